"""How a participant of a fan-in greets the end in front of its server, and what the end checks.

Participant --> hello_of --> (the TCP link) --> plan_of, check_same
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
    """Who takes part in what."""

    plan: FanIn
    rank: int  # of a worker, or of a host whose relay communicates for it
    count: int  # of participants
    chunks: Sequence[Chunk]  # of the job, by number
    adds: bool = False  # its gradients are fp32 sums of several workers, whatever the chunk's dtype

    @property
    def switch(self) -> str:
        return self.plan.place_of(self.rank, self.count)[0].address


def hello_of(plan: FanIn, hello: m.Hello) -> bytes:
    """A participant's greeting to a server."""
    switches = tuple((one.address, one.parent, one.workers) for one in plan.switches)
    rest = switch_frames.FanInHello(hello, switches, plan.wire, plan.window, plan.multicast)
    return routes.greeting_of("fan-in") + m.encode(rest)


def plan_of(said: switch_frames.FanInHello) -> FanIn:
    """What a participant's greeting describes. Raises ConfigError."""
    nodes = tuple(SwitchNode(*one) for one in said.switches)
    plan = FanIn(nodes, said.wire, said.window, said.multicast)  # type: ignore[arg-type]
    plan.check(said.hello.workers)
    return plan


def check_same(ours: switch_frames.FanInHello, said: switch_frames.FanInHello) -> None:
    """`ours`: the greeting of the participant that came first. Raises ForeignError."""
    rank = said.hello.rank
    for name in ("switches", "wire", "window", "multicast"):
        if getattr(said, name) != getattr(ours, name):
            raise ForeignError(
                f"worker {rank} has fan_in.{name} = {getattr(said, name)}, worker"
                f" {ours.hello.rank} has {getattr(ours, name)}",
                hint="every worker has the same fan_in",
            )
    if said.hello.signature != ours.hello.signature or said.hello.server != ours.hello.server:
        raise ForeignError(
            f"worker {rank} has another model, dtype, chunk size, optimizer or order of servers"
            f" than worker {ours.hello.rank}",
            hint="every worker runs the same job",
        )
