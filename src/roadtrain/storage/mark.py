"""Mark: what a run directory knows of its store, so that no other store, no older one and no copy
that was trained elsewhere is taken for it (Rule 3).

`mark.json` names the store (its job's uuid), the highest step that is known to be committed, and
the session that trains it. It is replaced now and then only, not at every step: the lines of
metrics.jsonl, each durable before its step can be committed, give the rest (`witness`, `sessions`).
A store that is absent, another one, below that step or trained by another session is refused before
anything is made, moved or removed; `new_store` says that the store that is there, or a new one, is
meant.

Note "settled": a start that is allowed to go back says so here before it does; from then on, until
metrics.jsonl has been brought to the same step, its lines are no witness.

Assumes: one process, worker 0, writes it. Does NOT read metrics.jsonl, and does NOT know replicas.
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
EVERY_S = 5.0  # between two replacements while training
IN_RAM = "RAM, since no directory is named"  # where the state of a job without a store rests
_ANYWAY = "--new-store (run.new_store)"
_KEPT = "nothing was changed: "


class Known(msgspec.Struct, frozen=True):
    """What a mark says."""

    # uuid of the store; "": not known, or the state rested in the memory of the process
    job: str = ""
    step: int = -1  # committed at least; -1: nothing is known
    history: str = ""  # a Witness (storage/history.py): its last sessions; "": not known
    settled: bool = True  # see Note "settled"
    format: int = 1


class Mark:
    """Of the run directory `directory`. `witness`: the step that metrics.jsonl proves committed, -1
    for none. `sessions`: for each step that has a line there, the session that trained it, "" where
    the line does not say. `reads`: a store that is there is wanted, none shall be made.
    `known`: what was known when it was opened, then what was written last. `fresh`: whether
    `check` has let another store in than the one that metrics.jsonl tells of. `new_store`: a person
    says that the store that is there is meant."""

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
        self.path = directory / NAME
        self.fresh = False
        self._sessions = sessions or {}
        self.new_store = new_store
        self._reads = reads
        self._report = report
        self._written = -EVERY_S  # when the mark was written last
        self.known = self._load(witness)

    def check(
        self, job: str, step: int, where: str, *, session: str | None = None, back: bool = False
    ) -> None:
        """Refuse a store that is not this run's. Called before anything is changed.

        Args:
            job: The store's uuid.
            step: Its last committed step, -1 where no store is there.
            where: Where it rests, for messages.
            session: What trained that step, "" where the store does not say. None: the store's
                history is compared elsewhere (servers, stages).
            back: Whether going back is within what was promised (state in RAM with snapshots).

        Raises:
            GoneError: No store is there.
            ForeignError: It is another one.
            StaleError: It is behind this run.
            ForkedError: It was trained without this run.
        """
        refusal = self._refusal(job, step, where, session)
        if refusal is None:
            return
        another = step < 0 or self.known.job not in ("", job) or isinstance(refusal, ForkedError)
        if not (back and not another):
            if not self.new_store:
                raise refusal
            self._report(f"--new-store: {refusal}".partition("\n")[0])
        self.fresh = another
        self._write(Known(job if step >= 0 else "", step, settled=False))

    def adopt(self, job: str, step: int, history: str = "") -> None:
        """The store of `job` at `step` is this run's from now on; `job` "": its state rests in
        this process."""
        if step >= 0 and job and self.known.job != job and self.known.step > 0:
            self._report(f"{self.path}: the store of job {job} at step {step} is this run's")
        self.fresh |= self.known.job not in ("", job)
        self._write(Known(job, step if job else -1, history, settled=False))

    def advance(self, step: int, *, now: bool = False) -> None:
        """`step` is committed, and metrics.jsonl is this store's. Written once in EVERY_S, or
        `now`."""
        if not self.known.job or (self.known.settled and step <= self.known.step):
            return
        if now or not self.known.settled or time.monotonic() - self._written > EVERY_S:
            self._write(Known(self.known.job, step, self.known.history))

    def _refusal(self, job: str, step: int, where: str, session: str | None) -> StoreError | None:
        known = self.known
        if self._reads and step < 0:
            return GoneError(
                f"{where}: no store is there", hint="mount its disk, or train the run first"
            )
        if known.step < 0 or (not job and where == IN_RAM and not known.job):
            return None
        ours = f"this run has committed step {known.step}" + (
            f" of store {known.job}" if known.job else ""
        )
        if step < 0:
            return GoneError(
                f"{where}: no store is there, {ours}",
                hint=(
                    f"{_KEPT}mount its disk, or name the place where it is now; {_ANYWAY} begins"
                    " anew at step 0, without what was trained"
                ),
            )
        if known.job not in ("", job):
            return ForeignError(
                f"{where}: holds step {step} of store {job}, {ours}",
                hint=(
                    f"{_KEPT}name the place of this run's store; {_ANYWAY} takes the other one"
                    f" instead, from its step {step}"
                ),
            )
        if session is not None and self._is_anothers(step, session):
            return ForkedError(
                f"{where}: step {step} there was trained without this run (by session"
                f" {session or 'that is not known'}), {ours}",
                hint=(
                    f"{_KEPT}this is a copy that went on elsewhere, or another run trained it: name"
                    f" the place of the store that this run trained; {_ANYWAY} takes what is there"
                    f" instead, from step {step}, and puts this run's metrics.jsonl aside"
                ),
            )
        if step < known.step:
            return StaleError(
                f"{where}: the store is at step {step}, {ours}",
                hint=(
                    f"{_KEPT}this is an older copy: put the newer one back, or name its place;"
                    f" {_ANYWAY} goes back to step {step} and repeats the steps after it"
                ),
            )
        return None

    def _is_anothers(self, step: int, session: str) -> bool:
        """Whether the store's `step` is of none of this run's sessions, as far as is known."""
        if self.known.settled and self._sessions:
            if step > max(self._sessions):  # a step has its line before it can be committed
                return True
            if by := self._sessions.get(step):
                return by != session
        witness = Witness.of(self.known.history)
        if witness is None or step < self.known.step:  # an older copy, as far as is known
            return False
        return session not in (witness.before, witness.last)

    def _load(self, witness: int) -> Known:
        metrics = Known(step=witness if witness > 0 else -1)
        content = read_or_none(self.path)
        if content is None:
            return metrics
        try:
            known = msgspec.json.decode(unsealed(content), type=Known)
        except ValueError as error:
            if metrics.step < 0 and not self.new_store:
                raise DamagedError(
                    f"{self.path}: damaged ({error}): which store is this run's, at which step, is"
                    " not known",
                    hint=(
                        f"{_KEPT}restore it from a copy; {_ANYWAY} goes on with the store that is"
                        " named, from its last committed step"
                    ),
                ) from error
            self._report(
                f"{self.path}: damaged ({error}); metrics.jsonl proves step {witness}, a store at"
                " that step or after it is taken for this run's"
            )
            return metrics
        if known.format != 1:
            raise ForeignError(f"{self.path}: format {known.format}, this version reads 1")
        if known.job and known.settled and witness > known.step:
            return msgspec.structs.replace(known, step=witness)
        return known

    def _write(self, known: Known) -> None:
        replace_file(self.path, sealed(msgspec.json.encode(known)), "writing")
        self.known, self._written = known, time.monotonic()
