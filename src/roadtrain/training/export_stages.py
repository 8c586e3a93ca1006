"""The model that a job in stages has trained, read from its newest committed snapshot.

Assumes: the parts of all ranks lie in the run directory (one host, or a file system that hosts
share). Does NOT start processes or build the model.
"""

from __future__ import annotations

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
    """The last committed step, and every parameter and buffer of it. masters: parameters in fp32,
    not in the dtype that the model computes in. Raises ConfigError where nothing is committed,
    GoneError where parts lie elsewhere."""
    folder = job.run_dir / FOLDER
    reader, told = newest(folder)
    wanted = [Extent(one.name, 0, one.numel) for one in told.params]
    if absent := uncovered([reader.extents()], wanted):
        raise GoneError(
            f"the snapshot of step {told.step} in {folder} has the parts of ranks"
            f" {', '.join(map(str, sorted(reader.parts)))} of {len(told.ranks)}:"
            f" {absent[0].name!r} is not whole",
            hint="bring the snapshots of all hosts into one directory",
        )
    items: list[Item] = []
    for entry in told.params:
        dtype = "fp32" if masters and entry.rule else entry.dtype
        items.append((entry.name, dtype, entry.shape, partial(value_of, reader, entry, dtype)))
    for name, buffer in buffers_in(reader.blobs()).items():
        if buffer.dtype in NAMES:
            shape = tuple(buffer.shape)
            items.append((name, NAMES[buffer.dtype], shape, partial(as_numpy, buffer)))
    return told.step, items


def newest(folder: Path) -> tuple[PartReader, Description]:
    """The newest committed snapshot. Raises ConfigError where there is none."""
    found = list_snapshots(folder) if folder.is_dir() else {}
    for _, reader in sorted(found.items(), reverse=True):
        if (told := reader.marker()) is not None:
            return reader, told
    raise ConfigError(
        f"{folder} has no committed snapshot", hint="train a step, or name the run's directory"
    )


def value_of(reader: PartReader, entry: ParamEntry, dtype: str) -> Any:
    """The whole parameter, flat; 16-bit floats as uint16."""
    whole = np.empty(entry.numel, np.float32)
    for extent in reader.extents_of(entry.name):
        whole[extent.start : extent.stop] = reader.piece(extent).arrays[VALUE].numpy()
    return as_numpy(torch.from_numpy(whole).to(DTYPES[dtype]))
