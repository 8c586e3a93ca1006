"""Read parameters from the newest committed snapshot of a job whose model is split into stages.

The files of all ranks must be in the run directory, as they are on a single host or a shared file
system. Does not build the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roadtrain.config.job import Job
from roadtrain.errors import ConfigError, GoneError
from roadtrain.stages.pieces import VALUE, Extent
from roadtrain.stages.snapshot_choice import Description, ParamEntry
from roadtrain.stages.snapshot_files import PartReader, list_snapshots
from roadtrain.stages.snapshots import FOLDER
from roadtrain.stages.stage_buffers import buffers_in
from roadtrain.stages.transfers import uncovered
from roadtrain.streaming.split import DTYPES, NAMES, as_numpy
from roadtrain.training.write_safetensors import Item


def export_of(job: Job, masters: bool) -> tuple[int, list[Item]]:
    """Return the last committed step, and the parameters and buffers of that step. `masters`:
    whether trained parameters are in fp32 instead of the compute dtype. Raises ConfigError if no
    snapshot is committed, or GoneError if the snapshot is incomplete."""
    folder = job.run_dir / FOLDER
    reader, snapshot = newest(folder)
    needed = [Extent(param.name, 0, param.numel) for param in snapshot.params]
    if absent := uncovered([reader.extents()], needed):
        raise GoneError(
            f"the snapshot of step {snapshot.step} in {folder} was written by {len(snapshot.ranks)}"
            f" ranks, but only the parts of ranks {', '.join(map(str, sorted(reader.parts)))} are"
            f" there, and parameter {absent[0].name!r} is incomplete",
            hint="copy the snapshots of all hosts into one directory",
        )
    items: list[Item] = []
    for entry in snapshot.params:
        dtype = "fp32" if masters and entry.rule else entry.dtype
        items.append((entry.name, dtype, entry.shape, partial(value_of, reader, entry, dtype)))
    return snapshot.step, [*items, *buffer_items(buffers_in(reader.blobs()))]


def buffer_items(buffers: Mapping[str, torch.Tensor]) -> list[Item]:
    """Return the items of a model's buffers whose dtype can be exported."""
    return [
        (name, NAMES[buffer.dtype], tuple(buffer.shape), partial(as_numpy, buffer))
        for name, buffer in buffers.items()
        if buffer.dtype in NAMES
    ]


def newest(folder: Path) -> tuple[PartReader, Description]:
    """Return a reader and the description of the newest committed snapshot in `folder`.

    Raises ConfigError if no snapshot is committed.
    """
    found = list_snapshots(folder) if folder.is_dir() else {}
    for _, reader in sorted(found.items(), reverse=True):
        if (snapshot := reader.marker()) is not None:
            return reader, snapshot
    raise ConfigError(
        f"{folder} has no committed snapshot", hint="train a step, or name the run's directory"
    )


def value_of(reader: PartReader, entry: ParamEntry, dtype: str) -> Any:
    """Return a whole parameter as a flat array; 16-bit floats as uint16."""
    whole = np.empty(entry.numel, np.float32)
    for extent in reader.extents_of(entry.name):
        whole[extent.start : extent.stop] = reader.piece(extent).arrays[VALUE].numpy()
    return as_numpy(torch.from_numpy(whole).to(DTYPES[dtype]))
