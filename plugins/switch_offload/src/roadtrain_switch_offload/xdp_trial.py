"""Self-test of the kernel program: the kernel runs the program on test packets, and the results are
compared with the state machine in switch/protocol/switch.py. The test uses no network device and
sends no packets.

A fixed sequence of pseudo-random packets of three children goes through a table of four slots, with
repeated, late and damaged packets. About half of the packets arrive as if from a device, the other
half as if from user space. For each packet, the program's verdict must equal the verdict of the
state machine. Every packet with a sum must equal the packet that user space makes: the payload is
summed by numpy, and the tag is computed by switch/packets.py.
"""

from __future__ import annotations

import random
import struct
from functools import partial

import numpy as np

from roadtrain.switch import packets
from roadtrain.switch.packets import HEADER, HEADER_NBYTES, PACKET_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import Heartbeat
from roadtrain.switch.protocol.switch import Packet, SwitchStateMachine
from roadtrain_switch_offload.bpf_object import BpfObject
from roadtrain_switch_offload.xdp_table import (
    LIVE,
    MOST_JOBS,
    UDP_HEADER,
    XDP_DROP,
    XDP_PASS,
    XDP_TX,
    XdpJob,
    XdpTable,
)

STEPS, CHILDREN, SLOTS, CHILD, PORT, JOB_NUMBER = 500, 3, 4, 9, 9, 0x1234
PARENT = ("127.0.0.2", 77)
HOPS = bytes(range(1, 7)), bytes(range(11, 17))  # hardware addresses of the parent and of this host
# (kind, width) of packet `number` is FORMS[number % len(FORMS)]
FORMS = ((Kind.GRADIENT, 4), (Kind.GRADIENT, 2), (Kind.EXPONENTS, 0), (Kind.GRADIENT, 1))
IP_HEADER = struct.Struct("!BBHHHBBH4s4s")
_WHOLE = np.dtype((np.uint8, PACKET_NBYTES - HEADER_NBYTES))


def failed_trial(program: BpfObject) -> str | None:
    """Run the self-test. Returns None if the test succeeds, otherwise a description of the
    failure."""
    live = program.mapped("live", LIVE, MOST_JOBS)[:1]
    key = PacketKey.derive(b"self-test", b"of the program")
    job = XdpJob(JOB_NUMBER, PORT, CHILDREN, CHILD, SLOTS, key, PARENT, 0)
    table = XdpTable(program, "", job, live)
    try:
        return _Trial(program, table, live, key).run()
    finally:
        table.close()


def _added(width: int, first: bytes, second: bytes) -> bytes:
    pair = [np.frombuffer(data, f"<i{width}") for data in (first, second)]
    return (pair[0] + pair[1]).tobytes()


def _greater(first: bytes, second: bytes) -> bytes:
    pair = [np.frombuffer(data, np.uint8) for data in (first, second)]
    return np.maximum(*pair).tobytes()


# for each element of FORMS, the function by which the state machine sums payloads
OPS = [partial(_added, width) if width else _greater for _, width in FORMS]


class _Trial:
    def __init__(
        self, program: BpfObject, table: XdpTable, live: np.ndarray, key: PacketKey
    ) -> None:
        self.program, self.table, self.live, self.key = program, table, live, key
        self.machine = SwitchStateMachine(SLOTS, CHILDREN, CHILD)
        self.random = random.Random(20)
        self.base = 0  # senders send numbers in [base, base + SLOTS), and late packets below `base`
        self.sums = 0

    def run(self) -> str | None:
        for step in range(STEPS):
            self._acknowledge()
            if why := self._step():
                return f"{why}, at packet {step}"
        return None if self.sums > STEPS // 20 else f"only {self.sums} sums were complete"

    def _acknowledge(self) -> None:
        """At random, advance `base` beyond the complete sums, as if the receiver had acknowledged
        them. About half of these acknowledgements are lost."""
        done = [slot.number for slot in self.machine.table.values() if slot.done]
        if done and self.random.random() < 0.1:
            self.base = max(self.base, max(done) + 1)
            if self.random.random() < 0.5:
                self.machine.parent_beat(Heartbeat(self.base, self.base + SLOTS - 1))
                self.table.snoop(self.base)

    def _step(self) -> str | None:
        number = max(0, self.base + self.random.randrange(-SLOTS, SLOTS))
        child = self.random.randrange(CHILDREN)
        payload = random.Random(number * CHILDREN + child).randbytes(_WHOLE.itemsize)
        sent = self._sealed(number, child, payload)
        if self.random.random() < 0.1:
            return self._stranger(sent)
        total = self.machine.packet(Packet(number, payload, OPS[number % len(OPS)], child))
        if total is None:
            return self._expect(sent, XDP_DROP, None)
        self.sums += 1
        return self._expect(sent, XDP_TX, self._sealed(number, total.child, total.data))

    def _sealed(self, number: int, child: int, payload: bytes) -> bytes:
        kind, width = FORMS[number % len(FORMS)]
        packet = np.zeros(1, [("head", HEADER), ("payload", _WHOLE)])
        packet["head"][["magic", "version", "kind", "job", "number", "sender", "width"]] = (
            packets.MAGIC,
            packets.VERSION,
            kind,
            JOB_NUMBER,
            number,
            child,
            width,
        )
        packet["head"][["a", "b", "c", "credit"]] = number % 7, number % 5, 3, 4
        packet["payload"] = np.frombuffer(payload, np.uint8)
        packets.seal(packet.view(np.uint8), PACKET_NBYTES, 1, self.key)
        return packet.tobytes()

    def _stranger(self, sent: bytes) -> str | None:
        wrong = bytearray(sent)
        wrong[self.random.randrange(len(wrong))] ^= 1 << self.random.randrange(8)
        return self._expect(bytes(wrong), XDP_PASS, bytes(wrong))

    def _expect(self, sent: bytes, verdict: int, left: bytes | None) -> str | None:
        """Run the program on the packet `sent`, as if from a device or from user space. Return a
        description of the first difference from the expected results, or None.

        `left` is the expected content of the packet after the run; None if the content is not
        compared.
        """
        from_device = self.random.random() < 0.5
        resolved = self.random.random() < 0.5  # whether the parent's hardware address is known
        self._set_parent(resolved)
        before = _frame(sent, ("10.0.0.1", 5), ("10.0.0.2", PORT))
        if not from_device:
            before = before[-PACKET_NBYTES - UDP_HEADER.size :]
        frame = np.frombuffer(before, np.uint8).copy()
        name = "take_packet" if from_device else "add_packet"
        got, _ = self.program.run(self.program.program(name), frame)
        if from_device and verdict == XDP_TX and not resolved:
            verdict, left = XDP_PASS, sent
        if got != verdict:
            return f"{name} must return verdict {verdict}, but returns {got}"
        if left is not None and frame[-PACKET_NBYTES:].tobytes() != left:
            return f"{name} leaves other bytes than the state machine's sum"
        if from_device and got == XDP_TX:
            whole = _frame(left or b"", ("10.0.0.2", PORT), PARENT, HOPS)
            return None if frame.tobytes() == whole else f"{name} addresses the sum wrongly"
        return None

    def _set_parent(self, resolved: bool) -> None:
        self.live["parent"], self.live["own"] = (np.frombuffer(hop, np.uint8) for hop in HOPS)
        self.live["found"] = resolved


def _frame(
    packet: bytes,
    source: tuple[str, int],
    to: tuple[str, int],
    hops: tuple[bytes, bytes] = (bytes(6), bytes(6)),
) -> bytes:
    """Return an Ethernet frame that contains `packet`. `hops`: the hardware addresses of the
    receiver and the sender."""
    udp = UDP_HEADER.pack(source[1], to[1], UDP_HEADER.size + len(packet), 0)
    hosts = [bytes(map(int, host.split("."))) for host in (source[0], to[0])]
    nbytes = IP_HEADER.size + len(udp) + len(packet)
    plain = IP_HEADER.pack(0x45, 0, nbytes, 0, 0x4000, 64, 17, 0, *hosts)
    total = sum(struct.unpack("!10H", plain))
    total = (total & 0xFFFF) + (total >> 16)
    check = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    ip = plain[:10] + struct.pack("!H", check) + plain[12:]
    return b"".join((*hops, b"\x08\x00", ip, udp, packet))
