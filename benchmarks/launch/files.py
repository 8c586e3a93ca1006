"""Item `files` of `launch`: validate the Slurm and Kubernetes files of three plans, and check that
every host name, path and port in these files comes from the plan or the job.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.report import Row
from benchmarks.launch.bench import Bench, attempted, row
from benchmarks.launch.local_slurm import MISSING, LocalSlurm
from benchmarks.launch.run import LaunchedRun, command
from benchmarks.launch.scene import CLUSTERS, SERVER, SUMS, Scene
from roadtrain.config.machines import Machines

KINDS = ("slurm", "kubernetes")
PORT = re.compile(r"(?<=:)[1-9]\d{3,4}(?![\d.])")
ADDRESS = re.compile(r"(?<![\d.])\d+\.\d+\.\d+\.\d+(?![\d.])")
PATH = re.compile(r"(?<![\w.}/-])/[\w.-]+/[\w./-]+")
SYSTEM = ("/bin/", "/usr/", "/dev/", "/proc/", "/tmp/", "/sys/", "/var/", "/etc/")


def rows(bench: Bench) -> Iterator[Row]:
    for number, scene in enumerate((SERVER, CLUSTERS, SUMS)):
        home = bench.home / f"files{number}"
        scene.write(home, 10, "files")
        run = LaunchedRun(f"bench-files{number}", "lab", home)
        run.plan("--placements", scene.placements)
        machines = bench.plan_of(run).machines
        assert machines is not None
        for kind in KINDS:
            yield from attempted(scene.name, written(run, scene, kind, machines))


def written(run: LaunchedRun, scene: Scene, kind: str, machines: Machines) -> Iterator[Row]:
    out = run.home / kind
    files = [str(run.home / name) for name in ("plan.toml", "job.toml")]
    what = f"files of {kind} pass their validator"
    image = ["--image", "roadtrain:0.2"] if kind == "kubernetes" else []
    command("launch", *files, "--write", kind, "--out", str(out), "--name", run.name, *image)
    texts = {path: path.read_text() for path in sorted(out.rglob("*")) if path.is_file()}
    wrong = [line for path, text in texts.items() for line in checked(kind, path, text)]
    if kind == "slurm":
        yield tried(out, [host.name for host in machines.hosts])
    first = f": {wrong[0]}" if wrong else ""
    yield row(scene.name, f"{what}{first}", "files", float(len(texts)), "yes", not wrong)
    source = "".join(Path(file).read_text() for file in files) + str(run.home)
    ports = {str(port) for host in machines.hosts for port in host.ports}
    ports.add(str(machines.rendezvous_port))
    every = "".join(texts.values())
    for name, strange in (
        ("ports", set(PORT.findall(every)) - ports),
        ("addresses", {address for address in ADDRESS.findall(every) if address not in source}),
        ("paths", {path for path in PATH.findall(every) if not _allowed(path, source)}),
    ):
        what = f"{kind}: {name} that are in neither file {', '.join(sorted(strange))}".rstrip()
        yield row(scene.name, what, "", float(len(strange)), "0", not strange)


def _allowed(path: str, source: str) -> bool:
    """Check that a path in a generated file is in `source` (the text of the plan and the job),
    below a directory in `source`, or a system path of Linux.
    """
    parents = [path, *map(str, Path(path).parents)][:-1]
    return path.startswith(SYSTEM) or any(p in source for p in parents if p.count("/") > 1)


def tried(files: Path, hosts: Sequence[str]) -> Row:
    """Check that `sbatch --test-only` accepts the generated script on a local Slurm with the hosts
    of the plan.
    """
    what, unit = "sbatch --test-only accepts the script", "hosts"
    lacking = f"{', '.join(MISSING)} not installed" if MISSING else ""
    if lacking or os.geteuid():
        why = lacking or "Slurm's daemons need root"
        return row("slurm", f"{what}: {why}", unit, None, "yes", False)
    with (
        TemporaryDirectory(prefix="roadtrain-slurm-") as home,
        LocalSlurm(Path(home), hosts) as slurm,
    ):
        output = slurm.ask("sbatch", "--test-only", "run.sbatch", cwd=files)
    met = "to start at" in output
    output = "" if met else f": {' '.join(output.split())}"
    return row("slurm", f"{what}{output}", unit, float(len(hosts)), "yes", met)


def checked(kind: str, path: Path, text: str) -> list[str]:
    """Run validators on a generated script or manifest, and return their complaints. `kind`:
    "slurm" or "kubernetes".
    """
    if kind == "slurm" and path.suffix == ".sbatch":
        tools = [["bash", "-n"], ["shellcheck"]]
        there = [[*words, str(path)] for words in tools if shutil.which(words[0])]
        done = [
            subprocess.run(words, capture_output=True, text=True, check=False) for words in there
        ]
        return [" ".join((run.stdout + run.stderr).split()) for run in done if run.returncode]
    if kind == "kubernetes" and path.suffix in (".yaml", ".yml"):
        validator = importlib.import_module("kubernetes_validate")
        complaints = []
        for document in importlib.import_module("yaml").safe_load_all(text):
            try:
                validator.validate(document, validator.latest_version(), strict=True)
            except Exception as error:  # any exception is the validator's complaint
                complaints.append(f"{path.name}: {error}")
        return complaints
    return []
