"""Parallelism: the degrees of parallelism, the groups of devices, and the layers of each pipeline
stage. Does NOT communicate.

Devices are numbered host by host, from 0. With t tensor-parallel, p pipeline-parallel and d
data-parallel ranks, the groups are those of Yang et al. (Holmes), equations 1 to 3, with indices
from 0:

    tensor group i     i t + j                                   j < t     inside one host
    pipeline group i   i + j t d                                 j < p     a stage is t d
                                                                           consecutive devices
    data group i       i mod t + (i div t) d t + j t             j < d     inside one stage

If stages differ in width (number of data-parallel ranks), devices are numbered by stage, then
replica, then tensor rank. Micro-batch i goes through replica i mod d_s of stage s, which has d_s
replicas. The devices that a micro-batch passes form a pipeline group.

Context-parallel ranks process parts of each sequence with the same parameters, so the d above is dp
x cp. The ranks of a context group or an expert group are consecutive in a data group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

from roadtrain.errors import ConfigError
from roadtrain.options.schema import Count, Whole, refusing, value


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The position of a rank in the pipeline. `replica`: the index of the rank's replica in the
    stage; every context-parallel rank counts as a replica."""

    stage: int
    replica: int
    tensor: int


@value
class Parallelism:
    """Degrees of data, tensor, pipeline, context and expert parallelism.

    Args:
        dp: Number of data-parallel ranks of every stage. Leave `dp` out if `widths` is set.
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline stages.
        stages: Number of layers of each pipeline stage or, with virtual stages, of each virtual
            stage in the model's order. If empty, layers are divided as evenly as possible.
        cp: Number of context-parallel ranks (simulation only).
        ep: Number of expert-parallel ranks (simulation only). It must divide dp x cp.
        virtual_stages: Number of parts of the model in each pipeline stage (interleaved schedule).
            A micro-batch passes part k of every stage before part k + 1 of any stage.
        widths: Number of data-parallel ranks of each stage, if stages differ. Equal widths are
            stored as `dp`.

    Raises:
        ConfigError: The degrees do not fit together.
    """

    dp: Count = 1
    tp: Count = 1
    pp: Count = 1
    stages: tuple[Whole, ...] = ()
    cp: Count = 1
    ep: Count = 1
    virtual_stages: Count = 1
    widths: tuple[Count, ...] = ()

    @model_validator(mode="after")
    @refusing
    def _widths_fit(self) -> Self:
        if not self.widths:
            return self
        widths = f"widths {', '.join(map(str, self.widths))}"
        if len(self.widths) != self.pp:
            raise ConfigError(
                f"{widths} do not match pp {self.pp}", hint="give one width per stage"
            )
        if self.dp != 1 and set(self.widths) != {self.dp}:
            raise ConfigError(
                f"dp {self.dp} and {widths} contradict each other",
                hint="leave out dp if widths is set",
            )
        if len(set(self.widths)) == 1:
            object.__setattr__(self, "dp", self.widths[0])
            object.__setattr__(self, "widths", ())
        elif self.virtual_stages > 1:
            raise ConfigError(
                f"{widths} differ, but virtual_stages is {self.virtual_stages}",
                hint="virtual_stages above 1 needs equal widths: set dp instead of widths",
            )
        return self

    @model_validator(mode="after")
    @refusing
    def _experts_fit(self) -> Self:
        for stage, width in enumerate(self.widths or (self.dp,)):
            if width * self.cp % self.ep:
                degree = f"width {width}" if self.widths else f"dp {width}"
                where = f" of stage {stage}" if self.widths else ""
                raise ConfigError(
                    f"ep {self.ep} does not divide {degree} x cp {self.cp}{where}",
                    hint="choose an ep that divides dp x cp of every stage",
                )
        return self

    @property
    def replicas_of(self) -> tuple[int, ...]:
        """Number of replicas (ranks with the same parameters, except for experts) of each stage."""
        return tuple(width * self.cp for width in self.widths or (self.dp,) * self.pp)

    @property
    def replicas(self) -> int:
        """Number of replicas of every stage. Raises ConfigError if stages differ."""
        if self.widths:
            raise ConfigError(
                f"widths {', '.join(map(str, self.widths))} must be equal in a simulation",
                hint="set dp instead of widths",
            )
        return self.dp * self.cp

    @property
    def devices(self) -> int:
        return sum(self.replicas_of) * self.tp

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each stage, followed by the number of devices."""
        return tuple(itertools.accumulate((n * self.tp for n in self.replicas_of), initial=0))

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...]:
        """Pairs (stage, next stage) between which activations are sent; with virtual stages, also
        (last stage, first stage)."""
        last = ((self.pp - 1, 0),) if self.virtual_stages > 1 and self.pp > 1 else ()
        return (*itertools.pairwise(range(self.pp)), *last)

    def position(self, rank: int) -> RankPosition:
        """Return the position of a rank. Raises ConfigError if there is no such rank."""
        if not 0 <= rank < self.devices:
            raise ConfigError(f"rank {rank} is out of range: {self} has {self.devices} ranks")
        first = self.first_ranks
        stage = next(s for s in range(self.pp) if rank < first[s + 1])
        return RankPosition(stage, *divmod(rank - first[stage], self.tp))

    def rank(self, at: RankPosition) -> int:
        return self.first_ranks[at.stage] + at.replica * self.tp + at.tensor

    def micro_batches(self, stage: int, replica: int, total: int) -> range:
        """Return the numbers of the micro-batches that a replica runs in a step of `total`
        micro-batches."""
        return range(replica // self.cp, total, self.replicas_of[stage] // self.cp)

    def check_micro_batches(self, total: int) -> None:
        """Raise ConfigError if `total` micro-batches leave a replica without any or, with virtual
        stages, are not a multiple of dp x pp."""
        widest = max(self.widths or (self.dp,))
        if total < widest:
            raise ConfigError(
                f"a step has {total} micro-batches, but a stage has {widest} replicas",
                hint=f"set at least {widest} micro-batches, one for each replica",
            )
        turn = self.dp * self.pp
        if self.virtual_stages > 1 and total % turn:
            raise ConfigError(
                f"a step has {total} micro-batches, but with virtual_stages"
                f" {self.virtual_stages} the number must be a multiple of dp x pp = {turn}",
                hint=f"use a multiple of {turn} micro-batches, or set virtual_stages = 1",
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

    def data_groups(self) -> list[list[int]]:
        """Return the data groups, ordered by stage and tensor rank."""
        return [
            list(range(first + tensor, following, self.tp))
            for first, following in itertools.pairwise(self.first_ranks)
            for tensor in range(self.tp)
        ]

    def layers(self, layers: int) -> tuple[int, ...]:
        """Return the number of layers of each stage or, with virtual stages, of each virtual stage
        in the model's order. Of virtual stages, the first and last may have 0 layers, because they
        have the embedding and the head. Raises ConfigError if `stages` does not add up to
        `layers`."""
        count = self.pp * self.virtual_stages
        if not self.stages:
            return even(layers, count)
        inner = self.stages if self.virtual_stages == 1 else self.stages[1:-1]
        if len(self.stages) != count or sum(self.stages) != layers or min(inner) < 1:
            raise ConfigError(
                f"stages {', '.join(map(str, self.stages))} divide {sum(self.stages)} layers among"
                f" {len(self.stages)} stages, but {layers} layers and {count} stages are needed",
                hint="give one number per stage, each at least 1, adding up to the model's layers",
            )
        return self.stages


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage if layers are divided evenly; the first stages may
    have one more. Raises ConfigError if there are more stages than layers."""
    if not 0 < stages <= layers:
        raise ConfigError(
            f"{layers} layers cannot fill {stages} stages", hint=f"set pp to at most {layers}"
        )
    return tuple(layers // stages + (i < layers % stages) for i in range(stages))


def balanced(
    weights: Sequence[float],
    speeds: Sequence[float],
    *,
    ends: tuple[float, float] = (0.0, 0.0),
    fits: Callable[[int, int, int], bool] = lambda stage, begin, stop: True,
) -> tuple[int, ...] | None:
    """Return the number of layers of each stage so that the slowest stage is as fast as possible,
    or None if no division fits.

    `weights`: the work of each layer (FLOPs). `speeds`: the work that each stage does in a unit of
    time. `ends`: the work before the first layer and after the last. `fits(stage, begin, stop)`:
    whether layers [begin, stop) fit in the stage's memory; any smaller range must fit, too. The
    result is exact; an even division is preferred if it is as fast.
    """
    before = [0.0, *itertools.accumulate(weights)]
    total, n = len(weights), len(speeds)

    def took(stage: int, begin: int, stop: int) -> float:
        own = before[stop] - before[begin] + ends[0] * (stage == 0) + ends[1] * (stage == n - 1)
        return own / speeds[stage]

    def within(bound: float) -> tuple[float, tuple[int, ...]] | None:
        # first layer of the next stage -> seconds of the slowest stage, sum of all stages' squared
        # seconds, number of layers of each stage
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
                        new = max(slowest, seconds), squares + seconds**2, (*stages, stop - begin)
                        following[stop] = min(following.get(stop, new), new)
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
