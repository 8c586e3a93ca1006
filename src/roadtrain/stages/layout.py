"""StageLayout: which segments of a model each stage has, which parameters, and which of them
several stages have; for every rank the same value."""

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
    """parallelism: with the blocks of each stage stated. segments: in the model's order, one a
    virtual stage. names: the parameters of each segment."""

    parallelism: Parallelism
    segments: tuple[Segment, ...]
    names: tuple[frozenset[str], ...]

    @staticmethod
    def of(parallelism: Parallelism, cuts: Cuts) -> StageLayout:
        """Raises ConfigError where stages and blocks do not add up, ModelError where the model
        cannot be cut there."""
        counts = parallelism.layers(len(cuts.blocks))
        if not all(counts):
            raise ConfigError(
                f"stages of {', '.join(map(str, counts))} blocks: a part without any is simulated"
                " only",
                hint="a block or more in each",
            )
        segments = tuple(Segment(*ends) for ends in pairwise(accumulate(counts, initial=0)))
        return StageLayout(parallelism, segments, tuple(map(cuts.parameters, segments)))

    def __str__(self) -> str:
        return ", ".join(str(s.stop - s.begin) for s in self.segments) + " blocks"

    def numbers(self, stage: int) -> list[int]:
        """Of the segments of `stage`."""
        return list(range(stage, len(self.segments), self.parallelism.pp))

    def segments_of(self, stage: int) -> list[Segment]:
        return [self.segments[number] for number in self.numbers(stage)]

    def names_of(self, stage: int) -> frozenset[str]:
        return frozenset().union(*(self.names[number] for number in self.numbers(stage)))

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Which stages have the parameter `name`, each a copy."""
        return tuple(s for s in range(self.parallelism.pp) if name in self.names_of(s))

    def shared(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Stages that have parameters in common -> the names of these."""
        found: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in sorted(frozenset().union(*self.names)):
            stages = self.stages_of(name)
            if len(stages) > 1:
                found[stages].append(name)
        return {stages: tuple(names) for stages, names in found.items()}

    def shared_groups(self) -> list[RankGroup]:
        """For each set of stages that have parameters in common and each tensor index."""
        tensors = range(self.parallelism.tp)
        return [self.shared_group(stages, tensor) for stages in self.shared() for tensor in tensors]

    def shared_group(self, stages: tuple[int, ...], tensor: int) -> RankGroup:
        """The ranks of all these stages, stage by stage, replica by replica."""
        ranks = tuple(
            self.parallelism.rank(RankPosition(stage, replica, tensor))
            for stage in stages
            for replica in range(self.parallelism.replicas_of[stage])
        )
        where = " and ".join(map(str, stages))
        more = f" tensor index {tensor}" if self.parallelism.tp > 1 else ""
        return RankGroup(GroupKind.SHARED, f"shared parameters of stages {where}{more}", ranks)
