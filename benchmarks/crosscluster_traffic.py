"""What a step of a pipeline must send over each network, in closed form: the figures of a plan that
`crosscluster` counts bytes against. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.crosscluster_model import RunSpec

FP32 = 4


@dataclass(frozen=True)
class HostTraffic:
    """Bytes of payload that one host of a stage sends in one step."""

    gradients: float
    """To the other ranks of its stage: a reduce-scatter of gradients and an all-gather of the new
    parameters, each (d - 1) / d of the stage's, fp32."""

    activations: float
    """To the stages beside it: activations one way, their gradients the other, fp32."""


def stage_traffic(spec: RunSpec, stage: int, parameters: int) -> HostTraffic:
    """parameters: of the stage. Stages have one width, and one part of the model each."""
    pp, dp = spec.parallelism["pp"], spec.parallelism["dp"]
    shared = FP32 * parameters * (dp - 1) / dp
    passed = FP32 * spec.batch.rows / dp * spec.batch.sequence * spec.model.hidden
    neighbours = (stage > 0) + (stage < pp - 1)
    return HostTraffic(2 * shared, neighbours * passed)


def stage_parameters(spec: RunSpec, stages: list[int]) -> list[int]:
    """Of each stage of so many layers: embeddings are in the first, head and norm in the last."""
    size = spec.model
    layer = 4 * size.hidden**2 + 3 * size.hidden * size.inner + 2 * size.hidden
    ends = size.vocabulary * size.hidden
    counts = [layer * layers for layers in stages]
    counts[0] += ends
    counts[-1] += ends + size.hidden
    return counts
