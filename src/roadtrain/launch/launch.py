"""`roadtrain launch`: from a plan and a job to a running training.

    here            check what was typed, write the run's home (home.py), start its supervisor
                    (supervisor_process.py), show its lines until the run has ended (follow.py)
    supervise.py    in the supervisor's process: plan and job -> the processes that they mean
                    (resolve.py), an engine that can start them (engines.py), checks of its hosts
                    (checks.py)
    supervisor.py   start, watch and end the processes until the run has ended

What is asked of a run by its name is in run_verbs.py. Does NOT start any process of the run.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from roadtrain.config.job import Job, load_job
from roadtrain.config.plan_file import PlanFile, load_plan_file
from roadtrain.errors import ConfigError
from roadtrain.launch.engines import (
    ENGINES,
    default_engine,
    function_of,
    is_alive,
    machines_of,
)
from roadtrain.launch.follow import follow
from roadtrain.launch.home import LaunchRecord, RunHome
from roadtrain.launch.resolve import resolve
from roadtrain.launch.run_verbs import (
    existing_run,
    resume_run,
    show_logs,
    stop_run,
    tell_host,
)
from roadtrain.launch.supervisor_process import start
from roadtrain.options.names import unknown_name
from roadtrain.planner.job_keys import batch_of_job, contradicted

# --write KIND -> "module:function" of a ResolvedRun, --out and --image; it returns lines to print.
WRITERS: Mapping[str, str] = {
    "slurm": "roadtrain.launch.write_slurm:write_slurm",
    "kubernetes": "roadtrain.launch.write_kubernetes:write_kubernetes",
}
REPLAN = "roadtrain.launch.replan:replan_run"  # the planner comes in
DRY_RUN = "roadtrain.launch.dry_run:dry_run"
THEN = ("keep", "stop")  # of --if-launcher-dies


def command(
    plan: str = "",
    job: str = "",
    *,
    on: str = "",
    name: str = "",
    ray_address: str = "",
    detach: bool = False,
    dry_run: bool = False,
    if_launcher_dies: str = "keep",
    write: str = "",
    out: str = "",
    image: str = "",
    stop: str = "",
    resume: str = "",
    replan: str = "",
    logs: str = "",
    leaves: str = "",
    comes: str = "",
    notice: float = 120.0,
    write_plan: str = "",
    new_run: str = "",
    placements: str = "",
) -> int:
    """Run a plan: all processes of a job on the hosts that it names, kept running until the job is
    done. What ends by itself is started again; what is done is said before.

    Raises RoadtrainError.

    Args:
        on: what the run is launched on: here, lab or ray (here, where all hosts of the plan are
            this one)
        name: of the run (the job file's)
        ray_address: HOST:PORT of the Ray cluster
        detach: return when the run is started
        dry_run: only print what would start where, and which files would be written
        if_launcher_dies: keep: the run goes on; stop: it ends, its step committed (keep)
        write: slurm or kubernetes: write files that start the run there, start nothing
        out: directory that --write writes to
        image: with --write kubernetes: the container image, whose `python` has roadtrain
        stop: NAME: end a run, its step committed
        resume: NAME: go on with a run that has ended, or whose supervisor was killed
        replan: NAME: plan again by what the run has measured
        logs: NAME: print the run's lines, and those that come
        leaves: NAME:HOST: a host will be gone within --notice
        comes: NAME:HOST: a host is there, again or for the first time
        notice: seconds until the host that --leaves names is gone (120)
        write_plan: file that the plan of --replan goes to as well
        new_run: with --replan: NAME of a run that is planned to begin anew; this one goes on as it
            is
        placements: with --new-run: only these, with commas between (all)
    """
    verbs: dict[str, tuple[str, Callable[[str], int]]] = {
        "stop": (stop, stop_run),
        "resume": (resume, lambda run: resume_run(run, if_launcher_dies, detach, ray_address)),
        "replan": (
            replan,
            lambda run: function_of(REPLAN)(
                existing_run(run),
                {
                    "dry_run": dry_run,
                    "write_plan": write_plan,
                    "new_run": new_run,
                    "placements": tuple(name for name in placements.split(",") if name),
                    "detach": detach,
                    "if_launcher_dies": if_launcher_dies,
                },
                partial(resume_run, run, paused=True),
            ),
        ),
        "logs": (logs, show_logs),
        "leaves": (leaves, lambda run: tell_host("leaves", run, f"{notice:g}")),
        "comes": (comes, lambda run: tell_host("comes", run)),
    }
    asked = [(verb, run, do) for verb, (run, do) in verbs.items() if run]
    if len(asked) > 1 or (asked and plan):
        also = plan or f"--{asked[1][0]}"
        raise ConfigError(f"--{asked[0][0]} and {also}: one of them at a time")
    if not 0 <= notice < math.inf:
        raise ConfigError(f"--notice {notice:g}: 0 seconds or more", hint="--notice 120")
    if if_launcher_dies not in THEN:
        raise unknown_name("--if-launcher-dies", if_launcher_dies, THEN)
    if detach and if_launcher_dies == "stop":
        raise ConfigError("--detach and --if-launcher-dies stop: the launcher does not stay")
    if dry_run and (write or (asked and not replan)):
        raise ConfigError(
            f"--dry-run and --{'write' if write else asked[0][0]} do not go together",
            hint="--dry-run belongs to PLAN.toml JOB.toml, or to --replan",
        )
    for _, run, do in asked:
        return do(run)
    if not plan or not job:
        raise ConfigError("what is to be launched?", hint="roadtrain launch PLAN.toml JOB.toml")
    plan_file, checked_job = load_plan_file(plan), load_job(job)
    check_batch(plan_file, checked_job)
    home = RunHome.of(name or Path(job).stem)
    if write:
        return write_files(plan_file, checked_job, home.name, write, out, image)
    if dry_run:
        return describe_run(plan_file, checked_job, home)
    record = LaunchRecord(
        name=home.name,
        engine=on or default_engine(machines_of(plan_file)),
        launched=time.time(),
        directory=os.getcwd(),
        if_launcher_dies=if_launcher_dies,
        ray_address=ray_address,
    )
    launch(home, record, Path(plan).read_text(), checked_job)
    return follow(home, record, detach=detach)


def launch(home: RunHome, record: LaunchRecord, plan: str, job: Job) -> None:
    """Write the files of a new run and start its supervisor. plan: the content of its file. Raises
    RoadtrainError."""
    check_engine(record.engine)
    with home.starting():
        check_directory(home, job)
        if home.exists and is_alive(home):
            raise ConfigError(
                f"run {home.name!r} is alive",
                hint=f"another --name, or roadtrain launch --stop {home.name}",
            )
        home.write(record, plan, job.to_toml())
        start(home, record)


def check_batch(plan_file: PlanFile, job: Job) -> None:
    """Raises ConfigError where a step of the job is of other samples, or its degrees are others,
    than the plan's. Only the file that the user wrote tells what it states and what is a
    default."""
    asked, planned = batch_of_job(job), plan_file.plan.samples
    if asked not in (None, planned):
        raise ConfigError(
            f"a step of the job is {asked} samples (data.batch_size x passes), of the plan"
            f" {planned}",
            hint="plan anew for this job (roadtrain plan CLUSTER.toml --job JOB.toml), or leave"
            " batch_size and accumulate out of it",
        )
    if why := contradicted(plan_file.plan, job):
        raise ConfigError(why, hint="plan anew for this job, or leave it out of the job")


def check_engine(name: str) -> None:
    """Raises ConfigError for a name that is none, LaunchError for one that is not installed."""
    if name not in ENGINES:
        raise unknown_name("--on", name, ENGINES)
    if supervise := ENGINES[name].supervise:
        function_of(supervise)


def check_directory(home: RunHome, job: Job) -> None:
    """Raises ConfigError where a run of another name trains in the job's directory just now."""
    mine = os.path.realpath(job.run.dir)
    for path in sorted(home.path.parent.glob("*/launch.json")):
        other = RunHome(path.parent)
        if other.path == home.path or not other.is_supervised():
            continue
        theirs = load_job(other.job_path).run.dir
        if os.path.realpath(Path(other.record().directory, theirs)) == mine:
            raise ConfigError(
                f"run {other.name!r} trains in {mine} just now",
                hint=f"another run.dir, or roadtrain launch --stop {other.name}",
            )


def describe_run(plan_file: PlanFile, job: Job, home: RunHome) -> int:
    """--dry-run: print what would be started. An engine knows the addresses that the plan does not
    say; names stand for them."""
    names = {host.name: host.address or host.name for host in machines_of(plan_file).hosts}
    run = resolve(plan_file, job, name=home.name, addresses=names, token="")
    print(function_of(DRY_RUN)(run, home))
    return 0


def write_files(plan_file: PlanFile, job: Job, name: str, kind: str, out: str, image: str) -> int:
    """--write: nothing is started."""
    if kind not in WRITERS:
        raise unknown_name("--write", kind, WRITERS)
    if not out:
        raise ConfigError("--write needs a directory", hint="--out DIR")
    if (kind == "kubernetes") != bool(image):
        raise ConfigError(
            f"--write {kind} and --image {image or 'is not given'}",
            hint="--image NAME belongs to --write kubernetes",
        )
    run = resolve(plan_file, job, name=name, addresses={}, token=secrets.token_hex())
    for line in function_of(WRITERS[kind])(run, Path(out), image):
        print(line)
    return 0
