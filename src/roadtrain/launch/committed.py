"""`python -m roadtrain.launch.committed`: the last step of a run that is known to be committed, on
the host of worker 0, which writes its metrics: {"directory": RUN} on standard input, {"step": N} on
standard output, -1 for none. It is asked when something has ended, so it imports little.
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
