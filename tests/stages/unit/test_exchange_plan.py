"""Plans for exchanging pieces between ranks, checked element by element against brute force; and
the state after a source has failed."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from roadtrain.errors import DamagedError, GoneError, LostError
from roadtrain.stages.control_links import RankPlace
from roadtrain.stages.piece_exchange import exchange
from roadtrain.stages.pieces import Extent
from roadtrain.stages.transfers import PieceTransfer, plan_transfers, uncovered
from tests.support import state_pieces
from tests.support.thread_links import run_ranks

SIZES = {"a": 37, "b": 1, "c": 64}
RANKS = 4


def cut_at_random(
    choose: random.Random, ranks: int, copies: int
) -> tuple[list[list[Extent]], dict[tuple[str, int], set[int]]]:
    """Give every element to at most `copies` ranks. Returns the extents of each rank and the owners
    of each element."""
    haves: list[list[Extent]] = [[] for _ in range(ranks)]
    owners: dict[tuple[str, int], set[int]] = {}
    for name, size in SIZES.items():
        for _ in range(copies):
            cuts = sorted({0, size, *(choose.randrange(size + 1) for _ in range(4))})
            for start, stop in itertools.pairwise(cuts):
                rank = choose.randrange(ranks)
                haves[rank].append(Extent(name, start, stop))
                for element in range(start, stop):
                    owners.setdefault((name, element), set()).add(rank)
    return haves, owners


@pytest.mark.parametrize("seed", range(60))
def test_each_rank_gets_each_element_once_from_its_cheapest_owner(seed: int) -> None:
    choose = random.Random(seed)
    haves, owners = cut_at_random(choose, RANKS, choose.choice([1, 2, 3]))
    wants, _ = cut_at_random(choose, RANKS, choose.choice([1, 2]))
    wants = [list(dict.fromkeys(extents)) for extents in wants]
    costs = {(s, t): choose.choice([1.0, 5.0]) for s in range(RANKS) for t in range(RANKS)}
    most = choose.choice([1, 5, 1000])

    plan = plan_transfers(haves, wants, lambda s, t: costs[s, t], most)

    got: Counter[tuple[int, str, int]] = Counter()
    for transfer in plan:
        assert 0 < transfer.extent.numel <= most
        inside = [
            e
            for e in haves[transfer.source]
            if e.name == transfer.extent.name
            and e.start <= transfer.extent.start
            and transfer.extent.stop <= e.stop
        ]
        assert inside, "a transfer is not within a single extent of its source"
        for element in range(transfer.extent.start, transfer.extent.stop):
            got[transfer.target, transfer.extent.name, element] += 1
            able = owners[transfer.extent.name, element]
            if transfer.target in able:
                assert transfer.source == transfer.target
            else:
                assert costs[transfer.source, transfer.target] == min(
                    costs[s, transfer.target] for s in able
                )
    expected: Counter[tuple[int, str, int]] = Counter(
        (rank, e.name, element)
        for rank, extents in enumerate(wants)
        for e in extents
        for element in range(e.start, e.stop)
    )
    assert got == expected
    assert plan == plan_transfers(haves, wants, lambda s, t: costs[s, t], most)


def finishes(plan: list[PieceTransfer], ranks: int) -> bool:
    """Whether all transfers finish if each rank runs its own in order and a transfer needs both
    ranks."""
    queues = [[t for t in plan if rank in (t.source, t.target)] for rank in range(ranks)]
    while any(queues):
        ready = [
            q[0]
            for q in queues
            if q and all(queues[r][0] is q[0] for r in (q[0].source, q[0].target))
        ]
        if not ready:
            return False
        done = ready[0]
        for rank in {done.source, done.target}:
            queues[rank].pop(0)
    return True


@pytest.mark.parametrize("seed", range(20))
def test_no_cycle_of_ranks_deadlocks(seed: int) -> None:
    choose = random.Random(seed)
    haves, _ = cut_at_random(choose, RANKS, 1)
    wants, _ = cut_at_random(choose, RANKS, 2)
    assert finishes(plan_transfers(haves, wants, lambda s, t: 1.0, 7), RANKS)  # Rule 5


def test_equal_sources_share_the_load() -> None:
    haves = [[Extent("a", 0, 100)], [Extent("a", 0, 100)], [], []]
    wants = [[], [], [Extent("a", 0, 100)], [Extent("a", 0, 100)]]
    plan = plan_transfers(haves, wants, lambda s, t: 1.0, 1000)
    assert sorted(t.source for t in plan) == [0, 1]


def test_a_missing_extent_is_named() -> None:
    haves = [[Extent("a", 0, 10)], [Extent("a", 15, 20)]]
    wants = [[], [Extent("a", 5, 18)]]
    with pytest.raises(GoneError, match=r"elements 10 to 15 of 'a', which rank 1 needs"):
        plan_transfers(haves, wants, lambda s, t: 1.0, 1000)
    assert uncovered(haves, [Extent("a", 0, 25), Extent("z", 0, 1)]) == [
        Extent("a", 10, 15),
        Extent("a", 20, 25),
        Extent("z", 0, 1),
    ]


def test_after_a_source_failed_all_ranks_continue_together() -> None:  # Rule 5
    """Rank 1 has all that the others need but cannot read a part of it."""
    everything = [Extent(name, 0, size) for name, size in state_pieces.SIZES.items()]

    def rank(links):
        mine = everything if links.rank == 1 else []
        source = state_pieces.RandomSource(mine, broken="first.weight")
        received, failed = [], None
        try:
            for piece in exchange(source, everything, links, most_elements=3000):
                received.append(piece.extent)
        except (DamagedError, LostError) as error:
            failed = error
        return links.agree(str(failed), "how it was"), {extent.name for extent in received}

    for errors, received in run_ranks([RankPlace("c", "h", "stage 0")] * 3, rank):
        assert errors[1] == "first.weight is damaged"
        sentence = "rank 1 (stage 0, host h, cluster c) could not read first.weight"
        assert all(sentence in errors[i] for i in (0, 2))
        assert received == {"first.bias", "second.weight"}
