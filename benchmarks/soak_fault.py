"""Faults of `roadtrain soak`, their outcomes, and the registry of kinds, which
other modules fill.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.soak_scene import WORKERS, Scene, WorkerLog, Wrong
from roadtrain.lab.bad_link import Way

ALONE = "alone"  # flavour of a trainer with a store of its own
TRAINER = "trainer"  # the same with Hugging Face's Trainer


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        moment: when it strikes, as a share of the bytes that an undisturbed run sends over the link
            of worker `link[0]` and server `link[1]` in direction `way`; for a trainer running
            alone, of its syncs or writes
        prompt: killed processes are restarted at once, not after all others have ended
        choice: source of the kind's other random choices
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
class Outcome:
    """Outcome of a fault. `how`: went on, sentence, failed, hung or skipped. `sentences`: errors of
    processes that ended by themselves. `lasted_s`: from the fault to the end of the last of
    these.
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
    """An undisturbed run. `nbytes`: bytes over each link in each direction; `calls`: syncs and
    writes of a trainer running alone.
    """

    logs: tuple[WorkerLog, ...]
    nbytes: dict[tuple[int, int], dict[Way, int]]
    calls: dict[str, int]


class NothingToStrike(Exception):
    """Raised if no step was committed before the moment of the fault, so that there was nothing to
    damage. The run has gone on to its end without the fault.
    """


# the first argument is a Scene or an AloneScene
Play = Callable[[Any, Fault, Reference], list[str]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `ends`: required outcome; "any" allows both. `alone`: "", or the flavour of
    its trainer. `mounts`: needs a file system of its own.
    """

    play: Play
    ends: str
    alone: str
    mounts: bool


KINDS: dict[str, Kind] = {}


def kind(
    name: str, *, ends: str = "went on", alone: str = "", mounts: bool = False
) -> Callable[[Play], Play]:
    """Register a kind of fault. The decorated function returns the errors of processes that ended
    by themselves.

    Args:
        ends: "sentence" for a mistake that the run cannot go on with, and that the function repairs
    """

    def register(play: Play) -> Play:
        KINDS[name] = Kind(play, ends, alone, mounts)
        return play

    return register


# shared by several kinds


def strike_at(
    scene: Scene, fault: Fault, reference: Reference, do: Callable[[], None], first: float = 0.0
) -> None:
    """Call `do` in the relay's thread at the fault's moment, at the earliest after the share
    `first` of all bytes.
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
    """Restart killed processes as torchrun and a service manager do. Returns workers' errors."""
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
    """Check that all workers ended by themselves and that an error matches `words`."""
    sentences = scene.wait_workers()
    if len(sentences) != WORKERS or not any(re.search(words, sentence) for sentence in sentences):
        raise Wrong(f"no error matches {words!r}: {' | '.join(sentences)}")
    return sentences
