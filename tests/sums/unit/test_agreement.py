"""The coordinator of agreements finds exactly the workers that differ and those that wait for each
other (Rules 5 and 6)."""

from __future__ import annotations

import random

import pytest

from roadtrain.sums.protocol.agreement import (
    Agreed,
    AgreementAction,
    AgreementStateMachine,
    AskWhetherBegun,
    Mismatch,
    Operation,
    WorkerLost,
)


def op(
    identity: str, signature: str = "float32 [3]", use: int = 0, each: bool = False
) -> Operation:
    return Operation(identity, use, signature, each)


def test_equal_operations_are_agreed_once() -> None:
    machine = AgreementStateMachine(3)
    for worker in (2, 0):
        assert machine.say(worker, 0, op("x")) == []
        machine.check()
    assert machine.say(1, 0, op("x")) == [Agreed(op("x"))]
    assert machine.say(2, 0, op("x", use=1)) == [Agreed(op("x", use=1), 2)], (
        "announced before it knew the operation"
    )
    assert machine.say(0, 0, op("b", each=True)) == [] == machine.say(1, 0, op("b", each=True))
    assert machine.say(2, 0, op("b", each=True)) == [Agreed(op("b", each=True))]
    assert machine.say(0, 0, op("b", use=1, each=True)) == [], "must be agreed each time"


def test_a_mismatch_lists_the_operation_of_each_worker() -> None:
    machine = AgreementStateMachine(3)
    machine.say(0, 0, op("x", "int32 [17]"))
    machine.say(2, 0, op("x", "int32 [17]"))
    (verdict,) = machine.say(1, 0, op("x", "float32 [17]"))
    assert verdict == Mismatch(
        1, "workers differ about 'x': workers 0, 2: int32 [17]; worker 1: float32 [17]"
    )
    assert machine.say(0, 0, op("y")) == [], "belongs to the previous epoch"
    assert machine.say(0, 1, op("x")) == [] == machine.say(1, 1, op("x"))
    assert machine.say(2, 1, op("x")) == [Agreed(op("x"))]


def test_a_changed_operation_differs_from_the_agreed_one() -> None:
    """Worker 0 reuses the agreed operation without asking and reports it once it has waited for a
    second."""
    machine = AgreementStateMachine(2)
    machine.say(0, 0, op("x"))
    machine.say(1, 0, op("x"))
    assert machine.say(1, 0, op("x", "float32 [4]", use=5)) == []
    assert machine.stall(0, 0, [op("x", use=4)], None) == [], "an older use is merely late"
    (verdict,) = machine.stall(0, 0, [op("x", use=5)], None)
    assert (
        isinstance(verdict, Mismatch)
        and "worker 0: float32 [3]; worker 1: float32 [4]" in verdict.words
    )


def answers(
    machine: AgreementStateMachine,
    actions: list[AgreementAction],
    begun: dict[int, set[str]],
    blocked: dict[int, str],
) -> list[AgreementAction]:
    """Feed the answers of the queried workers. Returns the resulting actions."""
    out: list[AgreementAction] = []
    for action in actions:
        if isinstance(action, AskWhetherBegun):
            name = action.place[0]
            out += machine.has(
                action.to, 0, action.place, name in begun[action.to], (blocked[action.to], 0)
            )
    return out


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_ring_of_waits_is_found(workers: int) -> None:
    """Each worker has begun one operation and waits for it, while the next worker waits for another
    and has not begun this one."""
    machine = AgreementStateMachine(workers)
    blocked = {rank: f"t{rank}" for rank in range(workers)}
    begun = {
        rank: {name for other, name in blocked.items() if other != (rank - 1) % workers}
        for rank in blocked
    }
    found: list[AgreementAction] = []
    for _ in range(2):
        for rank, name in blocked.items():
            if not found:
                found = answers(
                    machine, machine.stall(rank, 0, [op(name)], op(name)), begun, blocked
                )
                machine.check()
    assert len(found) == 1 and isinstance(found[0], Mismatch)
    for rank, name in blocked.items():
        lacks = f"which worker {(rank + 1) % workers} has not begun"
        assert f"worker {rank} waits for '{name}' (float32 [3]), {lacks}" in found[0].words


def test_a_late_worker_is_no_ring() -> None:
    machine = AgreementStateMachine(2)
    blocked = {0: "a", 1: "b"}
    # worker 1 has begun a and waits for b, which worker 0 will begin
    begun = {0: {"a"}, 1: {"a", "b"}}
    for _ in range(3):
        for rank, name in blocked.items():
            assert (
                answers(machine, machine.stall(rank, 0, [op(name)], op(name)), begun, blocked) == []
            )
    assert machine.stall(0, 0, [], None) == [], "it goes on"
    machine.check()


def test_an_operation_that_waits_for_a_lost_worker_fails() -> None:
    machine = AgreementStateMachine(3)
    machine.say(0, 0, op("x"))
    (lost,) = machine.left(1, "closed")
    assert isinstance(lost, WorkerLost) and lost.to is None
    assert "needs worker 1, which has left" in lost.words
    (lost,) = machine.say(2, 0, op("y"))
    assert isinstance(lost, WorkerLost) and lost.to == 2


def test_asynchronous_workers_are_compared_without_waiting() -> None:
    machine = AgreementStateMachine(2, waits=False)
    assert machine.say(0, 0, op("x", use=3)) == []
    assert machine.left(1, "closed") == []
    (verdict,) = machine.say(1, 0, op("x", "bfloat16 [3]"))
    assert isinstance(verdict, Mismatch)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.slow
def test_equal_programs_always_end(seed: int) -> None:
    """At any speeds, workers that begin the same operations in any order, each blocked on a random
    operation, never get a mismatch."""
    pick, workers = random.Random(seed), 3
    machine = AgreementStateMachine(workers)
    names = [f"t{i}" for i in range(6)]
    orders = [pick.sample(names, len(names)) for _ in range(workers)]
    begun: list[list[str]] = [[] for _ in range(workers)]
    done: set[str] = set()
    for _ in range(200):
        rank = pick.randrange(workers)
        left = [name for name in orders[rank] if name not in begun[rank]]
        if left and pick.random() < 0.5:
            begun[rank].append(left[0])
            actions = machine.say(rank, 0, op(left[0]))
        else:
            waits = [name for name in begun[rank] if name not in done]
            # a program takes all handles before it waits for any
            blocked = op(pick.choice(waits)) if waits and not left else None
            actions = machine.stall(rank, 0, [op(name) for name in waits], blocked)
        for action in actions:
            assert not isinstance(action, Mismatch)
            if isinstance(action, Agreed):
                done.add(action.operation.identity)
            if isinstance(action, AskWhetherBegun):
                mine = machine._workers[action.to].blocked
                assert (
                    machine.has(
                        action.to,
                        0,
                        action.place,
                        action.place[0] in begun[action.to],
                        mine and mine.place,
                    )
                    == []
                )
        machine.check()
