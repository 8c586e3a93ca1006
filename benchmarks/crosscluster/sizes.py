"""Item `sizes` of `crosscluster`: choose stage sizes on random clusters by an exact search, by the
formula of Yang et al. (Holmes), and equally.

Nothing is measured: the seconds of a step are computed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

from benchmarks.common.report import Row
from roadtrain.stages.parallelism import even
from roadtrain.stages.protocol.stage_sizes import best_sizes, paper_sizes
from roadtrain.stages.protocol.step_model import BoundarySpeed, StageSpeed, StepModel, StepWork

AS_GOOD = 1 + 1e-9
PAPER, UNIFORM = "the paper's formula", "uniform stages"


def rows(quick: bool = False) -> list[Row]:
    count = 20 if quick else 200
    chance = random.Random(20)
    papers, uniforms = list[float](), list[float]()
    for _ in range(count):
        work, clusters = drawn(chance)
        model, best = StepModel(work), best_sizes(work)
        assert best is not None
        flat = even(len(work.weights), work.parts)
        uniforms.append(model.seconds(flat) / best.step_s)
        if (formula := paper_sizes(work, clusters)) is not None:
            papers.append(model.seconds(formula) / best.step_s)
    case = f"stage sizes of {count} clusters drawn by chance, by the step model"
    return [*_beside(case, papers, PAPER), *_beside(case, uniforms, UNIFORM)]


def drawn(chance: random.Random) -> tuple[StepWork, list[str]]:
    """Draw a random job of 2 to 4 stages. Returns (speeds and sizes that determine its step time,
    name of the cluster of each stage).
    """
    stages = chance.randint(2, 4)
    speeds = [chance.uniform(1.0, 3.0) for _ in range(stages)]
    clusters = [f"c{min(stage, chance.randint(1, 3))}" for stage in range(stages)]
    clusters.sort()
    work = StepWork(
        tuple(StageSpeed(0.01 * s, 0.02 * s) for s in speeds),
        (1.0,) * chance.randint(8, 40),
        chance.choice((4, 8, 16)),
        (1,) * stages,
        (BoundarySpeed(*[chance.uniform(0.0, 0.05)] * 2),) * (stages - 1),
        ends=(chance.uniform(0.0, 1.0), chance.uniform(0.0, 3.0)),
    )
    return work, clusters


def _beside(case: str, ratios: Sequence[float], name: str) -> list[Row]:
    worse = sum(ratio * AS_GOOD < 1 for ratio in ratios)
    return [
        Row(case, f"worse than {name}", "", worse, goal="= 0", met=worse == 0),
        Row(
            case,
            "a step, median",
            "",
            1.0,
            peer=median(ratios),
            peer_name=name,
            ratio=median(ratios),
        ),
        Row(case, "a step, at most", "", 1.0, peer=max(ratios), peer_name=name, ratio=max(ratios)),
    ]
