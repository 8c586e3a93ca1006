"""resolve(): what a plan.toml and a job.toml start, on which hosts. Nothing is asked or made.

PlanFile + Job -> ResolvedRun -> Process of each server, reducer and switch
                              -> WorkerSet of an attempt, for the hosts that are there then

    RUN/                 the job's run.dir, which `train` writes; the same path on every host
    RUN/launch/job.toml  what the workers of this attempt train
    RUN/launch/token     the secret of the run's processes (mode 600)
    RUN/launch/reducers.txt  which reducers workers use, where they use any

Does NOT look whether all that is possible on the hosts: checks.py does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roadtrain.config.job import DataSection, Job, moved
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
    """name: of the run. job: the user's, with what the plan decides. directory: absolute, the same
    on every host: the run's files (job.toml, token, reducers.txt) stand in it. addresses: of each
    host, by name. token: as text; "" in a dry run. start: which start of the run it is, another
    one for each supervisor. shared: the directory is one and the same on all hosts that workers
    run on, so that what a lost host wrote there is not lost (checks.py finds out)."""

    name: str
    plan_file: PlanFile
    job: Job
    directory: str
    addresses: Mapping[str, str]
    token: str
    start: str = ""
    shared: bool = False

    @property
    def machines(self) -> Machines:
        assert self.plan_file.machines is not None
        return self.plan_file.machines

    @property
    def worker_hosts(self) -> tuple[str, ...]:
        """The plan's, in the order of ranks."""
        return tuple(host.name for host in self.machines.worker_hosts)

    @property
    def worker_count(self) -> int:
        """The plan's."""
        return sum(host.workers for host in self.machines.hosts)

    @property
    def sums_at_reducers(self) -> bool:
        """Whether workers use reducers, also such as come later."""
        return bool(self.job.parallelism.reducers)

    def ranks_of(self, host: str) -> range:
        """The plan's."""
        first = 0
        for one in self.machines.hosts:
            if one.name == host:
                return range(first, first + one.workers)
            first += one.workers
        return range(0)

    def host(self, name: str) -> PlanHost:
        """Of the plan, its spare ones too. Raises ConfigError."""
        known = (*self.machines.hosts, *self.machines.spares)
        for one in known:
            if one.name == name:
                return one
        raise ConfigError(
            f"the plan has no host {name!r}", hint=f"it has {', '.join(one.name for one in known)}"
        )

    def with_host(self, name: str, address: str, workers: int) -> ResolvedRun:
        """Also with a spare host that the plan does not have, or with another address of one."""
        machines = self.machines
        if all(one.name != name for one in (*machines.hosts, *machines.spares)):
            new = PlanHost(name, "", address, workers)
            machines = replace(machines, spares=(*machines.spares, new))
        plan_file = replace(self.plan_file, machines=machines)
        addresses = {**self.addresses, name: address}
        job = self.job.changed(flat(job_keys(plan_file, self.job, addresses)))
        return replace(self, plan_file=plan_file, job=job, addresses=addresses)

    def without_spares(self, names: Collection[str]) -> ResolvedRun:
        """These hosts are never used."""
        left = tuple(one for one in self.machines.spares if one.name not in names)
        machines = replace(self.machines, spares=left)
        return replace(self, plan_file=replace(self.plan_file, machines=machines))

    @property
    def snapshots_at_workers(self) -> bool:
        """Whether state rests in the run's directory on the workers' hosts: who takes the place of
        one needs that directory."""
        asked = self.job.parallelism
        served = {one.stage for one in asked.placements if one.servers}
        return asked.used and served != set(range(asked.pp))

    def stores_of_workers(self, host: str) -> list[str]:
        """Directories that the workers of a host of the plan open themselves."""
        job = self.job
        if not job.parallelism.used:
            return [] if job.servers.addresses else job.store.files
        degrees = job.parallelism.degrees(self.worker_count)
        stages = {degrees.position(rank).stage for rank in self.ranks_of(host)}
        return [
            path.replace("{run}", self.directory)
            for one in job.parallelism.placements
            if one.stage in stages
            for path in one.files
        ]

    def services(self) -> tuple[Process, ...]:
        """Servers, reducers, switches, in the order in which they start."""
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
        """Of any host that is known, also where the plan has none on it."""
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
        """hosts: with workers, in the order of ranks; maybe fewer than the plan's, or spare ones.
        reducers: the hosts whose reducers are used; None: the plan's. committed: the step from
        which they go on, or a later one; -1: nothing is known. begins_anew: whether a job's
        `run.new_store` still holds, as none of its steps is known. Raises ConfigError where the
        batch or the stages do not divide among them."""
        if why := self.can_run_on(hosts):
            raise ConfigError(why, hint="wait for the hosts of the plan")
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
        if self.start:  # a supervisor's: what was written for others goes on as they do
            about[LAUNCHED_AS] = self.name
        places = [(i, local) for i, count in enumerate(each) for local in range(count)]
        meets = self.job.parallelism.used  # others meet at their servers
        processes = []
        for rank, (group, local) in enumerate(places):
            own = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": each[group]}
            said = {**about, **own, "GROUP_RANK": group}
            processes.append(
                Process(
                    f"worker {rank}",
                    Role.WORKER,
                    hosts[group],
                    (*COMMAND, "train", self._path("job.toml")),
                    self.directory,
                    {key: str(value) for key, value in said.items()},
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
        """Of workers on these hosts, the first host of each stage. Raises ConfigError."""
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
        """Why workers cannot run on these hosts, in one sentence; "" where they can."""
        try:
            self._job_on(hosts)
        except ConfigError as error:
            return str(error).partition("\nhint: ")[0]
        planned = self.worker_hosts
        lost = [name for name in planned if name not in hosts]
        why = self._state_of_workers(lost) if lost else ""
        return f"{why}, and {', '.join(lost)} had a part of it" if why else ""

    def _state_of_workers(self, lost: Sequence[str]) -> str:
        """What of a run's state is lost with these hosts, in words; "" where nothing is."""
        job = self.job
        serving = [place for name in lost for place in self.host(name).servers]
        if len(serving) >= job.servers.replicas:
            return "servers on the workers' hosts have the state"
        if job.compress.error_feedback:
            return "what compression has not sent rests on the workers' hosts"
        if not job.parallelism.used:
            return "" if job.servers.addresses else "the state rests on the workers' host"
        if any(one.files for one in job.parallelism.placements):
            return "a stage's state rests on files of its host"
        if self.shared or not self.snapshots_at_workers:
            return ""
        return f"the run's snapshots rest in {self.directory} of each worker's host"

    def _job_on(self, hosts: Sequence[str]) -> Job:
        """Raises ConfigError."""
        if twice := [name for name in hosts if list(hosts).count(name) > 1]:
            raise ConfigError(f"host {twice[0]} is named {list(hosts).count(twice[0])} times")
        there = self.workers_on(hosts)
        if idle := [host.name for host in there if not host.workers] or ([] if there else ["none"]):
            raise ConfigError(f"0 workers can run on {', '.join(idle)}, 1 or more are needed")
        job = job_on(self.job, self.worker_count, there)
        return job if self._as_planned(there) else job.changed({"predicted": UNPREDICTED})

    def _as_planned(self, there: Sequence[WorkerHost]) -> bool:
        """Whether what the plan predicts is of these: as many workers in each place, by the host of
        the plan or by one in its stead."""
        planned = [WorkerHost(name, self.host(name).workers) for name in self.worker_hosts]
        others = {host.name for host in there} - {host.name for host in planned}
        return len(there) == len(planned) and all(
            mine.workers == host.workers and (mine.name == host.name or mine.name in others)
            for mine, host in zip(there, planned, strict=True)
        )

    def workers_on(self, hosts: Sequence[str]) -> list[WorkerHost]:
        """A spare host in the place of one of the plan's runs as many as that one did, though it
        could run more. Raises ConfigError for a host that is not known."""
        places = [self.host(name).workers for name in self.worker_hosts]
        most = places if len(places) == len(hosts) else [self.worker_count] * len(hosts)
        spares = {one.name for one in self.machines.spares}
        counts = [self.host(name).workers for name in hosts]
        return [
            WorkerHost(name, min(count, place) if name in spares else count)
            for name, count, place in zip(hosts, counts, most, strict=True)
        ]

    @property
    def reducers_path(self) -> str:
        return self._path(REDUCERS)

    def reducer_lines(self, hosts: Sequence[str]) -> str:
        """The content of reducers.txt, which workers read again and again."""
        ports = {name: self.host(name).reducer or PORT for name in hosts}
        return "".join(f"{self._reached(name, port)}\n" for name, port in ports.items())

    def address(self, host: str) -> str:
        """By which other hosts reach it. Raises ConfigError."""
        return self.addresses.get(host) or self.host(host).address

    def _reached(self, host: str, port: int) -> str:
        return host_port(self.address(host), port)

    def _path(self, name: str) -> str:
        return f"{self.directory}/{FILES}/{name}"


def resolve(
    plan_file: PlanFile, job: Job, *, name: str, addresses: Mapping[str, str], token: str
) -> ResolvedRun:
    """Raises ConfigError: a plan without machines, for another model than the job's, with degrees
    that the job's [parallelism] contradicts, a placement that nothing runs."""
    machines = machines_of(plan_file)
    _check_plan(plan_file.plan, machines, job)
    if plan_file.model is not None:
        check_model(plan_file.model, job)
    job = absolute_job(job)
    for host in machines.hosts:
        if not (addresses.get(host.name) or host.address):
            raise ConfigError(
                f"host {host.name} of the plan has no address", hint="give it in machines.hosts"
            )
    keys = flat(job_keys(plan_file, job, addresses))
    _check_contradictions(plan_file.plan, job, keys)
    run = ResolvedRun(name, plan_file, job.changed(keys), job.run.dir, addresses, token)
    if why := run.can_run_on(run.worker_hosts):
        raise ConfigError(f"the job cannot run on the machines of the plan: {why}")
    return run


def _check_contradictions(plan: Plan, job: Job, keys: Mapping[str, Any]) -> None:
    """Raises ConfigError where the job says one thing and the plan another."""
    said = {"parallelism.reducers": job.parallelism.reducers}
    said["servers.addresses"] = job.servers.addresses
    if plan.placement.name not in IN_STAGES:
        said |= {f"parallelism.{name}": own for name, own in stated_degrees(job).items()}
    default = {f"parallelism.{name}": own for name, own in DEGREES.items()}
    for key, mine in said.items():
        if mine and mine not in (planned := keys.get(key), default.get(key)):
            raise ConfigError(
                f"{key} is {mine} in the job, and {planned or 'not said'} in the plan",
                hint="leave it out of the job, or plan anew for this job",
            )
    if why := contradicted(plan, job):
        raise ConfigError(why, hint="plan anew for this job, or leave it out of the job")


def _text_of(job: Job) -> str:
    """A job.toml for any host. The text that is trained on where a job names none is each host's
    own; that all have the same is checked when workers meet, and before a start."""
    default = job.data.paths == DataSection().paths
    return job.to_toml([("data", "paths")] if default else [])


def absolute_job(job: Job) -> Job:
    """`job` with every path as it is where the caller stands: it is read elsewhere later."""
    directory = os.path.abspath(job.run.dir)
    inside = [moved(one, job.run.dir, directory) for one in job.store.files]
    words: dict[str, Any] = {
        "run.dir": directory,
        "store.files": [os.path.abspath(one) for one in inside],
        "data.paths": [os.path.abspath(one) for one in job.data.paths],
    }
    words |= {key: os.path.abspath(path) for key, path in files_read(job).items()}
    if job.parallelism.placements:
        words["parallelism.placements"] = [
            _absolute_placement(one, job.run.dir, directory) for one in job.parallelism.placements
        ]
    return job.changed(words)


def files_read(job: Job) -> dict[str, str]:
    """Files and folders that workers read besides their text, by the keys that name them."""
    tokenizer, servers = job.data.tokenizer, job.servers
    named = {
        "data.tokenizer": "" if tokenizer == "bytes" else tokenizer,
        "model.pretrained": job.model.pretrained,
        "servers.ca": servers.ca,
        "servers.cert": servers.cert,
        "servers.key": servers.key,
    }
    return {key: path for key, path in named.items() if path}


def _absolute_placement(one: StagePlacement, run: str, directory: str) -> dict[str, Any]:
    tree = one.model_dump(exclude_none=True)
    inside = (moved(path.replace("{run}", directory), run, directory) for path in one.files)
    tree["files"] = [os.path.abspath(path) for path in inside]
    if one.token_file:
        tree["token_file"] = os.path.abspath(one.token_file)
    return tree


def _check_services(plan: Plan, machines: Machines, job: Job) -> None:
    """Raises ConfigError for a plan whose machines run no servers, reducers or switches that its
    placement uses, or such as nobody uses."""
    name, hosts = plan.placement.name, machines.hosts
    of_stages = any(one.servers for one in job.parallelism.placements)  # the job says which
    servers = 0 if of_stages else sum(len(host.servers) for host in hosts)
    reducers = sum(host.reducer > 0 for host in hosts)
    switches = sum(host.switch is not None for host in hosts)
    for what, used, count in (
        ("servers", plan.placement.served or name == "smartnic", servers),
        ("reducers", name in REDUCED, reducers),
        ("switches", plan.placement.fans_in, switches),
    ):
        if used != (count > 0):
            need = "1 or more are needed" if used else "nobody would use them"
            raise ConfigError(
                f"placement {name} and {count} {what} in the plan's machines: {need}",
                hint=f"{what} stand at a host of machines.hosts; or plan anew",
            )


def _check_plan(plan: Plan, machines: Machines, job: Job) -> None:
    """Raises ConfigError for a plan that is for other machines, or another model."""
    _check_services(plan, machines, job)
    ranks, workers = plan.parallelism.devices, sum(host.workers for host in machines.hosts)
    if ranks != workers:
        raise ConfigError(
            f"the plan has {ranks} ranks ({plan.parallelism}), its machines have {workers} workers"
        )
    check_model(PlannedModel(0, 0, sum(plan.parallelism.stages)), job)
