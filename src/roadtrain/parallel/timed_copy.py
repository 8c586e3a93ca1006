"""A copy of one or two blocks of a model, to be timed before anybody has cut the model, given it
values or placed it: so sizes of stages are known before anything is built on them.

The copy has the model's own forward and shapes, and values of its own: what a block takes does not
depend on them. It takes the memory of the blocks that are timed, whatever the model's depth (Rule
4). The model stays as it is. Assumes: blocks that are alike take the same time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from roadtrain.parallel.cuts import Cuts, Segment
from roadtrain.parallel.stage_model import MicroBatch, StageModel

STD = 0.02  # of the values; small, so that nothing overflows in 16 bits


def sample_of(segments: Sequence[Segment], blocks: int) -> list[Segment]:
    """What stands for `segments` of a model of so many blocks: its first block and its last one,
    which have its ends, where they are in them; else the first own one."""
    own = [i for segment in segments for i in range(segment.begin, segment.stop)]
    chosen = [i for i in dict.fromkeys((0, blocks - 1)) if i in own] or own[:1]
    if len(chosen) == 2 and blocks == 2:
        return [Segment(0, 2)]
    return [Segment(i, i + 1) for i in chosen]


def timed_copy(
    model: nn.Module,
    batch: MicroBatch,
    segments: Sequence[Segment],
    device: torch.device,
    dtype: torch.dtype | None = None,
    blocks: Sequence[str] | None = None,
) -> StageModel:
    """`segments` of `model`, which may be on `meta`, attached, for `measure_blocks`. batch: a
    micro-batch. dtype: of floating parameters; None: their own. blocks: as for Cuts. Raises
    ModelError as Cuts and StageModel."""
    apart: dict[int, Any] = {}
    for p in model.parameters():
        floating = dtype if dtype is not None and p.is_floating_point() else p.dtype
        empty = torch.empty_like(p, device="meta", dtype=floating)
        apart[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    copied = copy.deepcopy(model, apart)
    cuts = Cuts(copied, batch.args, batch.kwargs or {}, blocks)
    stage_model = StageModel(copied, cuts, segments, device)
    _give_values(copied, device)
    stage_model.attach()
    return stage_model


def _give_values(model: nn.Module, device: torch.device) -> None:
    """To each parameter that is left, those that are one stay one; to each buffer its own, or
    zeros where it has none."""
    chance = torch.Generator(device).manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in made:
                made[id(p)] = _valued(p, device, chance)
            module._parameters[name] = None if p is None else made[id(p)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                has_none = buffer.is_meta
                value = torch.zeros_like(buffer, device=device) if has_none else buffer.to(device)
                module._buffers[name] = value


def _valued(p: nn.Parameter, device: torch.device, chance: torch.Generator) -> nn.Parameter:
    value = torch.zeros(p.shape, dtype=p.dtype, device=device)
    if p.is_floating_point():
        value.normal_(std=STD, generator=chance)
    return nn.Parameter(value, requires_grad=p.requires_grad)
