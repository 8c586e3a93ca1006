"""Link and Receiver: the interface by which frames travel between two nodes. A frame is a `kind`, a
short header and a payload.

A link is created with the Receiver of the frames that arrive. `send` only queues. Frames arrive in
the order of the calls, even if several connections carry one link, except that `urgent` frames
overtake all frames that have not started to leave. Payloads are gathered from the sender's buffers
and are received into the buffer that `room` of the other side returns, without intermediate copies.

    frame = HEAD, header (<= 64 KiB), payload (<= the frame limit); all lengths are checked before
    anything is allocated

Note "checksums". Where they are on (everywhere outside this process, except under TLS, which does
more), HEAD ends with its own xxh3 and contains those of the header and of the payload. Each is
checked before the data is used: a length before waiting for so many bytes, a header before calling
`room`, a payload before calling `arrived`. So a flipped bit ends the link with a WireError, and the
damaged payload is never delivered.

Integers on the wire are little-endian. The meaning of kinds is defined elsewhere. Nothing is
retried: a lost peer is an error that names it.
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
# magic, version, flags, kind, header bytes, payload bytes, sequence, xxh3 of the header, of the
# payload
_HEAD = struct.Struct("<4sBBHIQQQQ")
SUM = struct.Struct("<Q")  # xxh3_64
HEAD_NBYTES = _HEAD.size + SUM.size
MAX_HEADER = 64 * KIB
FRAME_LIMIT = 64 * MIB
# flags: checksums are present; this is the goodbye, whose sequence is the number of frames sent
SUMMED, LAST = 1, 2
# a copy of fewer bytes is faster than releasing and reacquiring the interpreter's lock
COPY_ALONE = 16 * KIB
EMPTY = memoryview(bytearray())


class Receiver(Protocol):
    """The owner of a link. Called from the link's threads; an exception from a method ends the
    link with it."""

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        """Return a writable buffer of exactly `nbytes` for a payload.

        Called in the order of sending, once at a time, and not for an empty payload. May block,
        which is the back-pressure, but must return or raise soon after the link has ended.
        """

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        """Handle a frame. Called in the order of sending, once at a time. Must not block for long;
        may send and close."""

    def lost(self, error: PeerError) -> None:
        """Handle the end of the link, unless close() ended it. Called once, after all frames."""


class Link(Protocol):
    peer: str  # for messages: "server 2 (10.0.0.3:7000)"

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

        `parts` must not change until `sent` is called: once, from a thread of the link, when the
        transport has the bytes or the link has ended. Raises LostError if the link is lost or
        closed, or WireError for a frame above the limit of either side, without calling `sent`.
        """

    def close(self) -> None:
        """Send what is queued, unless nothing moves for a while, and end the link. Idempotent.

        Nothing more arrives. All threads and descriptors are closed on return or, if called from a
        thread of the link, soon after.
        """


class Head(NamedTuple):
    flags: int
    kind: int
    header_nbytes: int
    nbytes: int
    sequence: int
    header_sum: int = 0  # xxh3_64; 0 where sums are off
    payload_sum: int = 0


def sealed(raw: bytes) -> bytes:
    """Append the xxh3 of `raw`."""
    return raw + SUM.pack(xxhash.xxh3_64_intdigest(raw))


def opened(raw: bytes | memoryview, what: str) -> bytes | memoryview:
    """Check and remove the xxh3 that `sealed` has appended. Raises WireError."""
    inside = raw[: len(raw) - SUM.size]
    if SUM.unpack(raw[len(inside) :]) != (xxhash.xxh3_64_intdigest(inside),):
        raise WireError(f"{what} does not match its checksum")
    return inside


def digest(parts: Sequence[memoryview | bytes]) -> int:
    """Return the xxh3_64 of all parts together. Releases the interpreter's lock for large parts."""
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
    """Parse the head of a frame; raise WireError for one that this side does not accept."""
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
    """Return the same memory as plain bytes; TypeError if it is not contiguous."""
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def copy(into: memoryview, source: memoryview) -> None:
    """Copy a view to one of equal length. A large copy releases the interpreter's lock."""
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
            hint="split it, or raise frame_limit on both sides",
        )
    if not 0 <= kind < 1 << 16:
        raise WireError(f"{peer}: kind {kind} does not fit 16 bits")
