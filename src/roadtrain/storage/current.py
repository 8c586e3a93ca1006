"""Which generation of a directory counts, and what becomes of the others.

`CURRENT` names N of the `gen-N` that counts, and carries a checksum. A generation is whole once it
has a record, since the first one is written after everything else; so where CURRENT is damaged,
lost, or names nothing, the records say which one counts, and that is said.

Note "never delete what has trained": a generation is removed where it has no record, or where it
and the one that counts are original and copy (a conversion or a refill made the one from the other)
and it is at no later step, or lies in RAM, which has no room for it. Any other one that has a
record is renamed, with a line.

Assumes: the directory is locked, or nothing is written. Does NOT know how several directories make
one store.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from roadtrain.errors import DamagedError, GoneError
from roadtrain.storage.direct import (
    in_ram,
    read_or_none,
    replace_file,
    sync_directory,
    typed_errors,
)
from roadtrain.storage.file import FILES
from roadtrain.storage.ledger import steps_in
from roadtrain.storage.meta import Brief
from roadtrain.storage.sealed import sealed, unsealed

NAME = "CURRENT"


@dataclass(frozen=True)
class Generation:
    """What lies in one `gen-N`, as far as it can be read."""

    home: Path
    number: int
    brief: Brief | None  # what its description says; None where that is not readable
    step: int  # of its newest whole record; -1 for none
    recorded: bool  # there is a record, whole or torn
    note: str = ""  # why it counts, where CURRENT does not say so by itself

    @property
    def job(self) -> str | None:
        return None if self.brief is None else self.brief.job

    @property
    def part(self) -> tuple[str, int] | None:
        """The job, and the number of the directory or server."""
        return None if self.brief is None else (self.brief.job, self.brief.index)

    def of(self, other: Generation) -> bool:
        """Whether both hold the same part of the same store."""
        return self.part is not None and self.part == other.part


def generations(directory: Path) -> list[Generation]:
    """By their numbers."""
    found = sorted(int(p.name[4:]) for p in directory.glob("gen-*") if p.name[4:].isdigit())
    return [_look(directory, number) for number in found]


def counting(directory: Path) -> Generation | None:
    """The generation that counts. None where CURRENT is absent, or says that nothing counts (and,
    where it has no checksum, nothing has a record). Nothing is written.

    Raises DamagedError where CURRENT is damaged and the records do not prove which one counts,
    GoneError where it names one that is not there and there is no other."""
    content = read_or_none(directory / NAME)
    if content is None:
        return None
    named, damage, vouched = _named(content)
    if vouched and named == 0:
        return None
    found = generations(directory)
    whole = [g for g in found if g.step >= 0 and g.brief is not None]
    here = next((g for g in found if g.number == named), None)
    if here is not None:
        later = [g for g in whole if g.of(here) and g.step > here.step]
        if not later:
            return here
        newest = max(later, key=lambda g: (g.step, g.number))
        counts = f"{newest.home.name} is at step {newest.step} and counts"
        note = f"{directory}: {counts}, {NAME} names {here.home.name}, at step {here.step}"
        return replace(newest, note=note)
    why = damage or (
        "says that nothing counts" if named == 0 else f"names gen-{named}, which is not there"
    )
    best = max(whole, key=lambda g: (g.step, g.number), default=None)
    if best is not None and all(g.of(best) for g in whole):
        note = f"{directory / NAME} {why}: {best.home.name}, at step {best.step}, counts"
        return replace(best, note=note)
    if not damage and not whole:
        if named == 0:
            return None
        raise GoneError(
            f"{directory / NAME} {why}",
            hint=f"nothing was changed: put gen-{named} back, or mount its disk; if it is lost for"
            f" good, remove {directory / NAME} to begin a new store here at step 0",
        )
    raise DamagedError(
        f"{directory / NAME} {why}; what lies beside it:"
        f" {[g.home.name for g in found] or 'nothing'}",
        hint="write the N of the gen-N that counts into it, or restore it from a copy",
    )


def switch(directory: Path, generation: int) -> None:
    """Name the generation that counts, atomically and durably."""
    replace_file(directory / NAME, sealed(str(generation).encode()), "switching the generation")


def repair(directory: Path, generation: int) -> None:
    """CURRENT names `generation`, with a checksum; what it says is durable (it may have been
    read before it was)."""
    if read_or_none(directory / NAME) != sealed(str(generation).encode()):
        switch(directory, generation)
    else:
        sync_directory(directory)


def clear(directory: Path, counts: Generation, copy_of: int) -> list[str]:
    """Only `counts`, a copy of generation `copy_of`, is left of what lies in the directory (Note
    "never delete what has trained"). Lines about what was renamed."""
    said = []
    for other in generations(directory):
        if other.home == counts.home:
            continue
        related = other.job is not None and other.job == counts.job
        copied_from = other.brief.copy_of if other.brief else None
        pair = other.number == copy_of or copied_from == counts.number
        older = other.step == 0 or (related and 0 < other.step <= counts.step)
        if not other.recorded or (pair and (older or in_ram(directory))):
            remove(other.home)
        else:
            said.append(set_aside(other))
    (directory / f"{NAME}.new").unlink(missing_ok=True)
    return said


def set_aside(generation: Generation) -> str:
    """Renames it, so that it counts for nothing and is lost to nobody. Returns the line that
    says so."""
    home = generation.home
    names = (f"{home.name}.aside{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
    aside = next(home.with_name(name) for name in names if not home.with_name(name).exists())
    with typed_errors(home, "renaming"):
        home.rename(aside)
    sync_directory(home.parent)
    step = f"step {generation.step}" if generation.step >= 0 else "a record"
    return (
        f"{home} holds {step} and does not count: it is {aside.name} now, remove it if nobody"
        " needs it"
    )


def remove(home: Path) -> None:
    """Delete a generation directory: the files that we make, then the directory where nothing
    else is in it."""
    with typed_errors(home, "removing"):
        for name in (*FILES, "spill.bin"):
            (home / name).unlink(missing_ok=True)
        if home.is_dir() and not any(home.iterdir()):
            home.rmdir()
            # gone before what comes in its place: a power cut cannot bring it back
            sync_directory(home.parent)


def _named(content: bytes) -> tuple[int, str, bool]:
    """(N, 0 for none; what is wrong with it, or nothing; whether a checksum vouches for it, which
    is absent where a person has written N, as a hint says)."""
    if content.strip().isdigit():
        return int(content), "", False
    try:
        return int(unsealed(content)), "", True
    except ValueError as error:
        return -1, f"is damaged ({error})", False


def _look(directory: Path, number: int) -> Generation:
    home = directory / f"gen-{number}"
    steps = steps_in(home)
    newest = max((step for step in steps if step is not None), default=-1)
    return Generation(home, number, brief_of(home), newest, bool(steps))


def brief_of(home: Path) -> Brief | None:
    """What the description in a generation directory says; None where it is not readable."""
    try:
        return msgspec.json.decode(unsealed(read_or_none(home / "store.json") or b""), type=Brief)
    except ValueError:
        return None
