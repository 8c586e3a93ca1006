"""resolve(): derive the processes of a run from plan.toml and job.toml. Contacts no host and
creates nothing.

PlanFile + Job -> ResolvedRun -> a Process for each server, reducer and switch
                              -> a WorkerSet for each attempt, on the hosts that are up

The files of a run are at the same paths on every host:

    RUN/                     the job's run.dir, into which `train` writes
    RUN/launch/job.toml      the job for the workers of the current attempt
    RUN/launch/token         the secret shared by the run's processes (mode 600)
    RUN/launch/reducers.txt  the addresses of the reducers, if workers use reducers

Does NOT check whether the hosts can run the processes (checks.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roadtrain.config.job import DataSection, Job, files_read, moved
from roadtrain.config.job_model import check_model
from roadtrain.config.machines import (
    FILES,
    LAUNCHED_AS,
    PORT,
    Machines,
    PlanHost,
    PlannedModel,
    Predicted,
    host_port,
)
from roadtrain.config.plan_file import Plan, PlanFile
from roadtrain.errors import ConfigError
from roadtrain.launch.engines import machines_of
from roadtrain.launch.processes import HostFile, Process, Role, WorkerSet
from roadtrain.launch.widths import WorkerHost, job_on
from roadtrain.options.schema import flat
from roadtrain.planner.job_keys import contradicted, job_keys, stated_degrees
from roadtrain.planner.machines_of import IN_STAGES, REDUCED
from roadtrain.stages.job_parallelism import DEGREES, StagePlacement

COMMAND = ("-m", "roadtrain.cli")
REDUCERS = "reducers.txt"
UNPREDICTED = Predicted(seconds=0.0).model_dump()


@dataclass(frozen=True)
class ResolvedRun:
    """A plan and a job, combined into the description of a run."""

    name: str
    plan_file: PlanFile
    job: Job  # the user's job, with the keys that the plan determines
    directory: str  # the absolute run.dir, the same path on every host
    addresses: Mapping[str, str]  # the address of each host
    token: str  # the secret shared by the run's processes; "" in a dry run
    start: str = ""  # id of this start of the run, the same for all supervisors of the start
    shared: bool = False  # True if all worker hosts share `directory`, which survives a lost host

    @property
    def machines(self) -> Machines:
        assert self.plan_file.machines is not None
        return self.plan_file.machines

    @property
    def worker_hosts(self) -> tuple[str, ...]:
        """The plan's hosts with workers, in rank order."""
        return tuple(host.name for host in self.machines.worker_hosts)

    @property
    def worker_count(self) -> int:
        """The number of workers in the plan."""
        return sum(host.workers for host in self.machines.hosts)

    @property
    def sums_at_reducers(self) -> bool:
        """True if workers use reducers, also those on hosts that join later."""
        return bool(self.job.parallelism.reducers)

    def ranks_of(self, host: str) -> range:
        """Return the ranks that the plan places on a host."""
        first = 0
        for other in self.machines.hosts:
            if other.name == host:
                return range(first, first + other.workers)
            first += other.workers
        return range(0)

    def host(self, name: str) -> PlanHost:
        """Return the host or spare host of this name in the plan. Raises ConfigError if there is
        none."""
        hosts = {host.name: host for host in (*self.machines.hosts, *self.machines.spares)}
        if name not in hosts:
            hint = f"the plan's hosts are {', '.join(hosts)}"
            raise ConfigError(f"the plan has no host {name!r}", hint=hint)
        return hosts[name]

    def with_host(self, name: str, address: str, workers: int) -> ResolvedRun:
        """Return a copy of the run in which a host has an address. A host that is not in the plan
        becomes a spare host that can run `workers` workers."""
        machines = self.machines
        if all(host.name != name for host in (*machines.hosts, *machines.spares)):
            new = PlanHost(name, "", address, workers)
            machines = replace(machines, spares=(*machines.spares, new))
        plan_file = replace(self.plan_file, machines=machines)
        addresses = {**self.addresses, name: address}
        job = self.job.changed(flat(job_keys(plan_file, self.job, addresses)))
        return replace(self, plan_file=plan_file, job=job, addresses=addresses)

    def without_spares(self, names: Collection[str]) -> ResolvedRun:
        """Return a copy of the run without the spare hosts in `names`."""
        left = tuple(spare for spare in self.machines.spares if spare.name not in names)
        machines = replace(self.machines, spares=left)
        return replace(self, plan_file=replace(self.plan_file, machines=machines))

    @property
    def snapshots_at_workers(self) -> bool:
        """True if worker hosts keep state of the run, such as snapshots, in the run's directory.
        Then a host that replaces a worker host needs the same directory."""
        stages = self.job.parallelism
        served = {placement.stage for placement in stages.placements if placement.servers}
        return stages.used and served != set(range(stages.pp))

    def stores_of_workers(self, host: str) -> list[str]:
        """Return the directories of the stores that the workers of a host open themselves, without
        those of servers."""
        job = self.job
        if not job.parallelism.used:
            return [] if job.servers.addresses else job.store.files
        degrees = job.parallelism.degrees(self.worker_count)
        stages = {degrees.position(rank).stage for rank in self.ranks_of(host)}
        return [
            path.replace("{run}", self.directory)
            for placement in job.parallelism.placements
            if placement.stage in stages
            for path in placement.files
        ]

    def services(self) -> tuple[Process, ...]:
        """Return the plan's switches, servers and reducers, in the order in which they start."""
        hosts = self.machines.hosts
        switches = [
            self._service(Role.SWITCH, "", host, host.switch.port, ("--switch",))
            for host in hosts
            if host.switch is not None
        ]
        servers = [
            self._server(host, number) for host in hosts for number in range(len(host.servers))
        ]
        reducers = [self.reducer(host.name) for host in hosts if host.reducer]
        return (*switches, *servers, *reducers)

    def reducer(self, host: str) -> Process:
        """Return the reducer process for a host, even if the plan has no reducer on it."""
        found = self.host(host)
        return self._service(Role.REDUCER, "", found, found.reducer or PORT, ("--sum",))

    def _server(self, host: PlanHost, number: int) -> Process:
        place = host.servers[number]
        words = ["--store", place.store]
        words += ["--snapshot", place.snapshot] if place.snapshot else []
        return self._service(Role.SERVER, f" {number}", host, place.port, words)

    def _service(
        self, role: Role, number: str, host: PlanHost, port: int, words: Sequence[str]
    ) -> Process:
        where = self._reached(host.name, port)
        return Process(
            f"{role} {host.name}{number}",
            role,
            host.name,
            (*COMMAND, "serve", where, *words, "--token-file", self._path("token")),
            self.directory,
            files=(HostFile(self._path("token"), self.token, secret=True),),
            ports=(port,),
        )

    def workers(
        self,
        hosts: Sequence[str],
        attempt: int,
        reducers: Sequence[str] | None = None,
        committed: int = -1,
        *,
        begins_anew: bool = True,
    ) -> WorkerSet:
        """Return the workers of an attempt.

        Args:
            hosts: The names of the hosts on which to run, in rank order; may lack hosts of the plan
                and include spare hosts.
            attempt: The number of this start of the workers.
            reducers: The hosts whose reducers the workers use; None for the plan's reducers.
            committed: A step that is known to be committed, or -1.
            begins_anew: True if no step was committed. Otherwise, the workers ignore
                `run.new_store`, which could discard the committed training.

        Raises:
            ConfigError: Workers cannot run on these hosts, for example because the batch cannot be
                divided among them.
        """
        if why := self.can_run_on(hosts):
            raise ConfigError(why, hint="wait until the plan's hosts are up")
        each = [host.workers for host in self.workers_on(hosts)]
        files = self._worker_files(hosts, reducers, committed, begins_anew)
        about = {
            "WORLD_SIZE": sum(each),
            "GROUP_WORLD_SIZE": len(hosts),
            "MASTER_ADDR": self.address(hosts[0]),
            "MASTER_PORT": self.machines.rendezvous_port,
            "TORCHELASTIC_RUN_ID": f"{self.name}:{self.start}" if self.start else self.name,
            "TORCHELASTIC_RESTART_COUNT": attempt,
        }
        if self.start:  # set only by a supervisor, not for the files for Slurm and Kubernetes
            about[LAUNCHED_AS] = self.name
        places = [(i, local) for i, count in enumerate(each) for local in range(count)]
        meets = self.job.parallelism.used  # workers without stages meet at their servers
        processes = []
        for rank, (group, local) in enumerate(places):
            own = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": each[group]}
            environment = {**about, **own, "GROUP_RANK": group}
            processes.append(
                Process(
                    f"worker {rank}",
                    Role.WORKER,
                    hosts[group],
                    (*COMMAND, "train", self._path("job.toml")),
                    self.directory,
                    {key: str(value) for key, value in environment.items()},
                    files,
                    (self.machines.rendezvous_port,) if meets and not rank else (),
                )
            )
        return WorkerSet(attempt, tuple(processes))

    def _worker_files(
        self,
        hosts: Sequence[str],
        reducers: Sequence[str] | None,
        committed: int,
        begins_anew: bool,
    ) -> tuple[HostFile, ...]:
        job = self._job_on(hosts)
        if job.run.new_store and not begins_anew:
            job = job.changed({"run.new_store": False})
        if committed > 0:
            job = job.changed({"launched.committed": committed})
        files = [
            HostFile(self._path("job.toml"), _text_of(job)),
            HostFile(self._path("token"), self.token, secret=True),
        ]
        if self.sums_at_reducers:
            planned = [host.name for host in self.machines.hosts if host.reducer]
            used = planned if reducers is None else reducers
            files.append(HostFile(self.reducers_path, self.reducer_lines(used)))
        return tuple(files)

    def hosts_of_stages(self, hosts: Sequence[str]) -> list[str]:
        """Return the first host of each pipeline stage, if workers run on `hosts`. Raises
        ConfigError if they cannot."""
        if not hosts or not self.job.parallelism.used:
            return [*hosts[:1]]
        there = self.workers_on(hosts)
        ranks = [host.name for host in there for _ in range(host.workers)]
        degrees = self._job_on(hosts).parallelism.degrees(len(ranks))
        first: dict[int, str] = {}
        for rank, host in enumerate(ranks):
            first.setdefault(degrees.position(rank).stage, host)
        return list(dict.fromkeys([ranks[0], *first.values()]))

    def can_run_on(self, hosts: Sequence[str]) -> str:
        """Return the reason why the workers cannot run on `hosts`, as one sentence, or "" if they
        can."""
        try:
            self._job_on(hosts)
        except ConfigError as error:
            return str(error).partition("\nhint: ")[0]
        planned = self.worker_hosts
        lost = [name for name in planned if name not in hosts]
        why = self._state_of_workers(lost) if lost else ""
        return f"{why}, and {', '.join(lost)} had a part of it" if why else ""

    def _state_of_workers(self, lost: Sequence[str]) -> str:
        """Return a text on the state of the run that would be lost with the hosts in `lost`, or
        ""."""
        job = self.job
        serving = [place for name in lost for place in self.host(name).servers]
        if len(serving) >= job.servers.replicas:
            return "the state is on servers on the workers' hosts"
        if job.compress.error_feedback:
            return "the residuals of compression are on the workers' hosts"
        if not job.parallelism.used:
            return "" if job.servers.addresses else "the state is on the workers' host"
        if any(placement.files for placement in job.parallelism.placements):
            return "the state of a stage is in files on its host"
        if self.shared or not self.snapshots_at_workers:
            return ""
        return f"the run's snapshots are in {self.directory} on each worker's host"

    def _job_on(self, hosts: Sequence[str]) -> Job:
        """Return the job, adapted to the number of workers on `hosts`. Raises ConfigError if the
        job cannot run on them."""
        if twice := [name for name in hosts if list(hosts).count(name) > 1]:
            raise ConfigError(f"host {twice[0]} is named {list(hosts).count(twice[0])} times")
        if not hosts:
            raise ConfigError("0 hosts are left for the workers, but at least 1 is needed")
        there = self.workers_on(hosts)
        if idle := [host.name for host in there if not host.workers]:
            raise ConfigError(f"0 workers can run on {', '.join(idle)}, but each host needs one")
        job = job_on(self.job, self.worker_count, there)
        return job if self._as_planned(there) else job.changed({"predicted": UNPREDICTED})

    def _as_planned(self, there: Sequence[WorkerHost]) -> bool:
        """Return True if the plan's predictions apply to these hosts, because each runs the planned
        number of workers."""
        planned = [WorkerHost(name, self.host(name).workers) for name in self.worker_hosts]
        others = {host.name for host in there} - {host.name for host in planned}
        return len(there) == len(planned) and all(
            mine.workers == host.workers and (mine.name == host.name or mine.name in others)
            for mine, host in zip(there, planned, strict=True)
        )

    def workers_on(self, hosts: Sequence[str]) -> list[WorkerHost]:
        """Return the hosts, each with the number of workers to run on it: for a spare host, at most
        as many as the host that it replaces. Raises ConfigError if a host is unknown."""
        places = [self.host(name).workers for name in self.worker_hosts]
        most = places if len(places) == len(hosts) else [self.worker_count] * len(hosts)
        spares = {spare.name for spare in self.machines.spares}
        counts = [self.host(name).workers for name in hosts]
        return [
            WorkerHost(name, min(count, place) if name in spares else count)
            for name, count, place in zip(hosts, counts, most, strict=True)
        ]

    @property
    def reducers_path(self) -> str:
        return self._path(REDUCERS)

    def reducer_lines(self, hosts: Sequence[str]) -> str:
        """Return the content of reducers.txt for reducers on `hosts`. Workers read this file again
        while they run."""
        ports = {name: self.host(name).reducer or PORT for name in hosts}
        return "".join(f"{self._reached(name, port)}\n" for name, port in ports.items())

    def address(self, host: str) -> str:
        """Return the address by which other hosts reach a host. Raises ConfigError if the host is
        unknown."""
        return self.addresses.get(host) or self.host(host).address

    def _reached(self, host: str, port: int) -> str:
        return host_port(self.address(host), port)

    def _path(self, name: str) -> str:
        return f"{self.directory}/{FILES}/{name}"


def resolve(
    plan_file: PlanFile, job: Job, *, name: str, addresses: Mapping[str, str], token: str
) -> ResolvedRun:
    """Combine a plan and a job into a run. `name`: the name of the run. `addresses`: addresses of
    hosts, with precedence over those in the plan. `token`: the secret shared by the run's
    processes. Raises ConfigError if the plan has no machines, is for another model, lacks services
    of its placement, or contradicts the job."""
    machines = machines_of(plan_file)
    _check_plan(plan_file.plan, machines, job)
    if plan_file.model is not None:
        check_model(plan_file.model, job)
    job = absolute_job(job)
    for host in machines.hosts:
        if not (addresses.get(host.name) or host.address):
            raise ConfigError(
                f"host {host.name} of the plan has no address", hint="set it in machines.hosts"
            )
    keys = flat(job_keys(plan_file, job, addresses))
    _check_contradictions(plan_file.plan, job, keys)
    run = ResolvedRun(name, plan_file, job.changed(keys), job.run.dir, addresses, token)
    if why := run.can_run_on(run.worker_hosts):
        raise ConfigError(f"the job cannot run on the plan's machines: {why}")
    return run


def _check_contradictions(plan: Plan, job: Job, keys: Mapping[str, Any]) -> None:
    stated = {"parallelism.reducers": job.parallelism.reducers}
    stated["servers.addresses"] = job.servers.addresses
    if plan.placement.name not in IN_STAGES:
        stated |= {f"parallelism.{name}": own for name, own in stated_degrees(job).items()}
    default = {f"parallelism.{name}": own for name, own in DEGREES.items()}
    for key, mine in stated.items():
        if mine and mine not in (planned := keys.get(key), default.get(key)):
            raise ConfigError(
                f"{key} is {mine} in the job, but {planned or 'unset'} in the plan",
                hint=f"leave {key} out of the job, or plan again for this job",
            )
    if why := contradicted(plan, job):
        raise ConfigError(why, hint="plan again for this job, or leave the key out of the job")


def _text_of(job: Job) -> str:
    """Return the content of job.toml for the hosts, without the default data.paths, whose text each
    host has in its own installation."""
    default = job.data.paths == DataSection().paths
    return job.to_toml([("data", "paths")] if default else [])


def absolute_job(job: Job) -> Job:
    """Return a copy of a job with absolute paths. Relative paths in the job are relative to the
    current directory."""
    directory = os.path.abspath(job.run.dir)
    inside = [moved(path, job.run.dir, directory) for path in job.store.files]
    words: dict[str, Any] = {
        "run.dir": directory,
        "store.files": [os.path.abspath(path) for path in inside],
        "data.paths": [os.path.abspath(path) for path in job.data.paths],
    }
    words |= {key: os.path.abspath(path) for key, path in files_read(job).items()}
    if placements := job.parallelism.placements:
        words["parallelism.placements"] = [
            _absolute_placement(placement, job.run.dir, directory) for placement in placements
        ]
    return job.changed(words)


def _absolute_placement(placement: StagePlacement, run: str, directory: str) -> dict[str, Any]:
    tree = placement.model_dump(exclude_none=True)
    inside = (moved(path.replace("{run}", directory), run, directory) for path in placement.files)
    tree["files"] = [os.path.abspath(path) for path in inside]
    if placement.token_file:
        tree["token_file"] = os.path.abspath(placement.token_file)
    return tree


def _check_services(plan: Plan, machines: Machines, job: Job) -> None:
    """Raise ConfigError if the machines do not have exactly the servers, reducers and switches that
    the placement needs."""
    name, hosts = plan.placement.name, machines.hosts
    # If the job assigns servers to stages, they are not counted.
    of_stages = any(placement.servers for placement in job.parallelism.placements)
    servers = 0 if of_stages else sum(len(host.servers) for host in hosts)
    reducers = sum(host.reducer > 0 for host in hosts)
    switches = sum(host.switch is not None for host in hosts)
    for kind, used, count in (
        ("servers", plan.placement.served or name == "smartnic", servers),
        ("reducers", name in REDUCED, reducers),
        ("switches", plan.placement.fans_in, switches),
    ):
        if used != (count > 0):
            need = "at least 1" if used else "none"
            raise ConfigError(
                f"the plan's machines have {count} {kind}, but placement {name} needs {need}",
                hint=f"correct the {kind} in machines.hosts, or plan again",
            )


def _check_plan(plan: Plan, machines: Machines, job: Job) -> None:
    """Raise ConfigError if the plan does not fit its machines or the job's model."""
    _check_services(plan, machines, job)
    ranks, workers = plan.parallelism.devices, sum(host.workers for host in machines.hosts)
    if ranks != workers:
        raise ConfigError(
            f"the plan has {ranks} ranks ({plan.parallelism}), but {workers} workers on its hosts"
        )
    check_model(PlannedModel(0, 0, sum(plan.parallelism.stages)), job)
