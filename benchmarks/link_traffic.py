"""How many bytes each rank sends to each other rank in one step: what a plan promises of every
link, and what the counters of a real run are held against.

Between stages: the transfers of the pipeline's state machines, each of one micro-batch. Inside a
stage of d replicas whose optimizer is sharded: each rank sends (d - 1) / d of its gradients' bytes
to those that own them (as processors do; NCCL passes them round a ring), and as much of its
parameters' to the next rank of a ring (all-gather). What a placed optimizer exchanges with its
servers is counted by them. Payload alone: no headers, no padding, no norms. Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from roadtrain.errors import ConfigError
from roadtrain.stages.parallelism import Parallelism, RankPosition
from roadtrain.stages.protocol.pipeline import FORWARD, Peer, StageStateMachine


class TrafficKind(StrEnum):
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    SHARED_GRADIENTS = "gradients of shared parameters"


Links = dict[tuple[int, int, TrafficKind], float]  # (from rank, to rank, kind) -> bytes


@dataclass(frozen=True)
class BoundaryBytes:
    """Of one micro-batch between two ranks of stages that follow each other."""

    activations: float
    gradients: float


@dataclass(frozen=True)
class StageBytes:
    """What one rank of a stage exchanges with the stage's other ranks of its tensor rank. Of a
    stage of one replica, or of a placed optimizer, nothing is sent."""

    gradients: float = 0.0  # bytes of its gradients, of which each rank gets its part from all
    parameters: float = 0.0  # bytes of its parameters, which go round a ring
    # bytes of its gradients that go round a ring; twice those of an all-reduce
    ring_gradients: float = 0.0


@dataclass(frozen=True)
class SharedBytes:
    """A parameter that several stages have (tied embeddings). Each rank gets the elements whose
    state it keeps of every other stage's summed gradient, from the ranks there that have them."""

    stages: tuple[int, ...]
    gradients: float  # bytes


def link_bytes(
    parallelism: Parallelism,
    num_microbatches: int,
    boundary: BoundaryBytes,
    stages: Sequence[StageBytes],
    shared: Sequence[SharedBytes] = (),
) -> Links:
    """Of one step. num_microbatches: over all replicas. boundary: of each micro-batch, and each
    tensor and context rank. Raises ConfigError where `stages` are not those of `parallelism`."""
    if len(stages) != parallelism.pp:
        raise ConfigError(f"bytes of {len(stages)} stages are given, pp is {parallelism.pp}")
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
        machine = StageStateMachine(
            stage,
            parallelism.pp,
            num_microbatches,
            parallelism.virtual_stages,
            widths=widths,
            replica=replica,
        )
        for one in machine.sends():
            kind, nbytes = TrafficKind.ACTIVATION_GRADIENTS, boundary.gradients
            if one.what == FORWARD:
                kind, nbytes = TrafficKind.ACTIVATIONS, boundary.activations
            ends = zip(_ranks(parallelism, one.sender), _ranks(parallelism, one.receiver))
            yield from ((here, there, kind, nbytes) for here, there in ends)


def _ranks(parallelism: Parallelism, peer: Peer) -> list[int]:
    """All of a replica: its context and tensor ranks, in order."""
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
    for one in shared:
        for a, b in itertools.permutations(one.stages, 2):
            for i, j in itertools.product(range(replicas[a]), range(replicas[b])):
                both = min((i + 1) / replicas[a], (j + 1) / replicas[b])
                share = both - max(i / replicas[a], j / replicas[b])
                for tensor in range(parallelism.tp):
                    here = parallelism.rank(RankPosition(a, i, tensor))
                    there = parallelism.rank(RankPosition(b, j, tensor))
                    yield here, there, TrafficKind.SHARED_GRADIENTS, share * one.gradients
