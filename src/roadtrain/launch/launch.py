"""`roadtrain launch`: train a job by a plan.

    this file       checks the arguments, writes the run's home (home.py), starts the supervisor
                    (supervisor_process.py) and prints the log until the run has ended (follow.py)
    supervise.py    in the supervisor's process: derives the processes from plan and job
                    (resolve.py), creates an engine (engines.py) and checks its hosts (checks.py)
    supervisor.py   starts, watches and ends the processes until the run has ended

Options that act on an existing run are in run_verbs.py. Does NOT start workers or servers: the
supervisor does.
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
from roadtrain.launch.paused_run import ReplanOptions
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
from roadtrain.planner.job_keys import batch_of_job, contradicted, unused_files

# For each value of --write, a "module:function" that takes (ResolvedRun, --out, --image), writes
# files and returns lines to print.
WRITERS: Mapping[str, str] = {
    "slurm": "roadtrain.launch.write_slurm:write_slurm",
    "kubernetes": "roadtrain.launch.write_kubernetes:write_kubernetes",
}
REPLAN = "roadtrain.launch.replan:replan"  # imported on first use, as it imports the planner
DRY_RUN = "roadtrain.launch.dry_run:dry_run"
IF_DIES = ("keep", "stop")  # values of --if-launcher-dies


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
    """Train a job by a plan: start all processes on the plan's hosts and keep them running until
    the job is done. A process that ends early is restarted. Each action is first announced in the
    log.

    Raises RoadtrainError.

    Args:
        on: where to run: here, lab or ray (here, if all hosts of the plan are this machine)
        name: name of the run (default: the name of the job file without its suffix)
        ray_address: HOST:PORT of the Ray cluster
        detach: return as soon as the run is started
        dry_run: only print which processes would start, and which files would be written
        if_launcher_dies: keep: the run goes on; stop: the run commits its step and ends (keep)
        write: slurm or kubernetes: only write files from which Slurm or Kubernetes starts the run
        out: directory for the files that --write creates
        image: with --write kubernetes: container image whose `python` has roadtrain installed
        stop: NAME: commit the run's step and end the run
        resume: NAME: continue a run that has ended, or whose supervisor was killed
        replan: NAME: measure the run's links and step times, and search for a better plan
        logs: NAME: print the run's log, and follow it while the run is alive
        leaves: NAME:HOST: announce that a host will be lost within --notice seconds
        comes: NAME:HOST: announce that a host is available: a new host, or a lost host that is back
        notice: seconds until the host that --leaves names is lost (120)
        write_plan: with --replan: also write the plan to this file
        new_run: with --replan: NAME of a new run to plan; the existing run keeps its plan
        placements: with --new-run: the placements to try, separated by commas (all)
    """
    verbs: dict[str, tuple[str, Callable[[str], int]]] = {
        "stop": (stop, stop_run),
        "resume": (resume, lambda run: resume_run(run, if_launcher_dies, detach, ray_address)),
        "replan": (
            replan,
            lambda run: function_of(REPLAN)(
                existing_run(run),
                ReplanOptions(
                    dry_run=dry_run,
                    write_plan=write_plan,
                    new_run=new_run,
                    placements=tuple(name for name in placements.split(",") if name),
                    detach=detach,
                    if_launcher_dies=if_launcher_dies,
                ),
                partial(resume_run, run, paused=True),
            ),
        ),
        "logs": (logs, show_logs),
        "leaves": (leaves, lambda run: tell_host("leaves", run, f"{notice:g}")),
        "comes": (comes, lambda run: tell_host("comes", run)),
    }
    chosen = [(verb, run, do) for verb, (run, do) in verbs.items() if run]
    if len(chosen) > 1 or (chosen and plan):
        also = plan or f"--{chosen[1][0]}"
        raise ConfigError(f"--{chosen[0][0]} and {also} cannot be combined", hint="use only one")
    if not 0 <= notice < math.inf:
        raise ConfigError(f"--notice is {notice:g} s, but must be at least 0", hint="--notice 120")
    if if_launcher_dies not in IF_DIES:
        raise unknown_name("--if-launcher-dies", if_launcher_dies, IF_DIES)
    if detach and if_launcher_dies == "stop":
        raise ConfigError("--detach would end the run, because --if-launcher-dies is stop")
    if dry_run and (write or (chosen and not replan)):
        raise ConfigError(
            f"--dry-run and --{'write' if write else chosen[0][0]} cannot be combined",
            hint="--dry-run goes with PLAN.toml JOB.toml, or with --replan",
        )
    for _, run, do in chosen:
        return do(run)
    if not plan or not job:
        raise ConfigError("a plan and a job are needed", hint="roadtrain launch PLAN.toml JOB.toml")
    plan_file, checked_job = load_plan_file(plan), load_job(job)
    check_batch(plan_file, checked_job)
    if unused := unused_files(plan_file.plan, checked_job):
        print(f"note: {unused}")
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
    """Write the files of a new run and start its supervisor. `plan`: the content of plan.toml.
    Raises RoadtrainError."""
    check_engine(record.engine)
    with home.starting():
        check_directory(home, job)
        if home.exists and is_alive(home):
            raise ConfigError(
                f"run {home.name!r} is running",
                hint=f"use another --name, or end the run: roadtrain launch --stop {home.name}",
            )
        home.write(record, plan, job.to_toml())
        start(home, record)


def check_batch(plan_file: PlanFile, job: Job) -> None:
    """Raise ConfigError if the job sets a batch or parallel degrees that differ from the plan's.
    `job`: the job as loaded from the user's file."""
    batch, planned = batch_of_job(job), plan_file.plan.samples
    if batch not in (None, planned):
        raise ConfigError(
            f"a step of the job has {batch} samples (data.batch_size x micro-batches), but a step"
            f" of the plan has {planned}",
            hint="plan again for this job (roadtrain plan CLUSTER.toml --job JOB.toml), or leave"
            " batch_size and accumulate out of the job",
        )
    if why := contradicted(plan_file.plan, job):
        raise ConfigError(why, hint="plan again for this job, or leave the key out of the job")


def check_engine(name: str) -> None:
    """Raise ConfigError if there is no engine called `name`, and LaunchError if the engine needs a
    package that is not installed."""
    if name not in ENGINES:
        raise unknown_name("--on", name, ENGINES)
    if supervise := ENGINES[name].supervise:
        function_of(supervise)


def check_directory(home: RunHome, job: Job) -> None:
    """Raise ConfigError if another run is training in the job's directory."""
    mine = os.path.realpath(job.run.dir)
    for path in sorted(home.path.parent.glob("*/launch.json")):
        other = RunHome(path.parent)
        if other.path == home.path or not other.is_supervised():
            continue
        theirs = load_job(other.job_path).run.dir
        if os.path.realpath(Path(other.record().directory, theirs)) == mine:
            raise ConfigError(
                f"run {other.name!r} is training in {mine}",
                hint=f"use another run.dir, or end that run: roadtrain launch --stop {other.name}",
            )


def describe_run(plan_file: PlanFile, job: Job, home: RunHome) -> int:
    """Print what a launch would start and write, for the option --dry-run, and return the exit
    code."""
    names = {host.name: host.address or host.name for host in machines_of(plan_file).hosts}
    run = resolve(plan_file, job, name=home.name, addresses=names, token="")
    print(function_of(DRY_RUN)(run, home))
    return 0


def write_files(plan_file: PlanFile, job: Job, name: str, kind: str, out: str, image: str) -> int:
    """Write the files from which Slurm or Kubernetes (`kind`) starts a run, for the option --write,
    and return the exit code. `image`: the container image for Kubernetes, else ""."""
    if kind not in WRITERS:
        raise unknown_name("--write", kind, WRITERS)
    if not out:
        raise ConfigError("--write needs a directory for the files", hint="give --out DIR")
    if (kind == "kubernetes") != bool(image):
        raise ConfigError(
            f"--write {kind} was given with {f'--image {image}' if image else 'no --image'}",
            hint="--write kubernetes needs --image NAME; --write slurm does not accept --image",
        )
    run = resolve(plan_file, job, name=name, addresses={}, token=secrets.token_hex())
    for line in function_of(WRITERS[kind])(run, Path(out), image):
        print(line)
    return 0
