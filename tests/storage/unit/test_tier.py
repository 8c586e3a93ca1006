"""The contract of a tier (storage/tier.py): bytes are read as written, and a part is written once
per step."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from roadtrain.chunks import PAGE, ChunkTable, ParamSpec
from roadtrain.device.buffers import Buffer
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import create_store
from roadtrain.storage.meta import GroupRule, StoreMeta
from roadtrain.storage.tier import RECORD, STATE_PART, WEIGHTS, part_range

TABLE = ChunkTable.build(
    [
        ("root", [ParamSpec("emb", (90, 1000), "bf16", True, 0)]),
        (
            "b0",
            [
                ParamSpec("w", (70, 1000), "fp32", True, 0),
                ParamSpec("f", (5000,), "bf16", False, -1),
            ],
        ),
        (
            "b1",
            [ParamSpec("h", (333,), "fp16", True, 1), ParamSpec("bare", (50,), "fp32", True, 1)],
        ),
    ],
    chunk_elements=1 << 16,
)
META = StoreMeta.of(TABLE, [GroupRule("adamw", ("m", "v"), ("t",)), GroupRule("sgd")])
RECORDS = META.records


@pytest.fixture(params=["direct", "buffered"])
def tier(request: pytest.FixtureRequest, tmp_path: Path):
    before = set(os.listdir("/proc/self/fd"))
    store = create_store(
        [tmp_path], META, [0] * len(TABLE.chunks), direct=request.param == "direct"
    )
    made = store.tiers[0]
    yield made
    made.check()
    store.close()
    assert set(os.listdir("/proc/self/fd")) == before


def content(chunk: int, part: str, version: int) -> Buffer:
    first, last = part_range(RECORDS[chunk], part)
    buffer = Buffer(last - first)
    buffer.view[: last - first] = np.random.default_rng([chunk, first, version]).bytes(last - first)
    return buffer


def read(tier: FileTier, chunk: int, part: str) -> bytes:
    first, last = part_range(RECORDS[chunk], part)
    buffer = Buffer(last - first)
    tier.read(chunk, part, buffer.view[: last - first])
    return bytes(buffer.view[: last - first])


def view(chunk: int, part: str, version: int) -> memoryview:
    first, last = part_range(RECORDS[chunk], part)
    return content(chunk, part, version).view[: last - first]


def fill(tier: FileTier) -> None:
    for chunk in RECORDS:
        tier.write(chunk, RECORD, view(chunk, RECORD, 0))
    tier.prepare(0, b"")
    tier.committed(0)


def test_a_record_is_read_back_whole_and_in_parts(tier: FileTier) -> None:
    fill(tier)
    for chunk, r in RECORDS.items():
        whole = bytes(view(chunk, RECORD, 0))
        assert read(tier, chunk, RECORD) == whole
        assert read(tier, chunk, WEIGHTS) == whole[: r.weights_nbytes]
        assert read(tier, chunk, STATE_PART) == whole[r.weights_nbytes :]


def test_parts_written_separately_read_as_one_record(tier: FileTier) -> None:
    fill(tier)
    for step, order in ((1, (WEIGHTS, STATE_PART)), (2, (STATE_PART, WEIGHTS)), (3, (RECORD,))):
        for chunk in [c.id for c in TABLE.trainable]:
            for part in order:
                tier.write(chunk, part, view(chunk, part, step))
                # pending but already readable
                assert read(tier, chunk, part) == bytes(view(chunk, part, step))
        tier.prepare(step, b"blob")
        tier.committed(step)
        for chunk in [c.id for c in TABLE.trainable]:
            want = b"".join(bytes(view(chunk, p, step)) for p in (WEIGHTS, STATE_PART))
            assert read(tier, chunk, RECORD) == (
                bytes(view(chunk, RECORD, step)) if order == (RECORD,) else want
            )


def test_public_is_absent_after_the_master_alone_was_written(tier: FileTier) -> None:
    fill(tier)
    chunk = next(c.id for c in TABLE.chunks if c.trainable and c.dtype == "bf16")
    r = RECORDS[chunk]
    for step in (1, 2):
        tier.write(chunk, STATE_PART, view(chunk, STATE_PART, step))
        assert not tier.has_weights(chunk)
        buffer = Buffer(r.nbytes)
        buffer.view[:] = b"\xab" * r.nbytes
        tier.read(chunk, RECORD, buffer.view)
        assert set(buffer.view[: r.weights_nbytes]) == {0xAB}  # left unchanged
        assert bytes(buffer.view[r.weights_nbytes :]) == bytes(view(chunk, STATE_PART, step))
        tier.prepare(step, b"")
        tier.committed(step)
        assert not tier.has_weights(chunk)
    tier.write(chunk, WEIGHTS, view(chunk, WEIGHTS, 3))
    assert tier.has_weights(chunk) and read(tier, chunk, WEIGHTS) == bytes(view(chunk, WEIGHTS, 3))
    tier.prepare(3, b"")
    tier.committed(3)
    assert read(tier, chunk, RECORD) == bytes(view(chunk, WEIGHTS, 3)) + bytes(
        view(chunk, STATE_PART, 2)
    )


def test_writing_twice_before_a_commit_fails_an_assertion(tier: FileTier) -> None:
    fill(tier)
    tier.write(0, STATE_PART, view(0, STATE_PART, 1))
    for part in (STATE_PART, RECORD):
        with pytest.raises(AssertionError, match="twice"):
            tier.write(0, part, view(0, part, 2))
    tier.write(0, WEIGHTS, view(0, WEIGHTS, 1))
    tier.prepare(1, b"")
    tier.committed(1)
    tier.write(0, RECORD, view(0, RECORD, 2))
    assert read(tier, 0, RECORD) == bytes(view(0, RECORD, 2))


@pytest.mark.slow
def test_threads_on_different_chunks(tier: FileTier) -> None:
    fill(tier)
    errors: list[BaseException] = []

    def work(chunk: int, step: int) -> None:
        try:
            tier.write(chunk, RECORD, view(chunk, RECORD, step))
            for _ in range(5):
                assert read(tier, chunk, RECORD) == bytes(view(chunk, RECORD, step))
        except BaseException as error:
            errors.append(error)

    for step in (1, 2, 3):
        threads = [threading.Thread(target=work, args=(c.id, step)) for c in TABLE.trainable]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        tier.prepare(step, b"")
        tier.committed(step)
    assert not errors


def test_a_view_that_is_not_page_aligned(tier: FileTier) -> None:
    fill(tier)
    r = RECORDS[0]
    odd = Buffer(r.nbytes + PAGE)
    odd.view[24 : 24 + r.nbytes] = view(0, RECORD, 1)
    tier.write(0, RECORD, odd.view[24 : 24 + r.nbytes])
    odd.view[24 : 24 + r.nbytes] = bytes(r.nbytes)
    tier.read(0, RECORD, odd.view[24 : 24 + r.nbytes])
    assert bytes(odd.view[24 : 24 + r.nbytes]) == bytes(view(0, RECORD, 1))
