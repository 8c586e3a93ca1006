"""How many blocks each stage of a pipeline has, so that a step is as short as can be: exactly, by
the published formula, and all alike.

The exact search begins with good sizes: the others', with blocks given from stage to stage as long
as that helps. Then it goes through all sizes by a bound, the least first, and runs those that are
whole through the step model, until no bound is below the best. Where that takes too long (deep
pipelines over slow links, many interleaved parts), it ends and says how much better sizes could be
at most. With the pass of a stage its forward and
backward of one micro-batch, no step is shorter than any of:

    the way of the first micro-batch to a stage and of the last one back, and between them all
    passes of the stage's busiest replica
    that way, and one round from the stage to the last one and back for each time that its
    activations' slots are used anew

For stages that are not decided, the least that any sizes of theirs give, over all remaining blocks,
found from the last stage backwards. Pure arithmetic.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from roadtrain.stages.parallelism import even
from roadtrain.stages.protocol.pipeline import PipelineShape
from roadtrain.stages.protocol.step_model import StepModel, StepWork
from roadtrain.units import show_seconds

ALPHA = 1.05  # Yang et al. (Holmes), Figure 5: what faster clusters take over their share
MOST_LOOKED_AT = 200_000  # beginnings of sizes, before the search says that it is not through
AS_GOOD = 1e-9  # relative: what rounding may make of the same seconds
MOST_RUNS = 256  # sizes that run through the step model together

# whether a stage's memory has room for these blocks; where it has not, neither has it for more
Fits = Callable[[int, tuple[range, ...]], bool]


def always(stage: int, blocks: tuple[range, ...]) -> bool:
    return True


@dataclass(frozen=True)
class FoundSizes:
    """sizes: blocks of each part in the model's order. at_least_s: no sizes that fit have a
    shorter step."""

    sizes: tuple[int, ...]
    step_s: float
    at_least_s: float

    @property
    def proven(self) -> bool:
        """Whether no other sizes are better."""
        return self.step_s <= self.at_least_s * (1 + AS_GOOD)


def blocks_of(sizes: Sequence[int], stages: int) -> list[tuple[range, ...]]:
    """Of each stage: the blocks of its parts."""
    stops = [*itertools.accumulate(sizes, initial=0)]
    ranges = [range(begin, stop) for begin, stop in itertools.pairwise(stops)]
    return [tuple(ranges[stage::stages]) for stage in range(stages)]


def all_fit(sizes: Sequence[int], stages: int, fits: Fits) -> bool:
    return all(fits(stage, blocks) for stage, blocks in enumerate(blocks_of(sizes, stages)))


def best_sizes(
    work: StepWork,
    *,
    fits: Fits = always,
    candidates: Sequence[Sequence[int]] = (),
    most_looked_at: int = MOST_LOOKED_AT,
) -> FoundSizes | None:
    """The sizes with the shortest step among those that fit; the most even ones where they are as
    good. known: sizes than which it is never worse. None where none fit."""
    return _SizeSearch(work, fits).run(candidates, most_looked_at)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The sizes of the first parts."""

    sizes: tuple[int, ...]
    stop: int  # the first block that is not in them
    # seconds of a micro-batch's way to each of these parts and back, and to the one after them
    ways: tuple[float, ...]
    passes: tuple[float, ...]  # seconds of a pass of each stage, of these parts


class _SizeSearch:
    def __init__(self, work: StepWork, fits: Fits) -> None:
        self.work, self.fits = work, fits
        self.model = StepModel(work)
        self.stages, self.parts = len(work.stages), work.parts
        self.blocks = len(work.weights)
        widths = work.widths
        self.runs = [math.ceil(work.num_microbatches / width) for width in widths]
        self.rounds = [
            math.ceil(runs / PipelineShape(s, 0, widths, 1, work.num_microbatches).ahead)
            for s, runs in enumerate(self.runs)
        ]
        self.lightest = min(work.weights)
        self.best: tuple[float, tuple[int, ...]] | None = None
        self._find_bounds()

    def run(self, candidates: Sequence[Sequence[int]], most_looked_at: int) -> FoundSizes | None:
        flat = even(self.blocks, self.parts)
        self._try([sizes for sizes in (flat, *map(tuple, candidates)) if self._all_fit(sizes)])
        self._improve()
        left_s = self._search(most_looked_at)
        if self.best is None:
            return None
        step_s, sizes = self.best
        return FoundSizes(sizes, step_s, min(step_s, left_s))

    def _search(self, most_looked_at: int) -> float:
        """The beginnings of sizes, the least bound first, until none is better or enough were
        looked at and some fit. The bound of what is left."""
        numbers = itertools.count()
        start = _Prefix((), 0, (0.0,), (0.0,) * self.stages)
        heap = [(self.ends[0][0], next(numbers), start)]
        whole: list[tuple[int, ...]] = []
        at_once = 1
        while heap:
            bound, _, begun = heap[0]
            if self._is_no_better(bound) or bound == math.inf:
                break
            if self.best is not None and next(numbers) >= most_looked_at:
                break
            heapq.heappop(heap)
            if len(begun.sizes) == self.parts:
                whole.append(begun.sizes)
            for one in self._longer(begun):
                number, least = next(numbers), max(bound, self._bound(one))
                if not self._is_no_better(least):
                    heapq.heappush(heap, (least, -number, one))
            if len(whole) >= at_once:
                self._try(whole)
                whole, at_once = [], min(2 * at_once, MOST_RUNS)
        self._try(whole)
        return heap[0][0] if heap else math.inf

    def _improve(self) -> None:
        """Gives blocks from one part to another, as long as that is better: a good beginning, of
        which the search has less to look at."""
        before = None
        while self.best is not None and self.best != before:
            before = self.best
            near = []
            for source, target in itertools.permutations(range(self.parts), 2):
                sizes = list(before[1])
                sizes[source] -= 1
                sizes[target] += 1
                near.append(tuple(sizes))
            self._try([sizes for sizes in near if self._all_fit(sizes)])

    def _is_no_better(self, bound: float) -> bool:
        return self.best is not None and bound >= self.best[0] * (1 - AS_GOOD)

    def _all_fit(self, sizes: tuple[int, ...]) -> bool:
        return min(sizes) >= 1 and all_fit(sizes, self.stages, self.fits)

    def _try(self, many: Sequence[tuple[int, ...]]) -> None:
        if many:
            for step_s, sizes in zip(self.model.seconds_of_all(many).tolist(), many, strict=True):
                if not self._is_no_better(step_s):
                    self.best = step_s, sizes

    def _longer(self, begun: _Prefix) -> Iterator[_Prefix]:
        """With one part more, of each size that fits and leaves the others a block each."""
        part = len(begun.sizes)
        left = self.parts - part - 1
        if left < 0:
            return
        stage = part % self.stages
        stops = range(begun.stop + 1, self.blocks - left + 1) if left else (self.blocks,)
        for stop in stops:
            sizes = (*begun.sizes, stop - begun.stop)
            if not self.fits(stage, blocks_of(sizes, self.stages)[stage]):
                return
            seconds = self._pass_s(part, begun.stop, stop)
            passes = list(begun.passes)
            passes[stage] += seconds
            ways = (*begun.ways, begun.ways[-1] + seconds + self._link_s(part))
            yield _Prefix(sizes, stop, ways, tuple(passes))

    def _pass_s(self, part: int, begin: int, stop: int) -> float:
        speed = self.work.stages[part % self.stages]
        return self.work.weight(part, begin, stop) * speed.pass_s

    def _link_s(self, part: int) -> float:
        """Over the boundary after a part and back."""
        if part == self.parts - 1 or self.stages == 1:
            return 0.0
        speed = self.work.boundaries[part % self.stages]
        return speed.activations_s + speed.gradients_s

    def _bound(self, begun: _Prefix) -> float:
        done = len(begun.sizes)
        after = begun.ways[-1]
        bound = after + self.ends[done][begun.stop]
        for stage in range(min(done, self.stages)):
            to_come = sum(part % self.stages == stage for part in range(done, self.parts))
            least = to_come * self.lightest * self.work.stages[stage].pass_s
            runs_s = self.runs[stage] * (begun.passes[stage] + least)
            bound = max(bound, begun.ways[stage] + runs_s)
            if self.work.virtual_stages == 1:
                round_s = after + self.rests[done][begun.stop] - begun.ways[stage]
                bound = max(bound, begun.ways[stage] + self.rounds[stage] * round_s)
        return bound

    def _find_bounds(self) -> None:
        """For the parts from each one on and the blocks from each one on, over all sizes that fit
        each stage alone: `ends`, the least time from the first forward to the last backward;
        `rests`, the least seconds of a micro-batch's way through them and back."""
        none = [math.inf] * self.blocks
        self.ends = [[*none, 0.0]]
        self.rests = [[*none, 0.0]]
        if self.work.virtual_stages > 1:
            zeros = [0.0] * (self.blocks + 1)
            self.ends = self.rests = [zeros] * (self.parts + 1)
            return
        for part in reversed(range(self.parts)):
            ends, rests = [*none, math.inf], [*none, math.inf]
            for begin in range(part, self.blocks):
                for stop in range(begin + 1, self.blocks + 1):
                    if not self.fits(part, (range(begin, stop),)):
                        break
                    seconds = self._pass_s(part, begin, stop)
                    on = seconds + self._link_s(part)
                    whole = max(self.runs[part] * seconds, on + self.ends[0][stop])
                    ends[begin] = min(ends[begin], whole)
                    rests[begin] = min(rests[begin], on + self.rests[0][stop])
            self.ends.insert(0, ends)
            self.rests.insert(0, rests)


def paper_sizes(
    work: StepWork, clusters: Sequence[str], *, fits: Fits = always, alpha: float = ALPHA
) -> tuple[int, ...] | None:
    """Yang et al. (Holmes), section 3.3: blocks of a cluster in proportion to its speed, times
    `alpha` for clusters faster than the mean, rounded down; the last takes the rest. Inside a
    cluster all stages alike. Where a cluster's memory has no room it gets fewer, or where it is the
    last, the first that has room gets more. None where that does not help, and for interleaved
    stages, of which the paper says nothing.

    clusters: of each stage, those of one cluster beside each other.
    """
    if work.virtual_stages > 1:
        return None
    names = list(dict.fromkeys(clusters))
    counts = [sum(one == name for one in clusters) for name in names]
    sizes = _by_formula(work, clusters, names, alpha)
    sizes = _with_room_for_all(sizes, counts)
    for _ in range(len(work.weights) * len(names) + 1):
        flat = tuple(n for own, k in zip(sizes, counts) for n in even(own, k))
        wrong = {
            clusters[stage]
            for stage, blocks in enumerate(blocks_of(flat, len(clusters)))
            if not fits(stage, blocks)
        }
        if not wrong:
            return flat
        full = names.index(next(name for name in names if name in wrong))
        takers = [i for i, name in enumerate(names) if name not in wrong]
        to = len(names) - 1 if full < len(names) - 1 else next(iter(takers), None)
        if to is None or sizes[full] <= counts[full]:
            return None
        sizes[full] -= 1
        sizes[to] += 1
    return None


def _by_formula(
    work: StepWork, clusters: Sequence[str], names: Sequence[str], alpha: float
) -> list[int]:
    """Blocks of each cluster. Its speed: of all its devices."""
    speed = dict.fromkeys(names, 0.0)
    for name, stage, width in zip(clusters, work.stages, work.widths, strict=True):
        speed[name] += width / stage.pass_s
    total, blocks = sum(speed.values()), len(work.weights)
    mean = total / len(names)
    shares = [
        math.floor((alpha if speed[name] > mean else 1.0) * speed[name] / total * blocks)
        for name in names[:-1]
    ]
    return [*shares, blocks - sum(shares)]


def _with_room_for_all(sizes: list[int], counts: Sequence[int]) -> list[int]:
    """With at least a block a stage, taken from the cluster that has most."""
    sizes = list(sizes)
    while any(own < count for own, count in zip(sizes, counts)):
        short = next(i for i, own in enumerate(sizes) if own < counts[i])
        most = max(range(len(sizes)), key=lambda i: sizes[i] - counts[i])
        sizes[short] += 1
        sizes[most] -= 1
    return sizes


@dataclass(frozen=True)
class SizesTable:
    """The exact search beside the paper's formula and even stages. others: by name, their sizes
    and seconds a step; None: they do not fit."""

    best: FoundSizes
    others: Mapping[str, tuple[tuple[int, ...], float] | None]

    def __str__(self) -> str:
        rows = {**self.others, "exact": (self.best.sizes, self.best.step_s)}
        texts = [" + ".join(map(str, row[0])) if row else "-" for row in rows.values()]
        lines = []
        for (name, row), text in zip(rows.items(), texts):
            said = f"{show_seconds(row[1])} a step" if row else "does not fit"
            if row and row[1] > self.best.step_s * (1 + AS_GOOD):
                said += f", {row[1] / self.best.step_s - 1:.1%} more"
            lines.append(f"{name:<8} {text:<{max(map(len, texts))}}  {said}")
        if not self.best.proven:
            lines.append(
                f"exact: the search stopped early; no stages take less than"
                f" {show_seconds(self.best.at_least_s)}"
            )
        return "\n".join(lines)


def compare_sizes(
    work: StepWork,
    clusters: Sequence[str],
    *,
    fits: Fits = always,
    most_looked_at: int = MOST_LOOKED_AT,
) -> SizesTable | None:
    """clusters: of each stage. None where no sizes fit."""
    model, flat = StepModel(work), even(len(work.weights), work.parts)
    sizes_of = {"even": flat if all_fit(flat, len(work.stages), fits) else None}
    if work.virtual_stages == 1:
        sizes_of["paper"] = paper_sizes(work, clusters, fits=fits)
    others = {n: (own, model.seconds(own)) if own else None for n, own in sizes_of.items()}
    known = [own for own in sizes_of.values() if own]
    best = best_sizes(work, fits=fits, candidates=known, most_looked_at=most_looked_at)
    return None if best is None else SizesTable(best, others)
