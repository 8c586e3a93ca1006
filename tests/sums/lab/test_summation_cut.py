"""A spare host that vanishes from the network without a word is gone round within 5 s, with
right sums, and used again when it is back (Rules 1 and 5)."""

import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise

import pytest

from roadtrain.lab import LabNic, Network, network_available
from roadtrain.transport.address import write_token

pytestmark = pytest.mark.skipif(network_available() is not None, reason=str(network_available()))


def rounds(home, since=0.0):
    out = []
    for rank in (0, 1):
        path = home / f"rounds {rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        out.append(
            [
                float(line.split()[1])
                for line in lines
                if line.endswith("\n") and float(line.split()[1]) > since
            ]
        )
    return out


def wait(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


@pytest.mark.exhaustive
def test_a_host_that_vanishes(tmp_path):
    with Network({name: [LabNic(50e6)] for name in ("w0", "w1", "s0")}) as network:
        spare = f"{network.hosts['s0'].address}:7000"
        write_token(tmp_path / "token")
        (tmp_path / "spares").write_text(f"{spare}\n")
        processes = []
        with open(tmp_path / "log", "w+") as log, ExitStack() as stack:
            stack.callback(lambda: print((tmp_path / "log").read_text()))

            def run(host, *words):
                processes.append(
                    host.run([sys.executable, "-u", "-m", *words], stdout=log, stderr=log)
                )
                stack.callback(processes[-1].wait)
                stack.callback(processes[-1].kill)

            def said(words):
                return words in (tmp_path / "log").read_text()

            token, alone = str(tmp_path / "token"), network.hosts["s0"]
            run(
                alone,
                "roadtrain.cli",
                "serve",
                spare,
                "--sum",
                "--budget",
                "64MiB",
                "--token-file",
                token,
            )
            wait(lambda: said("summing at"))
            for rank in (0, 1):
                host = network.hosts[f"w{rank}"]
                run(
                    host, "benchmarks.soak.sums", str(tmp_path), str(rank), "2", host.address, token
                )
            wait(lambda: all(len(one) > 5 for one in rounds(tmp_path)))
            begin = time.monotonic()
            assert alone.run(["ip", "link", "set", "eth0", "down"]).wait(10) == 0
            wait(
                lambda: (
                    all(len(one) > 20 for one in rounds(tmp_path, begin))
                    and said("not used any more")
                )
            )
            gaps = [b - a for one in rounds(tmp_path) for a, b in pairwise(one) if b > begin]
            assert max(gaps) < 5.5, max(gaps)  # 5 s and a round
            assert alone.run(["ip", "link", "set", "eth0", "up"]).wait(10) == 0
            wait(lambda: said("begins to sum"), 60)
            (tmp_path / "stop").touch()
            assert [process.wait(30) for process in processes[1:]] == [0, 0]
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout == ""
