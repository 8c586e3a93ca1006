"""Processes exchange pieces in bounded time and memory."""

import functools
import time

import pytest

from roadtrain.stages import control_links
from roadtrain.stages.piece_exchange import exchange
from roadtrain.stages.pieces import Extent
from tests.support import world
from tests.support.state_pieces import SIZES, RandomSource, linked, same_as_whole, spread

pytestmark = pytest.mark.slow


def everything():
    return [Extent(name, 0, size) for name, size in SIZES.items()]


def move(seed, rank):
    links = linked(rank)
    needed = spread(seed + 1, 3)[rank]
    largest = 0

    def measure_pieces():
        nonlocal largest
        source = RandomSource(spread(seed, 3)[rank])
        for piece in exchange(source, needed, links, most_elements=1000):
            largest = max(largest, piece.extent.numel)
            yield piece

    total = same_as_whole(measure_pieces(), needed)
    assert largest <= 1000  # Rule 4
    # a cold start: every rank needs everything that a single rank has
    source = RandomSource(everything() if rank == 2 else [])
    return total + same_as_whole(exchange(source, everything(), links), everything())


def test_every_rank_receives_the_pieces_it_needs():
    results = world.run(3, functools.partial(move, 5))
    assert all(isinstance(result, int) for result in results), results
    assert sum(results) == sum(SIZES.values()) * 4


def exchange_without_bias(rank):
    links = linked(rank)
    extents = [e for e in everything() if e.name != "first.bias"]
    list(exchange(RandomSource(extents), everything(), links))


def test_a_piece_that_no_rank_has_is_an_error_on_all_ranks():
    results = world.run(2, exchange_without_bias)
    assert all("elements 0 to 1 of 'first.bias'" in result for result in results), results


def exchange_from_broken_source(rank):
    links = linked(rank)
    source = RandomSource(everything() if rank == 1 else [], broken="second.weight")
    list(exchange(source, everything(), links))


def test_the_error_of_a_source_reaches_the_rank_that_waits():
    results = world.run(2, exchange_from_broken_source)
    assert results[1] == "DamagedError: second.weight is damaged"
    assert results[0].startswith(
        "LostError: rank 1 (stage 1, host host1, cluster b) could not read"
    )
    assert "second.weight is damaged" in results[0]


def late(absent_rank, rank):
    control_links.GRACE_S = 0.5  # in this process only
    links = linked(rank)
    links.agree({}, "that all are here")
    links.deadline_s = 1.0
    start = time.monotonic()
    if rank == absent_rank:
        time.sleep(6)
        return "late"
    try:
        list(exchange(RandomSource([]), [], links))
    except Exception as error:
        assert time.monotonic() - start < 5
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("absent_rank", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_an_absent_rank_is_named_by_all_others_within_the_deadline(absent_rank):  # Rule 5
    results = world.run(3, functools.partial(late, absent_rank))
    for rank, message in enumerate(results):
        if rank != absent_rank:
            assert f"rank {absent_rank} (stage {absent_rank}" in message, results
            assert "the pieces that each rank has and needs" in message
