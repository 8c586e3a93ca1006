"""Compute the bytes that each rank sends to each other rank in one step of a plan. Tests compare
the counters of real runs with the result.

In a stage of d replicas with a sharded optimizer, each rank sends (d - 1) / d of the bytes of its
gradients directly to the ranks that own the shards (on processors; NCCL uses a ring). Each rank
also sends (d - 1) / d of the bytes of the parameters to the next rank of a ring (all-gather). Bytes
to and from servers are NOT included. Only payload is counted: no headers, padding or norms.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from roadtrain.errors import ConfigError
from roadtrain.stages.parallelism import Parallelism, RankPosition
from roadtrain.stages.protocol.pipeline import FORWARD, Peer, PipelineShape, StageStateMachine


class TrafficKind(StrEnum):
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    SHARED_GRADIENTS = "gradients of shared parameters"


Links = dict[tuple[int, int, TrafficKind], float]  # (from rank, to rank, kind) -> bytes


@dataclass(frozen=True)
class BoundaryBytes:
    """Bytes that one micro-batch sends in each direction between two ranks of consecutive
    stages.
    """

    activations: float
    gradients: float


@dataclass(frozen=True)
class StageBytes:
    """Bytes that a rank exchanges with the ranks of its stage that have the same tensor rank; 0
    with one replica, or if servers keep the optimizer state.
    """

    gradients: float = 0.0  # bytes of its gradients; each rank receives its shard from all others
    parameters: float = 0.0  # bytes of its parameters, which go round a ring
    # bytes of its gradients that go round a ring; for an all-reduce, twice the gradients
    ring_gradients: float = 0.0


@dataclass(frozen=True)
class SharedBytes:
    """A parameter that several stages hold (tied embeddings). A rank that keeps the optimizer state
    of some elements receives their gradient from the ranks that keep the same elements in the other
    stages.
    """

    stages: tuple[int, ...]
    gradients: float  # bytes


def link_bytes(
    parallelism: Parallelism,
    num_microbatches: int,
    boundary: BoundaryBytes,
    stages: Sequence[StageBytes],
    shared: Sequence[SharedBytes] = (),
) -> Links:
    """Compute the bytes of one step, by sender, receiver and kind of traffic.

    Args:
        num_microbatches: number of micro-batches of all replicas together
        boundary: bytes that each tensor and context rank sends at a stage boundary for one
            micro-batch
        stages: bytes inside each stage
        shared: parameters that several stages hold

    Raises:
        ConfigError: `stages` has more or fewer entries than `parallelism` has stages
    """
    if len(stages) != parallelism.pp:
        raise ConfigError(f"`stages` has {len(stages)} entries, but pp is {parallelism.pp}")
    links: Links = defaultdict(float)
    for here, there, kind, nbytes in itertools.chain(
        _between_stages(parallelism, num_microbatches, boundary),
        _inside_stages(parallelism, stages),
        _of_shared(parallelism, shared),
    ):
        if nbytes > 0:
            links[here, there, kind] += nbytes
    return dict(links)


Sent = Iterator[tuple[int, int, TrafficKind, float]]


def _between_stages(
    parallelism: Parallelism, num_microbatches: int, boundary: BoundaryBytes
) -> Sent:
    widths = parallelism.widths or (parallelism.dp,) * parallelism.pp
    places = [(stage, replica) for stage, width in enumerate(widths) for replica in range(width)]
    for stage, replica in places:
        shape = PipelineShape(stage, replica, widths, parallelism.virtual_stages, num_microbatches)
        for transfer in StageStateMachine(shape).sends():
            kind, nbytes = TrafficKind.ACTIVATION_GRADIENTS, boundary.gradients
            if transfer.what == FORWARD:
                kind, nbytes = TrafficKind.ACTIVATIONS, boundary.activations
            ends = zip(_ranks(parallelism, transfer.sender), _ranks(parallelism, transfer.receiver))
            yield from ((here, there, kind, nbytes) for here, there in ends)


def _ranks(parallelism: Parallelism, peer: Peer) -> list[int]:
    """List all ranks of a replica of a stage, sorted by context rank, and then by tensor rank."""
    return [
        parallelism.rank(RankPosition(peer.stage, peer.replica * parallelism.cp + c, t))
        for c in range(parallelism.cp)
        for t in range(parallelism.tp)
    ]


def _inside_stages(parallelism: Parallelism, stages: Sequence[StageBytes]) -> Sent:
    groups = iter(parallelism.data_groups())
    for stage in stages:
        for group in itertools.islice(groups, parallelism.tp):
            others = (len(group) - 1) / len(group)
            for here, there in itertools.permutations(group, 2):
                yield here, there, TrafficKind.GRADIENTS, stage.gradients / len(group)
            for here, there in zip(group, [*group[1:], group[0]]):
                yield here, there, TrafficKind.PARAMETERS, stage.parameters * others
                yield here, there, TrafficKind.GRADIENTS, stage.ring_gradients * others


def _of_shared(parallelism: Parallelism, shared: Sequence[SharedBytes]) -> Sent:
    replicas = parallelism.replicas_of
    for param in shared:
        for a, b in itertools.permutations(param.stages, 2):
            for i, j in itertools.product(range(replicas[a]), range(replicas[b])):
                both = min((i + 1) / replicas[a], (j + 1) / replicas[b])
                share = both - max(i / replicas[a], j / replicas[b])
                for tensor in range(parallelism.tp):
                    here = parallelism.rank(RankPosition(a, i, tensor))
                    there = parallelism.rank(RankPosition(b, j, tensor))
                    yield here, there, TrafficKind.SHARED_GRADIENTS, share * param.gradients
