"""The directory of a long run on many hosts, written without training."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from msgspec.json import encode

from roadtrain.servers.trace import Interval
from roadtrain.training.timeline import TimelineLine


def write_large_run(directory: Path, job: str, steps: int, hosts: int, step_s: float = 0.5) -> None:
    """`job`: the text of job.toml."""
    directory.mkdir()
    (directory / "job.toml").write_text(job)
    gib, now = 1 << 30, time.time()
    for rank in range(hosts):
        lines = []
        for step in range(1, steps + 1) if rank == 0 else range(steps - 20, steps + 1):
            lines.append(
                {
                    "step": step,
                    "loss": 2 + 8 / math.sqrt(step) + 0.1 * math.sin(step * 12.9898),
                    "grad_norm": 1 + 0.3 * math.cos(step * 78.233),
                    "lr": 1e-3 * min(1, step / 100),
                    "tokens": 4096 * hosts,
                    "seconds": step_s,
                    "stages": {
                        name: {"seconds": 0.1, "bytes": gib // 100}
                        for name in ("Forward", "Backward", "Wait", "Push", "Read", "Write")
                    },
                    "memory": {
                        "host": {"bytes": 3 * gib, "budget": 4 * gib},
                        "process": {"bytes": 5 * gib + rank, "budget": None},
                        "disk": {"bytes": 90 * gib, "budget": 100 * gib},
                    },
                    "committed": step - 1,
                }
            )
        name = f"{rank}.jsonl" if rank else "jsonl"
        (directory / f"metrics.{name}").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        with open(directory / f"timeline.{name}", "wb") as file:
            for step in range(steps - 10, steps + 1):
                begin = now - (steps - step + 1) * step_s
                intervals = [
                    Interval(
                        stage, lane, begin + i * step_s / 40, begin + (i + 1) * step_s / 40, 1 << 20
                    )
                    for stage, lane in (
                        ("Forward", f"cuda:0 of worker {rank}"),
                        ("Wait", f"worker {rank}"),
                        ("Write", f"disk of server {rank} (/mnt/ssd/run)"),
                    )
                    for i in range(0, 40, 2)
                ]
                file.write(encode(TimelineLine(step, intervals)) + b"\n")
