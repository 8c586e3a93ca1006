"""Small runs of benchmarks/fanin/random.py: packets through a switch that loses, repeats and delays
them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest

from benchmarks.fanin.machines import LiteralSwitch
from benchmarks.fanin.random import Faults, Scene, Table, send_through
from roadtrain.errors import WireError
from roadtrain.switch.switch_table import SwitchTable
from tests.support.plain_table import PlainTable

BAD = Faults(loss=0.05, repeated=0.05, very_late=0.05, restart=0.05)


@pytest.mark.parametrize("table", [PlainTable, SwitchTable])
@pytest.mark.parametrize("workers, window", [(2, 64), (3, 256)])
@pytest.mark.slow
def test_no_sum_is_wrong(table: type[Table], workers: int, window: int) -> None:  # Rule 1
    found = send_through(table, 20_000, seed=1, workers=workers, window=window, faults=BAD)
    assert found.wrong == 0 and found.packets >= 20_000 and found.restarts > 0
    assert found.sums > 2_000


@pytest.mark.slow
def test_many_packets_through_the_compiled_table() -> None:  # Rule 1
    found = send_through(SwitchTable, 100_000, seed=2, workers=4, window=512)
    assert found.wrong == 0 and found.packets >= 100_000


def test_packets_that_are_not_lost_are_not_resent() -> None:
    still = Faults(loss=0, repeated=0, late=0, very_late=0, restart=0)
    found = send_through(PlainTable, 5_000, workers=2, window=64, faults=still)
    assert found.wrong == 0 and found.resent == 0 and found.packets == 3 * found.sums


def test_a_wrong_sum_is_detected() -> None:
    """L10: the switch as published."""
    literal = partial(PlainTable, machine=LiteralSwitch)
    scene = Scene(literal, BAD, seed=1, workers=2, window=64)
    for sender in scene.senders:
        sender.may_send(10_000)
    with suppress(WireError):  # a number that a worker never sent may arrive
        while not scene.outcome.wrong and scene.end.ack < 10_000:
            scene.tick()
    assert scene.outcome.wrong
