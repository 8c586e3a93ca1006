"""Listener: accept connections, authenticate the clients, combine the connections of each link, and
pass the link to the owner of the listener.

The owner passes a function `accept(link, hello)`. The listener calls it once all connections of a
link have arrived and have proven the token. The function returns the Receiver of the link, or
raises a RoadtrainError to refuse the link. The client gets the text of the error. The function may
call `link.send`, but the frames leave only after the function has returned. It may also set a
better name `link.peer`. Closing the listener does not close its links.

An unauthenticated connection costs a thread, a descriptor and a few hundred bytes, at most until
the deadline of its handshake. Beyond 128 unauthenticated connections, the oldest from the address
with most connections is closed. So a host that opens many connections does not lock out other
hosts. Each refused connection is reported in a line, but at most 10 in 60 s. A Carrier hides the
difference between TCP and shared memory.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from roadtrain.errors import LostError, PeerError, RoadtrainError, WireError
from roadtrain.transport import handshake
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.stream import Channel

MAX_PENDING = 128
AGAIN_S = 0.1  # pause after a failed accept
SHORT_S = 10.0  # minimum time between two reports that the host lacks descriptors or threads
LINES, WINDOW_S = 10, 60.0  # LINES: most reports of refused connections in WINDOW_S seconds
LOOK_S = 1.0  # interval of checks whether a number of dropped lines must be reported

Accept = Callable[[Link, bytes], Receiver]
Report = Callable[[str], None]


class Carrier(Protocol):
    """The part of a listener that depends on the transport (TCP or shared memory)."""

    def secure(self, sock: socket.socket, deadline: float) -> socket.socket:
        """Return the socket to use for the handshake: the same socket after a check, or a TLS
        socket. Raises an error to refuse the connection."""

    def name(self, sock: socket.socket) -> str:
        """Return the name of the client for messages, such as its address."""

    def binding(self, sock: socket.socket) -> bytes:
        """Return the SHA-256 of the server's TLS certificate, or b"" without TLS."""

    def channel(self, sock: socket.socket) -> Channel:
        """Return a new channel that uses the socket of an accepted connection."""


class LineLimit:
    """A rate limit for the lines that a listener reports. Within 60 s, at most 10 lines are passed
    to `report`; then the number of dropped lines is reported. Thread-safe."""

    def __init__(self, report: Report) -> None:
        self._report, self._lock = report, threading.Lock()
        self._passed = self._left_out = 0
        self._until = 0.0
        self._last = ""

    def __call__(self, line: str) -> None:
        self.tick()
        with self._lock:
            if not self._passed:
                self._until = time.monotonic() + WINDOW_S
            self._passed += 1
            if self._passed > LINES:
                self._left_out, self._last = self._left_out + 1, line
                return
        self._report(line)

    def tick(self, *, now: bool = False) -> None:
        """Report the number of dropped lines and count again, if 60 s have passed since the first
        line or if `now` is True."""
        with self._lock:
            if not self._passed or (time.monotonic() < self._until and not now):
                return
            count, self._passed, self._left_out = self._left_out, 0, 0
        if count:
            self._report(
                f"{count} more line(s) like these were dropped within {WINDOW_S:.0f} s; the last"
                f" dropped line: {self._last}"
            )


class _PartialLink:
    """A link that still waits for some of its connections. `there`: the socket and handshake of
    each arrived connection, by its number. `done`: set when the link is made or refused, or when
    the listener is closed."""

    def __init__(self) -> None:
        self.there: dict[int, tuple[socket.socket, handshake.OpenHandshake]] = {}
        self.done = threading.Event()


class Listener:
    """A listener on the socket `sock`, which it owns. `address`: the address on which the socket
    listens, with the actual port (not 0).

    Invariants, under `_lock`: a connection is in `_pending` until it is part of a link or closed. A
    link id is in `_joining` from the first connection of the link until all its connections have
    arrived, or until the link is given up.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: tuple[str, int] | str,
        accept: Accept,
        common: handshake.Common,
        token: bytes | None,
        carrier: Carrier,
        report: Report,
        language: bytes = handshake.NO_LANGUAGE,
    ) -> None:
        self.address = address
        self._sock, self._accept, self._common, self._token = sock, accept, common, token
        self._carrier, self._language = carrier, language
        self._say, self._report = report, LineLimit(report)
        self._lock = threading.Lock()
        # the socket and the client's host of each unfinished handshake, by the handshake's thread
        self._pending: dict[threading.Thread, tuple[socket.socket, str]] = {}
        self._joining: dict[bytes, _PartialLink] = {}
        self._closed = False
        self._short_at = -SHORT_S  # last report of a shortage
        self._thread = threading.Thread(target=self._listen, name=f"listen {address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections, and close the connections of unfinished handshakes.
        Idempotent."""
        with self._lock:
            self._closed = True
            pending = list(self._pending.items())
            for joining in self._joining.values():
                joining.done.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes accept
        for _, (sock, _) in pending:
            _cut(sock)
        for thread in (self._thread, *(thread for thread, _ in pending)):
            if thread is not threading.current_thread():
                thread.join()
        self._sock.close()
        self._report.tick(now=True)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            self._report.tick()
            if not poll.poll(LOOK_S * 1000):
                continue
            try:
                sock, where = self._sock.accept()
            except OSError as error:
                if self._closed:
                    return
                self._short_of(error.strerror or repr(error))
                time.sleep(AGAIN_S)
                continue
            thread = threading.Thread(
                target=self._greet, args=(sock,), name=f"greet {self.address}", daemon=True
            )
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                if len(self._pending) >= MAX_PENDING:
                    _cut(self._pending.pop(self._to_drop())[0])
                self._pending[thread] = sock, where[0] if where else ""
                try:
                    thread.start()
                # the host can start no more threads: refuse this connection, but keep listening
                except RuntimeError as error:
                    del self._pending[thread]
                    sock.close()
                    self._short_of(str(error))

    def _short_of(self, what: str) -> None:
        """Report a lack of descriptors, memory or threads, but at most every 10 s."""
        now = time.monotonic()
        if now - self._short_at >= SHORT_S:
            self._short_at = now
            self._say(f"listening on {self.address}: {what}; new connections wait or are refused")

    def _to_drop(self) -> threading.Thread:
        """Return the thread of the oldest unfinished handshake from the host with the most
        unfinished handshakes."""
        ((most, _),) = Counter(origin for _, origin in self._pending.values()).most_common(1)
        return next(thread for thread, (_, origin) in self._pending.items() if origin == most)

    def _greet(self, sock: socket.socket) -> None:
        """Do the handshake of a connection, then add the connection to a link or close it."""
        deadline, peer, joined = time.monotonic() + self._common.handshake_s, "a client", False
        try:
            peer = self._carrier.name(sock)
            sock = self._carrier.secure(sock, deadline)
            with self._lock:
                me = threading.current_thread()
                if me in self._pending:  # so that `close` cuts off the wrapped socket
                    self._pending[me] = sock, self._pending[me][1]
            ours = handshake.greeting(self._common, self._token, bytes(16), language=self._language)
            caller = handshake.server_greet(
                sock, ours, self._token, deadline, self._carrier.binding(sock)
            )
            joined = self._join(sock, caller, peer, deadline)
        except Exception as error:
            # not reported if the connection was cut off by `close`
            if not (self._closed and isinstance(error, (OSError, LostError))):
                self._report(f"refused: {handshake.as_peer_error(error, peer)}".replace("\n", "; "))
        finally:
            with self._lock:
                self._pending.pop(threading.current_thread(), None)
            if not joined:
                sock.close()

    def _join(
        self, sock: socket.socket, caller: handshake.OpenHandshake, peer: str, deadline: float
    ) -> bool:
        """Add a connection to its link, and return True. Then the caller must not close the socket.

        The thread of the last connection to arrive makes the link. The thread of the first waits
        for the other connections, and gives the link up at the deadline.
        """
        theirs = caller.greeting
        with self._lock:
            if self._closed:  # `close` has ended the waits, so a new wait would not be ended
                raise LostError("the listener was closed before all connections arrived")
            first = theirs.link not in self._joining
            joining = self._joining.setdefault(theirs.link, _PartialLink())
            if theirs.number in joining.there:
                raise WireError(f"the client opened connection {theirs.number} of the link twice")
            joining.there[theirs.number] = (sock, caller)
            complete = len(joining.there) == theirs.connections
            if complete:
                del self._joining[theirs.link]
        if complete:
            try:
                self._make(joining, peer, deadline)
            finally:
                joining.done.set()
        elif first:
            self._wait_for_others(theirs, joining, deadline)
        return True

    def _wait_for_others(
        self, theirs: handshake.Greeting, joining: _PartialLink, deadline: float
    ) -> None:
        joining.done.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            gave_up = self._joining.pop(theirs.link, None) is joining
        if gave_up:
            for sock, _ in joining.there.values():
                sock.close()
            there, count = len(joining.there), theirs.connections
            raise LostError(f"only {there} of the {count} connections of the link arrived in time")

    def _make(self, joining: _PartialLink, peer: str, deadline: float) -> None:
        callers = [joining.there[i] for i in sorted(joining.there)]
        link = handshake.stream_between(peer, self._common, [caller for _, caller in callers])
        try:
            receiver = self._accept(link, callers[0][1].hello)
        except Exception as error:
            typed = error if isinstance(error, RoadtrainError) else WireError("the server failed")
            link.stop(LostError(f"{peer}: refused"))
            for sock, caller in callers:
                with contextlib.suppress(OSError, PeerError):
                    handshake.refuse(sock, typed, deadline, caller)
                sock.close()
            raise
        channels: list[Channel] = []
        try:
            for sock, caller in callers:
                handshake.accept(sock, caller, deadline)
            for sock, _ in callers:
                channels.append(self._carrier.channel(sock))
            link.start(receiver, channels)
        except Exception as error:
            link.start(receiver, [])
            link.fail(handshake.as_peer_error(error, link.peer))
            for channel in channels:
                channel.close()
            for sock, _ in callers:
                sock.close()
            raise


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # SSLSocket.shutdown would continue in plain text
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
