"""`roadtrain plan CLUSTER.toml --model M`, or `--job JOB.toml`: the best plan, why it is, what
would make it faster, and why others lost.

As text, JSON (with a schema version) and one HTML page without anything from elsewhere. Exit code 1
where nothing fits, with the least change that would. Does NOT import torch.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path
from typing import Any

import tomli_w

from roadtrain.config.cluster import Cluster, load_cluster
from roadtrain.config.job import Job, load_job
from roadtrain.config.job_model import layers_of
from roadtrain.config.machines import PlannedModel
from roadtrain.config.models import ModelShape
from roadtrain.config.plan import HEADROOM, Plan
from roadtrain.config.plan_file import PlanFile
from roadtrain.errors import ConfigError
from roadtrain.planner import switches
from roadtrain.planner.candidates import EVERY
from roadtrain.planner.job_keys import batch_of_job, degrees, run_name, step_keys
from roadtrain.planner.job_plans import JobPlans, shape_of_job
from roadtrain.planner.machines_of import machines_of, predicted_of
from roadtrain.planner.page import Point, page
from roadtrain.planner.search import (
    Family,
    Found,
    SearchResult,
    least_change,
    main_reason,
    search,
)
from roadtrain.planner.simulate import (
    SCHEMA,
    as_json,
    assumed,
    assumed_json,
    load_model,
    perfetto,
    report,
)
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.compute import constants as named
from roadtrain.simulator.memory import kept_free
from roadtrain.simulator.run import simulate
from roadtrain.storage.direct import check_file, replace_file
from roadtrain.units import show_bytes, show_joules, show_number, show_params, show_seconds

SCORES = {"time": show_seconds, "cost": show_number, "energy": show_joules}
BETWEEN = ("spares", "separate")  # sums of what hosts send to each other


def words(plan: Plan, cluster: Cluster | None = None) -> str:
    """Describe a plan in one sentence.

    Args:
        cluster: The cluster that it is for, which says whether gradients leave a host at all.
    """
    place, parallelism = plan.placement, plan.parallelism
    rests = {
        "device": "on every device",
        "split": "split over the devices",
        "host": "in the hosts' memory",
        "ssd": "on the hosts' SSDs",
        "server": "at the server",
    }
    sums = {
        "ring": "a ring",
        "switch": f"switches as {plan.packets.wire}",
        "spares": "the summation service",
        "separate": "the spare hosts",
        "relay": "a relay beside each host",
        "server": "the server",
    }
    widths = "+".join(map(str, parallelism.widths))
    parts = [
        f"{place.name}: parameters {rests[place.parameters]}, optimizer state {rests[place.state]}"
    ]
    if max(plan.widths) > 1:
        inside = cluster is not None and place.sum in BETWEEN and _stages_are_inside(plan, cluster)
        parts.append(
            f"gradients summed by {'the devices of a host' if inside else sums[place.sum]}"
        )
    parts.append(
        f"updates {'beside the SSDs' if place.update == 'ssd' else 'on the ' + place.update}"
    )
    groups = (
        (widths or parallelism.dp, "data"),
        (parallelism.cp, "context"),
        (parallelism.tp, "tensor"),
        (parallelism.pp, "pipeline"),
    )
    ranks = [f"{n} {what}" for n, what in groups if n != 1]
    parts.append(" x ".join(ranks) + "-parallel" if ranks else "one device")
    if parallelism.ep > 1:
        parts.append(f"experts spread over {parallelism.ep}")
    if parallelism.virtual_stages > 1:
        parts.append(f"{parallelism.virtual_stages} parts of the model a stage, in turn")
    if parallelism.stages:
        parts.append(f"stages of {', '.join(map(str, parallelism.stages))} layers")
    parts.append(
        f"micro-batch {plan.micro_batch} x {plan.num_microbatches}"
        + (" over all replicas" if widths else "")
        + (", activation checkpointing" if plan.activation_checkpointing else "")
    )
    if plan.memory.kept or (plan.placement.streamed and plan.memory.slots >= EVERY):
        parts.append("blocks kept from forward to backward")
    if plan.staleness:
        parts.append(f"updates {plan.staleness} step late (lossy)")
    return "; ".join(parts)


def _stages_are_inside(plan: Plan, cluster: Cluster) -> bool:
    """Whether no stage of the plan is on more than one host."""
    hosts = [host for kind in cluster.workers for host in [kind] * kind.count]
    slots = [number for number, host in enumerate(hosts) for _ in range(host.devices)]
    ends = itertools.pairwise(plan.parallelism.first_ranks)
    return all(len(set(slots[begin:stop])) == 1 for begin, stop in ends)


def told(
    answer: SearchResult, cluster: Cluster, model: ModelShape, goal: str, of: Constants
) -> str:
    """For people."""
    pick = answer.pick
    if pick is None:
        return nothing(answer, cluster, model, of)
    result = pick.result
    top, share = max(result.busy.items(), key=lambda pair: pair[1])
    scored = f"{goal} a sample {SCORES[goal](pick.score)}"
    lines = [
        "pick    " + words(pick.plan, cluster),
        batch_line(answer, model),
        report(result, cluster, model, of),
        f"why     {top} is busy {share:.0%} of a step; {scored}",
    ]
    if answer.gains:
        lines.append(
            "10 % more of "
            + ", ".join(f"{name} takes off {gain:.1%}" for name, gain in answer.gains.items())
        )
    else:
        lines.append("10 % more of no single resource helps")
    if (runner := answer.runner_up) is not None:
        top, share = max(runner.result.busy.items(), key=lambda pair: pair[1])
        lines.append(
            f"second  {words(runner.plan, cluster)}: {runner.score / pick.score - 1:+.1%} {goal}"
            f" a sample; {top} is busy {share:.0%}"
        )
        lines.append(
            "        it would win with "
            + (
                " or with ".join(answer.flips)
                if answer.flips
                else "none of the rates halved or doubled"
            )
        )
    free = unpriced(cluster, goal)
    return "\n".join(
        [*lines, *([f"assumed {', '.join(free)}"] if free else []), *families(answer, pick)]
    )


def batch_line(answer: SearchResult, model: ModelShape) -> str:
    tokens = f" ({answer.batch * model.tokens} tokens)" if model.tokens > 1 else ""
    return f"batch   {answer.batch} samples{tokens} a step: {answer.chosen or 'as given'}"


def unpriced(cluster: Cluster, goal: str) -> list[str]:
    """Of what the goal counts, what the cluster file has no figure of: it counts as nothing."""
    if goal == "cost":
        return [
            f"hosts.{host.name}.price_per_hour 0"
            for host in cluster.hosts
            if not host.price_per_hour
        ]
    if goal == "energy":
        return [
            f"hosts.{host.name}.{what}peak_watts {of.idle_watts:g}"
            for host in cluster.hosts
            for what, of in (("", host), ("device.", host.device))
            if of is not None and not of.peak_watts
        ]
    return []


def families(answer: SearchResult, pick: Found | None) -> Iterable[str]:
    for family in sorted(
        answer.families.values(), key=lambda f: f.best.score if f.best else f.least
    ):
        yield f"  {family.placement:17}{family.tried:5} plans: {fate(family, pick)}"


def fate(family: Family, pick: Found | None) -> str:
    parts = []
    if pick is not None and family.best is pick:
        parts.append("the pick")
    elif family.best is not None and pick is not None:
        parts.append(f"best {family.best.score / pick.score - 1:+.1%}")
    elif family.pruned and pick is not None:
        parts.append(f"at least {family.least / pick.score - 1:+.1%} by their bound")
    for reason, count in sorted(family.refused.items(), key=lambda pair: -pair[1]):
        parts.append(f"{count} refused: {reason}")
    parts += [f"{count} not tried: {reason}" for reason, count in family.left_out.items()]
    if family.nearest is not None:
        need, _ = family.nearest
        parts.append(
            f"nearest miss {show_bytes(need.nbytes)} of {show_bytes(need.room)} ({need.where})"
        )
    return "; ".join(parts) or "none simulated"


def nothing(answer: SearchResult, cluster: Cluster, model: ModelShape, of: Constants) -> str:
    """Where nothing fits: both numbers and the least change; else the reason that most placements
    have, and what to do."""
    lines = [
        f"no plan fits: {model.name} ({show_params(model.params)} parameters) on {cluster.name}"
    ]
    if (reason := main_reason(answer)) is not None:
        lines += [f"why     {reason[0]}", *([f"hint    {reason[1]}"] if reason[1] else [])]
    if (near := least_change(answer)) is not None:
        need, plan = near
        lines += [
            (
                f"least change: {show_bytes(need.lacking)} more for {need.where}"
                f" ({show_bytes(need.nbytes)} instead of {show_bytes(need.room)}) makes this fit:"
                f" {words(plan, cluster)}"
            ),
            f"memory  {kept_free(plan)}",
        ]
    lines += assumed(cluster, model, of, None if near is None else near[1])
    return "\n".join([*lines, *families(answer, None)])


def plain(
    answer: SearchResult, cluster: Cluster, model: ModelShape, goal: str, of: Constants
) -> dict[str, Any]:
    def one(found: Found | None) -> dict[str, Any] | None:
        return (
            None
            if found is None
            else {
                **as_json(found.result, cluster, model, of),
                "score": found.score,
                "words": words(found.plan, cluster),
            }
        )

    near = least_change(answer)
    return {
        "schema": SCHEMA,
        "goal": goal,
        "pick": one(answer.pick),
        "runner_up": one(answer.runner_up),
        "gains": answer.gains,
        "runner_up_wins_with": answer.flips,
        "front": [one(found) for found in answer.front],
        "families": [
            {
                "placement": f.placement,
                "tried": f.tried,
                "simulated": f.simulated,
                "pruned": f.pruned,
                "refused": f.refused,
                "left_out": f.left_out,
                "nearest": None if f.nearest is None else asdict(f.nearest[0]),
                "best": None if f.best is None else f.best.score,
            }
            for f in answer.families.values()
        ],
        "least_change": None
        if near is None
        else {**asdict(near[0]), "plan": words(near[1], cluster)},
        "batch": answer.batch,
        "batch_chosen": answer.chosen,
        "unpriced": unpriced(cluster, goal),
        **assumed_json(cluster, model, of, None if answer.pick is None else answer.pick.plan),
    }


def job_text(plan: Plan, cluster: Cluster | None = None) -> str | None:
    """What `roadtrain train` needs of it, where there is a runtime for the placement. `cluster`:
    whose switches it names."""
    own: dict[str, Any] = {
        "data": {"batch_size": plan.micro_batch},
        "model": {"dtype": "bf16" if plan.sizes.parameter_bytes == 2 else "fp32"},
        **step_keys(plan),
    }
    if plan.update_at == "step":
        own["optimizer"]["clip_norm"] = 1.0
    kept = "all" if plan.memory.slots >= EVERY else "auto"
    relayed = "all" if plan.memory.kept else "auto"
    where: dict[str, dict[str, Any]] = {
        "files": {"store": {"files": ["{run}/store"]}},
        "zero-offload": {"store": {"files": []}},
        "server": {"servers": {"addresses": ["HOST:PORT"], "buffering": kept}},
        "smartnic": {
            "servers": {"addresses": ["HOST:PORT"], "relay": "4GiB", "buffering": relayed}
        },
    }
    ranks = plan.parallelism
    staged = plan.placement.name == "zero1" and ranks.cp == ranks.ep == 1
    if staged and not plan.activation_checkpointing:
        del own["optimizer"]["accumulate"]
        return tomli_w.dumps({**own, "parallelism": degrees(plan)})
    if plan.placement.fans_in and cluster is not None:
        keys = switches.job_keys(plan, cluster)
        where[plan.placement.name] = {
            "servers": {"addresses": ["HOST:PORT"], "buffering": kept, **keys}
        }
    if plan.placement.name not in where or ranks.tp > 1 or ranks.pp > 1:
        return None
    return tomli_w.dumps({**own, **where[plan.placement.name]})


def launchable(
    found: Found, cluster: Cluster, model: PlannedModel, run: str = ""
) -> tuple[PlanFile, str]:
    """The whole plan.toml, whose stores have the run's name in theirs; and why it has no machines,
    where it cannot be launched."""
    predicted = predicted_of(found.result)
    try:
        machines = machines_of(found.plan, cluster, run)
    except ConfigError as error:
        return PlanFile(found.plan, None, predicted, cluster, model), str(error).partition("\n")[0]
    return PlanFile(found.plan, machines, predicted, cluster, model), ""


def write_job_file(path: str, plan: Plan, cluster: Cluster) -> None:
    if (text := job_text(plan, cluster)) is None:
        print(f"no job file: `roadtrain train` cannot run this: {words(plan, cluster)}")
        return
    replace_file(Path(path), text.encode(), "writing")
    more = "put your servers in where it says HOST:PORT"
    if "[parallelism]" in text:
        more = "torchrun starts it, one process a device"
    print(f"job     {path}: add [model.config]; {more}")


def steps_of(cluster_file: str, model: str, plan: Plan, seq_len: int, lab: bool) -> int:
    """Real steps of the plan, here or in the lab, beside simulated ones, as `roadtrain
    calibrate` does. Raises ConfigError for a plan that has no runtime there, RoadtrainError."""
    text, path = (
        job_text(plan),
        Path(model) / "config.json" if Path(model).is_dir() else Path(model),
    )
    served, many = lab and plan.placement.name == "server", plan.parallelism.devices
    if (
        text is None
        or plan.placement.name not in ("files", "zero-offload", "server")[: 2 + served]
        or (many > (plan.parallelism.dp if served else 1))
    ):
        where = "in the lab" if lab else "by one worker of this host"
        raise ConfigError(
            f"placement {plan.placement.name} on {many} device(s) cannot be run {where}",
            hint="--placements files,zero-offload on a cluster of one device"
            + (", or --placements server" if lab else ", or --lab"),
        )
    if path.suffix != ".json":
        raise ConfigError(
            f"{model} is a shape, there is nothing to run",
            hint="--model config.json: a model's config",
        )
    tree = tomllib.loads(text)
    tree["model"]["config"] = {
        name: value for name, value in loads(path.read_text()).items() if value is not None
    }
    tree["data"]["seq_len"] = seq_len
    with tempfile.TemporaryDirectory(prefix="roadtrain-verify-") as home:
        file = Path(home) / "job.toml"
        file.write_text(tomli_w.dumps({**tree, "run": {"dir": f"{home}/run"}}))
        calibrate = importlib.import_module("roadtrain.planner.calibrate")  # torch comes in
        told: int = calibrate.command(cluster_file, str(file), lab=lab)
    return told


def batch_to_plan(job: Job, given: int | None) -> int | None:
    """Samples of a step: the job's, or those of --batch. Raises ConfigError where both say it."""
    own = batch_of_job(job)
    if given is not None and given < 1:
        raise ConfigError(f"--batch {given}: a step has 1 sample or more", hint="--batch 64")
    if own and given and own != given:
        raise ConfigError(
            f"--batch {given}, and a step of the job is {own} samples (data.batch_size x passes)",
            hint="leave --batch out, or batch_size, accumulate and num_microbatches of the job",
        )
    return own or given


def command(
    cluster_file: str,
    *,
    model: str = "",
    goal: str = "time",
    batch: int | None = None,
    placements: str = "",
    late: bool = False,
    seq_len: int | None = None,
    headroom: float = HEADROOM,
    constants: str = "",
    out: str = "plan.toml",
    json: str = "",
    html: str = "",
    trace: str = "",
    job_file: str = "",
    job: str = "",
    verify: bool = False,
    lab: bool = False,
) -> int:
    """`roadtrain plan`. Raises ConfigError.

    Args:
        model: a named shape as OPT-175B, a Hugging Face config.json, or MODULE:FUNCTION
        goal: time, cost or energy, each a sample (time)
        batch: samples of a step (the least that is near the best)
        headroom: share of devices' and hosts' memory that stays free (0.05)
        placements: only these, with commas between (all)
        late: also plans whose updates are a step late
        seq_len: tokens of a sample (a config.json: 4096 or its longest; a shape: as published)
        constants: fitted constants of computing, by name
        out: where the pick goes (plan.toml)
        json: also write all that is told to this file
        html: also write one page with plots
        trace: write a trace for ui.perfetto.dev to this file
        job: the job that `roadtrain launch` shall run: its model, and only what can be launched
        job_file: write what `roadtrain train` needs of it to this file
        verify: then run steps of it here beside simulated ones; write the measured rates back
        lab: --verify on the cluster emulated on this machine (root); writes NAME.lab.toml
    """
    if lab and not verify:
        raise ConfigError("--lab says where steps are run, and none are", hint="--verify --lab")
    for written in filter(None, (out, json, html, trace, job_file)):
        check_file(Path(written))
    cluster = load_cluster(cluster_file)
    if job and (model or seq_len is not None or job_file or verify):
        raise ConfigError(
            "--model, --seq-len, --job-file and --verify do not go with --job",
            hint="leave them out: the job says what is trained",
        )
    asked = load_job(job) if job else None
    one = load_model(model, seq_len) if asked is None else shape_of_job(asked)
    of = named(constants) if constants else Constants()
    answer = search(
        cluster,
        one,
        of,
        fitted=None if asked is None else JobPlans(asked, cluster).fitted,
        goal=goal,
        batch=batch if asked is None else batch_to_plan(asked, batch),
        late=late,
        headroom=headroom,
        placements=[name for name in placements.split(",") if name],
    )
    summary = told(answer, cluster, one, goal, of)
    print(summary)
    if json:
        replace_file(
            Path(json),
            (dumps(plain(answer, cluster, one, goal, of), indent=1) + "\n").encode(),
            "writing",
        )
    traced = None
    if answer.pick is not None and (html or trace):
        traced = simulate(answer.pick.plan, cluster, one, of, traced=True, checked=False)
    if html:
        front = [
            Point(
                found.result.seconds / found.plan.samples,
                (found.result.price or found.result.joules) / found.plan.samples,
                words(found.plan, cluster),
            )
            for found in answer.front
        ]
        shown = page(f"{one.name} on {cluster.name}", summary, traced, front)
        replace_file(Path(html), shown.encode(), "writing")
    if answer.pick is None:
        return 1
    planned_for = PlannedModel(one.params, one.tokens, layers_of(asked) if asked else 0)
    run = run_name(asked) if asked else ""
    planned, lacking = launchable(answer.pick, cluster, planned_for, run)
    replace_file(Path(out), planned.to_toml().encode(), "writing")
    again = f"simulate {cluster_file} --model {model} --plan {out}"
    lines = [f"plan    {out} (roadtrain {f'launch {out} {job}' if job else again})"]
    lines += [f"launch  not this plan: {lacking}"] if lacking else []
    started = [] if job else switches.commands(answer.pick.plan, cluster)
    print("\n".join([*lines, *(f"start   {line}" for line in started)]))
    if traced is not None and trace:
        replace_file(Path(trace), (dumps(perfetto(traced)) + "\n").encode(), "writing")
    if job_file:
        write_job_file(job_file, answer.pick.plan, cluster)
    return steps_of(cluster_file, model, answer.pick.plan, one.tokens, lab) if verify else 0
