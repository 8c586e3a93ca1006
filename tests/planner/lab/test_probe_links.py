"""`roadtrain probe` over emulated links: the measured rate of every ordered pair, those to the
asking host too, is that of its slower end; the whole command writes all hosts; one that goes
meanwhile is named, and the rest is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from roadtrain.config.cluster import load_cluster
from roadtrain.lab import LabNic, Network, network_available
from roadtrain.transport.address import write_token

RATES = {"a": 50e6, "b": 12.5e6, "c": 50e6}
CARRIED = 0.956  # of a link's bytes, by whole Ethernet frames
PORT = 7100
ASK = """
import json, sys
from roadtrain.planner.probe_links import matrix
from roadtrain.transport.tcp import TcpOptions
found, missing = matrix(sys.argv[2].split(","), TcpOptions(token=open(sys.argv[1], "rb").read().strip()))
print(json.dumps([[[*pair, *both] for pair, both in found.items()], missing]))
"""

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]


class Lab:
    """Hosts b and c listen, a asks."""

    def __init__(self, network: Network, home: Path) -> None:
        self.network, self.token, self.out = network, home / "token", home / "cluster.toml"
        write_token(self.token)
        self.where = {name: f"{network.hosts[name].address}:{PORT}" for name in RATES}
        self.others, self.running = (
            f"{self.where['b']},{self.where['c']}",
            list[subprocess.Popen[str]](),
        )
        self.listening = {
            name: self.start(
                name,
                "-u",
                "-m",
                "roadtrain.cli",
                "probe",
                "--listen",
                self.where[name],
                "--token-file",
                str(self.token),
                "--dirs",
                f"{home},{home.parent}",
            )
            for name in ("b", "c")
        }

    def start(self, host: str, *words: str) -> subprocess.Popen[str]:
        process = self.network.hosts[host].run(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.running.append(process)
        return process

    def probe(self, *words: str) -> subprocess.Popen[str]:
        return self.start(
            "a",
            "-u",
            "-m",
            "roadtrain.cli",
            "probe",
            "--hosts",
            self.others,
            "--out",
            str(self.out),
            *words,
        )


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Network({name: [LabNic(rate)] for name, rate in RATES.items()}) as network:
        made = Lab(network, tmp_path)
        try:
            for process in made.listening.values():
                assert process.stdout is not None and "listening at" in process.stdout.readline()
            yield made
        finally:
            for process in made.running:
                process.kill()
            for process in made.running:
                process.communicate(timeout=30)


def test_every_pair_has_the_rate_of_its_slower_end(lab: Lab) -> None:
    names = {lab.where["b"]: "b", lab.where["c"]: "c", "here": "a"}
    best = dict.fromkeys(permutations("abc", 2), 0.0)  # of the link's rate
    for _ in range(5):  # a busy machine that stalls makes a rate low, and none high
        asking = lab.start("a", "-c", ASK, str(lab.token), lab.others)
        out, _ = asking.communicate(timeout=120)
        assert asking.returncode == 0, out
        rows, missing = json.loads(out.splitlines()[-1])
        found = {(names[begin], names[end]): both for begin, end, *both in rows}
        assert set(found) == set(best) and not missing
        for pair, (rate, latency) in found.items():
            share = rate / (CARRIED * min(RATES[name] for name in pair))
            assert share <= 1.15, (pair, share)
            assert 0 < latency < 0.1
            best[pair] = max(best[pair], share)
        if min(best.values()) >= 0.85:
            break
    assert min(best.values()) >= 0.85, best


@pytest.mark.exhaustive
def test_the_whole_command(lab: Lab, tmp_path: Path) -> None:
    asking = lab.probe("--dirs", str(tmp_path), "--token-file", str(lab.token))
    told, _ = asking.communicate(timeout=300)
    assert asking.returncode == 0, told
    cluster = load_cluster(lab.out)
    assert len(cluster.hosts) == 3 and cluster.hosts[0].ssds
    for host, best in zip(cluster.hosts, (50e6, 12.5e6, 50e6)):
        assert f"hosts.{host.name}.nics" in cluster.measured and host.memory_rate > 1e8
        assert (
            host.nics[0].total == pytest.approx(CARRIED * best, rel=0.15)
            and host.nics[0].latency > 0
        )
    head = [line for line in lab.out.read_text().splitlines() if line.startswith("#")]
    for host in cluster.hosts:
        assert any(line.startswith(f"# {host.name}: NUMA node 0: cores ") for line in head), head
    assert not any("link from" in line for line in head)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_host_that_goes_meanwhile(lab: Lab, how: str) -> None:
    asking, going = lab.probe("--token-file", str(lab.token)), lab.listening["c"]
    # one of its directories is measured
    assert going.stdout is not None and "read" in going.stdout.readline()
    begin = time.monotonic()
    if how == "killed":
        going.kill()
    else:
        assert lab.network.hosts["c"].run(["ip", "link", "set", "eth0", "down"]).wait(10) == 0
    told, _ = asking.communicate(timeout=300)
    assert asking.returncode == 1 and time.monotonic() - begin < 60, told
    assert "Traceback" not in told
    cluster = load_cluster(lab.out)
    assert len(cluster.hosts) == 2
    for host in cluster.hosts:
        assert host.nics[0].total == pytest.approx(CARRIED * 12.5e6, rel=0.15)
    named = f"not measured: host {lab.where['c']}: "
    for lines in told.splitlines(), lab.out.read_text().splitlines():
        (line,) = (line.removeprefix("# ") for line in lines if lab.where["c"] in line)
        assert line.startswith(named) and "was lost" in line, told


def test_without_a_token(lab: Lab) -> None:
    asking = lab.probe()
    told, _ = asking.communicate(timeout=60)
    assert (
        asking.returncode == 2
        and "this side has no token, but the peer has one" in told
        and not lab.out.exists()
    )
