"""A plan.toml with machines, predictions and cluster: reading, writing and refused files."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from roadtrain.config.cluster import load_cluster, make_cluster
from roadtrain.config.machines import (
    Machines,
    PlanHost,
    PlannedModel,
    Predicted,
    ServerPlace,
    SwitchPlace,
)
from roadtrain.config.plan_file import (
    Plan,
    PlanFile,
    load_plan,
    load_plan_file,
    make_plan_file,
    placement,
)
from roadtrain.errors import ConfigError

GPU = PlanHost("gpu0", "gpu", "10.0.0.2", workers=1)
SPARE = PlanHost(
    "spare0",
    "spare",
    "10.0.0.9",
    servers=(ServerPlace("/dev/shm/run", 7000, "/mnt/run"), ServerPlace("/mnt/ssd0/run", 7001)),
    reducer=7002,
    switch=SwitchPlace(7003, "tor"),
)
MACHINES = Machines((GPU, SPARE), (replace(GPU, name="gpu1"),), 29501)
PREDICTED = Predicted(seconds=1.25, stages={"stage 0": {"Forward": 0.5, "Wait": 0.75}})


@pytest.mark.parametrize("name", ["servers", "workstation"])
def test_a_plan_file_is_read_as_it_was_written(name, tmp_path):
    cluster = load_cluster(name)
    plan = Plan(placement("server"), networks={"dp": "ethernet"}, headroom=0.1)
    whole = PlanFile(plan, MACHINES, PREDICTED, cluster, PlannedModel(1000, 64, 2))
    file = tmp_path / "plan.toml"
    file.write_text(whole.to_toml())
    read = load_plan_file(file)
    assert read == whole and read.cluster.assumed == cluster.assumed
    assert read.to_toml() == whole.to_toml()
    assert load_plan(file) == plan  # simulate reads only the plan
    file.write_text(PlanFile(plan).to_toml())
    assert load_plan_file(file) == PlanFile(plan)


def refusal_of(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan_file(tree, where="plan.toml")
    return str(caught.value)


def test_mistakes_name_the_table_and_the_key():
    host = {"name": "a", "kind": "a", "workers": 1}
    message = refusal_of({"placement": "server", "machines": {"hosts": [{**host, "wrokers": 1}]}})
    assert "plan.toml, [machines]" in message and "workers" in message
    message = refusal_of({"placement": "server", "cluster": {"hosts": [{"name": "a"}]}})
    assert "plan.toml, [cluster]" in message and "memory" in message
    assert "seconds" in refusal_of({"placement": "server", "predicted": {}})
    assert "parameters" in refusal_of({"placement": "server", "model": {"seq_len": 64}})


@pytest.mark.parametrize(
    ("hosts", "spares", "words"),
    [
        ((GPU, GPU), (), "2 hosts are called 'gpu0'"),
        ((GPU,), (GPU,), "2 hosts are called 'gpu0'"),
        ((SPARE,), (), "none of 1 hosts has workers"),
        ((GPU,), (SPARE,), "spare host 'spare0' listens at 4 ports"),
        ((GPU, SPARE, replace(SPARE, name="b")), (), "2 processes at 10.0.0.9 listen at port 7000"),
        ((GPU, replace(SPARE, address="10.0.0.2", reducer=29500)), (), "at port 29500"),
        ((replace(GPU, servers=(ServerPlace("/a", 1, "/a"),)),), (), "2 stores at 10.0.0.2"),
    ],
)
def test_names_ports_and_directories_must_be_unique(hosts, spares, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        Machines(hosts, spares)


def test_hosts_at_other_addresses_may_have_the_same_ports():
    other = replace(SPARE, name="spare1", address="10.0.0.10")
    assert Machines((GPU, SPARE, other)).worker_hosts == (GPU,)
    # the rendezvous port is on the host of the workers
    assert Machines((GPU, replace(SPARE, reducer=29500)))


def cluster(**host: Any) -> dict[str, Any]:
    return {"hosts": [{"name": "a", "memory": "1GB", **host}]}


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"count": 2, "addresses": ["10.0.0.1"]}, "count = 2 and 1 addresses"),
        ({"addresses": ["10.0.0.1:7000"]}, "has a port"),
        ({"ssds": [{"count": 2, "directories": ["/a"]}]}, "2 SSDs have 1 directories"),
        ({"ssds": [{"directories": ["a"]}]}, "is not absolute"),
    ],
)
def test_each_machine_has_an_address_and_each_ssd_a_directory(host, words):
    host = {**host}
    if "ssds" in host:
        host["ssds"] = [{"read": "1GB/s", "write": "1GB/s", **ssd} for ssd in host["ssds"]]
    with pytest.raises(ConfigError, match=words):
        make_cluster(cluster(**host))


def test_addresses_and_directories_are_written_back():
    ssds = [{"read": "1GB/s", "write": "1GB/s", "directories": ["/mnt/{host}"]}]
    made = make_cluster(cluster(count=2, addresses=["10.0.0.1", "fe80::1"], ssds=ssds))
    again = make_cluster(tomllib.loads(made.to_toml()))
    assert again.hosts == made.hosts and made.hosts[0].addresses[1] == "fe80::1"


@pytest.mark.parametrize("store", ["store", "~/store", ""])
def test_stores_must_be_absolute_paths(store: str) -> None:
    with pytest.raises(ConfigError, match="is not an absolute path"):
        ServerPlace(store, 7000)


def test_ports_of_a_host_must_differ_under_all_its_names() -> None:
    first, second = (ServerPlace(path, 7000) for path in ("/a", "/b"))
    hosts = (
        PlanHost("gpu", "gpu", "10.0.0.2", 1),
        PlanHost("s0", "spare", "127.0.0.1", servers=(first,)),
        PlanHost("s1", "spare", "localhost", servers=(second,)),
    )
    with pytest.raises(ConfigError, match="listen at port 7000"):
        Machines(hosts)


def test_the_address_of_a_switch_has_no_port() -> None:
    tree = {**cluster(), "switches": [{"name": "tor", "address": "10.0.2.1:7000"}]}
    with pytest.raises(ConfigError, match=r"the address '10.0.2.1:7000' has a port"):
        make_cluster(tree)
