"""The simulated fan-in: traffic of links, bounds of a step, and the use of the real end's state
machine (Rule 7)."""

from __future__ import annotations

import socket
from math import ceil
from typing import Any

import pytest

from benchmarks.common.report import cores
from benchmarks.fanin.predicted import ModelSizes, predict
from benchmarks.fanin.processors import PacketSeconds
from roadtrain.config.cluster import Cluster
from roadtrain.config.plan_file import Plan, SwitchPackets, placement
from roadtrain.config.switch_tree import switch_tree
from roadtrain.errors import ConfigError, LoopError
from roadtrain.simulator import site
from roadtrain.simulator.compute import Constants, HostTimes
from roadtrain.simulator.engine import Engine
from roadtrain.simulator.run import Result, simulate
from roadtrain.simulator.scene import Scene
from roadtrain.stages.parallelism import Parallelism
from roadtrain.switch import fixed_point, packets
from roadtrain.switch.datagrams import MOST_NBYTES
from roadtrain.switch.protocol.fan_in import ALONE_S, FanInStateMachine, Grant
from tests.support.plans import WHOLE, lump, racks, traffic

RATE = 1e9  # bytes/s of every link
N = 64 << 20  # parameters, in 8 blocks of one chunk
FRAME = packets.PACKET_NBYTES + 28 + 14


def run(where: Cluster, *, flops: float = 0.0, apart: bool = False, **plan: Any) -> Result:
    dp = sum(host.count for host in where.workers)
    node_plan = Plan(placement("optimizer-node"), Parallelism(dp=dp)).changed(
        **{"slots": 8, "update_at": "gradient", **plan}
    )
    return simulate(node_plan, where, lump(N, flops), WHOLE, checked=False, apart=apart)


@pytest.mark.parametrize(("workers", "of_racks"), [(1, 1), (4, 1), (8, 1), (8, 2)])
@pytest.mark.slow
def test_packets_of_all_hosts_share_the_cores_of_a_lab(workers: int, of_racks: int) -> None:
    """Senders and receivers handle their packets on the cores that also compute the models."""
    sizes = ModelSizes(layers=10, layer=1 << 20, forward_s=0.02, backward_s=0.06)
    costs = PacketSeconds(worker=20e-6, switch=7e-6, server=11e-6)
    updates = 6e9
    found = predict(workers, of_racks, sizes=sizes, updates=updates, costs=costs)
    alone = predict(workers, of_racks, sizes=sizes, updates=updates)
    up, down = (found.bytes["w0", way] / FRAME for way in ("sent", "received"))
    summed = workers + 1 if of_racks == 1 else workers + 2 * of_racks + 1
    busy = (up + down) * (workers * costs.worker + costs.server) + up * summed * costs.switch
    busy += workers * sizes.layers * (sizes.forward_s + sizes.backward_s)
    busy += 28 * sizes.elements / updates
    assert found.result.busy["processors"] * found.seconds * cores() == pytest.approx(
        busy, rel=0.02
    )
    least = max(busy / cores(), alone.seconds)
    assert least * 0.99 <= found.seconds <= least * 1.1


def test_a_host_with_its_own_cores_has_its_own_packet_rate() -> None:
    """Packets of the workers do not slow those of the server, nor vice versa."""
    where, rate = racks(4), 2e5
    count = N * (4 + 2) / packets.PAYLOAD_NBYTES
    for number, name in enumerate(("stage 0 packets", "server packets")):
        hosts = list(where.hosts)
        hosts[number] = hosts[number].model_copy(update={"packet_rate": rate})
        result = run(where.model_copy(update={"hosts": tuple(hosts)}))
        assert count / rate <= result.seconds <= 1.1 * count / rate
        assert result.busy[name] > 0.9


def frames(nbytes: float) -> float:
    """Bytes of whole frames that carry `nbytes` of data."""
    return ceil(nbytes / packets.PAYLOAD_NBYTES) * FRAME


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize(("wire", "width"), [("int32", 4), ("int16", 2), ("int8", 1)])
@pytest.mark.slow
def test_every_link_carries_each_byte_once(workers: int, wire: str, width: int) -> None:
    """Not W times: 16-bit parameters and maximal exponents down, integers and exponents up."""
    chunk = N // 8
    exponents = 8 * frames(ceil(chunk / packets.BLOCK))
    up, down = 8 * frames(width * chunk) + exponents, 8 * frames(2 * chunk) + exponents
    result = run(racks(workers), wire=wire)
    beats = 3e-3  # share of heartbeats, which come on top
    for link, nbytes in (
        (traffic(result, "out"), up),
        (result.bytes["server in"], up),
        (traffic(result, "in"), down),
        (result.bytes["server out"], down),
    ):
        assert nbytes <= link <= nbytes * (1 + beats)
    assert result.seconds == pytest.approx(max(up, down) / RATE, rel=0.15)


@pytest.mark.parametrize("apart", [False, True])
def test_every_link_of_a_tree_carries_each_byte_once(apart: bool) -> None:
    """With racks of different sizes and no bottleneck the step equals that of a single switch."""
    result, single = (run(racks(*sizes), apart=apart) for sizes in ((2, 4), (6,)))
    for rack in ("rack0", "rack1"):
        up, down = result.bytes[f"{rack} to root link"], result.bytes[f"root to {rack} link"]
        assert up == pytest.approx(result.bytes["server in"], rel=1e-6)
        assert down == pytest.approx(result.bytes["server out"], rel=1e-6)
    assert result.bytes["server in"] == pytest.approx(single.bytes["server in"])
    assert result.seconds == pytest.approx(single.seconds, rel=0.01)


def test_a_slow_link_of_the_tree_bounds_the_step() -> None:
    slow, fast = (run(racks(2, 2, link=rate)) for rate in (RATE / 4, RATE))
    assert slow.seconds > 3.5 * fast.seconds
    assert slow.busy["rack0 to root link"] > 0.9


def test_a_switch_beside_the_network_sends_to_each_child() -> None:
    """Unless the network copies packets: then the switch's card carries only sums."""
    alone, copied = (
        run(racks(4, rate="100GB/s", multicasts=by_network)) for by_network in (False, True)
    )
    up, down = alone.bytes["server in"], alone.bytes["server out"]
    assert alone.bytes["root in"] == pytest.approx(4 * up + down, rel=0.01)
    assert alone.bytes["root out"] == pytest.approx(up + 4 * down, rel=0.01)
    assert copied.bytes["root in"] == pytest.approx(4 * up, rel=0.01)
    assert copied.bytes["root out"] == pytest.approx(up, rel=0.01)


def test_the_packet_rate_of_a_switch_bounds_a_step() -> None:
    """With 4 children the switch handles 5 packets per sum and 5 per copied packet."""
    count = N * (4 + 2) / packets.PAYLOAD_NBYTES * 5
    rate = 5e5
    result = run(racks(4, packet_rate=rate))
    assert count / rate <= result.seconds <= 1.1 * count / rate
    assert result.busy["root packets"] > 0.9


def test_a_window_bounds_the_packets_in_transit() -> None:
    """A window travels to the receiver and its heartbeat back."""
    where = racks(2)
    hosts = tuple(
        host.model_copy(
            update={"nics": tuple(n.model_copy(update={"latency": 0.01}) for n in host.nics)}
        )
        for host in where.hosts
    )
    far = where.model_copy(update={"hosts": hosts})
    result = run(far, window=512)
    at_best = 512 * FRAME / (2 * 0.01)
    assert result.seconds >= 4 * N * FRAME / packets.PAYLOAD_NBYTES / at_best
    assert run(far, window=65536).seconds < result.seconds / 4


def test_a_late_step_hides_traffic() -> None:
    """With staleness 1 gradients are sent during the next step."""
    exact, late = (run(racks(4), flops=4e12, staleness=late) for late in (0, 1))
    assert late.seconds < 0.8 * exact.seconds
    assert late.bytes["server in"] == pytest.approx(exact.bytes["server in"])


@pytest.mark.parametrize("update_at", ["gradient", "step"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.slow
def test_separate_workers_take_as_long_as_the_shared_worker(
    update_at: str, staleness: int, num_microbatches: int
) -> None:
    how = {"update_at": update_at, "staleness": staleness, "num_microbatches": num_microbatches}
    shared, each = (run(racks(3), flops=1e12, apart=apart, **how) for apart in (False, True))
    assert each.seconds == pytest.approx(shared.seconds, rel=0.03)
    assert each.bytes["server in"] == pytest.approx(shared.bytes["server in"], rel=1e-3)


def test_the_slowest_worker_is_waited_for() -> None:
    """One of three workers computes ten times as long: its parameters still arrive in the same
    broadcasts, so the node's traffic does not grow."""
    where = racks(2, 1)
    quick, slow = (HostTimes({("layer", 1): s}) for s in (0.001, 0.01))
    of = Constants(network=1.0, hosts={"workers 0": quick, "workers 1": slow})
    plan = Plan(placement("optimizer-node"), Parallelism(dp=3)).changed(slots=8)
    result = simulate(plan, where, lump(N, 1e9), of, checked=False, apart=True)
    same = simulate(plan, where, lump(N, 1e9), of, checked=False, apart=False)
    assert result.bytes["server out"] == pytest.approx(same.bytes["server out"], rel=1e-3)
    assert result.seconds >= 8 * 0.01 * 3


def test_a_pull_of_a_single_worker_is_answered_alone() -> None:
    """Replicas with 3 and 2 micro-batches stream their blocks: only one worker makes the third pull
    of a block, which is answered over TCP after a wait (Rule 5)."""
    where = racks(3, 2)
    plan = Plan(
        placement("optimizer-node"), Parallelism(dp=2, pp=1, widths=(2,)), num_microbatches=5
    ).changed(slots=2)
    result = simulate(plan, where, lump(N, 1e9), WHOLE, checked=False)
    assert result.seconds > ALONE_S


def test_the_real_state_machine_drives_the_simulated_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it grants nothing, nothing is summed."""
    handle = FanInStateMachine.handle

    def silent(self: FanInStateMachine, event: Any) -> list[Any]:
        return [action for action in handle(self, event) if not isinstance(action, Grant)]

    monkeypatch.setattr(FanInStateMachine, "handle", silent)
    with pytest.raises(LoopError, match="is deadlocked"):
        run(racks(2))


def test_packet_counts_equal_those_of_the_runtime() -> None:
    """# Rule 7"""
    plan = SwitchPackets()
    assert plan.payload == packets.PAYLOAD_NBYTES and plan.block == packets.BLOCK
    assert plan.overhead == packets.HEADER_NBYTES + 8 + 20 + 14
    assert MOST_NBYTES[socket.AF_INET] // packets.PACKET_NBYTES == site.BATCH


@pytest.mark.parametrize("elements", [1, 351, 352, 353, 1408 * 352, 1408 * 352 + 1, 1 << 20])
@pytest.mark.parametrize(("wire", "width"), [("int32", 4), ("int16", 2), ("int8", 1)])
def test_as_many_packets_as_in_the_real_run(elements: int, wire: str, width: int) -> None:
    """# Rule 7"""
    where = racks(2)
    plan = Plan(placement("optimizer-node"), Parallelism(dp=2)).changed(wire=wire)
    scene = Scene(plan, where, lump(8), WHOLE)
    scene.build(Engine())
    costs = scene.stages[0].fabric.fan_in
    assert costs is not None
    assert costs.gradient_packets(elements) == fixed_point.packets_of(elements, width)
    assert costs.exponent_packets(elements) == fixed_point.exponent_packets_of(elements)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (racks(2, sums=False), "no switch of cluster 'cluster' sums"),
        (racks(2, slots=100), "needs 2048 slots, but switch root has 100"),
        (racks(65), "switch root has 65 children, but may have 64"),
    ],
)
def test_missing_properties_of_switches_are_reported(where: Cluster, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(where)


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match="sums whole gradients"):
        run(racks(2), keep=0.01)


def test_a_host_outside_the_tree_is_named() -> None:
    where = racks(2, 2)
    apart = where.model_copy(update={"links": where.links[:1]})
    with pytest.raises(ConfigError, match="are not connected to root by switches that sum"):
        run(apart)
    mute = tuple(s.model_copy(update={"sums": s.name != "rack1"}) for s in where.switches)
    with pytest.raises(ConfigError, match="host workers 1 is connected to no switch that sums"):
        run(where.model_copy(update={"switches": mute}))


def test_without_a_server_the_root_is_the_switch_nearest_to_all() -> None:
    where = racks(2, 2, 2)
    tree = switch_tree(where, where.workers)
    assert tree.root == "root" and tree.parents == {f"rack{i}": "root" for i in range(3)}
    assert switch_tree(where, where.workers[:1]).root == "rack0"
    assert tree.children("root") == 3 and tree.levels == 2


@pytest.mark.parametrize(("workers", "of_racks"), [(4, 1), (8, 1), (8, 2)])
@pytest.mark.slow
def test_the_lab_is_predicted(workers: int, of_racks: int) -> None:
    """Every link carries S in each direction, the only bound of a step without computing."""
    sizes = ModelSizes(layers=10, layer=1 << 20)
    found = predict(workers, of_racks, 50e6, sizes=sizes)
    nbytes = 4 * sizes.elements
    assert found.seconds <= 1.2 * nbytes / 50e6
    assert len(found.bytes) == 4 + 2 * (of_racks if of_racks > 1 else 0)
    for carried in found.bytes.values():
        assert carried * packets.PAYLOAD_NBYTES / FRAME == pytest.approx(nbytes, rel=0.01)
