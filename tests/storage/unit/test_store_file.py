"""Stores on files: after any crash the last committed step is intact (Rule 3), and every fault is a
typed error that names file, chunk and step."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roadtrain.chunks import PAGE, ChunkTable, ParamSpec
from roadtrain.device.buffers import HUGE, Buffer, array_in
from roadtrain.errors import (
    DamagedError,
    ForeignError,
    FullError,
    GoneError,
    StaleError,
    StoreError,
)
from roadtrain.storage import lock as lock_module
from roadtrain.storage.direct import DirectFile, beside, typed_errors
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import (
    OpenedStore,
    create_part,
    create_store,
    open_part,
    open_store,
    publish_part,
)
from roadtrain.storage.meta import GroupRule, StoreMeta
from roadtrain.storage.sealed import sealed, unsealed
from roadtrain.storage.tier import RECORD, STATE_PART, WEIGHTS, part_range

TABLE = ChunkTable.build(
    [
        (
            "root",
            [ParamSpec("emb", (10, 20), "bf16", True, 0), ParamSpec("head", (9,), "fp32", True, 1)],
        ),
        (
            "b0",
            [
                ParamSpec("w", (66, 1000), "fp16", True, 0),
                ParamSpec("f", (500,), "bf16", False, -1),
            ],
        ),
    ],
    chunk_elements=1 << 16,
)
META = StoreMeta.of(TABLE, [GroupRule("adamw", ("m",), ("t",)), GroupRule("sgd")])
RECORDS = META.records
OWNERS = [c.id % 2 for c in TABLE.chunks]
TRAINABLE = [c.id for c in TABLE.trainable]
FROZEN = next(c.id for c in TABLE.chunks if not c.trainable)
serial = itertools.count(1)


@pytest.fixture(autouse=True)
def no_descriptor_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


def size(chunk: int, part: str) -> int:
    first, last = part_range(RECORDS[chunk], part)
    return last - first


def random_bytes(chunk: int, part: str) -> memoryview:
    n = size(chunk, part)
    buffer = Buffer(n)
    buffer.view[:n] = np.random.default_rng(next(serial)).bytes(n)
    return buffer.view[:n]


def read(store: OpenedStore, chunk: int, part: str) -> bytes:
    buffer = Buffer(max(size(chunk, part), 1))
    store.tier_of(chunk).read(chunk, part, buffer.view[: size(chunk, part)])
    return bytes(buffer.view[: size(chunk, part)])


def made(directories: list[Path], meta: StoreMeta = META) -> OpenedStore:
    store = create_store(directories, meta, [o % len(directories) for o in OWNERS])
    for chunk in RECORDS:
        store.tier_of(chunk).write(chunk, RECORD, random_bytes(chunk, RECORD))
    store.commit(0, b"zero")
    store.publish()
    return store


def opened(directories: list[Path]) -> OpenedStore:
    store = open_store(directories)
    assert store is not None
    return store


def step_of(store: OpenedStore, step: int) -> None:
    for chunk in TRAINABLE:
        store.tier_of(chunk).write(chunk, RECORD, random_bytes(chunk, RECORD))
    store.commit(step, b"blob %d" % step)


class Model:
    """Reference for the store: committed and newest bytes of every part in a dict, None for an
    absent part."""

    def __init__(self, directories: list[Path]) -> None:
        self.directories, self.store, self.step = directories, made(directories), 0
        self.blob = b"zero"
        self.newest = {
            (c, p): read(self.store, c, p) for c in RECORDS for p in (WEIGHTS, STATE_PART)
        }
        self.committed = dict(self.newest)
        self.written: set[tuple[int, str]] = set()

    def write(self, chunk: int, part: str) -> None:
        parts = {(chunk, p) for p in ((WEIGHTS, STATE_PART) if part == RECORD else (part,))}
        if parts & self.written or chunk == FROZEN or not size(chunk, part):
            return
        data = random_bytes(chunk, part)
        self.store.tier_of(chunk).write(chunk, part, data)
        self.written |= parts
        start = part_range(RECORDS[chunk], part)[0]
        for c, p in parts:
            first, last = part_range(RECORDS[c], p)
            self.newest[c, p] = bytes(data[first - start : last - start])
        if RECORDS[chunk].master and (chunk, WEIGHTS) not in self.written:
            self.newest[chunk, WEIGHTS] = None

    def commit(self) -> None:
        self.step, self.blob = self.step + 1, b"blob %d" % next(serial)
        self.store.commit(self.step, self.blob)
        self.committed, self.written = dict(self.newest), set()

    def crash(self, prepared: int, garbage: bool, torn_at: float | None) -> None:
        """Simulate a kill or power cut: some directories hold the next step's record, slots being
        written may hold garbage, and directory 0's new record may be torn."""
        tiers = self.store.tiers
        for tier in [*tiers[1:], tiers[0]][:prepared]:
            tier.prepare(self.step + 1, b"lost" * 50)
        lost = prepared == len(tiers) and torn_at is None
        for tier in tiers if garbage and not lost else ():
            for chunk, part in tier._written:
                first, last = part_range(RECORDS[chunk], part)
                slot = tier._now[tier._places[chunk].row][f"{part}_slot"]
                with open(tier._slots[slot].path, "r+b") as file:
                    file.seek(tier._places[chunk].offset + first)
                    file.write(os.urandom(last - first))
        if torn_at is not None and prepared == len(tiers):
            ledger = tiers[0].ledger
            path = ledger._files[ledger.pending.file].path
            with open(path, "r+b") as file:
                file.seek(int(torn_at * 400))
                file.write(os.urandom(300))
        # the record of directory 0 exists, so the step is committed although it was never announced
        if lost:
            self.step, self.blob, self.committed = self.step + 1, b"lost" * 50, dict(self.newest)
        self.reopen()

    def reopen(self) -> None:
        self.store.close()
        self.store = opened(self.directories)
        self.newest, self.written = dict(self.committed), set()

    def check(self) -> None:
        for tier in self.store.tiers:
            tier.check()
        assert (self.store.step, self.store.blob) == (self.step, self.blob)
        for (chunk, part), want in self.newest.items():
            if want is None:
                assert not self.store.tier_of(chunk).has_weights(chunk)
            elif want:
                assert read(self.store, chunk, part) == want, (chunk, part)


OPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"),
            st.sampled_from(TRAINABLE),
            st.sampled_from([WEIGHTS, STATE_PART, RECORD]),
        ),
        st.tuples(st.just("commit")),
        st.tuples(st.just("reopen")),
        st.tuples(
            st.just("crash"), st.integers(0, 2), st.booleans(), st.none() | st.floats(0, 0.4)
        ),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(ops=OPS)
def test_after_any_crash_the_store_equals_the_last_committed_step(ops: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as home:
        model = Model([Path(home, "a"), Path(home, "b")])
        try:
            for name, *arguments in ops:
                getattr(model, name)(*arguments)
                model.check()
            model.reopen()
            model.check()
        finally:
            model.store.close()


def test_a_temporary_directory_is_on_the_disk_of_another(tmp_path: Path) -> None:
    with beside(tmp_path / "not" / "there", "x-") as made:
        assert Path(made).parent == tmp_path and Path(made).name.startswith("x-")
    assert not Path(made).exists()
    with beside(Path("/dev/shm"), "roadtrain-test-") as made:  # a mount point
        assert Path(made).parent == Path("/dev/shm")


def test_buffer_is_aligned_zero_and_tolerates_arrays_that_outlive_it() -> None:
    buffer = Buffer(3 * HUGE + 5)
    assert (
        buffer.nbytes == 3 * HUGE + PAGE and buffer.view.format == "B" and not buffer.view.readonly
    )
    array = array_in(buffer.view, "bf16", PAGE, 10)
    assert array.dtype == np.uint16 and array_in(buffer.view, "fp32", 0, 4).ctypes.data % HUGE == 0
    buffer.view[PAGE] = 7
    buffer.close()
    buffer.close()
    assert array[0] == 7 and len(buffer.view) == 0


@pytest.mark.parametrize("part", [WEIGHTS, STATE_PART])
def test_a_flipped_bit_is_found(tmp_path: Path, part: str) -> None:
    store = made([tmp_path / "a", tmp_path / "b"])
    step_of(store, 1)
    chunk = TRAINABLE[0]
    tier = store.tier_of(chunk)
    path = tier.directory / "slot1.bin"
    with open(path, "r+b") as file:
        file.seek(tier._places[chunk].offset + part_range(RECORDS[chunk], part)[0] + 99)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    for expected in (part, RECORD):
        with pytest.raises(DamagedError, match=rf"{path}: chunk {chunk}: .*{part}.* step 1"):
            read(store, chunk, expected)
    assert read(store, TRAINABLE[1], RECORD)  # the other chunks are usable
    store.close()


@pytest.mark.parametrize("name", ["slot0.bin", "slot1.bin", "ledger.0", "store.json"])
@pytest.mark.parametrize("fault", ["truncated", "removed"])
def test_truncated_and_removed_files(tmp_path: Path, name: str, fault: str) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    made(directories).close()
    path = directories[0] / "gen-1" / name
    if fault == "removed":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2 // PAGE * PAGE if "slot" in name else 50)
    with pytest.raises(GoneError if fault == "removed" else DamagedError, match=r"gen-1"):
        open_store(directories)


def test_truncated_while_in_use(tmp_path: Path) -> None:
    store = made([tmp_path])
    os.truncate(tmp_path / "gen-1" / "slot0.bin", 0)
    with pytest.raises(DamagedError, match=r"slot0.bin: truncated: reading chunk 0 at step 0"):
        read(store, 0, RECORD)
    store.close()


def test_removed_while_in_use_is_found_at_the_commit(tmp_path: Path) -> None:
    store = made([tmp_path])
    (tmp_path / "gen-1" / "slot1.bin").unlink()
    with pytest.raises(GoneError, match=r"slot1.bin: removed"):
        step_of(store, 1)
    store.close()


def test_a_vanished_directory(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    store = made(directories)
    step_of(store, 1)
    store.close()
    (tmp_path / "b").rename(tmp_path / "hidden")
    with pytest.raises(GoneError, match=r"b does not exist"):
        open_store(directories)
    (tmp_path / "hidden").rename(tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "hidden")
    with pytest.raises(GoneError, match=r"b: holds step 1"):
        open_store(directories)
    assert (tmp_path / "b" / "gen-1" / "slot0.bin").exists()  # nothing was removed
    # moved, and in another order
    for paths in ([tmp_path / "hidden", tmp_path / "b"], [tmp_path / "b", tmp_path / "hidden"]):
        store = opened(paths)
        assert store.step == 1 and store.directories == (tmp_path / "hidden", tmp_path / "b")
        store.close()
    # also in its original place
    with pytest.raises(
        GoneError,
        match=r"directory 1 of the store's 2 .* not among the 1 directories that were named",
    ):
        open_store([tmp_path / "hidden"])


def test_foreign_stores(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    made(directories).close()
    other = StoreMeta.of(TABLE, META.groups)
    made([tmp_path / "c", tmp_path / "d"], other).close()
    for mixed in (["a", "c"], ["a", "d"], ["a", "b", "d"]):
        with pytest.raises(ForeignError, match=r"job"):
            open_store([tmp_path / d for d in mixed])
    with pytest.raises(ForeignError, match=r"already holds a store"):
        create_store([tmp_path / "a"], other, [0] * len(OWNERS))
    for i in range(2):  # another job's ledger with this job's description
        shutil.copy(
            tmp_path / "c" / "gen-1" / f"ledger.{i}", tmp_path / "a" / "gen-1" / f"ledger.{i}"
        )
    with pytest.raises(ForeignError, match=r"ledger.0"):
        open_store(directories)
    path = tmp_path / "a" / "gen-1" / "store.json"
    tree = json.loads(unsealed(path.read_bytes())) | {"format": 99}
    path.write_bytes(sealed(json.dumps(tree).encode()))
    with pytest.raises(ForeignError, match=r"format 99"):
        open_store(directories)


def test_an_older_copy_of_one_directory_is_named(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    store = made(directories)
    shutil.copytree(tmp_path / "b", tmp_path / "old")
    shutil.copytree(tmp_path / "a", tmp_path / "old-a")
    step_of(store, 1)
    step_of(store, 2)
    store.close()
    with pytest.raises(StaleError, match=r"steps \[1, 2\].* at step 0: the first part"):
        open_store([tmp_path / "old-a", tmp_path / "b"])
    (tmp_path / "b").rename(tmp_path / "new")
    (tmp_path / "old").rename(tmp_path / "b")
    with pytest.raises(
        StaleError, match=r"b/gen-1: its records are of steps \[0\].* at step 2.*older"
    ):
        open_store(directories)
    # with the newest record of the other directory damaged the error is a different one
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "new").rename(tmp_path / "b")
    with open(tmp_path / "b" / "gen-1" / "ledger.0", "r+b") as file:
        file.seek(100)
        file.write(b"flip")
    with pytest.raises(
        DamagedError, match=r"ledger.0: the record in this file is damaged"
    ) as raised:
        open_store(directories)
    assert "--new-store" not in str(raised.value)


def test_a_torn_record_is_reported(tmp_path: Path) -> None:
    store = made([tmp_path])
    step_of(store, 1)
    store.close()
    with open(tmp_path / "gen-1" / "ledger.1", "r+b") as file:
        file.seek(100)
        file.write(b"torn")
    store = opened([tmp_path])
    assert store.step == 0 and "torn record" in store.notes[0]
    store.close()


def test_empty_directories_and_unfinished_generations(tmp_path: Path) -> None:
    assert open_store([tmp_path / "a"]) is None and not (tmp_path / "a").exists()
    store = create_store([tmp_path / "a", tmp_path / "b"], META, OWNERS)
    store.close()  # killed before the first commit
    (tmp_path / "a" / "gen-2").mkdir()  # killed before its description
    (tmp_path / "a" / "mine.txt").write_text("keep")
    assert open_store([tmp_path / "a", tmp_path / "b"]) is None
    assert os.listdir(tmp_path / "a") == ["mine.txt"] and os.listdir(tmp_path / "b") == []


def test_a_new_stores_files_are_durable_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 1 is not written before the first step: if its size were not synced, a power cut before
    that would leave no store."""
    synced, fsync = {}, os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        synced[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    monkeypatch.setattr(os, "fsync", noted)
    made([tmp_path / "a", tmp_path / "b"]).close()
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".0", ".1")]
    assert len(files) == 8
    assert all(synced[path.stat().st_ino] == path.stat().st_size > 0 for path in files)


def test_two_processes_cannot_write_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "LOCK_WAIT_S", 0.1)
    store = made([tmp_path])
    with pytest.raises(StoreError, match=r"in use by (this|another) process"):
        open_store([tmp_path])
    store.close()


def test_a_write_error_midway_keeps_the_committed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made([tmp_path])
    want = {c: read(store, c, RECORD) for c in RECORDS}

    def refuse(name: str, path: str, code: int):
        real = getattr(os, name)

        def call(fd: int, *rest: object) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(path):
                raise OSError(code, os.strerror(code))
            return real(fd, *rest)

        return call

    for code, kind in (
        (errno.ENOSPC, FullError),
        (errno.EIO, StoreError),
        (errno.ENODEV, GoneError),
    ):
        for name, path, what in (
            ("pwritev", "slot1.bin", "writing chunk 0 after step 0"),
            ("fdatasync", "slot1.bin", "fdatasync at step 1"),
            ("pwritev", "ledger.1", "writing the record of step 1"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, refuse(name, path, code))
                with pytest.raises(kind, match=rf"{path}: .*{what}"):
                    step_of(store, 1)
            store.close()
            store = opened([tmp_path])
            assert {c: read(store, c, RECORD) for c in RECORDS} == want
    step_of(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse("preadv", "slot1.bin", errno.EIO))
        with pytest.raises(StoreError, match=r"slot1.bin: reading chunk 0 at step 1"):
            read(store, 0, RECORD)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse("fdatasync", "ledger.0", errno.EIO))
        with pytest.raises(StoreError, match=r"ledger.0: fdatasync of the record of step 2"):
            step_of(store, 2)
    assert store.step == 1
    store.close()
    store = opened([tmp_path])
    # the commit was not announced, and the disk may lack the record
    assert store.step == 1
    for chunk in RECORDS:
        read(store, chunk, RECORD)
    store.close()


def test_short_transfers_and_refused_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made([tmp_path])
    data = random_bytes(0, RECORD)
    pwritev, preadv = os.pwritev, os.preadv

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        return pwritev(fd, [views[0][: max(PAGE, len(views[0]) // 2 // 512 * 512)]], offset)

    def short_read(fd: int, views: list[memoryview], offset: int) -> int:
        return preadv(fd, [views[0][: max(PAGE, len(views[0]) // 2 // PAGE * PAGE)]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", short)
        patch.setattr(os, "preadv", short_read)
        store.tiers[0].write(0, RECORD, data)
        assert read(store, 0, RECORD) == bytes(data)
    store.commit(1, b"")
    assert store.notes == ()
    refusals = iter([True, False, False, False])

    def invalid_once(fd: int, views: list[memoryview], offset: int) -> int:
        if next(refusals):
            raise OSError(errno.EINVAL, "invalid")
        return pwritev(fd, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", invalid_once)
        store.tiers[0].write(0, RECORD, data)
    assert "no direct I/O on this file system" in store.notes[0] and read(
        store, 0, RECORD
    ) == bytes(data)
    store.close()


def test_spill(tmp_path: Path) -> None:
    store = made([tmp_path])
    tier = store.tiers[0]
    for chunk in TRAINABLE:
        data = memoryview(bytes([chunk + 1]) * tier._places[chunk].spill_nbytes)
        tier.spill_write(chunk, data)
    for chunk in TRAINABLE:
        buffer = Buffer(tier._places[chunk].spill_nbytes)
        tier.spill_read(chunk, buffer.view)
        assert set(buffer.view) == {chunk + 1}
    assert "spill.bin" not in os.listdir(tmp_path / "gen-1")
    store.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "are free$"),
        (errno.EDQUOT, "are free, but your quota is exhausted$"),
        (errno.EFBIG, "are free, but a file cannot be that large$"),
    ],
)
def test_the_error_of_a_full_disk_states_needed_and_free_bytes(
    tmp_path: Path, code: int, words: str
) -> None:
    """The error names the path, the operation, the needed bytes and the free bytes."""
    at = tmp_path / "not" / "there" / "file"
    for nbytes, needs in ((0, r"at most 4\.0 KiB"), (3 << 20, r"3\.0 MiB")):
        with pytest.raises(FullError) as caught, typed_errors(at, "renaming", nbytes):
            raise OSError(code, os.strerror(code))
        message, hint = str(caught.value).split("\n")
        assert re.search(rf"^{at}: renaming needs {needs}, but [1-9][\d.]* \w+ {words}", message)
        assert hint.startswith("hint: ")


def test_a_disk_without_inodes_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoInodes:
        f_bavail, f_frsize, f_files, f_favail = 1000, PAGE, 70, 0

    monkeypatch.setattr(os, "statvfs", lambda _: NoInodes)
    with (
        pytest.raises(FullError, match=r"3\.9 MiB are free, but 0 of 70 inodes\n"),
        typed_errors(tmp_path / "a", "opening"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_sync_on_a_full_disk_reports_the_bytes_it_had_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = DirectFile(tmp_path / "file", create=4 * PAGE)
    file.write(memoryview(bytes(PAGE)), 0, "one")
    file.sync("once")
    file.write(memoryview(bytes(2 * PAGE)), 0, "two")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(FullError, match=r"file: fdatasync at step 1 needs 8\.0 KiB, "):
            file.sync("at step 1")
    file.close()


def test_a_disk_too_small_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tiny:
        f_bavail, f_frsize = 3, PAGE

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: Tiny)
        with pytest.raises(FullError, match=r"the store needs .*12.0 KiB are free"):
            create_store([tmp_path / "a", tmp_path / "b"], META, OWNERS)
    assert os.listdir(tmp_path / "a") == []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(FullError, match=r"allocating needs"):
            create_store([tmp_path / "a", tmp_path / "b"], META, OWNERS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path / "a") == []


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # bytes of the store itself, measured on a disk with room
    store = made([tmp_path / "roomy"])
    store.close()
    need = sum(f.stat().st_size for f in (tmp_path / "roomy" / "gen-1").iterdir())
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={need + (64 << 10)}", "tmpfs", str(disk)]
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        store = made([disk])
        want = {c: read(store, c, RECORD) for c in RECORDS}
        with (
            open(disk / "filler", "wb", buffering=0) as file,
            pytest.raises(OSError, match="No space"),
        ):
            while True:
                file.write(bytes(PAGE))
        with pytest.raises(FullError, match=r"spill.bin: allocating needs .* 0 B are free"):
            store.tiers[0].spill_write(TRAINABLE[0], memoryview(bytes(PAGE)))
        step_of(store, 1)  # the space for a step was allocated at the start
        with pytest.raises(FullError, match=r"ledger.0: writing the record of step 2 needs"):
            store.commit(2, bytes(200_000))
        store.close()
        store = opened([disk])
        assert store.step == 1 and read(store, FROZEN, RECORD) == want[FROZEN]
        store.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_tier_works_without_a_store(tmp_path: Path) -> None:
    meta = replace(META, owners=(0,) * len(OWNERS), directories=(str(tmp_path),), generation=1)
    tier = FileTier(tmp_path, meta, create=True)
    with pytest.raises(AssertionError, match="has not been written"):
        tier.prepare(0, b"")
    for chunk in RECORDS:
        tier.write(chunk, RECORD, random_bytes(chunk, RECORD))
    tier.prepare(0, b"x")
    with pytest.raises(AssertionError, match="between prepare and committed"):
        tier.write(0, RECORD, random_bytes(0, RECORD))
    tier.committed(0)
    with pytest.raises(AssertionError, match="frozen"):
        tier.write(FROZEN, WEIGHTS, random_bytes(FROZEN, WEIGHTS))
    tier.close()
    tier = FileTier(tmp_path, meta)
    assert (tier.step, tier.blob) == (0, b"x")
    tier.close()


def test_a_prepared_step_is_withdrawn_when_the_previous_step_is_opened(
    tmp_path: Path,
) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    store = made(directories)
    store.tiers[1].prepare(1, b"")
    store.close()
    opened(directories).close()
    tier = FileTier(store.tiers[1].directory, store.tiers[1].meta)
    assert tier.step == 0
    tier.close()


def test_a_part_that_has_missed_steps_is_replaced(tmp_path: Path) -> None:
    """With replicas. A part of another job is never replaced; the old copy counts until the new one
    is complete."""
    names = ("x", "y", "z")
    meta = replace(
        META, owners=tuple(c % 3 for c in RECORDS), directories=names, index=1, replicas=2
    )
    assert (
        {c for c in RECORDS if 1 in meta.holders(c)}
        == set(meta.owned(1))
        == {c for c in RECORDS if c % 3 != 2}
    )

    def part(meta: StoreMeta, step: int) -> None:
        tier = create_part(tmp_path, meta)
        for chunk in meta.owned(1):
            tier.write(chunk, RECORD, random_bytes(chunk, RECORD))
        tier.prepare(step, b"")
        tier.committed(step)
        tier.close()

    part(meta, 5)
    publish_part(tmp_path)
    with pytest.raises(ForeignError, match="holds step 5"):
        create_part(tmp_path, replace(meta, job=META.job[:-4] + "0000"))
    with pytest.raises(ForeignError, match="holds step 5"):
        create_part(tmp_path, replace(meta, index=2))
    create_part(tmp_path, meta).close()  # killed while it is filled
    tier = open_part(tmp_path)
    assert tier is not None and tier.step == 5 and generations_in(tmp_path) == ["gen-1"]
    tier.close()
    part(meta, 9)
    for _ in range(2):  # killed before publication: the part is complete, so it counts
        tier = open_part(tmp_path)
        assert tier is not None and tier.step == 9 and generations_in(tmp_path) == ["gen-2"]
        tier.close()
    part(meta, 12)
    assert generations_in(tmp_path) == ["gen-2", "gen-3"]
    publish_part(tmp_path)
    assert generations_in(tmp_path) == ["gen-3"]
    tier = open_part(tmp_path)
    assert tier is not None and tier.step == 12
    tier.close()


def generations_in(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob("gen-*"))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_directory_0_commits_last(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / name for name in "abc"]
    store = made(directories)

    def fail(step: int, blob: bytes) -> None:
        raise FullError("full")

    monkeypatch.setattr(store.tiers[failing], "prepare", fail)
    with pytest.raises(FullError):
        step_of(store, 1)
    store.close()
    store = opened(directories)
    assert store.step == 0
    for chunk in RECORDS:
        read(store, chunk, RECORD)
    store.close()
