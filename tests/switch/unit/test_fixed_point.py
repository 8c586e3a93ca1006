"""Fixed point: kernels equal the plain reference, errors stay within their bound, sums cannot
overflow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import reference_downcast, reference_widen
from roadtrain.switch import fixed_point as fixed
from roadtrain.switch.packets import BLOCK, HEADER_NBYTES, PACKET_NBYTES, PAYLOAD_NBYTES
from tests.support import switch_references as references

DTYPES = ("fp32", "bf16", "fp16")
WIDTHS = (1, 2, 4)
MOST = {"fp32": 3.4028235e38, "bf16": 3.3895314e38, "fp16": 65504.0}


def values_of(dtype: str, n: int, seed: int, spread: int = 40) -> np.ndarray:
    """Random values of many magnitudes, with zeros, denormals and uniform blocks."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.exp2(np.repeat(rng.integers(-spread, spread, n // 100 + 1), 100)[:n])
        x = (rng.standard_normal(n) * scale).astype(np.float32)
        x[rng.random(n) < 0.05] = 0
        x[rng.random(n) < 0.02] *= np.float32(1e-42)
    x[BLOCK : 2 * BLOCK] = 0
    limit = np.float32(MOST[dtype])
    return reference_downcast(np.clip(x, -limit, limit), dtype)


def exponents_of(values: np.ndarray, dtype: str) -> np.ndarray:
    out = np.full(fixed.blocks_of(values.size), 9, np.uint8)
    fixed.exponents(values, dtype, out)
    return out


def quantized(values, dtype, maxima, workers, width) -> np.ndarray:
    """Integers of all packets, padded to whole packets."""
    count = fixed.packets_of(values.size, width)
    buffer = np.full(count * PACKET_NBYTES, 77, np.uint8)
    fixed.quantize(values, dtype, maxima, workers, width, 0, buffer)
    packets = buffer.reshape(count, PACKET_NBYTES)
    assert (packets[:, :HEADER_NBYTES] == 77).all()
    return packets[:, HEADER_NBYTES:].reshape(-1).view(fixed.INTEGER[width])


def dequantized(integers, n, maxima, workers, width) -> np.ndarray:
    count = fixed.packets_of(n, width)
    buffer = np.zeros((count, PACKET_NBYTES), np.uint8)
    buffer[:, HEADER_NBYTES:] = integers.view(np.uint8).reshape(count, PAYLOAD_NBYTES)
    out, ok = np.full(n, 7, np.float32), np.ones(count, bool)
    fixed.dequantize(buffer.reshape(-1), ok, np.arange(count), width, workers, maxima, out)
    return out


def fan_in_sum(values: list[np.ndarray], dtype: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(sum, maxima) as the fan-in computes them."""
    n, workers = values[0].size, len(values)
    maxima = np.max([exponents_of(array, dtype) for array in values], axis=0)
    integers = [quantized(array, dtype, maxima, workers, width) for array in values]
    with np.errstate(over="raise"):
        exact = np.sum([array.astype(np.int64) for array in integers], axis=0)
    total = np.sum(integers, axis=0, dtype=fixed.INTEGER[width])
    assert np.array_equal(total, exact), "an overflow"
    return dequantized(total, n, maxima, workers, width), maxima


def assert_within_bound(values: list[np.ndarray], dtype: str, width: int) -> None:
    found, maxima = fan_in_sum(values, dtype, width)
    # float64's own rounding of a sum of 64 is far below the bound and float32's rounding
    wide = np.sum([reference_widen(array, dtype).astype(np.float64) for array in values], axis=0)
    bounds = [fixed.error_bound(int(exponent), len(values), width) for exponent in maxima]
    bound = np.repeat(bounds, BLOCK)[: found.size]
    rounding = np.maximum(np.abs(wide) * 2.0**-24, 2.0**-150) + bound * 2.0**-24
    fits = np.abs(wide) + bound < MOST["fp32"]
    error = np.abs(found[fits].astype(np.float64) - wide[fits])
    assert (error <= (bound + rounding * 1.0001)[fits]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 351, 352, 353, 5000])
def test_exponents_equal_the_reference(dtype, n):
    values = values_of(dtype, n, seed=n, spread=120 if dtype != "fp16" else 14)
    assert np.array_equal(
        exponents_of(values, dtype), references.reference_exponents(values, dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exponent_is_the_least_above_the_maximum(dtype):
    block = np.zeros(BLOCK, np.float32)
    for power in range(-149, 128):
        for x in (2.0**power, 2.0**power * 1.5, -(2.0**power)):
            block[17] = x
            values = reference_downcast(block, dtype)
            wide = float(abs(reference_widen(values, dtype)[17]))
            (byte,) = exponents_of(values, dtype)
            if wide == 0:
                assert byte == 0
            elif math.isinf(wide):
                assert byte == fixed.NOT_FINITE
            else:
                assert byte == min(max(math.frexp(wide)[1] + 126, 1), 254)
                assert wide < 2.0 ** (int(byte) - 126)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 33, 64])
@pytest.mark.slow
def test_kernels_equal_their_references(dtype, width, workers):
    n = 3000
    values = values_of(dtype, n, seed=workers)
    maxima = exponents_of(values, dtype)
    maxima[3:6] = [255, 0, min(int(maxima[5]) + 9, 254)]
    integers = quantized(values, dtype, maxima, workers, width)
    plain = references.reference_quantize(values, dtype, maxima, workers, width)
    assert np.array_equal(integers[:n], plain) and not integers[n:].any()
    rng = np.random.default_rng(0)
    info = np.iinfo(fixed.INTEGER[width])
    total = rng.integers(
        info.min, info.max, integers.size, dtype=fixed.INTEGER[width], endpoint=True
    )
    found = dequantized(total, n, maxima, workers, width)
    expected = references.reference_dequantize(total[:n], maxima, workers, width)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@given(
    dtype=st.sampled_from(DTYPES),
    width=st.sampled_from(WIDTHS),
    workers=st.integers(1, 64),
    n=st.integers(1, 1500),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=80)
def test_a_sum_lies_within_its_bound(dtype, width, workers, n, seed):  # Rule 2
    spread = 13 if dtype == "fp16" else 120
    assert_within_bound(
        [values_of(dtype, n, seed + worker, spread) for worker in range(workers)], dtype, width
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 17, 63, 64])
@pytest.mark.slow
def test_equal_extremes_do_not_overflow(dtype, width, workers):
    """All workers at the clamp, in every part of the sum, at magnitudes that round up to it."""
    for power in (1.0, 2.0**-14, 2.0**15 if dtype == "fp16" else 2.0**127):
        for below in (0, 1, 5):
            x = np.full(
                BLOCK, np.float32(power * 2) if power < 2.0**15 else MOST[dtype], np.float32
            )
            top = reference_downcast(x, dtype)
            top -= np.asarray(below, top.dtype) if dtype != "fp32" else 0
            if dtype == "fp32":
                top = (top.view(np.uint32) - np.uint32(below)).view(np.float32)
            for sign in (1, -1):
                values = top * np.float32(sign) if dtype == "fp32" else top ^ (0x8000 * (sign < 0))
                values = values.astype(top.dtype)
                maxima = exponents_of(values, dtype)
                integers = quantized(values, dtype, maxima, workers, width).astype(np.int64)
                info = np.iinfo(fixed.INTEGER[width])
                parts = np.cumsum(np.tile(integers[:1], workers))
                assert info.min <= parts.min() and parts.max() <= info.max
                assert abs(int(parts[-1])) < 1 << (8 * width - 1)
                assert_within_bound([values] * workers, dtype, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_values_beyond_their_maxima_cannot_overflow_either(
    width,
):  # Rule 6: never a wrong sum's sign
    values = np.array([3e38, -3e38, np.inf, -np.inf, np.nan, 5.0], np.float32)
    for workers in (1, 2, 64):
        q = quantized(values, "fp32", np.array([127], np.uint8), workers, width).astype(np.int64)
        assert (np.abs(q) * workers < 1 << (8 * width - 1)).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_value_makes_its_block_nan_for_all(dtype, bad, width):  # Rule 6
    values = [values_of(dtype, 4 * BLOCK, seed, 10) for seed in range(3)]
    poison = np.zeros(1, np.float32)
    poison[0] = bad
    values[1][2 * BLOCK + 5] = reference_downcast(poison, dtype)[0]
    found, maxima = fan_in_sum(values, dtype, width)
    assert maxima[2] == fixed.NOT_FINITE and np.isinf(fixed.error_bound(255, 3, width))
    assert np.isnan(found[2 * BLOCK : 3 * BLOCK]).all()
    assert np.isfinite(found[: 2 * BLOCK]).all() and np.isfinite(found[3 * BLOCK :]).all()


def test_zeros_and_denormals():
    zeros = np.zeros(700, np.float32)
    found, maxima = fan_in_sum([zeros, zeros], "fp32", 4)
    assert not maxima.any() and not found.any() and fixed.error_bound(0, 2, 4) == 0
    tiny = np.array([1e-45, -1e-45, 3e-39, 0], np.float32)
    found, maxima = fan_in_sum([tiny, tiny], "fp32", 4)
    assert maxima[0] == 1 and np.array_equal(found, 2 * tiny), "int32 holds them exactly"


@given(width=st.sampled_from(WIDTHS), workers=st.integers(1, 64), seed=st.integers(0, 1 << 32))
@settings(max_examples=30)
def test_all_orders_and_trees_give_the_same_bits(width, workers, seed):  # Rule 1
    values = [values_of("bf16", 400, seed + worker) for worker in range(workers)]
    maxima = np.max([exponents_of(array, "bf16") for array in values], axis=0)
    integers = [quantized(array, "bf16", maxima, workers, width) for array in values]
    rng = np.random.default_rng(seed)
    first = np.sum(integers, axis=0, dtype=fixed.INTEGER[width])
    while len(integers) > 1:  # add any two
        i, j = sorted(rng.choice(len(integers), 2, replace=False))
        integers[i] = integers[i] + integers.pop(j)
        assert integers[i].dtype == fixed.INTEGER[width]
    assert np.array_equal(first, integers[0])


@pytest.mark.parametrize("width", WIDTHS)
def test_packets_in_any_order_and_runs_give_the_same_bits(width):
    n = 7 * PAYLOAD_NBYTES // width - 13
    values = values_of("fp32", n, 3)
    maxima = exponents_of(values, "fp32")
    whole = quantized(values, "fp32", maxima, 4, width)
    buffer = np.full(3 * PACKET_NBYTES, 5, np.uint8)
    fixed.quantize(values, "fp32", maxima, 4, width, 4, buffer)
    payloads = buffer.reshape(3, -1)[:, HEADER_NBYTES:].reshape(-1).view(fixed.INTEGER[width])
    each = PAYLOAD_NBYTES // width
    assert np.array_equal(payloads, whole[4 * each :])
    out = np.full(n, 9, np.float32)
    shuffled = buffer.reshape(3, -1)[[2, 0, 1]].reshape(-1)
    ok, index = np.array([True, True, False]), np.array([6, 4, 5])
    fixed.dequantize(shuffled, ok, index, width, 4, maxima, out)
    plain = references.reference_dequantize(whole[:n], maxima, 4, width)
    assert np.array_equal(out[4 * each : 5 * each], plain[4 * each : 5 * each])
    assert np.array_equal(out[6 * each :], plain[6 * each :])
    assert (out[: 4 * each] == 9).all() and (out[5 * each : 6 * each] == 9).all()


def test_missing_values_count_as_zeros():
    buffer = np.full(2 * PACKET_NBYTES, 5, np.uint8)
    none = np.empty(0, np.float32)
    for maxima in (np.empty(0, np.uint8), np.full(9, 130, np.uint8)):
        fixed.quantize(none, "fp32", maxima, 4, 2, 5, buffer)
        assert not buffer.reshape(2, -1)[:, HEADER_NBYTES:].any()


@pytest.mark.parametrize(
    ("elements", "width", "packets", "exponents"),
    [(0, 4, 0, 0), (1, 4, 1, 1), (352, 4, 1, 1), (353, 4, 2, 1), (1408, 1, 1, 1), (1409, 1, 2, 1),
     (352 * 1408, 2, 704, 1), (352 * 1408 + 1, 2, 705, 2)],
)  # fmt: skip
def test_numbers_of_packets(elements, width, packets, exponents):
    assert fixed.packets_of(elements, width) == packets
    assert fixed.exponent_packets_of(elements) == exponents


def test_impossible_sizes_are_refused():  # Rule 4: both numbers, and the way out
    values, maxima = np.zeros(352, np.float32), np.zeros(1, np.uint8)
    buffer = np.zeros(PACKET_NBYTES, np.uint8)
    with pytest.raises(
        ConfigError,
        match=r"65 workers are too many for integers of 1 byte\(s\), .* at most 64 workers",
    ):
        fixed.quantize(values, "fp32", maxima, 65, 1, 0, buffer)
    with pytest.raises(ConfigError, match="3-byte"):
        fixed.error_bound(100, 2, 3)
    with pytest.raises(ConfigError, match="0 workers"):
        fixed.error_bound(100, 0, 4)
    with pytest.raises(AssertionError):
        fixed.quantize(values, "fp32", np.zeros(2, np.uint8), 2, 4, 0, buffer)
    with pytest.raises(AssertionError):
        fixed.exponents(values, "fp32", np.zeros(3, np.uint8))
    with pytest.raises(AssertionError, match="1455"):
        fixed.quantize(values, "fp32", maxima, 2, 4, 0, buffer[:-1])
