"""Fixed point: gradients as integers with a scale per block, so that switches can add them.

    each worker: exponents -> switches: maximum -> each worker: quantize -> switches: sum
    -> server: dequantize

Each block of 352 elements has an exponent byte: 0 if all elements are zero, and 255 if an element
is NaN or infinite. Otherwise it is e + 126 (1 to 254), for the least integer e with |x| < 2^e for
all elements. Let E be the maximum e of W workers, L = ceil(log2 W), and let integers have `bits`
bits:

    q = rint(x 2^(bits - 1 - L - E)), clamped to a magnitude of 2^(bits - 1 - L) - 1
    sum = (q of worker 0 + q of worker 1 + ...) 2^(E + L + 1 - bits)

Then W |q| < 2^(bits - 1): no partial sum overflows, and the sum does not depend on the order or on
the tree of switches (Rule 1). A block with a NaN or an infinite element becomes NaN (Rule 6). Fixed
point is lossy, so the user must choose it (Rule 2). Sources: SwitchML (Sapio et al., NSDI 2021) for
the scale per block, LuWu (section 3.2.2) for sums in the network.

Integers are little-endian, `width` bytes each, in payloads of 1408 bytes. Arrays must be
contiguous: float32, or uint16 for bf16 and fp16.
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

ZERO, NOT_FINITE = 0, 255  # special exponent bytes
BIAS = 126
INTEGER: Mapping[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}
_LEAST = 2.0**-126  # of all normal float32 numbers
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def blocks_of(elements: int) -> int:
    return -(-elements // BLOCK)


def packets_of(elements: int, width: int) -> int:
    """Return the number of packets for a gradient of `elements` elements, each of `width` bytes."""
    return -(-elements * width // PAYLOAD_NBYTES)


def exponent_packets_of(elements: int) -> int:
    return -(-blocks_of(elements) // PAYLOAD_NBYTES)


def _spare_bits(workers: int, width: int) -> int:
    """Return how many bits each worker's magnitudes may have so that the sum does not overflow.
    Raises ConfigError if `width` is not supported or too small.
    """
    if width not in INTEGER:
        raise ConfigError(f"{width}-byte integers are not supported", hint="use 1, 2 or 4 bytes")
    bits = 8 * width - 1 - (workers - 1).bit_length()
    if workers < 1 or bits < 1:
        raise ConfigError(
            f"{workers} workers are too many for integers of {width} byte(s), which can hold the"
            f" sum of at most {1 << (8 * width - 2)} workers",
            hint="use wider integers: int16 or int32",
        )
    return bits


def error_bound(maximum: int, workers: int, width: int) -> float:
    """Return a bound of the absolute error of an element of the sum: one integer unit per worker.

    `maximum` is the largest exponent byte of the element's block. For a block that becomes NaN, the
    bound is infinite. Rounding the sum to float32 adds at most 2^-24 of its magnitude. Raises
    ConfigError if `width` is not supported, or is too small for so many workers.
    """
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
        # the exponent field of float32 is e + 126, or 0 for subnormal numbers
        field = most >> np.uint32(23)
        out[block] = np.uint8(field if field > 0 or most == 0 else 1)


def exponents(values: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """Compute the exponent byte of each block.

    Args:
        values: [N] of `dtype`.
        out: uint8 [blocks_of(N)].
    """
    assert out.size == blocks_of(values.size)
    _exponents(typed(values, dtype), out)


@kernel
def _scale(exponent: Any, bits: Any) -> Any:
    """Return 2^(bits - E) in float64, where E is `exponent` - 126, or 0 if the block is zero or not
    finite.
    """
    power = np.int64(1023 + BIAS) + np.int64(bits) - np.int64(exponent)
    scale = np.uint64(power << np.int64(52)).view(np.float64)
    return np.float64(0) if exponent in (ZERO, NOT_FINITE) else scale


@kernel
def _quantize_block(values: Any, scale: Any, top: Any, out: Any) -> Any:
    for i in range(values.size):
        q = np.rint(widen(values[i]) * scale)
        q = q if q < top else top  # NaN too; the block's exponent byte is NOT_FINITE then
        q = q if q > -top else -top
        out[i] = np.int32(q)


@kernel
def _quantize(values: Any, maxima: Any, bits: Any, packet: Any, like: Any, run: Any) -> Any:
    # the greatest float32 below 2^bits, at most 2^bits - 1
    top = np.float32((1 << bits) - (1 << max(bits - 24, 0)))
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
                # float32 gives the same bits as float64, because a product with a normal power of
                # two is exact, or below 2^-126
                if _LEAST <= scale <= 1 / _LEAST:
                    _quantize_block(part, np.float32(scale), top, into)
                elif scale > 0:
                    _quantize_block(part, scale, np.float64(top), into)
                else:
                    into[:] = 0
            if part.size < BLOCK:
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
    """Quantize the elements of the gradient packets `packet`, `packet` + 1, ..., into the payloads
    of `run`, padded with zeros.

    Args:
        values: [N] of `dtype`; N = 0 stands for all zeros.
        maxima: uint8 [blocks_of(N)], the largest exponent bytes of all workers.

    Raises:
        ConfigError: `width` cannot hold the sum of so many workers.
    """
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
    """Convert the integers of the valid packets of a run to float32. Sums beyond the range of
    float32 become infinite. Raises ConfigError if `width` cannot hold the sum of so many workers.

    Args:
        ok: bool, one per packet of the run: whether the packet is valid.
        index: int64, one per packet: the packet's index among the packets of the gradient.
        maxima: uint8 [blocks_of(N)], the largest exponent bytes of all workers.
        out: float32 [N]. Only the elements of the valid packets are written.
    """
    bits = _spare_bits(workers, width)
    assert maxima.size == blocks_of(out.size)
    check_bulk(run)
    _dequantize(run, ok, index, np.empty(0, INTEGER[width]), bits, maxima, out)


def load_kernels(width: int) -> None:
    """Load the compiled kernels, which takes a second, before other processes wait for packets."""
    packet, ok = np.zeros(PACKET_NBYTES, np.uint8), np.ones(1, np.bool_)
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
    packets.copy_out(packet, ok, first.astype(np.uint32), maximum)
    dequantize(packet, ok, first, width, 1, maximum, block)
