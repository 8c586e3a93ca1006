"""A measurement in a process of its own: its result, and the most memory it had resident. Does NOT import torch: the
process that waits counts too where all processes are asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadtrain.errors import FullError, RoadtrainError
from roadtrain.units import show_bytes


def apart(module: str, *args: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `python -m module ARGS --json FILE` wrote to FILE, run with `env` beside our own environment. Raises
    RoadtrainError with its last words."""
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        out = Path(name) / "result.json"
        command = [sys.executable, "-m", module, *map(str, args), "--json", str(out)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                              env={**os.environ, **(env or {})})
        if done.returncode:
            raise RoadtrainError(f"{' '.join(command[2:])} ended with {done.returncode}: {done.stdout[-2000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def peak_bytes() -> int:
    """The most memory this process ever had resident, shared and mapped pages included (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def need_disk(directory: Path, nbytes: int) -> None:
    """Raises FullError before anything is written where `nbytes` would not fit."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise FullError(f"{directory} has {show_bytes(free)} free, this needs {show_bytes(nbytes)}",
                        hint="run it from a directory on a larger disk")
