"""The files for Slurm on a real Slurm: a controller and three nodes on this machine. The tests are
skipped if Slurm is not installed (Debian: slurm-wlm, munge)."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.launch.local_slurm import NEEDED, LocalSlurm, free_ports, wait_for
from roadtrain.config.job import make_job
from roadtrain.config.machines import Machines, PlanHost, ServerPlace
from roadtrain.config.plan_file import Plan, PlanFile, placement
from roadtrain.launch.resolve import resolve
from roadtrain.launch.write_slurm import write_slurm
from roadtrain.stages.parallelism import Parallelism
from tests.support.needs import needs

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    needs(*NEEDED, apt="slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="not root"),
    pytest.mark.timeout(600),
]
NODES = ("gpu0", "gpu1", "spare0")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[LocalSlurm]:
    home = tmp_path / "slurm"
    home.mkdir()
    with LocalSlurm(home, NODES) as cluster:
        yield cluster


def write_run(
    tmp_path: Path, steps: int, device: str = "cpu", workers: Sequence[int] = (1, 1)
) -> Path:
    """Write the files of a run of two worker hosts and a server. Returns their directory."""
    server, rendezvous = free_ports(2)
    store = ServerPlace(str(tmp_path / "ssd" / "run"), server)
    hosts = (
        *(PlanHost(name, "gpu", "127.0.0.1", count) for name, count in zip(NODES, workers)),
        PlanHost(NODES[2], "spare", "127.0.0.1", servers=(store,)),
    )
    text = tmp_path / "text.txt"
    text.write_text("all that is said here is said again and again. " * 600)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
    job = make_job(
        {
            "run": {"dir": str(tmp_path / "run"), "steps": steps, "device": device},
            "data": {"paths": [str(text)], "seq_len": 32},
            "model": {"config": {"model_type": "llama", **sizes, **heads}},
        }
    )
    plan = Plan(placement("server"), parallelism=Parallelism(dp=sum(workers)), micro_batch=2)
    machines = PlanFile(plan, Machines(hosts, (), rendezvous))
    run = resolve(machines, job, name="tiny", addresses={}, token=secrets.token_hex())
    write_slurm(run, tmp_path / "files")
    return tmp_path / "files"


def losses(tmp_path: Path) -> dict[int, float]:
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["loss"] for row in rows}


def find_task(slurm: LocalSlurm, words: str) -> psutil.Process:
    """Return the Python process of a Slurm job that runs `words` itself, not through torchrun."""
    for task in slurm.tasks():
        with suppress(psutil.Error):
            line = " ".join(task.cmdline())
            if "python" in task.name() and words in line and "torch.distributed.run" not in line:
                return task
    raise AssertionError(f"no task runs {words}")


def test_sbatch_accepts_the_script(slurm: LocalSlurm, tmp_path: Path) -> None:
    out = slurm.ask("sbatch", "--test-only", "run.sbatch", cwd=write_run(tmp_path, 1))
    assert "on nodes gpu[0-1],spare0" in out


def test_a_run_continues_after_kills_and_a_notice_with_the_same_losses(
    slurm: LocalSlurm, tmp_path: Path
) -> None:  # Rules 1, 3
    files = write_run(tmp_path, 120)

    def log() -> str:
        return "".join(path.read_text() for path in files.glob("slurm-*.out"))

    def upto(step: int) -> None:
        wait_for(lambda: max(losses(tmp_path), default=0) >= step, 90, log)

    job = slurm.ask("sbatch", "--parsable", "run.sbatch", cwd=files)
    upto(20)
    find_task(slurm, "roadtrain.cli serve").send_signal(signal.SIGKILL)
    upto(40)
    find_task(slurm, "roadtrain.cli train").send_signal(signal.SIGKILL)
    upto(60)
    slurm.ask("scancel", "--signal=INT", "--batch", job)
    wait_for(lambda: "roadtrain: asking Slurm to requeue the job" in log(), 60, log)
    committed = "is committed; run the same command to continue from there"
    wait_for(lambda: committed in log(), 60, log)
    # this job runs while the first waits, which Slurm restarts after 2 minutes
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    slurm.ask("sbatch", "run.sbatch", cwd=write_run(undisturbed, 120))
    wait_for(lambda: "roadtrain: done" in log(), 300, log)
    assert [*losses(tmp_path)] == list(range(1, 121))
    assert losses(tmp_path) == losses(undisturbed)


# The script alone: a stub named `python` replaces every program that the script starts.

TORCHRUN = 'echo "torchrun $SLURMD_NODENAME sees ${CUDA_VISIBLE_DEVICES-nothing}."'
COMMITTED = """echo '{"step": 3}'"""


@pytest.fixture(scope="module")
def with_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    with LocalSlurm(tmp_path_factory.mktemp("slurm"), NODES, {"gpu0": 4, "gpu1": 2}) as cluster:
        yield cluster


def submit(slurm: LocalSlurm, files: Path, torchrun: str, committed: str = COMMITTED) -> str:
    """Submit a job whose `python` runs these shell commands. Returns its number."""
    python = files / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"""#!/bin/bash
case "$*" in
*torch.distributed.run*) {torchrun};;
*launch.committed*) {committed};;
*) echo "service $SLURMD_NODENAME sees ${{CUDA_VISIBLE_DEVICES-nothing}}."; sleep 600;;
esac
"""
    )
    python.chmod(0o755)
    path = f"{python.parent}:{os.environ['PATH']}"
    return slurm.ask("sbatch", "--parsable", f"--export=ALL,PATH={path}", "run.sbatch", cwd=files)


def log_of(files: Path) -> str:
    return "".join(path.read_text() for path in files.glob("slurm-*.out"))


@pytest.mark.parametrize(
    "workers, seen", [((1, 1), ("0", "0")), ((3, 1), ("0,1,2", "0")), ((1, 2), ("0", "0,1"))]
)
def test_each_worker_of_a_host_gets_a_gpu(
    with_gpus: LocalSlurm, tmp_path: Path, workers: Sequence[int], seen: Sequence[str]
) -> None:
    files = write_run(tmp_path, 1, "cuda", workers)
    submit(with_gpus, files, TORCHRUN)
    wait_for(lambda: "roadtrain: done" in log_of(files), 90, lambda: log_of(files))
    for host, gpus in zip(NODES, seen):
        assert f": torchrun {host} sees {gpus}.\n" in log_of(files)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_notice_before_the_workers_start_requeues_the_job(
    with_gpus: LocalSlurm, tmp_path: Path, device: str
) -> None:
    """cuda: The job has several components, which are requeued together."""
    files = write_run(tmp_path, 1, device)
    asks = tmp_path / "asks"
    job = submit(with_gpus, files, TORCHRUN, f"touch {asks}; sleep 3; {COMMITTED}")
    wait_for(asks.exists, 60, lambda: log_of(files))
    with_gpus.ask("scancel", "--signal=INT", "--batch", job)
    wait_for(
        lambda: "roadtrain: asking Slurm to requeue the job" in log_of(files),
        60,
        lambda: log_of(files),
    )
    queue = "squeue", "--noheader", "--user=root", "--format=%T"
    parts = {"cpu": 1, "cuda": 2}[device]
    wait_for(
        lambda: with_gpus.ask(*queue).split() == parts * ["PENDING"], 60, lambda: log_of(files)
    )
    with_gpus.ask("scancel", job)
    assert "torchrun" not in log_of(files)


def test_workers_that_commit_nothing_end_the_job(with_gpus: LocalSlurm, tmp_path: Path) -> None:
    """This holds even if each start writes a line to the metrics."""
    files = write_run(tmp_path, 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    submit(with_gpus, files, f"{TORCHRUN}; echo >>{metrics}; exit 1")
    wait_for(lambda: "without a committed step" in log_of(files), 120, lambda: log_of(files))
    assert "workers failed 6 times without a committed step, last with code 1" in log_of(files)
    assert metrics.read_text() == 12 * "\n"


@pytest.mark.parametrize("workers", [(1, 1), (1, 2)])
def test_workers_that_outlive_the_others_are_restarted_after_a_minute(
    with_gpus: LocalSlurm, tmp_path: Path, workers: Sequence[int]
) -> None:
    """The workers are a single job step or several."""
    files = write_run(tmp_path, 1, "cuda", workers)
    hangs = "[[ $SLURMD_NODENAME = gpu0 ]] && sleep 600"
    submit(with_gpus, files, f"{TORCHRUN}; {hangs}; exit 7")
    wait_for(lambda: "restarting all of them" in log_of(files), 120, lambda: log_of(files))
    assert "workers ended with code" in log_of(files)
    with_gpus.ask("scancel", "--user=root")
