"""A pipeline in separate processes that can be killed at scripted points, stopped, and restarted
with other parallelism.

    python tests/support/pipeline_job.py HOME RANK ADDRESS PORT STEPS    # one rank of two stages
"""

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional

import roadtrain
from roadtrain import Files, Servers
from roadtrain.stages import control_links
from roadtrain.stages.parallel_options import ParallelOptions
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.pipeline import Pipeline
from roadtrain.stages.snapshots import SnapshotOptions
from roadtrain.stages.stage_model import MicroBatch
from roadtrain.storage.mark import Mark
from tests.support.models import VOCAB, Net
from tests.support.processes import FORK, free_port

MICROS = 4
EVERY = 2  # steps from one snapshot to the next
DEADLINE_S = 8.0


@dataclass(frozen=True)
class Fault:
    """Rank `rank` kills itself at the `at`-th "run" (a forward or a backward) or "fsync"."""

    rank: int
    kind: str
    at: int


@dataclass(frozen=True)
class PipelineSpec:
    """separate: Give every rank its own run directory, as on hosts that share none."""

    home: Path
    parallelism: Parallelism
    steps: int
    separate: bool = False
    fault: Fault | None = None
    options: dict = field(default_factory=dict)
    on_files: tuple[int, ...] = ()  # stages with their state in files under `home`
    on_servers: dict = field(default_factory=dict)  # stage -> addresses
    deadline_s: float = DEADLINE_S
    grace_s: float = control_links.GRACE_S
    replicas: int = 1
    sums: dict = field(default_factory=dict)  # ParallelOptions for reducers
    pace_s: float = 0.0  # minimum seconds of a step
    until: tuple[int, Path] | None = None  # steps from this one on wait until the file exists
    again: bool = False  # as if each rank's agent had restarted it `rank` times

    @property
    def ranks(self):
        widths = self.parallelism.replicas_of
        return sum(widths) * self.parallelism.tp


def micro(step, number):
    draw = torch.Generator().manual_seed(1000 * step + number)
    x, y = (torch.randint(VOCAB, (2, 8), generator=draw) for _ in range(2))
    return MicroBatch((x,), target=y)


def loss_of(result, batch):
    return functional.cross_entropy(result.flatten(0, 1), batch.target.flatten())


def build_model(dropout=0.1, width=32):
    torch.manual_seed(5)
    model = Net(depth=4, width=width, dropout=dropout)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def _strike():
    os.kill(os.getpid(), signal.SIGKILL)


def arm(fault):
    """Make this process kill itself at the fault's point."""
    if fault.kind == "run":
        counted, run = iter(range(1, 1 << 30)), Pipeline._run  # noqa: SLF001

        def striking(self, *args):
            if next(counted) == fault.at:
                _strike()
            return run(self, *args)

        Pipeline._run = striking  # noqa: SLF001
    else:
        counted, sync = iter(range(1, 1 << 30)), os.fsync

        def syncing(fd):
            sync(fd)
            if next(counted) == fault.at:
                _strike()

        os.fsync = syncing


def train(spec, rank):
    """Train to the end, writing the loss of each step to the rank's file."""
    home = spec.home / f"rank-{rank}" if spec.separate else spec.home
    home.mkdir(exist_ok=True, parents=True)
    control_links.GRACE_S = spec.grace_s  # in this process only
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank if spec.again else 0)
    model, optimizer = build_model(**spec.options)
    stores = {stage: Files(spec.home / f"stage-{stage}") for stage in spec.on_files}
    stores |= {stage: Servers(where) for stage, where in spec.on_servers.items()}
    options = ParallelOptions(
        spec.parallelism, MICROS, stores=stores, deadline_s=spec.deadline_s, seed=3, **spec.sums
    )
    lines = open(spec.home / f"lines-{rank}", "a", buffering=1)  # noqa: SIM115
    training = roadtrain.parallelize(
        model,
        optimizer,
        options,
        example=micro(0, 0),
        loss=loss_of,
        device="cpu",
        report=lambda line: lines.write(f"# {line}\n"),
    )
    with training:
        mark = Mark(spec.home) if rank == 0 else None
        training.keep(home, SnapshotOptions(EVERY, spec.replicas), mark, lambda line: None)
        lines.write(f"resumed {training.steps_done}\n")
        if spec.fault is not None and spec.fault.rank == rank:
            arm(spec.fault)
        while training.steps_done < spec.steps:
            step = training.steps_done
            while spec.until and step >= spec.until[0] and not spec.until[1].exists():
                time.sleep(0.02)
            result = training.step(lambda number: micro(step, number), clip_norm=1.0)  # noqa: B023
            lines.write(f"{step} {float(result).hex()}\n")
            time.sleep(spec.pace_s)
            if training.due():
                training.snapshot({"position": str(training.steps_done).encode()})


def child(spec, rank, port, address="127.0.0.1"):
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(spec.ranks),
    }
    torch.set_num_threads(1)
    result = "ended"
    try:
        train(spec, rank)
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    (spec.home / f"said-{rank}").write_text(result)
    os._exit(0)


class PipelineProcesses:
    """The processes of a start."""

    def __init__(self, spec):
        self.spec, port = spec, free_port()
        spec.home.mkdir(exist_ok=True, parents=True)
        for rank in range(spec.ranks):
            (spec.home / f"said-{rank}").unlink(missing_ok=True)
        self.processes = [
            FORK.Process(target=child, args=(spec, rank, port)) for rank in range(spec.ranks)
        ]
        for process in self.processes:
            process.start()

    def join(self, wait_s=100, but=()):
        """Wait for the ranks. Returns the final message of each, "" for a killed rank."""
        until = time.monotonic() + wait_s
        for rank, process in enumerate(self.processes):
            if rank not in but:
                process.join(max(0.0, until - time.monotonic()))
        self.end()
        paths = [self.spec.home / f"said-{rank}" for rank in range(self.spec.ranks)]
        return [path.read_text() if path.exists() else "" for path in paths]

    def stop(self, rank):
        """Stop a rank without ending it, like a host that lost its network."""
        os.kill(self.processes[rank].pid, signal.SIGSTOP)

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()

    def wait_for_step(self, step, wait_s=60):
        until = time.monotonic() + wait_s
        while step not in losses(self.spec.home):
            assert time.monotonic() < until, "no such step"
            time.sleep(0.02)


def start(spec, **options):
    return PipelineProcesses(spec).join(**options)


def losses(home, rank=0):
    """Loss by step, from the last time that the step was run."""
    found = {}
    path = home / f"lines-{rank}"
    for line in path.read_text().splitlines() if path.exists() else ():
        words = line.split()
        if len(words) == 2 and words[0].isdigit():
            found[int(words[0])] = words[1]
    return found


def resumed(home, rank=0):
    """Steps from which the starts resumed."""
    lines = (home / f"lines-{rank}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("resumed ")]


if __name__ == "__main__":
    home, rank, address, port, steps = sys.argv[1:]
    child(
        PipelineSpec(Path(home), Parallelism(pp=2), int(steps), separate=True),
        int(rank),
        int(port),
        address,
    )
