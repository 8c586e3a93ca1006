"""`python -m roadtrain.launch.host_status`: report the status of a launched run, on a host with
workers.

Reads {"directory": RUN, "first": true} from stdin, and writes {"step": N, "code": 0, "lines":
[...], "stages": [TABLE, ...]} to stdout (see `run_status`). Does NOT import torch.
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
    """Collect the status of a run from its directory.

    Args:
        directory: The run's directory.
        first: True on worker 0's host, which also reports on the whole run and on its servers.

    Returns:
        A dictionary. `step` is the last committed step, or -1. `code` is 0 if nothing is wrong,
        else 1. `lines` describes the run; it is empty before the run has started, or if `first` is
        False. `stages` has a table of predicted and measured times for each pipeline stage with
        metrics on this host.
    """
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
