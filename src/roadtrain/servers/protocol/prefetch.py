"""The Prefetcher decides which blocks a worker keeps, fetches and drops. The order of blocks in the
last step predicts this step. The block whose next use is latest is dropped first (Belady's rule).

The Prefetcher does no I/O: calls return the pulls to send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice


class SlotPhase(Enum):
    FREE = "free"  # empty
    COMING = "coming"  # a pull is in progress
    HERE = "here"  # holds a block that may be dropped
    USED = "used"  # a forward or backward is using the block


# The allowed transitions. A slot that is HERE can directly become COMING for another block.
NEXT_PHASES: Mapping[SlotPhase, frozenset[SlotPhase]] = {
    SlotPhase.FREE: frozenset({SlotPhase.COMING}),
    SlotPhase.COMING: frozenset({SlotPhase.HERE}),
    SlotPhase.HERE: frozenset({SlotPhase.USED, SlotPhase.COMING, SlotPhase.FREE}),
    SlotPhase.USED: frozenset({SlotPhase.USED, SlotPhase.HERE}),
}


IN_PLACE = (SlotPhase.HERE, SlotPhase.USED)


@dataclass(frozen=True, slots=True)
class PullBlock:
    block: int
    slot: int


@dataclass(slots=True)
class Slot:
    phase: SlotPhase = SlotPhase.FREE
    block: int | None = None  # None if the slot is FREE
    uses: int = 0  # number of forwards and backwards that are using the block
    # Whether the block was updated after its pull. A stale slot is freed as soon as it is neither
    # USED nor COMING.
    stale: bool = False

    def enter(self, phase: SlotPhase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase


class Prefetcher:
    def __init__(self, slots: int, blocks: Sequence[int]) -> None:
        assert slots >= 2
        # A block is in at most one slot that is not stale.
        self.slots = [Slot() for _ in range(slots)]
        self.where: dict[int, int] = {}  # block -> its slot that is not stale
        # The blocks used in the last step, in order. Before the first step, a guess: all
        # blocks in order (forward), then in reverse order (backward).
        self.past: list[int] = [*blocks, *reversed(blocks)]
        self.used = {*blocks}  # the blocks in `past`
        self.now: list[int] = []  # the blocks used in this step, in order
        self.cursor = 0  # index in `past` of the predicted next block
        # The blocks that were requested and are not in use yet, most urgent first. They get slots
        # before all other blocks.
        self.needed: list[int] = []

    def request(self, block: int) -> list[PullBlock]:
        """Request `block` for immediate use. The block is usable once `here(block)` is a slot."""
        self.follow(block)
        return self.prefer(block)

    def prefer(self, block: int) -> list[PullBlock]:
        """Make `block` the most urgent of the requested blocks, without recording a use."""
        self.needed = [block, *(b for b in self.needed if b != block)]
        return self._plan()

    def give_up(self, block: int) -> None:
        """Withdraw the request of `block`."""
        self.needed = [b for b in self.needed if b != block]

    def arrived(self, slot: int) -> list[PullBlock]:
        held = self.slots[slot]
        held.enter(SlotPhase.HERE)
        self._free_stale(held)
        return self._plan()

    def here(self, block: int) -> int | None:
        """Return the slot of `block` if its parameters have arrived, else None."""
        slot = self.where.get(block)
        return slot if slot is not None and self.slots[slot].phase in IN_PLACE else None

    def use(self, block: int) -> int:
        slot = self.where[block]
        self.slots[slot].enter(SlotPhase.USED)
        self.slots[slot].uses += 1
        self.give_up(block)
        return slot

    def returned(self, slot: int) -> list[PullBlock]:
        held = self.slots[slot]
        held.uses -= 1
        if held.uses == 0:
            held.enter(SlotPhase.HERE)
            self._free_stale(held)
        return self._plan()

    def updated(self, blocks: Sequence[int]) -> None:
        """Mark the slots of these blocks as stale, because the blocks get a new version."""
        for block in blocks:
            slot = self.where.pop(block, None)
            if slot is not None:
                self.slots[slot].stale = True
                self._free_stale(self.slots[slot])

    def stepped(self) -> list[PullBlock]:
        """End a step. Its order of blocks predicts the next step."""
        if self.now:
            self.past, self.now = self.now, []
            self.used = {*self.past}
        self.cursor = 0
        return self._plan()

    # decisions

    def follow(self, block: int) -> None:
        """Record that `block` is used next in this step."""
        self._move_to(block)
        self.now.append(block)

    def _move_to(self, block: int) -> None:
        past = self.past
        if self.cursor < len(past) and past[self.cursor] == block:
            self.cursor += 1
            return
        before = self.now[-1] if self.now else None
        matches = [i for i, b in enumerate(past) if b == block]
        follows = [i for i in matches if i > 0 and past[i - 1] == before]
        if follows or matches:
            self.cursor = (follows or matches)[0] + 1

    def _upcoming(self) -> list[int]:
        """Return distinct blocks in the order of their next use, also of the next step. The
        requested blocks are the first.
        """
        seen = dict.fromkeys(self.needed)
        enough = min(2 * len(self.slots) + 1, len(self.used | seen.keys()))
        for block in chain(islice(self.past, self.cursor, None), self.past):
            if len(seen) >= enough:
                break
            seen.setdefault(block)
        return list(seen)

    def _plan(self) -> list[PullBlock]:
        out: list[PullBlock] = []
        upcoming = self._upcoming()
        rank = {block: i for i, block in enumerate(upcoming)}
        for block in upcoming[: len(self.slots)]:
            if block in self.where:
                continue
            slot = self._room(rank, rank[block])
            if slot is None:
                break
            held = self.slots[slot]
            if held.block is not None:
                del self.where[held.block]
            held.enter(SlotPhase.COMING)
            held.block = block
            self.where[block] = slot
            out.append(PullBlock(block, slot))
        return out

    def _room(self, rank: dict[int, int], needed_at: int) -> int | None:
        """Return a free slot, or the slot whose block is needed last, if that is after `needed_at`,
        else None.
        """
        best, best_rank = None, needed_at
        for i, held in enumerate(self.slots):
            if held.phase is SlotPhase.FREE:
                return i
            if held.phase is SlotPhase.HERE and held.block is not None:
                needed = rank.get(held.block, len(rank) + 1)
                if needed > best_rank:
                    best, best_rank = i, needed
        return best

    def _free_stale(self, held: Slot) -> None:
        if held.stale and held.phase is SlotPhase.HERE:
            held.enter(SlotPhase.FREE)
            held.block, held.stale = None, False

    def check(self) -> None:
        for block, slot in self.where.items():
            assert self.slots[slot].block == block and not self.slots[slot].stale
        live = [s.block for s in self.slots if s.block is not None and not s.stale]
        assert len(live) == len(set(live)) == len(self.where)
        assert set(self.past) == self.used and len(set(self.needed)) == len(self.needed)
        assert 0 <= self.cursor <= len(self.past)
        for held in self.slots:
            assert (held.uses > 0) == (held.phase is SlotPhase.USED)
            assert (held.block is None) == (held.phase is SlotPhase.FREE)
            assert not held.stale or held.phase in (SlotPhase.COMING, SlotPhase.USED)
