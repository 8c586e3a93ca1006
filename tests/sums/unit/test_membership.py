"""Spare hosts that join and leave: at every moment all workers agree on the site of every part of
every round."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.servers import frames as m
from roadtrain.sums import sum_frames
from roadtrain.sums.coordinator_link import CoordinatorLink
from roadtrain.sums.protocol.membership import (
    AskRounds,
    Change,
    MembershipStateMachine,
    Spares,
)
from roadtrain.sums.protocol.part_map import Map

KEYS, PARTS = (1, 2, 99), 23


class World:
    """`n` workers with their maps, rounds and messages in transit, which may arrive in any
    order."""

    def __init__(self, n: int, k: int, rng: random.Random) -> None:
        self.n, self.rng = n, rng
        spares = tuple((n + i, f"s{i}", 1.0) for i in range(k))
        self.coordinator = MembershipStateMachine(n, spares)
        self.maps = [Map([1.0] * n, spares) for _ in range(n)]
        self.rounds = [dict.fromkeys(KEYS, 0) for _ in range(n)]
        self.done = [dict.fromkeys(KEYS, True) for _ in range(n)]
        self.inbox: list[list[AskRounds | Change]] = [[] for _ in range(n)]
        self.states: list[tuple[int, int, dict[int, tuple[int, bool]]]] = []
        self.held = [False] * n
        # key, round, part -> worker -> site
        self.pushed: dict[tuple[int, int, int], dict[int, int]] = {}
        self.names = 0

    def say(self, messages: list[AskRounds | Change]) -> None:
        for message in messages:
            for box in self.inbox:
                box.append(message)
        self.coordinator.check()

    def begin(self, worker: int) -> None:
        key = self.rng.choice(KEYS)
        if self.held[worker] or not self.done[worker][key]:
            return
        self.rounds[worker][key] += 1
        self.done[worker][key] = False
        self.push(worker, key, self.rounds[worker][key])

    def push(self, worker: int, key: int, number: int) -> None:
        for part, site in enumerate(self.maps[worker].reducers(key, PARTS, number)):
            self.pushed.setdefault((key, number, part), {})[worker] = site

    def finish(self, worker: int) -> None:
        """Complete a worker's sums whose parts all workers have pushed to the same sites."""
        for key in KEYS:
            number = self.rounds[worker][key]
            places = [self.pushed.get((key, number, part), {}) for part in range(PARTS)]
            if number and all(len(of) == self.n and len({*of.values()}) == 1 for of in places):
                self.done[worker][key] = True

    def deliver(self, worker: int) -> None:
        if not self.inbox[worker]:
            return
        message = self.inbox[worker].pop(0)
        if isinstance(message, AskRounds):
            self.held[worker] = True
            both = {
                key: (number, self.done[worker][key])
                for key, number in self.rounds[worker].items()
                if number
            }
            self.states.append((worker, message.number, both))
            return
        before = {
            (key, number): self.maps[worker].reducers(key, PARTS, number)
            for key in KEYS
            for number in (self.rounds[worker][key] - 1, self.rounds[worker][key])
            if number > 0
        }
        self.maps[worker].change(message)
        for (key, number), old in before.items():
            new = self.maps[worker].reducers(key, PARTS, number)
            lacked = message.rounds.get(key, (0, 1))[1]
            if number >= lacked:  # earlier rounds are no longer needed
                assert all(a == b or a in message.removed for a, b in zip(old, new)), (
                    "a part of a remaining site moved"
                )
        for key, number in self.rounds[worker].items():
            assert self.maps[worker].removed.isdisjoint(
                self.maps[worker].reducers(key, PARTS, number + 1)
            )
        self.held[worker] = False
        for key in KEYS:  # push moved parts again: its own, or the sum for workers that lack it
            for number in range(message.rounds.get(key, (0, 1))[1], self.rounds[worker][key] + 1):
                self.push(worker, key, number)

    def answer(self) -> None:
        if self.states:
            worker, number, state = self.states.pop(self.rng.randrange(len(self.states)))
            refused = (
                [site for site, _, _ in self.coordinator.query.added if self.rng.random() < 0.2]
                if self.coordinator.query is not None
                else []
            )
            self.say(self.coordinator.state(worker, number, state, refused))

    def trouble(self) -> None:
        if self.rng.random() < 0.5 and self.coordinator.spares:
            self.say(self.coordinator.remove(self.rng.choice([*self.coordinator.spares])))
        else:
            self.names += 1
            self.say(self.coordinator.offered(f"new {self.names}", self.rng.choice((0.5, 1.0))))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.integers(0, 3), st.integers(0, 1 << 32))
@pytest.mark.slow
def test_all_agree_and_every_round_ends(n: int, k: int, seed: int) -> None:
    rng = random.Random(seed)
    world = World(n, k, rng)
    for _ in range(300):
        what = rng.random()
        worker = rng.randrange(n)
        if what < 0.04:
            world.trouble()
        elif what < 0.3:
            world.deliver(worker)
        elif what < 0.45:
            world.answer()
        elif what < 0.75:
            world.begin(worker)
        else:
            world.finish(worker)
    while any(world.inbox) or world.states:  # without further events all must come to rest
        for worker in range(n):
            world.deliver(worker)
        world.answer()
    assert not any(world.held) and world.coordinator.query is None
    for _ in range(4):  # all advance to the same round
        for key in KEYS:
            for worker in range(n):
                world.finish(worker)
                if world.done[worker][key] and world.rounds[worker][key] < max(
                    r[key] for r in world.rounds
                ):
                    world.rounds[worker][key] += 1
                    world.done[worker][key] = False
                    world.push(worker, key, world.rounds[worker][key])
    for worker in range(n):
        world.finish(worker)
    assert all(all(done.values()) for done in world.done), "a round is incomplete"
    there = {*range(n), *world.coordinator.spares}
    for key in KEYS:
        of = [
            each.reducers(key, PARTS, max(r[key] for r in world.rounds) + 1) for each in world.maps
        ]
        assert all(sites == of[0] for sites in of) and set(of[0]) <= there


def test_a_spare_host_that_some_cannot_reach_is_not_used() -> None:
    coordinator = MembershipStateMachine(2, ())
    (ask,) = coordinator.offered("a:1", 1.0)
    assert ask == AskRounds(1, ((2, "a:1", 1.0),))
    assert coordinator.state(0, 1, {}, []) == [] and coordinator.offered("b:1", 1.0) == []
    change, again = coordinator.state(1, 1, {5: (3, False)}, [2])
    assert change == Change(1, (), (), {5: (3, 1)}) and again == AskRounds(2, ((3, "b:1", 1.0),))
    assert not coordinator.spares and coordinator.state(0, 1, {}, []) == [], (
        "an outdated answer is ignored"
    )
    coordinator.state(0, 2, {}, [])
    assert isinstance(coordinator.state(1, 2, {}, [])[0], Change) and coordinator.spares == {
        3: ("b:1", 1.0)
    }
    assert coordinator.offered("b:1", 1.0) == [] == coordinator.remove(7)
    (ask,) = coordinator.remove(3)
    assert ask == AskRounds(3, ())


def test_only_parts_of_a_reducer_that_was_removed_are_moved() -> None:
    spares = ((3, "a", 1.0), (4, "b", 1.0))
    there = Map([1.0] * 3, spares)
    begun, later = 5, 6
    before = there.reducers(1, PARTS, begun)
    assert {3, 4} < set(before) and not any(there.assigned(1, PARTS, begun)[1])
    there.change(Change(1, (3,), ((5, "c", 9.0),), {1: (begun, begun)}))
    assert there.assigned(1, PARTS, begun)[1] == [reducer == 3 for reducer in before]
    assert [a for a, b in zip(there.reducers(1, PARTS, begun), before) if b != 3] == [
        reducer for reducer in before if reducer != 3
    ]
    assert not any(there.assigned(1, PARTS, later)[1]) and 5 in there.reducers(1, PARTS, later)
    there.change(Change(2, (4, 5), (), {1: (later, begun)}))
    assert there.assigned(1, PARTS, begun)[1] == [reducer in (3, 4) for reducer in before]
    assert {*there.reducers(1, PARTS, begun), *there.reducers(1, PARTS, later)} <= {0, 1, 2}


def test_separate_workers_sum_only_without_spare_hosts() -> None:
    there = Map([1.0, 1.0], ((2, "a", 1.0), (3, "b", 3.0)), separate=True)
    assert there.shares == {0: 0.0, 1: 0.0, 2: 0.25, 3: 0.75}
    there.change(Change(1, (2, 3), (), {}))
    assert there.shares == {0: 0.5, 1: 0.5}


class RecordingLink:
    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []

    def send(self, kind: int, header: bytes, parts: Any = ()) -> None:
        self.frames.append((kind, header))


class Sums:
    def __init__(self) -> None:
        self.failed: list[BaseException] = []

    def dial(self, added: Spares) -> list[int]:
        return []

    def hold(self) -> dict[int, tuple[int, bool]]:
        return {}

    def change(self, change: Change) -> None: ...

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)


def test_messages_before_the_coordinator_is_known_are_sent_later() -> None:
    delegate, link, sums = CoordinatorLink(), RecordingLink(), Sums()
    delegate.sums = sums
    delegate.reducer_lost(3, "s3 died")
    # as soon as the link exists, before we learn of it
    delegate.arrived(sum_frames.ASK, m.encode((1, [])), memoryview(b""))
    delegate.linked(link)  # type: ignore[arg-type]
    delegate.reducer_lost(4, "s4 died")
    assert link.frames == [
        (sum_frames.REDUCER_LOST, m.encode((3, "s3 died"))),
        (sum_frames.STATE, m.encode((1, []))),
        (sum_frames.REDUCER_LOST, m.encode((4, "s4 died"))),
    ]
    assert not sums.failed
