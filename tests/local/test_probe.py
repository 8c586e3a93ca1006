"""`roadtrain probe`: a cluster.toml of this machine that `plan` takes; what it cannot measure is named."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from roadtrain import cli
from roadtrain.errors import AuthError, ConfigError, LostError, PeerError
from roadtrain.probing import products, with_others
from roadtrain.probing_links import DESCRIBE, MEASURE, ask, listening, matrix, measure
from roadtrain.spec.cluster import load_cluster, make_cluster
from roadtrain.wire.tcp import Options


def test_probe_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cluster.toml"
    assert cli.main(["probe", "--dirs", str(tmp_path), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert torch.get_num_threads() == 1  # as conftest.py set it: others' losses depend on it
    cluster = load_cluster(out)
    (host,) = cluster.hosts
    assert host.memory_rate > 1e8 and host.updates > 1e8 and host.sums > 1e8 and host.device is not None
    assert host.device.flops > 1e8 and host.ssds[0].read > 1e6 and 1 <= host.ssds[0].mixed <= 2
    assert f"hosts.{host.name}.memory_rate" in tomllib.loads(out.read_text())["measured"]
    if not torch.cuda.is_available():
        assert "not measured: accelerators" in told and "# not measured: accelerators" in out.read_text()
    words = ["--model", "GPT-2", "--seq-len", "128", "--out", str(tmp_path / "plan.toml")]
    assert cli.main(["plan", str(out), *words]) == 0


def test_products_of_each_size() -> None:
    found = products(torch.device("cpu"), torch.float32, (64, 128))
    assert list(found) == [64, 128] and min(found.values()) > 0


def one(name):
    def describe():
        host = {"name": name, "memory": "1GB", "memory_rate": "5GB/s"}
        return {"name": name, "hosts": [host], "measured": [f"hosts.{name}.memory_rate"]}, ["its devices"]

    return describe


@pytest.fixture
def two():
    """Two hosts that listen, on this machine."""
    made = [listening("127.0.0.1:0", Options(), one("other")) for _ in range(2)]
    yield ["{}:{}".format(*listener.address) for listener in made]
    for listener in made:
        listener.close()


def test_every_pair_is_measured(two, capsys):
    found = matrix(two, Options())
    assert set(found) == {("here", two[0]), ("here", two[1]), (two[0], two[1]), (two[1], two[0])}
    assert all(rate > 1e7 and 0 < latency < 0.1 for rate, latency in found.values())
    tree, _ = one("this")()
    missing = with_others(tree, two, Options())
    cluster = make_cluster(tree)
    assert [host.name for host in cluster.hosts] == ["this", "other", "other+"]
    assert all(host.nics[0].rate > 1e7 and host.nics[0].latency > 0 for host in cluster.hosts)
    assert {"hosts.other.memory_rate", "hosts.other+.memory_rate", "hosts.other+.nics"} <= set(cluster.measured)
    assert missing == ["other: its devices", "other+: its devices"]
    told = capsys.readouterr().out
    assert "here" in told and two[1] in told


def test_strangers_and_the_absent(two):  # Rule 8
    with pytest.raises(ConfigError, match="without a token"):
        listening("0.0.0.0:0", Options(), one("x"))
    guarded = listening("127.0.0.1:0", Options(token=b"a secret of the job"), one("x"))
    try:
        with pytest.raises(AuthError):
            measure("{}:{}".format(*guarded.address), Options(token=b"another"))
    finally:
        guarded.close()
    with pytest.raises(PeerError):
        measure("127.0.0.1:1", Options())
    with pytest.raises(LostError, match="LostError"):  # what failed there is said here
        ask(two[0], MEASURE, "127.0.0.1:1", Options())
    assert ask(two[0], DESCRIBE, "", Options())[1] == ["its devices"]
