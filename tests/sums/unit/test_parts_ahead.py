"""The parts that a worker queues in its links: sizes, number queued per link, and order. A link
that keeps its frames stands for a slow link."""

import numpy as np
import pytest

from roadtrain.servers import frames as m
from roadtrain.sums import sum_frames, worker_sums
from roadtrain.sums.worker_sums import SumOptions, WorkerSums
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import KIB, MIB


class SlowLinks:
    """The links of a worker. order: Keys of all parts, in the order of queuing."""

    def __init__(self):
        self.links, self.order = [], []

    def link(self, *_):
        self.links.append(KeptLink(self.order))
        return self.links[-1]

    def leave(self):
        """Send the oldest part of the longest queue and return its size."""
        return max(self.links, key=lambda link: len(link.queued)).leave()


class KeptLink:
    """Keeps queued parts until `leave` sends the oldest."""

    peer = "a slow link"

    def __init__(self, order):
        self.queued, self.order = [], order

    def send(self, kind, header, parts=(), sent=None, *, urgent=False):
        if kind == sum_frames.PART:
            self.order.append(m.header(kind, header).key)
            self.queued.append((sum(map(len, parts)), sent))

    def leave(self):
        nbytes, sent = self.queued.pop(0)
        sent()
        return nbytes

    def close(self): ...


@pytest.fixture
def slow(monkeypatch):
    links = SlowLinks()
    monkeypatch.setattr(worker_sums, "link_to", links.link)
    return links


@pytest.fixture
def sums(slow):
    made = WorkerSums(0, [None, None], [1.0, 1.0], (), None, SumOptions("s", TcpOptions()))
    yield made
    made.close()


def begin(sums, key, nbytes, priority=0):
    grad, out = (np.empty(nbytes, np.uint8).data for _ in range(2))
    sums.sum(key, grad, out, "fp32", lambda: None, priority=priority)


@pytest.mark.parametrize(
    ("nbytes", "large", "small"),
    [
        (4 * KIB, 4 * KIB, 4 * KIB),
        (MIB, 128 * KIB, 128 * KIB),
        (16 * MIB, 128 * KIB, 128 * KIB),
        (32 * MIB, 256 * KIB, 128 * KIB),
        (64 * MIB, 512 * KIB, 128 * KIB),
        (128 * MIB, MIB, 256 * KIB),
        (256 * MIB, 2 * MIB, 256 * KIB),
        (512 * MIB, 2 * MIB, 256 * KIB),
    ],
)
@pytest.mark.parametrize(
    ("workers", "spares"),
    [(2, ()), (4, ()), (5, ()), (2, ((2, "10.0.0.9:7000", 1.0),))],
    ids=["2 workers", "4 workers", "5 workers", "a spare host"],
)
def test_a_part_is_a_share_of_its_tensor_within_bounds(nbytes, large, small, workers, spares, slow):
    sums = WorkerSums(
        0, [None] * workers, [1.0] * workers, spares, None, SumOptions("s", TcpOptions())
    )
    begin(sums, 1, nbytes)
    sizes = []
    while any(link.queued for link in slow.links):
        sizes.append(slow.leave())
    sums.close()
    assert set(sizes) == {small if spares or workers > 4 else large}
    assert sum(sizes) == nbytes, "all parts were sent"


@pytest.mark.parametrize("nbytes", [8 * MIB, 80 * MIB, 256 * MIB])
def test_a_link_gets_no_part_while_enough_bytes_wait(nbytes, sums, slow):
    begin(sums, 1, nbytes)
    for _ in range(24):
        waits = [[size for size, _ in link.queued] for link in slow.links]
        assert all(sum(sizes[:-1]) < worker_sums.AHEAD for sizes in waits), waits
        assert any(sum(sizes) >= worker_sums.AHEAD for sizes in waits), waits
        slow.leave()


@pytest.mark.parametrize("nbytes", [8 * MIB, 256 * MIB])
def test_an_urgent_tensor_waits_only_for_queued_parts(nbytes, sums, slow):
    begin(sums, 1, nbytes, priority=5)
    for _ in range(6):
        slow.leave()
    before = len(slow.order)
    begin(sums, 2, 2 * MIB, priority=0)
    for _ in range(30):
        slow.leave()
    after = slow.order[before:]
    assert after[:16] == [2] * 16, "its 16 parts are queued next"
    assert set(after[16:]) == {1}, "then the large tensor continues"
