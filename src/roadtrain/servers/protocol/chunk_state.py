"""A server's state of one chunk: the phase of its update, the pushes and pulls in progress, and the
messages that came too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from roadtrain.servers.protocol import messages as m


class Resident(Enum):
    """The part of a chunk's record that stays in memory."""

    NOTHING = "nothing"
    WEIGHTS = "weights"  # the weights part: pulls need no file
    RECORD = "record"  # all of it: the update needs no file and no record buffer


class ChunkPhase(Enum):
    """The phase of a chunk's update. In all phases but IDLE the chunk holds a record buffer, unless
    its record is resident."""

    IDLE = "idle"  # no update is in progress, no memory is used
    READING = "reading"  # the record is being read from the file
    READ = "read"  # it is in the buffer; the update waits for pulls that copy from memory
    UPDATING = "updating"  # the update rule runs
    UPDATED = "updated"  # the new version exists; the write waits for the previous commit
    WRITING = "writing"  # the record is being written to the file
    WRITTEN = "written"  # the buffer waits for the last pull that copies from it


# The allowed transitions. Resident records are not read; records without a file are not written.
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
    # Updates applied since the session began. 0 is the version that the session found, -1 the one
    # before the last update.
    version: int = 0
    phase: ChunkPhase = ChunkPhase.IDLE
    buffer: int | None = None  # the record buffer that it holds
    # The queued update and the running one: the next step's update may be requested while this
    # step's record is still being written.
    queued: m.ApplyUpdate | None = None
    active: m.ApplyUpdate | None = None
    # Set if the weights part is one update behind the master: pulls of this version or a newer one
    # get the master's values.
    master_from: int | None = None
    answering: int = 0  # pulls that are being answered, from the file or from memory
    # Pulls that wait for a newer version, or for the update to end.
    pulls: list[m.Pull] = field(default_factory=list)
    # Pushes to be held, in order of arrival, and discards between them. The first is a push that is
    # being held now.
    holds: deque[m.Push | m.DiscardGrad] = field(default_factory=deque)
    # (worker, ticket) of pushes whose memory is in use until the update, without duplicates.
    kept: list[tuple[int, int]] = field(default_factory=list)
    # With several workers, for steps that are not applied: step -> workers that have closed it.
    closed: dict[int, set[int]] = field(default_factory=dict)
    # For the same steps: step -> worker -> the update that it requested.
    updates: dict[int, dict[int, m.ApplyUpdate]] = field(default_factory=dict)
    summed_in: int | None = None  # the last step that was summed and not discarded
    # Messages of workers about their next step while this step's update is due, in order.
    early: list[Early] = field(default_factory=list)
    # Slots of the spill file used by gradients in `early` and `holds`.
    spill_slots: set[int] = field(default_factory=set)

    @property
    def resident(self) -> bool:
        return self.resident_part is Resident.RECORD

    @property
    def in_memory(self) -> bool:
        """Whether pulls are answered from resident memory."""
        return self.resident_part is not Resident.NOTHING

    @property
    def update_due(self) -> bool:
        """Whether an agreed update is still to be applied."""
        return self.queued is not None or self.phase in BEFORE_UPDATE

    @property
    def changing(self) -> bool:
        """Whether memory that pulls copy from is being changed."""
        return self.phase is ChunkPhase.UPDATING and self.in_memory

    @property
    def in_step(self) -> bool:
        """Whether it holds anything of a step that is not applied."""
        return bool(self.closed or self.updates or self.holds or self.early)

    def enter(self, phase: ChunkPhase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase

    def is_ahead(self, worker: int) -> bool:
        """Whether the worker has requested the update that is due before its next step."""
        return any(worker == event.worker for event in self.early) or any(
            worker in updates for updates in self.updates.values()
        )

    def free_kept(self, worker: int | None) -> list[tuple[int, int]]:
        """Remove and return (worker, ticket) of the kept pushes of a worker (None: of all)."""
        freed = [push for push in self.kept if worker in (None, push[0])]
        self.kept = [push for push in self.kept if push not in freed]
        return freed

    def next_spill_slot(self, first: int) -> int:
        """Reserve and return the lowest free slot from `first` on."""
        slot = first
        while slot in self.spill_slots:
            slot += 1
        self.spill_slots.add(slot)
        return slot

    def check(self, next_step: int, workers: int) -> None:
        """Assert every invariant. `next_step`: the step that makes the chunk's next version."""
        over = self.phase in (ChunkPhase.IDLE, ChunkPhase.WRITTEN)
        assert (self.active is None) == over
        holds_buffer = self.phase is not ChunkPhase.IDLE and not self.resident
        assert (self.buffer is not None) == holds_buffer
        assert all(pull.version > self.version or self.changing for pull in self.pulls)
        assert self.answering >= 0
        assert not self.holds or isinstance(self.holds[0], m.Push)
        assert len(set(self.kept)) == len(self.kept)
        for step, senders in (*self.closed.items(), *self.updates.items()):
            assert step >= next_step and senders and all(0 <= w < workers for w in senders)
        assert self.summed_in is None or self.summed_in <= next_step
        spilling = bool(self.early) and isinstance(self.early[0], m.Spill)
        assert not self.early or self.update_due or self.updates or spilling
        slots = [
            event.spill_slot
            for event in (*self.early, *self.holds)
            if isinstance(event, m.Push | m.Spill)
        ]
        used = [slot for slot in slots if slot is not None]
        assert len(used) == len(self.spill_slots) and set(used) == self.spill_slots

    def open_steps(self) -> set[int]:
        """Return the steps with a requested update that is not written yet."""
        updates = [update for update in (self.queued, self.active) if update is not None]
        updates += [event for event in self.early if isinstance(event, m.ApplyUpdate)]
        return {update.step for update in updates} | set(self.updates)
