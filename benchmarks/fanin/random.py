"""Send millions of packets through a switch whose links lose, repeat and reorder packets, and count
wrong sums. The switch restarts now and then.

Time is counted in ticks. In each tick, all senders that may send a packet send one, and some of the
packets in flight arrive, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np

from benchmarks.common.report import Row
from benchmarks.fanin.transfer import Bench
from roadtrain.switch.packets import (
    HEADER,
    HEADER_NBYTES,
    MAGIC,
    PACKET_NBYTES,
    PAYLOAD_NBYTES,
    VERSION,
    Kind,
)
from roadtrain.switch.protocol.numbered import Heartbeat, NumberedReceiver, NumberedSender
from roadtrain.switch.switch_table import SwitchTable

BATCH = 45  # numbers that a worker sends in one call
SILENT_TICKS = 8  # ticks without progress after which workers send again
WIDTHS = {1: np.int8, 2: np.int16, 4: np.int32}
EXPONENTS_EVERY = 8  # one in so many numbers is of exponents
# of each worker; repeated for more workers
FACTORS = (3, 1_000_003, 77_777, 123_457, 31, 65_537, 999_983, 7)


class Table(Protocol):
    """The table of a switch: a SwitchTable or a PlainTable."""

    def add(self, run: np.ndarray, ok: np.ndarray, out: np.ndarray, child: int) -> int: ...
    def snoop(self, ack: int) -> None: ...


@dataclass(frozen=True)
class Faults:
    """Probabilities of faults: `restart` for each tick of the switch, all others for each packet on
    each link.
    """

    loss: float = 0.01
    repeated: float = 0.01
    late: float = 0.3  # stays in flight for another tick
    very_late: float = 0.002  # arrives once more, some hundred ticks later
    restart: float = 0.001  # per tick: the switch loses its table


@dataclass
class Outcome:
    packets: int = 0  # gradients and sums sent, lost packets included
    sums: int = 0  # accepted by the end, each of another number
    wrong: int = 0  # wrong sums
    resent: int = 0  # by workers
    restarts: int = 0
    seconds: float = 0.0


class Payloads:
    """The payload of each (worker, packet number), from which a sum shows exactly which packets
    were added.
    """

    def __init__(self, workers: int, random: np.random.Generator) -> None:
        self.rows = random.integers(0, 256, (workers, PAYLOAD_NBYTES), np.uint8)

    def width(self, numbers: np.ndarray) -> np.ndarray:
        """Return the bytes of an element in the payload of each packet; 0 if the packet carries
        exponents.
        """
        widths = np.array([1, 2, 4], np.uint8)[numbers // EXPONENTS_EVERY % 3]
        return np.where(numbers % EXPONENTS_EVERY == 0, 0, widths)

    def fill(self, workers: np.ndarray, numbers: np.ndarray, into: np.ndarray) -> None:
        """Write the payload of each (worker, packet number) to a row of `into`, uint8 [count, bytes
        of a payload].
        """
        widths = self.width(numbers)
        for width in np.unique(widths):
            rows = np.flatnonzero(widths == width)
            into[rows] = self._made(int(width), workers[rows], numbers[rows])

    def sums(self, numbers: np.ndarray) -> np.ndarray:
        """Return the right sum for each packet number, uint8 [count, bytes of a payload]."""
        total = np.empty((len(numbers), PAYLOAD_NBYTES), np.uint8)
        widths = self.width(numbers)
        for width in np.unique(widths):
            rows = np.flatnonzero(widths == width)
            total[rows] = self._total(int(width), numbers[rows])
        return total

    def _made(self, width: int, workers: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        dtype = WIDTHS[width] if width else np.uint8
        factors = np.array(FACTORS, np.int64)[workers % len(FACTORS)]
        # otherwise numbers of the same slot would be equal in 8 bits
        scattered = numbers * 2_654_435_761 >> 13
        plus = (scattered * factors).astype(dtype)
        return (self.rows.view(dtype)[workers] + plus[:, None]).view(np.uint8)

    def _total(self, width: int, numbers: np.ndarray) -> np.ndarray:
        each = (
            self._made(width, np.full(len(numbers), worker), numbers)
            for worker in range(len(self.rows))
        )
        total = next(each)
        for part in each:
            if width:
                total = (total.view(WIDTHS[width]) + part.view(WIDTHS[width])).view(np.uint8)
            else:
                total = np.maximum(total, part)
        return total


@dataclass
class Link:
    """The packets in flight on a link. In each tick, some packets arrive."""

    faults: Faults
    random: np.random.Generator
    under_way: np.ndarray  # initially without rows
    very_late: np.ndarray = field(init=False)
    sent: int = 0

    def __post_init__(self) -> None:
        self.very_late = self.under_way

    def send(self, rows: np.ndarray) -> None:
        self.sent += len(rows)
        chance, faults = self.random.random(len(rows)), self.faults
        kept = rows[chance >= faults.loss]
        again = rows[chance >= 1 - faults.repeated]
        late = rows[self.random.random(len(rows)) < faults.very_late]
        self.under_way = np.concatenate([self.under_way, kept, again])
        self.very_late = np.concatenate([self.very_late, late])

    def arrived(self) -> np.ndarray:
        """Remove and return the packets that arrive in this tick, in random order."""
        stays = self.random.random(len(self.under_way)) < self.faults.late
        arriving = self.random.random(len(self.very_late)) < 0.005
        found = np.concatenate([self.under_way[~stays], self.very_late[arriving]])
        self.under_way, self.very_late = self.under_way[stays], self.very_late[~arriving]
        return found[self.random.permutation(len(found))]


class Scene:
    """Workers, a switch, and a server."""

    def __init__(
        self,
        table: Callable[[int, int], Table],
        faults: Faults,
        *,
        seed: int,
        workers: int,
        window: int,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.workers, self.window, self.faults = workers, window, faults
        self.new_table = lambda: table(window, workers)
        self.table = self.new_table()
        self.payloads = Payloads(workers, self.random)
        self.senders = [NumberedSender() for _ in range(workers)]
        self.end = NumberedReceiver(window)
        self.beats = [self.end.heartbeat()]  # the last heartbeats, each of which may arrive
        gradients = np.empty((0, 2), np.int64)  # (worker, number)
        self.up = Link(faults, self.random, gradients)
        self.sums = Link(faults, self.random, np.empty((0, PACKET_NBYTES), np.uint8))
        self.still = 0  # ticks since the end received anything new
        self.outcome = Outcome()

    def tick(self) -> None:
        if self.random.random() < self.faults.restart:
            self.table = self.new_table()
            self.outcome.restarts += 1
        self._send()
        self._switch(self.up.arrived())
        self._end(self.sums.arrived())
        self._beat()

    def finish(self) -> Outcome:
        """Run until the server has received the sums of all packets that were sent, and all workers
        know this.
        """
        last = max(sender.next for sender in self.senders)
        for sender in self.senders:
            sender.ready = last
        ticks = 0
        while not all(sender.idle for sender in self.senders):
            self.tick()
            ticks += 1
            assert ticks < 10_000, f"no progress at {self.end.ack} of {last}"
        self.outcome.packets = self.up.sent + self.sums.sent
        self.outcome.resent = sum(sender.resends for sender in self.senders)
        return self.outcome

    def _send(self) -> None:
        for worker, sender in enumerate(self.senders):
            if self.still > SILENT_TICKS + worker:
                sender.silent()
            for _ in range(self.random.integers(1, 6)):
                numbers = sender.next_numbers(BATCH)
                rows = np.full((len(numbers), 2), worker)
                rows[:, 1] = numbers
                self.up.send(rows)
        if self.still > SILENT_TICKS + self.workers:
            self.still = 0

    def _switch(self, arrived: np.ndarray) -> None:
        count = len(arrived)
        packets = np.zeros((count, PACKET_NBYTES), np.uint8)
        headers = packets[:, :HEADER_NBYTES].view(HEADER)[:, 0]
        workers, numbers = arrived[:, 0], arrived[:, 1]
        widths = self.payloads.width(numbers)
        headers["magic"], headers["version"] = MAGIC, VERSION
        headers["kind"] = np.where(widths == 0, Kind.EXPONENTS, Kind.GRADIENT)
        headers["number"], headers["sender"], headers["width"] = numbers, workers, widths
        self.payloads.fill(workers, numbers, packets[:, HEADER_NBYTES:])
        out = np.empty((count, PACKET_NBYTES), np.uint8)
        ok = np.ones(count, np.bool_)
        made = self.table.add(packets.reshape(-1), ok, out.reshape(-1), 0)
        self.sums.send(out[:made])

    def _end(self, sums: np.ndarray) -> None:
        numbers = sums[:, :HEADER_NBYTES].view(HEADER)[:, 0]["number"].astype(np.int64)
        new = self.end.accept_many(numbers)
        right = (sums[new, HEADER_NBYTES:] == self.payloads.sums(numbers[new])).all(axis=1)
        self.outcome.sums += len(right)
        self.outcome.wrong += int((~right).sum())
        self.still = 0 if new.any() else self.still + 1

    def _beat(self) -> None:
        self.beats = [*self.beats[-4:], self.end.heartbeat()]
        self._deliver_beat(lambda beat: self.table.snoop(beat.ack))
        for sender in self.senders:
            self._deliver_beat(sender.heartbeat)
            sender.check()

    def _deliver_beat(self, receive: Callable[[Heartbeat], None]) -> None:
        if self.random.random() >= self.faults.loss:
            receive(self.beats[self.random.integers(len(self.beats))])


def send_through(
    table: Callable[[int, int], Table],
    packets: int = 10_000_000,
    *,
    seed: int = 0,
    workers: int = 4,
    window: int = 1024,
    faults: Faults = Faults(),
) -> Outcome:
    """Send at least `packets` packets through a switch. `table`: function that builds the switch's
    table from (number of slots, number of children).
    """
    began = perf_counter()
    scene = Scene(table, faults, seed=seed, workers=workers, window=window)
    for sender in scene.senders:
        sender.may_send(packets)
    while scene.up.sent + scene.sums.sent < packets:
        scene.tick()
    outcome = scene.finish()
    outcome.seconds = perf_counter() - began
    return outcome


CASE = "random packets through a switch's table: loss, repetition, reordering, restarts"


def rows(bench: Bench) -> list[Row]:
    """Send millions of random packets through the compiled table, and count the wrong sums."""
    found = send_through(SwitchTable, 100_000 if bench.quick else 10_000_000)
    text = f"of {found.packets:,} packets, {found.sums:,} sums, {found.restarts} restarts"
    rate = found.packets / found.seconds
    metric, goal = f"wrong sums {text}", "0"
    return [
        Row(CASE, metric, "sums", found.wrong, goal=goal, met=found.wrong == 0),
        Row(CASE, "sent again by workers", "packets", found.resent),
        Row(CASE, "this program's packets a second, all on one core", "packets/s", rate),
    ]
