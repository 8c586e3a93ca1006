"""The mark in a run directory: another store, an older store or an empty directory is not taken for
the run's store."""

from __future__ import annotations

from pathlib import Path

import pytest

from roadtrain.errors import DamagedError, ForeignError, ForkedError, GoneError, StaleError
from roadtrain.storage import mark as module
from roadtrain.storage.mark import IN_RAM, Mark

JOB, OTHER = "11111111-aaaa", "22222222-bbbb"


def write_mark(directory: Path, step: int) -> None:
    mark = Mark(directory)
    mark.check("", -1, "there")
    mark.adopt(JOB, 0)
    mark.advance(step, now=True)


def test_a_new_run_accepts_an_existing_store(tmp_path: Path) -> None:
    for job, step in [("", -1), (JOB, 0), (JOB, 7)]:
        Mark(tmp_path).check(job, step, "there")
    assert not list(tmp_path.iterdir())  # a check that passes changes nothing


@pytest.mark.parametrize(
    ("job", "step", "error", "words"),
    [
        ("", -1, GoneError, f"there is no store, but this run has committed step 5 of store {JOB}"),
        (OTHER, 5, ForeignError, f"has step 5 of store {OTHER}, but this run has committed step 5"),
        (JOB, 4, StaleError, "the store is at step 4, but this run has committed step 5"),
        (JOB, 0, StaleError, "the store is at step 0, but this run has committed step 5"),
    ],
)
def test_another_or_older_store_is_refused(
    tmp_path: Path, job: str, step: int, error: type[Exception], words: str
) -> None:
    write_mark(tmp_path, 5)
    before = (tmp_path / module.NAME).read_bytes()
    with pytest.raises(error, match=words) as raised:
        Mark(tmp_path).check(job, step, "/mnt/ssd")
    assert "--new-store" in str(raised.value) and "/mnt/ssd" in str(raised.value)
    assert (tmp_path / module.NAME).read_bytes() == before
    lines: list[str] = []
    anyway = Mark(tmp_path, new_store=True, report=lines.append)
    anyway.check(job, step, "/mnt/ssd")
    assert anyway.fresh == (job != JOB) and "--new-store" in lines[0]
    # the option is not needed again, however this start ends
    Mark(tmp_path).check(job, step, "/mnt/ssd")


def test_the_same_store_or_a_later_step(tmp_path: Path) -> None:
    write_mark(tmp_path, 5)
    for step in (5, 6, 50):
        Mark(tmp_path).check(JOB, step, "there")


def test_the_metrics_witness_the_last_step(tmp_path: Path) -> None:
    """The mark is replaced only now and then, so the metrics may be ahead of it."""
    write_mark(tmp_path, 5)
    with pytest.raises(StaleError, match="at step 8, but this run has committed step 9"):
        Mark(tmp_path, witness=9).check(JOB, 8, "there")
    # even if the mark is lost
    (tmp_path / module.NAME).unlink()
    with pytest.raises(StaleError, match="at step 8, but this run has committed step 9"):
        Mark(tmp_path, witness=9).check(OTHER, 8, "there")
    with pytest.raises(GoneError, match="this run has committed step 9"):
        Mark(tmp_path, witness=9).check("", -1, "there")
    Mark(tmp_path, witness=9).check(OTHER, 9, "there")


@pytest.mark.parametrize("lost", ["", "metrics", "mark"])
def test_a_copy_that_was_trained_elsewhere(tmp_path: Path, lost: str) -> None:
    """The mark, the lines of metrics.jsonl, or both record which session trained a step."""
    Mark(tmp_path).adopt(JOB, 5, "before ours 0,1")
    sessions = {4: "before", 5: "before", 6: "ours", 7: "ours"}
    if lost == "mark":
        (tmp_path / module.NAME).unlink()
    else:
        mark = Mark(tmp_path)
        mark.check(JOB, 5, "there", session="before")
        mark.advance(6, now=True)
    lines = {} if lost == "metrics" else sessions
    for step, session in [(6, "theirs"), (7, "theirs"), (8, "theirs"), (6, "")]:
        reopened = Mark(tmp_path, witness=4, sessions=lines)
        with pytest.raises(
            ForkedError, match=f"step {step} of the store was trained outside of this run"
        ):
            reopened.check(JOB, step, "there", session=session)
    for step, session in [(6, "ours"), (7, "ours")]:
        Mark(tmp_path, witness=4, sessions=lines).check(JOB, step, "there", session=session)
    printed: list[str] = []
    anyway = Mark(tmp_path, witness=4, sessions=lines, new_store=True, report=printed.append)
    anyway.check(JOB, 7, "there", session="theirs")
    # the run's lines do not belong to this store
    assert anyway.fresh and "--new-store" in printed[0]
    Mark(tmp_path, witness=4, sessions=lines).check(JOB, 7, "there", session="theirs")


def test_a_store_ahead_of_the_lines(tmp_path: Path) -> None:
    """Each step has its line before it is committed, even in a run of an earlier version."""
    write_mark(tmp_path, 5)
    for step in (5, 6):
        Mark(tmp_path, witness=4, sessions={5: "", 6: ""}).check(JOB, step, "there", session="")
    with pytest.raises(ForkedError, match="step 7 of the store was trained outside of this run"):
        Mark(tmp_path, witness=4, sessions={5: "", 6: ""}).check(JOB, 7, "there", session="")


def test_a_start_that_returns_to_a_snapshot(tmp_path: Path) -> None:
    """State in RAM returns to its snapshot. The mark records this first, and the lines of
    metrics.jsonl count again only once they have been cut to the same step."""
    write_mark(tmp_path, 9)
    mark = Mark(tmp_path, witness=9)
    with pytest.raises(ForeignError):
        mark.check(OTHER, 4, "there", back=True)
    mark.check(JOB, 4, "there", back=True)
    assert not mark.fresh
    again = Mark(tmp_path, witness=9)
    again.check(JOB, 4, "there")
    again.adopt(JOB, 4)
    again.advance(4)
    with pytest.raises(StaleError, match="at step 4, but this run has committed step 9"):
        Mark(tmp_path, witness=9).check(JOB, 4, "there")


@pytest.mark.parametrize("bit", range(0, 8 * 110, 13))
@pytest.mark.slow
def test_a_flipped_bit(tmp_path: Path, bit: int) -> None:
    write_mark(tmp_path, 5)
    path = tmp_path / module.NAME
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="--new-store"):
        Mark(tmp_path)
    lines: list[str] = []
    Mark(tmp_path, witness=4, report=lines.append).check(JOB, 5, "there")
    assert "damaged" in lines[0]
    with pytest.raises(StaleError):
        Mark(tmp_path, witness=4, report=lines.append).check(JOB, 3, "there")
    Mark(tmp_path, new_store=True, report=lines.append).check(JOB, 3, "there")


def test_state_in_ram_has_no_store(tmp_path: Path) -> None:
    for witness in (-1, 9):  # a run with state in RAM starts over, even if it has left lines
        mark = Mark(tmp_path, witness=witness)
        mark.check("", -1, IN_RAM)
        mark.adopt("", 0)
        mark.advance(9, now=True)
        assert mark.record.step == -1
    Mark(tmp_path, witness=9).check("", -1, "there")  # and writes no mark
    write_mark(tmp_path, 5)
    with pytest.raises(GoneError, match="RAM"):
        Mark(tmp_path).check("", -1, IN_RAM)


def test_the_mark_is_not_written_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(
        module, "replace_file", lambda path, content, doing: written.append(len(content))
    )
    mark = Mark(tmp_path)
    mark.adopt(JOB, 0)
    mark.advance(0)
    for step in range(100):
        mark.advance(step)
    assert len(written) == 2
    mark.advance(100, now=True)
    assert len(written) == 3


def test_reading_creates_no_store(tmp_path: Path) -> None:
    with pytest.raises(GoneError, match="there is no store"):
        Mark(tmp_path, reads=True).check("", -1, "there")
