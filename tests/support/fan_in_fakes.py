"""A fake worker and a fake end of a fan-in, driven by the test's own thread. They use real sockets
and switch/protocol/numbered.py only. Gradient n of a worker is a fixed array, so each sum is
known."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence

import numpy as np

from roadtrain.errors import LostError, PeerError
from roadtrain.servers import frames as m
from roadtrain.switch import packets, switch_frames
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import NumberedReceiver, NumberedSender
from roadtrain.switch.streams import Batch, beat_packet, beats_of
from roadtrain.transport.tcp import Address, TcpOptions, connect
from roadtrain.units import MIB
from tests.support.faulty import faulty

TOKEN = b"the token of a test job"
HOST = "127.0.0.1"
WINDOW = 64
RUN = 32
LOSS_S = 0.05
BEAT_S = 0.005


def gradient_of(worker: int, number: int) -> np.ndarray:
    """Payload of a gradient packet, int32."""
    return np.random.default_rng((worker, number)).integers(
        -(2**24), 2**24, PAYLOAD_NBYTES // 4, np.int32
    )


def parameters_of(number: int) -> np.ndarray:
    """Payload of a parameter packet, uint8."""
    return np.random.default_rng(number).integers(0, 256, PAYLOAD_NBYTES, np.uint8)


class Peer:
    """Base of a worker and an end: a stream of numbered packets in each direction."""

    def __init__(
        self,
        key: PacketKey,
        job: int,
        out: Kind,
        payload: Callable[[int], np.ndarray],
        *,
        child: int = 0,
        faults=None,
        window: int = WINDOW,
        host: str = HOST,
    ) -> None:
        self.socket = faulty(
            DatagramSocket((host, 0), receive_nbytes=4 * MIB, send_nbytes=4 * MIB), faults
        )
        self.key, self.job, self.child, self.out, self.payload = key, job, child, out, payload
        self.sender, self.receiver = NumberedSender(), NumberedReceiver(window)
        self.to: Sequence[Address] = ()
        self.got: dict[int, bytes] = {}  # number -> payload
        self.below: tuple[int, int] = (0, 0)  # as reported by the last heartbeat
        self.twice = 0  # packets received twice
        self._moved = self._last_beat = 0.0
        self._buffer = np.zeros(1 << 16, np.uint8)

    @property
    def where(self) -> Address:
        return self.socket.address

    def pump(self) -> None:
        """Receive packets, send those in the window, and send a heartbeat when it is due."""
        while (found := self.socket.receive(self._buffer, 0.0)) is not None:
            self._take(*found)
        now = time.monotonic()
        while numbers := self.sender.next_numbers(RUN):
            self._send(numbers)
            self._moved = now
        if not self.sender.idle and now - self._moved > LOSS_S * (1 + self.child):
            self.sender.silent()
            self._moved = now
        if now - self._last_beat > BEAT_S:
            self._last_beat = now
            self.beat()

    def beat(self) -> None:
        kind = Kind.GRADIENT_BEAT if self.out == Kind.PARAMETERS else Kind.PARAMETER_BEAT
        packet = beat_packet(
            self.key,
            self.job,
            kind,
            self.receiver.heartbeat(),
            sender=self.child,
            b=self.rank,
        )
        for to in self.to:
            self.socket.send(packet, packet.size, to)

    rank = 0

    def _send(self, numbers: range) -> None:
        staging = self.packets(numbers)
        for to in self.to:
            self.socket.send(staging, PACKET_NBYTES, to)

    def packets(self, numbers: range, kind: Kind | None = None) -> np.ndarray:
        """Build sealed packets."""
        staging = np.zeros(len(numbers) * PACKET_NBYTES, np.uint8)
        kind = kind or self.out
        width = 4 if kind == Kind.GRADIENT else 0
        packets.write_headers(
            staging,
            PACKET_NBYTES,
            len(numbers),
            kind=kind,
            job=self.job,
            first=numbers.start,
            sender=self.child,
            width=width,
        )
        for i, number in enumerate(numbers):
            at = i * PACKET_NBYTES + HEADER_NBYTES
            staging[at : at + PAYLOAD_NBYTES] = self.payload(number).view(np.uint8)
        packets.seal(staging, PACKET_NBYTES, len(numbers), self.key)
        return staging

    def _take(self, nbytes: int, segment: int, source: Address) -> None:
        for at in range(0, nbytes, segment):
            packet = self._buffer[at : min(at + segment, nbytes)]
            assert packets.verify(packet, packet.size, 1, self.key, self.job).all()
            header = packets.headers(packet, packet.size, 1)
            kind, number = Kind(header["kind"][0]), int(header["number"][0])
            if kind in (Kind.PARAMETER_BEAT, Kind.GRADIENT_BEAT):
                batch = Batch(packet, packet.size, [source], kind, np.ones(1, bool), header)
                for beat, fields, _ in beats_of(batch):
                    before = self.sender.ack
                    self.sender.heartbeat(beat)
                    self.below = int(fields["a"]), int(fields["b"])
                    if self.sender.ack > before:
                        self._moved = time.monotonic()
            elif self.receiver.accept(number):
                assert kind == (Kind.GRADIENT if self.out == Kind.PARAMETERS else Kind.PARAMETERS)
                self.got[number] = packet[HEADER_NBYTES:].tobytes()
            else:
                self.twice += 1

    def close(self) -> None:
        self.socket.close()


class Worker(Peer):
    def __init__(
        self, key: PacketKey, job: int, rank: int, child: int, switch: Address, **options
    ) -> None:
        super().__init__(
            key, job, Kind.GRADIENT, lambda n: gradient_of(rank, n), child=child, **options
        )
        self.rank, self.to = rank, (switch,)


class Registration:
    """The Receiver of an end's link to a switch."""

    def __init__(self) -> None:
        self.answers = queue.SimpleQueue[object]()
        self.over: PeerError | None = None
        self.failed = ""

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields = m.header(kind, header)
        if kind == m.FAILED:
            self.failed = fields.words
        else:
            self.answers.put(fields)

    def lost(self, error: PeerError) -> None:
        self.over = error
        self.answers.put(error)


class End(Peer):
    """The end of the fan-in of a job."""

    def __init__(self, job: int = 7, name: str = "a job", **options) -> None:
        self.nonce = bytes([job % 256]) * 16
        key = PacketKey.derive(TOKEN, self.nonce)
        super().__init__(key, job, Kind.PARAMETERS, parameters_of, **options)
        self.name, self.links = name, []
        self.port = 0  # UDP port of the root switch

    def register(
        self,
        switch: Address,
        children: int,
        *,
        slots: int = WINDOW,
        parent: Address | None = None,
        child: int = 0,
        port: int = 0,
    ) -> int:
        """Register the job at a switch. Returns its UDP port there."""
        hello = switch_frames.SwitchHello(
            self.name, self.job, self.nonce, children, slots, child, parent or self.where, port
        )
        receiver = Registration()
        link = connect(
            switch,
            receiver,
            TcpOptions(token=TOKEN, retry_s=5.0),
            hello=switch_frames.SWITCH_GREETING + m.encode(hello),
            language=m.LANGUAGE,
        )
        ready = receiver.answers.get(timeout=10)
        if isinstance(ready, Exception):
            raise ready
        assert ready.slots == slots
        self.links.append((link, receiver))
        if parent is None:
            self.port, self.to = ready.port, ((switch[0], ready.port),)
        return ready.port

    def leave(self) -> None:
        for link, _ in self.links:
            with contextlib.suppress(LostError):
                link.close()
        self.links.clear()

    def close(self) -> None:
        self.leave()
        super().close()


def pumped(peers: Sequence[Peer], until: Callable[[], bool], deadline_s: float = 20.0) -> bool:
    """Pump all peers until `until()`. Returns whether that happened within the deadline."""
    deadline = time.monotonic() + deadline_s
    while not until():
        if time.monotonic() > deadline:
            return False
        for peer in peers:
            peer.pump()
        time.sleep(0.0005)
    return True


def sums_are_right(end: End, ranks: Sequence[int], count: int) -> None:
    assert sorted(end.got) == list(range(count))
    for number in range(count):
        total = sum(gradient_of(rank, number) for rank in ranks)
        assert end.got[number] == total.tobytes(), number


def copies_are_right(workers: Sequence[Worker], count: int) -> None:
    for worker in workers:
        assert sorted(worker.got) == list(range(count))
        assert all(worker.got[n] == parameters_of(n).tobytes() for n in range(count))
