"""`roadtrain plan CLUSTER.toml --model M`, or `--job JOB.toml`: the best plan, why it is, what
would make it faster, and why others lost.

As text, JSON (with a schema version) and one HTML page without anything from elsewhere. Exit code 1
where nothing fits, with the least change that would. `command` is the whole of it:

    simulate.load_model, job_plans.shape_of_job   what is trained
    search.search                                 candidates, bounds, simulations: the pick
    job_plans.JobPlans.fitted                     what each candidate is when it trains a job
    plan_report, page                             the answer, for people and programs
    machines_of.machines_of                       which machines run which processes: plan.toml
    job_file                                      a job file; real steps beside simulated ones

Does NOT import torch.
"""

from __future__ import annotations

from pathlib import Path

from roadtrain.config.cluster import Cluster, load_cluster
from roadtrain.config.job import Job, load_job
from roadtrain.config.job_model import layers_of
from roadtrain.config.machines import PlannedModel
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import HEADROOM, PlanFile
from roadtrain.errors import ConfigError
from roadtrain.planner import switches
from roadtrain.planner.job_file import steps_of, write_job_file
from roadtrain.planner.job_keys import batch_of_job, run_name
from roadtrain.planner.job_plans import JobPlans, shape_of_job
from roadtrain.planner.machines_of import machines_of, predicted_of
from roadtrain.planner.page import Point, page
from roadtrain.planner.plan_report import answer_json, answer_text, words
from roadtrain.planner.search import Found, SearchResult, search
from roadtrain.planner.simulate import load_model, perfetto, write_json
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.compute import constants as named
from roadtrain.simulator.run import simulate
from roadtrain.storage.direct import check_file, replace_file


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
    """Find the best plan for a model on a cluster, say why, and why others lost; 1 if none fits.

    Raises ConfigError.

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
    if job and (model or seq_len is not None or job_file or verify):
        raise ConfigError(
            "--model, --seq-len, --job-file and --verify do not go with --job",
            hint="leave them out: the job says what is trained",
        )
    for written in filter(None, (out, json, html, trace, job_file)):
        check_file(Path(written))
    cluster = load_cluster(cluster_file)
    asked = load_job(job) if job else None
    shape = load_model(model, seq_len) if asked is None else shape_of_job(asked)
    of = named(constants) if constants else Constants()
    answer = search(
        cluster,
        shape,
        of,
        fitted=None if asked is None else JobPlans(asked, cluster).fitted,
        goal=goal,
        batch=batch if asked is None else batch_to_plan(asked, batch),
        late=late,
        headroom=headroom,
        placements=[name for name in placements.split(",") if name],
    )
    summary = answer_text(answer, cluster, shape, goal, of)
    print(summary)
    if json:
        write_json(json, answer_json(answer, cluster, shape, goal, of))
    traced = None
    if answer.pick is not None and (html or trace):
        traced = simulate(answer.pick.plan, cluster, shape, of, traced=True, checked=False)
    if html:
        shown = page(f"{shape.name} on {cluster.name}", summary, traced, _front(answer, cluster))
        replace_file(Path(html), shown.encode(), "writing")
    if answer.pick is None:
        return 1
    planned, lacking = launchable(answer.pick, cluster, shape, asked)
    replace_file(Path(out), planned.to_toml().encode(), "writing")
    again = f"simulate {cluster_file} --model {model} --plan {out}"
    lines = [f"plan    {out} (roadtrain {f'launch {out} {job}' if job else again})"]
    lines += [f"launch  not this plan: {lacking}"] if lacking else []
    started = [] if job else switches.commands(answer.pick.plan, cluster)
    print("\n".join([*lines, *(f"start   {line}" for line in started)]))
    if traced is not None and trace:
        write_json(trace, perfetto(traced), indent=None)
    if job_file:
        write_job_file(job_file, answer.pick.plan, cluster)
    return steps_of(cluster_file, model, answer.pick.plan, shape.tokens, lab) if verify else 0


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


def _front(answer: SearchResult, cluster: Cluster) -> list[Point]:
    points = []
    for found in answer.front:
        result, samples = found.result, found.plan.samples
        cost = (result.price or result.joules) / samples
        points.append(Point(result.seconds / samples, cost, words(found.plan, cluster)))
    return points


def launchable(
    found: Found, cluster: Cluster, shape: ModelShape, job: Job | None
) -> tuple[PlanFile, str]:
    """The whole plan.toml, whose stores have the job's run in their names; and why it has no
    machines, where it cannot be launched."""
    predicted = predicted_of(found.result)
    model = PlannedModel(shape.params, shape.tokens, 0 if job is None else layers_of(job))
    machines, why = None, ""
    try:
        machines = machines_of(found.plan, cluster, "" if job is None else run_name(job))
    except ConfigError as error:
        why = str(error).partition("\n")[0]
    return PlanFile(found.plan, machines, predicted, cluster, model), why
