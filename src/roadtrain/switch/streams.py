"""Streams of numbered packets on real sockets: the threads around switch/protocol/numbered.py.

    PacketSender   thread: machine.next_numbers -> fill -> seal -> socket
    PacketPort     thread: sockets -> read_runs -> verify -> take[kind]; and `tick`, now and then
    beat_packet    a heartbeat as a packet; beats_of reads it

Nobody holds a lock while bytes are copied, sealed or sent. Does NOT know what is in a payload.
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
from roadtrain.switch.protocol.numbered import Heartbeat, NumberedSender
from roadtrain.transport.tcp import Address

RUN = 264  # packets that are made at once: six calls to the kernel, 64 KB each
GATHERED = 264  # bulk packets of a port that are handled together
LOSS_S = 0.1  # without progress, after which what has not come goes again; doubles each time
MOST_LOSS_S = 2.0
LEFT_S = 0.008  # that packets are left to the kernel at most, so that more are handled together
FEW = 8  # packets, for which nobody waits
BUSY_S = 0.01  # between two heartbeats while packets come
# What the kernel holds of packets on their way out. More than this host's queue for its network
# device holds would be lost there, without a word; so it is far less, and senders wait.
SEND_NBYTES = 1 << 18
IDLE_S = 0.5  # between two heartbeats while none come
END_S = 5.0  # for a thread to end
MOST_HAVE = (1 << 8 * PAYLOAD_NBYTES) - 1  # what the bitmap of a heartbeat can say

Failed = Callable[[BaseException], None]
# (first, count, staging): writes whole, sealed packets of the numbers from `first` on to `staging`,
# one after the other, and returns how many: `count`, or fewer where the others are acknowledged
Fill = Callable[[int, int, np.ndarray], int]


@dataclass(frozen=True, slots=True)
class DatagramRun:
    """Packets of one length that came together; the memory is the reader's."""

    buffer: np.ndarray  # uint8; packet i begins at i * segment
    segment: int  # bytes of a packet
    sources: Sequence[Address]  # senders, one a packet

    @property
    def count(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class Batch(DatagramRun):
    """Those of a run that are of one kind."""

    kind: Kind
    ok: np.ndarray  # bool, one a packet: it is of this kind and has the right tag
    headers: np.ndarray  # HEADER, one a packet; a copy

    @property
    def numbers(self) -> np.ndarray:
        """int64, one a packet."""
        return self.headers["number"].astype(np.int64)


def read_runs(socket: DatagramSocket, memory: np.ndarray) -> tuple[list[DatagramRun], bool]:
    """The datagrams that have come, without waiting: bulk packets as one run, whoever sent them
    (the kernel joins those of one sender only, and not on every device), then the run that ended
    it, such as a heartbeat. Also whether nothing more was there.

    Args:
        memory: uint8 that the runs lie in: RECEIVE_NBYTES, and room for the bulk packets that are
            gathered
    """
    bulk, odd = list[Address](), list[DatagramRun]()
    most, found = (memory.size - RECEIVE_NBYTES) // PACKET_NBYTES, None
    while not odd and len(bulk) < most:
        at = len(bulk) * PACKET_NBYTES
        found = socket.receive(memory[at : at + RECEIVE_NBYTES], 0.0)
        if found is None:
            break
        nbytes, segment, source = found
        whole = nbytes // PACKET_NBYTES if segment == PACKET_NBYTES else 0
        bulk += [source] * whole
        if whole * PACKET_NBYTES < nbytes or not nbytes:
            odd = _split(memory[at + whole * PACKET_NBYTES : at + nbytes], segment, source)
    gathered = DatagramRun(memory[: len(bulk) * PACKET_NBYTES], PACKET_NBYTES, bulk)
    return ([gathered, *odd] if bulk else odd), found is None


def _split(rest: np.ndarray, segment: int, source: Address) -> list[DatagramRun]:
    """The kernel may join a shorter packet to a run of longer ones."""
    whole = rest.size // segment if segment else 0
    runs = [DatagramRun(rest[: whole * segment], segment, [source] * whole)] if whole else []
    if rest.size > whole * segment or not whole:
        last = rest[whole * segment :]
        runs.append(DatagramRun(last, last.size, [source]))
    return runs


class PacketSender:
    """One direction of a stream, to one address. The machine is guarded by `_changed`."""

    def __init__(
        self,
        socket: DatagramSocket,
        to: Address,
        fill: Fill,
        failed: Failed,
        *,
        name: str,
        delay_s: float = 0.0,
    ) -> None:
        """`delay_s`: what this sender waits longer than others that send the same numbers."""
        self.machine = NumberedSender()
        self._socket, self.to, self._fill, self._failed = socket, to, fill, failed
        self._delay_s, self._patience_s = delay_s, LOSS_S
        self._moved = time.monotonic()  # when something came last, or something new was sent
        self._changed, self._over = threading.Condition(), False
        self._staging = np.zeros(RUN * PACKET_NBYTES, np.uint8)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def may_send(self, below: int) -> None:
        with self._changed:
            if self.machine.idle:
                self._moved = time.monotonic()
            self.machine.may_send(below)
            self._changed.notify_all()

    def heartbeat(self, beat: Heartbeat) -> int:
        """What the receivers say. Returns the number below which all is acknowledged."""
        with self._changed:
            before = self.machine.beat
            self.machine.heartbeat(beat)
            now = self.machine.beat
            if now.ack > before.ack or now.have != before.have:
                self._moved, self._patience_s = time.monotonic(), LOSS_S
            self._changed.notify_all()
            return self.machine.ack

    @property
    def stuck(self) -> bool:
        """Whether nothing has come for some seconds, however often it was sent."""
        return self._patience_s >= MOST_LOSS_S and not self.machine.idle

    def close(self) -> None:
        """Idempotent; from any thread but its own it waits for the thread."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _work(self) -> None:
        try:
            while (numbers := self._next()) is not None:
                self._send(numbers)
        except BaseException as error:
            if not self._over:
                self._failed(error)

    def _next(self) -> range | None:
        """Waits for numbers to be sent; None at the end."""
        with self._changed:
            while not self._over:
                if numbers := self.machine.next_numbers(RUN):
                    return numbers
                if self.machine.idle:
                    self._changed.wait()
                    continue
                left_s = self._moved + self._patience_s + self._delay_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                self.machine.silent()
                self._moved = time.monotonic()
                self._patience_s = min(2 * self._patience_s, MOST_LOSS_S)
        return None

    def _send(self, numbers: range) -> None:
        filled = self._fill(numbers.start, len(numbers), self._staging)
        if filled:
            self._socket.send(self._staging[: filled * PACKET_NBYTES], PACKET_NBYTES, self.to)


class PacketPort:
    """What comes to sockets of one job, one thread for all: each time it wakes it does all there
    is. `strangers`: packets without the job's tag, which changed nothing. Takers and `tick` are
    called by its thread, one at a time; what they raise ends it and is told to `failed`."""

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
        """Idempotent. The sockets are its owner's."""
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
                    self._rest(pause_s)
        except LostError as error:
            if not self._over:
                self._failed(error)
        except BaseException as error:
            self._failed(error)

    def _rest(self, pause_s: float) -> None:
        if pause_s:
            time.sleep(pause_s)
        else:
            first, *others = self._sockets
            first.wait(BUSY_S, *others)

    def _drain(self, socket: DatagramSocket) -> bool:
        """Handle what has come to it: the more there is to do, the fewer calls do it. Returns
        whether nothing more was there."""
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
    """How long packets are left to the kernel, so that one call handles many: what cards do with
    interrupts. Not at all where they come seldom."""

    def __init__(self) -> None:
        self._last = 0.0  # when the last batch was handled

    def pause_s(self, count: int, now: float) -> float:
        """After a batch of `count` packets that was handled at `now`, both in seconds."""
        since, self._last = now - self._last, now
        if count * LEFT_S < FEW * since:
            return 0.0
        return min(LEFT_S, 0.75 * GATHERED * since / count)


class BeatClock:
    """When a receiver says what it has: after a quarter of a window, a moment after something
    came, and now and then while nothing does (Sun et al., appendix B)."""

    def __init__(self, window: int) -> None:
        self._quarter = max(window // 4, 1)
        self._came = 0  # packets since the last heartbeat
        self._last = 0.0  # when that was

    def came(self, count: int) -> None:
        self._came += count

    def due(self) -> bool:
        """Whether to say it now; then it counts as said."""
        since = time.monotonic() - self._last
        if self._came < self._quarter and since < (BUSY_S if self._came else IDLE_S):
            return False
        self._came, self._last = 0, time.monotonic()
        return True


def beat_packet(key: PacketKey, job: int, kind: Kind, beat: Heartbeat, **fields: int) -> np.ndarray:
    """A sealed heartbeat: uint8[HEADER_NBYTES + bytes of the bitmap]. fields: others of its
    header."""
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
        credit=beat.credit + 1,  # unsigned: nothing may be sent yet is 0
        **fields,
    )
    packets.seal(packet, packet.size, 1, key)
    return packet


def beats_of(batch: Batch) -> list[tuple[Heartbeat, np.void, Address]]:
    """The heartbeats of a batch, each with its header and its sender."""
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
