"""The safetensors library reads files that we write, and vice versa."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from roadtrain.chunks import NUMPY
from roadtrain.errors import ConfigError, DamagedError, ForeignError, GoneError
from roadtrain.storage.safetensors_io import open_dir
from roadtrain.training.write_safetensors import export_dir

TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}


def arrays() -> dict[str, tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    out = {}
    for i, dtype in enumerate(TORCH):
        for j, shape in enumerate([(3, 5 + i), (), (0, 4), (2, 3, 7)]):
            numel = int(np.prod(shape))
            nbytes = numel * np.dtype(NUMPY[dtype]).itemsize
            raw = rng.integers(0, 2, numel, np.uint8) if dtype == "bool" else rng.bytes(nbytes)
            out[f"layer.{i}.{dtype}.{j}"] = (
                dtype,
                np.frombuffer(bytes(raw), NUMPY[dtype]).reshape(shape),
            )
    return out


def items(tensors: dict[str, tuple[str, np.ndarray]]):
    return ((n, d, a.shape, lambda a=a: a) for n, (d, a) in tensors.items())


@pytest.mark.parametrize(("limit", "files"), [(1 << 30, 1), (200, None)])
def test_round_trip_and_the_library_reads_it(tmp_path: Path, limit: int, files: int | None) -> None:
    tensors = arrays()
    read = list[int]()
    made = export_dir(items(tensors), tmp_path / "out", limit, advance=read.append)
    assert read == [1] * len(tensors)
    shards = [p for p in made if p.suffix == ".safetensors"]
    assert sorted(made) == sorted((tmp_path / "out").iterdir())
    if files == 1:
        assert [p.name for p in made] == ["model.safetensors"]
    else:
        assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(a.nbytes for _, a in tensors.values())
        assert index["weight_map"].keys() == tensors.keys()
    seen = set()
    for path in shards:
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                dtype, array = tensors[name]
                tensor = file.get_tensor(name)
                assert tensor.dtype == TORCH[dtype] and tuple(tensor.shape) == array.shape
                assert (
                    tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    == array.tobytes()
                )
                seen.add(name)
    assert seen == tensors.keys()
    for source in [tmp_path / "out", *([made[0]] if files == 1 else [])]:
        back = open_dir(source)
        assert back.keys() == tensors.keys()
        for name, (dtype, array) in tensors.items():
            assert back[name].dtype == dtype and back[name].shape == array.shape
            got = back[name].read()
            assert got.shape == array.shape and got.tobytes() == array.tobytes()
            assert (
                back[name].read(1, array.size).tobytes() == array.ravel()[1:].tobytes()
                if array.size
                else True
            )


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(7, 3).bfloat16(), "b": torch.arange(5), "c": torch.randn(4)}
    save_file(state, tmp_path / "other-name.safetensors")
    back = open_dir(tmp_path)
    for name, tensor in state.items():
        assert back[name].read().tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert back["a.weight"].dtype == "bf16"


def test_a_second_export_replaces_the_first_unless_it_fails(tmp_path: Path) -> None:
    tensors = arrays()
    export_dir(items(tensors), tmp_path, 200)
    before = sorted(tmp_path.iterdir())

    def fail() -> np.ndarray:
        raise RuntimeError("reader")

    with pytest.raises(RuntimeError, match="reader"):
        export_dir(
            [("x", "fp32", (3,), lambda: np.zeros(3, "f4")), ("y", "fp32", (3,), fail)],
            tmp_path,
            12,
        )
    assert sorted(tmp_path.iterdir()) == before and open_dir(tmp_path).keys() == tensors.keys()
    export_dir(items({"only": tensors["layer.0.fp32.0"]}), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"] and list(
        open_dir(tmp_path)
    ) == ["only"]


def test_faults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors file"):
        open_dir(tmp_path)
    (path,) = export_dir(items(arrays()), tmp_path)
    tensor = open_dir(tmp_path)["layer.0.fp32.0"]
    os.truncate(path, path.stat().st_size - 9)
    with pytest.raises(DamagedError, match=r"does not fit its shape or file"):
        open_dir(tmp_path)
    os.truncate(path, tensor.offset + 4)
    with pytest.raises(DamagedError, match=r"truncated inside tensor 'layer.0.fp32.0'"):
        tensor.read()
    path.write_bytes(b"<html>" * 100)
    with pytest.raises(ForeignError, match=r"not safetensors"):
        open_dir(tmp_path)
    path.unlink()
    with pytest.raises(GoneError):
        tensor.read()
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "missing.safetensors"}}'
    )
    with pytest.raises(GoneError, match=r"missing.safetensors"):
        open_dir(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ForeignError, match=r"index"):
        open_dir(tmp_path)


def test_an_export_holds_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    n = 1 << 20
    tracemalloc.start()
    export_dir(
        ((f"t{i}", "fp32", (n,), lambda: np.ones(n, "f4")) for i in range(16)), tmp_path, n * 16
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 4 * n
