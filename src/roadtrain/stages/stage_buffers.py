"""Buffers of a model in stages (running means, counters): they are no parameters, so no optimizer
has them; a snapshot holds those of each stage as one named blob.

A buffer outside of the blocks, which every stage has, is told by the first stage that runs its
module: no other one's changes as the model trains. Of a stage's replicas the first one's counts.
Does NOT average what replicas have counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from roadtrain.errors import ForeignError
from roadtrain.placement.job_state import persistent_buffers
from roadtrain.stages.control_links import ControlLinks
from roadtrain.stages.stage_model import StageModel
from roadtrain.streaming import plain

_NAME = "buffers of stage {:06}"


def own_buffers(stage_model: StageModel) -> dict[str, torch.Tensor]:
    """Those that this stage tells, by name."""
    held = persistent_buffers(stage_model.model)
    return {n: b for n, b in held.items() if stage_model.runs_first(n.rpartition(".")[0])}


def buffers_blob(stage_model: StageModel, stage: int) -> dict[str, bytes]:
    """What a snapshot is given; nothing where the stage tells none."""
    told = own_buffers(stage_model)
    return {_NAME.format(stage): plain.encode(told, "the buffers")} if told else {}


def buffers_in(blobs: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Of a snapshot, by name; of a buffer that several stages told the first one's."""
    prefix, found = _NAME.partition("{")[0], dict[str, torch.Tensor]()
    for name in sorted((n for n in blobs if n.startswith(prefix)), reverse=True):
        found |= plain.decode(blobs[name])
    return found


@torch.no_grad()
def restore_buffers(blobs: Mapping[str, bytes], stage_model: StageModel) -> None:
    """`blobs`: of all stages of the snapshot, whatever these were. Raises ForeignError where one
    has another shape."""
    here = persistent_buffers(stage_model.model)
    for key, value in buffers_in(blobs).items():
        if key not in here:
            continue
        if here[key].shape != value.shape:
            raise ForeignError(
                f"buffer {key!r} is {tuple(value.shape)} in the snapshot,"
                f" {tuple(here[key].shape)} here"
            )
        here[key].copy_(value)


def gather_buffers(stage_model: StageModel, control: ControlLinks) -> dict[str, torch.Tensor]:
    """What all stages tell. Collective. Raises PeerError."""
    mine = plain.encode(own_buffers(stage_model), "the buffers")
    found: dict[str, torch.Tensor] = {}
    for one in reversed(control.gather(mine, "the buffers of each stage")):
        found |= plain.decode(one)
    return found


@torch.no_grad()
def adopt_buffers(
    gathered: Mapping[str, torch.Tensor], had: Collection[str], stage_model: StageModel
) -> None:
    """After blocks have moved: what this stage tells now and did not tell before."""
    for name, buffer in own_buffers(stage_model).items():
        if name not in had:
            buffer.copy_(gathered[name])
