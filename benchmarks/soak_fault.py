"""A fault of `roadtrain soak`, how one ends, and the table of kinds that the modules with the
kinds fill."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.soak_scene import WORKERS, Scene, Told, Wrong
from roadtrain.lab.bad_link import Way

ALONE = "alone"  # the flavour of a trainer that has a store of its own
TRAINER = "trainer"  # the same by Hugging Face's Trainer


@dataclass(frozen=True)
class Fault:
    """It strikes when `moment` (of all bytes that an undisturbed run sends there) went over the
    link of worker `link[0]` and server `link[1]` in direction `way`; of who trains alone, at that
    part of its syncs or writes.
    `prompt`: what was killed is started again at once, not when all others have ended. `choice`:
    what the kind draws besides."""

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
        if self.flavour in (ALONE, TRAINER):
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
class Ended:
    """`how`: went on, sentence, failed, hung, skipped. `sentences`: of processes that ended by
    themselves; `lasted_s`: from the fault to the end of the last of them."""

    fault: Fault
    how: str
    sentences: tuple[str, ...] = ()
    recovery_s: float | None = None
    lasted_s: float | None = None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Reference:
    """The run that nothing happened to. `nbytes`: over each link and way; `calls`: syncs and
    writes of who trains alone."""

    told: tuple[Told, ...]
    nbytes: dict[tuple[int, int], dict[Way, int]]
    calls: dict[str, int]


class Nothing(Exception):
    """The fault had nothing to strike: no step was committed before it. The run has gone on."""


Play = Callable[[Any, Fault, Reference], list[str]]  # of a Scene, or an AloneScene


@dataclass(frozen=True)
class Kind:
    """`ends`: how it must end, or with "any" in one of both ways. `alone`: "", or the flavour of
    its scene's one trainer. `mounts`: it needs a file system of its own."""

    play: Play
    ends: str
    alone: str
    mounts: bool


KINDS: dict[str, Kind] = {}


def kind(
    name: str, *, ends: str = "went on", alone: str = "", mounts: bool = False
) -> Callable[[Play], Play]:
    """`ends="sentence"`: a mistake that the run cannot go on with; the function mends it. It
    returns what was said."""

    def known(play: Play) -> Play:
        KINDS[name] = Kind(play, ends, alone, mounts)
        return play

    return known


# what many kinds do


def strike_at(
    scene: Scene, fault: Fault, reference: Reference, do: Callable[[], None], first: float = 0.0
) -> None:
    """`do`, in the relay's thread, at the fault's moment; not before `first` of all bytes."""

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
    """What torchrun does for workers, and whatever starts servers for these, after somebody was
    killed."""
    scene.wait_struck()
    if fault.prompt:
        for number, server in enumerate(scene.servers):
            if server.killed:
                server.process.join()
                scene.serve(number)
    said = scene.wait_workers()
    if last:
        scene.finish()
    return said


def refused(scene: Scene, words: str) -> list[str]:
    """Nobody got far, and somebody said why."""
    said = scene.wait_workers()
    if len(said) != WORKERS or not any(re.search(words, sentence) for sentence in said):
        raise Wrong(f"nobody says {words!r}: {' | '.join(said)}")
    return said
