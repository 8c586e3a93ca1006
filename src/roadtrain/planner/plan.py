"""`roadtrain plan CLUSTER.toml --model M`, or `--job JOB.toml`: find the best plan, and explain why
this plan is best, what would make the plan faster and why other plans lost.

If no plan fits, the exit code is 1, and the smallest change that would help is printed. `command`
uses these functions and files:

    fit_inputs.model_of, job_plans.shape_of_job   return the shape of the model
    search.search                                 finds the pick among the candidates
    job_plans.JobPlans.fitted                     adapts each candidate to a job
    plan_report, page                             describe the answer as text, JSON and HTML
    machines_of.machines_of                       assigns processes to machines, for plan.toml
    job_file                                      writes a job file; runs real steps to compare

Importing this module does not import torch.
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
from roadtrain.planner.fit_inputs import model_of
from roadtrain.planner.job_file import steps_of, write_job_file
from roadtrain.planner.job_keys import batch_of_job, run_name, unused_files
from roadtrain.planner.job_plans import JobPlans, shape_of_job
from roadtrain.planner.machines_of import machines_of, predicted_of
from roadtrain.planner.page import Point, page
from roadtrain.planner.plan_report import answer_json, answer_text, words
from roadtrain.planner.search import Found, SearchResult, search
from roadtrain.planner.simulate import perfetto, write_json
from roadtrain.retry import slow_work
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
    """Find the best plan for a model on a cluster, and explain it; the exit code is 1 if none fits.

    Raises ConfigError.

    Args:
        model: a named shape such as OPT-175B, a Hugging Face config.json, or MODULE:FUNCTION
        goal: minimize time, cost or energy per sample (time)
        batch: samples of a step (default: the smallest that is nearly as good as the best)
        headroom: fraction of device and host memory that stays free (0.05)
        placements: try only these placements, separated by commas (all)
        late: also try plans whose updates are one step late
        seq_len: tokens of a sample (a config.json: 4096 or its longest; a shape: as published)
        constants: name of the fitted constants for computing times
        out: file to write the plan to (plan.toml)
        json: also write the answer as JSON to this file
        html: also write the answer as an HTML page with plots to this file
        trace: also write a trace for ui.perfetto.dev to this file
        job: job file to plan for, instead of --model; tries only what `roadtrain launch` can run
        job_file: also write a job file for `roadtrain train` to this file
        verify: run steps of the plan here, compare them, and write the measured rates back
        lab: with --verify, emulate the cluster on this machine (root); writes NAME.lab.toml
    """
    if lab and not verify:
        raise ConfigError("--lab needs --verify", hint="add --verify, or omit --lab")
    if job and (model or seq_len is not None or job_file or verify):
        raise ConfigError(
            "--model, --seq-len, --job-file and --verify cannot be combined with --job",
            hint="omit them: the job defines the model, and `roadtrain launch` runs the plan",
        )
    for written in filter(None, (out, json, html, trace, job_file)):
        check_file(Path(written))
    cluster = load_cluster(cluster_file)
    loaded = load_job(job) if job else None
    shape = model_of(model, seq_len).shape if loaded is None else shape_of_job(loaded)
    of = named(constants) if constants else Constants()
    with slow_work("searching for plans"):
        answer = search(
            cluster,
            shape,
            of,
            fitted=None if loaded is None else JobPlans(loaded, cluster).fitted,
            goal=goal,
            batch=batch if loaded is None else batch_to_plan(loaded, batch),
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
    planned, lacking = launchable(answer.pick, cluster, shape, loaded)
    replace_file(Path(out), planned.to_toml().encode(), "writing")
    again = f"simulate {cluster_file} --model {model} --plan {out}"
    lines = [f"plan    {out} (roadtrain {f'launch {out} {job}' if job else again})"]
    lines += [f"launch  not possible: {lacking}"] if lacking else []
    if loaded is not None and (unused := unused_files(answer.pick.plan, loaded)):
        lines.append(f"note    {unused}")
    started = [] if job else switches.commands(answer.pick.plan, cluster)
    print("\n".join([*lines, *(f"start   {line}" for line in started)]))
    if traced is not None and trace:
        write_json(trace, perfetto(traced), indent=None)
    if job_file:
        write_job_file(job_file, answer.pick.plan, cluster)
    return steps_of(cluster_file, model, answer.pick.plan, shape.tokens, lab) if verify else 0


def batch_to_plan(job: Job, option: int | None) -> int | None:
    """Return the number of samples per step that the job or --batch sets, or None if neither sets
    it. `option`: the value of --batch. Raises ConfigError if they set different numbers."""
    own = batch_of_job(job)
    if option is not None and option < 1:
        raise ConfigError(f"--batch is {option}, but must be at least 1", hint="try --batch 64")
    if own and option and own != option:
        raise ConfigError(
            f"--batch is {option}, but a step of the job has {own} samples (batch_size x passes)",
            hint="omit --batch, or omit batch_size, accumulate and num_microbatches in the job",
        )
    return own or option


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
    """Return the content of plan.toml for a plan, and the reason why the plan cannot be launched
    ("" if it can). A plan that cannot be launched has no machines. The names of stores contain the
    name of the job's run."""
    predicted = predicted_of(found.result)
    model = PlannedModel(shape.params, shape.tokens, 0 if job is None else layers_of(job))
    machines, why = None, ""
    try:
        machines = machines_of(found.plan, cluster, "" if job is None else run_name(job))
    except ConfigError as error:
        why = str(error).partition("\n")[0]
    return PlanFile(found.plan, machines, predicted, cluster, model), why
