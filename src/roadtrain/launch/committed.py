"""`python -m roadtrain.launch.committed`: report the last committed step of a run, on the host of
worker 0. Reads {"directory": RUN} from stdin and writes {"step": N} to stdout; N is -1 if no step
is committed. Imports few modules, because it runs whenever a process ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from roadtrain.training.metrics import committed_by


def committed_step(directory: str) -> int:
    return committed_by(Path(directory) / "metrics.jsonl") or -1


if __name__ == "__main__":
    json.dump({"step": committed_step(**json.load(sys.stdin))}, sys.stdout)
