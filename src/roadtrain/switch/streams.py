"""Streams of numbered packets on real sockets: the threads around switch/protocol/numbered.py.

    PacketSender   thread: machine.next_numbers -> fill -> seal -> socket
    PacketPort     thread: sockets -> verify -> take[kind]; and `tick`, now and then

Nobody holds a lock while bytes are copied, sealed or sent. Does NOT know what is in a payload.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roadtrain.errors import LostError
from roadtrain.switch import packets
from roadtrain.switch.datagrams import RECEIVE_NBYTES, DatagramSocket
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import Heartbeat, NumberedSender
from roadtrain.transport.tcp import Address

RUN = 264  # packets that are made at once: six calls to the kernel, 64 KB each
GATHERED = 264  # packets that have come, after which they are handled
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

Failed = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packets of one kind that came together; its memory is used again when its taker returns."""

    kind: Kind
    buffer: np.ndarray  # uint8; packet i begins at i * segment
    segment: int  # bytes of a packet
    count: int
    ok: np.ndarray  # bool, one a packet: it is of this kind and has the right tag
    headers: np.ndarray  # HEADER, one a packet; a copy
    source: Address

    @property
    def numbers(self) -> np.ndarray:
        """int64, one a packet."""
        return self.headers["number"].astype(np.int64)


class Fill(Protocol):
    """Who has the bytes that numbers stand for."""

    def __call__(self, first: int, count: int, staging: np.ndarray) -> int:
        """Writes whole, sealed packets of the numbers from `first` on, one after the other, and
        returns how many: `count`, or fewer where the others are acknowledged meanwhile."""


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
        loss_s: float = LOSS_S,
    ) -> None:
        """`delay_s`: what this sender waits longer than others that send the same numbers."""
        self.machine = NumberedSender()
        self._socket, self.to, self._fill, self._failed = socket, to, fill, failed
        self._delay_s, self._loss_s, self._patience_s = delay_s, loss_s, loss_s
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
                self._moved, self._patience_s = time.monotonic(), self._loss_s
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
                drained = [self._take_in(one) for one in self._sockets]
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

    def _take_in(self, socket: DatagramSocket) -> bool:
        """What has come to it. Bulk packets of one sender go on together: the more there is to do,
        the fewer calls do it. And not every device joins packets. Returns whether nothing more was
        there."""
        held, sender = 0, ("", 0)  # bytes of whole bulk packets, at the beginning of the buffer
        found = socket.receive(self._buffer, 0.0)
        while found is not None:
            nbytes, segment, source = found
            bulk = segment == PACKET_NBYTES and nbytes % PACKET_NBYTES == 0
            if not bulk or (held and source != sender):
                self._took(self._buffer[:held], PACKET_NBYTES, sender)
                self._took(self._buffer[held : held + nbytes], segment, source)
                return False
            held, sender = held + nbytes, source
            if held >= GATHERED * PACKET_NBYTES:
                break
            found = socket.receive(self._buffer[held:], 0.0)
        self._took(self._buffer[:held], PACKET_NBYTES, sender)
        return found is None

    def _took(self, run: np.ndarray, segment: int, source: Address) -> None:
        """The kernel may join a shorter packet to a run of longer ones."""
        count = run.size // segment if segment else 0
        self._took_equal(run[: count * segment], segment, count, source)
        rest = run[count * segment :]
        self._took_equal(rest, rest.size, 1 if rest.size else 0, source)

    def _took_equal(self, run: np.ndarray, segment: int, count: int, source: Address) -> None:
        if segment < HEADER_NBYTES:
            self.strangers += count
            return
        if not count:
            return
        ok = packets.verify(run, segment, count, self._key, self._job)
        self.packets += count
        self.strangers += count - int(np.count_nonzero(ok))
        headers = packets.headers(run, segment, count)
        kinds = headers["kind"]
        for kind in sorted({*kinds[ok].tolist()}):
            taker = self._take.get(kind)
            if taker is not None:
                of_kind = ok & (kinds == kind)
                taker(Batch(Kind(kind), run, segment, count, of_kind, headers, source))


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


def beat_packet(
    key: PacketKey,
    job: int,
    kind: Kind,
    beat: Heartbeat,
    *,
    sender: int = 0,
    a: int = 0,
    b: int = 0,
) -> np.ndarray:
    """A sealed heartbeat: uint8[HEADER_NBYTES + bytes of the bitmap]."""
    bitmap = beat.have.to_bytes((beat.have.bit_length() + 7) // 8, "little")
    packet = np.zeros(HEADER_NBYTES + len(bitmap), np.uint8)
    packet[HEADER_NBYTES:] = np.frombuffer(bitmap, np.uint8)
    packets.write_headers(
        packet,
        packet.size,
        1,
        kind=kind,
        job=job,
        first=beat.ack,
        sender=sender,
        a=a,
        b=b,
        c=len(bitmap),
        credit=beat.credit + 1,  # unsigned: nothing may be sent yet is 0
    )
    packets.seal(packet, packet.size, 1, key)
    return packet


def beats_of(batch: Batch) -> list[tuple[Heartbeat, np.void]]:
    """The heartbeats of a batch, each with its header."""
    found = []
    for i in np.flatnonzero(batch.ok):
        header = batch.headers[i]
        at, nbytes = int(i) * batch.segment + HEADER_NBYTES, int(header["c"])
        if nbytes > batch.segment - HEADER_NBYTES:
            continue
        have = int.from_bytes(batch.buffer[at : at + nbytes].tobytes(), "little")
        beat = Heartbeat(int(header["number"]), int(header["credit"]) - 1, have)
        found.append((beat, header))
    return found
