"""What a worker does next: which version of which chunk it asks for and where to, which gradient
buffer is free, what is said of a gradient and to whom, when a step may end and be committed. Calls
and messages in, actions out; no I/O, no threads, no clock. servers/worker.py carries the actions
out, and waits until what a call needs is so (the questions: `slot_of`, `is_coming`, `free`,
`may_say`, `sums_here`, `may_end`).

A block's gradient through one step (block_state.NEXT_PHASES says what may follow what):
    grad_ready -> HELD      it rests at the block's servers, once send_dense or send_packed sent it
    close_grad -> *_CLOSED  (several workers) all were told that this worker's part is whole
    drop_grad  -> EMPTY     the servers drop it
    begin_update, end_update -> UPDATED   the update has begun: pulls ask for the next version
    end_step -> EMPTY

With several workers the sums of squares of a gradient come once, when all have closed it; with one
they come of each push.
Rule 4: at most two steps, or the staleness, have ended and are not committed; of the gradient
buffers two at least are never kept by a server until its update.
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
from roadtrain.servers.protocol.commit import CommitStateMachine
from roadtrain.servers.protocol.prefetch import Prefetcher, PullBlock

UNCOMMITTED = 2  # steps that may have ended and not be committed, where the staleness is not more
NEVER_KEPT = 2  # gradient buffers that servers may not keep until the update

# param -> what its gradient is multiplied by, None: it has no gradient
Scales = Callable[[int], float | None]


@dataclass(frozen=True, slots=True)
class Say:
    message: Any
    servers: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChunkPull:
    chunk: Chunk
    version: int
    ticket: int
    server: int
    at: int  # in the target


@dataclass(frozen=True, slots=True)
class StartPulls:
    """As soon as the device no longer reads `target`; an int is a slot."""

    target: Hashable
    pulls: Sequence[ChunkPull]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """All that was pulled into `target` is there: to the device with it."""

    target: Hashable
    block: int


Action = Say | StartPulls | CopyIn


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker's state machine is made of."""

    table: ChunkTable
    owners: Sequence[Sequence[int]]  # of each chunk: pulls go to the first, all else to all
    servers: Sequence[int]  # also those that own no chunk; the first commits
    committed: int  # the step at which this session begins
    compute_blocks: Sequence[int]  # in the order of a forward
    slots: int
    buffers: int  # for gradients on their way
    workers: int = 1  # whose mean gradient updates
    staleness: int = 0  # how many updates a step's parameters may lack; 1: they lack the last one
    replicas: int = 1
    own: int | None = None  # a server that only this worker has
    # block -> that of its residuals, which are of this worker alone
    residual_block: Mapping[int, int] = field(default_factory=dict)


class WorkerStateMachine:
    """A worker's decisions. Blocks are those of the table; the root block (0) has a buffer of its
    own and no slot.

    Invariants (asserted by `check`): a buffer is free, taken, or read by servers; what is coming
    for a target are its tickets; a block is UPDATED in the step that its last update belongs to.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup, self.table, self.owners = setup, setup.table, setup.owners
        self._residual_blocks = frozenset(setup.residual_block.values())
        self.commit = self._commit_from(setup.committed)
        self.prefetch = Prefetcher(setup.slots, setup.compute_blocks)
        self.order = {block: i + 1 for i, block in enumerate(setup.compute_blocks)}
        self.blocks = [BlockState(setup.committed, setup.committed) for _ in self.table.blocks]
        self.chunk_version = [0] * len(self.table.chunks)  # that the updates begun so far give
        self._updated_in = [setup.committed] * len(self.table.chunks)
        self._tickets = itertools.count(1)
        # pulls: ticket -> block and where to; how many are to come there
        self._pulls: dict[int, tuple[int, Hashable]] = {}
        self._coming: dict[Hashable, int] = {}
        self.slot_version = [0] * setup.slots  # of the block in it
        self._uses: dict[int, list[int]] = {}  # block -> its slots in use, latest last
        self._root_version = -1  # that was asked for last
        self.current: set[int] = set()  # blocks whose buffer of their own need not be fetched
        # gradient buffers: of the pool, those free; those that servers keep until the update
        self.pool = range(setup.buffers)
        self.free: list[Hashable] = list(self.pool)
        self.kept: set[Hashable] = set()
        # pushes: ticket -> buffer that it is read from; how many servers have yet to read there
        self._pushes: dict[int, Hashable] = {}
        self._read_by: dict[Hashable, int] = {}
        # step -> what each worker said with it, once all have ended it, until somebody reads it
        self.words: dict[int, Sequence[bytes]] = {}
        self.copying = 0  # gradients on their way from the device

    def _commit_from(self, committed: int) -> CommitStateMachine:
        setup = self.setup
        return CommitStateMachine(
            setup.servers, committed, everywhere=setup.replicas > 1, own=setup.own
        )

    def handle(self, message: Any) -> list[Action]:
        """A message from a server."""
        match message:
            case messages.Pulled(ticket, _):
                return self._pulled(ticket)
            case messages.GradAccumulated(chunk, sums):
                self.blocks[self.table.chunks[chunk].block].came(chunk, sums)
            case messages.BufferFree(ticket):
                self._read(ticket)
            case messages.Written():
                return _says(self.commit.on_written(message))
            case messages.Prepared():
                return _says(self.commit.on_prepared(message))
            case messages.CommitDone():
                return _says(self.commit.on_committed(message))
            case messages.StepWords(step, words):
                self.words[step] = words
            case _:
                raise TypeError(f"no worker knows {message!r}")
        return []

    # questions

    @property
    def open_step(self) -> int:
        return self.commit.ended + 1

    def slot_of(self, block: int) -> int | None:
        """Where its parameters are in place."""
        return self.prefetch.here(block)

    def slot_in_use(self, block: int) -> int:
        """The one that was taken last."""
        return self._uses[block][-1]

    def is_coming(self, target: Hashable | None = None) -> bool:
        """Whether something is on its way to `target`, or (None) to anywhere."""
        return bool(self._coming) if target is None else target in self._coming

    @property
    def root_is_old(self) -> bool:
        """Whether the updates begun gave the root block another version than was asked for."""
        return self._root_version != self.blocks[0].version

    def is_read(self, buffer: Hashable) -> bool:
        """Whether servers have yet to read what was sent out of it."""
        return buffer in self._read_by

    def may_say(self) -> bool:
        """Whether no gradient is still on its way from the device: what is said of one comes
        after it."""
        return not self.copying

    def workers_of(self, block: int) -> int:
        """Whose gradients update it."""
        return 1 if block in self._residual_blocks else self.setup.workers

    def is_open(self, block: int) -> bool:
        """Whether the others have yet to hear that this worker's gradient is whole."""
        state = self.blocks[block]
        return self.workers_of(block) > 1 and not (state.closed or state.updated)

    def sums_here(self, block: int) -> bool:
        return not self.blocks[block].sums.due

    def left_over(self, block: int) -> list[Chunk]:
        """The trainable chunks that the update of `block` in the open step leaves as they are."""
        chunks = self.table.blocks[block].trainable
        return [c for c in chunks if self._updated_in[c.id] != self.blocks[block].updated_in]

    def check_takes_grad(self, block: int) -> None:
        """LoopError once its update has begun."""
        if self.blocks[block].updated:
            raise LoopError(
                f"block '{self.table.blocks[block].name}' got a gradient in step {self.open_step}"
                " after its update had begun",
                hint=(
                    "place(..., backwards_per_step=N) must be the number of backward passes before"
                    " each step()"
                ),
            )

    def committed_before_end(self, step: int) -> int:
        """The step that must be committed before `step` may end (Rule 4)."""
        return step - max(UNCOMMITTED, self.setup.staleness)

    @property
    def sums_behind(self) -> int:
        """How many steps the sums of a block may be behind: two replicas report, not in step, so
        one at a time."""
        return 0 if self.commit.everywhere else self.setup.staleness

    def may_end(self, step: int) -> bool:
        both = self.commit.everywhere
        return self.commit.committed >= self.committed_before_end(step) and not any(
            s.steps_due() > self.sums_behind or (both and s.sums.due) for s in self.blocks
        )

    # pulls

    def fetch_block(self, block: int) -> list[Action]:
        """A forward or backward needs `block` now, in any slot."""
        return self._plan(self.prefetch.asked(block))

    def use_block(self, block: int) -> int:
        """It runs from now on, on the slot returned."""
        slot = self.prefetch.use(block)
        self._uses.setdefault(block, []).append(slot)
        return slot

    def release_block(self, block: int) -> list[Action]:
        """It no longer does."""
        return self._plan(self.prefetch.returned(self._uses[block].pop()))

    def fetch_into(self, block: int, target: Hashable) -> list[Action]:
        """`block` is wanted in a buffer of its own; `target` is opaque, but no slot's number."""
        if block == 0:
            self._root_version = self.blocks[0].version
        return [self._pull(block, target)]

    def fetch_newest(self, number: int, target: Hashable) -> list[Action]:
        """A chunk is wanted after every update that has begun."""
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
            target, [self._ticket(block, c, self._wanted(c), target, c.offset) for c in chunks]
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

    def _wanted(self, chunk: Chunk) -> int:
        """The version that the step at work needs, or the next one where this one's update of
        the chunk has begun."""
        version, staleness = self.chunk_version[chunk.id], self.setup.staleness
        if staleness > 1:  # whatever there is: `may_end` keeps the bound
            return version - staleness
        last = max(self.commit.ended, self.blocks[chunk.block].updated_in)
        late = staleness and chunk.trainable and 0 < last == self._updated_in[chunk.id]
        return version - bool(late)

    # pushes

    def take_buffer(self) -> Hashable:
        """A gradient is computed into the buffer returned. Only while one is `free`."""
        return self.free.pop()

    def return_buffer(self, buffer: Hashable) -> None:
        """Nobody reads what was computed into `buffer` any more."""
        if buffer in self.pool:
            self.free.append(buffer)

    def send_packed(self, chunk: int, grad: Any, sums: Any, fresh: bool) -> list[Action]:
        """As `send_dense`, of one chunk compressed into arrays of its own."""
        push = messages.Push(chunk, grad, fresh, True, next(self._tickets), sums)
        return [Say(push, self.owners[chunk])]

    def send_dense(
        self,
        buffer: Hashable,
        pieces: Sequence[tuple[Chunk, Any, str]],
        fresh: bool,
        then: Mapping[int, Say],
        keep_always: bool,
    ) -> list[Action]:
        """The host copy of what was computed into `buffer` is complete; the buffer is free again
        once every server has read every piece. `pieces`: (chunk, its gradient, what it was
        downcast to). `fresh`: it begins a new sum. `then`: what is said right behind a chunk.
        `keep_always`: no gradient waits for step(), so none is moved elsewhere."""
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
                out.append(Say(push, (server,)))
            if chunk.id in then:
                out.append(then[chunk.id])
        return out

    def _read(self, ticket: int) -> None:
        buffer = self._pushes.pop(ticket, None)
        if buffer is None:
            return  # a compressed push: its arrays are their own
        self._read_by[buffer] -= 1
        if not self._read_by[buffer]:
            del self._read_by[buffer]
            self.kept.discard(buffer)
            self.return_buffer(buffer)

    # a block's gradient

    def grad_ready(self, block: int, present: Sequence[int]) -> None:
        """There is a gradient of `block`, of its parameters `present`."""
        self.check_takes_grad(block)
        state = self.blocks[block]
        state.enter(GradPhase.HELD_CLOSED if state.closed else GradPhase.HELD)
        state.present.update(present)
        if self.workers_of(block) == 1:
            self._expect_sums(block)

    def close_grad(self, block: int) -> list[Action]:
        """This worker's gradient of `block` is whole. Only where `may_say` and `is_open(block)`."""
        self._close(block)
        chunks = self.table.blocks[block].trainable
        return [Say(messages.Close(c.id, self.open_step), self.owners[c.id]) for c in chunks]

    def _expect_sums(self, block: int) -> None:
        """GradAccumulated messages for a gradient of `block`: one of each server, so that the
        last is that of the last push."""
        due = self.blocks[block].sums.due
        for chunk in self.table.blocks[block].trainable:
            due[chunk.id] = due.get(chunk.id, 0) + len(self.owners[chunk.id])

    def _discard(self, chunks: Sequence[Chunk]) -> list[Action]:
        return [Say(messages.DiscardGrad(c.id), self.owners[c.id]) for c in chunks]

    def _close(self, block: int) -> None:
        if self.is_open(block):
            state = self.blocks[block]
            state.enter(GradPhase.HELD_CLOSED if state.held else GradPhase.EMPTY_CLOSED)
            self._expect_sums(block)

    def drop_grad(self, block: int) -> list[Action]:
        """The gradient of `block` is not wanted. Only where `may_say`, and its sums are here."""
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
        """The update of `block` as part of `step`: of every span whose `scales(param)` is not None.
        From now on the block has its next version. One worker leaves out what has no gradient;
        several release every chunk, and the server takes what any of them has."""
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
            out.append(Say(update, self.owners[chunk.id]))
        if out:
            self._new_version(block)
            state.changed_in = step
        state.updated_in = step
        state.enter(GradPhase.UPDATED)
        return out

    def end_update(self, block: int) -> list[Action]:
        """All of it was said. Where chunks are `left_over`: only where `may_say`, and the sums of
        `block` are here."""
        self.blocks[block].present.clear()
        return self._discard(self.left_over(block))

    def _new_version(self, block: int) -> None:
        self.blocks[block].version += 1
        self.prefetch.updated([block])

    # steps

    def end_step(self, step: int, word: bytes = b"") -> list[Action]:
        """All updates of `step` have begun. Only where `may_end`. `word`: for the other workers."""
        assert self.may_end(step)
        out = _says(self.commit.end_step(step, word))
        for block, state in enumerate(self.blocks):
            # with staleness they change once more, a step later
            if 1 <= step - state.changed_in <= self.setup.staleness:
                self._new_version(block)
            state.end_step()
        return [*out, *self._plan(self.prefetch.stepped())]

    def job_state(self, step: int, blob: Any) -> list[Action]:
        """The job's own state after `step`."""
        return _says(self.commit.blob(step, blob))

    def begin_again(self, step: int) -> None:
        """The servers hold other contents, as those of `step`; nothing is on its way."""
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


def _says(said: Sequence[tuple[int, Any]]) -> list[Action]:
    return [Say(message, (server,)) for server, message in said]
