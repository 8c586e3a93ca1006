"""Where parts are summed: the closed form against the published one and against a search; parts
that all workers cut alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.errors import ConfigError
from roadtrain.sums.protocol.shares import ALIGN, _hash, busiest, cut, optimum, order, reducers

ONE = Fraction(1)


def least(workers: Sequence[Fraction], spares: Sequence[Fraction] = ()) -> Fraction:
    """Seconds of an exchange of one byte with the best shares."""
    return busiest(workers, spares, optimum(workers, spares))


@pytest.mark.parametrize("n", range(2, 33))
def test_equal_links_are_the_published_formula(n: int) -> None:
    """Jiang et al. (OSDI 2020), equations 1, 2 and 6, exactly."""
    for k in range(n + 1):
        found, d = optimum([ONE] * n, [ONE] * k), n * n + k * n - 2 * k
        assert busiest([ONE] * n, [ONE] * k, found) == Fraction(2 * n * (n - 1), d)
        if n > 2:
            assert found == (Fraction(n - k, d),) * n + (Fraction(2 * (n - 1), d),) * k


def test_the_ends_are_the_ring_and_the_parameter_server() -> None:
    assert least([ONE] * 8) == Fraction(2 * 7, 8)  # k = 0: ring all-reduce
    assert least([ONE] * 8, [ONE] * 8) == 1  # k = n: all at spare hosts
    assert least([ONE] * 8, [ONE] * 20) == 1  # more do not help


rates = st.integers(1, 20).map(Fraction)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(rates, min_size=1, max_size=6),
    st.lists(rates, max_size=5),
    st.randoms(use_true_random=False),
)
def test_no_other_shares_are_better(
    workers: list[Fraction], spares: list[Fraction], rng: random.Random
) -> None:
    found = optimum(workers, spares)
    assert sum(found) == 1 and all(share >= 0 for share in found)
    seconds = busiest(workers, spares, found)
    for _ in range(30):  # random ones, and small moves from the best
        other = list(found)
        if rng.random() < 0.5:
            other = [Fraction(rng.randrange(100)) for _ in other]
            other = [share / sum(other) for share in other] if sum(other) else list(found)
        else:
            a, b = rng.randrange(len(other)), rng.randrange(len(other))
            moved = other[a] * Fraction(rng.randrange(1, 100), 100)
            other[a], other[b] = other[a] - moved, other[b] + moved if a != b else other[b]
            if a == b:
                other = list(found)
        assert busiest(workers, spares, other) >= seconds


def test_one_slow_worker_holds_up_all_whatever_is_summed_where() -> None:
    assert least([8 * ONE, 8 * ONE, 8 * ONE, ONE], [8 * ONE]) == 1
    assert optimum([8 * ONE, 8 * ONE, 8 * ONE, ONE])[3] == 0


@pytest.mark.parametrize(
    ("workers", "spares"), [([], []), ([1.0, 0.0], []), ([1.0], [-1.0]), ([float("nan")], [])]
)
def test_rates_that_cannot_be(workers: list[float], spares: list[float]) -> None:
    with pytest.raises(ConfigError, match="bytes/s"):
        optimum(workers, spares)


@settings(deadline=None)
@given(
    st.integers(0, 1 << 60),
    st.integers(0, 3_000_000),
    st.lists(rates, min_size=1, max_size=6),
    st.lists(rates, max_size=4),
    st.sampled_from([ALIGN, 1 << 16, 1 << 20]),
)
def test_parts_cover_a_tensor_once(
    key: int, elements: int, workers: list[Fraction], spares: list[Fraction], most: int
) -> None:
    parts, at = cut(elements, most), 0
    for number, (start, stop) in enumerate(parts):
        assert start == at < stop and stop - start <= most + ALIGN
        assert start == parts[0][1] * number, "the start says which part it is"
        at = stop
    assert at == elements and len(parts) <= -(-elements // most)
    shares = dict(enumerate(optimum([float(w) for w in workers], [float(s) for s in spares])))
    of = reducers(key, len(parts), shares)
    assert len(of) == len(parts) and of == sorted(of)
    for site, share in shares.items():
        assert abs(of.count(site) - share * len(parts)) < 1 + 1e-6
        assert share or not of.count(site)
    for rank in range(3):
        assert sorted(order(of, rank)) == [*range(len(parts))]


def test_over_many_tensors_every_site_gets_its_share() -> None:
    shares = dict(enumerate(optimum([1.0] * 4, [1.0] * 2)))
    for parts, keys in ((1, 20_000), (7, 4_000), (1000, 20)):
        counts = [0] * len(shares)
        for key in range(keys):
            for site in reducers(key, parts, shares):
                counts[site] += 1
        assert all(
            abs(count / (keys * parts) - share) < 0.01
            for count, share in zip(counts, shares.values())
        )


def test_the_hash_of_a_key_is_the_published_splitmix64() -> None:
    """The outputs for seed 1234567, and the first one for seed 0, of Vigna's splitmix64.c."""
    seeds = [1234567 + i * 0x9E3779B97F4A7C15 for i in range(3)]
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed, output in [*zip(seeds, outputs), (0, 0xE220A8397B1DCDAF)]:
        assert _hash(seed) == (output >> 11) / 2**53


def test_all_sites_get_theirs_at_the_pace_of_their_shares_and_workers_begin_apart() -> None:
    shares = dict(enumerate(optimum([1.0] * 4, [1.0] * 2)))  # 0.1 and 0.3
    of = reducers(0, 160, shares)
    ways = [order(of, rank) for rank in range(4)]
    for way in ways:
        for upto in range(0, len(way), 20):
            for site, share in shares.items():
                sent = sum(of[part] == site for part in way[:upto])
                assert abs(sent - share * upto) <= 3
    assert len({of[way[0]] for way in ways}) == 4
    of = reducers(0, 160, dict(enumerate(optimum([1.0] * 4))))
    assert [of[order(of, rank)[0]] for rank in range(4)] == [0, 1, 2, 3]
