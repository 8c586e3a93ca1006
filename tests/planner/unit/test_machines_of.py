"""The machines that run each part of a plan, and the job keys needed to train on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.job import make_job
from roadtrain.config.machines import Machines, PlanHost, ServerPlace
from roadtrain.config.plan_file import PLACEMENTS, Plan, PlanFile, placement
from roadtrain.errors import ConfigError
from roadtrain.planner.job_keys import job_keys
from roadtrain.planner.machines_of import machines_of, predicted_of, why_not_run
from roadtrain.simulator.run import simulate
from roadtrain.stages.parallelism import Parallelism
from tests.support.plans import WHOLE, lump, racks

MODEL = {"config": {"model_type": "llama"}}
SSDS = {"count": 2, "read": "1GB/s", "write": "1GB/s", "capacity": "1TB"}


ANY = make_job({"model": MODEL})


def cluster(
    gpus: dict[str, Any] | None = None, spare: dict[str, Any] | None = None, more: Any = ()
) -> Cluster:
    """A cluster of two hosts that compute and one that does not."""
    nic = {"rate": "1GB/s", "relay": True}
    host = {"memory": "64GB", "nics": [nic]}
    gpu = {"name": "gpu", "count": 2, "device": "A100-80GB", "addresses": ["a0", "a1"], **host}
    own = {"name": "spare", "addresses": ["b"], **host}
    return make_cluster({"hosts": [gpu | (gpus or {}), own | (spare or {}), *more]})


def plan(name: str, dp: int = 2, **changes: Any) -> Plan:
    return Plan(placement(name), Parallelism(dp=dp), num_microbatches=3).changed(**changes)


def keys(made: Plan, where: Cluster, **addresses: str) -> dict[str, Any]:
    """Keys of a job that runs the plan."""
    found = job_keys(PlanFile(made, machines_of(made, where), None, where), ANY, addresses)
    make_job({"model": MODEL, **found})
    return found


def hosts(machines: Machines) -> dict[str, PlanHost]:
    return {host.name: host for host in machines.hosts}


def test_stores_of_two_runs_are_two_directories() -> None:  # Rule 3
    where = cluster(spare={"ssds": [{**SSDS, "directories": ["/a", "/b"]}]})
    [server, _] = hosts(machines_of(plan("server"), where, "first run"))["spare"].servers
    assert server.store == "/a/roadtrain-first-run-spare"
    copied = cluster({"ssds": [{**SSDS, "directories": ["/a", "/b"]}]})
    [server] = hosts(machines_of(plan("smartnic"), copied, "x"))["gpu0"].servers
    assert (server.store, server.snapshot) == (
        "/dev/shm/roadtrain-x-gpu0",
        "/a/roadtrain-x-gpu0.snapshot",
    )


def test_workers_stand_in_the_order_of_ranks() -> None:
    where = cluster({"devices": 4})
    found = machines_of(plan("zero1", 6), where)
    assert found.worker_hosts == (
        PlanHost("gpu0", "gpu", "a0", workers=4),
        PlanHost("gpu1", "gpu", "a1", workers=2),
    )
    some = machines_of(plan("zero1", 4), where)
    assert some.hosts == (found.hosts[0],)
    assert some.spares == (PlanHost("gpu1", "gpu", "a1", workers=4),)
    assert keys(plan("zero1", 4), where) == {
        "data": {"batch_size": 1},
        "parallelism": {"auto": False, "dp": 4, "num_microbatches": 12},
    }


def test_a_server_for_each_directory_of_the_hosts_that_serve() -> None:
    ssds = {**SSDS, "directories": ["/mnt/{host}/0", "/mnt/1/"]}
    where = cluster(spare={"count": 2, "addresses": ["b0", "b1"], "ssds": [ssds]})
    found = hosts(machines_of(plan("server"), where))
    assert [*found] == ["gpu0", "gpu1", "spare0", "spare1"]
    assert found["spare1"].servers == (
        ServerPlace("/mnt/spare1/0/roadtrain-spare1", 7000),
        ServerPlace("/mnt/1/roadtrain-spare1", 7001),
    )
    found_keys = keys(plan("server", slots=1000, staleness=1, keep=0.1), where, spare0="fe80::1")
    assert found_keys["servers"] == {
        "addresses": ["[fe80::1]:7000", "[fe80::1]:7001", "b1:7000", "b1:7001"],
        "buffering": "all",
        "token_file": "/launch/token",
    }
    assert found_keys["optimizer"] == {"accumulate": 3, "delay": 1} and found_keys["compress"] == {
        "keep": 0.1
    }


def test_without_ssds_a_store_is_in_memory() -> None:
    found = hosts(machines_of(plan("server"), cluster()))["spare"]
    assert found.servers == (ServerPlace("/dev/shm/roadtrain-spare", 7000),)
    with pytest.raises(ConfigError, match=r"2 SSD\(s\) of host 'spare' have no directory"):
        machines_of(plan("server"), cluster(spare={"ssds": [SSDS]}))


def test_servers_at_the_same_address_get_successive_ports() -> None:
    ssds = {**SSDS, "directories": ["/a/{host}", "/b/{host}"]}
    where = cluster(spare={"count": 2, "addresses": ["b", "b"], "ssds": [ssds]})
    found = machines_of(plan("server"), where).hosts
    assert [server.port for host in found for server in host.servers] == [7000, 7001, 7002, 7003]


def test_smartnics_are_served_from_the_memory_of_their_hosts() -> None:
    where = cluster({"ssds": [{**SSDS, "directories": ["/a", "/b"]}]})
    found = hosts(machines_of(plan("smartnic"), where))
    assert [*found] == ["gpu0", "gpu1"]
    place = ServerPlace("/dev/shm/roadtrain-gpu1", 7000, "/a/roadtrain-gpu1.snapshot")
    assert found["gpu1"].servers == (place,)
    servers = keys(plan("smartnic", kept=1), where)["servers"]
    assert servers["addresses"] == ["a0:7000", "a1:7000"]
    assert (servers["buffering"], servers["relay"]) == ("all", "4GiB")


@pytest.mark.parametrize("name", ["server", "smartnic", "files"])
def test_runs_with_different_names_share_no_store(name: str) -> None:
    ssds = [{**SSDS, "directories": ["/a/{host}", "/b"]}]
    where = cluster({"count": 1, "addresses": ["a0"], "ssds": ssds}, {"ssds": ssds})

    def stores(run: str) -> set[str]:
        found = machines_of(plan(name, 1), where, run)
        named = job_keys(PlanFile(plan(name, 1), found, None, where), ANY, {}).get("store", {})
        places = {path for host in found.hosts for path in host.directories}
        return places | set(named.get("files", ()))

    plain, again = stores(""), stores("again")
    assert plain and len(plain) == len(again) and not plain & again
    assert all("roadtrain-again-" in path for path in again)


@pytest.mark.parametrize("name", ["summation", "parameter-server"])
def test_reducers_are_on_all_hosts_that_do_not_compute(name: str) -> None:
    other = {"name": "other", "memory": "1GB", "nics": [{"rate": "1GB/s"}]}
    where = cluster(more=(other, {"name": "mute", "memory": "1GB"}))
    found = hosts(machines_of(plan(name), where))
    assert {n: host.reducer for n, host in found.items()} == {
        "gpu0": 0,
        "gpu1": 0,
        "spare": 7000,
        "other": 7000,
    }
    parallelism = keys(plan(name), where)["parallelism"]
    assert parallelism["reducers"] == "{run}/launch/reducers.txt" and parallelism["dp"] == 2
    assert parallelism.get("reducers_alone", False) == (name == "parameter-server")


def test_switches_are_machines_whose_addresses_a_job_lists() -> None:
    where = racks(1, 2, address="s")
    spare = where.spares[0].model_copy(update={"addresses": ("n",)})
    where = where.model_copy(update={"hosts": (*where.workers, spare)})
    made = plan("optimizer-node", 3)
    found = hosts(machines_of(made, where))
    assert [*found] == ["workers 0", "workers 10", "workers 11", "node", "root", "rack0", "rack1"]
    at = {name: host.switch.port for name, host in found.items() if host.switch is not None}
    assert at == {"root": 7000, "rack0": 7001, "rack1": 7002}
    servers = keys(made, where, root="r")["servers"]
    assert servers["addresses"] == ["n:7000"]
    assert servers["switches"] == [
        {"address": "r:7000", "workers": []},
        {"address": "s:7001", "parent": "r:7000", "workers": [0]},
        {"address": "s:7002", "parent": "r:7000", "workers": [1, 2]},
    ]


def test_a_single_host_keeps_its_state() -> None:
    ssds = [{**SSDS, "directories": ["/a", "/b"]}]
    where = cluster({"count": 1, "addresses": ["a"], "ssds": ssds})
    assert machines_of(plan("files", 1), where).hosts == (PlanHost("gpu", "gpu", "a", workers=1),)
    made = plan("files", 1)
    named = job_keys(
        PlanFile(made, machines_of(made, where), None, where),
        make_job({"model": MODEL, "run": {"dir": "runs/x"}}),
        {},
    )
    assert named["store"]["files"] == ["/a/roadtrain-x-gpu", "/b/roadtrain-x-gpu"]
    stores = ["/a/roadtrain-gpu", "/b/roadtrain-gpu"]
    assert keys(plan("files", 1), where)["store"] == {"files": stores}
    # in memory, where a restarted worker finds it
    assert keys(plan("zero-offload", 1), where)["store"] == {"files": ["/dev/shm/roadtrain-gpu"]}
    bare = cluster({"count": 1, "addresses": ["a"], "ssds": [SSDS]})
    assert "store" not in keys(plan("files", 1), bare)  # the job's own store is used


def test_plans_that_cannot_run_are_refused_with_the_reason() -> None:
    where = cluster()
    refused = {name for name in PLACEMENTS if why_not_run(plan(name), where)}
    assert refused == {
        "ddp",
        "zero3",
        "zero-infinity",
        "raid0",
        "near-storage",
        "switch-sum",
        "files",
        "zero-offload",
    }
    for made, words in (
        (plan("files"), "is on 2 hosts"),
        (plan("summation", 1), "the plan has 1"),
        (plan("server", 1, parallelism=Parallelism(pp=2)), "only runs data-parallel workers"),
        (plan("zero1", activation_checkpointing=True), "does not support activation checkpointing"),
        (plan("zero1", staleness=1), "staleness or compressed"),
        (plan("zero1", 1, parallelism=Parallelism(cp=2)), "context"),
        (plan("server", stage_placements=("server",)), "only be simulated"),
    ):
        with pytest.raises(ConfigError, match=words):
            machines_of(made, where)


def test_a_plan_that_can_only_be_simulated_has_no_job() -> None:
    lacking = PlanFile(plan("optimizer-node"), machines_of(plan("zero1"), cluster()))
    with pytest.raises(ConfigError, match="can only be simulated"):
        job_keys(lacking, ANY, {})


def test_predictions_are_made_for_each_stage() -> None:
    """Rule 7: time without computing counts as waiting, as in `calibrate`."""
    made = Plan(placement("zero1"), Parallelism(pp=2), num_microbatches=4)
    result = simulate(made, cluster(), lump(1e7, 1e9), WHOLE, checked=False)
    promised = predicted_of(result)
    assert promised.seconds == result.seconds and [*promised.stages] == ["stage 0", "stage 1"]
    for own in promised.stages.values():
        assert own["Wait"] == pytest.approx(result.seconds - own["Forward"] - own["Backward"])


@pytest.mark.parametrize("name", ["server", "summation"])
def test_two_machines_with_the_same_name_are_refused(name: str) -> None:
    where = cluster(spare={"name": "gpu0"})
    with pytest.raises(ConfigError, match="2 machines of the cluster are called 'gpu0'"):
        machines_of(plan(name), where)


def test_the_switches_of_a_plan_must_be_summing_switches_of_its_cluster() -> None:
    where = racks(1, 2, address="s")
    made = plan("optimizer-node", 3)
    whole = machines_of(made, where)
    typo = [
        replace(host, switch=replace(host.switch, switch="torr"))
        if host.switch is not None and host.name == "root"
        else replace(host, address="a")
        for host in whole.hosts
    ]
    found = PlanFile(made, Machines(tuple(typo)), None, where)
    with pytest.raises(ConfigError, match="run the switches rack0, rack1, torr, but"):
        job_keys(found, ANY, {})


def test_files_on_a_host_of_an_unknown_kind_are_refused() -> None:
    where = cluster({"count": 1, "addresses": ["a"]})
    machines = Machines((PlanHost("gpu", "gpuu", "a", workers=1),))
    with pytest.raises(ConfigError, match="host gpu has kind 'gpuu'"):
        job_keys(PlanFile(plan("files", 1), machines, None, where), ANY, {})


def test_a_relay_gets_the_memory_the_job_states_or_its_model_needs() -> None:
    where = cluster({"devices": 8})
    made = plan("server", 16)
    found = PlanFile(made, machines_of(made, where), None, where)

    def relay(**tables: Any) -> str:
        job = make_job({"data": {"seq_len": 64}, **tables})
        return str(job_keys(found, job, {})["servers"]["relay"])

    small = {"config": {**MODEL["config"], "hidden_size": 64, "num_hidden_layers": 2}}
    assert relay(model=small) == "4GiB"
    assert relay(model=small, servers={"relay": "1GiB"}) == "1GiB"
    large = {"config": {**MODEL["config"], "hidden_size": 4096, "num_hidden_layers": 32}}
    large["config"] |= {"intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
    # it holds all gradients of 8 workers: 6.7e9 parameters of 4 bytes
    clipped = relay(model=large, optimizer={"clip_norm": 1.0})
    assert 8 * 6.7e9 * 4 < float(clipped.removesuffix("GiB")) * 2**30 < 1.4 * 8 * 6.7e9 * 4


def test_reducers_need_a_host() -> None:
    where = cluster(spare={"nics": []})
    with pytest.raises(ConfigError, match="summation needs a host without devices and with"):
        machines_of(plan("summation"), where)
