"""A server: owns chunks, holds their gradients, updates them next to their storage. Threads around flow/serve.py.

One loop thread feeds the decider; I/O threads serve the device's queue; update threads run kernels and copies. All
heavy work (preadv/pwritev, hashing, numba kernels, numpy copies) releases the GIL. Memory: record buffers and scratch
are allocated once; what is kept from files lies in one arena.

Any failure ends the server: the worker gets Failed with the cause, and the last committed step stays as it is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roadtrain.errors import LostError, RoadtrainError
from roadtrain.flow import ops
from roadtrain.flow.queues import READ_PARAMETERS, READ_STATE, WRITE_STATE, DeviceQueue, Trial
from roadtrain.flow.serve import ServeDecider
from roadtrain.kernels.cast import NUMPY_OF, cast
from roadtrain.kernels.rules import Rule
from roadtrain.node.gradients import Gradients
from roadtrain.spec.chunks import Chunk, Record
from roadtrain.store.buffers import Buffer
from roadtrain.store.file import FileTier
from roadtrain.store.ledger import pack
from roadtrain.trace import Stages
from roadtrain.units import show_rate
from roadtrain.wire.link import copy

Done = tuple[int, Any]
Job = Callable[[], Done]


@dataclass(frozen=True)
class Setup:
    """What one server is made of. `tier` None: everything rests in memory."""

    number: int
    name: str
    chunks: Mapping[int, Chunk]
    records: Mapping[int, Record]
    rules: Sequence[Rule]
    tier: FileTier | None
    resident: frozenset[int]
    public_resident: frozenset[int]
    buffers: int
    record_bytes: int
    scratch_bytes: int
    workers: int = 1
    local: int = 1  # of each host, whose gradients are summed first; negative: their relay has
    io_threads: int = 4  # a direction
    report: Callable[[str], None] = print
    staleness: int = 0
    first: int = 0  # the server that commits
    everywhere: bool = False  # each keeps the job's own state (replicas)


class Server:
    """`deliver(message, worker)`: to one worker, or (None) to all."""

    def __init__(
        self, setup: Setup, deliver: Callable[[Any, int | None], None], stages: Stages, committed: int
    ) -> None:
        self.setup, self._deliver, self._stages = setup, deliver, stages
        resident = frozenset(setup.chunks) if setup.tier is None else setup.resident
        self._resident = resident
        self._arena, self.memory = _arena(setup, resident)
        self._buffers = [Buffer(setup.record_bytes) for _ in range(setup.buffers)]
        self._grads = Gradients(
            setup.chunks, setup.tier, setup.buffers, setup.scratch_bytes, setup.workers, setup.local
        )
        self._sums: dict[int, dict[str, int]] = {}  # chunk -> checksums of what is updated and not yet written
        where = {c: (c in resident, c in setup.public_resident) for c in setup.chunks}
        self._late = frozenset(c for c, chunk in setup.chunks.items() if setup.staleness and chunk.trainable)
        self.decider = ServeDecider(
            setup.number, where, setup.buffers, durable=setup.tier is not None, committed=committed,
            workers=setup.workers, alone=setup.workers == setup.local == 1, first=setup.first,
            everywhere=setup.everywhere,
            late={c: setup.tier is not None and setup.tier.written_in(c) == committed > 0 for c in self._late},
        )
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._device = DeviceQueue(max_reads=setup.io_threads, max_writes=setup.io_threads)
        self.trial, self._moved, self._busy_s, self._began = Trial(), 0, 0.0, 0.0
        self._device_ready = threading.Condition()
        self._kernels: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._count = 0
        self._stopping = False
        self._failed = False
        self._threads: list[threading.Thread] = []

    def nbytes(self) -> int:
        """Memory that this server holds."""
        held = [*self._buffers, *self._grads.scratch] + ([self._arena] if self._arena else [])
        return sum(b.nbytes for b in held)

    def start(self) -> None:
        """Loads what is kept in memory, then serves. Raises StoreError when the files are damaged."""
        self._load()
        n_io = 2 * self.setup.io_threads if self.setup.tier is not None else 0
        jobs = [(self._loop, "loop"), (self._compute, "update"), *[(self._io, f"io{i}") for i in range(n_io)]]
        for target, name in jobs:
            thread = threading.Thread(target=target, name=f"{self.setup.name} {name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def receive(self, message: Any) -> None:
        """A message from the worker, or an event of a doer. Does not block."""
        self._inbox.put(message)

    def stop(self, deadline_s: float) -> list[str]:
        """Ends all threads; does not wait for unfinished steps (the caller flushes first if it wants them). Returns the
        names of those that hang beyond the deadline; the memory that they use stays until they let go."""
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
        if self.setup.tier is not None:
            self.setup.tier.close()
        self.memory.clear()
        self._grads.close()
        for buffer in [*self._buffers, *([self._arena] if self._arena else [])]:
            buffer.close()
        return late

    def fill(self, chunk: int, view: memoryview) -> None:
        """Before start: the first contents of a chunk's record."""
        if self.setup.tier is not None:
            self.setup.tier.write(chunk, "record" if self.setup.chunks[chunk].trainable else "public", view)
        else:
            copy(self.memory[chunk], view)

    # threads

    def _loop(self) -> None:
        while not self._stopping:
            event = self._inbox.get()
            if event is None:
                return
            try:
                if isinstance(event, ops.CommitDone) and self.setup.tier and event.step > self.decider.committed:
                    self.setup.tier.committed(event.step)
                for action in self.decider.handle(event):
                    self._carry_out(action)
            except BaseException as error:
                self._fail(error)
                return

    def _carry_out(self, action: Any) -> None:
        match action:
            case ops.Send(message, to):
                self._deliver(message, to)
            case ops.Answer(pull, True, newest):
                self._kernel(0, "Fetch", lambda: self._answer_memory(pull, newest))
            case ops.Answer(pull, False, newest):
                self._io_push(READ_PARAMETERS, pull.ticket, "Fetch", lambda: self._answer(
                    pull, lambda into: self._read_public(self.setup.chunks[pull.chunk], into, newest)))
            case ops.Hold(push):
                self._kernel(1, "Sum", lambda: self._hold(push))
            case ops.Total(chunk):
                self._kernel(1, "Sum", lambda: self._total(chunk))
            case ops.Update(chunk, release):
                self._kernel(2, "Update", lambda: self._update(chunk, release))
            case ops.Read(chunk, buffer):
                self._io_push(READ_STATE, 0, "Read", lambda: self._read(chunk, buffer))
            case ops.Write(chunk):
                self._io_push(WRITE_STATE, 0, "Write", lambda: self._write(chunk))
            case ops.Prepare(step, blobs):
                if self.setup.tier is None:
                    self.receive(ops.PrepareDone(step))
                else:
                    self._io_push(WRITE_STATE, -1, "Commit", lambda: self._prepare(step, blobs))
            case ops.Discard(chunk, worker):
                self._grads.discard(chunk, worker)

    def _kernel(self, priority: int, stage: str, job: Job) -> None:
        self._count += 1
        self._kernels.put((priority, self._count, (stage, job)))

    def _io_push(self, priority: int, order: int, stage: str, job: Job) -> None:
        with self._device_ready:
            self._device.push(priority, order, (stage, job))
            self._device_ready.notify()

    def _work(self, stage: str, job: Job) -> int:
        """Does a job, counts it, reports what it did. Returns its bytes."""
        start = time.perf_counter()
        try:
            nbytes, event = job()
        except BaseException as error:
            self._fail(error)
            return 0
        self._stages.add(stage, time.perf_counter() - start, nbytes)
        if event is not None:
            self.receive(event)
        return nbytes

    def _compute(self) -> None:
        while True:
            work = self._kernels.get()[2]
            if work is None or self._stopping:
                return
            self._work(*work)

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
            nbytes = self._work(*work)
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
            wrapped = LostError(f"{self.setup.name} stopped: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._deliver(ops.Failed(self.setup.number, error), None)

    # doers: each returns its bytes, and the event to report unless somebody else will

    def _load(self) -> None:
        tier = self.setup.tier
        if tier is None:
            return
        for number, view in self.memory.items():
            chunk, record = self.setup.chunks[number], self.setup.records[number]
            if number not in self._resident:
                self._read_public(chunk, view[: record.public_nbytes])
            elif tier.has_public(number):
                tier.read(number, "record" if chunk.trainable else "public", view[: record.nbytes])
            else:
                tier.read(number, "private", view[record.public_nbytes : record.nbytes])
                self._cast_public(chunk, record, view, view)

    def _read_public(self, chunk: Chunk, into: memoryview, newest: bool = False) -> None:
        """The public part from the file; cast from the master where the file does not hold it, or that is `newest`."""
        tier, record = self.setup.tier, self.setup.records[chunk.id]
        assert tier is not None
        if tier.has_public(chunk.id) and not newest:
            tier.read(chunk.id, "public", into)
            return
        whole = Buffer(record.nbytes)
        tier.read(chunk.id, "private", whole.view[record.public_nbytes : record.nbytes])
        self._cast_public(chunk, record, whole.view, into)
        whole.close()

    def _cast_public(self, chunk: Chunk, record: Record, view: memoryview, into: memoryview) -> None:
        master = np.frombuffer(view, np.float32, chunk.numel, record.master)
        cast(master, "fp32", np.frombuffer(into, NUMPY_OF[chunk.dtype], chunk.numel), chunk.dtype)

    def _record_view(self, chunk: int) -> memoryview:
        if chunk in self._resident:
            return self.memory[chunk]
        buffer = self.decider.chunks[chunk].buffer
        assert buffer is not None
        return self._buffers[buffer].view

    def _answer_memory(self, pull: ops.Pull, newest: bool) -> Done:
        view = None if newest else self.memory.get(pull.chunk)  # that may be the public part alone
        if view is None:
            view = self._record_view(pull.chunk)
        if newest:
            chunk, record = self.setup.chunks[pull.chunk], self.setup.records[pull.chunk]
            return self._answer(pull, lambda into: self._cast_public(chunk, record, view, into))
        return self._answer(pull, lambda into: copy(into, view[: len(into)]), view)

    def _answer(self, pull: ops.Pull, put: Callable[[memoryview], None], view: memoryview | None = None) -> Done:
        """What `put` writes goes to the worker. `view`: where it lies already, for a link to send it from there."""
        if isinstance(pull.into, memoryview):
            put(pull.into)
            return len(pull.into), ops.PublicRead(pull)
        if view is None:
            view = pull.into.buffer()
            put(view)
        return pull.into.send(view, lambda: self.receive(ops.PublicRead(pull))), None

    def _hold(self, push: ops.Push) -> Done:
        sums, kept = self._grads.hold(push)
        return self.setup.chunks[push.chunk].public_nbytes, ops.HoldDone(push, sums, kept)

    def _total(self, number: int) -> Done:
        sums = self._grads.total_sums(number)
        return self.setup.chunks[number].public_nbytes, ops.TotalDone(number, sums)

    def _read(self, number: int, buffer: int) -> Done:
        chunk, record, tier = self.setup.chunks[number], self.setup.records[number], self.setup.tier
        assert tier is not None
        if not self.setup.rules[chunk.group].reads_state:
            return 0, ops.ReadDone(number)
        first = record.public_nbytes if record.master else 0
        view = self._buffers[buffer].view[first : record.nbytes]
        tier.read(number, "private" if first else "record", view, check=False)
        return len(view), ops.ReadDone(number)

    def _update(self, number: int, release: ops.Release) -> Done:
        chunk, record = self.setup.chunks[number], self.setup.records[number]
        view = self._record_view(number)
        scratch, grad, dtype = self._grads.take(number)
        public, tier = self.memory.get(number, view), self.setup.tier
        if tier is not None and number not in self._resident and self.setup.rules[chunk.group].reads_state:
            first = record.public_nbytes if record.master else 0  # checked here: then it lies in the cache
            tier.check_sums(number, "private" if first else "record", view[first : record.nbytes])
        late = number in self._late  # the public part gets what the master was before
        if late:
            self._cast_public(chunk, record, view, view)
        narrow = None if late or chunk.dtype == "fp32" else public
        apply_rule(self.setup.rules[chunk.group], chunk, record, view, narrow, grad, dtype, release)
        if narrow is None and public is not view:
            copy(public[: chunk.public_nbytes], view[: chunk.public_nbytes])
        self._grads.done(scratch)
        if tier is not None:
            part, first = self._written_part(chunk)
            self._sums[number] = tier.sums(number, part, view[first : record.nbytes])
        return record.nbytes, ops.UpdateDone(number)

    def _write(self, number: int) -> Done:
        chunk, record, tier = self.setup.chunks[number], self.setup.records[number], self.setup.tier
        assert tier is not None
        part, first = self._written_part(chunk)
        tier.write(number, part, self._record_view(number)[first : record.nbytes], self._sums.pop(number))
        return record.nbytes - first, ops.WriteDone(number)

    def _written_part(self, chunk: Chunk) -> tuple[str, int]:
        """What of a record is written, and its first byte: not the copy where that is kept, and can be cast again."""
        derived = chunk.dtype != "fp32" and chunk.id in self.memory and chunk.id not in self._late
        return ("private", self.setup.records[chunk.id].public_nbytes) if derived else ("record", 0)

    def _prepare(self, step: int, blobs: Sequence[bytes]) -> Done:
        assert self.setup.tier is not None
        self.setup.tier.prepare(step, pack(blobs))
        if self.decider.commits_here:
            self.setup.tier.committed(step)
        self._choose()
        return 0, ops.PrepareDone(step)

    def _choose(self) -> None:
        """A step ended: mix reads and writes of state, or let them alternate in bursts?"""
        with self._device_ready:
            now, known = time.perf_counter(), self.trial.chosen
            busy = self._busy_s + now - self._began  # this very job is at work
            self._device.burst = self.trial.stepped(self._device.burst, self._moved, busy)
            self._moved, self._busy_s, self._began = 0, 0.0, now
        if self.trial.chosen and not known:
            mix, bursts = (show_rate(max(self.trial.rates[way])) for way in (False, True))
            self.setup.report(f"{self.setup.name}: reads and writes {'in bursts' if self._device.burst else 'mixed'} "
                              f"(measured: mixed {mix}, bursts {bursts})")


def apply_rule(
    rule: Rule, chunk: Chunk, record: Record, view: memoryview, public: memoryview | None, grad: np.ndarray,
    dtype: str, release: ops.Release,
) -> None:
    """Runs `rule` on every span of the record in `view` that has a gradient; neighbours with equal scalars and scale
    run as one range, padding included. The 16-bit copy, where one is wanted, goes to the start of `public`."""
    n = chunk.numel
    p = np.frombuffer(view, np.float32, n, record.master)
    arrays = [np.frombuffer(view, np.float32, n, at) for at in record.arrays]
    copy = None if public is None else np.frombuffer(public, np.uint16, n)
    width = len(rule.scalars)
    rows = np.frombuffer(view, np.float64, width * len(chunk.spans), record.scalars).reshape(len(chunk.spans), width)
    first = 0
    while first < len(chunk.spans):
        last = first + 1
        while (
            last < len(chunk.spans) and release.scales[last] == release.scales[first]
            and np.array_equal(rows[last], rows[first])
        ):
            last += 1
        scale = release.scales[first]
        start = 0 if first == 0 else chunk.spans[first].start
        stop = n if last == len(chunk.spans) else chunk.spans[last].start
        cut = slice(start, stop)
        if scale is not None:
            row = rows[first].copy()
            rule.apply(
                p[cut], grad[cut], dtype, [a[cut] for a in arrays], row, release.hyper, scale,
                None if copy is None else copy[cut], chunk.dtype,
            )
            rows[first:last] = row
        elif copy is not None:
            cast(p[cut], "fp32", copy[cut], chunk.dtype)
        first = last


def _arena(setup: Setup, resident: frozenset[int]) -> tuple[Buffer | None, dict[int, memoryview]]:
    """One allocation for everything that is kept in memory, and each chunk's view into it."""
    sizes = {}
    for number in setup.chunks:
        if number in resident:
            sizes[number] = setup.records[number].nbytes
        elif number in setup.public_resident:
            sizes[number] = setup.records[number].public_nbytes
    if not sizes:
        return None, {}
    arena, at, views = Buffer(sum(sizes.values())), 0, {}
    for number, size in sizes.items():
        views[number] = arena.view[at : at + size]
        at += size
    return arena, views
