"""The options of place() and parallelize() that a job stands for, and checks for keys that
contradict each other.

A field with the same name in a section and in the options is copied automatically.
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

# (true if the keys are in conflict, the error message, the hint)
Conflict = tuple[object, str, str]
SECRETS = ("token_file", "ca", "cert", "key")  # files that may exist only on the job's hosts
RETRY_S = 120.0  # seconds to retry a connection, because servers may still be starting


def check(job: Job) -> None:
    """Raise ConfigError for keys of a job that contradict each other."""
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
            "relay, give_up, replicas, buffering or switches are set, but there are no servers",
            "name the servers in servers.addresses",
        ),
        (
            servers.addresses and (store.rates is not None or store.moved_from),
            "store.rates or store.moved_from are set together with servers",
            "keep the state either here (store.files) or on servers (servers.addresses)",
        ),
        (
            compress.keep is not None and compress.downcast is not None,
            f"compress.keep = {compress.keep} and compress.downcast = {compress.downcast!r}",
            "kept gradient values are sent in full: leave one of the two out",
        ),
        (
            compress.error_feedback and compress.keep is None,
            "compress.error_feedback is set without compress.keep",
            "set keep, or leave error_feedback out",
        ),
    )


def _staged_conflicts(job: Job) -> Iterator[Conflict]:
    for key, found, hint in (
        ("compress", job.compress != CompressSection(), "use parallelism.activations"),
        ("optimizer.delay", job.optimizer.delay, "leave it out"),
        ("budget.host", job.budget.host, "use run.memory_limit, which limits each process"),
        ("budget.device", job.budget.device, "use more stages, or a placement for a stage"),
        ("servers.addresses", job.servers.addresses, "use parallelism.placements for each stage"),
        ("model.dtype = fp16", job.model.dtype == "fp16", "use bf16, which needs no loss scaling"),
        ("model.compile", job.model.compile, "leave it out"),
    ):
        yield found, f"{key} and [parallelism] do not go together yet", hint


def placed_options(job: Job, *, moves: bool) -> dict[str, Any]:
    """Return the options of place() that are fields of a Request.

    `moves`: whether store.moved_from applies. Raises ConfigError.
    """
    check(job)
    return {
        "store": _store_of(job, moves),
        "compress": _compression_of(job),
        "delay": _delay_of(job),
        "host_budget": job.budget.host,
        "device_budget": job.budget.device,
        "backwards_per_step": _promise(job),
        "chunk_elements": job.store.chunk_elements,
        "compile": job.model.compile,
    }


def _store_of(job: Job, moves: bool) -> Store:
    own = job.store
    if job.servers.addresses:
        return servers_of(job)
    if not own.files:
        return Memory()
    return Files(own.files, own.rates, own.direct, own.moved_from if moves else ())


def servers_of(job: Job) -> Servers:
    """Return the job's [servers] section as Servers. Raises ConfigError."""
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
    """Return the number of backward passes per step, or None if gradients are clipped or scaled
    after the last one."""
    scaled = job.optimizer.clip_norm is not None or job.model.dtype == "fp16"
    return None if scaled else job.optimizer.accumulate


def stage_options(job: Job, processes: int, shared: str = "") -> ParallelOptions:
    """Return the options of parallelize(), which compares the text `shared` between all processes.

    Raises ConfigError.
    """
    check(job)
    section = job.parallelism
    degrees = section.degrees(processes)
    options = _same_named(section, ParallelOptions) | {
        "num_microbatches": section.num_microbatches
        or job.optimizer.accumulate * max(degrees.replicas_of),
        "stages": "even" if isinstance(section.stages, list) else section.stages,
        "activations": None if section.activations is None else DTYPES[section.activations],
    }
    return ParallelOptions(
        degrees,
        **options,
        stores={placed.stage: _stage_store(placed, job) for placed in section.placements},
        data_groups=section.data_groups,
        blocks=job.model.blocks,
        dtype=DTYPES[job.model.dtype],
        weights=job.model.pretrained,
        seed=job.run.seed,
        deadline_s=section.deadline,
        job=shared,
    )


def _stage_store(placement: StagePlacement, job: Job) -> Store:
    if placement.servers:
        token = token_of(placement.token_file)
        return Servers(placement.servers, token=token, retry_s=RETRY_S)
    if placement.files:
        return Files([path.replace("{run}", job.run.dir) for path in placement.files])
    return Memory()


def _same_named(section: Section, kind: type) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in section if name in names}


def check_job(job: Job, workers: Sequence[int]) -> None:
    """Raise ConfigError if `train` would refuse the job's options. Does not read files of text,
    tokens and certificates, which may be missing on this host. `workers`: the number of workers on
    each host, in the order of ranks."""
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
    """Return the reason why `degree` tensor-parallel ranks cannot split a model, or "" if they can.
    `model` is the job's [model] section as JSON, with a vocabulary size."""
    job = make_job({"model": json.loads(model)})
    try:
        family_plan(build_model(job, "meta"), degree)
    except RoadtrainError as error:
        return str(error).partition("\n")[0]
    return ""
