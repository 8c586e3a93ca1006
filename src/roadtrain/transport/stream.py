"""FrameStream: a Link that sends frames over one or more byte channels. All transports use this
class. Other modules open the connections and authenticate the peer.

Sending: frames wait in a queue, and urgent frames in a second queue. Each channel has a sending
thread that takes the next frames as soon as it is free, so the fastest channel sends the most
frames.

Receiving: each channel has a receiving thread, which reads payloads directly into the buffer that
`room` returns. The order is restored by sequence numbers. `room` is called in the order of the
frames, so that no later frame can take the memory that an earlier frame waits for. `arrived` is
called in the same order. Payloads of several channels are received concurrently.

End: a side that closes the link sends a goodbye on every channel, with the number of frames that it
has sent. The other side delivers all these frames and then hangs up. Meanwhile the closing side
reads and discards frames, because closing a socket with unread bytes resets the connection before
the other side has read everything. The closing side gives up if no byte leaves for `close_s`
seconds.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from roadtrain.errors import LostError, PeerError, WireError
from roadtrain.transport.link import (
    EMPTY,
    HEAD_NBYTES,
    LAST,
    SUMMED,
    Head,
    Receiver,
    check_sizes,
    digest,
    flat,
    pack_head,
    parse_head,
)
from roadtrain.units import KIB

# most payload bytes and most frames in one call to the channel; a larger frame is sent alone
BATCH, BATCH_FRAMES = 256 * KIB, 256
IOV_MAX = 1024  # Linux: maximum number of buffers of one sendmsg
# bytes read at once with a head: one call reads many small frames, but of a large frame at most
# this much is copied twice
READ_AHEAD = 16 * KIB
# most frames that have room but are not delivered, because an earlier frame is still on its way
# over a slower channel
WINDOW = 256

Sent = Callable[[], None]


class Channel(Protocol):
    """A bidirectional byte stream. One thread sends, one thread receives, and any thread may call
    `shutdown`. Errors are OSError or PeerError."""

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        """Block until at least one byte of the buffers is sent, and return the number of bytes
        sent. The caller passes at most IOV_MAX buffers."""

    def recv_into(self, view: memoryview, whole: bool) -> int:
        """Block until at least one byte is received into `view`, and return the number of bytes
        received; 0 if the other side has ended the stream. If `whole` is True, the channel may wait
        until `view` is full, to save system calls."""

    def shutdown(self) -> None:
        """End both directions now, which wakes threads that wait in `send` and `recv_into`.
        Idempotent."""

    def close(self) -> None: ...


class _Frame(NamedTuple):
    kind: int
    header: bytes
    parts: Sequence[memoryview]
    nbytes: int
    sent: Sent | None
    rest: Iterator[memoryview] = iter(())  # payloads of frames that follow, with the same header
    sequence: int = 0  # set when the frame leaves the queue


class SentOnce:
    """Calls `sent` when all parts of a message have left. A new message has one part."""

    def __init__(self, sent: Sent) -> None:
        self._sent, self._left, self._lock = sent, 1, threading.Lock()

    def add(self) -> None:
        """Count another part. Allowed while some part has not left."""
        with self._lock:
            self._left += 1

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._sent()


class _Reader:
    """A buffered reader of one channel. `what`: a name of the awaited data for error messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._buffer = channel, memoryview(bytearray(READ_AHEAD))
        self._at = self._to = 0
        self.what = ""

    def head(self) -> memoryview | None:
        """Return the fixed fields at the beginning of the next frame, or None if the channel has
        ended. The returned view is valid until the next call of a method of this reader."""
        self.what = "the next frame"
        while (have := self._to - self._at) < HEAD_NBYTES:
            if self._at:
                self._buffer[:have] = bytes(self._buffer[self._at : self._to])
                self._at, self._to = 0, have
            n = self._channel.recv_into(self._buffer[have:], False)
            if n == 0:
                if have:
                    raise LostError(
                        f"the connection ended within the head of a frame: {have} of {HEAD_NBYTES}"
                        " bytes arrived"
                    )
                return None
            self._to += n
        self._at += HEAD_NBYTES
        return self._buffer[self._at - HEAD_NBYTES : self._at]

    def fill(self, view: memoryview) -> None:
        have = min(self._to - self._at, len(view))
        view[:have] = self._buffer[self._at : self._at + have]
        self._at += have
        while have < len(view):
            n = self._channel.recv_into(view[have:], True)
            if n == 0:
                raise LostError(
                    f"the connection ended within {self.what}: {have} of {len(view)} bytes arrived"
                )
            have += n

    def header(self, nbytes: int) -> bytes:
        if nbytes <= self._to - self._at:
            self._at += nbytes
            return bytes(self._buffer[self._at - nbytes : self._at])
        raw = bytearray(nbytes)
        self.fill(memoryview(raw))
        return bytes(raw)

    def skip(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, READ_AHEAD)))
        while nbytes:
            self.fill(scratch[:nbytes])
            nbytes -= min(nbytes, READ_AHEAD)


class FrameStream:
    """A link that sends and receives frames over byte channels.

    Attributes (guarded by `_lock`, except `_moved`):
        _accepted: The number of frames that have a buffer for their payload. It is also the
            sequence
            number of the next such frame.
        _delivered: The number of frames that were passed to `arrived`. Invariant: `_delivered <=
            _accepted <= _delivered + 256`.
        _ready: The received frames that are not delivered yet, by sequence number.
        _waiting: The sequence numbers of the frames for which a thread waits to call `room`.
        _delivering: Whether a thread is calling `arrived` or `lost`. Stays True after `lost`.
        _reading: The number of channels that have not received a goodbye.
        _alive: The number of running threads. The last thread to end closes the channels.
        _end: The number of frames that the other side has sent, as stated in its goodbye; None
            before the first goodbye.
        _moved: A counter that changes whenever bytes have left.
    """

    def __init__(self, peer: str, limit: int, summed: bool, close_s: float) -> None:
        self.peer = peer
        self._limit, self._summed, self._close_s = limit, summed, close_s
        self._lock = threading.Lock()
        self._to_send = threading.Condition(self._lock)
        self._turned = threading.Condition(self._lock)
        self._queue, self._urgent = deque[_Frame](), deque[_Frame]()
        self._next = self._idle = self._moved = 0
        self._ready: dict[int, tuple[int, bytes, memoryview]] = {}
        self._waiting: set[int] = set()
        self._accepted = self._delivered = self._reading = self._alive = 0
        self._end: int | None = None
        self._delivering = self._closing = False
        self._error: PeerError | None = None
        self._channels: Sequence[Channel] = ()
        self._threads: list[threading.Thread] = []

    def start(self, receiver: Receiver, channels: Sequence[Channel]) -> None:
        """Start the threads of all channels. Frames that were queued before this call are sent
        first."""
        self._receiver, self._channels = receiver, channels
        self._reading, self._alive = len(channels), 2 * len(channels)
        for i, channel in enumerate(channels):
            for doing, work in (("send", self._send_all), ("receive", self._receive_all)):
                run = functools.partial(self._run, work, channel)
                name = f"{doing} {i} {self.peer}"
                self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            # the host can start no more threads: end the link and notify its owner
            except RuntimeError as error:
                with self._lock:
                    self._alive -= len(self._threads) - number
                    del self._threads[number:]
                    last = not self._alive
                self.fail(LostError(f"{self.peer}: {error}"))
                if last:
                    self._close_channels()
                return

    def send(
        self,
        kind: int,
        header: bytes,
        parts: Iterable[memoryview] = (),
        sent: Sent | None = None,
        *,
        urgent: bool = False,
        each: bool = False,
    ) -> None:
        rest: Iterator[memoryview] = iter(parts) if each else iter(())
        if each:
            parts, sent = [next(rest)], SentOnce(sent or (lambda: None))
        views = [flat(part) for part in parts if part.nbytes]
        nbytes = sum(map(len, views))
        check_sizes(self.peer, kind, header, nbytes, self._limit)
        with self._lock:
            if self._error is not None:
                raise LostError(f"cannot send: {self._error}") from self._error
            if self._closing:
                raise LostError(f"{self.peer}: this link is closed")
            queue = self._urgent if urgent else self._queue
            queue.append(_Frame(kind, header, views, nbytes, sent, rest))
            if self._idle:
                self._to_send.notify()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._to_send.notify_all()
            self._turned.notify_all()
        if threading.current_thread() in self._threads:  # a thread cannot join itself
            threading.Thread(target=self._join, name=f"close {self.peer}", daemon=True).start()
        else:
            self._join()

    def fail(self, error: PeerError) -> None:
        """End the link because of `error`, and report the error to the receiver when no `arrived`
        is running."""
        self.stop(error)
        self._deliver()

    def stop(self, error: PeerError) -> None:
        """Stop sending because of `error`, wake all threads, and release the buffers of queued
        frames, without notifying the receiver."""
        with self._lock:
            self._error = self._error or error
            queued = [*self._urgent, *self._queue]
            self._urgent.clear()
            self._queue.clear()
            self._to_send.notify_all()
            self._turned.notify_all()
        for channel in self._channels:
            channel.shutdown()
        self._release(queued)

    def _join(self) -> None:
        moved, deadline = self._moved, time.monotonic() + self._close_s
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            alive[0].join(0.1)
            if self._moved != moved:
                moved, deadline = self._moved, time.monotonic() + self._close_s
            elif time.monotonic() > deadline:
                self.stop(LostError(f"{self.peer} did not close within {self._close_s:g} s"))
                for thread in alive:
                    thread.join(self._close_s)
                return

    def _run(self, work: Callable[[Channel], None], channel: Channel) -> None:
        try:
            work(channel)
        except PeerError as error:
            self.fail(error if self.peer in str(error) else type(error)(f"{self.peer}: {error}"))
        except Exception as error:  # raised by the owner's code: no thread may die silently
            self.fail(self._owner_failed(error))
        with self._lock:
            self._alive -= 1
            last = not self._alive
        if last:
            self._close_channels()

    def _close_channels(self) -> None:
        channels, self._channels = self._channels, ()
        for each in channels:
            each.close()

    def _lost(self, error: OSError, doing: str) -> LostError:
        return LostError(f"{self.peer}: {error.strerror or error} while {doing}")

    def _owner_failed(self, error: Exception) -> PeerError:
        if isinstance(error, PeerError):
            return error
        lost = LostError(f"{self.peer}: closed, because this side failed: {error!r}")
        lost.__cause__ = error
        return lost

    # Sending

    def _send_all(self, channel: Channel) -> None:
        while batch := self._take():
            try:
                buffers: list[memoryview | bytes] = []
                for frame in batch:
                    buffers += (self._lead(frame), *frame.parts)
                self._put(channel, buffers)
            except OSError as error:
                self.fail(self._lost(error, f"sending frame {batch[0].sequence}"))
            finally:
                self._release(batch)
        if self._error is None:
            try:
                self._put(
                    channel, [self._lead(_Frame(0, b"", (), 0, None, sequence=self._next), LAST)]
                )
            except OSError as error:
                self.fail(self._lost(error, "sending the goodbye"))

    def _take(self) -> list[_Frame]:
        """Wait until frames are queued, and return those that the calling thread sends next in a
        single call. Return an empty list if the link ends."""
        with self._lock:
            while not self._queue and not self._urgent:
                if self._error is not None or self._closing:
                    return []
                self._idle += 1
                self._to_send.wait()
                self._idle -= 1
            batch, room = list[_Frame](), BATCH
            while (queue := self._urgent or self._queue) and len(batch) < BATCH_FRAMES:
                if batch and queue[0].nbytes > room:
                    break
                frame = queue.popleft()._replace(sequence=self._next)
                batch.append(frame)
                room -= frame.nbytes
                self._next += 1
                if (part := next(frame.rest, None)) is not None:
                    assert isinstance(frame.sent, SentOnce)
                    frame.sent.add()
                    queue.appendleft(frame._replace(parts=[flat(part)], nbytes=part.nbytes))
                    if self._idle:
                        self._to_send.notify()
            return batch

    def _lead(self, frame: _Frame, flags: int = 0) -> bytes:
        header_sum = payload_sum = 0
        if self._summed:
            flags |= SUMMED
            header_sum, payload_sum = digest((frame.header,)), digest(frame.parts)
        sizes = len(frame.header), frame.nbytes
        head = Head(flags, frame.kind, *sizes, frame.sequence, header_sum, payload_sum)
        return pack_head(head) + frame.header

    def _put(self, channel: Channel, buffers: list[memoryview | bytes]) -> None:
        i = 0
        while i < len(buffers):
            n = channel.send(buffers[i : i + IOV_MAX])
            self._moved += 1
            while n and n >= len(buffers[i]):
                n -= len(buffers[i])
                i += 1
            if n:
                buffers[i] = memoryview(buffers[i])[n:]

    def _release(self, frames: Sequence[_Frame]) -> None:
        for frame in frames:
            if frame.sent is not None:
                try:
                    frame.sent()
                except Exception as error:
                    self.fail(self._owner_failed(error))

    # Receiving

    def _receive_all(self, channel: Channel) -> None:
        reader = _Reader(channel)
        try:
            while (raw := reader.head()) is not None:
                head = parse_head(raw, self._limit, self._summed)
                reader.what = f"frame {head.sequence} (kind {head.kind})"
                if head.flags & LAST:
                    self._goodbye(head)
                    return
                self._receive(reader, head)
        except OSError as error:
            raise self._lost(error, f"waiting for {reader.what}") from error
        if not self._closing:
            raise LostError("the connection ended without a goodbye")

    def _receive(self, reader: _Reader, head: Head) -> None:
        header, payload = reader.header(head.header_nbytes), EMPTY
        if self._summed and digest((header,)) != head.header_sum:
            raise WireError(f"the header of {reader.what} does not match its checksum")
        if not self._wait_turn(head.sequence):
            reader.skip(head.nbytes)
            return
        if head.nbytes:
            payload = flat(self._receiver.room(head.kind, header, head.nbytes))
            if len(payload) != head.nbytes or payload.readonly:
                raise TypeError(
                    f"room() returned {len(payload)}{' read-only' * payload.readonly} bytes, but"
                    f" must return {head.nbytes} writable bytes"
                )
        with self._lock:
            self._waiting.remove(head.sequence)
            self._accepted += 1
            self._turned.notify_all()
        reader.fill(payload)
        if self._summed and digest((payload,)) != head.payload_sum:
            raise WireError(f"the payload of {reader.what} does not match its checksum")
        with self._lock:
            self._ready[head.sequence] = (head.kind, header, payload)
        self._deliver()

    def _wait_turn(self, sequence: int) -> bool:
        """Wait until `room` may be called for the frame with this sequence number. Return False if
        the link ends during the wait."""
        with self._lock:
            if sequence < self._accepted or sequence in self._waiting:
                raise WireError(f"frame {sequence} was received twice")
            self._waiting.add(sequence)
            while self._error is None and not self._closing:
                if sequence == self._accepted and sequence - self._delivered < WINDOW:
                    return True
                if len(self._waiting) == self._reading and self._accepted not in self._waiting:
                    raise WireError(f"frame {self._accepted} is missing before frame {sequence}")
                self._turned.wait()
            self._waiting.remove(sequence)
            return False

    def _goodbye(self, head: Head) -> None:
        with self._lock:
            if self._end not in (None, head.sequence):
                raise WireError(
                    f"the peer's goodbyes differ: one counts {self._end} frames, another"
                    f" {head.sequence}"
                )
            self._end = head.sequence
            self._reading -= 1
            self._turned.notify_all()
            if not self._reading and self._accepted != self._end and not self._closing:
                raise WireError(
                    f"the peer's goodbye counts {self._end} frames, but {self._accepted} arrived"
                )
        self._deliver()

    def _deliver(self) -> None:
        """Call `arrived` for each received frame in order until a frame is missing, then `lost` if
        the link is lost. Return at once if another thread is already delivering frames."""
        with self._lock:
            if self._delivering:
                return
            self._delivering = True
        while self._deliver_one():
            pass

    def _deliver_one(self) -> bool:
        """Deliver the next frame, or report the loss of the link. Return whether the caller must
        call this method again. Only the thread that has set `_delivering` may call this method."""
        with self._lock:
            item = None if self._closing else self._ready.pop(self._delivered, None)
            error = None if self._closing else self._error
            ended = self._delivered == self._end and error is None and not self._closing
            if item is not None:
                self._delivered += 1
                if self._waiting:
                    self._turned.notify_all()
            elif not ended:
                self._delivering = error is not None
        if item is not None:
            try:
                self._receiver.arrived(*item)
            except Exception as failed:
                self.stop(self._owner_failed(failed))
            return True
        if ended:
            self.stop(LostError(f"{self.peer}: closed by peer"))
            return True
        if error is not None:
            self._receiver.lost(error)
        return False
