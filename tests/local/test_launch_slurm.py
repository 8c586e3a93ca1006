"""The files for Slurm on a Slurm: a controller and three nodes of this machine, made for the test.
Skipped where Slurm is not installed (Debian: slurm-wlm, munge)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from roadtrain.config.job import make_job
from roadtrain.config.machines import Machines, PlanHost, ServerPlace
from roadtrain.config.parallelism import Parallelism
from roadtrain.config.plan import Plan, placement
from roadtrain.config.plan_file import PlanFile
from roadtrain.launch.resolve import resolve
from roadtrain.launch.write_slurm import write_slurm

NEEDED = ("sbatch", "slurmctld", "slurmd", "munged")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
    pytest.mark.timeout(600),
]
NODES = ("gpu0", "gpu1", "spare0")
SETTINGS = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={home}/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/controller.pid
SlurmdPidFile={home}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in made:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in made]


def wait_for(what: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, why()
        time.sleep(0.1)


@dataclass
class Slurm:
    """All of it is in `home`, and ends with `close`."""

    home: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def begin(self) -> None:
        controller, *ports = free_ports(1 + len(NODES))
        text = SETTINGS.format(host=socket.gethostname(), port=controller, home=self.home)
        for node, port in zip(NODES, ports):
            about = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port}"
            text += f"NodeName={node} {about} CPUs=1 RealMemory=100\n"
            (self.home / f"spool.{node}").mkdir()
        text += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (self.home / "slurm.conf").write_text(text)
        (self.home / "state").mkdir()
        key = self.home / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"socket": "munge", "pid-file": "munge.pid", "log-file": "munge.log"}
        paths = [f"--{name}={self.home / path}" for name, path in files.items()]
        self._start(
            "munged",
            "-F",
            "--force",
            f"--key-file={key}",
            *paths,
            f"--seed-file={key.parent / 'seed'}",
        )
        wait_for((self.home / "munge").exists, 20, lambda: "munged does not begin")
        self._start("slurmctld", "-D", "-c")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D %T") == "3 idle", 120, self._said)

    def _start(self, *words: str) -> None:
        with open(self.home / f"{len(self.running)}.log", "wb") as log:
            self.running.append(
                subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)
            )

    def _said(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.home.glob("*.log")))

    @property
    def environment(self) -> dict[str, str]:
        own = {"SLURM_CONF": f"{self.home}/slurm.conf"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, **own, "PATH": path, "OMP_NUM_THREADS": "1"}

    def ask(self, *words: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        return (done.stdout + done.stderr).strip()

    def close(self) -> None:
        """Jobs end with their nodes' daemons; what they had started is found by its ancestors."""
        self.ask("scancel", "--user=root")
        psutil.wait_procs(self.tasks(), 40)
        for one in reversed(self.running):
            one.terminate()
        for one in self.running:
            one.wait(30)
        for process in self.tasks():
            process.kill()

    def tasks(self) -> list[psutil.Process]:
        """What its jobs have started: all that has this Slurm's configuration in its environment,
        but the daemons."""
        daemons = {one.pid for one in self.running}
        ours = f"SLURM_CONF={self.environment['SLURM_CONF']}\0".encode()
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):
                said = Path(f"/proc/{process.pid}/environ").read_bytes()
                if ours in said and process.pid not in daemons:
                    found.append(process)
        return found


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    home = tmp_path / "slurm"
    home.mkdir()
    one = Slurm(home)
    try:
        one.begin()
        yield one
    finally:
        one.close()


def written(tmp_path: Path, steps: int) -> Path:
    """A run of two workers and a server; the directory of its files."""
    server, rendezvous = free_ports(2)
    store = ServerPlace(str(tmp_path / "ssd" / "run"), server)
    hosts = (
        *(PlanHost(name, "gpu", "127.0.0.1", 1) for name in NODES[:2]),
        PlanHost(NODES[2], "spare", "127.0.0.1", servers=(store,)),
    )
    text = tmp_path / "text.txt"
    text.write_text("all that is said here is said again and again. " * 600)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
    job = make_job(
        {
            "run": {"dir": str(tmp_path / "run"), "steps": steps, "device": "cpu"},
            "data": {"paths": [str(text)], "seq_len": 32},
            "model": {"config": {"model_type": "llama", **sizes, **heads}},
        }
    )
    plan = Plan(placement("server"), parallelism=Parallelism(dp=2), micro_batch=2)
    machines = PlanFile(plan, Machines(hosts, (), rendezvous))
    run = resolve(machines, job, name="tiny", addresses={}, token=secrets.token_hex())
    write_slurm(run, tmp_path / "files")
    return tmp_path / "files"


def losses(tmp_path: Path) -> dict[int, float]:
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["loss"] for row in rows}


def a_task(slurm: Slurm, words: str) -> psutil.Process:
    """A Python of this Slurm's jobs that runs `words`, itself and not through torchrun."""
    for one in slurm.tasks():
        with suppress(psutil.Error):
            line = " ".join(one.cmdline())
            if "python" in one.name() and words in line and "torch.distributed.run" not in line:
                return one
    raise AssertionError(f"no task runs {words}")


def test_sbatch_would_take_the_script(slurm: Slurm, tmp_path: Path) -> None:
    out = slurm.ask("sbatch", "--test-only", "run.sbatch", cwd=written(tmp_path, 1))
    assert "on nodes gpu[0-1],spare0" in out


def test_a_run_goes_on_after_kills_and_a_notice_with_its_losses(
    slurm: Slurm, tmp_path: Path
) -> None:  # Rules 1, 3
    files = written(tmp_path, 120)

    def log() -> str:
        return "".join(path.read_text() for path in files.glob("slurm-*.out"))

    def upto(step: int) -> None:
        wait_for(lambda: max(losses(tmp_path), default=0) >= step, 90, log)

    job = slurm.ask("sbatch", "--parsable", "run.sbatch", cwd=files)
    upto(20)
    a_task(slurm, "roadtrain.cli serve").send_signal(signal.SIGKILL)
    upto(40)
    a_task(slurm, "roadtrain.cli train").send_signal(signal.SIGKILL)
    upto(60)
    slurm.ask("scancel", "--signal=INT", "--batch", job)
    wait_for(lambda: "roadtrain: put back into the queue" in log(), 60, log)
    assert "is committed; the same command goes on from there" in log()
    undisturbed = tmp_path / "undisturbed"  # while the other waits: Slurm begins it after 2 minutes
    undisturbed.mkdir()
    slurm.ask("sbatch", "run.sbatch", cwd=written(undisturbed, 120))
    wait_for(lambda: "roadtrain: done" in log(), 300, log)
    assert [*losses(tmp_path)] == list(range(1, 121))
    assert losses(tmp_path) == losses(undisturbed)
