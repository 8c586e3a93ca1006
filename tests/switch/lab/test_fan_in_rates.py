"""The packets of a fan-in on links of 10 Mbit/s to 4 Gbit/s: without loss, the node receives and
sends each packet once at any rate; with loss, every sum is right."""

from __future__ import annotations

import pytest

from roadtrain.lab import loss_available, network_available
from tests.support.fan_in_lab import FRAME, FanInLab, network

MBIT = 1e6 / 8
WHY = network_available() or loss_available()
pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(WHY is not None, reason=f"no lab: {WHY}"),
]
MOST = 1.05  # times the bytes of the packets
# A thread that gets no processor for longer than a timeout looks like a loss, which costs a probe
# or a window of packets. That may spoil one of three runs; before windows followed rates, each
# packet of every run was resent three times at 100 Mbit/s.
RESENT = 0.1


@pytest.mark.parametrize(
    ("workers", "mbit", "count"),
    [
        pytest.param(8, 10, 800, marks=pytest.mark.exhaustive),
        (8, 100, 6000),
        (2, 1000, 20_000),
        (2, 4000, 20_000),
    ],
)
def test_without_loss_the_node_receives_each_packet_once(
    workers: int, mbit: int, count: int
) -> None:
    with network(workers, mbit * MBIT) as net, FanInLab(net, workers) as lab:
        sent = min(
            (lab.send(count, count) for _ in range(3)), key=lambda traffic: max(traffic.resends)
        )
        assert sent.received <= MOST and sent.sent <= MOST, sent
        assert max(sent.resends) <= RESENT * count, sent
        assert sent.seconds >= 0.8 * count * FRAME / (mbit * MBIT), "the links are not limited"


@pytest.mark.parametrize("loss", [pytest.param(0.001, marks=pytest.mark.exhaustive), 0.01])
def test_with_loss_the_node_receives_little_more_and_every_sum_is_right(loss: float) -> None:
    with network(4, 50 * MBIT, loss) as net, FanInLab(net, 4) as lab:
        sent = min((lab.send(4000, 4000) for _ in range(3)), key=lambda traffic: traffic.received)
        # a number is lost on one of five links; each of four workers may resend it
        assert sent.received <= MOST + 4 * 5 * loss and sent.sent <= MOST + 2 * 5 * loss, sent
