"""A link inside one process. The link delivers the same frames in the same order, and ends in the
same way, as a link between hosts. Each payload is copied once, from the sender's buffers into the
buffer that the receiver's `room` returns.

    # `accept` is a function as for a Listener; connect() calls it
    link = connect(accept, receiver, hello=hello, name="server 0")

The sending thread waits until the receiving thread has copied its buffers. Frames have no checksums
unless `options` requests them, because no bytes leave the process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from roadtrain.transport.handshake import DEFAULTS, Common
from roadtrain.transport.link import Link, Receiver, copy
from roadtrain.transport.listener import Accept
from roadtrain.transport.stream import FrameStream


def connect(
    accept: Accept, receiver: Receiver, options: Common = DEFAULTS, *, hello: bytes = b"", name: str
) -> Link:
    """Make a link to the owner of `accept` and return this side of it, as tcp.connect does. An
    error that `accept` raises is raised again."""
    out, back = _Pipe(), _Pipe()
    here, there = (
        FrameStream(peer, options.frame_limit, bool(options.checksums), options.close_s)
        for peer in (name, "this process")
    )
    there.start(accept(there, hello), [_Side(back, out)])
    here.start(receiver, [_Side(out, back)])
    return here


class _Pipe:
    """One direction of a link."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._views: list[memoryview] = []
        self._ended = False

    def put(self, buffers: Sequence[memoryview | bytes]) -> int:
        with self._changed:
            self._views = [memoryview(buffer) for buffer in buffers]
            self._changed.notify_all()
            while self._views and not self._ended:
                self._changed.wait()
            if self._views:
                raise BrokenPipeError("the other side of the link is closed")
        return sum(map(len, buffers))

    def get(self, into: memoryview) -> int:
        with self._changed:
            while not self._views and not self._ended:
                self._changed.wait()
            if self._ended:
                return 0
            n = min(len(self._views[0]), len(into))
            copy(into[:n], self._views[0][:n])
            self._views = [view for view in (self._views[0][n:], *self._views[1:]) if view]
            if not self._views:  # otherwise the sender would wake up too early
                self._changed.notify_all()
        return n

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class _Side:
    def __init__(self, out: _Pipe, back: _Pipe) -> None:
        self._out, self._back = out, back

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        return self._out.put(buffers)

    def recv_into(self, view: memoryview, whole: bool) -> int:
        return self._back.get(view)

    def shutdown(self) -> None:
        self._out.end()
        self._back.end()

    def close(self) -> None:
        self.shutdown()
