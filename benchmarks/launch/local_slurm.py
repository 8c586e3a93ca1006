"""A Slurm cluster on this machine, to test the files of `roadtrain launch --write slurm`. Needs
root, and Debian's packages slurm-wlm and munge. Does NOT touch an installed Slurm that is running.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

NEEDED = ("sbatch", "slurmctld", "slurmd", "munged")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
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
GresTypes=gpu
SchedulerParameters=bf_interval=1
MpiDefault=none
ReturnToService=2
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in made:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in made]


def wait_for(what: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, why()
        time.sleep(0.1)


@dataclass
class LocalSlurm:
    """A running Slurm with all files in `home`. `close` stops it. `gpus`: number of GPUs that each
    node pretends to have.
    """

    home: Path
    nodes: Sequence[str]
    gpus: Mapping[str, int] = field(default_factory=dict)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def begin(self) -> None:
        controller, *ports = free_ports(1 + len(self.nodes))
        text = SETTINGS.format(host=socket.gethostname(), port=controller, home=self.home)
        for node, port in zip(self.nodes, ports):
            about = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port}"
            gpus = f" Gres=gpu:{self.gpus[node]}" if node in self.gpus else ""
            text += f"NodeName={node} {about} CPUs=1 RealMemory=100{gpus}\n"
            (self.home / f"spool.{node}").mkdir()
        text += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (self.home / "slurm.conf").write_text(text)
        (self.home / "gres.conf").write_text("".join(self._devices()))
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
        wait_for((self.home / "munge").exists, 20, lambda: "munged does not start")
        self._start("slurmctld", "-D", "-c")
        for node in self.nodes:
            self._start("slurmd", "-D", "-N", node)
        wait_for(
            lambda: self.ask("sinfo", "-h", "-o", "%D %T") == f"{len(self.nodes)} idle",
            120,
            self._logs,
        )

    def _devices(self) -> Iterator[str]:
        first = 0
        for node, count in self.gpus.items():
            yield f"NodeName={node} Name=gpu File=/dev/tty[{first}-{first + count - 1}]\n"
            first += count

    def _start(self, *words: str) -> None:
        with open(self.home / f"{len(self.running)}.log", "wb") as log:
            self.running.append(
                subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)
            )

    def _logs(self) -> str:
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

    def __enter__(self) -> LocalSlurm:
        try:
            self.begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all jobs, stop the daemons, and kill the processes that the jobs left."""
        self.ask("scancel", "--user=root")
        psutil.wait_procs(self.tasks(), 40)
        for daemon in reversed(self.running):
            daemon.terminate()
        for daemon in self.running:
            daemon.wait(30)
        for process in self.tasks():
            process.kill()

    def tasks(self) -> list[psutil.Process]:
        """Find the processes that jobs of this Slurm started, without the daemons' own children."""
        daemons = {daemon.pid for daemon in self.running}
        ours = f"SLURM_CONF={self.environment['SLURM_CONF']}\0".encode()
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if ours in environment and daemons.isdisjoint((process.pid, process.ppid())):
                    found.append(process)
        return found
