"""Buffers of a model in stages (running means, counters): they are no parameters, so no optimizer
has them; a snapshot holds those of each stage as one named blob.

Of a buffer that several stages have, outside of the blocks, the first stage's counts; of a stage's
replicas the first one's. Does NOT average what replicas have counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from roadtrain.api.job_state import persistent_buffers
from roadtrain.errors import ForeignError
from roadtrain.streaming import plain

_NAME = "buffers of stage {:06}"


def buffers_blob(model: nn.Module, stage: int) -> dict[str, bytes]:
    """What a snapshot is given; nothing where the stage's model has none."""
    held = persistent_buffers(model)
    return {_NAME.format(stage): plain.encode(held, "the buffers")} if held else {}


def buffers_in(blobs: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Of a snapshot, by name; of a buffer that several stages have the first one's."""
    prefix, found = _NAME.partition("{")[0], dict[str, torch.Tensor]()
    for name in sorted((n for n in blobs if n.startswith(prefix)), reverse=True):
        found |= plain.decode(blobs[name])
    return found


@torch.no_grad()
def restore_buffers(blobs: Mapping[str, bytes], model: nn.Module) -> None:
    """`blobs`: of all stages of the snapshot, whatever these were. Raises ForeignError where one
    has another shape."""
    here = persistent_buffers(model)
    for key, value in buffers_in(blobs).items():
        if key not in here:
            continue
        if here[key].shape != value.shape:
            raise ForeignError(
                f"buffer {key!r} is {tuple(value.shape)} in the snapshot,"
                f" {tuple(here[key].shape)} here"
            )
        here[key].copy_(value)
