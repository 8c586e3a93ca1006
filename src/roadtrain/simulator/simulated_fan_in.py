"""Simulate the fan-in of one stage with the real state machine of the server's process. The state
machine decides when a chunk is sent to all workers, when workers may send a gradient, and which
messages the server receives.

    FanInStateMachine -> Up, Broadcast, Grant, SendMaxima, PushRound: each becomes messages and
    packet streams with the costs of fan_in_costs.py

Each direction (to the server, to the workers) is one stream, in the order of sequence numbers. No
packet is lost. If the other workers continue without a late worker, the late worker is served over
TCP, as in a real run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.blocks import divided
from roadtrain.servers.protocol.intermediary import Give, Up
from roadtrain.simulator.engine import Cost, Engine, Lane, Then, joined
from roadtrain.simulator.fan_in_costs import FanInCosts
from roadtrain.simulator.simulated_server import BlockPieces, SimulatedServer
from roadtrain.switch.protocol import fan_in
from roadtrain.switch.protocol.chunk_queue import Announce

# number of an end's buffers for chunks to send, and for sums; the server has enough memory for them
COPIES, SUMS = 6, 6
TICK_S = 0.25  # seconds between checks for late workers, while a worker waits for others


# a run of packets with consecutive sequence numbers: an empty list until the packets are ready,
# then a list with one function that sends them
PacketRun = list[Then]


class NumberedStream:
    """A stream that sends packets in the order of their sequence numbers."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        # runs that are not sent yet, in order; the first of them is not ready
        self.runs: deque[PacketRun] = deque()

    def next(self) -> PacketRun:
        """Reserve sequence numbers for a run of packets after all earlier runs."""
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
    """The fan-in of one stage on the virtual clock. `blocks`: the division of the stage's blocks
    into chunks. A *member* of the fan-in is a link from one worker, or the only link if all workers
    are simulated as one."""

    def __init__(self, engine: Engine, name: str, workers: int, blocks: BlockPieces) -> None:
        self.engine, self.name, self.blocks = engine, name, blocks
        self.machine = fan_in.FanInStateMachine(workers, COPIES, SUMS, self._packets, 0.0)
        # one link per worker, or a single link for all workers
        self.members: list[SimulatedFanInLink] = []
        self.up = NumberedStream(engine.lane(f"{name} up"))
        self.down = engine.lane(f"{name} down")
        # (ticket, chunk) of a pull by the end -> number of members whose server has not answered;
        # at least 1
        self.unanswered: dict[tuple[int, int], int] = {}
        # chunk -> for each worker, callbacks in order, each for when one of its gradients has
        # reached the server
        self.pushed: dict[int, list[deque[Then]]] = {}
        # (chunk, round) -> the workers that take part in the round
        self.granted: dict[tuple[int, int], frozenset[int]] = {}
        self.tick_pending = False  # whether a check for late workers is scheduled

    @property
    def workers(self) -> int:
        return self.machine.workers

    def join(self, member: SimulatedFanInLink) -> int:
        """Add the link of a member before the first step, and return the member's number."""
        self.members.append(member)
        return len(self.members) - 1

    # messages of a member, over TCP

    def announce(self, member: int, fresh: bool, arrivals: Mapping[int, Then]) -> None:
        """Announce gradients of a member's workers. `fresh`: whether they are the first ones of the
        step. `arrivals`: for each chunk, called when the server has received its gradient."""
        workers = self._workers(member)
        for chunk, then in arrivals.items():
            waiting = self.pushed.setdefault(chunk, [deque() for _ in range(self.workers)])
            waiting[workers[0]].append(then)
        self._send([Announce(chunk, fresh, worker) for chunk in arrivals for worker in workers])

    def say(self, member: int, message: m.BlockMessage) -> None:
        """Send a message from each of a member's workers."""
        events = divided(message, self.blocks.blocks)
        workers = self._workers(member)
        self._send([replace(event, worker=worker) for event in events for worker in workers])

    def answered(self, answer: m.Pulled) -> None:
        """Count an answer to a pull by the end. The pull is answered once the server has answered
        for every member."""
        key = answer.ticket, answer.chunk
        self.unanswered[key] -= 1
        if not self.unanswered[key]:
            del self.unanswered[key]
            self._handle(answer)

    def _workers(self, member: int) -> range:
        """Return the numbers of the workers that a member stands for."""
        if len(self.members) == self.workers:
            return range(member, member + 1)
        assert len(self.members) == 1
        return range(self.workers)

    def _send(self, events: Sequence[fan_in.FanInEvent]) -> None:
        """Send messages from workers to the fan-in, one from each worker."""

        def arrived() -> None:
            # with a single member, all workers send at the same time, so none is late
            if len(self.members) > 1:
                self._handle(fan_in.Tick(self.engine.now))
            for event in events:
                self._handle(event)
            self._schedule_tick()

        self._after(self._costs[0].message_s, arrived)

    def _schedule_tick(self) -> None:
        waiting = self.machine.alone or self.machine.partly
        if waiting and not self.tick_pending:
            self.tick_pending = True
            self._after(TICK_S, self._tick)

    def _tick(self) -> None:
        self.tick_pending = False
        self._handle(fan_in.Tick(self.engine.now))
        self._schedule_tick()

    # actions of the state machine

    def _handle(self, event: fan_in.FanInEvent) -> None:
        for action in self.machine.handle(event):
            self._carry_out(action)

    def _carry_out(self, action: fan_in.FanInAction) -> None:
        match action:
            case Up(message):
                self._to_server(message)
            case fan_in.Broadcast():
                self._broadcast(action)
            case Give():
                self._give(action)
            case fan_in.Grant():
                self._granted(action)
            case fan_in.SendMaxima():
                self._send_maxima(action)
            case fan_in.PushRound():
                self._push(action)

    def _to_server(self, message: m.WorkerMessage) -> None:
        """Send a message from the fan-in to each member's simulated server."""
        if isinstance(message, m.Pull):
            self.unanswered[message.ticket, message.chunk] = len(self.members)
        for member in self.members if not isinstance(message, m.Close) else ():
            member.server.handle(message)
            if isinstance(message, m.ApplyUpdate):
                member.update_reached(message.step)

    def _broadcast(self, action: fan_in.Broadcast) -> None:
        params = self.blocks.params_of(action.pulls[0].chunk)

        def arrived() -> None:
            for number, member in enumerate(self.members):
                member.pulled(action.pulls[self._workers(number)[0]].ticket)
            self._after(self._costs[0].acknowledged_s, partial(self._handle, m.Done(action)))

        self._stream("Fetch", [c.parameters(params) for c in self._costs], self.down, arrived)

    def _give(self, action: Give) -> None:
        """Send parameters to one worker, over TCP."""
        pull, member = action.pull, self.members[action.pull.worker]

        def arrived() -> None:
            member.pulled(pull.ticket)
            self._handle(m.Done(action))

        cost = member.costs.alone(self.blocks.params_of(pull.chunk))
        self.engine.task("Fetch", cost.of_bytes, then=arrived, where=self.name)

    def _granted(self, action: fan_in.Grant) -> None:
        """Let all workers send their exponents once the grant has arrived. With a fixed scale there
        are no exponents, and the stream takes no time."""
        params, run = self.blocks.params_of(action.chunk), self.up.next()
        self.granted[action.chunk, action.round] = action.announced
        arrived = partial(self._handle, fan_in.ExponentsArrived(action.chunk, action.round))
        costs = [own.exponents(params) for own in self._costs]
        send = partial(self._stream, "Push", costs, self.up.lane, arrived)
        self._after(self._costs[0].message_s, partial(self.up.ready, run, send))

    def _send_maxima(self, action: fan_in.SendMaxima) -> None:
        params, run = self.blocks.params_of(action.chunk), self.up.next()
        arrived = partial(self._handle, fan_in.GradientArrived(action.chunk, action.round))
        gradients = [own.gradients(params) for own in self._costs]
        send = partial(self._stream, "Push", gradients, self.up.lane, arrived)
        maxima = [own.maxima(params) for own in self._costs]
        self._stream("Fetch", maxima, self.down, partial(self.up.ready, run, send))

    def _push(self, action: fan_in.PushRound) -> None:
        """Give a sum to the server at once. The buffer of the sum becomes free after the time for
        copying it."""
        announced = self.granted.pop((action.chunk, action.round))
        waiting = self.pushed[action.chunk]
        for then in [waiting[w].popleft() for w in sorted(announced) if waiting[w]]:
            then()
        params = self.blocks.params_of(action.chunk)
        cost = joined([own.copy_in(params) for own in self._costs])
        done = partial(self._handle, m.Done(action))
        self.engine.task("Push", cost.of_bytes, then=done, where=self.name)

    @property
    def _costs(self) -> list[FanInCosts]:
        return [member.costs for member in self.members]

    def _packets(self, chunk: int) -> tuple[int, int]:
        """Return the number of packets of a chunk's exponents, and of its gradient."""
        params, costs = self.blocks.params_of(chunk), self._costs[0]
        return costs.exponent_packets(params), costs.gradient_packets(params)

    # actions that take time

    def _stream(self, stage: str, costs: Sequence[Cost], lane: Lane, then: Then) -> None:
        """Send packets to or from all workers. `costs`: the cost for each member. `then`: called
        when the last packet has arrived."""
        cost = joined(costs)._replace(max_rate=costs[0].max_rate)
        if not cost.work:
            then()
            return
        arrived = partial(self._after, self._costs[0].latency, then)
        self.engine.task(stage, cost.of_bytes, lane=lane, then=arrived, where=self.name)

    def _after(self, seconds: float, then: Then) -> None:
        self.engine.task("Message", Cost(0.0, (), seconds), then=then, where=self.name)

    def check(self) -> None:
        """Assert the invariants of the state machine, the streams and the members."""
        self.machine.check()
        self.up.check()
        assert len(self.members) in (1, self.workers)
        assert all(count > 0 for count in self.unanswered.values())


class SimulatedFanInLink:
    """The link through switches to the server, from one worker or from all workers that are
    simulated as one.

    `end`: the fan-in that the link belongs to. `server`: the simulated server that does the work
    for this link. `pulled`: called with the ticket of each answered pull. `settled`: called with
    the number of a step when the server has received the requests for all updates of the step.
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
        # step -> number of requested updates that have not reached the server (at least 1)
        self.pending: Counter[int] = Counter()
        self.requested = 0  # the last step whose updates have all been requested
        # (step, function that sends a message about a gradient of this step), in order; each step
        # is later than `requested` + 1
        self.early: deque[tuple[int, Then]] = deque()

    def pull(self, pull: m.BlockPull) -> None:
        self.end.say(self.number, pull)

    def push(self, step: int, fresh: bool, arrivals: Mapping[int, Then]) -> None:
        """Push gradients of chunks. `fresh`: whether they are the first ones of the step.
        `arrivals`: for each chunk, called when the server has received its gradient."""
        self._in_order(step, partial(self.end.announce, self.number, fresh, arrivals))

    def close(self, close: m.BlockClose) -> None:
        """Report that all gradients of chunks in this step have been pushed."""
        if self.end.workers > 1:
            self._in_order(close.step, partial(self.end.say, self.number, close))

    def ask_update(self, update: m.BlockUpdate) -> None:
        self.pending[update.step] += update.chunks.bit_count()
        self._in_order(update.step, partial(self.end.say, self.number, update))

    def all_asked(self, step: int) -> None:
        """Record that all updates of a step have been requested, and send the waiting messages of
        the next step."""
        self.requested = step
        while self.early and self.early[0][0] <= step + 1:
            self.early.popleft()[1]()

    def _in_order(self, step: int, send: Then) -> None:
        """Send a message about a gradient of `step` once all updates of the previous step have been
        requested."""
        if step <= self.requested + 1:
            send()
        else:
            self.early.append((step, send))

    def update_reached(self, step: int) -> None:
        self.pending[step] -= 1
        if not self.pending[step]:
            del self.pending[step]
            self._settled(step)

    def settled(self, step: int) -> bool:
        return step not in self.pending

    def check(self) -> None:
        """Assert two invariants. For each step in `pending`, at least one update has not reached
        the server. Each message in `early` is about a step later than `requested` + 1."""
        assert all(count > 0 for count in self.pending.values())
        assert all(step > self.requested + 1 for step, _ in self.early)
