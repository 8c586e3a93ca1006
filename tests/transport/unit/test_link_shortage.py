"""A host briefly out of threads, descriptors or memory: new connections are refused or wait, one
line reports it, and the process keeps listening (Rules 5 and 6)."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

import pytest

from roadtrain.errors import PeerError
from roadtrain.transport import tcp

START = threading.Thread.start


class Kept:
    """A Receiver that records how its link ended."""

    def __init__(self) -> None:
        self.lost_with: list[PeerError] = []
        self.arrived_kinds: list[int] = []

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self.arrived_kinds.append(kind)

    def lost(self, error: PeerError) -> None:
        self.lost_with.append(error)


def wait_for(ready: Any) -> None:
    until = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.01)


def out_of_threads(monkeypatch: pytest.MonkeyPatch, refused: Any) -> list[str]:
    """Make the start of threads fail if `refused(name)` is true."""
    seen: list[str] = []

    def start(self: threading.Thread) -> None:
        if refused(self.name):
            seen.append(self.name)
            raise RuntimeError("can't start new thread")
        START(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return seen


@pytest.fixture
def listening() -> Any:
    """Yield (listener, its printed lines, receivers of the accepted links)."""
    lines: list[str] = []
    receivers: list[Kept] = []

    def accept(link: Any, hello: bytes) -> Kept:
        receivers.append(Kept())
        return receivers[-1]

    listener = tcp.listen(("127.0.0.1", 0), accept, tcp.TcpOptions(), lines.append)
    yield listener, lines, receivers
    listener.close()


def check_connects(listener: Any, receivers: list[Kept]) -> None:
    link = tcp.connect(listener.address, Kept())
    link.send(3, b"")
    wait_for(lambda: receivers and receivers[-1].arrived_kinds == [3])
    link.close()


def test_a_connection_is_refused_without_a_free_thread(
    listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, lines, receivers = listening
    refused = out_of_threads(monkeypatch, lambda name: name.startswith("greet"))
    for _ in range(3):
        with pytest.raises(PeerError):
            tcp.connect(listener.address, Kept())
    assert len(refused) == 3 and not listener._pending
    short = [line for line in lines if "can't start new thread" in line]
    assert len(short) == 1, "not a line for every connection"
    monkeypatch.undo()
    check_connects(listener, receivers)


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
def test_a_connection_waits_for_a_free_descriptor(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sparse:
        """A listening socket whose accept fails three times."""

        def __init__(self, sock: Any) -> None:
            self.sock, self.refusals = sock, 3

        def accept(self) -> Any:
            if self.refusals:
                self.refusals -= 1
                raise OSError(code, "too many")
            return self.sock.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

    lines: list[str] = []
    receivers: list[Kept] = []

    def accept(link: Any, hello: bytes) -> Kept:
        receivers.append(Kept())
        return receivers[-1]

    made = tcp.Listener
    monkeypatch.setattr(tcp, "Listener", lambda sock, *rest: made(Sparse(sock), *rest))
    listener = tcp.listen(("127.0.0.1", 0), accept, tcp.TcpOptions(), lines.append)
    try:
        check_connects(listener, receivers)
        assert [line for line in lines if "too many" in line][1:] == []
        assert "too many" in lines[0]
    finally:
        listener.close()


@pytest.mark.parametrize("which", [0, 1])
def test_an_accepted_link_without_a_free_thread_is_lost(
    listening: Any, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The receiver is told that the link is lost, whichever of its threads could not be started;
    later links work."""
    listener, _, receivers = listening
    seen: list[str] = []

    def refused(name: str) -> bool:
        of_link = name.startswith(("send", "receive"))
        # the end at the listener, whose peer has another port
        if of_link and not name.endswith(str(listener.address[1])):
            seen.append(name)
            return len(seen) == which + 1
        return False

    out_of_threads(monkeypatch, refused)
    mine = Kept()
    link = tcp.connect(listener.address, mine)
    wait_for(lambda: receivers and receivers[0].lost_with)
    assert "can't start new thread" in str(receivers[0].lost_with[0])
    wait_for(lambda: mine.lost_with)
    link.close()
    monkeypatch.undo()
    check_connects(listener, receivers)
