"""Simulate the workers of one pipeline stage with the state machines of real workers.

    StageStateMachine    decides which micro-batch runs next, forward or backward
    Prefetcher           pulls the parameters of blocks before they are needed
    RelayStateMachine    passes messages on, if a processor on the network card runs a relay

simulated_sums.py simulates sums; simulated_server.py simulates updates and commits.

Equal workers are simulated as one worker. The forward or backward of each block is a task. If all
parameters stay on the device, most forwards and backwards are a single task for all blocks. The
simulation computes no values: each gradient is None.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from roadtrain.config.models import BlockShape
from roadtrain.relay.protocol.relay import RelayEvent, RelayStateMachine
from roadtrain.servers.protocol.blocks import divided
from roadtrain.servers.protocol.intermediary import Give, Up
from roadtrain.servers.protocol.messages import (
    BlockClose,
    BlockPull,
    BlockPulled,
    BlockPush,
    BlockUpdate,
    Done,
    Pulled,
    Push,
)
from roadtrain.servers.protocol.prefetch import Prefetcher, PullBlock
from roadtrain.simulator.apart import RankOf, StagePush
from roadtrain.simulator.engine import Cost, Engine, Lane, Resource, Then
from roadtrain.simulator.fabric import Fabric, block_times
from roadtrain.simulator.memory import device_bytes, host_bytes, saved_bytes, working_bytes
from roadtrain.simulator.simulated_fan_in import SimulatedFanIn, SimulatedFanInLink
from roadtrain.simulator.simulated_server import SimulatedServer, block_pieces
from roadtrain.stages.protocol.pipeline import (
    BACKWARD,
    FORWARD,
    PipelineShape,
    RunBlocks,
    StageStateMachine,
)


class SimulatedStage:
    """The workers of one pipeline stage, or of one replica of a stage, on the virtual clock. A
    *run* is the forward or backward of a micro-batch. `send`: called after each run with this stage
    and the run, to send the output of the run."""

    def __init__(
        self,
        engine: Engine,
        fabric: Fabric,
        parts: Sequence[Sequence[BlockShape]],
        number: int,
        send: Callable[[SimulatedStage, RunBlocks], None],
        *,
        end: SimulatedFanIn | None = None,
        rank: RankOf | None = None,
    ) -> None:
        """Create the stage. `end`: the simulated fan-in between the stage's server and the
        switches; None if no switches send to the server. `rank`: the position of this replica; None
        if all replicas are simulated as one."""
        plan, device = fabric.plan, fabric.site.host.device
        assert device is not None
        name = f"stage {number}" if rank is None else f"stage {number} replica {rank.replica}"
        self.rank = rank
        self.widths = (1,) * plan.parallelism.pp if rank is None else rank.widths
        self.width = self.widths[number]
        self.replica = 0 if rank is None else rank.replica
        self.engine, self.fabric, self.plan, self.device = engine, fabric, plan, device
        self.number, self.name = number, name
        self.send = send  # passes the output of a run to the stage that needs it
        # the blocks of all parts of the model that this stage has, and the range of each part's
        # blocks
        self.blocks = [block for part in parts for block in part]
        ends = itertools.accumulate(map(len, parts), initial=0)
        self.spans = [range(begin, stop) for begin, stop in itertools.pairwise(ends)]
        self.lane = engine.lane(f"{name} device")
        self.num_microbatches = plan.num_microbatches
        self.times = block_times(fabric, self.blocks, device)
        self.pieces = block_pieces(plan, self.blocks)
        self._place_blocks()
        # lanes of transfers that run one at a time: the collectives of a stream, or a server's
        # links
        self.lanes: dict[str, Lane] = {}
        if rank is not None and plan.placement.sum == "ring":
            self.lanes = {"Fetch": engine.lane(f"{name} fetch")}
        elif plan.placement.sum == "ring" and fabric.group.replicas > 1:
            self.lanes = dict.fromkeys(("Fetch", "Push"), engine.lane(f"{name} collectives"))
        elif plan.placement.served:
            self.lanes = {what: engine.lane(f"{name} {what.lower()}") for what in ("Fetch", "Push")}
        fetches = self.lanes.get("Fetch") if end is None else None
        self.server = SimulatedServer(engine, fabric, self.pieces, name, fetches)
        self.server.pulled = self._answered
        self.server.held = lambda: self._end_step(self.step)
        self.relay: RelayStateMachine | None = None
        if plan.placement.sum == "relay":
            kept = min(plan.memory.kept, len(self.blocks))
            self.relay = RelayStateMachine(1, (2 + kept) * self.pieces.pieces)
        self.link: SimulatedFanInLink | None = None
        if end is not None:
            assert fabric.fan_in is not None
            self.link = SimulatedFanInLink(
                end, fabric.fan_in, self.server, self._pulled, self._settled
            )

        self.machine: StageStateMachine | None = None  # the state machine of the current step
        self.run: RunBlocks | None = None  # the run on the device
        self.todo: deque[int] = deque()  # blocks of the run that have not begun, in their order
        self.next: int | None = None  # the block that the device waits for
        self.tickets = itertools.count(1)
        # ticket of a pull -> the (block, slot) that it fills
        self.pulls: dict[int, tuple[int, int]] = {}
        self.coming: dict[int, int] = {}  # ticket of a pull -> number of its chunks in flight
        # the version that the next pull of each block requests
        self.version = [0] * len(self.blocks)
        self.step = 0  # the current step
        self.fresh = [True] * len(self.blocks)  # whether a block's next push is a step's first
        self.pushing: dict[int, int] = {}  # step -> number of its gradients in flight
        self.computed: set[int] = set()  # steps that are computed, but not yet in `requested`
        # steps whose updates have all been requested, but which have not ended
        self.requested: set[int] = set()
        # gradients to push after the last backward of the step
        self.later: list[tuple[int, RunBlocks]] = []
        # for each step, the time at which all of its updates were requested
        self.ends: list[float] = []
        self.pool = f"{name} device"
        self.saved = [saved_bytes(plan, part) * plan.framework.fragmentation for part in parts]
        self._hold_fixed()

    def _place_blocks(self) -> None:
        """Assign blocks to slots (buffers for one block each) of the device. Layers share slots;
        each other block has its own slot."""
        plan, n = self.plan, len(self.blocks)
        every = not plan.memory.root
        layers = [i for i, block in enumerate(self.blocks) if "." in block.name or every]
        layers = layers or [*range(n)]
        self.slots = max(2, min(plan.memory.slots, len(layers)) if plan.placement.streamed else n)
        stay = sorted({*range(n)} - {*layers})
        self.streams = Prefetcher(self.slots, layers)
        root = Prefetcher(max(2, len(stay)), stay)
        self.prefetch = [self.streams if i in layers else root for i in range(n)]

    def bound(self) -> float:
        """Return a lower bound for the seconds of a step: the longest of the computing time and the
        times that resources need for their traffic."""
        plan, fabric, n = self.plan, self.fabric, len(self.blocks)
        total = sum(self.pieces.params)
        streamed = plan.placement.streamed
        passes = self.passes if streamed else 1
        stay = self.slots + (min(plan.memory.kept, n) if self.relay is not None else 0)
        again = self._refetched(stay)
        costs = [
            (fabric.answer(total), 1.0 if streamed or fabric.gathers else 0.0),
            (fabric.answer(again), 2.0 * passes - 1 if streamed else 0.0),
            (fabric.push(total), float(passes)),
            (fabric.hold(total), float(passes)),
            (fabric.update(total), 1.0),
            (fabric.upstream(total), 1.0),
        ]
        if fabric.on_files:
            costs += [(fabric.read(total), 1.0 - plan.memory.resident), (fabric.write(total), 1.0)]
        used = defaultdict[Resource, float](float)
        for cost, times in costs:
            for resource, weight in cost.uses:
                used[resource] += cost.work * weight * times
        device = self.passes * self.pass_s
        if (cores := fabric.site.cores or fabric.group.machine) is not None:
            used[cores] += device * fabric.group.computing
        return max([device, *(amount / r.capacity for r, amount in used.items())])

    def _refetched(self, stay: int) -> float:
        """Return the least number of parameters that the stage fetches in each forward and in each
        backward of a micro-batch. The first forward of a step, which fetches all parameters, is
        excluded. `stay`: the most blocks that stay on the device or in the relay between passes."""
        total = 0.0
        for span in self.spans:
            layers = sorted(self.pieces.params[i] for i in span if self.prefetch[i] is self.streams)
            total += sum(layers[: max(0, len(layers) - stay)])
        return total

    @property
    def shape(self) -> PipelineShape:
        parts = self.plan.parallelism.virtual_stages
        return PipelineShape(self.number, self.replica, self.widths, parts, self.num_microbatches)

    @property
    def passes(self) -> int:
        """Number of micro-batches that this stage runs in a step."""
        return len(self.shape.own)

    @property
    def pass_s(self) -> float:
        """Seconds in which the stage computes the forward and backward of a micro-batch."""
        blocks = range(len(self.blocks))
        return sum(self._of(i, what) for i in blocks for what in (FORWARD, BACKWARD))

    @property
    def first_s(self) -> float:
        """Seconds in which the stage computes the forward and backward of a micro-batch through its
        first part of the model."""
        return sum(self._of(i, what) for i in self.spans[0] for what in (FORWARD, BACKWARD))

    def _hold_fixed(self) -> None:
        """Record the memory that is in use throughout a step."""
        plan, group, framework = self.plan, self.fabric.group, self.plan.framework
        held = device_bytes(plan, self.blocks) + working_bytes(plan, self.blocks)
        self.engine.hold(self.pool, framework.context_bytes + framework.fragmentation * held)
        self.engine.hold(f"{self.name} memory", host_bytes(plan, self.blocks, group.ranks))

    # the worker

    def begin_step(self) -> None:
        self.step += 1
        self.pushing[self.step] = 0
        self.machine = StageStateMachine(self.shape)
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
            inner = run.micro != self.replica if run.what == FORWARD else not run.last
            whole = inner and not self.plan.placement.streamed
            if whole and not any(self._rows_travel(block) for block in order):
                # all parameters are on the device, and this run pushes no gradient
                self.todo.clear()
                self._compute(sum(self._of(i, run.what) for i in order), self._run_ended)
            else:
                self._next_block()

    def _of(self, block: int, what: str) -> float:
        """Return the seconds of a block's forward (if `what` is FORWARD) or backward."""
        forward, ring = self.times.forward[block], self.times.ring[block]
        tensor = self.times.tensor[block] + self.times.routed[block]
        if what == FORWARD:
            return forward + tensor + ring
        shape, plan, again = self.blocks[block], self.plan, 0.0
        if plan.activation_checkpointing and not self._last(block):
            again = 1.0
        elif shape.attention and plan.framework.selective:
            again = 0.5 if plan.framework.selective == "layers" else shape.again / shape.flops
        # with "products", sums are kept
        whole = again if plan.framework.selective != "products" else 0.0
        both = self.fabric.constants.backward + again
        return forward * both + tensor * (1 + whole) + ring * (2 + whole)

    def _last(self, block: int) -> bool:
        return self.number == self.plan.parallelism.pp - 1 and block == len(self.blocks) - 1

    def _compute(self, seconds: float, then: Then) -> None:
        assert self.run is not None
        group, cost = self.fabric.group, Cost(seconds, max_rate=1.0)
        if (cores := group.site.cores or group.machine) is not None:
            # work is in the unit of updates, so that computing and updates get equal shares of the
            # CPUs
            rate = group.site.updates.capacity
            cost = Cost(seconds * rate, [(cores, group.computing / rate)], max_rate=rate)
        self.engine.task(self.run.what, cost, lane=self.lane, then=then, where=self.name)

    def _next_block(self) -> None:
        if not self.todo:
            self._run_ended()
            return
        block = self.todo.popleft()
        self.next = block
        self._pull(self.prefetch[block].request(block))
        self._use()

    def _use(self) -> None:
        """Run the next block, if the parameters of this block have arrived on the device."""
        block, run = self.next, self.run
        if block is None or run is None or self.prefetch[block].here(block) is None:
            return
        self.next = None
        slot = self.prefetch[block].use(block)

        def compute() -> None:
            self._compute(self._of(block, run.what), lambda: self._block_ended(block, slot))

        if self._rows_travel(block) and run.what == FORWARD:
            self._cost("Fetch", self._rows(block), compute, lane=self.lanes.get("Fetch"))
        else:
            compute()

    def _rows_travel(self, block: int) -> bool:
        return bool(self.blocks[block].tables) and self.fabric.group.replicas > 1

    def _rows(self, block: int, microbatches: int = 1) -> Cost:
        nbytes = self.blocks[block].touched * self.plan.micro_batch * microbatches
        return self.fabric.all_to_all(nbytes)

    def _block_ended(self, block: int, slot: int) -> None:
        assert self.run is not None
        pulls = self.prefetch[block].returned(slot)
        if self.run.what == BACKWARD and (self.run.last or self.plan.placement.streamed):
            if self.plan.overlap:
                self._push(block, self.run)
            else:
                self.later.append((block, self.run))
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
            for block, pushed in later:
                self._push(block, pushed)
            self.computed.add(self.step)
            # the next step may begin at once: its forward waits for its pulls
            if self.plan.update_at == "gradient":
                if self.link is not None:
                    self.link.all_asked(self.step)
                self._step_ended()
            self._end_step(self.step)

    # parameters

    def _pull(self, pulls: Sequence[PullBlock]) -> None:
        for pull in pulls:
            self._tax(self.fabric.answer(self.pieces.params[pull.block]))
            version = self.version[pull.block]
            if self.plan.staleness and version:
                version -= 1
            ticket = next(self.tickets)
            self.pulls[ticket], self.coming[ticket] = (pull.block, pull.slot), self.pieces.pieces
            message = BlockPull(pull.block, self.pieces.every, version, None, ticket)
            if self.link is not None:
                self.link.pull(message)
            elif self.relay is not None:
                for part in divided(message, self.pieces.blocks):
                    self._relay(self.relay, part)
            else:
                self.server.handle(message)

    def _relay(self, relay: RelayStateMachine, event: RelayEvent) -> None:
        for action in relay.handle(event):
            match action:
                case Up(message):
                    self.server.handle(message)
                case Give(pull):
                    cost = self.fabric.answer(self.pieces.params_of(pull.chunk), True)
                    self._cost("Fetch", cost, partial(self._delivered, relay, action))

    def _delivered(self, relay: RelayStateMachine, give: Give) -> None:
        self._relay(relay, Done(give))
        self._pulled(give.pull.ticket)

    def _answered(self, answer: Pulled | BlockPulled) -> None:
        """Handle the server's answer to a pull."""
        if isinstance(answer, BlockPulled):
            self._pulled(answer.ticket, self.pieces.pieces)
        elif self.link is not None:
            self.link.end.answered(answer)
        elif self.relay is not None:
            self._relay(self.relay, answer)

    def _pulled(self, ticket: int, chunks: int = 1) -> None:
        """Record that chunks of a pull have arrived."""
        self.coming[ticket] -= chunks
        if not self.coming[ticket]:
            del self.coming[ticket]
            block, slot = self.pulls.pop(ticket)
            self._pull(self.prefetch[block].arrived(slot))
            self._use()

    def _tax(self, cost: Cost) -> None:
        if (tax := self.fabric.tax(cost)) > 0:
            self.engine.task("Wait", Cost(tax), lane=self.lane, where=self.name, priority=-1.0)

    # gradients

    def _push(self, block: int, run: RunBlocks) -> None:
        last = run.last
        params, pieces = self.pieces.params[block], self.pieces.pieces
        cost = self.fabric.push(params / pieces)
        self._tax(self.fabric.push(params))
        fresh, self.fresh[block] = self.fresh[block], last
        if self.blocks[block].tables:
            # this device sums the gradients of rows until it sends them
            rows = self._rows(block, 1 if self.plan.placement.streamed else self.passes)
            cost = rows._replace(work=rows.work / pieces)
        whole = BlockPush(block, self.pieces.every, None, fresh, True, next(self.tickets))
        arrivals = {
            push.chunk: partial(self._arrived, push, last, self.step)
            for push in divided(whole, self.pieces.blocks)
        }
        self.pushing[self.step] += pieces
        if (link := self._link_of(block)) is not None:
            link.push(self.step, fresh, arrivals)
            if last:
                self._gradient_whole(link, block, self.step)
            arrivals = {}
        for chunk, arrived in arrivals.items():
            if self.rank is None:
                self._cost("Push", cost, arrived, lane=self.lanes.get("Push"))
            else:
                at = (chunk, self.step, None if last else run.micro // self.width)
                pushed = StagePush(cost.of_bytes, arrived, self.lanes.get("Push"))
                self.rank.exchange.push(at, self._partners(run), pushed)
        if last and self.plan.update_at == "gradient":
            self._updated_in(block, self.step)

    def _link_of(self, block: int) -> SimulatedFanInLink | None:
        """Return the link over which a block's gradients go to switches. A block with tables has
        none, because devices exchange the gradients of table rows directly."""
        return None if self.blocks[block].tables else self.link

    def _gradient_whole(self, link: SimulatedFanInLink, block: int, step: int) -> None:
        if self.plan.update_at == "gradient":
            link.ask_update(self._update_of(block, self.pieces.every, step))
        else:
            link.close(BlockClose(block, self.pieces.every, step))

    def _update_of(self, block: int, chunks: int, step: int) -> BlockUpdate:
        eager = self.plan.in_turn and self.plan.update_at == "gradient"
        order = next(self.tickets) if eager else block
        return BlockUpdate(block, chunks, step, {0: ()}, (1.0,), order)

    def _partners(self, run: RunBlocks) -> int:
        """Return the number of replicas that push a gradient in the same round as `run`. The last
        gradients of all replicas form a separate round, because replicas may have different numbers
        of micro-batches."""
        if run.last:
            return self.width
        rounds = (len(replace(self.shape, replica=replica).own) for replica in range(self.width))
        return sum(run.micro // self.width < many - 1 for many in rounds)

    def _arrived(self, push: Push, last: bool, step: int) -> None:
        """Handle a gradient whose push has ended."""
        if (sums := self.fabric.sums) is None:
            self._pushed(push, last, step)
            return
        for _ in sums.pushed(push.chunk, round(self.pieces.params_of(push.chunk))):
            self._pushed(push, last, step)

    def _pushed(self, push: Push, last: bool, step: int) -> None:
        self.pushing[step] -= 1
        assert self.pushing[step] >= 0, f"chunk {push.chunk} is summed twice"
        self.server.handle(push)
        block = self.pieces.block(push.chunk)
        if last and self.plan.update_at == "gradient" and self._link_of(block) is None:
            bit = 1 << push.chunk % self.pieces.pieces
            self.server.handle(self._update_of(block, bit, step))
        self._end_step(step)

    def _updated_in(self, block: int, step: int) -> None:
        """Let the next pulls of the block request the parameters that the update of `step`
        produces."""
        self.version[block] = step
        self.prefetch[block].updated([block])

    def _end_step(self, step: int) -> None:
        """End a step once all its blocks are computed, all its pushes have ended, and the previous
        step has ended."""
        if step not in self.computed or self.pushing[step] or step != self.server.commits.ended + 1:
            return
        if self.plan.update_at == "step":
            if self.server.holding:
                return
            self._ask_updates(step)
            for block in range(len(self.blocks)):
                self._updated_in(block, step)
            self._step_ended()
        self.computed.remove(step)
        self.requested.add(step)
        self._settled(step)

    def _ask_updates(self, step: int) -> None:
        for block in range(len(self.blocks)):
            update, link = self._update_of(block, self.pieces.every, step), self._link_of(block)
            if link is None:
                self.server.handle(update)
            else:
                link.ask_update(update)
        if self.link is not None:
            self.link.all_asked(step)

    def _settled(self, step: int) -> None:
        """Tell the server that a step has ended, once the server has received the requests for all
        its updates."""
        if step in self.requested and (self.link is None or self.link.settled(step)):
            self.requested.remove(step)
            self.server.end_step(step)
            self._end_step(step + 1)

    def _step_ended(self) -> None:
        self.ends.append(self.engine.now)
        for prefetch in dict.fromkeys(self.prefetch):
            self._pull(prefetch.stepped())

    def _cost(self, stage: str, cost: Cost, then: Then, *, lane: Lane | None = None) -> None:
        self.engine.task(stage, cost.of_bytes, then=then, lane=lane, where=self.name)

    def check(self) -> None:
        """Assert the invariants of the stage's state machines."""
        self.server.check()
        for prefetch in dict.fromkeys(self.prefetch):
            prefetch.check()
        if self.relay is not None:
            self.relay.check()
        if self.machine is not None:
            self.machine.check()
        if self.fabric.sums is not None:
            self.fabric.sums.check()
        if self.link is not None:
            self.link.check()
            self.link.end.check()
