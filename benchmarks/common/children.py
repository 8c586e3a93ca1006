"""Run a measurement in child processes, read the memory of a process, and start servers on this
host.

Does NOT import torch, so that the memory of the parent process stays small.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roadtrain.errors import FullError, RoadtrainError
from roadtrain.units import show_bytes


def run_child(function: Callable[..., Any], /, *, echo: bool = False, **arguments: Any) -> Any:
    """Call a function in a process of its own, and return its result, which must fit into JSON.

    Args:
        function: function of a module
        echo: show the child's output instead of capturing it
        arguments: arguments of the function; paths arrive as strings

    Raises:
        RoadtrainError: the child failed; the message ends with the child's last output
    """
    return run_children(function, [{}], echo=echo, **arguments)[0]


def run_children(
    function: Callable[..., Any],
    /,
    envs: Sequence[Mapping[str, str]],
    *,
    echo: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Call a function in one process for each entry of `envs`, all at the same time, and return
    their results. If a process fails, the others are killed.

    Args:
        function: function of a module
        envs: environment variables of each process, in addition to those of this process
        echo: show the output of the processes instead of capturing it
        arguments: arguments of the function; paths arrive as strings

    Raises:
        RoadtrainError: a process failed; the message ends with the last output of the process
    """
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        outs = [Path(name) / f"result{i}.json" for i in range(len(envs))]
        logs = [Path(name) / f"log{i}" for i in range(len(envs))]
        call = [function.__module__, function.__name__, json.dumps(arguments, default=str)]
        command = [sys.executable, "-m", __name__, *call]
        running = []
        try:
            for out, log, env in zip(outs, logs, envs):
                with log.open("w") as words:
                    running.append(
                        subprocess.Popen(
                            [*command, str(out)],
                            stdout=None if echo else words,
                            stderr=None if echo else subprocess.STDOUT,
                            env={**os.environ, **env},
                        )
                    )
            while any(process.poll() is None for process in running) and not any(
                p.returncode for p in running
            ):
                time.sleep(0.01)
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
        # includes the killed processes; the first in the list tells the cause
        bad = [i for i, p in enumerate(running) if p.returncode]
        if bad:
            output = "\n".join(logs[i].read_text()[-2000:] for i in bad)
            raise RoadtrainError(
                f"{' '.join(command[2:])} ended with exit code {running[bad[0]].returncode}: "
                f"{output}"
            )
        return [json.loads(out.read_text()) for out in outs]


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes, with shared and mapped pages."""
    return _memory("VmHWM")


def resident_bytes() -> int:
    """Return the present resident memory of this process in bytes."""
    return _memory("VmRSS")


def _memory(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Reset the peak, so that a later `peak_bytes` returns the peak since this call."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def serving(directory: Path, budget: str, count: int) -> Iterator[list[str]]:
    """Run `count` server processes on this host during the `with` block, and yield their addresses.

    Each server has the memory budget `budget` and a store of its own below `directory`.
    """
    processes = []
    try:
        logs = [directory / f"server{i}.log" for i in range(count)]
        for i, log in enumerate(logs):
            with log.open("w") as words:
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-m",
                            "roadtrain.cli",
                            "serve",
                            "127.0.0.1:0",
                            "--store",
                            str(directory / f"store{i}"),
                            "--budget",
                            budget,
                        ],
                        stdout=words,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield [_address(process, log) for process, log in zip(processes, logs)]
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _address(process: subprocess.Popen[Any], log: Path) -> str:
    """Wait until a server prints the HOST:PORT on which it listens, and return it."""
    while not (found := re.search(r" at (\S+:\d+), at most", log.read_text())):
        if process.poll() is not None:
            raise RoadtrainError(
                f"a server ended with exit code {process.returncode}: {log.read_text()[-2000:]}"
            )
        time.sleep(0.05)
    return found[1]


def need_disk(directory: Path, nbytes: int) -> None:
    """Raise FullError if `directory` has fewer than `nbytes` bytes of free space."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise FullError(
            f"the disk of {directory} has {show_bytes(free)} free, but the benchmark needs "
            f"{show_bytes(nbytes)}",
            hint="start the benchmark from a directory on a larger disk",
        )


def main() -> None:
    module, function, arguments, out = sys.argv[1:]
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
