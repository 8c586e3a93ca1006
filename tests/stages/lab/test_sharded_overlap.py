"""The sharded optimizer between two hosts sends no more than it must, and overlapping communication
with computation saves time without changing a bit."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from roadtrain.lab import LabNic, Network, network_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.alone,
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]

SUPPORT = Path(__file__).parents[2] / "support"
RATE = 75e6  # bytes a second: 600 Mbit/s
HEADERS = 1514 / 1448
OVERLAP_GAIN = 1.1


def run_ranks(tmp_path, rate, depth, steps):
    """Return the results of a rank on each of two hosts."""
    with Network({name: [LabNic(rate)] for name in ("h0", "h1")}) as network, ExitStack() as stack:
        processes = []
        for rank, host in enumerate(network.hosts.values()):
            arguments = [str(tmp_path / "store"), str(rank), "2", "eth0", str(depth), str(steps)]
            env = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            process = host.run(
                [sys.executable, "-W", "ignore", str(SUPPORT / "sharded_rank.py"), *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        return [json.loads(process.communicate(timeout=150)[0]) for process in processes]


@pytest.mark.exhaustive
def test_overlap_saves_time_and_sends_the_same_bytes(tmp_path):
    ranks = run_ranks(tmp_path, RATE, depth=4, steps=4)
    for result in ranks:
        on, off = result["True"], result["False"]
        assert result["same"] and on["losses"] == off["losses"]  # Rule 1
        print(f"overlap {on['median']:.3f} s a step, without {off['median']:.3f} s", on, off)
        for mode in (on, off):
            # half of the gradients and half of the parameters: S in all, plus headers
            assert 0.99 < mode["sent"] < 1.02 * HEADERS
        assert off["median"] / on["median"] >= OVERLAP_GAIN
