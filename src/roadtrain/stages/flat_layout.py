"""StageParameters: the parameters of a stage by their names in the whole model. FlatLayout: the
layout of the trainable parameters in flat memory, divided among the stage's data-parallel ranks.
Does NOT communicate.

Parameters of one dtype and one parameter group form a run, in the model's order. Each set of stages
that share parameters (tied embeddings) has separate runs, ordered by name, which are equal in all
of these stages. A run is divided into buckets, the unit of communication, and a bucket into equal
shares, one per rank. Both may begin and end inside a parameter. A run is padded at its end, so that
its last bucket divides into equal shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import nn

from roadtrain.chunks import PARAM_ALIGN, TRAINABLE, ParamSpec, Span, cut_spans
from roadtrain.errors import ModelError
from roadtrain.streaming.split import DTYPES, NAMES
from roadtrain.units import round_up

GRADIENT_ITEMSIZE = 4  # gradients are summed in fp32
# dtypes whose values fp32 represents exactly
FROZEN_DTYPES = (*TRAINABLE, "i8", "u8", "i16", "bool")


@dataclass(frozen=True)
class FlatRun:
    """A run of parameters in flat memory.

    `spans`: the position of each parameter in the run, in elements (`Span.param` is the parameter's
    index in the stage). `group`: the index of the parameter group. `link`: the index of the set of
    stages that share these parameters; None if only this stage has them.
    """

    dtype: str
    group: int
    link: int | None
    numel: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the run with the index `run`.

    `group`: the index of the run's parameter group. `spans`: the positions of the parameters in the
    bucket, in elements. `width`: the number of ranks that have a share of the bucket. `link`: the
    index of the set of stages that share these parameters; None if only this stage has them.
    """

    run: int
    group: int
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
        """Number of elements in each rank's share."""
        return self.numel // self.width

    def of_rank(self, rank: int) -> slice:
        """Return the range of the bucket's elements that are a rank's share."""
        return slice(rank * self.share, (rank + 1) * self.share)

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """Return the positions of the parameters in a rank's share, in elements from the start of
        the share."""
        own = self.of_rank(rank)
        return cut_spans(self.spans, own.start, own.stop)


@dataclass(frozen=True)
class FlatLayout:
    """The flat layout of a stage's parameters. The `buckets` are in the order in which a forward
    needs their parameters."""

    params: tuple[ParamSpec, ...]
    runs: tuple[FlatRun, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def buckets_of(self) -> tuple[tuple[int, ...], ...]:
        """For each parameter, the indices of the buckets that contain elements of it."""
        out: list[list[int]] = [[] for _ in self.params]
        for index, bucket in enumerate(self.buckets):
            for span in bucket.spans:
                out[span.param].append(index)
        return tuple(map(tuple, out))

    def shared_runs(self, link: int) -> list[int]:
        """Return the indices of the runs that the set of stages `link` share, in the same order in
        all of these stages."""
        own = [i for i, run in enumerate(self.runs) if run.link == link and run.spans]
        return sorted(own, key=lambda i: self.params[self.runs[i].spans[0].param].name)

    def shared_buckets(self, link: int) -> list[int]:
        """Return the indices of the buckets that the set of stages `link` share, in the same order
        in all of these stages."""
        place = {run: at for at, run in enumerate(self.shared_runs(link))}
        own = [i for i, bucket in enumerate(self.buckets) if bucket.run in place]
        return sorted(own, key=lambda i: (place[self.buckets[i].run], self.buckets[i].start))

    def describe(self, link: int | None = None) -> str:
        """Return the layout as a text, by which ranks compare their layouts. link: the index of a
        set of stages; if it is not None, the text contains only the runs that these stages
        share."""
        if link is None:
            runs, buckets = [*range(len(self.runs))], [*range(len(self.buckets))]
            groups = repr([run.group for run in self.runs])
        else:
            runs, buckets, groups = self.shared_runs(link), self.shared_buckets(link), ""
        members = [
            (
                self.runs[i].dtype,
                [(self.params[s.param].name, s.start, s.stop) for s in self.runs[i].spans],
            )
            for i in runs
        ]
        cuts = [(self.buckets[i].start, self.buckets[i].stop) for i in buckets]
        return repr((members, cuts)) + groups


def lay_out(
    params: Sequence[ParamSpec],
    width: int,
    bucket_bytes: int,
    link_of: Mapping[str, int],
    link_widths: Sequence[Sequence[int]],
) -> FlatLayout:
    """Lay out `params` over `width` ranks.

    params: the trainable parameters, in the order of the forward. bucket_bytes: the bytes of a
    bucket's fp32 gradients, rounded up to equal shares. link_of: for each shared parameter, by
    name, the index of the set of stages that share it. link_widths: for each set, the number of
    ranks of each of its stages.
    """
    members: dict[tuple[int, str, int], list[int]] = {}
    for i, spec in enumerate(params):
        key = (link_of.get(spec.name, -1), spec.dtype, spec.group)
        members.setdefault(key, []).append(i)
    runs: list[FlatRun] = []
    buckets: list[Bucket] = []
    for (link, dtype, group), indices in sorted(members.items(), key=lambda item: item[1][0]):
        widths = link_widths[link] if link >= 0 else (width,)
        grain = math.lcm(*widths) * PARAM_ALIGN
        spans, numel = list[Span](), 0
        for i in sorted(indices, key=lambda i: params[i].name) if link >= 0 else indices:
            if params[i].numel:
                spans.append(Span(i, numel, numel + params[i].numel, 0))
                numel += round_up(params[i].numel, PARAM_ALIGN)
        shared = link if link >= 0 else None
        run = FlatRun(dtype, group, shared, round_up(numel, grain), tuple(spans))
        size = max(grain, round_up(bucket_bytes // GRADIENT_ITEMSIZE, grain))
        for start in range(0, run.numel, size):
            stop = min(start + size, run.numel)
            parts = cut_spans(run.spans, start, stop)
            buckets.append(Bucket(len(runs), group, start, stop, width, run.link, parts))
        runs.append(run)
    buckets.sort(key=lambda bucket: min((s.param for s in bucket.spans), default=0))
    return FlatLayout(tuple(params), tuple(runs), tuple(buckets))


def overlaps(numel: int, start: int, stop: int, widths: Sequence[int]) -> list[int]:
    """Return how many elements of [start, stop) are in each rank's share, for all ranks of all
    stages. Each stage divides `numel` elements into equal shares. widths: the number of ranks of
    each stage."""
    shares = chain.from_iterable(
        ((r * numel // d, (r + 1) * numel // d) for r in range(d)) for d in widths
    )
    return [max(0, min(stop, end) - max(start, begin)) for begin, end in shares]


class StageParameters:
    """The parameters of a stage by name. `trainable`: the parameters that are in the optimizer and
    require gradients. `frozen`: all other parameters.

    Raises ModelError if a parameter is on `meta` or has an unsupported dtype, if trainable
    parameters are on several devices, or if the optimizer has parameters of other stages.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.trainable: dict[str, nn.Parameter] = {}
        self.frozen: dict[str, nn.Parameter] = {}
        # frozen parameters that are in the optimizer; they must stay frozen
        self.late: dict[str, nn.Parameter] = {}
        self.specs: list[ParamSpec] = []
        for name, p in model.named_parameters():
            trains = p.requires_grad and p in groups
            self._check(name, p, trains)
            (self.trainable if trains else self.frozen)[name] = p
            if not trains and p in groups:
                self.late[name] = p
            if trains:
                spec = ParamSpec(name, tuple(p.shape), NAMES[p.dtype], True, groups[p])
                self.specs.append(spec)
        own = {*self.trainable.values(), *self.frozen.values()}
        strangers = sum(p not in own for p in groups)
        if strangers:
            raise ModelError(
                f"the optimizer has {strangers} parameters that are not in the stage",
                hint="give the optimizer only the stage's own parameters",
            )
        some = next(iter((*self.trainable.values(), *self.frozen.values())), torch.empty(0))
        self.device = some.device

    def _check(self, name: str, p: nn.Parameter, trains: bool) -> None:
        devices = {q.device for q in (*self.trainable.values(), p)} if trains else {p.device}
        if p.is_meta or len(devices) > 1:
            raise ModelError(
                f"parameter {name!r} is on {p.device}, but a stage must be on one CPU or GPU",
                hint="move all parameters of the stage to one device first",
            )
        allowed = TRAINABLE if trains else FROZEN_DTYPES
        if NAMES.get(p.dtype) not in allowed:
            raise ModelError(
                f"{'trainable' if trains else 'frozen'} parameter {name!r} has dtype {p.dtype},"
                f" but supported dtypes are {', '.join(allowed)}",
                hint="cast the parameter" if trains else "cast the parameter, or make it a buffer",
            )

    def flatten(self, layout: FlatLayout) -> list[torch.Tensor]:
        """Copy the trainable parameters to flat memory, and make them views of it. Return the
        memory as one tensor per run."""
        params = list(self.trainable.values())
        out = []
        for run in layout.runs:
            flat = torch.zeros(run.numel, dtype=DTYPES[run.dtype], device=self.device)
            for index, view in views_of(flat, run, layout.params):
                view.copy_(params[index].detach())
                params[index].data = view
            out.append(flat)
        return out


def views_of(
    flat: torch.Tensor, run: FlatRun, params: Sequence[ParamSpec]
) -> list[tuple[int, torch.Tensor]]:
    """Return views of a run's parameters in its memory `flat`, as pairs (index of the parameter,
    view)."""
    return [(s.param, flat[s.start : s.stop].view(params[s.param].shape)) for s in run.spans]


def views_of_all(layout: FlatLayout, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view of each parameter, in the layout's order. flats: the memory of each run."""
    held: dict[int, torch.Tensor] = {}
    for flat, run in zip(flats, layout.runs, strict=True):
        held |= views_of(flat, run, layout.params)
    return [
        # parameters without elements are in no run
        held[i] if i in held else torch.empty(spec.shape, device=flats[0].device)
        for i, spec in enumerate(layout.params)
    ]
