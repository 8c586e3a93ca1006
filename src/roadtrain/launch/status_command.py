"""`roadtrain status`: of a launched run, by its name, each process beside what its run directory
says; of anything else as training/status.py has it. Does NOT import torch."""

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
    """Step, loss, rates, bytes written so far and how long the device endures it. Of a run on
    servers also each node, what it waits for and since when (RUN may be their HOST:PORT,...
    instead). Of a launched run, by its name, also each process; 1 if one does not answer.

    `run`: a launched run's name, a run directory, or the HOST:PORT,... of servers and switches.
    Raises ConfigError where it is none of them.

    Args:
        endurance_tbw: terabytes the device may be written, from its data sheet (assumed: 600)
        token_file: file with the servers' token, where RUN names servers
        ca: TLS: PEM file that the servers' certificates are known by, likewise
        cert: TLS: PEM file of a certificate, where the servers demand one, likewise
        key: TLS: PEM file of its key, likewise
        link: how the servers are reached, as they were told (tcp)
    """
    if not Path(run).is_dir() and (home := launched(run)) is not None:
        return of_launched(home, report)
    code = status.report_run(run, endurance_tbw, token_file, ca, cert, key, link, report)
    status.report_stages(run, report)
    return code


def launched(name: str) -> RunHome | None:
    try:
        home = RunHome.of(name)
    except ConfigError:
        return None
    return home if home.exists else None


def of_launched(home: RunHome, report: Callable[[str], None] = print) -> int:
    record = home.record()
    if not home.is_supervised():
        if is_alive(home):
            report(f"run {home.name} on {record.engine}: its supervisor is being started again")
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
    for beside in reply["run"]["stages"]:
        show_table(beside, report)
    down = [one.name for one in state.processes if one.state != UP]
    if down:
        report(f"down: {', '.join(down)}")
    return int(bool(down) or bool(reply["run"]["code"]))


def _without_supervisor(home: RunHome, record: LaunchRecord, report: Callable[[str], None]) -> int:
    """Of a run that has ended, or whose supervisor was killed."""
    state = home.state(report)
    if state.phase != "ended":
        report(
            f"run {home.name} on {record.engine}: its supervisor was killed, nothing runs;"
            f" `roadtrain launch --resume {home.name}` goes on"
        )
        return 1
    report(f"run {home.name} on {record.engine}: ended, {state.why}")
    if not ENGINES[record.engine].supervise:  # its hosts were this one
        job = load_job(home.job_path)
        directory = Path(record.directory, job.run.dir)
        if (directory / "job.toml").is_file():
            status.report_ended(str(directory), report)
    return int(state.code not in (0, 130))


def rows(processes: Sequence[ProcessRow]) -> list[tuple[str, ...]]:
    """Of a table with a head."""
    now = time.time()
    return [
        ("process", "host", "state", "restarts", "since"),
        *(
            (one.name, one.host, one.state, str(one.restarts), f"{show_seconds(now - one.since)}")
            for one in processes
        ),
    ]
