"""protocol/switch.py: sums and multicast in the network, with loss, delay and repetition."""

from __future__ import annotations

import heapq
import random

import pytest

from roadtrain.protocol.switch import (
    Packet,
    Sender,
    SwitchReceiver,
    SwitchStateMachine,
    WorkerHeartbeat,
)

WINDOW, COUNT = 8, 200


def gradients(workers: int, seed: int, lost: float) -> list[int]:
    """All gradients of COUNT numbers through a switch that loses packets: what the server gets."""
    rng = random.Random(seed)
    switch = SwitchStateMachine(workers, WINDOW, WINDOW, int.__add__)
    senders = [Sender(WINDOW) for _ in range(workers)]
    server, got = SwitchReceiver(WINDOW), list[int]()
    wire: list[tuple[float, int, str, object]] = []
    now, tick = 0.0, 0

    def send(what: str, item: object, keep: bool = False) -> None:
        nonlocal tick
        if keep or rng.random() >= lost:
            tick += 1
            heapq.heappush(wire, (now + rng.random(), tick, what, item))

    last = [0.0] * workers
    while len(got) < COUNT:
        for worker, sender in enumerate(senders):
            for number in sender.ready(COUNT):
                send("gradient", Packet(number, (number + 1) * 10**worker, worker))
        send("beat", server.heartbeat())
        until = now + 0.5
        while wire and wire[0][0] <= until:
            now, _, what, item = heapq.heappop(wire)
            if what == "gradient":
                assert isinstance(item, Packet)
                for packet in switch.gradient(item):
                    send("sum", packet)
            elif what == "sum":
                assert isinstance(item, Packet)
                if server.packet(item.number):
                    got.append(item.data)
                    server.freed(1)
            else:
                assert isinstance(item, WorkerHeartbeat)
                for worker, beat in switch.from_server(item):
                    if rng.random() >= lost:
                        before = senders[worker].ack
                        senders[worker].beat(beat)
                        if senders[worker].ack > before:
                            last[worker] = now
            switch.check()
        now = until
        for worker, sender in enumerate(senders):
            if now - last[worker] > 3 + worker and sender.ack < sender.next:
                sender.silent()
                last[worker] = now
        assert now < 100_000, "it stands still"
    return got


@pytest.mark.parametrize("lost", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_sums_are_exact_whatever_is_lost(workers: int, lost: float) -> None:  # Rule 1
    ones = sum(10**worker for worker in range(workers))
    for seed in range(5):
        assert gradients(workers, seed, lost) == [(number + 1) * ones for number in range(COUNT)]


def test_a_late_resend_does_not_poison_a_slot() -> None:
    """L10: as printed, an entry that is cleared when complete takes a resend for a new sum."""
    switch = SwitchStateMachine(2, 2, 2, int.__add__)
    assert switch.gradient(Packet(0, 1, 0)) == []
    assert switch.gradient(Packet(0, 2, 1)) == [Packet(0, 3)]
    assert switch.gradient(Packet(0, 1, 0)) == [Packet(0, 3)]  # a resend is answered
    switch.from_server(WorkerHeartbeat(1, 2))
    assert switch.gradient(Packet(0, 1, 0)) == []  # acknowledged: dropped
    assert switch.gradient(Packet(2, 5, 0)) == [] and switch.gradient(Packet(0, 1, 1)) == []
    assert switch.gradient(Packet(2, 7, 1)) == [Packet(2, 12)]


def test_parameters_go_to_all_and_heartbeats_are_merged() -> None:
    switch = SwitchStateMachine(3, 4, 4, int.__add__)
    assert [worker for worker, _ in switch.parameters(Packet(0, "p"))] == [0, 1, 2]
    assert switch.from_worker(WorkerHeartbeat(5, 8, 0)) == WorkerHeartbeat(0, 3)
    switch.from_worker(WorkerHeartbeat(4, 7, 1))
    assert switch.from_worker(WorkerHeartbeat(6, 9, 2)) == WorkerHeartbeat(4, 7)
    # a late one moves nothing back
    assert switch.from_worker(WorkerHeartbeat(3, 6, 1)) == WorkerHeartbeat(4, 7)


def test_credit_bounds_what_is_under_way() -> None:
    """A sender stops at its credit; a receiver that frees nothing gives no more."""
    sender, receiver = Sender(4), SwitchReceiver(4)
    assert sender.ready(100) == [0, 1, 2, 3] and sender.ready(100) == []
    assert all(receiver.packet(n) for n in range(4)) and not receiver.packet(4)
    sender.beat(receiver.heartbeat())
    assert sender.ready(100) == []
    receiver.freed(2)
    sender.beat(receiver.heartbeat())
    assert sender.ready(100) == [4, 5]
    sender.silent()
    assert sender.ready(100) == [4, 5]
