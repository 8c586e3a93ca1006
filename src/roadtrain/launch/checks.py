"""check(): report every problem of a run, one sentence each, before any process of the run starts.

    LaunchEngine.hosts()    lists the hosts that are up, each with its number of devices
    host_report.py          reports on a host: memory, stores, ports, training text, versions
    this file               compares the reports with the plan, the job and each other

Does NOT start, create or change anything.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from roadtrain.config.job import files_read
from roadtrain.config.job_model import shape_of
from roadtrain.config.machines import PlanHost
from roadtrain.config.models import ModelShape
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.host_report import (
    HostQuery,
    HostReport,
    PathReport,
    PortQuery,
    StoreReport,
    versions,
)
from roadtrain.launch.launch_engine import HostSeen, LaunchEngine
from roadtrain.launch.processes import Process, Role
from roadtrain.launch.resolve import ResolvedRun
from roadtrain.planner.job_plans import other_numbers
from roadtrain.simulator.memory import USABLE, cut, file_bytes, host_bytes
from roadtrain.switch.options import MOST_JOBS
from roadtrain.units import show_bytes, show_count

REPORT = ("-m", "roadtrain.launch.host_report")
LEAVE_S = (2.0, 3.0)  # pauses in which a run that has just ended releases its stores and ports
# The conditions that `check` examines, in the order in which it reports problems.
CHECKED = (
    "the plan's hosts are up and answer",
    "each host has enough devices and memory for its workers",
    "the job's text, tokenizer and weights are on each host with workers",
    "the run's directory is writable",
    "the ports of each host are free, at an address that the host has",
    "stores are writable, undamaged, for this model, and not in use",
    "no two servers share a directory, and the stores belong to this run",
    "the disks have room for the stores",
    "warnings only: different versions of Python, torch or roadtrain; fewer processors than"
    " workers; spare hosts that cannot run workers and so are not used",
)


@dataclass(frozen=True)
class LiveHost:
    """A host of the plan that is up, with its report."""

    plan: PlanHost
    seen: HostSeen  # the engine's description of the host
    query: HostQuery
    report: HostReport

    @property
    def name(self) -> str:
        return self.plan.name


def check(run: ResolvedRun, engine: LaunchEngine) -> list[str]:
    """Check a run and return warnings for the user. Raises one LaunchError that lists all
    problems."""
    there = {seen.name: seen for seen in engine.hosts()}
    wrong = [*_absent(run, there)]
    hosts, silent = _report_all(run, engine, there)
    for patience_s in LEAVE_S:
        if not any(_in_use(host) for host in hosts):
            break
        time.sleep(patience_s)
        hosts, silent = _report_all(run, engine, there)
    wrong += silent
    shape = shape_of(run.job)
    wrong += itertools.chain.from_iterable(
        (
            *(_lacking_hardware(run, host, hosts, shape) for host in hosts),
            *(_lacking_files(host) for host in hosts),
            *(_ports_in_use(host) for host in hosts),
            *(_bad_stores(run, host, shape) for host in hosts),
            _store_conflicts(run, hosts),
            _no_space(run, hosts, shape),
        )
    )
    wrong = wrong or [*_foreign_stores(run, engine, there, hosts)]
    if wrong:
        many = f"{len(wrong)} problems, nothing is started:\n  " if wrong[1:] else ""
        raise LaunchError(many + "\n  ".join(wrong))
    return [*_warnings(run, there, hosts)]


def directory_is_shared(run: ResolvedRun, engine: LaunchEngine, hosts: Sequence[str] = ()) -> bool:
    """Return True if the plan's worker hosts and `hosts` share one run directory. Hosts that do not
    answer are assumed to share a directory on a network file system."""
    queried = (*run.worker_hosts, *hosts)
    reports = [_report_of(engine, host, HostQuery(run.directory)) for host in queried]
    seen = [report for report in reports if isinstance(report, HostReport)]
    on_network = all(report.directory.files for report in seen)
    one_place = len({_place_of(report) for report in seen}) == 1
    return one_place and (len(seen) == len(queried) or on_network)


def _place_of(report: HostReport) -> tuple[object, ...]:
    """Return a value that is equal on two hosts if they share the run's directory."""
    at = report.directory
    if at.files:
        return at.files, at.exists, at.rest
    return report.machine, at.device, at.inode, at.rest


def without_unfit_spares(run: ResolvedRun, engine: LaunchEngine) -> tuple[ResolvedRun, list[str]]:
    """Return the run without the spare hosts that cannot run workers, and a sentence on each of
    them."""
    there = {seen.name for seen in engine.hosts()}
    unfit = {
        spare.name: why
        for spare in run.machines.spares
        if spare.workers and spare.name in there and (why := why_unfit(run, engine, spare.name))
    }
    lines = [f"spare host {name} is not used for workers: {why}" for name, why in unfit.items()]
    return run.without_spares(unfit), lines


def why_unfit(run: ResolvedRun, engine: LaunchEngine, host: str) -> str:
    """Return the reason why a spare or newly joined host cannot run workers, or "" if it can."""
    there = {seen.name: seen for seen in engine.hosts()}
    if host not in there:
        return "it does not answer"
    place = run.host(host)
    query = _query(run, place, [])
    report = _report_of(engine, host, query)
    if isinstance(report, str):
        return report.partition("\n")[0]
    seen = LiveHost(place, there[host], query, report)
    wrong = [*_lacking_hardware(run, seen, [seen], None), *_lacking_files(seen)]
    if not wrong and run.shared and run.snapshots_at_workers:
        at = f"{run.directory} on host {host} is not the directory that has the workers' snapshots"
        wrong += [] if directory_is_shared(run, engine, (host,)) else [at]
    return "; ".join(wrong)


def _report_of(engine: LaunchEngine, host: str, query: HostQuery) -> HostReport | str:
    """Return a host's report, or a text with the reason why there is none."""
    try:
        return msgspec.convert(engine.ask(host, REPORT, msgspec.to_builtins(query)), HostReport)
    except (LaunchError, msgspec.ValidationError) as error:
        return str(error)


def _absent(run: ResolvedRun, there: Mapping[str, HostSeen]) -> Iterator[str]:
    names = [host.name for host in run.machines.hosts]
    if not set(names) & there.keys():
        yield (
            f"none of the plan's {len(names)} hosts ({', '.join(names)}) is up; the engine has"
            f" {show_count(len(there), 'other host')} ({', '.join(there) or 'none'})"
        )
        return
    for name in names:
        if name not in there:
            yield (
                f"host {name} ({run.address(name)}) cannot be reached;"
                f" {len(set(names) & there.keys())} of the plan's {len(names)} hosts are up"
            )


def _report_all(
    run: ResolvedRun, engine: LaunchEngine, there: Mapping[str, HostSeen]
) -> tuple[list[LiveHost], list[str]]:
    """Return the hosts that answered, and a sentence on each host that is up but did not answer."""
    processes: list[Process] = [*run.services()]
    if not run.can_run_on(run.worker_hosts):
        processes += run.workers(run.worker_hosts, 0).processes
    hosts, silent = list[LiveHost](), list[str]()
    for host in run.machines.hosts:
        if host.name not in there:
            continue
        query = _query(run, host, [p for p in processes if p.host == host.name])
        report = _report_of(engine, host.name, query)
        if isinstance(report, str):
            silent.append(f"host {host.name} does not answer: {report}".replace("\nhint: ", "; "))
        else:
            hosts.append(LiveHost(host, there[host.name], query, report))
    return hosts, silent


def _query(run: ResolvedRun, host: PlanHost, processes: Sequence[Process]) -> HostQuery:
    job, address = run.job, run.address(host.name)
    ports = []
    for process in processes:
        ports += [PortQuery(address, port) for port in process.ports]
        if process.role is Role.SWITCH:
            (port,) = process.ports
            above = range(port + 1, port + MOST_JOBS + 1)
            ports += [PortQuery(address, each, datagrams=True) for each in above]
    stores = [path for server in host.servers for path in (server.store, server.snapshot) if path]
    globs, files = list[str](), list[str]()
    if host.workers:
        stores += run.stores_of_workers(host.name)
        globs = job.data.paths
        files = list(files_read(job).values())
    return HostQuery(run.directory, tuple(stores), tuple(ports), tuple(globs), tuple(files))


def _in_use(host: LiveHost) -> bool:
    return any(host.report.ports) or any(store.locked for store in host.report.stores)


def _on_devices(run: ResolvedRun, host: LiveHost, hosts: Sequence[LiveHost]) -> bool:
    """Return True if the workers of a host should compute on devices, according to the job, the
    devices of the worker hosts, or the plan."""
    if stated := run.job.run.device:
        return stated != "cpu"
    others = any(other.seen.devices for other in hosts if other.plan.workers)
    return others or bool(_planned_device(run, host) and not _is_emulated(host, hosts))


def _planned_device(run: ResolvedRun, host: LiveHost) -> str:
    """Return the kind of accelerator that the host has according to the plan's cluster, or ""."""
    cluster = run.plan_file.cluster
    kinds = () if cluster is None else cluster.hosts
    devices = (kind.device for kind in kinds if kind.name == host.plan.kind)
    kind = next((device.kind for device in devices if device is not None), "cpu")
    return "" if kind == "cpu" else kind


def _is_emulated(host: LiveHost, hosts: Sequence[LiveHost]) -> bool:
    """Return True if another host is on the same machine, as in a lab, whose hosts have no
    devices."""
    return sum(other.report.machine == host.report.machine for other in hosts) > 1


def _lacking_hardware(
    run: ResolvedRun, host: LiveHost, hosts: Sequence[LiveHost], shape: ModelShape | None
) -> Iterator[str]:
    workers, seen = host.plan.workers, host.seen
    if workers > seen.devices and _on_devices(run, host, hosts):
        kind = _planned_device(run, host)
        way_out = '; run.device = "cpu" in the job makes its workers compute on processors'
        yield (
            f"host {host.name} has {show_count(seen.devices, 'device')}, but the plan places"
            f" {show_count(workers, 'worker')} on it{f' ({kind})' if kind else ''}"
            f"{'' if seen.devices or run.job.run.device else way_out}"
        )
    if shape is None or not workers:
        return
    plan = run.plan_file.plan
    ranks = run.ranks_of(host.name)
    stages = [plan.parallelism.position(rank).stage for rank in ranks]
    try:
        parts = cut(shape.blocks, plan)
    except ConfigError as error:
        yield f"the plan is for another model: {error}".partition("\nhint: ")[0]
        return
    nbytes = sum(
        host_bytes(
            plan.of_stage(stage),
            [*itertools.chain.from_iterable(parts[stage])],
            max(1, stages.count(stage) // plan.parallelism.tp),
        )
        for stage in set(stages)
    )
    if nbytes > host.report.memory * USABLE:
        yield (
            f"host {host.name} has {show_bytes(host.report.memory)} of memory, but the plan needs"
            f" {show_bytes(nbytes / USABLE)} on it"
        )


def _lacking_files(host: LiveHost) -> Iterator[str]:
    for path in host.report.lacking:
        yield f"host {host.name} does not have {path}, which the job names"
    if refused := host.report.directory.refused:
        yield (
            f"host {host.name}: the run's directory {host.query.directory} is not writable:"
            f" {refused}"
        )


def _ports_in_use(host: LiveHost) -> Iterator[str]:
    for port, why in zip(host.query.ports, host.report.ports, strict=True):
        if why:
            kind = "UDP port" if port.datagrams else "port"
            yield f"host {host.name}: {kind} {port.port} of {port.address} {why}"


def _bad_stores(run: ResolvedRun, host: LiveHost, shape: ModelShape | None) -> Iterator[str]:
    for store in host.report.stores:
        if why := _why_unusable(run, store.at) or _why_foreign(run, store, shape):
            yield f"host {host.name}: store {store.at.path} {why}"


def _why_unusable(run: ResolvedRun, at: PathReport) -> str:
    """Return the reason why a directory cannot contain a store, or "" if it can."""
    ours = Path(at.path).is_relative_to(run.directory)
    if len(Path(at.rest).parts) > 1 and not ours:
        return f"does not exist, nor does its parent {Path(at.path).parent}: is the disk mounted?"
    return f"is not writable: {at.refused}" if at.refused else ""


def _why_foreign(run: ResolvedRun, store: StoreReport, shape: ModelShape | None) -> str:
    """Return the reason why the run must not open an existing store, or "" if it may."""
    if store.locked:
        return "is in use by another run"
    if store.damage:
        return f"cannot be opened: {store.damage}"
    # Element counts are comparable only without residuals and without stages.
    whole = run.job.compress.keep is None and not run.job.parallelism.used
    if shape is not None and whole and store.elements not in (0, shape.params):
        return (
            f"is of a different model: the store holds {store.elements:,} parameters, but the job's"
            f" model has {shape.params:,}"
        )
    return ""


def _store_conflicts(run: ResolvedRun, hosts: Sequence[LiveHost]) -> Iterator[str]:
    """Yield a sentence on each conflict between stores, or between the stores and the run's
    directory."""
    stores = [(host, store) for host in hosts for store in host.report.stores]
    for (host, store), (other, second) in itertools.combinations(stores, 2):
        if host.report.machine != other.report.machine:
            continue
        if _inside(store.at, second.at) or _inside(second.at, store.at):
            yield (
                f"stores {store.at.path} on {host.name} and {second.at.path} on {other.name} are"
                " the same directory or nested: each server needs a directory of its own"
            )
    marked = [host.report for host in hosts if host.report.marked_job]
    marks = {report.marked_job: report.marked_step for report in marked}
    held = {store.job: (host.name, store) for host, store in stores if store.job}
    # The stores of different stages belong to different jobs.
    if run.job.run.new_store or run.job.parallelism.used:
        return
    for job, (name, store) in held.items():
        if marks and job not in marks:
            yield (
                f"host {name}: store {store.at.path} belongs to another run: the store is of job"
                f" {job}, at step {store.step}, but the run in {run.directory} is of job"
                f" {', '.join(marks)}, at step {max(marks.values())}"
            )
    if len(held) > 1 and not marks:
        owners = " and ".join(
            f"{store.at.path} on {name} (job {job})" for job, (name, store) in held.items()
        )
        yield f"the stores belong to {len(held)} different runs: {owners}"
    if marks and stores and not held:
        yield (
            f"the run in {run.directory} has committed step {max(marks.values())}, but its stores"
            f" ({', '.join(store.at.path for _, store in stores)}) are empty: are their disks"
            " mounted?"
        )


def _foreign_stores(
    run: ResolvedRun, engine: LaunchEngine, there: Mapping[str, HostSeen], hosts: Sequence[LiveHost]
) -> Iterator[str]:
    """Yield a sentence on each store with a step greater than 0, if no host has the mark.json that
    every trained run has in its directory. Such a store belongs to another run."""
    if run.job.run.new_store or any(host.report.marked_job for host in hosts):
        return
    trained = [
        (host, store)
        for host in hosts
        for store in host.report.stores
        if store.job and store.step > 0
    ]
    # Spare hosts may have been worker hosts before the run was replanned, and so have the mark.
    spares = [spare.name for spare in run.machines.spares if spare.name in there]
    if not trained or any(_is_marked(run, engine, name) for name in spares):
        return
    for host, store in trained:
        yield (
            f"host {host.name}: store {store.at.path} belongs to another run: the store is of job"
            f" {store.job}, at step {store.step}, but {run.directory} has no mark of any job; give"
            " the plan another directory, or set run.new_store = true to go on from this store"
        )


def _is_marked(run: ResolvedRun, engine: LaunchEngine, host: str) -> bool:
    report = _report_of(engine, host, HostQuery(run.directory))
    return isinstance(report, HostReport) and bool(report.marked_job)


def _inside(outer: PathReport, inner: PathReport) -> bool:
    """Return True if the directory `inner` is `outer` or is inside `outer`."""
    if not outer.rest:
        return (outer.device, outer.inode) in inner.above
    same = (outer.device, outer.inode) == (inner.device, inner.inode)
    return same and Path(inner.rest).is_relative_to(outer.rest)


def _no_space(
    run: ResolvedRun, hosts: Sequence[LiveHost], shape: ModelShape | None
) -> Iterator[str]:
    """Yield a sentence on each file system with too little free space for the run's new stores."""
    if shape is None:
        return
    plan = run.plan_file.plan
    servers = sum(len(host.servers) for host in run.machines.hosts)
    copies = run.job.servers.replicas if servers else 1
    count = servers or max(1, sum(len(host.report.stores) for host in hosts))
    each = file_bytes(plan, shape.params) * copies / count
    snapshots = {server.snapshot for host in run.machines.hosts for server in host.servers}
    found: dict[tuple[str, int], list[tuple[str, StoreReport]]] = {}
    for host in hosts:
        for store in host.report.stores:
            if not store.job and not store.at.refused:
                key = host.report.machine, store.at.device
                found.setdefault(key, []).append((host.name, store))
    for stores in found.values():
        free = min(store.at.free for _, store in stores)
        if (nbytes := each * len(stores)) > free:
            full = ", ".join(
                f"{'snapshots' if store.at.path in snapshots else 'store'} {store.at.path} on"
                f" {name}"
                for name, store in stores
            )
            yield f"{full}: {show_bytes(nbytes)} will be stored, but {show_bytes(free)} are free"


def _warnings(
    run: ResolvedRun, there: Mapping[str, HostSeen], hosts: Sequence[LiveHost]
) -> Iterator[str]:
    """Yield a sentence on each problem that does not prevent the start of the run."""
    own, planned = versions(), run.plan_file
    if planned.model is not None and planned.cluster is not None:
        difference = other_numbers(planned.plan, run.job, planned.cluster)
        yield from [difference] if difference else []
    for host in hosts:
        cores, workers = host.report.processors, host.plan.workers
        kind = _planned_device(run, host)
        if workers and kind and not host.seen.devices and not run.job.run.device:
            yield (
                f"host {host.name} has {kind} in the plan's cluster, but no device is visible: the"
                " host's workers compute on processors"
            )
        if not host.seen.devices and workers > cores:
            yield f"host {host.name}: {workers} workers share {cores} processors"
        for name in own.keys() & host.report.versions.keys():
            if own[name] != host.report.versions[name]:
                yield (
                    f"host {host.name} has {name} {host.report.versions[name]}, but this host has"
                    f" {own[name]}"
                )
        if lacking := own.keys() - host.report.versions.keys():
            yield f"host {host.name} lacks {', '.join(sorted(lacking))}, which this host has"
        for store in host.report.stores:
            if store.job and not any(other.report.marked_job for other in hosts):
                yield (
                    f"host {host.name}: the run goes on from the state in {store.at.path}, job"
                    f" {store.job} at step {store.step}"
                )
    absent = [spare.name for spare in run.machines.spares if spare.name not in there]
    if absent:
        yield f"spare hosts that are down: {', '.join(absent)}"
