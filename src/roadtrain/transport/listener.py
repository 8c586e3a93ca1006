"""Listener: takes connections, proves who they are, joins those of one link, hands the link to its
owner.

`accept(link, hello)` is called once a link's connections are all there and have proven the token;
it returns the Receiver of that link, or raises a typed error whose text the client gets. What is
sent on the link inside `accept` goes out after it; `link.peer` may be given a better name there.
Links live on when the listener is closed.

A stranger costs a thread, a descriptor and a few hundred bytes until the deadline. Beyond
MAX_PENDING the oldest one of the address that most come from is cut off, so that a flood from one
place shuts nobody else out. Each that is not let in is one line to `report`, at most LINES in
WINDOW_S; of the others their number is told. Does NOT know TCP from shm: a Carrier does.
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
AGAIN_S = 0.1  # until the next try to accept
SHORT_S = 10.0  # between two lines about what the host is short of
LINES, WINDOW_S = 10, 60.0  # about strangers: so many lines in so many seconds, then their number
LOOK_S = 1.0  # between looks whether there is such a number to tell

Accept = Callable[[Link, bytes], Receiver]
Report = Callable[[str], None]


class Carrier(Protocol):
    """What differs between transports, on the side that listens."""

    def secure(self, sock: socket.socket, deadline: float) -> socket.socket:
        """Before the handshake: checks or wraps it; raises for whoever may not come in."""

    def name(self, sock: socket.socket) -> str: ...

    def binding(self, sock: socket.socket) -> bytes:
        """Of what protects this connection, the same on both sides; empty where nothing does."""

    def channel(self, sock: socket.socket) -> Channel:
        """After the verdict."""


class Few:
    """Passes lines on to `report`, LINES in WINDOW_S; says how many it left out once that time
    is over. From any thread."""

    def __init__(self, report: Report) -> None:
        self._report, self._lock = report, threading.Lock()
        self._said = self._left_out = 0
        self._until = 0.0
        self._last = ""

    def __call__(self, line: str) -> None:
        self.tick()
        with self._lock:
            if not self._said:
                self._until = time.monotonic() + WINDOW_S
            self._said += 1
            if self._said > LINES:
                self._left_out, self._last = self._left_out + 1, line
                return
        self._report(line)

    def tick(self, *, now: bool = False) -> None:
        """Tells what was left out if it is time, or `now`."""
        with self._lock:
            if not self._said or (time.monotonic() < self._until and not now):
                return
            count, self._said, self._left_out = self._left_out, 0, 0
        if count:
            self._report(
                f"{count} more such line(s) were left out within {WINDOW_S:.0f} s, the last:"
                f" {self._last}"
            )


class _Joining:
    """The connections of one link that have come so far, by number."""

    def __init__(self) -> None:
        self.there: dict[int, tuple[socket.socket, handshake.OpenHandshake]] = {}
        self.taken = threading.Event()


class Listener:
    """`address`: where it listens, with the real port. Owns `sock`. Invariant, under `_lock`: a
    connection is in `_pending` from accept until its thread has given it away or closed it, or
    it was cut off; a link id is in `_joining` until complete or given up."""

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
        self._say, self._report = report, Few(report)
        self._lock = threading.Lock()
        # and where it comes from
        self._pending: dict[threading.Thread, tuple[socket.socket, str]] = {}
        self._joining: dict[bytes, _Joining] = {}
        self._closed = False
        self._said_short = -SHORT_S  # when that line was printed last
        self._thread = threading.Thread(target=self._listen, name=f"listen {address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more connections; handshakes under way are cut off. Idempotent."""
        with self._lock:
            self._closed = True
            pending = list(self._pending.items())
            for joining in self._joining.values():
                joining.taken.set()
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
                    _cut(self._pending.pop(self._one_too_many())[0])
                self._pending[thread] = sock, where[0] if where else ""
                try:
                    thread.start()
                # this host has no thread for it: this one is refused, others come
                except RuntimeError as error:
                    del self._pending[thread]
                    sock.close()
                    self._short_of(str(error))

    def _short_of(self, what: str) -> None:
        """A line, and not one for every connection: descriptors, memory or threads are used up."""
        now = time.monotonic()
        if now - self._said_short >= SHORT_S:
            self._said_short = now
            self._say(f"listening on {self.address}: {what}; who comes now waits or is refused")

    def _one_too_many(self) -> threading.Thread:
        """The oldest that comes from where most come from."""
        ((most, _),) = Counter(origin for _, origin in self._pending.values()).most_common(1)
        return next(thread for thread, (_, origin) in self._pending.items() if origin == most)

    def _greet(self, sock: socket.socket) -> None:
        """One connection, from accept to its verdict; joined to a link or closed."""
        deadline, peer, given = time.monotonic() + self._common.handshake_s, "a stranger", False
        try:
            peer = self._carrier.name(sock)
            sock = self._carrier.secure(sock, deadline)
            with self._lock:
                me = threading.current_thread()
                if me in self._pending:  # the wrapped one is the one to cut
                    self._pending[me] = sock, self._pending[me][1]
            ours = handshake.greeting(self._common, self._token, bytes(16), language=self._language)
            caller = handshake.server_greet(
                sock, ours, self._token, deadline, self._carrier.binding(sock)
            )
            given = self._join(sock, caller, peer, deadline)
        except Exception as error:
            # we cut it off ourselves
            if not (self._closed and isinstance(error, (OSError, LostError))):
                self._report(f"refused: {handshake.as_peer_error(error, peer)}".replace("\n", "; "))
        finally:
            with self._lock:
                self._pending.pop(threading.current_thread(), None)
            if not given:
                sock.close()

    def _join(
        self, sock: socket.socket, caller: handshake.OpenHandshake, peer: str, deadline: float
    ) -> bool:
        """Adds a connection to its link. The thread of the last one makes the link, that of the
        first gives up on the others at the deadline. True: the socket now belongs to the link or
        to that thread."""
        theirs = caller.greeting
        with self._lock:
            if self._closed:  # nobody would end the wait for the others
                raise LostError("closed before the link was whole")
            first = theirs.link not in self._joining
            joining = self._joining.setdefault(theirs.link, _Joining())
            if theirs.number in joining.there:
                raise WireError(f"connection {theirs.number} came twice")
            joining.there[theirs.number] = (sock, caller)
            complete = len(joining.there) == theirs.connections
            if complete:
                del self._joining[theirs.link]
        if complete:
            try:
                self._make(joining, peer, deadline)
            finally:
                joining.taken.set()
        elif first:
            self._wait_for_others(theirs.link, joining, deadline)
        return True

    def _wait_for_others(self, link: bytes, joining: _Joining, deadline: float) -> None:
        joining.taken.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            gave_up = self._joining.pop(link, None) is joining
        if gave_up:
            for sock, _ in joining.there.values():
                sock.close()
            raise LostError(f"{len(joining.there)} connections of a link came, the others did not")

    def _make(self, joining: _Joining, peer: str, deadline: float) -> None:
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
                handshake.take(sock, caller, deadline)
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
        # an SSLSocket's own would go on in plain text
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
