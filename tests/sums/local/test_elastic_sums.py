"""Spare hosts join, leave, die and are slow while workers sum: every sum is right, no worker waits
forever, and no worker is restarted (Rules 1 and 5)."""

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


class NoAgreement:
    """A stand-in for the agreement, because the workers of a test run the same operations."""

    def lost(self, error):
        pass

    fail = lost


class Elastic(Hosts):
    """Hosts with a coordinator, and spare hosts that are identified by name."""

    def __init__(self, n, k):
        super().__init__(n, k)
        self.lines, self.where = [], {}
        self.spares = [self._name(i) for i in range(n, n + k)]
        spares = tuple((n + i, name, 1.0) for i, name in enumerate(self.spares))
        self.coordinator = Coordinator("s", n, True, [range(n)], spares, self.lines.append)
        self.reducers[0].coordinator = self.coordinator
        (self.control,) = self.coordinator.groups

    def _name(self, i):
        name = "{}:{}".format(*self.listeners[i].address)
        self.where[name] = i
        return name

    def add(self):
        """Start a spare host and offer it to the coordinator. Returns its name."""
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
        """End the links of a spare host and drop its state."""
        self.listeners[self.where[name]].close()
        for reducer in list(self.reducers[self.where[name]].jobs.values()):
            for connection in list(reducer.connections.values()):
                connection.link.close()
            reducer.end(LostError("killed"))

    def worker(self, rank, **options):
        spares = tuple((self.n + i, name, 1.0) for i, name in enumerate(self.spares))
        link = CoordinatorLink()
        sums = super().worker(rank, spares=spares, reducer_lost=link.reducer_lost, **options)
        link.agreement, link.sums = NoAgreement(), sums
        first = None if rank == 0 else self.listeners[0].address
        hello = ("s", rank, self.n, TO_COORDINATOR)
        link.linked(link_to(link, first, self.reducers[0].accept, hello, TcpOptions()))
        close, sums.close = sums.close, lambda: (link.close(), close())
        return sums

    def until(self, names, wait_s=10):
        deadline = time.monotonic() + wait_s
        while set(self.control.spares) != set(names):
            assert time.monotonic() < deadline, (self.control.spares, names, self.lines)
            time.sleep(0.01)


@pytest.fixture
def elastic():
    opened = []

    def make(n, k):
        opened.append(Elastic(n, k))
        return opened[-1]

    yield make
    for hosts in opened:
        hosts.close()


def sum_all(rank, sums, rounds, workers, tensors=TENSORS, between=lambda number: None):
    """Sum several tensors at once and check each round; workers may differ by a round."""
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
            exact = expected(workers, number, key, elements, dtype)
            near = partial(np.allclose, rtol=0.1, atol=0.4 if format.startswith("dither") else 0.05)
            assert (near if format else np.array_equal)(outs[key], exact), (rank, number, key)
    return rounds


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_dead_spare_host_is_bypassed_and_a_new_spare_host_is_used(n, elastic):
    hosts = elastic(n, 2)
    first, second = hosts.spares

    def between(number):
        if number == 3:
            hosts.kill(first)
        if number == 8:
            hosts.add()
        time.sleep(0.02)

    def work(rank, sums):
        sum_all(rank, sums, 20, n, between=between if rank == 0 else lambda number: None)
        if rank == 0:
            hosts.until(
                {second, *list(hosts.where)[n + 2 :]} & set(hosts.where)
                | {hosts._name(len(hosts.reducers) - 1)}
            )
        sum_all(rank, sums, 3, n)
        return {reducer.number for reducer in sums._reducers.values()}

    results = hosts.run(work)
    assert not any(isinstance(numbers, Exception) for numbers in results), results
    assert all(
        numbers == results[0] and n not in numbers and max(numbers) > n + 1 for numbers in results
    ), results
    assert any("not used any more" in words for words in hosts.lines) and any(
        "begins to sum" in words for words in hosts.lines
    )
    new = hosts.reducers[-1]
    assert sum(len(job._results) for job in new.jobs.values()) or not new.jobs


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.exhaustive if seed > 1 else ()) for seed in range(6)],
)
def test_sums_stay_right_when_spare_hosts_die_at_random(seed, elastic):
    rng, n = random.Random(seed), 2 + seed % 3
    hosts, over = elastic(n, 2), threading.Event()

    def trouble():
        while not over.wait(rng.uniform(0.01, 0.15)):
            spares = list(hosts.control.spares)
            if spares and rng.random() < 0.5:
                hosts.kill(rng.choice(spares))
            elif spares and rng.random() < 0.3:
                hosts.control.lost_reducer(
                    hosts.control.spares.get(rng.choice(spares), -1), "no longer listed"
                )
            elif len(spares) < 4:
                hosts.add()

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        rounds = hosts.run(partial(sum_all, rounds=15, workers=n))
    finally:
        over.set()
        thread.join()
    assert rounds == [15] * n, (rounds, hosts.lines)
    assert any("not used any more" in words for words in hosts.lines)


@pytest.mark.parametrize(
    "when", ["before anyone dials it", "with no coordinator known", "when others sum already"]
)
def test_a_spare_host_that_dies_while_the_job_starts_is_bypassed(when, elastic, monkeypatch):
    hosts, losses, all_there = elastic(3, 2), threading.Semaphore(0), threading.Barrier(3)
    first, second = hosts.spares
    link, lost = worker_sums.link_to, WorkerSums.lost

    def count_loss(self, site, error):
        lost(self, site, error)
        if site.number == 3:
            losses.release()

    def link_in_turn(receiver, address, own, hello, options, name="the coordinator"):
        if when == "with no coordinator known" and name == f"spare host {second}":
            if all_there.wait(20) == 0:
                hosts.kill(first)
                assert all(losses.acquire(timeout=20) for _ in range(3)), (
                    "all three lose their link"
                )
                assert not hosts.coordinator.connections, "and cannot report it"
            all_there.wait(20)
        if when == "when others sum already" and name == f"spare host {first}" and hello[1] == 2:
            deadline = time.monotonic() + 20
            while not any(
                connection.buffers
                for job in hosts.reducers[3].jobs.values()
                for connection in job.connections.values()
            ):
                assert time.monotonic() < deadline, "the others are summing"
                time.sleep(0.01)
            hosts.kill(first)
        return link(receiver, address, own, hello, options, name)

    monkeypatch.setattr(worker_sums, "link_to", link_in_turn)
    monkeypatch.setattr(WorkerSums, "lost", count_loss)
    if when == "before anyone dials it":
        hosts.kill(first)
    rounds = hosts.run(partial(sum_all, rounds=8, workers=3))
    assert rounds == [8] * 3, (rounds, hosts.lines)
    assert [*hosts.control.spares] == [second] and sum(
        "not used any more" in words for words in hosts.lines
    ) == 1, hosts.lines


@pytest.mark.parametrize("format", ["bf16", "dither:8", "fp16"])
def test_encoded_sums_survive_a_dead_spare_host(format, elastic):
    hosts = elastic(2, 2)
    tensors = {1: (300_000, "fp32", format), 2: (1000, "fp32", format)}

    def between(number):
        if number == 3:
            hosts.kill(hosts.spares[0])
        time.sleep(0.02)

    rounds = hosts.run(
        lambda rank, sums: sum_all(
            rank, sums, 8, 2, tensors, between if rank == 0 else lambda _: None
        )
    )
    assert rounds == [8, 8], rounds


def test_without_a_coordinator_a_dead_spare_host_is_an_error(hosts_two_one):
    hosts = hosts_two_one

    def work(rank, sums):
        sum_all(rank, sums, 1, 2)
        if rank == 0:
            for reducer in list(hosts.reducers[2].jobs.values()):
                reducer.end(LostError("killed"))
        sum_all(rank, sums, 50, 2)

    assert all(
        isinstance(error, RoadtrainError) and "spare host" in str(error)
        for error in hosts.run(work)
    )


@pytest.fixture
def hosts_two_one():
    hosts = Hosts(2, 1)
    yield hosts
    hosts.close()
