"""Pieces move between processes, in bounded time and memory."""

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
    wanted = spread(seed + 1, 3)[rank]
    largest = 0

    def watched():
        nonlocal largest
        source = RandomSource(spread(seed, 3)[rank])
        for piece in exchange(source, wanted, links, most_elements=1000):
            largest = max(largest, piece.extent.numel)
            yield piece

    total = same_as_whole(watched(), wanted)
    assert largest <= 1000  # Rule 4
    # all want all of what one has: a cold start
    source = RandomSource(everything() if rank == 2 else [])
    return total + same_as_whole(exchange(source, everything(), links), everything())


def test_every_rank_gets_what_it_wants():
    found = world.run(3, functools.partial(move, 5))
    assert all(isinstance(one, int) for one in found), found
    assert sum(found) == sum(SIZES.values()) * 4


def absent(rank):
    links = linked(rank)
    extents = [e for e in everything() if e.name != "first.bias"]
    list(exchange(RandomSource(extents), everything(), links))


def test_what_nobody_has_is_an_error_on_all_ranks():
    found = world.run(2, absent)
    assert all("elements 0 to 1 of 'first.bias'" in one for one in found), found


def broken(rank):
    links = linked(rank)
    source = RandomSource(everything() if rank == 1 else [], broken="second.weight")
    list(exchange(source, everything(), links))


def test_a_source_that_fails_says_why_to_who_waits():
    found = world.run(2, broken)
    assert found[1] == "DamagedError: second.weight is damaged"
    assert found[0].startswith("LostError: rank 1 (stage 1, host host1, cluster b) could not read")
    assert "second.weight is damaged" in found[0]


def late(who, rank):
    control_links.GRACE_S = 0.5  # of this process alone
    links = linked(rank)
    links.agree({}, "that all are here")
    links.deadline_s = 1.0
    begun = time.monotonic()
    if rank == who:
        time.sleep(6)
        return "late"
    try:
        list(exchange(RandomSource([]), [], links))
    except Exception as error:
        assert time.monotonic() - begun < 5
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("who", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_who_does_not_come_is_named_by_all_within_the_deadline(who):  # Rule 5
    found = world.run(3, functools.partial(late, who))
    for rank, said in enumerate(found):
        if rank != who:
            assert f"rank {who} (stage {who}" in said, found
            assert "the pieces that each rank has and needs" in said
