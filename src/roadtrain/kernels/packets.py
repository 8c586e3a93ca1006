"""Packets of the fan-in: their layout, and the keyed checksum that each carries.

A bulk packet (gradient, exponents, parameters, maxima) is always PACKET_NBYTES long, padded with
zeros, so that the kernel can cut and join runs of them. A heartbeat is a header and a bitmap.
Numbers are little-endian.

    HEADER (48 bytes, the last 8 are the tag), payload

What `a`, `b`, `c` and `credit` mean is said at each Kind. The tag covers all other bytes of the
packet: NH over its 32-bit words (Black et al., UMAC, 1999), then SipHash-2-4 (Aumasson and
Bernstein, 2012) of that hash; both keys are derived from the job's token. A stranger's packet has
no right tag; a repeated one has an old number.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

MAGIC, VERSION = 0x5254, 1
PAYLOAD_NBYTES = 1408
BLOCK = PAYLOAD_NBYTES // 4  # elements that share an exponent: an int32 packet is one block

HEADER = np.dtype(
    [
        ("magic", "<u2"),
        ("version", "u1"),
        ("kind", "u1"),
        ("job", "<u4"),  # of the job at this server, the same for all of the tree
        ("number", "<u8"),  # running; of a heartbeat the next number that its sender expects (ack)
        ("sender", "<u2"),  # child number at the receiver; from above 0
        ("width", "u1"),  # bytes of an element that is summed; else 0
        ("flags", "u1"),  # 0
        ("a", "<u4"),
        ("b", "<u4"),
        ("c", "<u4"),
        ("credit", "<u8"),
        ("tag", "<u8"),
    ]
)
HEADER_NBYTES = HEADER.itemsize
PACKET_NBYTES = HEADER_NBYTES + PAYLOAD_NBYTES
assert HEADER_NBYTES == 48


class Kind(IntEnum):
    """Up: from a worker towards the server. Down: from the server towards the workers. The two
    directions have sequences of numbers of their own; up, GRADIENT and EXPONENTS share one; down,
    PARAMETERS and MAXIMA do."""

    GRADIENT = 1  # up: integers of `width` bytes, which are added
    EXPONENTS = 2  # up: one byte for each block of BLOCK elements, of which the greatest is taken
    # down: a chunk's weights part; a: chunk, b: version modulo 2**32, c: which packet of the chunk
    PARAMETERS = 3
    # down: the greatest exponents of a chunk; a: chunk, b: its round modulo 2**32, c: which packet
    # of them; credit: the first number of the gradient packets that follow (grants them)
    MAXIMA = 4
    # up: about PARAMETERS and MAXIMA; number: ack; credit: one more than the greatest number that
    # there is room for; a: milliseconds since the most silent worker below was heard, b: its rank,
    # c: bytes of the bitmap, whose bit i says that number ack + i has come
    PARAMETER_BEAT = 5
    GRADIENT_BEAT = 6  # down: about GRADIENT and EXPONENTS; number, credit, c as above
    TRIAL = 7  # down: by the network's own multicast, to find out whether that reaches all


UP = frozenset((Kind.GRADIENT, Kind.EXPONENTS, Kind.PARAMETER_BEAT))
