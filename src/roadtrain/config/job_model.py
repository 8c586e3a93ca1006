"""The shape of a job's model, computed from its config, and the check that a plan is for this
model.

Does not build the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadtrain.config.job import Job
from roadtrain.config.machines import PlannedModel
from roadtrain.config.models import KEYS, ModelShape, from_config, read_config
from roadtrain.errors import ConfigError

BYTES_VOCABULARY = 256  # number of different tokens of the tokenizer "bytes"


def with_vocabulary(job: Job, size: int = BYTES_VOCABULARY) -> Job:
    """Return the job, with a vocabulary of `size` tokens if the model's config has no vocabulary
    size."""
    if job.model.pretrained or {"vocab_size", "text_config"} & job.model.config.keys():
        return job
    return job.changed({"model.config.vocab_size": size})


def shape_of(job: Job) -> ModelShape | None:
    """Compute the shape of the job's model by formula. Returns None if there is no exact formula
    for the model."""
    job = with_vocabulary(job) if job.data.tokenizer == "bytes" else job
    try:
        return from_config(config_of(job), seq_len=job.data.seq_len)
    except ConfigError:
        return None


def layers_of(job: Job) -> int:
    """Return the number of layers in the config of the job's model, or 0 if the config lacks the
    number."""
    config = config_of(job)
    found = next((config[name] for name in KEYS["num_hidden_layers"] if name in config), 0)
    return found if isinstance(found, int) else 0


def check_model(planned: PlannedModel, job: Job) -> None:
    """Raise ConfigError if a plan was made for a model with a different number of layers,
    parameters or tokens per sample than the job's model."""
    shape = shape_of(job)
    params = shape.params if shape else 0
    for noun, theirs, ours in (
        ("layers", planned.layers, layers_of(job)),
        ("parameters", planned.parameters, params),
        ("tokens per sample", planned.seq_len, job.data.seq_len),
    ):
        if theirs and ours and theirs != ours:
            raise ConfigError(
                f"the plan is for a model with {theirs:,} {noun}, but the job's model has {ours:,}",
                hint="make a plan for this job with `roadtrain plan`",
            )


def replaced(value: Any, old: Any, new: Any) -> Any:
    """Return a value of JSON with `new` in place of each value that equals `old`."""
    if isinstance(value, Mapping):
        return {key: replaced(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [replaced(inner, old, new) for inner in value]
    return new if value == old else value


def config_of(job: Job) -> dict[str, Any]:
    """Return the model's config, in which the job's "null" is None; {} if it cannot be read."""
    if not job.model.pretrained:
        return dict(replaced(job.model.config, "null", None))
    try:
        return read_config(Path(job.model.pretrained, "config.json"))
    except ConfigError:
        return {}
