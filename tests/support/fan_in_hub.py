"""Stands for a server, its fan-in end and its only switch, as seen by a participant's link: TCP
frames are kept for the test, integers are added in numpy, parameters are sent to all."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roadtrain.servers import frames as m
from roadtrain.servers.routes import greeting_of
from roadtrain.switch import packets, switch_frames
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.packets import PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import Heartbeat, NumberedReceiver, merged
from roadtrain.switch.streams import Batch, PacketPort, PacketSender, beat_packet, beats_of
from roadtrain.transport.link import Link
from roadtrain.transport.tcp import Address, TcpOptions, listen
from tests.support.faulty import faulty

JOB, NONCE = 7, b"nonce of this session"
WINDOW = 64
INTEGER = {1: np.int8, 2: np.int16, 4: np.int32}

GREETING = greeting_of("fan-in")


@dataclass
class Frame:
    kind: int
    fields: Any
    payload: bytes


@dataclass
class Member:
    """The hub's end of a participant's TCP link."""

    hub: Hub
    rank: int
    link: Link
    frames: list[Frame] = field(default_factory=list)
    error: Exception | None = None

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        with self.hub.changed:
            self.frames.append(Frame(kind, m.header(kind, header), bytes(payload)))
            self.hub.changed.notify_all()

    def lost(self, error: Exception) -> None:
        self.error = error

    def of(self, kind: int) -> list[Any]:
        return [frame.fields for frame in self.frames if frame.kind == kind]


class Hub:
    """loss: Fraction of packets lost in each direction. port: UDP port of the hub."""

    def __init__(self, workers: int, *, faults: Any = None, loss: float = 0.0) -> None:
        self.workers, self._loss, self._random = workers, loss, random.Random(7)
        self.changed = threading.Condition()
        self.members: dict[int, Member] = {}
        self.options = TcpOptions(token=b"a token of a test", retry_s=1.0)
        self.listener = listen(
            ("127.0.0.1", 0), self._accept, self.options, lambda _: None, language=m.LANGUAGE
        )
        self.key = PacketKey.derive(self.options.token, NONCE)
        self.socket = faulty(
            DatagramSocket(("127.0.0.1", 0), receive_nbytes=1 << 20, send_nbytes=1 << 20), faults
        )
        self.children: dict[int, Address] = {}
        self.beats: dict[int, Heartbeat] = {}
        self.numbers: dict[int, dict[int, np.ndarray]] = {}  # number -> child -> payload
        self.headers: dict[int, np.void] = {}  # number -> one of its headers
        self.receiver = NumberedReceiver(WINDOW)
        self.up = 0  # count of granted numbers
        self.down: list[np.ndarray] = []  # whole packets, by number
        self.quiet = False  # no heartbeat goes down
        self.failed: list[BaseException] = []
        self.senders = [
            PacketSender(self.socket, ("127.0.0.1", 9), self._filler(), self.failed.append, name="")
            for _ in range(workers)
        ]
        kinds = (Kind.GRADIENT, Kind.EXPONENTS)
        take = {**dict.fromkeys(kinds, self._sum), Kind.PARAMETER_BEAT: self._take_beat}
        self.receive = PacketPort(
            [self.socket], self.key, JOB, take, self.failed.append, name="hub", tick=self._tick
        )
        self.receive.start()

    def close(self) -> None:
        for member in self.members.values():
            member.link.close()
        for sender in self.senders:
            sender.close()
        self.receive.close()
        self.socket.close()
        self.listener.close()
        assert not self.failed, self.failed

    # TCP

    def _accept(self, link: Link, hello: bytes) -> Member:
        assert hello.startswith(GREETING)
        greeting = m.decoded(switch_frames.FAN_IN_HELLO, hello[len(GREETING) :], "a hello")
        assert greeting.window == WINDOW
        with self.changed:
            member = self.members[greeting.hello.rank] = Member(self, greeting.hello.rank, link)
            self.changed.notify_all()
        return member

    def join(self, group: str = "") -> None:
        """Wait until all participants have connected, and let them join."""
        self.until(lambda: len(self.members) == self.workers)
        for child, member in self.members.items():
            fields = (JOB, child, self.socket.address[1], group)
            member.link.send(switch_frames.FAN_IN, m.encode(fields), [memoryview(NONCE)])
        self.until(lambda: len(self.children) == self.workers)
        for child, sender in enumerate(self.senders):
            sender.to = self.children[child]
            sender.start()

    def until(self, ready: Any, seconds: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, seconds), self.failed

    def wait_frames(self, kind: int, count: int) -> None:
        """Wait until each member has sent `count` frames of `kind`."""
        self.until(lambda: all(len(member.of(kind)) >= count for member in self.members.values()))

    # packets from the participants

    def grant(self, chunk: int, round: int, count: int, announced: set[int]) -> int:
        first, self.up = self.up, self.up + count
        for rank, member in self.members.items():
            member.link.send(
                switch_frames.GRANT, m.encode((chunk, round, first, rank in announced))
            )
        return first

    def _sum(self, batch: Batch) -> None:
        with self.changed:
            for i in np.flatnonzero(batch.ok):
                if self._random.random() < self._loss:
                    continue
                number, child = int(batch.numbers[i]), int(batch.headers[i]["sender"])
                at = int(i) * batch.segment + packets.HEADER_NBYTES
                payload = batch.buffer[at : at + PAYLOAD_NBYTES].copy()
                had = self.numbers.setdefault(number, {}).setdefault(child, payload)
                assert np.array_equal(had, payload)  # the bytes of a number never change
                self.headers[number] = batch.headers[i]
                if len(self.numbers[number]) == self.workers:
                    self.receiver.accept(number)
            self.changed.notify_all()

    def _tick(self) -> None:
        beat = self.receiver.heartbeat()
        packet = beat_packet(self.key, JOB, Kind.GRADIENT_BEAT, beat)
        for to in [] if self.quiet else list(self.children.values()):
            self.socket.send(packet, packet.size, to)

    def sums(self, first: int, count: int, width: int) -> np.ndarray:
        """Packets [count, PAYLOAD_NBYTES] of all participants' integers."""
        self.until(lambda: self.receiver.ack >= first + count)
        out = []
        for number in range(first, first + count):
            parts = [payload.view(INTEGER[width]) for payload in self.numbers[number].values()]
            out.append(np.sum(parts, axis=0, dtype=INTEGER[width]).view(np.uint8))
        return np.stack(out)

    def maxima(self, first: int, count: int) -> np.ndarray:
        self.until(lambda: self.receiver.ack >= first + count)
        rows = [np.max(list(self.numbers[n].values()), axis=0) for n in range(first, first + count)]
        return np.concatenate(rows)

    # packets to the participants

    def send(self, kind: Kind, a: int, b: int, data: np.ndarray, credit: int = 0) -> None:
        """Send data to all children under the next numbers, which are the same for each child."""
        with self.changed:
            count, first = -(-data.size // PAYLOAD_NBYTES), len(self.down)
            buffer = np.zeros(count * PACKET_NBYTES, np.uint8)
            packets.write_headers(
                buffer, PACKET_NBYTES, count, kind=kind, job=JOB, first=first, a=a, b=b,
                c=0, credit=credit,
            )  # fmt: skip
            packets.copy_in(buffer, data, 0)
            packets.seal(buffer, PACKET_NBYTES, count, self.key)
            self.down += list(buffer.reshape(count, PACKET_NBYTES))
        for sender in self.senders:
            sender.may_send(len(self.down))

    def _filler(self) -> Any:
        def fill(first: int, count: int, staging: np.ndarray) -> int:
            staging[: count * PACKET_NBYTES] = np.concatenate(self.down[first : first + count])
            return count

        return fill

    def _take_beat(self, batch: Batch) -> None:
        with self.changed:
            for beat, header, source in beats_of(batch):
                child = int(header["sender"])
                assert int(header["b"]) == child  # here a rank is its number
                self.children[child], self.beats[child] = source, beat
                self.senders[child].heartbeat(beat)
            self.changed.notify_all()

    @property
    def merged_beat(self) -> Heartbeat:
        """Packets of the broadcast stream that all children have received."""
        return merged(list(self.beats.values()))
