"""Writing of safetensors files in Hugging Face layout, with an index, tensor by tensor.

The writer of the safetensors library would need all tensors in memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from roadtrain.chunks import ITEMSIZE
from roadtrain.storage.direct import make_directory, sync_directory, write_file
from roadtrain.storage.safetensors_io import INDEX, SINGLE, TAGS, Array

MOST_NBYTES = 5 * 10**9  # bytes of a file; a usual limit on Hugging Face
Item = tuple[str, str, tuple[int, ...], Callable[[], Array]]  # name, dtype, shape, reader


def export_dir(
    items: Iterable[Item],
    directory: str | Path,
    most_nbytes: int = MOST_NBYTES,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Path]:
    """Write `items` into `directory`, and return the paths of the files.

    Only one tensor is in memory at a time. A file has at most `most_nbytes` bytes, unless it has a
    single larger tensor. An existing export is only replaced once the new export is complete on
    disk. `advance` is called with 1 for each tensor that has been read. Raises FullError.
    """
    home = Path(directory)
    make_directory(home)
    files: list[list[Item]] = [[]]
    filled = total = 0
    for item in items:
        nbytes = prod(item[2]) * ITEMSIZE[item[1]]
        if files[-1] and filled + nbytes > most_nbytes:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled, total = filled + nbytes, total + nbytes
    count = len(files)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    names = [SINGLE] if count == 1 else names
    made: list[Path] = []
    try:
        for name, own in zip(names, files):
            made.append(home / f"{name}.new")
            _write_file(made[-1], own, advance)
        if count > 1:
            weights = {item[0]: name for name, own in zip(names, files) for item in own}
            made.append(home / f"{INDEX}.new")
            body = {"metadata": {"total_size": total}, "weight_map": weights}
            write_file(made[-1], [json.dumps(body, indent=2).encode()], "exporting")
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    for stale in [*home.glob("model*.safetensors"), home / INDEX]:
        stale.unlink(missing_ok=True)
    done = [path.rename(path.with_suffix("")) for path in made]
    sync_directory(home)
    return done


def _write_file(path: Path, items: list[Item], advance: Callable[[int], None]) -> None:
    # sorted by element size, so that every tensor is aligned to its elements
    items = sorted(items, key=lambda item: -ITEMSIZE[item[1]])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, _ in items:
        stop = at + prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(head).to_bytes(8, "little") + head
        for name, dtype, shape, reader in items:
            array = np.ascontiguousarray(reader())
            advance(1)
            fits = array.dtype.itemsize == ITEMSIZE[dtype] and array.size == prod(shape)
            assert fits, (name, array.dtype, array.shape)
            yield array.reshape(-1).view(np.uint8).data

    write_file(path, pieces(), "exporting")
