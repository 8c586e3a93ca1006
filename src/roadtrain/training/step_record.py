"""StepRecord: the results of a training step, which are written to metrics.jsonl as a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roadtrain.config.job import Job
from roadtrain.training.predicted import predicted_for

Line = dict[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """The results of a training step in one process.

    Attributes:
        grad_norm: The gradient norm before clipping; nan if it is unknown.
        stages: Maps the names of stages (Forward, Wait, ...) to seconds and bytes.
        at: The pipeline stage and the replica of this process.
        more: Additional keys of the metrics line, which only some jobs have.
        resident: The bytes of roadtrain's buffers after the step.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    stages: Mapping[str, tuple[float, int]]
    at: tuple[int, int]
    more: Line = field(default_factory=dict)
    resident: int = 0

    def line(self, job: Job, step: int, seconds: float) -> Line:
        """Return the metrics line of `step`, counted from 1."""
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
        line |= self.more | predicted_for(job, *self.at)
        return line | ({"lossy": job.lossy} if job.lossy else {})
