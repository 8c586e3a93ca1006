"""Measure the Python of a worker per block and step: processor time of the training thread in the
worker's calls, and of the threads that handle messages. Servers answer at once and do nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common.children import Child
from benchmarks.common.report import Row
from benchmarks.common.rows import row
from roadtrain.chunks import SEGMENT, Chunk, ChunkTable, ParamSpec
from roadtrain.options.budgets import WorkerBudgets
from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.worker import WorkerSetup
from roadtrain.servers.trace import Stages
from roadtrain.servers.worker import Worker

BLOCKS, STEPS, WARM_UP = 6, 8, 2
MOST_MS, LIMIT_S = 0.5, 60.0


class IdleServer:
    """Answers every message of a worker at once, in a thread. `busy_s`: processor time in which the
    worker has handled the answers."""

    peer = "idle server"

    def __init__(self, number: int, worker: Worker, owned: list[Chunk]) -> None:
        self.number, self.worker, self.busy_s = number, worker, 0.0
        self.segments = Counter[int]()  # of each block
        for chunk in owned:
            self.segments[chunk.block] += len(chunk.segments)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def waits_for(self) -> str:
        return ""

    def send(self, message: Any) -> None:
        self._inbox.put(message)

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            for answer in self._answers(message):
                began = time.thread_time()
                self.worker.deliver(answer)
                self.busy_s += time.thread_time() - began

    def _answers(self, message: Any) -> Iterator[Any]:
        match message:
            case m.BlockPull():
                yield m.BlockPulled(message.ticket)
            case m.BlockPush():
                sums = np.ones(self.segments[message.block])
                yield m.BlockAccumulated(self.number, message.block, sums)
                yield m.BufferFree(message.ticket)
            case m.EndStep() if self.number:
                yield m.Prepared(self.number, message.step)
            case m.Commit():
                yield m.CommitDone(message.step)


def python_time(quick: bool) -> list[Row]:
    rows = []
    for chunks in (4, 256):
        for servers in (1, 2):
            for clip in (False, True):
                case = f"{chunks} chunks per block, {servers} server(s), "
                case += "clipped" if clip else "updated in backward"
                child = Child(measure, {"chunks": chunks, "servers": servers, "clip": clip})
                seconds = child.wait_for("result", LIMIT_S)
                child.end()
                goal = f"ours <= {MOST_MS}"
                rows.append(row(case, "Python per block and step", "ms", seconds, goal=goal))
    return rows


def measure(chunks: int, servers: int, clip: bool) -> float:
    """Return the seconds per block and step. Runs in a process of its own, without other threads
    and without much for the garbage collector."""
    params = [("root", [ParamSpec("r", (8,), "bf16", True, 0)])]
    for block in range(1, BLOCKS + 1):
        shape = (chunks // 4, SEGMENT)
        of_block = [ParamSpec(f"w{block}.{i}", shape, "bf16", True, 0) for i in range(4)]
        params.append((f"b{block}", of_block))
    table = ChunkTable.build(params, SEGMENT)
    assert len(table.blocks[1].chunks) == chunks
    owners = [(chunk.id % servers,) for chunk in table.chunks]
    most = max(block.pull_nbytes for block in table.blocks)
    budgets = WorkerBudgets(4096, 3, most, 0, 4, most, 0, 0, None)
    setup = WorkerSetup(table, owners, range(servers), 0, range(1, BLOCKS + 1), 3, 4)
    worker = Worker(setup, budgets, torch.device("cpu"), Stages(), deadline_s=60)
    idle = [
        IdleServer(n, worker, [c for c in table.chunks if c.id % servers == n])
        for n in range(servers)
    ]
    worker.links.update(enumerate(idle))
    seconds = []
    for step in range(1, STEPS + 1):
        began = time.thread_time() + sum(server.busy_s for server in idle)
        _step(worker, step, clip=clip)
        own = time.thread_time()
        worker.wait_committed(step)
        time.sleep(0.05)  # so that all answers have been handled
        seconds.append((own + sum(server.busy_s for server in idle) - began) / BLOCKS)
    for server in idle:
        server.send(None)
    worker.close()
    return median(seconds[WARM_UP:])


def _step(worker: Worker, step: int, *, clip: bool) -> None:
    blocks, hyper = worker.table.blocks[1:], {0: (0.1, 0.9)}
    for block in blocks:
        worker.fetch(block.index)
        worker.release(block.index)
    for block in reversed(blocks):
        worker.fetch(block.index)
        flat = worker.lay_out(block.index, lambda _: None)
        worker.push_block(
            block.index,
            flat,
            [*block.params],
            fresh=True,
            step=0 if clip else step,
            hyperparameters=hyper,
        )
        worker.release(block.index)
    if clip:
        for block in blocks:
            worker.block_sums(block.index)
        for block in blocks:
            worker.apply_update(block.index, step, hyper, lambda _: 1.0)
    worker.end_step(step)
    worker.blob(step, b"")
