"""The worker's side: lends blocks to the stream of the model, sends gradients off, starts updates,
commits steps.

Threads: the training thread (and autograd's) call in; servers deliver messages from their threads.
One condition guards all shared state. Every wait has a deadline and says what it waits for (Rule
5).

A parameter's way: server -> `into` (a slot's host buffer) -> on CUDA one copy to the slot's device
buffer -> the stream's views. A gradient's way: the stream's flat push buffer -> (CUDA: pinned host
copy) -> server, whole or top-k.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from roadtrain.chunks import PAGE, Block, Chunk, ChunkTable
from roadtrain.config.budgets import Budgets
from roadtrain.device.buffers import Heap
from roadtrain.device.copies import AfterCopies, HostBuffer
from roadtrain.errors import DeadlineError, DivergedError, LoopError, LostError, WireError
from roadtrain.protocol import messages as ops
from roadtrain.protocol.commit import CommitStateMachine, Diverged
from roadtrain.protocol.prefetch import Prefetcher, PullBlock
from roadtrain.runtime.block_state import BlockState, MessageLink, SquareSums
from roadtrain.runtime.compress import Compressor, downcast_in_place
from roadtrain.runtime.trace import Stages
from roadtrain.units import round_up

# param -> what its gradient is multiplied by, None: it has no gradient
Scales = Callable[[int], float | None]


class Worker:
    """The Lender of streaming/stream.py and the GradBook of streaming/grads.py. Block indices
    are those of the ChunkTable; the root block (0) has permanent buffers and no slot."""

    def __init__(
        self,
        table: ChunkTable,
        budgets: Budgets,
        owners: Sequence[Sequence[int]],
        device: torch.device,
        stages: Stages,
        *,
        servers: Sequence[int],
        committed: int,
        deadline_s: float,
        compute_blocks: Sequence[int],
        compressor: Compressor | None = None,
        workers: int = 1,
        staleness: int = 0,
        replicas: int = 1,
        own: int | None = None,
    ) -> None:
        self.table, self.stages, self.deadline_s = table, stages, deadline_s
        # of each chunk: the servers that hold it; pulls go to the first, all else to all
        self.owners = owners
        self.workers = workers  # whose mean gradient updates; residuals are of one (`_workers`)
        # how many updates a step's parameters may lack; 1: it lacks the last one
        self.staleness = staleness
        self.compressor = compressor
        # block -> that of its residuals
        self.residual_block = compressor.residual_block if compressor is not None else {}
        self._residual_blocks = frozenset(self.residual_block.values())
        self.links: dict[int, MessageLink] = {}  # by number of the server
        self.blocks = [BlockState(released_in=committed) for _ in table.blocks]
        self._block_of = {
            s.param: b.index for b in table.blocks for run in b.runs for s in run.spans
        }
        self.chunk_version = [0] * len(table.chunks)
        # the last step in which each was released
        self._updated_in = [committed] * len(table.chunks)
        # also those that own no chunk
        self.ledger = CommitStateMachine(servers, committed, everywhere=replicas > 1, own=own)
        self.prefetch = Prefetcher(budgets.slots, compute_blocks)
        self.order = {block: i + 1 for i, block in enumerate(compute_blocks)}
        self.grad_dtype = ""  # what fp32 gradients travel as, where not as they are
        # gradients never wait for step(), so none is moved away from its buffer
        self.keep_always = False
        self._lock = threading.Condition()
        self._error: BaseException | None = None
        self._tickets = itertools.count(1)
        # ticket -> what comes, where to, its slot or -1
        self._pulls: dict[int, tuple[Block, HostBuffer, int]] = {}
        self._slots = [HostBuffer(budgets.slot_bytes, device) for _ in range(budgets.slots)]
        self._slot_version = [0] * budgets.slots
        self._uses: dict[int, list[int]] = {}  # block -> its slots in use, latest last
        root = table.blocks[0]
        self.root = HostBuffer(max(root.pull_nbytes, PAGE), device)
        self.root_push = HostBuffer(max(root.push_nbytes, PAGE), device)
        self._root_version = -1
        self.pull_rate = 0.0  # bytes a second of the last block pulled alone
        self._permanent: dict[int, HostBuffer] = {}
        self._current: set[int] = set()  # blocks whose permanent buffer need not be fetched
        self._push_all = [
            HostBuffer(budgets.push_bytes, device) for _ in range(budgets.push_buffers)
        ]
        self._push_free = list(self._push_all)
        self._push_tickets: dict[int, HostBuffer] = {}
        self._kept: set[HostBuffer] = set()  # that hold a gradient until the update
        self.heap = Heap()
        self._copying = 0  # gradients on their way from the device
        # what waits for copies from the device (push) and to it (pull)
        self._after: dict[str, AfterCopies] = {}
        if device.type == "cuda":
            self._after = {
                of: AfterCopies(f"worker {of}", self._copy_failed) for of in ("push", "pull")
            }

    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers())

    def _buffers(self) -> list[HostBuffer]:
        return [*self._slots, *self._push_all, self.root, self.root_push, *self._permanent.values()]

    # messages from servers

    def deliver(self, message: Any) -> None:
        with self._lock:
            match message:
                case ops.Pulled(ticket, _):
                    self._pulled(ticket)
                case ops.GradAccumulated(chunk, sums):
                    self.blocks[self.table.chunks[chunk].block].came(chunk, sums)
                case ops.BufferFree(ticket):
                    self._freed(ticket)
                case ops.Written():
                    self._send_all(self.ledger.on_written(message))
                    if self.ledger.diverged is not None and self._error is None:
                        self._error = self._diverged(self.ledger.diverged)
                case ops.Prepared():
                    self._send_all(self.ledger.on_prepared(message))
                case ops.CommitDone():
                    self._send_all(self.ledger.on_committed(message))
                case ops.Failed(_, error):
                    self._error = self._error or error
            self._lock.notify_all()

    def _diverged(self, found: Diverged) -> DivergedError:
        one, other = (
            getattr(self.links[server], "peer", f"server {server}") for server in found.servers
        )
        number = found.chunk(
            [c.id for c in self.table.trainable if self.owners[c.id][0] == found.owner]
        )
        chunk = (
            "several chunks"
            if number is None
            else f"chunk {number} of block {self.table.chunks[number].block}"
        )
        return DivergedError(
            f"{one} and {other} made different bytes of {chunk} in step {found.step}: it is not"
            " committed",
            hint=(
                "the same command goes on from the step before. If it comes again, the memory or"
                " processor of one of them is failing, or they are of different kinds and the"
                " optimizer has no compiled rule"
            ),
        )

    def _tell(self, server: int, message: Any) -> None:
        try:
            self.links[server].send(message)
        except (LostError, WireError) as error:
            raise self._in_step(error, "sending") from error

    def _in_step(self, error: BaseException, doing: str) -> BaseException:
        """The end of a link, with the step at work and what was done in it (Rule 5)."""
        if not isinstance(error, (LostError, WireError)) or str(error).startswith("step "):
            return error
        told = type(error)(f"step {self.ledger.sealed + 1}, {doing}: {error}")
        told.__cause__ = error
        return told

    def _send_all(self, messages: Sequence[tuple[int, Any]]) -> None:
        for server, message in messages:
            self._tell(server, message)

    def _send(self, chunk: int, message: Any) -> None:
        for server in self.owners[chunk]:
            self._tell(server, message)

    def _expect_sums(self, state: BlockState, chunks: Sequence[Chunk]) -> None:
        """GradAccumulated messages for a gradient of `chunks`: one of each server, so that the
        last is that of the last push."""
        for chunk in chunks:
            if chunk.trainable:
                state.sums.due[chunk.id] = state.sums.due.get(chunk.id, 0) + len(
                    self.owners[chunk.id]
                )

    def _wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Waits under the lock. Raises a server's error if one failed, DeadlineError when the
        deadline passes."""
        with self.stages.timed("Wait"):
            in_time = self._lock.wait_for(
                lambda: self._error is not None or ready(), self.deadline_s
            )
        if not in_time:
            self._error = DeadlineError(  # kept, so that whoever closes does not wait once more
                f"the worker waited {self.deadline_s:.0f} s for {what()} in step"
                f" {self.ledger.sealed + 1}; commit: {self.ledger.missing()}; peers:"
                f" {', '.join(link.peer for link in self.links.values())}",
                hint="a device that slow needs a longer deadline_s",
            )
        elif self._error is not None:
            self._error = self._in_step(self._error, f"waiting for {what()}")
        if self._error is not None:
            raise self._error

    # pulls

    def fetch(self, block: int) -> tuple[torch.Tensor, int]:
        with self._lock:
            self._pull_blocks(self.prefetch.asked(block))
            self._wait(
                lambda: self.prefetch.here(block) is not None,
                lambda: f"the parameters of block '{self.table.blocks[block].name}'",
            )
            slot = self.prefetch.use(block)
            self._uses.setdefault(block, []).append(slot)
            version = self._slot_version[slot]
        return self._slots[slot].on_device(), version

    def release(self, block: int) -> None:
        with self._lock:
            slot = self._uses[block].pop()
            self._slots[slot].record_use()
            self._pull_blocks(self.prefetch.returned(slot))
        self.heap.trim()

    def _pull_blocks(self, pulls: Sequence[PullBlock]) -> None:
        for pull in pulls:
            self._slot_version[pull.slot] = self.blocks[pull.block].version
            self._pull(self.table.blocks[pull.block], self._slots[pull.slot], pull.slot)

    def _pull(self, block: Block, host: HostBuffer, slot: int = -1) -> None:
        """With the lock: where the device still reads what `host` held, the pulls are sent
        later, by another thread."""
        host.pending = len(block.chunks)
        versions = [self._wanted(chunk) for chunk in block.chunks]
        if (copying := host.copying()) is None:
            self._send_pulls(block, host, slot, versions)
        else:
            self._after["pull"].put(
                copying, partial(self._send_pulls_later, block, host, slot, versions)
            )

    def _send_pulls_later(self, *what: Any) -> None:
        with self._lock:
            self._send_pulls(*what)

    def _send_pulls(
        self, block: Block, host: HostBuffer, slot: int, versions: Sequence[int]
    ) -> None:
        for chunk, version in zip(block.chunks, versions, strict=True):
            ticket = next(self._tickets)
            self._pulls[ticket] = (block, host, slot)
            into = host.view[chunk.offset : chunk.offset + round_up(chunk.weights_nbytes, PAGE)]
            self._tell(self.owners[chunk.id][0], ops.Pull(chunk.id, version, into, ticket))

    def _pulled(self, ticket: int) -> None:
        block, host, slot = self._pulls.pop(ticket)
        host.pending -= 1
        if not host.pending:
            host.to_device(block.pull_nbytes)
            self._pull_blocks(self.prefetch.arrived(slot) if slot >= 0 else ())

    def _wanted(self, chunk: Chunk) -> int:
        """The version that the step at work needs, or the next one where this one's update of
        the chunk has begun."""
        if self.staleness > 1:  # whatever there is: `seal` keeps the bound
            return self.chunk_version[chunk.id] - self.staleness
        last = max(self.ledger.sealed, self.blocks[chunk.block].released_in)
        late = self.staleness and chunk.trainable and 0 < last == self._updated_in[chunk.id]
        return self.chunk_version[chunk.id] - bool(late)

    def pull_into(self, block: Block, host: HostBuffer) -> None:
        """Fetches `block` into a permanent buffer and waits."""
        start = time.perf_counter()
        with self._lock:
            self._pull(block, host)
            self._wait(lambda: not host.pending, lambda: f"the parameters of '{block.name}'")
        self.pull_rate = block.pull_nbytes / (time.perf_counter() - start)
        host.on_device()

    def pull_newest(self, chunk: Chunk) -> memoryview:
        """Its weights part after every update released so far, whether committed or not. Waits."""
        host = HostBuffer(round_up(chunk.weights_nbytes, PAGE), torch.device("cpu"))
        with self._lock:
            host.pending, ticket = 1, next(self._tickets)
            self._pulls[ticket] = self.table.blocks[chunk.block], host, -1
            pull = ops.Pull(chunk.id, self.chunk_version[chunk.id], host.view, ticket)
            self._tell(self.owners[chunk.id][0], pull)
            self._wait(lambda: not host.pending, lambda: f"chunk {chunk.id}")
        return host.view

    def give_up_slots(self, count: int) -> None:
        """Before the first step."""
        self.prefetch.shrink(len(self._slots) - count)
        for _ in range(count):
            self._slots.pop().close()

    @property
    def root_is_old(self) -> bool:
        """Whether the released steps gave the root block another version than is here."""
        return self._root_version != self.blocks[0].version

    def refresh_root(self) -> bool:
        """Brings the root block to the version that the released steps gave it. True if it was
        fetched."""
        if not self.root_is_old:
            return False
        self._root_version = self.blocks[0].version
        self.root.record_use()
        self.pull_into(self.table.blocks[0], self.root)
        return True

    # pushes

    def gradient_buffer(self, block: int) -> torch.Tensor:
        with self._lock:
            if block == 0:
                self._wait(lambda: not self.root_push.pending, lambda: "the root's gradient buffer")
                return self.root_push.tensor
            self._wait(
                lambda: bool(self._push_free),
                lambda: f"a gradient buffer for '{self.table.blocks[block].name}'",
            )
            return self._push_free.pop().tensor

    def push_block(
        self,
        block: int,
        buffer: torch.Tensor,
        present: Sequence[int],
        *,
        fresh: bool,
        step: int = 0,
        hyperparameters: Mapping[int, tuple[float, ...]] = {},
    ) -> None:
        """Sends the gradient of `block` in the flat `buffer`. `fresh`: it begins a new sum. `step`:
        the gradient is whole and not to be scaled, so each chunk's update in that step begins as
        soon as it is there.
        """
        state, table = self.blocks[block], self.table.blocks[block]
        if state.released_in == self.ledger.sealed + 1:
            raise LoopError(
                f"block '{table.name}' got a gradient in step {self.ledger.sealed + 1} after its"
                " update had begun",
                hint=(
                    "place(..., backwards_per_step=N) must be the number of backward passes before"
                    " each step()"
                ),
            )
        if fresh:
            self.forget(block)
        host = next(
            b for b in [self.root_push, *self._push_all] if b.tensor.data_ptr() == buffer.data_ptr()
        )
        state.held = True
        state.present.update(present)
        with self.stages.timed("Push", table.push_nbytes):
            copied = host.from_device(table.push_nbytes)
            if self._workers(block) == 1:
                with self._lock:
                    self._expect_sums(state, table.chunks)
            at_once = step > 0 and self.compressor is None
            then = (
                self._begin_update(block, step, hyperparameters, lambda param: 1.0)
                if at_once
                else {}
            )
            if copied is None:
                self._push_host(table, host, fresh, then)
            else:
                with self._lock:
                    self._copying += 1
                self._after["push"].put(
                    copied, partial(self._push_copied, table, host, fresh, then)
                )
            if at_once:
                self._end_update(block, then)
            elif step:
                self.apply_update(block, step, hyperparameters, lambda param: 1.0)

    def _push_copied(self, *what: Any) -> None:
        self._push_host(*what)
        with self._lock:
            self._copying -= 1
            self._lock.notify_all()

    def _copy_failed(self, error: BaseException) -> None:
        self.deliver(ops.Failed(-1, error))

    def _all_sent(self) -> None:
        """Waits, with the lock, for gradients that are still being copied from the device: what
        is said of them comes after them."""
        self._wait(lambda: not self._copying, lambda: "gradients to be copied from the device")

    def _push_host(
        self, table: Block, host: HostBuffer, fresh: bool, then: Mapping[int, ops.ApplyUpdate] = {}
    ) -> None:
        chunks = [c for c in table.chunks if c.trainable]
        if self.compressor is not None:
            residual_block = self.residual_block.get(table.index)
            target = (
                None
                if residual_block is None
                else self._residual(residual_block, permanent=table.index == 0)
            )
            residual = None if target is None else np.frombuffer(target.view, np.float32)
            for chunk, grad, sums in self.compressor.compress(chunks, host.view, residual):
                with self._lock:
                    self._send(
                        chunk.id, ops.Push(chunk.id, grad, fresh, True, next(self._tickets), sums)
                    )
            if residual_block is not None and target is not None:
                self._send_residual(residual_block, target)
            if host is not self.root_push:
                with self._lock:
                    self._push_free.append(host)
                    self._lock.notify_all()
            return
        self.send_dense(chunks, host, fresh, then)

    def _residual(self, residual_block: int, *, permanent: bool) -> HostBuffer:
        """A buffer that holds the newest residuals of block `twin` and may be changed in place,
        then sent."""
        block = self.table.blocks[residual_block]
        if permanent:  # the root's: it never leaves this worker
            if residual_block not in self._permanent:
                self._permanent[residual_block] = HostBuffer(block.pull_nbytes, torch.device("cpu"))
            host = self._permanent[residual_block]
            with self._lock:
                self._wait(lambda: not host.pending, lambda: f"the buffer of '{block.name}'")
            if residual_block not in self._current:
                self.pull_into(block, host)
                self._current.add(residual_block)
            return host
        self.fetch(residual_block)
        slot = self._slots[self._uses[residual_block][-1]]
        buffer = self.gradient_buffer(residual_block)
        host = next(b for b in self._push_all if b.tensor is buffer)
        n = block.push_nbytes
        np.copyto(np.frombuffer(host.view, np.uint8, n), np.frombuffer(slot.view, np.uint8, n))
        self.release(residual_block)
        return host

    def _send_residual(self, residual_block: int, host: HostBuffer) -> None:
        state, table = self.blocks[residual_block], self.table.blocks[residual_block]
        state.held = True
        state.present.update(s.param for run in table.runs for s in run.spans)
        with self._lock:
            self._expect_sums(state, table.chunks)
        self.send_dense(table.chunks, host, True)

    def send_dense(
        self,
        chunks: Sequence[Chunk],
        host: HostBuffer,
        fresh: bool,
        then: Mapping[int, ops.ApplyUpdate] = {},
    ) -> None:
        """Pushes `chunks` out of `host`, free again when every server has said so. `then`: said
        right after a chunk."""
        dtypes = downcast_in_place(chunks, host.view, self.grad_dtype)
        with self._lock:
            keep = (
                self.keep_always
                or host not in self._push_all
                or len(self._kept) < len(self._push_all) - 2
            )
            if keep and fresh and host in self._push_all:
                self._kept.add(host)
            host.pending = sum(len(self.owners[chunk.id]) for chunk in chunks)
            for chunk, dtype in zip(chunks, dtypes):
                grad = host.view[
                    chunk.push_offset : chunk.push_offset + round_up(chunk.weights_nbytes, PAGE)
                ]
                for server in self.owners[chunk.id]:
                    ticket = next(self._tickets)
                    self._push_tickets[ticket] = host
                    self._tell(server, ops.Push(chunk.id, grad, fresh, keep, ticket, dtype=dtype))
                if chunk.id in then:
                    self._send(chunk.id, then[chunk.id])

    def _freed(self, ticket: int) -> None:
        host = self._push_tickets.pop(ticket, None)
        if host is None:
            return  # a compressed push: its arrays are their own
        host.pending -= 1
        if not host.pending:
            self._kept.discard(host)
            if host in self._push_all:
                self._push_free.append(host)

    # one step

    def sum_squares(self, param: int) -> float:
        """Of the gradient of `param` summed so far in this step. Waits for the servers that
        hold it."""
        return self.block_sums(self._block_of[param]).get(param, 0.0)

    def block_sums(self, block: int, *, sealed: bool = False) -> dict[int, float]:
        """param -> sum of squares, added up in flat order, the same for every chunk size. Of the
        workers' mean, where there are several: the block's gradient is taken for whole then.
        `sealed`: of the step sealed last instead.
        """
        state = self.blocks[block]
        with self._lock:
            if not sealed and self._whole(block):
                self._all_sent()
                for chunk in self.table.blocks[block].chunks:
                    if chunk.trainable:
                        self._send(chunk.id, ops.Close(chunk.id, self.ledger.sealed + 1))
            of = state.sealed[-1] if sealed else state.sums
            self._wait(
                lambda: not of.due, lambda: f"the sums of block '{self.table.blocks[block].name}'"
            )
            sums = of.values
        out: dict[int, float] = {}
        for chunk in self.table.blocks[block].chunks:
            for (param, _, _), value in zip(chunk.segments, sums.get(chunk.id, ())):
                out[param] = out.get(param, 0.0) + float(value) / self._workers(block) ** 2
        return out

    def _workers(self, block: int) -> int:
        return 1 if block in self._residual_blocks else self.workers

    def _whole(self, block: int) -> bool:
        """Whether the others have yet to hear that this worker's gradient of `block` is whole;
        they will have."""
        state = self.blocks[block]
        if self._workers(block) == 1 or state.closed:
            return False
        state.closed = True
        self._expect_sums(state, self.table.blocks[block].chunks)
        return True

    def forget(self, block: int) -> None:
        """Drops the held gradient of `block`, if any."""
        state = self.blocks[block]
        if not state.held:
            return
        if self._workers(block) == 1 or state.closed:
            self.block_sums(block)  # waits: what is still being held cannot be dropped
        self._forget_chunks([c for c in self.table.blocks[block].chunks if c.trainable])
        self._current.discard(block)
        if block in self.residual_block:
            self.forget(self.residual_block[block])
        state.held = state.closed = False
        state.present.clear()
        state.sums = SquareSums()

    def _forget_chunks(self, chunks: Sequence[Chunk]) -> None:
        with self._lock:
            self._all_sent()
            for chunk in chunks:
                self._send(chunk.id, ops.DiscardGrad(chunk.id))

    def apply_update(
        self,
        block: int,
        step: int,
        hyperparameters: Mapping[int, tuple[float, ...]],
        scales: Scales,
    ) -> None:
        """Starts the update of `block` as part of `step`: every span whose `scales(param)` is
        not None. With several workers each releases every block, and the server takes what any
        of them has."""
        releases = self._begin_update(block, step, hyperparameters, scales)
        sent = any(scale is not None for message in releases.values() for scale in message.scales)
        with self._lock:
            self._all_sent()
            for chunk, message in releases.items():
                self._send(chunk, message)
        self._end_update(block, releases)
        if (residual_block := self.residual_block.get(block)) and not sent:
            self.forget(residual_block)  # the step is skipped, or this worker had no gradient
        elif residual_block:
            groups = {chunk.group: () for chunk in self.table.blocks[residual_block].chunks}
            self.apply_update(residual_block, step, groups, lambda param: 1.0)

    def _begin_update(
        self,
        block: int,
        step: int,
        hyperparameters: Mapping[int, tuple[float, ...]],
        scales: Scales,
    ) -> dict[int, ops.ApplyUpdate]:
        """What is to be said of which chunk; from now on the block has its next version."""
        state, table = self.blocks[block], self.table.blocks[block]
        out = {}
        with self._lock:
            self._whole(block)
            for chunk in table.chunks:
                if not chunk.trainable:
                    continue
                of_spans = [
                    scales(s.param) if s.param in state.present else None for s in chunk.spans
                ]
                if (workers := self._workers(block)) > 1:
                    of_spans = [None if s is None else s / workers for s in of_spans]
                elif all(s is None for s in of_spans):
                    continue
                self.chunk_version[chunk.id] += 1
                self._updated_in[chunk.id] = step
                order = self.order.get(block, 0)
                out[chunk.id] = ops.ApplyUpdate(
                    chunk.id, step, hyperparameters[chunk.group], of_spans, order
                )
            if out:
                state.version += 1
                self.prefetch.updated([block])
            state.released_in = step
        return out

    def _end_update(self, block: int, released: Mapping[int, ops.ApplyUpdate]) -> None:
        """One worker's chunks without a gradient are dropped."""
        state, table = self.blocks[block], self.table.blocks[block]
        if dropped := [c for c in table.chunks if c.trainable and c.id not in released]:
            with self._lock:
                self._wait(lambda: not state.sums.due, lambda: f"block '{table.name}'")
            self._forget_chunks(dropped)
        state.held = False
        state.present.clear()

    def seal(self, step: int) -> None:
        """All of `step` is released. Waits while more steps are uncommitted than 1, or the
        staleness (Rule 4)."""
        with self._lock:
            last = step - max(2, self.staleness)
            self._wait(lambda: self.ledger.committed >= last, lambda: f"the commit of step {last}")
            # two report, not in step: one at a time
            most = 0 if (both := self.ledger.everywhere) else self.staleness
            self._wait(
                lambda: not any(s.due() > most or (both and s.sums.due) for s in self.blocks),
                lambda: f"the sums of step {step - 1 - most}",
            )
            self._send_all(self.ledger.seal(step))
            # with staleness they change once more, a step later
            for block, state in enumerate(self.blocks):
                if 1 <= step - state.released_in <= self.staleness:
                    state.version += 1
                    self.prefetch.updated([block])
                state.seal()
            self._pull_blocks(self.prefetch.stepped())

    def blob(self, step: int, blob: bytes) -> None:
        with self._lock:
            self._send_all(self.ledger.blob(step, blob))

    def wait_committed(self, step: int) -> None:
        with self._lock:
            self._wait(lambda: self.ledger.committed >= step, lambda: f"the commit of step {step}")

    def rest(self) -> None:
        """Waits until nothing is on its way from a server; drops what is held of gradients."""
        for block in range(len(self.blocks)):
            self.forget(block)
        with self._lock:
            self._wait(
                lambda: not self._pulls and not any(host.pending for host in self._slots),
                lambda: "the parameters that are on their way",
            )

    def begin_again(self, step: int) -> None:
        """The servers hold other contents, as those of `step`."""
        with self._lock:
            ledger = self.ledger
            self.ledger = CommitStateMachine(
                (ledger.first, *ledger.others), step, everywhere=ledger.everywhere, own=ledger.own
            )
            self.chunk_version = [0] * len(self.chunk_version)
            self._updated_in = [step] * len(self._updated_in)
            for state in self.blocks:
                state.version, state.released_in = state.version + 1, step
            self._current.clear()
            self.prefetch.updated(range(len(self.blocks)))

    def close(self) -> None:
        for after in self._after.values():
            after.close()
        for buffer in self._buffers():
            buffer.close()
