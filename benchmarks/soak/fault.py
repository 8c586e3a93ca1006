"""Types for the faults of `roadtrain soak` and their outcomes, and the registry of kinds of faults.
Does NOT define the kinds.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.scene import Scene, WorkerLog, Wrong
from roadtrain.lab.bad_link import Way

ALONE = "alone"  # flavour of a trainer with a store of its own


@dataclass(frozen=True)
class Fault:
    """A scripted fault.

    Attributes:
        moment: when the fault happens, from 0 to 1. With workers, it is a share of the bytes that a
            run without faults sends in direction `way` over the link of worker `link[0]` and server
            `link[1]`. For a trainer running alone, it is a share of the trainer's syncs or writes.
        prompt: restart killed processes at once, and not only after all other processes have ended.
            Some kinds of faults use this flag for another choice.
        choice: random number from which a kind of fault derives its other choices
    """

    number: int
    kind: str
    victims: tuple[str, ...]
    flavour: str
    link: tuple[int, int]
    way: Way
    moment: float
    prompt: bool
    choice: int

    def __str__(self) -> str:
        if self.flavour == ALONE:
            return (
                f"{self.number}: {self.kind}, at {self.moment:.3f},"
                f" {self.choice}{', prompt' if self.prompt else ''}"
            )
        return (
            f"{self.number}: {self.kind} ({', '.join(self.victims)}), {self.flavour}, at"
            f" {self.moment:.3f} of worker {self.link[0]}, server {self.link[1]},"
            f" {self.way}{', prompt' if self.prompt else ''}"
        )


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault.

    Attributes:
        how: "went on", "sentence" (ended with an error message), "failed", "hung" or "skipped"
        sentences: errors of processes that ended by themselves
        recovery_s: seconds from the restart until every worker has done a step
        lasted_s: seconds from the fault until the last running worker ended
        seconds: duration of the whole test of the fault
        why: reason why the fault failed, hung or was skipped
    """

    fault: Fault
    how: str
    sentences: tuple[str, ...] = ()
    recovery_s: float | None = None
    lasted_s: float | None = None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Reference:
    """A run without faults. `nbytes`: bytes over each link in each direction. `calls`: numbers of
    syncs and writes of a trainer.
    """

    logs: tuple[WorkerLog, ...]
    nbytes: dict[tuple[int, int], dict[Way, int]]
    calls: dict[str, int]


class NothingToStrike(Exception):
    """Raised if a fault could not happen, because no step was committed. The run has ended without
    the fault.
    """


# the first argument is a Scene or an AloneScene
Play = Callable[[Any, Fault, Reference], list[str]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `ends`: the required outcome, "went on", "sentence" (the run ends with an
    error message), or "any". `alone`: flavor of the job for a trainer that runs alone, or "" for
    workers and servers. `mounts`: True if the fault needs a small file system of its own.
    """

    play: Play
    ends: str = "went on"
    alone: str = ""
    mounts: bool = False


KINDS: dict[str, Kind] = {}


def kind(name: str, **fields: Any) -> Callable[[Play], Play]:
    """Return a decorator that registers a function as a kind of fault. The function runs the fault,
    and returns the errors of processes that ended by themselves. If the required outcome is
    "sentence", the function then repairs the cause, and lets the run go on. `fields`: of the Kind.
    """

    def register(play: Play) -> Play:
        KINDS[name] = Kind(play, **fields)
        return play

    return register


# shared by several kinds


def strike_at(
    scene: Scene, fault: Fault, reference: Reference, do: Callable[[], None], first: float = 0.0
) -> None:
    """Arrange that the link's relay calls `do` in its thread at `fault.moment`. `first`: share of
    the link's bytes that must pass before the fault; `fault.moment` is then a share of the
    remaining bytes.
    """

    def strike() -> None:
        do()
        scene.struck_at = time.monotonic()
        scene.struck.set()

    moment = first + fault.moment * (1 - first)
    scene.links[fault.link].at(
        int(moment * reference.nbytes[fault.link][fault.way]), fault.way, strike
    )


def kill(scene: Scene, victims: Iterable[str]) -> None:
    for victim in victims:
        role, _, number = victim.partition(" ")
        (scene.workers if role == "worker" else scene.servers)[int(number)].kill()


def supervised(scene: Scene, fault: Fault, *, last: bool = True) -> list[str]:
    """Wait for the fault, restart killed processes, and return the errors of workers that ended by
    themselves. If `last`, also let the run train to its end.
    """
    scene.wait_struck()
    if fault.prompt:
        for number, server in enumerate(scene.servers):
            if server.killed:
                server.process.join()
                scene.serve(number)
    sentences = scene.wait_workers()
    if last:
        scene.finish()
    return sentences


def refused(scene: Scene, words: str) -> list[str]:
    """Check that all workers end by themselves and that an error matches the regular expression
    `words`. Returns the errors.
    """
    sentences = scene.wait_workers()
    every = len(sentences) == len(scene.workers)
    if not every or not any(re.search(words, sentence) for sentence in sentences):
        raise Wrong(
            f"no error matches {words!r}: {' | '.join(sentences)};"
            f" {scene.log(0).read_text()[-1500:]}"
        )
    return sentences


def bytes_until(scene: Scene, fault: Fault, reference: Reference) -> int:
    """Return the number of bytes that the fault's link still carries before `fault.moment`."""
    moment = int(fault.moment * reference.nbytes[fault.link][fault.way])
    return max(0, moment - scene.links[fault.link].nbytes[fault.way])


@contextmanager
def unmounted(paths: Sequence[Path], locks: Collection[str] = ()) -> Iterator[None]:
    """Leave directories empty during the `with` block, as if a disk were not mounted. Raises Wrong
    if a file was created in them, other than `locks`.
    """
    for path in paths:
        path.rename(path.with_suffix(".away"))
        path.mkdir()
    yield
    for path in paths:
        if left := [str(file) for file in path.rglob("*") if file.name not in locks]:
            raise Wrong(f"a start that was refused created files in an empty directory: {left}")
        shutil.rmtree(path)
        path.with_suffix(".away").rename(path)


# bits of files


def flip_a_bit(scene: Scene, paths: Sequence[Path], rng: random.Random) -> Callable[[], None]:
    """Flip a bit of one of the files, and return a function that flips it back. This function
    raises Wrong if the file does not exist any more.
    """
    path = rng.choice(paths)
    at, bit = place_in(path, rng), rng.randrange(8)
    flip(path, at, bit)
    scene.note(f"flipped: bit {bit} of byte {at} of {path}")

    def mend() -> None:
        if not path.exists():
            raise Wrong(f"{path} is missing after a start that was refused")
        flip(path, at, bit)

    return mend


def place_in(path: Path, rng: random.Random) -> int:
    """Choose a random offset in a file, most likely of a nonzero byte."""
    content = path.read_bytes()
    places = [rng.randrange(len(content)) for _ in range(16)]
    return next((at for at in places if content[at]), places[0])


def flip(path: Path, at: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content[at : at + 1])
