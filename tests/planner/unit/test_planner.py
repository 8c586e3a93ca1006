"""The planner: on random clusters its pick is the best of all candidates; its output; clusters
where nothing fits; no import of torch."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.paper_clusters import gpt
from roadtrain import cli
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.job import make_job
from roadtrain.config.models import ModelShape, shape
from roadtrain.config.plan_file import PLACEMENTS, Plan, load_plan, make_plan, placement
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.planner.candidates import MOST_MICROBATCHES, candidates
from roadtrain.planner.job_file import job_text
from roadtrain.planner.plan_report import words
from roadtrain.planner.search import CLOSE, least_change, main_reason, scaled, search
from roadtrain.simulator.compute import Constants, HostTimes
from roadtrain.simulator.engine import Engine
from roadtrain.simulator.run import simulate
from roadtrain.simulator.scene import Scene
from roadtrain.stages.parallelism import Parallelism

OF = Constants()


def some_cluster(seed: int) -> tuple[Cluster, ModelShape]:
    """A random cluster: one to four small hosts of one or two kinds, some with spare hosts, SSDs
    and a summing switch."""
    rng = random.Random(seed)

    def rate(low: float, high: float) -> str:
        return f"{low * (high / low) ** rng.random():.3f}GB/s"

    def host(name: str, devices: bool) -> dict[str, Any]:
        out: dict[str, Any] = {
            "name": name,
            "count": rng.choice([1, 2]),
            "memory": f"{rng.choice([16, 64, 256])}GB",
            "memory_rate": rate(10, 200),
            "updates": rate(5, 100),
            "sums": rate(5, 100),
            "nics": [{"rate": rate(0.5, 25), "latency": "20us"}],
            "price_per_hour": rng.uniform(0.1, 4),
            "idle_watts": 100,
        }
        if devices:
            out |= {
                "devices": rng.choice([1, 2]),
                "fabric": rate(5, 200),
                "device": {
                    "flops": f"{rng.choice([20, 60, 120])}TFLOP/s",
                    "memory": f"{rng.choice([6, 12, 24])}GB",
                    "memory_rate": "900GB/s",
                    "copy": rate(4, 25),
                    "peak_watts": 300,
                    "idle_watts": 30,
                },
            }
        if rng.random() < 0.7:
            ssd = {
                "count": rng.choice([1, 4]),
                "read": rate(1, 6),
                "write": rate(1, 4),
                "capacity": "2TB",
            }
            out |= {
                "ssds": [ssd | ({"updates": "7GB/s"} if rng.random() < 0.3 else {})],
                "uplink": rate(6, 25),
            }
        return out

    hosts = [host("a", True)] + ([host("b", True)] if rng.random() < 0.4 else [])
    hosts += [host("spare", False)] if rng.random() < 0.6 else []
    switch = {"name": "ethernet", "sums": rng.random() < 0.4, "multicasts": rng.random() < 0.4}
    return make_cluster({"hosts": hosts, "switches": [switch]}), gpt(
        4, rng.choice([1024, 2048]), 16, vocab=32000, seq_len=512
    )


QUICK, MORE = (1, 3, 10), (5, 6, 15)
SEEDS = [
    pytest.param(
        seed,
        marks=() if seed in QUICK else pytest.mark.slow if seed in MORE else pytest.mark.exhaustive,
    )
    for seed in range(20)
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_pick_is_the_best_of_all(seed: int) -> None:
    cluster, model = some_cluster(seed)
    batch = 2 * cluster.device_count
    goal = ("time", "cost", "energy")[seed % 3]
    answer = search(cluster, model, OF, goal=goal, batch=batch, explain=False)
    scores = []
    for plan in candidates(cluster, model, batch=batch):
        try:
            scene = Scene(plan, cluster, model, OF)
            scene.check_networks()
            result = simulate(plan, cluster, model, OF)
            scene.build(Engine())
            least = scene.bound()
            # up to small differences between repeated steps
            assert least <= result.seconds * (1 + 1e-5), plan
        except RoadtrainError:
            continue
        scores.append(
            {"time": result.seconds, "cost": result.price, "energy": result.joules}[goal]
            / plan.samples
        )
    if not scores:
        assert answer.pick is None and least_change(answer) is not None
        return
    assert answer.pick is not None
    assert answer.pick.score <= min(scores) * (1 + 1e-9)
    assert sum(family.simulated for family in answer.families.values()) <= len(scores)


def two_clusters(devices: tuple[int, int] = (3, 1)) -> Cluster:
    """Hosts with a device each on InfiniBand or RoCE, with slow Ethernet between all."""
    slow = {"kind": "ethernet", "rate": "10MB/s"}
    device = {"flops": "1TFLOP/s", "memory": "24GB", "memory_rate": "200GB/s", "copy": "12GB/s"}
    hosts = [
        {
            "name": kind,
            "count": count,
            "device": device,
            "memory": "64GB",
            "nics": [{"kind": kind, "rate": "1GB/s"}, slow],
        }
        for kind, count in zip(("infiniband", "roce"), devices)
    ]
    return make_cluster({"hosts": hosts})


@pytest.mark.slow
def test_clusters_of_unequal_size_get_stages_of_unequal_width() -> None:
    """Gradients stay on the fast networks, and no host is idle."""
    cluster, model = two_clusters(), gpt(8, 1024, 16, vocab=32000, seq_len=512)
    answer = search(cluster, model, OF, batch=16, placements=["zero1"])
    assert answer.pick is not None and answer.pick.plan.widths == (3, 1)
    text = words(answer.pick.plan)
    assert "3+1 data x 2 pipeline-parallel" in text and "summed by a ring" in text
    free = search(cluster, model, OF, placements=["zero1"], explain=False)
    assert free.pick is not None and free.batch >= max(free.pick.plan.widths)


def test_a_plan_in_stages_has_a_job() -> None:
    plan = Plan(placement("zero1"), Parallelism(pp=2, widths=(3, 1), stages=(6, 2)), 2, 12)
    tree = tomllib.loads(job_text(plan) or "")
    made = make_job({**tree, "model": {"config": {"model_type": "llama"}}})
    assert made.parallelism.degrees(4) == plan.parallelism
    assert made.parallelism.num_microbatches == 12 and made.data.batch_size == 2
    even = plan.changed(parallelism=Parallelism(dp=2, pp=2, tp=2))
    assert tomllib.loads(job_text(even) or "")["parallelism"]["num_microbatches"] == 24
    assert job_text(plan.changed(activation_checkpointing=True)) is None


@pytest.mark.slow
def test_measured_speeds_bound_a_plan() -> None:
    """The bounds that prune plans include a backward shorter than twice its forward and seconds
    measured on a host."""
    cluster, model = two_clusters((2, 2)), gpt(4, 1024, 16, vocab=32000, seq_len=512)
    times = {("layer", n): 1e-3 * n for n in (1, 2, 4, 8)}
    of = Constants(backward=0.5, hosts={"roce": HostTimes(times), "infiniband": HostTimes(times)})
    names = ["ddp", "zero1"]
    answer = search(cluster, model, of, batch=8, explain=False, placements=names)
    assert answer.pick is not None
    for plan in candidates(cluster, model, batch=8, placements=names):
        try:
            result = simulate(plan, cluster, model, of)
        except RoadtrainError:
            continue
        assert answer.pick.score <= result.seconds / plan.samples * (1 + 1e-9), plan


def test_a_faster_network_has_faster_links_between_its_switches() -> None:
    nics = [[{"kind": "ethernet", "rate": "1GB/s", "switch": name}] for name in "ab"]
    device = {"flops": "1TFLOP/s", "memory": "24GB"}
    hosts = [
        {"name": name, "device": device, "memory": "64GB", "nics": own}
        for name, own in zip("ab", nics)
    ]
    links = [{"between": ["a", "b"], "rate": "20MB/s"}]
    switches = [{"name": name} for name in "ab"]
    cluster = make_cluster({"hosts": hosts, "switches": switches, "links": links})
    assert scaled(cluster, 2)["network"].links[0].rate == 40e6
    plan, model = Plan(placement("ddp"), Parallelism(dp=2)), gpt(4, 1024, 16, seq_len=16)
    twice = simulate(plan, scaled(cluster, 2)["network"], model, OF).seconds
    assert twice == pytest.approx(simulate(plan, cluster, model, OF).seconds / 2, rel=0.1)


@pytest.mark.slow
def test_the_answer_names_what_helps_and_the_second_best_plan() -> None:
    cluster, model = some_cluster(2)
    answer = search(cluster, model, OF, batch=4 * cluster.device_count)
    assert answer.pick is not None and answer.runner_up is not None
    assert answer.runner_up.score >= answer.pick.score
    for name, gain in answer.gains.items():
        faster = scaled(cluster, 1.1)[name]
        seconds = simulate(answer.pick.plan, faster, model, OF, checked=False).seconds
        assert 1 - seconds / answer.pick.result.seconds == pytest.approx(gain)
    assert all(family.tried for family in answer.families.values())


def test_late_plans_are_tried_only_on_request() -> None:  # Rule 2
    cluster, model = some_cluster(2)
    assert not any(plan.staleness or plan.keep for plan in candidates(cluster, model, batch=64))
    assert any(plan.staleness for plan in candidates(cluster, model, batch=64, late=True))


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out, html, job = (
        str(tmp_path / name) for name in ("plan.toml", "plan.json", "plan.html", "job.toml")
    )
    words = [
        "--model",
        "LLaMA-7B",
        "--batch",
        "8",
        "--out",
        plan,
        "--json",
        out,
        "--html",
        html,
        "--job-file",
        job,
    ]
    assert cli.main(["plan", "workstation", *words]) == 0
    printed = capsys.readouterr().out
    for word in (
        "pick    files",
        "why  ",
        "10 % more of",
        "second  ",
        "refused",
        "assumed hosts.workstation.updates",
    ):
        assert word in printed
    tree = json.loads(Path(out).read_text())
    assert tree["schema"] == 1 and tree["pick"]["plan"]["placement"] == "files" and tree["families"]
    page = Path(html).read_text()
    assert page.count("<svg") >= 3 and "http" not in page.replace("http://www.w3.org", "")
    assert "[store]" in Path(job).read_text()
    assert load_plan(plan).placement.name == "files"
    assert (
        cli.main(
            [
                "simulate",
                "workstation",
                "--model",
                "LLaMA-7B",
                "--plan",
                plan,
                "--trace",
                str(tmp_path / "t.json"),
            ]
        )
        == 0
    )
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"Forward", "Backward", "Read", "Update", "Write"} <= {event["name"] for event in events}


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["plan", "workstation", "--model", "GPT-3-175B", "--out", str(tmp_path / "plan.toml")]
        )
        == 1
    )
    printed = capsys.readouterr().out
    assert "no plan fits" in printed and "least change: 1.4 TiB more for stage 0 SSDs" in printed
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "servers"], "no model"),
        (["plan", "servers", "--model", "GPT-5"], "no model is called 'GPT-5'"),
        (["plan", "nowhere.toml", "--model", "GPT-2"], "cannot read cluster file"),
        (
            ["plan", "servers", "--model", "GPT-2", "--goal", "fun"],
            "`goal`: Input should be 'time', 'cost' or 'energy', not 'fun'",
        ),
        (["plan", "servers", "--model", "GPT-2", "--goal", "cost"], "no host has `price_per_hour`"),
        (
            ["plan", "servers", "--model", "GPT-2", "--placements", "zero9"],
            "no placement is called 'zero9'",
        ),
        (
            ["simulate", "servers", "--model", "GPT-2", "--tp", "3"],
            "does not divide the 32 devices",
        ),
        (["reproduce", "luwwu"], "unknown paper 'luwwu'"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from roadtrain.cli import main; assert main(['plan', 'workstation',"
        " '--model', 'GPT-2', '--batch', '4', '--placements', 'ddp,files', '--out',"
        f" {str(tmp_path / 'p')!r}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_a_cluster_without_devices() -> None:
    with pytest.raises(ConfigError, match="has no devices"):
        search(make_cluster({"hosts": [{"name": "a", "memory": "1GB"}]}), gpt(2, 64, 2), OF)


def eight_ssds(
    hosts: int = 2,
    ssds: int = 8,
    devices: int = 8,
    memory: str = "2TB",
    rate: str = "7GB/s",
    **more: Any,
) -> Cluster:
    ssd = {"count": ssds, "read": rate, "write": rate, "capacity": "7.68TB"}
    return make_cluster(
        {
            "hosts": [
                {
                    "name": "gpu",
                    "count": hosts,
                    "devices": devices,
                    "device": "H100-80GB",
                    "memory": memory,
                    "nics": [{"rate": "100Gbit/s"}],
                    "ssds": [ssd] if ssds else [],
                    **more,
                }
            ]
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OPT-125M", "LLaMA-7B", "LLaMA-3-70B", "DeepSeek-V3"])
@pytest.mark.parametrize("hosts", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_hosts_with_eight_fast_ssds(name: str, hosts: int) -> None:
    """Reading a byte takes about 1e-12 seconds, too little for a tolerance in seconds or
    bytes."""
    answer = search(
        eight_ssds(hosts),
        shape(name, seq_len=2048),
        OF,
        batch=8 * hosts,
        explain=False,
        placements=("zero-infinity", "raid0", "files"),
    )
    if answer.pick is None:
        assert name == "DeepSeek-V3" and least_change(answer) is not None
    else:
        assert 0 < answer.pick.result.seconds < float("inf")


@pytest.mark.exhaustive
@settings(max_examples=15, deadline=None)
@given(
    hosts=st.integers(1, 5),
    ssds=st.integers(0, 8),
    devices=st.integers(1, 8),
    memory=st.sampled_from(["1GB", "64GB", "2TB"]),
    rate=st.sampled_from(["1B/s", "1MB/s", "7GB/s", "999GB/s"]),
    model=st.sampled_from(
        ["OPT-125M", "LLaMA-7B", "LLaMA-3-70B", "DeepSeek-V3", "ResNet-50", "DLRM-Kaggle"]
    ),
    batch=st.sampled_from([None, 1, 7, 64]),
    names=st.lists(st.sampled_from([*PLACEMENTS]), min_size=1, max_size=2),
    nics=st.sampled_from([[], [{"rate": "1B/s"}], [{"rate": "900GB/s", "relay": True}]]),
)
def test_a_plan_or_a_sentence(
    hosts: int,
    ssds: int,
    devices: int,
    memory: str,
    rate: str,
    model: str,
    batch: int | None,
    names: list[str],
    nics: list[dict[str, Any]],
) -> None:
    """For any cluster: an answer with or without a pick, or a RoadtrainError."""
    cluster = eight_ssds(hosts, ssds, devices, memory, rate, nics=nics, memory_rate=rate)
    try:
        answer = search(cluster, shape(model), OF, batch=batch, placements=names, explain=False)
    except ConfigError as error:
        assert "divides a batch of" in str(error)
        return
    if answer.pick is not None:
        assert (
            0 < answer.pick.result.seconds < float("inf")
            and answer.batch == answer.pick.plan.samples
        )
        assert all(need.fits for need in answer.pick.result.needs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model", "where"),
    [
        pytest.param(
            Plan(placement("raid0"), Parallelism(dp=16), 32, 480),
            "DLRM-Kaggle",
            {"hosts": 4, "devices": 4, "nics": [{"rate": "900GB/s"}]},
            marks=pytest.mark.exhaustive,
        ),
        (
            Plan(placement("ddp"), Parallelism(pp=3, virtual_stages=4), 1, 480),
            "OPT-125M",
            {"hosts": 3, "devices": 1, "nics": [{"rate": "1B/s"}]},
        ),
    ],
    ids=["SSDs", "a pipeline"],
)
def test_a_step_of_many_micro_batches_that_differ_is_estimated(
    plan: Plan, model: str, where: dict[str, Any]
) -> None:
    """On SSDs or links so slow that a step takes hours, no two micro-batches take equal time;
    simulating a step of thousands of them took minutes."""
    cluster = eight_ssds(ssds=7, rate="1MB/s", memory_rate="1MB/s", **where)
    few, many = (
        simulate(plan.changed(num_microbatches=number), cluster, shape(model), OF, checked=False)
        for number in (plan.num_microbatches, 98_304)
    )
    whole = simulate(plan, cluster, shape(model), OF, checked=False, traced=True)
    assert few.estimated and many.estimated and not whole.estimated
    assert few.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert few.bytes == pytest.approx(whole.bytes, rel=0.03)
    assert many.tasks <= few.tasks < whole.tasks
    assert few.seconds < many.seconds < float("inf")


def test_memory_is_kept_free() -> None:  # Rule 4
    """A plan that needs 0.97 of a device's memory fits without headroom but not with the default
    headroom."""
    model = gpt(4, 1024, 16, vocab=32000, seq_len=512)
    plan = Plan(placement("ddp"))
    need = Scene(plan, eight_ssds(1, devices=1), model, OF).needs[0].nbytes
    device = {"flops": "100TFLOP/s", "memory": f"{need / 0.97:.0f}B"}
    cluster = eight_ssds(1, devices=1, device=device)
    picks = [
        search(
            cluster, model, OF, batch=1, placements=["ddp"], headroom=headroom, explain=False
        ).pick
        for headroom in (0.0, 0.02, 0.05)
    ]
    assert [pick is not None and not pick.plan.activation_checkpointing for pick in picks] == [
        True,
        True,
        False,
    ]
    assert search(cluster, model, OF, batch=1, placements=["ddp"], explain=False).pick == picks[2]
    assert picks[1] is not None and picks[1].plan.headroom == 0.02
    assert make_plan({"placement": "ddp"}).headroom == 0.05
    _, host, *_ = Scene(plan.changed(headroom=0.5), cluster, model, OF).needs
    assert host.room == pytest.approx(0.5 * 0.9 * 2e12)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="headroom"):
            search(cluster, model, OF, headroom=wrong)


def test_the_smartnic_placement_needs_a_card_with_a_relay() -> None:
    model = gpt(4, 1024, 16, vocab=32000, seq_len=512)
    for relay in (False, True):
        nics = [{"rate": "100Gbit/s"}, {"kind": "roce", "rate": "50Gbit/s", "relay": relay}]
        answer = search(
            eight_ssds(nics=nics), model, OF, batch=16, placements=["smartnic"], explain=False
        )
        assert (answer.pick is not None) == relay
        if answer.pick is None:
            assert any(
                "no card with a processor" in why for why in answer.families["smartnic"].refused
            )
        else:  # its traffic uses that card, although another is faster
            scene = Scene(answer.pick.plan, eight_ssds(nics=nics), model, OF)
            scene.build(Engine())
            nic = scene.stages[0].fabric.site.nic
            assert nic is not None and nic.relay


@pytest.mark.slow
def test_without_a_batch_accumulation_is_searched() -> None:
    """Many micro-batches share a slow update; the chosen batch is the smallest close to the
    optimum."""
    cluster = eight_ssds(1, devices=1, updates="120GB/s", memory_rate="200GB/s")
    model = gpt(8, 2048, 16, vocab=32000, seq_len=512)
    answer = search(cluster, model, OF, placements=["zero-offload"], explain=False)
    assert answer.pick is not None and answer.pick.plan.num_microbatches > 1
    assert answer.batch == answer.pick.plan.samples and "no batch was given" in answer.chosen
    scores = {}
    for batch in (answer.batch // 2, answer.batch, 64 * MOST_MICROBATCHES):
        pick = search(
            cluster, model, OF, batch=batch, placements=["zero-offload"], explain=False
        ).pick
        assert pick is not None
        scores[batch] = pick.score
    half, own, most = scores.values()
    assert own <= most * (1 + CLOSE) < half
    fixed = search(cluster, model, OF, batch=4, placements=["zero-offload"], explain=False)
    assert (fixed.batch, fixed.chosen) == (4, "")


@pytest.mark.parametrize(
    ("batch", "message"),
    [(0, "`batch`: .* 1, not 0"), (-8, "`batch`: .* 1, not -8"), (7, "divides a batch of 7")],
)
def test_an_impossible_batch_is_refused(batch: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(eight_ssds(2), gpt(4, 1024, 16, seq_len=512), OF, batch=batch, placements=["zero3"])


def test_groups_of_uneven_hosts_use_the_network() -> None:
    """Three hosts of eight devices in two stages of twelve: each stage spans two hosts, and a stage
    on two kinds of hosts gets the minimum of each resource."""
    model = gpt(4, 1024, 16, vocab=32000, seq_len=512)
    plan = Plan(placement("zero1"), Parallelism(dp=12, pp=2), num_microbatches=2)
    result = simulate(plan, eight_ssds(3), model, OF, checked=False)
    assert result.bytes["stage 0 out"] > 0 and result.bytes["stage 1 out"] > 0
    kinds = [
        {
            "name": name,
            "count": 1,
            "devices": n,
            "device": "A100-80GB",
            "memory": memory,
            "memory_rate": "9GB/s",
            "nics": [{"rate": "10GB/s"}],
        }
        for name, n, memory in (("a", 8, "64GB"), ("b", 2, "8GB"))
    ]
    mixed = make_cluster({"hosts": kinds})
    scene = Scene(Plan(placement("zero-offload"), Parallelism(dp=10)), mixed, model, OF)
    scene.build(Engine())
    group = scene.stages[0].fabric.group
    assert (group.hosts, group.replicas) == (2, 10)
    assert next(n for n in scene.needs if n.where == "stage 0 memory").room == pytest.approx(
        0.9 * 8e9
    )


def test_stages_on_one_host_share_its_memory() -> None:
    model = gpt(4, 1024, 16, vocab=32000, seq_len=512)
    rooms = [
        next(
            n.room
            for n in Scene(
                Plan(placement("zero-offload"), Parallelism(dp=8 // pp, pp=pp)),
                eight_ssds(1),
                model,
                OF,
            ).needs
            if n.where == "stage 0 memory"
        )
        for pp in (1, 4)
    ]
    assert rooms[1] == pytest.approx(rooms[0] / 4)


@pytest.mark.slow
def test_all_assumptions_are_printed_with_their_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.toml").write_text("""[[hosts]]
name = "gpu"
devices = 2
device = "RTX-4090"
memory = "128GB"
""")
    plan, out = str(tmp_path / "plan.toml"), tmp_path / "out.json"
    words = [str(tmp_path / "cluster.toml"), "--model", "OPT-1.3B", "--json", str(out)]
    assert (
        cli.main(
            ["plan", *words, "--batch", "4", "--placements", "ddp,zero-offload", "--out", plan]
        )
        == 0
    )
    plan_text = capsys.readouterr().out
    assert cli.main(["simulate", *words, "--placement", "zero-offload"]) == 0
    for text in (plan_text, capsys.readouterr().out):
        for phrase in (
            "hosts.gpu.memory_rate 20.00 GB/s",
            "hosts.gpu.updates 12.00 GB/s",
            "hosts.gpu.fabric 25.00 GB/s",
            "efficiency 0.5 of a device's peak",
            "network 0.9 of a network card's rate",
            "step inside a host 2 us",
            "assumed samples of 1024 tokens (as published",
            "5% of device and host memory is kept free",
        ):
            assert phrase in text, phrase
    assert "batch   4 samples (4096 tokens) per step: as given" in plan_text
    values = json.loads(out.read_text())["assumed_values"]
    assert values["hosts.gpu.memory_rate"] == 20e9 and values["efficiency"] == 0.5
    assert cli.main(["simulate", *words[:-2], "--placement", "ddp", "--headroom", "0.99"]) == 2
    assert "99% of device and host memory is kept free" in capsys.readouterr().err
    assert load_plan(plan).headroom == 0.05


def test_hosts_without_a_price_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("""[[hosts]]
name = "gpu"
device = "RTX-4090"
memory = "128GB"
price_per_hour = 1.0
[[hosts]]
name = "spare"
memory = "64GB"
""")
    assert (
        cli.main(
            [
                "plan",
                str(tmp_path / "c.toml"),
                "--model",
                "GPT-2",
                "--batch",
                "1",
                "--goal",
                "cost",
                "--placements",
                "ddp",
                "--out",
                str(tmp_path / "p.toml"),
            ]
        )
        == 0
    )
    assert "assumed hosts.spare.price_per_hour 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "servers", "--model", "GPT-2", f"--{name}", value]
        for name in (
            "micro-batch",
            "num-microbatches",
            "dp",
            "tp",
            "pp",
            "cp",
            "ep",
            "virtual-stages",
        )
        for value in ("0", "-1")
    ]
    + [
        ["simulate", "servers", "--model", "GPT-2", "--seq-len", "0"],
        ["simulate", "servers", "--model", "GPT-2", "--staleness", "-1"],
        ["simulate", "servers", "--model", "GPT-2", "--headroom", "-0.1"],
        ["plan", "servers", "--model", "GPT-2", "--batch", "0"],
        ["plan", "servers", "--model", "GPT-2", "--seq-len", "0"],
        ["plan", "servers", "--job", "job.toml", "--seq-len", "0"],
        ["preflight", "--hosts", "a,b", "--devices", "0"],
        ["soak", "--faults", "0"],
    ],
    ids=" ".join,
)
def test_zero_and_negative_values_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:  # Rule 6
    assert cli.main(words) == 2
    printed, (option, value) = capsys.readouterr().err, words[-2:]
    assert option in printed or option.removeprefix("--").replace("-", "_") in printed
    refused = re.search(rf"(not|have) {value}\b|\({value}\)", printed)
    assert refused or "--job" in words  # a job has no --seq-len, of whatever value


CARD = {"flops": "312TFLOP/s", "memory": "80GB", "memory_rate": "2TB/s", "copy": "25GB/s"}


def gpus(count: int = 2, devices: int = 1, nic: bool = True) -> Cluster:
    host = {"name": "gpu", "count": count, "devices": devices, "device": CARD, "memory": "64GB"}
    return make_cluster({"hosts": [host | ({"nics": [{"rate": "100Gbit/s"}]} if nic else {})]})


def test_placements_that_were_not_tried_are_listed_with_the_nearest_batch() -> None:  # Rule 6
    answer = search(gpus(4), gpt(4, 1024, 16), OF, batch=30, explain=False)
    assert set(answer.families) == set(PLACEMENTS)
    assert answer.families["zero3"].left_out == {
        "batch 30 is not divisible by 4 data-parallel ranks; 28 or 32 would be divisible": 1
    }
    assert any("interleaved" in why for why in answer.families["ddp"].left_out)


def test_hosts_without_a_network_get_that_reason() -> None:
    """The reason is the network, even if memory is short too."""
    answer = search(gpus(nic=False), gpt(96, 12288, 96), OF, batch=4, explain=False)
    assert answer.pick is None and least_change(answer) is None
    why, hint = main_reason(answer) or ("", "")
    assert why == "2 hosts named gpu have no network in common: gpu has no network card"
    assert "nics" in hint


def test_without_spare_hosts_none_sums() -> None:
    cluster = gpus(1, devices=2)
    answer = search(cluster, shape("ResNet-50"), OF, batch=64, explain=False)
    assert answer.pick is not None and "spare" not in words(answer.pick.plan, cluster)
    for name in ("parameter-server", "summation"):
        family = answer.families[name]
        assert family.simulated == 0 and family.refused


def test_rows_and_small_layers_take_time() -> None:
    """A DLRM sample takes at least the time of its rows over the network and memory."""
    cluster, model = gpus(), shape("DLRM-Kaggle")
    answer = search(cluster, model, OF, batch=8192, explain=False, placements=["ddp", "zero1"])
    assert answer.pick is not None
    result, tables = answer.pick.result, model.blocks[0]
    network = 0.9 * 12.5e9
    if answer.pick.plan.parallelism.dp == 2:  # half of a device's rows, there and back
        assert result.seconds >= 4096 * tables.touched / 2 / network
    assert result.seconds >= 3 * 1e-5 * len(model.blocks) / 2
    assert result.samples_per_s < 2e7
