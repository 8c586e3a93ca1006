"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest

from roadtrain.errors import UnitError
from roadtrain.units import parse_rate


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400Mbit/s", 50e6),
        ("1.5 GB/s", 1.5e9),
        ("25 gbit/s", 3.125e9),
        ("1MiB/s", 1 << 20),
        ("8bit/s", 1.0),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["400", "400/s", "400Mbit", "-1Mbit/s", "0Mbit/s", "fast", "1 Mbps", ""]
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(UnitError, match="is not a rate"):
        parse_rate(text)
