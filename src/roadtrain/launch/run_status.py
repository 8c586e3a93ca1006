"""`python -m roadtrain.launch.run_status`: how far a run is, said on the host of worker 0, which
writes its metrics. A request {"directory": RUN, "table": true} on standard input, the answer
{"step": N, "code": 0, "lines": [...]} on standard output. Does NOT import torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from roadtrain.errors import RoadtrainError
from roadtrain.training import status
from roadtrain.training.metrics import committed_by


def run_status(directory: str, table: bool) -> dict[str, Any]:
    """step: the last that is known to be committed, -1 for none. lines: of `roadtrain status`."""
    lines: list[str] = []
    code = 0
    if table and Path(directory, "job.toml").is_file():
        try:
            code = status.command(directory, report=lines.append)
        except RoadtrainError as error:
            code, lines = 1, [str(error)]
    return {
        "step": committed_by(Path(directory) / "metrics.jsonl") or -1,
        "code": code,
        "lines": lines,
    }


if __name__ == "__main__":
    json.dump(run_status(**json.load(sys.stdin)), sys.stdout)
