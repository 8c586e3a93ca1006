"""check_job(): what `roadtrain train` would refuse of a job, told to who plans it.

The values that `train` makes of a job are made, and check themselves. Assumes that the job names
its servers, or needs none. Does NOT read text, tokens or certificates, and opens nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from roadtrain.config.job import Job, make_job
from roadtrain.environment import WorkerGroup
from roadtrain.errors import RoadtrainError
from roadtrain.placement.session_plan import Request
from roadtrain.stages.tensor_families import family_plan
from roadtrain.training.build import build_model
from roadtrain.training.job_options import placed_options, stage_options
from roadtrain.training.progress import silent

SECRETS = ("token_file", "ca", "cert", "key")  # files that are only where the job is run


def check_job(job: Job, workers: Sequence[int]) -> None:
    """`workers`: of each host, in the order of ranks. Raises ConfigError."""
    if job.parallelism.used:
        stage_options(job, sum(workers))
        return
    job = job.changed({f"servers.{key}": None for key in SECRETS})
    local = workers[0] if len(set(workers)) == 1 else 1
    Request(
        **placed_options(job, moves=True),
        deadline_s=1.0,
        group=WorkerGroup(0, sum(workers), "", local),
        report=silent,
    )


@functools.cache
def why_not_split(model: str, degree: int) -> str:
    """Why a tensor group of `degree` ranks cannot split a model, in one sentence; "" where it can.
    `model`: the job's [model] as JSON, with a vocabulary."""
    job = make_job({"model": json.loads(model)})
    try:
        family_plan(build_model(job, "meta"), degree)
    except RoadtrainError as error:
        return str(error).partition("\n")[0]
    return ""
