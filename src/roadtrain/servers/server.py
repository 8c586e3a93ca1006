"""A server that stores chunks, collects gradients, and updates the chunks. Its threads carry out
the decisions of servers/protocol/server.py.

Any failure ends the server, and the workers get a Failed message with the cause. The last committed
step is not affected.
"""

from __future__ import annotations

import itertools
import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from roadtrain.chunks import Chunk
from roadtrain.device.buffers import Buffer, array_in
from roadtrain.errors import DeadlineError, LostError, RoadtrainError
from roadtrain.kernels.cast import cast
from roadtrain.kernels.rule import Rule
from roadtrain.options.budgets import RecordBudgets
from roadtrain.servers.gradients import PushedGradients, apply_rule
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.blocks import BlockAnswers
from roadtrain.servers.protocol.chunk_state import Resident
from roadtrain.servers.protocol.queues import (
    READ_PARAMETERS,
    READ_STATE,
    WRITE_STATE,
    DeviceQueue,
    Trial,
)
from roadtrain.servers.protocol.server import ServerStateMachine
from roadtrain.servers.protocol.server_steps import ServerSpec
from roadtrain.servers.trace import Stages
from roadtrain.storage.convert import RecordView
from roadtrain.storage.file import FileTier
from roadtrain.storage.ledger import digest, pack
from roadtrain.storage.meta import StoreMeta
from roadtrain.transport.link import copy
from roadtrain.units import show_rate

T = TypeVar("T")
Outcome = tuple[int, tuple[Any, ...] | None]
Job = Callable[[], Outcome]

LOOK_S = 2.0  # limit of the wait for an answer of the loop thread


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of one server."""

    number: int
    name: str
    meta: StoreMeta  # metadata of the whole store
    rules: Sequence[Rule]
    tier: FileTier | None  # the server's files; None if all records are only in memory
    budgets: RecordBudgets  # buffers of this server; its sets of chunks name those of all servers
    report: Callable[[str], None]
    workers: int = 1
    local: int = 1  # workers per host whose gradients are summed first; negative if relays sum them
    io_threads: int = 4  # number of threads that read, and of threads that write
    # Number of threads that copy, sum and update. More than 1 only with one worker.
    kernels: int = 1
    # Number of buffers for parameters that are sent to workers. None if the worker is in this
    # process, so that parameters are copied directly to the worker's memory.
    answers: int | None = None


class Server:
    """A server that stores and updates its chunks.

    `deliver(message, worker)` sends a message to a worker, or to all workers if `worker` is None.
    """

    def __init__(
        self,
        config: ServerConfig,
        deliver: Callable[[Any, int | None], None],
        stages: Stages,
        committed: int,
    ) -> None:
        self.config, self.peer, self._deliver, self._stages = config, config.name, deliver, stages
        self.tier, meta, budgets = config.tier, config.meta, config.budgets
        self.records = meta.owned(config.number)
        self.chunks = {number: meta.table.chunks[number] for number in self.records}
        self._resident = self.chunks.keys() & (budgets.resident if self.tier else self.chunks)
        buffers, scratch_bytes = (budgets.buffers, budgets.scratch_bytes) if self.chunks else (0, 0)
        self._buffers = [Buffer(budgets.buffer_bytes) for _ in range(buffers)]
        self.memory = self._allocate_resident()
        self._grads = PushedGradients(
            self.chunks, self.tier, buffers, scratch_bytes, config.workers, config.local
        )
        # chunk -> checksums of its updated record, until the record is written
        self._sums: dict[int, dict[str, int]] = {}
        self._delayed = frozenset(
            c for c, chunk in self.chunks.items() if meta.staleness and chunk.trainable
        )
        self.machine = self._new_machine(committed)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._device = DeviceQueue(limit=config.io_threads)
        self.trial, self._moved, self._busy_s, self._began = Trial(), 0, 0.0, 0.0
        self._device_ready = threading.Condition()
        self._kernels: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._count = itertools.count()  # entries of `_kernels`: equal priorities keep their order
        self._stopping = False
        self._failed = False
        self._threads: list[threading.Thread] = []

    def _new_machine(self, committed: int) -> ServerStateMachine:
        setup, meta = self.config, self.config.meta
        blocks = meta.table.blocks
        self._answers = BlockAnswers(setup.number, blocks, self.chunks, np.concatenate)
        spec = ServerSpec(
            setup.number,
            {c: self._resident_part(c) for c in self.chunks},
            len(self._buffers) - bool(self.memory),
            durable=self.tier is not None,
            committed=committed,
            workers=setup.workers,
            relays=setup.local < 0,
            delayed={
                c: self.tier is not None and self.tier.written_in(c) == committed > 0
                for c in self._delayed
            },
            first=meta.members[0],
            everywhere=meta.replicas > 1,
            owners={c: meta.owners[c] for c in self.chunks} if meta.replicas > 1 else {},
            answers=None if setup.answers is None else setup.answers // setup.workers,
            at_once=1 + setup.kernels,
        )
        return ServerStateMachine(spec)

    def _resident_part(self, chunk: int) -> Resident:
        if chunk in self._resident:
            return Resident.RECORD
        kept = chunk in self.config.budgets.weights_resident
        return Resident.WEIGHTS if kept else Resident.NOTHING

    def nbytes(self) -> int:
        """Return the memory that this server uses, in bytes."""
        return sum(b.nbytes for b in [*self._buffers, *self._grads.scratch.buffers])

    def _allocate_resident(self) -> dict[int, memoryview]:
        """Allocate the memory that stays in use from step to step, and return each chunk's view of
        it.
        """
        sizes = {
            c: r.nbytes if c in self._resident else r.weights_nbytes
            for c, r in self.records.items()
            if c in self._resident | self.config.budgets.weights_resident
        }
        if not sizes:
            return {}
        self._buffers.append(Buffer(sum(sizes.values())))
        starts = itertools.accumulate(sizes.values(), initial=0)
        return {c: self._buffers[-1].view[at : at + sizes[c]] for c, at in zip(sizes, starts)}

    def start(self, loaded: Callable[[int], None] = lambda nbytes: None) -> None:
        """Load the records that stay in memory, then serve.

        `loaded` is called with the number of bytes of each chunk. Raises StoreError if the files
        are damaged.
        """
        self._load(loaded)
        n_io = 2 * self.config.io_threads if self.tier is not None else 0
        jobs = [
            (self._loop, "loop"),
            *[(self._compute, f"update{i}") for i in range(self.config.kernels)],
            *[(self._io, f"io{i}") for i in range(n_io)],
        ]
        for target, name in jobs:
            thread = threading.Thread(target=target, name=f"{self.config.name} {name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, message: Any) -> None:
        """Send a message of the worker in this process to this server. Raises LostError if the
        server is stopped.
        """
        if self._stopping:
            raise LostError(f"{self.peer} is closed")
        self.receive(message)

    def waits_for(self) -> str:
        return ""

    def receive(self, message: Any) -> None:
        """Queue a message of a worker, or an event from a thread of this server. Does not block."""
        self._inbox.put(message)

    def waits(self) -> tuple[list[messages.Pull], list[tuple[int, str]]]:
        """Return the waiting pulls and the missing messages; see ServerStateMachine.waits. Raises
        DeadlineError if the answer takes more than 2 seconds.
        """
        return self._in_loop(
            self.machine.waits, LOOK_S, f"{self.config.name} did not report within {LOOK_S:.0f} s"
        )

    def reset(self, meta: StoreMeta, tier: FileTier | None, step: int, deadline_s: float) -> None:
        """Continue at `step` with the records of `tier`, or with those in memory if `tier` is None.
        Allowed only between steps. Raises StoreError if the files are damaged, and DeadlineError if
        reading takes too long.
        """

        def change() -> None:
            self.config = replace(self.config, meta=meta, tier=tier)
            self.tier = self._grads.tier = tier
            self._sums.clear()
            self.machine = self._new_machine(step)
            self._load()

        late = f"waited {deadline_s:.0f} s for {self.config.name} to reload its records"
        self._in_loop(change, deadline_s, late)

    def _in_loop(self, call: Callable[[], T], wait_s: float, late: str) -> T:
        """Return the result of `call()`, run in the loop thread between two events. Its exception
        is raised and ends the server. Raises DeadlineError(late) after `wait_s`.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
                raise

        self.receive(run)
        wait([done], wait_s)
        if not done.done():
            raise DeadlineError(late)
        return done.result()

    def stop(self, deadline_s: float) -> list[str]:
        """End all threads without waiting for unfinished steps. Returns the names of threads that
        have not ended within the deadline. They keep their memory. The caller must close the
        FileTier.
        """
        self._stopping = True
        self._inbox.put(None)
        with self._device_ready:
            self._device_ready.notify_all()
        for i in range(len(self._threads)):
            self._kernels.put((9, i, None))
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        self._threads.clear()
        self.memory.clear()
        self._grads.close()
        for buffer in self._buffers:
            buffer.close()
        return late

    def fill(self, chunk: int, view: memoryview) -> None:
        """Write the initial record of a chunk. Allowed only before `start`."""
        if self.tier is not None:
            self.tier.write(chunk, "record", view)
        else:
            copy(self.memory[chunk], view)

    # threads

    def _loop(self) -> None:
        while not self._stopping:
            event = self._inbox.get()
            if event is None:
                return
            try:
                self._handle(event)
            except BaseException as error:
                self._fail(error)
                return
            del event  # it may refer to memory of a worker, which must not be kept while waiting

    def _handle(self, event: Any) -> None:
        if callable(event):
            event()
            return
        done = isinstance(event, messages.CommitDone) and event.step > self.machine.committed
        if done and self.tier is not None:
            self.tier.committed(event.step)
        for part in self._answers.divided(event):
            for action in self.machine.handle(part):
                self._carry_out(action)

    def _carry_out(self, action: Any) -> None:
        match action:
            case messages.Send(message, to):
                self._send(message, to)
            case messages.Answer():
                self._answer(action)
            case messages.Hold(push):
                nbytes = self.chunks[push.chunk].weights_nbytes
                self._kernel(1, "Sum", action, lambda: (nbytes, self._grads.hold(push)))
            case messages.Spill(push, spill_slot):
                self._kernel(1, "Sum", action, lambda: (self._grads.spill(push, spill_slot), ()))
            case messages.Total(chunk):
                nbytes = self.chunks[chunk].weights_nbytes
                self._kernel(1, "Sum", action, lambda: (nbytes, (self._grads.total_sums(chunk),)))
            case messages.Update(chunk, apply_update):
                self._kernel(2, "Update", action, lambda: self._update(chunk, apply_update))
            case messages.Read(chunk, buffer):
                self._io_push(READ_STATE, 0, "Read", action, lambda: self._read(chunk, buffer))
            case messages.Write(chunk):
                self._io_push(WRITE_STATE, 0, "Write", action, lambda: self._write(chunk))
            case messages.Prepare(step, blobs):
                self._prepare(action, step, blobs)
            case messages.Discard(chunk, worker):
                self._grads.discard(chunk, worker)

    def _send(self, message: Any, to: int | None) -> None:
        if (joined := self._answers.joined(message, to)) is not None:
            self._deliver(joined, to)

    def _kernel(self, priority: int, stage: str, action: Any, job: Job) -> None:
        self._kernels.put((priority, next(self._count), (stage, action, job)))

    def _io_push(self, priority: int, order: int, stage: str, action: Any, job: Job) -> None:
        with self._device_ready:
            self._device.push(priority, order, (stage, action, job))
            self._device_ready.notify()

    def _work(self, lane: str, stage: str, action: Any, job: Job, threads: int = 1) -> int:
        """Run and time `job`, and report `action` as done. Returns the number of bytes moved. The
        time of a stage is divided by the number of `threads` that share its work.
        """
        start = time.perf_counter()
        try:
            nbytes, result = job()
        except BaseException as error:
            self._fail(error)
            return 0
        self._stages.add(stage, (time.perf_counter() - start) / threads, nbytes)
        self._stages.interval(stage, lane, start, nbytes)
        if result is not None:
            self.receive(messages.Done(action, result))
        return nbytes

    def _compute(self) -> None:
        while (work := self._kernels.get()[2]) is not None and not self._stopping:
            stage, action, job = work
            self._work(self.peer, stage, action, job, self.config.kernels)
            del work, action, job  # they may refer to memory of a worker

    def _io(self) -> None:
        while True:
            with self._device_ready:
                while (item := self._device.next()) is None and not self._stopping:
                    self._device_ready.wait()
                if self._stopping or item is None:
                    return
                if self._device.at_work == 1:
                    self._began = time.perf_counter()
            priority, work = item
            nbytes = self._work(f"disk of {self.peer}", *work)
            del item, work
            with self._device_ready:
                self._moved += nbytes if priority != READ_PARAMETERS else 0
                self._device.done(priority)
                if self._device.at_work == 0:
                    self._busy_s += time.perf_counter() - self._began
                self._device_ready.notify_all()

    def _fail(self, error: BaseException) -> None:
        if self._failed or self._stopping:
            return
        self._failed = True
        if not isinstance(error, RoadtrainError):
            wrapped = LostError(f"{self.config.name} stopped: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._deliver(messages.Failed(self.config.number, error), None)

    # Methods that carry out actions. Each returns the bytes that it has moved and the result of the
    # action, or None instead of a result that is reported later.

    def _load(self, loaded: Callable[[int], None] = lambda nbytes: None) -> None:
        tier = self.tier
        if tier is None:
            return
        for number, view in self.memory.items():
            loaded(len(view))
            if number not in self._resident:
                self._read_weights(number, view)
                continue
            tier.read(number, "record", view)
            if not tier.has_weights(number):
                self._cast_weights(number, view, view)

    def _read_weights(self, number: int, into: memoryview, newest: bool = False) -> None:
        """Read the weights of a chunk from its file. If the file has none, or for `newest`, cast
        the master.
        """
        tier, record = self.tier, self.records[number]
        assert tier is not None
        if tier.has_weights(number) and not newest:
            tier.read(number, "weights", into)
            return
        whole = Buffer(record.nbytes).view
        tier.read(number, "state", whole[record.weights_nbytes : record.nbytes])
        self._cast_weights(number, whole, into)

    def _cast_weights(self, number: int, view: memoryview, into: memoryview) -> None:
        chunk = self.chunks[number]
        master = array_in(view, "fp32", self.records[number].master, chunk.numel)
        cast(master, "fp32", array_in(into, chunk.dtype, 0, chunk.numel), chunk.dtype)

    def _record_view(self, chunk: int) -> memoryview:
        if chunk in self._resident:
            return self.memory[chunk]
        buffer = self.machine.chunks[chunk].buffer
        assert buffer is not None
        return self._buffers[buffer].view

    def _answer(self, answer: messages.Answer) -> None:
        if answer.memory:
            self._kernel(0, "Fetch", answer, lambda: self._send_from_memory(answer))
            return
        read = partial(self._read_weights, answer.pull.chunk, newest=answer.newest)
        job = partial(self._send_weights, answer, read)
        self._io_push(READ_PARAMETERS, answer.pull.ticket, "Fetch", answer, job)

    def _send_from_memory(self, answer: messages.Answer) -> Outcome:
        chunk = answer.pull.chunk
        if answer.newest:
            record = self._record_view(chunk)
            return self._send_weights(answer, lambda into: self._cast_weights(chunk, record, into))
        # the resident part may be only the weights part
        view = self.memory[chunk] if chunk in self.memory else self._record_view(chunk)
        return self._send_weights(answer, lambda into: copy(into, view[: len(into)]), view)

    def _send_weights(
        self,
        answer: messages.Answer,
        put: Callable[[memoryview], None],
        view: memoryview | None = None,
    ) -> Outcome:
        """Send parameters to a worker: from `view` if they are in memory, else as written by
        `put`.
        """
        into = answer.pull.into
        if isinstance(into, memoryview):
            put(into)
            return len(into), ()
        if view is None:
            view = into.buffer()
            put(view)
        return into.send(view, lambda: self.receive(messages.Done(answer))), None

    def _state_part(self, number: int) -> tuple[str, int]:
        """Return (name, byte offset) of the contents of a record that an update reads."""
        record = self.records[number]
        return ("state", record.weights_nbytes) if record.master else ("record", 0)

    def _read(self, number: int, buffer: int) -> Outcome:
        assert self.tier is not None
        if not self.config.rules[self.chunks[number].group].reads_state:
            return 0, ()
        part, first = self._state_part(number)
        view = self._buffers[buffer].view[first : self.records[number].nbytes]
        self.tier.read(number, part, view, check=False)
        return len(view), ()

    def _update(self, number: int, apply_update: messages.ApplyUpdate) -> Outcome:
        chunk, record, tier = self.chunks[number], self.records[number], self.tier
        rule, view = self.config.rules[chunk.group], self._record_view(number)
        scratch, grad, dtype = self._grads.take(number)
        public = self.memory.get(number, view)
        if tier is not None and number not in self._resident and rule.reads_state:
            part, first = self._state_part(number)
            # checked here instead of after reading, because the data are in the CPU's cache now
            tier.check_sums(number, part, view[first : record.nbytes])
        late = number in self._delayed  # then the weights part gets the master's previous value
        if late:
            self._cast_weights(number, view, view)
        narrow = None if late or chunk.dtype == "fp32" else public
        whole = RecordView(self.config.meta, chunk, view)
        apply_rule(rule, whole, narrow, grad, dtype, apply_update)
        if narrow is None and public is not view:
            copy(public[: chunk.weights_nbytes], view[: chunk.weights_nbytes])
        self._grads.done(scratch)
        if tier is not None:
            part, first = self._written_part(chunk)
            self._sums[number] = tier.sums(number, part, view[first : record.nbytes])
        checksum = self._checksum(chunk, public) if self.config.meta.replicas > 1 else 0
        return record.nbytes, (checksum,)

    def _checksum(self, chunk: Chunk, public: memoryview) -> int:
        """Return the checksum of an updated record: its state and the parameters that a pull
        returns, without padding.
        """
        sums = self._sums[chunk.id]
        copied = sums.get("weights", 0)
        if self.records[chunk.id].master:
            copied = digest(public[: chunk.weights_nbytes])
        return digest(struct.pack("<QQ", copied, sums.get("state", 0)))

    def _write(self, number: int) -> Outcome:
        chunk, record, tier = self.chunks[number], self.records[number], self.tier
        assert tier is not None
        part, first = self._written_part(chunk)
        view = self._record_view(number)[first : record.nbytes]
        tier.write(number, part, view, self._sums.pop(number))
        return record.nbytes - first, ()

    def _written_part(self, chunk: Chunk) -> tuple[str, int]:
        """Return (name, byte offset) of the contents of a record that are written. A resident
        16-bit copy is not written, because it can be cast from the master.
        """
        derived = (
            chunk.dtype != "fp32" and chunk.id in self.memory and chunk.id not in self._delayed
        )
        return ("state", self.records[chunk.id].weights_nbytes) if derived else ("record", 0)

    def _prepare(self, action: messages.Prepare, step: int, blobs: Sequence[bytes]) -> None:
        tier = self.tier
        if tier is None:
            self.receive(messages.Done(action))
            return

        def prepare() -> Outcome:
            tier.prepare(step, pack(blobs))
            if self.machine.spec.commits:
                tier.committed(step)
            self._choose()
            return 0, ()

        self._io_push(WRITE_STATE, -1, "Commit", action, prepare)

    def _choose(self) -> None:
        """Choose whether reads and writes of state are mixed or in bursts in the next step."""
        with self._device_ready:
            now, chosen = time.perf_counter(), self.trial.chosen
            busy = self._busy_s + now - self._began  # this job itself is running
            self._device.burst = self.trial.stepped(self._device.burst, self._moved, busy)
            self._moved, self._busy_s, self._began = 0, 0.0, now
        if self.trial.chosen and not chosen:
            mix, bursts = (show_rate(max(self.trial.rates[way])) for way in (False, True))
            self.config.report(
                f"{self.config.name}: reads and writes of its files"
                f" {'alternate' if self._device.burst else 'are mixed'} (measured: mixed {mix},"
                f" alternating {bursts})"
            )
