"""Snapshots: copies of a part that is kept in RAM to files, every few steps, during training.

A snapshot of step s copies the slots of s, which stay intact until step s+2 writes. A writer that
is about to overwrite an uncopied chunk waits for its copy, so a slow snapshot slows those steps
down to the rate of its device. Only what changed since the last snapshot is copied. The copy
is a part like any other, with two slots and a ledger: a kill in the middle leaves the snapshot
before intact.

Note "same steps": a server prepares the next step to be copied only after its last snapshot is
finished, and a step is committed only once all servers have prepared it. So when one server has
begun a snapshot, all have finished the one before. The oldest of their newest snapshots is
therefore one that all servers still have. A session begins at a snapshot that all servers have
(with replicas: that servers with every chunk have). A server without it starts a new one at once.

Assumes the rules of storage/tier.py. Does not choose the snapshot to go back to
(servers/opening.py does).
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
    """Describe where the state is kept and how durable that is. `every` 0: no snapshots."""
    ram = in_ram(directory)
    words = "in RAM" if ram else "on files: every committed step is durable"
    if every:
        where = "to RAM as well" if in_ram(snapshot) else "to files"
        return f"{words}, a snapshot {where} every {every} steps"
    alone = " alone: lost with this host's memory (--snapshot DIR copies it to files)"
    return words + alone if ram else words


def held_in(directory: Path) -> tuple[tuple[int, ...], StoreMeta | None]:
    """Return the steps that the part in `directory` has records of, and its description; () and
    None where there is no part."""
    tier = open_part(directory, read_only=True)
    if tier is not None:
        tier.close()
    return ((), None) if tier is None else (tier.found, tier.meta)


def open_snapshot(directory: Path, meta: StoreMeta, step: int) -> FileTier:
    """Open the snapshot of `step`, discarding later ones; -1: create an empty one. Raises
    ForeignError where it belongs to another job or server."""
    tier = (open_part(directory, step) if step >= 0 else None) or create_part(
        directory, meta, anew=True
    )
    if (tier.meta.job, tier.meta.index) != (meta.job, meta.index):
        tier.close()
        raise ForeignError(
            f"{directory}: holds a snapshot of server {tier.meta.index} of job {tier.meta.job},"
            f" not of server {meta.index} of job {meta.job}",
            hint="name another directory for the snapshots of this job",
        )
    return tier


def restore(snapshot: FileTier, to: FileTier) -> None:
    """Copy `snapshot` into the empty part `to`, and commit it there at the same step."""
    view, entry = Buffer(_largest(snapshot)).view, snapshot.entry
    for chunk in entry.rows["chunk"]:
        snapshot.copy(int(chunk), entry.rows, to, view)
    to.prepare(entry.step, entry.blob, entry.rows["step"])
    to.committed(entry.step)


class Snapshots:
    """Copies `source` to `target` at steps that are multiples of `every`, from `start` on. Writes
    and prepares of `source` wait for the copies they would spoil, and raise their errors."""

    def __init__(
        self, source: FileTier, target: FileTier, every: int, report: Callable[[str], None]
    ) -> None:
        self._source, self._target, self._every, self._report = source, target, every, report
        self._pool = ThreadPoolExecutor(COPIES, f"snapshot {target.directory}")
        self.nbytes = COPIES * _largest(source)  # upper bound of the memory used
        self._step, self._copies, self._closed = -1, dict[int, Future[int]](), False
        self._finished: Future[None] | None = None

    def start(self) -> None:
        """Begin the first snapshot. `source` must have a committed step and nothing of the next."""
        source = self._source
        source.on_write, source.on_prepare = self._before_write, self._before_prepare
        source.on_commit = self._committed
        if self._target.step < 0:
            self._begin()

    def _begin(self) -> None:
        """Begin a snapshot of the step that was just committed. Nothing of the next step is written
        yet."""
        entry, last = self._source.entry, self._target.step
        if self._closed or entry.step == last:
            return
        self._step, chunks = entry.step, self._source.meta.table.chunks
        changed = [
            c
            for c, step in entry.rows[["chunk", "step"]].tolist()
            # a part that was filled from elsewhere has its own step numbers
            if last < 0 or (step > last and chunks[c].trainable)
        ]
        self._copies = {
            chunk: self._pool.submit(self._copy, chunk, entry.rows) for chunk in changed
        }
        self._finished = self._pool.submit(self._finish, entry, time.monotonic())

    def _before_write(self, chunk: int) -> None:
        """Wait for the copy of a chunk that was already written after the snapshot's step: the next
        write overwrites the slot being copied."""
        if chunk in self._copies and self._source.written_in(chunk) > self._step:
            self._wait(self._copies[chunk])

    def _before_prepare(self, step: int) -> None:
        if self._finished is not None and (step % self._every == 0 or self._finished.done()):
            self._wait(self._finished)

    def _committed(self, step: int) -> None:
        if step % self._every == 0:
            self._begin()

    def close(self) -> None:
        """Finish the snapshot in progress; its failure is reported."""
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
                hint="check the device of that directory, it does not finish writing",
            ) from None

    def _copy(self, chunk: int, rows: Rows) -> int:
        return self._source.copy(chunk, rows, self._target, Buffer(_largest(self._source)).view)

    def _finish(self, entry: LedgerEntry, start: float) -> None:
        """Commit the snapshot; starts after all copies have started."""
        target, last, step = self._target, self._target.step, entry.step
        try:
            moved = sum(copy.result() for copy in self._copies.values())
            target.prepare(step, entry.blob, entry.rows["step"])
            target.committed(step)
            for line in publish_part(target.directory.parent) if last < 0 else ():
                self._report(line)
        except BaseException as error:
            line = f"the snapshot of step {step} failed, the last one is of step {last}: {error}"
            self._report(line.replace("\n", "; "))
            raise
        self._report(
            f"snapshot of step {step} in {target.directory.parent}: {show_bytes(moved)} in "
            f"{time.monotonic() - start:.1f} s"
        )


def _largest(tier: FileTier) -> int:
    return max((r.nbytes for r in tier.meta.owned(tier.meta.index).values()), default=1)
