"""What a job says of the plans that are tried for it: its model, the samples of a step, and what
each plan is when it trains this job.

A plan keeps what the job states: dtype, clipping, compression, delay, degrees of [parallelism]; one
that cannot is refused with the reason. Streamed blocks are computed again in backward, as
streaming/stream.py does. Does NOT search, and does NOT import torch by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roadtrain.chunks import ITEMSIZE
from roadtrain.config.cluster import Cluster
from roadtrain.config.job import CompressSection, Job
from roadtrain.config.models import ModelShape
from roadtrain.config.plan import Plan
from roadtrain.errors import ConfigError
from roadtrain.planner.machines_of import IN_STAGES, machines_of, why_not_run
from roadtrain.planner.simulate import load_model

# bytes of what an update keeps of a parameter, besides the parameter
MOMENTS = {"adamw": 8, "adam": 8, "lion": 4, "adagrad": 4, "rmsprop": 4, "sgd": 0}
BYTES_VOCABULARY = 256  # of data.tokenizer = "bytes"
DEGREES = ("dp", "tp", "pp", "widths", "stages", "virtual_stages")


def shape_of_job(job: Job) -> ModelShape:
    """Raises ConfigError where its config does not size the model."""
    length, config = job.data.seq_len, job.model.config
    build = importlib.import_module("roadtrain.training.build")  # torch
    if job.model.pretrained:
        build.build_config(job)
        return load_model(job.model.pretrained, length)
    if "vocab_size" not in config:
        if job.data.tokenizer != "bytes":
            raise ConfigError(
                "the job's model has no vocab_size", hint="give model.config.vocab_size"
            )
        job = job.changed({"model.config.vocab_size": BYTES_VOCABULARY})
    built = build.build_config(job)
    counted: ModelShape = importlib.import_module("roadtrain.planner.model_config").shape_of_config(
        built.to_dict(), seq_len=length, name=str(config["model_type"])
    )
    return counted


@dataclass(frozen=True)
class JobPlans:
    """Plans of a job on a cluster."""

    job: Job
    cluster: Cluster
    # (placement, devices) -> why it cannot be run; "" where it can
    machines: dict[Any, str] = field(default_factory=dict)

    def fitted(self, plan: Plan) -> Plan | str:
        """The plan as it is when it trains this job; else why it cannot."""
        plan = self._as_it_runs(plan)
        return self._refused(plan) or self._unplaced(plan) or plan

    def _unplaced(self, plan: Plan) -> str:
        if why := why_not_run(plan, self.cluster):
            return why
        key = plan.placement.name, plan.parallelism.devices
        if key not in self.machines:
            self.machines[key] = _said(lambda: machines_of(plan, self.cluster))
        return self.machines[key]

    def _refused(self, plan: Plan) -> str:
        """What the job says that this placement cannot do."""
        job, asked, name = self.job, self.job.parallelism, plan.placement.name
        for degree in DEGREES if asked.used else ():
            stated = getattr(asked, degree)
            planned = getattr(plan.parallelism, degree)
            planned = list(planned) if isinstance(planned, tuple) else planned
            numbers = degree in asked.model_fields_set and isinstance(stated, list | int)
            if numbers and stated not in ([], planned):
                return f"the job says parallelism.{degree} = {stated}"
        if job.optimizer.delay == "none":
            return 'optimizer.delay = "none" has no step to be simulated'
        if name not in IN_STAGES:
            return "the job has [parallelism]" if asked.used else ""
        for key, given in (
            ("compress", job.compress != CompressSection()),
            ("optimizer.delay", job.optimizer.delay),
            ("budget", job.budget.host or job.budget.device),
            ("model.dtype = fp16", job.model.dtype == "fp16"),
        ):
            if given:
                return f"the job has {key}, which does not go with [parallelism]"
        return ""

    def _as_it_runs(self, plan: Plan) -> Plan:
        job, place = self.job, plan.placement
        width = ITEMSIZE[job.model.dtype]
        late = job.optimizer.delay if isinstance(job.optimizer.delay, int) else 0
        state = MOMENTS.get(job.optimizer.name, 8) + 4 * bool(job.optimizer.momentum)
        state += 4 if width < 4 or late or plan.staleness else 0  # a copy that is updated
        changes: dict[str, Any] = {"parameter_bytes": width, "activation_bytes": width}
        if place.name in IN_STAGES:
            changes |= {"gradient_bytes": 4}  # gradients of stages are summed in fp32
            changes["activation_bytes"] = 2 if job.parallelism.activations else width
        else:
            sent = 2 if job.compress.downcast else width
            changes |= {"gradient_bytes": sent, "held_bytes": width, "upstream_bytes": width}
            changes |= {"activation_checkpointing": True, "keep": job.compress.keep}
            changes["staleness"] = late or plan.staleness
            scaled = job.optimizer.clip_norm is not None or job.model.dtype == "fp16"
            changes["update_at"] = "step" if scaled else "gradient"
        # a record on files has the parameters too
        changes["state_bytes"] = state + (width if place.name == "files" else 0)
        devices = [host.device for host in self.cluster.workers if host.device is not None]
        if all(device.kind == "cpu" for device in devices):
            changes["context_bytes"] = 0
        return plan.changed(**changes)


def _said(make: Callable[[], object]) -> str:
    try:
        make()
    except ConfigError as error:
        return str(error).partition("\n")[0]
    return ""
