"""The decision how worker 0 opens a job's store on remote servers, from the reports of the servers
that answer. storage/history.py explains from which steps a job may resume. remote_servers.py
communicates with the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from roadtrain.errors import ConfigError, ForeignError, ForkedError, StaleError
from roadtrain.servers.store_plan import StorePlan, check_same
from roadtrain.storage.history import (
    Histories,
    HistoryLink,
    Resume,
    ServerHoldings,
    Unclear,
    Witness,
    back_to,
    lost_chunks,
)
from roadtrain.storage.mark import Mark
from roadtrain.storage.meta import StoreMeta


class StartMode(Enum):
    """The state from which a job starts."""

    NEW = "a new store is made"
    RESUMED = "the newest step is resumed"
    SNAPSHOT = "memory was lost: all servers go back to a snapshot"


@dataclass(frozen=True)
class Opening:
    """Instructions for opening the servers' stores."""

    mode: StartMode
    step: int
    members: tuple[int, ...]  # the servers whose contents are used
    history: tuple[HistoryLink, ...]  # without the link of the new session
    meta: StoreMeta  # metadata of the store before this session
    kept: int  # the newest step of which all chunks have a snapshot, -1 for none
    holders: tuple[int, ...]  # servers that have a snapshot of step `kept`

    def refilled(self, step: int) -> Opening:
        """Return instructions for filling the same store again with the contents of `step`."""
        history = back_to(self.history, step)
        return replace(self, mode=StartMode.NEW, step=step, history=history, kept=-1, holders=())


@dataclass(frozen=True)
class FoundStore:
    """The report of one server about its store."""

    newest: int  # the newest step, -1 if the server is empty
    snapshots: tuple[int, ...]  # the steps of the snapshots
    every: int  # number of steps between two snapshots, 0 if none are taken
    meta: StoreMeta | None  # None if the server is empty


class FoundStores:
    """The reports of the servers, and the decision how to open the store.

    Attributes:
        found: The reports, by number of the server.
        given_up: The servers whose contents are ignored. Empty if the reports show which contents
            are the newest, otherwise the servers in `give_up`.
    """

    def __init__(
        self,
        store_plan: StorePlan,
        meta: StoreMeta,
        mark: Mark | None,
        give_up: Sequence[int],
    ) -> None:
        self._store_plan, self._meta, self._mark = store_plan, meta, mark
        self._give_up = tuple(give_up)
        self.names = meta.directories
        self.found: dict[int, FoundStore] = {}
        self.given_up: tuple[int, ...] = ()
        self._decided: Resume | Unclear | None = None  # cached result of `decide`

    def add(self, number: int, found: FoundStore) -> None:
        self.found[number] = found
        self._decided = None

    def decide(self) -> Resume | Unclear:
        """Decide from which step the reporting servers may resume. Raises ForkedError or
        StaleError.
        """
        if self._decided is None:
            decided: Resume | Unclear | None = None
            try:
                decided = self._histories(()).resume(self._witness())
            except (ForkedError, StaleError) as error:
                if isinstance(error, StaleError) and self._mark and self._mark.new_store:
                    decided = self._histories(()).resume()
                elif not self._give_up:
                    raise
            self.given_up = () if isinstance(decided, Resume) else self._give_up
            if decided is None or self.given_up:
                decided = self._histories(self.given_up).resume(None, self.given_up)
            self._decided = decided
        return self._decided

    def opening(self, missing: Collection[int], report: Callable[[str], None]) -> Opening:
        """Decide how to open the store. `missing` are the servers that do not answer.

        Raises ConfigError, ForeignError or StaleError. Raises GoneError if the run directory names
        a store, but the servers are empty.
        """
        if len(every := sorted({found.every for found in self.found.values()})) > 1:
            raise ConfigError(
                f"the servers take snapshots at different intervals: {every} steps (0 means never)",
                hint="give all servers of a job the same --snapshot-every",
            )
        decided = self.decide()
        kept, having = self._snapshot()
        if isinstance(decided, Resume):
            step, members = decided.step, decided.members
            meta = self._held_by(members, step, StartMode.RESUMED)
            return Opening(StartMode.RESUMED, step, members, decided.history, meta, kept, having)
        if kept >= 0 and decided.lost:
            self._report_back(kept, every[0], report)
            history = back_to(self._histories(self.given_up).history, kept)
            meta = self._held_by(having, kept, StartMode.SNAPSHOT)
            return Opening(StartMode.SNAPSHOT, kept, having, history, meta, kept, having)
        if not missing and self._unborn():
            if self._mark is not None:
                self._mark.check("", -1, self.names_of(self.found))
            return Opening(StartMode.NEW, 0, tuple(self.found), (), self._meta, kept, having)
        if decided.lost:
            raise ForeignError(
                decided.why,
                hint="name the servers in the original order; if servers lost the contents of RAM"
                " before all had a snapshot, start again in empty directories",
            )
        raise StaleError(decided.why, hint=decided.hint)

    def names_of(self, numbers: Iterable[int]) -> str:
        return ", ".join(self.names[number] for number in numbers)

    def _held_by(self, members: tuple[int, ...], step: int, mode: StartMode) -> StoreMeta:
        """Return the metadata of the store that `members` hold.

        Raises ConfigError or ForeignError if this store is not the requested store.
        """
        held = self.found[members[0]].meta
        assert held is not None
        check_same(self.names[members[0]], held, self._store_plan)
        if held.signature != self._meta.signature or len(held.directories) != len(self.names):
            raise ConfigError(
                f"{self.names[members[0]]} holds a store of {len(held.directories)} servers and"
                f" {held.chunk_elements} elements per chunk, but {len(self.names)} servers and"
                f" {self._meta.chunk_elements} per chunk, or another dtype, are requested",
                hint="use the servers, chunk size and dtype that the store was made with",
            )
        if self._mark is not None:
            back = mode is StartMode.SNAPSHOT or bool(self.given_up)
            self._mark.check(held.job, step, self.names_of(members), back=back)
        return held

    def _report_back(self, kept: int, every: int, report: Callable[[str], None]) -> None:
        newest = [found.newest for _, found in sorted(self.found.items())]
        again = max(newest) - kept if max(newest) >= kept else f"fewer than {2 * every}"
        report(
            f"memory was lost: the servers hold steps {', '.join(map(str, newest))} (-1 is none)."
            f" All servers go back to the snapshot of step {kept}, {again} steps earlier"
        )

    def _histories(self, given_up: Sequence[int]) -> Histories:
        held = {}
        for number, found in self.found.items():
            if number not in given_up:
                meta, kept = found.meta, max(found.snapshots, default=-1)
                links, without = (meta.history, meta.without) if meta else ((), ())
                held[number] = ServerHoldings(found.newest, links, kept, without)
        return Histories(held, self.names, self._holders())

    def _witness(self) -> Witness | None:
        """Return the record in the run directory about the sessions of these servers, or None."""
        jobs = {found.meta.job for found in self.found.values() if found.meta is not None}
        record = None if self._mark is None else self._mark.record
        return Witness.of(record.history) if record is not None and record.job in jobs else None

    def _snapshot(self) -> tuple[int, tuple[int, ...]]:
        """Return the newest step that has a snapshot of every chunk, and the servers that have it.

        If there is no such step, returns (-1, ()).
        """
        kept = {number: found.snapshots for number, found in sorted(self.found.items())}
        for step in sorted({step for steps in kept.values() for step in steps}, reverse=True):
            having = tuple(number for number, steps in kept.items() if step in steps)
            if not lost_chunks(self._holders(), having):
                return step, having
        return -1, ()

    def _holders(self) -> set[tuple[int, ...]]:
        return {self._meta.holders(chunk.id) for chunk in self._store_plan.table.chunks}

    def _unborn(self) -> bool:
        """Return whether no session has begun on the store, so that worker 0 may make the store
        again.
        """
        steps = [found.newest for found in self.found.values()]
        if max(steps) > 0 or min(steps) >= 0:
            return False
        return self._meta.replicas == 1 or not any(
            found.meta is not None and found.meta.history for found in self.found.values()
        )
