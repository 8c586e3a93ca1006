"""Gradients that a server holds for its workers equal plain sums bit for bit, whatever dtype each
push was downcast to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from roadtrain.chunks import ITEMSIZE, SEGMENT, Chunk, ChunkTable, ParamSpec
from roadtrain.kernels.cast import cast_in_place, reference_downcast, reference_widen
from roadtrain.kernels.codecs import downcast_in_place
from roadtrain.kernels.sum import sum_squares
from roadtrain.servers.gradients import PushedGradients
from roadtrain.servers.protocol import messages

N = 2 * SEGMENT + 4096 + 77


def chunk_of(dtype: str = "fp32", n: int = N) -> Chunk:
    return ChunkTable.build([("", [ParamSpec("p", (n,), dtype, True, 0)])]).chunks[0]


def numbers(chunk: Chunk, seed: int) -> np.ndarray:
    """Random values, including some that 16 bits hold as subnormals, as infinity, or not at all."""
    rng = np.random.default_rng(seed)
    out = (rng.standard_normal(chunk.numel) * 10.0 ** rng.integers(-9, 4, chunk.numel)).astype(
        np.float32
    )
    out[::1001] = 1e5
    out[1::1001] = -0.0
    return out


class Spill:
    """A spill file in memory that checks that reads are as long as writes."""

    def __init__(self) -> None:
        self.lanes: dict[int, bytes] = {}

    def spill_write(self, chunk: int, data: memoryview, lane: int) -> None:
        self.lanes[lane] = bytes(data)

    def spill_read(self, chunk: int, into: memoryview, lane: int) -> None:
        assert len(into) == len(self.lanes[lane])
        into[:] = self.lanes[lane]


def push_of(chunk: Chunk, values: np.ndarray, dtype: str, **more) -> messages.Push:
    """A push as it arrives, in a buffer of the whole gradient's size."""
    memory = memoryview(bytearray(b"\xab" * chunk.weights_nbytes))
    data = reference_downcast(values, dtype or chunk.dtype).tobytes()
    memory[: len(data)] = data
    fields = {"fresh": True, "keep": False, "ticket": 1, "dtype": dtype, **more}
    return messages.Push(chunk.id, memory, **fields)


def widened(chunk: Chunk, values: np.ndarray, dtype: str) -> np.ndarray:
    dtype = dtype or chunk.dtype
    return reference_widen(reference_downcast(values, dtype), dtype)


def squares(chunk: Chunk, grad: np.ndarray) -> np.ndarray:
    return np.array([sum_squares(grad[a:b], "fp32") for _, a, b in chunk.segments])


def result_of(grads: PushedGradients, chunk: Chunk) -> np.ndarray:
    scratch, grad, dtype = grads.take(chunk.id)
    wide = reference_widen(grad, dtype).copy()
    grads.done(scratch)
    assert not grads.holds(chunk.id)
    assert grads.scratch.spare == len(grads.scratch.buffers)
    return wide


PLACES = {"kept": (None, True), "copied": (None, False), "spilled": (Spill, False)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "dtypes", [("bf16",), ("fp16",), ("bf16",) * 3, ("", "bf16"), ("fp16", "", "bf16")], ids=str
)
@pytest.mark.slow
def test_passes_of_one_worker_add_up_in_fp32(place: str, dtypes: tuple[str, ...]) -> None:
    chunk, (tier, keep) = chunk_of(), PLACES[place]
    grads = PushedGradients({chunk.id: chunk}, tier and tier(), 2, chunk.weights_nbytes, 1)
    expected = np.zeros(0, np.float32)
    for i, dtype in enumerate(dtypes):
        values = numbers(chunk, i)
        sums, kept = grads.hold(push_of(chunk, values, dtype, fresh=i == 0, keep=keep, ticket=i))
        expected = expected + widened(chunk, values, dtype) if i else widened(chunk, values, dtype)
        assert sums.tobytes() == squares(chunk, expected).tobytes()
        assert kept == (keep and i == 0)
    assert grads.total_sums(chunk.id).tobytes() == squares(chunk, expected).tobytes()
    assert result_of(grads, chunk).tobytes() == expected.tobytes()
    assert len(dtypes) == 1 or expected.tobytes() != widened(chunk, expected, "bf16").tobytes(), (
        "fp32 holds more"
    )


@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.parametrize(
    "places", [("kept",) * 4, ("spilled",) * 4, ("kept", "spilled", "spilled", "kept")], ids=str
)
@pytest.mark.parametrize(
    "dtypes", [("bf16",) * 4, ("fp16",) * 4, ("", "bf16", "fp16", "bf16")], ids=str
)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.slow
def test_workers_are_summed_in_order_in_fp32(
    local: int, places: tuple[str, ...], dtypes: tuple[str, ...], passes: int
) -> None:
    chunk = chunk_of()
    grads = PushedGradients({chunk.id: chunk}, Spill(), 2, chunk.weights_nbytes, 4, local)
    of_workers = []
    for worker, (place, dtype) in enumerate(zip(places, dtypes)):
        mine = None
        for i in range(passes):
            values = numbers(chunk, 10 * worker + i)
            grads.hold(
                push_of(chunk, values, dtype, fresh=i == 0, keep=place == "kept", worker=worker)
            )
            got = widened(chunk, values, dtype)
            mine = got if mine is None else mine + got
        of_workers.append(mine)
    hosts = [of_workers[i : i + local] for i in range(0, 4, local)] if local > 1 else [of_workers]
    of_hosts = [list(itertools.accumulate(host))[-1] for host in hosts]
    expected = list(itertools.accumulate(of_hosts))[-1]
    assert grads.total_sums(chunk.id).tobytes() == squares(chunk, expected).tobytes()
    assert result_of(grads, chunk).tobytes() == expected.tobytes()


@pytest.mark.parametrize("keep", [False, True])
def test_a_spilled_push_is_unchanged(keep: bool) -> None:
    """It is spilled until its step begins and then held; half as many bytes are written."""
    chunk, spill, values = chunk_of(), Spill(), [numbers(chunk_of(), i) for i in range(3)]
    grads = PushedGradients({chunk.id: chunk}, spill, 2, chunk.weights_nbytes, 2)  # type: ignore[arg-type]
    early = [push_of(chunk, values[i], "bf16", fresh=i == 1, worker=1) for i in (1, 2)]
    assert [grads.spill(push, 2 + i) for i, push in enumerate(early)] == [2 * chunk.numel] * 2
    assert [len(spill.lanes[lane]) for lane in (2, 3)] == [2 * chunk.numel] * 2
    grads.hold(push_of(chunk, values[0], "bf16", keep=keep, worker=0))
    for lane, push in enumerate(early, 2):
        grads.hold(replace(push, grad=None, spill_slot=lane))
    first, *second = [widened(chunk, v, "bf16") for v in values]
    assert result_of(grads, chunk).tobytes() == (first + (second[0] + second[1])).tobytes()


def test_a_fresh_gradient_replaces_the_wider_sum() -> None:
    chunk = chunk_of()
    grads = PushedGradients({chunk.id: chunk}, None, 2, chunk.weights_nbytes, 1)
    for i, fresh in enumerate((True, False, True)):
        grads.hold(push_of(chunk, numbers(chunk, i), "fp16", fresh=fresh, keep=True))
    assert result_of(grads, chunk).tobytes() == widened(chunk, numbers(chunk, 2), "fp16").tobytes()


def test_gradients_of_16_bit_parameters_add_up_rounded() -> None:
    chunk = chunk_of("bf16")
    grads = PushedGradients({chunk.id: chunk}, Spill(), 2, 4 * chunk.numel, 1)  # type: ignore[arg-type]
    a, b = (widened(chunk, numbers(chunk, i), "bf16") for i in (0, 1))
    for i, values in enumerate((a, b)):
        grads.hold(push_of(chunk, values, "", fresh=i == 0))
    assert result_of(grads, chunk).tobytes() == widened(chunk, a + b, "bf16").tobytes()


@pytest.mark.parametrize("n", [1, 2048, SEGMENT, SEGMENT + 1, 4 * SEGMENT - 3])
@pytest.mark.parametrize(
    ("old", "new"),
    [(a, b) for a in ITEMSIZE if a in ("fp32", "bf16", "fp16") for b in ("fp32", "bf16", "fp16")],
)
@pytest.mark.slow
def test_recast_in_place(old: str, new: str, n: int) -> None:
    values = numbers(chunk_of(n=n), 3)[:n]
    memory = bytearray(4 * n)
    held = reference_downcast(values, old)
    memory[: held.nbytes] = held.tobytes()
    out = cast_in_place(memoryview(memory), n, old, new)
    expected = reference_downcast(reference_widen(held, old), new)
    assert out.tobytes() == expected.tobytes() == bytes(memory[: expected.nbytes])


def test_a_block_is_downcast_chunk_by_chunk_and_only_if_it_is_fp32() -> None:
    specs = [
        ParamSpec("a", (3 * SEGMENT,), "fp32", True, 0),
        ParamSpec("b", (5000,), "bf16", True, 0),
        ParamSpec("c", (70_000,), "fp32", False, 0),
        ParamSpec("d", (3000,), "fp32", True, 1),
    ]
    block = ChunkTable.build([("", specs)], SEGMENT).blocks[0]
    chunks = [c for c in block.chunks if c.trainable]
    rng = np.random.default_rng(0)
    for dtype in ("", "bf16", "fp16"):
        memory = bytearray(rng.standard_normal(block.push_nbytes // 4, np.float32).tobytes())
        before = bytes(memory)
        to = downcast_in_place(chunks, memoryview(memory), dtype)
        assert to == [dtype, dtype, dtype, "", dtype]
        for chunk, new in zip(chunks, to):
            place = slice(chunk.push_offset, chunk.push_offset + chunk.weights_nbytes)
            was = before[place]
            expected = (
                reference_downcast(np.frombuffer(was, np.float32), new).tobytes() if new else was
            )
            assert bytes(memory[place])[: len(expected)] == expected
