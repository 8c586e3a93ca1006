"""Simulating each worker separately: stages of unequal width, hosts of unequal speed, shared cards,
a placement per stage, streamed virtual stages, and optimizers whose parameters are gathered in the
next forward. Checked against closed forms and the simulation in which a single worker stands for
all."""

from __future__ import annotations

import json
import tomllib
from random import Random
from typing import Any

import pytest

from benchmarks.crosscluster.link_bytes import BoundaryBytes, StageBytes, link_bytes
from benchmarks.planner.paper_clusters import gpt
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import BlockShape, ModelShape, Transformer
from roadtrain.config.plan_file import PLACEMENTS, Plan, PlanFile, PlanMemory, make_plan, placement
from roadtrain.errors import ConfigError
from roadtrain.planner.simulate import as_json, report
from roadtrain.simulator.compute import Constants, HostTimes
from roadtrain.simulator.memory import cut
from roadtrain.simulator.run import Result, simulate
from roadtrain.stages.parallelism import Parallelism
from tests.support.plans import RATE, WHOLE, cluster, lump, run


def pipe(
    blocks: int = 8,
    flops: float = 8e12,
    params: float = 8e6,
    hidden: int = 1000,
    tokens: int = 1000,
) -> ModelShape:
    """A model of equal blocks with activations between them."""
    own = BlockShape("layer", int(params / blocks), flops / blocks, 0.0, 2.0 * hidden * tokens)
    return ModelShape("pipe", own.times(blocks), tokens, hidden)


def apart(plan: Plan, where: Cluster, model: ModelShape, of: Constants = WHOLE) -> Result:
    return simulate(plan, where, model, of, checked=False, apart=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_separate_replicas_equal_the_shared_simulation(seed: int) -> None:
    """With equal hosts and no shared card each replica takes as long as the worker that stands for
    all."""
    rng = Random(seed)
    name = rng.choice(["ddp", "zero1", "files", "summation", "server", "zero-offload", "zero3"])
    n, pp = rng.choice([2, 4]), rng.choice([1, 2])
    where = cluster(n * pp, 1 if name == "server" else 0)
    plan = Plan(
        placement(name),
        Parallelism(dp=n, pp=pp),
        1,
        rng.choice([1, 3, 4]),
        overlap=rng.random() < 0.5,
        gather=rng.choice(["update", "forward"]),
        update_at=rng.choice(["step", "gradient"]),
        memory=PlanMemory(slots=rng.choice([2, 1000])),
    )
    model = gpt(4, 512, 8, vocab=8000, seq_len=256)
    shared = simulate(plan, where, model, WHOLE, checked=False, traced=True)
    each = apart(plan, where, model)
    # pieces of a block sent on two lanes at once end later than pieces sent in sequence
    assert each.seconds == pytest.approx(shared.seconds, rel=0.03)
    sent = [
        nbytes for what, nbytes in each.bytes.items() if what.startswith("gpu") and "out" in what
    ]
    if pp == 1:
        assert sent[0] == pytest.approx(shared.bytes["stage 0 out"], rel=1e-6)


@pytest.mark.parametrize("name", [*PLACEMENTS])
@pytest.mark.slow
def test_ranks_on_a_host_share_its_traffic(name: str) -> None:
    """Hosts of two devices, each rank simulated separately: a ring crosses a card once for both,
    and a server gets a single gradient per host, as in the shared simulation."""
    where = cluster(2, 1, devices=2, sums=True)
    plan = Plan(placement(name), Parallelism(dp=4), num_microbatches=2, overlap=False)
    model = lump(4e8, 1e12)
    shared = simulate(plan, where, model, WHOLE, checked=False, traced=True)
    each = apart(plan, where, model)
    assert each.seconds == pytest.approx(shared.seconds, rel=0.05)
    for way in ("out", "in"):
        sent = each.bytes[f"gpu 0 roce {way}"]
        assert sent == pytest.approx(shared.bytes[f"stage 0 {way}"]) and sent > 0
        if "server in" in shared.bytes:
            assert each.bytes[f"server {way}"] == pytest.approx(shared.bytes[f"server {way}"])


@pytest.mark.parametrize("name", ["server", "optimizer-node"])
@pytest.mark.slow
def test_a_server_receives_the_gradients_of_every_host_of_a_replica(name: str) -> None:
    """Including replicas whose context ranks are on several hosts."""
    where, plan = cluster(4, 1, sums=True), Plan(placement(name), Parallelism(dp=2, cp=2))
    shared = simulate(plan, where, lump(1e8), WHOLE, checked=False, traced=True)
    each = apart(plan, where, lump(1e8))
    for way in ("out", "in"):
        assert each.bytes[f"server {way}"] == pytest.approx(shared.bytes[f"server {way}"])


@pytest.mark.parametrize(
    ("widths", "num_microbatches"), [((2, 1), 8), ((1, 3), 9), ((1, 2, 4), 16), ((3, 2), 12)]
)
def test_unequal_widths_take_the_slowest_stage(
    widths: tuple[int, ...], num_microbatches: int
) -> None:
    """With layers in proportion to widths a rank waits only while the pipeline fills and drains."""
    where = cluster(1, devices=sum(widths))
    blocks = 2 * sum(widths)
    model = pipe(blocks, 1e12 * blocks)
    stages = tuple(2 * d for d in widths)
    plan = Plan(
        placement("ddp"),
        Parallelism(pp=len(widths), widths=widths, stages=stages),
        num_microbatches=num_microbatches,
    )
    ideal = 3 * 2e12 / 50e12  # seconds of a micro-batch at one replica
    result = simulate(plan, where, model, WHOLE, checked=False)
    fill = ideal * (2 * sum(widths) - max(widths))
    assert ideal * num_microbatches <= result.seconds <= ideal * num_microbatches + fill
    assert plan.samples == num_microbatches
    busy = (
        result.busy[f"stage {number} replica {replica} device"]
        for number, width in enumerate(widths)
        for replica in range(width)
    )
    assert sum(busy) * result.seconds == pytest.approx(3 * 1e12 * blocks / 50e12 * num_microbatches)


def test_a_slow_host_has_its_own_measured_seconds() -> None:
    """In a stage of two hosts one at half the speed delays the other; in a stage of its own with
    fewer layers it does not."""
    model = pipe(12)
    kinds = [
        cluster(1).hosts[0].model_copy(update={"name": name, "nics": cluster(1).hosts[0].nics})
        for name in ("fast", "slow")
    ]
    where = cluster(1).model_copy(update={"hosts": tuple(kinds)})
    times = {name: HostTimes({("layer", 1): s}) for name, s in (("fast", 0.01), ("slow", 0.02))}
    of = Constants(network=1.0, hosts=times)
    shared = Plan(placement("ddp"), Parallelism(dp=2), num_microbatches=8)
    result = apart(shared, where, model, of)
    assert result.seconds == pytest.approx(8 * 12 * 0.02 * 3, rel=0.01)
    assert result.busy["stage 0 replica 0 device"] == pytest.approx(0.5, rel=0.02)
    folded = simulate(shared, where, model, of, checked=False)
    assert folded.seconds == pytest.approx(result.seconds, rel=0.01)
    for stages, slowest in (((6, 6), 6 * 0.02), ((8, 4), 8 * 0.01)):
        plan = Plan(placement("ddp"), Parallelism(pp=2, stages=stages), num_microbatches=60)
        assert apart(plan, where, model, of).seconds == pytest.approx(
            60 * 3 * slowest + 3 * (12 - stages[0]) * 0.01, rel=0.03
        )


def test_a_measured_backward_time_is_used() -> None:
    of = Constants(network=1.0, table={("layer", 1): 0.1}, backward=1.5)
    result = apart(Plan(placement("ddp")), cluster(1), pipe(4), of)
    assert result.seconds == pytest.approx(4 * 0.1 * 2.5, rel=1e-3)


def test_cpus_that_communicate_compute_less() -> None:
    """Each byte that a CPU device sends or receives takes compute time."""
    kind = cluster(2).hosts[0].device.model_copy(update={"kind": "cpu"})  # type: ignore[union-attr]
    host = cluster(2).hosts[0].model_copy(update={"device": kind})
    where = cluster(2).model_copy(update={"hosts": (host,)})
    model, plan = lump(1e9, 4e13), Plan(placement("ddp"), Parallelism(dp=2))
    free, busy = (
        apart(plan, where, model, Constants(network=1.0, touch=touch)).seconds
        for touch in (0.0, 2e-10)
    )
    # 2 GB leave and 2 GB enter, nearly all of it during backward
    assert busy - free == pytest.approx(2 * 2e9 * 2e-10, rel=0.15)


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("zero1", 2)])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_cpu_devices_update_at_the_rate_of_their_host(
    name: str, ranks: int, one_by_one: bool
) -> None:
    """All ranks of the host share this rate, which is not that of a device's memory."""
    kind = cluster(1).hosts[0].device.model_copy(update={"kind": "cpu"})  # type: ignore[union-attr]
    update = {"device": kind, "devices": ranks, "updates": 28e9, "fabric": 1e12}
    host = cluster(1).hosts[0].model_copy(update=update)
    where = cluster(1).model_copy(update={"hosts": (host,)})
    plan = Plan(placement(name), Parallelism(dp=ranks), overlap=False)
    result = simulate(plan, where, lump(1e9), WHOLE, checked=False, apart=one_by_one)
    assert result.seconds == pytest.approx(1.0, rel=0.05)


def test_measured_seconds_scale_with_ranks_and_samples() -> None:
    """Tensor ranks divide the time of a layer; other sample counts scale it in proportion."""
    of, block = Constants(table={("layer", 4): 0.8}), pipe().blocks[0]
    device = cluster(1).hosts[0].device
    assert device is not None
    for samples, ranks, seconds in ((4, 1, 0.8), (4, 2, 0.4), (2, 1, 0.4), (6, 2, 0.6)):
        plan = Plan(placement("ddp"), Parallelism(tp=ranks), micro_batch=samples)
        assert of.forward_of(block, plan, device) == pytest.approx(seconds)


def two_networks(between: str, *, devices: int = 1, kind: str = "device") -> Cluster:
    """Two clusters of two hosts, every host with both cards."""
    host = cluster(1, devices=devices).hosts[0]
    host = host.model_dump(mode="json", by_alias=True, exclude={"ssds"})
    host["device"]["kind"] = kind

    def hosts(name: str, kind: str, rate: str) -> dict[str, Any]:
        slow = {"kind": "ethernet", "rate": between, "latency": "1us"}
        nics = [{"kind": kind, "rate": rate, "latency": "1us"}, slow]
        return {**host, "name": name, "count": 2, "nics": nics}

    return make_cluster(
        {"hosts": [hosts("a", "infiniband", "10GB/s"), hosts("b", "roce", "8GB/s")]}
    )


def test_each_group_has_the_fastest_network_that_its_members_share() -> None:
    """Gradients travel inside the clusters, activations between them, and each card carries the
    computed bytes."""
    model, m = pipe(8, flops=1e11, params=8e6), 6
    plan = Plan(placement("zero1"), Parallelism(dp=2, pp=2), num_microbatches=m)
    plan = plan.changed(activation_bytes=4, gradient_bytes=4, parameter_bytes=4, gather="forward")
    result = apart(plan, two_networks("100MB/s"), model)
    gradients = 4e6 * 4 / 2
    for host, kind in (("a", "infiniband"), ("b", "roce")):
        for number in (0, 1):
            for way in ("out", "in"):
                assert result.bytes[f"{host} {number} {kind} {way}"] == pytest.approx(2 * gradients)
                assert result.bytes[f"{host} {number} ethernet {way}"] == pytest.approx(m * 4e6)
    # all traffic over Ethernet: gradients and activations share the cards
    slow = plan.changed(networks={"dp": "ethernet", "pp": "ethernet"})
    other = apart(slow, two_networks("100MB/s"), model)
    assert other.bytes["a 0 ethernet out"] == pytest.approx(2 * gradients + m * 4e6)
    assert other.seconds >= (2 * gradients + m * 4e6) / 100e6 > result.seconds


def test_networks_that_no_group_has_are_refused() -> None:
    """Otherwise a misspelt network would be ignored (Rule 6)."""
    for networks in ({"data": "ethernet"}, {"dp": "ib"}):
        with pytest.raises(ConfigError, match="networks"):
            make_plan({"placement": "ddp", "networks": networks})


def test_half_the_bytes_of_activations_take_half_the_time() -> None:
    """A slow link between the stages is the bottleneck."""
    model = pipe(8, flops=1e9, params=8e3)
    plan = Plan(placement("ddp"), Parallelism(dp=2, pp=2), num_microbatches=32)
    fp32, bf16 = (
        apart(plan.changed(activation_bytes=n), two_networks("20MB/s"), model).seconds
        for n in (4, 2)
    )
    assert fp32 == pytest.approx(2 * bf16, rel=0.02)
    assert fp32 >= 32 * 4e6 / 20e6


def test_two_switches_share_the_link_between_them() -> None:
    """The activations of both replicas cross the same link."""
    hosts = [
        {
            **cluster(2).hosts[0].model_dump(mode="json", by_alias=True, exclude={"ssds"}),
            "name": name,
            "nics": [{"kind": "ethernet", "rate": "1GB/s", "latency": "1us", "switch": name}],
        }
        for name in ("a", "b")
    ]
    links = [{"between": ["a", "b"], "rate": "20MB/s"}]
    where = make_cluster(
        {"hosts": hosts, "switches": [{"name": "a"}, {"name": "b"}], "links": links}
    )
    model = pipe(8, flops=1e9, params=8e3)
    result = apart(
        Plan(placement("ddp"), Parallelism(dp=2, pp=2), num_microbatches=16), where, model
    )
    assert result.bytes["a to b link"] == pytest.approx(32 * 2e6)
    assert result.seconds >= 32 * 2e6 / 20e6


def test_an_overlapping_optimizer_hides_its_traffic() -> None:
    """Gradients are sent during the last backward and parameters arrive during the next forward: a
    step grows only by the time that exceeds the computing."""
    model = lump(1e9, 4e13, blocks=32)
    each = 4e9 * 3 / 4 / RATE  # (d - 1) / d of the fp32 bytes, in each direction
    compute = 3 * 4e13 / 50e12
    plan = {"gradient_bytes": 4, "parameter_bytes": 4}
    off = run("zero1", cluster(4), model, overlap=False, **plan)
    on = run("zero1", cluster(4), model, overlap=True, gather="forward", **plan)
    assert off.seconds == pytest.approx(compute + 2 * each, rel=0.02)
    assert compute <= on.seconds <= compute + each / 8
    for result in (on, off):
        assert result.bytes["stage 0 out"] == pytest.approx(2 * 3 / 4 * 4e9)


@pytest.mark.parametrize(
    ("widths", "devices", "tp"),
    [
        ((2, 2), 1, 1),
        ((3, 1), 1, 1),
        ((1, 2, 1), 1, 1),
        ((4, 4), 2, 1),
        ((6, 2), 2, 1),
        ((3, 1), 2, 2),
        ((8,), 2, 1),
    ],
)
@pytest.mark.parametrize("name", ["zero1", "ddp"])
@pytest.mark.slow
def test_cards_carry_the_computed_bytes(
    name: str, widths: tuple[int, ...], devices: int, tp: int
) -> None:
    """Simulated cards carry the bytes with which a real run compares its counters
    (benchmarks/crosscluster/link_bytes.py), including hosts of several devices (Rule 7)."""
    pp = len(widths)
    plan = Plan(
        placement(name),
        Parallelism(pp=pp, widths=widths, tp=tp),
        num_microbatches=8,
        gather="forward",
    ).changed(gradient_bytes=4, parameter_bytes=4, activation_bytes=2)
    model = pipe(7, params=7e6)
    result = apart(plan, two_networks("1GB/s", devices=devices, kind="cpu"), model)
    hosts = ["a 0", "a 1", "b 0", "b 1"]
    passed = BoundaryBytes(2.0 * model.hidden * model.tokens, 2.0 * model.hidden * model.tokens)
    counts = [
        4 * sum(b.params for part in own for b in part) / tp for own in cut(model.blocks, plan)
    ]
    sharded = name == "zero1"
    stages = [StageBytes(n, n) if sharded else StageBytes(ring_gradients=2 * n) for n in counts]
    links = link_bytes(plan.parallelism, plan.step_microbatches, passed, stages)
    for host in hosts:
        for end, way in ((0, "out"), (1, "in")):
            planned = sum(
                nbytes
                for (*ranks, _), nbytes in links.items()
                if len({hosts[rank // devices] for rank in ranks}) == 2  # traffic leaves the host
                and hosts[ranks[end] // devices] == host
            )
            carried = sum(
                nbytes
                for what, nbytes in result.bytes.items()
                if what.startswith(host) and what.endswith(f" {way}")
            )
            assert planned == pytest.approx(carried) and planned > 0


@pytest.mark.parametrize(
    "name",
    [pytest.param("files", marks=pytest.mark.exhaustive), "server", "zero-offload", "zero3"],
)
@pytest.mark.slow
def test_virtual_stages_are_streamed(name: str) -> None:
    """Each device fetches its share of the model in each pass of each micro-batch; blocks of a part
    are fetched once if the micro-batches run on it in turn and its slots suffice."""
    model, m, pp, parts = lump(8e8, 1e9, blocks=16), 4, 2, 2
    plan = Plan(
        placement(name),
        Parallelism(pp=pp, virtual_stages=parts),
        num_microbatches=m,
        memory=PlanMemory(slots=2),
    )
    where = cluster(2, 1)
    result = simulate(plan, where, model, WHOLE, checked=False)
    whole = model.params / pp * plan.sizes.parameter_bytes
    for number in range(pp):
        fetched = result.bytes[f"stage {number} to device"]
        # 2 of 8 blocks may still be present at each of the 2 m passes of each part
        assert 2 * m * whole / 2 <= fetched <= 2 * m * whole if name != "zero3" else True
    enough = simulate(plan.changed(slots=8), where, model, WHOLE, checked=False)
    if name != "zero3":
        assert enough.bytes["stage 0 to device"] == pytest.approx(whole)
        assert enough.seconds < result.seconds
    assert result.seconds >= 0.999 * enough.seconds


def test_a_placement_for_each_stage() -> None:
    """An optimizer node, plain data parallelism and files in the same plan: the traffic of each
    stage is that of its placement."""
    names = ("optimizer-node", "ddp", "files")
    where, model = cluster(4, 1, sums=True), pipe(12, params=1.2e8)
    plan = Plan(
        placement("ddp"),
        Parallelism(pp=3, widths=(1, 2, 1)),
        num_microbatches=4,
        stage_placements=names,
        memory=PlanMemory(slots=2),
    ).changed(wire="int16", overhead=0, block=0, payload=1)
    result = simulate(plan, where, model, WHOLE, checked=False)
    share = model.params / 3
    assert result.bytes["server in"] == pytest.approx(4 * share * 2)
    ring = 2 / 2 * share * 2
    activations = 4 * 2e6
    for host in (1, 2):
        assert result.bytes[f"gpu {host} roce out"] == pytest.approx(ring + activations)
    state = share * plan.sizes.state_bytes
    assert result.bytes["gpu 3 ssd read"] == pytest.approx(state)
    assert "gpu 1 ssd read" not in {name for name, n in result.bytes.items() if n}
    assert {need.where for need in result.needs} >= {"server SSDs", "stage 2 SSDs"}
    with pytest.raises(ConfigError, match="stage_placements has 2 names, but there are 3"):
        plan.changed(stage_placements=("ddp",) * 2)
    with pytest.raises(ConfigError, match="no placement is called 'dpd'"):
        plan.changed(stage_placements=("ddp", "dpd", "files"))
    with pytest.raises(ConfigError, match="host without devices, but the cluster has none"):
        simulate(plan, cluster(4), model, WHOLE)


@pytest.mark.parametrize("name", [*PLACEMENTS])
@pytest.mark.slow
def test_every_placement_takes_unequal_widths(name: str) -> None:
    """The run reaches a steady state, no resource exceeds its capacity, and no bound is
    violated."""
    where = cluster(5, 2, sums=True)
    plan = Plan(
        placement(name),
        Parallelism(pp=2, widths=(3, 2)),
        num_microbatches=7,
        memory=PlanMemory(slots=2),
    )
    result = simulate(plan, where, gpt(6, 1024, 8), WHOLE, checked=False)
    assert result.differ <= 1e-5 * result.seconds and result.steps < 12
    assert all(0 <= share <= 1 + 1e-9 for share in result.busy.values())
    assert result.watts > 0 and result.price > 0


def test_fewer_micro_batches_than_replicas_are_refused() -> None:
    plan = Plan(placement("ddp"), Parallelism(pp=2, widths=(3, 1)), num_microbatches=2)
    with pytest.raises(ConfigError, match="a step has 2 micro-batches, but a stage has 3 replicas"):
        simulate(plan, cluster(4), pipe(), WHOLE)


def test_gradients_of_shared_embeddings_are_reported_as_left_out() -> None:
    """They would cross the network between the stages (Rule 6)."""
    plan, where = Plan(placement("ddp"), Parallelism(pp=2)), cluster(2)
    for tied, stages in ((True, plan), (False, plan), (True, Plan(placement("ddp")))):
        model = Transformer(2, 512, 8, vocab=8000, seq_len=64, tied=tied).shape("tied or not")
        text = report(simulate(stages, where, model, WHOLE), where, model, WHOLE)
        reported = "the first and the last stage share: 15.6 MiB of gradients each way" in text
        assert reported == (tied and stages is plan)


def test_the_report_lists_each_replica_and_the_traffic_of_each_card() -> None:
    plan = Plan(
        placement("zero1"),
        Parallelism(pp=2, widths=(3, 1)),
        num_microbatches=6,
        stage_placements=("zero1", "files"),
    )
    where, model = cluster(4), pipe()
    result = simulate(plan, where, model, WHOLE, checked=False)
    text = report(result, where, model, WHOLE)
    assert "placement zero1, files, dp 3+1 x tp 1 x pp 2" in text
    assert "micro-batch 1 x 6 over all replicas" in text
    assert "stage 0 replica 2: the device waits" in text and "stage 1 replica 0: the" in text
    # gradients of 6 x 2 MB of activations
    assert "carried gpu 3 roce out: 11.4 MiB per step" in text
    tree = as_json(result, where, model, WHOLE)
    assert make_plan(tomllib.loads(PlanFile(plan).to_toml())) == plan
    assert tree["plan"]["stage_placements"] == ("zero1", "files")
    assert json.loads(json.dumps(tree))["bytes"]["gpu 3 roce out"] == pytest.approx(12e6)
