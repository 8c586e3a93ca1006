"""Parallelism: which devices form which parallel groups, and which layers each pipeline stage has.
Arithmetic only.

Devices are numbered host by host, from 0, in the order of the clusters. With t tensor-, p pipeline-
and d data-parallel ranks (d p t = N), as in Yang et al. (Holmes), equations 1 to 3, here from 0:

    tensor group i     i t + j                                   j < t     inside one host
    pipeline group i   i + j t d                                 j < p     a stage is t d devices
                                                                 that follow each other
    data group i       i mod t + (i div t) d t + j t             j < d     inside one stage

Stages may have numbers of data-parallel ranks of their own (`widths`). Devices are numbered stage
by stage then, inside a stage replica by replica, inside a replica the tensor ranks: where all
widths are d that is the same. Micro-batch i of a step goes through replica i mod d_s of each stage
s; the devices that it passes are a pipeline group, and a device of a narrow stage is in several.

Context-parallel ranks have a part of each sequence, and the same parameters: d here is dp x cp, and
the ranks of a context group follow each other in a data group. So do those of an expert group,
which has each expert once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

from roadtrain.errors import ConfigError
from roadtrain.options.schema import Count, Whole, refusing, value


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is in the pipeline. `replica`: of those of its stage, context-parallel ranks
    counted too."""

    stage: int
    replica: int
    tensor: int


@value
class Parallelism:
    """Degrees of data, tensor, pipeline, context and expert parallelism. Widths that are all the
    same are kept as `dp`."""

    dp: Count = 1  # of every stage; left at 1 where `widths` says it
    tp: Count = 1
    pp: Count = 1
    # layers of each pipeline stage, or of each virtual stage in the model's order; none: as even
    # as can be
    stages: tuple[Whole, ...] = ()
    cp: Count = 1
    ep: Count = 1  # divides dp x cp
    # parts of the model that a pipeline stage has, part k of all stages before part k + 1 of any
    virtual_stages: Count = 1
    # data-parallel ranks of each stage, where they differ; none: dp everywhere
    widths: tuple[Count, ...] = ()

    @model_validator(mode="after")
    @refusing
    def _widths_fit(self) -> Self:
        if not self.widths:
            return self
        said = f"widths {', '.join(map(str, self.widths))}"
        if len(self.widths) != self.pp:
            raise ConfigError(
                f"{said} are {len(self.widths)}, pp is {self.pp}", hint="one number a stage"
            )
        if self.dp != 1 and set(self.widths) != {self.dp}:
            raise ConfigError(
                f"dp {self.dp} and {said} contradict each other",
                hint="leave dp out where widths says it",
            )
        if len(set(self.widths)) == 1:
            object.__setattr__(self, "dp", self.widths[0])
            object.__setattr__(self, "widths", ())
        elif self.virtual_stages > 1:
            raise ConfigError(
                f"{said} differ and virtual_stages is {self.virtual_stages}",
                hint="interleaved stages take turns in one order, so they have one width; give dp",
            )
        return self

    @model_validator(mode="after")
    @refusing
    def _experts_fit(self) -> Self:
        for stage, width in enumerate(self.widths or (self.dp,)):
            if width * self.cp % self.ep:
                said = f"width {width}" if self.widths else f"dp {width}"
                where = f" of stage {stage}" if self.widths else ""
                raise ConfigError(
                    f"ep {self.ep} does not divide {said} x cp {self.cp}{where}",
                    hint="every expert group is a part of a data group",
                )
        return self

    @property
    def replicas_of(self) -> tuple[int, ...]:
        """Of each stage: ranks that have the same parameters, but for experts."""
        return tuple(width * self.cp for width in self.widths or (self.dp,) * self.pp)

    @property
    def replicas(self) -> int:
        """Of every stage. Raises ConfigError where they differ."""
        if self.widths:
            raise ConfigError(
                f"stages of widths {', '.join(map(str, self.widths))} have no number of replicas"
                " in common",
                hint="this needs the same dp for all stages",
            )
        return self.dp * self.cp

    @property
    def devices(self) -> int:
        return sum(self.replicas_of) * self.tp

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Of each stage; and what follows the last."""
        return tuple(itertools.accumulate((n * self.tp for n in self.replicas_of), initial=0))

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...]:
        """(stage, stage after it) that activations go between; with virtual stages also from the
        last to the first."""
        last = ((self.pp - 1, 0),) if self.virtual_stages > 1 and self.pp > 1 else ()
        return (*itertools.pairwise(range(self.pp)), *last)

    def position(self, rank: int) -> RankPosition:
        """Raises ConfigError for a rank that is none of `devices`."""
        if not 0 <= rank < self.devices:
            raise ConfigError(f"rank {rank} is none of the {self.devices} of {self}")
        first = self.first_ranks
        stage = next(s for s in range(self.pp) if rank < first[s + 1])
        return RankPosition(stage, *divmod(rank - first[stage], self.tp))

    def rank(self, at: RankPosition) -> int:
        return self.first_ranks[at.stage] + at.replica * self.tp + at.tensor

    def micro_batches(self, stage: int, replica: int, total: int) -> range:
        """Which of a step's `total` micro-batches this replica runs. Those of a context group
        run the same."""
        return range(replica // self.cp, total, self.replicas_of[stage] // self.cp)

    def check_micro_batches(self, total: int) -> None:
        """Raises ConfigError where a replica of a step of `total` would have none, or those of
        interleaved stages do not take turns."""
        widest = max(self.widths or (self.dp,))
        if total < widest:
            raise ConfigError(
                f"{total} micro-batches a step are fewer than the {widest} replicas of a stage",
                hint=f"give at least {widest} micro-batches",
            )
        turn = self.dp * self.pp
        if self.virtual_stages > 1 and total % turn:
            raise ConfigError(
                f"{total} micro-batches a step go through {self.pp} stages of"
                f" {self.virtual_stages} parts each on {self.dp} replicas",
                hint=f"with virtual_stages above 1 they are a multiple of {turn}",
            )

    def __str__(self) -> str:
        more = "".join(
            f" x {name} {n}"
            for name, n in (
                ("cp", self.cp),
                ("ep", self.ep),
                ("virtual stages", self.virtual_stages),
            )
            if n > 1
        )
        data = f"dp {'+'.join(map(str, self.widths)) or self.dp}"
        return f"{data} x tp {self.tp} x pp {self.pp}{more}"

    def tensor_groups(self) -> list[list[int]]:
        return [list(range(i, i + self.tp)) for i in range(0, self.devices, self.tp)]

    def pipeline_groups(self) -> list[list[int]]:
        """As many as there are different ways through the stages, times tp: each once."""
        turns = math.lcm(*(n // self.cp for n in self.replicas_of))

        def passed(way: int, context: int, tensor: int) -> list[int]:
            return [
                self.rank(RankPosition(stage, way * self.cp % replicas + context, tensor))
                for stage, replicas in enumerate(self.replicas_of)
            ]

        return [
            passed(*each)
            for each in itertools.product(range(turns), range(self.cp), range(self.tp))
        ]

    def data_groups(self) -> list[list[int]]:
        """Stage by stage, inside a stage tensor rank by tensor rank."""
        return [
            list(range(first + tensor, following, self.tp))
            for first, following in itertools.pairwise(self.first_ranks)
            for tensor in range(self.tp)
        ]

    def layers(self, layers: int) -> tuple[int, ...]:
        """Of each stage, or of each part in the model's order (the first and the last of which
        may have only what comes before and after the layers). Raises ConfigError where they do
        not add up."""
        count = self.pp * self.virtual_stages
        if not self.stages:
            return even(layers, count)
        inner = self.stages if self.virtual_stages == 1 else self.stages[1:-1]
        if len(self.stages) != count or sum(self.stages) != layers or min(inner) < 1:
            raise ConfigError(
                f"stages of {', '.join(map(str, self.stages))} layers are {len(self.stages)} with "
                f"{sum(self.stages)} layers in all, the model has {layers} for {count} stages",
                hint="one number a stage, each 1 or more, adding up to the model's layers",
            )
        return self.stages


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, the first ones one more where it does not divide. Raises ConfigError
    for more stages than layers."""
    if not 0 < stages <= layers:
        raise ConfigError(
            f"{layers} layers cannot be {stages} stages", hint="pp is at most the number of layers"
        )
    return tuple(layers // stages + (i < layers % stages) for i in range(stages))


def balanced(
    weights: Sequence[float],
    speeds: Sequence[float],
    *,
    ends: tuple[float, float] = (0.0, 0.0),
    fits: Callable[[int, int, int], bool] = lambda stage, begin, stop: True,
) -> tuple[int, ...] | None:
    """Layers of each stage, so that the slowest takes as short as can be: `weights` (FLOPs) of each
    layer over `speeds` of each stage. `ends`: of what comes before the first layer and after the
    last. `fits(stage, begin, stop)`: whether these layers fit its memory (and so do fewer). None
    where they fit nowhere.

    Exact: the best of all first stages up to each layer, stage after stage; those slower than a
    bound are left out, which grows until there is an answer. Even stages are taken where they
    are as fast."""
    before = [0.0, *itertools.accumulate(weights)]
    total, n = len(weights), len(speeds)

    def took(stage: int, begin: int, stop: int) -> float:
        own = before[stop] - before[begin] + ends[0] * (stage == 0) + ends[1] * (stage == n - 1)
        return own / speeds[stage]

    def within(bound: float) -> tuple[float, tuple[int, ...]] | None:
        # stop -> slowest, squares, stages
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
        for stage in range(n):
            following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            first = stage + 1 if stage < n - 1 else total
            for stop in range(first, total - (n - 1 - stage) + 1):
                for begin in range(stop - 1, stage - 1, -1):
                    seconds = took(stage, begin, stop)
                    if seconds > bound or not fits(stage, begin, stop):
                        break
                    if begin in best:
                        slowest, squares, stages = best[begin]
                        one = max(slowest, seconds), squares + seconds**2, (*stages, stop - begin)
                        following[stop] = min(following.get(stop, one), one)
            best = following
        return (best[total][0], best[total][2]) if total in best else None

    whole = before[-1] + sum(ends)
    bound, most = 1.1 * whole / sum(speeds), whole / min(speeds)
    while (found := within(bound)) is None:
        if n > total or bound >= most:
            return None
        bound *= 1.5
    flat = even(total, n)
    spans = [(i, stop - flat[i], stop) for i, stop in enumerate(itertools.accumulate(flat))]
    as_fast = max(took(*span) for span in spans) <= found[0] * (1 + 1e-9)
    return flat if as_fast and all(fits(*span) for span in spans) else found[1]
