"""Read the lines of a run for `train`, `status` and `show`.

RunLines adds up the lines of a metrics file. LineTail returns the lines that were added to a file
since the last look. Does not import torch.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

from roadtrain.config.job import Job
from roadtrain.errors import ConfigError
from roadtrain.training.metrics import committed_at, line_of
from roadtrain.training.predicted import RECENT
from roadtrain.training.progress import limited_by
from roadtrain.units import show_bytes, show_count, show_rate, show_seconds

Line = dict[str, Any]
ASSUMED_TBW = 600.0  # terabytes; a typical value in data sheets of 1 TB consumer SSDs
FEW = 5  # the first and the last loss are means over at most so many steps
WRITES = ("Write", "Commit")  # stages whose bytes go to the device
CURVES = ("step", "loss", "grad_norm", "lr", "tokens", "seconds", "free")


@dataclass
class RunLines:
    """The lines of one metrics file.

    Attributes:
        curves: A value of each step, by name; nan where a line has none. `free`: bytes on disks.
        recent: The last lines.
        seconds: The sum over all lines.
        tokens: The sum over all lines.
        busy_s: The seconds of each stage, summed over all lines and threads.
        nbytes: The bytes of each stage, summed over all lines.
        resident: The peak bytes of roadtrain's buffers.
    """

    curves: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in CURVES}
    )
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT))
    seconds: float = 0.0
    tokens: int = 0
    busy_s: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    resident: int = 0

    @classmethod
    def of(cls, lines: Iterable[Line]) -> Self:
        run = cls()
        for line in lines:
            run.add(line)
        return run

    def add(self, line: Line) -> None:
        memory = line.get("memory", {})
        disk = memory.get("disk")  # its budget includes the free space
        free = {} if disk is None else {"free": disk["budget"] - disk["bytes"]}
        for name, values in self.curves.items():
            value = (line | free).get(name)
            values.append(math.nan if value is None else value)
        self.recent.append(line)
        self.seconds += line["seconds"]
        self.tokens += line["tokens"]
        for name, stage in line["stages"].items():
            self.busy_s[name] += stage["seconds"]
            self.nbytes[name] += stage["bytes"]
        host = memory.get("host", {"bytes": 0})  # a job in stages has no such budget
        self.resident = max(self.resident, host["bytes"])

    @property
    def last(self) -> Line:
        return self.recent[-1]

    @property
    def step(self) -> int:
        return int(self.last["step"]) if self.recent else 0

    @property
    def step_s(self) -> float:
        """The median seconds of the last steps."""
        return median(line["seconds"] for line in self.recent) if self.recent else math.nan

    @property
    def tokens_per_s(self) -> float:
        return float(self.last["tokens"] / self.step_s) if self.recent and self.step_s else math.nan

    @property
    def loss(self) -> float:
        """The mean loss of the last steps, without those that are not finite."""
        losses = [line["loss"] for line in self.recent if line["loss"] is not None]
        return fmean(losses) if losses else math.nan

    def first_and_last(self) -> tuple[float, float]:
        """Return the mean losses of the first and of the last steps; nan without a step."""
        losses = self.curves["loss"]
        few = max(1, min(FEW, len(losses) // 10))
        return (fmean(losses[:few]), fmean(losses[-few:])) if losses else (math.nan, math.nan)

    @property
    def waited_s(self) -> float:
        """Seconds that the training thread has waited, at most `seconds`."""
        return min(self.busy_s["Wait"], self.seconds)

    def left_s(self, job: Job) -> float:
        """Return the seconds until the last step of the job, at the rate of the last steps."""
        return (job.run.steps - self.step) * self.step_s

    def limit(self, job: Job) -> str:
        """Return the resource that limits the last steps."""
        busy: Counter[str] = Counter()
        for line in self.recent:
            busy.update({name: stage["seconds"] for name, stage in line["stages"].items()})
        return limited_by(job, sum(line["seconds"] for line in self.recent), busy)

    @property
    def durable(self) -> int:
        """The last step that certainly survives a crash; -1 for none."""
        if not self.recent:
            return -1
        return max(int(self.last.get("committed", -1)), committed_at(self.last))


def wear_rows(job: Job, run: RunLines, tbw: float | None) -> list[tuple[str, str]]:
    """Return rows that say what the run has written to this host's SSDs, and how long they last.
    `tbw`: the endurance of each, in terabytes. Raises ConfigError if it is not above 0."""
    if job.servers.addresses:
        return [("state", f"on {', '.join(job.servers.addresses)}")]
    if job.parallelism.used:
        return [("state", f"on the ranks, with snapshots in {job.run.dir}")]
    if not job.store.files:
        return [("written", "nothing: the state is in RAM and is lost when the process ends")]
    if tbw is not None and not tbw > 0:
        raise ConfigError(f"--endurance-tbw {tbw:g} is not above 0", hint="--endurance-tbw 600")
    written, devices = sum(run.nbytes[name] for name in WRITES), len(job.store.files)
    rate = written / run.seconds if written else 0.0
    where = show_count(devices, "directory", "directories")
    text = f"{show_bytes(written)} to {where}, {show_rate(rate)} while training"
    out = [("written so far", text)]
    if rate:
        source = "assumed, set --endurance-tbw" if tbw is None else "as specified"
        rated = ASSUMED_TBW if tbw is None else tbw
        used = f"{written / devices / (rated * 1e12):.4%} of {rated:g} TBW per device ({source})"
        lasts = show_seconds(rated * 1e12 * devices / rate)
        out.append(("endurance used", f"{used}, if each directory is its own device"))
        out.append(("endurance lasts", f"{lasts} of training like this"))
    return out


class LineTail:
    """The lines that were added to a file of JSON lines since the last call of `read`.

    `tail`: the bytes at the end of the file that are read at first; 0 for the whole file.
    """

    def __init__(self, path: Path, tail: int = 0) -> None:
        self.path, self._tail = path, tail
        self._at, self._file = 0, -1  # offset of the next line, and inode of the file

    def read(self) -> tuple[bool, list[Line]]:
        """Return (whether the file begins anew, its new lines). Damaged and torn lines are left
        out. A file that does not exist has no lines."""
        try:
            with open(self.path, "rb") as file:
                about = self.path.stat()
                anew = about.st_ino != self._file or about.st_size < self._at
                first = max(0, about.st_size - self._tail) if self._tail else 0
                self._at = file.seek(first if anew else self._at)
                content = file.read()
        except OSError:
            return False, []
        whole = content[: content.rfind(b"\n") + 1]
        self._at, self._file = self._at + len(whole), about.st_ino
        found = (line_of(line) for line in whole.splitlines())
        return anew, [line for line in found if line is not None]

    def rewind(self) -> None:
        """Read the whole file next."""
        self._file = -1
