"""Reading of safetensors files in Hugging Face layout, tensor by tensor.
training/write_safetensors.py writes such files.

A file contains the length of the header (8 bytes), a JSON header, and the data. Tensors of bf16 and
fp16 are read as uint16 arrays. The machine must be little-endian.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from roadtrain.chunks import ITEMSIZE, NUMPY
from roadtrain.errors import ConfigError, DamagedError, ForeignError
from roadtrain.storage.direct import typed_errors

TAGS = {dtype: dtype.upper().replace("FP", "F") for dtype in ITEMSIZE}  # F32, BF16, I8, BOOL
_DTYPES = {tag: dtype for dtype, tag in TAGS.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the format
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file. `read` reads its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Read the whole tensor in its shape, or elements [start, stop) of the flattened tensor."""
        whole = start == 0 and stop is None
        numel = prod(self.shape)
        last = numel if stop is None else stop
        assert 0 <= start <= last <= numel, (start, last, numel)
        with typed_errors(self.path, f"reading tensor {self.name!r}"):
            at = self.offset + start * ITEMSIZE[self.dtype]
            out: Array = np.fromfile(self.path, NUMPY[self.dtype], last - start, offset=at)
        if out.size < last - start:
            raise DamagedError(f"{self.path}: the file is truncated inside tensor {self.name!r}")
        return out.reshape(self.shape) if whole else out


def open_dir(path: str | Path) -> Mapping[str, Tensor]:
    """Return the tensors of a safetensors file, or of all safetensors files of a directory, by
    name. Only the headers are read.

    Args:
        path: A safetensors file, or a directory that contains an index, `model.safetensors`, or
            other safetensors files.

    Raises:
        ConfigError: There is no safetensors file at `path`.
        ForeignError: A file is not a safetensors file.
        DamagedError: A file is truncated.
    """
    home = Path(path)
    if home.is_file():
        return dict(_read_header(home))
    if (home / INDEX).is_file():
        try:
            index = json.loads((home / INDEX).read_bytes())
            files = sorted({home / name for name in index["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ForeignError(f"{home / INDEX}: not a safetensors index ({error})") from error
    else:
        single = home / SINGLE
        files = [single] if single.is_file() else sorted(home.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{home}: there is no safetensors file",
            hint="name a directory in Hugging Face layout, or a safetensors file",
        )
    return {name: tensor for file in files for name, tensor in _read_header(file)}


def _read_header(path: Path) -> Iterator[tuple[str, Tensor]]:
    with typed_errors(path, "reading"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER, size - 8):
            raise ForeignError(
                f"{path}: not safetensors, or truncated: {size} bytes with a header of {length}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ForeignError(f"{path}: not a safetensors file ({error})") from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise ForeignError(
                f"{path}: tensor {name!r} has dtype {entry['dtype']}, but only"
                f" {', '.join(_DTYPES)} are supported"
            )
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        if stop - start != prod(shape) * ITEMSIZE[dtype] or start < 0 or 8 + length + stop > size:
            raise DamagedError(
                f"{path}: tensor {name!r} at bytes {start} to {stop} does not fit its shape or file"
            )
        yield name, Tensor(name, dtype, shape, path, 8 + length + start)


def open_weights(
    weights: str | Path, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Tensor]:
    """Return the tensors in the file or directory `weights`, by name. `shapes` gives the shape of
    each parameter of the model. Raises ConfigError if a tensor is missing or has another shape."""
    tensors = open_dir(weights)
    lacking = [name for name in shapes if name not in tensors]
    wrong = [n for n, shape in shapes.items() if n in tensors and tuple(tensors[n].shape) != shape]
    if found := lacking or wrong:
        name = found[0]
        raise ConfigError(
            f"the weights do not fit the model: {len(lacking)} of {len(shapes)} tensors are"
            f" missing, {len(wrong)} have another shape. The model needs {name!r} with shape"
            f" {shapes[name]}, but the tensor "
            + (f"has shape {tuple(tensors[name].shape)}" if wrong is found else "is missing"),
            hint="see the directory's config.json for the model that the weights belong to",
        )
    return tensors
