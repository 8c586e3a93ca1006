"""Engine: the store, its servers and one worker, put together for one job on this host.

Opens the store or makes it (filling it block by block, so the model never exists whole), converts
it when the layout asked for is another one, and starts a server per directory; without directories
one server keeps everything in RAM. Does NOT know modules or optimizers: values come in as flat
arrays by parameter index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from roadtrain.chunks import Block, Chunk, ChunkTable
from roadtrain.config.budgets import Budgets
from roadtrain.device.buffers import Buffer
from roadtrain.errors import ConfigError, DeadlineError, ForeignError
from roadtrain.kernels.rules import Rule
from roadtrain.protocol.assignment import assign
from roadtrain.runtime.compress import Compressor
from roadtrain.runtime.server import Server, Setup
from roadtrain.runtime.trace import Stages
from roadtrain.runtime.worker import Worker
from roadtrain.storage.convert import (
    MASTER,
    RecordView,
    Source,
    convert,
    gather_param,
    needs_conversion,
    param_pieces,
    read_param,
    read_record,
    rewritten,
)
from roadtrain.storage.generation import Accept, OpenedStore, create_store, open_store
from roadtrain.storage.ledger import GroupRule, StoreMeta, unpack


@dataclass(frozen=True)
class StorePlan:
    """What rests where. `weights`: relative rates of the directories. `staleness`: 1 keeps two
    versions of the parameters, with a higher one pulls get the newest."""

    table: ChunkTable
    rules: Sequence[Rule]
    directories: tuple[Path, ...]
    direct: bool = True
    weights: tuple[float, ...] = ()
    staleness: int = 0
    replicas: int = 1
    moved_from: tuple[Path, ...] = ()  # directories that hold parts of the store and shall not

    @property
    def owners(self) -> tuple[int, ...]:
        """Of each chunk, by the weights of the directories (or servers)."""
        return assign(self.table, self.weights or (1.0,) * max(1, len(self.directories)))

    @property
    def groups(self) -> tuple[GroupRule, ...]:
        return tuple(GroupRule(r.name, tuple(r.arrays), tuple(r.scalars)) for r in self.rules)

    def meta(self, job: str = "") -> StoreMeta:
        return StoreMeta.of(self.table, self.groups, job, int(self.staleness == 1), self.replicas)


def open_or_none(
    store_plan: StorePlan, report: Callable[[str], None], accept: Accept = lambda job, step: None
) -> OpenedStore | None:
    """The job's store, converted to `store_plan` where it has another; None where there is none
    yet.
    `accept`: see open_store. Raises ForeignError where it belongs to another model or
    optimizer."""
    if not store_plan.directories:
        return None
    opened = open_store(
        store_plan.directories, also=store_plan.moved_from, direct=store_plan.direct, accept=accept
    )
    if opened is None:
        return None
    for note in opened.notes:  # at once: what follows may fail
        report(note)
    start = time.monotonic()
    try:
        check_same(str(opened.directories[0]), opened.meta, store_plan)
        meta = store_plan.meta(opened.meta.job)
        if not needs_conversion(opened, meta, store_plan.directories):
            return opened
        if meta.staleness:
            raise ConfigError(
                f"{opened.directories[0]} has staleness 1 and is not converted",
                hint="keep its layout",
            )
        new = convert(
            opened, meta, store_plan.directories, store_plan.owners, direct=store_plan.direct
        )
    except BaseException:
        opened.close()
        raise
    report(f"store converted to the layout asked for in {time.monotonic() - start:.1f} s")
    return new


def check_same(where: str, held: StoreMeta, store_plan: StorePlan) -> None:
    """ForeignError where the store at `where` is of another model or optimizer than
    `store_plan`."""
    if held.table.fingerprint() != store_plan.table.fingerprint():
        ours = {p.name: (p.shape, p.trainable) for p in store_plan.table.params}
        theirs = {p.name: (p.shape, p.trainable) for p in held.table.params}
        diff = next(
            (n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n)), "the split into blocks"
        )
        raise ForeignError(
            f"{where}: holds another model: {diff} is {theirs.get(diff, 'absent')} there and "
            f"{ours.get(diff, 'absent')} here (shape, trainable)",
            hint=(
                "name another store directory, or give the same model, blocks and error feedback as"
                " before"
            ),
        )
    if held.groups != store_plan.groups:
        raise ForeignError(
            f"{where}: holds state of {[g.rule for g in held.groups]}, the optimizer is "
            f"{[g.rule for g in store_plan.groups]}",
            hint=(
                "use the same optimizer and parameter groups, or export the weights and start anew"
            ),
        )
    if held.staleness != (store_plan.staleness == 1):
        raise ForeignError(
            f"{where}: trained with staleness {held.staleness}, asked for is"
            f" {store_plan.staleness}",
            hint="go on as before, or export the weights and start anew",
        )
    if held.replicas != store_plan.replicas:
        raise ForeignError(
            f"{where}: made with replicas = {held.replicas}, asked for are {store_plan.replicas}",
            hint="go on as before, or export the weights and start anew",
        )


def fill_record(
    meta: StoreMeta,
    store_plan: StorePlan,
    chunk: Chunk,
    source: Source,
    hyperparameters: Sequence[Sequence[float]],
) -> memoryview:
    """The first record of `chunk`: what `source` gives, then what its rule starts with."""
    view = RecordView(meta, chunk, Buffer(meta.records[chunk.id].nbytes).view)
    view.fill(store_plan.table.params, source)
    if chunk.trainable:
        for i in range(len(chunk.spans)):
            start_state(view, i, store_plan.rules[chunk.group], hyperparameters[chunk.group])
    return view.view


def start_state(view: RecordView, span: int, rule: Rule, hyper: Sequence[float]) -> None:
    """What `rule` starts with, where its state arrays and scalars are zero."""
    row = np.array([view.piece(what, span)[0] for what in rule.scalars])
    rule.start(
        view.piece(MASTER, span), [view.piece(what, span) for what in rule.arrays], row, hyper
    )
    for what, value in zip(rule.scalars, row):
        view.piece(what, span)[0] = value


def pieces_of(store: OpenedStore, name: str, what: str) -> Iterator[tuple[int, np.ndarray]]:
    """(first element, values) of a parameter, a chunk at a time."""
    sizes = store.meta.records
    return param_pieces(
        store.meta,
        name,
        what,
        lambda chunk: read_record(store, chunk, Buffer(sizes[chunk.id].nbytes), what),
    )


class LocalSession:
    """`stages`: seconds and bytes since the last take. `step`: the last committed one when it
    was opened."""

    history = ""  # that of a store on servers is told by a Cluster

    def __init__(
        self,
        store_plan: StorePlan,
        budgets: Budgets,
        opened: OpenedStore | None,
        device: torch.device,
        *,
        compute_blocks: Sequence[int],
        compressor: Compressor | None,
        deadline_s: float,
        report: Callable[[str], None] = print,
    ) -> None:
        self.store_plan, self.stages = store_plan, Stages()
        self.store, self.new = opened, opened is None
        if opened is None and store_plan.directories:
            self.store = create_store(
                store_plan.directories,
                store_plan.meta(),
                store_plan.owners,
                direct=store_plan.direct,
            )
        in_ram = replace(store_plan.meta(), owners=store_plan.owners, directories=("RAM",))
        self.meta = self.store.meta if self.store else in_ram
        self.step = max(0, self.store.step) if self.store else 0
        self.blob = unpack(self.store.blob)[0] if self.store else b""
        self.worker = Worker(
            store_plan.table,
            budgets,
            [(o,) for o in self.meta.owners],
            device,
            self.stages,
            servers=range(len(self.meta.directories)),
            committed=self.step,
            deadline_s=deadline_s,
            compute_blocks=compute_blocks,
            compressor=compressor,
            staleness=store_plan.staleness,
        )
        share = replace(
            budgets, record_buffers=budgets.record_buffers // (max(self.meta.owners, default=0) + 1)
        )
        self.servers: list[Server] = []
        for i, where in enumerate(store_plan.directories or ("RAM",)):
            tier = self.store.tiers[i] if self.store else None
            setup = Setup(
                i, f"server {i} ({where})", self.meta, store_plan.rules, tier, share, report
            )
            server = Server(
                setup, lambda message, _: self.worker.deliver(message), self.stages, self.step
            )
            self.servers.append(server)
            self.worker.links[i] = server

    def fill(
        self, block: Block, source: Source, hyperparameters: Sequence[Sequence[float]]
    ) -> None:
        """First contents of one block: what `source` gives, then what each rule starts with."""
        for chunk in block.chunks:
            record = fill_record(self.meta, self.store_plan, chunk, source, hyperparameters)
            self.servers[self.worker.owners[chunk.id][0]].fill(chunk.id, record)

    def start(self, blob: bytes) -> None:
        """Commits step 0 of a new store with `blob`, then serves."""
        if self.new and self.store is not None:
            self.store.commit(0, blob)
            self.store.publish()
        for server in self.servers:
            server.start()

    def read(self, name: str, what: str) -> np.ndarray:
        """One parameter's master (fp32; a frozen one's own dtype) or state array, in its shape, or
        a scalar as an array of one. Only while no step is open or uncommitted. Raises ConfigError
        for what is not there.
        """
        if self.store is not None:
            return read_param(self.store, name, what)
        memory = self.servers[0].memory
        return gather_param(
            self.meta, name, what, lambda chunk: RecordView(self.meta, chunk, memory[chunk.id])
        )

    def pieces(self, name: str, what: str) -> Iterator[tuple[int, np.ndarray]]:
        """As `read`, flat and a chunk at a time: (its first element, values)."""
        if (store := self.store) is not None:
            return pieces_of(store, name, what)
        memory = self.servers[0].memory
        return param_pieces(
            self.meta, name, what, lambda chunk: RecordView(self.meta, chunk, memory[chunk.id])
        )

    def rewrite(self, change: Callable[[RecordView], None], step: int, blob: bytes) -> None:
        """Between steps, all of which are committed: `change` is made to every record, and the
        whole counts as `step`. On files all of it or, where this raises, nothing; it is
        committed on return."""
        self.worker.rest()
        if self.store is not None:
            self.store = rewritten(self.store, change, step, blob, direct=self.store_plan.direct)
            self.meta, self.blob = self.store.meta, blob
        else:
            for chunk in self.store_plan.table.chunks:
                change(RecordView(self.meta, chunk, self.servers[0].memory[chunk.id]))
        for i, server in enumerate(self.servers):
            server.begin_again(
                self.meta, self.store.tiers[i] if self.store else None, step, self.worker.deadline_s
            )
        self.worker.begin_again(step)

    def nbytes(self) -> int:
        """Memory held by buffers of the worker and the servers."""
        return self.worker.nbytes() + sum(s.nbytes() for s in self.servers)

    def close(self) -> None:
        """DeadlineError where a server's threads hang; all else is closed nevertheless."""
        deadline_s = self.worker.deadline_s
        late = [name for server in self.servers for name in server.stop(deadline_s)]
        self.worker.close()
        if self.store is not None:
            self.store.close()
        if late:
            raise DeadlineError(
                f"waited {deadline_s:.0f} s for threads to end: {', '.join(late)}",
                hint="does the device still answer?",
            )
