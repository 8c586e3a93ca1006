"""DriftWatch: propose new sizes of stages (numbers of blocks) when devices have become slower or
faster, for example because of heat. Does NOT measure times or move blocks.

A stage's speed is the median over its last steps. Sizes are offered if they would have shortened
each of several consecutive steps by more than a threshold. Pure: the same seconds give the same
offers on every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from roadtrain.stages.protocol.stage_sizes import Fits, FoundSizes, always, best_sizes
from roadtrain.stages.protocol.step_model import StepModel, StepWork
from roadtrain.units import show_seconds

MIN_GAIN = 0.1  # default of the smallest fraction of a step that other sizes must save
WINDOW = 9  # number of steps whose median is a stage's speed
# number of consecutive steps in which other sizes must be better. It is more than half of WINDOW,
# because a few slow steps can raise the median for at most half a window.
HOLD = 5
REST = 50  # number of steps after an offer in which there is no offer
GRAIN = 1.02  # speeds within this factor count as equal, so that best sizes are found in the cache
# limit for `best_sizes`, which takes about half a second, in which training waits
MOST_LOOKED_AT = 20_000
MOST_CACHED = 64  # number of speeds whose best sizes are cached


@dataclass(frozen=True)
class SizesOffer:
    """Proposed sizes of stages. `before_s` and `after_s`: the seconds of a step at the current
    speeds, with the current and with the proposed sizes."""

    before: tuple[int, ...]  # the current sizes
    after: tuple[int, ...]  # the proposed sizes
    before_s: float
    after_s: float
    # by stage: the current seconds of a block of weight 1, forward plus backward
    passes_s: tuple[float, ...]
    # by stage: these seconds at the time when the current sizes were chosen
    were_s: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The fraction of the time of a step that the proposed sizes save."""
        return 1 - self.after_s / self.before_s

    def __str__(self) -> str:
        changes = [now / then for now, then in zip(self.passes_s, self.were_s, strict=True)]
        stage = max(range(len(changes)), key=lambda i: abs(math.log(changes[i])))
        old, new = (" + ".join(map(str, sizes)) for sizes in (self.before, self.after))
        return (
            f"stage {stage} computes at {1 / changes[stage]:.0%} of its earlier speed: with {new}"
            f" blocks per stage instead of {old}, a step would take {show_seconds(self.after_s)}"
            f" instead of {show_seconds(self.before_s)}"
        )


@dataclass
class DriftWatch:
    """A watch over the speeds of stages. work: the work of a step, with the speeds for which
    `sizes` were chosen. sizes: the current number of blocks of each part of the model. fits:
    whether given blocks fit into a stage's memory. gain: the fraction of a step that offered sizes
    must save."""

    work: StepWork
    sizes: tuple[int, ...]
    fits: Fits = always
    gain: float = MIN_GAIN
    # by stage, the seconds of the last WINDOW steps
    _seen: list[deque[float]] = field(init=False)
    # number of consecutive steps in which other sizes were better
    _better_for: int = field(init=False, default=0)
    _resting: int = field(init=False, default=0)  # number of remaining steps without an offer
    # speeds rounded to GRAIN -> the best sizes for them
    _cache: dict[tuple[int, ...], FoundSizes | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._seen = [deque(maxlen=WINDOW) for _ in self.work.stages]

    def step(self, passes_s: Sequence[float]) -> SizesOffer | None:
        """Record the speeds in a step, and return an offer of other sizes, or None.

        passes_s: for each stage, the seconds that its slowest replica took for the forward and
        backward of one micro-batch through a block of weight 1.
        """
        for seen, pass_s in zip(self._seen, passes_s, strict=True):
            seen.append(pass_s)
        if self._resting:
            self._resting -= 1
            return None
        if len(self._seen[0]) < WINDOW:
            return None
        offer = self._offer(tuple(median(seen) for seen in self._seen))
        self._better_for = 0 if offer is None else self._better_for + 1
        if self._better_for < HOLD:
            return None
        self._better_for, self._resting = 0, REST
        return offer

    def moved(self, offer: SizesOffer) -> None:
        """Record that stages have the sizes of `offer` from the next step on."""
        self.work, self.sizes = self._work_at(offer.passes_s), offer.after
        self._cache.clear()
        for seen in self._seen:
            seen.clear()

    def _offer(self, passes_s: tuple[float, ...]) -> SizesOffer | None:
        work = self._work_at(passes_s)
        key = tuple(round(math.log(pass_s, GRAIN)) for pass_s in passes_s)
        if key not in self._cache:
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            self._cache[key] = best_sizes(
                work, fits=self.fits, candidates=[self.sizes], most_looked_at=MOST_LOOKED_AT
            )
        best = self._cache[key]
        if best is None or best.sizes == self.sizes:
            return None
        before_s, after_s = StepModel(work).seconds_of_all([self.sizes, best.sizes]).tolist()
        were = tuple(stage.pass_s for stage in self.work.stages)
        offer = SizesOffer(self.sizes, best.sizes, before_s, after_s, passes_s, were)
        return offer if offer.gain > self.gain else None

    def _work_at(self, passes_s: Sequence[float]) -> StepWork:
        """Return the work of a step with these speeds. A stage's forward and backward change by the
        same factor."""
        stages = tuple(
            replace(
                stage,
                forward_s=stage.forward_s * now / stage.pass_s,
                backward_s=stage.backward_s * now / stage.pass_s,
            )
            for stage, now in zip(self.work.stages, passes_s, strict=True)
        )
        return replace(self.work, stages=stages)
