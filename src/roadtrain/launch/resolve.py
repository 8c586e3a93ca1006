"""resolve(): what a plan.toml and a job.toml start, on which hosts. Pure: nothing is asked or made.

PlanFile + Job -> ResolvedRun -> Process of each server, reducer and switch
                              -> WorkerSet of an attempt, for the hosts that are there then
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roadtrain.config.job import Job
from roadtrain.config.machines import Machines
from roadtrain.config.plan_file import PlanFile
from roadtrain.launch.processes import Process, WorkerSet


@dataclass(frozen=True)
class ResolvedRun:
    """name: of the run. job: the user's, with what the plan decides. directory: absolute, the same
    on every host: the run's files (job.toml, token, reducers.txt) stand in it. addresses: of each
    host, by name. token: as text; "" in a dry run."""

    name: str
    plan_file: PlanFile
    job: Job
    directory: str
    addresses: Mapping[str, str]
    token: str

    @property
    def machines(self) -> Machines:
        raise NotImplementedError

    def services(self) -> tuple[Process, ...]:
        """Servers, reducers, switches, in the order in which they start."""
        raise NotImplementedError

    def workers(self, hosts: Sequence[str], attempt: int) -> WorkerSet:
        """hosts: with workers, in the order of ranks; maybe fewer than the plan's, or spare ones.
        Raises ConfigError where the batch or the stages do not divide among them."""
        raise NotImplementedError

    def can_run_on(self, hosts: Sequence[str]) -> str:
        """Why workers cannot run on these hosts, in one sentence; "" where they can."""
        raise NotImplementedError

    def reducer_lines(self, hosts: Sequence[str]) -> str:
        """The content of reducers.txt, which workers read again and again."""
        raise NotImplementedError


def resolve(
    plan_file: PlanFile, job: Job, *, name: str, addresses: Mapping[str, str], token: str
) -> ResolvedRun:
    """Raises ConfigError: a plan without machines, for another model than the job's, with degrees
    that the job's [parallelism] contradicts, a placement that nothing runs."""
    raise NotImplementedError
