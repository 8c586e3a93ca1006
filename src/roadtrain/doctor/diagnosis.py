"""Subject and Diagnosis: what a check examines, and what it finds. Does NOT examine anything."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from roadtrain.config.job import Job
from roadtrain.doctor.torch_report import TorchReport
from roadtrain.storage.rates import StorageRates

T = TypeVar("T")
Level = Literal["wrong", "slow", "note"]


class Diagnosis(msgspec.Struct, frozen=True):
    """A finding about the machine. Serialized as JSON by `roadtrain doctor --json`."""

    fault: str  # name of the kind of fault, which stays the same in later versions
    level: Level  # prevents training, slows training, or is worth knowing
    what: str  # what was found, with both numbers
    fix: str = ""  # what to do about it; a note may have none


class PeerAnswer(msgspec.Struct, frozen=True):
    """The answer of a server to a status query."""

    text: str  # the server's state, or why there is none
    answered: bool
    ahead_s: float | None = None  # seconds by which the server's clock is ahead of this host's


@dataclass(frozen=True)
class Subject:
    """The machine, and the job that it shall run. The last three fields are measured in the
    background; checks that use them run last."""

    dirs: tuple[Path, ...]  # directories for stores
    named: bool = False  # whether the user named `dirs`; otherwise they are only a default
    job: Job | None = None
    peers: tuple[str, ...] = ()  # HOST:PORT of servers
    token_file: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
    root: Path = Path("/")  # of /sys, /proc and /dev
    torch: TorchReport = field(default_factory=TorchReport)
    # rates of directories; a text is the reason why there are none, None stands for a timeout
    rates: Mapping[Path, StorageRates | str | None] = field(default_factory=dict)
    answers: Mapping[str, PeerAnswer] = field(default_factory=dict)

    def read(self, path: str) -> str:
        """Return the content of a file below `root`, or "" if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, ValueError):
            return ""


class Background:
    """Measurements that run at the same time, each in a thread that may be left behind.

    A thread that waits for a disk or a server cannot be stopped, so the threads are daemons.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def start(self, measure: Callable[[], T]) -> Callable[[], T]:
        """Start `measure`. Returns a function that waits for its result, and that raises
        TimeoutError at the deadline, or the error of `measure`."""
        result: Future[T] = Future()

        def work() -> None:
            try:
                result.set_result(measure())
            except Exception as error:
                result.set_exception(error)

        threading.Thread(target=work, name="measurement of the doctor", daemon=True).start()
        return lambda: result.result(max(0.0, self._end - time.monotonic()))
