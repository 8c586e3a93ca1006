"""Engine: the store, its servers and one worker, put together for one job on this host.

Opens the store or makes it (filling it block by block, so the model never exists whole), converts it when the layout
asked for is another one, and starts a server per directory; without directories one server keeps everything in RAM.
Does NOT know modules or optimizers: values come in as flat arrays by parameter index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from roadtrain.errors import ForeignError
from roadtrain.flow.assign import assign
from roadtrain.kernels.cast import cast
from roadtrain.kernels.rules import Rule
from roadtrain.node.compress import Compressor
from roadtrain.node.server import Server, Setup
from roadtrain.node.worker import Worker
from roadtrain.spec.chunks import ITEMSIZE, Block, Chunk, ChunkTable, Record, record
from roadtrain.spec.plan import Budgets
from roadtrain.store.buffers import Buffer
from roadtrain.store.convert import convert
from roadtrain.store.generation import OpenedStore, create_store, open_store
from roadtrain.store.ledger import GroupRule, StoreMeta
from roadtrain.trace import Stages
from roadtrain.wire.local import LocalLink

Values = Callable[[int], np.ndarray]  # parameter index -> flat values: float32; frozen ones as their bytes


@dataclass(frozen=True)
class Layout:
    """What rests where. `weights`: relative rates of the directories."""

    table: ChunkTable
    rules: Sequence[Rule]
    directories: tuple[Path, ...]
    direct: bool = True
    weights: tuple[float, ...] = ()

    @property
    def owners(self) -> tuple[int, ...]:
        return assign(self.table, self.weights or (1.0,) * max(1, len(self.directories)))

    @property
    def groups(self) -> tuple[GroupRule, ...]:
        return tuple(GroupRule(r.name, tuple(r.arrays), tuple(r.scalars)) for r in self.rules)

    @property
    def records(self) -> dict[int, Record]:
        out = {}
        for chunk in self.table.chunks:
            rule = self.rules[chunk.group] if chunk.trainable else None
            out[chunk.id] = record(chunk, len(rule.arrays), len(rule.scalars)) if rule else record(chunk, 0, 0)
        return out


def open_or_none(layout: Layout, report: Callable[[str], None]) -> OpenedStore | None:
    """The job's store, converted to `layout` where it has another; None where there is none yet. Raises ForeignError
    where it belongs to another model or optimizer."""
    if not layout.directories:
        return None
    opened = open_store(layout.directories, direct=layout.direct)
    if opened is None:
        return None
    try:
        _check_same(opened, layout)
    except ForeignError:
        opened.close()
        raise
    meta = StoreMeta.of(layout.table, layout.groups, opened.meta.job)
    same = (
        meta.blocks == opened.meta.blocks and meta.chunk_elements == opened.meta.chunk_elements
        and [d.resolve() for d in opened.directories] == [d.resolve() for d in layout.directories]
    )
    if same:
        return opened
    start = time.monotonic()
    new = convert(opened, layout.table, layout.directories, meta, layout.owners, direct=layout.direct)
    report(f"store converted to the layout asked for in {time.monotonic() - start:.1f} s")
    return new


def _check_same(opened: OpenedStore, layout: Layout) -> None:
    where = str(opened.directories[0])
    if opened.table.fingerprint() != layout.table.fingerprint():
        ours = {p.name: (p.shape, p.trainable) for p in layout.table.params}
        theirs = {p.name: (p.shape, p.trainable) for p in opened.table.params}
        diff = next((n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n)), "the split into blocks")
        raise ForeignError(
            f"{where}: holds another model: {diff} is {theirs.get(diff, 'absent')} there and "
            f"{ours.get(diff, 'absent')} here (shape, trainable)",
            hint="name another store directory, or give the same model, blocks and error feedback as before",
        )
    if opened.meta.groups != layout.groups:
        raise ForeignError(
            f"{where}: holds state of {[g.rule for g in opened.meta.groups]}, the optimizer is "
            f"{[g.rule for g in layout.groups]}",
            hint="use the same optimizer and parameter groups, or export the weights and start anew",
        )


class Engine:
    """`stages`: seconds and bytes since the last take. `step`: the last committed one when it was opened."""

    def __init__(
        self, layout: Layout, budgets: Budgets, opened: OpenedStore | None, device: torch.device, *,
        compute_blocks: Sequence[int], compressor: Compressor | None, deadline_s: float,
        server_buffers: int | None = None, update_threads: int = 1,
    ) -> None:
        self.layout, self.stages = layout, Stages()
        self.store, self.new = opened, opened is None
        if opened is None and layout.directories:
            meta = StoreMeta.of(layout.table, layout.groups)
            self.store = create_store(layout.directories, meta, layout.owners, direct=layout.direct)
        owners = self.store.meta.owners if self.store else layout.owners
        self.step = max(0, self.store.step) if self.store else 0
        self.blob = self.store.blob if self.store else b""
        n = max(1, len(layout.directories))
        self.records = records = layout.records
        self.worker = Worker(
            layout.table, budgets, owners, device, self.stages, committed=self.step, deadline_s=deadline_s,
            compute_blocks=compute_blocks, compressor=compressor,
        )
        self.servers: list[Server] = []
        for i in range(n):
            mine = {c.id: c for c in layout.table.chunks if owners[c.id] == i}
            where = str(layout.directories[i]) if layout.directories else "RAM"
            setup = Setup(
                i, f"server {i} ({where})", mine, {c: records[c] for c in mine}, layout.rules,
                self.store.tiers[i] if self.store else None, budgets.resident & mine.keys(),
                budgets.public_resident & mine.keys(), server_buffers or budgets.record_buffers // n,
                budgets.record_bytes, budgets.scratch_bytes, update_threads,
            )
            server = Server(setup, self.worker.deliver, self.stages, self.step)
            self.servers.append(server)
            self.worker.links.append(LocalLink(setup.name, server.receive))

    def fill(self, block: Block, values: Values, hypers: Sequence[Sequence[float]]) -> None:
        """First contents of one block: fp32 masters and fresh optimizer state, or raw frozen values."""
        for chunk in block.chunks:
            r = self.records[chunk.id]
            buffer = Buffer(r.nbytes)
            rule, hyper = (self.layout.rules[chunk.group], hypers[chunk.group]) if chunk.trainable else (None, ())
            fill_record(chunk, r, rule, buffer, values, hyper)
            self.servers[self.worker.owners[chunk.id]].fill(chunk.id, buffer.view[: r.nbytes])
            buffer.close()

    def start(self, blob: bytes) -> None:
        """Commits step 0 of a new store with `blob`, then serves."""
        if self.new and self.store is not None:
            self.store.commit(0, blob)
            self.store.publish()
        for server in self.servers:
            server.start()

    def read(self, param: int, what: str) -> np.ndarray:
        """One parameter's fp32 master (`what` = "master"), state array or scalar, or its public values (raw dtype);
        only while no step is open or uncommitted."""
        parts: list[np.ndarray] = []
        for chunk in self.layout.table.chunks:
            for i, span in enumerate(chunk.spans):
                if span.param == param:
                    parts.append(self._read_span(chunk, i, what))
        if parts and parts[0].ndim == 0:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _read_span(self, chunk: Chunk, i: int, what: str) -> np.ndarray:
        r, span = self.records[chunk.id], chunk.spans[i]
        buffer = Buffer(r.nbytes)
        self.servers[self.worker.owners[chunk.id]].peek(chunk.id, buffer.view[: r.nbytes])
        if not chunk.trainable:
            size = ITEMSIZE[chunk.dtype]
            out = buffer.array("u8", span.start * size, (span.stop - span.start) * size).copy()
        elif what == "master":
            out = buffer.array("fp32", r.master + span.start * 4, span.stop - span.start).copy()
        else:
            rule = self.layout.rules[chunk.group]
            if what in rule.scalars:
                out = buffer.array("f64", r.scalars, len(chunk.spans) * len(rule.scalars)).copy()
                out = out.reshape(len(chunk.spans), -1)[i, rule.scalars.index(what)]
            else:
                at = r.arrays[rule.arrays.index(what)]
                out = buffer.array("fp32", at + span.start * 4, span.stop - span.start).copy()
        buffer.close()
        return np.asarray(out)

    def nbytes(self) -> int:
        """Memory held by buffers of the worker and the servers."""
        return self.worker.nbytes() + sum(s.nbytes() for s in self.servers)

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        self.worker.close()
        if self.store is not None:
            self.store.close()


def fill_record(
    chunk: Chunk, r: Record, rule: Rule | None, buffer: Buffer, values: Values, hyper: Sequence[float]
) -> None:
    """Lays the first contents of `chunk` out in `buffer`: zeros, then values, then what the rule starts with."""
    n = chunk.numel
    for i, span in enumerate(chunk.spans):
        flat, length = values(span.param), span.stop - span.start
        cut = slice(span.start, span.stop)
        if rule is None:
            size = ITEMSIZE[chunk.dtype]
            raw = buffer.array("u8", 0, n * size)
            raw[span.start * size : span.stop * size] = flat[span.origin * size : (span.origin + length) * size]
            continue
        p = buffer.array("fp32", r.master, n)[cut]
        p[:] = flat[span.origin : span.origin + length]
        arrays = [buffer.array("fp32", at, n)[cut] for at in r.arrays]
        rows = buffer.array("f64", r.scalars, len(chunk.spans) * len(rule.scalars)).reshape(len(chunk.spans), -1)
        rule.start(p, arrays, rows[i], hyper)
    if rule is not None and chunk.dtype != "fp32":
        cast(buffer.array("fp32", r.master, n), "fp32", buffer.array(chunk.dtype, 0, n), chunk.dtype)
