"""`roadtrain bench measured`: public training runs beside the simulator, a closed form and one constant efficiency.

Runs of vTrain (MICRO 2024; Megatron-DeepSpeed on A100) and of MosaicML's LLM Foundry (FSDP on A100 and H100), with
their sources in measured.json. The simulator has at most six constants a family, in spec/constants.toml; the closed
form five, by least squares; the other baseline one efficiency: all fitted to the same rows. Two families are also
checked with each model size left out of the fit (`held out`).

    python -m roadtrain.bench.measured --fit FAMILY      # what constants.toml should say
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from json import loads
from statistics import median
from typing import Any

import numpy as np

from roadtrain.bench.report import Report, Row
from roadtrain.sim.compute import Constants, constants
from roadtrain.sim.run import simulate
from roadtrain.spec.cluster import Cluster, make_cluster
from roadtrain.spec.layout import Layout
from roadtrain.spec.placement import Plan, placement
from roadtrain.spec.shapes import ModelShape, Transformer, gpt

FAMILIES = {"vtrain-multi": "vtrain", "vtrain-single": "vtrain-single", "foundry-a100": "foundry-a100",
            "foundry-h100": "foundry-h100"}
MPT = {"70b": (80, 8192, 64), "30b": (48, 7168, 56), "13b": (40, 5120, 40), "7b": (32, 4096, 32), "3b": (32, 2560, 20),
       "1b": (24, 2048, 16), "760m": (24, 1536, 12), "350m": (24, 1024, 16), "125m": (12, 768, 12)}
HELD_OUT = ("vtrain-single", "foundry-h100")
FITTED = ("efficiency", "half", "attention", "launch", "network", "fixed")
START: dict[str, Any] = {"efficiency": 0.65, "half": 1e10, "attention": 0.7, "launch": 5e-4, "network": 0.7,
                         "fixed": 0.05}


@dataclass(frozen=True)
class Run:
    """`seconds`: measured, of a step."""

    id: str
    family: str
    size: str
    cluster: Cluster
    model: ModelShape
    plan: Plan
    seconds: float


@cache
def runs() -> tuple[Run, ...]:
    found = loads(files("roadtrain.bench").joinpath("measured.json").read_text())
    return tuple(run for run in map(_run, found) if run is not None)


def _cluster(hosts: int, devices: int, device: str, inside: str, network: str) -> Cluster:
    nics = [{"kind": "infiniband", "rate": network}] if hosts > 1 else []
    host = {"name": "host", "count": hosts, "devices": devices, "device": device, "fabric": inside, "memory": "1TB",
            "memory_rate": "200GB/s", "nics": nics}
    return make_cluster({"name": device, "hosts": [host]})


def _run(row: dict[str, Any]) -> Run | None:
    """None for a run that the simulator has no layout for (tensor ranks over several hosts)."""
    how, batch, n = row["parallelism"], row["batch"], row["n_gpus"]
    hosts, devices = max(1, n // 8), min(8, n)
    if row["group"].startswith("vtrain"):
        h, layers, heads, s = (int(re.search(rf"\b{k}=(\d+)", row["model"])[1]) for k in ("h", "L", "heads", "s"))  # type: ignore[index]
        if how["tp"] > 8:
            return None
        layout = Layout(how["dp"], how["tp"], how["pp"])
        micros = batch["global_batch"] // how["dp"] // batch["micro_batch"]
        plan = Plan(placement("ddp"), layout, batch["micro_batch"], micros, recompute=True, overlap=False)
        cluster = _cluster(hosts, devices, "A100-80GB", "230GB/s", "800Gbit/s")
        return Run(row["id"], row["group"], f"{h}x{layers}", cluster, gpt(layers, h, heads, seq_len=s), plan,
                   row["value"] / 1e3)
    size, length = re.search(r"MPT-(\w+) .*seq (\d+)", row["model"]).groups()  # type: ignore[union-attr]
    h100 = row["hardware"].startswith("h100")
    device = "H100-80GB" if h100 else "A100-80GB" if "80gb" in row["hardware"] else "A100-40GB"
    cluster = _cluster(hosts, devices, device, "400GB/s" if h100 else "230GB/s", "3200Gbit/s" if h100 else "1600Gbit/s")
    shape = Transformer(*MPT[size], 50368, int(length), fused=True, biases=False).shape(f"MPT-{size}")
    plan = Plan(placement("zero3"), Layout(dp=n), batch["micro_batch"], batch["grad_accum"],
                recompute=how["activation_ckpt"], slots=2)
    return Run(row["id"], "foundry-h100" if h100 else "foundry-a100", size, cluster, shape, plan,
               batch["global_batch"] * int(length) / row["value"])


def predicted(run: Run, of: Constants) -> float:
    return simulate(run.plan, run.cluster, run.model, of, checked=False).seconds


# baselines


def terms(run: Run) -> list[float]:
    """Of the closed form: computing with the pipeline's bubble, tensor-parallel bytes, data-parallel bytes over the
    network, blocks a step, one."""
    plan, layout = run.plan, run.plan.layout
    flops = run.model.step_flops(plan.recompute) * plan.samples / layout.devices
    bubble = 1 + (layout.pp - 1) / plan.micros
    passes = 3 if plan.recompute else 2
    tensor = sum(b.input for b in run.model.blocks[1:-1]) * plan.micro_batch * plan.micros / layout.pp * passes * (
        2 * 2 * (layout.tp - 1) / layout.tp) / run.cluster.hosts[0].fabric
    share = run.model.params / layout.tp / layout.pp * 2
    rate = run.cluster.hosts[0].nics[0].total if run.cluster.hosts[0].nics else run.cluster.hosts[0].fabric
    data = share * (layout.dp - 1) / layout.dp * (3 * plan.micros if plan.placement.streamed else 2) / rate
    assert run.cluster.hosts[0].device is not None
    return [flops / run.cluster.hosts[0].device.flops * bubble, tensor, data, run.model.layers / layout.pp * plan.micros
            * 1e-3, 1.0]


def closed_form(fit: Sequence[Run]) -> Callable[[Run], float]:
    """Least squares of the relative error, no constant below 0 (by dropping what would be)."""
    a = np.array([[t / run.seconds for t in terms(run)] for run in fit])
    use = list(range(a.shape[1]))
    while True:
        found = np.linalg.lstsq(a[:, use], np.ones(len(fit)), rcond=None)[0]
        if (found >= 0).all():
            break
        use.pop(int(found.argmin()))
    return lambda run: float(sum(terms(run)[i] * x for i, x in zip(use, found)))


def constant_efficiency(fit: Sequence[Run]) -> Callable[[Run], float]:
    ratio = median(run.seconds / terms(run)[0] for run in fit)
    return lambda run: terms(run)[0] * ratio


# fits


def fitted(fit: Sequence[Run], start: Constants, rounds: int = 100) -> Constants:
    """Nelder and Mead over the logarithms of FITTED, for the least mean absolute error of the logarithm."""

    def of(x: Sequence[float]) -> Constants:
        values = {name: math.exp(value) for name, value in zip(FITTED, x)}
        least: dict[str, Any] = {name: min(1.0, v) if name in ("efficiency", "network", "attention") else v
                                 for name, v in values.items()}
        return replace(start, **least)

    def error(x: Sequence[float]) -> float:
        found = of(x)
        return sum(abs(math.log(predicted(run, found) / run.seconds)) for run in fit) / len(fit)

    first = [math.log(getattr(start, name)) for name in FITTED]
    points = [first, *([v + 0.5 * (i == j) for j, v in enumerate(first)] for i in range(len(first)))]
    simplex = sorted((error(x), x) for x in points)
    for _ in range(rounds):
        middle = [sum(x[j] for _, x in simplex[:-1]) / len(first) for j in range(len(first))]
        worst = simplex[-1]

        def toward(by: float, middle: list[float] = middle, worst: list[float] = worst[1]) -> tuple[float, list[float]]:
            x = [m + by * (m - w) for m, w in zip(middle, worst)]
            return error(x), x

        best = toward(1.0)
        if best[0] < simplex[0][0]:
            best = min(best, toward(2.0))
        elif best[0] >= simplex[-2][0]:
            best = min(best, toward(-0.5))
        if best[0] < worst[0]:
            simplex[-1] = best
        else:
            lowest = simplex[0][1]
            simplex = [simplex[0], *((error(x), x) for x in (
                [(a + b) / 2 for a, b in zip(x, lowest)] for _, x in simplex[1:]))]
        simplex.sort()
    return of(simplex[0][1])


def errors(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of (predicted, measured): mean and median absolute error, the 90th percentile, the signed mean."""
    signed = [p / m - 1 for p, m in found]
    absolute = sorted(map(abs, signed))
    return {"MAPE": sum(absolute) / len(absolute), "median": median(absolute),
            "P90": absolute[math.ceil(0.9 * len(absolute)) - 1], "bias": sum(signed) / len(signed)}


def held_out(own: Sequence[Run], start: Constants) -> list[tuple[float, float]]:
    out = []
    for size in dict.fromkeys(run.size for run in own):
        of = fitted([run for run in own if run.size != size], start, rounds=25)
        out += [(predicted(run, of), run.seconds) for run in own if run.size == size]
    return out


def run(quick: bool = False) -> Report:
    rows: list[Row] = []
    for family, name in FAMILIES.items():
        own = [one for one in runs() if one.family == family]
        own = own[:4] if quick else own
        of = constants(name)
        kinds = {"simulator": [(predicted(one, of), one.seconds) for one in own]}
        for what, make in (("closed form, 5 constants", closed_form), ("constant efficiency", constant_efficiency)):
            form = make(own)
            kinds[what] = [(form(one), one.seconds) for one in own]
        mine, peer = errors(kinds["simulator"]), errors(kinds["closed form, 5 constants"])
        flat = errors(kinds["constant efficiency"])
        for figure in ("MAPE", "median", "P90", "bias"):
            goal = {"MAPE": ("0.08", 0.08), "median": ("0.05", 0.05)}.get(figure)
            rows.append(Row(f"{family}, {len(own)} runs", figure, "", mine[figure], peer[figure],
                            "closed form, 5 constants", None, None, goal and goal[0], goal and mine[figure] <= goal[1]))
        rows.append(Row(f"{family}, {len(own)} runs", "MAPE", "", mine["MAPE"], flat["MAPE"], "constant efficiency",
                        None, None, None, None))
        if family in HELD_OUT and not quick:
            found = errors(held_out(own, of))
            rows += [Row(f"{family}, each model size left out of the fit", figure, "", found[figure],
                         *[None] * 6) for figure in ("MAPE", "median", "P90", "bias")]
    return Report("measured", rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit")
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    own = [one for one in runs() if one.family == args.fit]
    best = fitted(own, Constants(**START), args.rounds)
    print({name: getattr(best, name) for name in FITTED})
    for one in own:
        print(one.id, f"{one.seconds:.3f} {predicted(one, best) / one.seconds - 1:+.1%}")
    print(errors([(predicted(one, best), one.seconds) for one in own]))


if __name__ == "__main__":
    main()
