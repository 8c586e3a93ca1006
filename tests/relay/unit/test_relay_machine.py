"""The relay's state machine in a scripted world: messages of workers and completions arrive in
random order."""

import random

import pytest

from roadtrain.errors import LostError
from roadtrain.relay.protocol.relay import Give, PushSum, RelayStateMachine, Up
from roadtrain.servers.protocol import messages


class World:
    """Plays the server, which answers a pull with the requested version, and carries out
    actions."""

    def __init__(self, workers, buffers, seed):
        self.machine, self.random = RelayStateMachine(workers, buffers), random.Random(seed)
        self.todo, self.up, self.answered, self.filled, self.held = [], [], [], {}, {}

    def feed(self, event):
        for action in self.machine.handle(event):
            match action:
                case Up(message):
                    self.up.append(message)
                    if isinstance(message, messages.Pull):
                        self.todo.append(message)
                case messages.Hold(push):
                    self.held.setdefault(push.chunk, {})[push.worker] = push.ticket
                case messages.Discard(chunk, worker):
                    self.held.get(chunk, {}).pop(worker, None)
                case PushSum(chunk):
                    self.up.append(("sum", chunk, self.held.pop(chunk, {})))
                case Give():
                    self.todo.append(action)
        self.machine.check()

    def run_one(self):
        match self.todo.pop(self.random.randrange(len(self.todo))):
            case messages.Pull(chunk, version, into, ticket):
                assert self.machine.buffer_for(ticket, chunk) == into
                assert self.machine.buffer_for(ticket, chunk + 1) is None
                self.filled[into] = (chunk, version)
                self.feed(messages.Pulled(ticket, chunk))
                assert self.machine.buffer_for(ticket, chunk) is None
            case Give(pull, buffer) as give:
                assert self.filled[buffer] == (pull.chunk, pull.version)
                self.answered.append((pull.worker, pull.ticket))
                self.feed(messages.Done(give))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("buffers", [1, 3, 40])
@pytest.mark.slow
def test_every_pull_gets_the_requested_version(seed, buffers):  # Rule 4, Rule 5
    rng, world = random.Random(seed), World(3, buffers, seed)
    requested = []
    for step in range(4):
        order = [*range(8), *reversed(range(8))]
        pulls = [(w, c) for c in order for w in range(3)]
        rng.shuffle(pulls)
        for i, (worker, chunk) in enumerate(pulls):
            ticket = 1000 * step + i
            requested.append((worker, ticket))
            world.feed(messages.Pull(chunk, step, None, ticket, worker))
            while world.todo and rng.random() < 0.6:
                world.run_one()
        while world.todo:
            world.run_one()
    assert sorted(world.answered) == sorted(requested) and not world.machine.queue
    if buffers == 40:  # each version of a chunk is fetched once, however many workers pull it
        assert len([m for m in world.up if isinstance(m, messages.Pull)]) == 4 * 8


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.slow
def test_each_step_has_one_sum_of_its_own_pushes(seed, closes):  # Rule 1
    """Workers may run ahead; some drop their gradients and push again."""
    rng, n, chunks, steps = random.Random(seed), 3, range(4), 4
    world = World(n, 1, seed)
    has = {
        (s, c, w): rng.random() < 0.7 for s in range(1, steps + 1) for c in chunks for w in range(n)
    }

    def scripted(worker):
        for step in range(1, steps + 1):
            for chunk in chunks:
                if has[step, chunk, worker]:
                    if rng.random() < 0.2:
                        world.feed(messages.Push(chunk, None, True, True, -1, None, worker))
                        yield
                        world.feed(messages.DiscardGrad(chunk, worker))
                    world.feed(messages.Push(chunk, None, True, True, step, None, worker))
                    yield
                if closes:
                    world.feed(messages.Close(chunk, step, worker))
                    yield
            for chunk in chunks:
                scales = [1.0 if has[step, chunk, worker] else None]
                world.feed(messages.ApplyUpdate(chunk, step, (0.1,), scales, 0, worker))
                yield
            world.feed(messages.EndStep(step, worker))
            world.feed(messages.Commit(step, worker, worker))

    running = [scripted(w) for w in range(n)]
    while running:
        script = rng.choice(running)
        try:
            next(script)
        except StopIteration:
            running.remove(script)
    for chunk in chunks:
        mine = [
            m
            for m in world.up
            if (m[1] if isinstance(m, tuple) else getattr(m, "chunk", None)) == chunk
        ]
        for step in range(1, steps + 1):
            pushed, close, release = mine[3 * step - 3 : 3 * step]
            assert pushed == ("sum", chunk, {w: step for w in range(n) if has[step, chunk, w]})
            assert close == messages.Close(chunk, step) and release.step == step
    assert [m.step for m in world.up if isinstance(m, messages.EndStep)] == list(
        range(1, steps + 1)
    )
    assert [m.blob for m in world.up if isinstance(m, messages.Commit)] == [[0, 1, 2]] * steps


def test_a_dropped_sum_is_dropped_at_the_server_too():
    world = World(2, 1, 0)
    for worker in range(2):
        world.feed(messages.Push(0, None, True, True, 1, None, worker))
        world.feed(messages.Close(0, 1, worker))
    for worker in range(2):
        world.feed(messages.DiscardGrad(0, worker))
    for worker in range(2):
        world.feed(messages.Push(0, None, True, True, 2, None, worker))
        world.feed(messages.ApplyUpdate(0, 1, (), [1.0], 0, worker))
    kinds = [m if isinstance(m, tuple) else type(m).__name__ for m in world.up]
    assert kinds == [
        ("sum", 0, {0: 1, 1: 1}),
        "Close",
        "DiscardGrad",
        ("sum", 0, {0: 2, 1: 2}),
        "Close",
        "ApplyUpdate",
    ]


def test_a_worker_lost_during_a_step_is_an_error():  # Rule 5
    world = World(2, 1, 0)
    world.feed(messages.PeerLost(1, "killed"))  # between steps a worker may leave
    with pytest.raises(LostError, match="worker 1 of this host was lost: killed"):
        world.feed(messages.Push(0, None, True, True, 1, None, 0))
    world = World(2, 1, 0)
    world.feed(messages.Close(0, 1, 0))
    with pytest.raises(LostError):
        world.feed(messages.PeerLost(1, "killed"))


def test_pushes_of_a_single_worker_pass_through():
    world = World(1, 2, 0)
    push = messages.Push(0, b"", True, True, 1)
    for message in (
        push,
        messages.Close(0, 1),
        messages.ApplyUpdate(0, 1, (), [1.0], 0),
        messages.DiscardGrad(0),
        messages.EndStep(1),
    ):
        world.feed(message)
        assert world.up[-1] == message
