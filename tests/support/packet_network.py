"""A fan-in on virtual time: workers, a switch and the server's node, connected by links with a rate, a
delay, a queue and a loss. Senders, receivers, heartbeats and the switch are the real classes.

    worker w --link--> switch --link--> node     numbers up, summed
    worker w <--link-- switch <--link-- node     numbers down, copied
"""

from __future__ import annotations

import heapq
import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roadtrain.switch.packets import PACKET_NBYTES
from roadtrain.switch.protocol.numbered import NOTHING, Heartbeat, NumberedReceiver
from roadtrain.switch.protocol.switch import Packet, SwitchStateMachine
from roadtrain.switch.protocol.timed_sender import TimedSender
from roadtrain.switch.streams import RUN, SEND_NBYTES, BeatClock
from roadtrain.switch.switch_job import BEAT_S, IDLE_S

FRAME = PACKET_NBYTES + 42  # bytes of a packet on a link
BEAT_NBYTES = 150
POLL_S = 0.008  # hosts handle packets that arrive within this time together
QUEUE_NBYTES = 1 << 19


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), do))

    def run(self, done: Callable[[], bool], most_s: float) -> None:
        while not done():
            for _ in range(200):
                self.now, _, do = heapq.heappop(self._events)
                do()
            assert self.now < most_s, f"not done after {most_s} s"


@dataclass
class Wire:
    """One direction of a link."""

    clock: Clock
    random: random.Random
    rate: float  # bytes/s
    delay_s: float
    queue: float = QUEUE_NBYTES
    loss: float = 0.0
    repeated: float = 0.0
    late_s: float = (
        0.0  # a tenth of the packets is delayed by up to this, so that others overtake them
    )
    cut: Callable[[float], bool] | None = None
    nbytes: int = 0  # bytes that have arrived, without heartbeats
    free_s: float = 0.0  # when all earlier packets have left
    dropped: int = 0

    @property
    def backlog(self) -> float:
        return max(self.free_s - self.clock.now, 0.0) * self.rate

    def send(self, nbytes: int, arrive: Callable[[], None], bulk: bool = True) -> None:
        now, chance = self.clock.now, self.random.random
        free_s = max(self.free_s, now)
        if (free_s - now) * self.rate + nbytes > self.queue:
            self.dropped += 1
            return
        self.free_s = free_s + nbytes / self.rate
        in_s = self.free_s - now + self.delay_s
        if (self.loss and chance() < self.loss) or (self.cut and self.cut(now)):
            return
        self.nbytes += nbytes if bulk else 0
        if self.late_s and chance() < 0.1:
            in_s += self.late_s * chance()
        self.clock.after(in_s, arrive)
        if self.repeated and chance() < self.repeated:
            self.clock.after(in_s, arrive)


class Host:
    """A worker or the node, which sends a stream and receives another."""

    def __init__(self, net: Network) -> None:
        self.net, self.clock = net, net.clock
        self.sender = TimedSender()
        self.receiver = NumberedReceiver(net.window)
        self.beats = BeatClock(net.window)
        self.out: Wire
        self.arrived: list[int] = []
        self.beats_arrived: list[Heartbeat] = []
        self.got: dict[int, Any] = {}
        self.arrived_s = 0.0  # when the last new packet was handled
        self.blocked = False  # whether `pump` is called when the send buffer has room
        self.send: Callable[[int], None]
        self.beat: Callable[[Heartbeat], None]
        self.clock.after(net.random.uniform(0, POLL_S), self.poll)
        self.paused = lambda now: False

    def poll(self) -> None:
        self.clock.after(POLL_S, self.poll)
        if self.paused(self.clock.now):
            return
        for number, data in self.arrived:
            if self.receiver.accept(number):
                assert number not in self.got
                self.got[number], self.arrived_s = data, self.clock.now
        self.beats.received(len(self.arrived))
        self.arrived = []
        if self.beats.due(self.clock.now + 1.0):
            self.beat(self.receiver.heartbeat())
        for beat in self.beats_arrived:
            self.sender.heartbeat(beat, self.clock.now)
        self.beats_arrived = []
        if not self.blocked:
            self.pump()

    def may_send(self, below: int) -> None:
        self.sender.numbers.may_send(below)
        if not self.blocked:
            self.pump()

    def pump(self) -> None:
        """Send numbers in the window as long as the send buffer has room."""
        self.blocked = False
        if self.paused(self.clock.now):
            return
        while self.out.backlog <= SEND_NBYTES:
            numbers = self.sender.next_numbers(RUN, self.clock.now)
            self.net.most_flight = max(self.net.most_flight, self.sender.numbers.in_flight)
            for number in numbers:
                self.send(number)
            if not numbers:
                return
        self.blocked = True
        self.clock.after((self.out.backlog - SEND_NBYTES) / self.out.rate + 1e-6, self.pump)


class Network:
    def __init__(
        self,
        workers: int,
        rate: float,
        *,
        window: int = 2048,
        delay_s: float = 50e-6,
        seed: int = 0,
        queue: float = QUEUE_NBYTES,
        **faults: Any,
    ) -> None:
        self.clock, self.random, self.window = Clock(), random.Random(seed), window
        self.most_flight = 0

        def wire(queue: float = queue) -> Wire:
            return Wire(self.clock, self.random, rate, delay_s, queue, **faults)

        self.table = SwitchStateMachine(window, workers)
        self.up = [wire(1e9) for _ in range(workers)]
        self.down = [wire() for _ in range(workers)]
        self.to_node, self.from_node = wire(), wire(1e9)
        self.node = Host(self)
        self.node.out = self.from_node
        self.node.send = lambda n: self.from_node.send(FRAME, lambda: self._copy(n))
        self.node.beat = lambda b: self.from_node.send(
            BEAT_NBYTES, lambda: self._beat_down(b), False
        )
        self.workers = [Host(self) for _ in range(workers)]
        for w, host in enumerate(self.workers):
            host.out = self.up[w]
            host.send = lambda n, w=w: self.up[w].send(FRAME, lambda: self._sum(w, n))
            host.beat = lambda b, w=w: self.up[w].send(
                BEAT_NBYTES, lambda: self._beat_up(w, b), False
            )
        self._merged, self._sent, self._sent_s = NOTHING, NOTHING, 0.0
        self.clock.after(BEAT_S, self._tick)

    def _sum(self, worker: int, number: int) -> None:
        out = self.table.packet(Packet(number, data_of(worker, number), operator.add, worker))
        if out is not None:
            self.to_node.send(FRAME, lambda: self.node.arrived.append((out.number, out.data)))

    def _copy(self, number: int) -> None:
        for worker, wire in zip(self.workers, self.down):
            wire.send(FRAME, lambda w=worker: w.arrived.append((number, number)))

    def _beat_down(self, beat: Heartbeat) -> None:
        self.table.parent_beat(beat)
        for worker, wire in zip(self.workers, self.down):
            wire.send(BEAT_NBYTES, lambda w=worker: w.beats_arrived.append(beat), False)

    def _beat_up(self, worker: int, beat: Heartbeat) -> None:
        self._merged = self.table.child_beat(worker, beat) or self._merged

    def _tick(self) -> None:
        self.clock.after(BEAT_S, self._tick)
        beat, idle = self._merged, self.clock.now - self._sent_s >= IDLE_S
        if beat != self._sent or (idle and beat != NOTHING):
            self._sent, self._sent_s = beat, self.clock.now
            self.to_node.send(BEAT_NBYTES, lambda: self.node.beats_arrived.append(beat), False)

    def run(self, up: int, down: int, most_s: float = 600.0) -> float:
        """Send numbers in both directions until all are acknowledged, after a few that only measure
        the round trip. Returns the seconds until the last one arrived.
        """
        began = [self._send(number, number, most_s) for number in (1, 2, 3)][-1]
        arrived = self._send(up, down, most_s)
        right = {n: sum(data_of(w, n) for w in range(len(self.workers))) for n in range(up)}
        assert self.node.got == right
        assert all(worker.got == {n: n for n in range(down)} for worker in self.workers)
        return arrived - began

    def _send(self, up: int, down: int, most_s: float) -> float:
        for worker in self.workers:
            worker.may_send(up)
        self.node.may_send(down)
        hosts = [self.node, *self.workers]
        self.clock.run(lambda: all(host.sender.numbers.idle for host in hosts), most_s)
        return max(host.arrived_s for host in hosts)


def data_of(worker: int, number: int) -> int:
    return (number * 1_000_003 + worker * 7919) ** 2
