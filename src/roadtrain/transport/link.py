"""Link and Receiver: the interface with which two nodes exchange frames. A frame is a `kind` (a
number), a short header and a payload.

Each side of a link has a Receiver, which handles the frames that arrive. `send` only queues a
frame. Frames arrive in the order of the calls of `send`, even if a link uses several connections.
Only an `urgent` frame overtakes the queued frames that are not urgent. The payload goes from the
sender's buffers directly to the buffer that the receiving side's `room` returns, without
intermediate copies.

    frame = HEAD (the fields of class Head), header (<= 64 KiB), payload (<= the frame limit); all
    lengths are checked before anything is allocated

Note "checksums". Frames have checksums if bytes leave the process, except on links with TLS,
because TLS detects changed bytes itself. HEAD contains the xxh3 of the header and of the payload,
and ends with its own xxh3. HEAD is checked before its lengths are used, the header before `room` is
called, and the payload before `arrived` is called. So a flipped bit ends the link with a WireError,
and a damaged payload is never delivered.

Integers on the wire are little-endian. Each user of links defines the kinds of its own frames. A
lost link is not opened again: the loss is reported as an error that names the peer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from roadtrain.errors import PeerError, WireError
from roadtrain.units import KIB, MIB

MAGIC, VERSION = b"RTfr", 2
# magic, version, flags, kind, header bytes, payload bytes, sequence number, xxh3 of the header,
# xxh3 of the payload
_HEAD = struct.Struct("<4sBBHIQQQQ")
SUM = struct.Struct("<Q")  # xxh3_64
HEAD_NBYTES = _HEAD.size + SUM.size
MAX_HEADER = 64 * KIB
FRAME_LIMIT = 64 * MIB
# flags of a head. SUMMED: checksums are present. LAST: the frame is the goodbye, and its sequence
# number is the number of frames sent.
SUMMED, LAST = 1, 2
# a copy of fewer bytes is faster than releasing and reacquiring the interpreter's lock
COPY_ALONE = 16 * KIB
EMPTY = memoryview(bytearray())


class Receiver(Protocol):
    """The owner of one side of a link. The link's threads call these methods. If a method raises an
    exception, the link ends."""

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        """Return a writable buffer of exactly `nbytes` bytes, into which the link receives a
        payload.

        The link calls this method for each frame whose payload is not empty, in the order of the
        frames, one call at a time. The method may block, which slows the sender down
        (back-pressure). After the link has ended, the method must return or raise soon.
        """

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        """Handle a frame that has arrived. The link calls this method in the order of the frames,
        one call at a time. The method may call `send` and `close` of the link, but must not block
        for long."""

    def lost(self, error: PeerError) -> None:
        """Handle the loss of the link. The link calls this method once, after it has delivered the
        last frame. It is not called if this side has closed the link."""


class Link(Protocol):
    """A link to another node, as seen from this side.

    Attributes:
        peer: A name of the other side for messages, such as "server 2 (10.0.0.3:7000)".
    """

    peer: str

    def send(
        self,
        kind: int,
        header: bytes,
        parts: Iterable[memoryview] = (),
        sent: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
        each: bool = False,
    ) -> None:
        """Queue a frame, without waiting.

        Args:
            kind: The frame's kind.
            header: The frame's header.
            parts: Buffers; their concatenation is the payload. The content of the buffers must not
                change until `sent` is called.
            sent: Function that is called once, from a thread of the link, when the transport has
                taken all bytes of the frame or the link has ended. If `send` raises, `sent` is not
                called.
            urgent: If True, the frame overtakes all queued frames that are not urgent.
            each: If True, each of `parts` is sent as the payload of a frame of its own, with the
                same header. These frames have no other frames between them, except urgent ones, and
                `sent` is called once for all of them. A part is taken from `parts` only when the
                frame before it leaves the queue.

        Raises:
            LostError: The link is lost or closed.
            WireError: The frame exceeds a limit of this side or of the other side.
        """

    def close(self) -> None:
        """Send the queued frames, then end the link. Idempotent.

        If no byte leaves for `close_s` seconds, the queued frames are dropped. Frames that arrive
        from now on are not delivered. When `close` returns, all threads and descriptors of the link
        are closed, or soon after if a thread of the link calls `close`.
        """


class Head(NamedTuple):
    """The fields at the beginning of a frame, which have a fixed size."""

    flags: int
    kind: int
    header_nbytes: int
    nbytes: int
    sequence: int
    header_sum: int = 0  # xxh3_64; 0 if checksums are off
    payload_sum: int = 0  # xxh3_64; 0 if checksums are off


def sealed(raw: bytes) -> bytes:
    """Return `raw` followed by the 8-byte checksum (xxh3) of `raw`."""
    return raw + SUM.pack(xxhash.xxh3_64_intdigest(raw))


def opened(raw: bytes | memoryview, what: str) -> bytes | memoryview:
    """Check the checksum that `sealed` has appended, and return the data without it.

    Raises WireError if the checksum is wrong. `what`: a name of the data for the error message.
    """
    inside = raw[: len(raw) - SUM.size]
    if SUM.unpack(raw[len(inside) :]) != (xxhash.xxh3_64_intdigest(inside),):
        raise WireError(f"{what} does not match its checksum")
    return inside


def digest(parts: Sequence[memoryview | bytes]) -> int:
    """Return the checksum (xxh3_64) of the concatenated parts. Large parts are hashed without
    Python's global lock."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    whole = xxhash.xxh3_64()
    for part in parts:
        whole.update(part)
    return whole.intdigest()


def pack_head(head: Head) -> bytes:
    raw = _HEAD.pack(MAGIC, VERSION, *head)
    return sealed(raw) if head.flags & SUMMED else raw + bytes(SUM.size)


def parse_head(raw: memoryview, limit: int, summed: bool) -> Head:
    """Parse the fields at the beginning of a frame. Raises WireError if a field is damaged or this
    side does not accept its value.

    Args:
        raw: The first bytes of the frame, as long as its fixed fields.
        limit: The maximum size of a payload in bytes.
        summed: Whether frames of this link have checksums.
    """
    magic, version, *rest = _HEAD.unpack(raw[: _HEAD.size])
    head = Head(*rest)
    if magic != MAGIC:
        raise WireError(f"this is not a frame: it begins with {magic!r}, not {MAGIC!r}")
    if summed:
        opened(raw, "the head of a frame")
    if version != VERSION:
        raise WireError(f"the frame has protocol version {version}, but this side has {VERSION}")
    if head.flags & ~(SUMMED | LAST) or bool(head.flags & SUMMED) != summed:
        raise WireError(
            f"a frame has flags {head.flags:#x}, which this side does not accept (its checksums are"
            f" {'on' if summed else 'off'})"
        )
    if head.flags & LAST and (head.kind or head.header_nbytes or head.nbytes):
        raise WireError(
            f"a goodbye must have 0 bytes and kind 0, but has {head.header_nbytes + head.nbytes}"
            f" bytes and kind {head.kind}"
        )
    if head.header_nbytes > MAX_HEADER:
        raise WireError(f"a header of {head.header_nbytes} bytes exceeds the limit of {MAX_HEADER}")
    if head.nbytes > limit:
        raise WireError(f"a payload of {head.nbytes} bytes exceeds the limit of {limit}")
    return head


def flat(view: memoryview) -> memoryview:
    """Return a view of the same memory as plain bytes. Raises TypeError if the memory is not
    contiguous."""
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def copy(into: memoryview, source: memoryview) -> None:
    """Copy `source` into `into`, which has the same length. A large copy releases Python's global
    lock."""
    if len(into) < COPY_ALONE:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def check_sizes(peer: str, kind: int, header: bytes, nbytes: int, limit: int) -> None:
    """Raise WireError if a frame cannot be sent: its header or its payload of `nbytes` bytes is too
    large, or its kind is not a 16-bit number. `limit`: the most bytes of a payload."""
    if len(header) > MAX_HEADER:
        raise WireError(f"{peer}: a header has {len(header)} bytes; the limit is {MAX_HEADER}")
    if nbytes > limit:
        raise WireError(
            f"{peer}: a payload of {nbytes} bytes exceeds the limit of {limit}",
            hint="split the payload, or raise frame_limit on both sides",
        )
    if not 0 <= kind < 1 << 16:
        raise WireError(f"{peer}: the kind of a frame must be from 0 to 65535, but is {kind}")
