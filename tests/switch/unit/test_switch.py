"""switch/protocol/switch.py: sums and copies in the network, with loss, delay, repetition and restarts."""

from __future__ import annotations

import heapq
import operator
import random
from collections.abc import Callable
from functools import partial

import pytest

from roadtrain.switch.protocol.numbered import Heartbeat, NumberedReceiver, NumberedSender, merged
from roadtrain.switch.protocol.switch import Packet, SwitchStateMachine

WINDOW, COUNT = 8, 200


def gradient(number: int, data: int, child: int = 0) -> Packet:
    return Packet(number, data, operator.add, child)


class Tree:
    """Workers below leaf switches, below a root switch, below a server; links that lose and delay.

    Each value encodes its number and worker, so a wrong sum is detected."""

    def __init__(self, leaves: list[int], seed: int, lost: float) -> None:
        self.random, self.lost = random.Random(seed), lost
        self.leaves = leaves  # number of workers of each leaf
        self.senders = [NumberedSender() for _ in range(sum(leaves))]
        for sender in self.senders:
            sender.may_send(COUNT)
        self.server, self.got = NumberedReceiver(WINDOW), dict[int, int]()
        self.root = self.switch(len(leaves))
        self.below = [self.switch(workers, leaf) for leaf, workers in enumerate(leaves)]
        self.wire: list[tuple[float, int, Callable[[], None]]] = []
        self.now, self.order = 0.0, 0

    def switch(self, children: int, child: int = 0) -> SwitchStateMachine:
        return SwitchStateMachine(WINDOW, children, child)

    def send(self, arrive: Callable[[], None]) -> None:
        if self.random.random() >= self.lost:
            self.order += 1
            heapq.heappush(self.wire, (self.now + self.random.random(), self.order, arrive))

    def up(self, leaf: int, packet: Packet) -> None:
        if (sum_ := self.below[leaf].packet(packet)) is not None:
            assert sum_.child == leaf
            self.send(partial(self.up_root, sum_))
        self.below[leaf].check()

    def up_root(self, packet: Packet) -> None:
        if (sum_ := self.root.packet(packet)) is not None:
            self.send(partial(self.arrive, sum_))
        self.root.check()

    def arrive(self, sum_: Packet) -> None:
        if self.server.accept(sum_.number):
            self.got[sum_.number] = sum_.data

    def beat(self, beat: Heartbeat) -> None:
        for leaf, copy in self.root.parent_beat(beat).items():
            self.send(partial(self.beat_below, leaf, copy))

    def beat_below(self, leaf: int, beat: Heartbeat) -> None:
        first = sum(self.leaves[:leaf])
        for child, copy in self.below[leaf].parent_beat(beat).items():
            self.send(partial(self.senders[first + child].heartbeat, copy))

    def resend(self) -> None:
        """Resend packets of all workers that may send."""
        for leaf, workers in enumerate(self.leaves):
            for child in range(workers):
                worker = sum(self.leaves[:leaf]) + child
                sender = self.senders[worker]
                if self.random.random() < 0.05:
                    sender.silent()
                for number in sender.next_numbers(100):
                    packet = gradient(number, (number + 1) * 100**worker, child)
                    self.send(partial(self.up, leaf, packet))
                sender.check()

    def run(self, restarts: bool = False) -> None:
        while len(self.got) < COUNT:
            self.resend()
            self.send(partial(self.beat, self.server.heartbeat()))
            if restarts and self.random.random() < 0.1:
                leaf = self.random.randrange(len(self.leaves))
                self.below[leaf] = self.switch(self.leaves[leaf], leaf)
                self.root = self.switch(len(self.leaves))
            until = self.now + 0.5
            while self.wire and self.wire[0][0] <= until:
                self.now, _, arrive = heapq.heappop(self.wire)
                arrive()
            self.now = until
            assert self.now < 20_000, "no progress"
        ones = sum(100**worker for worker in range(len(self.senders)))
        assert self.got == {number: (number + 1) * ones for number in range(COUNT)}


@pytest.mark.parametrize("lost", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("leaves", [[1], [2], [2, 3]], ids=str)
@pytest.mark.slow
def test_sums_are_exact_despite_losses(leaves: list[int], lost: float) -> None:  # Rule 1
    for seed in range(4):
        Tree(leaves, seed, lost).run()


def test_switches_that_restart_lose_no_sum() -> None:
    for seed in range(4):
        Tree([2, 2], seed, 0.05).run(restarts=True)


def test_a_late_resend_does_not_poison_a_slot() -> None:
    """L10: in the published protocol an entry cleared on completion takes a resend for a new
    sum."""
    switch = SwitchStateMachine(slots=2, children=2)
    assert switch.packet(gradient(0, 1, 0)) is None
    assert switch.packet(gradient(0, 2, 1)) == gradient(0, 3)
    assert switch.packet(gradient(0, 1, 0)) == gradient(0, 3)  # a resend is answered
    switch.parent_beat(Heartbeat(1, 2))
    assert switch.packet(gradient(0, 1, 0)) is None  # acknowledged: dropped
    assert switch.packet(gradient(2, 5, 0)) is None and switch.packet(gradient(0, 1, 1)) is None
    assert switch.packet(gradient(2, 5, 0)) is None  # already in the sum
    assert switch.packet(gradient(2, 7, 1)) == gradient(2, 12)
    switch.check()


def test_a_late_packet_is_dropped_by_a_switch_without_the_acknowledgement() -> None:
    switch = SwitchStateMachine(slots=2, children=2)
    assert switch.packet(gradient(2, 5, 0)) is None
    assert switch.packet(gradient(0, 1, 1)) is None
    assert switch.packet(gradient(2, 7, 1)) == gradient(2, 12)


def test_a_packet_states_how_it_is_summed() -> None:
    switch = SwitchStateMachine(slots=2, children=2, child=5)
    switch.packet(Packet(0, 4, max, 0))
    switch.packet(Packet(1, 4, operator.add, 0))
    assert switch.packet(Packet(0, 3, operator.add, 1)) is None  # another kind is not added
    assert switch.packet(Packet(0, 3, max, 1)) == Packet(0, 4, max, 5)
    assert switch.packet(Packet(1, 3, operator.add, 1)) == Packet(1, 7, operator.add, 5)


def test_packets_from_above_are_copied_to_all_children() -> None:
    switch = SwitchStateMachine(slots=4, children=3)
    assert switch.down("parameters") == dict.fromkeys(range(3), "parameters")
    assert switch.parent_beat(Heartbeat(3, 6)) == dict.fromkeys(range(3), Heartbeat(3, 6))
    switch.parent_beat(Heartbeat(2, 5))
    assert switch.acked == 3  # a late acknowledgement changes nothing


def test_heartbeats_are_merged_once_all_children_have_sent_one() -> None:
    switch = SwitchStateMachine(slots=4, children=3)
    assert switch.child_beat(0, Heartbeat(5, 8)) is None
    assert switch.child_beat(0, Heartbeat(5, 8)) is None
    assert switch.child_beat(1, Heartbeat(4, 7, 0b110)) is None
    assert switch.child_beat(2, Heartbeat(6, 9)) == Heartbeat(4, 7)
    assert switch.child_beat(0, Heartbeat(6, 9)) == Heartbeat(4, 7, 0b10)
    # a late acknowledgement changes nothing
    assert switch.child_beat(0, Heartbeat(3, 6)) == Heartbeat(4, 7, 0b10)
    switch.check()


def test_merging_at_two_levels_equals_merging_at_one() -> None:
    """A child switch stands for all workers below it."""
    rng = random.Random(3)
    for _ in range(50):
        workers = [NumberedReceiver(8) for _ in range(4)]
        root, leaves = SwitchStateMachine(8, 2), [SwitchStateMachine(8, 2, i) for i in range(2)]
        latest = None
        for step in range(40):
            worker = workers[step % 4]
            worker.accept(rng.randrange(12))
            beat = leaves[step % 4 // 2].child_beat(step % 2, worker.heartbeat())
            if beat is not None:
                latest = root.child_beat(step % 4 // 2, beat)
        assert latest == merged([worker.heartbeat() for worker in workers])
