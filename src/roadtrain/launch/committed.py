"""`python -m roadtrain.launch.committed`: report the last committed step of a run, from the metrics
on the host of worker 0: {"directory": RUN} on stdin, {"step": N} on stdout, -1 for none. It runs
whenever a process of the run has ended, so it imports little.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from roadtrain.training.metrics import committed_by


def committed_step(directory: str) -> int:
    return committed_by(Path(directory) / "metrics.jsonl") or -1


if __name__ == "__main__":
    json.dump({"step": committed_step(**json.load(sys.stdin))}, sys.stdout)
