"""StepRecord: the results of a training step, which are written to metrics.jsonl as a line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from roadtrain.config.job import Job
from roadtrain.training.predicted import predicted_for

Line = dict[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """The results of a training step in one process.

    Attributes:
        measured: The keys "grad_norm", "stages", "memory" and "committed" of the metrics line, as
            `PlacedOptimizer.metrics` returns them.
        at: The pipeline stage and the replica of this process.
        more: Additional keys of the metrics line, which only some jobs have.
    """

    loss: float
    lr: float
    tokens: int
    measured: Line
    at: tuple[int, int]
    more: Line = field(default_factory=dict)

    def line(self, job: Job, step: int, seconds: float) -> Line:
        """Return the metrics line of `step`, counted from 1."""
        line: Line = {
            "step": step,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "grad_norm": self.measured["grad_norm"],
            "lr": self.lr,
            "tokens": self.tokens,
            "seconds": round(seconds, 6),
            **{key: self.measured[key] for key in ("stages", "memory", "committed")},
        }
        line |= self.more | predicted_for(job, *self.at)
        return line | ({"lossy": job.lossy} if job.lossy else {})
