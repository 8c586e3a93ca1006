"""servers/protocol/prefetch.py: which block is fetched next, and which one is dropped for it."""

from __future__ import annotations

from roadtrain.servers.protocol.prefetch import Prefetcher, PullBlock


def deliver(prefetcher: Prefetcher, pulls: list[PullBlock]) -> None:
    """Let all pulls arrive, also those that follow from an arrival."""
    while pulls:
        pulls += prefetcher.arrived(pulls.pop(0).slot)
        prefetcher.check()


def compute(prefetcher: Prefetcher, block: int) -> None:
    deliver(prefetcher, prefetcher.request(block))
    deliver(prefetcher, prefetcher.returned(prefetcher.use(block)))


def after_a_step(order: list[int], slots: int = 2) -> Prefetcher:
    """A prefetcher that has seen a step with this order of blocks."""
    prefetcher = Prefetcher(slots, range(max(order) + 1))
    for block in order:
        compute(prefetcher, block)
    deliver(prefetcher, prefetcher.stepped())
    return prefetcher


def blocks_here(prefetcher: Prefetcher) -> set[int]:
    return {block for block in range(10) if prefetcher.here(block) is not None}


def test_blocks_are_fetched_in_the_order_of_the_last_step() -> None:
    prefetcher = after_a_step([2, 0, 1])
    assert blocks_here(prefetcher) == {2, 0}
    compute(prefetcher, 2)
    assert blocks_here(prefetcher) == {0, 1}


def test_with_enough_slots_an_unexpected_block_comes_first_and_then_all_others() -> None:
    prefetcher = Prefetcher(5, range(3))
    assert [pull.block for pull in prefetcher.request(7)] == [7, 0, 1, 2]
    prefetcher.check()


def test_after_a_block_that_was_used_twice_the_one_with_the_same_predecessor_counts() -> None:
    """In the last step, 7 was followed by 5 after 3, and by 8 after 1."""
    prefetcher = after_a_step([1, 5, 3, 7, 5, 1, 7, 8])
    compute(prefetcher, 1)
    compute(prefetcher, 7)
    assert 8 in blocks_here(prefetcher)


def test_the_block_whose_next_use_is_the_latest_is_dropped() -> None:
    prefetcher = after_a_step([0, 1, 0, 2])
    assert blocks_here(prefetcher) == {0, 1}
    compute(prefetcher, 0)
    assert blocks_here(prefetcher) == {0, 1}
    compute(prefetcher, 1)
    assert blocks_here(prefetcher) == {0, 2}
