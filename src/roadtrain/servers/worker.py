"""A worker's exchange with its servers: it fetches blocks, sends gradients, starts updates and
commits steps. servers/protocol/worker.py makes the decisions.

The training thread and autograd's threads call the methods, and servers deliver messages in threads
of their own. Every wait has a deadline and an error message that names the reason of the wait (Rule
5).

Parameters go from a server to a slot's host buffer, and on to the GPU. Gradients go from a flat
buffer on the GPU to pinned host memory, and on to the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from msgspec.structs import replace

from roadtrain.chunks import PAGE, Block, Chunk
from roadtrain.device.accelerator import AfterCopies, DeviceBuffer, HostBuffer, accelerator_of
from roadtrain.device.buffers import Heap
from roadtrain.errors import DeadlineError, DivergedError, LoopError, LostError, WireError
from roadtrain.kernels.codecs import Compressor, downcast_in_place
from roadtrain.options.budgets import WorkerBudgets
from roadtrain.servers.connection import NO_ANSWER, SLOW, MessageLink
from roadtrain.servers.process_lock import ProcessLock
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol import worker as w
from roadtrain.servers.protocol.commit import Diverged
from roadtrain.servers.protocol.worker import WorkerSetup, WorkerStateMachine
from roadtrain.servers.square_sums import BlockSegments
from roadtrain.servers.trace import Stages
from roadtrain.servers.worker_buffers import WorkerBuffers
from roadtrain.units import round_up

Gradient: TypeAlias = DeviceBuffer | HostBuffer  # the buffer of a laid-out gradient


class Worker:
    """A worker's exchange of parameters and gradients with its servers. Blocks are indices of the
    ChunkTable. The root block (0) has permanent buffers instead of a slot.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        budgets: WorkerBudgets,
        device: torch.device,
        stages: Stages,
        *,
        deadline_s: float,
        compressor: Compressor | None = None,
    ) -> None:
        self.machine = WorkerStateMachine(setup)
        self.table, self.owners, self.workers = setup.table, setup.owners, setup.workers
        self.residual_block = setup.residual_block
        self.blocks, self.prefetch = self.machine.blocks, self.machine.prefetch
        self.order = self.machine.order  # block -> position in a forward, from 1
        self.stages, self.deadline_s, self.compressor = stages, deadline_s, compressor
        self.links: dict[int, MessageLink] = {}  # by number of the server
        self._block_of = {
            s.param: b.index for b in self.table.blocks for run in b.runs for s in run.spans
        }
        self._segments: dict[int, BlockSegments] = {}  # of blocks whose sums were needed
        self.word = b""  # bytes that are sent to the other workers at the end of the step
        # dtype to which fp32 gradients are cast for sending; "" if they are not cast
        self.grad_dtype = ""
        # If True, gradients never wait for step(), so servers may always keep them in place.
        self.keep_always = False
        self._lock = ProcessLock()
        self.maker, self.check_process = self._lock.maker, self._lock.check_process
        self._error: BaseException | None = None
        self.buffers = WorkerBuffers(setup, budgets, device)
        self.root = self.buffers.root
        self.heap = Heap()
        # With a device, threads that send what has to wait for copies: gradients and all messages
        # that must follow them (push), and pulls into buffers that are being copied (pull).
        self._after: dict[str, AfterCopies] = {}
        if (accelerator := accelerator_of(device)) is not None:
            self._after = {
                of: AfterCopies(f"worker {of}", accelerator, self._copy_failed)
                for of in ("push", "pull")
            }

    @property
    def committed(self) -> int:
        return self.machine.commit.committed

    @property
    def root_tensor(self) -> torch.Tensor:
        """The parameters of the root block, on the compute device."""
        device = self.buffers.on_device
        return self.root.tensor if device is None else device.root.tensor

    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers)

    # messages from and to servers

    def deliver(self, message: Any) -> None:
        with self._lock:
            match message:
                case messages.Failed(_, error):
                    self._error = self._error or error
                case _:
                    try:
                        self._carry_out(self.machine.handle(message))
                    except Exception as error:
                        # Raising here would end the link on which `message` has arrived. If the
                        # link of another server was lost, `_send` has stored the error in `_error`,
                        # and the next wait raises it.
                        if error is not self._error:
                            raise
            if (found := self.machine.commit.diverged) is not None and self._error is None:
                self._error = self._diverged(found)
            self._lock.notify_all()

    def _carry_out(self, actions: Sequence[w.Action]) -> None:
        """Carry out actions. The caller holds the lock."""
        for action in actions:
            match action:
                case w.SendTo() if "push" in self._after:
                    self._after["push"].put(None, partial(self._send_all, [action]))
                case w.SendTo():
                    self._send_all([action])
                case w.StartPulls(target, pulls):
                    self._start_pulls(self.buffers.slot(target), pulls)
                case w.CopyIn(source, slot, block) if self.buffers.on_device is not None:
                    device, nbytes = self.buffers.on_device, self.table.blocks[block].pull_nbytes
                    self.buffers.slots[source].copy_to(device.slots[slot], nbytes)

    def _send_all(self, messages_to: Sequence[w.SendTo]) -> None:
        with self._lock:
            for say in messages_to:
                for server in say.servers:
                    self._send(server, say.message)

    def _diverged(self, found: Diverged) -> DivergedError:
        first, second = (getattr(self.links[n], "peer", f"server {n}") for n in found.servers)
        chunks = [c for c in self.table.trainable if self.owners[c.id][0] == found.owner]
        return found.error(first, second, {c.id: c.block for c in chunks})

    def _send(self, server: int, message: Any) -> None:
        try:
            self.links[server].send(message)
            return
        except (LostError, WireError) as error:
            self._error = self._error or self._in_step(error, "sending")
        raise self._error

    def _in_step(self, error: BaseException, doing: str) -> BaseException:
        """Return a link's error, with the open step and the operation `doing` in the message."""
        if not isinstance(error, (LostError, WireError)) or str(error).startswith("step "):
            return error
        detailed = type(error)(f"step {self.machine.open_step}, {doing}: {error}")
        detailed.__cause__ = error
        return detailed

    def _wait(self, ready: Callable[[], bool], what: str, *, interrupted: bool = False) -> None:
        """Wait until `ready()`. The caller holds the lock. `what` names the awaited event.
        `interrupted`: whether the event happens also after Ctrl-C has stopped a change halfway.

        Raises the error of a server that has failed, or DeadlineError after the deadline.
        """
        if self._lock.interrupted and self._error is None and not interrupted:
            self._error = LoopError(
                f"step {self.machine.open_step} was interrupted and cannot be continued",
                hint="place the model again to resume from the last committed step",
            )
        self._lock.waiting = True
        with self.stages.timed("Wait"):
            in_time = self._lock.wait_for(
                lambda: self._error is not None or ready(), self.deadline_s
            )
        self._lock.waiting = False
        if not in_time:
            waits = {link.peer: link.waits_for() for link in self.links.values()}
            self._error = DeadlineError(  # stored, so that `close` does not wait again
                f"the worker waited {self.deadline_s:.0f} s for {what} in step"
                f" {self.machine.open_step}; commit: {self.machine.commit.missing()}; peers:"
                f" {', '.join(peer + words for peer, words in waits.items())}",
                hint=NO_ANSWER if any(waits.values()) else SLOW,
            )
        elif self._error is not None:
            self._error = self._in_step(self._error, f"waiting for {what}")
        if self._error is not None:
            raise self._error

    # pulls

    def fetch(self, block: int) -> tuple[torch.Tensor, int]:
        with self._lock:
            self._carry_out(self.machine.fetch_block(block))
            self._wait(
                lambda: self.machine.slot_of(block) is not None,
                f"the parameters of block '{self.table.blocks[block].name}'",
            )
            slot, version = self.machine.use_block(block)
        if (device := self.buffers.on_device) is not None:
            return device.slots[slot].ready(), version
        return self.buffers.slots[slot].tensor, version

    def release(self, block: int) -> None:
        with self._lock:
            if (device := self.buffers.on_device) is not None:
                device.slots[self.machine.slot_in_use(block)].record_use()
            self._carry_out(self.machine.release_block(block))
        self.heap.trim()

    def _start_pulls(self, host: HostBuffer, pulls: w.Pulls) -> None:
        """Send pulls into `host`, once its old contents were copied to the device. The caller holds
        the lock.
        """
        if (copying := host.copying()) is None:
            self._send_pulls(host, pulls)
        else:
            self._after["pull"].put(copying, partial(self._send_pulls, host, pulls))

    def _send_pulls(self, host: HostBuffer, pulls: w.Pulls) -> None:
        with self._lock:
            for server, pull in pulls:
                self._send(server, replace(pull, into=host.view))

    def start_pull(self, block: Block, host: HostBuffer) -> None:
        """Start fetching `block` into `host`, which is not a slot."""
        with self._lock:
            self._carry_out(self.machine.fetch_into(block.index, host))

    def wait_pulled(self, host: HostBuffer, what: str) -> None:
        with self._lock:
            self._wait(lambda: not self.machine.is_coming(host), what)

    def pull_into(self, block: Block, host: HostBuffer) -> None:
        """Fetch `block` into `host`, which is not a slot, and wait until it has arrived."""
        self.start_pull(block, host)
        self.wait_pulled(host, f"the parameters of '{block.name}'")

    def pull_newest(self, chunk: Chunk) -> memoryview:
        """Fetch the weights part of a chunk, with all updates that have begun, committed or not."""
        host = HostBuffer(round_up(chunk.weights_nbytes, PAGE))
        with self._lock:
            self._carry_out(self.machine.fetch_newest(chunk.id, host))
        self.wait_pulled(host, f"chunk {chunk.id}")
        return host.view

    @property
    def root_is_old(self) -> bool:
        """Return whether the open step needs newer root parameters than there are here."""
        return self.machine.root_is_old

    def refresh_root(self) -> bool:
        """Fetch the root block if `root_is_old`. Returns whether the root block was fetched."""
        if not self.root_is_old:
            return False
        root = self.table.blocks[0]
        self.pull_into(root, self.root)
        if (device := self.buffers.on_device) is not None:
            device.root.record_use()
            self.root.copy_to(device.root, root.pull_nbytes)
            device.root.ready()
        return True

    # pushes

    def lay_out(self, block: int, write: Callable[[torch.Tensor], None]) -> Gradient:
        """Wait for a buffer for the gradient of `block`, and call `write` with its tensor. Returns
        the buffer for `push_block`.

        On a device, the gradient of the root block, which is the last of a step, has no device
        buffer: `write` copies it to the host.
        """
        device = self.buffers.on_device
        if device is not None and block:
            buffer = device.next_gradient()
            write(buffer.ready())
            return buffer
        host = self._host_gradient(block)
        if device is None:
            write(host.tensor)
        else:
            accelerator = device.accelerator
            with host.copies_on(accelerator.out):
                write(host.tensor)
            # torch may use the memory of the gradients again
            accelerator.current().wait_event(host.copied)
        return host

    def _host_gradient(self, block: int) -> HostBuffer:
        with self._lock:
            if block == 0:
                root = self.buffers.root_gradient
                self._wait(lambda: not self.machine.is_read(root), "the root's gradient buffer")
                return root
            self._wait(
                lambda: bool(self.machine.free),
                f"a gradient buffer for '{self.table.blocks[block].name}'",
            )
            return self.buffers.gradient(self.machine.take_buffer())

    def push_block(
        self,
        block: int,
        buffer: Gradient,
        present: Sequence[int],
        *,
        fresh: bool,
        step: int = 0,
        hyperparameters: Mapping[int, tuple[float, ...]] = {},
    ) -> None:
        """Send the gradient of `block`.

        Args:
            block: Index of the block.
            buffer: The result of `lay_out`.
            present: Indices of the parameters that have a gradient.
            fresh: Whether the gradient replaces the servers' gradient, instead of being added.
            step: The open step if the gradient is complete and unscaled, else 0. If not 0, the
                update of each chunk begins as soon as the chunk's gradient has arrived.
            hyperparameters: Hyperparameters of each parameter group. Only used if `step` is not 0.
        """
        table = self.table.blocks[block]
        self.machine.check_takes_grad(block)
        if fresh:
            self.forget(block)
        if isinstance(buffer, DeviceBuffer):
            host = self._host_gradient(block)
            host.copy_from(buffer, table.push_nbytes)
        else:
            host = buffer
        at_once = step > 0 and self.compressor is None
        # The newest residuals are fetched before an update of them can begin.
        residual_block = self.residual_block.get(block) if self.compressor else None
        residual = None if residual_block is None else self._residual(residual_block)
        with self.stages.timed("Push", table.push_nbytes):
            updates: Sequence[w.SendTo] = ()
            with self._lock:
                self.machine.grad_ready(block, present)
                if residual_block is not None:
                    runs = self.table.blocks[residual_block].runs
                    all_of_it = [s.param for run in runs for s in run.spans]
                    self.machine.grad_ready(residual_block, all_of_it)
                if at_once:
                    updates = self.machine.begin_update(
                        block, step, hyperparameters, lambda param: 1.0
                    )
            if "push" in self._after:
                push = partial(self._push_host, table, host, fresh, updates, residual)
                self._after["push"].put(host.copying(), push)
            else:
                self._push_host(table, host, fresh, updates, residual)
            if at_once:
                self._end_update(block)
            elif step:
                self.apply_update(block, step, hyperparameters, lambda param: 1.0)

    def _copy_failed(self, error: BaseException) -> None:
        self.deliver(messages.Failed(-1, error))

    def _wait_summed(self, block: int) -> None:
        self._wait(
            lambda: self.machine.sums_here(block),
            f"the sums of block '{self.table.blocks[block].name}'",
        )

    def _push_host(
        self,
        table: Block,
        host: HostBuffer,
        fresh: bool,
        updates: Sequence[w.SendTo],
        residual: HostBuffer | None,
    ) -> None:
        if self.compressor is None:
            self.send_dense(table, host, fresh, updates)
        else:
            self._send_packed(table, host, fresh, self.compressor, residual)

    def _send_packed(
        self,
        table: Block,
        host: HostBuffer,
        fresh: bool,
        by: Compressor,
        residual: HostBuffer | None,
    ) -> None:
        values = None if residual is None else np.frombuffer(residual.view, np.float32)
        for chunk, grad, sums in by.compress(table.trainable, host.view, values):
            with self._lock:
                self._send_all(self.machine.send_packed(chunk.id, grad, sums, fresh))
        if residual is not None:
            self.send_dense(self.table.blocks[self.residual_block[table.index]], residual, True)
        with self._lock:
            self.machine.return_buffer(self.buffers.key(host))
            self._lock.notify_all()

    def _residual(self, residual_block: int) -> HostBuffer:
        """Return a buffer with the newest residuals, which the caller changes and sends."""
        block = self.table.blocks[residual_block]
        if residual_block == self.residual_block.get(0):
            # residuals of the root have a permanent buffer, as the root itself
            host = self.buffers.residual(residual_block, block.pull_nbytes)
            with self._lock:
                self._wait(
                    lambda: not (self.machine.is_read(host) or self.machine.is_coming(host)),
                    f"the buffer of '{block.name}'",
                )
            if residual_block not in self.machine.current:
                self.pull_into(block, host)
                self.machine.current.add(residual_block)
            return host
        with self._lock:
            self._carry_out(self.machine.fetch_to_host(residual_block))
            self._wait(
                lambda: self.machine.is_on_host(residual_block),
                f"the residuals of '{block.name}'",
            )
            slot = self.machine.use_on_host(residual_block)
        host, n = self._host_gradient(residual_block), block.push_nbytes
        values = np.frombuffer(self.buffers.slots[slot].view, np.uint8, n)
        np.copyto(np.frombuffer(host.view, np.uint8, n), values)
        with self._lock:
            self._carry_out(self.machine.release_on_host(slot))
        return host

    def send_dense(
        self, table: Block, host: HostBuffer, fresh: bool, updates: Sequence[w.SendTo] = ()
    ) -> None:
        """Push the gradients of a block from `host`, which becomes free when all servers have read
        them.

        Each of `updates` follows the gradients of its chunks.
        """
        dtype = self.grad_dtype
        if dtype:
            downcast_in_place(table.trainable, host.view, dtype)
        with self._lock:
            sends = self.machine.send_dense(
                table.index,
                self.buffers.key(host),
                host.view,
                fresh,
                updates,
                keep_always=self.keep_always,
                dtype=dtype,
            )
            self._send_all(sends)

    # one step

    def sum_squares(self, param: int) -> float:
        """Wait for the sum of squares of the gradient of `param`, as accumulated in this step."""
        return self.block_sums(self._block_of[param]).get(param, 0.0)

    def block_sums(self, block: int, *, last_step: bool = False) -> dict[int, float]:
        """Return a dict: index of a parameter -> sum of squares of its gradient in this step.

        With several workers, the gradient is the mean over the workers, and the block's gradients
        must be complete. If `last_step` is set, the sums are those of the last step that has ended.
        """
        state = self.blocks[block]
        with self._lock:
            if not last_step and self.machine.is_open(block):
                self._carry_out(self.machine.close_grad(block))
            of = state.ended[-1] if last_step else state.sums
            self._wait(lambda: not of.due, f"the sums of block '{self.table.blocks[block].name}'")
        if not of.values:
            return {}
        if (segments := self._segments.get(block)) is None:
            layout, table = self.machine.layouts[block], self.table.blocks[block]
            segments = self._segments[block] = BlockSegments(table, layout, self.owners)
        return segments.sums_of_squares(of.values, self.machine.workers_of(block))

    def forget(self, block: int) -> None:
        """Drop the gradient of `block` that the servers hold, if any."""
        if not self.blocks[block].held:
            return
        with self._lock:
            self._wait_summed(block)  # a push cannot be dropped while the servers handle it
            self._carry_out(self.machine.drop_grad(block))
        if block in self.residual_block:
            self.forget(self.residual_block[block])

    def apply_update(
        self,
        block: int,
        step: int,
        hyperparameters: Mapping[int, tuple[float, ...]],
        scales: w.Scales,
    ) -> None:
        """Begin the update of `block` as part of `step`.

        Parameters for which `scales(param)` is None are not updated. With several workers, each
        must call this method for every block.
        """
        with self._lock:
            updates = self.machine.begin_update(block, step, hyperparameters, scales)
            self._carry_out(updates)
        self._end_update(block)
        residual_block = self.residual_block.get(block)
        if residual_block is None:
            return
        applied = [say.message for say in updates if isinstance(say, w.SendTo)]
        if any(scale is not None for update in applied for scale in update.scales):
            groups = {chunk.group: () for chunk in self.table.blocks[residual_block].chunks}
            self.apply_update(residual_block, step, groups, lambda param: 1.0)
        else:  # the step is skipped, or this worker had no gradient
            self.forget(residual_block)

    def _end_update(self, block: int) -> None:
        """Finish an update. With a single worker, gradients of chunks that it skips are dropped."""
        with self._lock:
            if self.blocks[block].unchanged():
                self._wait_summed(block)
            self._carry_out(self.machine.end_update(block))

    def end_step(self, step: int) -> None:
        """End `step`, and send the bytes `self.word` to the other workers.

        All updates of the step must have begun. Waits while too many steps are uncommitted, or
        while sums of squares are missing.
        """
        machine = self.machine
        with self._lock:
            last, behind = machine.committed_before_end(step), machine.sums_behind
            self._wait(lambda: self.committed >= last, f"the commit of step {last}")
            self._wait(lambda: machine.may_end(step), f"the sums of step {step - 1 - behind}")
            word, self.word = self.word, b""
            self._carry_out(machine.end_step(step, word))

    def words(self, step: int) -> Sequence[bytes]:
        """Wait until all workers have ended `step`, and return the bytes that each worker sent.

        Allowed only if every worker sends bytes in `step`. Drops the bytes of earlier steps.
        """
        words = self.machine.words
        with self._lock:
            self._wait(lambda: step in words, f"the other workers' end of step {step}")
            for earlier in [number for number in words if number < step]:
                del words[earlier]
            return words.pop(step)

    def blob(self, step: int, blob: bytes) -> None:
        with self._lock:
            self._carry_out(self.machine.job_state(step, blob))

    def wait_committed(self, step: int) -> None:
        with self._lock:
            what = f"the commit of step {step}"
            self._wait(lambda: self.committed >= step, what, interrupted=True)

    def rest(self) -> None:
        """Drop all gradients that servers hold, and wait until no parameters are in flight."""
        for block in range(len(self.blocks)):
            self.forget(block)
        with self._lock:
            self._wait(lambda: not self.machine.is_coming(), "the parameters in flight")

    def reset(self, step: int) -> None:
        """Restart at `step`, after the contents of the servers were replaced."""
        with self._lock:
            self.machine.reset(step)

    def close(self) -> None:
        for after in self._after.values():
            after.close()
        self.buffers.close()
