"""Bytes, seconds and rates as people write them.

Inside the package a size is an `int` of bytes and a time a `float` of seconds. The unit stands in
the name: `nbytes`, `timeout_s`, `bytes_per_s`. Does NOT keep the unit that was written.
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
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """`"1.5GiB"`, `"800 MB"`, `4096` -> bytes. Raises UnitError for anything else, a negative
    number included."""
    if isinstance(text, int) and text >= 0:
        return text
    return int(_parsed(str(text), _BYTES, "a size", "900MB, 1.5GiB"))


def parse_rate(text: str) -> float:
    """`"400Mbit/s"`, `"1.5 GB/s"` -> bytes a second, more than 0. Raises UnitError for anything
    else, `Gb/s` included, which may be bits or bytes."""
    if re.search(r"[0-9 ][kmgtKMGT]?b/s$", text):
        raise UnitError(
            f"{text!r} is not a rate: b may be bits or bytes", hint="write 100Gbit/s or 12.5GB/s"
        )
    return _parsed(text, _RATES, "a rate", "400Mbit/s, 1.5GB/s", per="/s")


def parse_flops(text: str) -> float:
    """`"312TFLOP/s"` -> floating-point operations a second, more than 0. Raises UnitError for
    anything else."""
    return _parsed(str(text), _FLOPS, "a speed of computing", "312TFLOP/s", per="/s")


def parse_seconds(text: str) -> float:
    """`"5us"`, `"1.5 ms"`, `"2s"` -> seconds. Raises UnitError for anything else."""
    return _parsed(str(text), _SECONDS, "a time", "5us, 1.5ms, 2s")


def _parsed(text: str, units: Mapping[str, float], what: str, example: str, per: str = "") -> float:
    """`per`: what follows the unit, as `/s`. A number with it must be above 0."""
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
    """Bytes for a person: `9.4 GiB`, `512 B`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{int(nbytes)} B"


def show_rate(bytes_per_s: float) -> str:
    """A rate for a person, in the decimal units that disks are sold in: `3.10 GB/s`."""
    return (
        f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
    )


def show_seconds(seconds: float) -> str:
    """A time for a person: `1.25 s`, `340 ms`, `12 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} us"


def show_params(count: float) -> str:
    """How many parameters, for a person: `6.74 B`, `2.8 M`, `512`."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,.0f}"


def show_count(count: int, one: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{count} {one}{'' if count == 1 else 's'}"


def round_up(n: int, to: int) -> int:
    """The least multiple of `to` that is not below `n`."""
    return -(-n // to) * to
