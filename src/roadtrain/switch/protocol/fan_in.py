"""State machine of the fan-in end, which connects one server to workers whose gradients are summed
in the network (LuWu, section 3). Events in, actions out; no clock, no I/O.

    Pull           once all workers have sent a Pull of a chunk, the chunk is requested from the
                   server once and sent to all workers (Broadcast). A worker that has waited for 1 s
                   gets the chunk alone (Give)
    Announce       the r-th gradients of a chunk, one per worker, form one round. A worker that has
                   closed the chunk with fewer gradients adds zeros:
                       Grant -> exponents -> SendMaxima -> gradient packets -> PushRound
    Close, ApplyUpdate, DiscardGrad    once all workers have sent the message, the message is sent
                   to the server, after the earlier rounds of the chunk

Packet numbers are assigned in order, each once. Each SendMaxima needs a free sum buffer, in the
order of the grants. So memory is bounded (Rule 4), and a round never waits for a later round of the
same chunk. Every announced gradient is granted, even a discarded gradient, because the sequence of
packets may not have gaps.

NOTE alone. Workers with gradients of different chunks (experts) could wait for each other forever.
After 1 s, a chunk is therefore summed without workers that wait with a gradient of another chunk.
Their gradients are added in a later round, so the bits of the sum depend on timing. If another
server must compute the same bytes, this raises LoopError.

Assumes that the messages of each worker arrive in order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from roadtrain.errors import LoopError
from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.intermediary import CopyRequest, Give, Intermediary, Key, Up
from roadtrain.servers.protocol.server import agreed
from roadtrain.switch.protocol.chunk_queue import (
    Announce,
    ChunkQueue,
    GradientMessage,
    LateWorker,
    QueuedMessage,
    RoundPhase,
    SumRound,
)

ALONE_S = 1.0  # timeout after which a worker is served without waiting for the others
SAME_LOOP = "every worker must run the same loop with the same model"

# events


@dataclass(frozen=True, slots=True)
class Tick:
    """An event with the current time, by any monotonic clock."""

    now_s: float


@dataclass(frozen=True, slots=True)
class ExponentsArrived:
    """An event: the maxima of a round's exponents have arrived."""

    chunk: int
    round: int


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """An event: the sum of a round is complete in its buffer."""

    chunk: int
    round: int


# actions


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Answer one pull of each worker: send the contents of a buffer to all workers at once."""

    pulls: tuple[m.Pull, ...]
    buffer: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Ask all workers to send the exponents of a round."""

    chunk: int
    round: int
    first: int  # number of the first packet
    # workers that send their oldest announced gradient not granted yet; the others send zeros
    announced: frozenset[int]


@dataclass(frozen=True, slots=True)
class SendMaxima:
    """Send the maxima of a round's exponents to all workers, which then send their gradients as
    integers.
    """

    chunk: int
    round: int
    first: int  # number of the first packet of the gradient
    buffer: int  # for the sum


@dataclass(frozen=True, slots=True)
class PushRound:
    """Push the sum of a round to the server."""

    chunk: int
    round: int
    buffer: int
    fresh: bool


Reported: TypeAlias = Broadcast | Give | PushRound
FanInEvent: TypeAlias = (
    m.Pull
    | GradientMessage
    | m.EndStep
    | m.Commit
    | m.CommitDone
    | m.Pulled
    | m.PeerLost
    | Tick
    | ExponentsArrived
    | GradientArrived
    | m.Done[Reported]
)
FanInAction: TypeAlias = Up | Give | Broadcast | Grant | SendMaxima | PushRound


class FanInStateMachine(Intermediary[Broadcast | Give]):
    def __init__(
        self,
        workers: int,
        buffers: int,
        sums: int,
        packets: Callable[[int], tuple[int, int]],
        now_s: float,
        *,
        replicated: bool = False,
    ) -> None:
        """
        Args:
            buffers: Number of buffers for parameters.
            sums: Number of buffers for sums of gradients.
            packets: Takes the index of a chunk. Returns two counts: how many packets the chunk's
                exponents take, and how many its gradient takes.
            now_s: The current time, by the clock of the ticks.
            replicated: Whether another server has the same chunks and must compute the same bytes.
        """
        assert buffers > 0 and sums > 0
        super().__init__(workers, buffers)
        self.n_sums, self._packets, self._replicated = sums, packets, replicated
        self.apart = 0  # gradients summed in a later round than the others' (NOTE alone)
        self.now = now_s  # time of the last Tick
        # Pulls that not all workers have sent: one queue per worker, with arrival times.
        self.alone: dict[Key, list[deque[tuple[m.Pull, float]]]] = {}
        self.chunks: dict[int, ChunkQueue] = {}
        # Rounds by chunk and number, until the server has read them.
        self.rounds: dict[tuple[int, int], SumRound] = {}
        # Rounds in the phases EXPONENTS and READY in the order of their packet numbers. The first
        # is READY only while no sum buffer is free.
        self.order: deque[SumRound] = deque()
        # Invariant: each sum buffer is either free or used by one round.
        self.free_sums = list(range(sums))
        self.next_number = 0  # next packet number of the upward stream
        # Step -> updates that all workers have requested and that are not sent to the server yet;
        # no zeros.
        self.owed: Counter[int] = Counter()
        self.ended: dict[int, m.EndStep] = {}  # steps ended by all workers that have updates owed

    def handle(self, event: FanInEvent) -> list[FanInAction]:
        """Handle an event and return the next actions.

        Raises:
            LostError: A step needs a worker that has left.
            LoopError: Workers contradict each other.
        """
        match event:
            case m.Pull():
                return [*self._pull(event)]
            case m.Pulled():
                return [*self._pulled(event)]
            case Announce() | m.Close() | m.ApplyUpdate() | m.DiscardGrad():
                return self._gradient(event)
            case ExponentsArrived(chunk, number):
                self.rounds[chunk, number].enter(RoundPhase.READY, self.now)
                return self._grant_data()
            case GradientArrived(chunk, number):
                self.rounds[chunk, number].enter(RoundPhase.SUMMED, self.now)
                return self._flush(self.chunks[chunk])
            case m.Done(action):
                return self._done(action)
            case Tick(now_s):
                self.now = now_s
                return [*self._pulls_alone(), *self._gradients_alone()]
            case m.EndStep() | m.Commit() | m.CommitDone() | m.PeerLost():
                return [*self._behind_updates(self._step(event))]

    def _done(self, action: Reported) -> list[FanInAction]:
        match action:
            case Give(pull):
                return [*self._delivered(pull)]
            case Broadcast(pulls):
                return [*self._delivered(pulls[0])]
            case PushRound(chunk, number):
                round = self.rounds.pop((chunk, number))
                assert round.phase is RoundPhase.PUSHED and round.buffer is not None
                self.free_sums.append(round.buffer)
                return self._grant_data()

    def in_step(self) -> bool:
        return any(not chunk.idle for chunk in self.chunks.values())

    # pulls

    def _pull(self, pull: m.Pull) -> list[Up | Broadcast | Give]:
        key = pull.chunk, pull.version
        waiting = self.alone.setdefault(key, [deque() for _ in range(self.workers)])
        waiting[pull.worker].append((pull, self.now))
        if not all(waiting):
            return []
        pulls = tuple(queue.popleft()[0] for queue in waiting)
        if not any(waiting):
            del self.alone[key]
        return self._request(CopyRequest(pulls[0], partial(Broadcast, pulls)))

    def _pulls_alone(self) -> list[Up | Broadcast | Give]:
        late: list[m.Pull] = []
        for key, waiting in list(self.alone.items()):
            for queue in waiting:
                while queue and self.now - queue[0][1] >= ALONE_S and not self._early(queue[0][0]):
                    late.append(queue.popleft()[0])
            if not any(waiting):
                del self.alone[key]
        out: list[Up | Broadcast | Give] = []
        for pull in late:
            out += self._request(CopyRequest(pull, partial(Give, pull)))
        return out

    def _early(self, pull: m.Pull) -> bool:
        """Return whether the pull waits for an update that other workers have not requested yet. It
        would occupy a buffer that they may need.
        """
        chunk = self.chunks.get(pull.chunk)
        queue = () if chunk is None else chunk.queues[pull.worker]
        return any(isinstance(queued.message, m.ApplyUpdate) for queued in queue)

    # gradients

    def _gradient(self, message: GradientMessage) -> list[FanInAction]:
        if not isinstance(message, m.DiscardGrad):
            self._nobody_lost()
        chunk = self.chunks.get(message.chunk)
        if chunk is None:
            chunk = ChunkQueue(message.chunk, [deque() for _ in range(self.workers)])
            self.chunks[message.chunk] = chunk
        chunk.queues[message.worker].append(QueuedMessage(message, self.now))
        return self._match(chunk)

    def _match(self, chunk: ChunkQueue) -> list[FanInAction]:
        """Handle messages about a chunk, as long as there is a message of each worker."""
        out: list[FanInAction] = []
        while all(chunk.queues):
            heads = chunk.heads
            if chunk.dropped and not chunk.without:
                self._discard(chunk)
            elif any(isinstance(message, Announce) for message in heads):
                out += self._grant(chunk)
            elif any(isinstance(message, m.DiscardGrad) for message in heads):
                self._discard(chunk)
            elif any(isinstance(message, m.Close) for message in heads):
                self._close(chunk)
            else:
                self._update(chunk)
        return out + self._flush(chunk)

    def _grant(self, chunk: ChunkQueue) -> list[FanInAction]:
        """Start a round with the gradients of the workers whose first message announces one."""
        messages: list[Announce] = chunk.pop(Announce)
        for message in messages:
            if message.fresh == (message.worker in chunk.announced):
                raise LoopError(
                    f"worker {message.worker} announced its {'first' if message.fresh else 'next'}"
                    f" gradient of chunk {chunk.number} in this step, but"
                    f" {'one' if message.fresh else 'none'} was summed before",
                    hint=SAME_LOOP,
                )
        chunk.rounds += 1
        round = SumRound(chunk.number, chunk.rounds, not chunk.summed, self.now)
        announced = frozenset(message.worker for message in messages)
        self._check_apart(chunk, announced)
        chunk.announced |= announced
        chunk.summed, chunk.closed = True, False
        chunk.up.append(round)
        self.rounds[chunk.number, round.number] = round
        self.order.append(round)
        exponents, _ = self._packets(chunk.number)
        return [Grant(chunk.number, round.number, self._numbers(exponents), announced)]

    def _check_apart(self, chunk: ChunkQueue, announced: frozenset[int]) -> None:
        """Count gradients whose workers were left out of an earlier round (see NOTE alone). Raises
        LoopError if another server must compute the same bytes.
        """
        late = announced & chunk.without
        self.apart += len(late)
        if late and self._replicated:
            raise LoopError(
                f"chunk {chunk.number} was summed without worker(s) {_listed(sorted(late))}, which"
                " waited with gradients of other chunks and announced their gradient of this chunk"
                " later: another server with this chunk may have rounded the sum differently",
                hint="raise the host budget, so that workers need not wait, or remove fan_in",
            )

    def _discard(self, chunk: ChunkQueue) -> None:
        """Discard the sum of a chunk. Raises LoopError unless all workers with a gradient in it
        request that.
        """
        if not chunk.dropped:
            keep = chunk.announced - chunk.at(m.DiscardGrad)
            if closed := keep & chunk.at(m.Close):
                for worker in closed:
                    chunk.queues[worker].popleft()
                return
            drop = chunk.at(m.DiscardGrad)
            raise LoopError(
                f"worker(s) {_listed(sorted(drop))} discard their gradient of chunk {chunk.number},"
                f" worker(s) {_listed(sorted(keep))} do not, but all are already in one sum",
                hint=SAME_LOOP,
            )
        chunk.pop(m.DiscardGrad)
        if chunk.summed:
            chunk.up.append(m.DiscardGrad(chunk.number))
        chunk.begin()

    def _close(self, chunk: ChunkQueue) -> None:
        step = self._step_of(chunk)
        chunk.pop(m.Close)
        if not chunk.closed:
            chunk.closed = True
            chunk.up.append(m.Close(chunk.number, step))

    def _update(self, chunk: ChunkQueue) -> None:
        step = self._step_of(chunk)
        update = agreed(chunk.pop(m.ApplyUpdate))
        if not chunk.closed and self.workers > 1:
            chunk.up.append(m.Close(chunk.number, step))
        chunk.up.append(replace(update, worker=0))
        self.owed[step] += 1
        chunk.begin()

    def _step_of(self, chunk: ChunkQueue) -> int:
        """Return the step in the first message of each worker. Raises LoopError if the steps
        differ.
        """
        steps = [x.step for x in chunk.heads if isinstance(x, (m.Close, m.ApplyUpdate))]
        if len(set(steps)) > 1:
            raise LoopError(
                f"workers 0 to {self.workers - 1} close chunk {chunk.number} in different steps:"
                f" {_listed(steps)}",
                hint=SAME_LOOP,
            )
        return steps[0]

    def _flush(self, chunk: ChunkQueue) -> list[FanInAction]:
        """Send messages and summed rounds of a chunk to the server, in order, up to the first
        missing sum.
        """
        out: list[FanInAction] = []
        while chunk.up:
            first = chunk.up[0]
            if not isinstance(first, SumRound):
                out += [Up(first), *self._paid(first)]
            elif first.phase is RoundPhase.SUMMED and first.buffer is not None:
                first.enter(RoundPhase.PUSHED, self.now)
                out.append(PushRound(first.chunk, first.number, first.buffer, first.fresh))
            else:
                break
            chunk.up.popleft()
        return out

    def _behind_updates(self, messages: Sequence[Up]) -> list[Up]:
        """Return the messages to send to the server now. The end of a step waits for its
        updates.
        """
        out = []
        for up in messages:
            if isinstance(up.message, m.EndStep) and self.owed[up.message.step]:
                self.ended[up.message.step] = up.message
            else:
                out.append(up)
        return out

    def _paid(self, message: m.Close | m.ApplyUpdate | m.DiscardGrad) -> list[Up]:
        """Count an update that is sent to the server. After the last of its step, return the end of
        the step.
        """
        if not isinstance(message, m.ApplyUpdate):
            return []
        self.owed[message.step] -= 1
        if self.owed[message.step]:
            return []
        del self.owed[message.step]
        end = self.ended.pop(message.step, None)
        return [] if end is None else [Up(end)]

    def _grant_data(self) -> list[FanInAction]:
        out: list[FanInAction] = []
        while self.order and self.order[0].phase is RoundPhase.READY and self.free_sums:
            round = self.order.popleft()
            round.enter(RoundPhase.GRADIENT, self.now)
            round.buffer = self.free_sums.pop()
            _, gradient = self._packets(round.chunk)
            first = self._numbers(gradient)
            out.append(SendMaxima(round.chunk, round.number, first, round.buffer))
        return out

    def _numbers(self, count: int) -> int:
        """Assign `count` packet numbers, and return the first."""
        first, self.next_number = self.next_number, self.next_number + count
        return first

    # stragglers

    @property
    def partly(self) -> list[ChunkQueue]:
        """The chunks about which only some workers have sent a message."""
        return [chunk for chunk in self.chunks.values() if any(chunk.queues)]

    def _gradients_alone(self) -> list[FanInAction]:
        """Start rounds without some workers, if the workers would wait forever otherwise (see NOTE
        alone).
        """
        waits = {
            chunk.number: {
                worker
                for worker in chunk.at(Announce)
                if self.now - chunk.queues[worker][0].since >= ALONE_S
            }
            for chunk in self.partly
        }
        waiting = set[int]().union(*waits.values())
        out: list[FanInAction] = []
        for number in sorted(number for number, workers in waits.items() if workers):
            chunk = self.chunks[number]
            if (lacking := chunk.lacking) <= waiting:
                out += self._grant(chunk)
                chunk.without |= lacking
                out += self._match(chunk)
        return out

    def late(self) -> list[LateWorker]:
        """List the stragglers, each with the chunk for which the others have waited longest."""
        found: dict[int, LateWorker] = {}
        for chunk in self.partly:
            since = min(queue[0].since for queue in chunk.queues if queue)
            for worker in chunk.lacking:
                if worker not in found or since < found[worker].since:
                    found[worker] = LateWorker(worker, chunk.number, since)
        return [found[worker] for worker in sorted(found)]

    def stuck(self, longer_s: float) -> int:
        """Count the rounds that have waited more than `longer_s` seconds for packets of workers."""
        under_way = RoundPhase.EXPONENTS, RoundPhase.GRADIENT
        return sum(
            round.phase in under_way and self.now - round.since > longer_s
            for round in self.rounds.values()
        )

    def check(self) -> None:
        """Assert every invariant."""
        super().check()
        for waiting in self.alone.values():
            assert any(waiting) and not all(waiting)
        assert all(self.owed.values()) and set(self.ended) <= set(self.owed)
        used = [round.buffer for round in self.rounds.values() if round.buffer is not None]
        assert sorted(used + self.free_sums) == list(range(self.n_sums))
        before = RoundPhase.EXPONENTS, RoundPhase.READY
        assert sum(r.phase in before for r in self.rounds.values()) == len(self.order)
        assert not (self.free_sums and self.order and self.order[0].phase is RoundPhase.READY)
        for (number, count), round in self.rounds.items():
            assert (round.chunk, round.number) == (number, count)
            assert (round.buffer is None) == (round.phase in before) == (round in self.order)
            assert (round.phase is RoundPhase.PUSHED) == (round not in self.chunks[number].up)
        for number, chunk in self.chunks.items():
            assert chunk.number == number and not all(chunk.queues)
            assert not chunk.announced or chunk.summed
            assert not chunk.up or (
                isinstance(chunk.up[0], SumRound) and chunk.up[0].phase is not RoundPhase.SUMMED
            )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
