"""Spare hosts that come, go, die and are slow while workers sum: every sum is right, nobody
waits for ever, no worker is restarted (Rules 1 and 5)."""

import random
import threading
import time
from functools import partial

import numpy as np
import pytest
from test_summation import DTYPES, Hosts, expected, values

from benchmarks.sums.pending_sums import PendingSums
from roadtrain.errors import LostError, RoadtrainError
from roadtrain.servers import frames as m
from roadtrain.servers.connection import link_to
from roadtrain.sums import worker_sums
from roadtrain.sums.coordinator import TO_COORDINATOR, Coordinator
from roadtrain.sums.coordinator_link import CoordinatorLink
from roadtrain.sums.sum_server import Reducers
from roadtrain.sums.worker_sums import WorkerSums
from roadtrain.transport.tcp import TcpOptions, listen

TENSORS = {
    1: (400_003, "fp32", ""),
    2: (9, "fp32", ""),
    3: (150_000, "bf16", ""),
    4: (70_000, "fp32", ""),
}


class Nothing:
    """The agreement of workers that begin the same, in a test."""

    def lost(self, error):
        pass

    fail = lost


class Elastic(Hosts):
    """With a coordinator; spare hosts by name."""

    def __init__(self, n, k):
        super().__init__(n, k)
        self.said, self.where = [], {}
        self.spares = [self._name(i) for i in range(n, n + k)]
        spares = tuple((n + i, name, 1.0) for i, name in enumerate(self.spares))
        self.coordinator = Coordinator("s", n, True, [range(n)], spares, self.said.append)
        self.reducers[0].coordinator = self.coordinator
        (self.control,) = self.coordinator.groups

    def _name(self, i):
        name = "{}:{}".format(*self.listeners[i].address)
        self.where[name] = i
        return name

    def add(self):
        """A new one, which it offers."""
        self.reducers.append(Reducers(1 << 28))
        self.listeners.append(
            listen(
                ("127.0.0.1", 0),
                self.reducers[-1].accept,
                TcpOptions(),
                lambda _: None,
                language=m.LANGUAGE,
            )
        )
        name = self._name(len(self.reducers) - 1)
        self.control.offered(name, 1.0)
        return name

    def kill(self, name):
        """Its links end; what it had is lost."""
        self.listeners[self.where[name]].close()
        for reducer in list(self.reducers[self.where[name]].jobs.values()):
            for one in list(reducer.connections.values()):
                one.link.close()
            reducer.end(LostError("killed"))

    def worker(self, rank, **options):
        spares = tuple((self.n + i, name, 1.0) for i, name in enumerate(self.spares))
        link = CoordinatorLink()
        sums = super().worker(rank, spares=spares, reducer_lost=link.reducer_lost, **options)
        link.agreement, link.sums = Nothing(), sums
        first = None if rank == 0 else self.listeners[0].address
        hello = ("s", rank, self.n, TO_COORDINATOR)
        link.linked(link_to(link, first, self.reducers[0].accept, hello, TcpOptions()))
        close, sums.close = sums.close, lambda: (link.close(), close())
        return sums

    def until(self, there, wait_s=10):
        deadline = time.monotonic() + wait_s
        while set(self.control.spares) != set(there):
            assert time.monotonic() < deadline, (self.control.spares, there, self.said)
            time.sleep(0.01)


@pytest.fixture
def elastic():
    made = []

    def make(n, k):
        made.append(Elastic(n, k))
        return made[-1]

    yield make
    for one in made:
        one.close()


def sum_all(rank, sums, rounds, workers, tensors=TENSORS, between=lambda number: None):
    """Several tensors at once, each round checked; a worker may be a round ahead of another."""
    for number in range(rounds):
        between(number)
        outs, pending = {}, PendingSums(sums)
        for key, (elements, dtype, format) in tensors.items():
            grad, outs[key] = (
                values(rank, number, key, elements, dtype),
                np.empty(elements, DTYPES[dtype]),
            )
            pending.sum(
                key,
                m.as_bytes(grad),
                outs[key].view(np.uint8).data,
                dtype,
                priority=-key,
                format=format,
            )
        pending.wait()
        for key, (elements, dtype, format) in tensors.items():
            wanted = expected(workers, number, key, elements, dtype)
            near = partial(np.allclose, rtol=0.1, atol=0.4 if format.startswith("dither") else 0.05)
            assert (near if format else np.array_equal)(outs[key], wanted), (rank, number, key)
    return rounds


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_spare_host_that_dies_is_gone_round_and_one_that_comes_is_used(n, elastic):
    made = elastic(n, 2)
    first, second = made.spares

    def between(number):
        if number == 3:
            made.kill(first)
        if number == 8:
            made.add()
        time.sleep(0.02)

    def work(rank, sums):
        sum_all(rank, sums, 20, n, between=between if rank == 0 else lambda number: None)
        if rank == 0:
            made.until(
                {second, *list(made.where)[n + 2 :]} & set(made.where)
                | {made._name(len(made.reducers) - 1)}
            )
        sum_all(rank, sums, 3, n)
        return {reducer.number for reducer in sums._reducers.values()}

    found = made.run(work)
    assert not any(isinstance(one, Exception) for one in found), found
    assert all(one == found[0] and n not in one and max(one) > n + 1 for one in found), found
    assert any("not used any more" in words for words in made.said) and any(
        "begins to sum" in words for words in made.said
    )
    new = made.reducers[-1]
    assert sum(len(job._results) for job in new.jobs.values()) or not new.jobs


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.exhaustive if seed > 1 else ()) for seed in range(6)],
)
def test_sums_stay_right_whoever_dies_when(seed, elastic):
    rng, n = random.Random(seed), 2 + seed % 3
    made, over = elastic(n, 2), threading.Event()

    def trouble():
        while not over.wait(rng.uniform(0.01, 0.15)):
            there = list(made.control.spares)
            if there and rng.random() < 0.5:
                made.kill(rng.choice(there))
            elif there and rng.random() < 0.3:
                made.control.lost_reducer(
                    made.control.spares.get(rng.choice(there), -1), "no longer listed"
                )
            elif len(there) < 4:
                made.add()

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        found = made.run(partial(sum_all, rounds=15, workers=n))
    finally:
        over.set()
        thread.join()
    assert found == [15] * n, (found, made.said)
    assert any("not used any more" in words for words in made.said)


@pytest.mark.parametrize(
    "when", ["before anyone dials it", "with no coordinator known", "when others sum already"]
)
def test_a_spare_host_that_dies_while_the_job_starts_is_gone_round(when, elastic, monkeypatch):
    made, told, all_there = elastic(3, 2), threading.Semaphore(0), threading.Barrier(3)
    first, second = made.spares
    link, lost = worker_sums.link_to, WorkerSums.lost

    def heard(self, site, error):
        lost(self, site, error)
        if site.number == 3:
            told.release()

    def in_steps(receiver, address, own, hello, options, name="the coordinator"):
        if when == "with no coordinator known" and name == f"spare host {second}":
            if all_there.wait(20) == 0:
                made.kill(first)
                assert all(told.acquire(timeout=20) for _ in range(3)), "all three have lost it"
                assert not made.coordinator.connections, "and could not say so"
            all_there.wait(20)
        if when == "when others sum already" and name == f"spare host {first}" and hello[1] == 2:
            deadline = time.monotonic() + 20
            while not any(
                one.buffers
                for job in made.reducers[3].jobs.values()
                for one in job.connections.values()
            ):
                assert time.monotonic() < deadline, "the others are summing"
                time.sleep(0.01)
            made.kill(first)
        return link(receiver, address, own, hello, options, name)

    monkeypatch.setattr(worker_sums, "link_to", in_steps)
    monkeypatch.setattr(WorkerSums, "lost", heard)
    if when == "before anyone dials it":
        made.kill(first)
    found = made.run(partial(sum_all, rounds=8, workers=3))
    assert found == [8] * 3, (found, made.said)
    assert [*made.control.spares] == [second] and sum(
        "not used any more" in words for words in made.said
    ) == 1, made.said


@pytest.mark.parametrize("format", ["bf16", "dither:8", "fp16"])
def test_encoded_ones_too(format, elastic):
    made = elastic(2, 2)
    tensors = {1: (300_000, "fp32", format), 2: (1000, "fp32", format)}

    def between(number):
        if number == 3:
            made.kill(made.spares[0])
        time.sleep(0.02)

    found = made.run(
        lambda rank, sums: sum_all(
            rank, sums, 8, 2, tensors, between if rank == 0 else lambda _: None
        )
    )
    assert found == [8, 8], found


def test_without_a_coordinator_a_dead_spare_host_is_an_error(hosts_two_one):
    made = hosts_two_one

    def work(rank, sums):
        sum_all(rank, sums, 1, 2)
        if rank == 0:
            for reducer in list(made.reducers[2].jobs.values()):
                reducer.end(LostError("killed"))
        sum_all(rank, sums, 50, 2)

    assert all(
        isinstance(one, RoadtrainError) and "spare host" in str(one) for one in made.run(work)
    )


@pytest.fixture
def hosts_two_one():
    made = Hosts(2, 1)
    yield made
    made.close()
