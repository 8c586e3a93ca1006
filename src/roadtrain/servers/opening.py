"""What worker 0 opens a job's store as, from what the servers that answer say of theirs
(storage/history.py says what may be gone on from, and who knows). Does NOT speak to servers:
remote_servers.py does.
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


class Begin(Enum):
    """From where a job goes on."""

    NEW = "a store is made"
    RESUMED = "the newest step that counts"
    SNAPSHOT = "memory was lost: all go back to a snapshot"


@dataclass(frozen=True)
class Opening:
    """What the servers are to open."""

    begin: Begin
    step: int
    members: tuple[int, ...]  # the servers whose contents count
    history: tuple[HistoryLink, ...]  # the new link comes after it
    meta: StoreMeta  # of the store, before this session
    kept: int  # the newest step of which snapshots are whole, -1 for none
    having: tuple[int, ...]  # who has it

    def anew(self, step: int) -> Opening:
        """The same store, whose contents are made anew as those of `step`."""
        history = back_to(self.history, step)
        return replace(self, begin=Begin.NEW, step=step, history=history, kept=-1, having=())


@dataclass(frozen=True)
class FoundStore:
    """What one server said when it was joined."""

    newest: int  # its newest step, -1: it holds nothing
    snapshots: tuple[int, ...]  # steps
    every: int  # steps between two snapshots, 0: never
    meta: StoreMeta | None


class FoundStores:
    """`meta`: of the store asked for. `give_up`: servers whose contents are not to count where that
    is in doubt; `given_up`: those of them for which it was. `found`: by number of the server."""

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
        self._decided: Resume | Unclear | None = None  # of `found`; None: not known yet

    def add(self, number: int, found: FoundStore) -> None:
        self.found[number] = found
        self._decided = None

    def decide(self) -> Resume | Unclear:
        """What those who are here may go on from. Raises ForkedError, StaleError."""
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
        """Raises ConfigError, ForeignError, StaleError; GoneError where a run directory knows of a
        store. `missing`: servers that do not answer."""
        if len(every := sorted({found.every for found in self.found.values()})) > 1:
            raise ConfigError(
                f"the servers take snapshots every {every} steps (0: never)",
                hint="give all servers of a job the same --snapshot-every",
            )
        decided = self.decide()
        kept, having = self._snapshot()
        if isinstance(decided, Resume):
            step, members = decided.step, decided.members
            meta = self._held_by(members, step, Begin.RESUMED)
            return Opening(Begin.RESUMED, step, members, decided.history, meta, kept, having)
        if kept >= 0 and decided.lost:
            self._say_back(kept, every[0], report)
            history = back_to(self._histories(self.given_up).history, kept)
            meta = self._held_by(having, kept, Begin.SNAPSHOT)
            return Opening(Begin.SNAPSHOT, kept, having, history, meta, kept, having)
        if not missing and self._unborn():
            if self._mark is not None:
                self._mark.check("", -1, self.names_of(self.found))
            return Opening(Begin.NEW, 0, tuple(self.found), (), self._meta, kept, having)
        if decided.lost:
            raise ForeignError(
                decided.why,
                hint=(
                    "name the servers in the order in which they were named first; where memory was"
                    " lost before there was a snapshot of all, begin anew in empty directories"
                ),
            )
        raise StaleError(decided.why, hint=decided.hint)

    def names_of(self, numbers: Iterable[int]) -> str:
        return ", ".join(self.names[number] for number in numbers)

    def _held_by(self, members: tuple[int, ...], step: int, begin: Begin) -> StoreMeta:
        """What `members` hold, where that is the store asked for."""
        held = self.found[members[0]].meta
        assert held is not None
        check_same(self.names[members[0]], held, self._store_plan)
        if held.signature != self._meta.signature or len(held.directories) != len(self.names):
            raise ConfigError(
                f"{self.names[members[0]]} holds a store of {len(held.directories)} servers and"
                f" chunks of {held.chunk_elements} elements; asked for are {len(self.names)} and"
                f" {self._meta.chunk_elements}, or another dtype",
                hint="name the same servers, chunk size and dtype as when the store was made",
            )
        if self._mark is not None:
            back = begin is Begin.SNAPSHOT or bool(self.given_up)
            self._mark.check(held.job, step, self.names_of(members), back=back)
        return held

    def _say_back(self, kept: int, every: int, report: Callable[[str], None]) -> None:
        newest = [found.newest for _, found in sorted(self.found.items())]
        again = max(newest) - kept if max(newest) >= kept else f"fewer than {2 * every}"
        report(
            f"memory was lost: the servers hold steps {', '.join(map(str, newest))} (-1: none)."
            f" All go back to the snapshot of step {kept}, {again} steps are trained again"
        )

    def _histories(self, given_up: Sequence[int]) -> Histories:
        said = {}
        for number, found in self.found.items():
            if number not in given_up:
                kept = max(found.snapshots, default=-1)
                said[number] = ServerHoldings(found.newest, kept=kept)
                if (meta := found.meta) is not None:
                    said[number] = ServerHoldings(found.newest, meta.history, kept, meta.without)
        return Histories(said, self.names, self._holders())

    def _witness(self) -> Witness | None:
        """What this run's directory knows of the history of those who are here."""
        jobs = {found.meta.job for found in self.found.values() if found.meta is not None}
        known = None if self._mark is None else self._mark.record
        return Witness.of(known.history) if known is not None and known.job in jobs else None

    def _snapshot(self) -> tuple[int, tuple[int, ...]]:
        """The newest step of which those who are here have every chunk in snapshots, -1 for
        none, and who has it."""
        kept = {number: found.snapshots for number, found in sorted(self.found.items())}
        for step in sorted({step for steps in kept.values() for step in steps}, reverse=True):
            having = tuple(number for number, steps in kept.items() if step in steps)
            if not lost_chunks(self._holders(), having):
                return step, having
        return -1, ()

    def _holders(self) -> set[tuple[int, ...]]:
        return {self._meta.holders(chunk.id) for chunk in self._store_plan.table.chunks}

    def _unborn(self) -> bool:
        """Whether no session has begun on what is here: a store that was never finished is made
        anew."""
        steps = [found.newest for found in self.found.values()]
        if max(steps) > 0 or min(steps) >= 0:
            return False
        return self._meta.replicas == 1 or not any(
            found.meta is not None and found.meta.history for found in self.found.values()
        )
