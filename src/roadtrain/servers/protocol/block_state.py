"""A worker's state of one block: the versions of its chunks, the phase of its gradient in the open
step, and the sums of squares that have not arrived yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from roadtrain.chunks import Block
from roadtrain.servers.protocol.blocks import bit_of, trained


class GradPhase(Enum):
    """The phase of a block's gradient in the open step."""

    EMPTY = "empty"  # the servers hold no gradient of this worker
    HELD = "held"  # the servers hold a gradient of this worker
    # Only with several workers: the servers know that this worker has no gradient.
    EMPTY_CLOSED = "empty, closed"
    # Only with several workers: the servers know that this worker's gradient is complete.
    HELD_CLOSED = "held, closed"
    UPDATED = "updated"  # the update has begun


# The allowed transitions. A push after a close is allowed here, but the server refuses it.
NEXT_PHASES: Mapping[GradPhase, frozenset[GradPhase]] = {
    GradPhase.EMPTY: frozenset({GradPhase.HELD, GradPhase.EMPTY_CLOSED, GradPhase.UPDATED}),
    GradPhase.HELD: frozenset(
        {GradPhase.HELD, GradPhase.EMPTY, GradPhase.HELD_CLOSED, GradPhase.UPDATED}
    ),
    GradPhase.EMPTY_CLOSED: frozenset({GradPhase.HELD_CLOSED, GradPhase.EMPTY, GradPhase.UPDATED}),
    GradPhase.HELD_CLOSED: frozenset(
        {GradPhase.HELD_CLOSED, GradPhase.HELD, GradPhase.EMPTY, GradPhase.UPDATED}
    ),
    GradPhase.UPDATED: frozenset({GradPhase.EMPTY}),
}
HELD = frozenset({GradPhase.HELD, GradPhase.HELD_CLOSED})
CLOSED = frozenset({GradPhase.EMPTY_CLOSED, GradPhase.HELD_CLOSED})


@dataclass
class SquareSums:
    """The sums of squares of a block's gradients in one step that have arrived."""

    # server -> number of BlockAccumulated messages that have not arrived yet. The messages of a
    # server about a block arrive in the order of the pushes, also across steps.
    due: dict[int, int] = field(default_factory=dict)
    # server -> the sum of each segment of the block's chunks that the server holds
    values: dict[int, Any] = field(default_factory=dict)

    def add_sums(self, server: int, values: Any) -> None:
        self.values[server] = values
        self.due[server] -= 1
        if not self.due[server]:
            del self.due[server]


class BlockLayout:
    """The chunks of a block, as bitmaps (see servers/protocol/messages.py). All bitmaps except
    `pulls` have only trainable chunks.

    Args:
        block: The block.
        owners: The servers of each chunk of the table.
    """

    def __init__(self, block: Block, owners: Sequence[Sequence[int]]) -> None:
        self.index, self.trainable = block.index, 0
        self.frozen = 0
        self.pulls: dict[int, int] = {}  # server -> the chunks that are pulled from it
        self.holders: dict[int, int] = {}  # server -> the chunks that it holds
        # for each parameter of the trainable runs, in order: (parameter, its chunks)
        params = dict.fromkeys(trained(block), 0)
        for chunk in block.chunks:
            bit = bit_of(block, chunk.id)
            self.pulls[owners[chunk.id][0]] = self.pulls.get(owners[chunk.id][0], 0) | bit
            if not chunk.trainable:
                self.frozen |= bit
                continue
            self.trainable |= bit
            for server in owners[chunk.id]:
                self.holders[server] = self.holders.get(server, 0) | bit
            for span in chunk.spans:
                params[span.param] |= bit
        self.params = list(params.items())
        self.groups = {run.group for run in block.runs if run.trainable}

    def versions_at(self, step: int) -> dict[tuple[int, int], int]:
        """Return BlockState.versions of a session that begins at `step`."""
        both = {(0, step): self.trainable, (0, -1): self.frozen}
        return {key: chunks for key, chunks in both.items() if chunks}

    def at_holders(self, bits: int) -> Iterator[tuple[int, int]]:
        """Yield (server, chunks of `bits` that it holds) for each server that holds any of them."""
        for server, held in self.holders.items():
            if part := bits & held:
                yield server, part


@dataclass
class BlockState:
    """A worker's state of a block."""

    updated_in: int  # the last step in which an update of this block began
    changed_in: int  # the last step in which an update with a gradient began
    # (version, last step with an update) after all updates that have begun -> the chunks, a bitmap.
    # The step of a frozen chunk is -1.
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    version: int = 0  # version after all updates that have begun
    phase: GradPhase = GradPhase.EMPTY
    present: set[int] = field(default_factory=set)  # parameters with a gradient in the open step
    sums: SquareSums = field(default_factory=SquareSums)  # the sums of the open step
    # the sums of the last step that has ended, and of earlier steps whose sums are incomplete
    ended: deque[SquareSums] = field(default_factory=lambda: deque([SquareSums()]))

    @property
    def held(self) -> bool:
        return self.phase in HELD

    @property
    def closed(self) -> bool:
        return self.phase in CLOSED

    @property
    def updated(self) -> bool:
        return self.phase is GradPhase.UPDATED

    def enter(self, phase: GradPhase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase

    def add_sums(self, server: int, values: Any) -> None:
        sums = next(sums for sums in [*self.ended, self.sums] if server in sums.due)
        sums.add_sums(server, values)

    def begin_update(self, bits: int, step: int) -> None:
        """Give the chunks `bits` their next version, as part of `step`."""
        versions: dict[tuple[int, int], int] = {}
        for (version, last), chunks in self.versions.items():
            if unchanged := chunks & ~bits:
                versions[version, last] = versions.get((version, last), 0) | unchanged
            if changed := chunks & bits:
                key = version + 1, step
                versions[key] = versions.get(key, 0) | changed
        self.versions = versions

    def to_pull(self, ended: int, staleness: int) -> dict[int, int]:
        """Return the versions for the step after `ended`, or for the next step if an update has
        begun, as a dict: version -> chunks, a bitmap.
        """
        last = max(ended, self.updated_in)
        out: dict[int, int] = {}
        for (version, updated_in), chunks in self.versions.items():
            if staleness > 1:  # any available version is recent enough, because of `may_end`
                version -= staleness
            elif staleness and 0 < last == updated_in:
                version -= 1
            out[version] = out.get(version, 0) | chunks
        return out

    def unchanged(self) -> int:
        """Return the trainable chunks that the block's last update left unchanged, as a bitmap."""
        steps = -1, self.updated_in
        return sum(chunks for (_, last), chunks in self.versions.items() if last not in steps)

    def end_step(self) -> None:
        while self.ended and not self.ended[0].due:
            self.ended.popleft()
        self.ended.append(self.sums)
        self.sums = SquareSums()
        if self.closed or self.updated:
            self.enter(GradPhase.HELD if self.held else GradPhase.EMPTY)

    def steps_due(self) -> int:
        """Return the number of ended steps for which sums of squares have not arrived yet."""
        return sum(bool(sums.due) for sums in self.ended)
