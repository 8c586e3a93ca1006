"""The servers of a job in threads of this process: one per storage directory, or one that keeps
everything in RAM. This module also opens or makes the store, and converts a store to the planned
layout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from roadtrain.chunks import Chunk
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import ConfigError
from roadtrain.options.budgets import RecordBudgets
from roadtrain.retry import slow_work, undone_on_error
from roadtrain.servers.server import Server, ServerConfig
from roadtrain.servers.store_plan import StorePlan, check_same
from roadtrain.servers.trace import Stages
from roadtrain.storage.convert import (
    RecordView,
    convert,
    needs_conversion,
    param_pieces,
    read_record,
    rewritten,
)
from roadtrain.storage.generation import Accept, OpenedStore, create_store, open_store
from roadtrain.storage.ledger import unpack

MOST_KERNELS = 8  # threads of a server that copy and update; half of the cores if there are fewer


class LocalServers:
    """The servers of a job in this process. RemoteServers has the same methods.

    Attributes:
        running: The servers. Empty before `connect`.
    """

    local = True  # the servers are in this process, so the values in the store can be replaced
    rests = ""  # location of the servers' state, as text

    def __init__(
        self,
        store_plan: StorePlan,
        budgets: RecordBudgets,
        opened: OpenedStore | None,
        *,
        deadline_s: float,
        report: Callable[[str], None] = print,
    ) -> None:
        self.store_plan, self.group = store_plan, WorkerIdentity()
        self._budgets, self._deadline_s, self._report = budgets, deadline_s, report
        self.store = opened  # the open store; None if the state is in RAM
        self.new = opened is None  # whether this worker must fill a new store
        if opened is None and store_plan.directories:
            meta, owners = store_plan.meta(), store_plan.owners
            self.store = create_store(
                store_plan.directories, meta, owners, direct=store_plan.direct
            )
        # the witness of this run, which is recorded in the run directory (storage/mark.py)
        self.history = str(self.store.begin_session()) if self.store else ""
        in_ram = replace(store_plan.meta(), owners=store_plan.owners, directories=("RAM",))
        self.meta = self.store.meta if self.store else in_ram  # layout of the servers' chunks
        # the last committed step, and this worker's job state after that step
        self.step = max(0, self.store.step) if self.store else 0
        self.blob = unpack(self.store.blob)[0] if self.store else b""
        self.numbers = range(len(self.meta.directories))
        self.running: list[Server] = []
        self._reported = opened.notes if opened else ()  # notes that open_or_none has reported

    def connect(self, deliver: Callable[[Any], None], stages: Stages) -> Mapping[int, Server]:
        """Create the servers, and return them by number. They send their messages to `deliver`."""
        buffers = self._budgets.buffers // (max(self.meta.owners, default=0) + 1)
        share = replace(self._budgets, buffers=buffers)
        places = self.store_plan.directories or ("RAM",)
        # An update of a record on files may need two scratch buffers.
        scratch = buffers // 2 if self.store_plan.directories else MOST_KERNELS
        cores = len(os.sched_getaffinity(0)) // (2 * len(places))
        kernels = max(1, min(MOST_KERNELS, cores, scratch))
        for i, where in enumerate(places):
            setup = ServerConfig(
                i,
                f"server {i} ({where})",
                self.meta,
                self.store_plan.rules,
                self.store.tiers[i] if self.store else None,
                share,
                self._report,
                kernels=kernels,
            )
            server = Server(setup, lambda message, _: deliver(message), stages, self.step)
            self.running.append(server)
        return dict(enumerate(self.running))

    def fill(self, number: int, chunk: int, record: memoryview) -> None:
        """Write the initial record of a chunk to server `number`, which must own the chunk."""
        self.running[number].fill(chunk, record)

    def start(self, blob: bytes) -> None:
        """Start serving. For a new store, first commit step 0 with the job state `blob`."""
        if self.new and self.store is not None:
            self.store.commit(0, blob)
            self.store.publish()
        for server in self.running:
            server.start()
        for note in self.store.notes if self.store else ():
            if note not in self._reported:
                self._report(note)

    def record_of(self, chunk: Chunk, what: str) -> RecordView:
        """Return a view of a chunk's committed record. Only the array `what` of the view is
        valid.
        """
        if self.store is not None:
            return read_record(self.store, chunk, what)
        return RecordView(self.meta, chunk, self.running[0].memory[chunk.id])

    def rewrite(self, change: Callable[[RecordView], None], step: int, blob: bytes) -> None:
        if self.store is not None:
            self.store = rewritten(self.store, change, step, blob, direct=self.store_plan.direct)
            self.meta, self.blob = self.store.meta, blob
        else:
            for chunk in self.store_plan.table.chunks:
                change(self.record_of(chunk, ""))
        for i, server in enumerate(self.running):
            tier = self.store.tiers[i] if self.store else None
            server.reset(self.meta, tier, step, self._deadline_s)

    def nbytes(self) -> int:
        """Return the memory in bytes that the servers use."""
        return sum(server.nbytes() for server in self.running)

    def stop(self) -> list[str]:
        """Stop serving. Returns the names of threads that have not ended within the deadline."""
        return [name for server in self.running for name in server.stop(self._deadline_s)]

    def close(self) -> None:
        """Close the store, after the worker is closed."""
        if self.store is not None:
            self.store.close()

    abort = close  # called instead of `stop` and `close` if no session was started


def open_or_none(
    store_plan: StorePlan,
    report: Callable[[str], None],
    accept: Accept = lambda job, step, session: None,
) -> OpenedStore | None:
    """Open the job's store, and convert it if the layout differs from `store_plan`.

    Returns None if there is no store yet. `accept` checks the store. Raises ForeignError if the
    store belongs to another model or optimizer.
    """
    if not store_plan.directories:
        return None
    opened = open_store(
        store_plan.directories, also=store_plan.moved_from, direct=store_plan.direct, accept=accept
    )
    if opened is None:
        return None
    for note in opened.notes:  # report the notes now, because the following code may raise
        report(note)
    start = time.monotonic()
    with undone_on_error(opened.close):
        check_same(str(opened.directories[0]), opened.meta, store_plan)
        meta = store_plan.meta(opened.meta.job)
        if not needs_conversion(opened, meta, store_plan.directories):
            return opened
        if meta.staleness:
            raise ConfigError(
                f"the store in {opened.directories[0]} has staleness 1 and cannot be converted",
                hint="use the directories, chunk_elements and dtype that the store was made with",
            )
        with slow_work("converting the store to the requested layout", report=report):
            new = convert(
                opened, meta, store_plan.directories, store_plan.owners, direct=store_plan.direct
            )
    report(f"store converted to the requested layout in {time.monotonic() - start:.1f} s")
    return new


def pieces_of(store: OpenedStore, name: str, what: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the array `what` of the parameter `name` chunk by chunk, as (index of the first element
    in the parameter, values).
    """
    return param_pieces(store.meta, name, what, partial(read_record, store, what=what))
