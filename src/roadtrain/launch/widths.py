"""job_on(): the job of a run for as many workers as there are: fewer hosts than planned, or others.

A step stays what it is (its micro-batches, all workers together), so that its losses do: workers at
servers accumulate more or less often, stages are wider or narrower. Arithmetic only. Does NOT know
where state rests, nor whether it fits there.
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
    """`job`: for `planned` workers. Raises ConfigError where what a step consists of does not
    divide among those of `hosts`."""
    workers = sum(host.workers for host in hosts)
    if job.parallelism.used:
        return _staged(job, planned, workers, hosts)
    if workers == planned:
        return job
    if any(one.workers for one in job.servers.switches):
        raise ConfigError(
            f"a tree of {len(job.servers.switches)} switches names {planned} workers by rank, here"
            f" are {workers}"
        )
    total = job.optimizer.accumulate * planned
    each, rest = divmod(total, workers)
    if rest:
        raise ConfigError(
            f"{total} micro-batches a step do not divide among {workers} workers",
            hint="a multiple of both numbers of workers (optimizer.accumulate) would",
        )
    return job.changed({"optimizer.accumulate": each})


def _staged(job: Job, planned: int, workers: int, hosts: Sequence[WorkerHost]) -> Job:
    asked = job.parallelism
    before = asked.degrees(planned)
    widths = [width * workers for width in before.replicas_of]
    if any(width % planned or not width for width in widths):
        raise ConfigError(
            f"{workers} workers cannot be the stages of {before}, which are {before.devices} ranks",
            hint=f"a multiple of {before.pp * before.tp} workers, alike for all stages",
        )
    total = asked.num_microbatches or job.optimizer.accumulate * max(before.replicas_of)
    now = replace(before, dp=1, widths=tuple(width // planned for width in widths))
    now.check_micro_batches(total)
    check_ranks(now, [(host.name, "", host.workers) for host in hosts])
    words = {"dp": None, "widths": list(now.widths)} if now.widths else {"dp": now.dp}
    changed = {**words, "num_microbatches": total}
    return job.changed({f"parallelism.{key}": value for key, value in changed.items()})
