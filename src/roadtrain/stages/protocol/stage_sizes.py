"""Choose the number of blocks of each pipeline stage: by an exact search for the shortest step, by
the formula of a paper, or evenly.

The exact search begins with the best of equal sizes and the caller's candidates, and improves these
sizes by moving single blocks. Then a best-first branch and bound extends the sizes of the first
parts (ranges of blocks) of the model, until no lower bound is below the best step time. A search
that takes too long stops early. A pass of a stage is the forward and backward of one micro-batch. A
step takes at least as long as each of these two sums:

    the travel time of a micro-batch from the first stage to stage s and back, plus the time of all
    passes of the busiest replica of stage s

    the same travel time, plus n times the time of a round trip from stage s to the last stage and
    back, where n is (micro-batches of the busiest replica of stage s) / (micro-batches whose
    activations this replica can hold at once), rounded up

For a stage whose size is not chosen yet, the sums contain the shortest possible time.
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

ALPHA = 1.05  # factor on the blocks of faster clusters (Yang et al. (Holmes), Figure 5)
MOST_LOOKED_AT = 200_000  # number of partial sizes that are examined before the search stops early
AS_GOOD = 1e-9  # relative difference below which two times count as equal, because of rounding
MOST_RUNS = 256  # most sizes that the step model evaluates in one batch

# (stage, its blocks) -> whether the blocks fit into the stage's memory; if they do not fit, more
# blocks must not fit either
Fits = Callable[[int, tuple[range, ...]], bool]


def always(stage: int, blocks: tuple[range, ...]) -> bool:
    return True


@dataclass(frozen=True)
class FoundSizes:
    """The result of a search. sizes: the number of blocks of each part of the model, in order.
    step_s: the seconds of a step with these sizes. at_least_s: a lower bound on the seconds of a
    step with any sizes that fit."""

    sizes: tuple[int, ...]
    step_s: float
    at_least_s: float

    @property
    def proven(self) -> bool:
        """True if the search has proven that no other sizes are better."""
        return self.step_s <= self.at_least_s * (1 + AS_GOOD)


def blocks_of(sizes: Sequence[int], stages: int) -> list[tuple[range, ...]]:
    """Return, for each stage, the ranges of blocks that it runs. sizes: the number of blocks in
    each range, in the model's order; range i belongs to stage i mod `stages`."""
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
    """Return the sizes with the shortest step among the sizes that fit, or None. Equal sizes are
    preferred if they are as good.

    fits: whether given blocks fit into a stage's memory. candidates: sizes to try first.
    most_looked_at: the number of examined partial sizes after which the search stops early.
    """
    return _SizeSearch(work, fits).run(candidates, most_looked_at)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The sizes of the first parts of the model: a node of the search tree."""

    sizes: tuple[int, ...]
    stop: int  # index of the first block after these parts
    # seconds of a micro-batch's way to each of these parts and back, and finally to the next part
    # and back
    ways: tuple[float, ...]
    # for each stage, seconds of a pass through those of these parts that it has
    passes: tuple[float, ...]


class _SizeSearch:
    """The exact search for the sizes with the shortest step. `best`: (seconds of a step, sizes) of
    the best sizes so far, or None."""

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
        """Search by branch and bound, until no bound is better than the best step or, once sizes
        were found, `most_looked_at` partial sizes were examined. Return a lower bound on the
        seconds of a step with sizes that were not examined."""
        numbers = itertools.count()
        start = _Prefix((), 0, (0.0,), (0.0,) * self.stages)
        heap = [(self.ends[0][0], next(numbers), start)]
        whole: list[tuple[int, ...]] = []
        at_once = 1
        while heap:
            bound, _, prefix = heap[0]
            if self._is_no_better(bound) or bound == math.inf:
                break
            if self.best is not None and next(numbers) >= most_looked_at:
                break
            heapq.heappop(heap)
            if len(prefix.sizes) == self.parts:
                whole.append(prefix.sizes)
            for longer in self._longer(prefix):
                number, least = next(numbers), max(bound, self._bound(longer))
                if not self._is_no_better(least):
                    heapq.heappush(heap, (least, -number, longer))
            if len(whole) >= at_once:
                self._try(whole)
                whole, at_once = [], min(2 * at_once, MOST_RUNS)
        self._try(whole)
        return heap[0][0] if heap else math.inf

    def _improve(self) -> None:
        """Move single blocks between parts of the model as long as each move shortens the best
        step."""
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

    def _longer(self, prefix: _Prefix) -> Iterator[_Prefix]:
        """Yield the prefixes that have one part more than `prefix`, one for each size that fits."""
        part = len(prefix.sizes)
        left = self.parts - part - 1
        if left < 0:
            return
        stage = part % self.stages
        stops = range(prefix.stop + 1, self.blocks - left + 1) if left else (self.blocks,)
        for stop in stops:
            sizes = (*prefix.sizes, stop - prefix.stop)
            if not self.fits(stage, blocks_of(sizes, self.stages)[stage]):
                return
            seconds = self._pass_s(part, prefix.stop, stop)
            passes = list(prefix.passes)
            passes[stage] += seconds
            ways = (*prefix.ways, prefix.ways[-1] + seconds + self._link_s(part))
            yield _Prefix(sizes, stop, ways, tuple(passes))

    def _pass_s(self, part: int, begin: int, stop: int) -> float:
        speed = self.work.stages[part % self.stages]
        return self.work.weight(part, begin, stop) * speed.pass_s

    def _link_s(self, part: int) -> float:
        """Return the seconds in which a micro-batch crosses the boundary after a part forward and
        back."""
        if part == self.parts - 1 or self.stages == 1:
            return 0.0
        speed = self.work.boundaries[part % self.stages]
        return speed.activations_s + speed.gradients_s

    def _bound(self, prefix: _Prefix) -> float:
        """Return a lower bound on the seconds of a step with any sizes that begin with `prefix`."""
        done = len(prefix.sizes)
        after = prefix.ways[-1]
        bound = after + self.ends[done][prefix.stop]
        for stage in range(min(done, self.stages)):
            to_come = sum(part % self.stages == stage for part in range(done, self.parts))
            least = to_come * self.lightest * self.work.stages[stage].pass_s
            runs_s = self.runs[stage] * (prefix.passes[stage] + least)
            bound = max(bound, prefix.ways[stage] + runs_s)
            if self.work.virtual_stages == 1:
                round_s = after + self.rests[done][prefix.stop] - prefix.ways[stage]
                bound = max(bound, prefix.ways[stage] + self.rounds[stage] * round_s)
        return bound

    def _find_bounds(self) -> None:
        """Compute tables [part][block] of least seconds for that part and all later parts, if they
        begin at that block. `ends`: from the first forward to the last backward. `rests`: for one
        micro-batch through them and back."""
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
    """Return the sizes of Yang et al. (Holmes), section 3.3, or None if none fit or stages are
    interleaved.

    A cluster gets blocks in proportion to its speed, times `alpha` if it is faster than the mean,
    rounded down; the last cluster gets the remaining blocks. Inside a cluster, sizes are equal. A
    cluster with too little memory gives blocks to the last cluster, and the last cluster to the
    first with enough memory. clusters: the cluster of each stage; the stages of a cluster must be
    adjacent.
    """
    if work.virtual_stages > 1:
        return None
    names = list(dict.fromkeys(clusters))
    counts = [sum(cluster == name for cluster in clusters) for name in names]
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
    """Give each cluster at least one block per stage, from the cluster with the most to spare."""
    sizes = list(sizes)
    while any(own < count for own, count in zip(sizes, counts)):
        short = next(i for i, own in enumerate(sizes) if own < counts[i])
        most = max(range(len(sizes)), key=lambda i: sizes[i] - counts[i])
        sizes[short] += 1
        sizes[most] -= 1
    return sizes


@dataclass(frozen=True)
class SizesTable:
    """A comparison of the exact search (`best`) with the paper's formula and equal sizes. others:
    "paper" or "even" -> (sizes, seconds of a step), or None if the sizes do not fit."""

    best: FoundSizes
    others: Mapping[str, tuple[tuple[int, ...], float] | None]

    def __str__(self) -> str:
        rows = {**self.others, "exact": (self.best.sizes, self.best.step_s)}
        texts = [" + ".join(map(str, row[0])) if row else "-" for row in rows.values()]
        lines = []
        for (name, row), text in zip(rows.items(), texts):
            time = f"{show_seconds(row[1])} a step" if row else "does not fit"
            if row and row[1] > self.best.step_s * (1 + AS_GOOD):
                time += f", {row[1] / self.best.step_s - 1:.1%} more"
            lines.append(f"{name:<8} {text:<{max(map(len, texts))}}  {time}")
        if not self.best.proven:
            lines.append(
                f"exact: the search stopped early; no sizes take less than"
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
    """Compare exact, paper and even sizes. Return None if no sizes fit in memory. clusters: the
    cluster of each stage."""
    model, flat = StepModel(work), even(len(work.weights), work.parts)
    sizes_of = {"even": flat if all_fit(flat, len(work.stages), fits) else None}
    if work.virtual_stages == 1:
        sizes_of["paper"] = paper_sizes(work, clusters, fits=fits)
    others = {n: (own, model.seconds(own)) if own else None for n, own in sizes_of.items()}
    fitting = [own for own in sizes_of.values() if own]
    best = best_sizes(work, fits=fits, candidates=fitting, most_looked_at=most_looked_at)
    return None if best is None else SizesTable(best, others)
