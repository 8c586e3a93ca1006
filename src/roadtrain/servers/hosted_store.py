"""HostedStore: the storage directory of a server, and that of its snapshots, as one process has
them for one session after the other.

Whoever opens or makes the store is alone with it (`storing`); a session whose device hangs keeps
it, and the next one is refused. Does NOT keep the store open: a session does.
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

LOCK_S = 5.0  # for the store to be free of the session before


class HostedStore:
    def __init__(self, directory: Path, snapshot: Path = Path(), every: int = 0) -> None:
        self.directory = directory
        self.snapshot = snapshot  # where snapshots go
        self.every = every  # steps between two; 0: none are taken
        self.rests = describe_storage(directory, snapshot, every)  # and how durable, for people
        self._lock = threading.Lock()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Alone with the directory. BusyError while the session before is not done with it: a
        device hangs."""
        if not self._lock.acquire(timeout=LOCK_S):
            raise BusyError(f"{self.directory}: the session before is still at work there")
        try:
            yield
        finally:
            self._lock.release()

    def made(self) -> int:
        """Bytes that its files have by now, while they are being made."""
        with suppress(OSError):
            return sum(path.stat().st_size for path in self.directory.glob("gen-*/*"))
        return 0

    def held(self, opened: FileTier | None) -> tuple[int, tuple[int, ...], StoreMeta | None]:
        """Newest step of the store, -1 for none, those of its snapshots, and what they are of.
        `opened`: a session has it open."""
        with self.storing():
            if opened is not None:
                return opened.step, (), opened.meta
            steps, meta = held_in(self.directory)
            kept, of = held_in(self.snapshot) if self.every else ((), None)
        # another job's is refused when it is opened
        ours = meta is None or of is None or meta.job == of.job
        return max(steps, default=-1), kept if ours else (), meta or of

    def go_on_without(
        self, job: str, link: str, servers: tuple[int, ...], opened: FileTier | None
    ) -> StoreMeta | None:
        """The witness of the session `link` says that it has ended, and that this server may go on
        without the others: nobody else is told so. Durable on return; None where that was not the
        last session here.
        """
        with self.storing():
            home = None if opened is None else opened.directory
            if opened is None and (part := open_part(self.directory, read_only=True)) is not None:
                home = part.directory
                part.close()
            meta = None if home is None else StoreMeta.load(home)
            if home is None or meta is None or meta.job != job:
                return None
            if [one.id for one in meta.history[-1:]] != [link]:
                return None
            replace(meta, without=servers).write(home)
            return meta
