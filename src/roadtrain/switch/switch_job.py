"""SwitchJob: what a switch does for one job. Run by run: a constant number of calls, none for
each packet.

    from children   GRADIENT EXPONENTS          --> SwitchTable --> sums, sealed --> parent
                    PARAMETER_BEAT              --> Children    --> merged        --> parent
    from the parent PARAMETERS MAXIMA           --> as they are --> every child
                    GRADIENT_BEAT               --> its ack read, as it is --> every child

Sun et al. (LuWu), section 3.2.3 and appendix A; switch/protocol/switch.py is what it does, of which
the heartbeats run here and the sums in their compiled form. A packet without the job's tag changes
nothing and is counted. Of one thread, the packet loop's; others only read. Does NOT wait or know of
other jobs.
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
from roadtrain.switch.protocol.numbered import NOTHING, Heartbeat, heard
from roadtrain.switch.protocol.switch import SwitchStateMachine
from roadtrain.switch.streams import Batch, DatagramRun, beat_packet, beats_of, read_runs
from roadtrain.switch.switch_frames import SwitchHello
from roadtrain.switch.switch_table import StuckSlot, Table
from roadtrain.transport.listener import LineLimit, Report
from roadtrain.transport.tcp import Address

BEAT_S = 0.004  # between two merged heartbeats while what they say changes
IDLE_S = 0.25  # between two while it does not
LOOK_S = 0.25  # between two looks at who is silent and what is stuck
STUCK_MS = 1000  # after which a sum that lacks packets is named
MOST_NAMED = 4  # slots and children in one line
SILENT_S = 1.0  # after which a child is named
UNKNOWN_RANK = 0xFFFFFFFF  # in a heartbeat: the most silent child was never heard
MOST_MS = 0xFFFFFFFF
WAIT_S = 1.0  # that packets wait for the kernel
FULL = 132  # bulk packets that are handled together
MOST = FULL + RECEIVE_NBYTES // PACKET_NBYTES  # packets of a run
READ_NBYTES = FULL * PACKET_NBYTES + RECEIVE_NBYTES

# What becomes of a packet, by its kind
_NOTHING, _SUMMED, _COPIED, _HEARD = range(4)
_WAY = np.full(256, _NOTHING, np.uint8)
_WAY[[Kind.GRADIENT, Kind.EXPONENTS]] = _SUMMED
_WAY[[Kind.PARAMETERS, Kind.MAXIMA, Kind.GRADIENT_BEAT]] = _COPIED
_WAY[Kind.PARAMETER_BEAT] = _HEARD


class Buffers:
    """Memory of the packet loop, for whichever job it serves."""

    def __init__(self) -> None:
        self.came = np.zeros(READ_NBYTES, np.uint8)
        self.sums = np.zeros(MOST * PACKET_NBYTES, np.uint8)


@dataclass(slots=True)
class Counters:
    """Packets, since the job began. Those of sums are the table's, of sending SwitchOutgoing's."""

    came: int = 0  # with the job's tag
    strangers: int = 0  # without it
    refused: int = 0  # with it, from where or of a form that this switch takes none
    copied: int = 0  # down, each counted once


@dataclass(slots=True)
class Child:
    number: int
    heard: float  # when its last heartbeat came; before the first: when the job began
    address: Address | None = None  # where its datagrams go
    rank: int = UNKNOWN_RANK  # of the most silent worker below it, as it said last
    below_ms: int = 0  # how long that one had been silent then

    def silent_ms(self, now: float) -> int:
        """Of the most silent worker below it, or of itself."""
        return min(int((now - self.heard) * 1000) + self.below_ms, MOST_MS)

    def __str__(self) -> str:
        """For people."""
        where = "never heard" if self.address is None else "{}:{}".format(*self.address)
        worker = "" if self.rank == UNKNOWN_RANK else f"worker {self.rank}, "
        return f"child {self.number} ({worker}{where})"


class Children:
    """Where a switch's children are, what they have (the machine knows it), and which are silent.

    A child is a worker, or a switch below with all its workers. Where it is, is learned from its
    heartbeats, whose tags were verified. One that was recorded and comes again from elsewhere moves
    a child's address only where it says more than the child did, or the child has been silent.

    Invariants: `addresses` are those of all children whose
    address is known, each once; `merged` is what all have, NOTHING before all have spoken."""

    def __init__(self, machine: SwitchStateMachine, now: float) -> None:
        self._machine = machine
        self.all = [Child(number, now) for number in range(machine.children)]
        self.addresses: list[Address] = []
        self.merged = NOTHING

    def heard(
        self, number: int, beat: Heartbeat, source: Address, below: tuple[int, int], now: float
    ) -> bool:
        """A heartbeat of a child came. below: milliseconds and rank of the most silent worker that
        it speaks for. Returns whether it counts."""
        child, before = self.all[number], self._machine.beats.get(number)
        if source != child.address:
            news = before is None or heard(before, beat) != before
            if not news and now - child.heard <= SILENT_S:
                return False
            child.address = source
            found = [one.address for one in self.all if one.address is not None]
            self.addresses = list(dict.fromkeys(found))
        self.merged = self._machine.child_beat(number, beat) or self.merged
        child.heard, (child.below_ms, child.rank) = now, below
        return True

    def most_silent(self, now: float) -> tuple[int, int]:
        """Milliseconds and rank."""
        child = max(self.all, key=lambda one: one.silent_ms(now))
        return child.silent_ms(now), child.rank

    def silent(self, now: float) -> list[tuple[Child, float]]:
        """Children that have been silent for more than SILENT_S, or speak for a worker that has,
        and for how many seconds."""
        found = [(one, one.silent_ms(now) / 1000) for one in self.all]
        return [(one, seconds) for one, seconds in found if seconds > SILENT_S]


class SwitchOutgoing:
    """Sends for one job, without ever waiting. One thread calls it.

    The kernel takes no more of a job whose links are slower than what comes for it. What is left
    over waits here, the job is not read meanwhile (so it fills its own socket, nobody else's), and
    goes when the kernel has room again; what waits for longer than WAIT_S is lost, like a packet in
    a full queue.

    Invariant: what waits is in the order in which it was to be sent; of each run
    somebody is left that it goes to."""

    def __init__(self, socket: DatagramSocket) -> None:
        self._socket = socket
        self._left: deque[tuple[np.ndarray, int, Sequence[Address]]] = deque()
        self._since = 0.0  # when the first of them began to wait
        self.sent = 0  # packets
        self.given_up = 0  # packets that waited for too long

    @property
    def waits(self) -> bool:
        return bool(self._left)

    def send(self, packets: np.ndarray, segment: int, to: Sequence[Address]) -> None:
        """A run of packets of `segment` bytes, to each of `to`. packets: uint8, its owner's again
        when this returns."""
        gone = 0 if self._left else self._send(packets, segment, to)
        if gone == len(to):
            return
        if not self._left:
            self._since = time.monotonic()
        self._left.append((packets.copy(), segment, to[gone:]))

    def go_on(self) -> None:
        """Send of what waits as much as the kernel takes."""
        while self._left:
            packets, segment, to = self._left.popleft()
            gone = self._send(packets, segment, to)
            if gone < len(to):
                self._left.appendleft((packets, segment, to[gone:]))
                break
            self._since = time.monotonic()
        if self._left and time.monotonic() - self._since > WAIT_S:
            self.given_up += sum(run.size // each * len(to) for run, each, to in self._left)
            self._left.clear()

    def _send(self, packets: np.ndarray, segment: int, to: Sequence[Address]) -> int:
        """To how many of `to` it went."""
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
        """parent: of `hello`, in numbers. Owns `socket` and `table`."""
        self.hello, self._parent, self.socket, self.table = hello, parent, socket, table
        self._key, self._report = key, LineLimit(report)
        machine = SwitchStateMachine(hello.slots, hello.children, hello.child)
        self.children = Children(machine, time.monotonic())
        self.counters = Counters()
        # What hinders it: sums that have lacked packets for more than STUCK_MS; children that are
        # not heard, and since when.
        self.stuck, self.silent = list[StuckSlot](), list[str]()
        self.out = SwitchOutgoing(socket)
        self._said, self._said_at = NOTHING, 0.0  # what the parent was told last, and when
        self._looked_at = 0.0
        self._named = set[int]()  # children that were said to be silent, and were not heard since
        self._said_elsewhere = False  # that packets from above came from elsewhere

    @property
    def name(self) -> str:
        """For people."""
        return self.hello.session

    def take(self, buffers: Buffers) -> bool:
        """What has come, about 32 packets; False where nothing has."""
        runs, _ = read_runs(self.socket, buffers.came)
        for run in runs:
            self._take_run(run, buffers.sums)
        return bool(runs)

    def _take_run(self, run: DatagramRun, sums: np.ndarray) -> None:
        ok = packets.verify(run.buffer, run.segment, run.count, self._key, self.hello.job)
        right = int(np.count_nonzero(ok))
        self.counters.came += right
        self.counters.strangers += run.count - right
        if not right:
            return
        headers = packets.headers(run.buffer, run.segment, run.count)
        way = _WAY[headers["kind"]]
        way[~ok] = _NOTHING
        _, summed, copied, beats = np.bincount(way, minlength=4).tolist()
        self.counters.refused += right - summed - copied - beats
        if summed:
            self._sum(run, way == _SUMMED, sums)
        if copied:
            self._copy(run, headers, way == _COPIED)
        if beats:
            ok, kind = way == _HEARD, Kind.PARAMETER_BEAT
            self._hear(Batch(run.buffer, run.segment, run.sources, kind, ok, headers))

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
        """Down, with the tags that they have, what the parent's host has sent."""
        host = self._parent[0]
        above = np.fromiter((source[0] == host for source in run.sources), np.bool_, run.count)
        taken = there & above
        count = int(np.count_nonzero(taken))
        if not taken.all():
            self._refuse(run, there & ~above)
        if not count:
            return
        beats = headers["number"][taken & (headers["kind"] == Kind.GRADIENT_BEAT)]
        if beats.size:
            self.table.snoop(int(beats.max()))
        copied = run.buffer
        if count < run.count:
            copied = copied.reshape(run.count, run.segment)[taken].reshape(-1)
        self.counters.copied += count
        if self.children.addresses:
            self.out.send(copied, run.segment, self.children.addresses)

    def _refuse(self, run: DatagramRun, there: np.ndarray) -> None:
        """What goes down and has not come from the parent's host; the first time, says so: a parent
        with several addresses may send from one by which this switch does not know it."""
        at = np.flatnonzero(there)
        self.counters.refused += at.size
        if at.size and not self._said_elsewhere:
            self._said_elsewhere = True
            self._report(
                f"job {self.name}: packets for the children came from {run.sources[at[0]][0]}, the"
                f" parent is {self._parent[0]}: they are dropped"
            )

    def _hear(self, batch: Batch) -> None:
        now = time.monotonic()
        for beat, header, source in beats_of(batch):
            child = int(header["sender"]) - self.hello.first
            below = int(header["a"]), int(header["b"])
            known = 0 <= child < self.hello.children
            if not known or not self.children.heard(child, beat, source, below, now):
                self.counters.refused += 1

    def tick(self, now: float) -> None:
        """Now and then: what waits, heartbeats, who is silent."""
        self.table.now = int(now * 1000)
        if self.out.waits:
            self.out.go_on()
        beat, since = self.children.merged, now - self._said_at
        if since >= IDLE_S or (since >= BEAT_S and beat != self._said):
            self._say(beat, now)
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look(now)

    def _say(self, beat: Heartbeat, now: float) -> None:
        """To the parent, what all children have."""
        self._said, self._said_at = beat, now
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

    def _look(self, now: float) -> None:
        self._report.tick()
        stuck = self.table.stuck(STUCK_MS)
        silent = self.children.silent(now)
        before, self._named = self._named, {child.number for child, _ in silent}
        for child, seconds in silent:
            if child.number not in before:
                self._report(f"job {self.name}: {child} has been silent for {seconds:.1f} s")
        for number in sorted(before - self._named):
            self._report(f"job {self.name}: {self.children.all[number]} is heard again")
        if stuck and not self.stuck:
            self._report(f"job {self.name}: {shown_stuck(stuck)}")
        self.stuck, self.silent = stuck, [f"{child} for {s:.1f} s" for child, s in silent]

    def close(self) -> None:
        self.socket.close()
        self.table.close()
        self._report.tick(now=True)

    def rows(self) -> list[str]:
        """For people: what it has done, and what hinders it. From any thread."""
        counters, table = self.counters, self.table.counters
        lost = self.socket.drops, self.socket.unsent + self.out.given_up
        late = table["dropped_old"]
        return [
            f"job {self.name}: {self.hello.slots} slots, {self.hello.children} children, datagrams"
            f" to port {self.socket.address[1]}",
            f"  {counters.came:,} packets came, {table['completed']:,} sums,"
            f" {table['repeated']:,} repeated, {table['answered']:,} answered again, {late:,} late,"
            f" {counters.copied:,} copied down, {self.out.sent:,} sent",
            f"  loss: {lost[0]:,} dropped by the socket, {lost[1]:,} not sent;"
            f" {counters.strangers:,} of strangers, {counters.refused + table['mismatched']:,}"
            " refused",
            f"  {shown_stuck(self.stuck)}",
            f"  silent: {', '.join(self.silent) or 'nobody'}",
        ]


def shown_stuck(stuck: Sequence[StuckSlot]) -> str:
    """For people."""
    if not stuck:
        return "stuck slots: none"
    oldest = max(one.age for one in stuck) / 1000
    few = "; ".join(
        f"number {one.number} lacks child {', '.join(map(str, one.missing))}"
        for one in stuck[:MOST_NAMED]
    )
    more = ", ..." if len(stuck) > MOST_NAMED else ""
    return f"stuck slots: {len(stuck)}, the oldest for {oldest:.1f} s: {few}{more}"
