"""Two hosts with a stage each. When the link between them is cut, both end within the deadline with
an error; they resume once the link is restored (Rules 3 and 5)."""

import sys
import time
from pathlib import Path

import pytest

from roadtrain.lab import LabNic, Network, network_available
from roadtrain.stages.control_links import GRACE_S

pytestmark = pytest.mark.skipif(network_available() is not None, reason=str(network_available()))
JOB = Path(__file__).parents[2] / "support" / "pipeline_job.py"
DEADLINE_S = 8.0  # of the job


def lines(home, rank=0):
    path = home / f"lines-{rank}"
    return path.read_text().splitlines() if path.exists() else []


def steps(home):
    return [int(line.split()[0]) for line in lines(home) if line[0].isdigit()]


def run(network, home, port, count, log):
    address = network.hosts["a0"].address
    return [
        network.hosts[host].run(
            [sys.executable, str(JOB), str(home), str(rank), address, str(port), str(count)],
            stdout=log,
            stderr=log,
        )
        for rank, host in enumerate(("a0", "b0"))
    ]


@pytest.mark.exhaustive
def test_both_stages_end_at_a_cut_link_and_resume_later(tmp_path):
    home = tmp_path / "run"
    home.mkdir()
    with (
        Network({name: [LabNic(50e6)] for name in ("a0", "b0")}) as network,
        open(tmp_path / "log", "w+") as log,
    ):
        processes = run(network, home, 7100, 1000, log)
        try:
            deadline = time.monotonic() + 90
            while len(steps(home)) < 4:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)
            cut = time.monotonic()
            assert network.hosts["b0"].run(["ip", "link", "set", "eth0", "down"]).wait(10) == 0
            for process in processes:
                process.wait(4 * DEADLINE_S)
            assert time.monotonic() - cut < DEADLINE_S + GRACE_S + 12.0
            results = [(home / f"said-{rank}").read_text() for rank in range(2)]
            for own, message in enumerate(results):
                assert message.startswith(("DeadlineError: ", "LostError: ")), results
                assert "stage" in message and "step" in message and f"rank {1 - own}" in message, (
                    results
                )
            assert network.hosts["b0"].run(["ip", "link", "set", "eth0", "up"]).wait(10) == 0
            done = max(steps(home)) + 1
            processes = run(network, home, 7101, done + 2, log)
            for process in processes:
                process.wait(90)
            results = [(home / f"said-{rank}").read_text() for rank in range(2)]
            assert results == ["ended"] * 2, (tmp_path / "log").read_text()
            assert max(steps(home)) == done + 1
        finally:
            for process in processes:
                process.kill()
                process.wait()
