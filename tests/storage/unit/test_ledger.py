"""The two files of a ledger: the record that is loaded, the records that are erased, and that only
a complete record of this store is accepted (Rule 3)."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.errors import DamagedError, ForeignError, FullError, StaleError
from roadtrain.storage.direct import DirectFile
from roadtrain.storage.ledger import HEADER, ROW, Ledger, pack, record_in, steps_in, unpack
from roadtrain.storage.meta import GroupRule, StoreMeta

TABLE = ChunkTable.build(
    [("root", [ParamSpec("w", (3, 1 << 16), "fp32", True, 0)])], chunk_elements=1 << 16
)
META = StoreMeta.of(TABLE, [GroupRule("sgd")])
ROWS = np.zeros(len(TABLE.chunks), ROW)
BLOBS = st.lists(
    st.binary(max_size=20).filter(lambda b: b[:8] != b"roadtrai"), min_size=1, max_size=5
)


@given(st.lists(BLOBS, min_size=1, max_size=4))
def test_blobs_that_were_packed_several_times_come_back_in_order(many: list[list[bytes]]) -> None:
    packed = [pack(blobs) for blobs in many]
    assert unpack(pack(packed)) == [blob for blobs in many for blob in blobs]
    assert pack([]) == b""


def create_with_steps(home: Path, *steps: int, sessions: bool = False) -> Ledger:
    ledger = Ledger(home, META, ROWS, create=True)
    for step in steps:
        if sessions:
            ledger.begin_session()
        ledger.append(step, rows_of(step), b"blob %d" % step)
        ledger.confirm()
    return ledger


def rows_of(step: int) -> np.ndarray:
    rows = ROWS.copy()
    rows["step"], rows["weights_slot"] = step, step % 2
    return rows


def open_existing(home: Path, meta: StoreMeta = META) -> Ledger:
    return Ledger(home, meta, ROWS)


@pytest.mark.parametrize("sessions", [False, True])
def test_the_newest_or_requested_record_is_loaded_and_the_other_erased(
    tmp_path: Path, sessions: bool
) -> None:
    for last in (4, 5):  # the newest record is in either file
        home = tmp_path / str(last)
        home.mkdir()
        made = create_with_steps(home, *range(1, last + 1), sessions=sessions)
        assert made.entry.session == made.session and (made.session is not None) == sessions
        made.close()
        assert sorted(steps_in(home)) == [last - 1, last]
        for step, loaded in ((None, last), (last, last), (last - 1, last - 1)):
            ledger = open_existing(home)
            assert sorted(ledger.load(step)) == [last - 1, last]
            entry = ledger.entry
            assert (entry.step, entry.blob) == (loaded, b"blob %d" % loaded)
            assert entry.rows.tolist() == rows_of(loaded).tolist()
            assert len(ledger.dropped) == (loaded < last) and not ledger.damaged
            assert ledger.session == entry.session and (entry.session is not None) == sessions
            ledger.close()
        ledger = open_existing(home)
        ledger.load(last - 1)
        ledger.settle()
        assert steps_in(home) == [last - 1]
        ledger.append(last + 7, rows_of(last + 7), b"")  # written to the other file, never over it
        assert sorted(steps_in(home)) == [last - 1, last + 7]
        ledger.close()


def test_a_session_records_the_step_from_which_it_resumed(tmp_path: Path) -> None:
    ledger = create_with_steps(tmp_path)
    assert ledger.entry.step == -1
    for step, before in ((0, ""), (3, None), (8, None)):
        if step:
            ledger.append(step, rows_of(step), b"")
            ledger.confirm()
        old = "" if ledger.session is None else ledger.session.id
        found, begun = ledger.begin_session()
        assert found == old and begun != old and (before is None or found == before)
        assert (ledger.session.id, ledger.session.step) == (begun, step)
        assert abs(ledger.session.at - time.time()) < 60
    ledger.close()


def test_records_of_another_time_or_store_are_never_loaded(tmp_path: Path) -> None:
    create_with_steps(tmp_path, 1, 2).close()
    for step, older in ((3, "this part"), (0, "the first part")):
        ledger = open_existing(tmp_path)
        with pytest.raises(StaleError, match=rf"of steps \[1, 2\], but.* at step {step}: {older}"):
            ledger.load(step)
        ledger.close()
    others = {"generation": META.generation + 1, "job": str(uuid.uuid4()), "index": META.index + 1}
    for name, value in others.items():
        ledger = open_existing(tmp_path, replace(META, **{name: value}))
        with pytest.raises(ForeignError, match="belongs to another store"):
            ledger.load(None)
        ledger.close()
    ledger = Ledger(tmp_path, META, np.zeros(len(ROWS) + 1, ROW))
    with pytest.raises(ForeignError, match="belongs to another store"):
        ledger.load(None)
    ledger.close()
    (tmp_path / "empty").mkdir()
    ledger = create_with_steps(tmp_path / "empty")
    with pytest.raises(DamagedError, match="holds no record"):
        ledger.load(None)
    assert steps_in(tmp_path / "empty") == []
    ledger.close()


@pytest.mark.parametrize("sessions", [False, True])
def test_only_a_complete_record_is_accepted(tmp_path: Path, sessions: bool) -> None:
    """Records torn anywhere, with a flipped bit in any byte, or of another program with a matching
    checksum."""
    create_with_steps(tmp_path, 6, sessions=sessions).close()
    file = tmp_path / "ledger.0"
    record = record_in(file)
    assert record is not None and len(record) < file.stat().st_size
    for nbytes in range(len(record)):
        file.write_bytes(record[:nbytes])
        assert not record_in(file), nbytes
    for at in range(len(record)):
        changed = bytearray(record)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        assert record_in(file) is None, at
    body = b"another\0" + record[8:-8]
    file.write_bytes(body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))
    assert record_in(file) is None
    file.write_bytes(record + bytes(HEADER.size))
    assert record_in(file) == record


def test_a_record_of_another_format_is_foreign(tmp_path: Path) -> None:
    create_with_steps(tmp_path, 6).close()
    file = tmp_path / "ledger.0"
    record = record_in(file)
    assert record is not None
    body = record[:8] + (9).to_bytes(4, "little") + record[12:-8]
    file.write_bytes(body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))
    ledger = open_existing(tmp_path)
    with pytest.raises(ForeignError, match="its format is 9"):
        ledger.load(None)
    ledger.close()


def test_a_ledger_has_room_for_a_blob_before_the_disk_is_full(tmp_path: Path) -> None:
    ledger = create_with_steps(tmp_path)
    before = [os.stat(tmp_path / name).st_size for name in ("ledger.0", "ledger.1")]
    room = HEADER.size + ROWS.nbytes + (1 << 16)
    assert before == [room, room]
    ledger.append(1, ROWS, bytes((1 << 16) - 100))
    assert os.stat(tmp_path / "ledger.0").st_size == room
    ledger.close()
    open_existing(tmp_path).close()
    assert os.stat(tmp_path / "ledger.0").st_size == room


@pytest.mark.parametrize("at", ["write", "sync"])
def test_a_failed_record_is_erased_and_the_previous_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    ledger = create_with_steps(tmp_path, 1, 2)
    full = iter([FullError("the disk is full")])
    real = getattr(DirectFile, at)

    def once(self, *arguments):
        done = real(self, *arguments)
        for error in full:
            raise error
        return done

    monkeypatch.setattr(DirectFile, at, once)
    with pytest.raises(FullError):
        ledger.append(3, rows_of(3), b"blob")
    assert ledger.pending is None and ledger.entry.step == 2
    assert steps_in(tmp_path) == [2]
    ledger.close()
