"""The clock in a server's answer to a status query."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from roadtrain.errors import WireError
from roadtrain.servers import health
from roadtrain.servers.frames import Figures
from roadtrain.transport.tcp import TcpOptions

STATUS = ("step 3", {}, {}, Figures(step=3))


def answer_to(monkeypatch: pytest.MonkeyPatch, header: bytes, payload: bytes) -> tuple[Any, Any]:
    def connect(address: object, watcher: health.Watcher, *_: object, **__: object) -> Any:
        watcher.arrived(0, header, memoryview(payload))
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(health, "connect", connect)
    return health.ask_with_clock(("127.0.0.1", 1), TcpOptions())


def test_the_difference_of_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = msgspec.json.encode(STATUS)
    status, ahead_s = answer_to(monkeypatch, repr(time.time() + 60).encode(), payload)
    assert status == STATUS and ahead_s == pytest.approx(60, abs=1)
    assert health.ask(("127.0.0.1", 1), TcpOptions()) == STATUS


def test_an_earlier_version_sends_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer_to(monkeypatch, b"", msgspec.json.encode(STATUS)) == (STATUS, None)


def test_a_clock_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rule 8
    status, ahead_s = answer_to(monkeypatch, b"noon", msgspec.json.encode(STATUS))
    assert isinstance(status, WireError) and ahead_s is None


def test_an_answer_carries_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    link: Any = SimpleNamespace(send=lambda kind, header, payload: sent.append(header))
    health.answer(link, STATUS)
    assert float(sent[0]) == pytest.approx(time.time(), abs=5)
