"""The layout and cuts of a stage's parameters, checked by brute force."""

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadtrain.chunks import ParamSpec
from roadtrain.errors import StoreError
from roadtrain.stages.flat_layout import lay_out, overlaps
from roadtrain.stages.pieces import Extent
from roadtrain.stages.transfers import check_covered

SHAPES = st.sampled_from([(0,), (1,), (7,), (33, 5), (64, 64), (257,)])


@st.composite
def params(draw):
    return [
        ParamSpec(f"p{i:02}", draw(SHAPES), draw(st.sampled_from(["fp32", "bf16"])), True, group)
        for i, group in enumerate(draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)))
    ]


@given(params(), st.integers(1, 4), st.sampled_from([1, 512, 4096, 1 << 20]), st.data())
def test_every_element_belongs_to_a_single_rank(specs, width, bucket_bytes, data):
    shared = data.draw(st.lists(st.sampled_from([s.name for s in specs]), unique=True))
    widths = (width, data.draw(st.integers(1, 3)))
    layout = lay_out(specs, width, bucket_bytes, dict.fromkeys(shared, 0), [widths])
    seen = {(spec.name, element): 0 for spec in specs for element in range(spec.numel)}
    for bucket in layout.buckets:
        assert bucket.numel == width * bucket.share
        assert bucket.link is None or bucket.numel % lcm(*widths) == 0
        run = layout.runs[bucket.run]
        for rank in range(width):
            for span in bucket.spans_of(rank):
                spec = specs[span.param]
                assert (spec.dtype, spec.group) == (run.dtype, run.group)
                assert (spec.name in shared) == (run.link == 0)
                assert 0 <= span.start < span.stop <= bucket.share
                for element in range(span.origin, span.origin + span.stop - span.start):
                    seen[spec.name, element] += 1
    assert set(seen.values()) <= {1}
    for i, own in enumerate(layout.buckets_of):
        assert list(own) == [
            index
            for index, bucket in enumerate(layout.buckets)
            if any(span.param == i for span in bucket.spans)
        ]


def test_stages_of_other_widths_cut_shared_parameters_equally():
    first = [ParamSpec("tok", (100, 8), "fp32", True, 0), ParamSpec("a", (9,), "fp32", True, 0)]
    last = [ParamSpec("z", (50,), "fp32", True, 0), ParamSpec("tok", (100, 8), "fp32", True, 0)]
    mine, theirs = (
        lay_out(specs, width, 1024, {"tok": 0}, [(2, 3)])
        for specs, width in ((first, 2), (last, 3))
    )
    assert mine.describe(0) == theirs.describe(0)
    assert mine.describe() != theirs.describe()


@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.data())
def test_overlaps_are_the_elements_of_both_ranks(widths, data):
    stage = data.draw(st.integers(0, len(widths) - 1))
    rank = data.draw(st.integers(0, widths[stage] - 1))
    numel = 5 * lcm(*widths)
    shares = [range(r * numel // d, (r + 1) * numel // d) for d in widths for r in range(d)]
    own = shares[sum(widths[:stage]) + rank]
    assert overlaps(numel, own.start, own.stop, widths) == [
        len(set(own) & set(share)) for share in shares
    ]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_missing_extents_are_those_that_no_piece_covers(pairs):
    expected = [Extent("p", 2, 9), Extent("p", 12, 18)]
    received = [Extent("p", start, max(start, stop)) for start, stop in pairs]
    covered = {e for start, stop in pairs for e in range(start, stop)}
    missing = sorted({*range(2, 9), *range(12, 18)} - covered)
    if not missing:
        check_covered(received, expected, "rank 0")
    else:
        with pytest.raises(StoreError, match=rf"{len(missing)} elements.*\[{missing[0]}, "):
            check_covered(received, expected, "rank 0")
