"""FlatRun, Bucket: a stage's trainable parameters laid out flat and cut for its data-parallel
ranks. Arithmetic only.

Parameters of one dtype and one parameter group form a run, in the model's order. So do those that
the same other stages have copies of, in the order of their names, which is the same in all of them.
A run is cut into buckets, which travel one at a time; a bucket is cut into as many equal shares as
there are ranks, and share r is rank r's. Neither respects the borders of parameters. A run's end is
padded, so that the last bucket divides, also by the widths of the other stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from roadtrain.chunks import PARAM_ALIGN, ParamSpec, Span, cut_spans
from roadtrain.units import round_up

GRADIENT_ITEMSIZE = 4  # gradients are summed in fp32


@dataclass(frozen=True)
class FlatRun:
    """Spans are of parameters (`Span.param` is an index into the stage's), in elements of the
    run. `link`: index of the copies in other stages; None: there are none."""

    dtype: str
    group: int
    link: int | None
    numel: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of run `run`; its spans are in elements of the bucket."""

    run: int
    start: int
    stop: int
    width: int
    link: int | None
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def share(self) -> int:
        """Elements of each rank."""
        return self.numel // self.width

    def of_rank(self, rank: int) -> slice:
        """The rank's share, in elements of the bucket."""
        return slice(rank * self.share, (rank + 1) * self.share)

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """In elements of the rank's share."""
        own = self.of_rank(rank)
        return cut_spans(self.spans, own.start, own.stop)


@dataclass(frozen=True)
class FlatLayout:
    """`buckets` are in the order in which a forward needs them."""

    params: tuple[ParamSpec, ...]
    runs: tuple[FlatRun, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def buckets_of(self) -> tuple[tuple[int, ...], ...]:
        """Of each parameter."""
        out: list[list[int]] = [[] for _ in self.params]
        for index, bucket in enumerate(self.buckets):
            for span in bucket.spans:
                out[span.param].append(index)
        return tuple(map(tuple, out))

    def shared_runs(self, link: int) -> list[int]:
        """Those of `link`, in an order that is the same in all stages that have it."""
        own = [i for i, run in enumerate(self.runs) if run.link == link and run.spans]
        return sorted(own, key=lambda i: self.params[self.runs[i].spans[0].param].name)

    def shared_buckets(self, link: int) -> list[int]:
        """Those of `link`, in an order that is the same in all stages that have it."""
        place = {run: at for at, run in enumerate(self.shared_runs(link))}
        own = [i for i, bucket in enumerate(self.buckets) if bucket.run in place]
        return sorted(own, key=lambda i: (place[self.buckets[i].run], self.buckets[i].start))

    def describe(self, runs: Iterable[int], buckets: Iterable[int]) -> str:
        """What ranks that have these must agree on."""
        members = [
            (
                self.runs[i].dtype,
                [(self.params[s.param].name, s.start, s.stop) for s in self.runs[i].spans],
            )
            for i in runs
        ]
        return repr((members, [(self.buckets[i].start, self.buckets[i].stop) for i in buckets]))

    @property
    def whole(self) -> str:
        """What the ranks of the stage must agree on."""
        groups = [run.group for run in self.runs]
        return self.describe(range(len(self.runs)), range(len(self.buckets))) + repr(groups)

    def common(self, link: int) -> str:
        """What all stages of `link` must agree on."""
        return self.describe(self.shared_runs(link), self.shared_buckets(link))


def lay_out(
    params: Sequence[ParamSpec],
    width: int,
    bucket_bytes: int,
    link_of: Mapping[str, int],
    link_widths: Sequence[Sequence[int]],
) -> FlatLayout:
    """The layout of `params` (trainable ones, in the order of the forward) over `width` ranks.
    bucket_bytes: of fp32 gradients, rounded up. link_of: parameters that other stages have too, by
    name; link_widths: ranks of each stage that has a link's parameters."""
    members: dict[tuple[int, str, int], list[int]] = {}
    for i, spec in enumerate(params):
        key = (link_of.get(spec.name, -1), spec.dtype, spec.group)
        members.setdefault(key, []).append(i)
    runs: list[FlatRun] = []
    buckets: list[Bucket] = []
    for (link, dtype, group), indices in sorted(members.items(), key=lambda item: item[1][0]):
        widths = link_widths[link] if link >= 0 else (width,)
        grain = math.lcm(*widths) * PARAM_ALIGN
        order = sorted(indices, key=lambda i: params[i].name) if link >= 0 else indices
        spans, numel = _spans(params, order)
        run = FlatRun(dtype, group, link if link >= 0 else None, round_up(numel, grain), spans)
        size = max(grain, round_up(bucket_bytes // GRADIENT_ITEMSIZE, grain))
        for start in range(0, run.numel, size):
            stop = min(start + size, run.numel)
            parts = cut_spans(spans, start, stop)
            buckets.append(Bucket(len(runs), start, stop, width, run.link, parts))
        runs.append(run)
    buckets.sort(key=lambda bucket: min((s.param for s in bucket.spans), default=0))
    return FlatLayout(tuple(params), tuple(runs), tuple(buckets))


def overlaps(numel: int, start: int, stop: int, widths: Sequence[int]) -> list[int]:
    """How many elements of [start, stop) each rank of stages of these widths has, where each
    stage cuts `numel` elements into equal shares: stage by stage, rank by rank."""
    shares = chain.from_iterable(
        ((r * numel // d, (r + 1) * numel // d) for r in range(d)) for d in widths
    )
    return [max(0, min(stop, end) - max(start, begin)) for begin, end in shares]


def _spans(params: Sequence[ParamSpec], order: Sequence[int]) -> tuple[tuple[Span, ...], int]:
    spans, at = [], 0
    for i in order:
        if params[i].numel:
            spans.append(Span(i, at, at + params[i].numel, 0))
            at += round_up(params[i].numel, PARAM_ALIGN)
    return tuple(spans), at
