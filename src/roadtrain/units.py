"""Parse and print byte sizes, durations and rates.

Inside the package, sizes are in bytes and durations in seconds. Names contain the unit: `nbytes`,
`timeout_s`, `bytes_per_s`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from roadtrain.errors import UnitError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATES = {unit: nbytes for unit, nbytes in _BYTES.items() if unit} | {
    unit: bits / 8 for unit, bits in _BITS.items()
}
_FLOPS = {"gflop": 1e9, "tflop": 1e12, "pflop": 1e15, "gflops": 1e9, "tflops": 1e12, "pflops": 1e15}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# (unit, seconds of the unit, shortest duration in seconds that is printed in the unit)
_DURATIONS = (
    ("years", 31536000.0, 63072000.0),
    ("d", 86400.0, 172800.0),
    ("h", 3600.0, 7200.0),
    ("min", 60.0, 120.0),
    ("s", 1.0, 0.9995),
    ("ms", 1e-3, 0.9995e-3),
    ("us", 1e-6, 0.9995e-6),
    ("ns", 1e-9, 1e-12),
)
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Parse a size, such as `"1.5GiB"`, `"800 MB"` or `4096`, and return it in bytes. Raises
    UnitError."""
    if isinstance(text, int) and text >= 0:
        return text
    return int(_parsed(str(text), _BYTES, "a size", "900MB, 1.5GiB"))


def parse_rate(text: str) -> float:
    """Parse a rate above 0, such as `"400Mbit/s"` or `"1.5 GB/s"`, and return it in bytes per
    second. Raises UnitError, also for `Gb/s`, because b may mean bits or bytes."""
    if re.search(r"[0-9 ][kmgtKMGT]?b/s$", text):
        raise UnitError(
            f"{text!r} is not a rate: b may be bits or bytes", hint="write 100Gbit/s or 12.5GB/s"
        )
    return _parsed(text, _RATES, "a rate", "400Mbit/s, 1.5GB/s", per="/s")


def parse_flops(text: str) -> float:
    """Parse a compute speed above 0, such as `"312TFLOP/s"`, and return it in floating-point
    operations per second. Raises UnitError."""
    return _parsed(str(text), _FLOPS, "a compute speed", "312TFLOP/s", per="/s")


def parse_seconds(text: str) -> float:
    """Parse a duration, such as `"5us"`, `"1.5 ms"` or `"2s"`, and return it in seconds. Raises
    UnitError."""
    return _parsed(str(text), _SECONDS, "a time", "5us, 1.5ms, 2s")


def _parsed(text: str, units: Mapping[str, float], what: str, example: str, per: str = "") -> float:
    """Parse a number, a unit and the suffix `per`, and return the number times the unit's
    factor."""
    match = _NUMBER.fullmatch(text.removesuffix(per))
    size = units.get(match[2].lower()) if match and text.endswith(per) else None
    if (
        match is None
        or size is None
        or (per and not float(match[1]))
        or float(match[1]) == float("inf")
    ):
        raise UnitError(f"{text!r} is not {what}", hint=f"write a number and a unit: {example}")
    return float(match[1]) * size


def show_bytes(nbytes: float) -> str:
    """Format a number of bytes: `9.4 GiB`, `512 B`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{int(nbytes)} B"


def show_rate(bytes_per_s: float) -> str:
    """Format a rate in decimal units: `3.10 GB/s`, `25 MB/s`."""
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.2f} {unit}"
    if bytes_per_s >= 1e6:
        return f"{bytes_per_s / 1e6:.{0 if bytes_per_s >= 1e7 else 1}f} MB/s"
    return f"{show_number(bytes_per_s / 1e3)} kB/s"


def show_seconds(seconds: float) -> str:
    """Format a duration: `7.08 h`, `3.2 min`, `1.25 s`, `340 ms`, `12 us`."""
    for unit, size, least in _DURATIONS:
        if seconds >= least:
            whole = round(seconds / size) if unit == "years" else seconds / size
            return f"{show_number(whole)} {unit}"
    return "0 s"


def show_flops(flops_per_s: float) -> str:
    """Format a compute speed: `312 TFLOP/s`, `45.2 GFLOP/s`."""
    unit, size = ("TFLOP/s", 1e12) if flops_per_s >= 1e12 else ("GFLOP/s", 1e9)
    return f"{show_number(flops_per_s / size)} {unit}"


def show_joules(joules: float) -> str:
    """Format an energy: `4.2 MJ`, `8.06 J`, `77.2 mJ`."""
    for unit, size in (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0)):
        if joules >= size:
            return f"{show_number(joules / size)} {unit}"
    return f"{show_number(joules * 1e3)} mJ"


def show_number(number: float) -> str:
    """Format a number with three significant digits: `0.0123`, `45.6`, `1,234,567`."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def show_params(count: float) -> str:
    """Format a parameter count: `6.74 B`, `2.8 M`, `512`."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,.0f}"


def show_count(count: int, noun: str, plural: str = "") -> str:
    """Format a count and its noun: `1 host`, `2 hosts`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def round_up(n: int, to: int) -> int:
    """Round `n` up to a multiple of `to`."""
    return -(-n // to) * to
