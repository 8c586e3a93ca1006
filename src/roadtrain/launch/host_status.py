"""`python -m roadtrain.launch.host_status`: what `roadtrain status` says of a launched run, on a
host with workers: {"directory": RUN, "first": true} on standard input, {"step": N, "code": 0,
"lines": [...], "stages": [TABLE, ...]} on standard output. Does NOT import torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from roadtrain.errors import RoadtrainError
from roadtrain.launch.committed import committed_step
from roadtrain.training import status
from roadtrain.training.predicted import compared


def run_status(directory: str, first: bool) -> dict[str, Any]:
    """first: this is worker 0's host, which knows what the others do not: lines of the run and its
    servers. stages: predicted beside measured, of ranks of this directory. step: the last that is
    known to be committed, -1 for none. A run that has not begun has no lines."""
    lines: list[str] = []
    code = 0
    if first and Path(directory, "job.toml").is_file():
        try:
            code = status.report_run(directory, report=lines.append)
        except RoadtrainError as error:
            code, lines = 1, [str(error)]
    stages = compared(Path(directory))
    return {"step": committed_step(directory), "code": code, "lines": lines, "stages": stages}


if __name__ == "__main__":
    json.dump(run_status(**json.load(sys.stdin)), sys.stdout)
