"""A cluster with the rates that a run's hosts showed, and the orders of hosts that are tried."""

from __future__ import annotations

import socket
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
import tomli_w

from roadtrain.config.cluster import Cluster, Host, make_cluster
from roadtrain.config.machines import Machines, PlanHost, ServerPlace
from roadtrain.config.models import from_config
from roadtrain.config.parallelism import Parallelism
from roadtrain.config.plan import Plan, placement
from roadtrain.config.plan_file import PlanFile, load_plan_file
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.home import RunHome
from roadtrain.launch.measured_cluster import LinkSeen, RunSeen, measured_cluster
from roadtrain.launch.measured_host import MODULE, HostAnswer, Told, seconds_of
from roadtrain.launch.measured_run import FILE, MeasuredRun
from roadtrain.launch.replan import ReplanOptions, kept, replan
from roadtrain.planner.arrangements import MOST, arrangements, best_arrangement
from roadtrain.planner.machines_of import machines_of, predicted_of
from roadtrain.planner.search import SearchResult, search
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.run import simulate
from roadtrain.transport.address import write_token

MBIT = 1e6 / 8
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
DEVICE = {
    "kind": "cpu",
    "flops": "40GFLOP/s",
    "memory": "4GB",
    "memory_rate": "10GB/s",
    "copy": "10GB/s",
}


def cluster_of(rates: list[float], count: int = 1, **more: object) -> Cluster:
    """A kind of `count` hosts for each rate (Mbit/s)."""
    hosts = [
        {
            "name": f"g{number}",
            "count": count,
            "devices": 1,
            "device": DEVICE,
            "memory": "6GB",
            "memory_rate": "10GB/s",
            "updates": "2GB/s",
            "sums": "2GB/s",
            "nics": [{"kind": "ethernet", "rate": f"{rate}Mbit/s", "latency": "50us", **more}],
        }
        for number, rate in enumerate(rates)
    ]
    return make_cluster({"hosts": hosts})


def planned_on(names: list[str], kind: str) -> Machines:
    return Machines(
        tuple(
            PlanHost(name=name, kind=kind, address=f"10.0.0.{number}", workers=1)
            for number, name in enumerate(names)
        )
    )


def seen(rates: dict[str, float], share: float) -> tuple[LinkSeen, ...]:
    """Each pair as fast as the slower card of both."""
    return tuple(
        LinkSeen(a, b, min(rates[a], rates[b]) * MBIT * share, 1e-4)
        for a in rates
        for b in rates
        if a != b
    )


def test_one_slow_host_becomes_a_kind_of_its_own_and_its_peers_stay_as_they_are() -> None:
    cluster = cluster_of([100], count=4)
    machines = planned_on(["a", "b", "c", "d"], "g0")
    rates = {"a": 100.0, "b": 25.0, "c": 104.0, "d": 97.0}
    found, changes = measured_cluster(cluster, machines, RunSeen(seen(rates, 0.9)), 0.9)
    assert [host.name for host in found.hosts] == ["a", "b", "c", "d"]
    got = [round(host.nics[0].total / MBIT) for host in found.hosts]
    assert got == [100, 25, 100, 100]  # what is within 15 % of the file's stays the file's
    assert [host.addresses for host in found.hosts] == [(f"10.0.0.{i}",) for i in range(4)]
    assert [change.what for change in changes] == ["hosts.b.nics"]
    assert "hosts.b.nics" in found.measured


def test_what_is_as_the_plan_says_leaves_the_cluster_as_it_was() -> None:
    cluster = cluster_of([100], count=3)
    machines = planned_on(["a", "b", "c"], "g0")
    rates = dict.fromkeys("abc", 90.0)
    found, changes = measured_cluster(cluster, machines, RunSeen(seen(rates, 0.9)), 0.9)
    assert found is cluster and not changes


def test_of_a_card_the_worse_direction_counts() -> None:
    cluster = cluster_of([100], count=3)
    machines = planned_on(["a", "b", "c"], "g0")
    links = [
        LinkSeen(one.sender, one.receiver, one.rate / (4 if one.receiver == "b" else 1), 0.0)
        for one in seen(dict.fromkeys("abc", 100.0), 0.9)
    ]
    found, _ = measured_cluster(cluster, machines, RunSeen(tuple(links)), 0.9)
    assert [round(host.nics[0].total / MBIT) for host in found.hosts] == [100, 25, 100]


def test_all_hosts_of_a_kind_slower_alike_stay_a_kind() -> None:
    cluster = cluster_of([100], count=3)
    machines = planned_on(["a", "b", "c"], "g0")
    slower = dict.fromkeys("abc", 2.0)
    found, changes = measured_cluster(cluster, machines, RunSeen(slower=slower), 0.9)
    (kind,) = found.hosts
    assert kind.count == 3 and kind.device is not None and kind.device.flops == 20e9
    assert len(changes) == 3


def test_servers_that_serve_alike_shares_are_as_fast_as_the_slowest() -> None:
    """A kind whose hosts serve is not split: a plan has servers on one kind."""
    cluster = make_cluster(
        {
            "hosts": [
                {"name": "spare", "count": 2, "memory": "6GB", "nics": [{"rate": "100Mbit/s"}]},
                {"name": "gpu", "device": DEVICE, "memory": "6GB", "nics": [{"rate": "1Gbit/s"}]},
            ]
        }
    )
    served = (ServerPlace("/dev/shm/store", 7000),)
    hosts = (
        PlanHost(name="gpu", kind="gpu", address="c", workers=1),
        PlanHost(name="spare0", kind="spare", address="a", servers=served),
        PlanHost(name="spare1", kind="spare", address="b", servers=served),
    )
    links = seen({"gpu": 1000.0, "spare0": 100.0, "spare1": 25.0}, 0.9)
    found, changes = measured_cluster(cluster, Machines(hosts), RunSeen(links), 0.9)
    assert [change.what for change in changes] == ["hosts.spare1.nics"]  # no peer is as fast as gpu
    assert [(host.name, host.count) for host in found.hosts] == [("spare", 2), ("gpu", 1)]
    assert round(found.hosts[0].nics[0].rate / MBIT) == 25


def test_a_slow_link_between_switches_is_the_links_and_no_cards() -> None:
    cluster = make_cluster(
        {
            "hosts": [
                {
                    "name": name,
                    "count": 2,
                    "device": DEVICE,
                    "memory": "6GB",
                    "nics": [{"rate": "400Mbit/s", "switch": name}],
                }
                for name in ("left", "right")
            ],
            "switches": [{"name": "left"}, {"name": "right"}],
            "links": [{"between": ["left", "right"], "rate": "200Mbit/s"}],
        }
    )
    kinds = {"a": "left", "b": "left", "c": "right", "d": "right"}
    hosts = tuple(PlanHost(name=n, kind=k, address=n, workers=1) for n, k in kinds.items())
    links = tuple(
        LinkSeen(one, other, (400 if kinds[one] == kinds[other] else 50) * MBIT, 1e-4)
        for one in kinds
        for other in kinds
        if one != other
    )
    found, changes = measured_cluster(cluster, Machines(hosts), RunSeen(links), 1.0)
    assert found.hosts == cluster.hosts
    assert found.links[0].rate == pytest.approx(50 * MBIT)
    assert [change.what for change in changes] == ["links.left-right"]


def names(hosts: tuple[Host, ...]) -> tuple[str, ...]:
    return tuple(host.name for host in hosts)


def test_hosts_that_are_alike_have_one_order() -> None:
    assert [one.said for one in arrangements(cluster_of([100, 100, 100]))] == [
        "hosts in the order g0, g1, g2"
    ]


def test_a_slow_host_is_tried_at_each_place_and_left_out() -> None:
    cluster = cluster_of([100, 25, 100])
    found = list(arrangements(cluster))
    rates = {
        tuple(round(h.nics[0].total / MBIT) for h in one.cluster.workers): names(one.left_out)
        for one in found
    }
    assert rates == {
        (100, 25, 100): (),
        (100, 100): ("g1",),
        (100, 100, 25): (),
        (25, 100, 100): (),
    }
    assert found[0].cluster.hosts == cluster.hosts
    assert all(len(one.whole.workers) == 3 for one in found)


def test_arrangements_of_many_hosts_are_bounded_and_move_the_slow_ones_to_an_end() -> None:
    rates = [100.0] * 30
    rates[7], rates[19] = 25.0, 50.0
    found = list(arrangements(cluster_of(rates)))
    assert len(found) <= MOST
    assert any(names(one.left_out) == ("g7",) for one in found)
    assert any(one.cluster.workers[-1].name == "g7" for one in found)


def searched(cluster: Cluster) -> SearchResult:
    model = from_config(LLAMA, seq_len=128)
    return search(cluster, model, Constants(), batch=16, placements=["zero1"], explain=False)


def test_a_slowed_card_in_the_middle_of_a_pipeline_is_planned_away() -> None:
    found = best_arrangement(cluster_of([100, 25, 100, 100]), searched)
    assert found.as_given is not None and found.as_given.pick is not None
    assert found.answer.pick is not None
    assert found.answer.pick.score < 0.9 * found.as_given.pick.score
    assert found.arrangement.cluster.workers[1].name != "g1"


def test_where_no_arrangement_takes_a_plan_the_first_reason_is_told() -> None:
    def refused(cluster: Cluster) -> SearchResult:
        raise ConfigError(f"no plan for {cluster.workers[0].name}")

    with pytest.raises(ConfigError, match="no plan for g0"):
        best_arrangement(cluster_of([100, 25]), refused)


def test_medians_of_a_workers_last_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": n, "seconds": n / 10, "stages": {"Forward": {"seconds": 0.5, "bytes": 0}}}
        for n in range(1, 41)
    ]
    path.write_text("".join(msgspec.json.encode(line).decode() + "\n" for line in lines))
    found = seconds_of(path)
    assert found is not None
    assert (found.step, found.steps) == (40, 20)
    assert found.seconds == pytest.approx(3.05)
    assert found.stages == {"Forward": 0.5}
    assert seconds_of(tmp_path / "none.jsonl") is None


def test_steps_of_the_plan_before_do_not_count_with_those_of_the_last_one(tmp_path: Path) -> None:
    """Nor those at full width with those of fewer hosts, of which nothing is predicted."""
    path = tmp_path / "metrics.jsonl"

    def written(*predicted: float) -> None:
        lines = [
            {
                "step": n,
                "seconds": seconds or 9.0,
                "stages": {"Forward": {"seconds": seconds or 9.0, "bytes": 0}},
                **({"predicted": {"stages": {"Forward": seconds}}} if seconds else {}),
            }
            for n, seconds in enumerate(predicted, 1)
        ]
        path.write_text("".join(msgspec.json.encode(line).decode() + "\n" for line in lines))

    written(*[4.0] * 15, *[1.0] * 3)
    found = seconds_of(path)
    assert found is not None
    assert (found.step, found.steps, found.seconds) == (18, 3, 1.0)
    assert (found.stages, found.predicted) == ({"Forward": 1.0}, {"Forward": 1.0})
    written(*[4.0] * 15, *[0.0] * 2)
    found = seconds_of(path)
    assert found is not None
    assert (found.steps, found.seconds, found.predicted) == (2, 9.0, {})


def test_hosts_measure_their_links_with_the_token_told_on_standard_input(tmp_path: Path) -> None:
    """Rule 8: no token in words. Two listening hosts and the one that asks, as an engine runs
    them; those that listen end by themselves."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, other)]
    others = [f"127.0.0.1:{port}" for port in ports]
    words = [sys.executable, "-m", MODULE]
    write_token(tmp_path / "token", b"t" * 32)
    listening = [
        subprocess.Popen([*words, "--listen", one, "--token-file", str(tmp_path / "token")])
        for one in others
    ]
    try:
        told = msgspec.json.encode(Told("t" * 32, others))
        done = subprocess.run(words, input=told, capture_output=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr.decode()
        found = msgspec.json.decode(done.stdout, type=HostAnswer)
        assert [process.wait(timeout=30) for process in listening] == [0, 0]
    finally:
        for process in listening:
            process.kill()
            process.wait()
    assert not found.missing
    places = ("here", *others)
    assert {(a, b) for a, b, _, _ in found.links} == {(a, b) for a, b in permutations(places, 2)}
    assert all(rate > 0 for _, _, rate, _ in found.links)


JOB = {
    "run": {"dir": "runs/again", "steps": 20},
    "model": {"config": LLAMA},
    "data": {"seq_len": 128, "batch_size": 1},
    "optimizer": {"accumulate": 4},
}


def launched(home: RunHome, cluster: Cluster, plan: Plan) -> PlanFile:
    """What a launch of the plan leaves in its home, and what its supervisor measured: the card of
    gpu1 has a quarter of its rate."""
    result = simulate(plan, cluster, from_config(LLAMA, seq_len=128), Constants(), checked=False)
    file = PlanFile(plan, machines_of(plan, cluster), predicted_of(result), cluster)
    home.path.mkdir(parents=True)
    home.plan_path.write_text(file.to_toml())
    home.job_path.write_text(tomli_w.dumps(JOB))
    rates = {f"gpu{number}": 25.0 if number == 1 else 100.0 for number in range(4)}
    links = tuple((one.sender, one.receiver, one.rate, 1e-4) for one in seen(rates, 0.9))
    (home.path / FILE).write_bytes(msgspec.json.encode(MeasuredRun(links, shared=True)))
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunHome:
    monkeypatch.setenv("HOME", str(tmp_path))
    return RunHome.of("again")


def gpus() -> Cluster:
    (kind,) = cluster_of([100], count=4).hosts
    addresses = tuple(f"10.0.0.{number}" for number in range(4))
    kind = kind.model_copy(update={"name": "gpu", "addresses": addresses})
    return make_cluster({"hosts": [kind.model_dump(by_alias=True, exclude_defaults=True)]})


def test_a_slowed_link_gives_another_plan_of_the_same_hosts_and_the_old_one_is_kept(
    home: RunHome,
) -> None:
    old = launched(home, gpus(), Plan(placement("zero1"), Parallelism(dp=4), num_microbatches=4))
    lines: list[str] = []
    assert replan(home, ReplanOptions(), pytest.fail, lines.append) == 0
    new = load_plan_file(home.plan_path)
    assert new.machines is not None and old.machines is not None and new.predicted is not None
    assert new.plan.parallelism.pp > 1
    assert new.plan.samples == old.plan.samples and new.plan.micro_batch == old.plan.micro_batch
    ours = {host.name: host.address for host in (*new.machines.hosts, *new.machines.spares)}
    assert ours == {host.name: host.address for host in old.machines.hosts}
    assert load_plan_file(home.path / "plan.before-1.toml") == old
    assert lines[0] == "hosts.gpu1.nics: 3 MB/s measured, the plan has 12 MB/s"


def test_a_dry_run_leaves_the_plan_and_writes_the_new_one_where_it_is_asked_to(
    home: RunHome, tmp_path: Path
) -> None:
    old = launched(home, gpus(), Plan(placement("zero1"), Parallelism(dp=4), num_microbatches=4))
    options = ReplanOptions(dry_run=True, write_plan=str(tmp_path / "new.toml"))
    replan(home, options, pytest.fail, lambda _: None)
    assert load_plan_file(home.plan_path) == old
    assert load_plan_file(tmp_path / "new.toml").plan != old.plan


def test_a_plan_that_is_hardly_better_is_not_taken(home: RunHome) -> None:
    launched(home, gpus(), Plan(placement("zero1"), Parallelism(dp=4), num_microbatches=4))
    replan(home, ReplanOptions(), pytest.fail, lambda _: None)
    after = home.plan_path.read_text()
    lines: list[str] = []
    replan(home, ReplanOptions(), pytest.fail, lines.append)
    assert home.plan_path.read_text() == after
    assert "less than 3%: the plan stays" in lines[-2]


def test_a_run_of_which_nothing_was_measured_is_refused_with_what_to_do(home: RunHome) -> None:
    launched(home, gpus(), Plan(placement("zero1"), Parallelism(dp=4), num_microbatches=4))
    (home.path / FILE).unlink()
    with pytest.raises(LaunchError, match=r"does not run.*\n.*--resume again, then --replan"):
        replan(home, ReplanOptions(), pytest.fail, lambda _: None)


def test_placements_are_of_a_new_run(home: RunHome) -> None:
    with pytest.raises(ConfigError, match="--new-run NAME"):
        replan(home, ReplanOptions(placements=("server",)), pytest.fail)


def test_servers_keep_their_stores_order_and_ports_whatever_the_workers_do() -> None:
    served = (ServerPlace("/mnt/a/mine", 7100),)
    old = Machines(
        (
            PlanHost("g0", "gpu", "10.0.0.1", 1),
            PlanHost("g1", "gpu", "10.0.0.2", 1),
            PlanHost("s1", "spare", "10.0.0.4", servers=served),
            PlanHost("s0", "spare", "10.0.0.3", servers=served),
        ),
        rendezvous_port=31000,
    )
    new = Machines(
        (
            PlanHost("g1", "g1", "10.0.0.2", 1),
            PlanHost("s0", "spare", "10.0.0.3", servers=(ServerPlace("/dev/shm/x", 7000),)),
            PlanHost("s1", "spare", "10.0.0.4", servers=(ServerPlace("/dev/shm/y", 7000),)),
        ),
        (PlanHost("g0", "g0", "10.0.0.1", 1),),
    )
    found = kept(old, new)
    assert [(host.name, host.kind) for host in found.hosts] == [
        ("g1", "g1"),
        ("s1", "spare"),
        ("s0", "spare"),
    ]
    assert [host.servers for host in found.hosts] == [(), served, served]
    assert [host.name for host in found.spares] == ["g0"]
    assert found.rendezvous_port == 31000
