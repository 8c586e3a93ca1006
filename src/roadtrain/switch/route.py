"""The route to the servers through switches, which sum gradients and copy parameters.
`Servers(fan_in=...)` selects this route for workers and for relays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import msgspec

from roadtrain.environment import WorkerIdentity
from roadtrain.errors import ConfigError
from roadtrain.options.check import check_options
from roadtrain.servers import frames as m
from roadtrain.servers import routes
from roadtrain.servers.routes import OpenRoute, Report, RouteEnds
from roadtrain.switch.end import FanInEnd
from roadtrain.switch.fan_in_link import FanInLink
from roadtrain.switch.fixed_point import BIAS, error_bound, load_kernels
from roadtrain.switch.greeting import Participant, hello_of
from roadtrain.switch.options import FanIn, SwitchNode, fan_in_of
from roadtrain.switch.packets import BLOCK
from roadtrain.transport.address import address_of
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.stream import FrameStream
from roadtrain.transport.tcp import TcpOptions

EXPONENT = BIAS  # exponent byte of a block whose largest magnitude is in [0.5, 1)


@dataclass(frozen=True)
class SwitchRoute:
    """The route to the servers through switches (a Route).

    Args:
        fan_in: A FanIn, or a FanIn as JSON, or a list of switches as in `Servers`, each HOST:PORT
            or a SwitchNode.
    """

    fan_in: FanIn | Sequence[str | SwitchNode]
    name, end = FanInEnd.name, FanInEnd

    def __post_init__(self) -> None:
        check_options(SwitchRoute, vars(self), "Servers")
        for switch in self.plan.switches:
            address_of(switch.address)

    @cached_property
    def plan(self) -> FanIn:
        return self.fan_in if isinstance(self.fan_in, FanIn) else fan_in_of(self.fan_in)

    def check_links(self, options: TcpOptions, replicas: int) -> None:
        if type(options) is not TcpOptions:
            raise ConfigError(
                "fan_in needs links over TCP, but the option `link` is"
                f" {type(options).__module__}.{type(options).__name__}",
                hint="remove fan_in, or use roadtrain.transport.tcp.TcpOptions",
            )
        if options.tls is not None:
            raise ConfigError(
                "fan_in and TLS exclude each other: packets are authenticated, not encrypted",
                hint="remove fan_in, or replace tls by a token",
            )

    def check_workers(self, group: WorkerIdentity, compressed: str) -> None:
        if compressed:
            raise ConfigError(
                f"fan_in does not work with {compressed}: switches add whole gradients",
                hint="remove one of the two options",
            )
        self.plan.check(group.workers)
        error_bound(EXPONENT, group.workers, self.plan.width)

    def lossy(self, group: WorkerIdentity) -> str:
        # Relative to the largest magnitude of a block, which is at least half of the power of two
        # above it: hence 2 *.
        off = 2 * error_bound(EXPONENT, group.workers, self.plan.width)
        return (
            f"gradients are summed in the network as {self.plan.wire}, by {len(self.plan.switches)}"
            f" switch(es): an element of the sum of {group.workers} is off by at most {off:.1e} of"
            f" the greatest magnitude among the {BLOCK} elements that share its scale"
        )

    def open(self, ends: RouteEnds) -> OpenRoute:
        return OpenSwitchRoute(ends, self.plan)

    def to_json(self) -> str:
        return msgspec.json.encode(asdict(self.plan)).decode()

    @staticmethod
    def from_json(text: str) -> SwitchRoute:
        return SwitchRoute(msgspec.json.decode(text, type=FanIn))


class OpenSwitchRoute:
    """The open route of a participant in one session: a FanInLink to each server (an OpenRoute).
    Raises ConfigError if no switch lists the participant.
    """

    def __init__(self, ends: RouteEnds, plan: FanIn) -> None:
        group = ends.group
        self._ends = ends
        self._participant = Participant(
            plan, group.rank, group.workers, ends.meta.table.chunks, ends.adds
        )
        self.via = f" by switch {self._participant.switch}"

    def connect(
        self, number: int, receiver: Receiver, options: TcpOptions, hello: m.Hello, report: Report
    ) -> Link:
        plan, where = self._participant.plan, self._ends.addresses[number]
        load_kernels(plan.width)
        link = FanInLink(receiver, self._participant, options.token)
        made = routes.dial(where, link, options, hello_of(plan, hello), number, report)
        assert isinstance(made, FrameStream)
        link.begin(made)
        return link

    def close(self) -> None: ...
    def abort(self) -> None: ...
