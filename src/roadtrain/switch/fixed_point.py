"""Fixed point: gradients as integers with a scale per block, so that a network can add them.

    exponents of all workers -> the greatest (a switch) -> quantize at each -> sums (switches)
    -> dequantize

BLOCK elements share one exponent byte: 0 where all are zero, 255 where a NaN or an infinity is
among them, else e + 126 within 1 to 254, e the least integer with |x| < 2^e for all of them. With E
the greatest of W workers' e, L = ceil(log2 W) and an integer of `bits`:

    q = rint(x 2^(bits - 1 - L - E)), at most 2^(bits - 1 - L) - 1 in magnitude
    sum = (q of worker 0 + ... ) 2^(E + L + 1 - bits)

so W |q| < 2^(bits - 1): neither a sum nor a part of it can overflow, in whatever order and tree it
is made, and all orders give the same integer (Rule 1). A block of exponent 255 is NaN for all: no
NaN becomes a number (Rule 6). Lossy: it is the user's choice (Rule 2). `error_bound` says how much.
A scale per block agreed ahead of it is SwitchML's (Sapio et al., NSDI 2021), fixed point in the
network LuWu's (section 3.2.2).

Integers stand in packets' payloads (switch/packets.py), little-endian, `width` bytes each:
gradient packet p holds elements [p n, (p + 1) n), n = PAYLOAD_NBYTES / width. Computed in float64.
Assumes contiguous arrays: float32, uint16 for bf16 and fp16. Does NOT thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import kernel, typed, widen
from roadtrain.switch import packets
from roadtrain.switch.packets import (
    BLOCK,
    HEADER_NBYTES,
    PACKET_NBYTES,
    PAYLOAD_NBYTES,
    Kind,
    PacketKey,
    check_bulk,
)

ZERO, NOT_FINITE = 0, 255  # exponent bytes that are no exponent
BIAS = 126
INTEGER: Mapping[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def blocks_of(elements: int) -> int:
    return -(-elements // BLOCK)


def packets_of(elements: int, width: int) -> int:
    """Gradient packets of so many elements of `width` bytes."""
    return -(-elements * width // PAYLOAD_NBYTES)


def exponent_packets_of(elements: int) -> int:
    return -(-blocks_of(elements) // PAYLOAD_NBYTES)


def _spare_bits(workers: int, width: int) -> int:
    """Bits of one worker's magnitude: bits - 1 - L. Raises ConfigError."""
    if width not in INTEGER:
        raise ConfigError(f"integers of {width} bytes", hint="1, 2 or 4")
    bits = 8 * width - 1 - (workers - 1).bit_length()
    if workers < 1 or bits < 1:
        raise ConfigError(
            f"the sum of {workers} workers in an integer of {width} bytes, of"
            f" {1 << (8 * width - 2)} at most",
            hint="a wider one: int16 or int32",
        )
    return bits


def error_bound(maximum: int, workers: int, width: int) -> float:
    """How far an element of the sum of `workers` may lie from the exact sum, in a block whose
    greatest exponent byte is `maximum`: one unit of each worker (half a unit where the magnitude
    was not clamped). The rounding of the sum to float32 comes on top: 2^-24 of its magnitude,
    2^-150 at least. Infinite for a block that is NaN. Raises ConfigError."""
    bits = _spare_bits(workers, width)
    if maximum == ZERO:
        return 0.0
    return math.inf if maximum == NOT_FINITE else workers * 2.0 ** (maximum - BIAS - bits)


@kernel
def _exponents(values: Any, out: Any) -> Any:
    for block in range(out.size):
        part = values[block * BLOCK : (block + 1) * BLOCK]
        most = np.uint32(0)
        for i in range(part.size):
            most = max(most, np.uint32(np.float32(widen(part[i])).view(np.uint32) & _MAGNITUDE))
        # the exponent field of float32 is e + 126; below the least normal number it is 0
        field = most >> np.uint32(23)
        out[block] = np.uint8(field if field > 0 or most == 0 else 1)


def exponents(values: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """The exponent byte of each block. values: [N] of `dtype`; out: uint8 [blocks_of(N)]."""
    assert out.size == blocks_of(values.size)
    _exponents(typed(values, dtype), out)


@kernel
def _scale(exponent: Any, bits: Any) -> Any:
    """2^(bits - E) in float64; 0 for a block of zeros or of what is not finite."""
    power = np.int64(1023 + BIAS) + np.int64(bits) - np.int64(exponent)
    one = np.uint64(power << np.int64(52)).view(np.float64)
    return np.float64(0) if exponent in (ZERO, NOT_FINITE) else one


@kernel
def _quantize_block(values: Any, scale: Any, top: Any, out: Any) -> Any:
    for i in range(values.size):
        q = np.rint(np.float64(widen(values[i])) * scale)
        q = q if q < top else top  # so is a NaN, which `exponents` has said before
        q = q if q > -top else -top
        out[i] = np.int32(q)


@kernel
def _quantize(values: Any, maxima: Any, bits: Any, packet: Any, like: Any, run: Any) -> Any:
    top = np.float64((1 << bits) - 1)
    each = PAYLOAD_NBYTES // like.itemsize
    for i in range(run.size // PACKET_NBYTES):
        start = i * PACKET_NBYTES + HEADER_NBYTES
        payload = run[start : start + PAYLOAD_NBYTES].view(like.dtype)
        first = (packet + i) * each
        for at in range(0, each, BLOCK):
            part = values[first + at : first + at + BLOCK]
            into = payload[at : at + BLOCK]
            if part.size > 0:
                scale = _scale(maxima[(first + at) // BLOCK], bits)
                if scale > 0:
                    _quantize_block(part, scale, top, into)
                else:
                    into[:] = 0
            into[part.size :] = 0


def quantize(
    values: np.ndarray,
    dtype: str,
    maxima: np.ndarray,
    workers: int,
    width: int,
    packet: int,
    run: np.ndarray,
) -> None:
    """Write the integers of gradient packets packet, packet + 1, ... into the payloads of a run of
    packets; zeros after the last element. values: [N] of `dtype`, N = 0: all zeros. maxima: uint8
    [blocks_of(N)]. Raises ConfigError for workers or a width that cannot be."""
    bits = _spare_bits(workers, width)
    assert not values.size or maxima.size == blocks_of(values.size)
    check_bulk(run)
    _quantize(typed(values, dtype), maxima, bits, packet, np.empty(0, INTEGER[width]), run)


@kernel
def _dequantize_block(integers: Any, unit: Any, out: Any) -> Any:
    for i in range(out.size):
        out[i] = np.float32(np.float64(integers[i]) * unit)


@kernel
def _dequantize(run: Any, ok: Any, index: Any, like: Any, bits: Any, maxima: Any, out: Any) -> Any:
    each = PAYLOAD_NBYTES // like.itemsize
    for i in range(run.size // PACKET_NBYTES):
        if not ok[i] or index[i] < 0:
            continue
        start = i * PACKET_NBYTES + HEADER_NBYTES
        payload = run[start : start + PAYLOAD_NBYTES].view(like.dtype)
        first = index[i] * each
        for at in range(0, each, BLOCK):
            part = out[first + at : first + at + BLOCK]
            if part.size == 0:
                break
            exponent = maxima[(first + at) // BLOCK]
            scale = _scale(exponent, bits)
            if exponent == NOT_FINITE:
                part[:] = np.float32(np.nan)
            elif scale > 0:
                _dequantize_block(payload[at : at + BLOCK], 1 / scale, part)
            else:
                part[:] = np.float32(0)


def dequantize(
    run: np.ndarray,
    ok: np.ndarray,
    index: np.ndarray,
    width: int,
    workers: int,
    maxima: np.ndarray,
    out: np.ndarray,
) -> None:
    """out = the sums that stand in packets: packet i, where ok[i], holds gradient packet index[i].
    ok: bool, index: int64, one a packet; maxima: uint8 [blocks_of(N)]; out: float32 [N], only the
    elements of these packets are written. A sum beyond float32's range is infinite. Raises as
    `quantize`."""
    bits = _spare_bits(workers, width)
    assert maxima.size == blocks_of(out.size)
    check_bulk(run)
    _dequantize(run, ok, index, np.empty(0, INTEGER[width]), bits, maxima, out)


def load_kernels(width: int) -> None:
    """Load the compiled code of a fan-in's ends, which takes a second on a busy host where it is
    first used: whoever takes part does it before anybody waits for its packets. `width`: bytes of
    an element on its way."""
    packet, one = np.zeros(PACKET_NBYTES, np.uint8), np.ones(1, np.bool_)
    key, block = PacketKey.derive(None, b""), np.zeros(BLOCK, np.float32)
    maximum = np.zeros(1, np.uint8)
    packets.write_headers(packet, PACKET_NBYTES, 1, kind=Kind.TRIAL, job=0, first=0)
    packets.copy_in(packet, maximum, 0)
    for values, dtype in ((block, "fp32"), (np.zeros(BLOCK, np.uint16), "bf16")):
        exponents(values, dtype, maximum)
        quantize(values, dtype, maximum, 1, width, 0, packet)
    packets.seal(packet, PACKET_NBYTES, 1, key)
    packets.verify(packet, PACKET_NBYTES, 1, key, 0)
    packets.headers(packet, PACKET_NBYTES, 1)
    first = np.zeros(1, np.int64)
    packets.copy_out(packet, one, first.astype(np.uint32), maximum)
    dequantize(packet, one, first, width, 1, maximum, block)
