"""The current generation of a directory, and the removal of all other generations.

A *generation* is a subdirectory `gen-N` with all files of a store. Creating, converting or
refilling a store makes a new generation. The file `CURRENT` contains the number of the current
generation. A generation with a ledger record is complete, because its first record is written after
everything else. If CURRENT is damaged, lost or outdated, the complete generation with the latest
step is used, and `Generation.note` tells the user why.

Note "never delete what has trained": a generation without a ledger record was never complete, and
is removed. After a conversion or refill, the original is removed once the copy is current, unless
the original is at a later step. On a RAM disk, which may lack room for both, it is removed even
then. All other generations are renamed and reported.

The caller has locked the directory, or no process writes to it. storage/generation.py combines the
directories of a store.
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
    """The readable contents of a `gen-N` directory."""

    home: Path
    number: int
    brief: Brief | None  # basic fields of its description; None if the description is unreadable
    step: int  # step of its newest intact record; -1 if there is none
    recorded: bool  # whether there is a record, intact or torn
    note: str = ""  # why this generation is current although CURRENT does not name it

    @property
    def job(self) -> str | None:
        return None if self.brief is None else self.brief.job

    @property
    def part(self) -> tuple[str, int] | None:
        """The job's id and the index of the directory or server that this generation belongs to.
        None if the description (`store.json`) is unreadable."""
        return None if self.brief is None else (self.brief.job, self.brief.index)

    def of(self, other: Generation) -> bool:
        """Whether `other` belongs to the same directory or server of the same store."""
        return self.part is not None and self.part == other.part


def generations(directory: Path) -> list[Generation]:
    """Return the generations in a directory, sorted by number."""
    found = sorted(int(p.name[4:]) for p in directory.glob("gen-*") if p.name[4:].isdigit())
    return [_inspect(directory, number) for number in found]


def current(directory: Path) -> Generation | None:
    """Return the current generation of a directory. Writes nothing.

    Returns:
        The current generation, or None if CURRENT is missing or contains 0. A 0 without a checksum
        was written by a user, and is ignored if there is a complete generation.

    Raises:
        DamagedError: CURRENT is damaged, and no generation is complete. Or CURRENT is damaged or
            names a missing generation, and the complete generations belong to several stores.
        GoneError: CURRENT names a missing generation, and no generation is complete.
    """
    content = read_or_none(directory / NAME)
    if content is None:
        return None
    named, damage, checked = _named(content)
    if checked and named == 0:
        return None
    found = generations(directory)
    whole = [g for g in found if g.step >= 0 and g.brief is not None]
    here = next((g for g in found if g.number == named), None)
    if here is not None:
        later = [g for g in whole if g.of(here) and g.step > here.step]
        if not later:
            return here
        newest = max(later, key=lambda g: (g.step, g.number))
        counts = f"{newest.home.name} is at step {newest.step} and is used"
        note = f"{directory}: {counts}, although {NAME} names {here.home.name} at step {here.step}"
        return replace(newest, note=note)
    why = damage or (
        "names no generation" if named == 0 else f"names gen-{named}, which is missing"
    )
    best = max(whole, key=lambda g: (g.step, g.number), default=None)
    if best is not None and all(g.of(best) for g in whole):
        note = f"{directory / NAME} {why}: {best.home.name}, at step {best.step}, is used"
        return replace(best, note=note)
    if not damage and not whole:
        if named == 0:
            return None
        raise GoneError(
            f"{directory / NAME} {why}",
            hint=f"nothing was changed: restore gen-{named}, or mount its disk; if it is lost for"
            f" good, remove {directory / NAME} to begin a new store here at step 0",
        )
    raise DamagedError(
        f"{directory / NAME} {why}; the directory has {[g.home.name for g in found] or 'nothing'}",
        hint=f"write the number N of the right gen-N into {NAME}, or restore {NAME} from a copy",
    )


def switch(directory: Path, generation: int) -> None:
    """Make `generation` the current generation of `directory`, atomically and durably."""
    replace_file(directory / NAME, sealed(str(generation).encode()), "switching the generation")


def repair(directory: Path, generation: int) -> None:
    """Make `generation` the current generation durably, without a write if CURRENT already names
    it."""
    if read_or_none(directory / NAME) != sealed(str(generation).encode()):
        switch(directory, generation)
    else:
        sync_directory(directory)


def clear(directory: Path, kept: Generation, copy_of: int) -> list[str]:
    """Remove or rename all generations in `directory` except `kept` (Note "never delete what has
    trained"). `kept` is a copy of generation `copy_of`, or no copy if this is 0. Returns a report
    of each rename."""
    events = []
    for other in generations(directory):
        if other.home == kept.home:
            continue
        related = other.job is not None and other.job == kept.job
        copied_from = other.brief.copy_of if other.brief else None
        pair = other.number == copy_of or copied_from == kept.number
        older = other.step == 0 or (related and 0 < other.step <= kept.step)
        if not other.recorded or (pair and (older or in_ram(directory))):
            remove(other.home)
        else:
            events.append(set_aside(other))
    (directory / f"{NAME}.new").unlink(missing_ok=True)
    return events


def set_aside(generation: Generation) -> str:
    """Rename the directory of a generation, which is then ignored, but not deleted. Returns a
    report of the rename."""
    home = generation.home
    names = (f"{home.name}.aside{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
    aside = next(home.with_name(name) for name in names if not home.with_name(name).exists())
    with typed_errors(home, "renaming"):
        home.rename(aside)
    sync_directory(home.parent)
    step = f"step {generation.step}" if generation.step >= 0 else "a record"
    return (
        f"{home} holds {step} but is not used: it was renamed to {aside.name}, which you may remove"
    )


def remove(home: Path) -> None:
    """Delete the files that roadtrain makes in a generation directory, and the directory itself if
    it is then empty."""
    with typed_errors(home, "removing"):
        for name in (*FILES, "spill.bin"):
            (home / name).unlink(missing_ok=True)
        if home.is_dir() and not any(home.iterdir()):
            home.rmdir()
            # durable before the replacement exists, so a power cut cannot bring the directory back
            sync_directory(home.parent)


def _named(content: bytes) -> tuple[int, str, bool]:
    """Parse the content of CURRENT. A number without a checksum is valid, because error messages
    ask users to write one.

    Returns:
        The number (0 for no generation, -1 for a damaged file); a description of the damage, or "";
        and whether the file has a correct checksum.
    """
    if content.strip().isdigit():
        return int(content), "", False
    try:
        return int(unsealed(content)), "", True
    except ValueError as error:
        return -1, f"is damaged ({error})", False


def _inspect(directory: Path, number: int) -> Generation:
    home = directory / f"gen-{number}"
    steps = steps_in(home)
    newest = max((step for step in steps if step is not None), default=-1)
    return Generation(home, number, brief_of(home), newest, bool(steps))


def brief_of(home: Path) -> Brief | None:
    """Read the basic fields of the description (`store.json`) in the generation directory `home`.
    Returns None if the description is unreadable."""
    try:
        return msgspec.json.decode(unsealed(read_or_none(home / "store.json") or b""), type=Brief)
    except ValueError:
        return None
