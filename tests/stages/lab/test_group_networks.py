"""Each group sends over the network that was chosen for it, on hosts of a lab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.crosscluster.broken import JOB
from benchmarks.crosscluster.lab import FAST, HOSTS, HYBRID, SLOW, two_clusters
from roadtrain.lab import network_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]
NBYTES = 4 << 20  # of the worker's tensor


@pytest.mark.exhaustive  # as does test_crosscluster.py
def test_each_group_sends_over_its_network(tmp_path) -> None:
    """With two stages of two replicas, the sums of a stage use InfiniBand or RoCE and the messages
    between stages use Ethernet. No environment variable names the interface (Rule 6)."""
    (tmp_path / "job.toml").write_text(JOB)
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "group_worker.py")]
    with two_clusters(HYBRID) as network:
        hosts = [network.hosts[name] for name in HOSTS]
        workers = [
            host.run(
                [*command, str(tmp_path / "job.toml")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(HOSTS)),
                    "MASTER_ADDR": hosts[0].nics[SLOW].address,
                    "MASTER_PORT": "29500",
                },
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            answers = command_all(workers, "begin")
            before = sent(hosts)
            assert command_all(workers, "sum") == [f"done {NBYTES / 2}"] * 4, answers
            summed = sent(hosts)
            command_all(workers, "pass on")
            passed = sent(hosts)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
                worker.stdin.close()
                worker.stdout.close()
    for host in range(4):
        by_fast, by_slow = (summed[host][nic] - before[host][nic] for nic in (FAST, SLOW))
        # a sum over two ranks sends the tensor's size from each
        assert NBYTES <= by_fast < 1.05 * NBYTES, host
        assert by_slow < 0.05 * NBYTES, host  # the barrier
        by_fast, by_slow = (passed[host][nic] - summed[host][nic] for nic in (FAST, SLOW))
        assert by_fast < 0.01 * NBYTES, host
        if host < 2:
            assert NBYTES <= by_slow < 1.05 * NBYTES, host


def command_all(workers, word):
    for worker in workers:
        worker.stdin.write(word + "\n")
        worker.stdin.flush()
    return [worker.stdout.readline().strip() for worker in workers]


def sent(hosts):
    return [[nic.traffic().sent for nic in host.nics] for host in hosts]
