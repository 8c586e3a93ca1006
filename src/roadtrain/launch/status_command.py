"""`roadtrain status`: show the processes and the progress of a launched run. For other arguments,
see training/status.py. Does NOT import torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from roadtrain.config.job import load_job
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.control_socket import ask_supervisor
from roadtrain.launch.engines import ENGINES, is_alive
from roadtrain.launch.home import LaunchRecord, ProcessRow, RunHome, RunState
from roadtrain.training import status
from roadtrain.training.progress import show_table
from roadtrain.units import show_seconds

UP = "running"


def command(
    run: str,
    endurance_tbw: float | None = None,
    token_file: str | None = None,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    link: str = "tcp",
    report: Callable[[str], None] = print,
) -> int:
    """Show a run's step, loss, rates, bytes written so far and the remaining life of the SSD. For a
    run with servers, also show each server and what the server is waiting for. For a launched run,
    also show each process. The exit code is 1 if a process of a launched run is down.

    `run`: a launched run's name, a run directory, or the HOST:PORT,... of servers and switches.
    Raises ConfigError if `run` is none of these.

    Args:
        endurance_tbw: rated endurance of the SSD, terabytes written (assumed: 600)
        token_file: file with the servers' token, if RUN names servers
        ca: TLS, if RUN names servers: PEM file with the CA of the servers' certificates
        cert: TLS, if RUN names servers: PEM file with a client certificate
        key: TLS, if RUN names servers: PEM file with the key of that certificate
        link: transport by which the servers are reached (tcp)
    """
    if not Path(run).is_dir() and (home := launched(run)) is not None:
        return of_launched(home, report)
    code = status.report_run(run, endurance_tbw, token_file, ca, cert, key, link, report)
    status.report_stages(run, report)
    return code


def launched(name: str) -> RunHome | None:
    """Return the home of the launched run of this name, or None if there is none."""
    try:
        home = RunHome.of(name)
    except ConfigError:
        return None
    return home if home.exists else None


def of_launched(home: RunHome, report: Callable[[str], None] = print) -> int:
    record = home.record()
    if not home.is_supervised():
        if is_alive(home):
            report(f"run {home.name} on {record.engine}: the supervisor is being restarted")
            return 1
        return _without_supervisor(home, record, report)
    try:
        reply = ask_supervisor(home, "status")
    except LaunchError as error:
        report(f"run {home.name}: {home.state().phase} ({error})")
        return 1
    state = msgspec.convert(reply["state"], RunState)
    report(f"run {home.name} on {record.engine}: {state.phase}, start {record.start}")
    show_table(rows(state.processes), report)
    for line in reply["run"]["lines"]:
        report(line)
    for table in reply["run"]["stages"]:
        show_table(table, report)
    down = [process.name for process in state.processes if process.state != UP]
    if down:
        report(f"down: {', '.join(down)}")
    return int(bool(down) or bool(reply["run"]["code"]))


def _without_supervisor(home: RunHome, record: LaunchRecord, report: Callable[[str], None]) -> int:
    """Show the status of a run that has ended, or whose supervisor was killed. Return the exit code
    of the command."""
    state = home.state(report)
    if state.phase != "ended":
        report(
            f"run {home.name} on {record.engine}: the supervisor was killed, no process is running;"
            f" `roadtrain launch --resume {home.name}` resumes the run"
        )
        return 1
    report(f"run {home.name} on {record.engine}: ended, {state.why}")
    if not ENGINES[record.engine].supervise:  # the run's directory is on this host
        job = load_job(home.job_path)
        directory = Path(record.directory, job.run.dir)
        if (directory / "job.toml").is_file():
            status.report_ended(str(directory), report)
    return int(state.code not in (0, 130))


def rows(processes: Sequence[ProcessRow]) -> list[tuple[str, ...]]:
    """Return a table of the processes, with a header and a row per process."""
    now = time.time()
    return [
        ("process", "host", "state", "restarts", "since"),
        *(
            (row.name, row.host, row.state, str(row.restarts), f"{show_seconds(now - row.since)}")
            for row in processes
        ),
    ]
