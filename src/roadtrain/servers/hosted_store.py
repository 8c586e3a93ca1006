"""The directories of a server for its store and its snapshots, which all its sessions use in turn.

A session that hangs because of a storage device keeps the lock (`storing`), and the next session is
refused. The open store belongs to the session, not to the HostedStore.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from roadtrain.errors import BusyError
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import open_part
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.snapshot import describe_storage, held_in

LOCK_S = 5.0  # limit of the wait for the lock


class HostedStore:
    def __init__(self, directory: Path, snapshot: Path = Path(), every: int = 0) -> None:
        self.directory = directory
        self.snapshot = snapshot  # directory for snapshots
        self.every = every  # number of steps between two snapshots, 0 if none are taken
        self.rests = describe_storage(
            directory, snapshot, every
        )  # location and durability, as text
        self._lock = threading.Lock()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Lock the directory. Raises BusyError if the previous session still uses the directory."""
        if not self._lock.acquire(timeout=LOCK_S):
            raise BusyError(f"the previous session still uses the directory {self.directory}")
        try:
            yield
        finally:
            self._lock.release()

    def file_bytes(self) -> int:
        """Return the size of the store's files in bytes, which shows the progress while a store is
        made.
        """
        with suppress(OSError):
            return sum(path.stat().st_size for path in self.directory.glob("gen-*/*"))
        return 0

    def held(self, opened: FileTier | None) -> tuple[int, tuple[int, ...], StoreMeta | None]:
        """Return the newest step of the store (-1 without a store), the steps of its snapshots, and
        its metadata.

        `opened` has the store's files if the running session has opened them.
        """
        with self.storing():
            if opened is not None:
                return opened.step, (), opened.meta
            steps, meta = held_in(self.directory)
            kept, of = held_in(self.snapshot) if self.every else ((), None)
        # snapshots of another job are refused when they are opened
        ours = meta is None or of is None or meta.job == of.job
        return max(steps, default=-1), kept if ours else (), meta or of

    def resume_without(
        self, job: str, link: str, servers: tuple[int, ...], opened: FileTier | None
    ) -> StoreMeta | None:
        """Record durably that this server may resume without `servers`, and return the store's
        metadata.

        `link` is the id of the session that has ended. If another session was the store's last,
        records nothing and returns None.
        """
        with self.storing():
            home = None if opened is None else opened.directory
            if opened is None and (part := open_part(self.directory, read_only=True)) is not None:
                home = part.directory
                part.close()
            meta = None if home is None else StoreMeta.load(home)
            if home is None or meta is None or meta.job != job:
                return None
            if [entry.id for entry in meta.history[-1:]] != [link]:
                return None
            replace(meta, without=servers).write(home)
            return meta
