"""Items `lab` and `tree` of `fanin`: measure the bytes on the links and the seconds of a step, with
one switch and with a tree of switches. Fan-in is compared with the same server without switches,
and with torch's all-reduce.

S is the bytes of the parameters in fp32, equal to the bytes of the gradients as int32. B is the
rate of a link in each direction, of which the fan-in's datagrams carry 0.940.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.lab import CARRIED, MBIT, RATE, Lab, Measured, Scene
from benchmarks.common.lab_worker import WorkerSpec
from benchmarks.common.report import Row, at_least, at_most
from benchmarks.common.rows import row
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
    """Run item `lab`: all workers below one switch, also on links so slow that they limit a step of
    the decoder.
    """
    for workers in (4, 8):
        with Lab(Scene(workers), bench.home / f"{workers}") as lab:
            name = f"{workers} workers"
            case = f"{name}, one switch, {_sizes(bench.spec())}"
            yield from _transfer_and_decoder(bench, lab, name, case, (TCP, DDP))
    with Lab(Scene(8, SLOW), bench.home / "slow") as lab:
        name, spec = "8 workers, decoder, slower links", bench.spec(steps=PEER_STEPS)
        ours = bench.measure(name, lab, spec, WIRE)
        case = f"8 workers, one switch, {_sizes(spec, SLOW)}, staleness 1"
        yield from step_rows(case, ours, {}, spec, lab.scene)


def tree(bench: Bench) -> Iterator[Row]:
    """Run item `tree`: workers in two racks, below a tree of switches."""
    with Lab(Scene(8, racks=2), bench.home / "tree") as lab:
        name = "8 workers, tree of two racks"
        case = f"{name}, {_sizes(bench.spec())}"
        yield from _transfer_and_decoder(bench, lab, name, case)


def _transfer_and_decoder(
    bench: Bench, lab: Lab, name: str, case: str, peers: Sequence[str] = ()
) -> Iterator[Row]:
    """Measure a model that computes nothing, and a decoder beside the peers."""
    spec = bench.spec(computes=False)
    moved = bench.measure(f"{name}, transfer", lab, spec, WIRE)
    yield from transfer_rows(f"{case}, transfer alone", moved, spec, lab.scene)
    spec = bench.spec()
    ours = bench.measure(f"{name}, decoder", lab, spec, WIRE)
    methods = {TCP: "ours", DDP: "ddp"}
    beside = {
        peer: bench.measure(f"{name}, decoder, {peer}", lab, bench.spec(methods[peer], PEER_STEPS))
        for peer in peers
    }
    case = f"{case}, {spec.tokens} tokens a worker, staleness 1"
    yield from step_rows(case, ours, beside, spec, lab.scene)
    yield from link_rows(case, ours, spec)
    if TCP in beside:
        carried = beside[TCP].frames["node"].received * TCP_CARRIED / spec.nbytes
        yield Row(case, f"received by the node a step, {TCP}", "S", carried)


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
    what = "share of what datagrams can carry, in each direction at every link"
    yield Row(case, what, "", share, **at_least(share, TRANSFER))
    yield Row(case, "S / seconds, each way", "MB/s", goodput / 1e6)
    yield Row(case, "processors busy, share of all", "", run.busy)


def step_rows(
    case: str, run: Measured, peers: Mapping[str, Measured], spec: WorkerSpec, scene: Scene
) -> Iterator[Row]:
    unit = spec.nbytes / scene.rate
    steps = run.seconds / unit
    floor = unit / CARRIED / run.seconds
    yield Row(case, "step", "S/B", steps, of_floor=floor, **at_most(steps, STEP))
    for name, peer in peers.items():
        yield row(case, "step", "s", run.seconds, (peer.seconds, name))
    yield Row(case, "processors busy, share of all", "", run.busy)
    for role, seconds in run.cpu.items():
        whose = "all workers" if role == "worker" else role
        yield Row(case, f"processor time of {whose}, a step", "s", seconds)


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
    goal, met = f"within {NEAR:.0%} of S", abs(share - 1) <= NEAR
    return Row(case, metric, "S", share, goal=goal, met=met)
