"""Mark: what a run directory knows of its store, so that no other one and no older one is taken for
it (Rule 3).

`mark.json` names the store (its job's uuid) and the highest step that is known to be committed. It
is replaced now and then only, not at every step: the lines of metrics.jsonl, each durable before
its step can be committed, give the rest (`witness`). A store that is absent, another one or below
that step is refused before anything is made, moved or removed; `new_store` says that the store that
is there, or a new one, is meant.

Note "settled": a start that is allowed to go back says so here before it does; from then on, until
metrics.jsonl has been brought to the same step, its lines are no witness.

Assumes: one process, worker 0, writes it. Does NOT read metrics.jsonl, and does NOT know replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from roadtrain.errors import DamagedError, ForeignError, GoneError, StaleError, StoreError
from roadtrain.storage.direct import replace_file, typed_errors
from roadtrain.storage.sealed import sealed, unsealed

NAME = "mark.json"
EVERY_S = 5.0  # between two replacements while training
IN_RAM = "RAM, since no directory is named"  # where the state of a job without a store rests
_ANYWAY = "--new-store (run.new_store) goes on with what is there"


class Known(msgspec.Struct, frozen=True):
    """What a mark says."""

    job: str = (
        ""  # uuid of the store; "": not known, or the state rested in the memory of the process
    )
    step: int = -1  # committed at least; -1: nothing is known
    history: str = ""  # which of a store's histories; "": not known
    settled: bool = True  # see Note "settled"
    format: int = 1


class Mark:
    """Of the run directory `directory`. `witness`: the step that metrics.jsonl proves committed, -1
    for none. `reads`: a store that is there is wanted, none shall be made.
    `known`: what was known when it was opened, then what was written last. `fresh`: whether
    `check` has let another store in than the one that metrics.jsonl tells of."""

    def __init__(
        self,
        directory: Path,
        *,
        witness: int = -1,
        new_store: bool = False,
        reads: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        self.path = directory / NAME
        self.fresh = False
        self._new_store = new_store
        self._reads = reads
        self._report = report
        self._written = -EVERY_S  # when the mark was written last
        self.known = self._load(witness)

    def check(self, job: str, step: int, where: str, *, back: bool = False) -> None:
        """Whether the store at `where`, of `job` and at `step` (-1: none is there), may be gone on
        with. Called before anything is changed. `back`: going back is within what was promised, and
        is said (state in RAM with snapshots).

        Raises GoneError (none is there), ForeignError (another one), StaleError (it is behind)."""
        refusal = self._refusal(job, step, where)
        if refusal is None:
            return
        another = step < 0 or (self.known.job not in ("", job))
        if not (back and not another):
            if not self._new_store:
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

    def _refusal(self, job: str, step: int, where: str) -> StoreError | None:
        known = self.known
        if self._reads and step < 0:
            return GoneError(
                f"{where}: no store is there", hint="is its disk mounted? Has the run been trained?"
            )
        if known.step < 0 or (not job and where == IN_RAM and not known.job):
            return None
        ours = f"this run has committed step {known.step}" + (
            f" of store {known.job}" if known.job else ""
        )
        if step < 0:
            return GoneError(
                f"{where}: no store is there, {ours}",
                hint=f"is its disk mounted? {_ANYWAY}: step 0",
            )
        if known.job not in ("", job):
            return ForeignError(f"{where}: holds step {step} of store {job}, {ours}", hint=_ANYWAY)
        if step < known.step:
            return StaleError(
                f"{where}: the store is at step {step}, {ours}",
                hint=f"name the store that holds it; {_ANYWAY}: step {step}",
            )
        return None

    def _load(self, witness: int) -> Known:
        metrics = Known(step=witness if witness > 0 else -1)
        with typed_errors(self.path, "reading"):
            try:
                content = self.path.read_bytes()
            except FileNotFoundError:
                return metrics
        try:
            body, whole = unsealed(content)
            if not whole:
                raise ValueError("it has no checksum")
            known = msgspec.json.decode(body, type=Known)
        except ValueError as error:
            if metrics.step < 0 and not self._new_store:
                raise DamagedError(
                    f"{self.path}: damaged ({error}): which store is this run's, at which step, is"
                    " not known",
                    hint=_ANYWAY,
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
