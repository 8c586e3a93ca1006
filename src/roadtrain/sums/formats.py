"""The formats that gradients travel in to be summed, by name; `register` takes the user's own.

    gradient + residual -> encode -> (network) -> decode -> sum in fp32 + residual -> encode ->
    (network) -> decode

Residuals are kept at workers and at reducers. Lossy: off by default (Rule 2).
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


class _Half(Codec):
    """bf16, fp16: every value rounded to the nearest."""

    feedback, dtype = False, ""

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        cast(values, "fp32", out.view(np.uint16), self.dtype)

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        cast(raw.view(np.uint16), self.dtype, out, "fp32")


class Bf16(_Half):
    name = dtype = "bf16"


class Fp16(_Half):
    name = dtype = "fp16"


class OneBit(Codec):
    """onebit: the sign of every value, and the mean magnitude of all."""

    name = "onebit"

    def nbytes(self, n: int) -> int:
        return 4 + -(-n // 8)

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        out[:4].view(np.float32)[0] = quantize.pack_signs(values, out[4:])

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        quantize.unpack_signs(raw[4:], raw[:4].view(np.float32)[0], out)


class Dither(Codec):
    """dither:BITS (2, 4, 8): a level below or above the value, at random, so that the mean is
    exact."""

    name = "dither"

    def __init__(self, argument: str) -> None:
        self.bits = int(argument)
        if self.bits not in (2, 4, 8):
            raise ValueError("takes 2, 4 or 8 bits a value")

    def nbytes(self, n: int) -> int:
        return 4 + -(-n * self.bits // 8)

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        most = quantize.largest(values)
        out[:4].view(np.float32)[0] = most
        quantize.pack_levels(values, most, self.bits, np.uint64(seed & (1 << 64) - 1), out[4:])

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        quantize.unpack_levels(raw[4:], raw[:4].view(np.float32)[0], self.bits, out)


FORMATS: dict[str, type[Codec]] = {}


def register(kind: type[Codec]) -> type[Codec]:
    """Makes `kind` known under its name, in this process; usable as a decorator."""
    FORMATS[kind.name] = kind
    format_of.cache_clear()
    return kind


@lru_cache
def format_of(text: str) -> Codec:
    """NAME or NAME:ARGUMENT. Raises ConfigError."""
    name, _, argument = text.partition(":")
    if name not in FORMATS:
        raise ConfigError(
            f"no format {text!r}, there are {', '.join(sorted(FORMATS))}",
            hint=did_you_mean(name, FORMATS)
            or "a class of your own is made known by register, on every host (roadtrain serve --sum"
            " --formats MODULE)",
        )
    try:
        return FORMATS[name](argument)
    except ValueError as error:
        raise ConfigError(f"format {text!r}: {error}", hint=FORMATS[name].__doc__ or "") from error


for _kind in (Bf16, Fp16, TopKCodec, OneBit, Dither):
    register(_kind)


def seed_of(*numbers: int) -> int:
    """Other for every encoding, the same in every run."""
    return hash(numbers) & (1 << 64) - 1  # Python's, of integers: not randomized


def decode(text: str, raw: memoryview, out: np.ndarray) -> None:
    """What came from the network, checked. Raises WireError."""
    try:
        format_of(text).decode(np.frombuffer(raw, np.uint8), out)
    except ValueError as error:
        raise WireError(f"{len(raw)} bytes of {text} came, which cannot be: {error}") from error


def encode(text: str, values: np.ndarray, residual: np.ndarray | None, out: Any, seed: int) -> None:
    """values: float32 [n]. out: nbytes(n) bytes. `residual`: as of `encode_with_feedback`."""
    raw = np.frombuffer(out, np.uint8)
    encode_with_feedback(format_of(text), values, "fp32", residual, raw, seed)
