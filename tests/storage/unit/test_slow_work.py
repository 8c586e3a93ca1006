"""Progress of work above two seconds: a line, or a bar on a terminal; nothing for fast work."""

from __future__ import annotations

import threading
import time

import pytest
from rich.console import Console

from roadtrain import retry
from roadtrain.retry import slow_work


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "SLOW_S", 0.05)


def test_slow_work_prints_a_line_and_fast_work_nothing() -> None:
    lines: list[str] = []
    with slow_work("exporting", report=lines.append):
        pass
    assert lines == []
    with slow_work("exporting", 3, lines.append) as advance:
        advance(1)
        time.sleep(0.3)
    assert lines == ["exporting ..."]


def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "rich.console.Console", lambda stderr: Console(stderr=stderr, force_terminal=True)
    )
    with slow_work("exporting", 4, pytest.fail) as advance:
        advance(1)
        time.sleep(0.3)
        advance(1)
    shown = capsys.readouterr()
    assert "exporting" in shown.err and "25%" in shown.err and not shown.out


def test_the_end_is_clean_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # other ranks show nothing
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="broken"), slow_work("exporting", report=pytest.fail):
        time.sleep(0.2)
        raise ValueError("broken")
    assert set(threading.enumerate()) <= before
