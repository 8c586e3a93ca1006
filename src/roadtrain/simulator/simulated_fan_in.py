"""The fan-in of one stage on the virtual clock, by the state machine of its end: it says when a
chunk goes to all workers, when a gradient may come, and what its server gets.

    FanInStateMachine -> Up, Broadcast, Grant, SendMaxima, PushRound: each becomes messages and
    packet streams that cost what fan_in_costs.py says

Of each direction there is one stream, whose packets go in the order of their numbers. Nothing is
lost. Who is so late that others go on alone is served over TCP, as in the real run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.intermediary import Give, Up
from roadtrain.simulator.engine import Cost, Engine, Lane, Then, joined
from roadtrain.simulator.fan_in_costs import FanInCosts
from roadtrain.simulator.simulated_server import BlockPieces, SimulatedServer
from roadtrain.switch.protocol.chunk_queue import Announce
from roadtrain.switch.protocol.fan_in import (
    Broadcast,
    ExponentsArrived,
    FanInAction,
    FanInEvent,
    FanInStateMachine,
    GradientArrived,
    Grant,
    PushRound,
    SendMaxima,
    Tick,
)

# buffers of an end where its server has memory to spare: for chunks that it sends, and for sums
COPIES, SUMS = 6, 6
TICK_S = 0.25  # how often the end looks for who is late, while anybody waits for others


# Packets whose numbers follow each other: what sends them, once they can be made
PacketRun = list[Then]


class NumberedStream:
    """Packets that go in the order of their numbers, whatever is ready first."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        # Runs that have not begun, in the order of their numbers; the first is not ready.
        self.runs: deque[PacketRun] = deque()

    def next(self) -> PacketRun:
        """The numbers after all that were given out."""
        self.runs.append([])
        return self.runs[-1]

    def ready(self, run: PacketRun, send: Then) -> None:
        run.append(send)
        while self.runs and self.runs[0]:
            [first] = self.runs.popleft()
            first()

    def check(self) -> None:
        assert not self.runs or not self.runs[0]


class SimulatedFanIn:
    def __init__(self, engine: Engine, name: str, workers: int, blocks: BlockPieces) -> None:
        self.engine, self.name, self.blocks = engine, name, blocks
        self.machine = FanInStateMachine(workers, COPIES, SUMS, self._packets, 0.0)
        self.members: list[SimulatedFanInLink] = []  # as many as workers, or one for all of them
        self.up = NumberedStream(engine.lane(f"{name} up"))
        self.down = engine.lane(f"{name} down")
        # Ticket of ours -> members whose server has not answered: never none.
        self.unanswered: dict[int, int] = {}
        # Chunk -> of each worker what is to be done once its gradients are at the server, in order.
        self.pushed: dict[int, list[deque[Then]]] = {}
        self.granted: dict[tuple[int, int], frozenset[int]] = {}  # round -> whose gradients
        self.looking = False  # whether a look for who is late will come

    @property
    def workers(self) -> int:
        return self.machine.workers

    def join(self, member: SimulatedFanInLink) -> int:
        """Returns its number. All join before the first step."""
        self.members.append(member)
        return len(self.members) - 1

    # what a member says, over TCP

    def pull(self, member: int, pull: m.Pull) -> None:
        self._tell([replace(pull, worker=worker) for worker in self._workers(member)])

    def announce(self, member: int, chunk: int, fresh: bool, then: Then) -> None:
        """`then`: the server has the gradient."""
        waiting = self.pushed.setdefault(chunk, [deque() for _ in range(self.workers)])
        waiting[self._workers(member)[0]].append(then)
        self._tell([Announce(chunk, fresh, worker) for worker in self._workers(member)])

    def close(self, member: int, chunk: int, step: int) -> None:
        if self.workers > 1:
            self._tell([m.Close(chunk, step, worker) for worker in self._workers(member)])

    def ask_update(self, member: int, update: m.ApplyUpdate) -> None:
        self._tell([replace(update, worker=worker) for worker in self._workers(member)])

    def answered(self, ticket: int) -> None:
        """By one member's server."""
        self.unanswered[ticket] -= 1
        if not self.unanswered[ticket]:
            del self.unanswered[ticket]
            self._handle(m.Pulled(ticket, 0))

    def _workers(self, member: int) -> range:
        """That a member stands for."""
        if len(self.members) == self.workers:
            return range(member, member + 1)
        assert len(self.members) == 1
        return range(self.workers)

    def _tell(self, events: Sequence[FanInEvent]) -> None:
        """A message of each worker travels."""

        def came() -> None:
            if len(self.members) > 1:  # else all are there at once
                self._handle(Tick(self.engine.now))
            for event in events:
                self._handle(event)
            self._look_later()

        self._after(self._costs[0].message_s, came)

    def _look_later(self) -> None:
        waiting = self.machine.alone or self.machine.partly
        if waiting and not self.looking:
            self.looking = True
            self._after(TICK_S, self._look)

    def _look(self) -> None:
        self.looking = False
        self._handle(Tick(self.engine.now))
        self._look_later()

    # what the machine says

    def _handle(self, event: FanInEvent) -> None:
        for action in self.machine.handle(event):
            self._carry_out(action)

    def _carry_out(self, action: FanInAction) -> None:
        match action:
            case Up(message):
                self._to_server(message)
            case Broadcast():
                self._broadcast(action)
            case Give():
                self._give(action)
            case Grant():
                self._granted(action)
            case SendMaxima():
                self._send_maxima(action)
            case PushRound():
                self._push(action)

    def _to_server(self, message: m.WorkerMessage) -> None:
        """To each member's part of it. There they are one worker, whose gradient is whole when it
        comes: Close says nothing new."""
        if isinstance(message, m.Pull):
            self.unanswered[message.ticket] = len(self.members)
        for member in self.members if not isinstance(message, m.Close) else ():
            member.server.tell(message)
            if isinstance(message, m.ApplyUpdate):
                member.update_reached(message.step)

    def _broadcast(self, action: Broadcast) -> None:
        params = self.blocks.params_of(action.pulls[0].chunk)

        def arrived() -> None:
            for number, member in enumerate(self.members):
                member.pulled(action.pulls[self._workers(number)[0]].ticket)
            self._after(self._costs[0].acknowledged_s, partial(self._handle, m.Done(action)))

        self._stream("Fetch", [c.parameters(params) for c in self._costs], self.down, arrived)

    def _give(self, action: Give) -> None:
        """To one worker, over TCP."""
        pull, member = action.pull, self.members[action.pull.worker]

        def arrived() -> None:
            member.pulled(pull.ticket)
            self._handle(m.Done(action))

        cost = member.costs.alone(self.blocks.params_of(pull.chunk))
        self.engine.task("Fetch", cost.of_bytes, then=arrived, where=self.name)

    def _granted(self, action: Grant) -> None:
        """All send exponents once they know; where blocks have a fixed scale there are none."""
        params, run = self.blocks.params_of(action.chunk), self.up.next()
        self.granted[action.chunk, action.round] = action.announced
        came = partial(self._handle, ExponentsArrived(action.chunk, action.round))
        costs = [one.exponents(params) for one in self._costs]
        send = partial(self._stream, "Push", costs, self.up.lane, came)
        self._after(self._costs[0].message_s, partial(self.up.ready, run, send))

    def _send_maxima(self, action: SendMaxima) -> None:
        params, run = self.blocks.params_of(action.chunk), self.up.next()
        came = partial(self._handle, GradientArrived(action.chunk, action.round))
        gradients = [one.gradients(params) for one in self._costs]
        send = partial(self._stream, "Push", gradients, self.up.lane, came)
        maxima = [one.maxima(params) for one in self._costs]
        self._stream("Fetch", maxima, self.down, partial(self.up.ready, run, send))

    def _push(self, action: PushRound) -> None:
        """The server gets the sum: of each member its part, where the member has a gradient in it.
        What follows goes behind it; the buffer is free once it is copied."""
        announced = self.granted.pop((action.chunk, action.round))
        waiting = self.pushed[action.chunk]
        for then in [waiting[w].popleft() for w in sorted(announced) if waiting[w]]:
            then()
        params = self.blocks.params_of(action.chunk)
        cost = joined([one.taken(params) for one in self._costs])
        done = partial(self._handle, m.Done(action))
        self.engine.task("Push", cost.of_bytes, then=done, where=self.name)

    @property
    def _costs(self) -> list[FanInCosts]:
        return [member.costs for member in self.members]

    def _packets(self, chunk: int) -> tuple[int, int]:
        """Of its exponents and of its gradient."""
        params, costs = self.blocks.params_of(chunk), self._costs[0]
        return costs.exponent_packets(params), costs.gradient_packets(params)

    # what takes time

    def _stream(self, stage: str, costs: Sequence[Cost], lane: Lane, then: Then) -> None:
        """Packets to or from all. `then`: the last of them has come."""
        cost = joined(costs)._replace(max_rate=costs[0].max_rate)
        if not cost.work:
            then()
            return
        came = partial(self._after, self._costs[0].latency, then)
        self.engine.task(stage, cost.of_bytes, lane=lane, then=came, where=self.name)

    def _after(self, seconds: float, then: Then) -> None:
        self.engine.task("Message", Cost(0.0, (), seconds), then=then, where=self.name)

    def check(self) -> None:
        """Assert every invariant."""
        self.machine.check()
        self.up.check()
        assert len(self.members) in (1, self.workers)
        assert all(count > 0 for count in self.unanswered.values())


class SimulatedFanInLink:
    """One worker's way to its server through switches, or the way of all that do the same.
    `server`: this worker's part of what the one server does. `pulled`: a pull of this ticket is
    answered; `settled`: all updates that were asked for in a step have reached the server.
    """

    def __init__(
        self,
        end: SimulatedFanIn,
        costs: FanInCosts,
        server: SimulatedServer,
        pulled: Callable[[int], None],
        settled: Callable[[int], None],
    ) -> None:
        self.end, self.costs, self.server = end, costs, server
        self.pulled, self._settled = pulled, settled
        self.number = end.join(self)
        # Step -> updates that were asked for and have not reached the server; never 0.
        self.asking: Counter[int] = Counter()
        self.asked = 0  # the last step whose updates were all asked for
        # Of later steps than the one after it, what is said of gradients; in order.
        self.early: deque[tuple[int, Then]] = deque()

    def pull(self, pull: m.Pull) -> None:
        self.end.pull(self.number, pull)

    def push(self, step: int, chunk: int, fresh: bool, then: Then) -> None:
        """`then`: the server has it."""
        self._in_turn(step, partial(self.end.announce, self.number, chunk, fresh, then))

    def close(self, step: int, chunk: int) -> None:
        """Its gradient is whole."""
        self._in_turn(step, partial(self.end.close, self.number, chunk, step))

    def ask_update(self, update: m.ApplyUpdate) -> None:
        self.asking[update.step] += 1
        self._in_turn(update.step, partial(self.end.ask_update, self.number, update))

    def all_asked(self, step: int) -> None:
        """No more updates in it: what was pushed for the next one may go."""
        self.asked = step
        while self.early and self.early[0][0] <= step + 1:
            self.early.popleft()[1]()

    def _in_turn(self, step: int, say: Then) -> None:
        """A worker says nothing of a gradient before it has asked for the updates of the step
        before."""
        if step <= self.asked + 1:
            say()
        else:
            self.early.append((step, say))

    def update_reached(self, step: int) -> None:
        self.asking[step] -= 1
        if not self.asking[step]:
            del self.asking[step]
            self._settled(step)

    def settled(self, step: int) -> bool:
        return step not in self.asking

    def check(self) -> None:
        """Assert every invariant."""
        assert all(count > 0 for count in self.asking.values())
        assert all(step > self.asked + 1 for step, _ in self.early)
