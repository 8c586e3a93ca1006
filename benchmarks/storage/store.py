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
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.common.children import forget_peak, peak_bytes, resident_bytes
from benchmarks.common.report import Report, Row
from benchmarks.common.rows import row
from benchmarks.storage.session import blocks_of, fill, session_on_files
from roadtrain.chunks import ChunkTable
from roadtrain.device.buffers import Buffer
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.servers.session import JobSession
from roadtrain.units import GIB, MIB

# the first update touches every page and extent, the next five are the server's own trial of mixed
# requests and bursts
WARM_UP = 6
# name -> (threads, burst)
CASES = {"mixed, 2+2 threads": (2, 0), "mixed, 4+4 threads": (4, 0), "bursts of 16": (2, 16)}


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
    src = os.open(source, os.O_RDONLY | os.O_DIRECT)
    dst = os.open(target, os.O_WRONLY | os.O_DIRECT)
    offsets = range(0, nbytes - size + 1, size)
    buffers = [Buffer(size) for _ in range(max(2 * threads + 2, 2 * burst))]
    free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
    for buffer in buffers:
        free.put(buffer)

    def read(offset: int, buffer: Buffer) -> None:
        os.preadv(src, [buffer.view[skip:size]], offset + skip)

    def write(offset: int, buffer: Buffer) -> None:
        os.pwritev(dst, [buffer.view[:size]], offset)

    def copy(offset: int) -> Future[None]:
        buffer = free.get()
        read(offset, buffer)
        written = writers.submit(write, offset, buffer)
        written.add_done_callback(lambda _: free.put(buffer))
        return written

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as readers, ThreadPoolExecutor(threads) as writers:
        if burst:
            for at in range(0, len(offsets), burst):
                part = offsets[at : at + burst]
                for move in (read, write):
                    deque(readers.map(move, part, buffers), maxlen=0)
        else:
            for written in readers.map(copy, offsets):
                written.result()
    os.fdatasync(dst)
    seconds = time.perf_counter() - start
    os.close(src)
    os.close(dst)
    for buffer in buffers:
        buffer.close()
    return seconds


def run(quick: bool = False, directory: str | None = None) -> Report:
    state = 2 * GIB if quick else 8 * GIB
    block_elements, host = 16 << 20, 512 * MIB
    table = blocks_of(-(-state // (14 * block_elements)), block_elements, "bf16")
    home = (
        Path(directory)
        if directory
        else Path(tempfile.mkdtemp(prefix="roadtrain-bench-", dir=Path.cwd()))
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], lr=1e-3)
    before = resident_bytes()
    servers, engine = session_on_files(table, optimizer, (home / "store",), host, 600)
    engine.worker.keep_always = True
    values = np.random.default_rng(0).standard_normal(block_elements, dtype=np.float32)
    hyper = rules_for(optimizer)[0].hyper(optimizer.param_groups[0])
    fill(engine, table, optimizer, values)
    assert servers.store is not None
    slots = [servers.store.tiers[0].directory / f"slot{i}.bin" for i in range(2)]
    record, skip = engine.meta.records[0].nbytes, engine.meta.records[0].weights_nbytes
    total = len(table.chunks) * record
    for buffer in engine.worker.buffers.gradients:
        buffer.tensor[: 2 * block_elements].view(torch.bfloat16).copy_(
            torch.linspace(-1, 1, block_elements)
        )
    ours: list[float] = []
    bare: dict[str, list[float]] = {name: [] for name in CASES}
    fractions: list[float] = []
    used = 0
    try:
        for rep in range(WARM_UP + (2 if quick else 4)):
            forget_peak()
            seconds = _update(engine, table, hyper, rep + 1)
            used = max(used, peak_bytes() - before)
            if rep < WARM_UP:
                engine.stages.take()
                continue
            ours.append(seconds)
            source, target = slots[(rep + 1) % 2], slots[rep % 2]
            for name, (threads, burst) in CASES.items():
                bare[name].append(bare_loop(source, target, total, record, skip, threads, burst))
            fractions.append(min(times[-1] for times in bare.values()) / seconds)
        stages = engine.stages.take()
    finally:
        engine.close()
        shutil.rmtree(home, ignore_errors=True)
    best = min(bare, key=lambda name: median(bare[name]))
    moved, of_floor = 2 * total - len(table.chunks) * skip, median(fractions)
    rows = [
        Row(
            f"update of {total / 1e9:.1f} GB of state",
            "bytes moved per second",
            "GB/s",
            moved / median(ours) / 1e9,
            peer=moved / median(bare[best]) / 1e9,
            peer_name=f"bare loop ({best})",
            ratio=of_floor,
            of_floor=of_floor,
            goal="of_floor >= 0.9",
            met=of_floor >= 0.9,
        ),
        replace(
            row("the same", "memory above the start", "MB", used, (host, "budget")),
            goal="ours <= budget",
            met=used <= host,
        ),
    ]
    for name, stage in sorted(stages.items()):
        rows.append(Row("stage (thread seconds)", name, "s", stage.seconds))
    return Report("store", rows)


def _update(engine: JobSession, table: ChunkTable, hyper: tuple[float, ...], step: int) -> float:
    worker = engine.worker
    start = time.perf_counter()
    for block in table.blocks[1:]:
        buffer = worker.lay_out(block.index, lambda flat: None)
        worker.push_block(block.index, buffer, [block.runs[0].spans[0].param], fresh=True)
        worker.apply_update(block.index, step, {0: hyper}, lambda param: 1.0)
    worker.end_step(step)
    worker.blob(step, b"")
    worker.wait_committed(step)
    return time.perf_counter() - start
