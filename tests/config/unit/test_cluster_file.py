"""cluster.toml (config/cluster.py): units, assumed values, common networks, and errors in one
sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from roadtrain.config.cluster import Cluster, guesses, least_of, load_cluster, make_cluster
from roadtrain.errors import ConfigError


def host(name: str = "a", **more: Any) -> dict[str, Any]:
    return {"name": name, "memory": "64GB", **more}


def cluster_of(*hosts: dict[str, Any], **more: Any) -> Cluster:
    return make_cluster({"hosts": list(hosts), **more})


@pytest.mark.parametrize("name", ["workstation", "servers"])
def test_templates_are_read_and_written_back(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    (tmp_path / "cluster.toml").write_text(cluster.to_toml())
    assert load_cluster(tmp_path / "cluster.toml") == cluster


def test_omitted_values_are_assumed_and_reported() -> None:
    cluster = cluster_of(
        host(memory_rate="100GB/s", nics=[{"rate": "100Gbit/s"}]), measured=["hosts.a.memory_rate"]
    )
    assert cluster.assumed == ("hosts.a.updates", "hosts.a.sums", "hosts.a.nics.latency")
    assert (
        cluster.hosts[0].updates == pytest.approx(60e9)
        and cluster.hosts[0].nics[0].latency == 30e-6
    )
    assert tomllib.loads(cluster.to_toml())["measured"] == ["hosts.a.memory_rate"]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"hosts": []}, "at least 1 item"),
        ({"hosts": [host(nics=[{"rate": 100}])]}, "100 has no unit"),
        ({"hosts": [host(nics=[{"rate": "100Gbit"}])]}, "'100Gbit' is not a rate"),
        ({"hosts": [host(nics=[{"rate": "0Gbit/s"}])]}, "is not a rate"),
        (
            {
                "hosts": [host(nics=[{"rate": "1Gbit/s", "switch": "b"}])],
                "switches": [{"name": "c"}],
            },
            "leads to switch 'b', which is not defined; there are 1 switches (c)",
        ),
        (
            {"hosts": [host()], "links": [{"between": ["x", "y"], "rate": "1GB/s"}]},
            "switch 'x', which is not defined",
        ),
        ({"hosts": [host(), host()]}, "two entries of `hosts` are named 'a'"),
        ({"hosts": [host(memry="1GB")]}, "unknown key `hosts.0.memry`"),
        ({"hosts": [{"name": "a"}]}, "`hosts.0.memory` is missing"),
        ({"hosts": [host(count=0)]}, "greater than or equal to 1"),
        ({"hosts": [host(device="A100-40")]}, "no device is called 'A100-40'"),
        ({"hosts": [host(devices=8)]}, "has devices = 8, but no `device`"),
        (
            {"hosts": [host(nics=[{"rate": "100Gb/s"}])]},
            "'100Gb/s' is not a rate: b may be bits or bytes",
        ),
        (
            {"hosts": [host(nics=[{"rate": 0}])]},
            "`hosts.0.nics.0.rate`: Input should be greater than 0",
        ),
        ({"hosts": [host(memory=0)]}, "`hosts.0.memory`: Input should be greater than 0"),
        ({"hosts": [host(ssds=[{"read": 0, "write": "1GB/s"}])]}, "greater than 0"),
        ({"hosts": [host(device={"flops": 0, "memory": "1GB"})]}, "greater than 0"),
        (
            {"hosts": [host(idle_watts=100, peak_watts=50)]},
            "peak_watts = 50 is less than idle_watts = 100",
        ),
        (
            {"hosts": [host(ssds=[{"read": "1GB/s", "write": "1GB/s", "mixed": 3}])]},
            "less than or equal to 2",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_cluster(tree)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) <= 2


def test_hosts_use_the_fastest_network_they_share() -> None:
    """Yang et al. (Holmes), section 3.2, the general case."""
    cards = {
        kind: {"kind": kind, "rate": rate}
        for kind, rate in (
            ("infiniband", "200Gbit/s"),
            ("roce", "200Gbit/s"),
            ("ethernet", "25Gbit/s"),
        )
    }
    first = host("ib", nics=[cards["ethernet"], cards["infiniband"]])
    second = host("roce", nics=[cards["ethernet"], cards["roce"]])
    cluster = cluster_of(first, second)
    ib, roce = cluster.hosts
    assert (
        cluster.common([ib, ib])[0].kind == "infiniband"
        and cluster.common([roce, roce])[0].kind == "roce"
    )
    assert [nic.kind for nic in cluster.common([ib, roce])] == ["ethernet", "ethernet"]


def test_hosts_without_a_network_in_common() -> None:
    first, second = (
        host("one", nics=[{"kind": "roce", "rate": "1GB/s", "switch": "x"}]),
        host("two", nics=[{"kind": "roce", "rate": "1GB/s", "switch": "y"}]),
    )
    switches = [{"name": "x"}, {"name": "y"}]
    apart = cluster_of(first, second, switches=switches)
    with pytest.raises(ConfigError, match="hosts one, two have no network in common"):
        apart.common(apart.hosts)
    joined = cluster_of(
        first,
        second,
        switches=switches,
        links=[{"between": ["x", "y"], "rate": "100MB/s", "latency": "5ms"}],
    )
    assert joined.between(joined.common(joined.hosts)) == 100e6
    assert [(nic.total, nic.latency) for nic in joined.common(joined.hosts)] == [
        (100e6, 5e-3 + 5e-6)
    ] * 2
    assert joined.between(joined.common([joined.hosts[0]] * 2)) == float("inf")


def test_assumed_values_are_listed() -> None:
    device = {"flops": "100TFLOP/s", "memory": "80GB"}
    ssd = {"read": "7GB/s", "write": "5GB/s", "capacity": "1TB", "updates": "1GB/s"}
    cluster = cluster_of(
        host("a.b", devices=8, device=device, ssds=[ssd], nics=[{"rate": "1GB/s"}])
    )
    found = guesses(cluster)
    assert (
        set(found)
        == set(cluster.assumed)
        == {
            f"hosts.a.b.{name}"
            for name in (
                "memory_rate",
                "updates",
                "sums",
                "uplink",
                "device.copy",
                "device.memory_rate",
                "fabric",
                "nics.latency",
                "ssds.mixed",
                "ssds.depth",
                "ssds.internal",
            )
        }
    )
    assert found["hosts.a.b.memory_rate"] == (20e9, "20.00 GB/s") and found["hosts.a.b.fabric"] == (
        12e9,
        "12.00 GB/s",
    )
    assert (
        found["hosts.a.b.nics.latency"] == (30e-6, "30 us")
        and found["hosts.a.b.ssds.internal"][0] == 7e9
    )
    assert cluster.hosts[0].fabric == 12e9
    again = make_cluster(tomllib.loads(cluster.to_toml()))
    assert guesses(again) == found  # an assumed value still counts as assumed after it was written
    # keys of older files
    old = cluster.model_copy(update={"assumed": ("hosts.a.b.nics", "hosts.a.b.device")})
    assert set(guesses(old)) == {
        f"hosts.a.b.{name}" for name in ("nics.latency", "device.copy", "device.memory_rate")
    }


def test_a_device_without_a_count_is_one_device() -> None:
    table = {"flops": "100TFLOP/s", "memory": "80GB"}
    assert (
        cluster_of(host(device=table)).device_count
        == cluster_of(host(device="A100-80GB")).device_count
        == 1
    )
    assert cluster_of(host(device=table, devices=0)).device_count == 0


def test_small_rates_are_written_back() -> None:
    device = {"flops": "0.000001TFLOP/s", "memory": "1GB", "memory_rate": "0.5B/s", "copy": "1B/s"}
    cluster = cluster_of(
        host(
            memory_rate="0.25B/s",
            updates="1B/s",
            sums="1B/s",
            device=device,
            nics=[{"rate": "1.5B/s", "latency": "0.5ns"}],
        )
    )
    assert make_cluster(tomllib.loads(cluster.to_toml())) == cluster


def test_a_group_of_hosts_has_the_minimum_of_each_resource() -> None:
    def table(name: str, flops: int, rate: int, ssds: int, devices: int) -> dict[str, Any]:
        device = {
            "flops": f"{flops}TFLOP/s",
            "memory": f"{flops}GB",
            "memory_rate": f"{rate}GB/s",
            "copy": "9GB/s",
        }
        ssd = {"count": ssds, "read": "2GB/s", "write": f"{rate}GB/s", "capacity": "1TB"}
        return host(name, devices=devices, device=device, memory_rate=f"{rate}GB/s", ssds=[ssd])

    first, second = cluster_of(table("a", 100, 5, 1, 2), table("b", 50, 20, 4, 8)).hosts
    least = least_of([first, second])
    assert least.device is not None and (least.device.flops, least.device.memory_rate) == (
        50e12,
        5e9,
    )
    assert (least.memory_rate, least.devices, least.name) == (5e9, 8, "a and b")
    (ssd,) = least.ssds
    assert (ssd.count, ssd.read, ssd.write, ssd.capacity) == (1, 2e9, 5e9, 1e12)
    assert least_of([first, first]) is first
