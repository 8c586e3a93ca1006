"""Measure optimizer updates with 1 to 8 storage devices. Roadtrain updates parameters next to each
device, and is compared with a host that reads and writes all state over one interconnect.

Throttled loop devices emulate storage. The interconnect is one shared link in each direction, as
fast as 4 devices. If M is 2 bytes for each parameter, the fp32 state has 6M bytes, and gradients
and new parameters have 2M bytes each. With roadtrain, only gradients and new parameters cross the
interconnect. In the host update (the method of ZeRO-Infinity, overlapped), everything crosses it.

The update phase lasts from the first push of a gradient until all updates are durable and the new
parameters are at the host. In the mode "norm first", no update begins before all gradients have
arrived. Only rates are emulated, NOT latency or the compute power of a real device.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import Report, Row
from benchmarks.common.rows import row
from benchmarks.storage.session import blocks_of, fill, session_on_files
from roadtrain.chunks import Block, ChunkTable
from roadtrain.device.accelerator import HostBuffer
from roadtrain.device.buffers import Buffer, array_in
from roadtrain.errors import RoadtrainError
from roadtrain.kernels.codecs import Compressor
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.lab import LoopDevice, Throttle, lab_available
from roadtrain.options.lossy import TopK
from roadtrain.servers.protocol import messages
from roadtrain.servers.server import Server
from roadtrain.units import GIB, MIB

RATE = 40e6  # bytes/s of one device, in each direction
LINK = 4 * RATE  # of the interconnect, in each direction
CHUNK = 1 << 17  # elements
BLOCK = 25 * CHUNK  # elements; 1 % of it is a whole number
KEEP = 0.01  # kept fraction of the elements: 2 % of the bytes are sent
BUFFERS = 4  # record buffers of a server; the host has twice as many for each device
THREADS = 4  # I/O threads of the host, for each device and direction
DEADLINE_S = 120.0


class TokenLink:
    """Direction of an interconnect that is emulated inside this process. `take(n)` returns when
    n bytes have crossed.

    Bytes cross in the order of the calls, at `bytes_per_s` while any caller waits. `nbytes`: bytes
    requested so far. A sleeping caller holds neither the lock nor the GIL.

    Note: late wake-ups. A sleep may end later than the transfer that it waits for. The next
    transfer is therefore timed from the moment when the link became free, not from the wake-up.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.nbytes = bytes_per_s, 0
        self._lock = threading.Lock()
        # when the last accepted piece will have crossed; never decreases
        self._free_at = 0.0
        self.late_s = 0.0  # seconds by which the caller of that piece woke late; 0 while it sleeps

    def take(self, nbytes: int) -> None:
        with self._lock:
            begin = max(self._free_at, time.perf_counter() - self.late_s)
            done = self._free_at = begin + nbytes / self.bytes_per_s
            self.nbytes, self.late_s = self.nbytes + nbytes, 0.0
        while (left := done - time.perf_counter()) > 0:
            time.sleep(left)
        with self._lock:
            if self._free_at == done:
                self.late_s = time.perf_counter() - done


class Wire:
    """Direction of the interconnect. Delivers each message, in order, when all its bytes have
    crossed.
    """

    def __init__(self, name: str, link: TokenLink) -> None:
        self.link = link
        self._queue: queue.SimpleQueue[tuple[int, Callable[[Any], None], Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._carry, name=f"wire {name}", daemon=True)
        self._thread.start()

    def post(self, nbytes: int, deliver: Callable[[Any], None], message: Any) -> None:
        self._queue.put((nbytes, deliver, message))

    def _carry(self) -> None:
        while (item := self._queue.get()) is not None:
            nbytes, deliver, message = item
            if nbytes:
                self.link.take(nbytes)
            deliver(message)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class ChargedLink:
    """A MessageLink over the emulated interconnect. Gradients cross `down`, the direction from the
    host to the devices.
    """

    def __init__(self, server: Server, down: Wire) -> None:
        self.peer, self._server, self._down = server.peer, server, down

    def waits_for(self) -> str:
        return self._server.waits_for()

    def send(self, message: Any) -> None:
        """Send a message about a block chunk by chunk, as links to other processes do."""
        for part in self._server._answers.divided(message):
            nbytes = 0
            if isinstance(part, messages.Push):
                sparse = isinstance(part.grad, tuple)
                nbytes = sum(values.nbytes for values in part.grad) if sparse else len(part.grad)
            self._down.post(nbytes, self._server.send, part)


class Ours:
    """A roadtrain engine whose host reaches the stores in `directories` over the emulated
    interconnect.

    Args:
        down: direction from the host to the devices, for gradients
        up: direction from the devices to the host, for new parameters
        start: initial values of the parameters of each block
        grad: gradient of each block
    """

    def __init__(
        self,
        table: ChunkTable,
        optimizer: torch.optim.Optimizer,
        directories: Sequence[Path],
        down: Wire,
        up: Wire,
        start: np.ndarray,
        grad: np.ndarray,
    ) -> None:
        (rule,), (group,) = rules_for(optimizer), optimizer.param_groups
        self.table, self.hyper, self.step = table, rule.hyper(group), 0
        servers, self.engine = session_on_files(
            table,
            optimizer,
            directories,
            GIB,
            DEADLINE_S,
            worker={"push_buffers": 3},
            records={"buffers": BUFFERS * len(directories)},
        )
        worker = self.worker = self.engine.worker
        self.top_k = Compressor(TopK(KEEP, per_block=True))
        try:
            worker.links.update({s.config.number: ChargedLink(s, down) for s in servers.running})
            for server in servers.running:
                server.trial.TRIED = 0  # no trial steps: all steps are timed
                server._send = partial(self._answer, server, up)  # type: ignore[method-assign]
            fill(self.engine, table, optimizer, start)
            for buffer in worker.buffers.gradients:
                np.frombuffer(buffer.view, np.float32, BLOCK)[:] = grad
            self._hosts = [HostBuffer(b.pull_nbytes) for b in table.blocks[1:]]
        except BaseException:
            self.engine.close()
            raise

    def _answer(self, server: Server, up: Wire, message: Any, to: int | None) -> None:
        """Send an answer about a chunk, and deliver it once all chunks of its block have one."""

        def arrived(message: Any) -> None:
            if (joined := server._answers.joined(message, to)) is not None:
                self.engine.worker.deliver(joined)

        pulled = isinstance(message, messages.Pulled)
        nbytes = self.table.chunks[message.chunk].weights_nbytes if pulled else 0
        up.post(nbytes, arrived, message)

    def params(self) -> list[np.ndarray]:
        return [np.frombuffer(host.view, np.float32, BLOCK) for host in self._hosts]

    def update(self, *, norm_first: bool = False, compress: bool = False) -> float:
        worker, blocks = self.worker, self.table.blocks[1:]
        worker.compressor = self.top_k if compress else None
        worker.keep_always = not norm_first
        self.step += 1
        start = time.perf_counter()
        for block in blocks:
            buffer = worker.lay_out(block.index, lambda flat: None)
            worker.push_block(block.index, buffer, [block.runs[0].spans[0].param], fresh=True)
            if not norm_first:
                self._release(block)
        if norm_first:
            for block in blocks:
                worker.block_sums(block.index)
            for block in blocks:
                self._release(block)
        worker.end_step(self.step)
        worker.blob(self.step, b"")
        for host in self._hosts:
            worker.wait_pulled(host, "the new parameters")
        worker.wait_committed(self.step)
        return time.perf_counter() - start

    def _release(self, block: Block) -> None:
        worker = self.worker
        worker.apply_update(block.index, self.step, {0: self.hyper}, lambda param: 1.0)
        worker.start_pull(block, self._hosts[block.index - 1])

    def close(self) -> None:
        self.engine.close()
        for host in self._hosts:
            host.close()


class HostUpdate:
    """The method that roadtrain is compared with: the host updates all state. `params`: the
    parameters at the host. With n devices, chunk i is on device i mod n.
    """

    def __init__(
        self,
        chunks: int,
        rule: Rule,
        hyper: tuple[float, ...],
        directories: Sequence[Path],
        down: TokenLink,
        up: TokenLink,
        start: np.ndarray,
        grad: np.ndarray,
    ) -> None:
        self.chunks, self.rule, self.hyper, self.step = chunks, rule, hyper, 0
        self.down, self.up = down, up
        self.params = np.empty(chunks * CHUNK, np.float32)
        self._n = len(directories)
        self._grad = Buffer(4 * BLOCK)
        np.frombuffer(self._grad.view, np.float32, BLOCK)[:] = grad
        self._buffers = [[Buffer(16 * CHUNK) for _ in range(2 * BUFFERS)] for _ in directories]
        self._files: list[tuple[int, int]] = []
        share = -(-chunks // self._n)
        for directory in directories:
            directory.mkdir()
            pair = [
                os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
                for name in ("state", "gradients")
            ]
            self._files.append((pair[0], pair[1]))
            os.posix_fallocate(pair[0], 0, share * 12 * CHUNK)
            os.posix_fallocate(pair[1], 0, share * 4 * CHUNK)
        record = Buffer(12 * CHUNK)
        for chunk in range(chunks):
            at = chunk * CHUNK % BLOCK
            array_in(record.view, "fp32", 0, CHUNK)[:] = start[at : at + CHUNK]
            self._move(os.pwritev, chunk, 0, record.view[: 12 * CHUNK])
        record.close()

    def update(self, *, norm_first: bool = False) -> float:
        """Run one update phase and return its seconds. With `norm_first`, all gradients are written
        before any gradient is read.
        """
        self.step += 1
        window = threading.Semaphore(self.chunks if norm_first else 4 * BUFFERS * self._n)
        written, updated = threading.Semaphore(0), threading.Semaphore(0)
        errors: list[BaseException] = []
        free: list[queue.SimpleQueue[Buffer]] = [queue.SimpleQueue() for _ in self._files]
        for pool, buffers in zip(free, self._buffers):
            for buffer in buffers:
                pool.put(buffer)

        def then(pool: ThreadPoolExecutor, stage: Callable[..., None], *arguments: Any) -> None:
            pool.submit(stage, *arguments).add_done_callback(ended)

        def ended(stage: Future[None]) -> None:
            if (error := stage.exception()) is not None:
                errors.append(error)

        def write_gradient(chunk: int) -> None:
            device, at = chunk % self._n, 4 * (chunk * CHUNK % BLOCK)
            self.down.take(4 * CHUNK)
            self._move(os.pwritev, chunk, 1, self._grad.view[at : at + 4 * CHUNK])
            written.release()
            if not norm_first:
                then(readers[device], read, chunk)

        def read(chunk: int) -> None:
            buffer = free[chunk % self._n].get(timeout=DEADLINE_S)
            self._move(os.preadv, chunk, 0, buffer.view[: 12 * CHUNK])
            self._move(os.preadv, chunk, 1, buffer.view[12 * CHUNK : 16 * CHUNK])
            self.up.take(16 * CHUNK)
            then(kernels, compute, chunk, buffer)

        def compute(chunk: int, buffer: Buffer) -> None:
            p, m, v, grad = (array_in(buffer.view, "fp32", i * 4 * CHUNK, CHUNK) for i in range(4))
            self.rule.apply(
                p, grad, "fp32", [m, v], np.array([self.step - 1.0]), self.hyper, 1.0, None, None
            )
            self.params[chunk * CHUNK : (chunk + 1) * CHUNK] = p
            then(writers[chunk % self._n], write_state, chunk, buffer)

        def write_state(chunk: int, buffer: Buffer) -> None:
            self.down.take(12 * CHUNK)
            self._move(os.pwritev, chunk, 0, buffer.view[: 12 * CHUNK])
            free[chunk % self._n].put(buffer)
            window.release()
            updated.release()

        with ExitStack() as stack:
            kernels, *pools = (
                stack.enter_context(ThreadPoolExecutor(threads))
                for threads in (2, *[THREADS] * 2 * self._n)
            )
            readers, writers = pools[: self._n], pools[self._n :]
            start = time.perf_counter()
            for chunk in range(self.chunks):
                _count(window, 1, errors)
                then(writers[chunk % self._n], write_gradient, chunk)
            if norm_first:
                _count(written, self.chunks, errors)
                for chunk in range(self.chunks):
                    then(readers[chunk % self._n], read, chunk)
            _count(updated, self.chunks, errors)
            for pair in self._files:
                os.fdatasync(pair[0])
            return time.perf_counter() - start

    def _move(self, call: Callable[..., int], chunk: int, kind: int, view: memoryview) -> None:
        """Read or write all of `view`: the state (`kind` 0) or the gradient (1) of a chunk."""
        file, place = self._files[chunk % self._n][kind], chunk // self._n
        done = call(file, [view], place * len(view))
        if done != len(view):
            raise RoadtrainError(f"{call.__name__} moved {done} of {len(view)} bytes")

    def close(self) -> None:
        for pair in self._files:
            for file in pair:
                os.close(file)
        for buffer in [self._grad, *(b for buffers in self._buffers for b in buffers)]:
            buffer.close()


def _count(semaphore: threading.Semaphore, n: int, errors: list[BaseException]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while n:
        if errors:
            raise errors[0]
        if time.monotonic() > deadline:
            raise RoadtrainError(
                f"the host update did not process {n} chunks within {DEADLINE_S:.0f} s"
            )
        n -= semaphore.acquire(timeout=1.0)


DENSE, TOP_K, NORM, NORM_TOP_K = "ours", "top-k", "norm first", "norm first, top-k"
HOST, HOST_NORM = "host update", "host update, norm first"
SPARSE_M, HOST_M = 2 + 4 * KEEP, 16.0
CROSSING = {DENSE: 4.0, TOP_K: SPARSE_M, NORM: 4.0, NORM_TOP_K: SPARSE_M}  # in M
CROSSING |= {HOST: HOST_M, HOST_NORM: HOST_M}
PAIRS = (
    (DENSE, HOST, 1.6),
    (TOP_K, HOST, 2.4),
    (NORM, HOST_NORM, 1.6),
    (NORM_TOP_K, HOST_NORM, 2.4),
)


def measure(n: int, blocks: int, reps: int, directory: Path) -> dict[str, float]:
    """Run all modes in turn on `n` fresh devices and map each mode to its median seconds. `blocks`:
    number of blocks of the model.

    Raises:
        AssertionError: a wrong number of bytes crossed the interconnect, or roadtrain and the host
            update computed different parameters
    """
    table = blocks_of(blocks, BLOCK, "fp32", CHUNK)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], lr=1e-3)
    rule = rules_for(optimizer)[0]
    random = np.random.default_rng(0)
    start, grad = (random.standard_normal(BLOCK, dtype=np.float32) for _ in range(2))
    # bytes an element: two slots and a spilled gradient in the engine, one slot and a gradient in
    # the host update
    size = int(1.1 * BLOCK * blocks * (28 + 16) / n) + 96 * MIB
    with ExitStack() as stack:
        devices = [
            stack.enter_context(LoopDevice(directory / f"{n}-{i}.img", size)) for i in range(n)
        ]
        ours, theirs = ([d.mount / name for d in devices] for name in ("ours", "host"))
        down, up = Wire("down", TokenLink(LINK)), Wire("up", TokenLink(LINK))
        # closed after the engine, so that its last messages are carried
        stack.callback(up.close)
        stack.callback(down.close)
        engine = Ours(table, optimizer, ours, down, up, start, grad)
        stack.callback(engine.close)
        hyper = rule.hyper(optimizer.param_groups[0])
        host = HostUpdate(len(table.chunks), rule, hyper, theirs, down.link, up.link, start, grad)
        stack.callback(host.close)
        modes: dict[str, Callable[[], float]] = {
            DENSE: engine.update,
            HOST: host.update,
            TOP_K: lambda: engine.update(compress=True),
            NORM: lambda: engine.update(norm_first=True),
            HOST_NORM: lambda: host.update(norm_first=True),
            NORM_TOP_K: lambda: engine.update(norm_first=True, compress=True),
        }

        def timed(mode: str) -> float:
            before = down.link.nbytes + up.link.nbytes
            seconds = modes[mode]()
            nbytes = down.link.nbytes + up.link.nbytes - before
            expected = round(CROSSING[mode] * 2 * BLOCK * blocks)
            assert nbytes == expected, (n, mode, nbytes, expected)
            return seconds

        timed(DENSE)
        timed(HOST)
        pairs = zip(engine.params(), host.params.reshape(-1, BLOCK), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs), (
            "the parameters differ from the host update's"
        )
        for mode in (NORM, HOST_NORM):  # until every extent of both slots has been written
            timed(mode)
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        with Throttle(devices, RATE, RATE) as throttle:
            throttle.enter_process(os.getpid())
            timed(DENSE)  # uses up the burst that the throttle allows after idling
            for rep in range(reps):
                for mode in list(modes)[:: -1 if rep % 2 else 1]:
                    seconds[mode].append(timed(mode))
    return {mode: median(times) for mode, times in seconds.items()}


def floor(mode: str, n: int, unit: int) -> float:
    """Compute the seconds of an update phase if devices and interconnect work at their full rates.
    `unit`: 2 bytes for each parameter.

    In the mode "norm first", roadtrain can be up to 5 % faster, because the gradient of one block
    never reaches a device.
    """
    device, link = n * RATE, min(n * RATE, LINK)
    if mode == NORM:
        return unit * (2 / link + 8 / device)
    return unit * max(6 / device, 2 / link)


def run(quick: bool = False, directory: str | None = None) -> Report:
    if (why := lab_available()) is not None:
        raise RoadtrainError(
            f"storage cannot be emulated on this machine: {why}",
            hint="the benchmark needs root, loop devices and the blkio controller",
        )
    reps = {4: 3, 8: 3} if quick else {1: 1, 2: 2, 4: 3, 8: 5}  # the slow runs vary least
    blocks = 4 if quick else 8
    home = Path(tempfile.mkdtemp(prefix="roadtrain-bench-", dir=directory or Path.cwd()))
    try:
        found = {n: measure(n, blocks, r, home) for n, r in reps.items()}
    finally:
        shutil.rmtree(home, ignore_errors=True)
    rows: list[Row] = []
    for mode, peer, least in PAIRS:
        for n, s in found.items():
            theirs, of_floor = (s[peer], HOST), floor(mode, n, 2 * blocks * BLOCK) / s[mode]
            goal = f"ratio >= {least}" if n == 8 else None
            phase = ("update phase", "s", s[mode], theirs)
            rows.append(row(_case(n, mode), *phase, of_floor=of_floor, goal=goal))
        for few, many in pairwise(found):
            a, b = found[few], found[many]
            ours, theirs = a[mode] / b[mode], (a[peer] / b[peer], HOST)
            case = f"{few} to {_case(many, mode)}"
            rose = row(case, "speed-up", "x", ours, theirs, more_is_better=True)
            if few == 4:
                met = ours > 1.1 > theirs[0]
                rose = replace(rose, goal="ours rises, host update does not", met=met)
            rows.append(rose)
    for mode, peer, _ in PAIRS[:2]:  # counted and asserted in every update phase
        ours, theirs = CROSSING[mode], (CROSSING[peer], HOST)
        goal = f"exactly {ours:g} and {CROSSING[peer]:g}"
        for n in found:
            crossed = row(_case(n, mode), "bytes over the interconnect", "M", ours, theirs)
            rows.append(replace(crossed, goal=goal, met=True))
    return Report("devices", rows)


def _case(n: int, mode: str) -> str:
    return f"{n} device{'s' * (n > 1)}{'' if mode == DENSE else f', {mode}'}"
