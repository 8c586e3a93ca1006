"""`roadtrain launch --write slurm`: a directory that Slurm runs the plan from.

    run.sbatch   which hosts run what (here), and what keeps it running (run.sbatch of this package)
    job.toml token reducers.txt   handed out to all hosts, where the run's processes look for them

One job of all hosts, also where they differ in devices: `--exclusive` gives each host's devices,
whatever they are. One job's `--gres` asks for the same of all, and components of a heterogeneous
job would each want their own options, for nothing more. A process is a step (`srun --overlap`) on
its host. Host names of the plan are taken for Slurm's. Does NOT ask Slurm.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path, PurePosixPath

from roadtrain.launch.processes import Process
from roadtrain.launch.resolve import ResolvedRun
from roadtrain.launch.torchrun import (
    SHUTDOWN_S,
    TorchrunWorkers,
    check_for_files,
    files_of,
    hosts_of,
    not_done,
)
from roadtrain.storage.direct import replace_file
from roadtrain.transport.address import write_token

PYTHON = "python"  # of the environment that sbatch is called in
NOTICE_S = 120  # before the time is over, or a spot host goes


def write_slurm(run: ResolvedRun, out: Path, _image: str = "") -> list[str]:
    """What is to be told the user. Raises ConfigError for what Slurm cannot do."""
    check_for_files(run)
    out.mkdir(parents=True, exist_ok=True)
    for file in files_of(run):
        where = out / PurePosixPath(file.path).name
        if file.secret:
            write_token(where, file.content.encode())
        else:
            replace_file(where, file.content.encode(), "writing")
    replace_file(out / "run.sbatch", slurm_script(run).encode(), "writing")
    return [
        f"{len(hosts_of(run))} hosts; start it in {out}, in an environment whose `{PYTHON}` has"
        " roadtrain: sbatch run.sbatch",
        *not_done(run),
    ]


def slurm_script(run: ResolvedRun) -> str:
    """The content of run.sbatch."""
    body = files("roadtrain.launch").joinpath("run.sbatch").read_text()
    return "\n".join([*_head(run), "", *_machines(run), "", body])


def _head(run: ResolvedRun) -> Iterable[str]:
    hosts = hosts_of(run)
    yield "#!/bin/bash"
    yield "# Written by `roadtrain launch --write slurm`: change the plan or the job, write anew."
    yield "# shellcheck disable=SC2016,SC2317 # what hosts expand; a function that a signal calls"
    options = {
        "job-name": shlex.quote(run.name),
        "nodes": len(hosts),
        "nodelist": ",".join(hosts),
        "ntasks-per-node": 1,
        "exclusive": "",
        "mem": 0,  # all that a host has
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:INT@{NOTICE_S}",
    }
    for name, value in options.items():
        yield f"#SBATCH --{name}" + (f"={value}" if value != "" else "")


def _machines(run: ResolvedRun) -> Iterable[str]:
    """What the rest of the script goes by."""
    workers = TorchrunWorkers.of(run)
    torchrun = (*workers.torchrun("$rank", "$workers", "$start"), *workers.words)
    torchrun_line = " ".join([*_env(workers.environment), PYTHON, *map(_in_shell, torchrun)])
    places = " ".join(
        f"{host}) rank={rank} workers={count};;"
        for rank, (host, count) in enumerate(workers.hosts.items())
    )
    known = {
        "name": run.name,
        "directory": run.directory,
        "first": next(iter(workers.hosts)),
        "worker_hosts": ",".join(workers.hosts),
        "nodes": str(len(workers.hosts)),
        "shutdown_s": str(SHUTDOWN_S),
        "places": f"case $SLURMD_NODENAME in {places} esac",
        "torchrun": torchrun_line,
    }
    yield from (f"{key}={shlex.quote(text)}" for key, text in known.items())
    yield "hand_out_all() {"
    for file in files_of(run):
        yield f"    hand_out {PurePosixPath(file.path).name} {shlex.quote(file.path)}"
    yield "}"
    yield "start_services() {"
    yield "    :"
    for process in run.services():
        yield f"    {_service(process)} &"
        yield "    services+=($!)"
    yield "}"


def _service(process: Process) -> str:
    words = [*_env(process.environment), PYTHON, *map(shlex.quote, process.words)]
    return " ".join(["service", shlex.quote(process.name), process.host, *words])


def _env(environment: Mapping[str, str]) -> list[str]:
    pairs = [shlex.quote(f"{key}={value}") for key, value in environment.items()]
    return ["env", *pairs] if pairs else []


def _in_shell(word: str) -> str:
    """A word in which $rank, $workers and $start are the shell's."""
    return f'"{word}"' if "$" in word else shlex.quote(word)
