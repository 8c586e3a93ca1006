"""Parallelism: which devices form which parallel groups, and which layers each pipeline stage has.
Arithmetic only.

Devices are numbered host by host, from 0, in the order of the clusters. With t tensor-, p pipeline-
and d data-parallel ranks (d p t = N), as in Yang et al. (Holmes), equations 1 to 3, here from 0:

    tensor group i     i t + j                                   j < t     inside one host
    pipeline group i   i + j t d                                 j < p     a stage is t d devices
                                                                 that follow each other
    data group i       i mod t + (i div t) d t + j t             j < d     inside one stage

Context-parallel ranks have a part of each sequence, and the same parameters: d here is dp x cp, and
the ranks of a context group follow each other in a data group. So do those of an expert group,
which has each expert once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Self

from pydantic import model_validator

from roadtrain.config.schema import Count, Whole, refusing, value
from roadtrain.errors import ConfigError


@value
class Parallelism:
    """Degrees of data, tensor, pipeline, context and expert parallelism."""

    dp: Count = 1
    tp: Count = 1
    pp: Count = 1
    # layers of each pipeline stage, or of each virtual stage in the model's order; none: as even
    # as can be
    stages: tuple[Whole, ...] = ()
    cp: Count = 1
    ep: Count = 1  # divides dp x cp
    # parts of the model that a pipeline stage has, part k of all stages before part k + 1 of any
    virtual_stages: Count = 1

    @model_validator(mode="after")
    @refusing
    def _experts_fit(self) -> Self:
        if self.replicas % self.ep:
            raise ConfigError(
                f"ep {self.ep} does not divide dp {self.dp} x cp {self.cp}",
                hint="every expert group is a part of a data group",
            )
        return self

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters, but for experts."""
        return self.dp * self.cp

    @property
    def devices(self) -> int:
        return self.replicas * self.tp * self.pp

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
        return f"dp {self.dp} x tp {self.tp} x pp {self.pp}{more}"

    def tensor_groups(self) -> list[list[int]]:
        return [[i * self.tp + j for j in range(self.tp)] for i in range(self.pp * self.replicas)]

    def pipeline_groups(self) -> list[list[int]]:
        stage = self.tp * self.replicas
        return [[i + j * stage for j in range(self.pp)] for i in range(stage)]

    def data_groups(self) -> list[list[int]]:
        t, d = self.tp, self.replicas
        return [[i % t + (i // t * d + j) * t for j in range(d)] for i in range(self.pp * t)]

    def context_groups(self) -> list[list[int]]:
        return [
            group[i : i + self.cp]
            for group in self.data_groups()
            for i in range(0, self.replicas, self.cp)
        ]

    def expert_groups(self) -> list[list[int]]:
        return [
            group[i : i + self.ep]
            for group in self.data_groups()
            for i in range(0, self.replicas, self.ep)
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
            for stop in (
                range(stage + 1, total - (n - 1 - stage) + 1) if stage < n - 1 else (total,)
            ):
                for begin in range(stop - 1, stage - 1, -1):
                    if (seconds := took(stage, begin, stop)) > bound or not fits(
                        stage, begin, stop
                    ):
                        break
                    if begin in best:
                        slowest, squares, stages = best[begin]
                        one = max(slowest, seconds), squares + seconds**2, (*stages, stop - begin)
                        following[stop] = min(following.get(stop, one), one)
            best = following
        return (best[total][0], best[total][2]) if total in best else None

    bound, most = (
        1.1 * (before[-1] + sum(ends)) / sum(speeds),
        (before[-1] + sum(ends)) / min(speeds),
    )
    while (found := within(bound)) is None:
        if n > total or bound >= most:
            return None
        bound *= 1.5
    flat = even(total, n)
    stops = [*itertools.accumulate(flat)]
    same = max(took(i, stop - flat[i], stop) for i, stop in enumerate(stops)) <= found[0] * (
        1 + 1e-9
    )
    return (
        flat
        if same and all(fits(i, stop - flat[i], stop) for i, stop in enumerate(stops))
        else found[1]
    )
