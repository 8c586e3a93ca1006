"""How fast this rank computes: a short timing of its own segment of the model, forward and backward
of one micro-batch, block by block; and what each block leaves for its backward.

Forward is timed by block, between the moments at which blocks begin; backward as a whole, shared
out over the blocks as forward is. The model, its buffers, its gradients and the random numbers are
as before. Does NOT communicate.

Assumes: the segment's parameters have values; nobody else computes on this device; no optimizer is
placed on the model yet.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.protocol.stage_memory import BlockMemory
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_part import LossFunction

# Note: a mean over a second. A host may compute in bursts (a limit of CPU time is one of every
# 100 ms), of which short timings or a median would see the fast part alone.
TIMED_S = 1.0
LEAST_PASSES, MOST_PASSES = 3, 200  # after two that are not counted
LEAST_WEIGHT = 0.01  # of a block without parameters


@dataclass(frozen=True)
class RankTimes:
    """Of one rank. Seconds are of one micro-batch and a block of weight 1."""

    forward_s: float
    backward_s: float
    before: float  # weight of what comes before the model's first block; 0 where it is not here
    after: float  # of what comes after the last one, with the loss
    activation_bytes: Mapping[int, int]  # of each own block: kept from forward to backward
    before_bytes: int = 0
    after_bytes: int = 0


@dataclass
class _Pass:
    """One timed forward and backward of all segments. Block -1 stands for what comes before the
    model's first block, the one after the last for what comes behind it. Whatever else a stage
    computes for itself before its blocks (masks, positions) is its first block's."""

    starts: list[tuple[int, float]] = field(default_factory=list)  # (block, when it began)
    forward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    backward_s: float = 0.0
    kept: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    storages: set[int] = field(default_factory=set)  # that are counted, or the model's own

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
    """Times the segments of `stage_model`, which is attached, for `least_s` or a few passes more.
    weights: of all blocks of the model; none: all alike."""
    count = len(stage_model.cuts.blocks)
    weights = weights or (1.0,) * count

    def one_pass() -> _Pass:
        found = _Pass()
        for segment in stage_model.segments:
            _time(found, stage_model, segment, batch, loss)
        return found

    with _as_before(stage_model.model, stage_model.device):
        one_pass()
        passes = math.ceil(least_s / one_pass().seconds)
        many = [one_pass() for _ in range(min(MOST_PASSES, max(LEAST_PASSES, passes)))]
    forward = {block: fmean(one.forward[block] for one in many) for block in many[0].forward}
    before, after = forward.pop(-1, 0.0), forward.pop(count, 0.0)
    forward_s = sum(forward.values())
    unit = forward_s / sum(weights[block] for block in forward)
    backward = fmean(one.backward_s for one in many) / (forward_s + before + after)
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
    """Elements of each block's parameters; of what comes before all blocks, and after. parameters:
    how many elements each of the whole model has, by its name."""
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
    """Work of each block over that of the mean one, taken to be as its parameters' elements."""
    mean = sum(counts) / len(counts)
    return tuple(max(count / mean, LEAST_WEIGHT) if mean else 1.0 for count in counts)


def block_memories(
    cuts: Cuts, parameters: Mapping[str, int], times: Sequence[RankTimes]
) -> tuple[tuple[BlockMemory, ...], tuple[BlockMemory, BlockMemory]]:
    """Of all blocks; of what comes before and after. parameters: as for `block_parameters`. A
    block that none of `times` is of keeps for its backward what the others keep at most."""
    counts, ends = block_parameters(cuts, parameters)
    kept: dict[int, int] = {}
    for one in times:
        for number, nbytes in one.activation_bytes.items():
            kept[number] = max(nbytes, kept.get(number, 0))
    most = max(kept.values(), default=0)
    blocks = tuple(BlockMemory(count, kept.get(i, most)) for i, count in enumerate(counts))
    before, after = (max(one.before_bytes for one in times), max(one.after_bytes for one in times))
    return blocks, (BlockMemory(ends[0], before), BlockMemory(ends[1], after))


def _time(
    one: _Pass, stage_model: StageModel, segment: Segment, batch: MicroBatch, loss: LossFunction
) -> None:
    model, device = stage_model.model, stage_model.device
    one.storages = {_storage(x) for x in (*model.parameters(), *model.buffers())}
    received = _received(stage_model, segment)
    blocks = [model.get_submodule(n) for n in stage_model.cuts.blocks]
    hooks = [
        blocks[i].register_forward_pre_hook(_begins(one, i, device))
        for i in range(segment.begin, segment.stop)
    ]
    if segment.stop == len(blocks):
        hooks.append(blocks[-1].register_forward_hook(_begins(one, segment.stop, device)))
    try:
        one.starts = [(segment.begin or -1, finished_at(device))]
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(_keeps(one), lambda x: x),
        ):
            ended, value = stage_model.run(segment, received, batch)
            ends = [loss(value, batch)] if ended else _with_gradient(value)
        stop = finished_at(device)
    finally:
        for hook in hooks:
            hook.remove()
    _backward(stage_model, received, ends)
    one.backward_s += finished_at(device) - stop
    moments = [*one.starts, (segment.stop, stop)]
    for (block, begin), (_, end) in itertools.pairwise(moments):
        one.forward[block] += end - begin


def _backward(
    stage_model: StageModel, received: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]
) -> None:
    """Gradients of what a backward of the stage gives, which nobody keeps."""
    own = [p for p in stage_model.model.parameters() if p.requires_grad]
    wanted = [*own, *(x for x in received if x.requires_grad)]
    if ends and wanted:  # else all of it is frozen
        ones = [torch.ones_like(x) for x in ends]
        torch.autograd.grad(ends, wanted, ones, allow_unused=True)


def _received(stage_model: StageModel, segment: Segment) -> list[torch.Tensor]:
    """What might have crossed the cut before the segment."""
    if not segment.begin:
        return []
    return [
        torch.zeros(x.shape, dtype=x.dtype, device=stage_model.device).requires_grad_(
            x.requires_grad
        )
        for x in stage_model.cuts.crossing(segment.begin)
    ]


def _begins(one: _Pass, block: int, device: torch.device) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        one.starts.append((block, finished_at(device)))

    return hook


def _keeps(one: _Pass) -> Callable[[torch.Tensor], torch.Tensor]:
    """Counts a storage that is kept for backward to the block that keeps it first."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = _storage(tensor)
        if key not in one.storages:
            one.storages.add(key)
            one.kept[one.starts[-1][0]] += tensor.untyped_storage().nbytes()
        return tensor

    return pack


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _with_gradient(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]


def finished_at(device: torch.device) -> float:
    """When all that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def _as_before(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers (running means) and random numbers are after it what they were before."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
