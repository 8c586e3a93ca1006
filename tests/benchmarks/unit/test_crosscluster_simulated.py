"""benchmarks/crosscluster/simulated.py: a row of the benchmark becomes its plan and cluster.
Nothing is run here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from benchmarks.crosscluster.costs import HostCosts
from benchmarks.crosscluster.lab import CPUS, ENVIRONMENTS, ETHERNET, Environment, Measured
from benchmarks.crosscluster.losses import WITHIN, worst_difference
from benchmarks.crosscluster.model import Batch, ModelSize, RunSpec
from benchmarks.crosscluster.simulated import plan_of, predicted, shape_of
from roadtrain.errors import ConfigError
from roadtrain.lab import CARRIED

COSTS = HostCosts({2: 0.04, 4: 0.08}, {2: 0.01, 4: 0.02}, 2.0, 2e-9, 0.0)
LAYOUT: dict[str, Any] = {"pp": 2, "dp": 2}


def measured(stages: list[int]) -> Measured:
    return Measured(1.0, [], {}, [{"stages": stages}])


@dataclass(frozen=True)
class Case:
    """Stands for the benchmark's Run."""

    case: str = "a row"
    environment: Environment = ENVIRONMENTS["hybrid"]
    spec: RunSpec = field(
        default_factory=lambda: RunSpec(
            "ours", ModelSize(layers=16), Batch(16, 128, 8), parallelism=LAYOUT
        )
    )
    cpus: tuple[float, float] = (CPUS, CPUS)
    measured: Measured = field(default_factory=lambda: measured([8, 8]))

    def seconds(self, **more: Any) -> float:
        """Simulated seconds of the run with changed values of its spec."""
        run: Any = replace(self, spec=replace(self.spec, **more))
        return predicted(run, COSTS).seconds


@pytest.mark.slow
def test_the_shape_equals_the_model() -> None:
    size = RunSpec("ours").model
    assert shape_of(RunSpec("ours")).params == sum(p.numel() for p in size.build().parameters())


def test_a_step_has_the_samples_of_the_run() -> None:
    run: Any = Case()
    assert plan_of(run).samples == run.spec.batch.rows
    peer: Any = replace(run, spec=replace(run.spec, method="ddp"))
    assert plan_of(peer).samples == run.spec.batch.rows
    wide: Any = replace(
        run,
        spec=replace(run.spec, parallelism={"pp": 2, "widths": [3, 1]}),
        measured=measured([11, 5]),
    )
    assert plan_of(wide).samples == run.spec.batch.rows
    assert plan_of(wide).parallelism.stages == (11, 5)


def test_runs_that_cannot_be_predicted_are_refused() -> None:
    """A stage with its state on a server is not part of the plan (Rule 6)."""
    with pytest.raises(
        ConfigError, match="a row: the simulation does not support stages with a store"
    ):
        Case().seconds(stage_stores={"0": {"servers": ["h:1"]}})


def test_computing_alone_takes_the_measured_seconds() -> None:
    """On fast networks a step is the first stage's half of the layers, the pipeline fill and the
    update."""
    seconds = Case(environment=ENVIRONMENTS["all InfiniBand"]).seconds()
    pass_s = 3 * (8 * 0.04 + 0.01)
    assert 4 * pass_s < seconds < 5.6 * pass_s + 0.5


def test_the_traffic_of_a_slow_network_bounds_a_step() -> None:
    case = Case(environment=ENVIRONMENTS["all Ethernet"])
    params = shape_of(case.spec).params
    whole = 2 * 3 / 4 * params * 4 / (ETHERNET * CARRIED)
    assert whole < case.seconds(method="ddp") < whole + 4
    on, off = (case.seconds(overlap=overlap) for overlap in (True, False))
    assert params * 4 / 2 / (ETHERNET * CARRIED) < on < off
    assert Case().seconds() < on / 2  # the hybrid uses fast networks for gradients


def test_a_throttled_cluster_is_slower_and_uneven_stages_help() -> None:
    even = Case(cpus=(CPUS, 0.6 * CPUS))
    uneven = replace(even, measured=measured([10, 6]))
    assert even.seconds() > 1.4 * Case().seconds()
    assert uneven.seconds() < 0.9 * even.seconds()


def test_the_measured_seconds_of_an_update_count() -> None:
    """On fast networks nothing hides the update: it adds a second for each rank's half of a
    stage."""
    run: Any = Case(environment=ENVIRONMENTS["all InfiniBand"])
    slow = replace(COSTS, update=COSTS.update + 1 / (shape_of(run.spec).params / 4))
    assert predicted(run, slow).seconds == pytest.approx(run.seconds() + 1, rel=0.1)


def test_a_nan_loss_counts_as_different() -> None:
    """In whichever step the NaN occurs (Rule 6)."""
    assert worst_difference([1.0, math.nan], [1.0, 1.0]) == math.inf > WITHIN
    assert worst_difference([math.nan, 1.0], [1.0, 1.0]) == math.inf
