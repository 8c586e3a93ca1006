"""The work of a switch for one job. It handles whole runs of packets, and does not block.

    from children   GRADIENT EXPONENTS          --> SwitchTable --> sums, sealed --> parent
                    PARAMETER_BEAT              --> Children    --> merged        --> parent
    from the parent PARAMETERS MAXIMA           --> unchanged   --> every child
                    GRADIENT_BEAT               --> ack is read --> unchanged, every child

See Sun et al. (LuWu), section 3.2.3 and appendix A, and switch/protocol/switch.py for the protocol.
All methods except `rows` run in the thread of the packet loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roadtrain.switch import packets
from roadtrain.switch.datagrams import RECEIVE_NBYTES, DatagramSocket
from roadtrain.switch.packets import PACKET_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import NOTHING, Heartbeat, combined
from roadtrain.switch.protocol.switch import SwitchStateMachine
from roadtrain.switch.streams import Batch, DatagramRun, beat_packet, beats_of, read_runs
from roadtrain.switch.switch_frames import SwitchHello
from roadtrain.switch.switch_table import StuckSlot, Table
from roadtrain.transport.listener import LineLimit, Report
from roadtrain.transport.tcp import Address

BEAT_S = 0.004  # shortest interval between two merged heartbeats
IDLE_S = 0.25  # interval between merged heartbeats that do not change
CHECK_S = 0.25  # interval between checks for silent children and stuck sums
STUCK_MS = 1000  # an incomplete sum of this age is reported
MOST_NAMED = 4  # stuck sums listed in one line
SILENT_S = 1.0  # a child silent for longer is reported
UNKNOWN_RANK = 0xFFFFFFFF  # in a heartbeat: the most silent worker has never sent anything
MOST_MS = 0xFFFFFFFF
WAIT_S = 1.0  # packets that the kernel does not accept for longer are dropped
FULL = 132  # bulk packets handled at once
MOST = FULL + RECEIVE_NBYTES // PACKET_NBYTES  # packets of a run
READ_NBYTES = FULL * PACKET_NBYTES + RECEIVE_NBYTES

# What to do with a packet, by its kind
_DROP, _SUM, _COPY, _BEAT = range(4)
_HANDLING = np.full(256, _DROP, np.uint8)
_HANDLING[[Kind.GRADIENT, Kind.EXPONENTS]] = _SUM
_HANDLING[[Kind.PARAMETERS, Kind.MAXIMA, Kind.GRADIENT_BEAT]] = _COPY
_HANDLING[Kind.PARAMETER_BEAT] = _BEAT


class Buffers:
    """Buffers of the packet loop, shared by all jobs."""

    def __init__(self) -> None:
        self.received = np.zeros(READ_NBYTES, np.uint8)
        self.sums = np.zeros(MOST * PACKET_NBYTES, np.uint8)


@dataclass(slots=True)
class Counters:
    """Numbers of packets since the job began. Summed packets and sent packets are counted
    elsewhere.
    """

    received: int = 0  # with the job's tag
    strangers: int = 0  # without the job's tag
    refused: int = 0  # with the tag, but with a wrong sender or form
    copied: int = 0  # copied down; a packet counts once, whatever the number of children


@dataclass(slots=True)
class Child:
    """A child of the switch: a worker, or another switch."""

    number: int
    last_beat: float  # time of its last heartbeat; until it sends one, time when the job began
    address: Address | None = None  # UDP address, once it has sent a heartbeat
    rank: int = UNKNOWN_RANK  # the most silent worker below it, according to its last heartbeat
    below_ms: int = 0  # silence of that worker at the time of the heartbeat

    def silent_ms(self, now: float) -> int:
        """Return the milliseconds for which the most silent worker below this child has been
        silent.
        """
        return min(int((now - self.last_beat) * 1000) + self.below_ms, MOST_MS)

    def __str__(self) -> str:
        where = "no packet yet" if self.address is None else "{}:{}".format(*self.address)
        worker = "" if self.rank == UNKNOWN_RANK else f"worker {self.rank}, "
        return f"child {self.number} ({worker}{where})"


class Children:
    """The addresses, heartbeats and silences of a switch's children.

    A child's address is learned from its verified heartbeats. Because heartbeats may be replayed,
    the address changes only if a heartbeat acknowledges more packets, or if the child has been
    silent.
    """

    def __init__(self, machine: SwitchStateMachine, now: float) -> None:
        self._machine = machine
        self.all = [Child(number, now) for number in range(machine.children)]
        self.addresses: list[Address] = []
        self.merged = NOTHING

    def heartbeat(
        self, number: int, beat: Heartbeat, source: Address, below: tuple[int, int], now: float
    ) -> bool:
        """Process a heartbeat of a child. Returns False if the heartbeat was ignored.

        Args:
            below: The most silent worker below the child: (milliseconds of silence, rank).
        """
        child, before = self.all[number], self._machine.beats.get(number)
        if source != child.address:
            new = before is None or combined(before, beat) != before
            if not new and now - child.last_beat <= SILENT_S:
                return False
            child.address = source
            found = [each.address for each in self.all if each.address is not None]
            self.addresses = list(dict.fromkeys(found))
        self.merged = self._machine.child_beat(number, beat) or self.merged
        child.last_beat, (child.below_ms, child.rank) = now, below
        return True

    def most_silent(self, now: float) -> tuple[int, int]:
        """Return the most silent worker of all children, as (milliseconds of silence, rank)."""
        child = max(self.all, key=lambda child: child.silent_ms(now))
        return child.silent_ms(now), child.rank

    def silent(self, now: float) -> list[tuple[Child, float]]:
        """List (child, seconds of silence) for each child with a worker that was silent for more
        than 1 s.
        """
        found = [(child, child.silent_ms(now) / 1000) for child in self.all]
        return [(child, seconds) for child, seconds in found if seconds > SILENT_S]


class SwitchOutgoing:
    """Sends packets of one job without blocking. Not thread-safe.

    While the send buffer is full, unsent packets are kept, and no packets of the job are read.
    After 1 s, unsent packets are dropped.
    """

    def __init__(self, socket: DatagramSocket) -> None:
        self._socket = socket
        self._unsent: deque[tuple[np.ndarray, int, Sequence[Address]]] = deque()
        self._since = 0.0  # time since which the first run in `_unsent` waits
        self.sent = 0  # packets
        self.given_up = 0  # packets dropped after WAIT_S

    @property
    def waits(self) -> bool:
        return bool(self._unsent)

    def send(self, packets: np.ndarray, segment: int, to: Sequence[Address]) -> None:
        """Send a run of packets of `segment` bytes to each address in `to`. The caller may reuse
        the memory of `packets` (uint8).
        """
        sent = 0 if self._unsent else self._send(packets, segment, to)
        if sent == len(to):
            return
        if not self._unsent:
            self._since = time.monotonic()
        self._unsent.append((packets.copy(), segment, to[sent:]))

    def resume(self) -> None:
        """Send as many unsent packets as the kernel accepts."""
        while self._unsent:
            packets, segment, to = self._unsent.popleft()
            sent = self._send(packets, segment, to)
            if sent < len(to):
                self._unsent.appendleft((packets, segment, to[sent:]))
                break
            self._since = time.monotonic()
        if self._unsent and time.monotonic() - self._since > WAIT_S:
            self.given_up += sum(run.size // each * len(to) for run, each, to in self._unsent)
            self._unsent.clear()

    def _send(self, packets: np.ndarray, segment: int, to: Sequence[Address]) -> int:
        """Send a run until the send buffer is full. Returns the number of addresses that got the
        whole run.
        """
        for i, address in enumerate(to):
            if not self._socket.has_room():
                return i
            self._socket.send(packets, segment, address)
            self.sent += packets.size // segment
        return len(to)


class SwitchJob:
    def __init__(
        self,
        hello: SwitchHello,
        parent: Address,
        socket: DatagramSocket,
        table: Table,
        key: PacketKey,
        report: Report,
    ) -> None:
        """
        Args:
            parent: The numeric address of `hello.parent`.
            socket: The UDP socket of the job. The method `close` closes the socket.
            table: The table of the job's sums. The method `close` closes the table.
        """
        self.hello, self._parent, self.socket, self.table = hello, parent, socket, table
        self.name = hello.session
        self._key, self._report = key, LineLimit(report)
        machine = SwitchStateMachine(hello.slots, hello.children, hello.child)
        self.children = Children(machine, time.monotonic())
        self.counters = Counters()
        # For `rows`: sums that have been incomplete for STUCK_MS, and descriptions of silent
        # children.
        self.stuck, self.silent = list[StuckSlot](), list[str]()
        self.out = SwitchOutgoing(socket)
        self._sent, self._sent_at = NOTHING, 0.0  # the last heartbeat to the parent, and when
        self._checked_at = 0.0
        self._reported = set[int]()  # silent children that were reported
        self._warned = False  # whether packets from a wrong source address were reported

    def take(self, buffers: Buffers) -> bool:
        """Read and handle one batch of packets. Returns False if no packet has arrived."""
        runs, _ = read_runs(self.socket, buffers.received)
        for run in runs:
            self._take_run(run, buffers.sums)
        return bool(runs)

    def _take_run(self, run: DatagramRun, sums: np.ndarray) -> None:
        ok = packets.verify(run.buffer, run.segment, run.count, self._key, self.hello.job)
        right = int(np.count_nonzero(ok))
        self.counters.received += right
        self.counters.strangers += run.count - right
        if not right:
            return
        headers = packets.headers(run.buffer, run.segment, run.count)
        handling = _HANDLING[headers["kind"]]
        handling[~ok] = _DROP
        _, summed, copied, beats = np.bincount(handling, minlength=4).tolist()
        self.counters.refused += right - summed - copied - beats
        if summed:
            self._sum(run, handling == _SUM, sums)
        if copied:
            self._copy(run, headers, handling == _COPY)
        if beats:
            ok, kind = handling == _BEAT, Kind.PARAMETER_BEAT
            self._take_beats(Batch(run.buffer, run.segment, run.sources, kind, ok, headers))

    def _sum(self, run: DatagramRun, there: np.ndarray, sums: np.ndarray) -> None:
        if run.segment != PACKET_NBYTES:
            self.counters.refused += int(np.count_nonzero(there))
            return
        made = self.table.add(run.buffer, there, sums, self.hello.child)
        if made:
            whole = sums[: made * PACKET_NBYTES]
            packets.seal(whole, PACKET_NBYTES, made, self._key)
            self.out.send(whole, PACKET_NBYTES, (self._parent,))

    def _copy(self, run: DatagramRun, headers: np.ndarray, there: np.ndarray) -> None:
        """Copy packets from the parent's host to the children. Their tags stay valid."""
        host = self._parent[0]
        above = np.fromiter((source[0] == host for source in run.sources), np.bool_, run.count)
        accepted = there & above
        count = int(np.count_nonzero(accepted))
        if not accepted.all():
            self._refuse(run, there & ~above)
        if not count:
            return
        beats = headers["number"][accepted & (headers["kind"] == Kind.GRADIENT_BEAT)]
        if beats.size:
            self.table.snoop(int(beats.max()))
        copied = run.buffer
        if count < run.count:
            copied = copied.reshape(run.count, run.segment)[accepted].reshape(-1)
        self.counters.copied += count
        if self.children.addresses:
            self.out.send(copied, run.segment, self.children.addresses)

    def _refuse(self, run: DatagramRun, there: np.ndarray) -> None:
        """Drop packets going down that are not from the parent's host, and report the first."""
        at = np.flatnonzero(there)
        self.counters.refused += at.size
        if at.size and not self._warned:
            self._warned = True
            self._report(
                f"job {self.name}: dropping packets for the children from {run.sources[at[0]][0]},"
                f" because the address of the parent is {self._parent[0]}"
            )

    def _take_beats(self, batch: Batch) -> None:
        now = time.monotonic()
        for beat, header, source in beats_of(batch):
            child = int(header["sender"]) - self.hello.first
            below = int(header["a"]), int(header["b"])
            ours = 0 <= child < self.hello.children
            if not ours or not self.children.heartbeat(child, beat, source, below, now):
                self.counters.refused += 1

    def tick(self, now: float) -> None:
        """Send unsent packets and heartbeats, and check for silent children, each at its own
        interval.
        """
        self.table.now = int(now * 1000)
        if self.out.waits:
            self.out.resume()
        beat, since = self.children.merged, now - self._sent_at
        if since >= IDLE_S or (since >= BEAT_S and beat != self._sent):
            self._send_beat(beat, now)
        if now - self._checked_at >= CHECK_S:
            self._checked_at = now
            self._check(now)

    def _send_beat(self, beat: Heartbeat, now: float) -> None:
        self._sent, self._sent_at = beat, now
        silent_ms, rank = self.children.most_silent(now)
        packet = beat_packet(
            self._key,
            self.hello.job,
            Kind.PARAMETER_BEAT,
            beat,
            sender=self.hello.child,
            a=silent_ms,
            b=rank,
        )
        self.out.send(packet, packet.size, (self._parent,))

    def _check(self, now: float) -> None:
        self._report.tick()
        stuck = self.table.stuck(STUCK_MS)
        silent = self.children.silent(now)
        before, self._reported = self._reported, {child.number for child, _ in silent}
        for child, seconds in silent:
            if child.number not in before:
                self._report(f"job {self.name}: {child} has been silent for {seconds:.1f} s")
        for number in sorted(before - self._reported):
            self._report(f"job {self.name}: {self.children.all[number]} sends packets again")
        if stuck and not self.stuck:
            self._report(f"job {self.name}: {shown_stuck(stuck)}")
        self.stuck, self.silent = stuck, [f"{child} for {s:.1f} s" for child, s in silent]

    def close(self) -> None:
        self.socket.close()
        self.table.close()
        self._report.tick(now=True)

    def rows(self) -> list[str]:
        """Format counters and problems, one line each. May be called from any thread."""
        counters, table = self.counters, self.table.counters
        lost = self.socket.drops, self.socket.unsent + self.out.given_up
        late = table["dropped_old"]
        return [
            f"job {self.name}: {self.hello.slots} slots, {self.hello.children} children, datagrams"
            f" to port {self.socket.address[1]}",
            f"  {counters.received:,} packets received, {table['completed']:,} sums,"
            f" {table['repeated']:,} repeated, {table['answered']:,} answered again, {late:,} late,"
            f" {counters.copied:,} copied down, {self.out.sent:,} sent",
            f"  loss: {lost[0]:,} dropped by the socket, {lost[1]:,} not sent;"
            f" {counters.strangers:,} with a wrong tag, {counters.refused + table['mismatched']:,}"
            " refused",
            f"  {shown_stuck(self.stuck)}",
            f"  silent: {', '.join(self.silent) or 'none'}",
        ]


def shown_stuck(stuck: Sequence[StuckSlot]) -> str:
    if not stuck:
        return "stuck slots: none"
    oldest = max(slot.age for slot in stuck) / 1000
    few = "; ".join(
        f"number {slot.number} lacks child {', '.join(map(str, slot.missing))}"
        for slot in stuck[:MOST_NAMED]
    )
    more = ", ..." if len(stuck) > MOST_NAMED else ""
    return f"stuck slots: {len(stuck)}, the oldest for {oldest:.1f} s: {few}{more}"
