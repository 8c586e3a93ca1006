"""Mark: a run directory's record of its store, so that a run does not silently continue with a
wrong store.

A store is refused before anything is changed, if it is missing, belongs to another job, is at an
earlier step, or was trained by another session. The option `new_store` accepts it.

The file `mark.json` is written only every few seconds; metrics.jsonl shows later steps. A step's
line in metrics.jsonl is durable before the step is committed. So a step without a line was trained
outside of this run.

Note "settled": before a run may go back to an earlier step, it writes settled=False to the mark.
The lines of metrics.jsonl are then ignored, because they may describe undone steps. settled becomes
True when metrics.jsonl has been cut to the step of the store.

Only worker 0 writes the mark. The caller reads metrics.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from roadtrain.errors import (
    DamagedError,
    ForeignError,
    ForkedError,
    GoneError,
    StaleError,
    StoreError,
)
from roadtrain.storage.direct import read_or_none, replace_file
from roadtrain.storage.history import Witness
from roadtrain.storage.sealed import sealed, unsealed

NAME = "mark.json"
EVERY_S = 5.0  # interval between two writes of the mark while training
IN_RAM = "RAM, since no directory is named"  # location of the state of a job without a store
_ANYWAY = "--new-store (run.new_store)"
_KEPT = "nothing was changed: "


class MarkRecord(msgspec.Struct, frozen=True):
    """The content of a mark."""

    # uuid of the store; "" if it is unknown, or if the state was in the memory of the process
    job: str = ""
    step: int = -1  # a step known to be committed; -1 if there is none
    history: str = ""  # a Witness (storage/history.py) as text; "" if unknown
    settled: bool = True  # see Note "settled"
    format: int = 1


class Mark:
    """The file `mark.json` of a run directory, which records the store of the run.

    Attributes:
        record: The content of the mark.
        fresh: Whether the run now uses another store, so that metrics.jsonl describes the former
            store.
        new_store: Whether the user accepts the store that is found (`--new-store`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        witness: int = -1,
        sessions: Mapping[int, str] | None = None,
        new_store: bool = False,
        reads: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        """Open the mark of the run directory `directory`.

        `witness` is the last step that is committed according to metrics.jsonl, or -1. `sessions`
        maps each step in metrics.jsonl to the session that trained the step, or "". With `reads`,
        the command only reads a store, and a missing store is an error. `report` is called with
        each line to be printed.
        """
        self.path = directory / NAME
        self.fresh = False
        self._sessions = sessions or {}
        self.new_store = new_store
        self._reads = reads
        self._report = report
        self._written = -EVERY_S  # time of the last write
        self.record = self._load(witness)

    def check(
        self, job: str, step: int, where: str, *, session: str | None = None, back: bool = False
    ) -> None:
        """Refuse a store that is not the store of this run. Called before anything is changed.

        Args:
            job: The store's uuid.
            step: The store's last committed step; -1 if there is no store.
            where: The store's location, for messages.
            session: The id of the session that trained this step; "" if the store names no session.
                None if sessions are not to be compared.
            back: Whether the store may be at an earlier step than the mark, for example after state
                in RAM was restored from a snapshot.

        Raises:
            GoneError: There is no store.
            ForeignError: The store is not that of this run.
            StaleError: The store is at an earlier step than the mark.
            ForkedError: The store was trained outside of this run.
        """
        refusal = self._refusal(job, step, where, session)
        if refusal is None:
            return
        another = step < 0 or self.record.job not in ("", job) or isinstance(refusal, ForkedError)
        if not (back and not another):
            if not self.new_store:
                raise refusal
            self._report(f"--new-store: {refusal}".partition("\n")[0])
        self.fresh = another
        self._write(MarkRecord(job if step >= 0 else "", step, settled=False))

    def adopt(self, job: str, step: int, history: str = "") -> None:
        """Record that this run's store belongs to `job` and is at `step`. If `job` is "", the state
        is in the memory of this process. `history` is a Witness (storage/history.py) as text, or
        ""."""
        if step >= 0 and job and self.record.job != job and self.record.step > 0:
            self._report(f"{self.path}: this run now uses the store of job {job}, at step {step}")
        self.fresh |= self.record.job not in ("", job)
        self._write(MarkRecord(job, step if job else -1, history, settled=False))

    def advance(self, step: int, *, now: bool = False) -> None:
        """Record that `step` is committed and that metrics.jsonl agrees with the store. The mark is
        written at most once in 5 s, or at once if `now` is True or the mark was not settled (Note
        "settled")."""
        if not self.record.job or (self.record.settled and step <= self.record.step):
            return
        if now or not self.record.settled or time.monotonic() - self._written > EVERY_S:
            self._write(MarkRecord(self.record.job, step, self.record.history))

    def _refusal(self, job: str, step: int, where: str, session: str | None) -> StoreError | None:
        mine = self.record
        if self._reads and step < 0:
            return GoneError(
                f"{where}: there is no store", hint="mount its disk, or train the run first"
            )
        if mine.step < 0 or (not job and where == IN_RAM and not mine.job):
            return None
        ours = f"this run has committed step {mine.step}" + (
            f" of store {mine.job}" if mine.job else ""
        )
        if step < 0:
            return GoneError(
                f"{where}: there is no store, but {ours}",
                hint=f"{_KEPT}mount its disk, or name its new location; {_ANYWAY} starts again at"
                " step 0, without the earlier training",
            )
        if mine.job not in ("", job):
            return ForeignError(
                f"{where}: has step {step} of store {job}, but {ours}",
                hint=f"{_KEPT}name the location of this run's store; {_ANYWAY} continues with the"
                f" other store from its step {step}",
            )
        if session is not None and self._is_anothers(step, session):
            return ForkedError(
                f"{where}: step {step} of the store was trained outside of this run (by session"
                f" {session or '(unknown)'}), but {ours}",
                hint=f"{_KEPT}the store is a copy that was trained elsewhere, or by another run:"
                f" name the store that this run trained; {_ANYWAY} continues with this copy"
                f" from step {step} and sets this run's metrics.jsonl aside",
            )
        if step < mine.step:
            return StaleError(
                f"{where}: the store is at step {step}, but {ours}",
                hint=f"{_KEPT}this is an older copy: restore the newer copy, or name its location;"
                f" pass {_ANYWAY} to continue from step {step} and to repeat the later steps",
            )
        return None

    def _is_anothers(self, step: int, session: str) -> bool:
        """Whether it is certain that a session of another run trained the store's `step`."""
        if self.record.settled and self._sessions:
            if step > max(self._sessions):  # this run writes a step's line before the commit
                return True
            if by := self._sessions.get(step):
                return by != session
        witness = Witness.of(self.record.history)
        if witness is None or step < self.record.step:  # just an older copy
            return False
        return session not in (witness.before, witness.last)

    def _load(self, witness: int) -> MarkRecord:
        metrics = MarkRecord(step=witness if witness > 0 else -1)
        content = read_or_none(self.path)
        if content is None:
            return metrics
        try:
            found = msgspec.json.decode(unsealed(content), type=MarkRecord)
        except ValueError as error:
            if metrics.step < 0 and not self.new_store:
                raise DamagedError(
                    f"{self.path}: damaged ({error}), so this run's store and its step are unknown",
                    hint=f"{_KEPT}restore {NAME} from a copy; {_ANYWAY} continues with the store"
                    " that is named, from its last committed step",
                ) from error
            self._report(
                f"{self.path}: damaged ({error}); metrics.jsonl proves step {witness}, so a store"
                " at that step or later is accepted"
            )
            return metrics
        if found.format != 1:
            raise ForeignError(f"{self.path} has format {found.format}, but this version reads 1")
        if found.job and found.settled and witness > found.step:
            return msgspec.structs.replace(found, step=witness)
        return found

    def _write(self, record: MarkRecord) -> None:
        replace_file(self.path, sealed(msgspec.json.encode(record)), "writing")
        self.record, self._written = record, time.monotonic()
