"""`roadtrain launch --write slurm`: a directory that Slurm runs the plan from.

    run.sbatch   which hosts run what (here), and what keeps it running (run.sbatch of this package)
    job.toml token reducers.txt   handed out to all hosts, where the run's processes look for them

One job of all hosts (`--exclusive`). A step gets no GPU that it does not ask for, and may ask for
what its job asked for: so where hosts need different numbers of GPUs, 0 too, the job is a
heterogeneous one with a component for each number. A process is a step (`srun --overlap`) on its
host. Host names of the plan are taken for Slurm's. Does NOT ask Slurm.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path, PurePosixPath

from roadtrain.launch.processes import Process
from roadtrain.launch.resolve import ResolvedRun
from roadtrain.launch.torchrun import (
    SHUTDOWN_S,
    check_ours,
    files_of,
    first_worker,
    gpus_of,
    hosts_of,
    notes_for_user,
    torchrun_words,
    with_device,
)
from roadtrain.storage.direct import make_directory, replace_file, typed_errors
from roadtrain.transport.address import write_token

PYTHON = "python"  # of the environment that sbatch is called in
MARK = "# Written by `roadtrain launch --write slurm`"
HOST_VARIABLES = (
    "$rank",
    "$workers",
    "$start",
)  # of torchrun's words: a shell on each host has them
NOTICE_S = 120  # before the time is over, or a spot host goes


def write_slurm(run: ResolvedRun, out: Path, _image: str = "") -> list[str]:
    """What is to be told the user. Raises ConfigError for what Slurm cannot do."""
    run = with_device(run)
    script = slurm_script(run)
    _check_out(run, out)
    make_directory(out)
    replace_file(out / "run.sbatch", script.encode(), "writing")
    for file in files_of(run):
        where = out / PurePosixPath(file.path).name
        if file.secret:
            with typed_errors(where, "writing the token"):
                write_token(where, file.content.encode())
        else:
            head = f"{_head_line()}\n" if where.suffix == ".toml" else ""
            replace_file(where, (head + file.content).encode(), "writing")
    return [
        f"{len(hosts_of(run))} hosts; start it in {out}, in an environment whose `{PYTHON}` has"
        " roadtrain: sbatch run.sbatch",
        *notes_for_user(run),
    ]


def _check_out(run: ResolvedRun, out: Path) -> None:
    """Raises ConfigError where something of the user's would be replaced. A token and reducers.txt
    have no line of ours: they are ours beside a run.sbatch that is."""
    names = [PurePosixPath(file.path).name for file in files_of(run)]
    own = ["run.sbatch", *(name for name in names if name.endswith(".toml"))]
    check_ours(out, own if (out / "run.sbatch").exists() else [*own, *names], MARK)


def _head_line() -> str:
    return f"{MARK}: change the plan or the job, write anew."


def slurm_script(run: ResolvedRun) -> str:
    """The content of run.sbatch."""
    body = files("roadtrain.launch").joinpath("run.sbatch").read_text()
    return "\n".join([*_head(run), "", *_machines(run), "", body])


def _components(run: ResolvedRun) -> dict[int, list[str]]:
    """Hosts by the number of GPUs that each needs. The script runs on the first one of all."""
    gpus, found = gpus_of(run), dict[int, list[str]]()
    for host in hosts_of(run):
        found.setdefault(gpus.get(host, 0), []).append(host)
    return found


def _head(run: ResolvedRun) -> Iterable[str]:
    yield "#!/bin/bash"
    yield _head_line()
    yield "# shellcheck disable=SC2016,SC2317 # what hosts expand; a function that a signal calls"
    of_job = {
        "job-name": shlex.quote(run.name),
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:INT@{NOTICE_S}",
    }
    yield from _options(of_job)
    for number, (gpus, hosts) in enumerate(_components(run).items()):
        if number:
            yield "#SBATCH hetjob"
        of_component = {
            "nodes": len(hosts),
            "nodelist": ",".join(hosts),
            "ntasks-per-node": 1,
            "exclusive": "",
            "mem": 0,  # all that a host has
        }
        yield from _options(of_component)
        if gpus:
            yield from _options({"gres": f"gpu:{gpus}"})


def _options(options: Mapping[str, object]) -> Iterable[str]:
    for name, value in options.items():
        yield f"#SBATCH --{name}" + (f"={value}" if value != "" else "")


def _machines(run: ResolvedRun) -> Iterable[str]:
    """What the rest of the script goes by."""
    worker = first_worker(run)
    torchrun = [_in_shell(word) for word in torchrun_words(run, *HOST_VARIABLES)]
    words = [PYTHON, *torchrun, *map(shlex.quote, worker.words)]
    places = " ".join(
        f"{host}) rank={rank} workers={run.host(host).workers};;"
        for rank, host in enumerate(run.worker_hosts)
    )
    known = {
        "name": run.name,
        "directory": run.directory,
        "first": worker.host,
        "python": PYTHON,
        "asks_committed": json.dumps({"directory": run.directory}),
        "shutdown_s": str(SHUTDOWN_S),
        "places": f"case $SLURMD_NODENAME in {places} esac",
        "torchrun": " ".join(words),
    }
    yield from (f"{key}={shlex.quote(text)}" for key, text in known.items())
    yield f"hosts=({' '.join(hosts_of(run))})"
    yield from _options_of_steps(run)
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


def _options_of_steps(run: ResolvedRun) -> Iterable[str]:
    """Of each host: the component that it is in, and the GPUs that its workers ask for. Workers of
    a component are one step, which a signal reaches at once."""
    components = list(_components(run).values())
    at_work = [[host for host in hosts if host in run.worker_hosts] for hosts in components]
    steps = [f'"{",".join(hosts)}"' for hosts in at_work if hosts]
    yield f"worker_steps=({' '.join(steps)})"
    several = enumerate(components) if len(components) > 1 else ()
    part = [f"[{host}]=--het-group={number}" for number, one in several for host in one]
    gpus = [f"[{host}]=--gres=gpu:{count}" for host, count in gpus_of(run).items()]
    yield f"declare -A component_of=({' '.join(part)})"
    yield f"declare -A gpus_of=({' '.join(gpus)})"
    if gpus:
        yield "export SLURM_STEP_GRES=none  # of all steps that ask for nothing else"


def _service(process: Process) -> str:
    words = [PYTHON, *map(shlex.quote, process.words)]
    return " ".join(["service", shlex.quote(process.name), process.host, *words])


def _in_shell(word: str) -> str:
    """In double quotes where it ends with what a shell on the host says."""
    return f'"{word}"' if word.endswith(HOST_VARIABLES) else shlex.quote(word)
