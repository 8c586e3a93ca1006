"""Where parts are summed: the closed form against the published one and against a search; parts that all workers cut
alike."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.errors import ConfigError
from roadtrain.flow.shares import ALIGN, busiest, cut, optimum, order

ONE = Fraction(1)


@pytest.mark.parametrize("n", range(2, 33))
def test_equal_links_are_the_published_formula(n: int) -> None:
    """Jiang et al. (OSDI 2020), equations 1, 2 and 6, exactly."""
    for k in range(n + 1):
        found, d = optimum([ONE] * n, [ONE] * k), n * n + k * n - 2 * k
        assert found.seconds == Fraction(2 * n * (n - 1), d)
        if n > 2:
            assert found.spares == (Fraction(2 * (n - 1), d),) * k
            assert found.workers == (Fraction(n - k, d),) * n


def test_the_ends_are_the_ring_and_the_parameter_server() -> None:
    assert optimum([ONE] * 8).seconds == Fraction(2 * 7, 8)  # k = 0: ring all-reduce
    assert optimum([ONE] * 8, [ONE] * 8).seconds == 1  # k = n: all at spare hosts
    assert optimum([ONE] * 8, [ONE] * 20).seconds == 1  # more do not help


rates = st.integers(1, 20).map(Fraction)


@settings(deadline=None)
@given(st.lists(rates, min_size=1, max_size=6), st.lists(rates, max_size=5), st.randoms(use_true_random=False))
def test_no_other_shares_are_better(workers: list[Fraction], spares: list[Fraction], rng: random.Random) -> None:
    found = optimum(workers, spares)
    assert sum(found.all) == 1 and all(share >= 0 for share in found.all)
    if len(workers) > 1:
        assert busiest(workers, spares, found.all) == found.seconds
    for _ in range(30):  # random ones, and small moves from the best
        other = list(found.all)
        if rng.random() < 0.5:
            other = [Fraction(rng.randrange(100)) for _ in other]
            other = [share / sum(other) for share in other] if sum(other) else list(found.all)
        else:
            a, b = rng.randrange(len(other)), rng.randrange(len(other))
            moved = other[a] * Fraction(rng.randrange(1, 100), 100)
            other[a], other[b] = other[a] - moved, other[b] + moved if a != b else other[b]
            if a == b:
                other = list(found.all)
        assert busiest(workers, spares, other) >= found.seconds


def test_one_slow_worker_holds_up_all_whatever_is_summed_where() -> None:
    assert optimum([8 * ONE, 8 * ONE, 8 * ONE, ONE], [8 * ONE]).seconds == 1
    assert optimum([8 * ONE, 8 * ONE, 8 * ONE, ONE]).workers[3] == 0


@pytest.mark.parametrize(("workers", "spares"), [([], []), ([1.0, 0.0], []), ([1.0], [-1.0]), ([float("nan")], [])])
def test_rates_that_cannot_be(workers: list[float], spares: list[float]) -> None:
    with pytest.raises(ConfigError, match="bytes a second"):
        optimum(workers, spares)


@settings(deadline=None)
@given(st.integers(0, 1 << 60), st.integers(0, 3_000_000), st.lists(rates, min_size=1, max_size=6),
       st.lists(rates, max_size=4), st.sampled_from([ALIGN, 1 << 16, 1 << 20]))
def test_parts_cover_a_tensor_once(
    key: int, elements: int, workers: list[Fraction], spares: list[Fraction], most: int
) -> None:
    shares = optimum([float(w) for w in workers], [float(s) for s in spares]).all
    parts = cut(key, elements, shares, most)
    at = 0
    for part in parts:
        assert part.start == at < part.stop and part.stop - part.start <= most + ALIGN
        assert shares[part.site] > 0
        at = part.stop
    assert at == elements
    for rank in range(3):
        assert sorted(order(parts, rank), key=lambda p: p.start) == list(parts)


def test_large_tensors_are_spread_by_the_shares_and_small_ones_too() -> None:
    shares = optimum([1.0] * 4, [1.0] * 2).all
    parts = cut(3, 64 << 20, shares, 1 << 18)
    for site, share in enumerate(shares):
        assert abs(sum(p.stop - p.start for p in parts if p.site == site) / (64 << 20) - share) < 1e-3
    counts = [0] * len(shares)
    for key in range(20_000):
        (part,) = cut(key, 100, shares, 1 << 18)
        counts[part.site] += 1
    assert all(abs(count / 20_000 - share) < 0.01 for count, share in zip(counts, shares))


def test_all_sites_get_theirs_at_the_pace_of_their_shares_and_workers_begin_apart() -> None:
    shares = optimum([1.0] * 4, [1.0] * 2).all  # 0.1 and 0.3
    parts = cut(0, 40 << 20, shares, 1 << 18)
    ways = [order(parts, rank) for rank in range(4)]
    for way in ways:
        for upto in range(0, len(way), 20):
            sent = [sum(p.stop - p.start for p in way[:upto] if p.site == s) for s in range(6)]
            for size, share in zip(sent, shares):
                assert abs(size - share * sum(sent)) <= 3 * (1 << 18)
    assert {way[0].site for way in ways} == {4, 5}
    parts = cut(0, 40 << 20, optimum([1.0] * 4).all, 1 << 18)
    assert [order(parts, rank)[0].site for rank in range(4)] == [0, 1, 2, 3]
