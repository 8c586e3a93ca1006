"""check(): everything that is wrong with a run, one sentence each, before anything of it starts.

    LaunchEngine.hosts()   which hosts are there, with how many devices and how much memory
    launch/look.py         on each of them: stores, ports, text, versions
    here                   what these mean for the plan and the job, and for each other

Nothing is started, made or changed. Clocks are not compared: nothing depends on them. Does NOT know
what starts when all is well, nor why a host that does not answer is gone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from roadtrain.config.job_model import shape_of
from roadtrain.config.machines import PlanHost
from roadtrain.config.models import ModelShape
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.launch_engine import HostSeen, LaunchEngine
from roadtrain.launch.look import (
    HostLook,
    HostQuestion,
    PathLook,
    PortQuestion,
    StoreLook,
    versions,
)
from roadtrain.launch.processes import Process, Role
from roadtrain.launch.resolve import ResolvedRun, files_read
from roadtrain.planner.job_plans import other_numbers
from roadtrain.simulator.memory import USABLE, cut, file_bytes, host_bytes
from roadtrain.switch.options import MOST_JOBS
from roadtrain.units import show_bytes, show_count

LOOK = ("-m", "roadtrain.launch.look")
LEAVE_S = (2.0, 3.0)  # a run that has just ended may hold its stores and ports for so long
# in the order of the sentences
CHECKED = (
    "the plan's hosts are there, and answer",
    "devices and memory of each host are enough for its workers",
    "text, tokenizer and weights of the job are on each host with workers",
    "the run's directory can be written",
    "the ports of each host are free, and at an address of it",
    "stores can be written, are whole, of this model, and in use by nobody",
    "no two servers have one directory; the stores are those that this run has trained",
    "what will be stored fits",
    "said only: other versions of Python, torch or roadtrain, fewer processors than workers; spare"
    " hosts that cannot run workers, which are left out",
)


@dataclass(frozen=True)
class SeenHost:
    """A host of the plan that is there, and what it told of itself."""

    plan: PlanHost
    seen: HostSeen
    asked: HostQuestion
    look: HostLook

    @property
    def name(self) -> str:
        return self.plan.name


def check(run: ResolvedRun, engine: LaunchEngine) -> list[str]:
    """Lines that the user should know. Raises one LaunchError with all that is wrong."""
    there = {one.name: one for one in engine.hosts()}
    wrong = [*_absent(run, there)]
    hosts, silent = _look_at(run, engine, there)
    for patience_s in LEAVE_S:
        if not any(_in_use(host) for host in hosts):
            break
        time.sleep(patience_s)
        hosts, silent = _look_at(run, engine, there)
    wrong += silent
    shape = shape_of(run.job)
    wrong += itertools.chain.from_iterable(
        (
            *(_lacking_hardware(run, host, hosts, shape) for host in hosts),
            *(_lacking_files(host) for host in hosts),
            *(_ports_in_use(host) for host in hosts),
            *(_bad_stores(run, host, shape) for host in hosts),
            _stores_together(run, hosts),
            _full(run, hosts, shape),
        )
    )
    wrong = wrong or [*_of_no_run(run, engine, there, hosts)]
    if wrong:
        many = f"{len(wrong)} things are wrong, nothing is started:\n  " if wrong[1:] else ""
        raise LaunchError(many + "\n  ".join(wrong))
    return [*_lines(run, there, hosts)]


def directory_is_shared(run: ResolvedRun, engine: LaunchEngine, hosts: Sequence[str] = ()) -> bool:
    """Whether the run's directory is one and the same on all of the plan's hosts with workers, and
    on `hosts`: what one of them wrote there is not lost with it. Hosts that do not answer now have
    a directory that is on a network too."""
    asked = (*run.worker_hosts, *hosts)
    looks = [_look(engine, host, HostQuestion(run.directory)) for host in asked]
    seen = [look for look in looks if isinstance(look, HostLook)]
    on_network = all(look.directory.files for look in seen)
    return len({_place_of(look) for look in seen}) == 1 and (len(seen) == len(asked) or on_network)


def _place_of(look: HostLook) -> tuple[object, ...]:
    """Where a host has the run's directory: two that are equal are one directory."""
    at = look.directory
    if at.files:
        return at.files, at.exists, at.rest
    return look.machine, at.device, at.inode, at.rest


def without_unfit_spares(run: ResolvedRun, engine: LaunchEngine) -> tuple[ResolvedRun, list[str]]:
    """The run without those spare hosts that cannot run workers, and a sentence for each."""
    there = {one.name for one in engine.hosts()}
    unfit = {
        one.name: why
        for one in run.machines.spares
        if one.workers and one.name in there and (why := why_unfit(run, engine, one.name))
    }
    lines = [f"spare host {name} is not used for workers: {why}" for name, why in unfit.items()]
    return run.without_spares(unfit), lines


def why_unfit(run: ResolvedRun, engine: LaunchEngine, host: str) -> str:
    """Why a spare host, or one that came, can run no workers; "" where it can."""
    there = {one.name: one for one in engine.hosts()}
    if host not in there:
        return "it does not answer"
    place = run.host(host)
    asked = _question(run, place, [])
    look = _look(engine, host, asked)
    if isinstance(look, str):
        return look.partition("\n")[0]
    seen = SeenHost(place, there[host], asked, look)
    wrong = [*_lacking_hardware(run, seen, [seen], None), *_lacking_files(seen)]
    if not wrong and run.shared and run.snapshots_at_workers:
        at = f"host {host} has another {run.directory} than the workers, whose snapshots rest there"
        wrong += [] if directory_is_shared(run, engine, (host,)) else [at]
    return "; ".join(wrong)


def _look(engine: LaunchEngine, host: str, asked: HostQuestion) -> HostLook | str:
    """What a host told, or why it did not."""
    try:
        return msgspec.convert(engine.ask(host, LOOK, msgspec.to_builtins(asked)), HostLook)
    except (LaunchError, msgspec.ValidationError) as error:
        return str(error)


def _absent(run: ResolvedRun, there: Mapping[str, HostSeen]) -> Iterator[str]:
    wanted = [host.name for host in run.machines.hosts]
    if not set(wanted) & there.keys():
        yield (
            f"the plan is for other machines than there are: it has {len(wanted)}"
            f" ({', '.join(wanted)}), here are {len(there)} ({', '.join(there) or 'none'})"
        )
        return
    for name in wanted:
        if name not in there:
            yield (
                f"host {name} ({run.address(name)}) cannot be reached: of the plan's"
                f" {len(wanted)} machines {len(set(wanted) & there.keys())} are there"
            )


def _look_at(
    run: ResolvedRun, engine: LaunchEngine, there: Mapping[str, HostSeen]
) -> tuple[list[SeenHost], list[str]]:
    """Hosts that answered, and a sentence for each of the others."""
    processes: list[Process] = [*run.services()]
    if not run.can_run_on(run.worker_hosts):
        processes += run.workers(run.worker_hosts, 0).processes
    hosts, silent = list[SeenHost](), list[str]()
    for one in run.machines.hosts:
        if one.name not in there:
            continue
        asked = _question(run, one, [p for p in processes if p.host == one.name])
        look = _look(engine, one.name, asked)
        if isinstance(look, str):
            silent.append(f"host {one.name} cannot be asked: {look}".replace("\nhint: ", "; "))
        else:
            hosts.append(SeenHost(one, there[one.name], asked, look))
    return hosts, silent


def _question(run: ResolvedRun, host: PlanHost, processes: Sequence[Process]) -> HostQuestion:
    job, address = run.job, run.address(host.name)
    ports = []
    for process in processes:
        ports += [PortQuestion(address, port) for port in process.ports]
        if process.role is Role.SWITCH:
            (port,) = process.ports
            above = range(port + 1, port + MOST_JOBS + 1)
            ports += [PortQuestion(address, each, datagrams=True) for each in above]
    stores = [place for one in host.servers for place in (one.store, one.snapshot) if place]
    globs, files = list[str](), list[str]()
    if host.workers:
        stores += run.stores_of_workers(host.name)
        globs = job.data.paths
        files = list(files_read(job).values())
    return HostQuestion(run.directory, tuple(stores), tuple(ports), tuple(globs), tuple(files))


def _in_use(host: SeenHost) -> bool:
    return any(host.look.ports) or any(store.locked for store in host.look.stores)


def _on_devices(run: ResolvedRun, host: SeenHost, hosts: Sequence[SeenHost]) -> bool:
    """Whether workers of a host are meant to compute on devices, which it may not have now."""
    asked = run.job.run.device
    if asked:
        return asked.startswith("cuda")
    others = any(one.seen.devices for one in hosts if one.plan.workers)
    return others or bool(_planned_device(run, host) and not _is_emulated(host, hosts))


def _planned_device(run: ResolvedRun, host: SeenHost) -> str:
    """The kind of device that the plan's cluster says it has; "" for processors, and where it does
    not say."""
    cluster = run.plan_file.cluster
    kinds = () if cluster is None else cluster.hosts
    found = (one.device for one in kinds if one.name == host.plan.kind and one.device is not None)
    kind = next((device.kind for device in found), "cpu")
    return "" if kind == "cpu" else kind


def _is_emulated(host: SeenHost, hosts: Sequence[SeenHost]) -> bool:
    """Whether other hosts are on the same machine, as in the lab, which emulates no devices."""
    return sum(one.look.machine == host.look.machine for one in hosts) > 1


def _lacking_hardware(
    run: ResolvedRun, host: SeenHost, hosts: Sequence[SeenHost], shape: ModelShape | None
) -> Iterator[str]:
    workers, seen = host.plan.workers, host.seen
    if workers > seen.devices and _on_devices(run, host, hosts):
        kind = _planned_device(run, host)
        way_out = '; run.device = "cpu" lets it compute on its processors'
        yield (
            f"host {host.name} has {show_count(seen.devices, 'device')}, the plan has"
            f" {show_count(workers, 'worker')} there{f' ({kind})' if kind else ''}"
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
    if nbytes > host.look.memory * USABLE:
        yield (
            f"host {host.name} has {show_bytes(host.look.memory)} of memory, the plan needs"
            f" {show_bytes(nbytes / USABLE)} there"
        )


def _lacking_files(host: SeenHost) -> Iterator[str]:
    for path in host.look.lacking:
        yield f"host {host.name} lacks {path}, which the job names"
    if refused := host.look.directory.refused:
        yield (
            f"host {host.name}: the run's directory {host.asked.directory} cannot be written:"
            f" {refused}"
        )


def _ports_in_use(host: SeenHost) -> Iterator[str]:
    for asked, why in zip(host.asked.ports, host.look.ports, strict=True):
        if why:
            kind = "UDP port" if asked.datagrams else "port"
            yield f"host {host.name}: {kind} {asked.port} of {asked.address} {why}"


def _bad_stores(run: ResolvedRun, host: SeenHost, shape: ModelShape | None) -> Iterator[str]:
    for store in host.look.stores:
        if why := _bad_place(run, store.at) or _of_another(run, store, shape):
            yield f"host {host.name}: store {store.at.path} {why}"


def _bad_place(run: ResolvedRun, at: PathLook) -> str:
    """Why no store can be in a directory; "" where one can."""
    ours = Path(at.path).is_relative_to(run.directory)
    if len(Path(at.rest).parts) > 1 and not ours:
        return f"is missing, and so is {Path(at.path).parent}: is its disk mounted?"
    return f"cannot be written: {at.refused}" if at.refused else ""


def _of_another(run: ResolvedRun, store: StoreLook, shape: ModelShape | None) -> str:
    """Why a store that is there is not this run's to open; "" where it is."""
    if store.locked:
        return "is in use by another run"
    if store.damage:
        return f"cannot be opened: {store.damage}"
    # residuals have elements of their own, and so has a stage's store
    whole = run.job.compress.keep is None and not run.job.parallelism.used
    if shape is not None and whole and store.elements not in (0, shape.params):
        return (
            f"is of another model: it holds {store.elements:,} parameters, the job's model has"
            f" {shape.params:,}"
        )
    return ""


def _stores_together(run: ResolvedRun, hosts: Sequence[SeenHost]) -> Iterator[str]:
    """What is wrong with the stores of all hosts, seen beside each other."""
    stores = [(host, store) for host in hosts for store in host.look.stores]
    for (host, one), (other, two) in itertools.combinations(stores, 2):
        if host.look.machine != other.look.machine:
            continue
        if _inside(one.at, two.at) or _inside(two.at, one.at):
            yield (
                f"stores {one.at.path} on {host.name} and {two.at.path} on {other.name} are one"
                " directory, or one lies in the other: each server needs one of its own"
            )
    marks = {host.look.marked_job: host.look.marked_step for host in hosts if host.look.marked_job}
    held = {store.job: (host.name, store) for host, store in stores if store.job}
    if run.job.run.new_store or run.job.parallelism.used:  # each stage's store is of its own
        return
    for job, (name, store) in held.items():
        if marks and job not in marks:
            yield (
                f"host {name}: store {store.at.path} belongs to another run: it is of job {job}, at"
                f" step {store.step}, the run in {run.directory} is of job"
                f" {', '.join(marks)}, at step {max(marks.values())}"
            )
    if len(held) > 1 and not marks:
        said = " and ".join(
            f"{store.at.path} on {name} (job {job})" for job, (name, store) in held.items()
        )
        yield f"the stores belong to {len(held)} different runs: {said}"
    if marks and stores and not held:
        yield (
            f"the run in {run.directory} has committed step {max(marks.values())}, and its stores"
            f" ({', '.join(store.at.path for _, store in stores)}) are empty: are their disks"
            " mounted?"
        )


def _of_no_run(
    run: ResolvedRun, engine: LaunchEngine, there: Mapping[str, HostSeen], hosts: Sequence[SeenHost]
) -> Iterator[str]:
    """Stores that were trained, where no run directory knows of any: another run's. One at step 0
    may be this run's, which ended before it was marked."""
    if run.job.run.new_store or any(host.look.marked_job for host in hosts):
        return
    trained = [
        (host, store)
        for host in hosts
        for store in host.look.stores
        if store.job and store.step > 0
    ]
    # hosts that may have computed before the run was planned anew
    spares = [one.name for one in run.machines.spares if one.name in there]
    if not trained or any(_is_marked(run, engine, name) for name in spares):
        return
    for host, store in trained:
        yield (
            f"host {host.name}: store {store.at.path} is of another run: it is of job {store.job},"
            f" at step {store.step}, the run in {run.directory} knows of none; give the plan"
            " another directory, or say run.new_store = true to go on with what is there"
        )


def _is_marked(run: ResolvedRun, engine: LaunchEngine, host: str) -> bool:
    look = _look(engine, host, HostQuestion(run.directory))
    return isinstance(look, HostLook) and bool(look.marked_job)


def _inside(outer: PathLook, inner: PathLook) -> bool:
    if not outer.rest:
        return (outer.device, outer.inode) in inner.above
    same = (outer.device, outer.inode) == (inner.device, inner.inode)
    return same and Path(inner.rest).is_relative_to(outer.rest)


def _full(run: ResolvedRun, hosts: Sequence[SeenHost], shape: ModelShape | None) -> Iterator[str]:
    """Of all new stores on one file system together: what will be stored, and what is free."""
    if shape is None:
        return
    plan = run.plan_file.plan
    servers = sum(len(host.servers) for host in run.machines.hosts)
    copies = run.job.servers.replicas if servers else 1
    count = servers or max(1, sum(len(host.look.stores) for host in hosts))
    each = file_bytes(plan, shape.params) * copies / count
    snapshots = {one.snapshot for host in run.machines.hosts for one in host.servers}
    found: dict[tuple[str, int], list[tuple[str, StoreLook]]] = {}
    for host in hosts:
        for store in host.look.stores:
            if not store.job and not store.at.refused:
                key = host.look.machine, store.at.device
                found.setdefault(key, []).append((host.name, store))
    for stores in found.values():
        free = min(store.at.free for _, store in stores)
        if (nbytes := each * len(stores)) > free:
            said = ", ".join(
                f"{'snapshots' if store.at.path in snapshots else 'store'} {store.at.path} on"
                f" {name}"
                for name, store in stores
            )
            yield f"{said}: {show_bytes(nbytes)} will be stored there, {show_bytes(free)} are free"


def _lines(
    run: ResolvedRun, there: Mapping[str, HostSeen], hosts: Sequence[SeenHost]
) -> Iterator[str]:
    """What is possible, and should be known."""
    own, planned = versions(), run.plan_file
    if planned.model is not None and planned.cluster is not None:
        said = other_numbers(planned.plan, run.job, planned.cluster)
        yield from [said] if said else []
    for host in hosts:
        cores, workers = host.look.processors, host.plan.workers
        kind = _planned_device(run, host)
        if workers and kind and not host.seen.devices and not run.job.run.device:
            yield (
                f"host {host.name}: the plan's cluster has {kind} there, no device is seen: its"
                " processors compute"
            )
        if not host.seen.devices and workers > cores:
            yield f"host {host.name}: {workers} workers share {cores} processors"
        for name in own.keys() & host.look.versions.keys():
            if own[name] != host.look.versions[name]:
                yield (
                    f"host {host.name} has {name} {host.look.versions[name]}, this one has"
                    f" {own[name]}"
                )
        if lacking := own.keys() - host.look.versions.keys():
            yield f"host {host.name} has no {', '.join(sorted(lacking))}, this one has"
        for store in host.look.stores:
            if store.job and not any(one.look.marked_job for one in hosts):
                yield (
                    f"host {host.name}: the run goes on with what is in {store.at.path}, job"
                    f" {store.job} at step {store.step}"
                )
    absent = [one.name for one in run.machines.spares if one.name not in there]
    if absent:
        yield f"spare hosts that are not there: {', '.join(absent)}"
