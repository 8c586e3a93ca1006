"""benchmarks/crosscluster/link_bytes.py: bytes of each link in a step, against closed forms."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.crosscluster.link_bytes import (
    BoundaryBytes,
    Links,
    SharedBytes,
    StageBytes,
    TrafficKind,
    link_bytes,
)
from roadtrain.errors import ConfigError
from roadtrain.stages.parallelism import Parallelism

NOTHING = BoundaryBytes(0, 0)


def total(links: Links, kind: TrafficKind) -> float:
    return sum(
        nbytes for (_, _, kind_of_traffic), nbytes in links.items() if kind_of_traffic is kind
    )


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(4, 24),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_every_micro_batch_crosses_every_boundary_once_each_way(
    widths: list[int], num_microbatches: int, tp: int, cp: int
) -> None:
    parallelism = Parallelism(tp=tp, cp=cp, pp=len(widths), widths=tuple(widths))
    stages = [StageBytes()] * len(widths)
    links = link_bytes(parallelism, num_microbatches, BoundaryBytes(100, 50), stages)
    crossed = num_microbatches * (len(widths) - 1) * tp * cp
    assert total(links, TrafficKind.ACTIVATIONS) == 100 * crossed
    assert total(links, TrafficKind.ACTIVATION_GRADIENTS) == 50 * crossed
    for (here, there, kind), nbytes in links.items():
        a, b = parallelism.position(here), parallelism.position(there)
        assert b.stage - a.stage == (1 if kind is TrafficKind.ACTIVATIONS else -1)
        assert (a.tensor, a.replica % cp) == (b.tensor, b.replica % cp)
        back = {TrafficKind.ACTIVATIONS: TrafficKind.ACTIVATION_GRADIENTS}.get(
            kind, TrafficKind.ACTIVATIONS
        )
        ratio = 0.5 if kind is TrafficKind.ACTIVATIONS else 2
        assert links[there, here, back] == ratio * nbytes


def test_parts_cross_the_boundary_from_the_last_stage_to_the_first() -> None:
    parallelism = Parallelism(pp=2, virtual_stages=3)
    links = link_bytes(parallelism, 4, BoundaryBytes(10, 10), [StageBytes()] * 2)
    # three times from stage 0 to 1, twice back; gradients in the opposite direction
    assert (
        links[0, 1, TrafficKind.ACTIVATIONS] == links[1, 0, TrafficKind.ACTIVATION_GRADIENTS] == 120
    )
    assert (
        links[1, 0, TrafficKind.ACTIVATIONS] == links[0, 1, TrafficKind.ACTIVATION_GRADIENTS] == 80
    )


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_sharded_optimizer_sends_the_shares_of_other_ranks(width: int) -> None:
    parallelism = Parallelism(pp=2, tp=2, widths=(width, 3))
    links = link_bytes(parallelism, 15, NOTHING, [StageBytes(400, 200), StageBytes()])
    sent: dict[tuple[int, TrafficKind], float] = defaultdict(float)
    got: dict[tuple[int, TrafficKind], float] = defaultdict(float)
    for (here, there, kind), nbytes in links.items():
        sent[here, kind] += nbytes
        got[there, kind] += nbytes
    assert sent == pytest.approx(got)
    ranks = range(2 * width) if width > 1 else ()
    others = (width - 1) / width
    assert sent == pytest.approx(
        {(rank, TrafficKind.GRADIENTS): 400 * others for rank in ranks}
        | {(rank, TrafficKind.PARAMETERS): 200 * others for rank in ranks}
    )


def test_an_all_reduce_goes_round_the_ring_twice() -> None:
    links = link_bytes(Parallelism(dp=3), 3, NOTHING, [StageBytes(ring_gradients=2 * 300)])
    assert links == {(a, b, TrafficKind.GRADIENTS): 400 for a, b in ((0, 1), (1, 2), (2, 0))}


@given(st.integers(1, 5), st.integers(1, 5))
def test_a_shared_parameter_is_sent_once_in_each_direction(first: int, last: int) -> None:
    """Every rank of each stage gets the elements whose state it holds, once."""
    parallelism = Parallelism(pp=3, widths=(first, 2, last))
    shared = [SharedBytes((0, 2), 60)]
    links = link_bytes(parallelism, 10, NOTHING, [StageBytes()] * 3, shared)
    got: dict[int, float] = defaultdict(float)
    for (here, there, kind), nbytes in links.items():
        assert kind is TrafficKind.SHARED_GRADIENTS
        assert {parallelism.position(rank).stage for rank in (here, there)} == {0, 2}
        got[there] += nbytes
    firsts, lasts = range(first), range(first + 2, first + 2 + last)
    assert got == pytest.approx(dict.fromkeys(firsts, 60 / first) | dict.fromkeys(lasts, 60 / last))


def test_stages_that_do_not_match_the_parallelism_are_refused() -> None:
    with pytest.raises(ConfigError, match="`stages` has 1 entries, but pp is 2"):
        link_bytes(Parallelism(pp=2), 1, NOTHING, [StageBytes()])
