"""The state machine of a worker. Calls and messages in, actions out; no I/O, no threads, no clock.

It decides what is pulled into which buffer, which servers get messages, and when a step may be
committed. servers/worker.py carries out the actions, and waits for the precondition of each call.

The phases of a block's gradient in a step:
    grad_ready -> HELD      send_dense or send_packed follows; the block's servers hold the gradient
    close_grad -> *_CLOSED  (several workers) the servers know that the gradient is complete
    drop_grad  -> EMPTY     the servers drop the gradient
    begin_update, end_update -> UPDATED   the update has begun; pulls request the next version
    end_step -> EMPTY

With one worker, the sums of squares of a gradient arrive for each push. With several workers, they
arrive once, after all workers have closed the gradient.

Memory is bounded (Rule 4): at most 2 steps, or as many as the staleness if larger, are uncommitted.
Servers may keep all gradient buffers except two until the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roadtrain.chunks import Chunk, ChunkTable
from roadtrain.errors import LoopError
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.block_state import BlockState, GradPhase, SquareSums
from roadtrain.servers.protocol.commit import Addressed, CommitStateMachine
from roadtrain.servers.protocol.prefetch import Prefetcher, PullBlock

# Most steps that have ended but are not committed, unless the staleness is higher.
UNCOMMITTED = 2
NEVER_KEPT = 2  # number of gradient buffers that servers must not keep until the update

# A function from a parameter index to the factor for its gradient, or None without a gradient.
Scales = Callable[[int], float | None]


@dataclass(frozen=True, slots=True)
class SendTo:
    message: Any
    servers: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChunkPull:
    chunk: Chunk
    version: int
    ticket: int
    server: int
    at: int  # byte offset in the target


@dataclass(frozen=True, slots=True)
class StartPulls:
    """Send the pulls as soon as the GPU no longer reads the buffer `target` (an int is a slot's
    number).
    """

    target: Hashable
    pulls: Sequence[ChunkPull]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy the buffer `target` to the GPU, because all pulls into it have arrived."""

    target: Hashable
    block: int


Action = SendTo | StartPulls | CopyIn


@dataclass(frozen=True)
class WorkerSetup:
    """The configuration of a worker's state machine."""

    table: ChunkTable
    # The servers of each chunk. Pulls go to the first server of a chunk. All other messages go to
    # all servers of the chunk.
    owners: Sequence[Sequence[int]]
    servers: Sequence[int]  # all servers, also those without chunks; the first server commits
    committed: int  # the step at which this session begins
    compute_blocks: Sequence[int]  # in the order of a forward
    slots: int
    buffers: int  # number of gradient buffers
    workers: int = 1  # number of workers whose gradients are averaged
    # Number of updates that a step's parameters may lack. With 1, they always lack the last update.
    staleness: int = 0
    replicas: int = 1
    own: int | None = None  # the server of this worker's residuals, if any
    # block -> the block of its residuals, which belong to this worker alone
    residual_block: Mapping[int, int] = field(default_factory=dict)


class WorkerStateMachine:
    """The decisions of a worker. Blocks are indices of the table. The root block (0) has a buffer
    of its own instead of a slot.

    A gradient buffer is either free, or in use, or read by servers.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup, self.table, self.owners = setup, setup.table, setup.owners
        self._residual_blocks = frozenset(setup.residual_block.values())
        self.commit = self._commit_from(setup.committed)
        self.prefetch = Prefetcher(setup.slots, setup.compute_blocks)
        self.order = {block: i + 1 for i, block in enumerate(setup.compute_blocks)}
        self.blocks = [BlockState(setup.committed, setup.committed) for _ in self.table.blocks]
        # version of each chunk after all updates that have begun
        self.chunk_version = [0] * len(self.table.chunks)
        self._updated_in = [setup.committed] * len(self.table.chunks)
        self._tickets = itertools.count(1)
        self._pulls: dict[int, tuple[int, Hashable]] = {}  # ticket of a pull -> (block, target)
        self._coming: dict[Hashable, int] = {}  # target -> number of pulls that have not arrived
        self.slot_version = [0] * setup.slots  # version of the block in each slot
        self._uses: dict[int, list[int]] = {}  # block -> its slots in use, latest last
        self._root_version = -1  # the last version of the root that was requested
        # residual blocks whose permanent buffer has the newest values
        self.current: set[int] = set()
        self.pool = range(setup.buffers)  # all gradient buffers
        self.free: list[Hashable] = list(self.pool)  # gradient buffers that are free
        self.kept: set[Hashable] = set()  # gradient buffers that servers keep until the update
        self._pushes: dict[int, Hashable] = {}  # ticket of a push -> its buffer
        self._read_by: dict[Hashable, int] = {}  # buffer -> number of pushes that still read it
        # step -> the word of each worker; added when all workers have ended the step
        self.words: dict[int, Sequence[bytes]] = {}
        self.copying = 0  # number of gradients that are being copied from the device

    def _commit_from(self, committed: int) -> CommitStateMachine:
        setup = self.setup
        return CommitStateMachine(
            setup.servers, committed, everywhere=setup.replicas > 1, own=setup.own
        )

    def handle(self, message: Any) -> list[Action]:
        """Handle a message from a server."""
        match message:
            case messages.Pulled(ticket, _):
                return self._pulled(ticket)
            case messages.GradAccumulated(chunk, sums):
                self.blocks[self.table.chunks[chunk].block].add_sums(chunk, sums)
            case messages.BufferFree(ticket):
                self._read(ticket)
            case messages.Written():
                return _sends(self.commit.on_written(message))
            case messages.Prepared():
                return _sends(self.commit.on_prepared(message))
            case messages.CommitDone():
                return _sends(self.commit.on_committed(message))
            case messages.StepWords(step, words):
                self.words[step] = words
            case _:
                raise TypeError(f"unexpected message from a server: {message!r}")
        return []

    # questions

    @property
    def open_step(self) -> int:
        return self.commit.ended + 1

    def slot_of(self, block: int) -> int | None:
        """Return the slot of `block` if its parameters have arrived, else None."""
        return self.prefetch.here(block)

    def slot_in_use(self, block: int) -> int:
        """Return the slot in which `block` is used, the latest if there are several."""
        return self._uses[block][-1]

    def is_coming(self, target: Hashable | None = None) -> bool:
        """Return whether a pull into `target` is in flight, or any pull if `target` is None."""
        return bool(self._coming) if target is None else target in self._coming

    @property
    def root_is_old(self) -> bool:
        """Return whether the open step needs a newer version of the root block than was last
        requested.
        """
        return self._root_version != self.blocks[0].version

    def is_read(self, buffer: Hashable) -> bool:
        """Return whether servers still read gradients from this buffer."""
        return buffer in self._read_by

    def may_send(self) -> bool:
        """Return whether a message about a gradient may be sent, because no gradient is being
        copied from the GPU.
        """
        return not self.copying

    def workers_of(self, block: int) -> int:
        """Return the number of workers whose gradients update `block`."""
        return 1 if block in self._residual_blocks else self.setup.workers

    def is_open(self, block: int) -> bool:
        """Return whether this worker has not closed its gradient of `block` yet."""
        state = self.blocks[block]
        return self.workers_of(block) > 1 and not (state.closed or state.updated)

    def sums_here(self, block: int) -> bool:
        return not self.blocks[block].sums.due

    def unchanged(self, block: int) -> list[Chunk]:
        """Return the trainable chunks that the open step's update of `block` leaves unchanged."""
        chunks = self.table.blocks[block].trainable
        return [c for c in chunks if self._updated_in[c.id] != self.blocks[block].updated_in]

    def check_takes_grad(self, block: int) -> None:
        """Raise LoopError if the update of `block` has begun."""
        if self.blocks[block].updated:
            raise LoopError(
                f"block '{self.table.blocks[block].name}' got a gradient in step {self.open_step}"
                " after its update had begun",
                hint="set place(..., backwards_per_step=N) to the number of backward passes before"
                " each step()",
            )

    def committed_before_end(self, step: int) -> int:
        """Return the step that must be committed before `step` may end, so that memory is
        bounded.
        """
        return step - max(UNCOMMITTED, self.setup.staleness)

    @property
    def sums_behind(self) -> int:
        """Largest number of ended steps whose sums of squares may still be missing for a block."""
        return 0 if self.commit.everywhere else self.setup.staleness

    def may_end(self, step: int) -> bool:
        both = self.commit.everywhere
        return self.commit.committed >= self.committed_before_end(step) and not any(
            s.steps_due() > self.sums_behind or (both and s.sums.due) for s in self.blocks
        )

    # pulls

    def fetch_block(self, block: int) -> list[Action]:
        """Request `block` for a forward or backward, in any slot."""
        return self._plan(self.prefetch.request(block))

    def use_block(self, block: int) -> int:
        """Start using `block`, and return its slot."""
        slot = self.prefetch.use(block)
        self._uses.setdefault(block, []).append(slot)
        return slot

    def release_block(self, block: int) -> list[Action]:
        """Stop using `block`."""
        return self._plan(self.prefetch.returned(self._uses[block].pop()))

    def fetch_into(self, block: int, target: Hashable) -> list[Action]:
        """Pull `block` into the buffer `target`, which is not a slot."""
        if block == 0:
            self._root_version = self.blocks[0].version
        return [self._pull(block, target)]

    def fetch_newest(self, number: int, target: Hashable) -> list[Action]:
        """Pull the version of a chunk that includes all updates that have begun."""
        chunk = self.table.chunks[number]
        pull = self._ticket(chunk.block, chunk, self.chunk_version[number], target, 0)
        return [StartPulls(target, [pull])]

    def _plan(self, pulls: Sequence[PullBlock]) -> list[Action]:
        out: list[Action] = []
        for pull in pulls:
            self.slot_version[pull.slot] = self.blocks[pull.block].version
            out.append(self._pull(pull.block, pull.slot))
        return out

    def _pull(self, block: int, target: Hashable) -> Action:
        assert target not in self._coming
        chunks = self.table.blocks[block].chunks
        return StartPulls(
            target, [self._ticket(block, c, self._version_for(c), target, c.offset) for c in chunks]
        )

    def _ticket(
        self, block: int, chunk: Chunk, version: int, target: Hashable, at: int
    ) -> ChunkPull:
        ticket = next(self._tickets)
        self._pulls[ticket] = block, target
        self._coming[target] = self._coming.get(target, 0) + 1
        return ChunkPull(chunk, version, ticket, self.owners[chunk.id][0], at)

    def _pulled(self, ticket: int) -> list[Action]:
        block, target = self._pulls.pop(ticket)
        self._coming[target] -= 1
        if self._coming[target]:
            return []
        del self._coming[target]
        more = self._plan(self.prefetch.arrived(target)) if isinstance(target, int) else []
        return [CopyIn(target, block), *more]

    def _version_for(self, chunk: Chunk) -> int:
        """Return the version of the chunk for the open step, or for the next step if its update has
        begun.
        """
        version, staleness = self.chunk_version[chunk.id], self.setup.staleness
        if staleness > 1:  # any available version is recent enough, because of `may_end`
            return version - staleness
        last = max(self.commit.ended, self.blocks[chunk.block].updated_in)
        late = staleness and chunk.trainable and 0 < last == self._updated_in[chunk.id]
        return version - bool(late)

    # pushes

    def take_buffer(self) -> Hashable:
        """Take a gradient buffer. Allowed only if `free` is not empty."""
        return self.free.pop()

    def return_buffer(self, buffer: Hashable) -> None:
        """Make a gradient buffer free, because no server reads it any more."""
        if buffer in self.pool:
            self.free.append(buffer)

    def send_packed(self, chunk: int, grad: Any, sums: Any, fresh: bool) -> list[Action]:
        """Send the compressed gradient of one chunk, which needs no gradient buffer."""
        push = messages.Push(chunk, grad, fresh, True, next(self._tickets), sums)
        return [SendTo(push, self.owners[chunk])]

    def send_dense(
        self,
        buffer: Hashable,
        pieces: Sequence[tuple[Chunk, Any, str]],
        fresh: bool,
        then: Mapping[int, SendTo],
        keep_always: bool,
    ) -> list[Action]:
        """Send gradients from `buffer`, which becomes free when all servers have read them. They
        must have been copied to the host.

        Args:
            buffer: Key of the buffer.
            pieces: For each chunk, (chunk, gradient, dtype). `dtype` is the type to which the
                gradient was downcast, or "" without a downcast.
            fresh: Whether the gradients replace the servers' gradients, instead of being added.
            then: Chunk number -> the message to send directly after the gradient of the chunk.
            keep_always: Whether servers may keep all gradient buffers until the update. Allowed
                only if updates begin before step() is called.
        """
        pooled = buffer in self.pool
        keep = keep_always or not pooled or len(self.kept) < len(self.pool) - NEVER_KEPT
        if keep and fresh and pooled:
            self.kept.add(buffer)
        out: list[Action] = []
        for chunk, grad, dtype in pieces:
            for server in self.owners[chunk.id]:
                ticket = next(self._tickets)
                self._pushes[ticket] = buffer
                self._read_by[buffer] = self._read_by.get(buffer, 0) + 1
                push = messages.Push(chunk.id, grad, fresh, keep, ticket, dtype=dtype)
                out.append(SendTo(push, (server,)))
            if chunk.id in then:
                out.append(then[chunk.id])
        return out

    def _read(self, ticket: int) -> None:
        buffer = self._pushes.pop(ticket, None)
        if buffer is None:
            return  # a compressed push uses no buffer
        self._read_by[buffer] -= 1
        if not self._read_by[buffer]:
            del self._read_by[buffer]
            self.kept.discard(buffer)
            self.return_buffer(buffer)

    # a block's gradient

    def grad_ready(self, block: int, present: Sequence[int]) -> None:
        """Record that `block` has a gradient, for the parameters with the indices `present`."""
        self.check_takes_grad(block)
        state = self.blocks[block]
        state.enter(GradPhase.HELD_CLOSED if state.closed else GradPhase.HELD)
        state.present.update(present)
        if self.workers_of(block) == 1:
            self._expect_sums(block)

    def close_grad(self, block: int) -> list[Action]:
        """Close this worker's gradient of `block`. Requires `may_send` and `is_open(block)`."""
        self._close(block)
        chunks = self.table.blocks[block].trainable
        return [SendTo(messages.Close(c.id, self.open_step), self.owners[c.id]) for c in chunks]

    def _expect_sums(self, block: int) -> None:
        """Expect one GradAccumulated message about `block` from each server of each chunk."""
        due = self.blocks[block].sums.due
        for chunk in self.table.blocks[block].trainable:
            due[chunk.id] = due.get(chunk.id, 0) + len(self.owners[chunk.id])

    def _discard(self, chunks: Sequence[Chunk]) -> list[Action]:
        return [SendTo(messages.DiscardGrad(c.id), self.owners[c.id]) for c in chunks]

    def _close(self, block: int) -> None:
        if self.is_open(block):
            state = self.blocks[block]
            state.enter(GradPhase.HELD_CLOSED if state.held else GradPhase.EMPTY_CLOSED)
            self._expect_sums(block)

    def drop_grad(self, block: int) -> list[Action]:
        """Drop the gradient of `block`. Requires `may_send` and `sums_here(block)`."""
        state = self.blocks[block]
        assert state.held and not state.sums.due
        self.current.discard(block)
        state.enter(GradPhase.EMPTY)
        state.present.clear()
        state.sums = SquareSums()
        return self._discard(self.table.blocks[block].trainable)

    def begin_update(
        self,
        block: int,
        step: int,
        hyperparameters: Mapping[int, tuple[float, ...]],
        scales: Scales,
    ) -> list[Action]:
        """Begin the update of `block` as part of `step`. Later pulls request the next version.

        Parameters for which `scales(param)` is None are not updated. A single worker skips chunks
        without a gradient. If there are several workers, each requests the update of every chunk.
        """
        state, workers = self.blocks[block], self.workers_of(block)
        assert step == self.open_step
        self._close(block)
        out: list[Action] = []
        for chunk in self.table.blocks[block].trainable:
            scaled = [scales(s.param) if s.param in state.present else None for s in chunk.spans]
            if workers > 1:
                scaled = [None if s is None else s / workers for s in scaled]
            elif all(s is None for s in scaled):
                continue
            self.chunk_version[chunk.id] += 1
            self._updated_in[chunk.id] = step
            hyper, order = hyperparameters[chunk.group], self.order.get(block, 0)
            update = messages.ApplyUpdate(chunk.id, step, hyper, scaled, order)
            out.append(SendTo(update, self.owners[chunk.id]))
        if out:
            self._new_version(block)
            state.changed_in = step
        state.updated_in = step
        state.enter(GradPhase.UPDATED)
        return out

    def end_update(self, block: int) -> list[Action]:
        """Finish an update after the actions of `begin_update` were carried out.

        Drops the gradients of `unchanged` chunks. This requires `may_send` and `sums_here(block)`.
        """
        self.blocks[block].present.clear()
        return self._discard(self.unchanged(block))

    def _new_version(self, block: int) -> None:
        self.blocks[block].version += 1
        self.prefetch.updated([block])

    # steps

    def end_step(self, step: int, word: bytes = b"") -> list[Action]:
        """End `step`. Requires `may_end`, and that all updates of the step have begun.

        `word` holds any bytes for the other workers. The first server passes them on to all
        workers.
        """
        assert self.may_end(step)
        out = _sends(self.commit.end_step(step, word))
        for block, state in enumerate(self.blocks):
            # with staleness, the next step pulls newer values although no further update has begun
            if 1 <= step - state.changed_in <= self.setup.staleness:
                self._new_version(block)
            state.end_step()
        return [*out, *self._plan(self.prefetch.stepped())]

    def job_state(self, step: int, blob: Any) -> list[Action]:
        """Record this worker's job state after `step`."""
        return _sends(self.commit.blob(step, blob))

    def reset(self, step: int) -> None:
        """Restart at `step`, after the contents of the servers were replaced. No pull may be in
        flight.
        """
        assert not self._coming and not any(state.held for state in self.blocks)
        self.commit = self._commit_from(step)
        self.chunk_version = [0] * len(self.chunk_version)
        self._updated_in = [step] * len(self._updated_in)
        for state in self.blocks:
            state.version += 1
            state.updated_in = state.changed_in = step
        self.current.clear()
        self.prefetch.updated(range(len(self.blocks)))

    def check(self) -> None:
        self.prefetch.check()
        self.commit.check()
        setup, ended = self.setup, self.commit.ended
        assert ended - self.commit.committed <= max(UNCOMMITTED, setup.staleness)
        assert sum(self._coming.values()) == len(self._pulls)
        assert all(self._coming.values()) and all(self._read_by.values())
        assert sum(self._read_by.values()) == len(self._pushes)
        assert len(set(self.free)) == len(self.free) and set(self.free) <= set(self.pool)
        assert not set(self.free) & set(self._read_by) and self.kept <= set(self._read_by)
        for state in self.blocks:
            assert state.updated == (state.updated_in == ended + 1)
            assert state.steps_due() <= self.sums_behind + 1
            assert not state.present or state.phase is not GradPhase.EMPTY


def _sends(addressed: Sequence[Addressed]) -> list[Action]:
    return [SendTo(message, (server,)) for server, message in addressed]
