"""The shape of a job's model, read from its config alone, and whether it is the model of a plan.

Does not build the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadtrain.config.job import Job
from roadtrain.config.machines import PlannedModel
from roadtrain.config.models import KEYS, ModelShape, from_config
from roadtrain.errors import ConfigError

BYTES_VOCABULARY = 256  # tokens of the tokenizer "bytes"


def with_vocabulary(job: Job) -> Job:
    """Return the job with the vocabulary size of bytes, if its config gives none."""
    if job.model.pretrained or "vocab_size" in job.model.config:
        return job
    return job.changed({"model.config.vocab_size": BYTES_VOCABULARY})


def shape_of(job: Job) -> ModelShape | None:
    """Return the model's shape by formula; None if no formula is exact, since torch is not
    imported here."""
    job = with_vocabulary(job) if job.data.tokenizer == "bytes" else job
    try:
        return from_config(_config_of(job), seq_len=job.data.seq_len)
    except ConfigError:
        return None


def layers_of(job: Job) -> int:
    """Return the number of layers; 0 if the config does not say."""
    config = _config_of(job)
    names = (name for name in KEYS["num_hidden_layers"] if name in config)
    found = config.get(next(names, ""), 0)
    return found if isinstance(found, int) else 0


def check_model(planned: PlannedModel, job: Job) -> None:
    """Raise ConfigError if the plan is for another model, or other samples, than the job's."""
    shape = shape_of(job)
    params = shape.params if shape else 0
    for noun, theirs, ours in (
        ("layers", planned.layers, layers_of(job)),
        ("parameters", planned.parameters, params),
        ("tokens a sample", planned.seq_len, job.data.seq_len),
    ):
        if theirs and ours and theirs != ours:
            raise ConfigError(
                f"the plan is for another model: it has {theirs:,} {noun}, the job's has {ours:,}",
                hint="make a plan for this job with `roadtrain plan`",
            )


def _config_of(job: Job) -> Mapping[str, Any]:
    """Return the model's config; {} if it cannot be read, which checks.py reports for the hosts
    that need it."""
    if not job.model.pretrained:
        return job.model.config
    try:
        read = json.loads(Path(job.model.pretrained, "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
