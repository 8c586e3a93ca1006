"""Top-k: the exact count and the bits of a stable sort for any data."""

from __future__ import annotations

import numpy as np
import pytest

from roadtrain.errors import RuleError
from roadtrain.kernels import topk
from roadtrain.kernels.cast import NUMPY_OF, reference_downcast
from roadtrain.kernels.codecs import TopKCodec, encode_with_feedback
from tests.support.references import reference_accumulate, reference_top_k

N = 70_003


def data(kind, dtype, n=N):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(n, dtype=np.float32)
    if kind == "ties":
        x = np.round(x)
    elif kind == "sparse":
        x[rng.random(n) < 0.995] = 0
    elif kind == "constant":
        x[:] = -2
    elif kind == "special":
        x[::1000], x[1::1500], x[5::900] = np.nan, -np.inf, np.inf
        x[7::800] *= np.float32(1e-42)
    # all large values are adjacent, so samples and ranges see them unevenly
    elif kind == "front":
        x[: n // 50] *= 1e6
    elif kind == "periodic":
        x *= (np.arange(n) % 64 == 3) * 1000 + 1
    return reference_downcast(x.astype(np.float32), dtype)


def run(function, x, dtype, k):
    idx, val = np.zeros(k, np.uint32), np.zeros(k, NUMPY_OF[dtype])
    function(x, dtype, k, idx, val)
    return idx, val.view(np.uint8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "kind", ["normal", "ties", "sparse", "constant", "special", "front", "periodic"]
)
@pytest.mark.parametrize("k", [0, 1, 700, 35_000, N])
@pytest.mark.slow
def test_top_k_equals_a_stable_sort(dtype, kind, k):
    x = data(kind, dtype)
    plain = run(reference_top_k, x, dtype, k)
    mine = run(topk.top_k, x, dtype, k)
    assert all(map(np.array_equal, mine, plain))


@pytest.mark.parametrize("n", [1, 2, 17, 5000])
def test_small_arrays(n):
    x = data("normal", "fp32", n)
    for k in {0, 1, n // 2, n}:
        assert all(
            map(np.array_equal, run(topk.top_k, x, "fp32", k), run(reference_top_k, x, "fp32", k))
        )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scatter_restores_the_selected_values(dtype):
    x = data("normal", dtype)
    idx, val = np.zeros(999, np.uint32), np.zeros(999, NUMPY_OF[dtype])
    topk.top_k(x, dtype, 999, idx, val)
    mine, plain = np.full(N, 7, x.dtype), np.full(N, 9, x.dtype)
    topk.scatter(idx, val, mine)
    plain[:] = 0
    plain[idx] = val
    assert np.array_equal(mine, plain) and np.count_nonzero(mine) == 999
    with pytest.raises(RuleError):
        topk.scatter(idx, val, np.zeros(int(idx[-1]), x.dtype))
    topk.scatter(idx[:0], val[:0], mine)
    assert not mine.any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_error_feedback_keeps_unsent_values(dtype):
    mine, plain = np.zeros(N, np.float32), np.zeros(N, np.float32)
    for step in range(5):
        grad = (
            data("normal", dtype) if step % 2 else data("special" if step == 4 else "ties", dtype)
        )
        b, y = np.zeros(300, np.uint32), np.zeros(300, np.float32)
        raw = np.zeros(8 * 300, np.uint8)
        encode_with_feedback(TopKCodec(300 / N), grad, dtype, mine, raw)
        a, x = TopKCodec(300 / N).pairs(raw)
        reference_accumulate(plain, grad, dtype)
        reference_top_k(plain, "fp32", 300, b, y)
        plain[b] = 0
        assert np.array_equal(a, b) and np.array_equal(x, y, equal_nan=True)
        assert np.array_equal(mine, plain, equal_nan=True) and not mine[a].any()


def test_wrong_sizes_are_refused():
    with pytest.raises(RuleError):
        run(topk.top_k, data("normal", "fp32", 10), "fp32", 11)
