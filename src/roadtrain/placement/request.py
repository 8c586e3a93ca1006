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

Report = Callable[[str], None]


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
        if self.servers and (words := self.servers.route.lossy(self.group)):
            self.report(f"lossy: {words}")


def check(asked: Request) -> None:
    """Raises ConfigError for values that are each good and do not go together."""
    _check_error_feedback(asked)
    servers = asked.servers
    if servers:
        servers.route.check_workers(asked.group, str(asked.top_k or ""))
    if asked.downcast and servers is None:
        raise ConfigError(
            f"Downcast({asked.downcast!r}) without servers: no gradient travels",
            hint="leave it out, or store=Servers([...])",
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
