"""`roadtrain probe`: it writes a cluster.toml of this machine that `plan` accepts, and names the
quantities that it cannot measure."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
import torch

from roadtrain import cli
from roadtrain.config.cluster import load_cluster, make_cluster
from roadtrain.errors import AuthError, ConfigError, LostError, PeerError, WireError
from roadtrain.planner import probe, probe_links
from roadtrain.planner.probe import copies, fabric, products, with_others
from roadtrain.planner.probe_links import (
    BACK,
    DESCRIBE,
    MEASURE,
    PING,
    ProbeReport,
    ask,
    listening,
    matrix,
    measure,
    reach,
)
from roadtrain.transport.address import write_token
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import GIB, MIB

pytestmark = pytest.mark.alone


def test_probe_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cluster.toml"
    assert cli.main(["probe", "--dirs", str(tmp_path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert torch.get_num_threads() == 1  # as conftest.py set it: losses of other tests depend on it
    cluster = load_cluster(out)
    (host,) = cluster.hosts
    assert (
        host.memory_rate > 1e8
        and host.updates > 1e8
        and host.sums > 1e8
        and host.device is not None
    )
    assert host.ssds[0].directories == (str(tmp_path),)
    assert host.device.flops > 1e8 and host.ssds[0].read > 1e6 and 1 <= host.ssds[0].mixed <= 2
    assert f"hosts.{host.name}.memory_rate" in tomllib.loads(out.read_text())["measured"]
    if not torch.accelerator.is_available():
        assert (
            "not measured: accelerators" in printed
            and "# not measured: accelerators" in out.read_text()
        )
    words = ["--model", "GPT-2", "--seq-len", "128", "--out", str(tmp_path / "plan.toml")]
    assert cli.main(["plan", str(out), *words]) == 0


def test_products_of_each_size() -> None:
    rates = products(torch.device("cpu"), torch.float32, (64, 128))
    assert list(rates) == [64, 128] and min(rates.values()) > 0


def test_copies_wait_until_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of the device return at once and take 20 ms: the rates are those of 20 ms, and of
    the slower direction."""
    cpu, settled = torch.device("cpu"), list[tuple[torch.device, ...]]()
    to, inside = copies(cpu, MIB)
    assert to > 0 and inside > 0

    def settle(*devices: torch.device) -> None:
        settled.append(devices)
        time.sleep(0.02)

    monkeypatch.setattr(probe, "_settle", settle)
    to, inside = copies(cpu, MIB)
    assert (
        0.6 * MIB / 0.02 < to <= MIB / 0.02
        and 1.9 * to < inside + 0.4 * to
        and set(settled) == {(cpu, cpu)}
    )
    settled.clear()
    assert 0.6 * MIB / 0.02 < fabric([cpu] * 4, MIB) <= MIB / 0.02
    assert len(settled) == 3 * 6  # a copy to each other device: a warm-up and REPEATS


def test_the_slowest_of_the_devices_sets_the_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(probe, "_copy", lambda source, target: next(rates))
    assert fabric([torch.device("cpu")] * 4, 8) == 1.0


def test_two_devices_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a host with accelerators, with invented measurements."""
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_accelerator": lambda: torch.device("cuda"),
        "get_memory_info": lambda device: (70 * GIB, 80 * GIB),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.accelerator, name, fake)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["A", "B"].__getitem__)
    calls = list[tuple[object, ...]]()
    for name, answer in (
        ("copies", (25e9, 2e12)),
        ("fabric", 2e11),
        ("products", {1024: 1e14, 8192: 6e14}),
        ("processors", {"memory_rate": 1e11, "updates": 1e11, "sums": 1e11}),
    ):
        monkeypatch.setattr(
            probe, name, lambda *words, answer=answer: calls.append(words) or answer
        )
    report = probe.describe([], 2)
    (host,) = make_cluster(report.tree).hosts
    assert host.devices == 2 and host.fabric == 2e11 and host.device is not None
    assert (host.device.kind, host.device.flops, host.device.copy_rate) == ("A", 6e14, 25e9)
    assert (host.device.memory_rate, host.device.memory) == (2e12, 80 * GIB)
    assert f"hosts.{host.name}.fabric" in report.tree["measured"]
    assert "device 1, a B: assumed to be like device 0, a A" in report.missing
    gpus = [torch.device("cuda", number) for number in range(2)]
    assert (gpus[0],) in calls and (gpus[0], torch.bfloat16) in calls and (gpus,) in calls


def reporter(name: str) -> Callable[[], ProbeReport]:
    def describe() -> ProbeReport:
        host = {"name": name, "memory": "1GB", "memory_rate": "5GB/s"}
        tree = {"name": name, "hosts": [host], "measured": [f"hosts.{name}.memory_rate"]}
        return ProbeReport(tree, ["its devices"], ["NUMA node 0"])

    return describe


@pytest.fixture
def two() -> Iterator[list[str]]:
    """The addresses of two listening hosts on this machine."""
    listeners = [listening("127.0.0.1:0", TcpOptions(), reporter("other")) for _ in range(2)]
    yield ["{}:{}".format(*listener.address) for listener in listeners]
    for listener in listeners:
        listener.close()


@pytest.mark.exhaustive  # test_probe_links.py measures every pair
def test_every_pair_is_measured(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    links, missing = matrix(two, TcpOptions())
    assert set(links) == {*permutations(["here", *two], 2)} and not missing
    assert all(rate > 1e7 and 0 < latency < 0.1 for rate, latency in links.values())
    own = reporter("this")()
    assert with_others(own, two, TcpOptions())
    cluster = make_cluster(own.tree)
    assert [host.name for host in cluster.hosts] == ["this", "other", "other+"]
    assert all(host.nics[0].rate > 1e7 and host.nics[0].latency > 0 for host in cluster.hosts)
    assert all(host.addresses == ("127.0.0.1",) for host in cluster.hosts)
    assert {"hosts.other.memory_rate", "hosts.other+.memory_rate", "hosts.other+.nics"} <= set(
        cluster.measured
    )
    assert own.missing == ["its devices", "other: its devices", "other+: its devices"]
    assert own.topology == ["this: NUMA node 0", "other: NUMA node 0", "other+: NUMA node 0"]
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["here", *two] and len(out.splitlines()) == 4


def test_a_reverse_flood_ends_by_itself(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after a number of bytes on a fast link, and after a time on a slow link."""
    sizes = list[int]()
    room = probe_links.LinkEnd.room
    monkeypatch.setattr(
        probe_links.LinkEnd, "room", lambda *words: sizes.append(words[-1]) or room(*words)
    )
    monkeypatch.setattr(probe_links, "FRAMES", 3)
    ask(two[0], BACK, "", TcpOptions())
    assert sizes == [MIB] * 3
    sizes.clear()
    monkeypatch.setattr(probe_links, "FRAMES", 1 << 40)
    monkeypatch.setattr(probe_links, "FLOOD_S", 0.05)
    begin = time.monotonic()
    ask(two[0], BACK, "", TcpOptions())
    assert sizes and time.monotonic() - begin < 30


def test_a_host_that_fails_is_named_and_the_rest_is_kept(two: list[str]) -> None:
    own, reports = (
        reporter("this")(),
        [
            ProbeReport(error="FullError: no space"),
            ProbeReport({"hosts": [{"memory": "1GB"}]}),
            reporter("x")(),
        ],
    )
    listeners = [
        listening("127.0.0.1:0", TcpOptions(), partial(ProbeReport.__copy__, report))
        for report in reports
    ]
    full, odd, lost = ("{}:{}".format(*listener.address) for listener in listeners)
    listeners[2].close()
    try:
        assert not with_others(own, [*two, full, odd], TcpOptions())
        alone = reporter("this")()
        assert (
            not with_others(alone, [full], TcpOptions())
            and make_cluster(alone.tree).hosts[0].name == "this"
        )
    finally:
        listeners[0].close()
        listeners[1].close()
    assert [host["name"] for host in own.tree["hosts"]] == ["this", "other", "other+"]
    assert own.missing[-2:] == [
        f"host {full}: {full}: FullError: no space",
        f"host {odd}: its report: `hosts.0.name` is missing",
    ]
    links, missing = matrix([two[0], lost], TcpOptions())
    assert set(links) == {("here", two[0]), (two[0], "here")}
    assert [what.partition(": ")[0] for what in missing] == [
        f"the link from here to {lost}",
        f"other links of host {lost}, which was lost",
    ]


def test_strangers_and_absent_hosts_are_errors(two: list[str]) -> None:  # Rule 8
    with pytest.raises(ConfigError, match="needs a token"):
        listening("0.0.0.0:0", TcpOptions(), reporter("x"))
    guarded = listening("127.0.0.1:0", TcpOptions(token=b"a secret of the job"), reporter("x"))
    try:
        for call in (measure, reach, lambda *words: ask(words[0], BACK, "", words[1])):
            with pytest.raises(AuthError):
                call("{}:{}".format(*guarded.address), TcpOptions(token=b"another secret of a job"))
    finally:
        guarded.close()
    with pytest.raises(PeerError):
        measure("127.0.0.1:1", TcpOptions())
    with pytest.raises(LostError, match="LostError"):  # the remote failure is raised here
        ask(two[0], MEASURE, "127.0.0.1:1", TcpOptions())
    assert ask(two[0], DESCRIBE, "", TcpOptions()).missing == ["its devices"]
    with pytest.raises(WireError, match="sent an invalid report"):
        ask(two[0], PING, "not a word of a probe", TcpOptions())


def test_wrong_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command prints a sentence and exits with code 2, or 3 for the fault of another host,
    before any measurement."""

    def measures(threads: int) -> dict[str, float]:
        raise AssertionError("this host is measured")

    monkeypatch.setattr(probe, "processors", measures)

    def error_of(*words: str, code: int = 2) -> str:
        begin = time.monotonic()
        assert cli.main(["probe", "--out", str(tmp_path / "out.toml"), *words]) == code
        assert time.monotonic() - begin < 30 and not (tmp_path / "out.toml").exists()
        captured = capsys.readouterr()
        assert not captured.out
        return captured.err

    assert f"{tmp_path}/none is not a directory" in error_of("--dirs", f"{tmp_path}/none")
    assert f"{tmp_path}/none is not a directory" in error_of(
        "--out", f"{tmp_path}/none/cluster.toml"
    )
    assert "/sys: probing: " in error_of("--dirs", "/sys")  # no file can be created there
    assert "127.0.0.1:1" in error_of("--hosts", "127.0.0.1:1", code=3)
    assert "'nowhere' is not an address" in error_of("--hosts", "nowhere")
    assert "give only one of them" in error_of("--hosts", "127.0.0.1:1", "--listen", "127.0.0.1:0")
    assert "needs a token" in error_of("--listen", "0.0.0.0:0")
    assert "cannot read the token" in error_of(
        "--listen", "127.0.0.1:0", "--token-file", f"{tmp_path}/none"
    )
    guarded = listening("127.0.0.1:0", TcpOptions(token=b"a secret of the job"), reporter("x"))
    write_token(tmp_path / "token")
    try:
        where = "{}:{}".format(*guarded.address)
        assert "this side has no token, but the peer has one" in error_of("--hosts", where)
        assert "token" in error_of("--hosts", where, "--token-file", str(tmp_path / "token"))
    finally:
        guarded.close()


def test_a_comment_stays_a_comment() -> None:
    """The report of another host cannot become keys of the file."""
    assert probe.comment("gone:\nhint: x\x00y\r[hosts]") == "gone: hint: x y [hosts]"
