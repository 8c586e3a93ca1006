"""Both streams of a fan-in on virtual time, with the real senders, receivers and heartbeats (Rule
7): links of 10 Mbit/s to 4 Gbit/s, losses, repetition, reordering and stalls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.switch.protocol.timed_sender import LEAST_WINDOW
from tests.support.packet_network import FRAME, QUEUE_NBYTES, Network

MBIT = 1e6 / 8


def resends(net: Network) -> list[int]:
    return [host.sender.numbers.resends for host in [net.node, *net.workers]]


@pytest.mark.parametrize("mbit", [10, 100, 1000, 4000])
@pytest.mark.slow
def test_without_loss_every_packet_crosses_each_link_once(mbit: int) -> None:
    net, count = Network(8, mbit * MBIT), 1500
    seconds = net.run(count, count)
    assert resends(net) == [0] * 9
    assert net.to_node.nbytes == net.from_node.nbytes == count * FRAME
    assert seconds < count * FRAME / (mbit * MBIT) * 1.1 + 0.4
    if mbit < 1000:
        flight_s = (net.most_flight - LEAST_WINDOW) * FRAME / (mbit * MBIT)
        assert flight_s < 0.08, "a queue builds"


@pytest.mark.parametrize(("loss", "goal"), [(0.0001, 0.97), (0.001, 0.93), (0.01, 0.75)])
@pytest.mark.slow
def test_losses_are_repaired_within_a_round_trip(loss: float, goal: float) -> None:
    count, seconds = 6000, list[float]()
    for share in (0.0, loss):
        net = Network(4, 50 * MBIT, loss=share)
        seconds.append(net.run(count, count))
        assert net.to_node.nbytes / (count * FRAME) <= 1 + 20 * share
    assert seconds[0] / seconds[1] >= goal


@pytest.mark.slow
def test_a_switch_with_a_short_queue_is_not_overrun_for_long() -> None:
    net = Network(8, 100 * MBIT, queue=QUEUE_NBYTES // 4)
    net.run(6000, 6000)
    assert net.to_node.nbytes < 1.05 * 6000 * FRAME


@pytest.mark.parametrize("of", ["worker", "node", "links"])
@pytest.mark.slow
def test_after_a_stall_the_rest_is_sent_at_full_rate(of: str) -> None:
    net, count, stall = Network(4, 50 * MBIT), 3000, (0.3, 1.5)

    def stalled(now: float) -> bool:
        return stall[0] < now < stall[1]

    if of == "links":
        for wire in (net.to_node, net.from_node):
            wire.cut = stalled
    else:
        (net.node if of == "node" else net.workers[1]).paused = stalled
    seconds = net.run(count, count)
    assert seconds < 1.3 * count * FRAME / (50 * MBIT) + stall[1] - stall[0] + 0.9
    # a timer cannot tell a stall from a loss; each of the few timeouts resends at most a window
    assert max(resends(net)) < 0.2 * count


@settings(max_examples=25)
@given(
    workers=st.integers(1, 4),
    mbit=st.sampled_from([10, 100, 1000]),
    window=st.sampled_from([8, 64, 2048]),
    loss=st.sampled_from([0.0, 0.01, 0.2]),
    repeated=st.sampled_from([0.0, 0.1]),
    late_s=st.sampled_from([0.0, 0.003, 0.3]),
    seed=st.integers(0, 1000),
)
def test_faults_cost_time_but_never_a_sum(
    workers: int, mbit: int, window: int, seed: int, **faults: Any
) -> None:
    """`Network.run` checks all sums and copies."""
    net = Network(workers, mbit * MBIT, window=window, seed=seed, **faults)
    net.run(100, 100)
    for host in (net.node, *net.workers):
        host.sender.numbers.check()
