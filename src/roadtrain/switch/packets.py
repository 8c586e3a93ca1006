"""Packets of the fan-in: their layout and their authentication tag. Does NOT encrypt or send.

A bulk packet (gradient, exponents, parameters, maxima) is always 1456 bytes long, padded with
zeros. A heartbeat is a header and a bitmap. Integers are little-endian, and the header has 48
bytes, of which the last 8 are the tag.

The tag covers all other bytes of the packet. First the packet's 32-bit words are hashed with NH
(Black et al., UMAC, 1999), under each of two keys. The tag is SipHash-2-4 (Aumasson and Bernstein,
2012) of both hashes and the packet's length. The probability that two different packets have the
same hashes is 2^-64. Replayed packets are recognized by their old numbers.

Packet i of a run of packets is the bytes [i * segment, (i + 1) * segment) of a buffer. Arrays are
contiguous uint8 arrays on a little-endian host.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from roadtrain.kernels.cast import kernel

MAGIC, VERSION = 0x5254, 1
PAYLOAD_NBYTES = 1408
BLOCK = PAYLOAD_NBYTES // 4  # elements per exponent; a packet of int32 is one block

HEADER = np.dtype(
    [
        ("magic", "<u2"),
        ("version", "u1"),
        ("kind", "u1"),
        ("job", "<u4"),  # of one job at one server; the same for all switches of the tree
        ("number", "<u8"),  # sequence number; in a heartbeat, the next number that is expected
        ("sender", "<u2"),  # sender number of the child in packets going up; 0 in packets down
        ("width", "u1"),  # bytes of an element in GRADIENT packets; 0 in other packets
        ("flags", "u1"),  # always 0
        ("a", "<u4"),
        ("b", "<u4"),
        ("c", "<u4"),
        ("credit", "<u8"),
        ("tag", "<u8"),
    ]
)
HEADER_NBYTES = HEADER.itemsize
_PACKED = struct.Struct("<HBBIQHBBIIIQQ")  # HEADER; packing is faster than setting numpy's fields
PACKET_NBYTES = HEADER_NBYTES + PAYLOAD_NBYTES
assert HEADER_NBYTES == 48


class Kind(IntEnum):
    """Kinds of packets. "Up" means from a worker towards the server, and "down" means the opposite.
    Each direction has one sequence of packet numbers.
    """

    GRADIENT = 1  # up: integers of `width` bytes, which are added
    EXPONENTS = 2  # up: one byte per block of BLOCK elements; combined by maximum
    # down: a chunk's weights part. a: chunk; b: version modulo 2**32; c: index of the packet in the
    # chunk
    PARAMETERS = 3
    # down: the largest exponents of a chunk. a: chunk; b: round modulo 2**32; c: index of the
    # packet; credit: number of the first GRADIENT packet, granted once all MAXIMA have arrived
    MAXIMA = 4
    # up: acknowledges PARAMETERS and MAXIMA. number: ack; credit: one more than the greatest number
    # for which there is room; a: for how many milliseconds the most silent worker below the sender
    # has been silent; b: rank of this worker; c: bytes of the bitmap, in which bit i stands for
    # number ack + i
    PARAMETER_BEAT = 5
    # down: acknowledges GRADIENT and EXPONENTS. number, credit and c: as in PARAMETER_BEAT
    GRADIENT_BEAT = 6
    TRIAL = 7  # down: sent to the multicast group, to find out whether it reaches all workers


# The `sender` in packets of the root switch to the server. No child has this number, so the server
# rejects a packet of a worker that was recorded on its way to a switch and replayed.
ROOT = 0xFFFF

_TAG_AT = HEADER.fields["tag"][1]  # type: ignore[index]
_WORDS = (PACKET_NBYTES - 8) // 8  # 64-bit words that the tag covers
_TAG_WORD = _TAG_AT // 8
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_HEAD = np.uint64(MAGIC | VERSION << 16)
_NO_FIELDS = {**dict.fromkeys(HEADER.names or (), 0), "magic": MAGIC, "version": VERSION}
_HEAD_MASK = np.uint64(0xFFFFFF)


@dataclass(frozen=True, eq=False)
class PacketKey:
    """The secret keys of one session's packets. `repr` does not show them."""

    # uint64 [words of a packet + 1]: the first NH key is words[:-1], the second is words[1:] (a
    # Toeplitz construction, as in UMAC)
    words: np.ndarray = field(repr=False)
    # uint64 [2, words of a packet]: both NH keys, with 0 for the word of the tag
    rows: np.ndarray = field(repr=False)
    sip: tuple[np.uint64, np.uint64] = field(repr=False)  # SipHash's key, two 64-bit words

    @classmethod
    def derive(cls, token: bytes | None, nonce: bytes) -> PacketKey:
        """Derive the keys with BLAKE2b.

        Args:
            token: The job's token. None for a job on one host, which needs no secret.
            nonce: Bytes that are different in every session.
        """
        secret = b"" if token is None else token
        seeds = b"".join(len(part).to_bytes(8, "little") + part for part in (secret, nonce))
        seed = hashlib.blake2b(seeds, person=b"fan-in packets").digest()
        nbytes = 8 * (_WORDS + 1) + 16
        stream = b"".join(
            hashlib.blake2b(i.to_bytes(8, "little"), key=seed).digest()
            for i in range(-(-nbytes // 64))
        )
        words = np.frombuffer(stream, "<u8", nbytes // 8)
        rows = np.array([np.insert(words[i : i + _WORDS], _TAG_WORD, 0) for i in range(2)])
        return cls(words[:-2].copy(), rows, (words[-2], words[-1]))


@kernel
def _rotated(x: Any, by: Any) -> Any:
    return (x << np.uint64(by)) | (x >> np.uint64(64 - by))


@kernel
def _sip_round(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0 += v1
    v1 = _rotated(v1, 13) ^ v0
    v0 = _rotated(v0, 32)
    v2 += v3
    v3 = _rotated(v3, 16) ^ v2
    v0 += v3
    v3 = _rotated(v3, 21) ^ v0
    v2 += v1
    v1 = _rotated(v1, 17) ^ v2
    v2 = _rotated(v2, 32)
    return v0, v1, v2, v3


@kernel
def siphash(key: Any, message: Any) -> Any:
    """Compute SipHash-2-4 of a tuple of uint64. `key` has two uint64."""
    v0 = key[0] ^ np.uint64(0x736F6D6570736575)
    v1 = key[1] ^ np.uint64(0x646F72616E646F6D)
    v2 = key[0] ^ np.uint64(0x6C7967656E657261)
    v3 = key[1] ^ np.uint64(0x7465646279746573)
    for word in message:
        v3 ^= word
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0 ^= word
    last = np.uint64(8 * len(message)) << np.uint64(56)
    v3 ^= last
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0 ^= last
    v2 ^= np.uint64(0xFF)
    for _ in range(4):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


@kernel
def _product(word: Any, key: Any) -> Any:
    """Compute NH of one pair of 32-bit words."""
    low = (word + key) & _LOW
    high = ((word >> _HALF) + (key >> _HALF)) & _LOW
    return low * high


@kernel
def _tags(buffer: Any, segment: Any, count: Any, rows: Any, sip: Any) -> Any:
    """Compute the tags of packets: uint64 [count]. A packet has 48 to 1456 bytes.

    The loop over packets is here, because numba's call for each packet would take a third of the
    time; the loop over words includes the old tag, so that it compiles to vector instructions.
    """
    tags = np.empty(count, np.uint64)
    whole = segment // 8
    for i in range(count):
        at = i * segment
        body = buffer[at : at + whole * 8].view(np.uint64)
        first = second = np.uint64(0) - _product(body[_TAG_WORD], np.uint64(0))
        for word in range(body.size):
            first += _product(body[word], rows[0, word])
            second += _product(body[word], rows[1, word])
        if segment % 8:
            rest = np.uint64(0)
            for byte in range(segment % 8):
                rest |= np.uint64(buffer[at + whole * 8 + byte]) << np.uint64(8 * byte)
            first += _product(rest, rows[0, whole])
            second += _product(rest, rows[1, whole])
        tags[i] = siphash(sip, (first, second, np.uint64(segment)))
    return tags


@kernel
def _seal(buffer: Any, segment: Any, count: Any, rows: Any, sip: Any) -> Any:
    for i, tag in enumerate(_tags(buffer, segment, count, rows, sip)):
        at = i * segment + _TAG_AT
        buffer[at : at + 8].view(np.uint64)[0] = tag


@kernel
def _verify(
    buffer: Any, segment: Any, count: Any, rows: Any, sip: Any, job: Any, right: Any
) -> Any:
    for i, tag in enumerate(_tags(buffer, segment, count, rows, sip)):
        head = buffer[i * segment : i * segment + HEADER_NBYTES].view(np.uint64)
        ours = (head[0] & _HEAD_MASK) == _HEAD and (head[0] >> _HALF) == job
        right[i] = ours and head[_TAG_WORD] == tag


def check_run(buffer: np.ndarray, segment: int, count: int) -> None:
    """Assert that `buffer` holds `count` packets of `segment` bytes."""
    assert HEADER_NBYTES <= segment <= PACKET_NBYTES, f"packets of {segment} bytes"
    assert 0 <= count * segment <= buffer.size, f"{count} packets in {buffer.size} bytes"


def seal(buffer: np.ndarray, segment: int, count: int, key: PacketKey) -> None:
    """Compute the tags of `count` packets, and write each tag into its packet."""
    check_run(buffer, segment, count)
    _seal(buffer, segment, count, key.rows, key.sip)


def verify(buffer: np.ndarray, segment: int, count: int, key: PacketKey, job: int) -> np.ndarray:
    """Return for each packet whether its magic, version, job, tag and length are right: bool
    [count].
    """
    right = np.zeros(count, np.bool_)
    if HEADER_NBYTES <= segment <= PACKET_NBYTES:
        check_run(buffer, segment, count)
        _verify(buffer, segment, count, key.rows, key.sip, np.uint64(job), right)
    return right


def headers(buffer: np.ndarray, segment: int, count: int) -> np.ndarray:
    """Return a copy of the headers of `count` packets, verified or not. If the packets are shorter
    than a header, the headers are zeros.
    """
    assert count * segment <= buffer.size, f"{count} packets in {buffer.size} bytes"
    if segment < HEADER_NBYTES:
        return np.zeros(count, HEADER)
    # numpy copies opaque bytes faster than it copies fields
    found = np.ndarray(count, f"V{HEADER_NBYTES}", buffer.data, strides=(segment,))
    return found.copy().view(HEADER)


@kernel
def _write_headers(buffer: Any, segment: Any, count: Any, words: Any) -> Any:
    for i in range(count):
        at = i * segment
        head = buffer[at : at + HEADER_NBYTES].view(np.uint64)
        head[0] = words[0]
        head[1] = words[1] + np.uint64(i)
        head[2] = words[2]
        c = ((words[3] >> _HALF) + np.uint64(i)) & _LOW
        head[3] = (words[3] & _LOW) | c << _HALF
        head[4] = words[4]
        head[5] = 0


def write_headers(
    buffer: np.ndarray, segment: int, count: int, *, first: int, **fields: int
) -> None:
    """Write the headers of `count` packets, without tags.

    Args:
        first: Number of the first packet. Packet i gets the number `first` + i.
        fields: Values of other fields of HEADER, by name. Omitted fields are 0. The field `c` of
            packet i is `c` + i.
    """
    check_run(buffer, segment, count)
    values = {**_NO_FIELDS, "number": first, **fields}
    words = np.frombuffer(_PACKED.pack(*values.values()), np.uint64)
    _write_headers(buffer, segment, count, words)


@kernel
def copy_bytes(source: Any, into: Any) -> Any:
    for i in range(source.size):
        into[i] = source[i]


@kernel
def _copy_in(run: Any, source: Any, packet: Any) -> Any:
    for i in range(run.size // PACKET_NBYTES):
        start = i * PACKET_NBYTES + HEADER_NBYTES
        payload = run[start : start + PAYLOAD_NBYTES]
        at = (packet + i) * PAYLOAD_NBYTES
        have = min(max(source.size - at, 0), PAYLOAD_NBYTES)
        copy_bytes(source[at : at + have], payload)
        payload[have:] = 0


def copy_in(run: np.ndarray, source: np.ndarray, packet: int) -> None:
    """Fill the payload of each packet i from `source` (uint8), from byte (packet + i) * 1408 on,
    padded with zeros.
    """
    check_bulk(run)
    _copy_in(run, source, packet)


@kernel
def _copy_out(run: Any, ok: Any, index: Any, into: Any) -> Any:
    for i in range(run.size // PACKET_NBYTES):
        at = np.int64(index[i]) * PAYLOAD_NBYTES
        if ok[i] and 0 <= at < into.size:
            start = i * PACKET_NBYTES + HEADER_NBYTES
            have = min(into.size - at, PAYLOAD_NBYTES)
            copy_bytes(run[start : start + have], into[at : at + have])


def copy_out(run: np.ndarray, ok: np.ndarray, index: np.ndarray, into: np.ndarray) -> None:
    """Copy the payload of each packet i for which ok[i] is set to `into` (uint8), from byte
    index[i] * 1408 on. Bytes beyond the end of `into` are left out.
    """
    check_bulk(run)
    _copy_out(run, ok, index, into)


def check_bulk(run: np.ndarray) -> int:
    """Return the number of bulk packets in a run. Asserts that the run has no other bytes."""
    assert run.size % PACKET_NBYTES == 0, f"{run.size} bytes are not whole bulk packets"
    return run.size // PACKET_NBYTES
