"""Link and Receiver: the interface by which frames travel between two nodes. A frame is a `kind`, a
short header and a payload.

Each side of a link has a Receiver, which handles the frames that arrive. `send` only queues a
frame. Frames arrive in the order of the calls of `send`, even if a link uses several connections.
But an `urgent` frame overtakes all frames that have not started to leave. A payload is sent from
the sender's buffers, and is received into the buffer that `room` of the receiving side returns,
without intermediate copies.

    frame = HEAD, header (<= 64 KiB), payload (<= the frame limit); all lengths are checked before
    anything is allocated

Note "checksums". Frames have checksums if bytes leave the process, except under TLS, which detects
deliberate changes as well. HEAD contains the xxh3 of the header and of the payload, and ends with
its own xxh3. Each checksum is checked before the data is used: a length before waiting for so many
bytes, a header before calling `room`, and a payload before calling `arrived`. So a flipped bit ends
the link with a WireError, and a damaged payload is never delivered.

Integers on the wire are little-endian. The kinds are defined by the users of links. Nothing is
retried: the loss of a peer is reported as an error that names the peer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
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
    """The owner of one side of a link. The link's threads call the methods. An exception that a
    method raises ends the link."""

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        """Return a writable buffer of exactly `nbytes` for a payload.

        Called for each frame with a payload that is not empty, in the order in which frames were
        sent, one call at a time. The method may block, which slows the sender down (back-pressure).
        After the link has ended, the method must return or raise soon.
        """

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        """Handle a frame. Called in the order in which frames were sent, one call at a time. The
        method may call `send` and `close` of the link, but must not block for long."""

    def lost(self, error: PeerError) -> None:
        """Handle the loss of the link. Called once, after all frames. Not called if this side has
        ended the link by calling `close`."""


class Link(Protocol):
    """This side's end of a link.

    Attributes:
        peer: A name of the other side for messages, such as "server 2 (10.0.0.3:7000)".
    """

    peer: str

    def send(
        self,
        kind: int,
        header: bytes,
        parts: Sequence[memoryview] = (),
        sent: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """Queue a frame, without waiting.

        Args:
            kind: The frame's kind.
            header: The frame's header.
            parts: The buffers whose concatenation is the payload. They must not change until `sent`
                is called.
            sent: Called once from a thread of the link, when the transport has taken the bytes or
                the link has ended. Not called if `send` raises.
            urgent: Whether the frame overtakes frames that have not started to leave.

        Raises:
            LostError: The link is lost or closed.
            WireError: The frame exceeds the limit of either side.
        """

    def close(self) -> None:
        """Send the queued frames, then end the link. Idempotent.

        Gives up sending if no byte leaves for `close_s` seconds. No more frames are delivered. When
        `close` returns, all threads and descriptors of the link are closed. If a thread of the link
        calls `close`, the threads and descriptors are closed soon after the call.
        """


class Head(NamedTuple):
    """The fixed part at the beginning of a frame."""

    flags: int
    kind: int
    header_nbytes: int
    nbytes: int
    sequence: int
    header_sum: int = 0  # xxh3_64; 0 if checksums are off
    payload_sum: int = 0  # xxh3_64; 0 if checksums are off


def sealed(raw: bytes) -> bytes:
    """Return `raw` followed by its xxh3."""
    return raw + SUM.pack(xxhash.xxh3_64_intdigest(raw))


def opened(raw: bytes | memoryview, what: str) -> bytes | memoryview:
    """Check the xxh3 that `sealed` has appended, and return the data without it.

    Raises WireError if the checksum is wrong. `what` names the data in the message.
    """
    inside = raw[: len(raw) - SUM.size]
    if SUM.unpack(raw[len(inside) :]) != (xxhash.xxh3_64_intdigest(inside),):
        raise WireError(f"{what} does not match its checksum")
    return inside


def digest(parts: Sequence[memoryview | bytes]) -> int:
    """Return the xxh3_64 of the concatenated parts. Releases the interpreter's lock for large
    parts."""
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
    """Parse the head of a frame. Raises WireError for a head that this side does not accept.

    Args:
        raw: HEAD_NBYTES bytes.
        limit: The maximum size of a payload in bytes.
        summed: Whether frames of this link have checksums.
    """
    magic, version, *rest = _HEAD.unpack(raw[: _HEAD.size])
    head = Head(*rest)
    if magic != MAGIC:
        raise WireError(f"not a frame: it begins with {magic!r}, not {MAGIC!r}")
    if summed:
        opened(raw, "the head of a frame")
    if version != VERSION:
        raise WireError(f"a frame has protocol version {version}, this side has {VERSION}")
    if head.flags & ~(SUMMED | LAST) or bool(head.flags & SUMMED) != summed:
        raise WireError(
            f"frame {head.sequence} has flags {head.flags:#x}, but checksums are"
            f" {'on' if summed else 'off'}"
        )
    if head.flags & LAST and (head.kind or head.header_nbytes or head.nbytes):
        raise WireError(
            f"a goodbye of {head.header_nbytes + head.nbytes} bytes, kind {head.kind} is not empty"
        )
    if head.header_nbytes > MAX_HEADER:
        raise WireError(f"a header of {head.header_nbytes} bytes exceeds {MAX_HEADER}")
    if head.nbytes > limit:
        raise WireError(f"a payload of {head.nbytes} bytes exceeds the limit of {limit}")
    return head


def flat(view: memoryview) -> memoryview:
    """Return a view of the same memory as plain bytes. Raises TypeError if the memory is not
    contiguous."""
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def copy(into: memoryview, source: memoryview) -> None:
    """Copy `source` into `into`, which has the same length. A large copy releases the interpreter's
    lock."""
    if len(into) < COPY_ALONE:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def check_sizes(peer: str, kind: int, header: bytes, nbytes: int, limit: int) -> None:
    """Raise WireError for a frame that is too large to send."""
    if len(header) > MAX_HEADER:
        raise WireError(f"{peer}: a header of {len(header)} bytes exceeds {MAX_HEADER}")
    if nbytes > limit:
        raise WireError(
            f"{peer}: a payload of {nbytes} bytes exceeds the limit of {limit}",
            hint="split the payload, or raise frame_limit on both sides",
        )
    if not 0 <= kind < 1 << 16:
        raise WireError(f"{peer}: kind {kind} does not fit 16 bits")
