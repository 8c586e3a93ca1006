"""With `replicas = 2` every chunk has a second server that applies the same pushes, so losing a
server and its contents costs no step and changes no bit (Rules 1 and 3)."""

import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import roadtrain
from roadtrain.errors import LostError
from roadtrain.servers.protocol.messages import CommitDone
from tests.support.models import Case, one_step, place
from tests.support.processes import HostProcess, Workers, losses

STEPS, LONG = 14, Case(clip=0.5, dtype=torch.bfloat16)


class Cluster:
    """Several servers. `lose` kills servers as if their hosts were gone; `restart` starts them again
    at the same addresses."""

    def __init__(self, home, n=3):
        self.home, self.sessions = home, 0
        self.hosts = [HostProcess(home / f"host{i}") for i in range(n)]
        self.where = [h.where for h in self.hosts]

    def start(self, steps, workers=2, case=LONG, **options):
        self.sessions += 1
        return Workers(
            case,
            self.where,
            self.home,
            steps,
            workers,
            session=str(self.sessions),
            **{"replicas": 2, **options},
        )

    def train(self, steps, **options):
        running = self.start(steps, **options)
        assert set(running.join()) == {0}, running.errors()
        return running

    def lose(self, *numbers, keep=False):
        for number in numbers:
            self.hosts[number].kill()
            if not keep:
                shutil.rmtree(self.hosts[number].directory, ignore_errors=True)

    def restart(self, *numbers, **options):
        for number in numbers:
            port = int(self.where[number].split(":")[1])
            self.hosts[number] = HostProcess(self.home / f"host{number}", port=port, **options)

    def close(self):
        for host in self.hosts:
            host.kill()


@pytest.fixture
def cluster(tmp_path):
    clusters = []

    def make(n=3):
        home = tmp_path / f"cluster{len(clusters)}"
        home.mkdir()
        clusters.append(Cluster(home, n))
        return clusters[-1]

    yield make
    for started in clusters:
        started.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of two workers with one server, without replicas or faults."""
    home = tmp_path_factory.mktemp("whole")
    host = HostProcess(home / "host")
    workers = Workers(LONG, [host.where], home, STEPS, 2)
    assert workers.join() == [0, 0], workers.errors()
    host.kill()
    return [losses(log) for log in workers.logs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of one worker that trains in memory."""
    model, placed, scaler = place(LONG, None)
    with placed:
        steps = [
            (one_step(LONG, model, placed, scaler, i), placed.grad_norm()) for i in range(STEPS)
        ]
    return [{str(i + 1): {f"{loss.hex()} {norm.hex()}"} for i, (loss, norm) in enumerate(steps)}]


def assert_same_losses(workers, reference, steps=STEPS):
    """Check that every step up to `steps` was logged with the reference's loss each time."""
    for log, whole in zip(workers.logs, reference):
        seen = losses(log)
        assert {int(s) for s in seen if s != "end"} >= set(range(1, steps + 1)), "a step is missing"
        for step in map(str, range(1, steps + 1)):
            assert seen[step] == whole[step], f"step {step} has another loss"


def newest(workers):
    return max((int(s) for s in losses(workers.logs[0]) if s != "end"), default=0)


def wait_for_step(workers, step, seconds=120):
    until = time.monotonic() + seconds
    while newest(workers) < step:
        assert time.monotonic() < until and workers.processes[0].is_alive(), workers.errors()
        time.sleep(0.02)


@pytest.mark.parametrize(
    "case",
    [Case(eager=True, frozen=True), Case(clip=0.5, scaler=True, staleness=1)],
    ids=["eager", "late"],
)
def test_the_losses_are_those_without_replicas(case, cluster, tmp_path):  # Rule 1
    host = HostProcess(tmp_path / "one")
    plain = Workers(case, [host.where], tmp_path, 5, 2)
    assert plain.join() == [0, 0], plain.errors()
    host.kill()
    assert [losses(x) for x in cluster().train(5, case=case).logs] == [
        losses(x) for x in plain.logs
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "victim", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2))]
)
# Rules 3 and 6
def test_a_lost_server_is_left_out_and_refilled_later(victim, undisturbed, cluster, tmp_path):
    """A server dies with its contents and the run continues without it; then it restarts empty, and
    another server dies."""
    three, lost = cluster(), [tmp_path / name for name in ("first", "second")]
    running = three.start(STEPS, until=(STEPS // 2 - 1, lost[0]))
    wait_for_step(running, 3)
    three.lose(victim)
    lost[0].touch()
    assert set(running.join(60)) == {3}
    # a worker may first notice the loss of the other worker, which ended because of the server
    errors = running.errors()
    assert any(f"server {victim}" in error for error in errors), errors
    assert all(
        f"server {victim}" in error or "was lost before step" in error for error in errors
    ), errors
    running = three.train(STEPS // 2)
    assert [n for n in running.notes() if "left out" in n and f"server {victim}" in n], (
        running.notes()
    )

    three.restart(victim)
    running = three.start(STEPS, until=(STEPS - 1, lost[1]))
    wait_for_step(running, STEPS // 2 + 2)
    three.lose((victim + 1) % 3)
    lost[1].touch()
    assert set(running.join(60)) == {3}
    assert [n for n in running.notes() if "being refilled" in n and f"server {victim}" in n], (
        running.notes()
    )
    running = three.train(STEPS)
    assert_same_losses(running, undisturbed)
    assert losses(running.logs[0])["end"] >= undisturbed[0]["end"], "parameters or moments differ"


@pytest.mark.timeout(300)
def test_a_server_that_missed_steps_is_refilled(cluster, tmp_path):
    """The server restarts with an older store. In this case the weights part lags, and some steps
    update nothing."""
    case = Case(dtype=torch.bfloat16, frozen=True, scaler=True, staleness=1)
    host = HostProcess(tmp_path / "one")
    plain = Workers(case, [host.where], tmp_path, 9, 2)
    assert plain.join() == [0, 0], plain.errors()
    host.kill()
    three = cluster()
    three.train(2, case=case)
    three.lose(1, keep=True)
    three.train(3, case=case)  # the scaler skips step 3
    three.restart(1)
    running = three.train(6, case=case)
    assert any("server 1" in n and "being refilled at step 3" in n for n in running.notes()), (
        running.notes()
    )
    three.lose(2)
    running = three.train(9, case=case)
    assert_same_losses(running, [losses(log) for log in plain.logs], 9)
    assert losses(running.logs[0])["end"] >= losses(plain.logs[0])["end"]


def test_two_dead_servers_are_refused_and_named(cluster):
    three = cluster()
    three.train(2)
    three.lose(0, 1)
    soon = {"retry_s": 1, "deadline_s": 4}
    running = three.start(4, **soon)
    assert set(running.join()) == {3}
    assert "server 0 (" in running.errors()[0] and "server 1 (" in running.errors()[0], (
        running.errors()
    )
    for number in (0, 1):
        three.restart(number)
    running = three.start(4, **soon)
    assert set(running.join()) == {3}
    error = running.errors()[0]
    assert "the rest, on server 0 (" in error and "server 1 (" in error, error


def test_another_number_of_replicas_is_refused(cluster):
    two = cluster(2)
    two.train(2)
    two.sessions += 1
    running = Workers(LONG, two.where, two.home, 4, 1, session="other")
    assert running.join() == [3]
    assert "has replicas = 2, but 1 are requested" in running.errors()[0]
    alone = Workers(LONG, two.where[:1], two.home, 4, 1, session="alone", replicas=2)
    assert alone.join() == [3] and "replicas = 2 with 1 server" in alone.errors()[0]
    two.train(3)


def test_a_dead_server_costs_no_link_to_a_living_one(alone, cluster, monkeypatch):  # Rule 3
    """The worker finds the link to server 1 lost while it answers server 0, before the loss has been
    reported. Server 0 still receives the permission to continue alone."""
    two, held = cluster(2), []
    servers = roadtrain.Servers(two.where, replicas=2)
    model, placed, scaler = place(LONG, servers, deadline_s=20, chunk_elements=1 << 16)
    worker, server = placed._worker, placed.session.servers.servers[0]  # noqa: SLF001
    one_step(LONG, model, placed, scaler, 1, seed=1000)
    placed.flush()

    def hold(message):
        held.append(message) if isinstance(message, CommitDone) else worker.deliver(message)

    def lost(message):
        raise LostError("server 1: ended without a goodbye")

    server.deliver = hold
    one_step(LONG, model, placed, scaler, 2, seed=1001)
    with ThreadPoolExecutor() as pool:
        closing, until = pool.submit(placed.close), time.monotonic() + 30
        while not held:
            assert time.monotonic() < until
            time.sleep(0.01)
        monkeypatch.setattr(worker.links[1], "send", lost)
        for message in held:
            worker.deliver(message)  # as a link's thread does; an exception ends the link
        two.lose(1)
        with pytest.raises(LostError, match="step 3, sending: server 1: ended without a goodbye"):
            closing.result(30)
    two.restart(1)
    later = losses(two.train(4, workers=1).logs[0])
    assert later.keys() == {"3", "4", "end"} and later["4"] == alone[0]["4"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.exhaustive if seed else ()) for seed in range(6)],
)
def test_kills_at_random_moments(seed, alone, cluster):  # Rule 3
    """Kill servers twice. The second kill may happen at the start, during the refill; it then hits
    the same server."""
    rng, cluster = random.Random(seed), cluster(2 + seed % 2)
    victim = None
    for _ in range(2):
        running = cluster.start(STEPS * 100, workers=1)
        before = newest(running)
        if started := before == 0 or rng.random() < 0.5:
            wait_for_step(running, before + 1 + rng.randrange(3))
        time.sleep(rng.random() * (0.2 if started else 1.5))
        victim = rng.randrange(len(cluster.hosts)) if started else victim
        cluster.lose(victim, keep=rng.random() < 0.3)
        died, until = newest(running), time.monotonic() + 120
        while (
            running.processes[0].is_alive()
            and newest(running) < died + 4
            and time.monotonic() < until
        ):
            time.sleep(0.02)
        # the worker had not connected to the server yet and continues without it
        if running.processes[0].is_alive():
            assert newest(running) >= died + 4, "it hangs"
            running.processes[0].kill()
        running.join(60)
        cluster.restart(victim)
    running = cluster.train(max(STEPS, newest(running) + 1), workers=1)
    assert_same_losses(running, alone)
    assert all(len(v) == 1 for s, v in losses(running.logs[0]).items()), (
        "a step was repeated with another loss"
    )
