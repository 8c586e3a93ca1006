"""Items `lab` and `tree` of `fanin`: measure the bytes on the links and the seconds of a step, with
one switch and with a tree of switches. Fan-in is compared with the same server without switches,
and with torch's all-reduce.

S is the bytes of the parameters in fp32, equal to the bytes of the gradients as int32. B is the
rate of a link in each direction, of which the fan-in's datagrams carry 0.940.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import Row
from benchmarks.fanin.lab import CARRIED, MBIT, RATE, Lab, Measured, Scene
from benchmarks.fanin.worker import WorkerSpec
from roadtrain.lab import CARRIED as TCP_CARRIED

WIRE = "int32"
SLOW = 100 * MBIT
TRANSFER, STEP, NEAR = 0.9, 1.2, 0.03
STEPS, PEER_STEPS, QUICK_STEPS = 6, 4, 4
QUICK: dict[str, Any] = {"layers": 3, "width": 256, "inner": 512}
TCP, DDP = "the same servers over TCP", "torch DDP over gloo"


@dataclass(frozen=True)
class Case:
    """Measurement with everything that is needed to simulate it."""

    name: str
    scene: Scene
    spec: WorkerSpec
    wire: str | None
    measured: Measured


@dataclass
class Bench:
    """Measures cases, and keeps the measurements in the order in which they ran."""

    home: Path
    quick: bool = False
    cases: list[Case] = field(default_factory=list)

    def spec(
        self, method: str = "ours", steps: int = STEPS, *, computes: bool = True
    ) -> WorkerSpec:
        made = WorkerSpec(method, steps, computes=computes)
        return replace(made, steps=QUICK_STEPS, **QUICK) if self.quick else made

    def sized(self, **size: Any) -> WorkerSpec:
        """Return the spec of a worker whose decoder has the given sizes, or small sizes in a quick
        benchmark.
        """
        return self.spec() if self.quick else replace(self.spec(), **size)

    def measure(self, name: str, lab: Lab, spec: WorkerSpec, wire: str | None = None) -> Measured:
        measured = lab.train(spec, wire)
        self.cases.append(Case(name, lab.scene, spec, wire, measured))
        print(
            f"{name}: {measured.seconds:.2f} s a step, processors {measured.busy:.0%} busy",
            flush=True,
        )
        return measured


def one_switch(bench: Bench) -> Iterator[Row]:
    """Run item `lab`: all workers below one switch."""
    for workers in (4, 8):
        scene = Scene(workers)
        with Lab(scene, bench.home / f"{workers}") as lab:
            yield from _below(bench, lab, f"{workers} workers")
    with Lab(Scene(8, SLOW), bench.home / "slow") as lab:
        yield from slower(bench, lab, "8 workers")


def slower(bench: Bench, lab: Lab, name: str) -> Iterator[Row]:
    """Measure steps of the decoder on links so slow that they limit a step."""
    ours = bench.measure(f"{name}, decoder, slower links", lab, bench.spec(steps=PEER_STEPS), WIRE)
    case = f"{name}, one switch, {_sizes(bench.spec(), SLOW)}, staleness 1"
    yield from step_rows(case, ours, {}, bench.spec(), lab.scene)


def _below(bench: Bench, lab: Lab, name: str) -> Iterator[Row]:
    case = f"{name}, one switch, {_sizes(bench.spec())}"
    moved = bench.measure(f"{name}, transfer", lab, bench.spec(computes=False), WIRE)
    yield from transfer_rows(
        f"{case}, transfer alone", moved, bench.spec(computes=False), lab.scene
    )
    ours = bench.measure(f"{name}, decoder", lab, bench.spec(), WIRE)
    tcp = bench.measure(f"{name}, decoder, {TCP}", lab, bench.spec(steps=PEER_STEPS))
    ddp = bench.measure(f"{name}, decoder, {DDP}", lab, bench.spec("ddp", PEER_STEPS))
    case = f"{case}, {bench.spec().tokens} tokens a worker, staleness 1"
    yield from step_rows(case, ours, {TCP: tcp, DDP: ddp}, bench.spec(), lab.scene)
    yield from link_rows(case, ours, bench.spec())
    carried = tcp.frames["node"].received * TCP_CARRIED / bench.spec().nbytes
    yield row(case, f"received by the node a step, {TCP}", "S", carried)


def tree(bench: Bench) -> Iterator[Row]:
    """Run item `tree`: workers in two racks, below a tree of switches."""
    with Lab(Scene(8, racks=2), bench.home / "tree") as lab:
        name = "8 workers, tree of two racks"
        case = f"{name}, {_sizes(bench.spec())}"
        moved = bench.measure(f"{name}, transfer", lab, bench.spec(computes=False), WIRE)
        spec = bench.spec(computes=False)
        yield from transfer_rows(f"{case}, transfer alone", moved, spec, lab.scene)
        ours = bench.measure(f"{name}, decoder", lab, bench.spec(), WIRE)
        yield from step_rows(case, ours, {}, bench.spec(), lab.scene)
        yield from link_rows(case, ours, bench.spec())


def _sizes(spec: WorkerSpec, rate: float = RATE) -> str:
    return (
        f"{rate * 8 / 1e6:.0f} Mbit/s each way, {spec.elements / 1e6:.1f} M parameters,"
        f" S = {spec.nbytes / 1e6:.0f} MB (fp32, {WIRE})"
    )


def transfer_rows(case: str, run: Measured, spec: WorkerSpec, scene: Scene) -> Iterator[Row]:
    """Compare the rate at which a step transfers gradients and parameters with the rate of the
    links.
    """
    goodput = spec.nbytes / run.seconds
    share = goodput / (scene.rate * CARRIED)
    met = share >= TRANSFER
    what = "share of what datagrams can carry, in each direction at every link"
    yield row(case, what, "", share, f">= {TRANSFER}", met)
    yield row(case, "S / seconds, each way", "MB/s", goodput / 1e6)
    yield row(case, "processors busy, share of all", "", run.busy)


def step_rows(
    case: str, run: Measured, peers: Mapping[str, Measured], spec: WorkerSpec, scene: Scene
) -> Iterator[Row]:
    unit = spec.nbytes / scene.rate
    steps = run.seconds / unit
    goal, met = f"<= {STEP}", steps <= STEP
    floor = unit / CARRIED / run.seconds
    yield Row(case, "step", "S/B", steps, None, None, None, floor, goal, met)
    for name, peer in peers.items():
        ratio = peer.seconds / run.seconds
        yield Row(case, "step", "s", run.seconds, peer.seconds, name, ratio, None, None, None)
    yield row(case, "processors busy, share of all", "", run.busy)
    for role, seconds in run.cpu.items():
        whose = "all workers" if role == "worker" else role
        yield row(case, f"processor time of {whose}, a step", "s", seconds)


def link_rows(case: str, run: Measured, spec: WorkerSpec) -> Iterator[Row]:
    """Compare the bytes of each link in a step, in each direction, with the bytes of the
    parameters.
    """
    shares = {
        (name, way): getattr(traffic, way) * CARRIED / spec.nbytes
        for name, traffic in run.frames.items()
        for way in ("sent", "received")
    }
    links = [name for name in run.frames if not name.startswith("w")]
    for name in links:
        for way in ("sent", "received"):
            what = f"{way} by {name}" if name == "node" else f"{way} by a rack: {name}"
            yield _near(case, f"{what}, a step", shares[name, way])
    own = {key: share for key, share in shares.items() if key[0] not in links}
    key = max(own, key=lambda key: abs(own[key] - 1))
    yield _near(case, f"of all workers farthest from S: {key[1]} by {key[0]}, a step", own[key])


def _near(case: str, metric: str, share: float) -> Row:
    return row(case, metric, "S", share, f"within {NEAR:.0%} of S", abs(share - 1) <= NEAR)


def row(
    case: str, metric: str, unit: str, ours: float, goal: str | None = None, met: bool | None = None
) -> Row:
    return Row(case, metric, unit, ours, None, None, None, None, goal, met)
