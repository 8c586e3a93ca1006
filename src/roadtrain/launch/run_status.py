"""`python -m roadtrain.launch.run_status`: `roadtrain status` of a run directory, on the host of
worker 0: {"directory": RUN} on standard input, {"step": N, "code": 0, "lines": [...]} on standard
output. Does NOT import torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from roadtrain.errors import RoadtrainError
from roadtrain.launch.committed import committed_step
from roadtrain.training import status


def run_status(directory: str) -> dict[str, Any]:
    """step: the last that is known to be committed, -1 for none. A run that has not begun has no
    lines."""
    lines: list[str] = []
    code = 0
    if Path(directory, "job.toml").is_file():
        try:
            code = status.command(directory, report=lines.append)
        except RoadtrainError as error:
            code, lines = 1, [str(error)]
    return {"step": committed_step(directory), "code": code, "lines": lines}


if __name__ == "__main__":
    json.dump(run_status(**json.load(sys.stdin)), sys.stdout)
