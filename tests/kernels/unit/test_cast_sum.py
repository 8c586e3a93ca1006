"""Conversions and sums: every 16-bit pattern, rounding, and bits equal to the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roadtrain.errors import RuleError
from roadtrain.kernels import cast as c
from roadtrain.kernels import sum as s
from tests.support import references

DTYPES = ("fp32", "bf16", "fp16")


def data(n, dtype, seed=0):
    return c.reference_downcast(
        np.random.default_rng(seed).standard_normal(n, dtype=np.float32), dtype
    )


def same(a, b):
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_pattern_converts_and_every_rounding_is_right(dtype):
    half = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    wide = np.empty(65536, np.float32)
    c.cast(half, dtype, wide, "fp32")
    assert same(wide, c.reference_widen(half, dtype))
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    theirs = torch.from_numpy(half.view(np.int16)).view(kind).float().numpy()
    assert np.array_equal(wide, theirs, equal_nan=True)
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype(np.uint32)
    edge = wide.view(np.uint32)
    x = np.concatenate([bits, edge, edge + 1, edge - 1, edge + 0x8000, edge + 0x1000]).view(
        np.float32
    )
    back = np.empty(x.size, np.uint16)
    c.cast(x, "fp32", back, dtype)
    assert same(back, c.reference_downcast(x, dtype))
    theirs = torch.from_numpy(x).to(kind).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(x)
    assert np.array_equal(back[number], theirs[number])
    assert np.isnan(c.reference_widen(back[~number], dtype)).all()


@pytest.mark.parametrize("src", DTYPES)
@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.slow
def test_cast_between_all_formats(src, dst):
    x = data(1003, src)
    mine = np.empty(1003, c.NUMPY_OF[dst])
    c.cast(x, src, mine, dst)
    plain = c.reference_downcast(c.reference_widen(x, src), dst)
    assert same(mine, plain)


def test_a_wrong_name_is_refused():
    with pytest.raises(RuleError):
        c.cast(np.zeros(3, np.float32), "bf16", np.zeros(3, np.float32), "fp32")
    with pytest.raises(RuleError):
        c.cast(np.zeros(3, np.float32), "fp32", np.zeros(4, np.float32), "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1003, 70001])
def test_accumulate_and_squares(dtype, n):
    grad, acc = data(n, dtype), data(n, "fp32", 7)
    plain = acc.copy()
    s.accumulate(acc, grad, dtype)
    references.reference_accumulate(plain, grad, dtype)
    assert same(acc, plain)
    assert s.sum_squares(grad, dtype) == references.reference_sum_squares(grad, dtype)
    exact = float((c.reference_widen(grad, dtype).astype(np.float64) ** 2).sum())
    assert s.sum_squares(grad, dtype) == pytest.approx(exact, rel=1e-12)


def test_squares_show_inf_and_nan():
    x = data(100, "fp32")
    x[50] = np.inf
    assert s.sum_squares(x, "fp32") == np.inf
    x[51] = np.nan
    assert np.isnan(s.sum_squares(x, "fp32"))


@pytest.mark.parametrize(("dtype", "k"), [("bf16", 8), ("fp32", 3), ("fp16", 1), ("fp16", 4)])
@pytest.mark.parametrize("n", [1, 4096, 10001])
@pytest.mark.slow
def test_sum_of_buffers_in_order(dtype, k, n):
    buffers = [data(n, dtype, i) for i in range(k)]
    mine, plain = (np.empty(n, np.float32) for _ in range(2))
    s.sum_k(mine, buffers, dtype)
    references.reference_sum_k(plain, buffers, dtype)
    assert same(mine, plain)
    with pytest.raises(RuleError):
        s.sum_k(mine, [*buffers, data(n + 1, dtype)], dtype)


def test_gradients_of_several_dtypes_are_widened_one_by_one_and_summed_in_order():  # Rule 1
    n, dtypes = 1003, ["bf16", "fp32", "fp16", "fp32"]
    grads = [(data(n, dtype, i), dtype) for i, dtype in enumerate(dtypes)]
    plain = c.reference_widen(*grads[0])
    for grad, dtype in grads[1:]:
        references.reference_accumulate(plain, grad, dtype)
    mine, memory = np.empty(n, np.float32), np.empty(n, np.float32)

    def made():
        for i, grad_and_dtype in enumerate(grads):
            into = memory if i else mine  # the first is widened into the sum itself
            into[:] = c.reference_widen(*grad_and_dtype)
            yield into, "fp32"

    for all_of_them in (grads, made()):
        s.sum_in_order(mine, all_of_them)
        assert same(mine, plain)
    s.sum_in_order(mine, [])
    assert not mine.any()
