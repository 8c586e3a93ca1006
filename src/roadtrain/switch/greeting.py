"""The greeting that a fan-in participant sends to the fan-in end, and the checks that the fan-in
end makes on this greeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roadtrain.chunks import Chunk
from roadtrain.errors import ForeignError
from roadtrain.servers import frames as m
from roadtrain.servers import routes
from roadtrain.switch import switch_frames
from roadtrain.switch.options import FanIn, SwitchNode


@dataclass(frozen=True)
class Participant:
    """A worker, or the relay of a host, that takes part in a fan-in."""

    plan: FanIn
    rank: int  # rank of the worker; for a relay, number of the host
    count: int  # number of participants
    chunks: Sequence[Chunk]  # all chunks of the job, by number
    adds: bool = False  # whether its gradients are fp32 sums of several workers (for a relay)

    @property
    def switch(self) -> str:
        return self.plan.place_of(self.rank, self.count)[0].address


def hello_of(plan: FanIn, hello: m.Hello) -> bytes:
    """Encode a participant's greeting to a server."""
    switches = tuple((node.address, node.parent, node.workers) for node in plan.switches)
    rest = switch_frames.FanInHello(hello, switches, plan.wire, plan.window, plan.multicast)
    return routes.greeting_of("fan-in") + m.encode(rest)


def plan_of(hello: switch_frames.FanInHello) -> FanIn:
    """Build the FanIn that a participant's greeting describes. Raises ConfigError if it is
    invalid.
    """
    nodes = tuple(SwitchNode(*fields) for fields in hello.switches)
    plan = FanIn(nodes, hello.wire, hello.window, hello.multicast)  # type: ignore[arg-type]
    plan.check(hello.hello.workers)
    return plan


def check_same(first: switch_frames.FanInHello, hello: switch_frames.FanInHello) -> None:
    """Raise ForeignError if a greeting differs from the greeting of the first participant."""
    rank = hello.hello.rank
    for name in ("switches", "wire", "window", "multicast"):
        if getattr(hello, name) != getattr(first, name):
            raise ForeignError(
                f"worker {rank} has fan_in.{name} = {getattr(hello, name)}, but worker"
                f" {first.hello.rank} has {getattr(first, name)}",
                hint="give every worker the same fan_in",
            )
    if hello.hello.signature != first.hello.signature or hello.hello.server != first.hello.server:
        raise ForeignError(
            f"worker {rank} has another model, dtype, chunk size, optimizer or order of servers"
            f" than worker {first.hello.rank}",
            hint="every worker must run the same job",
        )
