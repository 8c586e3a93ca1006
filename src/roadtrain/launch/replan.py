"""`roadtrain launch --replan NAME`: measure a run's hosts and search for a better plan.

1. Stop the run at a committed step (paused_run.py). The run's supervisor measures the links between
   the hosts before it releases the hosts (measured_run.py).
2. Put the measured rates into the cluster of the run's plan.toml (measured_cluster.py).
3. Search for plans that can continue the run, also with other orders of hosts and with fewer hosts.
   Such a plan has the same placement, micro-batches, delay, compression and servers as the old
   plan, because existing stores fix the division of the model. The number of pipeline stages may
   change, because any number of stages can load the snapshots. For this, the hosts with snapshots
   must take part, or all hosts must share the run's directory.
4. If the new plan shortens a step by at least 3 percent at the measured rates: copy the old plan to
   plan.before-N.toml, replace the run's plan.toml, delete measured.json, and resume the run.

A run that can never be replanned is not stopped. A run that the command has stopped is always
resumed, with the old plan if no new plan is better. With --new-run, the command also tries other
placements, and the result is a plan for a new run with stores of its own. Does NOT change a job.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

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
from roadtrain.launch.paused_run import GoOn, PausedRun, ReplanOptions, Report
from roadtrain.launch.protocol.run_events import REFUSED
from roadtrain.planner.arrangements import Arranged, best_arrangement
from roadtrain.planner.job_plans import JobPlans, shape_of_job
from roadtrain.planner.machines_of import machines_of, machines_of_kind, predicted_of
from roadtrain.planner.plan_report import words
from roadtrain.planner.search import SearchResult, search
from roadtrain.simulator.compute import Constants, constants
from roadtrain.simulator.run import simulate
from roadtrain.storage.direct import replace_file
from roadtrain.units import show_seconds

BETTER = 0.03  # smallest relative gain per step for which a plan is replaced
CALIBRATED = ("measured", "lab")  # names of constants, besides the defaults, that a plan may use
SAME = 1e-6  # largest relative difference of two predictions that count as the same


@dataclass(frozen=True)
class ReplanResult:
    """The best plan that the search has found, and the old plan with which it is compared."""

    plan_file: PlanFile  # the plan file with the new plan
    changes: Mapping[str, str]  # texts on the rates that differ from the old plan's cluster
    arranged: Arranged  # the arrangement of hosts of the new plan, with its search result
    old: Plan
    old_s: float  # predicted seconds per step of the old plan at the measured rates
    new_s: float  # predicted seconds per step of the new plan at the measured rates
    blind: bool = False  # True if the run has links, but no link was measured

    @property
    def adopted(self) -> bool:
        """True if the run switches to the new plan."""
        return self.better and not self.blind

    @property
    def better(self) -> bool:
        return self.new_s < (1 - BETTER) * self.old_s


@dataclass(frozen=True)
class PlannedRun:
    """The inputs from which a run was planned. `needs_links`: True if links must be measured,
    because the run's hosts have more than one address."""

    plan_file: PlanFile
    job: Job
    model: ModelShape
    machines: Machines
    cluster: Cluster
    needs_links: bool


def replan(
    home: RunHome,
    options: ReplanOptions,
    go_on: GoOn,
    report: Report = print,
) -> int:
    """Measure a run's links and search for a better plan (option --replan). Return the exit code of
    the command. `go_on`: function that resumes the run. Raises RoadtrainError. A run that was
    running is resumed even after an error."""
    ends_with_launcher = "stop" in (options.if_launcher_dies, home.record().if_launcher_dies)
    check_options(home, options, ends_with_launcher)
    run = planned_run(home)
    if not is_alive(home):
        _search_and_write(home, run, options, report)
        report(f"run {home.name} is not running: see `roadtrain launch --resume {home.name}`")
        return 0
    report(f"stopping run {home.name} after its current step, to measure the links of its hosts")
    paused = PausedRun(home, go_on, report, ends_with_launcher)
    try:
        if not paused.measure():
            return paused.report_end()
        before = _search_and_write(home, run, options, report)
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
    report(f"the new plan was refused, the run goes on with the old plan: {refused.why}")
    replace_file(home.plan_path, before.read_bytes(), "writing the run's plan")
    return paused.go_on(follows=follows)


def check_options(home: RunHome, options: ReplanOptions, ends_with_launcher: bool) -> None:
    """Raise ConfigError for options that contradict each other."""
    if options.placements and not options.new_run:
        raise ConfigError(
            "--placements needs --new-run: an existing run cannot change its placement",
            hint="--new-run NAME plans a new run",
        )
    if options.new_run and RunHome.of(options.new_run).path == home.path:
        raise ConfigError(
            f"--new-run {options.new_run} names the existing run", hint="choose another name"
        )
    if options.detach and ends_with_launcher:
        raise ConfigError(
            f"--detach cannot be used: run {home.name} ends with its launcher (this command)",
            hint="leave --detach out",
        )


def planned_run(home: RunHome) -> PlannedRun:
    """Load the plan and the job of a run. Raises ConfigError if the run can never be replanned, for
    example because its plan has no cluster."""
    plan_file, job = load_plan_file(home.plan_path), load_job(home.job_path)
    machines, cluster = plan_file.machines, plan_file.cluster
    if machines is None or cluster is None:
        raise ConfigError(
            f"{home.plan_path} lacks machines or a cluster, so the run cannot be replanned",
            hint="roadtrain plan CLUSTER.toml --job JOB.toml writes a plan with both",
        )
    check_names(machines, cluster)
    addresses = home.addresses()
    hosts = (*machines.hosts, *machines.spares)
    places = {addresses.get(host.name) or host.address or host.name for host in hosts}
    return PlannedRun(plan_file, job, shape_of_job(job), machines, cluster, len(places) > 1)


def check_names(machines: Machines, cluster: Cluster) -> None:
    """Raise ConfigError if the plan's hosts with devices do not have the names that a search would
    derive from the cluster."""
    kinds = {kind.name for kind in cluster.workers}
    every = (*machines.hosts, *machines.spares)
    ours = {host.name for host in every if host.workers or host.kind in kinds}
    theirs = {host.name for kind in cluster.workers for host, _ in machines_of_kind(kind)}
    if ours == theirs:
        return
    parts = [
        f"only {where} has {', '.join(sorted(names))}"
        for names, where in ((ours - theirs, "[machines]"), (theirs - ours, "[cluster]"))
        if names
    ]
    raise ConfigError(
        f"[machines] and [cluster] must name the same hosts with devices, but {'; '.join(parts)}",
        hint="if a kind K of [cluster] has one host, [machines] must call it K, else K0, K1, ...;"
        " roadtrain plan CLUSTER.toml --job JOB.toml writes both tables",
    )


def measured_of(home: RunHome) -> MeasuredRun:
    """Read measured.json. Raises LaunchError if the file does not exist or cannot be read."""
    path = home.measured_path
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasuredRun)
    except FileNotFoundError as cause:
        raise LaunchError(
            f"run {home.name!r} is not running and has no measurements: {path} does not exist",
            hint=f"roadtrain launch --resume {home.name}, then --replan after some steps",
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
    """Search for plans of a cluster that can continue the run, or for plans of any kind if the
    options name a new run. `leaves_out`: True if a plan may leave out hosts that had workers.
    Raises ConfigError if no plan can divide the batch, or if a host that must not be left out is
    not in the cluster."""
    computed = {host.name for host in run.machines.worker_hosts}
    there = {host.name for kind in cluster.workers for host, _ in machines_of_kind(kind)}
    if not leaves_out and (lost := sorted(computed - there)):
        raise ConfigError(f"the plan must use {', '.join(lost)}: part of the run's state is there")
    old, plans = run.plan_file.plan, JobPlans(run.job, cluster)

    def fitted(plan: Plan) -> Plan | str:
        new = plans.fitted(plan)
        if isinstance(new, str) or options.new_run:
            return new
        for text, changed in (
            ("micro-batches of another size", new.micro_batch != old.micro_batch),
            ("gradients in another wire format", new.packets.wire != old.packets.wire),
            (f"updates {new.staleness} steps late", new.staleness != old.staleness),
            ("another share of the gradients sent", new.keep != old.keep),
        ):
            if changed:
                return f"losses would differ: {text}"
        return new

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


def replanned(run: PlannedRun, measured: MeasuredRun, options: ReplanOptions) -> ReplanResult:
    """Search for the best plan at the measured rates. Raises ConfigError if no plan fits."""
    old, machines = run.plan_file.plan, run.machines
    of = constants_of(run.plan_file, run.cluster, run.model)
    now, changes = measured_cluster(
        run.cluster, machines, measured.links, slower(measured), of.network
    )
    leaves_out = bool(options.new_run) or measured.shared or old.placement.served
    arranged = best_arrangement(now, partial(search_again, run, of, options, leaves_out))
    pick = arranged.answer.pick
    if pick is None:
        raise ConfigError("no plan that could continue the run fits the measured cluster")
    before = simulate(old, now, run.model, of, checked=False)
    whole = arranged.arrangement.whole
    new = machines_of(pick.plan, whole, options.new_run)
    if options.new_run:
        check_stores(machines, new, options.new_run)
    else:
        new = kept(machines, new)
    file = PlanFile(pick.plan, new, predicted_of(pick.result), whole, run.plan_file.model)
    blind = run.needs_links and not measured.links
    return ReplanResult(file, changes, arranged, old, before.seconds, pick.result.seconds, blind)


def check_stores(old: Machines, new: Machines, name: str) -> None:
    """Raise ConfigError if a new run called `name` would use a store of the existing run."""
    ours, theirs = ({path for h in each.hosts for path in h.directories} for each in (old, new))
    if (same := sorted(ours & theirs)) or name == old.stores_of:
        raise ConfigError(
            f"--new-run {name} would use stores of the existing run: {', '.join(same) or name}",
            hint="choose another name",
        )


def constants_of(plan_file: PlanFile, cluster: Cluster, model: ModelShape) -> Constants:
    """Return the constants with which the simulator reproduces the prediction in a plan, or else
    its default constants."""
    if plan_file.predicted is None:
        return Constants()
    for of in (Constants(), *map(constants, CALIBRATED)):
        result = simulate(plan_file.plan, cluster, model, of, checked=False)
        if abs(result.seconds - plan_file.predicted.seconds) <= SAME * result.seconds:
            return of
    return Constants()


def kept(old: Machines, new: Machines) -> Machines:
    """Combine the worker hosts of the new plan with the services of the old plan, because existing
    stores fix the division of the model. Hosts without workers and services become spare hosts."""
    kinds = {host.name: host.kind for host in (*new.hosts, *new.spares)}
    before = {host.name: host for host in (*old.hosts, *old.spares)}
    workers = [replace(before[h.name], workers=h.workers, kind=h.kind) for h in new.worker_hosts]
    rest = [
        replace(host, kind=kinds.get(host.name, host.kind))
        for host in before.values()
        if host.name not in {worker.name for worker in workers}
    ]
    services = [replace(host, workers=0) for host in rest if host.ports]
    spares = [host for host in rest if not host.ports]
    return replace(old, hosts=(*workers, *services), spares=tuple(spares))


def describe(found: ReplanResult, measured: MeasuredRun) -> list[str]:
    """Return lines for the user: the measured rates, the predicted times of both plans, and the
    reason if the run keeps the old plan."""
    plan, pick = found.plan_file.plan, found.arranged.answer.pick
    cluster = found.plan_file.cluster
    assert pick is not None
    lines = [f"not measured: {why}" for why in measured.missing]
    lines += [f"{name}: {change}" for name, change in found.changes.items()]
    if not found.changes and measured.links:
        lines.append(f"all rates are within {WITHIN:.0%} of those in the plan's cluster")
    elif not measured.links:
        lines.append("no link between hosts was measured")
    if measured.seconds:
        lines.append(f"a step took {show_seconds(measured.seconds)} (median of the last steps)")
    top, share = max(pick.result.busy.items(), key=lambda pair: pair[1])
    lines += [
        f"old plan, predicted     {show_seconds(found.old_s)} a step: {words(found.old, cluster)}",
        f"best plan, predicted    {show_seconds(found.new_s)} a step: {words(plan, cluster)}",
        f"                        {found.arranged.arrangement.text}; {found.arranged.tried}"
        f" arrangements of hosts were tried; {top} is busy {share:.0%}",
    ]
    if not found.better:
        gain = 1 - found.new_s / found.old_s
        lines.append(f"a step gets {gain:.1%} shorter, less than {BETTER:.0%}: the old plan stays")
    elif found.blind:
        lines.append("no link was measured: the old plan stays")
    return lines


def _search_and_write(
    home: RunHome, run: PlannedRun, options: ReplanOptions, report: Report
) -> Path | None:
    """Search for a better plan, report it, and write it. Return the path of the copy of the old
    plan if the run's plan.toml was replaced, else None."""
    measured = measured_of(home)
    found = replanned(run, measured, options)
    for line in describe(found, measured):
        report(line)
    return _written(home, found, options, report)


def _written(
    home: RunHome, found: ReplanResult, options: ReplanOptions, report: Report
) -> Path | None:
    """Write the plan to the file that the options name and to the run's plan.toml, if it is
    adopted. Return the path of the copy of the old plan, or None."""
    text = found.plan_file.to_toml().encode()
    if options.write_plan or options.new_run:
        path = Path(options.write_plan or f"{options.new_run}.plan.toml")
        replace_file(path, text, "writing the plan")
        report(f"plan    {path}")
    if options.new_run:
        report(
            f"start   roadtrain launch {path} JOB.toml --name {options.new_run}, with a job that"
            " has its own run.dir; the existing run keeps its plan, as a store keeps its shape"
        )
    elif options.dry_run and found.adopted:
        report("dry run: the old plan stays")
    elif found.adopted:
        names = (home.path / f"plan.before-{n}.toml" for n in itertools.count(1))
        before = next(path for path in names if not path.exists())
        replace_file(before, home.plan_path.read_bytes(), "keeping the old plan")
        replace_file(home.plan_path, text, "writing the run's plan")
        # The worker times in measured.json are relative to predictions of the old plan.
        home.measured_path.unlink(missing_ok=True)
        report(f"plan    {home.plan_path} (old plan: {before.name})")
        return before
    return None
