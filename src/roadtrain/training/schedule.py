"""The learning rate as a function of the step number, so that a resumed run has the same rates as
an uninterrupted run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from roadtrain.config.job import Job


def learning_rate(job: Job, number: int) -> float:
    """Return the learning rate of step `number`, counted from 0. The rate rises during warm-up, and
    then follows the schedule down to a tenth (or stays constant)."""
    o = job.optimizer
    if number < o.warmup_steps:
        return o.lr * (number + 1) / o.warmup_steps
    if o.schedule == "constant":
        return o.lr
    part = min(1.0, (number - o.warmup_steps) / max(1, job.run.steps - o.warmup_steps))
    fall = part if o.schedule == "linear" else (1 - math.cos(math.pi * part)) / 2
    return o.lr * (1 - 0.9 * fall)


def set_learning_rate(groups: Iterable[dict[str, Any]], job: Job, number: int) -> float:
    """Set the learning rate of step `number` in an optimizer's `groups`, and return the rate."""
    lr = learning_rate(job, number)
    for group in groups:
        group["lr"] = lr
    return lr
