"""Converting a store to another number of directories, chunk size or dtype of the copy is exact and
uses bounded memory, and a kill during it leaves the old store."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.device import buffers
from roadtrain.errors import ConfigError, ForeignError, FullError
from roadtrain.kernels.cast import cast
from roadtrain.storage import convert, generation
from roadtrain.storage.convert import convert as convert_store
from roadtrain.storage.convert import needs_conversion, read_param, read_record, write_params
from roadtrain.storage.generation import OpenedStore, create_store, open_store
from roadtrain.storage.meta import GroupRule, StoreMeta
from roadtrain.storage.tier import STATE_PART

GROUPS = (GroupRule("adamw", ("m", "v"), ("t", "beta_t")), GroupRule("sgd"))
STATE = {0: ("m", "v", "t", "beta_t"), 1: ()}


def table(dtype: str, frozen: str = "bf16", chunk_elements: int = 1 << 20) -> ChunkTable:
    return ChunkTable.build(
        [
            (
                "root",
                [
                    ParamSpec("emb", (300, 500), dtype, True, 0),
                    ParamSpec("scalar", (), dtype, True, 1),
                ],
            ),
            (
                "b0",
                [
                    ParamSpec("b0.w", (700, 501), dtype, True, 0),
                    ParamSpec("b0.empty", (0, 3), dtype, True, 0),
                    ParamSpec("b0.norm", (33,), "fp32", True, 0),
                    ParamSpec("b0.frozen", (70, 1001), frozen, False, -1),
                    ParamSpec("b0.mask", (3, 5), "bool", False, -1),
                ],
            ),
            ("b1", []),
        ],
        chunk_elements,
    )


@functools.cache
def value(p: ParamSpec, what: str) -> np.ndarray:
    rng = np.random.default_rng([len(p.name), p.numel, len(what), ord(what[0])])
    if what in ("t", "beta_t"):
        return rng.standard_normal(1)
    if p.trainable:
        return rng.standard_normal(p.numel).astype(np.float32)
    if p.dtype == "bool":
        return rng.integers(0, 2, p.numel).astype(np.uint8)
    return (rng.integers(0, 1 << 14, p.numel)).astype(np.uint16)  # finite in bf16 and fp16


def arrays_of(p: ParamSpec) -> tuple[str, ...]:
    return ("master", *(STATE[p.group] if p.trainable else ()))


def piece(p: ParamSpec, what: str, start: int, stop: int) -> np.ndarray:
    whole = value(p, what)
    return whole if what in ("t", "beta_t") else whole[start:stop]


def create_filled(directories: Sequence[Path], tab: ChunkTable) -> OpenedStore:
    store = create_store(directories, StoreMeta.of(tab, GROUPS), owners(tab, len(directories)))
    write_params(store, piece)
    store.commit(41, b"forty-one")
    store.publish()
    return store


def owners(tab: ChunkTable, n: int) -> list[int]:
    return [c.id * 7 % n for c in tab.chunks]


def check(store: OpenedStore) -> None:
    assert (store.step, store.blob) == (41, b"forty-one")
    for p in store.table.params:
        for what in arrays_of(p):
            if what in ("t", "beta_t") and not p.numel:
                continue
            got = read_param(store, p.name, what)
            want = value(p, what)
            assert got.tobytes() == want.tobytes() and got.dtype == want.dtype, (p.name, what)
            assert got.shape == (p.shape if what not in ("t", "beta_t") else (1,))
        if p.trainable and p.dtype != "fp32":
            copy = np.empty(p.numel, np.uint16)
            cast(value(p, "master"), "fp32", copy, p.dtype)
            assert read_param(store, p.name, "weights").tobytes() == copy.tobytes()


DECODED_BY_THREADS = """
import importlib, pathlib, sys, threading
import roadtrain.storage.meta as meta

path = pathlib.Path(sys.argv[1])
sys.setswitchinterval(1e-6)
for _ in range(100):  # new classes each time
    importlib.reload(meta)
    both, loaded = threading.Barrier(2), []

    def load():
        both.wait()
        loaded.append(meta.StoreMeta.load(path))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 2
"""


@pytest.mark.slow
def test_two_threads_may_be_the_first_to_read_a_description(tmp_path: Path) -> None:
    tab = table("bf16", chunk_elements=1 << 16)
    replace(StoreMeta.of(tab, GROUPS), owners=tuple(owners(tab, 1))).write(tmp_path)
    subprocess.run([sys.executable, "-c", DECODED_BY_THREADS, tmp_path], check=True, timeout=120)


def test_the_table_is_restored_from_the_description(tmp_path: Path) -> None:
    tab = table("bf16", chunk_elements=1 << 16)
    meta = StoreMeta.of(tab, GROUPS)
    assert meta.table == tab
    meta = replace(meta, owners=tuple(owners(tab, 2)), directories=("a", "b"))
    meta.write(tmp_path)
    assert StoreMeta.load(tmp_path) == meta


MATRIX = list(itertools.product((1, 3), (1 << 20, 1 << 16), ("fp32", "bf16", "fp16")))
# directories, elements of a chunk, dtype
BEFORE = {
    "one directory": (1, 1 << 20, "bf16"),
    "three directories, fp16": (3, 1 << 20, "fp16"),
    "three directories, small chunks": (3, 1 << 16, "fp32"),
}


# Half of the pairs: from each of BEFORE to each number of directories, chunk size and dtype.
CONVERSIONS = [
    pytest.param(
        before,
        after,
        id=f"{name}-{after}",
        marks=pytest.mark.exhaustive if (i + j) % 2 else pytest.mark.slow,
    )
    for i, (name, before) in enumerate(BEFORE.items())
    for j, after in enumerate(MATRIX)
]


@pytest.mark.parametrize(("before", "after"), CONVERSIONS)
def test_conversion_is_exact(tmp_path: Path, before: tuple, after: tuple) -> None:
    n, chunk_elements, dtype = before
    create_filled(
        [tmp_path / f"old{i}" for i in range(n)], table(dtype, chunk_elements=chunk_elements)
    ).close()
    n, chunk_elements, dtype = after
    tab = table(dtype, chunk_elements=chunk_elements)
    directories = [tmp_path / "old0", *[tmp_path / f"new{i}" for i in range(1, n)]]
    old = open_store(directories, also=[tmp_path / f"old{i}" for i in range(before[0])])
    assert old is not None
    check(old)
    meta = StoreMeta.of(tab, GROUPS)
    if needs_conversion(old, meta, directories):
        new = convert_store(old, meta, directories, owners(tab, n))
        check(new)
        assert not needs_conversion(new, meta, directories)
        new.close()
    else:
        old.close()
    again = open_store(directories)
    assert again is not None and again.table == tab and again.meta.job == old.meta.job
    check(again)
    again.close()
    gens = [str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/gen-*")]
    kept = sorted(f"{d.name}/gen-{again.meta.generation}" for d in directories)
    assert sorted(gens) == kept, "the old store was not removed"


def test_a_public_part_that_is_not_stored_is_cast_from_the_master(tmp_path: Path) -> None:
    store = create_filled([tmp_path], table("bf16"))
    for chunk in store.table.trainable:
        if chunk.dtype != "bf16":
            continue
        view = read_record(store, chunk)
        first = view.record.weights_nbytes
        store.tiers[0].write(chunk.id, STATE_PART, view.view[first : view.record.nbytes])
    store.tiers[0].prepare(42, b"")
    store.tiers[0].committed(42)
    assert not store.tiers[0].has_weights(0)
    p = store.table.params[0]
    copy = np.empty(p.numel, np.uint16)
    cast(value(p, "master"), "fp32", copy, "bf16")
    assert read_param(store, p.name, "weights").tobytes() == copy.tobytes()
    new = convert_store(
        store, StoreMeta.of(table("fp16"), GROUPS), [tmp_path], owners(table("fp16"), 1)
    )
    assert read_param(new, p.name).tobytes() == value(p, "master").tobytes()
    new.close()


@pytest.mark.parametrize("moment", ["creating", "writing", "committing", "publishing", "removing"])
@pytest.mark.slow
def test_a_kill_while_converting(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    old = create_filled([tmp_path / "a", tmp_path / "b"], table("bf16"))
    target = {
        "creating": (generation.FileTier, "__init__"),
        "writing": (generation.FileTier, "write"),
        "committing": (OpenedStore, "commit"),
        "publishing": (generation, "switch"),
        "removing": (generation, "remove"),
    }[moment]
    tab = table("fp32", chunk_elements=1 << 16)
    directories = [tmp_path / "c", tmp_path / "a"]
    with monkeypatch.context() as patch:
        patch.setattr(*target, die)
        with pytest.raises(Killed):
            convert_store(old, StoreMeta.of(tab, GROUPS), directories, owners(tab, 2))
    old.close()
    for fd in os.listdir("/proc/self/fd"):  # as the kernel does for a killed process
        if (link := Path("/proc/self/fd", fd)).is_symlink() and str(link.readlink()).startswith(
            str(tmp_path)
        ):
            os.close(int(fd))
    store = open_store(directories, also=[tmp_path / "b"])
    assert store is not None
    assert store.table == (tab if moment == "removing" else table("bf16"))
    check(store)
    store.close()
    kept = {"removing": {"c", "a"}}.get(moment, {"a", "b"})
    assert {p.parent.name for p in tmp_path.glob("*/gen-*")} == kept, "leftovers are removed"
    assert [p.parent.name for p in tmp_path.glob("*/CURRENT*")] == (
        ["c"] if moment == "removing" else ["a"]
    )


def test_a_full_disk_while_converting_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tiny:
        f_bavail, f_frsize = 3, 4096

    old = create_filled([tmp_path], table("bf16"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: Tiny)
        with pytest.raises(FullError):
            convert_store(
                old, StoreMeta.of(table("fp32"), GROUPS), [tmp_path], owners(table("fp32"), 1)
            )
    check(old)
    old.close()


def test_refusals(tmp_path: Path) -> None:
    old = create_filled([tmp_path], table("bf16", "fp32"))
    with pytest.raises(
        ConfigError,
        match=r"frozen parameter 'b0.frozen' is stored in fp32 and would lose precision in bf16",
    ):
        convert_store(
            old, StoreMeta.of(table("bf16"), GROUPS), [tmp_path], owners(table("bf16"), 1)
        )
    lion = (GroupRule("lion", ("m",)), GROUPS[1])
    with pytest.raises(ForeignError, match=r"parameter 'emb' has state .*adamw.*lion"):
        convert_store(
            old, StoreMeta.of(table("bf16", "fp32"), lion), [tmp_path], owners(table("bf16"), 1)
        )
    with pytest.raises(ConfigError, match=r"there is no parameter named 'x'"):
        read_param(old, "x")
    with pytest.raises(ConfigError, match=r"'scalar' has no array 'm'"):
        read_param(old, "scalar", "m")
    old.close()


@pytest.mark.parametrize("wide", ["fp32"])
def test_a_frozen_parameter_is_widened(tmp_path: Path, wide: str) -> None:
    old = create_filled([tmp_path], table("bf16", "bf16"))
    tab = table("bf16", wide, 1 << 16)
    new = convert_store(old, StoreMeta.of(tab, GROUPS), [tmp_path], owners(tab, 1))
    frozen = next(p for p in table("bf16").params if p.name == "b0.frozen")
    want = (value(frozen, "master").astype(np.uint32) << 16).view(np.float32)
    assert read_param(new, "b0.frozen").tobytes() == want.tobytes()
    new.close()


@pytest.mark.slow
def test_memory_is_a_few_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(buffers.Buffer):
        alive = peak = 0

        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            Counted.alive += self.nbytes
            Counted.peak = max(Counted.peak, Counted.alive)

        def __del__(self) -> None:
            Counted.alive -= self.nbytes

    def wide(dtype: str) -> ChunkTable:
        return ChunkTable.build([("root", [ParamSpec("w", (2000, 1000), dtype, True, 0)])], 1 << 16)

    old = create_filled([tmp_path], wide("bf16"))
    monkeypatch.setattr(convert, "Buffer", Counted)
    meta = StoreMeta.of(wide("fp32"), GROUPS)
    convert_store(old, meta, [tmp_path], owners(meta.table, 1)).close()
    records = old.meta.records.values()
    assert Counted.peak <= 6 * max(r.nbytes for r in records) < sum(r.nbytes for r in records) / 4
