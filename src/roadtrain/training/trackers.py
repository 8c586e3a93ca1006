"""Trackers: log the steps of a run to tensorboard, wandb, trackio and mlflow.

The steps are lines of a file: metrics.jsonl, or `trackers/steps.jsonl` of a custom loop. A thread
per tracker reads it and calls the library, so a slow tracker never delays a step, and a tracker
that fails prints one line while training goes on. `trackers/NAME.json` in the run directory names
the tracker's run and its last step, so that a resumed run continues there. The step is recorded
before it is logged, so that none appears twice. Steps that a library loses in a kill are logged
again from the file.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from roadtrain.errors import ConfigError
from roadtrain.options.names import unknown_name
from roadtrain.servers.trace import flat_numbers
from roadtrain.storage.direct import make_directory
from roadtrain.training.run_lines import Line, LineTail
from roadtrain.training.tracker_libraries import LIBRARIES, OpenRun, TrackedRun

CONSTANT = ("step", "lossy", "predicted")  # keys of a line that do not change, or are the x axis
CLOSE_S = 60.0


class Trackers:
    """Log steps to trackers, in the background. Only the process with RANK 0 logs.

    A resumed loop continues the trackers' runs, and steps that a tracker has already are ignored. A
    loop that begins again at step 1 gets new runs.

    Args:
        names: Any of "tensorboard", "wandb", "trackio" and "mlflow".
        directory: The run directory. Trackers that keep files put them here, except trackio.
        config: Values to record with the run, such as hyperparameters.
        report: Called with each line that roadtrain prints.

    Raises:
        ConfigError: A tracker is unknown or not installed.
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: str | Path,
        config: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        names = [names] if isinstance(names, str) else names
        check_installed(names)
        ours = names if os.environ.get("RANK", "0") == "0" else ()
        self._threads = [
            _TrackerThread(name, Path(directory), config or {}, report) for name in ours
        ]
        self._steps, self._report = Path(directory, "trackers", "steps.jsonl"), report

    def log(self, line: Mapping[str, Any]) -> None:
        """Log the numbers of a step. Returns at once.

        Args:
            line: A dict with "step", such as `{"loss": loss, **optimizer.metrics()}`. Tensors must
                have a single element; texts are ignored.

        Raises ConfigError for a line without "step".
        """
        if "step" not in line:
            raise ConfigError('the line has no "step"', hint="add **optimizer.metrics()")
        if not self._threads:
            return
        begins = line["step"] == 1
        try:
            make_directory(self._steps.parent)
            with open(self._steps, "wb" if begins else "ab") as file:
                file.write(msgspec.json.encode(line, enc_hook=_plain) + b"\n")
        except OSError as error:
            self._report(f"{self._steps}: no further steps are logged: {error.strerror}")
            self._threads = []
        for thread in self._threads:
            thread.follow(self._steps, line["step"], 0 if begins else math.inf)

    def follow(self, lines: Path, committed: int) -> None:
        """Log the lines of metrics.jsonl up to the step `committed`, except those that were logged.
        If a tracker has later steps, it gets a new run."""
        for thread in self._threads:
            thread.follow(lines, committed, committed)

    def close(self) -> None:
        """Wait until all steps are logged, for at most a minute. Safe to call twice."""
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_S)
            if thread.is_alive():
                self._report(
                    f"{thread.name}: still busy after {CLOSE_S:.0f} s, so steps may be missing"
                )
        self._threads = []

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError if a tracker is unknown or its library is not installed."""
    for name in names:
        if name not in LIBRARIES:
            raise unknown_name("tracker", name, LIBRARIES)
        for module in LIBRARIES[name][1]:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"the tracker {name} needs the module {module}, which is not installed",
                    hint="pip install 'roadtrain[trackers]'",
                )


class _TrackerThread(threading.Thread):
    """A thread that logs to one tracker, from the first call of `follow` on."""

    def __init__(
        self, name: str, directory: Path, config: Mapping[str, Any], report: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._library, self._report = LIBRARIES[name][0], report
        self._path = directory / "trackers" / f"{name}.json"
        self._run = TrackedRun(directory, uuid.uuid4().hex[:12], 0, config)
        self._last, self._committed, self._ends = 0, 0, False
        self._news = threading.Event()
        self._waiting: deque[Line] = deque()  # lines that are not committed
        self._open: OpenRun | None = None

    def follow(self, lines: Path, committed: int, most: float) -> None:
        """Log the lines up to `committed`. `most`: a step that the run cannot have exceeded when
        this is called first."""
        self._committed = committed
        if self.ident is None:
            self._tail, self._most = LineTail(lines), most
            self.start()
        self._news.set()

    def end(self) -> None:
        self._ends = True
        self._news.set()

    def run(self) -> None:
        try:
            make_directory(self._path.parent)
            with suppress(FileNotFoundError):
                state = json.loads(self._path.read_bytes())
                if state["step"] <= self._most:
                    self._last = state["step"]
                    self._run = replace(self._run, id=state["run"], last=self._last)
            ends = False
            while not ends:
                self._news.wait()
                self._news.clear()
                ends = self._ends
                self._log_lines()
            if self._open is not None:
                self._open.close()
        except BaseException as error:  # whatever a library raises, training goes on
            text = str(error).strip().partition("\n")[0]
            self._report(
                f"{self.name}: failed after step {self._last} and is off until the next start:"
                f" {type(error).__name__}: {text}"
            )

    def _log_lines(self) -> None:
        anew, lines = self._tail.read()
        self._waiting = deque(lines) if anew else self._waiting + deque(lines)
        if self._waiting and self._open is None:
            self._open = self._opened(self._waiting[0].get("lossy", {}))
        while self._open and self._waiting and self._waiting[0]["step"] <= self._committed:
            line = self._waiting.popleft()
            if line["step"] > self._last:
                self._record(line["step"])
                numbers = flat_numbers({k: v for k, v in line.items() if k not in CONSTANT})
                if line.get("seconds") and "tokens" in line:
                    numbers["tokens_per_s"] = line["tokens"] / line["seconds"]
                self._open.log(self._last, numbers)

    def _record(self, step: int) -> None:
        self._last, new = step, self._path.with_suffix(".new")
        new.write_text(json.dumps({"run": self._run.id, "step": step}))
        new.replace(self._path)

    def _opened(self, lossy: Mapping[str, Any]) -> OpenRun:
        self._record(self._last)  # a library may create its run long before it logs a step
        config = {**self._run.config, "lossy": lossy} if lossy else self._run.config
        opened = self._library(replace(self._run, config=config))
        if opened.last is not None:
            self._last = min(self._last, opened.last)
        self._report(f"{self.name}: {opened.where}")
        return opened
