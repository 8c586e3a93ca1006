"""Model of gradients on their way from the workers through switches to the server, for the
exploration (explore.py). `end` means the server's receiver.

benchmarks/fanin/model.py states the assumptions about network, restarts and termination.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cache

from benchmarks.fanin.explore import Action, Parts, State, Step
from benchmarks.fanin.machines import (
    RESTART,
    SEND,
    SILENT,
    Data,
    LiteralSwitch,
    ReceiverStep,
    SwitchStep,
    beat_of,
    collected,
    eager_step,
    earlier_beats,
    sender_state,
    sender_step,
)
from roadtrain.switch.protocol.numbered import Heartbeat, NumberedSender
from roadtrain.switch.protocol.switch import Packet, SwitchStateMachine

Tree = tuple["int | Tree", ...]  # a switch: its children; an int is a worker


class Variant(Enum):
    """Variants of the protocol. The exploration finds an error in every variant except OURS."""

    OURS = "the machines that run"
    LITERAL = "the paper's switch, taken literally (L10)"
    ANY_JOB = "packets of an older job are not refused"
    FEW_SLOTS = "a table with one slot less than the window"
    HASTY = "heartbeats are merged before all children have spoken"


OLD = 100  # added to a worker's index in data of an older job


class Upwards:
    """The model of gradients from the workers through switches to the server. A state of the model
    is a tuple: the server's receiver, each worker, and for each switch its state and all sums that
    it ever sent.
    """

    def __init__(
        self,
        tree: Tree,
        window: int,
        numbers: int,
        variant: Variant,
        timeouts: bool = False,
        eager: bool = False,
    ) -> None:
        self.window, self.numbers, self.variant = window, numbers, variant
        self.timeouts = timeouts
        self.nodes = list[Tree]()  # switches, children before parents: the last is the root
        # child -> (its parent's index, its index among the parent's children)
        self.above = dict[Tree, tuple[int, int]]()
        self._place(tree)
        self.workers = sorted(c for node in self.nodes for c in node if isinstance(c, int))
        machine = LiteralSwitch if variant is Variant.LITERAL else SwitchStateMachine
        slots = window - (variant is Variant.FEW_SLOTS)
        self.end = Parts((0, 0), ReceiverStep(window))
        sender = NumberedSender()
        sender.may_send(numbers)
        step = eager_step if eager else sender_step
        begun, _ = step(sender_state(sender), Heartbeat(0, window - 1))
        self.senders = Parts(begun, step)
        kinds = [SwitchStep(machine, slots, len(node)) for node in self.nodes]
        self.switches = [Parts(kind.first, kind) for kind in kinds]
        self.sums = Parts(frozenset[tuple[int, Data]](), lambda s, e: (s | {e}, None))
        self.arrivals = cache(self._arrivals)
        self.beats = cache(lambda end: self._earlier(end))

    def _place(self, tree: Tree) -> None:
        for child in tree:
            if not isinstance(child, int):
                self._place(child)
        self.nodes.append(tree)
        for i, child in enumerate(tree):
            if not isinstance(child, int):
                self.above[child] = len(self.nodes) - 1, i

    def first(self) -> State:
        below = [part for switch in self.switches for part in (switch.first, self.sums.first)]
        return (self.end.first, *(self.senders.first for _ in self.workers), *below)

    def at(self, switch: int) -> int:
        """Return the index of a switch's state in a state of the model."""
        return 1 + len(self.workers) + 2 * switch

    def done(self, state: State) -> bool:
        ends = self.end.states[state[0]][0]
        acks = [self.senders.states[state[1 + w]][0] for w in range(len(self.workers))]
        return min(ends, *acks) == self.numbers

    def right(self, number: int) -> Data:
        return tuple((worker, number) for worker in self.workers)

    # --- steps -----------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        for worker in range(len(self.workers)):
            yield from self._worker(state, worker)
        for switch in range(len(self.nodes)):
            yield from self._switch(state, switch)
        for number, data in self.sums.states[state[-1]]:
            yield from self._sum(state, number, data)
        if self.variant is Variant.ANY_JOB:
            for number in range(self.numbers):
                data = tuple((OLD + worker, number) for worker in self.workers)
                yield from self._sum(state, number, data)

    def _worker(self, state: State, worker: int) -> Iterator[Step]:
        """Yield every step of a worker: it sends a packet, times out, or receives a heartbeat."""
        part = state[1 + worker]
        to, number = self.senders.step(part, self.senders.event(SEND))
        if to != part:
            credit = self.end.states[state[0]][0] + self.window - 1
            wrong = f"{number} is beyond the credit of {credit}" if number > credit else ""
            yield ("sends", worker, number), with_part(state, 1 + worker, to), wrong
        if self.timeouts:
            to, _ = self.senders.step(part, self.senders.event(SILENT))
            if to != part:
                yield ("silent", worker), with_part(state, 1 + worker, to), ""
        for beat in self.beats(state[0]):
            to, _ = self.senders.step(part, self.senders.event(beat))
            if to != part:
                yield ("beat", worker, beat), with_part(state, 1 + worker, to), ""

    def _switch(self, state: State, switch: int) -> Iterator[Step]:
        """Yield every step of a switch: it receives a packet or a heartbeat, or restarts."""
        at, parts = self.at(switch), self.switches[switch]
        for child, source in enumerate(self.nodes[switch]):
            below = state[1 + source] if isinstance(source, int) else state[self._sums_of(source)]
            for number, data in self.arrivals(source, below):
                yield from self._packet(state, switch, child, number, data)
        for ack in range(1, self.end.states[state[0]][0] + 1):
            event = parts.event(Heartbeat(ack, ack + self.window - 1))
            to, _ = parts.step(state[at], event)
            if to != state[at]:
                yield ("ack", switch, ack), with_part(state, at, to), ""
        to, _ = parts.step(state[at], parts.event(RESTART))
        if to != state[at]:
            yield ("restarts", switch), with_part(state, at, to), ""

    def _packet(
        self, state: State, switch: int, child: int, number: int, data: Data
    ) -> Iterator[Step]:
        at, parts = self.at(switch), self.switches[switch]
        packet = Packet(number, data, collected, child)
        to, (out, lost) = parts.step(state[at], parts.event(packet))
        after = with_part(state, at, to)
        if isinstance(out, Packet):
            sums, _ = self.sums.step(state[at + 1], self.sums.event((out.number, out.data)))
            after = with_part(after, at + 1, sums)
        if after != state:
            wrong = ""
            if lost >= self.end.states[state[0]][0]:
                wrong = f"the slot of {lost} is reused before {lost} has reached the end"
            yield ("packet", switch, number, data, out), after, wrong

    def _sum(self, state: State, number: int, data: Data) -> Iterator[Step]:
        """Yield the step in which a sum first arrives at the server."""
        to, new = self.end.step(state[0], self.end.event(number))
        if new:
            wrong = "" if data == self.right(number) else f"the sum of {number} is wrong"
            yield ("ends", number, data), with_part(state, 0, to), wrong

    def _arrivals(self, source: int | Tree, part: int) -> list[tuple[int, Data]]:
        """List (packet number, data) of all packets that a child of a switch may have sent.
        `source`: the child, a worker or the tree below a switch. `part`: number of the child's
        state.
        """
        if not isinstance(source, int):
            return sorted(self.sums.states[part])
        found: list[tuple[int, Data]] = [
            (n, ((source, n),)) for n in range(self.senders.states[part][4])
        ]
        if self.variant is Variant.ANY_JOB:
            found += [(n, ((OLD + source, n),)) for n in range(self.numbers)]
        return found

    def _earlier(self, end: int) -> list[Heartbeat]:
        return earlier_beats(self.end.states[end], self.window)

    def _sums_of(self, tree: Tree) -> int:
        return self.at(self.nodes.index(tree)) + 1

    # --- a round without loss --------------------------------------------------------------------

    def round(self, state: State) -> State:
        now = list(self._beat(list(state)))
        for worker in range(len(self.workers)):
            now[1 + worker], _ = self.senders.step(now[1 + worker], self.senders.event(SILENT))
            number = 0
            while number >= 0:
                now[1 + worker], number = self.senders.step(
                    now[1 + worker], self.senders.event(SEND)
                )
                if number >= 0:
                    self._deliver(now, worker, number)
        return tuple(self._beat(now))

    def _beat(self, now: list[int]) -> list[int]:
        """Deliver the server's heartbeat to every switch and worker. Changes and returns the state
        `now`.
        """
        beat = beat_of(self.end.states[now[0]], self.window)
        for switch, parts in enumerate(self.switches):
            at = self.at(switch)
            now[at], _ = parts.step(now[at], parts.event(Heartbeat(beat.ack, beat.credit)))
        for worker in range(len(self.workers)):
            now[1 + worker], _ = self.senders.step(now[1 + worker], self.senders.event(beat))
        return now

    def _deliver(self, now: list[int], worker: int, number: int) -> None:
        """Deliver a worker's packet to its switch, and complete sums to the switches above and the
        server. Changes the state `now`.
        """
        node = next(node for node in self.nodes if worker in node)
        switch, child, data = self.nodes.index(node), node.index(worker), ((worker, number),)
        while True:
            at, parts = self.at(switch), self.switches[switch]
            event = parts.event(Packet(number, data, collected, child))
            now[at], (out, _) = parts.step(now[at], event)
            if not isinstance(out, Packet):
                return
            number, data = out.number, out.data
            now[at + 1], _ = self.sums.step(now[at + 1], self.sums.event((number, data)))
            if self.nodes[switch] not in self.above:
                break
            switch, child = self.above[self.nodes[switch]]
        now[0], _ = self.end.step(now[0], self.end.event(number))

    # --- words -----------------------------------------------------------------------------------

    def describe(self, action: Action) -> str:
        match action:
            case ("sends", worker, number):
                return f"worker {worker} sends {number}"
            case ("silent", worker):
                return f"worker {worker} times out and sends the missing numbers again"
            case ("beat", worker, beat):
                return f"worker {worker} receives an acknowledgement of all below {beat.ack}"
            case ("ack", switch, ack):
                return f"{self._name(switch)} snoops an acknowledgement of all below {ack}"
            case ("restarts", switch):
                return f"{self._name(switch)} restarts"
            case ("packet", switch, number, data, out):
                sent = "" if out is None else f" and sends {out.number}: {_sum(out.data)}"
                return f"{self._name(switch)} receives {_sum(data)}{sent}"
            case ("ends", number, data):
                return f"the end accepts {number}: {_sum(data)}"
        raise AssertionError(action)

    def _name(self, switch: int) -> str:
        return "the switch" if len(self.nodes) == 1 else f"switch {switch}"


def _sum(data: Data) -> str:
    return " + ".join(
        f"{number} of worker {worker % OLD}{' of an older job' if worker >= OLD else ''}"
        for worker, number in data
    )


def with_part(state: State, at: int, part: int) -> State:
    """Return a state of the model in which one machine has another state."""
    return (*state[:at], part, *state[at + 1 :])
