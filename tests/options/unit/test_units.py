"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest

from roadtrain.errors import UnitError
from roadtrain.units import parse_rate, show_flops, show_number, show_rate, show_seconds


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
def test_invalid_rates_are_refused(text: str) -> None:
    with pytest.raises(UnitError, match="is not a rate"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (4e-19, "0 s"),  # a float rounding error
        (17e-9, "17 ns"),
        (12e-6, "12 us"),
        (0.9996e-3, "1 ms"),  # never 1e+03 us
        (0.34, "340 ms"),
        (0.99999, "1 s"),
        (1.25, "1.25 s"),
        (119.0, "119 s"),
        (192.0, "3.2 min"),
        (25494.0, "7.08 h"),
        (3e5, "3.47 d"),
        (1e9, "32 years"),
    ],
)
def test_durations_are_shown_in_readable_units(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


def test_rates_and_numbers_are_shown_without_exponents() -> None:
    rates = (3.1e9, 1e12, 25e6, 1.5e6, 250e3, 12.0)
    assert [show_rate(rate) for rate in rates] == [
        "3.10 GB/s",
        "1.00 TB/s",
        "25 MB/s",
        "1.5 MB/s",
        "250 kB/s",
        "0.012 kB/s",
    ]
    assert [show_flops(flops) for flops in (312e12, 1979e12, 45.2e9)] == [
        "312 TFLOP/s",
        "1,979 TFLOP/s",
        "45.2 GFLOP/s",
    ]
    assert [show_number(n) for n in (0.0123, 45.6, 999.7, 1.8e8)] == [
        "0.0123",
        "45.6",
        "1,000",
        "180,000,000",
    ]
