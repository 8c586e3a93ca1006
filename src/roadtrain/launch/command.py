"""`roadtrain launch`: from a plan and a job to a run; and what is asked of a run by its name.

The run's supervisor is a process of its own (supervise.py); this one shows its lines and its end.
Does NOT start any process of the run.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from roadtrain.config.job import Job, load_job
from roadtrain.config.plan_file import PlanFile, load_plan_file
from roadtrain.errors import ConfigError, LaunchError, RoadtrainError
from roadtrain.launch.control import ControlClient, ask_supervisor
from roadtrain.launch.engines import (
    ENGINES,
    default_engine,
    function_of,
    is_alive,
    machines_of,
)
from roadtrain.launch.home import (
    CHECKED,
    IMPORTED,
    JOINED,
    LAUNCHED,
    PHASES,
    PLACED,
    PLANNED_ANEW,
    READY,
    SERVICES,
    STEPPED,
    WORKERS,
    LaunchRecord,
    RunHome,
    RunState,
)
from roadtrain.launch.logs import LogTail
from roadtrain.launch.resolve import ResolvedRun, resolve
from roadtrain.options.names import unknown_name
from roadtrain.planner.job_keys import batch_of_job, contradicted

# --write KIND -> "module:function" of a ResolvedRun, --out and --image; it returns lines to print.
WRITERS: Mapping[str, str] = {
    "slurm": "roadtrain.launch.write_slurm:write_slurm",
    "kubernetes": "roadtrain.launch.write_kubernetes:write_kubernetes",
}
REPLAN = "roadtrain.launch.replan:replan_run"  # the planner comes in
THEN = ("keep", "stop")  # of --if-launcher-dies
POLL_S = 0.2
ASKED = "the user asked for it"  # why a run ends
REFUSED = 2  # the exit code of a run of which nothing was started
INTERRUPTED = 130  # the exit code of a run that was stopped
STARTS_S = 30.0  # the supervisor's process has the run's lock within it
CHECKS_S = 600.0  # a supervisor has checked its hosts and listens within it
STOPS_S = 600.0  # a run that is asked to stop has ended within it: a step, its services
WHAT_TOOK = {
    READY: "the supervisor and its engine",
    CHECKED: "the checks",
    SERVICES: "starting services",
    WORKERS: "starting workers",
    PLACED: "places of workers",
    IMPORTED: "Python and imports of worker 0",
    JOINED: "text, model and servers",
    STEPPED: "the first step",
}
WHOSE = {READY: "engine", PLACED: "engine", IMPORTED: "Python and imports"}  # else ours


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
    """`roadtrain launch`. Raises RoadtrainError.

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
    named: dict[str, tuple[str, Callable[[str], int]]] = {
        "stop": (stop, stop_run),
        "resume": (resume, lambda run: resume_run(run, if_launcher_dies, detach, ray_address)),
        "replan": (
            replan,
            lambda run: replan_run(
                run,
                {"dry_run": dry_run, "write_plan": write_plan, "new_run": new_run}
                | {"placements": tuple(name for name in placements.split(",") if name)}
                | {"detach": detach, "if_launcher_dies": if_launcher_dies},
                partial(resume_run, run, paused=True),
            ),
        ),
        "logs": (logs, show_logs),
        "leaves": (leaves, lambda run: tell_host("leaves", run, f"{notice:g}")),
        "comes": (comes, lambda run: tell_host("comes", run)),
    }
    given = [(key, value, do) for key, (value, do) in named.items() if value]
    if len(given) > 1 or (given and plan):
        also = plan or f"--{given[1][0]}"
        raise ConfigError(f"--{given[0][0]} and {also}: one of them at a time")
    if not 0 <= notice < math.inf:
        raise ConfigError(f"--notice {notice:g}: 0 seconds or more", hint="--notice 120")
    if if_launcher_dies not in THEN:
        raise unknown_name("--if-launcher-dies", if_launcher_dies, THEN)
    if detach and if_launcher_dies == "stop":
        raise ConfigError("--detach and --if-launcher-dies stop: the launcher does not stay")
    if dry_run and (write or (given and not replan)):
        raise ConfigError(
            f"--dry-run and --{'write' if write else given[0][0]} do not go together",
            hint="--dry-run belongs to PLAN.toml JOB.toml, or to --replan",
        )
    if given:
        return given[0][2](given[0][1])
    if not plan or not job:
        raise ConfigError("what is to be launched?", hint="roadtrain launch PLAN.toml JOB.toml")
    plan_file = load_plan_file(plan)
    check_batch(plan_file, load_job(job))
    home = RunHome.of(name or Path(job).stem)
    if write or dry_run:
        if write:
            return write_files(plan_file, job, home.name, write, (out, image))
        run = described(plan_file, job, home.name)
        print(function_of("roadtrain.launch.dry_run:dry_run")(run, home))
        return 0
    record = LaunchRecord(
        name=home.name,
        engine=on or default_engine(machines_of(plan_file)),
        launched=time.time(),
        directory=os.getcwd(),
        if_launcher_dies=if_launcher_dies,
        ray_address=ray_address,
    )
    check_engine(record.engine)
    with home.starting():
        check_directory(home, load_job(job))
        begin(home, record, Path(plan).read_text(), load_job(job).to_toml())
        start(home, record)
    return followed(home, record, detach)


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
        if other == home or not other.is_supervised():
            continue
        theirs = load_job(other.job_path).run.dir
        if os.path.realpath(Path(other.record().directory, theirs)) == mine:
            raise ConfigError(
                f"run {other.name!r} trains in {mine} just now",
                hint=f"another run.dir, or roadtrain launch --stop {other.name}",
            )


def begin(home: RunHome, record: LaunchRecord, plan: str, job: str) -> None:
    """The files of a new run. Raises ConfigError where one of its name is alive."""
    if home.exists and is_alive(home):
        raise ConfigError(
            f"run {home.name!r} is alive",
            hint=f"another --name, or roadtrain launch --stop {home.name}",
        )
    home.write(record, plan, job)


def start(home: RunHome, record: LaunchRecord) -> None:
    """The supervisor. Raises RoadtrainError where there is none then; the run has ended."""
    try:
        if supervise := ENGINES[record.engine].supervise:
            function_of(supervise)(home)
        else:
            start_supervisor(home)
    except RoadtrainError as error:
        if not home.is_supervised() and (state := home.state()).phase == "starting":
            why = f"it was not started: {error}"
            ended = msgspec.structs.replace(state, phase="ended", code=REFUSED, why=why)
            home.write_state(ended)
        raise


def followed(home: RunHome, record: LaunchRecord, detach: bool, offset: int = 0) -> int:
    """Follow a run that was started to its end, unless `detach`."""
    if detach:
        print(f"run {home.name} is starting: roadtrain status {home.name}")
        return 0
    return follow(home, record, offset)


def start_supervisor(home: RunHome) -> None:
    """A process of its own session, which outlives this one. Raises LaunchError where it does not
    begin."""
    log = home.log_directory / "supervisor.log"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "roadtrain.launch.supervise", str(home.path)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + STARTS_S
    try:
        while not home.is_supervised():
            if process.poll() is not None:
                if home.state().phase == "ended":
                    return  # refused already
                raise LaunchError(
                    f"the supervisor ended (code {process.returncode}): {log} says why"
                )
            if time.monotonic() > deadline:
                raise LaunchError(f"the supervisor did not begin within {STARTS_S:.0f} s: {log}")
            time.sleep(0.02)
    except BaseException:  # a Ctrl-C, too: nobody would know that the run begins
        process.kill()
        raise


def follow(home: RunHome, record: LaunchRecord, offset: int = 0) -> int:
    """Print the run's lines until it has ended; its exit code."""
    stops = record.if_launcher_dies == "stop"
    with ExitStack() as stack:
        try:
            greeting = stack.enter_context(LauncherHello(home)) if stops else None
            shown_until_end(home, offset, greeting)
        except KeyboardInterrupt:
            if not stops:
                print(
                    f"\nrun {home.name} goes on: `roadtrain launch --stop {home.name}` ends it,"
                    f" --logs {home.name} shows it"
                )
                return 130
            print("\nstopping after this step")
            offset = log_size(home)
            ask_to_stop(home)
            shown_until_end(home, offset)
    if home.record().start != record.start:  # by --replan or --resume of another terminal
        print(f"run {home.name} was started again: `roadtrain launch --logs {home.name}` shows it")
        return INTERRUPTED
    return told_end(home)


@contextmanager
def patient_client(home: RunHome) -> Iterator[ControlClient | None]:
    """Of a supervisor that may still be checking hosts; None: it has ended."""
    deadline, client = time.monotonic() + CHECKS_S, None
    while client is None:
        try:
            client = ControlClient(home)
        except LaunchError as error:
            if not is_alive(home):
                break
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the supervisor of {home.name!r} is there, and has not listened within"
                    f" {CHECKS_S:.0f} s",
                    hint=f"{home.all_log} says what it waits for",
                ) from error
            time.sleep(POLL_S)
    with client or nullcontext():
        yield client


def ask_to_stop(home: RunHome) -> bool:
    """Whether a supervisor was there to be asked."""
    with patient_client(home) as client:
        if client is not None:
            client.ask("stop", ASKED)
        return client is not None


def stay_stopped(home: RunHome) -> bool:
    """Whether the run was stopped so that it is planned anew (paused_run.py): it does not go on
    then. Raises LaunchError where it is being started just now."""
    with home.starting():
        state = home.state()
        if is_alive(home) or (state.phase, state.why) != ("ended", PLANNED_ANEW):
            return False
        home.write_state(msgspec.structs.replace(state, why=ASKED))
        return True


def log_size(home: RunHome) -> int:
    return home.all_log.stat().st_size if home.all_log.exists() else 0


class LauncherHello:
    """The hello of a launcher that the run is to end with: also to a supervisor that was started
    again."""

    def __init__(self, home: RunHome) -> None:
        self._home = home
        self._client: ControlClient | None = None

    def say(self) -> None:
        """Unless the supervisor has heard it, or there is none now."""
        if self._client is not None and not self._client.gone:
            return
        self.close()
        with suppress(LaunchError):
            client = ControlClient(self._home)
            try:
                client.ask("hello")
            except LaunchError:
                client.close()
            else:
                self._client = client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def __enter__(self) -> LauncherHello:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shown_until_end(home: RunHome, offset: int, greeting: LauncherHello | None = None) -> None:
    tail, told = LogTail(home, offset), False
    while True:
        if greeting is not None:
            greeting.say()
        alive = is_alive(home)  # before its last lines are read
        for line in tail.lines():
            print(line)
        if not told and (text := first_step(home.state(), home.record().engine)):
            told = True
            print(text)
        if not alive:
            return
        time.sleep(POLL_S)


def told_end(home: RunHome) -> int:
    """Print how a run has ended; its exit code."""
    state = home.state()
    if state.phase != "ended":
        raise LaunchError(
            f"the supervisor of {home.name} was killed, and all that it had started with it",
            hint=f"roadtrain launch --resume {home.name} goes on at the committed step",
        )
    if state.code == REFUSED:
        raise LaunchError(state.why)
    end = {0: "is done", 130: "is stopped"}.get(state.code, "failed")
    print(f"run {home.name} {end}: {state.why}")
    return state.code if state.code in (0, 130) else 1


def first_step(state: RunState, engine: str) -> str:
    """What the time from nothing to the first step was, once it is known: whose it was, and for
    what."""
    stamps = state.stamps
    if not {LAUNCHED, STEPPED} <= stamps.keys():
        return ""
    whose, parts = dict.fromkeys(("engine", "Python and imports", "ours"), 0.0), []
    for before, after in itertools.pairwise(phase for phase in PHASES if phase in stamps):
        took_s = max(0.0, stamps[after] - stamps[before])
        whose[WHOSE.get(after, "ours")] += took_s
        parts.append(f"{WHAT_TOOK[after]} {took_s:.1f} s")
    names = {"engine": "Ray" if engine == "ray" else f"engine `{engine}`"}
    sums = ", ".join(f"{names.get(name, name)} {took_s:.1f} s" for name, took_s in whose.items())
    whole_s = stamps[STEPPED] - stamps[LAUNCHED]
    return f"first step {whole_s:.1f} s after launch: {sums} ({', '.join(parts)})"


def described(plan_file: PlanFile, job_file: str, name: str) -> ResolvedRun:
    """For --dry-run: an engine knows the addresses that the plan does not say; names stand for
    them."""
    names = {host.name: host.address or host.name for host in machines_of(plan_file).hosts}
    return resolve(plan_file, load_job(job_file), name=name, addresses=names, token="")


def write_files(
    plan_file: PlanFile, job_file: str, name: str, kind: str, told: tuple[str, str]
) -> int:
    """--write: nothing is started. told: --out, --image."""
    out, image = told
    if kind not in WRITERS:
        raise unknown_name("--write", kind, WRITERS)
    if not out:
        raise ConfigError("--write needs a directory", hint="--out DIR")
    if (kind == "kubernetes") != bool(image):
        raise ConfigError(
            f"--write {kind} and --image {image or 'is not given'}",
            hint="--image NAME belongs to --write kubernetes",
        )
    token = secrets.token_hex()
    run = resolve(plan_file, load_job(job_file), name=name, addresses={}, token=token)
    for line in function_of(WRITERS[kind])(run, Path(out), image):
        print(line)
    return 0


# -- of a run by its name --


def stop_run(name: str) -> int:
    home = RunHome.of(name)
    home.record()
    if not is_alive(home) and not stay_stopped(home):
        print(f"run {name} does not run: {home.state().phase}")
        return 0
    offset = log_size(home)
    # It may have been stopped to be planned anew, and have gone on before it could be asked.
    while not ask_to_stop(home) and not stay_stopped(home) and is_alive(home):
        time.sleep(POLL_S)
    tail, deadline = LogTail(home, offset), time.monotonic() + STOPS_S
    while is_alive(home):
        if time.monotonic() > deadline:
            raise LaunchError(f"run {name} has not ended within {STOPS_S:.0f} s of being asked to")
        time.sleep(POLL_S)
        for line in tail.lines():
            print(line)
    told_end(home)
    return 0


def resume_run(
    name: str,
    if_launcher_dies: str,
    detach: bool,
    ray_address: str = "",
    *,
    paused: bool = False,
) -> int:
    """paused: it was stopped to be planned anew, and stays so where a user has said it since."""
    home = RunHome.of(name)
    home.record()
    with home.starting():
        if paused and home.state().why == ASKED:
            return told_end(home)
        record, offset = renew(home, if_launcher_dies, ray_address), log_size(home)
        start(home, record)
    return followed(home, record, detach, offset)


def renew(home: RunHome, if_launcher_dies: str, ray_address: str) -> LaunchRecord:
    """The files of another start of a run. ray_address: where the cluster's head is now; "": where
    it was. Raises ConfigError where the run is alive."""
    record = home.record()
    if is_alive(home):
        raise ConfigError(f"run {home.name!r} is alive", hint=f"roadtrain status {home.name}")
    record = msgspec.structs.replace(
        record,
        start=record.start + 1,
        launched=time.time(),
        if_launcher_dies=if_launcher_dies,
        ray_address=ray_address or record.ray_address,
    )
    state = home.state(print)
    home.measured_path.unlink(missing_ok=True)  # of a plan that may not be this one
    # 0: a step was seen, so `run.new_store` holds no longer
    step = max(0, state.step) if STEPPED in state.stamps else state.step
    home.write_state(RunState(attempt=state.attempt, step=step, stamps={LAUNCHED: record.launched}))
    home.write_record(record)
    return record


def replan_run(name: str, options: Mapping[str, Any], go_on: Callable[[str, bool], int]) -> int:
    home = RunHome.of(name)
    home.record()
    code: int = function_of(REPLAN)(home, options, go_on)
    return code


def show_logs(name: str) -> int:
    home = RunHome.of(name)
    home.record()
    with suppress(KeyboardInterrupt):
        shown_until_end(home, 0)
    return 0


def tell_host(verb: str, run_and_host: str, *words: str) -> int:
    name, _, host = run_and_host.partition(":")
    if not host:
        raise ConfigError(f"--{verb} {run_and_host}: which host?", hint=f"--{verb} NAME:HOST")
    print(said(RunHome.of(name), [verb, host, *words]))
    return 0


def said(home: RunHome, words: Sequence[str]) -> str:
    """What the engine of a run answers to one of its verbs."""
    home.record()
    return str(ask_supervisor(home, "tell", words)["said"])
