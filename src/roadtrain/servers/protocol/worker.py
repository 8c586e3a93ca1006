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

Messages are about blocks. A block has one message for each server that holds chunks of it, and one
answer to it, so the work for a block does not grow with the number of its chunks.

Memory is bounded (Rule 4): at most 2 steps, or as many as the staleness if larger, are uncommitted.
Servers may keep all gradient buffers except two until the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from roadtrain.chunks import ChunkTable
from roadtrain.errors import LoopError
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.block_state import BlockLayout, BlockState, GradPhase, SquareSums
from roadtrain.servers.protocol.blocks import bit_of
from roadtrain.servers.protocol.commit import Addressed, CommitStateMachine
from roadtrain.servers.protocol.prefetch import Prefetcher, PullBlock, SlotPhase

# Most steps that have ended but are not committed, unless the staleness is higher.
UNCOMMITTED = 2
NEVER_KEPT = 2  # number of gradient buffers that servers must not keep until the update

Pulls = Sequence[tuple[int, messages.BlockPull]]  # each with its server
# A function from a parameter index to the factor for its gradient, or None without a gradient.
Scales = Callable[[int], float | None]


@dataclass(frozen=True, slots=True)
class SendTo:
    message: Any
    servers: Sequence[int]


@dataclass(frozen=True, slots=True)
class StartPulls:
    """Send each pull to its server, as soon as the GPU no longer reads the destination `target` (an
    int is a slot's number).
    """

    target: Hashable
    pulls: Pulls


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy the slot `source`, into which a block was pulled, to the device slot `slot`."""

    source: int
    slot: int
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
    # number of slots on the device; 0 if blocks run on the CPU, directly on `slots`
    device_slots: int = 0
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
        # With a device, `prefetch` decides about host memory. A block is then used on the host only
        # while its copy to a device slot begins.
        self.on_device = (
            Prefetcher(setup.device_slots, setup.compute_blocks) if setup.device_slots else None
        )
        self._to_copy: list[PullBlock] = []  # copies to the device that have not begun, in order
        self.order = {block: i + 1 for i, block in enumerate(setup.compute_blocks)}
        self.layouts = [BlockLayout(block, setup.owners) for block in self.table.blocks]
        self.blocks = [
            BlockState(setup.committed, setup.committed, layout.versions_at(setup.committed))
            for layout in self.layouts
        ]
        self._tickets = itertools.count(1)
        self._pulls: dict[int, Hashable] = {}  # ticket of a pull -> its target
        self._coming: dict[Hashable, int] = {}  # target -> number of pulls that have not arrived
        self._host_version = [0] * setup.slots  # version of the block in each slot
        self._device_version = [0] * setup.device_slots
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

    def _commit_from(self, committed: int) -> CommitStateMachine:
        setup = self.setup
        return CommitStateMachine(
            setup.servers, committed, everywhere=setup.replicas > 1, own=setup.own
        )

    def handle(self, message: Any) -> list[Action]:
        """Handle a message from a server."""
        match message:
            case messages.BlockPulled(ticket):
                return self._pulled(ticket)
            case messages.BlockAccumulated(server, block, sums):
                self.blocks[block].add_sums(server, sums)
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
    def _computes(self) -> Prefetcher:
        """The Prefetcher of the slots on which blocks run."""
        return self.prefetch if self.on_device is None else self.on_device

    @property
    def open_step(self) -> int:
        return self.commit.ended + 1

    def slot_of(self, block: int) -> int | None:
        """Return the slot of `block`, on the device if there is one, if its parameters have
        arrived, else None.
        """
        return self._computes.here(block)

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

    def workers_of(self, block: int) -> int:
        """Return the number of workers whose gradients update `block`."""
        return 1 if block in self._residual_blocks else self.setup.workers

    def is_open(self, block: int) -> bool:
        """Return whether this worker has not closed its gradient of `block` yet."""
        state = self.blocks[block]
        return self.workers_of(block) > 1 and not (state.closed or state.updated)

    def sums_here(self, block: int) -> bool:
        return not self.blocks[block].sums.due

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
        """Return the step that must be committed before `step` may end: this bounds memory."""
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
        if self.on_device is None:
            return self._plan(self.prefetch.request(block))
        return self._copy(self.on_device.request(block))

    def use_block(self, block: int) -> tuple[int, int]:
        """Start using `block`, and return (slot, version of the parameters)."""
        slot = self._computes.use(block)
        self._uses.setdefault(block, []).append(slot)
        versions = self._host_version if self.on_device is None else self._device_version
        return slot, versions[slot]

    def release_block(self, block: int) -> list[Action]:
        """Stop using `block`."""
        slot = self._uses[block].pop()
        if self.on_device is None:
            return self._plan(self.prefetch.returned(slot))
        return self._copy(self.on_device.returned(slot))

    def fetch_to_host(self, block: int) -> list[Action]:
        """Request `block` for a use on the host."""
        return self._plan(self.prefetch.request(block))

    def is_on_host(self, block: int) -> bool:
        return self.prefetch.here(block) is not None

    def use_on_host(self, block: int) -> int:
        """Start a use of `block` on the host, and return its slot."""
        return self.prefetch.use(block)

    def release_on_host(self, slot: int) -> list[Action]:
        return self._plan(self.prefetch.returned(slot))

    def _copy(self, copies: Sequence[PullBlock]) -> list[Action]:
        """Add copies to device slots, and begin those that are possible now."""
        self._to_copy += copies
        return self._copy_next()

    def _copy_next(self) -> list[Action]:
        """Begin the copies to the device whose blocks have arrived on the host. Their order is
        that of `_to_copy`, but blocks that are needed now are first.
        """
        device, out = self.on_device, list[Action]()
        while device is not None and self._to_copy:
            copy = min(self._to_copy, key=lambda copy: copy.block not in device.needed)
            block = copy.block
            if self.prefetch.needed[:1] != [block]:
                out += self._plan(self.prefetch.prefer(block))
            slot = self.prefetch.here(block)
            if slot is None:
                break
            self._to_copy.remove(copy)
            self.prefetch.follow(block)
            self._device_version[copy.slot] = self._host_version[self.prefetch.use(block)]
            out.append(CopyIn(slot, copy.slot, block))
            # A pull into `slot` begins after the copy.
            out += self._plan(self.prefetch.returned(slot))
            self._to_copy += device.arrived(copy.slot)
        return out

    def fetch_into(self, block: int, target: Hashable) -> list[Action]:
        """Pull `block` into the buffer `target`, which is not a slot."""
        if block == 0:
            self._root_version = self.blocks[0].version
        return [self._pull(block, target)]

    def fetch_newest(self, number: int, target: Hashable) -> list[Action]:
        """Pull the version of a chunk that includes all updates that have begun."""
        chunk = self.table.chunks[number]
        block = self.table.blocks[chunk.block]
        bit, state = bit_of(block, number), self.blocks[block.index]
        version = next(v for (v, _), chunks in state.versions.items() if chunks & bit)
        pull = self._pull_of(block.index, bit, version, target, chunk.offset)
        return [StartPulls(target, [(self.owners[number][0], pull)])]

    def _plan(self, pulls: Sequence[PullBlock]) -> list[Action]:
        out: list[Action] = []
        for pull in pulls:
            self._host_version[pull.slot] = self.blocks[pull.block].version
            out.append(self._pull(pull.block, pull.slot))
        return out

    def _pull(self, block: int, target: Hashable) -> Action:
        assert target not in self._coming
        versions = self.blocks[block].to_pull(self.commit.ended, self.setup.staleness)
        pulls = [
            (server, self._pull_of(block, part, version, target))
            for server, pulled in self.layouts[block].pulls.items()
            for version, chunks in versions.items()
            if (part := chunks & pulled)
        ]
        return StartPulls(target, pulls)

    def _pull_of(
        self, block: int, chunks: int, version: int, target: Hashable, first: int = 0
    ) -> messages.BlockPull:
        ticket = next(self._tickets)
        self._pulls[ticket] = target
        self._coming[target] = self._coming.get(target, 0) + 1
        return messages.BlockPull(block, chunks, version, None, ticket, first)

    def _pulled(self, ticket: int) -> list[Action]:
        target = self._pulls.pop(ticket)
        self._coming[target] -= 1
        if self._coming[target]:
            return []
        del self._coming[target]
        if not isinstance(target, int):
            return []
        return [*self._plan(self.prefetch.arrived(target)), *self._copy_next()]

    # pushes

    def take_buffer(self) -> Hashable:
        """Take a gradient buffer. Allowed only if `free` is not empty."""
        return self.free.pop()

    def return_buffer(self, buffer: Hashable) -> None:
        """Make a gradient buffer free, because no server reads it any more."""
        if buffer in self.pool:
            self.free.append(buffer)

    def send_packed(self, chunk: int, grad: Any, sums: Any, fresh: bool) -> list[SendTo]:
        """Send the compressed gradient of one chunk, which needs no gradient buffer."""
        push = messages.Push(chunk, grad, fresh, True, next(self._tickets), sums)
        return [SendTo(push, self.owners[chunk])]

    def send_dense(
        self,
        block: int,
        buffer: Hashable,
        grad: Any,
        fresh: bool,
        updates: Sequence[SendTo] = (),
        *,
        keep_always: bool = False,
        dtype: str = "",
    ) -> list[SendTo]:
        """Send the gradients of `block` from `buffer`, which becomes free when all servers have
        read them. They must have been copied to the host.

        Args:
            block: Index of the block.
            buffer: Key of the buffer.
            grad: Memory of the flat gradient of the block.
            fresh: Whether the gradients replace the servers' gradients, instead of being added.
            updates: The actions of `begin_update` if its updates follow the gradients.
            keep_always: Whether servers may keep all gradient buffers until the update. Allowed
                only if updates begin before step() is called.
            dtype: The type to which fp32 gradients were downcast, or "" without a downcast.
        """
        pooled = buffer in self.pool
        keep = keep_always or not pooled or len(self.kept) < len(self.pool) - NEVER_KEPT
        if keep and fresh and pooled:
            self.kept.add(buffer)
        update_of = {server: say.message for say in updates for server in say.servers}
        out: list[SendTo] = []
        for server, chunks in self.layouts[block].holders.items():
            ticket = next(self._tickets)
            self._pushes[ticket] = buffer
            self._read_by[buffer] = self._read_by.get(buffer, 0) + 1
            push = messages.BlockPush(
                block, chunks, grad, fresh, keep, ticket, dtype, update_of.get(server)
            )
            out.append(SendTo(push, (server,)))
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
        """Close this worker's gradient of `block`. Requires `is_open(block)`."""
        self._close(block)
        trainable = self.layouts[block].trainable
        return [*self._to_holders(messages.BlockClose(block, trainable, self.open_step))]

    def _expect_sums(self, block: int) -> None:
        """Expect one BlockAccumulated message about `block` from each server."""
        due = self.blocks[block].sums.due
        for server in self.layouts[block].holders:
            due[server] = due.get(server, 0) + 1

    def _to_holders(self, message: Any) -> list[SendTo]:
        """Send each server the part of a message that is about its chunks."""
        parts = self.layouts[message.block].at_holders(message.chunks)
        return [SendTo(replace(message, chunks=part), (server,)) for server, part in parts]

    def _close(self, block: int) -> None:
        if self.is_open(block):
            state = self.blocks[block]
            state.enter(GradPhase.HELD_CLOSED if state.held else GradPhase.EMPTY_CLOSED)
            self._expect_sums(block)

    def drop_grad(self, block: int) -> list[Action]:
        """Drop the gradient of `block`. Requires `sums_here(block)`."""
        state = self.blocks[block]
        assert state.held and not state.sums.due
        self.current.discard(block)
        state.enter(GradPhase.EMPTY)
        state.present.clear()
        state.sums = SquareSums()
        return [*self._to_holders(messages.BlockDiscard(block, self.layouts[block].trainable))]

    def begin_update(
        self,
        block: int,
        step: int,
        hyperparameters: Mapping[int, tuple[float, ...]],
        scales: Scales,
    ) -> list[SendTo]:
        """Begin the update of `block` as part of `step`. Later pulls request the next version.

        Parameters for which `scales(param)` is None are not updated. A single worker skips chunks
        without a gradient. If there are several workers, each requests the update of every chunk.
        """
        state, workers = self.blocks[block], self.workers_of(block)
        layout = self.layouts[block]
        assert step == self.open_step
        self._close(block)
        scaled = [scales(p) if p in state.present else None for p, _ in layout.params]
        bits = layout.trainable
        if workers > 1:
            scaled = [None if s is None else s / workers for s in scaled]
        else:
            bits = 0
            for (_, chunks), scale in zip(layout.params, scaled):
                bits |= 0 if scale is None else chunks
        state.begin_update(bits, step)
        hyper, order = {g: hyperparameters[g] for g in layout.groups}, self.order.get(block, 0)
        out = self._to_holders(messages.BlockUpdate(block, bits, step, hyper, scaled, order))
        if out:
            self._new_version(block)
            state.changed_in = step
        state.updated_in = step
        state.enter(GradPhase.UPDATED)
        return out

    def end_update(self, block: int) -> list[Action]:
        """Finish an update after the actions of `begin_update` were carried out.

        Drops the gradients of chunks that the update leaves unchanged. This requires
        `sums_here(block)`.
        """
        state = self.blocks[block]
        state.present.clear()
        discard = messages.BlockDiscard(block, state.unchanged())
        return [*self._to_holders(discard), *self._copy_next()]

    def _new_version(self, block: int) -> None:
        self.blocks[block].version += 1
        self._updated([block])

    def _updated(self, blocks: Sequence[int]) -> None:
        """Drop the parameters of these blocks. Copies of them that have not begun are given up, and
        `_copy_next` begins those that follow.
        """
        self.prefetch.updated(blocks)
        if self.on_device is not None:
            self.on_device.updated(blocks)
            given_up = [copy for copy in self._to_copy if copy.block in blocks]
            self._to_copy = [copy for copy in self._to_copy if copy.block not in blocks]
            for copy in given_up:
                self.prefetch.give_up(copy.block)
                self._to_copy += self.on_device.arrived(copy.slot)

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
        out += self._plan(self.prefetch.stepped())
        return out if self.on_device is None else [*out, *self._copy(self.on_device.stepped())]

    def job_state(self, step: int, blob: Any) -> list[Action]:
        """Record this worker's job state after `step`."""
        return _sends(self.commit.blob(step, blob))

    def reset(self, step: int) -> None:
        """Restart at `step`, after the contents of the servers were replaced. No pull may be in
        flight.
        """
        assert not self._coming and not any(state.held for state in self.blocks)
        self.commit = self._commit_from(step)
        for state, layout in zip(self.blocks, self.layouts):
            state.versions = layout.versions_at(step)
            state.version += 1
            state.updated_in = state.changed_in = step
        self.current.clear()
        self._updated(range(len(self.blocks)))

    def check(self) -> None:
        self.prefetch.check()
        if self.on_device is not None:
            self.on_device.check()
            coming = {i for i, s in enumerate(self.on_device.slots) if s.phase is SlotPhase.COMING}
            assert {copy.slot for copy in self._to_copy} == coming
            assert len(self._to_copy) == len(coming)
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
