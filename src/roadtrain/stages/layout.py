"""StageLayout: the segments (ranges of blocks) and parameters of each stage, and the parameters
that several stages share. Every rank computes the same StageLayout."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise

from roadtrain.errors import ConfigError
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.parallelism import Parallelism, RankPosition
from roadtrain.stages.rank_groups import GroupKind, RankGroup


@dataclass(frozen=True)
class StageLayout:
    """The division of a model into stages. segments: one segment per virtual stage, in the model's
    order. names: for each segment, the names of its parameters."""

    parallelism: Parallelism
    segments: tuple[Segment, ...]
    names: tuple[frozenset[str], ...]

    @staticmethod
    def of(parallelism: Parallelism, cuts: Cuts) -> StageLayout:
        """Divide the model into stages. Raises ConfigError if the stages' numbers of blocks do not
        add up to the model's, and ModelError if the model cannot be cut between these stages."""
        counts = parallelism.layers(len(cuts.blocks))
        if not all(counts):
            raise ConfigError(
                f"the stages have {', '.join(map(str, counts))} blocks, but a stage without blocks"
                " cannot be trained, only simulated",
                hint="give each stage at least one block",
            )
        segments = tuple(Segment(*ends) for ends in pairwise(accumulate(counts, initial=0)))
        return StageLayout(parallelism, segments, tuple(map(cuts.parameters, segments)))

    def __str__(self) -> str:
        return ", ".join(str(s.stop - s.begin) for s in self.segments) + " blocks"

    def numbers(self, stage: int) -> list[int]:
        """Return the indices in `segments` of the segments of `stage`."""
        return list(range(stage, len(self.segments), self.parallelism.pp))

    def segments_of(self, stage: int) -> list[Segment]:
        return [self.segments[number] for number in self.numbers(stage)]

    def names_of(self, stage: int) -> frozenset[str]:
        return frozenset().union(*(self.names[number] for number in self.numbers(stage)))

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that have a copy of the parameter `name`."""
        return tuple(s for s in range(self.parallelism.pp) if name in self.names_of(s))

    def shared(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Return the names of the shared parameters, by the tuple of stages that share them."""
        found: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in sorted(frozenset().union(*self.names)):
            stages = self.stages_of(name)
            if len(stages) > 1:
                found[stages].append(name)
        return {stages: tuple(names) for stages, names in found.items()}

    def shared_groups(self) -> list[RankGroup]:
        """Return the groups of ranks that share parameters: one for each set of stages that share
        parameters and each index in the tensor-parallel groups."""
        tensors = range(self.parallelism.tp)
        return [self.shared_group(stages, tensor) for stages in self.shared() for tensor in tensors]

    def shared_group(self, stages: tuple[int, ...], tensor: int) -> RankGroup:
        """Return the group of the ranks of `stages` that share parameters, ordered by stage and
        replica. tensor: the index of these ranks in their tensor-parallel groups."""
        ranks = tuple(
            self.parallelism.rank(RankPosition(stage, replica, tensor))
            for stage in stages
            for replica in range(self.parallelism.replicas_of[stage])
        )
        where = " and ".join(map(str, stages))
        more = f" tensor index {tensor}" if self.parallelism.tp > 1 else ""
        return RankGroup(GroupKind.SHARED, f"shared parameters of stages {where}{more}", ranks)
