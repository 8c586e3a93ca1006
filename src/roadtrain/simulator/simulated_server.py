"""Simulate one stage's server with the state machines of real servers.

Each action of ServerStateMachine (Answer, Hold, Read, Update, Write, Prepare) becomes a task on the
virtual clock. CommitStateMachine decides when a step is committed. Equal servers are simulated as
one server. The simulation computes no values: each gradient is None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from typing import Any

from roadtrain.chunks import Block, Chunk, Run, Span
from roadtrain.config.models import BlockShape
from roadtrain.config.plan_file import Plan
from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.blocks import BlockAnswers
from roadtrain.servers.protocol.chunk_state import Resident
from roadtrain.servers.protocol.commit import Addressed, CommitStateMachine
from roadtrain.servers.protocol.queues import READ_PARAMETERS, READ_STATE, WRITE_STATE, DeviceQueue
from roadtrain.servers.protocol.server import ServerStateMachine
from roadtrain.servers.protocol.server_steps import ServerSpec
from roadtrain.simulator.engine import Cost, Engine, Lane, Task, Then
from roadtrain.simulator.fabric import Fabric

SMALLEST = 8 << 20  # the least number of parameters of a piece, if a block has several pieces
ROW_BYTES = 2  # bytes of each element of a row that a block looks up (config/models.py)


@dataclass(frozen=True)
class BlockPieces:
    """The division of blocks into chunks: `pieces` chunks per block, numbered block by block. The
    transfers, reads and updates of a block's chunks overlap, as in a real run."""

    pieces: int
    params: Sequence[float]  # for each block, the parameters that are transferred
    updated: Sequence[float]  # for each block, the parameters whose state is at this server
    rows: Sequence[float]  # for each block, the elements of tables that a step reads and updates

    @property
    def chunks(self) -> int:
        return len(self.params) * self.pieces

    @property
    def every(self) -> int:
        """All chunks of a block, as a bitmap."""
        return (1 << self.pieces) - 1

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks as messages name them, each of one parameter. Their chunks have no sizes."""
        out = []
        for block in range(len(self.params)):
            run = block, 0, "fp32", 0, True, 0, 0, 0, (Span(block, 0, 0, 0),)
            chunks = [Chunk(*run, block * self.pieces + i, 0) for i in range(self.pieces)]
            out.append(Block(block, "", range(block, block + 1), (Run(*run),), tuple(chunks), 0, 0))
        return out

    def block(self, chunk: int) -> int:
        return chunk // self.pieces

    def params_of(self, chunk: int) -> float:
        return self.params[chunk // self.pieces] / self.pieces

    def updated_of(self, chunk: int) -> float:
        block = chunk // self.pieces
        return (self.updated[block] + self.rows[block]) / self.pieces

    def state_of(self, chunk: int) -> float:
        """Return the number of a chunk's parameters whose state an update reads and writes."""
        block = chunk // self.pieces
        return (self.params[block] + self.rows[block]) / self.pieces


def block_pieces(plan: Plan, blocks: Sequence[BlockShape]) -> BlockPieces:
    parallelism = plan.parallelism
    # number of ranks that sum an expert's gradients, and that sum all other gradients
    e, n = parallelism.replicas // parallelism.ep, parallelism.replicas
    summed = (1 - 1 / e) / (1 - 1 / n) / parallelism.ep if n > 1 else 1.0
    here = 1.0 if plan.placement.state == "split" else 1 / parallelism.ep

    def own(block: BlockShape, share: float) -> float:
        return (block.params - block.tables - block.experts * (1 - share)) / parallelism.tp

    params = [own(block, summed) for block in blocks]
    updated = [own(block, here) for block in blocks]
    most = max(params, default=0.0)
    pieces = ceil(most / plan.memory.chunk) if plan.memory.chunk else min(4, int(most // SMALLEST))
    return BlockPieces(max(1, pieces), params, updated, [_rows(plan, block) for block in blocks])


def _rows(plan: Plan, block: BlockShape) -> float:
    """Return the number of elements per device of this block's embedding tables that the samples of
    a step use. In every placement, tables are divided among all devices."""
    elements = block.touched / ROW_BYTES * plan.micro_batch * plan.num_microbatches
    touched = min(float(block.tables), elements * plan.parallelism.dp)
    alone = plan.placement.update == "device" and plan.placement.state == "device"
    return touched / (plan.parallelism.replicas if alone else plan.parallelism.tp)


class SimulatedServer:
    """The server of one stage on the virtual clock. If replicas are simulated separately, each
    replica has its own object, which does this replica's share of the server's work."""

    def __init__(
        self, engine: Engine, fabric: Fabric, blocks: BlockPieces, name: str, fetches: Lane | None
    ) -> None:
        self.engine, self.fabric, self.blocks, self.name = engine, fabric, blocks, name
        # a lane that sends one answer at a time; if None, answers are sent concurrently
        self.fetches = fetches
        self.updates = engine.lane(f"{name} updates")
        self.disk = DeviceQueue(limit=fabric.depth)
        self.commits = CommitStateMachine([0], 0)
        # chunk -> the transfer of its parameters from a processor in an SSD to memory after its
        # last update
        self.upstream: dict[int, Task] = {}
        pieces = range(blocks.chunks)
        self.answers = BlockAnswers(0, blocks.blocks, pieces, lambda sums: None)
        self.inbox: deque[m.Event] = deque()  # events that wait until the current event is handled
        self.busy = False
        # set by the stage; called with the answer to each pull
        self.pulled: Callable[[m.Pulled | m.BlockPulled], None]
        self.held: Then  # set by the stage; called when a gradient is held

    @cached_property
    def machine(self) -> ServerStateMachine:
        """The server's state machine, which is created on first use."""
        plan, durable, chunks = self.fabric.plan, self.fabric.on_files, self.blocks.chunks
        # the first chunks stay in memory, because the next forward needs them first
        resident = round(plan.memory.resident * chunks)
        weights = round(self.fabric.weights_share(sum(self.blocks.params)) * chunks)

        def part(chunk: int) -> Resident:
            if not durable or chunk < resident:
                return Resident.RECORD
            return Resident.WEIGHTS if chunk < weights else Resident.NOTHING

        return ServerStateMachine(
            ServerSpec(
                0,
                {chunk: part(chunk) for chunk in range(chunks)},
                plan.memory.buffers if durable else 0,
                durable=durable,
                delayed=dict.fromkeys(range(chunks), False) if plan.staleness else {},
            )
        )

    @property
    def holding(self) -> bool:
        """True if any gradient is still on its way to host memory or to an SSD."""
        return any(chunk.holds for chunk in self.machine.chunks.values())

    def handle(self, event: m.Event | m.BlockMessage) -> None:
        """Pass an event to the server's state machine, after all earlier events."""
        self.inbox += self.answers.divided(event)
        if self.busy:
            return
        self.busy = True
        while self.inbox:
            for action in self.machine.handle(self.inbox.popleft()):
                self._carry_out(action)
        self.busy = False

    def end_step(self, step: int) -> None:
        """End a step whose updates have all been requested."""
        self._send(self.commits.end_step(step))
        self._send(self.commits.blob(step, None))

    def _send(self, messages: Sequence[Addressed]) -> None:
        for _, message in messages:
            self.handle(message)

    def _carry_out(self, action: m.Action) -> None:
        match action:
            case m.Answer():
                self._answer(action)
            case m.Hold(push):
                cost = self.fabric.hold(self.blocks.params_of(push.chunk))
                self._on_disk(WRITE_STATE, "Write", cost, partial(self._held, action), -1)
            case m.Read(chunk):
                cost = self.fabric.read(self.blocks.state_of(chunk))
                self._on_disk(READ_STATE, "Read", cost, partial(self._done, action))
            case m.Update(chunk):
                cost = self.fabric.update(self.blocks.updated_of(chunk))
                self._cost("Update", cost, partial(self._updated, action), lane=self.updates)
            case m.Write(chunk):
                cost = self.fabric.write(self.blocks.state_of(chunk))
                self._on_disk(WRITE_STATE, "Write", cost, partial(self._done, action))
            case m.Prepare():
                self._cost("Commit", Cost(0.0), partial(self._done, action))
            case m.Send(message, to):
                self._reply(self.answers.joined(message, to))
            case _:
                raise AssertionError(f"unexpected action of the server: {action}")

    def _reply(self, message: Any) -> None:
        match message:
            case m.Pulled() | m.BlockPulled():
                self.pulled(message)
            case m.CommitDone():
                self._send(self.commits.on_committed(message))

    def _answer(self, action: m.Answer) -> None:
        chunk = action.pull.chunk
        size = self.blocks.params_of(chunk)
        after = [self.upstream[chunk]] if chunk in self.upstream else []

        def give() -> None:
            done, cost = partial(self._done, action), self.fabric.serve(size)
            self._cost("Fetch", cost, done, after=after, lane=self.fetches)

        if action.memory:
            give()
        else:
            self._on_disk(READ_PARAMETERS, "Read", self.fabric.public(size), give)

    def _done(self, action: m.Action) -> None:
        self.handle(m.Done(action))

    def _held(self, hold: m.Hold) -> None:
        self.handle(m.Done(hold, (None, True)))
        self.held()

    def _updated(self, update: m.Update) -> None:
        up = self.fabric.upstream(self.blocks.params_of(update.chunk))
        if up.uses:  # move the parameters at once, so that the next step finds them in memory
            self.upstream[update.chunk] = self._cost("Fetch", up, None)
        self._done(update)

    # actions that take time

    def _cost(
        self,
        stage: str,
        cost: Cost,
        then: Then | None,
        *,
        after: Sequence[Task] = (),
        lane: Lane | None = None,
    ) -> Task:
        return self.engine.task(
            stage, cost.of_bytes, then=then, after=after, lane=lane, where=self.name
        )

    def _on_disk(self, priority: int, stage: str, cost: Cost, then: Then, order: int = 0) -> None:
        """Run a task when the queue of the SSDs admits it, or at once if it uses no SSD.
        `priority`: the kind of access, such as READ_STATE."""
        if not cost.uses:
            self._cost(stage, cost, then)
            return
        self.disk.push(priority, order, (stage, cost, then))
        self._serve_disk()

    def _serve_disk(self) -> None:
        while (item := self.disk.next()) is not None:
            priority, (stage, cost, then) = item
            self._cost(stage, cost, partial(self._disk_done, priority, then))

    def _disk_done(self, priority: int, then: Then) -> None:
        self.disk.done(priority)
        then()
        self._serve_disk()

    def check(self) -> None:
        """Assert the invariants of the state machines and of the queue of the SSDs."""
        self.machine.check()
        self.commits.check()
        self.answers.check()
        self.disk.check()
