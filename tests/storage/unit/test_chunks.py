"""Properties of every chunk layout (chunks.py), for any model and any chunk size on the grid."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.chunks import (
    ITEMSIZE,
    MAX_CHUNK,
    PAGE,
    PARAM_ALIGN,
    RUN_ALIGN,
    SEGMENT,
    TRAINABLE,
    ChunkTable,
    ParamSpec,
    record,
)
from roadtrain.errors import ConfigError

SIZES = st.integers(1, MAX_CHUNK // SEGMENT).map(lambda n: n * SEGMENT)
DIMS = st.sampled_from([0, 1, 3, 31, 32, 33, 64, 257, 1000, 2048])
SHAPES = st.one_of(
    st.lists(DIMS, max_size=2).map(tuple),
    st.integers(SEGMENT - 2, SEGMENT + 2).map(lambda n: (n,)),
    st.integers(MAX_CHUNK - 1, MAX_CHUNK + 1).map(lambda n: (n,)),
)


@st.composite
def models(draw):
    """Blocks of parameters with any mixture of dtype, group and trainability, including empty
    parameters and blocks."""
    blocks, n = [], 0
    for b in range(draw(st.integers(1, 4))):
        specs = []
        for _ in range(draw(st.integers(0, 5))):
            trainable = draw(st.booleans())
            dtype = draw(
                st.sampled_from(TRAINABLE if trainable else [*TRAINABLE, "i8", "i64", "bool"])
            )
            group = draw(st.integers(0, 1)) if trainable else -1
            specs.append(ParamSpec(f"p{n}", draw(SHAPES), dtype, trainable, group))
            n += 1
        blocks.append((f"block{b}" if b else "root", specs))
    return blocks


def pieces(table):
    """(origin, length) of each parameter in every chunk, in flat order."""
    out = {i: [] for i in range(len(table.params))}
    for chunk in table.chunks:
        for span in chunk.spans:
            out[span.param].append((span.origin, span.stop - span.start))
    return out


@given(models(), SIZES)
@settings(max_examples=80, deadline=None)
@pytest.mark.slow
def test_every_element_is_in_exactly_one_chunk(model, size):
    table = ChunkTable.build(model, size)
    for i, found in pieces(table).items():
        at = 0
        for origin, length in found:
            assert origin == at and length > 0
            at += length
        assert at == table.params[i].numel
    assert [p for _, specs in model for p in specs] == list(table.params)
    assert [[table.params[i] for i in b.params] for b in table.blocks] == [
        specs for _, specs in model
    ]
    for block in table.blocks:
        assert {s.param for run in block.runs for s in run.spans} == {
            i for i in block.params if table.params[i].numel
        }


@given(models(), SIZES)
@settings(max_examples=80, deadline=None)
@pytest.mark.slow
def test_runs_and_chunks_are_adjacent_and_page_aligned(model, size):
    table = ChunkTable.build(model, size)
    assert [c.id for c in table.chunks] == list(range(len(table.chunks)))
    assert [c for b in table.blocks for c in b.chunks] == list(table.chunks)
    for block in table.blocks:
        pull, push = [], []
        for run in block.runs:
            assert (
                run.numel % RUN_ALIGN == 0
                and run.offset % PAGE == 0
                and run.push_offset % PAGE == 0
            )
            own = [c for c in block.chunks if c.index == run.index]
            assert [c.start for c in own] == list(range(0, run.numel, size))
            assert sum(c.numel for c in own) == run.numel
            for span in run.spans:
                assert span.start % PARAM_ALIGN == 0
                spec = table.params[span.param]
                assert (spec.dtype, spec.group, spec.trainable) == (
                    run.dtype,
                    run.group,
                    run.trainable,
                )
            assert all(a.stop <= b.start for a, b in pairwise(run.spans))
        for chunk in block.chunks:
            run = block.runs[chunk.index]
            assert (chunk.dtype, chunk.group, chunk.trainable) == (
                run.dtype,
                run.group,
                run.trainable,
            )
            assert chunk.offset == run.offset + chunk.start * ITEMSIZE[run.dtype]
            assert chunk.offset % PAGE == 0 and chunk.weights_nbytes <= size * ITEMSIZE[chunk.dtype]
            assert all(0 <= s.start < s.stop <= chunk.numel for s in chunk.spans)
            pull.append((chunk.offset, chunk.offset + chunk.weights_nbytes))
            if chunk.trainable:
                assert chunk.push_offset % PAGE == 0
                push.append((chunk.push_offset, chunk.push_offset + chunk.weights_nbytes))
        for ranges, total in ((pull, block.pull_nbytes), (push, block.push_nbytes)):
            assert total % PAGE == 0
            assert all(a[1] <= b[0] < a[1] + PAGE for a, b in pairwise(ranges))
            assert (
                (ranges[-1][1] if ranges else 0) <= total < (ranges[-1][1] if ranges else 0) + PAGE
            )


def segments(table):
    """The grid of partial sums in flat order: (block, run, parameter, first and last element of the
    run)."""
    return [
        (c.block, c.index, p, c.start + a, c.start + b)
        for c in table.chunks
        for p, a, b in c.segments
    ]


@given(models(), SIZES, SIZES)
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_another_chunk_size_describes_the_same_model(model, first, second):  # Rule 1
    a, b = ChunkTable.build(model, first), ChunkTable.build(model, second)
    assert segments(a) == segments(b)
    assert a.fingerprint() == b.fingerprint()
    assert sum(c.weights_nbytes for c in a.chunks) == sum(c.weights_nbytes for c in b.chunks)
    for block, other in zip(a.blocks, b.blocks):
        assert (block.runs, block.pull_nbytes, block.push_nbytes) == (
            other.runs,
            other.pull_nbytes,
            other.push_nbytes,
        )


@given(models(), SIZES)
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_segments_cover_the_spans(model, size):
    for chunk in ChunkTable.build(model, size).chunks:
        covered = [(s.param, i) for s in chunk.spans for i in (s.start, s.stop)]
        ends = {}
        for param, a, b in chunk.segments:
            assert 0 <= a < b <= chunk.numel and b - a <= SEGMENT
            assert (chunk.start + a) // SEGMENT == (chunk.start + b - 1) // SEGMENT
            assert ends.get(param, a) == a
            ends[param] = b
        assert ends == {
            p: i for p, i in covered if i in {s.stop for s in chunk.spans if s.param == p}
        }


@given(models(), SIZES)
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_the_fingerprint_covers_names_shapes_and_trainability(model, size):
    table = ChunkTable.build(model, size)
    for b, (_, specs) in enumerate(model):
        for i, p in enumerate(specs):
            if not p.numel:
                continue
            changes = [
                ParamSpec(p.name + "x", p.shape, p.dtype, p.trainable, p.group),
                ParamSpec(p.name, (*p.shape, 1), p.dtype, p.trainable, p.group),
            ]
            if p.dtype in TRAINABLE:
                changes.append(
                    ParamSpec(p.name, p.shape, p.dtype, not p.trainable, -1 if p.trainable else 0)
                )
            for q in changes:
                other = [
                    (n, [q if (b, i) == (k, j) else s for j, s in enumerate(own)])
                    for k, (n, own) in enumerate(model)
                ]
                assert ChunkTable.build(other, size).fingerprint() != table.fingerprint()
            if p.trainable:  # the dtype of the copy does not change the model
                q = ParamSpec(
                    p.name, p.shape, "bf16" if p.dtype == "fp32" else "fp32", True, p.group
                )
                other = [(n, [q if s is p else s for s in own]) for n, own in model]
                assert ChunkTable.build(other, size).fingerprint() == table.fingerprint()


@given(models(), SIZES, st.integers(0, 3), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_parts_of_a_record_do_not_overlap(model, size, arrays, scalars):
    for chunk in ChunkTable.build(model, size).chunks:
        r = record(chunk, arrays, scalars)
        if not chunk.trainable:
            assert r.state_nbytes == 0 and r.nbytes >= chunk.weights_nbytes
            continue
        parts = [(0, chunk.weights_nbytes)]
        parts += [(r.master, chunk.numel * 4)] if chunk.dtype != "fp32" else []
        parts += [(at, chunk.numel * 4) for at in r.arrays]
        parts += [(r.scalars, scalars * len(chunk.spans) * 8)]
        assert len(r.arrays) == arrays and (r.master == 0) == (chunk.dtype == "fp32")
        assert all(at % PAGE == 0 for at, _ in parts)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(parts))
        assert sum(parts[-1]) <= r.nbytes and r.nbytes % PAGE == 0 and r.weights_nbytes % PAGE == 0


@pytest.mark.parametrize("size", [0, -SEGMENT, SEGMENT - 1, SEGMENT + 1, MAX_CHUNK + SEGMENT])
def test_a_chunk_size_off_the_grid_is_refused(size):
    with pytest.raises(ConfigError, match=str(size)):
        ChunkTable.build([("root", [])], size)


def test_impossible_layouts_are_refused():
    with pytest.raises(ConfigError, match="'w' appears twice"):
        ChunkTable.build(
            [
                ("root", [ParamSpec("w", (1,), "fp32", True, 0)]),
                ("b", [ParamSpec("w", (1,), "fp32", True, 0)]),
            ]
        )
    with pytest.raises(ConfigError, match="'w' has dtype c64"):
        ChunkTable.build([("root", [ParamSpec("w", (1,), "c64", False, -1)])])
    with pytest.raises(ConfigError, match="'w' has dtype fp64, but trainable dtypes"):
        ChunkTable.build([("root", [ParamSpec("w", (1,), "fp64", True, 0)])])
