"""Simulated plans against closed forms, the state machines' order, memory, energy and refused
plans."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest

from benchmarks.planner.paper_clusters import gpt
from roadtrain.config.cluster import Cluster, Device, make_cluster
from roadtrain.config.models import BlockShape, ModelShape, Transformer, shape
from roadtrain.config.plan_file import (
    PARTS,
    PLACEMENTS,
    ElementBytes,
    Framework,
    Plan,
    PlanFile,
    PlanMemory,
    make_plan,
    placement,
)
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.servers.protocol import messages
from roadtrain.simulator.compute import LAUNCH_S, Constants
from roadtrain.simulator.engine import Cost, Engine
from roadtrain.simulator.fabric import Fabric
from roadtrain.simulator.memory import device_bytes, saved_bytes
from roadtrain.simulator.run import _Steps, simulate
from roadtrain.simulator.scene import Scene
from roadtrain.simulator.simulated_server import SimulatedServer
from roadtrain.simulator.site import Site
from roadtrain.simulator.step import SimulatedStage
from roadtrain.stages.parallelism import Parallelism
from roadtrain.sums.protocol.shares import busiest, optimum
from tests.support.plans import RATE, WHOLE, cluster, lump, run, traffic


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.slow
def test_traffic_is_the_closed_form(n: int) -> None:
    """The bounds in docs/design.md. S: bytes of 16-bit parameters, equal to the bytes of
    gradients."""
    model, s = lump(1e9), 2e9
    assert traffic(run("ddp", cluster(n), model), "out") == pytest.approx(2 * (n - 1) / n * s)
    assert traffic(run("zero3", cluster(n), model, slots=2), "out") == pytest.approx(
        3 * (n - 1) / n * s, rel=0.15
    )
    links = [1.0] * n
    seconds = busiest(links, links, optimum(links, links))
    assert traffic(run("summation", cluster(n, n), model), "out") == pytest.approx(seconds * s)
    plain_packets = {"wire": "int16", "overhead": 0, "block": 0, "payload": 1}  # the paper's
    switched = run("switch-sum", cluster(n, sums=True), model, **plain_packets)
    assert traffic(switched, "out") == traffic(switched, "in") == pytest.approx(s)
    node = run("optimizer-node", cluster(n, 1, sums=True), model, slots=2, **plain_packets)
    assert traffic(node, "out") == pytest.approx(s) and node.bytes["server in"] == pytest.approx(s)
    assert node.bytes["server out"] == traffic(node, "in") == pytest.approx(2 * s, rel=0.15)
    plain = run("server", cluster(n, 1), model, slots=2)
    assert plain.bytes["server in"] == pytest.approx(n * s)


def test_a_step_takes_the_slowest_part_not_the_sum() -> None:
    """Computing hides traffic: except for the first and last block a step takes the longer of
    both."""
    s = 2e9
    comm = 1.5 * s / RATE
    for flops, floor in ((1e11, comm), (8e13, 3 * 8e13 / 50e12)):
        result = run("ddp", cluster(4), lump(1e9, flops, blocks=32))
        assert floor <= result.seconds <= 1.1 * floor + comm / 16


@pytest.mark.slow
def test_ssds_or_devices_bound_a_step() -> None:
    """Sun et al. (LuWu), Figure 15: few SSDs bound the step whatever the batch; with many SSDs the
    devices do."""
    where = cluster(4, 1, sums=True)
    few = [
        run(
            "optimizer-node",
            where,
            lump(4e9, 2e12),
            micro_batch=mb,
            update_at="gradient",
            buffers=16,
            slots=2,
        )
        for mb in (1, 4)
    ]
    assert (
        few[0].seconds == pytest.approx(few[1].seconds, rel=0.1)
        and few[0].busy["server ssd read"] > 0.85
    )
    many = run(
        "optimizer-node",
        where,
        lump(4e9, 2e12),
        micro_batch=400,
        update_at="gradient",
        buffers=16,
        slots=2,
    )
    assert many.busy["stage 0 device"] > 0.95


def test_near_storage_traffic_equals_the_published_table() -> None:
    """Jang et al. (Smart-Infinity), Table I, in units of 16-bit parameters."""
    model = lump(1e9)
    base = Plan(
        placement("raid0"), sizes=ElementBytes(upstream_bytes=4), memory=PlanMemory(file_slots=1)
    )
    for name, topk, up, down in (
        ("raid0", None, 8, 8),
        ("near-storage", None, 2, 2),
        ("near-storage", 2.0, 2, 0.04),
    ):
        plan = base.changed(placement=placement(name), keep=topk and topk / 200)
        result = simulate(plan, cluster(1), model, WHOLE)
        assert traffic(result, "uplink in") == pytest.approx(up * 2e9)
        assert traffic(result, "uplink out") == pytest.approx(down * 2e9)


def test_buffers_let_reads_and_writes_overlap() -> None:
    """Smart-Infinity's transfer handler: the same bytes in less time."""
    plan = Plan(placement("near-storage"), memory=PlanMemory(buffers=1))
    single, more = (simulate(plan.changed(buffers=n), cluster(1), lump(2e9), WHOLE) for n in (1, 4))
    assert more.seconds < 0.75 * single.seconds and more.bytes == pytest.approx(single.bytes)


def test_reads_and_writes_in_the_order_of_arrival_need_two_buffers_only() -> None:
    """If they share the rate instead, both buffers are read and then both are written."""
    plan = Plan(placement("files"), update_at="gradient", memory=PlanMemory(buffers=2))
    ssd = {"read": "3GB/s", "write": "3GB/s", "mixed": 2, "capacity": "8TB"}
    shared, ordered = (
        simulate(plan, cluster(1, ssds=[{**ssd, "depth": n}]), lump(2e9, blocks=16), WHOLE).seconds
        for n in (2, 1)
    )
    assert ordered < 1.1 * 2e9 * 12 / 3e9 < 1.6 * 2e9 * 12 / 3e9 < shared


def test_the_next_forward_begins_while_gradients_travel() -> None:
    """A server's links are busy in both directions: a step with all blocks kept takes the time of
    the parameters' bytes once, not twice."""
    model, s = lump(1e9, 1e10, blocks=16), 2e9
    plan, where = {"slots": 16, "update_at": "gradient"}, cluster(1, 1)
    where = where.model_copy(
        update={"hosts": tuple(host.model_copy(update={"ssds": ()}) for host in where.hosts)}
    )
    kept = run("server", where, model, **plan)
    assert s / RATE <= kept.seconds <= 1.15 * s / RATE and kept.bytes[
        "server out"
    ] == pytest.approx(s)
    assert run("server", where, model, **{**plan, "update_at": "step"}).seconds > 1.8 * s / RATE


def note_calls(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, note: Callable[..., None]
) -> None:
    """Patch a method so that `note` is called before it, with its object and arguments."""
    method = getattr(kind, name)

    def noted(*args: Any) -> Any:
        note(*args)
        return method(*args)

    monkeypatch.setattr(kind, name, noted)


def logged_actions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    """Record (step, action, block or chunk) in order: what the worker of the only simulated stage
    runs and what its server's state machine decides."""
    log: list[tuple[int, str, int]] = []
    begun = 0  # steps

    def begins(_: SimulatedStage) -> None:
        nonlocal begun
        begun += 1

    def ends(stage: SimulatedStage, block: int, _: int) -> None:
        assert stage.run is not None
        log.append((begun, stage.run.what, block))

    def carries_out(_: SimulatedServer, action: messages.Action) -> None:
        what = type(action).__name__
        match action:
            case messages.Answer(about) | messages.Hold(about):
                log.append((begun, what, about.chunk))
            case messages.Read(chunk) | messages.Update(chunk) | messages.Write(chunk):
                log.append((begun, what, chunk))

    note_calls(monkeypatch, SimulatedStage, "begin_step", begins)
    note_calls(monkeypatch, SimulatedStage, "_block_ended", ends)
    note_calls(monkeypatch, SimulatedServer, "_carry_out", carries_out)
    return log


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.slow
def test_updates_run_in_the_configured_order(
    in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSDs are the bottleneck, so updates queue: in order of arrival (last layers first) or in the
    order of the next forward."""
    plan = Plan(
        placement("optimizer-node"),
        Parallelism(dp=4),
        activation_checkpointing=True,
        update_at="gradient",
        in_turn=in_turn,
        memory=PlanMemory(buffers=2, slots=2, root=False),
    )
    log = logged_actions(monkeypatch)
    simulate(plan, cluster(4, 1, sums=True), lump(8e9), WHOLE, checked=False, traced=True)
    seen = [chunk for _, what, chunk in log if what == "Update"]
    assert len(seen) >= 32
    blocks = [chunk // 4 for chunk in seen[:32]]  # the first step: 8 blocks of 4 chunks
    if in_turn:
        assert blocks == sorted(blocks, reverse=True)
    else:  # but for those that began before another had arrived
        assert blocks[4:] == sorted(blocks[4:])


def test_all_collectives_block_the_device() -> None:
    """Including gathers of parameters; a network with cards of its own does not block."""
    taxed = Constants(efficiency=0.5, network=1.0, tax=0.3)
    for name, more in (("zero3", {"slots": 2}), ("ddp", {}), ("smartnic", {"slots": 2, "kept": 8})):
        plan = Plan(placement(name), Parallelism(dp=4)).changed(**more)
        stages = simulate(plan, cluster(4), lump(1e9), taxed, checked=False).stages
        moved = sum(stages.get(("stage 0", what), (0.0, 0.0))[0] for what in ("Fetch", "Push"))
        waited = stages.get(("stage 0", "Wait"), (0.0, 0.0))[0]
        assert waited == pytest.approx(0.0 if name == "smartnic" else 0.3 * moved, rel=0.05)


def test_embeddings_take_no_slot_and_are_sent_once() -> None:
    model = lump(1e9, 1e10, blocks=4)
    ends = (
        BlockShape("embedding", 10**9, 0.0, 0.0, 0.0),
        BlockShape("output", 10**9, 0.0, 0.0, 0.0),
    )
    model = ModelShape("ends", (ends[0], *model.blocks, ends[1]), 1)
    own, streamed = (
        run("server", cluster(1, 1), model, slots=2, root=root) for root in (True, False)
    )
    assert own.bytes["server out"] == pytest.approx(2 * 3e9 + 2 * 0.5e9)  # two of four layers twice
    assert streamed.bytes["server out"] == pytest.approx(2 * 3e9 + 3 * 0.5e9 + 2e9)


@pytest.mark.slow
def test_servers_share_the_load() -> None:
    single, double = (
        run("server", cluster(2, n), lump(1e9, 1e10), slots=8, update_at="gradient") for n in (1, 2)
    )
    assert double.seconds < 0.6 * single.seconds and double.bytes["server out"] == pytest.approx(
        single.bytes["server out"]
    )


def test_a_relay_keeps_parameters_for_backward() -> None:
    """Guo et al. (SGC): buffering saves the second gathering."""
    model = lump(1e9, 1e11)
    plain, kept = (run("smartnic", cluster(4), model, kept=n, slots=2) for n in (0, 8))
    gathered = 0.75 * 2e9
    assert traffic(plain, "in") == pytest.approx(3 * gathered, rel=0.15)
    assert traffic(kept, "in") == pytest.approx(2 * gathered, rel=0.01)


def test_a_late_update_hides_behind_the_step() -> None:
    slow = cluster(4, updates="20GB/s")
    model = lump(1e9, 4e12)
    now, late = (run("smartnic", slow, model, kept=8, staleness=n) for n in (0, 1))
    update = 1e9 / 4 * 28 / 20e9
    assert late.seconds < 1.05 * update < 0.8 * now.seconds  # the processors are busy all the time


@pytest.mark.parametrize("num_microbatches", [4, 8, 16])
def test_a_pipeline_bubble_has_its_closed_form(num_microbatches: int) -> None:
    """(p - 1) / m of the time for equal stages."""
    device = {"flops": "100TFLOP/s", "memory": "1TB", "memory_rate": "1000000GB/s"}
    host = {"name": "a", "devices": 4, "memory": "1TB", "fabric": "100000GB/s", "device": device}
    where = make_cluster({"hosts": [host]})
    plan = Plan(placement("ddp"), Parallelism(dp=1, pp=4), num_microbatches=num_microbatches)
    model = lump(1e6, 5e12, blocks=8)
    work = 3 * 5e12 / 50e12 / 4 * num_microbatches
    assert simulate(plan, where, model, WHOLE).seconds == pytest.approx(
        work * (1 + 3 / num_microbatches), rel=1e-3
    )


def test_rows_of_tables_go_all_to_all() -> None:
    """DLRM: tables are spread over the devices; looked-up rows cross the network once in forward
    and their gradients once in backward. Tables are not summed, and each device keeps its part."""
    model = shape("DLRM-Kaggle")
    tables = model.blocks[0]
    for n in (2, 8):
        result = run("ddp", cluster(n), model, micro_batch=4096)
        rest = (model.params - tables.tables) * 2 * 2 * (n - 1) / n
        rows = 2 * tables.touched * 4096 * (n - 1) / n
        assert traffic(result, "out") == pytest.approx(rest + rows)
    once, often = (
        traffic(run("ddp", cluster(2), model, micro_batch=64, num_microbatches=m), "out")
        for m in (1, 8)
    )
    assert often - once == pytest.approx(7 * 2 * tables.touched * 64 / 2)  # each has rows
    whole, part = (
        device_bytes(Plan(placement("ddp"), Parallelism(dp=n)), model.blocks) for n in (1, 8)
    )
    assert part < 0.2 * whole


def test_stages_exchange_the_input_of_the_next_block_if_blocks_have_no_common_width() -> None:
    model = shape("ResNet-50")
    plan = Plan(placement("ddp"), Parallelism(pp=2, stages=(8, 8)), micro_batch=4)
    result = simulate(plan, cluster(2), model, WHOLE, checked=False)
    layers = [block for block in model.blocks if "." in block.name]
    assert result.bytes["between 1 forth"] == pytest.approx(4 * layers[8].input)
    assert result.bytes["between 1 back"] == result.bytes["between 1 forth"] > 0


def test_a_memory_bound_block_takes_its_bytes_over_the_bandwidth() -> None:
    device = Device(flops="100TFLOP/s", memory="1GB", memory_rate="1GB/s")
    wide, plan = BlockShape("layer.0", 10**6, 2e6, 3e6, 1e6), Plan(placement("ddp"))
    assert WHOLE.forward_of(wide, plan, device) == pytest.approx((2e6 + 3e6 + 1e6) / 1e9)
    rows = BlockShape("tables", 10**9, 0.0, 0.0, 0.0, 10**9, 5e6)
    assert WHOLE.forward_of(rows, plan.changed(micro_batch=2), device) == pytest.approx(1e7 / 1e9)
    assert WHOLE.forward_of(BlockShape("layer.0", 1, 1.0, 0.0, 0.0), plan, device) == LAUNCH_S


def test_cpu_devices_share_the_memory_of_their_host() -> None:  # Rule 4
    """Parameters on the device and state on the host share the RAM of all processes."""
    device = {"kind": "cpu", "flops": "1TFLOP/s", "memory": "16GB", "memory_rate": "20GB/s"}
    host = {"name": "box", "devices": 2, "device": device, "memory": "16GB"}
    model, plan = gpt(8, 2048, 16, vocab=32000, seq_len=128), Plan(placement("ddp"))
    single, double = (
        Scene(
            plan.changed(parallelism=Parallelism(dp=n)),
            make_cluster({"hosts": [host]}),
            model,
            WHOLE,
        )
        for n in (1, 2)
    )
    [alone], [both] = (
        [need for need in scene.needs if need.where.startswith("host box")]
        for scene in (single, double)
    )
    assert both.nbytes == pytest.approx(2 * alone.nbytes)
    assert alone.fits and not both.fits
    assert all(need.fits for need in double.needs if need is not both)
    with pytest.raises(
        BudgetError, match=r"host box.* needs .* GiB, but 13.4 GiB is available"
    ) as caught:
        simulate(double.plan, double.cluster, model, WHOLE)
    assert "GiB more there" in caught.value.hint


def test_a_link_between_switches_is_the_limit() -> None:
    """Two kinds of hosts joined by a slow link: a ring is as slow as the link."""

    def host(name: str) -> dict[str, Any]:
        nic = {"kind": "roce", "rate": "10GB/s", "switch": name}
        return {"name": name, "device": "A100-80GB", "memory": "1TB", "nics": [nic]}

    where = make_cluster(
        {
            "hosts": [host("x"), host("y")],
            "switches": [{"name": "x"}, {"name": "y"}],
            "links": [{"between": ["x", "y"], "rate": "1GB/s"}],
        }
    )
    assert run("ddp", where, lump(1e9)).seconds >= 2e9 / 1e9


def test_a_server_behind_a_link_is_as_slow_as_the_link() -> None:
    tree = cluster(2, 1).model_dump(mode="json", by_alias=True)
    for host, switch in zip(tree["hosts"], "xy"):
        host["nics"] = [{"kind": "roce", "rate": "10GB/s", "switch": switch}]
    tree |= {
        "switches": [{"name": "x"}, {"name": "y"}],
        "links": [{"between": ["x", "y"], "rate": "1GB/s"}],
    }
    # both hosts' gradients
    assert run("server", make_cluster(tree), lump(1e9)).seconds >= 2 * 2e9 / 1e9


def test_unreachable_spare_hosts_are_reported() -> None:
    tree = cluster(2, 1).model_dump(mode="json", by_alias=True)
    tree["hosts"][1]["nics"] = [{"kind": "ethernet", "rate": "1GB/s"}]
    with pytest.raises(ConfigError, match="gpu, spare have no network in common"):
        run("summation", make_cluster(tree), lump(1e9))


def test_uneven_stages_help_unequal_devices() -> None:
    fast = {
        "name": "fast",
        "devices": 2,
        "memory": "1TB",
        "device": "A100-80GB",
        "nics": [{"rate": "100GB/s"}],
    }
    slow = {**fast, "name": "slow", "device": "V100-32GB"}
    where = make_cluster({"hosts": [fast, slow]})
    model = gpt(14, 2048, 16)
    plan = Plan(
        placement("ddp"), Parallelism(dp=2, pp=2), num_microbatches=8, activation_checkpointing=True
    )
    even, uneven = (
        simulate(
            plan.changed(parallelism=Parallelism(dp=2, pp=2, stages=stages)),
            where,
            model,
            WHOLE,
            checked=False,
        )
        for stages in ((7, 7), (10, 4))
    )
    assert uneven.seconds < 0.8 * even.seconds


@pytest.mark.slow
def test_every_placement_reaches_a_steady_state() -> None:
    where = cluster(4, 2, devices=2, sums=True)
    for name in PLACEMENTS:
        result = run(name, where, gpt(6, 1024, 8), activation_checkpointing=True)
        assert result.differ <= 1e-5 * result.seconds and result.steps < 12, name
        assert all(0 <= share <= 1 + 1e-9 for share in result.busy.values()), name
        # the same every time
        assert (
            run(name, where, gpt(6, 1024, 8), activation_checkpointing=True).seconds
            == result.seconds
        )


def test_the_order_is_that_of_the_state_machines(monkeypatch: pytest.MonkeyPatch) -> None:  # Rule 7
    """Two blocks on files, second step: actions of the worker and of the server's state
    machine."""
    log = logged_actions(monkeypatch)
    simulate(
        Plan(placement("files"), memory=PlanMemory(slots=2, buffers=2)),
        cluster(1),
        lump(2e6, 1e9, blocks=2),
        WHOLE,
        traced=True,
    )
    step = [f"{what} {number}" for at, what, number in log if at == 2]
    assert step == [
        "Update 0",
        "Update 1",
        "Answer 0",
        "Write 0",
        "Forward 0",
        "Answer 1",
        "Write 1",
        "Forward 1",
        "Backward 1",
        "Hold 1",
        "Backward 0",
        "Hold 0",
    ]
    # released at the end of the first step
    assert [what for at, what, _ in log if at == 1][-2:] == ["Read", "Read"]


def test_energy_and_cost_add_up() -> None:
    result = run("ddp", cluster(4, 1), lump(1e9, 8e13))
    busy = result.busy["stage 0 device"]
    work = max(result.busy.get(f"stage 0 {what}", 0.0) for what in ("updates", "sums", "out"))
    assert result.watts == pytest.approx(4 * (100 + 200 * busy) + 4 * (50 + 200 * work))
    assert result.joules == pytest.approx(result.watts * result.seconds)
    assert result.price == pytest.approx(4 * 3.6 / 3600 * result.seconds)
    wired = cluster(4, 1).model_copy(update={"price_per_kwh": 0.3})
    assert run("ddp", wired, lump(1e9, 8e13)).price == pytest.approx(
        result.price + result.joules / 3.6e6 * 0.3
    )
    with_spares = run("summation", cluster(4, 2), lump(1e9, 8e13))
    assert with_spares.price == pytest.approx((4 * 3.6 + 2 * 0.36) / 3600 * with_spares.seconds)


def test_memory_is_counted_and_plans_that_do_not_fit_are_refused() -> None:  # Rule 4
    model, where = gpt(24, 8192, 64), cluster(4, 1)
    with pytest.raises(
        BudgetError, match=r"stage 0 device: the plan needs .* GiB, but 74.5 GiB is available"
    ) as caught:
        simulate(Plan(placement("ddp"), Parallelism(dp=4)), where, model, WHOLE)
    assert "activation_checkpointing" in caught.value.hint
    fits = simulate(
        Plan(placement("server"), Parallelism(dp=4), activation_checkpointing=True),
        where,
        model,
        WHOLE,
    )
    assert all(need.fits for need in fits.needs)
    assert (
        fits.peaks["stage 0 device"]
        <= next(n.nbytes for n in fits.needs if n.where == "stage 0 device") * 1.001
    )
    plan = Plan(placement("ddp"), Parallelism(dp=4), sizes=ElementBytes(state_bytes=12))
    assert device_bytes(plan, model.blocks) == pytest.approx(model.params * 16)


@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("optimizer-node", cluster(2), "needs a host without devices"),
        ("parameter-server", cluster(2), "sums on hosts without devices"),
        ("switch-sum", cluster(2), "no switch of cluster 'cluster' sums"),
        (
            "near-storage",
            cluster(2, ssds=[{"read": "1GB/s", "write": "1GB/s"}]),
            "cannot compute",
        ),
        ("files", cluster(2, ssds=[]), "has no SSDs"),
    ],
)
def test_missing_hardware_of_a_placement_is_reported(
    name: str, where: Cluster, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(name, where, lump(1e6))


def test_plans_are_written_and_read_back() -> None:
    plan = Plan(
        placement("smartnic"),
        Parallelism(8, 2, 2, (5, 7)),
        micro_batch=4,
        keep=0.01,
        networks={"pp": "ethernet"},
        memory=PlanMemory(slots=4),
        framework=Framework(precision="fp8"),
    )
    assert make_plan(tomllib.loads(PlanFile(plan).to_toml())) == plan
    for tree, message in (
        ({}, "`placement` is missing\nhint: one of ddp, zero1"),
        ({"placement": "zero4"}, "no placement is called 'zero4'"),
        ({"placement": "ddp", "micro_bach": 2}, "unknown key `micro_bach`"),
        ({"placement": "ddp", "micro_batch": 0}, "`micro_batch`: .* not 0"),
        ({"placement": "ddp", "parallelism": {"dpp": 1}}, "unknown key `parallelism.dpp`"),
        ({"placement": "ddp", "parallelism": {"ep": 0}}, "`parallelism.ep`: .* not 0"),
        ({"placement": "ddp", "overlap": 1}, "`overlap`: .* not 1"),
        (
            {"placement": "ddp", "framework": {"fragmentation": "1.1"}},
            "`framework.fragmentation`: .* not '1.1'",
        ),
        ({"placement": "ddp", "sizes": {"host_bytes": -1}}, "`sizes.host_bytes`: .* not -1"),
        (
            {"placement": "ddp", "memory": {"slot": 3}},
            "unknown key `memory.slot`.*\n.*`memory.slots`",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make_plan(tree)


@pytest.mark.parametrize(
    "wrong", ["x", -1, 0.5, True, [], {"dp": "q"}, {"stages": 5}, None, float("nan")]
)
def test_a_wrong_value_of_any_plan_key_is_a_config_error(wrong: Any) -> None:
    """The plan is read, or ConfigError names the key."""
    parts = {name: part for part, names in PARTS.items() for name in names}
    for name in [*(own.name for own in fields(Plan)), *parts]:
        try:
            table = {parts[name]: {name: wrong}} if name in parts else {name: wrong}
            plan = make_plan({"placement": "ddp", **table})
        except ConfigError as error:
            assert name in str(error) or "placement" in str(error)
        else:
            held = getattr(plan, parts[name]) if name in parts else plan
            kept = tuple if type(wrong) is list else type(wrong)
            assert name in PARTS or type(getattr(held, name)) is kept or wrong is None


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ConfigError, match="needs 32 devices, the cluster has 4"):
        simulate(Plan(placement("ddp"), Parallelism(dp=32)), cluster(4), lump(1e6), WHOLE)


def test_an_engine_that_traces_has_every_stage() -> None:
    result = simulate(Plan(placement("files")), cluster(1), lump(2e6, 1e9), WHOLE, traced=True)
    assert {task.stage for task in result.trace} == {
        "Fetch",
        "Forward",
        "Backward",
        "Push",
        "Read",
        "Update",
        "Write",
        "Commit",
    }
    assert isinstance(Engine().now, float)


def transformer(**more: Any) -> ModelShape:
    return Transformer(
        8,
        1024,
        8,
        32000,
        2048,
        4096,
        256,
        gated=True,
        tied=False,
        fused=True,
        biases=False,
        norms=2,
        **more,
    ).shape("small")


def test_parts_shrink_the_bubble() -> None:
    """Narayanan et al. (2021), section 2.2: with p stages and v virtual stages, (p - 1) / v of a
    micro-batch's time is idle."""
    own = lump(8e6, 8e12)
    ideal = 3 * 8e12 / 4 / 50e12
    for parts in (1, 2):
        plan = Plan(placement("ddp"), Parallelism(pp=4, virtual_stages=parts), num_microbatches=8)
        result = simulate(plan, cluster(1, devices=4), own, WHOLE, checked=False)
        assert result.seconds == pytest.approx(ideal * (8 + 3 / parts), rel=0.01)


def test_context_ranks_split_a_sequence() -> None:
    """Compute and activations are halved; keys and values hide behind attention on a fast link,
    not on a slow one."""
    model = transformer()
    single = simulate(
        Plan(placement("zero1"), Parallelism()), cluster(1), model, WHOLE, checked=False
    )
    two = [
        simulate(
            Plan(placement("zero1"), Parallelism(cp=2)),
            cluster(1, devices=2, fabric=fabric),
            model,
            WHOLE,
            checked=False,
        )
        for fabric in ("1000GB/s", "100MB/s")
    ]
    assert two[0].busy["stage 0 device"] * two[0].seconds == pytest.approx(
        single.busy["stage 0 device"] * single.seconds / 2, rel=0.01
    )
    assert (
        two[1].busy["stage 0 device"] * two[1].seconds
        > 2 * two[0].busy["stage 0 device"] * two[0].seconds
    )
    plans = [Plan(placement("zero1"), Parallelism(cp=cp)) for cp in (1, 2)]
    assert saved_bytes(plans[1], model.blocks) == saved_bytes(plans[0], model.blocks) / 2
    assert device_bytes(plans[0], model.blocks) == pytest.approx(16 * model.params)
    assert device_bytes(plans[1], model.blocks) == pytest.approx(10 * model.params)


def test_experts_are_spread_and_tokens_are_sent_to_them() -> None:
    model = transformer(experts=8, active=2)
    plan = Plan(placement("zero1"), Parallelism(dp=8, ep=8))
    experts = 8 * 8 * 3 * 1024 * 4096
    assert sum(block.experts for block in model.blocks) == experts
    assert device_bytes(plan, model.blocks) == pytest.approx(
        4 * (model.params - experts + experts / 8) + 12 * model.params / 8
    )
    alone = simulate(plan, cluster(1, devices=8), model, WHOLE, checked=False)
    slow = simulate(plan, cluster(1, devices=8, fabric="10GB/s"), model, WHOLE, checked=False)
    # layers, passes, a token's 2 experts; one direction
    moved = 8 * 4 * 2 * 7 / 8 * 2048 * 2 * 1024 * 2 / 2
    busy = [r.busy["stage 0 device"] * r.seconds for r in (alone, slow)]
    assert busy[1] - busy[0] == pytest.approx(moved * (1 / 10e9 - 1 / 100e9), rel=0.01)


def test_tensor_ranks_on_two_hosts_use_their_cards() -> None:
    """Megatron's two all-reduces per layer and pass, over the slower of both networks."""
    model = transformer()
    busy = []
    for hosts, devices in ((1, 4), (2, 2)):
        result = simulate(
            Plan(placement("ddp"), Parallelism(tp=4)),
            cluster(hosts, devices=devices),
            model,
            WHOLE,
            checked=False,
        )
        busy.append(result.busy["stage 0 device"] * result.seconds)
    bytes_s = 8 * 2 * 2 * 2 * 3 / 4 * 2 * 2048 * 1024
    assert busy[1] - busy[0] == pytest.approx(bytes_s * (1 / RATE - 1 / 100e9), rel=0.02)


def test_precision_changes_only_matrix_products() -> None:
    model = transformer()
    device = {
        "flops": "100TFLOP/s",
        "peaks": {"fp8": "200TFLOP/s"},
        "memory": "80GB",
        "memory_rate": "100000GB/s",
    }
    busy = [
        simulate(
            Plan(placement("ddp"), framework=Framework(precision=precision)),
            cluster(1, device=device),
            model,
            WHOLE,
            checked=False,
        ).busy["stage 0 device"]
        for precision in ("", "fp8")
    ]
    assert busy[1] < busy[0]
    layers = [block for block in model.blocks if "." in block.name]
    forward = [
        sum(
            WHOLE.forward_of(
                b,
                Plan(placement("ddp"), framework=Framework(precision=p)),
                Device.model_validate(device),
            )
            for b in layers
        )
        for p in ("", "fp8")
    ]
    half = sum(b.flops - b.attention for b in layers) / 2 / 50e12
    assert forward[0] - forward[1] == pytest.approx(half)
    with pytest.raises(ConfigError, match="device device has no peak for 'nvfp4'"):
        Device.model_validate(device).peak("nvfp4")


def test_selective_checkpointing_lies_between_all_and_none() -> None:
    model = transformer()
    seconds, saved = {}, {}
    for name, options in (
        ("none", {}),
        ("products", {"selective": "products"}),
        ("layers", {"selective": "layers"}),
        ("all", {"activation_checkpointing": True}),
    ):
        plan = Plan(placement("ddp"), Parallelism()).changed(**options)
        seconds[name] = simulate(plan, cluster(1), model, WHOLE, checked=False).seconds
        saved[name] = saved_bytes(plan, model.blocks)
    assert (
        seconds["none"] < seconds["products"] < seconds["all"]
        and seconds["layers"] < seconds["all"]
    )
    assert saved["all"] < saved["products"] < saved["none"] and saved["layers"] < saved["none"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.exhaustive if seed in (1, 3, 6, 11) else ())
        for seed in range(12)
    ],
)
def test_micro_batches_that_repeat_are_counted_not_simulated(seed: int) -> None:
    """The result equals a simulation of every micro-batch."""
    rng = Random(seed)
    where, model = cluster(rng.choice([2, 4]), 1), gpt(4, 1024, 16, vocab=32000, seq_len=512)
    choice = placement(
        rng.choice(["zero1", "zero3", "zero-offload", "files", "smartnic", "server", "raid0"])
    )
    pp = 1 if choice.streamed else rng.choice([1, 2])
    plan = Plan(
        choice,
        Parallelism(dp=where.device_count // pp, pp=pp),
        rng.choice([1, 2]),
        rng.choice([24, 33, 40]),
        activation_checkpointing=rng.random() < 0.5,
        update_at=rng.choice(["step", "gradient"]),
        memory=PlanMemory(slots=rng.choice([2, 3, 1000]), buffers=8, kept=rng.choice([0, 4])),
    )
    short = simulate(plan, where, model, WHOLE, checked=False)
    # a traced run is simulated in full
    whole = simulate(plan, where, model, WHOLE, checked=False, traced=True)
    # every micro-batch repeats with these seeds
    assert short.tasks < whole.tasks / 2 or seed not in (4, 7, 9, 10)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert short.bytes == pytest.approx(whole.bytes, rel=1e-6)
    assert short.busy == pytest.approx(whole.busy, rel=1e-5, abs=1e-9)
    for key, (seconds, work) in whole.stages.items():
        assert short.stages[key] == pytest.approx(
            (seconds, work), rel=1e-5, abs=1e-6 * whole.seconds
        )
    assert short.peaks == pytest.approx(whole.peaks)


class Alone(Fabric):
    """Costs of one of several workers simulated separately; the server's work is spread over all of
    them."""

    def __init__(self, whole: Fabric, cluster: Cluster, site: Site, workers: int) -> None:
        own, ranks = whole.group, whole.group.ranks
        group = replace(own, site=site, hosts=1, replicas=ranks, beside=ranks, tp=1, rates=(1.0,))
        super().__init__(cluster, whole.plan, group, whole.constants)
        self.workers = workers

    def answer(self, params: float, kept: bool = False) -> Cost:
        cost = super().answer(params, kept)
        memory = self.server.memory if self.server is not None else None
        return cost._replace(
            uses=[(r, w / self.workers if r is memory else w) for r, w in cost.uses]
        )

    def push(self, params: float) -> Cost:
        cost = super().push(params)
        assert self.server is not None
        return cost._replace(uses=[*cost.uses, (self.server.sums, 1.0)])

    def read(self, params: float) -> Cost:
        return self.part(super().read(params))

    def update(self, params: float) -> Cost:
        return self.part(super().update(params))

    def write(self, params: float) -> Cost:
        return self.part(super().write(params))

    def public(self, params: float) -> Cost:
        return self.part(super().public(params))

    def part(self, cost: Cost) -> Cost:
        return cost._replace(work=cost.work / self.workers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_folded_equals_unfolded(seed: int) -> None:
    """Identical workers are simulated as one with a multiplicity: the step time and the server's
    bytes equal those of a simulation of each worker."""
    rng = Random(seed)
    n, model = rng.randint(2, 16), gpt(4, 512, 8, vocab=8000, seq_len=256)
    ssds = [
        {
            "count": 1,
            "read": f"{rng.choice([1, 3])}GB/s",
            "write": "1GB/s",
            "mixed": rng.choice([1, 2]),
            "capacity": "1TB",
        }
    ]
    drive = make_cluster(
        {"hosts": [{"name": "x", "memory": "1GB", "ssds": ssds, "uplink": "9GB/s"}]}
    ).hosts[0]
    where = cluster(
        n,
        1,
        memory_rate=f"{rng.choice([5, 2000])}GB/s",
        updates=f"{rng.choice([2, 1000])}GB/s",
        nics=[{"kind": "roce", "rate": f"{rng.choice([0.5, 10])}GB/s", "latency": "10us"}],
    )
    spare = where.hosts[1].model_copy(update={"ssds": drive.ssds if rng.random() < 0.5 else ()})
    where = where.model_copy(update={"hosts": (where.hosts[0], spare)})
    plan = Plan(
        placement("server"),
        Parallelism(dp=n),
        1,
        rng.choice([1, 3]),
        memory=PlanMemory(slots=rng.choice([2, 3, 1000]), buffers=4),
        update_at=rng.choice(["step", "gradient"]),
        staleness=rng.choice([0, 0, 1]),
    )
    folded = simulate(plan, where, model, WHOLE, checked=False, traced=True)
    engine, scene = Engine(), Scene(plan, where, model, WHOLE)
    scene.build(engine)
    (stage,) = scene.stages
    reducers = [
        Site(engine, where.hosts[0], where.hosts[0].nics[0], WHOLE, "stage 0") for _ in range(n)
    ]
    scene.stages = [
        SimulatedStage(
            engine,
            Alone(stage.fabric, where, site, n),
            [stage.blocks],
            0,
            stage.send,
        )
        for site in reducers
    ]
    counts = _Steps(scene).steady(plan.num_microbatches)
    assert counts["seconds"] == pytest.approx(folded.seconds, rel=1e-6)
    for resource in engine.resources:
        if resource.name.startswith("server") and counts[resource]:
            assert counts[resource] == pytest.approx(folded.bytes[resource.name], rel=1e-6), (
                resource.name
            )
