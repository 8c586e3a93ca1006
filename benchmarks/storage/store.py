"""Compare an update of state on disk with a bare loop that only reads and writes the same files.
Both are measured in turn in one run.

State of 14 bytes a parameter (bf16 copy, fp32 master and two moments) is stored in two files, of
which an update reads one and writes the other. An update includes checksums, syncs and the commit.
The bare loop runs with mixed requests and in bursts, each with several numbers of threads, and its
best result counts.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import Report, Row
from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.device.buffers import Buffer
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.options.budgets import Budgets, BudgetTerms, derive
from roadtrain.servers.local_servers import LocalServers
from roadtrain.servers.session import JobSession
from roadtrain.servers.store_plan import StorePlan
from roadtrain.units import GIB, MIB

# the first update touches every page and extent, the next five are the server's own trial of mixed
# requests and bursts
WARM_UP = 6
# name -> (threads, burst)
CASES = {"mixed, 2+2 threads": (2, 0), "mixed, 4+4 threads": (4, 0), "bursts of 16": (2, 16)}


def _rss() -> int:
    text = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024
    )


class _Peak:
    """Samples the resident memory of this process during a `with` block. `nbytes`: the largest
    sample.
    """

    def __enter__(self) -> _Peak:
        self.nbytes, self._stop = _rss(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.nbytes = max(self.nbytes, _rss())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def bare_loop(
    source: Path, target: Path, nbytes: int, size: int, skip: int, threads: int, burst: int
) -> float:
    """Read `source` and write `target` in records of `size` bytes, and return the seconds. Each
    direction has `threads` threads.

    Args:
        skip: bytes at the start of each record that are not read
        burst: if positive, alternate between `burst` reads and `burst` writes; if 0, reads and
            writes are mixed
    """
    src, dst = (
        os.open(source, os.O_RDONLY | os.O_DIRECT),
        os.open(target, os.O_WRONLY | os.O_DIRECT),
    )
    offsets = list(range(0, nbytes - size + 1, size))
    buffers = [Buffer(size) for _ in range(max(2 * threads + 2, 2 * burst))]
    start = time.perf_counter()
    if burst:
        for at in range(0, len(offsets), burst):
            part = offsets[at : at + burst]
            for op, fd in ((os.preadv, src), (os.pwritev, dst)):
                jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
                for i, offset in enumerate(part):
                    jobs.put((offset, buffers[i]))
                _run_all(threads, partial(_drain, jobs, op, fd, skip if op is os.preadv else 0))
    else:
        free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        full: queue.SimpleQueue[Any] = queue.SimpleQueue()
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for b in buffers:
            free.put(b)
        for offset in offsets:
            todo.put(offset)

        def read() -> None:
            while True:
                try:
                    offset = todo.get_nowait()
                except queue.Empty:
                    return
                b = free.get()
                os.preadv(src, [b.view[skip:size]], offset + skip)
                full.put((offset, b))

        def write() -> None:
            while (item := full.get()) is not None:
                os.pwritev(dst, [item[1].view[:size]], item[0])
                free.put(item[1])

        writers = [threading.Thread(target=write) for _ in range(threads)]
        for w in writers:
            w.start()
        _run_all(threads, read)
        for _ in writers:
            full.put(None)
        for w in writers:
            w.join()
    os.fdatasync(dst)
    seconds = time.perf_counter() - start
    os.close(src)
    os.close(dst)
    for b in buffers:
        b.close()
    return seconds


def _drain(jobs: queue.SimpleQueue[Any], op: Any, fd: int, skip: int) -> None:
    while True:
        try:
            offset, buffer = jobs.get_nowait()
        except queue.Empty:
            return
        op(fd, [buffer.view[skip:]], offset + skip)


def _run_all(threads: int, job: Callable[[], None]) -> None:
    running = [threading.Thread(target=job) for _ in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()


def run(quick: bool = False, directory: str | None = None) -> Report:
    state = 2 * GIB if quick else 8 * GIB
    block_elements = 16 << 20
    count = -(-state // (14 * block_elements))
    table = ChunkTable.build(
        [
            ("root", []),
            *(
                (f"b{i}", [ParamSpec(f"b{i}.w", (block_elements,), "bf16", True, 0)])
                for i in range(count)
            ),
        ]
    )
    home = (
        Path(directory)
        if directory
        else Path(tempfile.mkdtemp(prefix="roadtrain-bench-", dir=Path.cwd()))
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], lr=1e-3)
    rules = rules_for(optimizer)
    parallelism = StorePlan(table, rules, (home / "store",))
    host = 512 * MIB
    budgets = derive(
        table,
        parallelism.meta().records,
        parallelism.owners,
        BudgetTerms(on_files=True, holds_gradients=False),
        host,
    )
    budgets = _without_cache(budgets)
    before = _rss()
    servers = LocalServers(parallelism, budgets.records, None, deadline_s=600)
    engine = JobSession(
        servers,
        budgets,
        torch.device("cpu"),
        compute_blocks=(),
        compressor=None,
        deadline_s=600,
    )
    engine.worker.keep_always = True
    values = np.random.default_rng(0).standard_normal(block_elements, dtype=np.float32)
    hyper = rules[0].hyper(optimizer.param_groups[0])
    for block in table.blocks:
        engine.fill(
            block,
            lambda spec, what, a, b: values[a:b] if what == "master" else None,
            optimizer.param_groups,
        )
    engine.start(b"")
    assert servers.store is not None
    slots = [servers.store.tiers[0].directory / f"slot{i}.bin" for i in range(2)]
    record = engine.meta.records[0].nbytes
    total = len(table.chunks) * record
    skip = engine.meta.records[0].weights_nbytes
    for buffer in engine.worker.buffers.gradients:
        buffer.tensor[: 2 * block_elements].view(torch.bfloat16).copy_(
            torch.linspace(-1, 1, block_elements)
        )
    ours: list[float] = []
    bare: dict[str, list[float]] = {}
    fractions: list[float] = []
    used = 0
    try:
        for rep in range(WARM_UP + (2 if quick else 4)):
            with _Peak() as peak:
                seconds = _update(engine, table, hyper, rep + 1)
            used = max(used, peak.nbytes - before)
            if rep < WARM_UP:
                engine.stages.take()
                continue
            ours.append(seconds)
            source, target = (slots[(rep + 1) % 2], slots[rep % 2])
            for name, (threads, burst) in CASES.items():
                bare.setdefault(name, []).append(
                    bare_loop(source, target, total, record, skip, threads, burst)
                )
            fractions.append(min(b[-1] for b in bare.values()) / ours[-1])
        stages = engine.stages.take()
    finally:
        engine.close()
        shutil.rmtree(home, ignore_errors=True)
    best_name = min(bare, key=lambda n: median(bare[n]))
    moved = 2 * total - len(table.chunks) * skip
    ours_rate, best_rate = moved / median(ours) / 1e9, moved / median(bare[best_name]) / 1e9
    report = Report(
        "store",
        [
            Row(
                f"update of {total / 1e9:.1f} GB of state",
                "bytes moved per second",
                "GB/s",
                ours_rate,
                peer=best_rate,
                peer_name=f"bare loop ({best_name})",
                ratio=median(fractions),
                of_floor=median(fractions),
                goal="of_floor >= 0.9",
                met=median(fractions) >= 0.9,
            ),
            Row(
                "the same",
                "memory above the start",
                "MB",
                used / 1e6,
                peer=host / 1e6,
                peer_name="budget",
                ratio=host / used,
                goal="ours <= budget",
                met=used <= host,
            ),
        ],
    )
    for name, stage in sorted(stages.items()):
        report.rows.append(Row("stage (thread seconds)", name, "s", stage.seconds))
    return report


def _without_cache(budgets: Budgets) -> Budgets:
    records = replace(
        budgets.records, resident=frozenset(), weights_resident=frozenset(), resident_bytes=0
    )
    return replace(budgets, records=records)


def _update(engine: JobSession, table: ChunkTable, hyper: tuple[float, ...], step: int) -> float:
    worker = engine.worker
    start = time.perf_counter()
    for block in table.blocks[1:]:
        buffer = worker.gradient_buffer(block.index)
        worker.push_block(block.index, buffer, [block.runs[0].spans[0].param], fresh=True)
        worker.apply_update(block.index, step, {0: hyper}, lambda param: 1.0)
    worker.end_step(step)
    worker.blob(step, b"")
    worker.wait_committed(step)
    return time.perf_counter() - start
