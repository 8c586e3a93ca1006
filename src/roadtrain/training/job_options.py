"""A job's sections as options of place() and parallelize(), the table of keys that do not go
together, and what `roadtrain train` would refuse of a job, told to who plans it.

What a section and the value made of it call alike is passed on by name, so an option is declared in
these two and nowhere between. Opens nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from roadtrain.config.job import CompressSection, Job, make_job
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.options.lossy import Delay, Downcast, TopK
from roadtrain.options.schema import Section
from roadtrain.placement.session_plan import Request
from roadtrain.placement.stores import Files, Memory, Servers, Store
from roadtrain.stages.job_parallelism import StagePlacement
from roadtrain.stages.parallel_options import ParallelOptions
from roadtrain.stages.tensor_families import family_plan
from roadtrain.streaming.split import DTYPES
from roadtrain.training.build import build_model
from roadtrain.training.progress import silent
from roadtrain.transport.address import tls_of, token_of

# Whether keys are given that do not go together, which these are, and the way out
Conflict = tuple[object, str, str]
SECRETS = ("token_file", "ca", "cert", "key")  # files that are only where the job is run
RETRY_S = 120.0  # servers are tried again for so long, since they may be starting too


def check(job: Job) -> None:
    """Raises ConfigError for keys of a job that do not go together."""
    conflicts = _staged_conflicts if job.parallelism.used else _placed_conflicts
    for both, what, hint in conflicts(job):
        if both:
            raise ConfigError(what, hint=hint)


def _placed_conflicts(job: Job) -> tuple[Conflict, ...]:
    store, servers, compress = job.store, job.servers, job.compress
    of_servers = servers.relay or servers.give_up or servers.replicas > 1 or servers.switches
    return (
        (
            not servers.addresses and (of_servers or servers.buffering != "auto"),
            "relay, give_up, replicas, buffering or switches, and no servers are given",
            "name them in servers.addresses",
        ),
        (
            servers.addresses and (store.rates is not None or store.moved_from),
            "store.rates or store.moved_from, together with servers",
            "the state rests here (store.files) or there (servers.addresses)",
        ),
        (
            compress.keep is not None and compress.downcast is not None,
            f"compress.keep = {compress.keep} and compress.downcast = {compress.downcast!r}",
            "what is kept of a gradient travels as it is: leave one out",
        ),
        (
            compress.error_feedback and compress.keep is None,
            "compress.error_feedback without compress.keep",
            "give keep, or leave it out",
        ),
    )


def _staged_conflicts(job: Job) -> Iterator[Conflict]:
    for key, given, hint in (
        ("compress", job.compress != CompressSection(), "parallelism.activations"),
        ("optimizer.delay", job.optimizer.delay, "leave it out"),
        ("budget.host", job.budget.host, "run.memory_limit, which holds for each process"),
        ("budget.device", job.budget.device, "more stages, or a placement for a stage"),
        ("servers.addresses", job.servers.addresses, "parallelism.placements, for each stage"),
        ("model.dtype = fp16", job.model.dtype == "fp16", "bf16, which needs no loss scaling"),
    ):
        yield given, f"{key} and [parallelism] do not go together yet", hint


def placed_options(job: Job, *, moves: bool) -> dict[str, Any]:
    """Options of place() that a Request has. `moves`: the store may leave directories that it
    rested in. Raises ConfigError."""
    check(job)
    return {
        "store": _store_of(job, moves),
        "compress": _compression_of(job),
        "delay": _delay_of(job),
        "host_budget": job.budget.host,
        "device_budget": job.budget.device,
        "backwards_per_step": _promise(job),
        "chunk_elements": job.store.chunk_elements,
    }


def _store_of(job: Job, moves: bool) -> Store:
    own = job.store
    if job.servers.addresses:
        return servers_of(job)
    if not own.files:
        return Memory()
    return Files(own.files, own.rates, own.direct, own.moved_from if moves else ())


def servers_of(job: Job) -> Servers:
    """Raises ConfigError."""
    own = job.servers
    residuals = Files(job.run_dir / "residuals", direct=job.store.direct)
    return Servers(
        **_same_named(own, Servers),
        token=own.token_file,
        tls=tls_of(own.cert, own.key, own.ca),
        retry_s=RETRY_S,
        fan_in=own.fan_in,
        residuals=residuals if job.compress.error_feedback else None,
    )


def _compression_of(job: Job) -> TopK | Downcast | None:
    own = job.compress
    if own.keep is not None:
        return TopK(own.keep, own.error_feedback)
    return Downcast(own.downcast) if own.downcast else None


def _delay_of(job: Job) -> Delay | None:
    allowed = job.optimizer.delay
    return Delay(None if allowed == "none" else allowed) if allowed else None


def _promise(job: Job) -> int | None:
    """Backward passes a step, where nothing scales gradients after backward: updates then begin
    in it."""
    scaled = job.optimizer.clip_norm is not None or job.model.dtype == "fp16"
    return None if scaled else job.optimizer.accumulate


def stage_options(job: Job, processes: int, told: str = "") -> ParallelOptions:
    """Options of parallelize(). `told`: what else all processes must have alike. Raises
    ConfigError."""
    check(job)
    asked = job.parallelism
    degrees = asked.degrees(processes)
    given = _same_named(asked, ParallelOptions) | {
        "num_microbatches": asked.num_microbatches
        or job.optimizer.accumulate * max(degrees.replicas_of),
        "stages": "even" if isinstance(asked.stages, list) else asked.stages,
        "activations": None if asked.activations is None else DTYPES[asked.activations],
    }
    return ParallelOptions(
        degrees,
        **given,
        stores={placed.stage: _stage_store(placed, job) for placed in asked.placements},
        data_groups=asked.data_groups,
        blocks=job.model.blocks,
        dtype=DTYPES[job.model.dtype],
        weights=job.model.pretrained,
        seed=job.run.seed,
        deadline_s=asked.deadline,
        job=told,
    )


def _stage_store(placement: StagePlacement, job: Job) -> Store:
    if placement.servers:
        token = token_of(placement.token_file)
        return Servers(placement.servers, token=token, retry_s=RETRY_S)
    if placement.files:
        return Files([path.replace("{run}", job.run.dir) for path in placement.files])
    return Memory()


def _same_named(section: Section, kind: type) -> dict[str, Any]:
    """What a section says of the options that `kind` has by the same names."""
    names = {field.name for field in fields(kind)}
    return {name: given for name, given in section if name in names}


def check_job(job: Job, workers: Sequence[int]) -> None:
    """Make the values that `train` makes of a job, which check themselves. Reads no text, tokens or
    certificates; assumes that the job names its servers, or needs none. `workers`: of each host, in
    the order of ranks. Raises ConfigError."""
    if job.parallelism.used:
        stage_options(job, sum(workers))
        return
    job = job.changed({f"servers.{key}": None for key in SECRETS})
    local = workers[0] if len(set(workers)) == 1 else 1
    Request(
        **placed_options(job, moves=True),
        deadline_s=1.0,
        group=WorkerIdentity(0, sum(workers), "", local),
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
