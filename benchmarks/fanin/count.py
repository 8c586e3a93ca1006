"""Count the bytes of the fan-in's heartbeats that a network device sends and receives, as whole
frames. Needs root.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import sys
import time

from benchmarks.common.children import send_value
from roadtrain.switch.packets import MAGIC, Kind

ETH_P_IP, ETH_P_ALL, SO_ATTACH_FILTER, OUTGOING = 0x0800, 3, 26, 4
MAGIC_AT, KIND_AT = 42, 45  # after the headers of Ethernet, IP and UDP


def _program() -> bytes:
    """Return a classic BPF program (linux/filter.h) that accepts only heartbeats of a fan-in."""
    half, byte, equal, leave = 0x28, 0x30, 0x15, 0x06
    wire_magic = int.from_bytes(MAGIC.to_bytes(2, "little"), "big")
    steps = [
        (half, 0, 0, 12),
        (equal, 0, 7, ETH_P_IP),
        (byte, 0, 0, 23),
        (equal, 0, 5, socket.IPPROTO_UDP),
        (half, 0, 0, MAGIC_AT),
        (equal, 0, 3, wire_magic),
        (byte, 0, 0, KIND_AT),
        (equal, 2, 0, Kind.PARAMETER_BEAT),
        (equal, 1, 0, Kind.GRADIENT_BEAT),
        (leave, 0, 0, 0),
        (leave, 0, 0, 0xFFFF),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def count(device: str) -> dict[str, float]:
    """Count the bytes of heartbeats until the parent lets this process go on. Returns {"sent",
    "received", "seconds"}.
    """
    program = _program()
    memory = ctypes.create_string_buffer(program)
    attached = struct.pack("HL", len(program) // 8, ctypes.addressof(memory))
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attached)
        sock.bind((device, ETH_P_ALL))
        send_value("ready")
        begin, found = time.monotonic(), {"sent": 0.0, "received": 0.0}
        while True:
            ready, _, _ = select.select([sock, sys.stdin], [], [])
            if sock in ready:
                frame, (_, _, kind, *_) = sock.recvfrom(1 << 16)
                found["sent" if kind == OUTGOING else "received"] += len(frame)
            elif ready:
                return {**found, "seconds": time.monotonic() - begin}
