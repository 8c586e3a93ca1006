"""Snapshots: files to which a server copies its state in RAM every few steps, during training.

Only chunks that changed since the last snapshot are copied. A write that would overwrite a chunk
not copied yet waits, so a slow snapshot slows down training. A kill during a snapshot leaves the
previous snapshot intact.

Note "same steps": at any time, there is a step of which all servers have a snapshot. A server
finishes its last snapshot before it prepares the next step to be copied, and keeps that snapshot
until the new one is finished. A step is committed only after all servers have prepared it. A
session that goes back begins at a common snapshot. With replicas, it suffices that the servers with
this snapshot together hold every chunk.

Follows the rules of storage/tier.py. servers/opening.py chooses the snapshot to go back to.
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

COPIES = 2  # concurrent copies of chunks, each with its own buffer
WAIT_S = 600.0


def describe_storage(directory: Path, snapshot: Path, every: int) -> str:
    """Describe where the state and its snapshots are kept, and how durable they are. `every` is the
    number of steps between two snapshots; 0 if there are none."""
    ram = in_ram(directory)
    words = "in RAM" if ram else "on files: every committed step is durable"
    if every:
        where = "to RAM as well" if in_ram(snapshot) else "to files"
        return f"{words}, a snapshot {where} every {every} steps"
    alone = " alone: lost with this host's memory (--snapshot DIR copies it to files)"
    return words + alone if ram else words


def held_in(directory: Path) -> tuple[tuple[int, ...], StoreMeta | None]:
    """Return the steps for which `directory` has records, and the description of the store. If
    `directory` holds no store, return () and None."""
    tier = open_part(directory, read_only=True)
    if tier is not None:
        tier.close()
    return ((), None) if tier is None else (tier.found, tier.meta)


def open_snapshot(directory: Path, meta: StoreMeta, step: int) -> FileTier:
    """Open the snapshot of `step` and discard later snapshots. If `step` is -1 or there is no
    snapshot, create empty files for snapshots. Raises ForeignError if the snapshot belongs to
    another job or server."""
    tier = (open_part(directory, step) if step >= 0 else None) or create_part(
        directory, meta, anew=True
    )
    if (tier.meta.job, tier.meta.index) != (meta.job, meta.index):
        tier.close()
        raise ForeignError(
            f"{directory} holds a snapshot of server {tier.meta.index} of job {tier.meta.job},"
            f" not of server {meta.index} of job {meta.job}",
            hint="name another directory for the snapshots of this job",
        )
    return tier


def restore(snapshot: FileTier, to: FileTier) -> None:
    """Copy `snapshot` into the empty tier `to`, and commit the step of the snapshot."""
    view, entry = Buffer(_largest(snapshot)).view, snapshot.entry
    for chunk in entry.rows["chunk"]:
        snapshot.copy(int(chunk), entry.rows, to, view)
    to.prepare(entry.step, entry.blob, entry.rows["step"])
    to.committed(entry.step)


class Snapshots:
    """Copies a server's tier `source` to the tier `target` at each step that is a multiple of
    `every`.

    Two methods of `source` may wait for the copy in progress: `write`, if it would overwrite a
    chunk not copied yet, and `prepare` of the next step to be copied. Both raise the error of a
    failed copy.
    """

    def __init__(
        self, source: FileTier, target: FileTier, every: int, report: Callable[[str], None]
    ) -> None:
        self._source, self._target, self._every, self._report = source, target, every, report
        self._pool = ThreadPoolExecutor(COPIES, f"snapshot {target.directory}")
        self.nbytes = COPIES * _largest(source)  # upper bound of the memory used
        self._step, self._copies, self._closed = -1, dict[int, Future[int]](), False
        self._finished: Future[None] | None = None

    def start(self) -> None:
        """Start to make snapshots, the first of them at once if `target` has none. `source` must
        have a committed step, and no writes of the next step."""
        source = self._source
        source.on_write, source.on_prepare = self._before_write, self._before_prepare
        source.on_commit = self._committed
        if self._target.step < 0:
            self._begin()

    def _begin(self) -> None:
        """Begin a snapshot of the step that was just committed, before any write of the next
        step."""
        entry, last = self._source.entry, self._target.step
        if self._closed or entry.step == last:
            return
        self._step, chunks = entry.step, self._source.meta.table.chunks
        changed = [
            c
            for c, step in entry.rows[["chunk", "step"]].tolist()
            # if `target` has no snapshot, copy all chunks: if the part was filled from another
            # part, its chunks have the step numbers of that part
            if last < 0 or (step > last and chunks[c].trainable)
        ]
        self._copies = {
            chunk: self._pool.submit(self._copy, chunk, entry.rows) for chunk in changed
        }
        self._finished = self._pool.submit(self._finish, entry, time.monotonic())

    def _before_write(self, chunk: int) -> None:
        """Wait for the copy of `chunk`, if the next write of this chunk overwrites the slot that is
        being copied."""
        if chunk in self._copies and self._source.written_in(chunk) > self._step:
            self._wait(self._copies[chunk])

    def _before_prepare(self, step: int) -> None:
        if self._finished is not None and (step % self._every == 0 or self._finished.done()):
            self._wait(self._finished)

    def _committed(self, step: int) -> None:
        if step % self._every == 0:
            self._begin()

    def close(self) -> None:
        """Finish the snapshot in progress. A failure is reported, not raised."""
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
                hint="check the disk of this directory: writing to the disk does not finish",
            ) from None

    def _copy(self, chunk: int, rows: Rows) -> int:
        return self._source.copy(chunk, rows, self._target, Buffer(_largest(self._source)).view)

    def _finish(self, entry: LedgerEntry, start: float) -> None:
        """Wait for the copies of all chunks, then commit the snapshot."""
        target, last, step = self._target, self._target.step, entry.step
        try:
            moved = sum(copy.result() for copy in self._copies.values())
            target.prepare(step, entry.blob, entry.rows["step"])
            target.committed(step)
            for line in publish_part(target.directory.parent) if last < 0 else ():
                self._report(line)
        except BaseException as error:
            line = f"the snapshot of step {step} failed, the last snapshot has step {last}: {error}"
            self._report(line.replace("\n", "; "))
            raise
        self._report(
            f"snapshot of step {step} in {target.directory.parent}: {show_bytes(moved)} in "
            f"{time.monotonic() - start:.1f} s"
        )


def _largest(tier: FileTier) -> int:
    return max((r.nbytes for r in tier.meta.owned(tier.meta.index).values()), default=1)
