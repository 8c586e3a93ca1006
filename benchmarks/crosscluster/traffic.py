"""Compute the bytes that each NIC must send in a step of a plan, to compare them with counted
bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from benchmarks.crosscluster.lab import FAST, SLOW, Environment
from benchmarks.crosscluster.link_bytes import BoundaryBytes, StageBytes, link_bytes
from benchmarks.crosscluster.model import RunSpec
from benchmarks.crosscluster.ours import parallelism_of

FP32 = 4


def sent_by_nics(
    spec: RunSpec, environment: Environment, stages: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Map (rank, index of a NIC of its host) to the bytes that this NIC sends in a step. `stages`:
    number of layers of each stage.
    """
    counts = [FP32 * n for n in stage_parameters(spec, stages)]
    passed = FP32 * spec.batch.micro_rows * spec.batch.sequence * spec.model.hidden
    links = link_bytes(
        parallelism_of(spec.parallelism),
        spec.batch.microbatches,
        BoundaryBytes(passed, passed),
        [StageBytes(gradients=n, parameters=n) for n in counts],
    )
    out: dict[tuple[int, int], float] = defaultdict(float)
    for (here, there, _), nbytes in links.items():
        nic = FAST if environment.share_fast(here, there) else SLOW
        out[here, nic] += nbytes
    return dict(out)


def stage_parameters(spec: RunSpec, stages: Sequence[int]) -> list[int]:
    """Count the parameters of each stage. The first stage has the embeddings; the last has the head
    and the norm.
    """
    size = spec.model
    layer = 4 * size.hidden**2 + 3 * size.hidden * size.inner + 2 * size.hidden
    ends = size.vocabulary * size.hidden
    counts = [layer * layers for layers in stages]
    counts[0] += ends
    counts[-1] += ends + size.hidden
    return counts
