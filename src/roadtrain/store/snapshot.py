"""Snapshots: a part that rests in RAM is copied to files every so many steps, while training goes on.

A snapshot of step s is what the slots of s hold. They are whole until step s+2 writes; whoever is about to overwrite a
chunk that is not copied yet copies it first, so a snapshot that takes longer slows those steps down to its device's
rate. Only what changed since the last snapshot is copied. The copy is a part like any other, with two slots and a
ledger: a kill in the middle leaves the snapshot before.

Note "same steps": a server prepares the next step that is to be copied only when its snapshot before is finished, and a
step is committed once all servers have prepared it. So where one has begun a snapshot all have finished the one
before, and the oldest of their newest snapshots is one that each of them still has.

Assumes: what store.tier says. Does NOT decide what to go back to (node/cluster.py does).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from roadtrain.errors import DeadlineError, ForeignError, LostError
from roadtrain.store.buffers import Buffer
from roadtrain.store.file import FileTier
from roadtrain.store.generation import create_part, open_part, publish_part
from roadtrain.store.ledger import StoreMeta
from roadtrain.units import show_bytes

COPIES = 2  # chunks that are copied at once, each in a buffer of its own
WAIT_S = 600.0


def open_snapshot(directory: Path, meta: StoreMeta, step: int) -> FileTier:
    """The snapshot of `step`, those after it are forgotten; -1: the newest, or a part that holds none yet.
    ForeignError where it is of another job or server."""
    found = open_part(directory, step if step >= 0 else None)
    tier = found or create_part(directory, meta)
    if (tier.meta.job, tier.meta.index) != (meta.job, meta.index):
        tier.close()
        raise ForeignError(
            f"{directory}: holds a snapshot of server {tier.meta.index} of job {tier.meta.job}, not of server "
            f"{meta.index} of job {meta.job}", hint="name another directory for the snapshots of this job")
    tier.drop_pending()
    return tier


def restore(directory: Path, snapshot: FileTier) -> FileTier:
    """What `snapshot` holds as a part in `directory`, in place of what is there. It counts from publish_part on."""
    tier, rows = create_part(directory, snapshot.meta, replaces=True), snapshot.rows
    buffer = _record_buffer(snapshot)
    try:
        for chunk in snapshot.chunks:
            snapshot.copy(chunk, rows, tier, buffer.view)
        tier.prepare(snapshot.step, snapshot.blob, rows["step"])
        tier.committed(snapshot.step)
    except BaseException:
        tier.close()
        raise
    finally:
        buffer.close()
    return tier


class Snapshots:
    """`source` is copied to `target` at the steps that `every` divides. Its owner calls `before_prepare`, `committed`,
    `before_write` of `source`; they raise what a copy failed of. Invariant, under `_changed`: while `_running`, a chunk
    of the snapshot is in `_todo`, then in `_busy`, then pending in `target`."""

    def __init__(self, source: FileTier, target: FileTier, every: int, report: Callable[[str], None]) -> None:
        self.every, self._source, self._target, self._report = every, source, target, report
        self._changed = threading.Condition()
        self._todo: dict[int, None] = {}  # in the order in which they are copied
        self._busy: set[int] = set()
        self._running = self._closed = False
        self._error: BaseException | None = None
        self._step, self._rows, self._blob, self._moved = -1, source.rows, b"", 0
        self._free = [_record_buffer(source) for _ in range(COPIES)]
        self._thread: threading.Thread | None = None  # of the snapshot that began last
        self.nbytes = sum(buffer.nbytes for buffer in self._free)

    @property
    def step(self) -> int:
        """Of the last finished snapshot, -1 before the first."""
        return self._target.step

    def begin(self) -> None:
        """A snapshot of the step that was just committed; nothing of the next one is written yet."""
        with self._changed:
            if self._closed or self._source.step == self.step:
                return
            assert not self._running
            self._step, self._rows, self._blob, self._moved = self._source.step, self._source.rows, self._source.blob, 0
            self._todo = dict.fromkeys(c for c in self._source.chunks if self._source.written_in(c) > self.step)
            self._running = True
        self._thread = threading.Thread(target=self._run, name=f"snapshot {self._target.directory}", daemon=True)
        self._thread.start()

    def before_prepare(self, step: int) -> None:
        with self._changed:
            if step % self.every == 0:
                self._wait(lambda: not self._running)
            if self._error is not None or self._closed:
                raise self._error or LostError("the server stops")

    def committed(self, step: int) -> None:
        if step % self.every == 0:
            self.begin()

    def before_write(self, chunk: int) -> None:
        """What is committed of the chunk is in the slot that the snapshot does not need, or the write goes there."""
        if self._source.written_in(chunk) > self._step:
            self._copy(chunk)

    def close(self) -> None:
        """Finishes the snapshot that has begun, unless it failed."""
        with self._changed:
            self._closed = True
        if self._thread is not None:
            self._thread.join(WAIT_S)
        for buffer in self._free:
            buffer.close()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Under the lock."""
        if not self._changed.wait_for(lambda: self._error is not None or ready(), WAIT_S):
            raise DeadlineError(f"waited {WAIT_S:.0f} s for the snapshot of step {self._step} in "
                                f"{self._target.directory}", hint="its device hangs")
        if self._error is not None:
            raise self._error

    def _copy(self, chunk: int) -> None:
        """Returns when the chunk needs no copy any more, whoever made it."""
        with self._changed:
            self._wait(lambda: chunk not in self._busy and (chunk not in self._todo or len(self._free) > 0))
            if chunk not in self._todo:
                return
            del self._todo[chunk]
            self._busy.add(chunk)
            buffer = self._free.pop()
        try:
            moved, error = self._source.copy(chunk, self._rows, self._target, buffer.view), None
        except BaseException as failed:
            moved, error = 0, failed
        with self._changed:
            self._free.append(buffer)
            self._busy.discard(chunk)
            self._moved += moved
            self._error = self._error or error
            self._changed.notify_all()
        if error is not None:
            raise error

    def _run(self) -> None:
        start, first, home = time.monotonic(), self.step < 0, self._target.directory.parent
        try:
            for chunk in list(self._todo):
                self._copy(chunk)
            with self._changed:
                self._wait(lambda: not self._busy)
            self._target.prepare(self._step, self._blob, self._rows["step"])
            self._target.committed(self._step)
            if first:
                publish_part(home)
        except BaseException as error:
            self._error = self._error or error
            self._report(f"no snapshot of step {self._step}, the last is of step {self.step}: {error}")
        else:
            self._report(f"snapshot of step {self._step} in {home}: {show_bytes(self._moved)} in "
                         f"{time.monotonic() - start:.1f} s")
        with self._changed:
            self._running = False
            self._changed.notify_all()


def _record_buffer(tier: FileTier) -> Buffer:
    return Buffer(max((tier.meta.records[chunk].nbytes for chunk in tier.chunks), default=1))
