"""job_on(): adapt a job to a number of workers that differs from the plan.

All workers together still compute the same number of micro-batches per step, so that the losses
stay the same. Does NOT check whether the workers have the state of the run
(`ResolvedRun.can_run_on`) or enough memory (checks.py).
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
    """Return a copy of `job`, which is made for `planned` workers, for the workers of `hosts`.
    Raises ConfigError if its micro-batches or stages cannot be divided among them."""
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
            f"{workers} workers cannot be divided among the pipeline stages of the plan ({before})",
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
