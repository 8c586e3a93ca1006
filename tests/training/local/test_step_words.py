"""Workers of servers end after the same step, whichever worker is asked to stop, and the loss and
tokens of the run are those of all workers (`training/step_exchange.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from roadtrain.training.metrics import read_metrics
from tests.support.small_job import write_small_job
from tests.support.warm_python import warm_python


class Workers:
    """Two processes of `roadtrain train`, each with its own run directory."""

    def __init__(self, home: Path, where: str) -> None:
        self.home, self.where, self.started = home, where, 0

    def start(self, rank: int, steps: int, **options: object) -> subprocess.Popen[str]:
        path = write_small_job(self.home, steps)
        words = {"run.dir": self.home / f"run{rank}", "servers.addresses": self.where, **options}
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2" if "servers.relay" in options else "1",
            "TORCHELASTIC_RUN_ID": "words",
            "TORCHELASTIC_RESTART_COUNT": str(self.started),
            "OMP_NUM_THREADS": "1",
        }
        arguments = [word for key, value in words.items() for word in (f"--{key}", str(value))]
        return subprocess.Popen(
            [warm_python(), "-m", "roadtrain", "train", str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )

    def both(
        self, steps: int, apart_s: float = 0.0, **options: object
    ) -> list[subprocess.Popen[str]]:
        self.started += 1
        first = self.start(0, steps, **options)
        deadline = time.monotonic() + 60
        while apart_s and not (self.home / "run0").exists():  # its minutes count from here
            assert time.monotonic() < deadline, first.kill() or first.communicate()
            time.sleep(0.05)
        time.sleep(apart_s)
        return [first, self.start(1, steps, **options)]

    def lines(self, rank: int) -> list[dict[str, float]]:
        name = "metrics.1.jsonl" if rank else "metrics.jsonl"
        return read_metrics(self.home / f"run{rank}" / name)


def ended(workers: list[subprocess.Popen[str]]) -> list[str]:
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    return outputs


@pytest.fixture
def workers(tmp_path, hosts):
    return Workers(tmp_path, hosts(1)[0].where)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="directly"),
        pytest.param({"optimizer.delay": 1}, marks=pytest.mark.exhaustive, id="late"),
        pytest.param({"servers.relay": "64MiB"}, marks=pytest.mark.exhaustive, id="by a relay"),
    ],
)
def test_workers_whose_minutes_are_over_end_after_the_same_step(workers, options):
    """Worker 0 starts earlier. A later start continues from the common step."""
    outputs = ended(workers.both(10**6, apart_s=1.5, **{"run.minutes": 0.1, **options}))
    assert "0.1 minutes are over: step" in outputs[0]  # worker 0 reports for all
    last = [workers.lines(rank)[-1]["step"] for rank in (0, 1)]
    assert last[0] == last[1] and 0 < last[0] < 10**6
    ended(workers.both(last[0] + 2, **options))
    assert [workers.lines(rank)[-1]["step"] for rank in (0, 1)] == [last[0] + 2] * 2
    assert [line["step"] for line in workers.lines(0)] == list(range(1, last[0] + 3))


@pytest.mark.slow
def test_interrupting_a_worker_ends_the_others(workers):
    both = workers.both(10**6)
    deadline = time.monotonic() + 60
    while not (workers.home / "run1" / "metrics.1.jsonl").exists() or not workers.lines(1):
        assert time.monotonic() < deadline, [
            worker.kill() or worker.communicate() for worker in both
        ]
        time.sleep(0.05)
    both[1].send_signal(signal.SIGTERM)
    outputs = [worker.communicate(timeout=60)[0] for worker in both]
    assert [worker.returncode for worker in both] == [0, 130], outputs
    assert "another worker was interrupted: step" in outputs[0]
    assert workers.lines(0)[-1]["step"] == workers.lines(1)[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("relay", [False, True])
def test_the_loss_of_the_run_is_that_of_all_workers(workers, relay):
    """The loss of each worker is that of its half of the batch."""
    ended(workers.both(3, **({"servers.relay": "64MiB"} if relay else {})))
    lines, own = workers.lines(0), workers.lines(1)
    assert [line["tokens"] for line in lines] == [2 * line["tokens"] for line in own]
    assert all("loss_of" not in line for line in lines)
    # step 1 uses the initial parameters: its mean is that of a single worker with both halves
    write_small_job(workers.home, 1)
    words = ["--run.dir", str(workers.home / "alone"), "--optimizer.accumulate", "2"]
    result = subprocess.run(
        [warm_python(), "-m", "roadtrain", "train", str(workers.home / "job.toml"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (whole,) = read_metrics(workers.home / "alone" / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert own[0]["loss"] != lines[0]["loss"] and lines[0]["tokens"] == whole["tokens"]
