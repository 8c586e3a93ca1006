"""stages/block_times.py: the speed of a segment, block by block; the model is left unchanged."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch import nn

from roadtrain.stages import block_times
from roadtrain.stages.block_times import (
    block_memories,
    block_parameters,
    block_weights,
    measure_blocks,
)
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.protocol.stage_memory import BlockMemory
from roadtrain.stages.stage_model import MicroBatch, StageModel

ROWS, WIDTH = 4, 8
MOMENT_S = 1e-6


class Clock:
    """Replaces `time`: only sleeps take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.linear(_Sleeps.apply(x, self.seconds))))


class Slow(nn.Module):
    """A model whose blocks take 5 ms forward and 10 ms backward times their weight, with a head of
    10 ms and a short embedding."""

    def __init__(self, weights: tuple[float, ...]) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Block(0.005 * w) for w in weights)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = _Sleeps.apply(self.embed(x), MOMENT_S)
        for layer in self.layers:
            x = layer(x)
        return self.head(_Sleeps.apply(x, 0.01))


WEIGHTS = (1.0, 1.0, 3.0, 1.0)
BATCH = MicroBatch((torch.ones(ROWS, 3),))


def stage_of(*segments: Segment) -> tuple[StageModel, Cuts, dict[str, int]]:
    model = Slow(WEIGHTS)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    cuts = Cuts(model, BATCH.args, {})
    stage = StageModel(model, cuts, segments)
    stage.attach()
    return stage, cuts, sizes


def loss(result: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return result.square().sum()


@pytest.mark.parametrize(
    ("segments", "blocks", "after"),
    [
        ([Segment(0, 4)], [0, 1, 2, 3], 2.0),
        ([Segment(0, 2)], [0, 1], 0.0),
        ([Segment(2, 4)], [2, 3], 2.0),
        ([Segment(1, 3)], [1, 2], 0.0),
        ([Segment(0, 1), Segment(2, 3)], [0, 2], 0.0),
    ],
)
def test_the_speed_of_a_segment_is_measured_per_block(
    segments: list[Segment], blocks: list[int], after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 ms forward and 10 ms backward per weight of 1, wherever the cuts are; the head counts as
    two blocks. Stages without the embedding add its time to their blocks."""
    clock = Clock()
    monkeypatch.setattr(block_times, "time", clock)
    monkeypatch.setattr(sys.modules[__name__], "time", clock)
    stage, _, _ = stage_of(*segments)
    found = measure_blocks(stage, BATCH, loss, WEIGHTS, least_s=0.2)
    before = MOMENT_S / 0.005 if segments[0].begin == 0 else 0.0
    assert found.forward_s == pytest.approx(0.005, rel=1e-3)
    assert found.backward_s == pytest.approx(0.010, rel=1e-3)
    assert (found.before, found.after) == pytest.approx((before, after), rel=1e-3)
    assert sorted(found.activation_bytes) == blocks


@pytest.mark.slow
def test_timing_leaves_the_model_unchanged() -> None:
    stage, _, _ = stage_of(Segment(0, 4))
    model, rng = stage.model, torch.get_rng_state()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    called: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    measure_blocks(stage, BATCH, loss, least_s=0.1)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not called
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.slow
def test_parameters_and_activations_of_blocks_are_counted() -> None:
    """A block keeps at most its input, the output of its linear, two statistics, and the mask and
    input of its dropout; parameters count for the block that owns them."""
    stage, cuts, sizes = stage_of(Segment(0, 4))
    blocks, (before, after) = block_memories(
        cuts, sizes, [measure_blocks(stage, BATCH, loss, least_s=0.1)]
    )
    assert [block.parameters for block in blocks] == [WIDTH * WIDTH + WIDTH + 2 * WIDTH] * 4
    counts, ends = block_parameters(cuts, sizes)
    assert (counts, ends) == (tuple(b.parameters for b in blocks), (32, 18))
    assert block_weights(counts) == (1.0,) * 4 and block_weights((3, 1, 0)) == (2.25, 0.75, 0.01)
    assert before.parameters == 3 * WIDTH + WIDTH and after.parameters == 2 * WIDTH + 2
    state = ROWS * WIDTH * 4
    assert all(2 * state <= block.activation_bytes <= 4 * state + 4 * WIDTH * 4 for block in blocks)
    assert isinstance(before, BlockMemory) and after.activation_bytes > 0


def test_untimed_blocks_get_the_activations_of_the_others() -> None:
    stage, cuts, sizes = stage_of(Segment(2, 3))
    times = measure_blocks(stage, BATCH, loss, least_s=0.02)
    blocks, _ = block_memories(cuts, sizes, [times])
    assert {block.activation_bytes for block in blocks} == {times.activation_bytes[2]}


@pytest.mark.slow
def test_a_host_that_computes_in_bursts_does_not_count_as_fast() -> None:
    """Every third block stalls for the time of four blocks, as under a CPU limit: the mean includes
    the stalls, a median would not."""
    stage, _, _ = stage_of(Segment(0, 4))
    turns = iter(range(1 << 20))

    class Bursts(Block):
        def forward(self, x):
            time.sleep(0.02 if next(turns) % 3 == 0 else 0)
            return super().forward(x)

    for layer in stage.model.layers:
        layer.__class__ = Bursts
    stage.detach()
    stage.attach()
    found = measure_blocks(stage, BATCH, loss, WEIGHTS, least_s=0.5)
    assert found.forward_s >= 0.005 + 0.02 / 3 * 4 / 6 * 0.8
