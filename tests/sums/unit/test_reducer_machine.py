"""The state machine of a reducer: the round of each part, and dropped rounds."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from roadtrain.errors import LoopError
from roadtrain.sums.protocol.reducer import Arrived, ReducerStateMachine

WORKERS = 3


def part(
    round: int, key: int = 7, elements: int = 8, format: str = "bf16", summed: int = 0
) -> Arrived:
    return Arrived(key, 0, round, elements, format, summed)


@pytest.mark.parametrize("seed", range(20))
def test_each_round_is_summed_once_when_all_parts_have_arrived(seed: int) -> None:
    pick, machine = random.Random(seed), ReducerStateMachine(WORKERS)
    round = dict.fromkeys(((worker, key) for worker in range(WORKERS) for key in (1, 2)), 1)
    waiting: dict[int, set[int]] = {1: set(), 2: set()}
    for _ in range(100):
        worker, key = pick.randrange(WORKERS), pick.choice((1, 2))
        if worker in waiting[key]:
            with pytest.raises(
                LoopError, match=f"round {round[worker, key]} of tensor {key} twice"
            ):
                machine.arrived(worker, part(round[worker, key], key))
            continue
        waiting[key].add(worker)
        done = machine.arrived(worker, part(round[worker, key], key, summed=worker))
        machine.check()
        missing = [w for w in range(WORKERS) if w not in waiting[key]]
        assert machine.missing().get((key, 0, round[worker, key]), []) == missing
        assert (done is not None) == (not missing)
        if done is not None:
            assert astuple(done) == (round[worker, key], 8, "bf16", {0, 1, 2}, {1: 1, 2: 2})
            round |= {(worker, key): round[worker, key] + 1 for worker in range(WORKERS)}
            waiting[key].clear()


def sum_round(machine: ReducerStateMachine, round: int) -> None:
    for worker in range(WORKERS):
        machine.arrived(worker, part(round))


def test_only_the_last_round_may_be_pushed_again() -> None:
    """A worker whose sum was lost with its reducer pushes the last round again."""
    machine = ReducerStateMachine(WORKERS)
    sum_round(machine, 4)
    assert machine.arrived(0, part(4)) is None
    machine.give_up(0)
    sum_round(machine, 5)
    with pytest.raises(LoopError, match=r"round 4.* in round 5"):
        machine.arrived(0, part(4))
    machine.arrived(1, part(6))
    for other in (5, 7):
        with pytest.raises(LoopError, match=rf"round {other}, but worker\(s\) \[1\]"):
            machine.arrived(0, part(other))


@pytest.mark.parametrize(
    "changed", [{"elements": 4}, {"elements": 16}, {"format": "fp16"}, {"format": "a"}]
)
def test_a_tensor_keeps_its_size_and_format(changed: dict) -> None:
    machine = ReducerStateMachine(WORKERS)
    sum_round(machine, 1)
    with pytest.raises(LoopError, match=r"tensor 7 has changed: .* but had 8 elements of bf16"):
        machine.arrived(0, part(2, **changed))
    machine.arrived(0, part(2))
    with pytest.raises(LoopError, match="same loop over the same model"):
        machine.arrived(1, part(2, **changed))


def test_a_worker_that_gives_up_drops_the_rounds_in_which_it_waits() -> None:
    machine = ReducerStateMachine(WORKERS)
    sum_round(machine, 1)  # no worker waits
    machine.arrived(1, part(1, key=8))
    machine.arrived(0, part(1, key=9))
    machine.arrived(2, part(1, key=9))
    machine.give_up(2)
    assert set(machine.rounds) == {(7, 0), (8, 0)}
    machine.give_up(0)
    assert set(machine.rounds) == {(8, 0)}, "worker 1 waits there"
    machine.give_up(1)
    assert not machine.rounds
    machine.arrived(0, part(1, elements=99))  # a new size is allowed after all have given up


def test_accumulated_parts_are_added_at_once() -> None:
    machine = ReducerStateMachine(WORKERS, "accumulate")
    for worker, round in ((0, 1), (0, 2), (1, 1)):
        current = machine.arrived(worker, part(round))
        assert current is not None and not current.here
    assert current.round == 2
