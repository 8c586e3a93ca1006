"""The worker's state machine, driven in random orders against slow servers; its messages are
checked against counts that the test keeps itself."""

import random
from collections import Counter, defaultdict, deque

import pytest

from roadtrain.chunks import SEGMENT, ChunkTable, ParamSpec
from roadtrain.errors import LoopError
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol import worker as w
from roadtrain.servers.protocol.block_state import BlockState, GradPhase
from roadtrain.servers.protocol.blocks import bit_of, chunks_in
from roadtrain.servers.protocol.worker import WorkerSetup, WorkerStateMachine

ROOT, ROOT_GRAD = "root", "gradient of the root"


def a_table(blocks=5):
    """A root block, a block of one chunk, blocks of two chunks, and one with a frozen chunk."""
    specs = [("root", [ParamSpec("r", (8,), "fp32", True, 0)])]
    for i in range(1, blocks):
        rows = [ParamSpec(f"w{i}", (2 if i > 1 else 1, SEGMENT), "fp32", True, 0)]
        if i == 3:
            rows.append(ParamSpec("frozen", (16,), "fp32", False, -1))
        specs.append((f"b{i}", rows))
    return ChunkTable.build(specs, SEGMENT)


def a_machine(*, servers=(0, 1), replicas=1, slots=3, buffers=4, committed=0, **options):
    table = a_table()
    owners = [tuple((c.id + i) % len(servers) for i in range(replicas)) for c in table.chunks]
    setup = WorkerSetup(
        table,
        owners,
        servers,
        committed,
        range(1, len(table.blocks)),
        slots,
        buffers,
        replicas=replicas,
        **options,
    )
    return WorkerStateMachine(setup)


def version_of(machine, chunk):
    """The version of a chunk after all updates that have begun."""
    block = machine.table.blocks[machine.table.chunks[chunk].block]
    versions = machine.blocks[block.index].versions
    [version] = [v for (v, _), chunks in versions.items() if chunks & bit_of(block, chunk)]
    return version


class SlowServer:
    """A server that takes its messages in order and updates, answers and commits when the test lets
    it. Gradients of other workers have always arrived already."""

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.inbox, self.outbox, self.updates = deque(), deque(), deque()
        self.version = Counter()
        self.pulls, self.reading, self.blobs = [], defaultdict(list), {}
        self.over = Counter()  # block -> its chunks that are updated or discarded, a bitmap
        self.ended, self.done = [], 0

    def take_message(self):
        message = self.inbox.popleft()
        several = self.world.machine.setup.workers > 1
        match message:
            case messages.BlockPull():
                self.pulls.append(message)
            case messages.BlockPush(block, _, _, _, keep, ticket):
                if not several:
                    self.report_sums(block)
                if keep:
                    self.reading[block].append(ticket)
                else:
                    self.outbox.append(messages.BufferFree(ticket))
                if message.update is not None:
                    self.inbox.appendleft(message.update)
            case messages.BlockClose(block):
                self.report_sums(block)
            case messages.BlockDiscard(block, chunks):
                self.free(block, chunks)
            case messages.BlockUpdate(block, _, step):
                assert step not in self.ended, "a message of a step follows its end"
                if several and (block, step) not in self.world.closed:
                    self.report_sums(block)
                self.updates.append(message)
            case messages.EndStep(step):
                self.ended.append(step)
                self.updates.append(message)
            case messages.Commit(step, blob):
                self.blobs[step] = blob
            case messages.CommitDone():
                pass

    def report_sums(self, block):
        self.outbox.append(messages.BlockAccumulated(self.number, block, (1.0,)))

    def free(self, block, chunks):
        """Free the pushes of a block once all of its chunks are updated or discarded."""
        self.over[block] |= chunks
        if self.over[block] == self.world.machine.layouts[block].holders[self.number]:
            self.over[block] = 0
            self.outbox.extend(
                messages.BufferFree(ticket) for ticket in self.reading.pop(block, ())
            )

    def work(self):
        """Run an update or the end of a step."""
        match self.updates[0]:
            case messages.BlockUpdate(block, chunks):
                self.version.update(self.world.numbers(block, chunks))
                self.free(block, chunks)
            case messages.EndStep(step):
                commit, first = self.world.machine.commit, self.number == 0
                if commit.everywhere and (self.number, step) not in self.world.wrote:
                    self.world.wrote.add((self.number, step))
                    self.outbox.append(messages.Written(self.number, step, ()))
                if (first or commit.everywhere) and step not in self.blobs:
                    return
                if first:
                    self.outbox.append(messages.CommitDone(step))
                else:
                    self.outbox.append(messages.Prepared(self.number, step))
        self.updates.popleft()

    def answer(self):
        ready = [
            p
            for p in self.pulls
            if all(p.version <= self.version[c] for c in self.world.numbers(p.block, p.chunks))
        ]
        if ready:
            pull = self.world.random.choice(ready)
            self.pulls.remove(pull)
            self.outbox.append(messages.BlockPulled(pull.ticket))


class World:
    """Carries out actions and keeps its own counts of messages."""

    def __init__(self, machine, seed):
        self.machine, self.random = machine, random.Random(seed)
        self.servers = {n: SlowServer(self, n) for n in machine.setup.servers}
        self.requested = {}  # (target, chunk) -> version requested
        self.coming = defaultdict(set)  # target -> tickets
        self.target_of, self.copied = {}, []
        self.updated = defaultdict(set)  # chunk -> steps
        self.closed, self.wrote = set(), set()
        self.read_by = {}  # ticket -> (buffer, kept)
        self.sums_due = Counter()  # block -> sums that pushes or closes will bring
        self.prepared, self.blobs = defaultdict(set), set()

    def numbers(self, block, bits):
        return [chunk.id for chunk in chunks_in(self.machine.table.blocks[block], bits)]

    def feed(self, actions):
        for action in actions:
            match action:
                case w.SendTo(message, servers):
                    for number in servers:
                        self.say(number, message)
                case w.StartPulls(target, pulls):
                    assert not self.coming[target], "a buffer is filled twice at once"
                    for server, pull in pulls:
                        for chunk in self.numbers(pull.block, pull.chunks):
                            assert self.machine.owners[chunk][0] == server
                            self.requested[target, chunk] = pull.version
                        self.coming[target].add(pull.ticket)
                        self.target_of[pull.ticket] = target
                        self.servers[server].inbox.append(pull)
                case w.CopyIn(target):
                    assert not self.coming[target], "the buffer is not complete"
                    self.copied.append(target)
        self.machine.check()

    def say(self, number, message):
        several = self.machine.setup.workers > 1
        if (chunks := getattr(message, "chunks", None)) is not None:
            held = [c for c in self.numbers(message.block, chunks) if number in self.owners(c)]
            assert held == self.numbers(message.block, chunks) and held
        match message:
            case messages.BlockPush(block, _, grad):
                self.read_by[message.ticket] = grad, message.keep
                self.sums_due[block] += not several
                if message.update is not None:
                    self.updates(message.update, several)
            case messages.BlockClose(block, _, step):
                self.closed.add((block, step))
                self.sums_due[block] += 1
            case messages.BlockDiscard(block):
                assert not self.sums_due[block], "a gradient that is still being held is dropped"
            case messages.BlockUpdate():
                self.updates(message, several)
            case messages.Commit(step):
                assert step in self.blobs
                others = set(self.servers) - {0}
                assert number or self.prepared[step] == others, "server 0 must commit last"
        self.servers[number].inbox.append(message)

    def updates(self, message, several):
        block, step = message.block, message.step
        assert step == self.machine.commit.ended + 1
        assert several or any(scale is not None for scale in message.scales)
        for chunk in self.numbers(block, message.chunks):
            self.updated[chunk].add(step)
        if several and (block, step) not in self.closed:
            self.sums_due[block] += 1

    def owners(self, chunk):
        return self.machine.owners[chunk]

    def run_one(self):
        """Let a random pending action happen."""
        todo = []
        for server in self.servers.values():
            todo += [server.take_message] * bool(server.inbox) + [server.work] * bool(
                server.updates
            )
            todo += [server.answer] * bool(server.pulls)
            todo += [lambda server=server: self.deliver(server)] * bool(server.outbox)
        if todo:
            self.random.choice(todo)()

    def deliver(self, server):
        message = server.outbox.popleft()
        match message:
            case messages.BlockPulled(ticket):
                self.coming[self.target_of.pop(ticket)].discard(ticket)
            case messages.BlockAccumulated(_, block):
                self.sums_due[block] -= 1
            case messages.BufferFree(ticket):
                self.read_by.pop(ticket, None)
            case messages.Prepared(number, step):
                self.prepared[step].add(number)
        self.feed(self.machine.handle(message))

    def until(self, ready):
        for _ in range(20000):
            if ready():
                return
            self.run_one()
        raise AssertionError("no pending action is left")

    # the parts of a step

    def count(self, chunk, last):
        """Number of updates of `chunk` in steps up to `last`."""
        return sum(step <= last for step in self.updated[chunk])

    def check_versions(self, target, block, step):
        """Rule 1: a step computes with the version that its staleness allows, never an older
        one."""
        staleness = self.machine.setup.staleness
        for chunk in self.machine.table.blocks[block].chunks:
            version = self.requested[target, chunk.id]
            if staleness > 1:
                assert version >= self.count(chunk.id, step - 1) - staleness
            else:
                assert version == self.count(chunk.id, step - 1 - staleness)

    def compute(self, block, step):
        machine = self.machine
        self.feed(self.machine.fetch_block(block))
        self.until(lambda: machine.slot_of(block) is not None)
        self.check_versions(machine.use_block(block)[0], block, step)
        return lambda: self.feed(self.machine.release_block(block))

    def fetch_root(self, step):
        if self.machine.root_is_old:
            self.feed(self.machine.fetch_into(0, ROOT))
            self.until(lambda: not self.machine.is_coming(ROOT))
        self.check_versions(ROOT, 0, step)

    def push(self, block, *, keep_always=False):
        machine, buffer = self.machine, ROOT_GRAD
        if block:
            self.until(lambda: machine.free)
            buffer = machine.take_buffer()
        else:
            self.until(lambda: not machine.is_read(buffer))
        read = {b for b, _ in self.read_by.values()}
        assert buffer not in read, "a server still reads the buffer"
        machine.grad_ready(block, self.params(block))
        return lambda updates: self.send(block, buffer, updates, keep_always)

    def params(self, block):
        return [s.param for c in self.machine.table.blocks[block].chunks for s in c.spans]

    def send(self, block, buffer, updates, keep_always):
        self.feed(
            self.machine.send_dense(block, buffer, buffer, True, updates, keep_always=keep_always)
        )
        kept = {b for b, keep in self.read_by.values() if keep and b != ROOT_GRAD}
        assert keep_always or len(kept) <= len(self.machine.pool) - 2

    def drop(self, block):
        self.until(lambda: self.machine.sums_here(block))
        self.feed(self.machine.drop_grad(block))

    def update(self, block, step, skip=False):
        scale = (lambda param: None) if skip else (lambda param: 1.0)
        self.feed(self.machine.begin_update(block, step, {0: (0.1,)}, scale))
        self.end_update(block)

    def end_update(self, block):
        if self.machine.blocks[block].unchanged():
            self.until(lambda: self.machine.sums_here(block))
        self.feed(self.machine.end_update(block))

    def end(self, step):
        self.until(lambda: self.machine.may_end(step))
        self.feed(self.machine.end_step(step))
        behind = step - self.machine.commit.committed
        assert behind <= max(2, self.machine.setup.staleness)  # Rule 4
        self.blobs.add(step)
        self.feed(self.machine.job_state(step, b""))

    def drain(self):
        sealed = self.machine.commit.ended
        self.until(lambda: self.machine.commit.committed == sealed)
        self.until(lambda: not any(s.inbox or s.outbox or s.updates for s in self.servers.values()))


CASES = {
    "plain": {},
    "three servers": {"servers": (0, 1, 2)},
    "delayed": {"staleness": 1},
    "three late": {"staleness": 3},
    "several workers": {"workers": 3},
    "several delayed": {"workers": 2, "staleness": 1},
    "replicas": {"servers": (0, 1, 2), "replicas": 2},
    "replicas of several": {"replicas": 2, "workers": 2},
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_steps_complete_in_any_order_of_events(case, seed):  # Rules 1, 3, 4
    rng = random.Random(seed)
    machine = a_machine(slots=rng.choice([2, 3, 5]), buffers=rng.choice([3, 4, 6]), **CASES[case])
    world, blocks = World(machine, seed), range(1, len(machine.table.blocks))
    several, eager, n = machine.setup.workers > 1, rng.random() < 0.5, 7
    for step in range(1, n + 1):
        world.fetch_root(step)
        for block in blocks:
            world.compute(block, step)()
        for block in reversed(blocks):
            release = world.compute(block, step)
            if rng.random() < 0.85:
                send, updates = world.push(block, keep_always=eager), ()
                if eager:
                    updates = machine.begin_update(block, step, {0: (0.1,)}, lambda param: 1.0)
                send(updates)
                if eager:
                    world.end_update(block)
            release()
            for _ in range(rng.randrange(8)):
                world.run_one()
        world.push(0, keep_always=eager)(())
        for block in (0, *blocks):
            state = machine.blocks[block]
            if state.updated:
                with pytest.raises(LoopError, match="after its update had begun"):
                    machine.check_takes_grad(block)
                continue
            if rng.random() < 0.4 and machine.is_open(block):  # as clipping does
                world.feed(machine.close_grad(block))
                world.until(lambda b=block: machine.sums_here(b))
            if rng.random() < 0.15 and state.held and not several:
                world.drop(block)
            if state.held or several:
                world.update(block, step, skip=rng.random() < 0.1)
        world.end(step)
    world.drain()
    machine.check()
    assert machine.commit.committed == n and not world.read_by
    assert sorted(machine.free) == list(machine.pool) and not machine.kept
    assert not +world.sums_due and all(machine.sums_here(b) for b in (0, *blocks))
    trainable = [c.id for c in machine.table.chunks if c.trainable]
    assert all(version_of(machine, c) == len(world.updated[c]) for c in trainable)
    assert not several or all(len(world.updated[c]) == n for c in trainable)


@pytest.mark.parametrize(("staleness", "most"), [(0, 2), (1, 2), (2, 2), (4, 4)])
def test_the_number_of_uncommitted_steps_is_bounded(staleness, most):  # Rule 4
    """Without any commit only so many steps can end."""
    machine = a_machine(staleness=staleness, committed=10)
    for step in range(11, 11 + most):
        assert machine.may_end(step)
        machine.end_step(step)
    assert not machine.may_end(11 + most)
    assert machine.committed_before_end(11 + most) == 11


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_sums_are_no_more_steps_behind_than_updates(staleness):
    """Commits arrive, but the sums of block 1 never do."""
    machine = a_machine(staleness=staleness)
    for step in range(1, staleness + 2):
        assert machine.may_end(step)
        machine.grad_ready(1, [1])
        machine.begin_update(1, step, {0: ()}, lambda param: 1.0)
        machine.end_update(1)
        machine.end_step(step)
        machine.commit.committed = step
    assert not machine.may_end(staleness + 2)


def test_all_replicas_report_their_sums_before_a_step_ends():
    """Two servers report at their own pace: only sums of a single step are in transit."""
    machine = a_machine(staleness=2, replicas=2)
    machine.grad_ready(1, [1])
    machine.begin_update(1, 1, {0: ()}, lambda param: 1.0)
    machine.end_update(1)
    for server in (0, 1):
        assert not machine.may_end(1)
        machine.handle(messages.BlockAccumulated(server, 1, (1.0,)))
    assert machine.may_end(1) and machine.sums_behind == 0


def test_two_gradient_buffers_are_never_kept():
    """When updates wait for step(), servers keep the gradients in all other buffers."""
    machine, kept = a_machine(buffers=4), []
    for _ in range(4):
        buffer = machine.take_buffer()
        [sent] = machine.send_dense(1, buffer, None, True)
        kept.append(sent.message.keep)
    assert kept == [True, True, False, False] and not machine.free


def test_a_buffer_is_free_once_every_server_has_read_all_of_it():
    machine = a_machine(replicas=2, buffers=3)
    buffer = machine.take_buffer()
    sends = machine.send_dense(2, buffer, None, True, keep_always=True)
    assert [(say.servers, say.message.chunks) for say in sends] == [((0,), 3), ((1,), 3)]
    for sent in sends:
        assert machine.is_read(buffer) and buffer not in machine.free
        machine.handle(messages.BufferFree(sent.message.ticket))
    assert not machine.is_read(buffer) and machine.free[-1] == buffer


@pytest.mark.parametrize(
    ("staleness", "versions"),
    [
        (0, [0, 1, 2, 2]),
        (1, [0, 0, 1, 2]),
        (2, [-2, -1, 0, 0]),
        (3, [-3, -2, -1, -1]),
    ],
)
def test_a_step_requests_the_version_of_its_staleness(staleness, versions):  # Rule 1
    """Updates in the first two steps, none in the third."""
    machine, found = a_machine(staleness=staleness), []
    for step in range(1, 5):
        [pulls] = machine.fetch_into(1, "here")
        found += [pull.version for _, pull in pulls.pulls]
        arrive(machine, [pulls])
        machine.commit.committed = step - 1
        if step < 3:
            machine.grad_ready(1, [1])
            report(machine, 1)
            machine.begin_update(1, step, {0: ()}, lambda param: 1.0)
            machine.end_update(1)
        machine.end_step(step)
    assert found == versions


def test_states_of_a_gradient():
    """A gradient is closed once and is refused after its update has begun."""
    machine = a_machine(workers=2)
    machine.grad_ready(1, [1])
    assert machine.is_open(1) and machine.blocks[1].held
    [close] = machine.close_grad(1)
    assert isinstance(close.message, messages.BlockClose) and not machine.is_open(1)
    assert not machine.sums_here(1)
    [update] = machine.begin_update(1, 1, {0: ()}, lambda param: 1.0)
    assert list(update.message.scales) == [0.5], "the mean of two workers"
    assert not machine.is_open(1) and machine.blocks[1].updated
    [update, *_] = machine.begin_update(2, 1, {0: ()}, lambda param: 1.0)
    assert list(update.message.scales) == [None], "this worker has no gradient for it"
    with pytest.raises(LoopError, match="after its update had begun"):
        machine.grad_ready(1, [1])
    with pytest.raises(AssertionError):
        machine.begin_update(1, 1, {0: ()}, lambda param: 1.0)
    with pytest.raises(AssertionError):
        machine.drop_grad(1)


def test_residuals_belong_to_a_single_worker():
    """Their sums are not those of the mean, and come from the push itself."""
    machine = a_machine(workers=4, residual_block={1: 2})
    machine.grad_ready(2, [2])
    assert not machine.is_open(2) and machine.is_open(1)
    assert machine.workers_of(2) == 1 and not machine.sums_here(2)
    updates = machine.begin_update(2, 1, {0: ()}, lambda param: 1.0)
    assert [(say.message.chunks, list(say.message.scales)) for say in updates] == [
        (1, [1.0]),
        (2, [1.0]),
    ]


def test_a_frozen_chunk_is_requested_at_version_0():  # Rule 1
    """A session resumes with staleness 1: the last step did not update the frozen chunk."""
    machine = a_machine(staleness=1, committed=5)
    [pulls] = machine.fetch_into(3, "here")
    requested = {(server, pull.chunks): pull.version for server, pull in pulls.pulls}
    frozen = machine.layouts[3].frozen
    assert requested == {(0, 1 << 0): -1, (1, 1 << 1): -1, (0, frozen): 0}


def test_a_gradient_with_its_own_memory_takes_none_of_the_pool():
    """The root block's gradient, and a gradient pushed again, always stay in their own memory."""
    machine = a_machine(buffers=3)

    def pushed(buffer, fresh):
        [sent] = machine.send_dense(1, buffer, None, fresh)
        return sent.message.keep

    assert pushed(ROOT_GRAD, True) and not machine.kept
    for fresh, kept in ((False, 0), (True, 1)):
        buffer = machine.take_buffer()
        assert pushed(buffer, fresh) and len(machine.kept) == kept
    machine.take_buffer()
    assert not pushed(0, True) and pushed(ROOT_GRAD, True)
    machine.check()


def test_a_dropped_gradient_leaves_nothing():
    """Neither its sums nor its parameters count for the next gradient."""
    machine = a_machine()
    machine.grad_ready(1, [1])
    report(machine, 1)
    machine.current.add(1)
    state = machine.blocks[1]
    assert state.sums.values == {1: (1.0,)}
    machine.drop_grad(1)
    assert not (state.sums.values or state.present or machine.current or state.held)


@pytest.mark.parametrize(("staleness", "versions"), [(0, [1, 1, 1]), (1, [1, 2, 2])])
def test_a_block_is_fetched_again_when_its_values_change(staleness, versions):
    """Only the first step updates; with staleness 1 the update is visible a step later."""
    machine, found = a_machine(staleness=staleness), []
    for step in (1, 2, 3):
        if step == 1:
            machine.grad_ready(1, [1])
            report(machine, 1)
            machine.begin_update(1, step, {0: ()}, lambda param: 1.0)
            machine.end_update(1)
        machine.end_step(step)
        machine.commit.committed = step
        found.append(machine.blocks[1].version)
    assert found == versions


def test_a_slot_records_the_version_it_holds():
    machine = a_machine()
    machine.reset(3)
    machine.fetch_block(1)
    machine.prefetch.arrived(machine.prefetch.where[1])
    _, version = machine.use_block(1)
    assert version == machine.blocks[1].version == 1


def arrive(machine, actions):
    """Complete all pulls, including those started by completed ones."""
    for action in actions:
        if isinstance(action, w.StartPulls):
            for _, pull in action.pulls:
                arrive(machine, machine.handle(messages.BlockPulled(pull.ticket)))


def report(machine, block):
    """Deliver the sums of a block's gradient."""
    for server in machine.layouts[block].holders:
        machine.handle(messages.BlockAccumulated(server, block, (1.0,)))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_reset_machine_requests_the_versions_of_a_new_session(staleness):
    """After two steps the machine is reset; its pulls equal those of a machine that starts
    there."""
    machine = a_machine(staleness=staleness)
    for step in (1, 2):
        machine.grad_ready(1, [1])
        report(machine, 1)
        machine.begin_update(1, step, {0: ()}, lambda param: 1.0)
        machine.end_update(1)
        arrive(machine, machine.end_step(step))
        machine.commit.committed = step
    machine.current.add(0)
    machine.reset(7)
    machine.check()
    fresh = a_machine(staleness=staleness, committed=7)

    def asks(it):
        versions = []
        for block in (1, 2, 3):
            [pulls] = it.fetch_into(block, f"block {block}")
            versions.append([(pull.chunks, pull.version) for _, pull in pulls.pulls])
        state = [(s.updated_in, s.changed_in, s.phase) for s in it.blocks]
        return versions, [s.versions for s in it.blocks], state, it.current, it.open_step

    assert asks(machine) == asks(fresh)


def test_the_end_of_a_step_opens_every_gradient_again():
    """Held gradients stay held, none is closed or updated, and complete sums are released."""
    ends = {
        GradPhase.EMPTY: GradPhase.EMPTY,
        GradPhase.HELD: GradPhase.HELD,
        GradPhase.EMPTY_CLOSED: GradPhase.EMPTY,
        GradPhase.HELD_CLOSED: GradPhase.HELD,
        GradPhase.UPDATED: GradPhase.EMPTY,
    }
    for before, after in ends.items():
        state = BlockState(0, 0, phase=before)
        for _ in range(5):
            last = state.sums
            state.end_step()
            assert state.sums is not last and [*state.ended] == [last]
        assert state.phase is after


def test_changed_contents_are_fetched_again():
    machine = a_machine()
    arrive(machine, machine.fetch_block(1))
    arrive(machine, machine.fetch_into(0, ROOT))
    assert machine.slot_of(1) is not None and not machine.root_is_old
    machine.reset(7)
    assert machine.slot_of(1) is None and machine.root_is_old
    assert machine.commit.committed == 7 and machine.open_step == 8
