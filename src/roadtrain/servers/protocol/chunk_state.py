"""A server's state of one chunk: the phase of the chunk's update, the pushes and pulls in progress,
and messages that have arrived too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from roadtrain.servers.protocol import messages as m


class Resident(Enum):
    """The contents of a chunk's record that stay in memory."""

    NOTHING = "nothing"
    WEIGHTS = "weights"  # the weights part, so pulls need no file
    RECORD = "record"  # the whole record, so the update needs no file and no record buffer


class ChunkPhase(Enum):
    """The phase of a chunk's update. In all phases except IDLE, a chunk whose record does not stay
    in memory has a record buffer.
    """

    IDLE = "idle"  # no update is in progress, and no record buffer is used
    READING = "reading"  # the record is being read from the file
    READ = "read"  # the record is in the buffer; the update waits for pulls that copy from memory
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
    # Number of updates applied since the session began. Version 0 is the version at the begin of
    # the session, and version -1 is the version before it (with staleness 1).
    version: int = 0
    phase: ChunkPhase = ChunkPhase.IDLE
    buffer: int | None = None  # number of the chunk's record buffer
    # The queued update and the running update. There may be both, because the next step's update
    # may be requested while this step's record is still being written.
    queued: m.ApplyUpdate | None = None
    active: m.ApplyUpdate | None = None
    # None unless the weights part is one update behind the master. Pulls of this version or of a
    # newer version then get the master's values.
    master_from: int | None = None
    answering: int = 0  # number of pulls that are being answered, from the file or from memory
    # Pulls that wait for a newer version, or for the end of the update.
    pulls: list[m.Pull] = field(default_factory=list)
    # Pushes and discards in order of arrival. The first is a push that is being handled.
    holds: deque[m.Push | m.DiscardGrad] = field(default_factory=deque)
    # (worker, ticket) of pushes whose memory is in use until the update, without duplicates.
    kept: list[tuple[int, int]] = field(default_factory=list)
    # Only with several workers: step -> workers that have closed their gradient. A step is removed
    # when all workers have closed it.
    closed: dict[int, set[int]] = field(default_factory=dict)
    # Only with several workers: step -> worker -> its request to update. A step is removed when all
    # workers have requested the update.
    updates: dict[int, dict[int, m.ApplyUpdate]] = field(default_factory=dict)
    # the last step whose gradients were summed, unless a gradient was discarded afterwards
    summed_in: int | None = None
    # Messages about a worker's next step, in order, that wait for the end of this step's update.
    early: list[Early] = field(default_factory=list)
    # Slots of the spill file used by gradients in `early` and `holds`.
    spill_slots: set[int] = field(default_factory=set)

    @property
    def resident(self) -> bool:
        return self.resident_part is Resident.RECORD

    @property
    def in_memory(self) -> bool:
        """Return whether pulls are answered without a file."""
        return self.resident_part is not Resident.NOTHING

    @property
    def update_due(self) -> bool:
        """Return whether an update is queued or running, but not applied yet."""
        return self.queued is not None or self.phase in BEFORE_UPDATE

    @property
    def changing(self) -> bool:
        """Return whether an update is changing the memory from which pulls are answered."""
        return self.phase is ChunkPhase.UPDATING and self.in_memory

    @property
    def in_step(self) -> bool:
        """Return whether a message has arrived about a step whose update is not applied yet."""
        return bool(self.closed or self.updates or self.holds or self.early)

    def enter(self, phase: ChunkPhase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase

    def is_ahead(self, worker: int) -> bool:
        """Return whether the worker has requested an update that is not applied yet. Its further
        messages belong to its next step.
        """
        return any(worker == event.worker for event in self.early) or any(
            worker in updates for updates in self.updates.values()
        )

    def free_kept(self, worker: int | None) -> list[tuple[int, int]]:
        """Remove and return the pushes whose memory was in use until the update, as (worker,
        ticket) pairs.

        If `worker` is None, these are the pushes of all workers.
        """
        freed = [push for push in self.kept if worker in (None, push[0])]
        self.kept = [push for push in self.kept if push not in freed]
        return freed

    def next_spill_slot(self, first: int) -> int:
        """Reserve and return the lowest free slot of the spill file that is at least `first`."""
        slot = first
        while slot in self.spill_slots:
            slot += 1
        self.spill_slots.add(slot)
        return slot

    def check(self, next_step: int, workers: int) -> None:
        """Assert every invariant. `next_step` is the step that makes the chunk's next version."""
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
        """Return the steps whose updates were requested but are not written yet."""
        updates = [update for update in (self.queued, self.active) if update is not None]
        updates += [event for event in self.early if isinstance(event, m.ApplyUpdate)]
        return {update.step for update in updates} | set(self.updates)
