"""The state machine of a fan-in's end in a scripted world: workers, switches and the server act in
random order; events for the server are compared with a plain model."""

import random
from collections import Counter

import pytest

from roadtrain.errors import LoopError, LostError
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.intermediary import Give, Up
from roadtrain.switch.protocol.chunk_queue import Announce
from roadtrain.switch.protocol.fan_in import (
    ALONE_S,
    Broadcast,
    ExponentsArrived,
    FanInStateMachine,
    GradientArrived,
    Grant,
    PushRound,
    SendMaxima,
    Tick,
)


def packets_of(chunk):
    return 1 + chunk % 2, 3 + chunk


class World:
    """Plays the switches, the links and the server. up: Events for the server, with sums as
    ("sum", chunk, fresh, contributions)."""

    def __init__(self, workers, *, buffers=3, sums=2, seed=0):
        self.machine = FanInStateMachine(workers, buffers, sums, packets_of, 0.0)
        self.workers, self.random = workers, random.Random(seed)
        self.todo = []  # slow actions, done in any order
        self.up, self.answered, self.filled = [], [], {}
        self.announced = {}  # (worker, chunk) -> values not yet granted, in order
        self.sums, self.buffers, self.numbers = {}, {}, []
        self.now = 0.0

    def announce(self, chunk, fresh, worker, value):
        self.announced.setdefault((worker, chunk), []).append(value)
        self.feed(Announce(chunk, fresh, worker))

    def feed(self, event):
        for action in self.machine.handle(event):
            self.carry_out(action)
        self.machine.check()

    def carry_out(self, action):
        match action:
            case Up(messages.Pull() as pull):
                self.todo.append(pull)
                self.up.append(pull)
            case Up(message):
                self.up.append(message)
            case Grant(chunk, number, first, announced):
                exponents, _ = packets_of(chunk)
                self.numbers.append((first, exponents))
                self.sums[chunk, number] = [
                    self.announced[worker, chunk].pop(0) for worker in sorted(announced)
                ]
                self.todo.append(ExponentsArrived(chunk, number))
            case SendMaxima(chunk, number, first, buffer):
                _, gradient = packets_of(chunk)
                self.numbers.append((first, gradient))
                assert buffer not in self.buffers, "a sum buffer is used twice"
                self.buffers[buffer] = chunk, number
                self.todo.append(GradientArrived(chunk, number))
            case PushRound(chunk, number, buffer, fresh):
                assert self.buffers[buffer] == (chunk, number)
                self.up.append(("sum", chunk, fresh, self.sums.pop((chunk, number))))
                self.todo.append(action)
            case Give() | Broadcast():
                self.todo.append(action)

    def run_one(self):
        match self.todo.pop(self.random.randrange(len(self.todo))):
            case messages.Pull(chunk, version, into, ticket):
                assert self.machine.buffer_for(ticket, chunk) == into
                self.filled[into] = (chunk, version)
                self.feed(messages.Pulled(ticket, chunk))
            case Give(pull, buffer) as give:
                assert self.filled[buffer] == (pull.chunk, pull.version)
                self.answered.append(pull)
                self.feed(messages.Done(give))
            case Broadcast(pulls, buffer) as broadcast:
                assert [pull.worker for pull in pulls] == list(range(self.workers))
                assert {self.filled[buffer]} == {(pull.chunk, pull.version) for pull in pulls}
                self.answered += pulls
                self.feed(messages.Done(broadcast))
            case PushRound() as push:
                del self.buffers[push.buffer]
                self.feed(messages.Done(push))
            case event:
                self.feed(event)

    def run_all(self):
        while self.todo:
            self.run_one()

    def tick(self, seconds):
        self.now += seconds
        self.feed(Tick(self.now))

    def about(self, chunk):
        """Events for the server about the gradient of a chunk."""
        return [
            m
            for m in self.up
            if (m[1] if isinstance(m, tuple) else getattr(m, "chunk", None)) == chunk
            and not isinstance(m, messages.Pull)
        ]

    def at_the_end(self):
        """Check that nothing was lost: every buffer is free and every number was used once, in
        order."""
        assert not (self.todo or self.sums or self.buffers or self.machine.in_step())
        assert not (any(self.announced.values()) or self.machine.rounds or self.machine.order)
        assert not (self.machine.queue or self.machine.alone or self.machine.late())
        following = 0
        for first, count in self.numbers:
            assert first == following
            following += count
        assert self.machine.next_number == following


def update(chunk, step, worker, has=True):
    return messages.ApplyUpdate(chunk, step, (0.1,), [1.0 if has else None], 0, worker)


class Script:
    """A worker that may run ahead. plan: (worker, step, chunk) -> number of gradients. dropped:
    Steps whose gradients all workers drop and push again."""

    def __init__(self, world, worker, plan, dropped, closes):
        self.world, self.worker, self.plan = world, worker, plan
        self.dropped, self.closes = dropped, closes

    def run(self, steps, chunks):
        for step in range(1, steps + 1):
            for chunk in chunks:
                yield from self.gradients(step, chunk)
            for chunk in chunks:
                self.world.feed(update(chunk, step, self.worker))
                yield
            self.world.feed(messages.EndStep(step, self.worker))
            self.world.feed(messages.Commit(step, self.worker, self.worker))

    def gradients(self, step, chunk):
        many = self.plan[self.worker, step, chunk]
        if (step, chunk) in self.dropped:
            for i in range(many):
                self.world.announce(chunk, i == 0, self.worker, ("dropped", self.worker, step, i))
                yield
            if self.closes and self.world.random.random() < 0.5:
                self.world.feed(messages.Close(chunk, step, self.worker))
                yield
            if many:  # otherwise it has nothing to drop
                self.world.feed(messages.DiscardGrad(chunk, self.worker))
                yield
        for i in range(many):
            self.world.announce(chunk, i == 0, self.worker, (self.worker, step, i))
            yield
        if self.closes:
            self.world.feed(messages.Close(chunk, step, self.worker))
            yield


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.slow
def test_the_server_gets_the_events_of_the_plain_model(workers, seed):  # Rule 1, Rule 5
    """0 to 3 gradients per worker and step; all workers drop some of them; time may pass."""
    rng, steps, chunks = random.Random(seed), 3, range(3)
    world = World(workers, sums=rng.choice([1, 2, 3]), seed=seed)
    plan = {
        (w, s, c): rng.choice([0, 1, 1, 1, 2, 3])
        for w in range(workers)
        for s in range(1, steps + 1)
        for c in chunks
    }
    dropped = {(s, c) for s in range(1, steps + 1) for c in chunks if rng.random() < 0.2}
    closes, hurried = rng.random() < 0.5, rng.random() < 0.3
    scripts = [Script(world, w, plan, dropped, closes).run(steps, chunks) for w in range(workers)]
    while scripts or world.todo:
        if world.todo and (not scripts or rng.random() < 0.5):
            world.run_one()
        else:
            script = rng.choice(scripts)
            if next(script, "over") == "over":
                scripts.remove(script)
        if hurried and rng.random() < 0.1:
            world.tick(ALONE_S)
    world.at_the_end()
    for chunk in chunks:
        messages_up = iter(world.about(chunk))
        for step in range(1, steps + 1):
            expected = Counter(
                (w, step, i) for w in range(workers) for i in range(plan[w, step, chunk])
            )
            found, fresh = Counter(), []
            for message in messages_up:
                match message:
                    case ("sum", _, is_fresh, values):
                        fresh.append(is_fresh)
                        found.update(values)
                    case messages.DiscardGrad():
                        assert all(value[0] == "dropped" for value in found)
                        found, fresh = Counter(), []
                    case messages.ApplyUpdate():
                        assert message.step == step
                        break
            assert found == expected
            assert fresh == [True] * bool(fresh) + [False] * (len(fresh) - 1)
            if not hurried:
                most = max(plan[w, step, chunk] for w in range(workers))
                assert len(fresh) == most, "the r-th gradients of all workers share a round"
    ends = [m.step for m in world.up if isinstance(m, messages.EndStep)]
    assert ends == list(range(1, steps + 1))
    blobs = [m.blob for m in world.up if isinstance(m, messages.Commit)]
    assert blobs == [list(range(workers))] * steps


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("buffers", [1, 3, 40])
@pytest.mark.slow
def test_every_pull_is_answered_once_and_a_broadcast_answers_one_pull_per_worker(
    workers, seed, buffers
):  # Rule 4, Rule 5
    """Each worker pulls each version of a chunk twice, and may be a whole step ahead."""
    rng, world, requested = random.Random(seed), World(workers, buffers=buffers, seed=seed), []

    def pulls_of(worker):
        for version in range(3):
            for i, chunk in enumerate([*range(5), *reversed(range(5))]):
                pull = messages.Pull(chunk, version, None, 100 * version + i, worker)
                requested.append(pull)
                world.feed(pull)
                yield

    scripts = [pulls_of(worker) for worker in range(workers)]
    while scripts or world.todo:
        if world.todo and (not scripts or rng.random() < 0.5):
            world.run_one()
        else:
            script = rng.choice(scripts)
            if next(script, "over") == "over":
                scripts.remove(script)
    assert Counter(map(id, world.answered)) == Counter(map(id, requested))
    assert world.now == 0.0, "a pull was answered alone"
    world.at_the_end()
    if buffers == 40:
        assert sum(isinstance(m, messages.Pull) for m in world.up) == 3 * 5


def test_two_pulls_of_a_worker_go_into_two_broadcasts():
    world = World(2)
    tickets = [(0, 1), (0, 2), (1, 3)]
    for worker, ticket in tickets:
        world.feed(messages.Pull(7, 0, None, ticket, worker))
    world.run_all()
    assert [pull.ticket for pull in world.answered] == [1, 3]
    world.feed(messages.Pull(7, 0, None, 4, 1))
    world.run_all()
    assert [pull.ticket for pull in world.answered] == [1, 3, 2, 4]
    assert len(world.up) == 1, "the copy is still there"
    world.at_the_end()


def test_a_pull_that_no_other_worker_shares_is_answered_alone():  # Rule 5
    world = World(2)
    world.tick(5.0)
    world.feed(messages.Pull(7, 0, None, 1, 0))
    world.tick(0.5)
    assert not world.up
    world.feed(messages.Pull(7, 0, None, 2, 0))
    world.tick(0.6)
    world.run_all()
    assert [pull.ticket for pull in world.answered] == [1], "the second has not waited long enough"
    world.feed(messages.Pull(7, 0, None, 3, 1))
    world.run_all()
    assert [pull.ticket for pull in world.answered] == [1, 2, 3]
    world.at_the_end()


def test_workers_that_wait_for_each_other_are_summed_alone():  # Rule 5
    """Each has a gradient that the other lacks, and no room for another gradient."""
    world = World(2)
    world.announce(0, True, 0, "mine")
    world.announce(1, True, 1, "theirs")
    world.tick(ALONE_S / 2)
    assert not world.todo
    world.tick(ALONE_S)
    world.run_all()
    for worker in range(2):
        for chunk in range(2):
            if worker != chunk:
                world.announce(chunk, True, worker, "late")
            world.feed(update(chunk, 1, worker))
    world.run_all()
    assert world.about(0)[:2] == [("sum", 0, True, ["mine"]), ("sum", 0, False, ["late"])]
    assert world.about(1)[:2] == [("sum", 1, True, ["theirs"]), ("sum", 1, False, ["late"])]
    world.at_the_end()


def test_copies_of_a_chunk_are_not_summed_at_different_times():
    """Each server decides by its own clock which workers wait; with replicas that is an error."""
    world = World(2)
    world.machine = FanInStateMachine(2, 3, 2, packets_of, 0.0, replicated=True)
    world.announce(0, True, 0, "mine")
    world.announce(1, True, 1, "theirs")
    world.tick(2 * ALONE_S)
    world.run_all()
    world.feed(messages.Close(0, 1, 1))  # it has no gradient, so the sum is the same
    world.feed(messages.Close(0, 1, 0))
    assert world.about(0) == [("sum", 0, True, ["mine"]), messages.Close(0, 1)]
    world.announce(1, True, 0, "late")
    with pytest.raises(LoopError, match=r"chunk 1 was summed without worker\(s\) 0"):
        world.feed(messages.Close(1, 1, 1))


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_worker_without_a_gradient_drops_nothing(closes, again):
    """A step for which only one worker had a gradient is skipped and then repeated."""
    world = World(2)
    world.announce(0, True, 0, "dropped")
    world.feed(messages.Close(0, 1, 1))
    if closes:
        world.feed(messages.Close(0, 1, 0))
        world.run_all()
    world.feed(messages.DiscardGrad(0, 0))
    if again:
        world.announce(0, True, 1, "theirs")
    world.announce(0, True, 0, "mine")
    for worker in range(2):
        world.feed(update(0, 1, worker))
    world.run_all()
    sums = [up for up in world.about(0) if isinstance(up, tuple)]
    assert sums[0] == ("sum", 0, True, ["dropped"])
    assert {value for *_, values in sums[1:] for value in values} == {"mine", *["theirs"] * again}
    assert sums[1][2] and messages.DiscardGrad(0) in world.about(0)
    world.at_the_end()


def test_a_slow_worker_is_waited_for_and_named():  # Rule 5
    """A gradient that it is about to announce is not summed without it."""
    world = World(3)
    world.tick(10.0)
    world.announce(4, True, 0, "a")
    world.tick(2.0)
    world.announce(4, True, 2, "c")
    world.tick(5.0)
    assert not world.todo
    [late] = world.machine.late()
    assert (late.worker, late.chunk, world.now - late.since) == (1, 4, 7.0)
    world.announce(4, True, 1, "b")
    assert not world.machine.late()
    world.tick(1.5)
    assert world.machine.stuck(1.0) == 1 and world.machine.stuck(2.0) == 0
    world.run_all()
    assert world.about(4) == [("sum", 4, True, ["a", "b", "c"])]


def test_a_chunk_without_a_gradient_is_closed_alone():
    world = World(2)
    for worker in range(2):
        world.feed(messages.Close(0, 1, worker))
    assert world.up == [messages.Close(0, 1)]
    for worker in range(2):
        world.feed(update(0, 1, worker, has=False))
    assert [type(m) for m in world.up] == [messages.Close, messages.ApplyUpdate]
    world.at_the_end()


def test_data_is_granted_only_if_a_sum_buffer_is_free():  # Rule 4
    world = World(2, sums=1)
    for chunk in range(3):
        for worker in range(2):
            world.announce(chunk, True, worker, worker)
    grants = [event for event in world.todo if isinstance(event, ExponentsArrived)]
    assert len(grants) == 3, "exponents need no sum buffer"
    world.todo.clear()
    for grant in reversed(grants):
        world.feed(grant)
    assert world.todo == [GradientArrived(0, 1)], "in the order of their exponents"
    world.todo.clear()
    world.feed(GradientArrived(0, 1))
    [push] = world.todo
    world.run_one()
    assert isinstance(push, PushRound) and world.todo == [GradientArrived(1, 1)]
    world.run_all()


def test_differences_between_workers_are_refused():
    world = World(3)
    for worker in range(3):
        world.announce(5, True, worker, worker)
    world.feed(messages.DiscardGrad(5, 0))
    world.feed(messages.Close(5, 1, 1))
    world.feed(messages.DiscardGrad(5, 2))
    with pytest.raises(
        LoopError, match=r"worker\(s\) 0, 2 discard .* chunk 5, worker\(s\) 1 do not"
    ):
        world.feed(update(5, 1, 1))
    world = World(2)
    world.announce(5, True, 0, 0)
    words = (
        "worker 1 announced its next gradient of chunk 5 in this step, but none was summed before"
    )
    with pytest.raises(LoopError, match=words):
        world.announce(5, False, 1, 1)
    world = World(2)
    world.feed(update(5, 1, 0))
    with pytest.raises(LoopError, match="hyperparameters"):
        world.feed(messages.ApplyUpdate(5, 1, (0.2,), [1.0], 0, 1))
    world = World(2)
    world.feed(messages.Close(5, 1, 0))
    with pytest.raises(LoopError, match="steps: 1, 2"):
        world.feed(messages.Close(5, 2, 1))


def test_a_worker_lost_during_a_step_is_an_error():  # Rule 5
    world = World(2)
    world.feed(messages.PeerLost(1, "killed"))  # between steps a worker may leave
    with pytest.raises(LostError, match="worker 1 was lost: killed"):
        world.announce(0, True, 0, 0)
    world = World(2)
    for worker in range(2):
        world.announce(0, True, worker, worker)
    world.run_all()
    with pytest.raises(LostError):
        world.feed(messages.PeerLost(1, "killed"))


def test_the_end_of_a_step_follows_its_updates():  # Rule 3
    """Otherwise the server could commit a step while its gradients are still in the network."""
    world = World(2)
    for worker in range(2):
        world.announce(0, True, worker, worker)
        world.feed(messages.ApplyUpdate(0, 1, (), (1.0,), 0, worker))
        world.feed(messages.EndStep(1, worker))
    assert world.up == []
    while world.todo:
        world.run_one()
    assert [type(message).__name__ for message in world.up] == [
        "tuple",
        "Close",
        "ApplyUpdate",
        "EndStep",
    ]


def test_waits_before_the_first_tick_count_from_the_start_of_the_machine():  # Rule 5
    world, began_s = World(2), 20_000.0
    world.machine = FanInStateMachine(2, 3, 2, packets_of, began_s)
    world.announce(0, True, 0, "mine")
    world.feed(messages.Pull(1, 0, None, 1, 0))
    world.feed(Tick(began_s + ALONE_S / 2))
    assert [late.since for late in world.machine.late()] == [began_s]
    assert world.todo == []  # neither is summed without the other worker yet
    world.feed(Tick(began_s + 2 * ALONE_S))
    assert world.todo != []


def test_pulls_of_the_next_step_leave_buffers_for_a_slow_worker():  # Rule 5
    """Worker 0 has requested all updates and pulls their results; worker 1 still needs the previous
    version, which must pass through the same buffers."""
    world = World(2, buffers=2)
    for chunk in range(3):
        world.announce(chunk, True, 0, 0)
        world.feed(messages.ApplyUpdate(chunk, 1, (), (1.0,), 0, 0))
        world.feed(messages.Pull(chunk, 1, None, chunk, 0))
    world.feed(Tick(2 * ALONE_S))
    assert world.todo == []
    world.feed(messages.Pull(0, 0, None, 9, 1))
    world.feed(Tick(4 * ALONE_S))
    [pull] = world.todo
    assert (pull.chunk, pull.version) == (0, 0)
