"""Subject and Diagnosis: what a check examines, and what it finds. Does NOT examine anything.

The faults and their texts are in faults.toml.
"""

from __future__ import annotations

import functools
import os
import string
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from roadtrain.config.job import Job
from roadtrain.doctor.torch_report import TorchReport
from roadtrain.storage.rates import StorageRates
from roadtrain.units import show_bytes, show_count, show_rate

K = TypeVar("K")
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
        shows: dict[str, Callable[[Any], str]] = {"bytes": show_bytes, "rate": show_rate}
        shows |= {"list": ", ".join, "devices": partial(show_count, noun="device")}
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


def within(seconds: float, works: Mapping[K, Callable[[], T]]) -> dict[K, T]:
    """Run functions at the same time, which must not raise. Returns the results that are there
    after `seconds`.

    A thread that waits for a disk or a server cannot be stopped, so the threads are daemons.
    """
    end, done = time.monotonic() + seconds, dict[K, T]()

    def run(key: K) -> None:
        done[key] = works[key]()

    threads = [threading.Thread(target=run, args=[key], daemon=True) for key in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return done.copy()
