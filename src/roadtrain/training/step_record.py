"""StepRecord: what a training step gives, and the line of metrics.jsonl that is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roadtrain.config.job import Job
from roadtrain.training.predicted import promised

Line = dict[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """One step, as one process trained it. `grad_norm`: before clipping, NaN where it is not known.
    `stages`: name -> (seconds, bytes). `at`: pipeline stage and replica. `more`: keys that only
    some jobs have. `resident`: bytes that roadtrain's buffers held."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    stages: Mapping[str, tuple[float, int]]
    at: tuple[int, int]
    more: Line = field(default_factory=dict)
    resident: int = 0

    def line(self, job: Job, step: int, seconds: float) -> Line:
        """The line of `step`, counted from 1."""
        line: Line = {
            "step": step,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "grad_norm": self.grad_norm if math.isfinite(self.grad_norm) else None,
            "lr": self.lr,
            "tokens": self.tokens,
            "seconds": round(seconds, 6),
            "stages": {
                name: {"seconds": round(busy, 6), "bytes": nbytes}
                for name, (busy, nbytes) in self.stages.items()
            },
        }
        line |= self.more | promised(job, *self.at)
        return line | ({"lossy": job.lossy} if job.lossy else {})
