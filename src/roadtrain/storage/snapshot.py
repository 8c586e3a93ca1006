"""Snapshots: a part that rests in RAM is copied to files every so many steps, while training goes
on.

A snapshot of step s is what the slots of s hold. They are whole until step s+2 writes; whoever is
about to overwrite a chunk that is not copied yet copies it first, so a snapshot that takes longer
slows those steps down to its device's rate. Only what changed since the last snapshot is copied.
The copy is a part like any other, with two slots and a ledger: a kill in the middle leaves the
snapshot before.

Note "same steps": a server prepares the next step that is to be copied only when its snapshot
before is finished, and a step is committed once all servers have prepared it. So where one has
begun a snapshot all have finished the one before, and the oldest of their newest snapshots is one
that each of them still has. A session begins with one that all have (with replicas: that some have
who hold every chunk); whoever lacks that begins anew, at once.

Assumes: what storage/tier.py says. Does NOT decide what to go back to (servers/opening.py does).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from roadtrain.device.buffers import Buffer
from roadtrain.errors import DeadlineError, ForeignError
from roadtrain.storage.direct import in_ram
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import create_part, open_part, publish_part
from roadtrain.storage.ledger import LedgerEntry, Rows
from roadtrain.storage.meta import StoreMeta
from roadtrain.units import show_bytes

COPIES = 2  # chunks that are copied at once, each in a buffer of its own
WAIT_S = 600.0


def where_it_rests(directory: Path, snapshot: Path, every: int) -> str:
    """The state, in words that say what that is worth (Rule 3). `every` 0: without snapshots."""
    ram = in_ram(directory)
    words = "in RAM" if ram else "on files: every committed step is durable"
    if every:
        where = "to RAM as well" if in_ram(snapshot) else "to files"
        return f"{words}, a snapshot {where} every {every} steps"
    alone = " alone: lost with this host's memory (--snapshot DIR copies it to files)"
    return words + alone if ram else words


def held_in(directory: Path) -> tuple[tuple[int, ...], StoreMeta | None]:
    """The steps that the part in `directory` has records of, and what it holds; None where none
    is."""
    tier = open_part(directory, look=True)
    if tier is not None:
        tier.close()
    return ((), None) if tier is None else (tier.found, tier.meta)


def open_snapshot(directory: Path, meta: StoreMeta, step: int) -> FileTier:
    """The snapshot of `step`, those after it are forgotten; -1: a part that holds none yet,
    whatever was there. ForeignError where it is of another job or server."""
    tier = (open_part(directory, step) if step >= 0 else None) or create_part(
        directory, meta, anew=True
    )
    if (tier.meta.job, tier.meta.index) != (meta.job, meta.index):
        tier.close()
        raise ForeignError(
            f"{directory}: holds a snapshot of server {tier.meta.index} of job {tier.meta.job}, not"
            f" of server {meta.index} of job {meta.job}",
            hint="name another directory for the snapshots of this job",
        )
    return tier


def restore(snapshot: FileTier, to: FileTier) -> None:
    """What `snapshot` holds is committed in the empty part `to`, at the same step."""
    view, entry = Buffer(_largest(snapshot)).view, snapshot.entry
    for chunk in entry.rows["chunk"]:
        snapshot.copy(int(chunk), entry.rows, to, view)
    to.prepare(entry.step, entry.blob, entry.rows["step"])
    to.committed(entry.step)


class Snapshots:
    """From `start` on `source` is copied to `target` at the steps that `every` divides. A write
    or prepare of `source` waits for what it would spoil, and raises what that failed of."""

    def __init__(
        self, source: FileTier, target: FileTier, every: int, report: Callable[[str], None]
    ) -> None:
        self._source, self._target, self._every, self._report = source, target, every, report
        self._pool = ThreadPoolExecutor(COPIES, f"snapshot {target.directory}")
        self.nbytes = COPIES * _largest(source)  # memory that it uses at most
        self._step, self._copies, self._closed = -1, dict[int, Future[int]](), False
        self._finished: Future[None] | None = None

    def start(self) -> None:
        """`source` has a committed step, and nothing of the next one. The first snapshot begins
        now."""
        source = self._source
        source.on_write, source.on_prepare = self._before_write, self._before_prepare
        source.on_commit = self._committed
        if self._target.step < 0:
            self._begin()

    def _begin(self) -> None:
        """A snapshot of the step that was just committed; nothing of the next one is written
        yet."""
        entry, last = self._source.entry, self._target.step
        if self._closed or entry.step == last:
            return
        self._step, chunks = entry.step, self._source.meta.table.chunks
        changed = [
            c
            for c, step in entry.rows[["chunk", "step"]].tolist()
            # a part that was filled up names its own step
            if last < 0 or (step > last and chunks[c].trainable)
        ]
        self._copies = {
            chunk: self._pool.submit(self._copy, chunk, entry.rows) for chunk in changed
        }
        self._finished = self._pool.submit(self._finish, entry, time.monotonic())

    def _before_write(self, chunk: int) -> None:
        """What was written after the snapshot's step is in the other slot, so now its own is
        overwritten."""
        if chunk in self._copies and self._source.written_in(chunk) > self._step:
            self._wait(self._copies[chunk])

    def _before_prepare(self, step: int) -> None:
        if self._finished is not None and (step % self._every == 0 or self._finished.done()):
            self._wait(self._finished)

    def _committed(self, step: int) -> None:
        if step % self._every == 0:
            self._begin()

    def close(self) -> None:
        """Finishes the snapshot that has begun; what it failed of is reported."""
        self._closed = True
        wait([self._finished] if self._finished else [], WAIT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self, done: Future[Any]) -> None:
        try:
            done.result(WAIT_S)
        except TimeoutError:
            raise DeadlineError(
                f"waited {WAIT_S:.0f} s for the snapshot of step {self._step} in "
                f"{self._target.directory}",
                hint="its device hangs",
            ) from None

    def _copy(self, chunk: int, rows: Rows) -> int:
        return self._source.copy(chunk, rows, self._target, Buffer(_largest(self._source)).view)

    def _finish(self, entry: LedgerEntry, start: float) -> None:
        """Begins once all copies have begun."""
        target, last, step = self._target, self._target.step, entry.step
        try:
            moved = sum(copy.result() for copy in self._copies.values())
            target.prepare(step, entry.blob, entry.rows["step"])
            target.committed(step)
            for line in publish_part(target.directory.parent) if last < 0 else ():
                self._report(line)
        except BaseException as error:
            line = f"no snapshot of step {step}, the last is of step {last}: {error}"
            self._report(line.replace("\n", "; "))
            raise
        self._report(
            f"snapshot of step {step} in {target.directory.parent}: {show_bytes(moved)} in "
            f"{time.monotonic() - start:.1f} s"
        )


def _largest(tier: FileTier) -> int:
    return max((r.nbytes for r in tier.meta.owned(tier.meta.index).values()), default=1)
