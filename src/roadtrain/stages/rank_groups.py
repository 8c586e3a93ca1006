"""Groups: which ranks work together, as a value: every rank's host, cluster, stage, replica and
tensor index, and from them the data, tensor and boundary groups of one job.

Each rank makes the same value from the same job, so that all create the same process groups in
the same order. Does NOT create process groups, nor choose their networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roadtrain.stages.host_ranks import DataGroups, HostDevices, Hosts, check_ranks
from roadtrain.stages.parallelism import Parallelism, RankPosition


class GroupKind(StrEnum):
    """What the ranks of a group do together."""

    TENSOR = "tp"  # parts of each matrix of one replica of a stage
    DATA = "dp"  # sums of the gradients of a stage
    ACTIVATIONS = "activations"  # from a stage to the one after it
    GRADIENTS = "gradients"  # of activations, from a stage to the one before it
    SHARED = "shared"  # sums of gradients of parameters that several stages have


@dataclass(frozen=True, slots=True)
class RankGroup:
    """`name` is unique among a job's groups and the same on every rank. `ranks` ascend."""

    kind: GroupKind
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """The groups of one job. Make it with `of`, which checks it."""

    parallelism: Parallelism
    host_of: tuple[HostDevices, ...]  # of each rank

    @classmethod
    def of(
        cls,
        parallelism: Parallelism,
        hosts: Hosts,
        *,
        blocks: int | None = None,
        data_groups: DataGroups = DataGroups.IN_ONE_CLUSTER,
    ) -> Groups:
        """hosts: (host name, cluster name, devices) in the order of ranks. blocks: of the model,
        to be divided into stages. Raises ConfigError where it cannot work: the first reason, with
        both numbers."""
        host_of = check_ranks(parallelism, hosts, blocks=blocks, data_groups=data_groups)
        return cls(parallelism, tuple(host_of))

    @property
    def world_size(self) -> int:
        return len(self.host_of)

    def position(self, rank: int) -> RankPosition:
        return self.parallelism.position(rank)

    def host(self, rank: int) -> str:
        return self.host_of[rank].host

    def cluster(self, rank: int) -> str:
        return self.host_of[rank].cluster

    def stage_ranks(self, stage: int) -> range:
        first = self.parallelism.first_ranks
        return range(first[stage], first[stage + 1])

    @property
    def tensor(self) -> tuple[RankGroup, ...]:
        """One a replica of a stage, in rank order."""
        return tuple(
            RankGroup(GroupKind.TENSOR, f"tp stage {at.stage} replica {at.replica}", tuple(ranks))
            for ranks in self.parallelism.tensor_groups()
            for at in (self.position(ranks[0]),)
        )

    @property
    def data(self) -> tuple[RankGroup, ...]:
        """One a tensor index of a stage, stage by stage."""
        return tuple(
            RankGroup(GroupKind.DATA, f"dp stage {at.stage} tensor index {at.tensor}", tuple(ranks))
            for ranks in self.parallelism.data_groups()
            for at in (self.position(ranks[0]),)
        )

    @property
    def boundaries(self) -> tuple[RankGroup, ...]:
        """All ranks of two stages that send to each other, for each of the parallelism's
        boundaries: a group for activations, then one for their gradients. Each direction has its
        own, so that the messages of one never wait for those of the other."""
        out = []
        for stage, after in self.parallelism.boundaries:
            ranks = tuple(sorted((*self.stage_ranks(stage), *self.stage_ranks(after))))
            for kind, a, b in (
                (GroupKind.ACTIVATIONS, stage, after),
                (GroupKind.GRADIENTS, after, stage),
            ):
                out.append(RankGroup(kind, f"{kind} stage {a} to {b}", ranks))
        return tuple(out)

    @property
    def to_create(self) -> tuple[RankGroup, ...]:
        """Every group that needs a process group, in the order in which all ranks create them.
        A pipeline needs none: its stages talk over their boundaries."""
        return (*self.data, *self.tensor, *self.boundaries)

    def group_of(self, kind: GroupKind, rank: int) -> RankGroup:
        """The tensor or data group that `rank` is in."""
        return next(one for one in self.to_create if one.kind is kind and rank in one.ranks)
