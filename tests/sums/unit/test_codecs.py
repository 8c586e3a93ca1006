"""Codecs of gradients sent to reducers: decoded values, residuals of error feedback, refused input
(Rules 1, 2 and 8)."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from roadtrain.errors import ConfigError, WireError
from roadtrain.sums import formats
from roadtrain.sums.tensor_round import TensorCodec

ALL = ("bf16", "fp16", "topk:0.1", "topk:0.9", "onebit", "dither:2", "dither:4", "dither:8")
LEVELS = ("dither:2", "dither:4", "dither:8")  # the largest magnitude and 0 are exact
FEEDBACK = ("topk:0.1", "onebit", "dither:2", "dither:4")
NOT_FINITE = ("onebit", "dither:4", "topk:0.1")  # a NaN makes decoded values NaN
floats = hnp.arrays(np.float32, st.integers(1, 70), elements=st.floats(-1e4, 1e4, width=32))


def through(text, values, seed=0):
    raw = bytearray(formats.format_of(text).nbytes(values.size))
    formats.encode(text, values, None, raw, seed)
    out = np.empty(values.size, np.float32)
    formats.decode(text, memoryview(raw), out)
    return out


@pytest.mark.parametrize("text", ALL)
@settings(deadline=None, max_examples=40)
@given(values=floats, seed=st.integers(0, 1 << 70))
@pytest.mark.slow
def test_decoded_values_are_near_the_originals(text, values, seed):  # Rule 2
    out, most = through(text, values, seed), np.abs(values).max()
    kind, _, argument = text.partition(":")
    if kind in ("bf16", "fp16"):
        assert np.allclose(out, values, rtol=2**-8, atol=1e-4)
    elif kind == "topk":
        k = min(values.size, max(1, round(float(argument) * values.size)))
        assert np.count_nonzero(out) <= k and np.isin(out[out != 0], values).all()
        assert np.abs(values - out).max() <= np.sort(np.abs(values))[-k]
    elif kind == "onebit":
        assert np.allclose(np.abs(out), np.abs(values.astype(np.float64)).mean(), rtol=1e-6)
        assert ((out >= 0) == (values >= 0)).all() or not out.any()
    else:
        assert (np.abs(out - values) <= most / (2 ** (int(argument) - 1) - 1) * 1.001).all()
    assert np.array_equal(out, through(text, values, seed)), "Rule 1"


@pytest.mark.parametrize("text", LEVELS)
@pytest.mark.parametrize("most", [3e-45, 1e-41, 2e-39])
def test_levels_hold_below_the_least_normal_number(text, most):  # Rule 6: no value is lost
    values = np.array([most, 0, -most], np.float32)
    out = through(text, values)
    assert np.array_equal(out, values), "the largest value and zero are levels themselves"


@pytest.mark.parametrize("text", ["dither:2", "dither:4"])
def test_dithering_has_the_right_mean(text):
    values = np.array([0.3, -0.77, 1.0, 0.0, -0.01], np.float32)
    mean = np.mean([through(text, values, seed) for seed in range(4000)], axis=0)
    assert np.allclose(mean, values, atol=0.03)


@pytest.mark.parametrize("text", FEEDBACK)
def test_nothing_is_lost_with_error_feedback(text):
    """Sent values and the residual add up to the original values."""
    rng = np.random.default_rng(0)
    residual, expected, sent = np.zeros(500, np.float32), np.zeros(500), np.zeros(500)
    raw, out = bytearray(formats.format_of(text).nbytes(500)), np.empty(500, np.float32)
    for step in range(50):
        values = rng.standard_normal(500, np.float32)
        formats.encode(text, values, residual, raw, step)
        formats.decode(text, memoryview(raw), out)
        expected += values
        sent += out
    assert np.allclose(expected, sent + residual, atol=1e-3)
    assert np.abs(residual).max() < 60, "the residual grows without bound"


@pytest.mark.parametrize("text", NOT_FINITE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_non_finite_value_shows_and_disappears_a_step_later(text, wrong):
    values, residual = np.ones(100, np.float32), np.zeros(100, np.float32)
    raw, out = bytearray(formats.format_of(text).nbytes(100)), np.empty(100, np.float32)
    for step in range(2):
        values[3] = 1.0 if step else wrong
        formats.encode(text, values, residual, raw, step)
        formats.decode(text, memoryview(raw), out)
        assert np.isfinite(out).all() == bool(step)
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("text", ALL)
@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.integers(1, 40))
@pytest.mark.slow
def test_any_bytes_are_decoded_or_refused(text, data, n):  # Rule 8
    size = formats.format_of(text).nbytes(n)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    around = np.full(n + 64, 7, np.float32)
    try:
        formats.decode(text, memoryview(raw), around[32 : 32 + n])
    except WireError:
        assert text.startswith("topk")
    assert (around[:32] == 7).all() and (around[32 + n :] == 7).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topc:0.1", "did you mean `topk`"),
        ("nonsense", "bf16, dither"),
        ("topk:2", "between 0 and 1"),
        ("topk", "topk"),
        ("dither:3", "2, 4 or 8"),
        ("onebit:1", "no argument"),
    ],
)
def test_unknown_codecs_are_refused_with_a_hint(text, words):
    with pytest.raises(ConfigError, match=words):
        formats.format_of(text)


def test_users_can_register_a_codec():
    class Ternary(formats.Codec):
        name = "signs"

        def nbytes(self, n):
            return n

        def encode(self, values, out, seed):
            out[:] = np.sign(values) + 1

        def decode(self, raw, out):
            out[:] = raw.astype(np.float32) - 1

    formats.register(Ternary)
    try:
        assert through("signs", np.array([3, -2, 0], np.float32)).tolist() == [1, -1, 0]
    finally:
        del formats.FORMATS["signs"]
        formats.format_of.cache_clear()


def test_a_part_is_encoded_once_even_if_two_threads_push_it(monkeypatch):  # Rule 1
    """A second encoding would add the gradient to the residual again, so it would be summed twice.
    A thread that is late does not encode its part in place of the next round's."""
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    alone, codec, pushed = TensorCodec("dither:2", 1000), TensorCodec("dither:2", 1000), []
    encode, inside = formats.encode, threading.Barrier(2)

    def slow(*args):
        try:
            inside.wait(0.3)  # until a second thread encodes the part too
        except threading.BrokenBarrierError:
            pass
        encode(*args)

    expected = bytes(alone.encode(values, 0, 1, 5))
    monkeypatch.setattr(formats, "encode", slow)

    def push():
        pushed.append(bytes(codec.encode(values, 0, 1, 5)))

    threads = [threading.Thread(target=push) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pushed == [expected] * 2 and np.array_equal(codec.residual, alone.residual)
    later = bytes(codec.encode(values, 0, 2, 6))
    push()
    assert pushed[-1] == later
