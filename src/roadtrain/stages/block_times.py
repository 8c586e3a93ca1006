"""Measure, on this rank, the time and activation memory of a micro-batch's forward and backward.

Forward is timed per block. The total time of backward is divided among the blocks in proportion to
their forward times. The model's buffers, its gradients and the random number generators are left
unchanged. Does NOT communicate.

Assumes that the segments' parameters have values, that no other process computes on this device,
and that `place` was not called on the model.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch

from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.protocol.stage_memory import BlockMemory
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_part import LossFunction

# Note: the result is a mean over one second. A host may compute in bursts (a CPU quota is enforced
# per 100 ms), and a shorter timing or a median would see only the fast part of a burst.
TIMED_S = 1.0
LEAST_PASSES, MOST_PASSES = 3, 200  # number of timed passes, after two warm-up passes
LEAST_WEIGHT = 0.01  # the weight of a block without parameters


@dataclass(frozen=True)
class RankTimes:
    """The measurements of one rank. The weight of a block is its amount of work, relative to other
    blocks. `forward_s` and `backward_s`: the seconds of one micro-batch's forward and backward
    through a block of weight 1."""

    forward_s: float
    backward_s: float
    # weight of the layers before the model's first block; 0 if they are not on this rank
    before: float
    # weight of the layers after the last block and of the loss; 0 if they are not on this rank
    after: float
    # for each block of this rank, bytes that it keeps from forward to backward
    activation_bytes: Mapping[int, int]
    before_bytes: int = 0
    after_bytes: int = 0


@dataclass
class _Pass:
    """The timings of one forward and backward of all segments, by block number. Number -1 stands
    for the layers before the model's first block, and number n of a model with n blocks for the
    layers after the last block."""

    starts: list[tuple[int, float]] = field(default_factory=list)  # (block, start time)
    forward: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # seconds
    backward_s: float = 0.0
    kept: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # activation bytes
    # addresses of storages that are counted already, or belong to the model
    storages: set[int] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        return sum(self.forward.values()) + self.backward_s


def measure_blocks(
    stage_model: StageModel,
    batch: MicroBatch,
    loss: LossFunction,
    weights: Sequence[float] = (),
    *,
    least_s: float = TIMED_S,
) -> RankTimes:
    """Run the segments of `stage_model` for about `least_s` seconds, and return the measured times.

    `stage_model.attach` must have been called. weights: the amount of work of each block of the
    model, relative to other blocks (default: all equal).
    """
    count = len(stage_model.cuts.blocks)
    weights = weights or (1.0,) * count

    def one_pass() -> _Pass:
        timed = _Pass()
        for segment in stage_model.segments:
            _time(timed, stage_model, segment, batch, loss)
        return timed

    with _restored_state(stage_model.model, stage_model.device):
        one_pass()
        passes = math.ceil(least_s / one_pass().seconds)
        many = [one_pass() for _ in range(min(MOST_PASSES, max(LEAST_PASSES, passes)))]
    forward = {block: fmean(p.forward[block] for p in many) for block in many[0].forward}
    before, after = forward.pop(-1, 0.0), forward.pop(count, 0.0)
    forward_s = sum(forward.values())
    unit = forward_s / sum(weights[block] for block in forward)
    backward = fmean(p.backward_s for p in many) / (forward_s + before + after)
    kept = many[0].kept
    return RankTimes(
        unit,
        unit * backward,
        before / unit,
        after / unit,
        {block: kept[block] for block in forward},
        kept[-1],
        kept[count],
    )


def block_parameters(
    cuts: Cuts, parameters: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the number of parameter elements of each block, and those of the layers before the
    first block and after the last. parameters: the number of elements of every parameter, by
    name."""
    last = len(cuts.blocks) - 1
    counts, ends = [], [0, 0]
    for i, block in enumerate(cuts.blocks):
        names = cuts.parameters(Segment(i, i + 1))
        own = {name for name in names if name.startswith(f"{block}.")}
        rest = sum(parameters[name] for name in names - own)
        ends[0] += rest * (i == 0)
        ends[1] += rest * (i == last and last > 0)
        counts.append(sum(parameters[name] for name in own))
    return tuple(counts), (ends[0], ends[1])


def block_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """Return the estimated weight of each block: its number of parameters divided by the mean over
    all blocks, but at least 0.01. counts: the number of parameters of each block."""
    mean = sum(counts) / len(counts)
    return tuple(max(count / mean, LEAST_WEIGHT) if mean else 1.0 for count in counts)


def block_memories(
    cuts: Cuts, parameters: Mapping[str, int], times: Sequence[RankTimes]
) -> tuple[tuple[BlockMemory, ...], tuple[BlockMemory, BlockMemory]]:
    """Return the memory of each block, and those of the layers before the first block and after the
    last.

    parameters: the number of elements of every parameter, by name. times: the measurements of all
    ranks. A block that no rank measured is assumed to keep as many activation bytes as the block
    that keeps the most.
    """
    counts, ends = block_parameters(cuts, parameters)
    kept: dict[int, int] = {}
    for measured in times:
        for number, nbytes in measured.activation_bytes.items():
            kept[number] = max(nbytes, kept.get(number, 0))
    most = max(kept.values(), default=0)
    blocks = tuple(BlockMemory(count, kept.get(i, most)) for i, count in enumerate(counts))
    before, after = (max(t.before_bytes for t in times), max(t.after_bytes for t in times))
    return blocks, (BlockMemory(ends[0], before), BlockMemory(ends[1], after))


def _time(
    timed: _Pass, stage_model: StageModel, segment: Segment, batch: MicroBatch, loss: LossFunction
) -> None:
    model, device = stage_model.model, stage_model.device
    timed.storages = {_storage(x) for x in (*model.parameters(), *model.buffers())}
    received = _received(stage_model, segment)
    blocks = [model.get_submodule(n) for n in stage_model.cuts.blocks]
    hooks = [
        blocks[i].register_forward_pre_hook(partial(_start, timed, i, device))
        for i in range(segment.begin, segment.stop)
    ]
    if segment.stop == len(blocks):
        after = partial(_start, timed, segment.stop, device)
        hooks.append(blocks[-1].register_forward_hook(after))
    try:
        timed.starts = [(segment.begin or -1, finished_at(device))]
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(partial(_save, timed), lambda x: x),
        ):
            ended, value = stage_model.run(segment, received, batch)
            ends = [loss(value, batch)] if ended else _with_gradient(value)
        stop = finished_at(device)
    finally:
        for hook in hooks:
            hook.remove()
    _backward(stage_model, received, ends)
    timed.backward_s += finished_at(device) - stop
    moments = [*timed.starts, (segment.stop, stop)]
    for (block, begin), (_, end) in itertools.pairwise(moments):
        timed.forward[block] += end - begin


def _backward(
    stage_model: StageModel, received: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]
) -> None:
    """Compute the gradients of a segment and discard them. received: the activations that the
    segment received. ends: the outputs of the segment that require gradients."""
    own = [p for p in stage_model.model.parameters() if p.requires_grad]
    inputs = [*own, *(x for x in received if x.requires_grad)]
    if ends and inputs:  # otherwise everything is frozen
        ones = [torch.ones_like(x) for x in ends]
        torch.autograd.grad(ends, inputs, ones, allow_unused=True)


def _received(stage_model: StageModel, segment: Segment) -> list[torch.Tensor]:
    """Return zeros in the shapes and dtypes of the activations that cross the cut before the
    segment."""
    if not segment.begin:
        return []
    shapes, device = stage_model.cuts.crossing(segment.begin), stage_model.device
    return [torch.zeros_like(x, device=device).requires_grad_(x.requires_grad) for x in shapes]


def _start(timed: _Pass, block: int, device: torch.device, *_: Any) -> None:
    timed.starts.append((block, finished_at(device)))


def _save(timed: _Pass, tensor: torch.Tensor) -> torch.Tensor:
    """Count the bytes that autograd saves for backward. A storage that several blocks save counts
    once, for the first of them."""
    key = _storage(tensor)
    if key not in timed.storages:
        timed.storages.add(key)
        timed.kept[timed.starts[-1][0]] += tensor.untyped_storage().nbytes()
    return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _with_gradient(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]


def finished_at(device: torch.device) -> float:
    """Wait until the GPU or CPU has finished all work, and return the time of
    `time.perf_counter`."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def _restored_state(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers (running means) and the random number generators on exit."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
