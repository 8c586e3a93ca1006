"""Arguments and results of the measured runs of `crosscluster`. Does NOT compare the results with
goals.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.crosscluster.lab import (
    CPUS,
    ENVIRONMENTS,
    HYBRID,
    Environment,
    Measured,
    measure,
    two_clusters,
)
from benchmarks.crosscluster.model import Batch, ModelSize, RunSpec

LAYOUT = {"pp": 2, "dp": 2}


@dataclass(frozen=True)
class Setting:
    """Settings that all runs of the benchmark share."""

    size: ModelSize
    batch: Batch
    steps: int
    home: Path


@dataclass(frozen=True)
class Run:
    """Measured run, with everything that is needed to simulate it."""

    case: str
    environment: Environment
    cpus: tuple[float, float]
    """CPUs of each host, for the two clusters."""

    spec: RunSpec
    measured: Measured

    @property
    def samples_per_s(self) -> float:
        return self.spec.batch.rows / self.measured.seconds


@dataclass
class Bench:
    """Makes the measured runs, and keeps their results in the order of the runs."""

    setting: Setting
    runs: list[Run] = field(default_factory=list)

    def ours(
        self,
        case: str,
        environment: Environment = HYBRID,
        cpus: tuple[float, float] = (CPUS, CPUS),
        **more: object,
    ) -> Run:
        spec = replace(
            self._spec("ours"),
            parallelism=LAYOUT,
            networks=environment.statements(),
            **more,  # type: ignore[arg-type]
        )
        return self._run(case, environment, cpus, spec)

    def peer(self, case: str, method: str) -> Run:
        layers = self.setting.size.layers
        halves = [layers - layers // 2, layers // 2]
        spec = replace(self._spec(method), parallelism={**LAYOUT, "stages": halves})
        return self._run(case, ENVIRONMENTS["all Ethernet"], (CPUS, CPUS), spec)

    def _spec(self, method: str) -> RunSpec:
        common = self.setting
        return RunSpec(
            method,
            common.size,
            common.batch,
            steps=common.steps,
            master="a0-eth1",
            interface="eth1",
        )

    def _run(
        self, case: str, environment: Environment, cpus: tuple[float, float], spec: RunSpec
    ) -> Run:
        with two_clusters(environment, cpus) as network:
            home = self.setting.home / f"run{len(self.runs)}"
            self.runs.append(Run(case, environment, cpus, spec, measure(network, spec, home)))
        run = self.runs[-1]
        print(f"{case}: {run.measured.seconds:.2f} s a step", flush=True)
        return run
