"""Save and restore the buffers of a model in stages (running means, counters), which no optimizer
holds. Does NOT average the buffers of replicas.

Of the copies of a buffer outside of the blocks, that of the first stage that runs its module
counts, because only this copy changes during training. The first replica of a stage saves the
stage's buffers.
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
    """Return the buffers that belong to this stage, by name."""
    held = persistent_buffers(stage_model.model)
    return {n: b for n, b in held.items() if stage_model.runs_first(n.rpartition(".")[0])}


def buffers_blob(stage_model: StageModel, stage: int) -> dict[str, bytes]:
    """Return {blob name: bytes} with the stage's buffers; empty if it has none."""
    own = own_buffers(stage_model)
    return {_NAME.format(stage): plain.encode(own, "the buffers")} if own else {}


def buffers_in(blobs: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Return the buffers in the blobs of a snapshot, by name. If several stages saved a buffer, the
    first counts."""
    prefix, found = _NAME.partition("{")[0], dict[str, torch.Tensor]()
    for name in sorted((n for n in blobs if n.startswith(prefix)), reverse=True):
        found |= plain.decode(blobs[name])
    return found


@torch.no_grad()
def restore_buffers(blobs: Mapping[str, bytes], stage_model: StageModel) -> None:
    """Restore this stage's buffers from the blobs of a snapshot, which may be of other stages.
    Raises ForeignError if a buffer has another shape in the snapshot."""
    here = persistent_buffers(stage_model.model)
    for key, value in buffers_in(blobs).items():
        if key not in here:
            continue
        if here[key].shape != value.shape:
            raise ForeignError(
                f"buffer {key!r} has the shape {tuple(value.shape)} in the snapshot, but"
                f" {tuple(here[key].shape)} in the model"
            )
        here[key].copy_(value)


def gather_buffers(stage_model: StageModel, control: ControlLinks) -> dict[str, torch.Tensor]:
    """Return the buffers of all stages, by name. Collective. Raises PeerError if a rank is lost."""
    mine = plain.encode(own_buffers(stage_model), "the buffers")
    found: dict[str, torch.Tensor] = {}
    for blob in reversed(control.gather(mine, "the buffers of each stage")):
        found |= plain.decode(blob)
    return found


@torch.no_grad()
def adopt_buffers(
    gathered: Mapping[str, torch.Tensor], had: Collection[str], stage_model: StageModel
) -> None:
    """Set the buffers that came to this stage with moved blocks. gathered: the buffers of all
    stages before the move. had: the names of the buffers that belonged to this stage before."""
    for name, buffer in own_buffers(stage_model).items():
        if name not in had:
            buffer.copy_(gathered[name])
