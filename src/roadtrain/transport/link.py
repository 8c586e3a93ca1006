"""Link and Receiver: how frames travel between two nodes, on one page. A frame is a `kind`, a short
header and a payload.

A link is made with the Receiver of what arrives. `send` only queues; order of calls is order of
arrival, also where several connections carry one link; but `urgent` frames go before all others
that have not begun to leave. Bulk bytes are gathered from the sender's buffers and land in the
buffer that the other side's `room` names: a transport copies them, this room never holds them.

    frame = HEAD, header (<= 64 KiB), payload (<= the frame limit); all lengths are checked before
    anything is allocated

NOTE sums. Where they are on (everywhere outside this process but under TLS, which does more), HEAD
ends with its own xxh3 and holds those of the header and of the payload. Each is checked before what
it covers is used: a length before so many bytes are waited for, a header before `room` is asked, a
payload before it arrives. So a flipped bit ends the link with a WireError, and the memory that the
payload went to is told to nobody.

Assumes little-endian integers on the wire (HEAD says so). NOT here: what kinds mean, who retries
(nobody: a lost peer is an error with a name).
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
# flags: the checksum counts; the goodbye, whose sequence is the number of frames sent
SUMMED, LAST = 1, 2
# bytes copied faster than the interpreter's lock is given away and taken again
COPY_ALONE = 16 * KIB
EMPTY = memoryview(bytearray())


class Receiver(Protocol):
    """The owner's side, called from the link's threads. An exception from any of these ends the
    link with it."""

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        """Where this payload goes: exactly `nbytes` writable bytes. In the order of sending, one
        call at a time, and not for an empty payload. May block: that is the back-pressure; must
        return or raise soon after the link ended."""

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        """In the order of sending, one call at a time. Must not block for long; may send and
        close."""

    def lost(self, error: PeerError) -> None:
        """Once, when the link ended other than by our own close(); nothing arrives after it."""


class Link(Protocol):
    peer: str  # for people: "server 2 (10.0.0.3:7000)"

    def send(
        self,
        kind: int,
        header: bytes,
        parts: Sequence[memoryview] = (),
        sent: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """Queues, and never waits. `parts` must not change until `sent` is called: once, from a
        thread of the link, when the transport has the bytes or when the link has ended without
        them. Raises LostError once the link is lost or closed, WireError for a frame over the limit
        of either side; `sent` is not called then.
        """

    def close(self) -> None:
        """What was queued is still sent, unless nothing moves for a while; nothing more arrives.
        Idempotent. No thread or descriptor is left when it returns, or (called from a thread of the
        link) soon after.
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
    """`raw` and its xxh3."""
    return raw + SUM.pack(xxhash.xxh3_64_intdigest(raw))


def opened(raw: bytes | memoryview, what: str) -> bytes | memoryview:
    """What was sealed. WireError where it is not what it was."""
    inside = raw[: len(raw) - SUM.size]
    if SUM.unpack(raw[len(inside) :]) != (xxhash.xxh3_64_intdigest(inside),):
        raise WireError(f"{what} does not match its checksum")
    return inside


def digest(parts: Sequence[memoryview | bytes]) -> int:
    """xxh3_64 of them, one after the other. Other threads run meanwhile where they are large."""
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
    """The head of a frame; WireError for whatever this side does not take."""
    magic, version, *rest = _HEAD.unpack(raw[: _HEAD.size])
    head = Head(*rest)
    if magic != MAGIC:
        raise WireError(f"not a frame: it begins with {magic!r}, not {MAGIC!r}")
    if summed:
        opened(raw, "the head of a frame")
    if version != VERSION:
        raise WireError(f"a frame of protocol version {version}, this side speaks {VERSION}")
    if head.flags & ~(SUMMED | LAST) or bool(head.flags & SUMMED) != summed:
        raise WireError(
            f"frame {head.sequence} has flags {head.flags:#x}, checksums are"
            f" {'on' if summed else 'off'}"
        )
    if head.flags & LAST and (head.kind or head.header_nbytes or head.nbytes):
        raise WireError(
            f"a goodbye of {head.header_nbytes + head.nbytes} bytes and kind {head.kind}, not empty"
        )
    if head.header_nbytes > MAX_HEADER:
        raise WireError(f"a header of {head.header_nbytes} bytes, {MAX_HEADER} are allowed")
    if head.nbytes > limit:
        raise WireError(f"a payload of {head.nbytes} bytes, {limit} are allowed")
    return head


def flat(view: memoryview) -> memoryview:
    """The same memory as plain bytes; TypeError if it is not contiguous."""
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def copy(into: memoryview, source: memoryview) -> None:
    """Equal lengths. A large copy lets other threads run."""
    if len(into) < COPY_ALONE:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def check_sizes(peer: str, kind: int, header: bytes, nbytes: int, limit: int) -> None:
    """What `send` refuses; WireError with both numbers."""
    if len(header) > MAX_HEADER:
        raise WireError(f"{peer}: a header of {len(header)} bytes, {MAX_HEADER} are allowed")
    if nbytes > limit:
        raise WireError(
            f"{peer}: a payload of {nbytes} bytes, {limit} are allowed",
            hint="cut it, or raise frame_limit on both sides",
        )
    if not 0 <= kind < 1 << 16:
        raise WireError(f"{peer}: kind {kind} does not fit 16 bits")
