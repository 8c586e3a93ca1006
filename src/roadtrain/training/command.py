"""`roadtrain train`: train a job, or this process's stage of a job with [parallelism].

An invalid job is refused before torch is imported, which takes long.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadtrain.config.job import Job, check_own, load_job
from roadtrain.stages.job_parallelism import ParallelismSection


def command(path: str, overrides: Mapping[str, Any], new_store: bool = False) -> int:
    """Train a job. Repeating the command resumes at the last committed step.

    Raises RoadtrainError.

    Args:
        new_store: accept a store that belongs to another run or is at an earlier step than this
            run; if the store of this run is missing, make a new store
    """
    job = load_job(path, {**overrides, "run.new_store": True} if new_store else overrides)
    check_own(path, job)
    job.parallelism.check_known()
    staged_job = importlib.import_module("roadtrain.training.staged_job")  # imports torch
    job = staged_job.as_stages(job)
    if (idle := idle_keys(job)) and os.environ.get("RANK", "0") == "0":
        needs = "dp, tp, pp, widths, placements or reducers"
        print(f"parallelism: {', '.join(idle)} without {needs}: no effect")
    train = importlib.import_module("roadtrain.training.train").train
    called = Path(sys.argv[0])
    program = "python -m roadtrain" if called.name == "__main__.py" else shlex.quote(str(called))
    summary = train(job, program=program)
    return 130 if summary.stopped == "interrupted" else 0


def idle_keys(job: Job) -> list[str]:
    """Return the keys of [parallelism] that have no effect because the job has no stages."""
    section, default = job.parallelism, ParallelismSection()
    names = [] if section.used else [*ParallelismSection.model_fields]
    return [name for name in names if getattr(section, name) != getattr(default, name)]
