"""What a server knows of one chunk: how far its update is, what was pushed and asked for, and what
was said too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from roadtrain.servers.protocol import messages as m


class Resident(Enum):
    """What of a chunk's record is kept in memory for good."""

    NOTHING = "nothing"
    WEIGHTS = "weights"  # the weights part: pulls need no file
    RECORD = "record"  # all of it: the update needs no file and no record buffer


class ChunkPhase(Enum):
    """How far the chunk's update is. All phases but IDLE hold one record buffer, unless the record
    is resident."""

    IDLE = "idle"  # no update is under way: 0 bytes
    READING = "reading"  # the record is on its way from the file
    READ = "read"  # it is in its buffer; the update waits for pulls that copy from memory
    UPDATING = "updating"  # the update rule runs
    UPDATED = "updated"  # the new version exists; the write waits for the commit of the step before
    WRITING = "writing"  # the record is on its way to the file
    WRITTEN = "written"  # the buffer waits for the last pull that copies from it


# Which phase may follow which. A resident record is not read. What rests in memory alone is not
# written.
NEXT_PHASES: Mapping[ChunkPhase, frozenset[ChunkPhase]] = {
    ChunkPhase.IDLE: frozenset({ChunkPhase.READING, ChunkPhase.UPDATING}),
    ChunkPhase.READING: frozenset({ChunkPhase.READ, ChunkPhase.UPDATING}),
    ChunkPhase.READ: frozenset({ChunkPhase.UPDATING}),
    ChunkPhase.UPDATING: frozenset({ChunkPhase.UPDATED}),
    ChunkPhase.UPDATED: frozenset({ChunkPhase.WRITING, ChunkPhase.WRITTEN}),
    ChunkPhase.WRITING: frozenset({ChunkPhase.WRITTEN}),
    ChunkPhase.WRITTEN: frozenset({ChunkPhase.IDLE}),
}
BEFORE_UPDATE = frozenset({ChunkPhase.READING, ChunkPhase.READ, ChunkPhase.UPDATING})
AFTER_UPDATE = frozenset({ChunkPhase.UPDATED, ChunkPhase.WRITING, ChunkPhase.WRITTEN})
Early: TypeAlias = m.GradientMessage | m.Spill


@dataclass(slots=True)
class ChunkState:
    resident_part: Resident
    # Updates applied since the session began. 0 is what the session found, -1 what was before the
    # last update of that.
    version: int = 0
    phase: ChunkPhase = ChunkPhase.IDLE
    buffer: int | None = None  # the record buffer that it holds
    # The update that is queued, and the one that is being carried out: the next step's may be asked
    # for while this step's record is still being written.
    queued: m.ApplyUpdate | None = None
    active: m.ApplyUpdate | None = None
    # The weights part is one update behind the master: a pull of this version or a newer one gets
    # the master's values. None: the weights part is never behind.
    master_from: int | None = None
    answering: int = 0  # pulls that are being answered, from the file or from memory
    # Each waits for a newer version, or for the update to end.
    pulls: list[m.Pull] = field(default_factory=list)
    # Gradients to be held in the order of arrival, and discards between them. The first is a Push
    # that is being held now.
    holds: deque[m.Push | m.DiscardGrad] = field(default_factory=deque)
    # (worker, ticket) of pushes whose memory is in use until the update. No pair is there twice.
    kept: list[tuple[int, int]] = field(default_factory=list)
    # Of several workers, for steps that are not applied: step -> whose gradient of it is whole.
    closed: dict[int, set[int]] = field(default_factory=dict)
    # The same: step -> worker -> the update that it asked for.
    asked: dict[int, dict[int, m.ApplyUpdate]] = field(default_factory=dict)
    summed_in: int | None = None  # the step of the sum that was taken last and not dropped
    # What a worker said of its next step while this one's update is due, in order.
    early: list[Early] = field(default_factory=list)
    # Slots of the spill file in use: of the gradients in `early` and `holds`.
    spill_slots: set[int] = field(default_factory=set)

    @property
    def resident(self) -> bool:
        return self.resident_part is Resident.RECORD

    @property
    def in_memory(self) -> bool:
        """Whether pulls are answered from what memory keeps for good."""
        return self.resident_part is not Resident.NOTHING

    @property
    def update_due(self) -> bool:
        """Whether an update that was agreed on is still to be applied."""
        return self.queued is not None or self.phase in BEFORE_UPDATE

    @property
    def changing(self) -> bool:
        """Whether memory that pulls copy from changes now."""
        return self.phase is ChunkPhase.UPDATING and self.in_memory

    @property
    def in_step(self) -> bool:
        """Whether anything of a step that is not applied is here."""
        return bool(self.closed or self.asked or self.holds or self.early)

    def enter(self, phase: ChunkPhase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase

    def heard_early(self, worker: int) -> bool:
        """Whether the worker has asked for the update that is due before its next step."""
        return any(worker == one.worker for one in self.early) or any(
            worker in asked for asked in self.asked.values()
        )

    def free_kept(self, worker: int | None) -> list[tuple[int, int]]:
        """(worker, ticket) of the pushes of one worker (None: of all) whose memory was in use."""
        freed = [one for one in self.kept if worker in (None, one[0])]
        self.kept = [one for one in self.kept if one not in freed]
        return freed

    def next_spill_slot(self, first: int) -> int:
        """The least free one from `first` on, which is taken by this."""
        slot = first
        while slot in self.spill_slots:
            slot += 1
        self.spill_slots.add(slot)
        return slot

    def check(self, next_step: int, workers: int) -> None:
        """Assert every invariant. `next_step`: that the chunk's next version is of."""
        over = self.phase in (ChunkPhase.IDLE, ChunkPhase.WRITTEN)
        assert (self.active is None) == over
        holds_buffer = self.phase is not ChunkPhase.IDLE and not self.resident
        assert (self.buffer is not None) == holds_buffer
        assert all(pull.version > self.version or self.changing for pull in self.pulls)
        assert self.answering >= 0
        assert not self.holds or isinstance(self.holds[0], m.Push)
        assert len(set(self.kept)) == len(self.kept)
        for step, said in (*self.closed.items(), *self.asked.items()):
            assert step >= next_step and said and all(0 <= worker < workers for worker in said)
        assert self.summed_in is None or self.summed_in <= next_step
        spilling = bool(self.early) and isinstance(self.early[0], m.Spill)
        assert not self.early or self.update_due or self.asked or spilling
        slots = [
            one.spill_slot
            for one in (*self.early, *self.holds)
            if isinstance(one, m.Push | m.Spill)
        ]
        used = [slot for slot in slots if slot is not None]
        assert len(used) == len(self.spill_slots) and set(used) == self.spill_slots

    def asks_in(self) -> set[int]:
        """Steps in which a worker asked for an update that is not written yet."""
        updates = [one for one in (self.queued, self.active) if one is not None]
        updates += [one for one in self.early if isinstance(one, m.ApplyUpdate)]
        return {one.step for one in updates} | set(self.asked)
