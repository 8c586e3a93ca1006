"""Subject and Diagnosis: what a check examines, and what it finds. Does NOT examine anything.

The faults and their texts are in faults.toml.
"""

from __future__ import annotations

import functools
import os
import queue
import string
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from roadtrain.config.job import Job
from roadtrain.doctor.torch_report import TorchReport
from roadtrain.storage.rates import StorageRates
from roadtrain.units import show_bytes, show_rate

T = TypeVar("T")
Level = Literal["wrong", "slow", "note"]
FAULTS = Path(__file__).with_name("faults.toml")


class Diagnosis(msgspec.Struct, frozen=True):
    """A finding about the machine. Serialized as JSON by `roadtrain doctor --json`."""

    fault: str  # name of the fault, which stays the same in later versions
    level: Level  # prevents training, slows training, or is worth knowing
    what: str  # what was found, with both numbers
    fix: str = ""  # what to do about it; a note may have none


class _Texts(string.Formatter):
    """Fills in the texts of faults.toml."""

    def format_field(self, value: Any, spec: str) -> str:
        shows: dict[str, Callable[[Any], str]]
        shows = {"bytes": show_bytes, "rate": show_rate, "list": ", ".join}
        return shows[spec](value) if spec in shows else str(super().format_field(value, spec))


@functools.cache
def faults() -> dict[str, dict[str, str]]:
    return tomllib.loads(FAULTS.read_text(encoding="utf-8"))


def diagnose(entry: str, level: str = "", **values: Any) -> Diagnosis:
    """Return the finding of an entry of faults.toml, with `values` for the names in its texts.
    `level` overrides the level of the entry."""
    texts = faults()[entry]
    what, fix = (_Texts().vformat(texts[key], (), values) for key in ("what", "fix"))
    found = {"fault": entry.partition("/")[0], "level": level or texts["level"]}
    return msgspec.convert({**found, "what": what, "fix": fix}, Diagnosis)


@dataclass(frozen=True)
class Subject:
    """The machine, and the job that it shall run. The last three fields are measured."""

    dirs: tuple[Path, ...]  # directories for stores
    named: bool = False  # whether the user or the job named them; otherwise they are a default
    job: Job | None = None
    peers: tuple[str, ...] = ()  # HOST:PORT of servers
    token_file: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
    root: Path = Path("/")  # of /sys, /proc and /dev
    torch: TorchReport = field(default_factory=TorchReport)
    # rates of directories; a text is the reason why there are none, None stands for a timeout
    rates: Mapping[Path, StorageRates | str | None] = field(default_factory=dict)
    # seconds by which the servers' clocks are ahead, or the reasons why they do not answer
    answers: Mapping[str, float | str] = field(default_factory=dict)

    def read(self, path: str) -> str:
        """Return the content of a file below `root`, or "" if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, ValueError):
            return ""


class Background:
    """Work that runs at the same time, each piece in a thread that may be left behind.

    A thread that waits for a disk or a server cannot be stopped, so the threads are daemons.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def start(self, work: Callable[[], T], late: T) -> Callable[[], T]:
        """Start `work`, which must not raise. Returns a function that waits for the result, and
        returns `late` if there is none at the deadline."""
        result = queue.SimpleQueue[T]()
        threading.Thread(target=lambda: result.put(work()), name="doctor", daemon=True).start()

        def wait() -> T:
            try:
                return result.get(timeout=max(0.0, self._end - time.monotonic()))
            except queue.Empty:
                return late

        return wait
