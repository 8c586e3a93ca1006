"""Replanning a run: a cluster with measured rates, and the orders of hosts that the search
tries."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import tomli_w

from roadtrain.config.cluster import Cluster, Host, make_cluster
from roadtrain.config.job import make_job
from roadtrain.config.machines import Machines, PlanHost, ServerPlace
from roadtrain.config.models import ModelShape, from_config
from roadtrain.config.plan_file import Plan, PlanFile, load_plan_file, placement
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch import paused_run, run_verbs, supervisor_process
from roadtrain.launch import replan as replan_module
from roadtrain.launch.control_socket import ControlSocket
from roadtrain.launch.engines import ENGINES, EngineKind
from roadtrain.launch.home import PLANNED_ANEW, LaunchRecord, RunHome, RunState, StartPhase
from roadtrain.launch.measured_cluster import MeasuredLink, measured_cluster
from roadtrain.launch.measured_host import (
    MODULE,
    HostAnswer,
    MeasureRequest,
    WorkerSeconds,
    seconds_of,
)
from roadtrain.launch.measured_run import MeasuredRun, MeasuredWorker, with_names
from roadtrain.launch.paused_run import ReplanOptions
from roadtrain.launch.replan import kept, planned_run, replan, search_again
from roadtrain.planner.arrangements import MOST, arrangements, best_arrangement
from roadtrain.planner.job_plans import shape_of_job
from roadtrain.planner.machines_of import machines_of, predicted_of
from roadtrain.planner.search import SearchResult, search
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.run import simulate
from roadtrain.stages.parallelism import Parallelism
from roadtrain.transport.address import write_token
from tests.support.ports import free_port

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
    """A cluster with one kind of `count` hosts for each rate (Mbit/s)."""
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


def measured_links(rates: dict[str, float], share: float) -> tuple[MeasuredLink, ...]:
    """Links between all pairs of hosts, each as fast as the slower of both cards."""
    return tuple(
        MeasuredLink(a, b, min(rates[a], rates[b]) * MBIT * share, 1e-4)
        for a in rates
        for b in rates
        if a != b
    )


def test_a_slow_host_becomes_a_separate_kind_and_its_peers_keep_theirs() -> None:
    cluster = cluster_of([100], count=4)
    machines = planned_on(["a", "b", "c", "d"], "g0")
    rates = {"a": 100.0, "b": 25.0, "c": 104.0, "d": 97.0}
    found, changes = measured_cluster(cluster, machines, measured_links(rates, 0.9), {}, 0.9)
    assert [host.name for host in found.hosts] == ["a", "b", "c", "d"]
    got = [round(host.nics[0].total / MBIT) for host in found.hosts]
    assert got == [100, 25, 100, 100]  # rates within 15 % of the file's are kept
    assert [host.addresses for host in found.hosts] == [(f"10.0.0.{i}",) for i in range(4)]
    assert list(changes) == ["hosts.b.nics"]
    assert "hosts.b.nics" in found.measured


def test_rates_near_the_planned_ones_leave_the_cluster_unchanged() -> None:
    cluster = cluster_of([100], count=3)
    machines = planned_on(["a", "b", "c"], "g0")
    rates = dict.fromkeys("abc", 90.0)
    found, changes = measured_cluster(cluster, machines, measured_links(rates, 0.9), {}, 0.9)
    assert found is cluster and not changes


def test_the_slower_direction_of_a_card_counts() -> None:
    cluster = cluster_of([100], count=3)
    machines = planned_on(["a", "b", "c"], "g0")
    links = [
        MeasuredLink(
            link.sender, link.receiver, link.rate / (4 if link.receiver == "b" else 1), 0.0
        )
        for link in measured_links(dict.fromkeys("abc", 100.0), 0.9)
    ]
    found, _ = measured_cluster(cluster, machines, tuple(links), {}, 0.9)
    assert [round(host.nics[0].total / MBIT) for host in found.hosts] == [100, 25, 100]


def test_equally_slowed_hosts_stay_one_kind() -> None:
    cluster = cluster_of([100], count=3)
    machines = planned_on(["a", "b", "c"], "g0")
    slower = dict.fromkeys("abc", 2.0)
    found, changes = measured_cluster(cluster, machines, (), slower, 0.9)
    (kind,) = found.hosts
    assert kind.count == 3 and kind.device is not None and kind.device.flops == 20e9
    assert len(changes) == 3


def test_servers_with_equal_shares_get_the_rate_of_the_slowest() -> None:
    """The kind of the servers is not split, since a plan places servers on a single kind."""
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
    links = measured_links({"gpu": 1000.0, "spare0": 100.0, "spare1": 25.0}, 0.9)
    found, changes = measured_cluster(cluster, Machines(hosts), links, {}, 0.9)
    assert list(changes) == ["hosts.spare1.nics"]  # no peer is as fast as gpu
    assert [(host.name, host.count) for host in found.hosts] == [("spare", 2), ("gpu", 1)]
    assert round(found.hosts[0].nics[0].rate / MBIT) == 25


def test_a_slow_link_between_switches_lowers_the_links_rate_and_no_cards() -> None:
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
        MeasuredLink(sender, other, (400 if kinds[sender] == kinds[other] else 50) * MBIT, 1e-4)
        for sender in kinds
        for other in kinds
        if sender != other
    )
    found, changes = measured_cluster(cluster, Machines(hosts), links, {}, 1.0)
    assert found.hosts == cluster.hosts
    assert found.links[0].rate == pytest.approx(50 * MBIT)
    assert list(changes) == ["links.left-right"]


def names(hosts: tuple[Host, ...]) -> tuple[str, ...]:
    return tuple(host.name for host in hosts)


def test_identical_hosts_have_a_single_order() -> None:
    assert [arrangement.text for arrangement in arrangements(cluster_of([100, 100, 100]))] == [
        "hosts in the order g0, g1, g2"
    ]


def test_a_slow_host_is_tried_at_each_position_and_left_out() -> None:
    cluster = cluster_of([100, 25, 100])
    found = list(arrangements(cluster))
    rates = {
        tuple(round(h.nics[0].total / MBIT) for h in arrangement.cluster.workers): names(
            arrangement.left_out
        )
        for arrangement in found
    }
    assert rates == {
        (100, 25, 100): (),
        (100, 100): ("g1",),
        (100, 100, 25): (),
        (25, 100, 100): (),
    }
    assert found[0].cluster.hosts == cluster.hosts
    assert all(len(arrangement.whole.workers) == 3 for arrangement in found)


def test_arrangements_of_many_hosts_are_bounded_and_move_the_slow_ones_to_an_end() -> None:
    rates = [100.0] * 30
    rates[7], rates[19] = 25.0, 50.0
    found = list(arrangements(cluster_of(rates)))
    assert len(found) <= MOST
    assert any(names(arrangement.left_out) == ("g7",) for arrangement in found)
    assert any(arrangement.cluster.workers[-1].name == "g7" for arrangement in found)


def search_all(cluster: Cluster) -> SearchResult:
    model = from_config(LLAMA, seq_len=128)
    return search(cluster, model, Constants(), batch=16, placements=["zero1"], explain=False)


@pytest.mark.slow
def test_a_slowed_card_in_the_middle_of_a_pipeline_is_planned_away() -> None:
    cluster = cluster_of([100, 25, 100, 100])
    found, as_given = best_arrangement(cluster, search_all), search_all(cluster).pick
    assert as_given is not None and found.answer.pick is not None
    assert found.answer.pick.score < 0.9 * as_given.score
    assert found.arrangement.cluster.workers[1].name != "g1"


def test_if_no_arrangement_takes_a_plan_the_first_reason_is_reported() -> None:
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
    assert found.seconds == pytest.approx(3.05)
    assert found.stages == {"Forward": 0.5}
    assert seconds_of(tmp_path / "none.jsonl") is None


def test_steps_of_an_earlier_plan_are_not_counted(tmp_path: Path) -> None:
    """Steps on fewer hosts, which have no prediction, are not mixed with those at full width."""
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
    assert found.seconds == 1.0
    assert (found.stages, found.predicted) == ({"Forward": 1.0}, {"Forward": 1.0})
    written(*[4.0] * 15, *[0.0] * 2)
    found = seconds_of(path)
    assert found is not None
    assert (found.seconds, found.predicted) == (9.0, {})


@pytest.mark.slow
def test_hosts_that_measure_links_read_the_token_from_standard_input(tmp_path: Path) -> None:
    """Rule 8: no token on a command line. Two hosts listen and one measures, as an engine starts
    them."""
    others = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    words = [sys.executable, "-m", MODULE]
    write_token(tmp_path / "token", b"t" * 32)
    listening = [
        subprocess.Popen([*words, listener, str(tmp_path / "token")], stdout=subprocess.DEVNULL)
        for listener in others
    ]
    try:
        request = msgspec.json.encode(MeasureRequest("t" * 32, others))
        done = subprocess.run(words, input=request, capture_output=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr.decode()
        found = msgspec.json.decode(done.stdout, type=HostAnswer)
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


def with_a_spare(cluster: Cluster) -> Cluster:
    """Add a host like the others but without devices."""
    update = {"name": "spare", "count": 1, "addresses": ("10.0.0.9",), "devices": 0, "device": None}
    spare = cluster.hosts[0].model_copy(update=update)
    return cluster.model_copy(update={"hosts": (*cluster.hosts, spare)})


DP4 = Plan(placement("zero1"), Parallelism(dp=4), num_microbatches=4)


def write_launch(home: RunHome, cluster: Cluster, plan: Plan) -> PlanFile:
    """Write what a launch of the plan leaves in its home, with measurements: the card of gpu1 runs
    at a quarter of its rate."""
    result = simulate(plan, cluster, from_config(LLAMA, seq_len=128), Constants(), checked=False)
    file = PlanFile(plan, machines_of(plan, cluster), predicted_of(result), cluster)
    record = LaunchRecord(name=home.name, engine="here", launched=time.time(), directory="/")
    home.write(record, file.to_toml(), tomli_w.dumps(JOB))
    write_measurements(home)
    return file


def write_measurements(home: RunHome) -> None:
    rates = {f"gpu{number}": 25.0 if number == 1 else 100.0 for number in range(4)}
    links = tuple(
        (link.sender, link.receiver, link.rate, 1e-4) for link in measured_links(rates, 0.9)
    )
    home.measured_path.write_bytes(msgspec.json.encode(MeasuredRun(links, shared=True)))


@pytest.fixture(scope="module")
def shape_of_the_job() -> ModelShape:
    return shape_of_job(make_job(JOB))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape_of_the_job: ModelShape) -> RunHome:
    monkeypatch.setenv("HOME", str(tmp_path))
    # each test plans the same job again
    monkeypatch.setattr(replan_module, "shape_of_job", lambda job: shape_of_the_job)
    return RunHome.of("again")


def gpus() -> Cluster:
    (kind,) = cluster_of([100], count=4).hosts
    addresses = tuple(f"10.0.0.{number}" for number in range(4))
    kind = kind.model_copy(update={"name": "gpu", "addresses": addresses})
    return make_cluster({"hosts": [kind.model_dump(by_alias=True, exclude_defaults=True)]})


@pytest.mark.slow
def test_a_slowed_link_gives_a_new_plan_of_the_same_hosts_and_keeps_the_old_file(
    home: RunHome,
) -> None:
    old = write_launch(home, gpus(), DP4)
    lines: list[str] = []
    assert replan(home, ReplanOptions(), pytest.fail, lines.append) == 0
    new = load_plan_file(home.plan_path)
    assert new.machines is not None and old.machines is not None and new.predicted is not None
    assert new.plan.parallelism.pp > 1
    assert new.plan.samples == old.plan.samples and new.plan.micro_batch == old.plan.micro_batch
    ours = {host.name: host.address for host in (*new.machines.hosts, *new.machines.spares)}
    assert ours == {host.name: host.address for host in old.machines.hosts}
    assert load_plan_file(home.path / "plan.before-1.toml") == old
    assert lines[0] == "hosts.gpu1.nics: measured 3.1 MB/s, the plan has 12 MB/s"


@pytest.mark.slow
def test_a_dry_run_keeps_the_plan_and_writes_the_new_one_to_the_given_file(
    home: RunHome, tmp_path: Path
) -> None:
    old = write_launch(home, gpus(), DP4)
    options = ReplanOptions(dry_run=True, write_plan=str(tmp_path / "new.toml"))
    replan(home, options, pytest.fail, lambda _: None)
    assert load_plan_file(home.plan_path) == old
    assert load_plan_file(tmp_path / "new.toml").plan != old.plan


@pytest.mark.slow
def test_a_slightly_better_plan_is_not_adopted(home: RunHome) -> None:
    write_launch(home, gpus(), DP4)
    replan(home, ReplanOptions(), pytest.fail, lambda _: None)
    after = home.plan_path.read_text()
    write_measurements(home)
    lines: list[str] = []
    replan(home, ReplanOptions(), pytest.fail, lines.append)
    assert home.plan_path.read_text() == after
    assert "less than 3%: the old plan stays" in lines[-2]


def test_a_run_without_measurements_is_refused_with_a_hint(home: RunHome) -> None:
    write_launch(home, gpus(), DP4)
    home.measured_path.unlink()
    with pytest.raises(LaunchError, match=r"is not running.*\n.*--resume again, then --replan"):
        replan(home, ReplanOptions(), pytest.fail, lambda _: None)


def test_another_placement_needs_a_new_run(home: RunHome) -> None:
    write_launch(home, gpus(), DP4)
    with pytest.raises(ConfigError, match="--new-run NAME"):
        replan(home, ReplanOptions(placements=("server",)), pytest.fail)


def test_measurements_belong_to_the_plan_they_were_made_under(home: RunHome) -> None:
    """Otherwise a host at half its planned speed would be planned at a quarter next time."""
    write_launch(home, gpus(), DP4)
    replan(home, ReplanOptions(), pytest.fail, lambda _: None)
    assert not home.measured_path.exists()
    after = home.plan_path.read_text()
    with pytest.raises(LaunchError, match=r"run 'again' .* has no measurements"):
        replan(home, ReplanOptions(), pytest.fail, lambda _: None)
    assert home.plan_path.read_text() == after


def test_without_link_measurements_the_plan_stays_and_the_gap_is_reported(home: RunHome) -> None:
    old = write_launch(home, gpus(), DP4)
    slower = [
        MeasuredWorker(
            f"gpu{rank}",
            WorkerSeconds(9.0, {"Forward": 9.0 if rank == 1 else 1.0}, {"Forward": 1.0}),
        )
        for rank in range(4)
    ]
    missing = ("host gpu2, which does not answer", "steps of gpu3: it has gone")
    for workers in ([], slower):  # these measurements favor another plan
        found = MeasuredRun((), tuple(workers), missing, shared=True)
        home.measured_path.write_bytes(msgspec.json.encode(found))
        lines: list[str] = []
        replan(home, ReplanOptions(), pytest.fail, lines.append)
        assert lines[:2] == [f"not measured: {why}" for why in missing]
        assert "no link between hosts was measured" in lines
        assert not any("within 15" in line for line in lines)
        assert load_plan_file(home.plan_path) == old
    assert lines[-2] == "no link was measured: the old plan stays"


def test_a_run_continues_on_the_hosts_that_hold_its_state(home: RunHome) -> None:
    """Other hosts in the same number are refused."""
    file = write_launch(home, gpus(), DP4)
    run = planned_run(home)
    two = tuple(host for host in run.machines.hosts if host.name in ("gpu0", "gpu1"))
    old = file.plan.changed(parallelism=Parallelism(dp=2), num_microbatches=8)
    computed = replace(run, plan_file=PlanFile(old), machines=replace(run.machines, hosts=two))
    again = partial(search_again, computed, Constants(), ReplanOptions(), False)
    slower = {"gpu0": 2.0, "gpu1": 2.0}
    found, _ = measured_cluster(run.cluster, run.machines, (), slower, 0.9)
    assert again(found).pick is not None
    without = [host for host in found.hosts if host.name != "gpu1"]
    with pytest.raises(ConfigError, match="must use gpu1: part"):
        again(found.model_copy(update={"hosts": tuple(without)}))


def test_a_run_keeps_its_delay_and_compression(home: RunHome) -> None:  # Rule 2
    write_launch(home, gpus(), DP4)
    run = planned_run(home)
    cluster = with_a_spare(run.cluster)

    def again(old: Plan, **words: Any) -> SearchResult:
        own = replace(run, plan_file=PlanFile(old), job=run.job.changed(words))
        return search_again(own, Constants(), ReplanOptions(), True, cluster)

    for delay in (0, 1):
        old = Plan(placement("server"), Parallelism(dp=4), num_microbatches=4, staleness=delay)
        pick = again(old).pick
        assert pick is not None and pick.plan.staleness == delay
    found = again(old.changed(staleness=0), **{"optimizer.delay": 1})
    assert found.pick is None
    assert "losses would differ: updates 1 steps late" in str(found.families["server"].refused)
    old = old.changed(staleness=0, keep=0.1)
    found = again(old)
    assert found.pick is None
    assert "another share of the gradients sent" in str(found.families["server"].refused)
    pick = again(old, **{"compress.keep": 0.1}).pick
    assert pick is not None and pick.plan.keep == 0.1


def test_a_new_run_shares_no_store_with_the_old_one(home: RunHome, tmp_path: Path) -> None:
    served = Plan(placement("server"), Parallelism(dp=4), num_microbatches=4)
    old = write_launch(home, with_a_spare(gpus()), served)
    path = tmp_path / "new.toml"
    options = ReplanOptions(new_run="other", placements=("server",), write_plan=str(path))
    replan(home, options, pytest.fail, lambda _: None)
    new = load_plan_file(path)
    assert old.machines is not None and new.machines is not None
    ours, theirs = (
        {directory for host in machines.hosts for directory in host.directories}
        for machines in (old.machines, new.machines)
    )
    assert theirs == {"/dev/shm/roadtrain-other-spare"} and not ours & theirs
    home.plan_path.write_text(path.read_text())  # as if launched under another name
    with pytest.raises(
        ConfigError, match="would use stores of the existing run: /dev/shm/roadtrain-ot"
    ):
        replan(home, options, pytest.fail, lambda _: None)
    with pytest.raises(ConfigError, match="names the existing run"):
        replan(home, ReplanOptions(new_run="again"), pytest.fail, lambda _: None)


class Paused:
    """A run in a thread that lives until it gets a request, then measures and ends for `why`.
    Records the requests and how the run is continued."""

    def __init__(self, home: RunHome, why: str = PLANNED_ANEW, after: RunState | None = None):
        self.home, self.why = home, why
        self.after = after or RunState(phase="going", stamps={StartPhase.CHECKED: 1.0})
        self.verbs: list[str] = []
        self.gone_on: list[tuple[str, bool]] = []
        self.lines: list[str] = []
        self.ended = threading.Event()
        self._there = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self.home.supervised(), ControlSocket(self.home) as control:
            self._there.set()
            until = time.monotonic() + 30
            while not self.verbs and time.monotonic() < until:
                for request in control.requests():
                    self.verbs.append(request.verb)
                    request.connection.answer({})
                time.sleep(0.01)
            self.home.write_state(RunState(phase="ending"))
            time.sleep(0.1)
            write_measurements(self.home)
            self.home.write_state(RunState(phase="ended", code=130, why=self.why))
        self.ended.set()

    def __enter__(self) -> Paused:
        self._thread.start()
        assert self._there.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended.is_set() and not self.verbs:
            self.verbs.append("over")
        self._thread.join(30)
        assert not self._thread.is_alive()

    def go_on(self, if_launcher_dies: str, detach: bool) -> int:
        assert self.ended.is_set()
        self.gone_on.append((if_launcher_dies, detach))
        self.home.write_state(self.after)
        return 0

    def replan(self, **options: Any) -> int:
        return replan(self.home, ReplanOptions(**options), self.go_on, self.lines.append)


@pytest.fixture
def no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a continued run as alive although no supervisor runs."""

    def alive(home: RunHome) -> bool:
        return home.is_supervised() or home.state().phase == "going"

    monkeypatch.setattr(paused_run, "is_alive", alive)


def ends_with_its_launcher(home: RunHome) -> None:
    home.write_record(msgspec.structs.replace(home.record(), if_launcher_dies="stop"))


@pytest.mark.usefixtures("no_supervisor")
@pytest.mark.parametrize(
    ("options", "recorded", "started"),
    [
        ({}, "keep", ("keep", False)),
        ({"detach": True}, "keep", ("keep", True)),
        ({"dry_run": True}, "keep", ("keep", True)),
        ({}, "stop", ("stop", False)),
        ({"if_launcher_dies": "stop"}, "keep", ("stop", False)),
        ({"dry_run": True}, "stop", ("stop", False)),
    ],
)
@pytest.mark.slow
def test_a_run_continues_with_its_launch_options(
    home: RunHome, options: dict[str, Any], recorded: str, started: tuple[str, bool]
) -> None:
    """A run that ends with its launcher gets this command as its new launcher, even in a dry
    run."""
    write_launch(home, gpus(), DP4)
    if recorded == "stop":
        ends_with_its_launcher(home)
    with Paused(home) as run:
        assert run.replan(**options) == 0
    assert (run.verbs, run.gone_on) == (["measure"], [started])
    stays = any("this command waits for the run's end" in line for line in run.lines)
    assert stays == (recorded == "stop" and "dry_run" in options)


@pytest.mark.usefixtures("no_supervisor")
@pytest.mark.slow
def test_a_dry_run_ends_once_the_run_has_continued_or_failed(home: RunHome) -> None:
    write_launch(home, gpus(), DP4)
    refused = RunState(phase="ended", code=2, why="port 7000 is taken")
    with Paused(home, after=refused) as run:
        assert run.replan(dry_run=True) == 2
    assert run.lines[-1] == "run again has ended: port 7000 is taken"
    home.write_state(RunState(phase="starting"))
    with Paused(home, after=RunState(phase="going")) as run:
        checking = threading.Thread(target=check_later, args=(home,))
        checking.start()
        assert run.replan(dry_run=True) == 0
        assert StartPhase.CHECKED in home.state().stamps
    checking.join()


@pytest.mark.usefixtures("no_supervisor")
@pytest.mark.slow
def test_a_run_continues_with_its_old_plan_if_the_new_plan_is_refused(home: RunHome) -> None:
    old = write_launch(home, gpus(), DP4)
    plans: list[PlanFile] = []
    with Paused(home) as run:
        going = run.after

        def go_on(*words: Any) -> int:
            plans.append(load_plan_file(home.plan_path))
            refused = RunState(phase="ended", code=2, why="port 7000 is taken")
            run.after = going if len(plans) > 1 else refused
            return run.go_on(*words)

        assert replan(home, ReplanOptions(detach=True), go_on, run.lines.append) == 0
    assert plans[0] != old and plans[1] == old
    assert "the old plan: port 7000 is taken" in run.lines[-1]


def check_later(home: RunHome) -> None:
    """Record, a little later, that the run was checked, as a newly started supervisor does."""
    while home.state().phase != "going":
        time.sleep(0.02)
    time.sleep(0.5)
    home.write_state(RunState(phase="going", stamps={StartPhase.CHECKED: 1.0}))


@pytest.mark.usefixtures("no_supervisor")
@pytest.mark.parametrize("why", ["the user asked for it", "all workers are done"])
@pytest.mark.slow
def test_a_run_that_ended_by_itself_is_not_continued(home: RunHome, why: str) -> None:
    old = write_launch(home, gpus(), DP4)
    with Paused(home, why) as run:
        assert run.replan() == 130
    assert not run.gone_on and load_plan_file(home.plan_path) == old
    assert f"and is not resumed: {why} (`roadtrain launch --resume again`" in run.lines[-1]


def assert_stays_stopped(home: RunHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the next step of `--replan` starts nothing."""
    monkeypatch.setattr(run_verbs, "start", lambda *_: pytest.fail("the run continues"))
    assert run_verbs.resume_run(home.name, "keep", True, paused=True) == 130
    assert home.state().why == supervisor_process.USER_ASKED


def test_a_run_stopped_while_it_is_replanned_stays_stopped(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_launch(home, gpus(), DP4)
    home.write_state(RunState(phase="ended", code=130, why=PLANNED_ANEW))
    assert run_verbs.stop_run(home.name) == 0
    assert_stays_stopped(home, monkeypatch)


@pytest.mark.slow
def test_a_run_stopped_while_its_links_are_measured_stays_stopped(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor holds the lock but no longer accepts requests."""
    write_launch(home, gpus(), DP4)
    home.write_state(RunState(phase="ending"))
    measuring = threading.Event()

    def measure() -> None:
        with home.supervised():
            measuring.set()
            time.sleep(1.0)
            home.write_state(RunState(phase="ended", code=130, why=PLANNED_ANEW))

    supervisor = threading.Thread(target=measure)
    supervisor.start()
    assert measuring.wait(10)
    assert run_verbs.stop_run(home.name) == 0
    supervisor.join(10)
    assert_stays_stopped(home, monkeypatch)


def test_a_run_that_continued_before_the_stop_request_gets_the_request_again(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_launch(home, gpus(), DP4)
    home.write_state(RunState(phase="going"))
    alive, answers = [True, True, False, False, False], [False, True]
    monkeypatch.setattr(run_verbs, "is_alive", lambda _: alive.pop(0))
    monkeypatch.setattr(run_verbs, "ask_to_stop", lambda _: answers.pop(0))
    monkeypatch.setattr(run_verbs, "report_end", lambda *_: 130)
    monkeypatch.setattr(run_verbs, "stay_stopped", lambda _: False)
    assert run_verbs.stop_run(home.name) == 0 and not answers


def test_a_stop_does_not_wait_for_another_start_of_the_run(
    home: RunHome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is resumed between two checks of the command."""
    write_launch(home, gpus(), DP4)
    home.write_state(RunState(phase="going"))
    monkeypatch.setattr(run_verbs, "ask_to_stop", lambda _: True)
    monkeypatch.setattr(run_verbs, "STOPS_S", 1.0)
    looks: list[RunHome] = []

    def is_alive(home: RunHome) -> bool:
        looks.append(home)
        if len(looks) == 3:
            home.write_record(msgspec.structs.replace(home.record(), start=1, launched=1.0))
        return True

    monkeypatch.setattr(run_verbs, "is_alive", is_alive)
    assert run_verbs.stop_run(home.name) == 0
    assert "was restarted" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LaunchError("a host is gone")])
@pytest.mark.parametrize(
    ("why", "recorded", "gone_on", "message"),
    [
        (PLANNED_ANEW, "keep", True, "run again goes on with its old plan"),
        (PLANNED_ANEW, "stop", False, "stays stopped, as it ends with its launcher"),
        ("the user asked for it", "keep", False, "is not resumed: the user asked for it"),
    ],
)
@pytest.mark.slow
def test_after_an_error_in_replan_the_run_still_ends_and_continues(
    home: RunHome,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    why: str,
    recorded: str,
    gone_on: bool,
    message: str,
) -> None:
    """Including an error while the run still stops and measures."""
    write_launch(home, gpus(), DP4)
    if recorded == "stop":
        ends_with_its_launcher(home)

    with Paused(home, why) as run:
        failed: list[BaseException] = []

        def alive(home: RunHome) -> bool:
            if run.verbs and not failed:
                failed.append(error)
                raise error
            return home.is_supervised() or home.state().phase == "going"

        monkeypatch.setattr(paused_run, "is_alive", alive)
        with pytest.raises(type(error)):
            run.replan()
    if recorded == "stop" and not isinstance(error, KeyboardInterrupt):
        assert run.gone_on == [("stop", False)]  # this command stays
        return
    assert run.gone_on == ([("keep", True)] if gone_on else [])
    assert message in run.lines[-1]


@pytest.mark.parametrize("lacking", ["machines", "cluster"])
def test_a_run_that_cannot_be_replanned_is_refused_before_it_is_stopped(
    home: RunHome, lacking: str
) -> None:
    old = write_launch(home, gpus(), DP4)
    home.plan_path.write_text(replace(old, **{lacking: None}).to_toml())
    with Paused(home) as run:
        with pytest.raises(ConfigError, match="lacks machines or a cluster"):
            run.replan()
        assert not run.verbs


def test_hosts_missing_from_the_cluster_are_refused_before_the_run_is_stopped(
    home: RunHome,
) -> None:
    old = write_launch(home, gpus(), DP4)
    assert old.machines is not None
    hosts = tuple(replace(host, name=f"mine{n}") for n, host in enumerate(old.machines.hosts))
    machines = replace(old.machines, hosts=hosts)
    home.plan_path.write_text(replace(old, machines=machines).to_toml())
    with Paused(home) as run:
        with pytest.raises(
            ConfigError,
            match=r"only \[machines\] has mine0, mine1, .*; only \[cluster\] has gpu0, gpu1",
        ):
            run.replan()
        assert not run.verbs


def test_a_run_tied_to_its_launcher_is_not_replanned_detached(home: RunHome) -> None:
    write_launch(home, gpus(), DP4)
    ends_with_its_launcher(home)
    with Paused(home) as run:
        with pytest.raises(ConfigError, match=r"ends with its launcher .this command"):
            run.replan(detach=True)
        assert not run.verbs


def test_a_run_whose_supervisor_is_being_restarted_is_alive(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray: the plan of such a run is not replaced."""
    old = write_launch(home, gpus(), DP4)
    home.write_record(msgspec.structs.replace(home.record(), engine="again"))
    kind = EngineKind("", alive=f"{__name__}:alive")
    monkeypatch.setitem(cast(dict[str, EngineKind], ENGINES), "again", kind)
    monkeypatch.setattr(supervisor_process, "CHECKS_S", 0.0)
    monkeypatch.setattr(paused_run, "STOPS_S", 0.0)
    home.write_state(RunState(phase="going"))
    lines: list[str] = []
    with pytest.raises(LaunchError, match="has not answered"):
        replan(home, ReplanOptions(), pytest.fail, lines.append)
    assert load_plan_file(home.plan_path) == old
    assert lines[-1] == "run again is still running: `roadtrain status again`"


def alive(home: RunHome) -> bool:
    return True


def test_servers_keep_stores_order_and_ports_when_workers_change() -> None:
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


def test_failed_measurements_name_hosts_and_only_whole_addresses() -> None:
    names = {"here": "gpu0", "10.0.0.1:7001": "gpu1", "110.0.0.1:7001": "here"}
    for text, part in (
        ("the link from here to 10.0.0.1:7001: there is no answer", "gpu0 to gpu1: there is no"),
        ("other links of host 110.0.0.1:7001, which was lost", "host here, which was lost"),
        ("10.0.0.1:70010 is not known here, nor where", "10.0.0.1:70010 is not known gpu0, nor w"),
    ):
        assert part in with_names(text, names)
