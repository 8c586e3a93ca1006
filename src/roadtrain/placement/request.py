"""Request: what place() was asked for. Its values have checked themselves; which of
them do not go together stands here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from roadtrain.environment import WorkerGroup
from roadtrain.errors import ConfigError
from roadtrain.options.lossy import Delay, Downcast, TopK
from roadtrain.placement.stores import Files, Memory, Servers, Store
from roadtrain.switch.fixed_point import BIAS, error_bound
from roadtrain.switch.options import FanIn
from roadtrain.switch.packets import BLOCK

Report = Callable[[str], None]
ONE = BIAS  # the exponent byte of a block whose greatest magnitude is from 0.5 to below 1


@dataclass(frozen=True)
class Request:
    """Raises ConfigError where two values contradict each other."""

    store: Store
    compress: TopK | Downcast | None
    delay: Delay | None
    host_budget: str | int | None
    device_budget: str | int | None
    backwards_per_step: int | None  # None: updates wait for step()
    chunk_elements: int
    deadline_s: float
    group: WorkerGroup  # this worker among those that share the servers
    report: Report

    def __post_init__(self) -> None:
        check(self)

    @property
    def top_k(self) -> TopK | None:
        return self.compress if isinstance(self.compress, TopK) else None

    @property
    def error_feedback(self) -> bool:
        return self.top_k is not None and self.top_k.error_feedback

    @property
    def downcast(self) -> str:
        """What whole fp32 gradients travel as; "": as they are."""
        return self.compress.dtype if isinstance(self.compress, Downcast) else ""

    @property
    def staleness(self) -> int:
        """How many updates the parameters of a step may lack."""
        return self.delay.staleness if self.delay else 0

    @property
    def servers(self) -> Servers | None:
        return self.store if isinstance(self.store, Servers) else None

    @property
    def fan_in(self) -> FanIn | None:
        """How gradients are summed in the network, if they are."""
        return self.servers.plan if self.servers else None

    @property
    def participants(self) -> int:
        """Who sends to switches: workers, or relays that communicate for those of a host."""
        relayed = self.servers is not None and self.servers.relay is not None
        return self.group.workers // self.group.local if relayed else self.group.workers

    @property
    def buffering(self) -> str:
        return self.servers.buffering if self.servers else "auto"

    @property
    def waits_for_step(self) -> bool:
        """Whether the gradients of all blocks pile up until step()."""
        return self.backwards_per_step is None

    @property
    def in_memory(self) -> bool:
        return isinstance(self.store, Memory)

    @property
    def held(self) -> set[object]:
        """Directories, and places at servers, that only one session of a process can have."""
        servers = self.servers
        files = servers.residual_files if servers else self.store
        paths = (*files.paths, *files.left) if isinstance(files, Files) else ()
        links = [(address, self.group.rank) for address in servers.resolved] if servers else []
        return {*map(os.path.realpath, paths), *links}

    def say_lossy(self) -> None:
        """Rule 2: what is lossy or late is printed at the start."""
        if self.compress is not None:
            self.report(f"lossy: {self.compress}")
        if self.delay is not None:
            self.report(f"late: {self.delay}")
        if self.fan_in is not None:
            self.report(f"lossy: {described(self.fan_in, self.participants)}")


def described(plan: FanIn, participants: int) -> str:
    """For people: the choice of integers and what it costs (Rule 2)."""
    # of the greatest magnitude of a block, which is at least half of the power of two above it
    off = 2 * error_bound(ONE, participants, plan.width)
    return (
        f"gradients are summed in the network as {plan.wire}, by {len(plan.switches)} switch(es):"
        f" an element of the sum of {participants} is off by at most {off:.1e} of the greatest"
        f" magnitude among the {BLOCK} elements that share its scale"
    )


def _check_fan_in(asked: Request, plan: FanIn) -> None:
    if asked.top_k:
        raise ConfigError(
            f"{asked.top_k}, and fan_in: switches add whole gradients", hint="leave one of them out"
        )
    plan.check(asked.participants)
    error_bound(ONE, asked.participants, plan.width)


def check(asked: Request) -> None:
    """Raises ConfigError for values that are each good and do not go together."""
    _check_error_feedback(asked)
    if asked.fan_in is not None:
        _check_fan_in(asked, asked.fan_in)
    servers = asked.servers
    if asked.downcast and servers is None:
        raise ConfigError(
            f"Downcast({asked.downcast!r}) without servers: no gradient travels",
            hint="leave it out, or store=Servers([...])",
        )
    if servers and servers.relay is not None and asked.top_k and asked.group.local > 1:
        raise ConfigError(
            f"a relay adds up whole gradients of its {asked.group.local} workers, not top-k ones",
            hint="leave relay out, or TopK",
        )
    if asked.staleness > 1 and asked.buffering == "none":
        raise ConfigError(
            f"a delay of {asked.staleness} updates and buffering 'none': parameters change at any"
            " time, backward needs those that forward had",
            hint="leave buffering out",
        )


def _check_error_feedback(asked: Request) -> None:
    residuals = asked.servers and asked.servers.residual_files
    if asked.servers and bool(residuals) != asked.error_feedback:
        raise ConfigError(
            f"{len(asked.servers.addresses)} server(s), {int(bool(residuals))} directories for"
            f" residuals, error feedback {asked.error_feedback}",
            hint=(
                "with servers and error feedback, what was not sent rests in one directory of this"
                " host: Servers(..., residuals=DIRECTORY)"
            ),
        )
    if asked.error_feedback and (asked.backwards_per_step or 1) > 1:
        raise ConfigError(
            f"error feedback keeps one residual a step, backwards_per_step is"
            f" {asked.backwards_per_step}",
            hint="backwards_per_step must be 1",
        )
    if asked.error_feedback and asked.delay:
        raise ConfigError(
            f"error feedback needs the last update, and a delay of {asked.staleness} is allowed",
            hint="leave out delay, or error_feedback",
        )
