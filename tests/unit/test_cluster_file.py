"""spec/cluster.py: cluster.toml, its units, what is assumed, which cards meet; bad input in one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from roadtrain.errors import ConfigError
from roadtrain.spec.cluster import Cluster, load_cluster, make_cluster


def host(name: str = "a", **more: Any) -> dict[str, Any]:
    return {"name": name, "memory": "64GB", **more}


def made(*hosts: dict[str, Any], **more: Any) -> Cluster:
    return make_cluster({"hosts": list(hosts), **more})


@pytest.mark.parametrize("name", ["workstation", "servers"])
def test_templates_are_read_and_written_back(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    (tmp_path / "cluster.toml").write_text(cluster.to_toml())
    assert load_cluster(tmp_path / "cluster.toml") == cluster


def test_what_is_left_out_is_assumed_and_said() -> None:
    cluster = made(host(memory_rate="100GB/s", nics=[{"rate": "100Gbit/s"}]), measured=["hosts.a.memory_rate"])
    assert cluster.assumed == ("hosts.a.updates", "hosts.a.sums", "hosts.a.nics")
    assert cluster.hosts[0].updates == pytest.approx(60e9) and cluster.hosts[0].nics[0].latency == 30e-6
    assert tomllib.loads(cluster.to_toml())["measured"] == ["hosts.a.memory_rate"]


@pytest.mark.parametrize(("tree", "said"), [
    ({"hosts": []}, "at least 1 item"),
    ({"hosts": [host(nics=[{"rate": 100}])]}, "100 has no unit"),
    ({"hosts": [host(nics=[{"rate": "100Gbit"}])]}, "'100Gbit' is not a rate"),
    ({"hosts": [host(nics=[{"rate": "0Gbit/s"}])]}, "is not a rate"),
    ({"hosts": [host(nics=[{"rate": "1Gbit/s", "switch": "b"}])], "switches": [{"name": "c"}]},
     "leads to a switch 'b' that is not there; there are 1 (c)"),
    ({"hosts": [host()], "links": [{"between": ["x", "y"], "rate": "1GB/s"}]}, "switch 'x' that is not there"),
    ({"hosts": [host(), host()]}, "two kinds of hosts are called 'a'"),
    ({"hosts": [host(memry="1GB")]}, "unknown key `hosts.0.memry`"),
    ({"hosts": [{"name": "a"}]}, "`hosts.0.memory` is missing"),
    ({"hosts": [host(count=0)]}, "greater than or equal to 1"),
    ({"hosts": [host(device="A100-40")]}, "no device is called 'A100-40'"),
    ({"hosts": [host(devices=8)]}, "has 8 devices but no `device`"),
    ({"hosts": [host(ssds=[{"read": "1GB/s", "write": "1GB/s", "mixed": 3}])]}, "less than or equal to 2"),
])
def test_bad_input_is_one_sentence(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_cluster(tree)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) <= 2


def test_hosts_meet_over_the_fastest_kind_they_all_have() -> None:
    """Yang et al. (Holmes), section 3.2, the general case."""
    cards = {kind: {"kind": kind, "rate": rate} for kind, rate in
             (("infiniband", "200Gbit/s"), ("roce", "200Gbit/s"), ("ethernet", "25Gbit/s"))}
    first = host("ib", nics=[cards["ethernet"], cards["infiniband"]])
    second = host("roce", nics=[cards["ethernet"], cards["roce"]])
    cluster = made(first, second)
    ib, roce = cluster.hosts
    assert cluster.common([ib, ib])[0].kind == "infiniband" and cluster.common([roce, roce])[0].kind == "roce"
    assert [nic.kind for nic in cluster.common([ib, roce])] == ["ethernet", "ethernet"]


def test_hosts_without_a_network_in_common() -> None:
    one, two = host("one", nics=[{"kind": "roce", "rate": "1GB/s", "switch": "x"}]), host(
        "two", nics=[{"kind": "roce", "rate": "1GB/s", "switch": "y"}])
    switches = [{"name": "x"}, {"name": "y"}]
    apart = made(one, two, switches=switches)
    with pytest.raises(ConfigError, match="hosts one, two have no network in common"):
        apart.common(apart.hosts)
    joined = made(one, two, switches=switches, links=[{"between": ["x", "y"], "rate": "100MB/s"}])
    assert joined.between(joined.common(joined.hosts)) == 100e6
    assert joined.between(joined.common([joined.hosts[0]] * 2)) == float("inf")
