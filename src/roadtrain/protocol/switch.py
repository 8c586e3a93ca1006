"""What a switch does that sums gradients and multicasts parameters; the ends' go-back-n. Pure:
packets in, packets out.

Sun et al. (LuWu), section 3.2.3: gradient packets carry a running number; an entry of the switch's
window adds up those of all workers and sends the sum on; heartbeats carry what is acknowledged and
how far a receiver's buffer reaches, and those of workers are merged to their minimum. As printed,
an entry is cleared when it is complete though resends are answered from it, and a late resend can
poison the number that takes its slot (L10 in the paper's inconsistencies). Here an entry keeps its
number and its sum until a greater number takes the slot, and the switch reads the acknowledgements
that pass, so that a late packet is dropped. `data` is opaque but for `add`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Packet:
    number: int  # running, one sequence each for parameters and for gradients
    data: Any
    worker: int = 0


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    ack: int  # the next number that its sender expects
    credit: int  # the greatest number that its buffer takes
    worker: int = 0


@dataclass(slots=True)
class Aggregate:
    """One number that took the slot: the sum of its packets."""

    number: int
    came: set[int] = field(default_factory=set)  # workers whose packet is in the sum, each once
    data: Any = None  # their sum
    done: bool = False  # all have come


class SwitchStateMachine:
    def __init__(
        self, workers: int, window: int, depth: int, add: Callable[[Any, Any], Any]
    ) -> None:
        assert depth <= window, "the receiver's buffer must not exceed the window"
        self.workers, self.window, self.add = workers, window, add
        # Slot -> the greatest number that took it: numbers that are equal modulo the window share
        # one.
        self.table: dict[int, Aggregate] = {}
        self.acked = 0  # the server has all gradients below it
        self.beats = [
            WorkerHeartbeat(0, depth - 1, worker) for worker in range(workers)
        ]  # the last ones

    def parameters(self, packet: Packet) -> list[tuple[int, Packet]]:
        """(worker, packet) of a packet of parameters: one for each."""
        return [(worker, packet) for worker in range(self.workers)]

    def gradient(self, packet: Packet) -> list[Packet]:
        """What goes on to the server: the sum, once all have come, or again for a resend."""
        number, slot = packet.number, packet.number % self.window
        entry = self.table.get(slot)
        if number < self.acked or (entry is not None and number < entry.number):
            return []
        if entry is None or number > entry.number:
            entry = self.table[slot] = Aggregate(number)
        if entry.done:
            return [Packet(number, entry.data)]
        if packet.worker in entry.came:
            return []
        entry.data = packet.data if not entry.came else self.add(entry.data, packet.data)
        entry.came.add(packet.worker)
        entry.done = len(entry.came) == self.workers
        return [Packet(number, entry.data)] if entry.done else []

    def from_server(self, beat: WorkerHeartbeat) -> list[tuple[int, WorkerHeartbeat]]:
        """A heartbeat about gradients, to every worker."""
        self.acked = max(self.acked, beat.ack)
        return [(worker, beat) for worker in range(self.workers)]

    def from_worker(self, beat: WorkerHeartbeat) -> WorkerHeartbeat:
        """A heartbeat about parameters: the minimum of all workers' goes to the server."""
        last = self.beats[beat.worker]
        self.beats[beat.worker] = WorkerHeartbeat(
            max(last.ack, beat.ack), max(last.credit, beat.credit), beat.worker
        )
        return WorkerHeartbeat(min(b.ack for b in self.beats), min(b.credit for b in self.beats))

    def check(self) -> None:
        """Assert every invariant: what is not done lacks a worker, nothing acknowledged is summed
        again."""
        for slot, entry in self.table.items():
            assert slot == entry.number % self.window
            assert entry.came and entry.done == (len(entry.came) == self.workers)
            assert entry.done or entry.number >= self.acked
        assert [beat.worker for beat in self.beats] == list(range(self.workers))


class Sender:
    """One end's go-back-n: it sends up to its credit, and from the acknowledged number again
    when told that time has passed without progress."""

    def __init__(self, depth: int) -> None:
        self.next, self.ack, self.credit = 0, 0, depth - 1

    def ready(self, until: int) -> list[int]:
        """Numbers to send now, of those below `until`."""
        stop = min(until, self.credit + 1)
        out = list(range(self.next, stop))
        self.next = max(self.next, stop)
        return out

    def beat(self, beat: WorkerHeartbeat) -> None:
        self.ack, self.credit = max(self.ack, beat.ack), max(self.credit, beat.credit)
        self.next = max(self.next, self.ack)

    def silent(self) -> None:
        """No progress for as long as a loss takes to be believed."""
        self.next = self.ack


class SwitchReceiver:
    """The other end: takes numbers in order, drops others. `depth`: packets that its buffer
    holds."""

    def __init__(self, depth: int, worker: int = 0) -> None:
        self.ack, self.consumed, self.depth, self.worker = 0, 0, depth, worker

    def packet(self, number: int) -> bool:
        """Whether it is the next one, to be kept."""
        if number != self.ack or number - self.consumed >= self.depth:
            return False
        self.ack += 1
        return True

    def freed(self, count: int) -> None:
        self.consumed += count

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(self.ack, self.consumed + self.depth - 1, self.worker)
