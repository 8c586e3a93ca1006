"""A measurement in a process of its own, or in several: what they found, and the most memory they
had resident; servers beside them. Does NOT import torch: the process that waits counts too where
all processes are asked for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roadtrain.errors import FullError, RoadtrainError
from roadtrain.units import show_bytes


def apart(
    module: str, *args: object, env: Mapping[str, str] | None = None, echo: bool = False
) -> dict[str, Any]:
    """What `python -m module ARGS --json FILE` wrote to FILE, run with `env` beside our own
    environment. `echo`: what it prints appears, instead of being kept. Raises RoadtrainError
    with its last words."""
    return together(module, args, [env or {}], echo=echo)[0]


def together(
    module: str, args: Sequence[object], envs: Sequence[Mapping[str, str]], echo: bool = False
) -> list[dict[str, Any]]:
    """As `apart`, one process for each of `envs`, at the same time. When one fails the others
    are killed."""
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        outs = [Path(name) / f"result{i}.json" for i in range(len(envs))]
        logs = [Path(name) / f"log{i}" for i in range(len(envs))]
        command = [sys.executable, "-m", module, *map(str, args)]
        running = []
        try:
            for out, log, env in zip(outs, logs, envs):
                with log.open("w") as words:
                    running.append(
                        subprocess.Popen(
                            [*command, "--json", str(out)],
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
        # those that were killed, too: the first one says why
        bad = [i for i, p in enumerate(running) if p.returncode]
        if bad:
            said = "\n".join(logs[i].read_text()[-2000:] for i in bad)
            raise RoadtrainError(
                f"{' '.join(command[2:])} ended with {running[bad[0]].returncode}: {said}"
            )
        return [json.loads(out.read_text()) for out in outs]


def peak_bytes() -> int:
    """The most memory this process ever had resident, shared and mapped pages included (VmHWM)."""
    return _memory("VmHWM")


def resident_bytes() -> int:
    """What this process has resident now (VmRSS)."""
    return _memory("VmRSS")


def _memory(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """From now on `peak_bytes` is the most since now."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def serving(directory: Path, budget: str, count: int) -> Iterator[list[str]]:
    """The addresses of `count` servers on this host, each a process with a store below
    `directory`; ended after."""
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
    """HOST:PORT out of the line that a server prints when it listens."""
    while not (said := re.search(r" at (\S+:\d+), at most", log.read_text())):
        if process.poll() is not None:
            raise RoadtrainError(
                f"a server ended with {process.returncode}: {log.read_text()[-2000:]}"
            )
        time.sleep(0.05)
    return said[1]


def need_disk(directory: Path, nbytes: int) -> None:
    """Raises FullError before anything is written where `nbytes` would not fit."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise FullError(
            f"{directory} has {show_bytes(free)} free, this needs {show_bytes(nbytes)}",
            hint="run it from a directory on a larger disk",
        )
