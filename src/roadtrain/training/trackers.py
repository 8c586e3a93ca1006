"""Trackers: log the steps of a run to tensorboard, wandb, trackio and mlflow.

A thread per tracker calls its library, so a slow tracker never delays a step, and a tracker that
fails prints one line while training goes on. `trackers/NAME.json` in the run directory names the
tracker's run and its last step, so that a resumed run continues there. The step is recorded before
it is logged, so that none appears twice. Steps that a library loses in a kill are logged again from
metrics.jsonl.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from roadtrain.errors import ConfigError
from roadtrain.options.names import unknown_name
from roadtrain.servers.trace import flat_numbers
from roadtrain.storage.direct import make_directory
from roadtrain.training.tracker_libraries import LIBRARIES, OpenRun, TrackedRun

CONSTANT = ("step", "lossy", "predicted")  # keys of a line that do not change, or are the x axis
MOST_LINES = 10_000  # a tracker that is so many lines behind is given up
CLOSE_S = 15.0
Line = Mapping[str, Any]


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
        self._report = report

    def log(self, line: Line) -> None:
        """Log the numbers of a step. Returns at once.

        Args:
            line: A dict with "step", such as `{"loss": loss, **optimizer.metrics()}`. Tensors must
                have a single element; texts are ignored.
        """
        line = {k: v.item() if hasattr(v, "item") else v for k, v in line.items()}
        lossy = line.get("lossy", {})
        for thread in self._threads:
            thread.config |= {"lossy": lossy} if lossy else {}
            thread.put(partial(iter, [line]), line["step"] - 1, exact=False)

    def follow(self, lines: Path, committed: int) -> None:
        """Log the lines of metrics.jsonl up to the step `committed`, except those that were logged.
        If a tracker has later steps, it gets a new run."""
        for thread in self._threads:
            thread.put(partial(thread.lines_of, lines, committed), committed, exact=True)

    def close(self) -> None:
        """Wait until all steps are logged, for at most 15 seconds. Safe to call twice."""
        for thread in self._threads:
            thread.put(None)
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
    """A thread that logs to one tracker, from the first line on."""

    def __init__(
        self, name: str, directory: Path, config: Line, report: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._library, self._directory, self._report = name, directory, report
        self.config = dict(config)  # read when the first line arrives
        # functions that return lines, with the step that training has certainly done; None: the end
        self._queue: queue.Queue[tuple[Any, int, bool] | None] = queue.Queue(MOST_LINES)
        self._path = directory / "trackers" / f"{name}.json"
        self._run, self._last = uuid.uuid4().hex[:12], 0
        self._is_behind = False  # whether a line was left out
        self._offset = 0  # in the file that `lines_of` follows
        self._open: OpenRun | None = None

    def put(self, lines: Any, done: int = 0, *, exact: bool = False) -> None:
        """Queue a function that returns lines. `exact`: whether the run has no step after
        `done`."""
        if self.ident is None and lines is not None:
            self.start()
        try:
            self._queue.put_nowait(None if lines is None else (lines, done, exact))
        except queue.Full:  # also after a failure, when nothing empties the queue
            # lines of a file can be read later
            if self.is_alive() and not exact and not self._is_behind:
                self._is_behind = True
                self._report(f"{self.name}: {MOST_LINES} steps behind, so steps are left out")

    def run(self) -> None:
        try:
            self._load()
            while (item := self._queue.get()) is not None:
                self._log(*item)
            if self._open is not None:
                self._open.close()
        except BaseException as error:  # whatever a library raises, training goes on
            text = str(error).strip().partition("\n")[0]
            self._report(
                f"{self.name}: failed after step {self._last} and is off until the next start:"
                f" {type(error).__name__}: {text}"
            )

    def _load(self) -> None:
        make_directory(self._path.parent)
        if self._path.exists():
            state = json.loads(self._path.read_text())
            self._run, self._last = state["run"], state["step"]

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"run": self._run, "step": self._last}))
        new.replace(self._path)

    def _log(self, lines: Callable[[], Iterator[Line]], done: int, exact: bool) -> None:
        if self._open is None and self._last > done and (exact or not done):
            self._run, self._last = uuid.uuid4().hex[:12], 0
        if self._open is None:
            self._save()  # a library may create its run long before it logs a step
            self._open = self._opened()
        for line in lines():
            if line["step"] <= self._last:
                continue
            self._last = line["step"]
            self._save()
            numbers = flat_numbers({k: v for k, v in line.items() if k not in CONSTANT})
            if line.get("seconds") and "tokens" in line:
                numbers["tokens_per_s"] = line["tokens"] / line["seconds"]
            self._open.log(self._last, numbers)

    def _opened(self) -> OpenRun:
        run = TrackedRun(self._directory, self._run, self._last, self.config)
        opened = LIBRARIES[self._library][0](run)
        if opened.last is not None:
            self._last = min(self._last, opened.last)
        self._report(f"{self.name}: {opened.where}")
        return opened

    def lines_of(self, path: Path, committed: int) -> Iterator[Line]:
        """Yield the next lines of metrics.jsonl up to the step `committed`."""
        with open(path, "rb") as file:
            file.seek(self._offset)
            for raw in file:
                # a line without an end is still being written
                if not raw.endswith(b"\n") or (line := json.loads(raw))["step"] > committed:
                    return
                self._offset += len(raw)
                yield line
