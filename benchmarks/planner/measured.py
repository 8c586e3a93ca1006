"""`roadtrain bench measured`: compare measured step times of public training runs with three
predictions: those of the simulator, of a closed form (a sum of five terms), and of a constant
efficiency.

The runs were published by vTrain (MICRO 2024; Megatron-DeepSpeed on A100), MosaicML's LLM Foundry
(FSDP on A100 and H100), torchtitan (FSDP2 on A100 and H100), SimuMax (Megatron-LM on B200),
Megatron-Bridge (GB200, GB300, H100), Sailor (GH200, mixed devices) and DeepSpeed (offload). Their
sources are in measured.json, their plans in measured_rows.py. The simulator has at most six
constants for each family of runs, the closed form has five, and the constant efficiency is a single
number. All constants are fitted to the same runs. In rows `held out`, runs of a model size are
predicted with constants that are fitted to the other sizes.

    python -m benchmarks.planner.measured --fit FAMILY      # print constants for fitted.toml
    python -m benchmarks.planner.measured --rows FILE       # your own, as in measured.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.report import Report, Row
from benchmarks.planner.measured_rows import Run, all_runs, device_peak, runs_of
from benchmarks.planner.paper_clusters import fitted as constants_table
from roadtrain.simulator.compute import Constants, constants
from roadtrain.simulator.run import simulate

FAMILIES = {  # family -> constants; those of another family were not fitted to it
    "vtrain-multi": "vtrain",
    "vtrain-single": "vtrain-single",
    "foundry-a100": "foundry-a100",
    "foundry-h100": "foundry-h100",
    "torchtitan-h100": "torchtitan-h100",
    "torchtitan-a100": "foundry-a100",
    "simumax-b200": "simumax-b200",
    "megatron-gb300": "megatron-gb300",
    "megatron-gb200": "megatron-gb200",
    "megatron-h100": "megatron-gb300",
    "megatron-b200": "megatron-gb200",
    "megatron-b300": "megatron-gb300",
    "sailor-gh200": "sailor-gh200",
    "sailor-hetero": "sailor-hetero",
    "deepspeed-offload": "deepspeed-offload",
}
MIXED = ("sailor-hetero", "deepspeed-offload")  # families with a goal of 10 %
HELD_OUT = ("vtrain-single", "foundry-h100", "simumax-b200", "torchtitan-h100")
FORM = 5
FITTED = ("efficiency", "half", "attention", "launch", "network", "fixed")
START: dict[str, Any] = {
    "efficiency": 0.65,
    "half": 1e10,
    "attention": 0.7,
    "launch": 5e-4,
    "network": 0.7,
    "fixed": 0.05,
    "traffic": 1.0,
}
# upper bounds; attention counts in full, though causal attention skips half
MOST = {"efficiency": 1.0, "network": 1.0, "attention": 2.0}


def runs() -> tuple[Run, ...]:
    """List those public runs whose reports have a step time."""
    return tuple(run for run in all_runs() if run.seconds)


def predicted(run: Run, of: Constants) -> float:
    return simulate(run.plan, run.cluster, run.model, of, checked=False).seconds


def by_plan(own: Sequence[Run]) -> list[list[Run]]:
    """Group repeated measurements: the runs with the same plan."""
    found: dict[Any, list[Run]] = {}
    for run in own:
        found.setdefault(
            (run.family, run.size, run.model.tokens, run.cluster.to_toml(), run.plan), []
        ).append(run)
    return list(found.values())


def pairs(own: Sequence[Run], of: Constants) -> list[tuple[float, float]]:
    """List the pairs (predicted seconds, measured seconds) of all runs, with the simulator's
    constants `of`.
    """
    return [
        (seconds, run.seconds)
        for same in by_plan(own)
        for seconds in (predicted(same[0], of),)
        for run in same
    ]


# baselines


def terms(run: Run) -> list[float]:
    """Compute the five terms of the closed form: the seconds to compute, the seconds to transfer
    tensor-parallel bytes, the seconds to transfer data-parallel bytes, a thousandth of the blocks
    that a device runs in a step, and 1.
    """
    plan, parallelism, host = run.plan, run.plan.parallelism, run.cluster.hosts[0]
    flops = run.model.step_flops(plan.activation_checkpointing) * plan.samples / parallelism.devices
    bubble = 1 + (parallelism.pp - 1) / plan.num_microbatches / parallelism.virtual_stages
    passes = 3 if plan.activation_checkpointing else 2
    tensor = (
        sum(b.input for b in run.model.blocks[1:-1])
        * plan.micro_batch
        * plan.num_microbatches
        / parallelism.pp
        * passes
        * (2 * 2 * (parallelism.tp - 1) / parallelism.tp)
        / parallelism.cp
        / host.fabric
    )
    share = run.model.params / parallelism.tp / parallelism.pp * 2
    rate = host.nics[0].total if host.nics else host.fabric
    data = (
        share
        * (parallelism.replicas - 1)
        / parallelism.replicas
        * (3 * plan.num_microbatches if plan.placement.streamed else 2)
        / rate
    )
    peak = min(
        host.device.peak(plan.framework.precision) for host in run.cluster.workers if host.device
    )
    return [
        flops / peak * bubble,
        tensor,
        data,
        run.model.layers / parallelism.pp * plan.num_microbatches * 1e-3,
        1.0,
    ]


def closed_form(fit: Sequence[Run]) -> Callable[[Run], float]:
    """Fit the closed form to the runs by least squares of the relative error, with constants that
    are not negative. Returns a function that predicts the seconds of a run.
    """
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


def fitted(
    fit: Sequence[Run], start: Constants, rounds: int = 100, names: Sequence[str] = FITTED
) -> Constants:
    """Fit the named constants to runs, beginning at the constants `start`. The search (Nelder and
    Mead) minimizes the mean absolute error of the logarithm of the step time.
    """
    groups = by_plan(fit)

    def of(x: Sequence[float]) -> Constants:
        found: dict[str, Any] = {
            name: min(MOST.get(name, math.inf), math.exp(v)) for name, v in zip(names, x)
        }
        return replace(start, **found)

    def error(x: Sequence[float]) -> float:
        found, total = of(x), 0.0
        for own in groups:
            seconds = predicted(own[0], found)
            total += sum(abs(math.log(seconds / run.seconds)) for run in own)
        return total / len(fit)

    first = [math.log(getattr(start, name)) for name in names]
    points = [
        first,
        *([v + 0.5 * (i == j) for j, v in enumerate(first)] for i in range(len(first))),
    ]
    simplex = sorted((error(x), x) for x in points)
    for _ in range(rounds):
        middle = [sum(x[j] for _, x in simplex[:-1]) / len(first) for j in range(len(first))]
        worst = simplex[-1]

        def toward(
            by: float, middle: list[float] = middle, worst: list[float] = worst[1]
        ) -> tuple[float, list[float]]:
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
            simplex = [
                simplex[0],
                *(
                    (error(x), x)
                    for x in ([(a + b) / 2 for a, b in zip(x, lowest)] for _, x in simplex[1:])
                ),
            ]
        simplex.sort()
    return of(simplex[0][1])


def errors(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Compute the relative errors of (predicted, measured) pairs: the mean, the median and the 90th
    percentile of the absolute error, and the signed mean.
    """
    signed = [p / m - 1 for p, m in found]
    absolute = sorted(map(abs, signed))
    return {
        "MAPE": sum(absolute) / len(absolute),
        "median": median(absolute),
        "P90": absolute[math.ceil(0.9 * len(absolute)) - 1],
        "bias": sum(signed) / len(signed),
    }


def held_out(own: Sequence[Run], name: str) -> list[tuple[float, float]]:
    """Predict the runs of each model size with constants that are fitted to all other sizes.
    Returns pairs (predicted seconds, measured seconds). `name`: name of the family's constants.
    """
    out, names = [], [key for key in constants_table(name) if key in START]
    for size in dict.fromkeys(run.size for run in own):
        of = fitted([run for run in own if run.size != size], constants(name), 25, names)
        out += [(predicted(run, of), run.seconds) for run in own if run.size == size]
    return out


def run(quick: bool = False) -> Report:
    rows: list[Row] = []
    for family, name in FAMILIES.items():
        own = [r for r in runs() if r.family == family]
        own = own[:4] if quick else own
        if not own:
            continue
        of, case = constants(name), f"{family}, {len(own)} runs"
        mine, peer = errors(pairs(own, of)), dict[str, float]()
        if len(own) > FORM:  # with fewer runs it would fit exactly
            form = closed_form(own)
            peer = errors([(form(r), r.seconds) for r in own])
        goals = {"MAPE": 0.10 if family in MIXED else 0.08, "median": 0.05}
        for figure in ("MAPE", "median", "P90", "bias"):
            goal = goals.get(figure)
            made = Row(case, figure, "", mine[figure], peer.get(figure), "closed form, 5 constants")
            if goal:
                made = replace(made, goal=f"{goal:g}", met=mine[figure] <= goal)
            rows.append(made)
        flat = constant_efficiency(own)
        theirs = errors([(flat(r), r.seconds) for r in own])["MAPE"]
        rows.append(Row(case, "MAPE", "", mine["MAPE"], theirs, "constant efficiency"))
        if family in HELD_OUT and not quick:
            found = errors(held_out(own, name))
            case = f"{family}, each model size left out of the fit"
            rows += [Row(case, figure, "", value) for figure, value in found.items()]
    return Report("measured", rows + memory_rows())


def memory_rows() -> list[Row]:
    """Compare the predicted bytes of the fullest device with the measured bytes, for each
    family.
    """
    rows: list[Row] = []
    full = [run for run in all_runs() if run.peak]
    for family in dict.fromkeys(run.family for run in full):
        signed = [device_peak(run) / run.peak - 1 for run in full if run.family == family]
        case = f"{family}, memory of {len(signed)} runs"
        for figure, value in (
            ("MAPE", sum(map(abs, signed)) / len(signed)),
            ("worst under", max(0.0, -min(signed))),
        ):
            rows.append(Row(case, figure, "", value, goal="0.05", met=value <= 0.05))
    return rows


def compare_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Compare predictions with runs that were not used to fit constants. Returns a text with each
    run, the errors of each family, and the rows that have no plan.
    """
    found, refused = runs_of(rows)
    lines, timed = [], dict[str, list[tuple[float, float]]]()
    for run in found:
        if run.seconds:
            seconds = predicted(run, constants(FAMILIES[run.family]))
            timed.setdefault(run.family, []).append((seconds, run.seconds))
            lines.append(
                f"{run.id}: {seconds:.4g} s, measured {run.seconds:.4g} s,"
                f" {seconds / run.seconds - 1:+.1%}"
            )
        if run.peak:
            peak = device_peak(run)
            timed.setdefault(f"{run.family}, memory", []).append((peak, run.peak))
            lines.append(
                f"{run.id}: {peak / 1e9:.4g} GB, measured {run.peak / 1e9:.4g} GB,"
                f" {peak / run.peak - 1:+.1%}"
            )
    lines += [
        f"{name}, {len(pairs)} runs: "
        + ", ".join(f"{what} {value:.1%}" for what, value in errors(pairs).items())
        for name, pairs in timed.items()
    ]
    return "\n".join(lines + [f"{name} is skipped: {why}" for name, why in refused.items()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit")
    parser.add_argument("--rows")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--constants", nargs="+", default=FITTED, help="at most six")
    args = parser.parse_args()
    if args.rows:
        print(compare_rows(json.loads(Path(args.rows).read_text())))
        return
    own = [run for run in runs() if run.family == args.fit]
    start = Constants(**{name: value for name, value in START.items() if name in args.constants})
    best = fitted(own, start, args.rounds, args.constants[:6])
    print({name: float(f"{getattr(best, name):.4g}") for name in args.constants})
    for run in own:
        print(run.id, f"{run.seconds:.3f} {predicted(run, best) / run.seconds - 1:+.1%}")
    print(errors([(predicted(run, best), run.seconds) for run in own]))


if __name__ == "__main__":
    main()
