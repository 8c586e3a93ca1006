"""The servers' state machines, driven by a scripted world without hardware. The real nodes run the
same objects (Rule 7)."""

import itertools
import random

import pytest
from msgspec.structs import replace

from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.errors import LoopError, LostError
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.assignment import assign
from roadtrain.servers.protocol.chunk_state import ChunkPhase, Resident
from roadtrain.servers.protocol.commit import CommitStateMachine, added
from roadtrain.servers.protocol.prefetch import Prefetcher, SlotPhase
from roadtrain.servers.protocol.queues import (
    READ_PARAMETERS,
    READ_STATE,
    WRITE_STATE,
    DeviceQueue,
    Trial,
    Turns,
)
from roadtrain.servers.protocol.server import ServerStateMachine, agreed
from roadtrain.servers.protocol.server_steps import ServerSpec
from roadtrain.storage.history import Histories, HistoryLink, Resume, ServerHoldings


class World:
    """Carries out a server's actions in random order and checks that nothing is written into the
    committed slot (Rule 3)."""

    def __init__(self, machine, seed):
        self.machine, self.random = machine, random.Random(seed)
        self.todo, self.sent, self.log, self.held, self.lanes = [], [], [], {}, {}
        self.written = dict.fromkeys(machine.chunks, 0)  # last step written
        self.checksum = lambda chunk: 0

    def feed(self, event):
        for action in self.machine.handle(event):
            if isinstance(action, messages.Send):
                self.sent.append(action.message)
            elif isinstance(action, messages.Discard):  # at once, as the server does
                self.held.pop(action.chunk, None)
            else:
                self.todo.append(action)
        self.machine.check()

    def run_one(self):
        action = self.random.choice([action for action in self.todo if self.may_run(action)])
        self.todo.remove(action)
        self.log.append(action)
        result = ()
        match action:
            case messages.Spill(push, lane):
                assert (
                    push.chunk,
                    lane,
                ) not in self.lanes, "the committed slot is overwritten"
                self.lanes[push.chunk, lane] = push.worker
            case messages.Hold(push):
                if push.spill_slot is not None:
                    assert self.lanes.pop((push.chunk, push.spill_slot)) == push.worker
                self.held.setdefault(push.chunk, []).append(push.worker)
                result = (None, push.keep)
            case messages.Total(chunk):
                result = (tuple(self.held.get(chunk, ())),)
            case messages.Update(chunk, _):
                self.held.pop(chunk, None)
                result = (self.checksum(chunk),)
        self.feed(messages.Done(action, result))

    def may_run(self, action):
        """A server's kernels run sums before updates (servers/server.py)."""
        summing = [other.chunk for other in self.todo if isinstance(other, messages.Total)]
        return not isinstance(action, messages.Update) or action.chunk not in summing

    def drain(self):
        while self.todo:
            self.run_one()


def server(chunks, buffers=0, *, number=0, durable=True, **options):
    return ServerStateMachine(ServerSpec(number, chunks, buffers, durable=durable, **options))


def chunk_of(world, chunk=0):
    return world.machine.chunks[chunk]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("buffers", [1, 2, 5])
@pytest.mark.slow
def test_steps_end_committed_in_any_order_of_actions(seed, buffers):  # Rule 3, Rule 5
    rng = random.Random(seed)
    kinds = [Resident.NOTHING, Resident.RECORD, Resident.WEIGHTS]
    machine = ServerStateMachine(
        ServerSpec(0, {c: rng.choice(kinds) for c in range(9)}, buffers, durable=True)
    )
    world = World(machine, seed)
    for step in range(1, 5):
        chunks = [c for c in machine.chunks if rng.random() < 0.8]
        for c in chunks:
            world.feed(messages.Push(c, None, True, rng.random() < 0.5, 100 * step + c))
        for c in chunks:
            world.feed(messages.ApplyUpdate(c, step, (), [1.0], c))
            if rng.random() < 0.5 and world.todo:
                world.run_one()
        for c in chunks:  # the next forward asks for the new version while updates run
            world.feed(
                messages.Pull(
                    c,
                    machine.chunks[c].version + (machine.chunks[c].queued is not None),
                    None,
                    c,
                )
            )
        world.feed(messages.EndStep(step))
        world.feed(messages.Commit(step, b""))
        world.drain()
        assert machine.committed == step and not (machine.gated or machine.steps.ended)
        assert not (machine.queue or machine.resident_queue)
        assert [m.step for m in world.sent if isinstance(m, messages.CommitDone)][-1] == step
    freed = [m.ticket for m in world.sent if isinstance(m, messages.BufferFree)]
    pushed = [a.push.ticket for a in world.log if isinstance(a, messages.Hold)]
    assert sorted(freed) == sorted(pushed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("closes", "staleness"), [(False, 0), (True, 0), (True, 1), (False, 3), (True, 3)]
)
def test_several_workers_meet_in_every_step(seed, closes, staleness):
    """Workers send their events in random order, each as far ahead as its pulls allow; a chunk
    without a gradient from some (or all) workers still gets its version. Rule 1: an update uses
    every push of its step and no other; a pull returns the values after exactly the step it names,
    or newer values if staleness exceeds 1.
    """
    rng, n = random.Random(seed), 3
    chunks, steps = range(5), 4
    has = {
        (s, c, w): rng.random() < 0.6 for s in range(1, steps + 1) for c in chunks for w in range(n)
    }
    kinds = {c: rng.choice([Resident.NOTHING, Resident.RECORD, Resident.WEIGHTS]) for c in chunks}
    delayed = dict.fromkeys(chunks, False) if staleness == 1 else {}
    machine = ServerStateMachine(ServerSpec(0, kinds, 2, durable=True, workers=n, delayed=delayed))
    world = World(machine, seed)
    seen = {}
    # updates contained in (weights part, master), for the record in memory and for the file
    held = dict.fromkeys(chunks, (0, 0))
    filed = dict(held)

    def scripted(worker):
        for step in range(1, steps + 1):
            for c in chunks:
                if has[step, c, worker]:
                    ticket = len(seen) + 1000 * worker + 100000 * step
                    version = max(step - 1 - staleness, 0)
                    world.feed(messages.Pull(c, version, version, ticket, worker))
                    while messages.Pulled(ticket, c) not in world.sent:
                        yield False
                    world.feed(
                        messages.Push(c, None, True, rng.random() < 0.5, ticket, None, worker)
                    )
            if closes:
                for c in chunks:
                    world.feed(messages.Close(c, step, worker))
                    yield True
                for c in chunks:
                    while (
                        sum(
                            m.chunk == c
                            for m in world.sent
                            if isinstance(m, messages.GradAccumulated)
                        )
                        < step
                    ):
                        yield False
            for c in chunks:
                scale = 1.0 if has[step, c, worker] else None
                world.feed(messages.ApplyUpdate(c, step, (0.1,), [scale], c, worker))
                yield True
            world.feed(messages.EndStep(step, worker))
            world.feed(messages.Commit(step, worker, worker))

    original = world.run_one

    def run_one():
        before = {c: tuple(w) for c, w in world.held.items()}
        original()
        action = world.log[-1]
        if isinstance(action, messages.Write):
            filed[action.chunk] = held[action.chunk]
        elif isinstance(action, messages.Answer):
            c, version = action.pull.chunk, action.pull.into
            found = (held if action.memory else filed)[c][action.newest]
            named = sum(any(has[s, c, w] for w in range(n)) for s in range(1, version + 1))
            assert found >= named if staleness > 1 else found == named
        elif isinstance(action, messages.Update):
            _, master = held[action.chunk]
            held[action.chunk] = (master if staleness == 1 else master + 1, master + 1)
            step = action.apply_update.step
            seen[step, action.chunk] = True
            assert sorted(before[action.chunk]) == [
                w for w in range(n) if has[step, action.chunk, w]
            ]

    world.run_one = run_one
    running = [scripted(w) for w in range(n)]
    idle = 0
    while running and idle < 10000:
        script = rng.choice(running)
        try:
            idle = 0 if next(script) else idle + 1
        except StopIteration:
            running.remove(script)
        if world.todo and rng.random() < 0.7:
            world.run_one()
    world.drain()
    assert not running and machine.committed == steps
    assert set(seen) == {(s, c) for s, c, w in has if has[s, c, w]}
    assert all(chunk.version == steps for chunk in machine.chunks.values())
    prepared = [a.blobs for a in world.log if isinstance(a, messages.Prepare)]
    assert prepared == [[0, 1, 2]] * steps


def test_an_early_gradient_does_not_block_the_link():
    """Its buffer is freed for later messages before its own step begins."""
    machine = ServerStateMachine(ServerSpec(0, {0: Resident.NOTHING}, 1, durable=True))
    world = World(machine, 0)
    world.feed(messages.Push(0, None, True, True, 1))
    world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    world.feed(messages.Push(0, None, True, False, 2))
    world.feed(messages.ApplyUpdate(0, 2, (), [1.0], 0))
    [spill] = [a for a in world.todo if isinstance(a, messages.Spill)]
    world.todo.remove(spill)
    # the first step's update is done, the second's gradient is still being spilled to disk
    world.drain()
    assert machine.chunks[0].version == 1 and messages.BufferFree(2) not in world.sent
    world.todo.append(spill)
    world.run_one()
    assert messages.BufferFree(2) in world.sent
    world.drain()
    assert (
        machine.chunks[0].version == 2
        and world.sent.count(messages.BufferFree(2)) == 1
        and not machine.chunks[0].spill_slots
    )


def test_a_dropped_gradient_is_replaced_by_the_next_push():
    """zero_grad() without step() before the server has stored the push: only the next push
    counts."""
    machine = ServerStateMachine(ServerSpec(0, {0: Resident.RECORD}, 0, durable=False, workers=2))
    world = World(machine, 0)
    world.feed(messages.Push(0, None, True, True, 1, None, 0))
    world.feed(messages.DiscardGrad(0, 0))
    world.feed(messages.Push(0, None, True, True, 2, None, 0))
    world.feed(messages.Push(0, None, True, True, 3, None, 1))
    world.drain()
    assert world.held == {0: [0, 1]} and [
        m.ticket for m in world.sent if isinstance(m, messages.BufferFree)
    ] == [1]


def sums_of(world):
    """For each sum reported to workers, the workers whose gradients it contains."""
    return [m.sums for m in world.sent if isinstance(m, messages.GradAccumulated)]


@pytest.mark.parametrize("closes", [True, False])
def test_a_dropped_sum_is_computed_again(closes):
    """Two workers close, drop their gradients and push again: the update's norm comes from the
    second gradients, even if those are not closed."""
    world = World(server({0: Resident.RECORD}, durable=False, workers=2), 0)
    for worker in (0, 1):
        world.feed(messages.Push(0, None, True, True, worker, None, worker))
        world.feed(messages.Close(0, 1, worker))
    world.drain()
    for worker in (0, 1):
        world.feed(messages.DiscardGrad(0, worker))
    world.feed(messages.Push(0, None, True, True, 2, None, 1))
    for worker in (0, 1):
        if closes:
            world.feed(messages.Close(0, 1, worker))
        world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0, worker))
    world.drain()
    assert sums_of(world) == [(0, 1), (1,)] and chunk_of(world).version == 1


def test_a_relay_pushes_for_several_workers():
    """The relay pushes their sum, whose norm is reported only after the relay has closed it."""
    world = World(server({0: Resident.RECORD}, durable=False, relays=True), 0)
    world.feed(messages.Push(0, None, True, True, 1))
    world.drain()
    assert sums_of(world) == []
    world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    world.drain()
    assert sums_of(world) == [(0,)] and chunk_of(world).version == 1


def test_a_dropped_gradient_frees_the_memory_of_its_own_worker():
    """The memory of the other worker is in use until the update."""
    world = World(server({0: Resident.RECORD}, durable=False, workers=2), 0)
    for worker in (0, 1):
        world.feed(messages.Push(0, None, True, True, 10 + worker, None, worker))
    world.drain()
    world.feed(messages.DiscardGrad(0, 0))

    def freed():
        return [m.ticket for m in world.sent if isinstance(m, messages.BufferFree)]

    assert freed() == [10]
    for worker in (0, 1):
        world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0, worker))
    world.drain()
    assert freed() == [10, 11]


def test_a_sum_counts_only_for_its_step():
    """The first step's gradients are closed, the second step's are not."""
    world = World(server({0: Resident.RECORD}, durable=False, workers=2), 0)
    for step in (1, 2):
        for worker in (0, 1):
            ticket = 2 * step + worker
            world.feed(messages.Push(0, None, True, True, ticket, None, worker))
            if step == 1:
                world.feed(messages.Close(0, step, worker))
        for worker in (0, 1):
            world.feed(messages.ApplyUpdate(0, step, (), [1.0], 0, worker))
        world.drain()
    assert sums_of(world) == [(0, 1), (0, 1)]


# The events of one of two workers before the other's link ends.
IN_A_STEP = {
    "a gradient is on its way": [messages.Push(0, None, True, True, 1)],
    "a gradient is whole": [messages.Close(0, 1)],
    "an update is asked for": [messages.ApplyUpdate(0, 1, (), [1.0], 0)],
    "a step is ended": [messages.EndStep(1)],
    "the job's state is here": [messages.Commit(1, b"")],
    "a step waits for the job's state": [messages.EndStep(1), messages.EndStep(1, 1)],
    "a step is being prepared": [
        *(messages.EndStep(1, worker) for worker in (0, 1)),
        *(messages.Commit(1, b"", worker) for worker in (0, 1)),
    ],
}


@pytest.mark.parametrize("case", IN_A_STEP)
def test_a_worker_that_leaves_during_a_step_ends_the_session(case):  # Rule 5
    machine = server({0: Resident.RECORD}, workers=2)
    for event in IN_A_STEP[case]:
        machine.handle(event)
    with pytest.raises(LostError, match="worker 1 was lost before step 1 was committed: unplugged"):
        machine.handle(messages.PeerLost(1, "unplugged"))


@pytest.mark.parametrize(
    "event",
    [
        messages.Push(0, None, True, True, 1),
        messages.Close(0, 1),
        messages.ApplyUpdate(0, 1, (), [1.0], 0),
        messages.EndStep(1),
    ],
    ids=lambda event: type(event).__name__,
)
def test_no_step_begins_after_a_worker_has_left(event):  # Rule 5
    """A worker may leave between two steps; pending operations of the others complete."""
    machine = server({0: Resident.RECORD}, workers=2)
    assert machine.handle(messages.PeerLost(1, "unplugged")) == []
    assert machine.handle(messages.DiscardGrad(0)) == [messages.Discard(0, 0)]
    assert machine.handle(messages.Pull(0, 0, None, 1))
    with pytest.raises(LostError, match="worker 1 was lost"):
        machine.handle(event)


@pytest.mark.parametrize("kind", list(Resident), ids=lambda kind: kind.value)
def test_no_pull_copies_a_record_during_its_update(kind):  # Rule 6
    """A record held in memory is updated in place; a file is not."""
    world = World(server({0: kind}, 1), 0)
    world.feed(messages.Push(0, None, True, True, 1))
    world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    while chunk_of(world).phase is not ChunkPhase.UPDATING:
        world.run_one()
    world.feed(messages.Pull(0, 0, None, 7))
    begun = [action for action in world.todo if isinstance(action, messages.Answer)]
    assert [answer.memory for answer in begun] == ([False] if kind is Resident.NOTHING else [])
    world.drain()
    assert world.sent.count(messages.Pulled(7, 0)) == 1


def test_a_pull_waits_for_an_update_of_its_chunk_to_end():  # Rule 6
    """One answer at a time; another chunk's answer is in progress when the update begins."""
    world = World(server(dict.fromkeys((0, 1), Resident.RECORD), answers=1), 0)
    world.feed(messages.Pull(1, 0, None, 1))
    world.feed(messages.Pull(0, 0, None, 2))
    [first] = world.todo
    world.todo.remove(first)
    world.feed(messages.Push(0, None, True, True, 1))
    world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    while chunk_of(world).phase is not ChunkPhase.UPDATING:
        world.run_one()
    world.feed(messages.Done(first))
    assert not any(isinstance(action, messages.Answer) for action in world.todo)
    world.feed(messages.Pull(1, 0, None, 3))  # it does not delay other pulls
    world.drain()
    assert [m.ticket for m in world.sent if isinstance(m, messages.Pulled)] == [1, 3, 2]


def test_an_update_waits_for_every_pull_that_copies_from_memory():  # Rule 6
    machine = server({0: Resident.WEIGHTS}, 1)
    pulls = [answer for n in (1, 2) for answer in machine.handle(messages.Pull(0, 0, None, n))]
    [hold] = machine.handle(messages.Push(0, None, True, True, 3))
    machine.handle(messages.Done(hold, (None, True)))
    [read] = machine.handle(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    assert machine.handle(messages.Done(read)) == []
    first, last = (machine.handle(messages.Done(answer)) for answer in pulls)
    assert [type(action).__name__ for action in first] == ["Send"]
    assert [type(action).__name__ for action in last] == ["Send", "Update"]


def test_a_record_buffer_is_kept_while_a_pull_copies_from_it():  # Rule 6
    world = World(server({0: Resident.NOTHING}, 1), 0)
    world.feed(messages.Push(0, None, True, True, 1))
    world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    while chunk_of(world).phase is not ChunkPhase.WRITING:
        world.run_one()
    world.feed(messages.Pull(0, 1, None, 7))
    [answer] = [action for action in world.todo if isinstance(action, messages.Answer)]
    assert answer.memory
    world.todo.remove(answer)
    world.drain()
    assert world.machine.free == [] and chunk_of(world).phase is ChunkPhase.WRITTEN
    world.feed(messages.Done(answer))
    assert world.machine.free == [0] and chunk_of(world).phase is ChunkPhase.IDLE


def test_the_newest_values_are_read_beside_the_master():
    """With staleness 1 memory may hold only the weights part, which lags by one update."""
    kinds = dict(enumerate(Resident))
    machine = server(kinds, 3, delayed=dict.fromkeys(kinds, True))
    for number, kind in kinds.items():
        for version, newest in ((-1, False), (0, True)):
            [answer] = machine.handle(messages.Pull(number, version, None, 1))
            kept = kind is Resident.RECORD or (kind is Resident.WEIGHTS and not newest)
            assert (answer.newest, answer.memory) == (newest, kept)


def test_a_chunk_without_an_update_in_the_last_step_has_a_single_version():  # Rule 1
    """When a session begins, the weights part lags only for chunks that the last step updated."""
    kinds = dict.fromkeys((0, 1), Resident.RECORD)
    machine = server(kinds, delayed={0: True, 1: False}, committed=5)
    answers = [machine.handle(messages.Pull(c, v, None, 1))[0] for c in (0, 1) for v in (-1, 0)]
    assert [answer.newest for answer in answers] == [False, True, True, True]


@pytest.mark.parametrize(
    ("push", "spills"),
    [
        (messages.Push(0, None, True, False, 2), True),
        (messages.Push(0, None, True, True, 2), False),
        (messages.Push(0, None, True, False, 2, sums=(1.0,)), False),
    ],
    ids=["its buffer is needed", "kept in its buffer", "compressed"],
)
def test_early_gradients_spill_to_disk_beyond_the_slots(push, spills):
    """The slots hold the workers' gradients."""
    world = World(server({0: Resident.NOTHING}, 1, workers=3, relays=True), 0)
    for worker in range(3):
        world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0, worker))
    assert chunk_of(world).update_due
    world.feed(push)
    slots = [action.spill_slot for action in world.todo if isinstance(action, messages.Spill)]
    assert slots == ([3] if spills else [])


def test_a_repeated_commit_from_another_worker_changes_nothing():
    """Every worker forwards the commit at its own time."""
    machine = server({0: Resident.NOTHING}, 1, number=1, workers=2)
    for step, committed in ((1, 1), (1, 1), (2, 2), (1, 2), (2, 2)):
        assert machine.handle(messages.CommitDone(step)) == []
        assert machine.committed == committed


def test_workers_with_different_updates_are_refused():
    a = messages.ApplyUpdate(0, 1, (0.1,), [1.0, None], 0, 0)
    assert list(agreed([a, replace(a, scales=[None, 2.0], worker=1)]).scales) == [1.0, 2.0]
    nan = replace(a, scales=[float("nan"), None])  # a diverged run, where all workers agree
    assert agreed([nan, replace(nan, scales=[float("nan"), None], worker=1)]).scales[0] != 0
    with pytest.raises(LoopError, match="hyperparameters"):
        agreed([a, replace(a, hyper=(0.2,), worker=1)])
    with pytest.raises(LoopError, match="2 and 1 parameters"):
        agreed([a, replace(a, scales=[1.0], worker=1)])
    with pytest.raises(LoopError, match=r"factors, 1.0 and 0.5"):
        agreed([a, replace(a, scales=[0.5, None], worker=1)])


@pytest.mark.parametrize(("kept", "writes"), [(Resident.NOTHING, 1), (Resident.RECORD, 0)])
def test_a_step_waits_for_the_commit_of_the_previous_step(kept, writes):  # Rule 3
    machine = server({0: kept}, 2, number=1, durable=kept is Resident.NOTHING)
    world = World(machine, 0)
    for step in (1, 2):
        world.feed(messages.Push(0, None, True, True, step))
        world.feed(messages.ApplyUpdate(0, step, (), [1.0], 0))
        world.feed(messages.EndStep(step))
        world.drain()
    assert [type(a).__name__ for a in world.log].count("Write") == writes
    assert messages.Prepared(1, 1) in world.sent and messages.Prepared(1, 2) not in world.sent
    world.feed(messages.CommitDone(1))
    world.drain()
    assert messages.Prepared(1, 2) in world.sent


def test_updates_run_in_the_order_of_the_next_forward():
    machine = ServerStateMachine(
        ServerSpec(0, dict.fromkeys(range(7), Resident.NOTHING), 1, durable=True)
    )
    world = World(machine, 0)
    for c in range(7):
        world.feed(messages.Push(c, None, True, True, c))
    world.drain()
    # the first takes the only buffer, so nothing else starts before all have been requested
    for c in reversed(range(7)):
        world.feed(messages.ApplyUpdate(c, 1, (), [1.0], c))
    world.feed(messages.EndStep(1))
    world.feed(messages.Commit(1, b""))
    world.drain()
    assert [a.chunk for a in world.log if isinstance(a, messages.Update)] == [6, *range(6)]


def test_a_waiting_pull_is_answered_before_the_write():
    machine = ServerStateMachine(ServerSpec(0, {0: Resident.NOTHING}, 1, durable=True))
    world = World(machine, 0)
    world.feed(messages.Push(0, None, True, True, 1))
    world.feed(messages.Pull(0, 1, None, 7))
    world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    while not any(isinstance(a, messages.Answer) for a in world.todo):
        world.run_one()
    assert not any(isinstance(a, messages.Write) for a in world.log)
    assert next(a for a in world.todo if isinstance(a, messages.Answer)).memory


def answered_order(turns, slow, n):
    """Let answers complete, for worker `slow` a quarter as often. Returns each worker's count over
    time."""
    under_way, ended, out = [], dict.fromkeys(range(3), 0), []
    for tick in range(4 * n):
        while (pull := turns.next()) is not None:
            under_way.append(pull)
        for worker in range(3):
            mine = [pull for pull in under_way if pull[0] == worker]
            if mine and (worker != slow or tick % 4 == 0):
                under_way.remove(mine[0])
                turns.answered(worker)
                ended[worker] += 1
                assert mine[0][1] == ended[worker] - 1, "answered in the order of the pulls"
        out.append(dict(ended))
    return out


def test_pulls_of_all_workers_are_answered_at_the_same_pace():
    """Among waiting workers none gets far ahead; a worker that waits alone is not held up; a late
    worker starts level with the others."""
    turns = Turns(2)
    for worker in range(3):
        for i in range(20):
            turns.ask(worker, (worker, i))
    got = answered_order(turns, 1, 20)
    assert all(
        counts[0] - counts[1] <= turns.most and counts[2] - counts[1] <= turns.most
        for counts in got
    )
    assert got[-1] == {0: 20, 1: 20, 2: 20}
    for i in range(5):  # alone
        turns.ask(0, (0, i))
    for i in range(0, 4, 2):
        assert [turns.next(), turns.next(), turns.next()] == [(0, i), (0, i + 1), None]
        turns.answered(0)
        turns.answered(0)
    assert turns.next() == (0, 4)
    turns.answered(0)
    turns.ask(1, (1, 0))
    for i in range(9):
        turns.ask(2, (2, i))
    assert len([p for p in iter(turns.next, None) if p[0] == 2]) == turns.most, "worker 0 has left"


def _arrive(prefetcher, pulls):
    while pulls:
        pulls = pulls[1:] + prefetcher.arrived(pulls[0].slot)


def _run_sequence(prefetcher, sequence):
    """Use blocks in sequence; pulls arrive one use later. Returns how many uses had to wait."""
    pending, waits = [], 0
    for block in sequence:
        pending += prefetcher.request(block)
        prefetcher.check()
        if prefetcher.here(block) is None:
            waits += 1
            while prefetcher.here(block) is None:
                pending += prefetcher.arrived(pending.pop(0).slot)
        slot = prefetcher.use(block)
        while pending:
            pending += prefetcher.arrived(pending.pop(0).slot)
        pending += prefetcher.returned(slot)
        prefetcher.check()
    _arrive(prefetcher, pending)
    return waits


def test_prefetch_hides_all_but_the_first_fetch():
    prefetcher = Prefetcher(3, range(1, 9))
    sequence = [*range(1, 9), *range(8, 0, -1)]
    for _ in range(3):
        assert _run_sequence(prefetcher, sequence) <= 1
        prefetcher.updated(list(range(1, 9)))
        _arrive(prefetcher, prefetcher.stepped())


def test_prefetch_learns_a_skipped_block():
    prefetcher = Prefetcher(2, range(1, 7))
    sequence = [1, 2, 4, 5, 6, 6, 5, 4, 2, 1]
    _run_sequence(prefetcher, sequence)
    prefetcher.updated(list(range(1, 7)))
    _arrive(prefetcher, prefetcher.stepped())
    assert _run_sequence(prefetcher, sequence) <= 1


def test_nothing_is_fetched_twice_if_all_blocks_fit():
    prefetcher = Prefetcher(6, range(1, 7))
    sequence = [*range(1, 7), *range(6, 0, -1)]
    _run_sequence(prefetcher, sequence)
    assert all(s.phase is SlotPhase.HERE for s in prefetcher.slots)
    assert _run_sequence(prefetcher, sequence) == 0


def test_device_queue_priorities_and_bursts():
    queue = DeviceQueue(limit=1)
    for name, priority in (("w", WRITE_STATE), ("r", READ_STATE), ("p", READ_PARAMETERS)):
        queue.push(priority, 0, name)
    assert [queue.next()[1] for _ in range(3)] == ["p", "r", "w"]
    burst = DeviceQueue(burst=True, burst_ops=2)
    for i in range(4):
        burst.push(READ_STATE, i, f"r{i}")
        burst.push(WRITE_STATE, i, f"w{i}")
    order = []
    while (item := burst.next()) is not None:
        burst.check()
        order.append(item[1])
        burst.done(item[0])
    assert sorted(order) == sorted([*(f"r{i}" for i in range(4)), *(f"w{i}" for i in range(4))])
    assert sum(a[0] != b[0] for a, b in itertools.pairwise(order)) <= 3


@pytest.mark.parametrize(("bursts", "kept"), [(1.3, True), (1.05, False), (0.8, False)])
def test_the_trial_keeps_bursts_only_if_they_are_clearly_faster(bursts, kept):
    trial, burst, tried = Trial(), False, []
    while not trial.chosen:
        tried.append(burst)
        burst = trial.stepped(burst, Trial.LEAST, 1 / (bursts if burst else 1))
    assert tried == [False, False, True, False, True] and burst is kept
    assert trial.stepped(burst, Trial.LEAST, 100.0) is kept  # for good


def test_the_trial_ignores_steps_without_traffic():
    trial = Trial()
    assert (
        not any(trial.stepped(False, Trial.LEAST - 1, 1.0) for _ in range(20)) and not trial.chosen
    )


def test_the_ledger_commits_once_all_servers_prepared_and_the_blob_is_known():
    ledger = CommitStateMachine(range(3), 0)
    assert len(ledger.end_step(1)) == 3
    assert ledger.on_prepared(messages.Prepared(1, 1)) == []
    assert ledger.blob(1, b"x") == []
    assert ledger.on_prepared(messages.Prepared(2, 1)) == [(0, messages.Commit(1, b"x"))]
    assert [s for s, _ in ledger.on_committed(messages.CommitDone(1))] == [1, 2]
    ledger.check()


def test_assign_spreads_evenly_and_by_weight():
    params = [ParamSpec(f"p{i}", (1 << 20,), "fp32", i % 5 != 0, 0) for i in range(40)]
    table = ChunkTable.build([("", params[:2]), ("b", params[2:])])
    counts = [assign(table, (1, 1, 1)).count(s) for s in range(3)]
    assert max(counts) - min(counts) <= 2
    uneven = assign(table, (1, 3))
    assert 2.2 < uneven.count(1) / uneven.count(0) < 4.2


def test_with_replicas_the_ledger_sends_the_blob_to_all_before_the_commit():
    ledger = CommitStateMachine((1, 2, 4), 0, everywhere=True)
    assert [s for s, _ in ledger.end_step(1)] == [1, 2, 4]
    assert ledger.blob(1, b"x") == []
    # nobody prepares before the comparison
    assert ledger.missing() == "step 1 waits for server(s) [1, 2, 4]"
    assert (
        ledger.on_written(messages.Written(1, 1)) == ledger.on_written(messages.Written(2, 1)) == []
    )
    assert ledger.on_written(messages.Written(4, 1)) == [
        (2, messages.Commit(1, b"x")),
        (4, messages.Commit(1, b"x")),
    ]
    assert ledger.on_prepared(messages.Prepared(2, 1)) == []
    assert ledger.missing() == "step 1 waits for server(s) [4]"
    assert ledger.on_prepared(messages.Prepared(4, 1)) == [(1, messages.Commit(1, b"x"))]
    assert ledger.missing() == "step 1 waits for server(s) [1]"
    assert [s for s, _ in ledger.on_committed(messages.CommitDone(1))] == [2, 4]
    ledger.check()


def test_a_workers_own_server_prepares_before_the_others_commit():
    """Server 9 belongs to that worker: it compares nothing and holds no state of the job."""
    ledger = CommitStateMachine((1, 2, 9), 0, everywhere=True, own=9)
    ledger.end_step(1)
    ledger.blob(1, b"x")
    for server_ in (1, 2):
        assert ledger.on_written(messages.Written(server_, 1)) == []
    assert ledger.on_prepared(messages.Prepared(9, 1)) == [(2, messages.Commit(1, b"x"))]
    assert ledger.on_prepared(messages.Prepared(2, 1)) == [(1, messages.Commit(1, b"x"))]


def test_two_chunks_whose_differences_cancel_are_found():  # Rule 6
    """Their plain sums are equal, their weighted sums are not."""
    ledger = CommitStateMachine((0, 1), 0, everywhere=True)
    ledger.end_step(1)
    ledger.blob(1, b"x")
    for server_, (second, third) in ((0, (10, 20)), (1, (20, 10))):
        sums = added(added((0, 0), 2, second), 3, third)
        assert ledger.on_written(messages.Written(server_, 1, ((0, *sums),))) == []
    assert ledger.diverged is not None and ledger.diverged.chunk([2, 3]) is None


@pytest.mark.parametrize("bad", [(), (5,), (2, 7)])
def test_a_step_that_two_servers_wrote_differently_is_not_committed(bad):  # Rule 6
    """Three servers; servers 1 and 2 hold the chunks of owner 1. The error names the server that
    differs, or says that several differ."""
    chunks, ledger = [2, 5, 7], CommitStateMachine((0, 1, 2), 3, everywhere=True)
    sums = dict.fromkeys((1, 2), (0, 0))
    for chunk in chunks:
        for server in sums:
            flipped = server == 2 and chunk in bad
            sums[server] = added(
                sums[server], chunk, (chunk * 0x9E3779B97F4A7C15 + flipped) % 2**64
            )
    ledger.end_step(4)
    ledger.blob(4, b"x")
    out = [
        *ledger.on_written(messages.Written(0, 4, ((0, 8, 8), (2, 9, 9)))),
        *ledger.on_written(messages.Written(1, 4, ((0, 8, 8), (1, *sums[1])))),
        *ledger.on_written(messages.Written(2, 4, ((1, *sums[2]), (2, 9, 9)))),
    ]
    if not bad:
        assert ledger.diverged is None and [s for s, _ in out] == [1, 2]
        return
    assert (
        out == []
        and ledger.on_prepared(messages.Prepared(1, 4))
        == ledger.on_prepared(messages.Prepared(2, 4))
        == []
    )
    found = ledger.diverged
    assert (found.step, found.owner, found.servers) == (4, 1, (1, 2))
    assert found.chunk(chunks) == (bad[0] if len(bad) == 1 else None)


def test_a_server_reports_its_checksums_before_it_prepares():
    """The sum over the chunks of each owner does not depend on the order of updates."""
    reports = []
    for seed in range(4):
        machine = ServerStateMachine(
            ServerSpec(
                1,
                dict.fromkeys(range(4), Resident.RECORD),
                0,
                durable=True,
                everywhere=True,
                owners={0: 0, 1: 1, 2: 1, 3: 0},
            )
        )
        world = World(machine, seed)
        world.checksum = lambda chunk: 1000 + chunk
        for chunk in range(3):
            world.feed(messages.Push(chunk, None, True, True, chunk))
            world.feed(messages.ApplyUpdate(chunk, 1, (), (1.0,), chunk))
        world.feed(messages.EndStep(1))
        world.drain()
        assert not any(isinstance(a, messages.Prepare) for a in world.log)
        world.feed(messages.Commit(1, b"x"))
        world.drain()
        written = [m for m in world.sent if isinstance(m, messages.Written)]
        assert len(written) == 1, "reported once, however long the step waits"
        reports += written
        assert [a.step for a in world.log if isinstance(a, messages.Prepare)] == [1]
    first = added((0, 0), 0, 1000)
    second = added(added((0, 0), 1, 1001), 2, 1002)
    assert set(reports) == {messages.Written(1, 1, ((0, *first), (1, *second)))}


class Replicas:
    """Servers with real state machines, workers with real ledgers, and records in place of disks.
    The contents after a step are the earlier contents plus (session, step), so that two histories
    never have equal contents. own: Each worker keeps a private part on server n + its number."""

    WORKERS = 2

    def __init__(self, n, seed, own=False):
        self.n, self.random, self.own = n, random.Random(seed), own
        self.disks = [{} for _ in range(n)]  # step -> (contents, blobs), for the two newest steps
        self.disks += [{0: ((), ())} for _ in range(self.WORKERS * own)]
        self.histories = [()] * n  # history of each server
        self.sessions = 0
        self.committed = 0  # the last step that any worker knows to be committed
        self.contents = {}  # contents at that step
        self.away, self.stale = None, None  # the dead server; the server that has missed steps

    def start(self, alive, events):
        """Run a session of the servers `alive` and kill it after `events` events.

        Returns:
            Whether the session got past its start.
        """
        # worker 0 saw the server die and informed the others
        without = () if self.stale is None else (self.stale,)
        found = {
            i: ServerHoldings(max(self.disks[i], default=-1), self.histories[i], without=without)
            for i in alive
        }
        got = Histories(
            found,
            [f"server {i}" for i in range(self.n)],
            {(i, (i + 1) % self.n) for i in range(self.n)},
        ).resume()
        if not isinstance(got, Resume):
            assert not self.committed
            got = Resume(0, tuple(alive), ())
            for i in alive:
                self.disks[i] = {0: ((), None)}
        step, members, number = got.step, got.members, self.sessions
        self.sessions += 1
        records = [self.disks[i].get(step) for i in members]
        assert all(r == records[0] and r is not None for r in records), "members differ"
        assert step >= self.committed, (
            f"step {self.committed} was committed, but the session resumes from {step}"
        )
        if step == self.committed and self.contents:
            assert records[0] == self.contents, "the contents are those of another history"
        for i in members:
            if (events := events - 1) < 0:
                return False
            self.disks[i] = {s: r for s, r in self.disks[i].items() if s <= step}
        for i in alive:
            if i not in members:
                if (events := events - 1) < 0:
                    return False
                self.disks[i], self.histories[i] = {step: records[0]}, got.history
        history = (*got.history, HistoryLink(f"session {number}", step, tuple(sorted(alive))))
        for i in alive:  # once all members hold the step that the link names
            if (events := events - 1) < 0:
                return False
            self.histories[i] = history
        for i in range(self.n, len(self.disks)):
            assert self.disks[i][step][0] == records[0][0], (
                "the private part of a worker is at another step"
            )
            self.disks[i] = {s: r for s, r in self.disks[i].items() if s <= step}
        self.stale = self.away
        self.run(sorted(alive), step, number, events)
        return True

    def run(self, alive, base, number, events):
        own = {self.n + w: w for w in range(self.WORKERS) if self.own}
        self.ledgers = [
            CommitStateMachine(
                [*alive, *(i for i in own if own[i] == w)],
                base,
                everywhere=True,
                own=self.n + w if own else None,
            )
            for w in range(self.WORKERS)
        ]
        self.machines = {
            i: ServerStateMachine(
                ServerSpec(
                    i,
                    {0: Resident.RECORD},
                    0,
                    durable=True,
                    committed=base,
                    workers=self.WORKERS,
                    first=alive[0],
                    everywhere=True,
                )
            )
            for i in alive
        }
        self.machines |= {
            i: ServerStateMachine(
                ServerSpec(i, {0: Resident.RECORD}, 0, durable=True, committed=base)
            )
            for i in own
        }
        lanes = {
            (i, w): [] for i in alive for w in range(self.WORKERS)
        }  # messages of each lane in order, both ways
        lanes |= {(i, w): [] for i, w in own.items()}
        back = {key: [] for key in lanes}
        work = {i: [] for i in self.machines}

        def act(server, actions):
            for action in actions:
                if isinstance(action, messages.Send):
                    for i, w in back:
                        if i == server:
                            back[i, w].append(action.message)
                elif isinstance(action, messages.Prepare):
                    work[server].append(action)

        for _ in range(events):
            kind = self.random.choice(["worker", "lane", "lane", "back", "back", "work"])
            w = self.random.randrange(self.WORKERS)
            if kind == "worker":
                ledger, out = self.ledgers[w], []
                if (
                    ledger.ended in ledger.prepared
                    and ledger.ended not in ledger.blobs
                    and not self.blob_sent[w]
                ):
                    self.blob_sent[w], out = (
                        True,
                        ledger.blob(ledger.ended, (number, ledger.ended, w)),
                    )
                elif ledger.committed >= ledger.ended - 1:
                    self.blob_sent[w], out = False, ledger.end_step(ledger.ended + 1)
                for server, message in out:
                    lanes[server, w].append(replace(message, worker=0 if server in own else w))
            elif kind == "work":
                server = self.random.choice(list(work))
                if work[server]:
                    action, disk = work[server].pop(0), self.disks[server]
                    before = disk[action.step - 1][0]
                    self.disks[server] = {
                        action.step - 1: disk[action.step - 1],
                        action.step: ((*before, (number, action.step)), tuple(action.blobs)),
                    }
                    act(server, self.machines[server].handle(messages.Done(action)))
            elif full := [
                key for key, queue in (lanes if kind == "lane" else back).items() if queue
            ]:
                server, w = self.random.choice(full)
                if kind == "lane":
                    act(server, self.machines[server].handle(lanes[server, w].pop(0)))
                    continue
                message, ledger = back[server, w].pop(0), self.ledgers[w]
                done = isinstance(message, messages.CommitDone)
                out = (
                    ledger.on_committed(message)
                    if done
                    else (
                        ledger.on_written(message)
                        if isinstance(message, messages.Written)
                        else ledger.on_prepared(message)
                    )
                )
                if done and message.step > self.committed:
                    self.committed, self.contents = message.step, self.disks[alive[0]][message.step]
                for to, what in out:
                    lanes[to, w].append(
                        what if done else replace(what, worker=0 if to in own else w)
                    )

    def life(self):
        """Run sessions in which servers die and return; at most one at a time is dead or stale."""
        self.blob_sent = [True] * self.WORKERS
        for _ in range(12):
            self.blob_sent = [True] * self.WORKERS
            alive = [i for i in range(self.n) if i != self.away]
            self.start(
                alive,
                self.random.randrange(8 if self.committed and self.random.random() < 0.3 else 140),
            )
            fate, may_die = (
                self.random.random(),
                self.random.randrange(self.n) if self.stale is None else self.stale,
            )
            if fate < 0.3:
                self.away = None
            elif fate < 0.8 and (self.committed or self.away is not None):
                self.away = self.stale = may_die
                if self.random.random() < 0.7:
                    self.disks[may_die], self.histories[may_die] = {}, ()
        return self.committed


@pytest.mark.parametrize(("n", "own"), [(2, False), (3, False), (2, True)])
@pytest.mark.slow
def test_no_committed_step_is_lost_with_one_server_at_any_moment(n, own):  # Rule 3
    """A server dies (with or without its disk) between any two events of a session or of its start.
    The private part of a worker is at the step from which the others continue."""
    assert sum(Replicas(n, seed, own).life() for seed in range(200)) > (50 if own else 200)


def test_the_machine_names_the_workers_it_waits_for():
    machine = ServerStateMachine(
        ServerSpec(0, {0: Resident.RECORD, 1: Resident.RECORD}, 0, durable=False, workers=3)
    )
    world = World(machine, 0)
    assert machine.waits() == ([], [])
    for worker in (0, 2):
        world.feed(messages.Push(1, None, True, True, worker, None, worker))
        world.feed(messages.Close(1, 1, worker))
    pull = messages.Pull(1, 1, None, 9, 2)
    world.feed(pull)
    world.feed(messages.EndStep(1, 0))
    world.drain()
    assert machine.waits() == (
        [pull],
        [
            (1, "the end of step 1"),
            (2, "the end of step 1"),
            (1, "the gradient of chunk 1 in step 1"),
        ],
    )
    world.feed(messages.Close(1, 1, 1))
    assert [what for _, what in machine.waits()[1]] == ["the end of step 1"] * 2
