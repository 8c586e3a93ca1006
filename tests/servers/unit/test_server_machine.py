"""The state machines, driven by a scripted world without hardware. Rule 7: these same objects drive
the real nodes."""

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
    """Carries a server's actions out in random order and watches Rule 3: no write into the
    committed slot."""

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
                ) not in self.lanes, "nobody writes over what is still wanted"
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
def test_steps_end_committed_whatever_the_order(seed, buffers):  # Rule 3, Rule 5
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
    """Workers say their parts in random order, each as far ahead as its pulls let it; a chunk that
    some (or all) have no gradient for still gets its version. Rule 1: an update sees every push of
    its step and none of another, a pull gets the values after exactly the step it names, with a
    staleness above 1 those or newer ones.
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
    # updates in (weights part, master), of the record in memory and of the file
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


def test_an_early_gradient_does_not_stay_in_the_way():
    """What the link needs for the messages behind it is freed before the turn of its step has
    come."""
    machine = ServerStateMachine(ServerSpec(0, {0: Resident.NOTHING}, 1, durable=True))
    world = World(machine, 0)
    world.feed(messages.Push(0, None, True, True, 1))
    world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    world.feed(messages.Push(0, None, True, False, 2))
    world.feed(messages.ApplyUpdate(0, 2, (), [1.0], 0))
    [spill] = [a for a in world.todo if isinstance(a, messages.Spill)]
    world.todo.remove(spill)
    # the first step's update is through, the second's gradient is still being written away
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


def test_a_gradient_is_dropped_in_its_turn():
    """zero_grad() without step(), before the server has put the push away: the next push
    counts, nothing else."""
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
    """Of each sum that workers were told: whose gradients it is of."""
    return [m.sums for m in world.sent if isinstance(m, messages.GradAccumulated)]


@pytest.mark.parametrize("closes", [True, False])
def test_a_sum_that_was_dropped_is_taken_again(closes):
    """Two workers close, drop their gradients and push again: the norm of the update is that of the
    second gradients, also where they are not closed."""
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


def test_one_relay_stands_for_several_workers():
    """What it pushes is their sum: its norm is told once the relay has closed it, not before."""
    world = World(server({0: Resident.RECORD}, durable=False, relays=True), 0)
    world.feed(messages.Push(0, None, True, True, 1))
    world.drain()
    assert sums_of(world) == []
    world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0))
    world.drain()
    assert sums_of(world) == [(0,)] and chunk_of(world).version == 1


def test_a_dropped_gradient_frees_the_memory_of_its_own_worker():
    """The other worker's is in use until the update."""
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


def test_a_sum_counts_for_its_own_step_only():
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


# What one of two workers has done when the other one's link ends.
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
def test_a_worker_that_goes_in_a_step_ends_the_session(case):  # Rule 5
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
def test_no_step_begins_without_a_worker_that_has_gone(event):  # Rule 5
    """Between two steps a worker may leave; what the others have under way goes on."""
    machine = server({0: Resident.RECORD}, workers=2)
    assert machine.handle(messages.PeerLost(1, "unplugged")) == []
    assert machine.handle(messages.DiscardGrad(0)) == [messages.Discard(0, 0)]
    assert machine.handle(messages.Pull(0, 0, None, 1))
    with pytest.raises(LostError, match="worker 1 was lost"):
        machine.handle(event)


@pytest.mark.parametrize("kind", list(Resident), ids=lambda kind: kind.value)
def test_no_pull_copies_what_an_update_is_changing(kind):  # Rule 6
    """What memory keeps for good changes in place; a file does not."""
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


def test_a_pull_whose_turn_comes_during_an_update_waits_for_its_end():  # Rule 6
    """One answer at a time; another chunk's is under way when the update begins."""
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
    world.feed(messages.Pull(1, 0, None, 3))  # it keeps nobody else from his turn
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


def test_the_newest_values_come_from_where_the_master_rests():
    """With staleness 1 memory may keep the weights part alone, which is one update behind."""
    kinds = dict(enumerate(Resident))
    machine = server(kinds, 3, delayed=dict.fromkeys(kinds, True))
    for number, kind in kinds.items():
        for version, newest in ((-1, False), (0, True)):
            [answer] = machine.handle(messages.Pull(number, version, None, 1))
            kept = kind is Resident.RECORD or (kind is Resident.WEIGHTS and not newest)
            assert (answer.newest, answer.memory) == (newest, kept)


def test_a_chunk_that_the_last_step_left_as_it_was_has_one_version():  # Rule 1
    """A session begins: only the weights part of what the last step updated is one update
    behind."""
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
    ids=["its memory is wanted", "kept where it lies", "compressed"],
)
def test_which_early_gradients_are_written_away(push, spills):
    """Beyond the slots of the workers' held gradients."""
    world = World(server({0: Resident.NOTHING}, 1, workers=3, relays=True), 0)
    for worker in range(3):
        world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0, worker))
    assert chunk_of(world).update_due
    world.feed(push)
    slots = [action.spill_slot for action in world.todo if isinstance(action, messages.Spill)]
    assert slots == ([3] if spills else [])


def test_what_another_worker_has_said_before_changes_nothing():
    """Every worker passes the commit on, each in its own time."""
    machine = server({0: Resident.NOTHING}, 1, number=1, workers=2)
    for step, committed in ((1, 1), (1, 1), (2, 2), (1, 2), (2, 2)):
        assert machine.handle(messages.CommitDone(step)) == []
        assert machine.committed == committed


def test_workers_that_differ_are_told():
    a = messages.ApplyUpdate(0, 1, (0.1,), [1.0, None], 0, 0)
    assert list(agreed([a, replace(a, scales=[None, 2.0], worker=1)]).scales) == [1.0, 2.0]
    nan = replace(a, scales=[float("nan"), None])  # of a diverged run: all agree
    assert agreed([nan, replace(nan, scales=[float("nan"), None], worker=1)]).scales[0] != 0
    with pytest.raises(LoopError, match="hyperparameters"):
        agreed([a, replace(a, hyper=(0.2,), worker=1)])
    with pytest.raises(LoopError, match="2 and 1 parameters"):
        agreed([a, replace(a, scales=[1.0], worker=1)])
    with pytest.raises(LoopError, match=r"factors, 1.0 and 0.5"):
        agreed([a, replace(a, scales=[0.5, None], worker=1)])


def test_no_write_before_the_commit_of_the_step_before():  # Rule 3
    machine = ServerStateMachine(ServerSpec(1, {0: Resident.NOTHING}, 2, durable=True))
    world = World(machine, 0)
    for step in (1, 2):
        world.feed(messages.Push(0, None, True, True, step))
        world.feed(messages.ApplyUpdate(0, step, (), [1.0], 0))
        world.feed(messages.EndStep(step))
        world.drain()
    assert [type(a).__name__ for a in world.log].count("Write") == 1
    assert messages.Prepared(1, 1) in world.sent and messages.Prepared(1, 2) not in world.sent
    world.feed(messages.CommitDone(1))
    world.drain()
    assert messages.Prepared(1, 2) in world.sent


def test_updates_run_in_the_order_the_next_forward_asks():
    machine = ServerStateMachine(
        ServerSpec(0, dict.fromkeys(range(7), Resident.NOTHING), 1, durable=True)
    )
    world = World(machine, 0)
    for c in range(7):
        world.feed(messages.Push(c, None, True, True, c))
    world.drain()
    # the first takes the only buffer, so nothing else starts before all are asked for
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
    """Answers that end, each worker's at its own pace: `slow` ends one of four. How far each
    got, time by time."""
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
                assert mine[0][1] == ended[worker] - 1, "in the order of asking"
        out.append(dict(ended))
    return out


def test_pulls_are_answered_at_one_pace():
    """Of workers that wait at the same time none gets far ahead; one that waits alone is not
    held up; one that comes later begins where the others are."""
    turns = Turns(2)
    for worker in range(3):
        for i in range(20):
            turns.ask(worker, (worker, i))
    got = answered_order(turns, 1, 20)
    assert all(one[0] - one[1] <= turns.most and one[2] - one[1] <= turns.most for one in got)
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
    assert len([p for p in iter(turns.next, None) if p[0] == 2]) == turns.most, (
        "0 is not there any more"
    )


def _arrive(prefetcher, pulls):
    while pulls:
        pulls = pulls[1:] + prefetcher.arrived(pulls[0].slot)


def _run_sequence(prefetcher, sequence):
    """Plays uses; pulls arrive one use later. Returns how many uses had to wait."""
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


def test_with_room_for_all_nothing_is_fetched_twice():
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
def test_trial_tries_both_ways_and_keeps_bursts_only_where_they_are_clearly_faster(bursts, kept):
    trial, burst, tried = Trial(), False, []
    while not trial.chosen:
        tried.append(burst)
        burst = trial.stepped(burst, Trial.LEAST, 1 / (bursts if burst else 1))
    assert tried == [False, False, True, False, True] and burst is kept
    assert trial.stepped(burst, Trial.LEAST, 100.0) is kept  # for good


def test_trial_waits_for_steps_that_move_something():
    trial = Trial()
    assert (
        not any(trial.stepped(False, Trial.LEAST - 1, 1.0) for _ in range(20)) and not trial.chosen
    )


def test_ledger_commits_once_all_prepared_and_the_blob_is_known():
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


def test_ledger_with_replicas_gives_the_blob_to_all_before_the_commit():
    ledger = CommitStateMachine((1, 2, 4), 0, everywhere=True)
    assert [s for s, _ in ledger.end_step(1)] == [1, 2, 4]
    assert ledger.blob(1, b"x") == []
    # nobody prepares what is not compared
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


def test_what_only_one_worker_has_is_prepared_before_the_others_are_told():
    """Server 9 is that worker's own: it compares nothing and keeps no job's state."""
    ledger = CommitStateMachine((1, 2, 9), 0, everywhere=True, own=9)
    ledger.end_step(1)
    ledger.blob(1, b"x")
    for server_ in (1, 2):
        assert ledger.on_written(messages.Written(server_, 1)) == []
    assert ledger.on_prepared(messages.Prepared(9, 1)) == [(2, messages.Commit(1, b"x"))]
    assert ledger.on_prepared(messages.Prepared(2, 1)) == [(1, messages.Commit(1, b"x"))]


def test_two_chunks_whose_differences_cancel_are_found():  # Rule 6
    """The plain sums are the same, the weighted ones are not."""
    ledger = CommitStateMachine((0, 1), 0, everywhere=True)
    ledger.end_step(1)
    ledger.blob(1, b"x")
    for server_, (second, third) in ((0, (10, 20)), (1, (20, 10))):
        sums = added(added((0, 0), 2, second), 3, third)
        assert ledger.on_written(messages.Written(server_, 1, ((0, *sums),))) == []
    assert ledger.diverged is not None and ledger.diverged.chunk([2, 3]) is None


@pytest.mark.parametrize("bad", [(), (5,), (2, 7)])
def test_a_step_that_two_servers_wrote_differently_is_not_committed(bad):  # Rule 6
    """Three servers; the chunks of owner 1 are held by 1 and 2. One that differs is named, of
    several it is said."""
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


def test_a_server_says_what_it_wrote_before_it_prepares():
    """The sum over its chunks, of each owner, in whatever order they were updated."""
    said = []
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
        assert len(written) == 1, "once, however long the step waits"
        said += written
        assert [a.step for a in world.log if isinstance(a, messages.Prepare)] == [1]
    first = added((0, 0), 0, 1000)
    second = added(added((0, 0), 1, 1001), 2, 1002)
    assert set(said) == {messages.Written(1, 1, ((0, *first), (1, *second)))}


class Replicas:
    """Servers with real state machines and workers with real ledgers; records are what a disk would
    hold. A step's contents are those before it and (session, step), so that contents of two
    histories never look alike. `own`: each worker has a part that only it knows, server n + its
    number."""

    WORKERS = 2

    def __init__(self, n, seed, own=False):
        self.n, self.random, self.own = n, random.Random(seed), own
        self.disks = [{} for _ in range(n)]  # step -> (contents, blobs); the two newest
        self.disks += [{0: ((), ())} for _ in range(self.WORKERS * own)]
        self.known = [()] * n  # the history that a server has
        self.sessions = 0
        self.told = 0  # the last step that a worker knows to be committed
        self.contents = {}  # of that step
        self.away, self.stale = None, None  # who is dead; who has missed steps

    def start(self, alive, events):
        """A session of `alive`, which ends after `events` events; every one of them is a kill
        point. True: it ran."""
        # worker 0 saw it die and told the others
        without = () if self.stale is None else (self.stale,)
        found = {
            i: ServerHoldings(max(self.disks[i], default=-1), self.known[i], without=without)
            for i in alive
        }
        got = Histories(
            found,
            [f"server {i}" for i in range(self.n)],
            {(i, (i + 1) % self.n) for i in range(self.n)},
        ).resume()
        if not isinstance(got, Resume):
            assert not self.told
            got = Resume(0, tuple(alive), ())
            for i in alive:
                self.disks[i] = {0: ((), None)}
        step, members, number = got.step, got.members, self.sessions
        self.sessions += 1
        records = [self.disks[i].get(step) for i in members]
        assert all(r == records[0] and r is not None for r in records), "members differ"
        assert step >= self.told, f"step {self.told} was committed, {step} is gone on from"
        if step == self.told and self.contents:
            assert records[0] == self.contents, "another history"
        for i in members:
            if (events := events - 1) < 0:
                return False
            self.disks[i] = {s: r for s, r in self.disks[i].items() if s <= step}
        for i in alive:
            if i not in members:
                if (events := events - 1) < 0:
                    return False
                self.disks[i], self.known[i] = {step: records[0]}, got.history
        history = (*got.history, HistoryLink(f"session {number}", step, tuple(sorted(alive))))
        for i in alive:  # once all have what the link says
            if (events := events - 1) < 0:
                return False
            self.known[i] = history
        for i in range(self.n, len(self.disks)):
            assert self.disks[i][step][0] == records[0][0], (
                "what only one worker has is of another step"
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
        lanes = {(i, w): [] for i in alive for w in range(self.WORKERS)}  # each in order, both ways
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
                    and not self.said[w]
                ):
                    self.said[w], out = True, ledger.blob(ledger.ended, (number, ledger.ended, w))
                elif ledger.committed >= ledger.ended - 1:
                    self.said[w], out = False, ledger.end_step(ledger.ended + 1)
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
                if done and message.step > self.told:
                    self.told, self.contents = message.step, self.disks[alive[0]][message.step]
                for to, what in out:
                    lanes[to, w].append(
                        what if done else replace(what, worker=0 if to in own else w)
                    )

    def life(self):
        """Sessions in which one server after the other dies and comes back; at most one at a
        time is dead or stale."""
        self.said = [True] * self.WORKERS
        for _ in range(12):
            self.said = [True] * self.WORKERS
            alive = [i for i in range(self.n) if i != self.away]
            self.start(
                alive, self.random.randrange(8 if self.told and self.random.random() < 0.3 else 140)
            )
            fate, may_die = (
                self.random.random(),
                self.random.randrange(self.n) if self.stale is None else self.stale,
            )
            if fate < 0.3:
                self.away = None
            elif fate < 0.8 and (self.told or self.away is not None):
                self.away = self.stale = may_die
                if self.random.random() < 0.7:
                    self.disks[may_die], self.known[may_die] = {}, ()
        return self.told


@pytest.mark.parametrize(("n", "own"), [(2, False), (3, False), (2, True)])
def test_no_committed_step_is_lost_with_one_server_whatever_the_moment(n, own):  # Rule 3
    """A server dies (with or without what it held) between any two events of a session or of its
    start. What only one worker has is at the step that the others go on from."""
    assert sum(Replicas(n, seed, own).life() for seed in range(200)) > (50 if own else 200)


def test_who_is_waited_for_is_known():
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


def test_fewer_slots_before_the_first_pull():
    prefetcher = Prefetcher(6, range(1, 7))
    prefetcher.shrink(2)
    assert _run_sequence(prefetcher, [*range(1, 7), *range(6, 0, -1)]) >= 1
    assert len(prefetcher.slots) == 2
