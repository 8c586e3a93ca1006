"""job_on(): adapt a job to another number of workers than planned.

All workers together still compute the same number of micro-batches per step, so that the losses
stay the same. Workers that use servers accumulate gradients over more or fewer passes. Pipeline
stages get more or fewer replicas. Arithmetic only. Does NOT know where state is kept or whether the
state fits into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from roadtrain.config.job import Job
from roadtrain.errors import ConfigError
from roadtrain.stages.host_ranks import check_ranks


class WorkerHost(NamedTuple):
    """A host with its number of workers."""

    name: str
    workers: int


def job_on(job: Job, planned: int, hosts: Sequence[WorkerHost]) -> Job:
    """Return a job for `planned` workers adapted to the workers of `hosts`. Raises ConfigError if
    the micro-batches or the stages cannot be divided among the workers of `hosts`."""
    workers = sum(host.workers for host in hosts)
    if job.parallelism.used:
        return _staged(job, planned, workers, hosts)
    if workers == planned:
        return job
    if any(switch.workers for switch in job.servers.switches):
        raise ConfigError(
            f"the tree of {len(job.servers.switches)} switches is set up for {planned} workers, but"
            f" there are {workers}"
        )
    total = job.optimizer.accumulate * planned
    each, rest = divmod(total, workers)
    if rest:
        raise ConfigError(
            f"{total} micro-batches per step cannot be divided among {workers} workers",
            hint=f"choose optimizer.accumulate so that {workers} divides accumulate * {planned}",
        )
    return job.changed({"optimizer.accumulate": each})


def _staged(job: Job, planned: int, workers: int, hosts: Sequence[WorkerHost]) -> Job:
    before = job.parallelism.degrees(planned)
    widths = [width * workers for width in before.replicas_of]
    if any(width % planned or not width for width in widths):
        raise ConfigError(
            f"{workers} workers cannot be divided among the stages of {before}",
            hint=f"use a multiple of {before.pp * before.tp} workers",
        )
    stated = job.parallelism.num_microbatches
    total = stated or job.optimizer.accumulate * max(before.replicas_of)
    now = replace(before, dp=1, widths=tuple(width // planned for width in widths))
    now.check_micro_batches(total)
    check_ranks(now, [(host.name, "", host.workers) for host in hosts])
    words = {"dp": None, "widths": list(now.widths)} if now.widths else {"dp": now.dp}
    changed = {**words, "num_microbatches": total}
    return job.changed({f"parallelism.{key}": value for key, value in changed.items()})
