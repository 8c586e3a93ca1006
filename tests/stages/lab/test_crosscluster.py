"""Two clusters with separate fast networks: each group sends the planned number of bytes over the
network that its members share, and the losses equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.crosscluster.lab import ENVIRONMENTS, FAST, HYBRID, SLOW, Environment
from benchmarks.crosscluster.losses import WITHIN, worst_difference
from benchmarks.crosscluster.model import Batch, ModelSize, RunSpec
from benchmarks.crosscluster.runs import Bench, Setting
from benchmarks.crosscluster.traffic import sent_by_nics, stage_parameters
from benchmarks.crosscluster.worker import train
from roadtrain.lab import cpus_available, network_available

SIZE = ModelSize(layers=4, hidden=128, inner=256)
# long enough that messages of a few bytes (the sums of losses) are far below 2 %
BATCH = Batch(rows=8, sequence=256, microbatches=4)
STAGES = [2, 2]
SKIP_REASON = network_available() or cpus_available()
pytestmark = [pytest.mark.lab, pytest.mark.slow]


def spec() -> RunSpec:
    return RunSpec("ours", SIZE, BATCH, parallelism={"pp": 2, "dp": 2, "stages": STAGES})


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=list(ENVIRONMENTS))
def test_planned_bytes_have_a_closed_form(environment: Environment) -> None:
    counts = stage_parameters(spec(), STAGES)
    assert sum(counts) == sum(p.numel() for p in SIZE.build().parameters())
    fast, slow = (
        FAST if environment.fast else SLOW,
        FAST if environment.name in ("all InfiniBand", "all RoCE") else SLOW,
    )
    expected: dict[tuple[int, int], float] = {}
    for rank in range(4):
        # reduce-scatter and all-gather of two ranks: half of the stage's 4 bytes a parameter each
        expected[rank, fast] = 2 * 0.5 * 4 * counts[rank // 2]
        # a rank has half of the rows; stage 0 sends activations, stage 1 sends their gradients
        passed = 4 * (BATCH.rows // 2) * BATCH.sequence * SIZE.hidden
        expected[rank, slow] = expected.get((rank, slow), 0.0) + passed
    assert sent_by_nics(spec(), environment, STAGES) == pytest.approx(expected)


@pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))
def test_bytes_follow_the_plan_and_losses_equal_those_of_one_process(tmp_path: Path) -> None:
    run = Bench(Setting(SIZE, BATCH, 2, tmp_path)).ours(HYBRID.name)
    hosts = list(run.measured.traffic)
    planned = sent_by_nics(run.spec, HYBRID, run.measured.results[0]["stages"])
    counted = {
        (rank, nic): run.measured.traffic[host][nic].sent
        for rank, host in enumerate(hosts)
        for nic in (FAST, SLOW)
    }
    assert counted == pytest.approx(planned, rel=0.02)
    single_losses = train(RunSpec("single", SIZE, BATCH, steps=2), 0, 1, lambda what: None)[
        "losses"
    ]
    assert worst_difference(run.measured.losses, single_losses) < WITHIN
