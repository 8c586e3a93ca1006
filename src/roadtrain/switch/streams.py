"""Streams of numbered packets over sockets: the threads around switch/protocol/numbered.py. Does
NOT look into payloads.

    PacketSender   thread: machine.next_numbers -> fill -> seal -> socket
    PacketPort     thread: sockets -> read_runs -> verify -> take[kind]; calls `tick` in between
    beat_packet    encodes a heartbeat as a packet; beats_of decodes it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roadtrain.errors import LostError
from roadtrain.switch import packets
from roadtrain.switch.datagrams import RECEIVE_NBYTES, DatagramSocket
from roadtrain.switch.packets import (
    HEADER_NBYTES,
    PACKET_NBYTES,
    PAYLOAD_NBYTES,
    Kind,
    PacketKey,
)
from roadtrain.switch.protocol.numbered import Heartbeat
from roadtrain.switch.protocol.timed_sender import BEAT_S, TimedSender
from roadtrain.transport.tcp import Address

RUN = 264  # packets made at once: six system calls of 64 KB each
GATHERED = 528  # bulk packets that a port handles at once
HOLD_S = 0.016  # longest time that packets wait in the kernel, to be handled together
FEW = 16  # if fewer packets arrive in HOLD_S, each packet is handled immediately
# Send buffer of a socket; the kernel takes twice as many bytes. It must be smaller than the host's
# queue for its network device, which silently drops packets when it is full (the queues of the lab
# have 256 KiB and more); a full send buffer makes the sender wait instead.
SEND_NBYTES = 1 << 17
IDLE_S = 0.5  # interval between two heartbeats while no packets arrive
END_S = 5.0  # timeout for a thread to end
MOST_HAVE = (1 << 8 * PAYLOAD_NBYTES) - 1  # bits that fit in the bitmap of a heartbeat

Failed = Callable[[BaseException], None]
# fill(first, count, staging) makes the packets with the numbers in [first, first + count) that are
# not acknowledged. It writes them to `staging`, whole and sealed, and returns their number.
Fill = Callable[[int, int, np.ndarray], int]


@dataclass(frozen=True, slots=True)
class DatagramRun:
    """A run of packets of equal length. The next call of `read_runs` overwrites `buffer`."""

    buffer: np.ndarray  # uint8; packet i begins at i * segment
    segment: int  # bytes of a packet
    sources: Sequence[Address]  # senders, one per packet

    @property
    def count(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class Batch(DatagramRun):
    """The packets of one kind in a run: the packets for which `ok` is set."""

    kind: Kind
    ok: np.ndarray  # bool, one per packet: whether it is verified and of this kind
    headers: np.ndarray  # HEADER, one per packet; a copy

    @property
    def numbers(self) -> np.ndarray:
        """Packet numbers: int64, one per packet."""
        return self.headers["number"].astype(np.int64)


def read_runs(socket: DatagramSocket, memory: np.ndarray) -> tuple[list[DatagramRun], bool]:
    """Read datagrams without blocking, up to a packet that is no bulk packet, such as a heartbeat.
    Bulk packets of all senders form one run.

    Args:
        memory: The memory for the runs, uint8. Must have 64 KiB, and in addition room for the bulk
            packets.

    Returns:
        A list with the run of bulk packets and the runs of other packets (without empty runs); and
        whether all packets of the socket were read.
    """
    bulk, other = list[Address](), list[DatagramRun]()
    most, found = (memory.size - RECEIVE_NBYTES) // PACKET_NBYTES, None
    while not other and len(bulk) < most:
        at = len(bulk) * PACKET_NBYTES
        found = socket.receive(memory[at : at + RECEIVE_NBYTES], 0.0)
        if found is None:
            break
        nbytes, segment, source = found
        whole = nbytes // PACKET_NBYTES if segment == PACKET_NBYTES else 0
        bulk += [source] * whole
        if whole * PACKET_NBYTES < nbytes or not nbytes:
            other = _split(memory[at + whole * PACKET_NBYTES : at + nbytes], segment, source)
    gathered = DatagramRun(memory[: len(bulk) * PACKET_NBYTES], PACKET_NBYTES, bulk)
    return ([gathered, *other] if bulk else other), found is None


def _split(rest: np.ndarray, segment: int, source: Address) -> list[DatagramRun]:
    """Divide received bytes into runs. A shorter last packet gets a run of its own."""
    whole = rest.size // segment if segment else 0
    runs = [DatagramRun(rest[: whole * segment], segment, [source] * whole)] if whole else []
    if rest.size > whole * segment or not whole:
        last = rest[whole * segment :]
        runs.append(DatagramRun(last, last.size, [source]))
    return runs


class PacketSender:
    """Sends a stream of numbered packets to one address, in a thread."""

    def __init__(
        self,
        socket: DatagramSocket,
        to: Address,
        fill: Fill,
        failed: Failed,
        *,
        name: str,
    ) -> None:
        self.machine = TimedSender()
        self._socket, self.to, self._fill, self._failed = socket, to, fill, failed
        # `_changed` guards `machine`
        self._changed, self._over = threading.Condition(), False
        self._staging = np.zeros(RUN * PACKET_NBYTES, np.uint8)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def may_send(self, below: int) -> None:
        with self._changed:
            self.machine.numbers.may_send(below)
            self._changed.notify_all()

    def heartbeat(self, beat: Heartbeat) -> int:
        """Process a heartbeat of the receivers. Returns the number below which all packets are
        acknowledged.
        """
        with self._changed:
            self._changed.notify_all()
            return self.machine.heartbeat(beat, time.monotonic())

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _work(self) -> None:
        try:
            while (numbers := self._next()) is not None:
                if filled := self._fill(numbers.start, len(numbers), self._staging):
                    run = self._staging[: filled * PACKET_NBYTES]
                    self._socket.send(run, PACKET_NBYTES, self.to)
        except BaseException as error:
            if not self._over:
                self._failed(error)

    def _next(self) -> range | None:
        """Wait for numbers to send, and return them, or None after `close`."""
        with self._changed:
            while not self._over:
                now_s = time.monotonic()
                if numbers := self.machine.next_numbers(RUN, now_s):
                    return numbers
                wait_s = self.machine.wait_s(now_s)
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
        return None


class PacketPort:
    """Receives the packets of one job from its sockets, in one thread.

    The thread calls the functions in `take` with received packets, and `tick` in between. An
    exception ends the thread and is passed to `failed`. `strangers` counts packets that failed
    verification and were dropped.
    """

    def __init__(
        self,
        sockets: Sequence[DatagramSocket],
        key: PacketKey,
        job: int,
        take: Mapping[Kind, Callable[[Batch], None]],
        failed: Failed,
        *,
        name: str,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._sockets, self._key, self._job, self._take = tuple(sockets), key, job, dict(take)
        self._failed, self._tick, self._over = failed, tick, False
        self.strangers = self.packets = 0
        self._moderation = Moderation()
        self._buffer = np.zeros(GATHERED * PACKET_NBYTES + RECEIVE_NBYTES, np.uint8)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; the caller closes the sockets. Idempotent."""
        self._over = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _work(self) -> None:
        try:
            while not self._over:
                before = self.packets
                drained = [self._drain(socket) for socket in self._sockets]
                self._tick()
                pause_s = self._moderation.pause_s(self.packets - before, time.monotonic())
                if all(drained):
                    self._pause(pause_s)
        except LostError as error:
            if not self._over:
                self._failed(error)
        except BaseException as error:
            self._failed(error)

    def _pause(self, pause_s: float) -> None:
        if pause_s:
            time.sleep(pause_s)
        else:
            first, *others = self._sockets
            first.wait(BEAT_S, *others)

    def _drain(self, socket: DatagramSocket) -> bool:
        """Handle packets that have arrived at a socket. Returns whether all of them were read."""
        runs, drained = read_runs(socket, self._buffer)
        for run in runs:
            self._take_run(run)
        return drained

    def _take_run(self, run: DatagramRun) -> None:
        ok = packets.verify(run.buffer, run.segment, run.count, self._key, self._job)
        self.packets += run.count
        self.strangers += run.count - int(np.count_nonzero(ok))
        headers = packets.headers(run.buffer, run.segment, run.count)
        kinds = headers["kind"]
        for kind in sorted({*kinds[ok].tolist()}):
            taker = self._take.get(kind)
            if taker is not None:
                of_kind = ok & (kinds == kind)
                taker(Batch(run.buffer, run.segment, run.sources, Kind(kind), of_kind, headers))


class Moderation:
    """Decides how long the receiving thread sleeps, so that it handles many packets each time it
    wakes up.
    """

    def __init__(self) -> None:
        self._last = 0.0  # when the last batch was handled

    def pause_s(self, count: int, now: float) -> float:
        """Return the seconds to sleep after a batch of `count` packets was handled at `now`."""
        since, self._last = now - self._last, now
        if count * HOLD_S < FEW * since:
            return 0.0
        return min(HOLD_S, 0.75 * GATHERED * since / count)


class BeatClock:
    """Decides when a receiver sends a heartbeat (Sun et al., appendix B): after a quarter of a
    window, otherwise 10 ms after the last heartbeat, or 0.5 s if no packet has arrived.
    """

    def __init__(self, window: int) -> None:
        self._quarter = max(window // 4, 1)
        self._received = 0  # packets since the last heartbeat
        self._last = 0.0  # time of the last heartbeat

    def received(self, count: int) -> None:
        self._received += count

    def due(self, now: float) -> bool:
        """Return whether to send a heartbeat now. If so, the heartbeat counts as sent."""
        since = now - self._last
        if self._received < self._quarter and since < (BEAT_S if self._received else IDLE_S):
            return False
        self._received, self._last = 0, now
        return True


def beat_packet(key: PacketKey, job: int, kind: Kind, beat: Heartbeat, **fields: int) -> np.ndarray:
    """Make a heartbeat packet, with its tag: uint8 [48 bytes of header + bytes of the bitmap].

    `fields` are the header fields that `beat` does not determine.
    """
    have = beat.have & MOST_HAVE
    bitmap = have.to_bytes((have.bit_length() + 7) // 8, "little")
    packet = np.zeros(HEADER_NBYTES + len(bitmap), np.uint8)
    packet[HEADER_NBYTES:] = np.frombuffer(bitmap, np.uint8)
    packets.write_headers(
        packet,
        packet.size,
        1,
        kind=kind,
        job=job,
        first=beat.ack,
        c=len(bitmap),
        credit=beat.credit + 1,  # the field is unsigned, and the credit may be -1
        **fields,
    )
    packets.seal(packet, packet.size, 1, key)
    return packet


def beats_of(batch: Batch) -> list[tuple[Heartbeat, np.void, Address]]:
    """Decode the heartbeats of a batch, each with its header and its sender."""
    found = []
    for i in np.flatnonzero(batch.ok).tolist():
        header = batch.headers[i]
        at, nbytes = i * batch.segment + HEADER_NBYTES, int(header["c"])
        if nbytes > batch.segment - HEADER_NBYTES:
            continue
        have = int.from_bytes(batch.buffer[at : at + nbytes].tobytes(), "little")
        beat = Heartbeat(int(header["number"]), int(header["credit"]) - 1, have)
        found.append((beat, header, batch.sources[i]))
    return found
