"""Wire formats of gradients, by name; `register` adds the user's own. The formats lose precision,
so a format is used only if the user chooses it (Rule 2).

    gradient + residual -> encode -> (network) -> decode -> sum in fp32 + residual -> encode ->
    (network) -> decode

Workers and reducers keep the residuals: the values that encoding has lost so far (error feedback).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from roadtrain.errors import ConfigError, WireError
from roadtrain.kernels.cast import cast
from roadtrain.kernels.codecs import Codec, TopKCodec, encode_with_feedback
from roadtrain.options.names import did_you_mean
from roadtrain.sums import quantize


class _HalfPrecision(Codec):
    """The formats `bf16` and `fp16`: each value is rounded to the nearest value of the format."""

    feedback, dtype = False, ""

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        cast(values, "fp32", out.view(np.uint16), self.dtype)

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        cast(raw.view(np.uint16), self.dtype, out, "fp32")


class Bf16(_HalfPrecision):
    name = dtype = "bf16"


class Fp16(_HalfPrecision):
    name = dtype = "fp16"


class OneBit(Codec):
    """The format `onebit`: the sign of each value, and the mean magnitude of all values."""

    name = "onebit"

    def nbytes(self, n: int) -> int:
        return 4 + -(-n // 8)

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        out[:4].view(np.float32)[0] = quantize.pack_signs(values, out[4:])

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        quantize.unpack_signs(raw[4:], raw[:4].view(np.float32)[0], out)


class Dither(Codec):
    """The format `dither:BITS`, with BITS 2, 4 or 8: each value is rounded at random to the next
    level above or below. The probabilities are chosen so that the expected result equals the
    value."""

    name = "dither"

    def __init__(self, argument: str) -> None:
        self.bits = int(argument)
        if self.bits not in (2, 4, 8):
            raise ValueError(f"dither needs 2, 4 or 8 bits per value, not {self.bits}")

    def nbytes(self, n: int) -> int:
        return 4 + -(-n * self.bits // 8)

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        most = quantize.largest(values)
        out[:4].view(np.float32)[0] = most
        quantize.pack_levels(values, most, self.bits, np.uint64(seed & (1 << 64) - 1), out[4:])

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        quantize.unpack_levels(raw[4:], raw[:4].view(np.float32)[0], self.bits, out)


FORMATS: dict[str, type[Codec]] = {c.name: c for c in (Bf16, Fp16, TopKCodec, OneBit, Dither)}


def register(kind: type[Codec]) -> type[Codec]:
    """Register a codec class under its `name` in this process. Can be used as a decorator.

    Args:
        kind: A subclass of Codec.

    Returns:
        The class `kind`.
    """
    FORMATS[kind.name] = kind
    format_of.cache_clear()
    return kind


@lru_cache
def format_of(text: str) -> Codec:
    """Return the codec of the format `text`, which is NAME or NAME:ARGUMENT. Raises ConfigError."""
    name, _, argument = text.partition(":")
    if name not in FORMATS:
        raise ConfigError(
            f"there is no format {text!r}, the formats are {', '.join(sorted(FORMATS))}",
            hint=did_you_mean(name, FORMATS)
            or "register your own class on every host (roadtrain serve --sum --formats MODULE)",
        )
    try:
        return FORMATS[name](argument)
    except ValueError as error:
        raise ConfigError(f"format {text!r}: {error}", hint=FORMATS[name].__doc__ or "") from error


def seed_of(*numbers: int) -> int:
    """Return a seed for random numbers, which is the same for the same `numbers` in every run."""
    return hash(numbers) & (1 << 64) - 1  # Python's hash of integers is not randomized


def decode(text: str, raw: memoryview, out: np.ndarray) -> None:
    """Decode the received bytes `raw` of the format `text` into `out`. Raises WireError if the
    bytes are malformed."""
    try:
        format_of(text).decode(np.frombuffer(raw, np.uint8), out)
    except ValueError as error:
        raise WireError(f"{len(raw)} received bytes are not valid {text}: {error}") from error


def encode(text: str, values: np.ndarray, residual: np.ndarray | None, out: Any, seed: int) -> None:
    """Encode `values` plus `residual` in the format `text`, and store the new residual in
    `residual`.

    Args:
        values: float32 [n].
        residual: float32 [n], the values that encoding has lost so far; None if there is no error
            feedback.
        out: Destination of the encoded bytes. Its size is the codec's `nbytes(n)`.
        seed: Seed for formats that round at random.
    """
    raw = np.frombuffer(out, np.uint8)
    encode_with_feedback(format_of(text), values, "fp32", residual, raw, seed)
