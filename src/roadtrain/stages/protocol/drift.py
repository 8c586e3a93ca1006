"""DriftWatch: says when stages should get other sizes, since devices have become slower or faster
(heat, neighbours).

Each step every stage's seconds are given; the median of the last ones is taken for its speed, so
that single slow steps count for nothing. Other sizes are offered when they would have made each of
some steps in a row shorter by more than a threshold; after that, sizes are left alone for a while.
Pure: the same seconds give the same offers on every rank. Does NOT measure, nor move blocks.
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

MIN_GAIN = 0.1  # the share of a step that other sizes save at least, where nobody says another
WINDOW = 9  # steps of whose seconds the median is a stage's speed
# steps in a row for which other sizes are better; more than half a window, as so few slow steps
# make the median slow for no longer than half a window
HOLD = 5
REST = 50  # steps after an offer without another
GRAIN = 1.02  # speeds closer than this are the same: sizes are not searched for anew
MOST_LOOKED_AT = 20_000  # as of `best_sizes`: about half a second, while training waits
MOST_CACHED = 64  # speeds whose best sizes are remembered


@dataclass(frozen=True)
class SizesOffer:
    """Other sizes, and the step's seconds before and after, both with the speeds of now."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    before_s: float
    after_s: float
    passes_s: tuple[float, ...]  # of each stage now: a block of weight 1, forward and backward
    were_s: tuple[float, ...]  # of each stage when the sizes of now were chosen

    @property
    def gain(self) -> float:
        return 1 - self.after_s / self.before_s

    def __str__(self) -> str:
        changes = [now / then for now, then in zip(self.passes_s, self.were_s, strict=True)]
        stage = max(range(len(changes)), key=lambda i: abs(math.log(changes[i])))
        old, new = (" + ".join(map(str, sizes)) for sizes in (self.before, self.after))
        return (
            f"stage {stage} computes at {1 / changes[stage]:.0%} of its speed: stages of {new}"
            f" blocks instead of {old} would take {show_seconds(self.after_s)} a step instead of"
            f" {show_seconds(self.before_s)}"
        )


@dataclass
class DriftWatch:
    """work: with the speeds that `sizes` were chosen for. fits: as for `best_sizes`. gain: the
    share of a step that other sizes save at least."""

    work: StepWork
    sizes: tuple[int, ...]
    fits: Fits = always
    gain: float = MIN_GAIN
    # of each stage, the seconds of the last WINDOW steps
    _seen: list[deque[float]] = field(init=False)
    _better_for: int = field(init=False, default=0)  # steps in a row
    _resting: int = field(init=False, default=0)  # steps that are left without an offer
    # speeds, rounded to GRAIN -> the best sizes for them
    _cache: dict[tuple[int, ...], FoundSizes | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._seen = [deque(maxlen=WINDOW) for _ in self.work.stages]

    def step(self, passes_s: Sequence[float]) -> SizesOffer | None:
        """After each step. passes_s: of each stage, the seconds in which its slowest replica ran
        a block of weight 1 forward and backward for one micro-batch. An offer is None where the
        sizes should stay."""
        for seen, one in zip(self._seen, passes_s, strict=True):
            seen.append(one)
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
        """The stages have the sizes of `offer` from the next step on."""
        self.work, self.sizes = self._work_at(offer.passes_s), offer.after
        self._cache.clear()
        for seen in self._seen:
            seen.clear()

    def _offer(self, passes_s: tuple[float, ...]) -> SizesOffer | None:
        """Where other sizes gain enough at these speeds."""
        work = self._work_at(passes_s)
        key = tuple(round(math.log(one, GRAIN)) for one in passes_s)
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
        """Forwards and backwards keep their ratio; what follows the last backward its time."""
        stages = tuple(
            replace(
                stage,
                forward_s=stage.forward_s * now / stage.pass_s,
                backward_s=stage.backward_s * now / stage.pass_s,
            )
            for stage, now in zip(self.work.stages, passes_s, strict=True)
        )
        return replace(self.work, stages=stages)
