"""One pipeline stage's workers and servers on the virtual clock: the state machines of `flow` drive
it, as they drive the nodes.

    StageStateMachine -> which micro-batch's forward or backward is next
    Prefetcher   -> Pull       what a block needs, ahead of it
    (RelayStateMachine -> Give      where a card beside the worker communicates)
    ServerStateMachine -> Answer, Hold, Read, Update, Write, Prepare: each becomes a task of what
    fabric.py says it costs

Workers that do the same are one here. A block's parameters are `pieces` chunks, so that its
transfers, reads and updates follow each other as chunks do. Where all parameters stay on the
device, all but the first forward and the last backward of a step run as one task. Does NOT know
numbers: gradients are None.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import ceil
from typing import Any

from roadtrain.config.cluster import Device
from roadtrain.config.models import BlockShape
from roadtrain.config.plan import Plan
from roadtrain.protocol import messages
from roadtrain.protocol.chunk_state import Resident
from roadtrain.protocol.pipeline import BACKWARD, FORWARD, RunBlocks, StageStateMachine
from roadtrain.protocol.prefetch import Prefetcher, PullBlock
from roadtrain.protocol.queues import READ_PARAMETERS, READ_STATE, WRITE_STATE, DeviceQueue
from roadtrain.protocol.relay import Give, RelayStateMachine, Up
from roadtrain.protocol.server import ServerStateMachine
from roadtrain.protocol.server_steps import ServerSpec
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Engine, Lane, Resource, Task
from roadtrain.simulator.fabric import Cost, Fabric
from roadtrain.simulator.memory import device_bytes, host_bytes, saved_bytes, working_bytes

SMALLEST = 8 << 20  # parameters of a piece, where there are several


class SimulatedStage:
    """`parts`: the blocks of each part of the model that it has. `send(stage, run)`: what a run
    leaves goes to the stage that needs it."""

    def __init__(
        self,
        engine: Engine,
        fabric: Fabric,
        plan: Plan,
        parts: Sequence[Sequence[BlockShape]],
        device: Device,
        constants: Constants,
        number: int,
        send: Callable[[SimulatedStage, RunBlocks], None],
        *,
        log: list[Any] | None = None,
    ) -> None:
        blocks = [block for part in parts for block in part]
        ends = itertools.accumulate(map(len, parts), initial=0)
        self.spans = [range(begin, stop) for begin, stop in itertools.pairwise(ends)]
        self.engine, self.fabric, self.plan, self.blocks = engine, fabric, plan, blocks
        self.number, self.send, self.name, self.log = number, send, f"stage {number}", log
        self.device = device
        self.lane = engine.lane(f"{self.name} device")
        parallelism, size = plan.parallelism, plan.micro_batch / plan.parallelism.cp
        self.micros, tp, split = plan.micros, parallelism.tp, parallelism.tp * parallelism.cp
        # that sum an expert, that sum all else
        e, n = parallelism.replicas // parallelism.ep, parallelism.replicas
        summed = (1 - 1 / e) / (1 - 1 / n) / parallelism.ep if n > 1 else 1.0
        self.params = [
            (block.params - block.tables - block.experts * (1 - summed)) / tp for block in blocks
        ]
        here = 1.0 if plan.placement.state == "split" else 1 / parallelism.ep
        self.updated = [
            (block.params - block.tables - block.experts * (1 - here)) / tp for block in blocks
        ]
        self.forward_s = [
            constants.forward(
                block, plan.micro_batch, split, device, plan.precision, parallelism.ep, plan.passes
            )
            for block in blocks
        ]
        self.tensor_s = [
            fabric.tensor(block.input * size) if "." in block.name else 0.0 for block in blocks
        ]
        self.routed_s = [fabric.experts(block.routed * size / tp) for block in blocks]
        self.ring_s = [
            max(
                0.0,
                fabric.context(block.kv * size / tp)
                - constants.scores(
                    # that attention does not hide
                    block,
                    plan.micro_batch,
                    split,
                    device,
                ),
            )
            for block in blocks
        ]
        n = len(blocks)
        most = max(self.params, default=0.0)
        self.pieces = max(
            1, min(4, int(most // SMALLEST)) if not plan.chunk else ceil(most / plan.chunk)
        )
        streamed = plan.placement.streamed
        layers = [
            i for i, block in enumerate(blocks) if "." in block.name or not plan.root
        ] or list(range(n))
        self.slots = max(2, min(plan.slots, len(layers)) if streamed else n)
        # what comes before the layers and after: once a step
        stay = sorted({*range(n)} - {*layers})
        prefetch, root = Prefetcher(self.slots, layers), Prefetcher(max(2, len(stay)), stay)
        self.streams, self.prefetch = (
            prefetch,
            [prefetch if i in layers else root for i in range(n)],
        )
        self.disk = DeviceQueue(limit=fabric.depth)
        self.updates = engine.lane(f"{self.name} updates")
        # transfers that follow each other: collectives on a stream, a server's links
        self.lanes: dict[str, Lane] = {}
        if plan.placement.sum == "ring" and fabric.group.dp > 1:
            self.lanes = dict.fromkeys(("Fetch", "Push"), engine.lane(f"{self.name} collectives"))
        elif plan.placement.served:
            self.lanes = {
                what: engine.lane(f"{self.name} {what.lower()}") for what in ("Fetch", "Push")
            }
        self.relay: RelayStateMachine | None = None
        if plan.placement.sum == "relay":
            self.relay = RelayStateMachine(1, (2 + min(plan.kept, n)) * self.pieces)
        # ticket -> (block, slot)
        self.tickets, self.pulls = itertools.count(1), dict[int, tuple[int, int]]()
        self.coming: dict[int, int] = {}  # block -> its chunks on their way
        self.version = [0] * n
        self.upstream: dict[int, Task] = {}
        self.machine: StageStateMachine | None = None
        self.todo: deque[int] = deque()
        self.run: RunBlocks | None = None
        self.wanted: int | None = None
        self.step = 0
        self.pushing: dict[int, int] = {}  # step -> its gradients on their way
        self.computed = set[int]()  # steps that are computed and not sealed
        self.fresh: list[bool] = [True] * n
        self.later: list[tuple[int, bool]] = []  # gradients that wait for the end of backward
        self.ends: list[float] = []  # of steps: all is released
        self.inbox: deque[Any] = deque()
        self.busy = False
        self.pool = f"{self.name} device"
        self.saved = [saved_bytes(plan, part) * plan.fragmentation for part in parts]
        self._hold_fixed()

    @cached_property
    def server(self) -> ServerStateMachine:
        """Made for the first step: plans that are only bounded need none."""
        plan, durable, chunks = self.plan, self.fabric.on_files, len(self.blocks) * self.pieces
        kept = round(plan.resident * chunks)  # the first, which the next forward wants first
        weights = round(self.fabric.weights_share(sum(self.params)) * chunks)

        def part(chunk: int) -> Resident:
            if not durable or chunk < kept:
                return Resident.RECORD
            return Resident.WEIGHTS if chunk < weights else Resident.NOTHING

        spec = ServerSpec(
            0,
            {chunk: part(chunk) for chunk in range(chunks)},
            plan.buffers if durable else 0,
            durable=durable,
            delayed=dict.fromkeys(range(chunks), False) if plan.staleness else {},
        )
        return ServerStateMachine(spec)

    def bound(self) -> tuple[float, str]:
        """Seconds that a step takes at least, and what takes them: each resource's bytes over
        its capacity, the device's time. Nothing is waited for."""
        plan, fabric, total, n = self.plan, self.fabric, sum(self.params), len(self.blocks)
        streamed = plan.placement.streamed
        passes = self.micros if streamed else 1
        layers = sorted(
            params
            for params, prefetch in zip(self.params, self.prefetch)
            if prefetch is self.streams
        )
        stay = self.slots + (min(plan.kept, n) if self.relay is not None else 0)
        # the largest may be here still at every turn
        again = sum(layers[: max(0, len(layers) - stay)])
        costs = [
            (fabric.answer(total), 1.0 if streamed else 0.0),
            (fabric.answer(again), 2.0 * passes - 1),
            (fabric.push(total), float(passes)),
            (fabric.hold(total), float(passes)),
            (fabric.update(total), 1.0),
            (fabric.upstream(total), 1.0),
        ]
        if fabric.on_files:
            costs += [(fabric.read(total), 1.0 - plan.resident), (fabric.write(total), 1.0)]
        used: dict[Resource, float] = {}
        for cost, times in costs:
            for resource, weight in cost.uses:
                used[resource] = used.get(resource, 0.0) + cost.work * weight * times
        if fabric.site.cores is not None:
            used[fabric.site.cores] = used.get(fabric.site.cores, 0.0) + self.micros * self.pass_s
        device = (self.micros * self.pass_s, f"{self.name} device")
        return max([device, *((u / r.capacity, r.name) for r, u in used.items())])

    @property
    def pass_s(self) -> float:
        """Seconds that a micro-batch computes here, both ways."""
        return sum(
            self._of(i, what) for i in range(len(self.blocks)) for what in (FORWARD, BACKWARD)
        )

    @property
    def first_s(self) -> float:
        """Of that, what its first part takes."""
        return sum(self._of(i, what) for i in self.spans[0] for what in (FORWARD, BACKWARD))

    def _hold_fixed(self) -> None:
        """What stays; activations come and go."""
        plan, group = self.plan, self.fabric.group
        self.engine.hold(
            self.pool,
            plan.context_bytes
            + plan.fragmentation
            * (device_bytes(plan, self.blocks) + working_bytes(plan, self.blocks)),
        )
        self.engine.hold(f"{self.name} memory", host_bytes(plan, self.blocks, group.ranks))

    # the worker

    def begin_step(self) -> None:
        self.step += 1
        self.pushing[self.step] = 0
        self.machine = StageStateMachine(
            self.number, self.plan.parallelism.pp, self.micros, self.plan.parallelism.vp
        )
        self._go(self.machine.start())

    def arrived(self, what: str, micro: int, part: int) -> None:
        assert self.machine is not None
        self._go(self.machine.arrived(what, micro, part))

    def _go(self, runs: Sequence[RunBlocks]) -> None:
        for run in runs:
            self.run = run
            order = self.spans[run.part]
            self.todo = deque(order if run.what == FORWARD else reversed(order))
            if run.what == FORWARD:
                self.engine.hold(self.pool, self.saved[run.part])
            whole = not self.plan.placement.streamed and (
                run.micro if run.what == FORWARD else not run.last
            )
            if whole:  # all parameters are here and nothing is pushed
                self.todo.clear()
                self._compute(sum(self._of(i, run.what) for i in order), self._run_ended)
            else:
                self._next_block()

    def _of(self, block: int, what: str) -> float:
        """Seconds; with recompute a backward is a forward more, but for the output layer's. Keys
        and values go round again, with their gradients."""
        forward, tensor, ring = (
            self.forward_s[block],
            self.tensor_s[block] + self.routed_s[block],
            self.ring_s[block],
        )
        if what == FORWARD:
            return forward + tensor + ring
        shape, plan, again = self.blocks[block], self.plan, 0.0
        if plan.recompute and not self._last(block):
            again = 1.0
        elif shape.attention and plan.selective:
            again = 0.5 if plan.selective == "layers" else shape.again / shape.flops
        whole = again if plan.selective != "products" else 0.0  # sums are kept
        return forward * (2 + again) + tensor * (1 + whole) + ring * (2 + whole)

    def _last(self, block: int) -> bool:
        return self.number == self.plan.parallelism.pp - 1 and block == len(self.blocks) - 1

    def _compute(self, seconds: float, then: Callable[[], None]) -> None:
        assert self.run is not None
        cores, rate = self.fabric.site.cores, 1.0
        if cores is not None:
            # in an update's unit, so that both get the same share
            rate = self.fabric.site.updates.capacity
        uses = [] if cores is None else [(cores, 1.0 / rate)]
        self.engine.task(
            self.run.what,
            seconds * rate,
            uses,
            max_rate=rate,
            lane=self.lane,
            then=then,
            where=self.name,
        )

    def _next_block(self) -> None:
        if not self.todo:
            self._run_ended()
            return
        block = self.todo.popleft()
        self.wanted = block
        self._pull(self.prefetch[block].asked(block))
        self._use()

    def _use(self) -> None:
        """Runs the block that is wanted, once it is here."""
        block, run = self.wanted, self.run
        if block is None or run is None or self.prefetch[block].here(block) is None:
            return
        self.wanted = None
        slot = self.prefetch[block].use(block)

        def compute() -> None:
            self._compute(self._of(block, run.what), lambda: self._block_ended(block, slot))

        if self.blocks[block].tables and run.what == FORWARD:
            self._cost("Fetch", self._rows(block), compute, lane=self.lanes.get("Fetch"))
        else:
            compute()

    def _rows(self, block: int) -> Cost:
        return self.fabric.all_to_all(self.blocks[block].touched * self.plan.micro_batch)

    def _block_ended(self, block: int, slot: int) -> None:
        assert self.run is not None
        self._log(self.run.what, block)
        pulls = self.prefetch[block].returned(slot)
        if self.run.what == BACKWARD and (self.run.last or self.plan.placement.streamed):
            if self.plan.overlap:
                self._push(block, self.run.last)
            else:
                self.later.append((block, self.run.last))
        self._pull(pulls)
        self._next_block()

    def _run_ended(self) -> None:
        run, self.run = self.run, None
        assert run is not None and self.machine is not None
        if run.what == BACKWARD:
            self.engine.hold(self.pool, -self.saved[run.part])
        self.send(self, run)
        following = self.machine.ended(run)
        if following:
            self._go(following)
        elif self.machine.finished:
            later, self.later = self.later, []
            for block, last in later:
                self._push(block, last)
            self.computed.add(self.step)
            # all is released: the next forward waits for what it pulls
            if self.plan.update_at == "gradient":
                self._step_ended()
            self._seal(self.step)

    # parameters

    def _pull(self, pulls: Sequence[PullBlock]) -> None:
        for pull in pulls:
            self._tax(self.fabric.answer(self.params[pull.block]))
            self.coming[pull.block] = self.pieces
            version = self.version[pull.block] - (
                1 if self.plan.staleness and self.version[pull.block] else 0
            )
            for piece in range(self.pieces):
                ticket = next(self.tickets)
                self.pulls[ticket] = pull.block, pull.slot
                message = messages.Pull(pull.block * self.pieces + piece, version, None, ticket)
                if self.relay is None:
                    self._tell(message)
                else:
                    self._relay(message)

    def _relay(self, event: Any) -> None:
        assert self.relay is not None
        for action in self.relay.handle(event):
            if isinstance(action, Up):
                self._tell(action.message)
            elif isinstance(action, Give):
                cost = self.fabric.answer(self._piece(action.pull.chunk), True)
                self._cost("Fetch", cost, partial(self._given, action))

    def _given(self, give: Give) -> None:
        self._relay(messages.Done(give))
        self._pulled(give.pull.ticket)

    def _pulled(self, ticket: int) -> None:
        block, slot = self.pulls.pop(ticket)
        self.coming[block] -= 1
        if not self.coming[block]:
            self._pull(self.prefetch[block].arrived(slot))
            self._use()

    def _piece(self, chunk: int) -> float:
        return self.params[chunk // self.pieces] / self.pieces

    def _tax(self, cost: Cost) -> None:
        if (tax := self.fabric.tax(cost)) > 0:
            self.engine.task("Wait", tax, lane=self.lane, where=self.name, priority=-1.0)

    # gradients

    def _push(self, block: int, last: bool) -> None:
        cost = self.fabric.push(self.params[block] / self.pieces)
        self._tax(self.fabric.push(self.params[block]))
        fresh, self.fresh[block] = self.fresh[block], last
        if self.blocks[block].tables:
            cost = self._rows(block)._replace(work=self._rows(block).work / self.pieces)
        for chunk in range(block * self.pieces, (block + 1) * self.pieces):
            self.pushing[self.step] += 1
            self._cost(
                "Push",
                cost,
                partial(self._pushed, chunk, fresh, last, self.step),
                lane=self.lanes.get("Push"),
            )
        if last and self.plan.update_at == "gradient":
            self._updated_in(block, self.step)

    def _pushed(self, chunk: int, fresh: bool, last: bool, step: int) -> None:
        self.pushing[step] -= 1
        self._tell(messages.Push(chunk, None, fresh, True, next(self.tickets)))
        if last and self.plan.update_at == "gradient":
            order = next(self.tickets) if self.plan.in_turn else chunk // self.pieces
            self._tell(messages.ApplyUpdate(chunk, step, (), (1.0,), order))
        self._seal(step)

    def _updated_in(self, block: int, step: int) -> None:
        """From now on the block's next version is pulled."""
        self.version[block] = step
        self.prefetch[block].updated([block])

    def _seal(self, step: int) -> None:
        """Once everything of it is computed and where it is summed."""
        if step not in self.computed or self.pushing[step]:
            return
        if self.plan.update_at == "step":
            if any(chunk.holds for chunk in self.server.chunks.values()):
                return
            for chunk in range(len(self.blocks) * self.pieces):
                self._tell(messages.ApplyUpdate(chunk, step, (), (1.0,), chunk // self.pieces))
            for block in range(len(self.blocks)):
                self._updated_in(block, step)
            self._step_ended()
        self.computed.remove(step)
        self._tell(messages.EndStep(step))
        self._tell(messages.Commit(step, None))

    def _step_ended(self) -> None:
        self.ends.append(self.engine.now)
        for prefetch in dict.fromkeys(self.prefetch):
            self._pull(prefetch.stepped())

    # the server

    def _tell(self, event: Any) -> None:
        """To the server's state machine, one event at a time."""
        self.inbox.append(event)
        if self.busy:
            return
        self.busy = True
        while self.inbox:
            for action in self.server.handle(self.inbox.popleft()):
                self._carry_out(action)
        self.busy = False

    def _cost(
        self,
        stage: str,
        cost: Cost,
        then: Callable[[], None] | None,
        *,
        after: Sequence[Task] = (),
        lane: Lane | None = None,
    ) -> Task:
        work = cost.work if cost.uses else 0.0
        return self.engine.task(
            stage,
            work,
            cost.uses,
            latency=cost.latency,
            then=then,
            after=after,
            lane=lane,
            where=self.name,
        )

    def _on_disk(
        self, priority: int, stage: str, cost: Cost, then: Callable[[], None], order: int = 0
    ) -> None:
        """In the order of the device's queue; at once where nothing rests on files."""
        if not cost.uses:
            self._cost(stage, cost, then)
            return
        self.disk.push(priority, order, (stage, cost, then))
        self._serve_disk()

    def _serve_disk(self) -> None:
        while (item := self.disk.next()) is not None:
            priority, (stage, cost, then) = item
            self._cost(stage, cost, partial(self._disk_done, priority, then))

    def _disk_done(self, priority: int, then: Callable[[], None]) -> None:
        self.disk.done(priority)
        then()
        self._serve_disk()

    def _carry_out(self, action: Any) -> None:
        def done(*result: Any) -> Callable[[], None]:
            return lambda: self._tell(messages.Done(action, result))

        about = getattr(action, "push", getattr(action, "pull", action))
        self._log(type(action).__name__, getattr(about, "chunk", None))
        match action:
            case messages.Answer(pull, memory, _):
                size = self._piece(pull.chunk)
                after = [self.upstream[pull.chunk]] if pull.chunk in self.upstream else []

                def give() -> None:
                    self._cost(
                        "Fetch",
                        self.fabric.answer(size),
                        done(),
                        after=after,
                        lane=self.lanes.get("Fetch"),
                    )

                if memory:
                    give()
                else:
                    self._on_disk(READ_PARAMETERS, "Read", self.fabric.public(size), give)
            case messages.Hold(push):
                cost = self.fabric.hold(self._piece(push.chunk))
                self._on_disk(WRITE_STATE, "Write", cost, partial(self._held, action), -1)
            case messages.Read(chunk):
                self._on_disk(READ_STATE, "Read", self.fabric.read(self._piece(chunk)), done())
            case messages.Update(chunk):
                cost = self.fabric.update(self.updated[chunk // self.pieces] / self.pieces)
                self._cost("Update", cost, partial(self._updated, action), lane=self.updates)
            case messages.Write(chunk):
                self._on_disk(WRITE_STATE, "Write", self.fabric.write(self._piece(chunk)), done())
            case messages.Prepare():
                self.engine.task("Commit", 0.0, then=done(), where=self.name)
            case messages.Send(messages.Pulled(ticket, _)):
                if self.relay is None:
                    self._pulled(ticket)
                else:
                    self._relay(messages.Pulled(ticket, 0))

    def _held(self, hold: messages.Hold) -> None:
        self._tell(messages.Done(hold, (None, True)))
        self._seal(self.step)

    def _updated(self, update: messages.Update) -> None:
        up = self.fabric.upstream(self._piece(update.chunk))
        if up.uses:  # at once, so that the next step finds it in memory
            self.upstream[update.chunk] = self._cost("Fetch", up, None)
        self._tell(messages.Done(update))

    def _log(self, what: str, number: int | None) -> None:
        if self.log is not None and number is not None:
            self.log.append((self.step, what, number))
