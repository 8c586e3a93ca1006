"""The tree of switches that sums a job's gradients inside the network (Sun et al., LuWu, section
3.2 and appendix A).

    workers --> switch of the rack --> root switch --> server        (sums go up)
    workers <-- switch of the rack <-- root switch <-- server        (parameters go down)

Gradients are sent as integers, so a sum does not depend on the order of packets. Gradients and
parameters are sent as UDP datagrams, and all other data over TCP.
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
MOST_CHILDREN = 64  # of a switch, because each slot has a 64-bit bitmap of children
MOST_JOBS = 64  # of a switch; the UDP ports of the jobs follow the switch's TCP port
WINDOWS = range(8, 65537)  # possible numbers of packets in flight, if they are powers of two
WINDOW = 2048


@dataclass(frozen=True)
class SwitchNode:
    """A switch in the tree that a `FanIn` describes.

    Args:
        address: HOST:PORT of the switch's `roadtrain serve --switch`.
        parent: Address of the switch above this switch. If empty, this switch is the root of the
            tree and sends to the server.
        workers: Ranks of the workers that send to this switch. If the workers of a host share a
            relay, the numbers of the hosts are listed instead. If the tree has only one switch, an
            empty tuple stands for all workers.

    Raises:
        ConfigError: A value has the wrong type.
    """

    address: str
    parent: str = ""
    workers: Annotated[tuple[int, ...], Field(strict=False)] = ()  # or a list

    def __post_init__(self) -> None:
        check_options(SwitchNode, vars(self))
        object.__setattr__(self, "workers", tuple(self.workers))


@dataclass(frozen=True)
class FanIn:
    """The tree of switches that sums a job's gradients and copies the job's parameters.

    Args:
        switches: The switches of the tree, in any order.
        wire: Integer type in which the elements of gradients are sent: "int32", "int16" or "int8".
        window: Maximum number of packets in flight per stream, which is also the number of slots in
            the table of each switch. Must be a power of two.
        multicast: If "off", the switches copy the parameters. If "auto", a trial is made. If IP
            multicast reaches all workers in the trial, parameters are copied by IP multicast, and
            otherwise by the switches.

    Raises:
        ConfigError: The switches do not form a tree, or an option has a wrong value.
    """

    switches: Annotated[tuple[SwitchNode, ...], Field(strict=False)]  # or a list
    wire: Wire = "int32"
    window: int = WINDOW
    multicast: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        check_options(FanIn, vars(self))
        object.__setattr__(self, "switches", tuple(self.switches))
        if self.window not in WINDOWS or self.window & (self.window - 1):
            raise ConfigError(
                f"fan_in: a window of {self.window} packets is not possible",
                hint=f"use a power of two from {WINDOWS[0]} to {WINDOWS[-1]}",
            )
        self._check_tree()

    def _check_tree(self) -> None:
        if not self.switches:
            raise ConfigError("fan_in has no switch", hint="add switches = [{address = ...}]")
        names = [node.address for node in self.switches]
        if not all(names):
            raise ConfigError("fan_in: a switch has no address", hint="give its HOST:PORT")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"fan_in: switch {sorted(twice)[0]} is listed twice")
        for node in self.switches:
            if node.parent and node.parent not in names:
                raise ConfigError(
                    f"fan_in: the parent {node.parent} of switch {node.address} is not listed",
                    hint=f"the listed switches are {', '.join(names)}",
                )
        roots = [node.address for node in self.switches if not node.parent]
        if len(roots) != 1:
            raise ConfigError(
                f"fan_in: {len(roots)} switches have no parent ({', '.join(roots) or 'none'})",
                hint="exactly one switch is the root; every other switch needs a parent",
            )
        if cycle := set(names) - {node.address for node in self.from_root}:
            raise ConfigError(f"fan_in: the parents of {', '.join(sorted(cycle))} form a cycle")

    @cached_property
    def root(self) -> SwitchNode:
        return next(node for node in self.switches if not node.parent)

    @cached_property
    def from_root(self) -> tuple[SwitchNode, ...]:
        """The switches that are reachable from the root, each after its parent."""
        found = [self.root]
        for above in found:  # `found` grows during this loop
            found += [node for node in self.switches if node.parent == above.address]
        return tuple(found)

    @property
    def width(self) -> int:
        """Number of bytes of an element on the wire."""
        return WIDTH[self.wire]

    def below(self, switch: SwitchNode) -> tuple[SwitchNode, ...]:
        """Return the switches directly below `switch`, which are its children 0, 1, ..."""
        return tuple(node for node in self.switches if node.parent == switch.address)

    def workers_of(self, switch: SwitchNode, workers: int) -> tuple[int, ...]:
        """Return the ranks of the workers directly below `switch`. They are its children after the
        switches.
        """
        if len(self.switches) == 1 and not switch.workers:
            return tuple(range(workers))
        return switch.workers

    def children(self, switch: SwitchNode, workers: int) -> int:
        return len(self.below(switch)) + len(self.workers_of(switch, workers))

    def first_child(self, switch: SwitchNode, workers: int) -> int:
        """Return the sender number of child 0 of `switch`; the other children have the following
        numbers.

        Sender numbers are unique in the tree, so a packet replayed to another switch is not
        accepted.
        """
        before = self.from_root[: self.from_root.index(switch)]
        return sum(self.children(node, workers) for node in before)

    def place_of(self, rank: int, workers: int) -> tuple[SwitchNode, int]:
        """Return the switch to which worker `rank` sends, and the worker's number among its
        children.
        """
        for switch in self.switches:
            ranks = self.workers_of(switch, workers)
            if rank in ranks:
                return switch, len(self.below(switch)) + ranks.index(rank)
        raise ConfigError(f"fan_in: no switch lists worker {rank}")

    def check(self, workers: int) -> None:
        """Check that each of the ranks 0 to `workers` - 1 is in the tree once.

        Raises:
            ConfigError: A rank is missing, listed twice or too large; or a switch has no children
                or too many.
        """
        ranks = [rank for switch in self.switches for rank in self.workers_of(switch, workers)]
        if sorted(ranks) != list(range(workers)):
            raise ConfigError(
                f"fan_in: the switches list workers {sorted(ranks)}, but the job has workers 0 to"
                f" {workers - 1}",
                hint="list each worker at exactly one switch",
            )
        for switch in self.switches:
            if not 1 <= (count := self.children(switch, workers)) <= MOST_CHILDREN:
                raise ConfigError(
                    f"fan_in: {switch.address} has {count} children, not 1 to {MOST_CHILDREN}",
                    hint="add a level of switches if there are too many",
                )


def fan_in_of(switches: Sequence[str | SwitchNode], **options: object) -> FanIn:
    """Build a FanIn of `switches`; a string is the address of a switch without a parent.

    `options` are the other arguments of FanIn.
    """
    nodes = [node if isinstance(node, SwitchNode) else SwitchNode(node) for node in switches]
    return FanIn(tuple(nodes), **options)  # type: ignore[arg-type]
