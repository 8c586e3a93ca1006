"""Formats: how fp32 gradients travel to a reducer and back. A registry; `register` takes the user's
own.

    fp32 gradient + residual -> encode -> (network) -> decode -> sum in fp32 + residual -> encode ->
    (network) -> decode

With `feedback`, what one encoding loses is kept, and added to the next gradient of the same tensor
(error feedback, Karimireddy et al. 2019), at the worker and at the reducer. Does NOT know tensors,
rounds or links.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import numpy as np

from roadtrain.errors import ConfigError, WireError
from roadtrain.kernels import quantize
from roadtrain.kernels.cast import cast
from roadtrain.kernels.topk import scatter, top_k


class Codec:
    """One way to write n values, from NAME or NAME:ARGUMENT. All hosts must know it. A new one
    needs these three."""

    name = ""
    feedback = True

    def __init__(self, argument: str) -> None:
        """Raises ValueError for an argument it does not take."""
        if argument:
            raise ValueError("takes no argument")

    def nbytes(self, n: int) -> int:
        """Of n encoded values; not less for a larger n."""
        raise TypeError(f"the format {self.name} says no nbytes")

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        """values: float32 [n]. out: uint8 [nbytes(n)], all of it is sent. `seed`: other for
        every call."""
        raise TypeError(f"the format {self.name} has no encode")

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        """raw: uint8 [nbytes(n)], from the network: anything may stand in it, ValueError if it
        cannot be. out: float32 [n]."""
        raise TypeError(f"the format {self.name} has no decode")


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


class TopKCodec(Codec):
    """topk:FRACTION: the largest by magnitude, as indices and values."""

    name = "topk"

    def __init__(self, argument: str) -> None:
        self.keep = float(argument)
        if not 0 < self.keep < 1:
            raise ValueError("keeps a fraction between 0 and 1")

    def _k(self, n: int) -> int:
        return min(n, max(1, round(self.keep * n)))

    def nbytes(self, n: int) -> int:
        return 8 * self._k(n)

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        k = self._k(values.size)
        top_k(values, "fp32", k, out[: 4 * k].view(np.uint32), out[4 * k :].view(np.float32))

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        k = self._k(out.size)
        indices = raw[: 4 * k].view(np.uint32)
        if indices.size and int(indices.max()) >= out.size:
            raise ValueError(f"an index {int(indices.max())} of {out.size} values")
        scatter(
            np.sort(indices), raw[4 * k :].view(np.float32)[np.argsort(indices, kind="stable")], out
        )


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
        near = get_close_matches(name, FORMATS, n=1, cutoff=0.5)
        raise ConfigError(
            f"no format {text!r}, there are {', '.join(sorted(FORMATS))}",
            hint=(
                f"did you mean {near[0]}?"
                if near
                else (
                    "a class of your own is made known by "
                    "register, on every host (roadtrain serve --sum --formats MODULE)"
                )
            ),
        )
    try:
        return FORMATS[name](argument)
    except ValueError as error:
        raise ConfigError(f"format {text!r}: {error}", hint=FORMATS[name].__doc__ or "") from error


for _kind in (Bf16, Fp16, TopKCodec, OneBit, Dither):
    register(_kind)


def decode(text: str, raw: memoryview, out: np.ndarray) -> None:
    """What came from the network, checked. Raises WireError."""
    try:
        format_of(text).decode(np.frombuffer(raw, np.uint8), out)
    except ValueError as error:
        raise WireError(f"{len(raw)} bytes of {text} came, which cannot be: {error}") from error


def encode(text: str, values: np.ndarray, residual: np.ndarray | None, out: Any, seed: int) -> None:
    """values: float32 [n]; with a residual (float32 [n], changed in place) it is added first.
    out: nbytes(n) bytes."""
    form, into = format_of(text), np.frombuffer(out, np.uint8)
    if residual is None:
        form.encode(values, into, seed)
        return
    wanted, sent = values + residual, np.empty_like(residual)
    form.encode(wanted, into, seed)
    form.decode(into, sent)
    quantize.keep_back(wanted, sent, residual)
