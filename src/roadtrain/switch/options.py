"""FanIn: that a job's gradients are summed inside the network, and how. A value that checks itself.

    workers --> switch of the rack --> root switch --> optimizer node        (sums go up)
    workers <-- switch of the rack <-- root switch <-- optimizer node        (parameters go down)

Sun et al. (LuWu), sections 3.2 and appendix A. Gradients travel as integers (`wire`), so a sum is
the same in whatever order packets come. Bulk bytes travel as datagrams, all else over TCP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from roadtrain.errors import ConfigError
from roadtrain.options.check import check_options

Wire = Literal["int32", "int16", "int8"]
WIDTH: Mapping[str, int] = {"int32": 4, "int16": 2, "int8": 1}  # bytes of an element on the wire
MOST_CHILDREN = 64  # of one switch: who has come to a slot is one 64-bit word
MOST_JOBS = 64  # of one switch, and its ports for datagrams: those above its own
WINDOWS = range(8, 65537)  # numbers under way; a power of two
WINDOW = 2048


@dataclass(frozen=True)
class SwitchNode:
    """One switch of the tree."""

    address: str  # HOST:PORT of its `roadtrain serve --switch`
    parent: str = ""  # the address of the switch above it; empty: the root, below the server
    # Ranks of those that send to it: workers, or where relays communicate for them, hosts. Empty at
    # the only switch of a tree: all of them.
    workers: Annotated[tuple[int, ...], Field(strict=False)] = ()  # or a list

    def __post_init__(self) -> None:
        check_options(SwitchNode, vars(self))
        object.__setattr__(self, "workers", tuple(self.workers))


@dataclass(frozen=True)
class FanIn:
    """Raises ConfigError for what is no tree, with the switch at fault."""

    switches: Annotated[tuple[SwitchNode, ...], Field(strict=False)]  # or a list
    wire: Wire = "int32"  # what an element of a gradient travels as
    window: int = WINDOW  # packets under way of a stream, and slots of a switch's table
    # "auto": the network copies parameters to all workers where a trial reaches them all, else the
    # switches do; "off": the switches
    multicast: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        check_options(FanIn, vars(self))
        object.__setattr__(self, "switches", tuple(self.switches))
        if self.window not in WINDOWS or self.window & (self.window - 1):
            raise ConfigError(
                f"fan_in: a window of {self.window} packets",
                hint=f"a power of two from {WINDOWS[0]} to {WINDOWS[-1]}",
            )
        self._check_tree()

    def _check_tree(self) -> None:
        if not self.switches:
            raise ConfigError("fan_in without a switch", hint="switches = [{address = ...}]")
        names = [one.address for one in self.switches]
        if not all(names):
            raise ConfigError("fan_in: a switch without an address", hint="its HOST:PORT")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"fan_in: switch {sorted(twice)[0]} stands there twice")
        for one in self.switches:
            if one.parent and one.parent not in names:
                raise ConfigError(
                    f"fan_in: switch {one.address} is below {one.parent}, which is not there",
                    hint=f"switches are {', '.join(names)}",
                )
        roots = [one.address for one in self.switches if not one.parent]
        if len(roots) != 1:
            raise ConfigError(
                f"fan_in: {len(roots)} switches are below no other ({', '.join(roots) or 'none'})",
                hint="exactly one is the root, all others name their parent",
            )
        if circle := set(names) - {one.address for one in self.from_root}:
            raise ConfigError(
                f"fan_in: {', '.join(sorted(circle))} are below each other in a circle"
            )

    @cached_property
    def root(self) -> SwitchNode:
        return next(one for one in self.switches if not one.parent)

    @cached_property
    def from_root(self) -> tuple[SwitchNode, ...]:
        """Those that the root leads to, each after its parent."""
        found = [self.root]
        for above in found:  # grows meanwhile
            found += [one for one in self.switches if one.parent == above.address]
        return tuple(found)

    @property
    def width(self) -> int:
        """Bytes of an element on the wire."""
        return WIDTH[self.wire]

    def below(self, switch: SwitchNode) -> tuple[SwitchNode, ...]:
        """The switches right below one, in the order of their child numbers (from 0)."""
        return tuple(one for one in self.switches if one.parent == switch.address)

    def workers_of(self, switch: SwitchNode, workers: int) -> tuple[int, ...]:
        """Ranks right below it, in the order of their child numbers, which follow the switches'."""
        if len(self.switches) == 1 and not switch.workers:
            return tuple(range(workers))
        return switch.workers

    def children(self, switch: SwitchNode, workers: int) -> int:
        return len(self.below(switch)) + len(self.workers_of(switch, workers))

    def first_child(self, switch: SwitchNode, workers: int) -> int:
        """What its child 0 calls itself in packets. No other switch has a child of that name, so
        nobody can make one take what was sent to another."""
        before = self.from_root[: self.from_root.index(switch)]
        return sum(self.children(one, workers) for one in before)

    def place_of(self, rank: int, workers: int) -> tuple[SwitchNode, int]:
        """The switch that worker `rank` sends to, and its child number there."""
        for switch in self.switches:
            ranks = self.workers_of(switch, workers)
            if rank in ranks:
                return switch, len(self.below(switch)) + ranks.index(rank)
        raise ConfigError(f"fan_in: worker {rank} is below no switch")

    def check(self, workers: int) -> None:
        """That `workers` of them fit this tree, each once. Raises ConfigError."""
        said = [rank for switch in self.switches for rank in self.workers_of(switch, workers)]
        if sorted(said) != list(range(workers)):
            raise ConfigError(
                f"fan_in: workers {sorted(said)} are below switches, the job has workers 0 to"
                f" {workers - 1}",
                hint="each worker stands below exactly one switch",
            )
        for switch in self.switches:
            if not 1 <= (count := self.children(switch, workers)) <= MOST_CHILDREN:
                raise ConfigError(
                    f"fan_in: {count} children of switch {switch.address}, 1 to {MOST_CHILDREN} are"
                    " possible",
                    hint="a level of switches more",
                )


def fan_in_of(switches: Sequence[str | SwitchNode], **options: object) -> FanIn:
    """Addresses alone stand for one switch with all workers."""
    nodes = [one if isinstance(one, SwitchNode) else SwitchNode(one) for one in switches]
    return FanIn(tuple(nodes), **options)  # type: ignore[arg-type]
