"""Read safetensors tensor by tensor, as Hugging Face lays them out (training/write_safetensors.py
writes them).

The file is 8 bytes of header length, a JSON header, the data. Assumes a little-endian machine; bf16
and fp16 are uint16 arrays, a dtype name beside them. Does NOT hold files open.
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
_MAX_HEADER = 100_000_000  # bytes: the format's own limit
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tensor:
    """One tensor in a file; nothing is read before `read`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """All of it in its shape; with bounds, those flat elements."""
        whole = start == 0 and stop is None
        numel = prod(self.shape)
        last = numel if stop is None else stop
        assert 0 <= start <= last <= numel, (start, last, numel)
        with typed_errors(self.path, f"reading tensor {self.name!r}"):
            at = self.offset + start * ITEMSIZE[self.dtype]
            out: Array = np.fromfile(self.path, NUMPY[self.dtype], last - start, offset=at)
        if out.size < last - start:
            raise DamagedError(f"{self.path}: truncated inside tensor {self.name!r}")
        return out.reshape(self.shape) if whole else out


def open_dir(path: str | Path) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file, or of a directory with `model.safetensors`, an index,
    or any safetensors files. Raises ConfigError where there are none, ForeignError for other
    content, DamagedError for a truncated file."""
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
            f"{home}: no safetensors file there",
            hint="weights are read from a directory in Hugging Face layout, or a safetensors file",
        )
    return {name: tensor for file in files for name, tensor in _read_header(file)}


def _read_header(path: Path) -> Iterator[tuple[str, Tensor]]:
    with typed_errors(path, "reading"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER, size - 8):
            raise ForeignError(
                f"{path}: not a safetensors file, or truncated: header of {length} bytes in {size}"
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
                f"{path}: tensor {name!r} has dtype {entry['dtype']}, known are"
                f" {', '.join(_DTYPES)}"
            )
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        if stop - start != prod(shape) * ITEMSIZE[dtype] or start < 0 or 8 + length + stop > size:
            raise DamagedError(
                f"{path}: tensor {name!r} at bytes {start} to {stop} does not fit, the file has"
                f" {size}"
            )
        yield name, Tensor(name, dtype, shape, path, 8 + length + start)


def open_weights(
    weights: str | Path, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Tensor]:
    """The tensors in `weights`. shapes: of the parameters that need one, by name. Raises
    ConfigError where they do not fit the model."""
    given = open_dir(weights)
    lacking = [name for name in shapes if name not in given]
    wrong = [n for n, shape in shapes.items() if n in given and tuple(given[n].shape) != shape]
    if found := lacking or wrong:
        name = found[0]
        raise ConfigError(
            f"the weights do not fit the model: {len(lacking)} of {len(shapes)} tensors are"
            f" absent, {len(wrong)} have another shape; {name!r} is"
            f" {tuple(given[name].shape) if wrong is found else 'absent'}, the model has"
            f" {shapes[name]}",
            hint="the directory's config.json says which model it is",
        )
    return given
