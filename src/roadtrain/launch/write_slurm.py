"""`roadtrain launch --write slurm`: write a directory from which Slurm runs the plan.

    run.sbatch                    the batch script. Its first part is generated and has the hosts
                                  and their processes. Its second part is a copy of run.sbatch of
                                  this package and keeps the processes running
    job.toml token reducers.txt   files that run.sbatch copies to all hosts

The run is one exclusive Slurm job on all hosts, and each process is a step (`srun --overlap`) on
its host. If hosts need different numbers of GPUs (including 0), the job is a heterogeneous Slurm
job, with one component for each number, because a step cannot request more GPUs than its job has.
The host names in the plan must be Slurm's node names. Does NOT contact Slurm.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path, PurePosixPath

from roadtrain.launch import torchrun
from roadtrain.launch.processes import Process
from roadtrain.launch.resolve import ResolvedRun
from roadtrain.storage.direct import make_directory, replace_file, typed_errors
from roadtrain.transport.address import write_token

PYTHON = "python"  # the interpreter of the environment in which sbatch is called
MARK = "# Written by `roadtrain launch --write slurm`"
# Shell variables in the arguments of torchrun, which the shell of each host expands.
HOST_VARIABLES = ("$rank", "$workers", "$start")
NOTICE_S = 120  # seconds of notice before the time limit or the loss of a spot host


def write_slurm(run: ResolvedRun, out: Path, _image: str = "") -> list[str]:
    """Write the directory and return notes for the user. Raises ConfigError if Slurm cannot run the
    plan."""
    run = torchrun.with_device(run)
    script = slurm_script(run)
    _check_out(run, out)
    make_directory(out)
    replace_file(out / "run.sbatch", script.encode(), "writing")
    for file in torchrun.files_of(run):
        where = out / PurePosixPath(file.path).name
        if file.secret:
            with typed_errors(where, "writing the token"):
                write_token(where, file.content.encode())
        else:
            head = f"{_head_line()}\n" if where.suffix == ".toml" else ""
            replace_file(where, (head + file.content).encode(), "writing")
    return [
        f"{len(torchrun.hosts_of(run))} hosts; start the run in {out}, in an environment whose"
        f" `{PYTHON}` has roadtrain installed: sbatch run.sbatch",
        *torchrun.notes_for_user(run),
    ]


def _check_out(run: ResolvedRun, out: Path) -> None:
    """Raise ConfigError if the output would replace a file that `launch --write` has not
    written."""
    names = [PurePosixPath(file.path).name for file in torchrun.files_of(run)]
    own = ["run.sbatch", *(name for name in names if name.endswith(".toml"))]
    torchrun.check_ours(out, own if (out / "run.sbatch").exists() else [*own, *names], MARK)


def _head_line() -> str:
    return f"{MARK}: do not edit; change the plan or the job and write again."


def slurm_script(run: ResolvedRun) -> str:
    """Return the text of the batch script run.sbatch."""
    body = files("roadtrain.launch").joinpath("run.sbatch").read_text()
    return "\n".join([*_head(run), "", *_machines(run), "", body])


def _components(run: ResolvedRun) -> dict[int, list[str]]:
    """Return the hosts by the number of GPUs that they need. The first host of the first group runs
    the batch script."""
    gpus, found = torchrun.gpus_of(run), dict[int, list[str]]()
    for host in torchrun.hosts_of(run):
        found.setdefault(gpus.get(host, 0), []).append(host)
    return found


def _head(run: ResolvedRun) -> Iterable[str]:
    yield "#!/bin/bash"
    yield _head_line()
    yield "# shellcheck disable=SC2016,SC2317 # variables expanded on hosts; a signal handler"
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
            "mem": 0,  # all memory of a host
        }
        yield from _options(of_component)
        if gpus:
            yield from _options({"gres": f"gpu:{gpus}"})


def _options(options: Mapping[str, object]) -> Iterable[str]:
    for name, value in options.items():
        yield f"#SBATCH --{name}" + (f"={value}" if value != "" else "")


def _machines(run: ResolvedRun) -> Iterable[str]:
    """Yield shell code: the variables and functions that the batch script uses."""
    worker = torchrun.first_worker(run)
    launcher = [_in_shell(word) for word in torchrun.torchrun_words(run, *HOST_VARIABLES)]
    words = [PYTHON, *launcher, *map(shlex.quote, worker.words)]
    places = " ".join(
        f"{host}) rank={rank} workers={run.host(host).workers};;"
        for rank, host in enumerate(run.worker_hosts)
    )
    variables = {
        "name": run.name,
        "directory": run.directory,
        "first": worker.host,
        "python": PYTHON,
        "asks_committed": json.dumps({"directory": run.directory}),
        "shutdown_s": str(torchrun.SHUTDOWN_S),
        "places": f"case $SLURMD_NODENAME in {places} esac",
        "torchrun": " ".join(words),
    }
    yield from (f"{key}={shlex.quote(text)}" for key, text in variables.items())
    yield f"hosts=({' '.join(torchrun.hosts_of(run))})"
    yield from _options_of_steps(run)
    yield "hand_out_all() {"
    for file in torchrun.files_of(run):
        yield f"    hand_out {PurePosixPath(file.path).name} {shlex.quote(file.path)}"
    yield "}"
    yield "start_services() {"
    yield "    :"
    for process in run.services():
        yield f"    {_service(process)} &"
        yield "    services+=($!)"
    yield "}"


def _options_of_steps(run: ResolvedRun) -> Iterable[str]:
    """Yield shell code that sets the hosts of each worker step, and each host's component of the
    Slurm job and number of GPUs."""
    components = list(_components(run).values())
    at_work = [[host for host in hosts if host in run.worker_hosts] for hosts in components]
    steps = [f'"{",".join(hosts)}"' for hosts in at_work if hosts]
    yield f"worker_steps=({' '.join(steps)})"
    several = enumerate(components) if len(components) > 1 else ()
    part = [f"[{host}]=--het-group={number}" for number, hosts in several for host in hosts]
    gpus = [f"[{host}]=--gres=gpu:{count}" for host, count in torchrun.gpus_of(run).items()]
    yield f"declare -A component_of=({' '.join(part)})"
    yield f"declare -A gpus_of=({' '.join(gpus)})"
    if gpus:
        yield "export SLURM_STEP_GRES=none  # default of steps that request no GPUs"


def _service(process: Process) -> str:
    words = [PYTHON, *map(shlex.quote, process.words)]
    return " ".join(["service", shlex.quote(process.name), process.host, *words])


def _in_shell(word: str) -> str:
    """Return a word quoted for the shell, which still expands $rank, $workers or $start at its
    end."""
    return f'"{word}"' if word.endswith(HOST_VARIABLES) else shlex.quote(word)
