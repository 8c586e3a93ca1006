"""The actions on each chunk and their order are unchanged, in the real run and the simulation (Rule
7)."""

from __future__ import annotations

import cases
import fixtures
import pytest


@pytest.mark.parametrize("name", cases.ORDERS)
def test_real_orders(name: str) -> None:
    assert cases.real_order(name) == fixtures.load("order.json")[name]


@pytest.mark.parametrize("name", cases.SIMULATED_ORDERS)
def test_simulated_orders(name: str) -> None:
    assert cases.simulated_order(name) == (fixtures.KEPT / f"order-{name}.txt").read_text()
