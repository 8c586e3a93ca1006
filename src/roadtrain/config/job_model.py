"""What is known of a job's model from its config alone: its shape, and whether a plan is for it.
Does NOT build anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadtrain.config.job import Job
from roadtrain.config.machines import PlannedModel
from roadtrain.config.models import KEYS, ModelShape, from_config
from roadtrain.errors import ConfigError

BYTES_VOCABULARY = 256  # of data.tokenizer = "bytes"


def with_vocabulary(job: Job) -> Job:
    """The job with the vocabulary of bytes, where its config gives none."""
    if job.model.pretrained or "vocab_size" in job.model.config:
        return job
    return job.changed({"model.config.vocab_size": BYTES_VOCABULARY})


def shape_of(job: Job) -> ModelShape | None:
    """Where a formula has it; torch is not imported for the others."""
    job = with_vocabulary(job) if job.data.tokenizer == "bytes" else job
    try:
        return from_config(_config_of(job), seq_len=job.data.seq_len)
    except ConfigError:
        return None


def layers_of(job: Job) -> int:
    """0 where its config does not say."""
    config = _config_of(job)
    names = (name for name in KEYS["num_hidden_layers"] if name in config)
    found = config.get(next(names, ""), 0)
    return found if isinstance(found, int) else 0


def check_model(planned: PlannedModel, job: Job) -> None:
    """Raises ConfigError for a plan that is for another model, or other samples, than the job's."""
    shape = shape_of(job)
    params = shape.params if shape else 0
    for what, theirs, ours in (
        ("layers", planned.layers, layers_of(job)),
        ("parameters", planned.parameters, params),
        ("tokens a sample", planned.seq_len, job.data.seq_len),
    ):
        if theirs and ours and theirs != ours:
            raise ConfigError(
                f"the plan is for another model: it has {theirs:,} {what}, the job's has {ours:,}",
                hint="plan anew for this job",
            )


def _config_of(job: Job) -> Mapping[str, Any]:
    """{} where it cannot be read: checks.py says so of the hosts that need it."""
    if not job.model.pretrained:
        return job.model.config
    try:
        read = json.loads(Path(job.model.pretrained, "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
