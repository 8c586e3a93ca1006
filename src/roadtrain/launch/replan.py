"""`roadtrain launch --replan NAME`: what a run has shown is used to plan it anew.

1. The run is stopped at a committed step (paused_run.py); its supervisor measures the links between
   its hosts before it lets them go (measured_run.py).
2. The cluster of its plan.toml gets the rates that differ (measured_cluster.py).
3. The planner searches again, other orders of hosts and fewer of them too, for what the run can go
   on as: the same placement, micro-batches, delay and compression. A store keeps its shape: the
   servers and their order stay. Snapshots of stages take any stages, as long as the hosts that have
   their parts take part, or share the run's directory.
4. Where a step is shorter by BETTER than by the old plan on the same rates, the run's plan.toml is
   replaced (the old one stays as plan.before-N.toml), what was measured is removed, and the run
   goes on by it.
What cannot be planned anew is refused before 1. Whatever happens after 1, the run goes on: with the
old plan, where there is no better one. With a name for a new run, other placements are tried too,
and what comes of it is a plan for a run that begins anew, with stores of its own. Does NOT change a
job.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from roadtrain.config.cluster import Cluster
from roadtrain.config.job import Job, load_job
from roadtrain.config.machines import Machines
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import Plan, PlanFile, load_plan_file
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.engines import is_alive
from roadtrain.launch.home import RunHome
from roadtrain.launch.measured_cluster import WITHIN, measured_cluster
from roadtrain.launch.measured_run import MeasuredRun, slower
from roadtrain.launch.paused_run import GoOn, PausedRun, Report
from roadtrain.planner.arrangements import Arranged, best_arrangement
from roadtrain.planner.job_plans import JobPlans, shape_of_job
from roadtrain.planner.machines_of import machines_of, machines_of_kind, predicted_of
from roadtrain.planner.plan_report import words
from roadtrain.planner.search import SearchResult, search
from roadtrain.simulator.compute import Constants, constants
from roadtrain.simulator.run import simulate
from roadtrain.storage.direct import replace_file
from roadtrain.units import show_seconds

REFUSED = 2  # the exit code of a run that was refused before anything of it started
BETTER = 0.03  # of a step: what a new plan takes off at least
KNOWN = ("measured", "lab")  # constants that a plan may have been made by, besides those assumed
SAME = 1e-6


@dataclass(frozen=True)
class Replanned:
    """`old_s`: of a step by the old plan with the measured rates; `new_s`: by the new one.
    `blind`: no link was measured, though the run has some."""

    plan_file: PlanFile
    changes: Mapping[str, str]
    arranged: Arranged
    old: Plan
    old_s: float
    new_s: float
    blind: bool = False

    @property
    def taken(self) -> bool:
        """Whether the run goes on by it."""
        return self.better and not self.blind

    @property
    def better(self) -> bool:
        return self.new_s < (1 - BETTER) * self.old_s


@dataclass(frozen=True)
class ReplanOptions:
    """`write_plan`: a further file that the plan goes to. `new_run`: the plan is for a run that
    begins anew. `placements`: that are tried for it; none: all. `detach`, `if_launcher_dies`: of
    the run as it goes on."""

    dry_run: bool = False
    write_plan: str = ""
    new_run: str = ""
    placements: tuple[str, ...] = ()
    detach: bool = False
    if_launcher_dies: str = "keep"


@dataclass(frozen=True)
class PlannedRun:
    """What a run was planned from. `links_wanted`: its hosts are at several addresses."""

    plan_file: PlanFile
    job: Job
    model: ModelShape
    machines: Machines
    cluster: Cluster
    links_wanted: bool


def replan(
    home: RunHome,
    options: ReplanOptions,
    go_on: GoOn,
    report: Report = print,
) -> int:
    """go_on: starts the run again (`--resume`). Returns the command's exit code. Raises
    RoadtrainError; a run that was alive goes on then too."""
    ends_with_launcher = "stop" in (options.if_launcher_dies, home.record().if_launcher_dies)
    check_options(home, options, ends_with_launcher)
    run = planned_run(home)
    if not is_alive(home):
        _planned_anew(home, run, options, report)
        report(f"run {home.name} does not run: `roadtrain launch --resume {home.name}`")
        return 0
    report(f"run {home.name} is stopped at its next step, to measure the links of its hosts")
    paused = PausedRun(home, go_on, report, ends_with_launcher)
    try:
        if not paused.measure():
            return paused.told_end()
        before = _planned_anew(home, run, options, report)
    except BaseException as error:
        paused.go_on_after(error)
        raise
    follows = not (options.dry_run or options.detach)
    try:
        code, refused = paused.go_on(follows=follows), home.state()
    except LaunchError:
        code, refused = REFUSED, home.state()
        if before is None or refused.code != REFUSED:
            raise
    if before is None or code != REFUSED:
        return code
    report(f"the new plan was refused, the run goes on by the one before: {refused.why}")
    replace_file(home.plan_path, before.read_bytes(), "writing the run's plan")
    return paused.go_on(follows=follows)


def check_options(home: RunHome, options: ReplanOptions, ends_with_launcher: bool) -> None:
    """Raises ConfigError."""
    if options.placements and not options.new_run:
        raise ConfigError(
            "--placements and a run that goes on: its state keeps its placement",
            hint="--new-run NAME plans a run that begins anew",
        )
    if options.new_run and RunHome.of(options.new_run).path == home.path:
        raise ConfigError(
            f"--new-run {options.new_run}: that is the run itself", hint="give it another name"
        )
    if options.detach and ends_with_launcher:
        raise ConfigError(
            f"--detach, and run {home.name} ends with its launcher: none would stay",
            hint="leave --detach out: this command becomes its launcher",
        )


def planned_run(home: RunHome) -> PlannedRun:
    """Raises ConfigError where it cannot be planned anew, whatever is measured."""
    plan_file, job = load_plan_file(home.plan_path), load_job(home.job_path)
    machines, cluster = plan_file.machines, plan_file.cluster
    if machines is None or cluster is None:
        raise ConfigError(
            f"{home.plan_path} has no machines or no cluster, it cannot be planned anew",
            hint="roadtrain plan CLUSTER.toml --job JOB.toml writes both",
        )
    check_names(machines, cluster)
    known = home.addresses()
    hosts = (*machines.hosts, *machines.spares)
    places = {known.get(host.name) or host.address or host.name for host in hosts}
    return PlannedRun(plan_file, job, shape_of_job(job), machines, cluster, len(places) > 1)


def check_names(machines: Machines, cluster: Cluster) -> None:
    """A search finds hosts by the names that the cluster's kinds give them. Raises ConfigError."""
    kinds = {kind.name for kind in cluster.workers}
    every = (*machines.hosts, *machines.spares)
    ours = {host.name for host in every if host.workers or host.kind in kinds}
    theirs = {one.name for kind in cluster.workers for one, _ in machines_of_kind(kind)}
    if ours == theirs:
        return
    parts = [
        f"{', '.join(sorted(names))} in {where} alone"
        for names, where in ((ours - theirs, "[machines]"), (theirs - ours, "[cluster]"))
        if names
    ]
    raise ConfigError(
        f"hosts with devices are not the same in the plan's tables: {'; '.join(parts)}",
        hint="a kind of one host has the host's name, of several the name with 0, 1, ... behind;"
        " roadtrain plan CLUSTER.toml --job JOB.toml writes both",
    )


def measured_of(home: RunHome) -> MeasuredRun:
    """Raises LaunchError where nothing was measured."""
    path = home.measured_path
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasuredRun)
    except FileNotFoundError as cause:
        raise LaunchError(
            f"nothing of run {home.name!r} was measured: it does not run, {path} is not there",
            hint=f"roadtrain launch --resume {home.name}, then --replan once it has made steps",
        ) from cause
    except (OSError, msgspec.MsgspecError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error


def search_again(
    run: PlannedRun,
    constants: Constants,
    options: ReplanOptions,
    leaves_out: bool,
    cluster: Cluster,
) -> SearchResult:
    """Search a cluster for plans that the run can go on as, or, for a new run, for all that can be
    launched. Raises ConfigError where no plan takes the batch.

    Args:
        leaves_out: Whether hosts that computed may be left out.
    """
    computed = {host.name for host in run.machines.worker_hosts}
    there = {one.name for kind in cluster.workers for one, _ in machines_of_kind(kind)}
    if not leaves_out and (gone := sorted(computed - there)):
        raise ConfigError(f"{', '.join(gone)} left out would have a part of the run's state")
    old, plans = run.plan_file.plan, JobPlans(run.job, cluster)

    def fitted(plan: Plan) -> Plan | str:
        made = plans.fitted(plan)
        if isinstance(made, str) or options.new_run:
            return made
        for what, new, before in (
            ("micro-batches of another size", made.micro_batch, old.micro_batch),
            ("gradients on another wire", made.packets.wire, old.packets.wire),
            (f"updates {made.staleness} steps late", made.staleness, old.staleness),
            ("another part of gradients that travels", made.keep, old.keep),
        ):
            if new != before:
                return f"other losses: {what}"
        return made

    return search(
        cluster,
        run.model,
        constants,
        batch=old.samples,
        placements=options.placements if options.new_run else (old.placement.name,),
        headroom=old.headroom,
        late=bool(old.staleness),
        explain=False,
        fitted=fitted,
    )


def replanned(run: PlannedRun, measured: MeasuredRun, options: ReplanOptions) -> Replanned:
    """Raises ConfigError where no plan fits what was measured."""
    old, machines = run.plan_file.plan, run.machines
    of = constants_of(run.plan_file, run.cluster, run.model)
    now, changes = measured_cluster(
        run.cluster, machines, measured.links, slower(measured), of.network
    )
    leaves_out = bool(options.new_run) or measured.shared or old.placement.served
    arranged = best_arrangement(now, partial(search_again, run, of, options, leaves_out))
    pick = arranged.answer.pick
    if pick is None:
        raise ConfigError("no plan that the run can go on as fits what was measured")
    before = simulate(old, now, run.model, of, checked=False)
    whole = arranged.arrangement.whole
    new = machines_of(pick.plan, whole, options.new_run)
    if options.new_run:
        check_stores(machines, new, options.new_run)
    else:
        new = kept(machines, new)
    file = PlanFile(pick.plan, new, predicted_of(pick.result), whole, run.plan_file.model)
    blind = run.links_wanted and not measured.links
    return Replanned(file, changes, arranged, old, before.seconds, pick.result.seconds, blind)


def check_stores(old: Machines, new: Machines, name: str) -> None:
    """Raises ConfigError where a run that begins anew would find a store of this one."""
    ours, theirs = ({path for host in one.hosts for path in host.directories} for one in (old, new))
    if (same := sorted(ours & theirs)) or name == old.stores_of:
        raise ConfigError(
            f"--new-run {name}: its stores would be this run's: {', '.join(same) or name}",
            hint="give it another name",
        )


def constants_of(plan_file: PlanFile, cluster: Cluster, model: ModelShape) -> Constants:
    """Those by which the plan was made: by which it is predicted what the file says."""
    if plan_file.predicted is None:
        return Constants()
    for of in (Constants(), *map(constants, KNOWN)):
        result = simulate(plan_file.plan, cluster, model, of, checked=False)
        if abs(result.seconds - plan_file.predicted.seconds) <= SAME * result.seconds:
            return of
    return Constants()


def kept(old: Machines, new: Machines) -> Machines:
    """The new plan's workers in their order; all that listens or stores as it was, as a store keeps
    its shape; hosts that compute no more as spare ones."""
    kinds = {host.name: host.kind for host in (*new.hosts, *new.spares)}
    known = {host.name: host for host in (*old.hosts, *old.spares)}
    workers = [
        replace(known[one.name], workers=one.workers, kind=one.kind) for one in new.worker_hosts
    ]
    rest = [
        replace(host, kind=kinds.get(host.name, host.kind))
        for host in known.values()
        if host.name not in {one.name for one in workers}
    ]
    services = [replace(host, workers=0) for host in rest if host.ports]
    spares = [host for host in rest if not host.ports]
    return replace(old, hosts=(*workers, *services), spares=tuple(spares))


def told(found: Replanned, measured: MeasuredRun) -> list[str]:
    """For people: rates, predictions, why."""
    plan, pick = found.plan_file.plan, found.arranged.answer.pick
    cluster = found.plan_file.cluster
    assert pick is not None
    lines = [f"not measured: {why}" for why in measured.missing]
    lines += [f"{what}: {said}" for what, said in found.changes.items()]
    if not found.changes and measured.links:
        lines.append(f"all rates are within {WITHIN:.0%} of what the plan's cluster says")
    elif not measured.links:
        lines.append("no link between hosts was measured")
    if measured.seconds:
        lines.append(f"a step took {show_seconds(measured.seconds)} (median of the last steps)")
    top, share = max(pick.result.busy.items(), key=lambda pair: pair[1])
    lines += [
        f"by the plan that ran    {show_seconds(found.old_s)} a step: {words(found.old, cluster)}",
        f"by the best one         {show_seconds(found.new_s)} a step: {words(plan, cluster)}",
        f"                        {found.arranged.arrangement.text}; {found.arranged.tried}"
        f" arrangements of hosts were tried; {top} is busy {share:.0%}",
    ]
    if not found.better:
        shorter = 1 - found.new_s / found.old_s
        lines.append(f"it takes {shorter:.1%} off a step, less than {BETTER:.0%}: the plan stays")
    elif found.blind:
        lines.append("by rates that were not measured no plan is replaced: the plan stays")
    return lines


def _planned_anew(
    home: RunHome, run: PlannedRun, options: ReplanOptions, report: Report
) -> Path | None:
    """The file that keeps the plan before, where the run has another one now."""
    measured = measured_of(home)
    found = replanned(run, measured, options)
    for line in told(found, measured):
        report(line)
    return _written(home, found, options, report)


def _written(
    home: RunHome, found: Replanned, options: ReplanOptions, report: Report
) -> Path | None:
    """Where the plan goes: the run's own, where it is better and the run goes on by it. The file of
    the one before then."""
    text = found.plan_file.to_toml().encode()
    if options.write_plan or options.new_run:
        path = Path(options.write_plan or f"{options.new_run}.plan.toml")
        replace_file(path, text, "writing the plan")
        report(f"plan    {path}")
    if options.new_run:
        report(
            f"start   roadtrain launch {path} JOB.toml --name {options.new_run}, of a job with a"
            " run.dir of its own: a store keeps its shape, so this run goes on as it is"
        )
    elif options.dry_run and found.taken:
        report("a dry run: the plan stays")
    elif found.taken:
        names = (home.path / f"plan.before-{n}.toml" for n in itertools.count(1))
        before = next(path for path in names if not path.exists())
        replace_file(before, home.plan_path.read_bytes(), "keeping the plan before")
        replace_file(home.plan_path, text, "writing the run's plan")
        # it says how much slower hosts are than by the plan before
        home.measured_path.unlink(missing_ok=True)
        report(f"plan    {home.plan_path} (the one before: {before.name})")
        return before
    return None


def replan_run(home: RunHome, options: Mapping[str, Any], go_on: GoOn) -> int:
    """As `roadtrain launch` calls it; options: fields of ReplanOptions."""
    return replan(home, ReplanOptions(**options), go_on)
