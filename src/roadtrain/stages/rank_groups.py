"""Groups: a value that describes which ranks of a job work together. Does NOT create process groups
or choose their networks.

Each rank computes the same Groups from the same job, so all ranks create the same process groups in
the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roadtrain.stages.host_ranks import DataGroups, HostDevices, Hosts, check_ranks
from roadtrain.stages.parallelism import Parallelism, RankPosition


class GroupKind(StrEnum):
    """The purpose of a group of ranks."""

    TENSOR = "tp"  # splits the matrices of one replica of a stage
    DATA = "dp"  # sums the gradients of a stage
    ACTIVATIONS = "activations"  # sends activations to the next stage
    GRADIENTS = "gradients"  # sends gradients of activations to the previous stage
    SHARED = "shared"  # sums the gradients of parameters shared by several stages
    CONTROL = "control"  # exchanges control messages of all ranks


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of one group, in ascending order. `name` is unique in the job and the same on every
    rank."""

    kind: GroupKind
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """The groups of one job. Create this value with `of`, which validates the arguments."""

    parallelism: Parallelism
    host_of: tuple[HostDevices, ...]  # for each rank, its host

    @classmethod
    def of(
        cls,
        parallelism: Parallelism,
        hosts: Hosts,
        *,
        blocks: int | None = None,
        data_groups: DataGroups = DataGroups.IN_ONE_CLUSTER,
    ) -> Groups:
        """Create the groups. hosts: (host name, cluster name, number of devices) for each host, in
        rank order. blocks: the number of blocks of the model. Raises ConfigError if the parallelism
        does not fit the hosts or the blocks; the error names the first mismatch."""
        host_of = check_ranks(parallelism, hosts, blocks=blocks, data_groups=data_groups)
        return cls(parallelism, tuple(host_of))

    def position(self, rank: int) -> RankPosition:
        return self.parallelism.position(rank)

    def host(self, rank: int) -> str:
        return self.host_of[rank].host

    def stage_ranks(self, stage: int) -> range:
        first = self.parallelism.first_ranks
        return range(first[stage], first[stage + 1])

    @property
    def tensor(self) -> tuple[RankGroup, ...]:
        """The tensor-parallel groups, one for each replica of a stage, in rank order."""
        return tuple(
            RankGroup(GroupKind.TENSOR, f"tp stage {at.stage} replica {at.replica}", tuple(ranks))
            for ranks in self.parallelism.tensor_groups()
            for at in (self.position(ranks[0]),)
        )

    @property
    def data(self) -> tuple[RankGroup, ...]:
        """The data-parallel groups, by stage and tensor-parallel index."""
        return tuple(
            RankGroup(GroupKind.DATA, f"dp stage {at.stage} tensor index {at.tensor}", tuple(ranks))
            for ranks in self.parallelism.data_groups()
            for at in (self.position(ranks[0]),)
        )

    @property
    def boundaries(self) -> tuple[RankGroup, ...]:
        """Two groups per boundary between stages, each with all ranks of both stages: one sends
        activations, the other their gradients, so that no message waits for one in the opposite
        direction."""
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
        """The groups that need a process group, in the order in which all ranks create them."""
        return (*self.data, *self.tensor, *self.boundaries)

    def group_of(self, kind: GroupKind, rank: int) -> RankGroup:
        """Return the tensor group (kind TENSOR) or the data group (kind DATA) of `rank`."""
        return next(g for g in self.to_create if g.kind is kind and rank in g.ranks)
