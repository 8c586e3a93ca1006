"""`roadtrain status`: step, loss, rates, bytes written and the endurance of disks, read from a run
directory, and the state of the run's servers, switches and reducers.

The endurance of a disk is the number of bytes that its data sheet allows to be written (TBW, in
decimal terabytes). It is compared with the bytes that this run has written, without write
amplification inside the disk. Does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roadtrain.config.job import Job, job_of_run
from roadtrain.errors import PeerError
from roadtrain.servers import health
from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.training.metrics import read_metrics
from roadtrain.training.predicted import compared
from roadtrain.training.progress import Report, describe, show_table
from roadtrain.training.run_lines import RunLines, wear_rows
from roadtrain.transport.address import address_of, tls_of, token_of
from roadtrain.transport.plugins import link_options
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import show_seconds


def names_servers(run: str) -> bool:
    return ":" in run and not Path(run).is_dir()


def report_run(
    run: str,
    endurance_tbw: float | None = None,
    token_file: str | None = None,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    link: str = "tcp",
    report: Report = print,
) -> int:
    """Report on `run`: a run directory, or addresses HOST:PORT,... of servers and switches.

    The other arguments are the options of `roadtrain status`. Returns the exit code: 1 if a node
    does not answer, else 0. Raises ConfigError if `run` is neither a directory nor addresses.
    """
    found: list[Any] = []
    table: list[tuple[str, str]] = []
    reducers: list[tuple[str, str]] = []
    servers, switches = run.split(","), 0
    if not names_servers(run):
        job = job_of_run(run)
        if job.parallelism.reducers:
            reducers, found = ask_reducers(job, token_file)
        own, switches = job.servers, len(job.servers.switches)
        table = rows(job, lines_of_run(run), endurance_tbw)
        servers = [*own.addresses, *(switch.address for switch in own.switches)]
        token_file, ca = token_file or own.token_file, ca or own.ca
        cert, key = cert or own.cert, key or own.key
    if servers:
        options = link_options(link)(token=token_of(token_file), tls=tls_of(cert, key, ca))
        answers = health.ask_all([address_of(server) for server in servers], options)
        table += health.rows(servers, answers, switches)
        found += answers
    show_table([*table, *reducers], report)
    return int(any(isinstance(answer, PeerError) for answer in found))


def ask_reducers(job: Job, token_file: str | None) -> tuple[list[tuple[str, str]], list[Any]]:
    """Query the reducers of a job in stages. Returns rows (node, state of the node) of a table, and
    the reducers' answers."""
    section = job.parallelism
    names = [*SpareHosts(section.reducers, None, None).now()]
    if not names:
        return [("reducers", "the list is empty now, so the workers sum themselves")], []
    options = TcpOptions(token=token_of(token_file or section.reducers_token_file))
    found = health.ask_all([address_of(name) for name in names], options)
    return health.rows(names, found, role="reducer"), found


def lines_of_run(run: str) -> RunLines:
    return RunLines.of(read_metrics(Path(run) / "metrics.jsonl"))


def report_ended(run: str, report: Report) -> None:
    """Report on the directory of a run that has ended, without querying its servers.

    Raises ConfigError.
    """
    show_table(rows(job_of_run(run), lines_of_run(run), None), report)
    report_stages(run, report)


def report_stages(run: str, report: Report) -> None:
    """Report the predicted and measured times of each stage if `run` is a run directory."""
    for beside in [] if names_servers(run) else compared(Path(run)):
        show_table(beside, report)


def rows(job: Job, run: RunLines, endurance_tbw: float | None) -> list[tuple[str, str]]:
    if not run.recent:
        return [("step", f"0 of {job.run.steps}")]
    losses = sum(line["loss"] is not None for line in run.recent)
    out = [
        ("step", f"{run.step} of {job.run.steps}, about {show_seconds(run.left_s(job))} left"),
        ("last step", describe(job, run.last)),
        (f"loss, mean of {losses} steps", f"{run.loss:.4f}"),
        ("tokens so far", f"{run.tokens:,}"),
        ("a step takes", f"{show_seconds(run.step_s)}, {run.tokens_per_s:,.0f} tokens/s"),
    ]
    if job.lossy:
        out.append(("lossy", ", ".join(f"{k} {v}" for k, v in job.lossy.items())))
    return [*out, *wear_rows(job, run, endurance_tbw)]
