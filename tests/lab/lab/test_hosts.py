"""Hosts of the emulated network: their CPUs, names and NICs' counters, and what breaks them on
purpose: a one-way firewall, an MTU that the path does not carry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roadtrain.errors import ConfigError
from roadtrain.lab import (
    PREFIX,
    LabHost,
    LabNic,
    Network,
    cpus_available,
    network_available,
    sweep,
)
from roadtrain.lab.control_groups import hierarchy

needs_network = pytest.mark.skipif(network_available() is not None, reason=str(network_available()))
needs_cpus = pytest.mark.skipif(cpus_available() is not None, reason=str(cpus_available()))
pytestmark = [pytest.mark.lab, pytest.mark.alone]

SRC = Path(__file__).parents[3] / "src"
ENV = os.environ | {"PYTHONPATH": str(SRC)}
FAST = 50e6

# Begin and end of each half second, and the CPU time that the process itself used in it: the
# machine may be busy.
BURN = """
import time
while True:
    begin, used = time.monotonic(), time.process_time()
    while time.monotonic() < begin + 0.5:
        pass
    print(begin, time.monotonic(), time.process_time() - used, flush=True)
"""
PERIOD_S = 0.1  # the kernel grants CPU time in such portions
SERVE = """
import socket, sys
with socket.create_server(("0.0.0.0", 5000)) as listener:
    print("ready", flush=True)
    while True:
        peer, count = listener.accept()[0], 0
        with peer:
            while got := peer.recv(1 << 20):
                count += len(got)
            peer.sendall(count.to_bytes(8, "big"))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3])) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    print(int.from_bytes(peer.recv(8), "big"))
"""


def python(host: LabHost, code: str, *argv: str) -> subprocess.Popen[str]:
    return host.run(
        [sys.executable, "-c", code, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def server() -> Iterator[list[subprocess.Popen[str]]]:
    """Servers that a test started."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def serve(host: LabHost, started: list[subprocess.Popen[str]]) -> None:
    started.append(python(host, SERVE))
    assert started[-1].stdout is not None and started[-1].stdout.readline() == "ready\n"


def send(host: LabHost, to: str, nbytes: int, timeout_s: float = 20.0) -> int | str:
    """How many bytes the server says it got, or why not."""
    said, why = python(host, SEND, to, str(nbytes), str(timeout_s)).communicate(timeout=60)
    return int(said) if said else why.splitlines()[-1]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    mine = f"{PREFIX}{os.getpid()}-*"
    roots = [Path(tempfile.gettempdir()), hierarchy("cpu")]
    assert [path for root in roots if root for path in root.glob(mine)] == []


def windows(
    process: subprocess.Popen[str], after: float, count: int = 2, share: float = 0.0
) -> list[tuple[float, float, float]]:
    """(begin, end, CPU seconds) of `count` windows that began after that time, and of more until
    one of them has more than this share of a CPU, or 30 s are over."""
    assert process.stdout is not None
    found, best, deadline = list[tuple[float, float, float]](), 0.0, time.monotonic() + 30
    while len(found) < count or (best <= share and time.monotonic() < deadline):
        begin, end, used = map(float, process.stdout.readline().split())
        if begin > after:
            found.append((begin, end, used))
            best = max(best, used / (end - begin))
    return found


def keep_to(limit: float, *found: tuple[float, float, float]) -> bool:
    """Whether all of them together used no more CPU time than the limit, and a period's more."""
    span_s = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
    return sum(used for _, _, used in found) <= 1.05 * limit * (span_s + PERIOD_S)


def best_share(found: list[tuple[float, float, float]]) -> float:
    return max(used / (end - begin) for begin, end, used in found)


@needs_network
@needs_cpus
def test_a_limit_of_cpus_holds_and_changes_while_processes_run() -> None:
    with Network({"a": [LabNic(FAST)], "b": [LabNic(FAST)]}, cpus={"a": 0.2}) as network:
        a = network.hosts["a"]
        burner = python(a, BURN)
        at_first = windows(burner, time.monotonic(), share=0.1)
        a.set_cpus(0.1)
        later = windows(burner, time.monotonic() + PERIOD_S, share=0.05)
        two = python(a, BURN)
        both_run = windows(two, 0.0, count=1)[0][1]
        together = windows(two, both_run, count=4) + windows(burner, both_run, count=4)
        with pytest.raises(ConfigError, match="host b was made without a CPU limit"):
            network.hosts["b"].set_cpus(0.5)
        with pytest.raises(ConfigError, match=r"0\.01 CPUs for a host"):
            a.set_cpus(0.01)
    for process in (burner, two):
        process.communicate()
    # a busy machine may give less than the limit, never more than it and a period's share
    assert all(keep_to(0.2, window) for window in at_first), at_first
    assert best_share(at_first) > 0.1, at_first
    assert all(keep_to(0.1, window) for window in later), later
    assert best_share(later) > 0.05, later
    assert keep_to(0.1, *together), together


def test_cpus_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="hosts that do not exist: c"):
        Network({"a": [LabNic(1)]}, cpus={"c": 1})
    with pytest.raises(ConfigError, match="0 CPUs for a host"):
        Network({"a": [LabNic(1)]}, cpus={"a": 0})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="cannot be limited here: not root"):
        Network({"a": [LabNic(1)]}, cpus={"a": 1})


@needs_network
@needs_cpus
def test_sweep_removes_the_group_that_a_killed_process_left() -> None:
    code = """
import os, time
from roadtrain.lab import Network, LabNic
with Network({"a": [LabNic(1e6)]}, cpus={"a": 0.5}) as network:
    network.hosts["a"].run(["sleep", "60"], start_new_session=True)
    print(network.hosts["a"].group, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=ENV
    ) as process:
        assert process.stdout is not None
        group = Path(process.stdout.readline().strip())
        deadline = time.monotonic() + 5
        while not (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (group / "cgroup.procs").read_text(), "nothing is in it"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert str(group) in sweep() and not group.exists()


@needs_network
def test_counters_of_a_nic_are_the_bytes_of_the_user(
    server: list[subprocess.Popen[str]],
) -> None:
    nbytes = 20_000_000
    with Network({"a": [LabNic(FAST)], "b": [LabNic(FAST), LabNic(FAST, "x")]}) as network:
        a, b = network.hosts.values()
        serve(b, server)
        before = [nic.traffic() for nic in (a.nics[0], *b.nics)]
        assert send(a, "b", nbytes) == nbytes
        sent, received, other = (
            nic.traffic() - was for nic, was in zip((a.nics[0], *b.nics), before, strict=True)
        )
    assert sent.sent == pytest.approx(nbytes, rel=0.005)
    assert received.received == pytest.approx(nbytes, rel=0.005)
    assert abs(sent.received) < 0.005 * nbytes and abs(received.sent) < 0.005 * nbytes
    assert abs(other.sent) + abs(other.received) < 0.005 * nbytes


@needs_network
def test_a_firewall_that_lets_one_direction_pass(server: list[subprocess.Popen[str]]) -> None:
    """Datagrams show the direction; a connection, which needs both, times out as it does behind a
    firewall, and is not refused."""
    hear = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
    ear.bind(("0.0.0.0", 5001))
    print("ready", flush=True)
    ear.settimeout(float(input()))
    try:
        print(ear.recv(99).decode())
    except TimeoutError:
        print("nothing")
"""
    say = "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'hi', (sys.argv[1], 5001))"

    def heard(start: LabHost, end: LabHost, within_s: float = 30.0) -> str:
        """What has come that long after it was sent."""
        hearer = python(end, hear)
        assert hearer.stdout is not None and hearer.stdout.readline() == "ready\n"
        assert python(start, say, end.name).communicate()[1] == ""
        return hearer.communicate(f"{within_s}\n")[0].strip()

    with Network({name: [LabNic(FAST)] for name in "abc"}) as network:
        a, b, c = network.hosts.values()
        assert heard(a, b) == heard(b, a) == "hi"
        a.drop_from(b)
        assert (heard(a, b), heard(b, a, 1.0), heard(c, a)) == ("hi", "nothing", "hi")
        serve(a, server)
        serve(b, server)
        assert "imeout" in str(send(a, "b", 10, 0.5)) and "imeout" in str(send(b, "a", 10, 0.5))
        assert send(c, "a", 10) == 10
        a.pass_from(b)
        assert send(a, "b", 10) == send(b, "a", 10) == 10


@needs_network
def test_an_mtu_that_the_path_does_not_carry(server: list[subprocess.Popen[str]]) -> None:
    """Small messages pass, and large ones vanish: the trap of a jumbo NIC on an ordinary switch."""
    with Network({name: [LabNic(FAST)] for name in "ab"}) as network:
        a, b = network.hosts.values()
        serve(b, server)
        for host in (a, b):
            host.nics[0].set_mtu(9000, carried=1500)
        assert send(a, "b", 1000) == 1000
        assert "imeout" in str(send(a, "b", 100_000, 1.0))
        for host in (a, b):
            host.nics[0].set_mtu(9000)
        assert send(a, "b", 100_000) == 100_000
        with pytest.raises(ConfigError, match="68 to 65535 bytes, not 10"):
            a.nics[0].set_mtu(10)


@needs_network
def test_a_host_knows_the_others_by_name_and_only_its_own_nics() -> None:
    resolve = "import socket, sys; print(*(socket.gethostbyname(name) for name in sys.argv[1:]))"
    here = Path("/etc/hosts").read_text(), os.uname().nodename
    hosts = {
        "a": [LabNic(FAST, "ib"), LabNic(FAST, "eth")],
        "b": [LabNic(FAST, "ib"), LabNic(FAST, "eth")],
        "c": [LabNic(FAST, "roce"), LabNic(FAST, "eth")],
    }
    with Network(hosts) as network:
        a, _, c = network.hosts.values()

        def resolved(host: LabHost, *names: str) -> list[str]:
            return python(host, resolve, *names).communicate()[0].split()

        # b is reached over `ib` from a and over `eth` from c
        assert resolved(a, "a", "b", "c", "b-eth1") == [
            "10.1.0.1",
            "10.1.0.2",
            "10.2.1.3",
            "10.2.1.2",
        ]
        assert resolved(c, "a", "b", "c", "localhost") == [
            "10.2.1.1",
            "10.2.1.2",
            "10.3.0.3",
            "127.0.0.1",
        ]
        sees = "import os; print(os.uname().nodename, *sorted(os.listdir('/sys/class/net')))"
        assert python(a, sees).communicate()[0].split() == ["a", "eth0", "eth1", "lo"]
        groups = "import os; print(os.path.ismount('/sys/fs/cgroup'))"
        assert python(a, groups).communicate()[0] == f"{os.path.ismount('/sys/fs/cgroup')}\n"
        waits = a.run(
            [sys.executable, "-c", f"input(); {resolve}", "c"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert resolved(a, "c") == ["10.2.1.3"]
        a.set_names({"c": "127.0.0.1"})
        assert resolved(a, "c", "b") == ["127.0.0.1", "10.1.0.2"]
        assert waits.communicate("\n")[0] == "127.0.0.1\n", "also for a process that was there"
        assert resolved(c, "a") == ["10.2.1.1"]
    assert here == (Path("/etc/hosts").read_text(), os.uname().nodename)
