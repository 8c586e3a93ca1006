"""When other stage sizes are offered (stages/protocol/drift.py) and which sizes fit
(stage_memory.py)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from roadtrain.errors import BudgetError
from roadtrain.stages.protocol.drift import HOLD, MIN_GAIN, REST, WINDOW, DriftWatch, SizesOffer
from roadtrain.stages.protocol.stage_memory import BlockMemory, StageMemory
from roadtrain.stages.protocol.stage_sizes import best_sizes
from roadtrain.stages.protocol.step_model import StageSpeed, StepModel, StepWork
from tests.support.step_works import still_work

WORK = still_work((StageSpeed(0.1, 0.2),) * 2, 12, 16)


def watch(work: StepWork = WORK, gain: float = MIN_GAIN) -> DriftWatch:
    best = best_sizes(work)
    assert best is not None
    return DriftWatch(work, best.sizes, gain=gain)


def noisy(rng: Random, seconds: float) -> float:
    """A time with 5 % noise; one in ten is three times as slow."""
    return seconds * rng.uniform(0.95, 1.05) * (3 if rng.random() < 0.1 else 1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.slow
def test_noise_offers_nothing(seed: int) -> None:
    rng, drift = Random(seed), watch()
    assert drift.sizes == (6, 6)
    assert not any(drift.step([noisy(rng, 0.3), noisy(rng, 0.3)]) for _ in range(300))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.slow
def test_a_throttle_is_answered_within_steps(stage: int, seed: int) -> None:
    """A stage slows to 60 % of its speed, with 3 % noise: within half a window plus HOLD steps the
    sizes best at that speed are offered, and afterwards nothing more."""
    rng, drift = Random(seed), watch()

    def seconds(slow: float) -> list[float]:
        both = [0.3 * rng.uniform(0.97, 1.03) for _ in range(2)]
        both[stage] /= slow
        return both

    assert not any(drift.step(seconds(1.0)) for _ in range(20))
    steps = WINDOW // 2 + HOLD
    offers = [offer for _ in range(steps) if (offer := drift.step(seconds(0.6)))]
    assert len(offers) == 1
    offer = offers[0]
    assert offer.after == ((4, 8) if stage == 0 else (8, 4)) or offer.after in ((5, 7), (7, 5))
    assert offer.gain > MIN_GAIN
    assert f"stage {stage} computes at " in str(offer) and "instead of 6 + 6" in str(offer)
    drift.moved(offer)
    assert drift.sizes == offer.after
    assert not any(drift.step(seconds(0.6)) for _ in range(200))
    # the stage recovers: the old sizes are offered again
    back = [offer for _ in range(WINDOW + steps) if (offer := drift.step(seconds(1.0)))]
    assert [drift.after for drift in back] == [(6, 6)]


def test_a_declined_offer_is_repeated_after_a_rest() -> None:
    drift, first = watch(), WINDOW + HOLD - 2
    offered = [step for step in range(150) if drift.step([0.3, 0.6]) is not None]
    assert offered == [first, first + REST + HOLD, first + 2 * (REST + HOLD)]


def test_a_small_gain_is_not_offered() -> None:
    """With stage 1 at half its speed other sizes save about a quarter of the step."""
    asks_much, asks_less = watch(gain=0.4), watch(gain=0.2)
    assert not any(asks_much.step([0.3, 0.6]) for _ in range(50))
    assert any(asks_less.step([0.3, 0.6]) for _ in range(50))


def test_offers_respect_memory() -> None:
    drift = DriftWatch(WORK, (6, 6), fits=lambda stage, blocks: sum(map(len, blocks)) <= 7)
    offers = [offer for _ in range(20) if (offer := drift.step([0.3, 0.6]))]
    assert [offer.after for offer in offers] == [(7, 5)]


def test_the_offers_sentence() -> None:
    offer = SizesOffer((6, 6), (8, 4), 10.0, 8.0, (0.3, 0.5), (0.3, 0.3))
    assert str(offer) == (
        "stage 1 computes at 60% of its earlier speed: with 8 + 4 blocks per stage instead of 6 + 6,"
        " a step would take 8 s instead of 10 s"
    )


WIDE = replace(still_work((StageSpeed(1, 2),) * 2, 8, 8), widths=(2, 1))
MEMORY = StageMemory(
    WIDE,
    (1000.0, 700.0),
    (BlockMemory(10, 20),) * 8,
    (BlockMemory(5, 0), BlockMemory(0, 40)),
)


def test_a_stages_memory() -> None:
    """Stage 0: 3 blocks and the embedding; 8 bytes per parameter plus 8 / 2 of state; activations
    of two micro-batches (width 2 before width 1: one forward ahead of a backward). Stage 1: 8 + 8
    bytes per parameter, activations of one micro-batch."""
    assert MEMORY.need(0, (range(3),)) == 35 * (8 + 4) + 2 * 60
    assert MEMORY.need(1, (range(3, 8),)) == 50 * 16 + 1 * (5 * 20 + 40)
    assert not MEMORY.fits(1, (range(3, 8),)) and MEMORY.fits(1, (range(5, 8),))
    found = best_sizes(WIDE, fits=MEMORY.fits)
    assert found is not None and found.sizes == (5, 3)


def test_memories_that_fit_nothing() -> None:
    small = StageMemory(WIDE, (500.0, 400.0), MEMORY.blocks)
    with pytest.raises(BudgetError, match="no division of 8 blocks into 2 stages fits: stage") as e:
        raise small.refusal()
    lacking = [
        max(small.need(0, (range(k),)) - 500, small.need(1, (range(k, 8),)) - 400)
        for k in range(1, 8)
    ]
    assert f"{min(lacking):.0f} B more on each device" in e.value.hint


def test_the_offered_gain_equals_the_model() -> None:
    drift = watch()
    offer = next(found for _ in range(20) if (found := drift.step([0.3, 0.5])))
    slow = still_work((StageSpeed(0.1, 0.2), StageSpeed(0.5 / 3, 1 / 3)), 12, 16)
    assert offer.before_s == pytest.approx(StepModel(slow).seconds((6, 6)))
    assert offer.after_s == pytest.approx(StepModel(slow).seconds(offer.after))
