"""What the end of a fan-in does next: it stands between workers whose gradients are summed in the
network (Sun et al., LuWu, section 3) and one server. Events in, actions out; pure.

    Pull of all    the server is asked once, and all get the copy at once (Broadcast). A pull that
                   others do not join for ALONE_S is answered by itself (Give)
    Announce ..    the r-th gradients that all have of a chunk are one round; who has closed the
                   chunk with fewer adds zeros:
                       Grant -> exponents -> SendMaxima -> gradient packets -> PushRound
    Close, ApplyUpdate, DiscardGrad, once all have said them, go on behind the rounds before them

Numbers of the stream that goes up are given out here, in order, each once: they are sent in that
order, so nobody's are given out before all can send them. Data are granted in the order of the
exponents, where a sum buffer is free: what is under way is bounded by `sums` (Rule 4), and the
round that all later ones of its chunk wait for is never the one without a buffer. Every gradient
that was announced is granted some time, also one that was discarded: its numbers must come.

NOTE alone. Workers with gradients of different chunks (experts) and few buffers could all wait for
each other: each has announced what the others have not. So where everybody that lacks a chunk waits
in this way for ALONE_S, those that have announced it are summed without the others, who add theirs
in a round of its own. `Tick` says what time it is; without it nobody is late. Integers of two
rounds are rounded otherwise than those of one, so the sum then depends on the time: it is counted
(`apart`), and refused where another server makes the same bytes.

Assumes each worker's messages in their order. What it shares with relays:
servers/protocol/intermediary.py.
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
    GradientWord,
    Heard,
    LateWorker,
    RoundPhase,
    SumRound,
)

ALONE_S = 1.0  # for the others to say the same, before a worker is served without them
SAME_LOOP = "every worker runs the same loop with the same model"

# events


@dataclass(frozen=True, slots=True)
class Tick:
    """What time it is, by any clock that only goes forward."""

    now_s: float


@dataclass(frozen=True, slots=True)
class ExponentsCame:
    """The greatest exponents of a round, of all its blocks, are here."""

    chunk: int
    round: int


@dataclass(frozen=True, slots=True)
class GradientCame:
    """The sum of a round is whole, in its buffer."""

    chunk: int
    round: int


# actions


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send what is in a buffer to all workers at once: one pull of each."""

    pulls: tuple[m.Pull, ...]
    buffer: int


@dataclass(frozen=True, slots=True)
class Grant:
    """All workers send the exponents of a round."""

    chunk: int
    round: int
    first: int  # number of the first packet
    # whose gradient it is: of each the first announced that was not granted; the others send zeros
    announced: frozenset[int]


@dataclass(frozen=True, slots=True)
class SendMaxima:
    """The greatest exponents go to all workers, who send their integers."""

    chunk: int
    round: int
    first: int  # number of the first packet of the gradient
    buffer: int  # for the sum


@dataclass(frozen=True, slots=True)
class PushRound:
    """The sum of a round goes to the server."""

    chunk: int
    round: int
    buffer: int
    fresh: bool


Reported: TypeAlias = Broadcast | Give | PushRound
FanInEvent: TypeAlias = (
    m.Pull
    | GradientWord
    | m.EndStep
    | m.Commit
    | m.CommitDone
    | m.Pulled
    | m.PeerLost
    | Tick
    | ExponentsCame
    | GradientCame
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
        """`buffers`: for copies of parameters; `sums`: for sums of gradients; `packets`: of the
        exponents and of the gradient of a chunk; `now_s`: the time now, by the clock of the ticks:
        what arrives before the first tick waits since then; `replicated`: another server has the
        same chunks and must come to the same bytes."""
        assert buffers > 0 and sums > 0
        super().__init__(workers, buffers)
        self.n_sums, self._packets, self._replicated = sums, packets, replicated
        self.apart = 0  # gradients that came after their round had gone without them
        self.now = now_s  # of the last Tick
        # Pulls of some workers, not of all: of each worker, with the time they came.
        self.alone: dict[Key, list[deque[tuple[m.Pull, float]]]] = {}
        self.chunks: dict[int, ChunkQueue] = {}
        # Rounds by chunk and number, until the server has them.
        self.rounds: dict[tuple[int, int], SumRound] = {}
        # Those of EXPONENTS and READY in the order of their numbers; the first is not READY where
        # a sum buffer is free.
        self.order: deque[SumRound] = deque()
        # Free sum buffers and those of rounds are disjoint and together all.
        self.free_sums = list(range(sums))
        self.next_number = 0  # of a packet that goes up
        # Step -> its updates that all have asked for and the server has not heard of; never 0.
        self.owed: Counter[int] = Counter()
        self.ended: dict[int, m.EndStep] = {}  # steps that all have ended, with updates owed

    def handle(self, event: FanInEvent) -> list[FanInAction]:
        """Next actions. Raises LostError where a step needs a worker that has gone, LoopError
        where they differ."""
        match event:
            case m.Pull():
                return [*self._pull(event)]
            case m.Pulled(ticket):
                return [*self._pulled(ticket)]
            case Announce() | m.Close() | m.ApplyUpdate() | m.DiscardGrad():
                return self._gradient(event)
            case ExponentsCame(chunk, number):
                self.rounds[chunk, number].enter(RoundPhase.READY, self.now)
                return self._grant_data()
            case GradientCame(chunk, number):
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
        pulls = tuple(one.popleft()[0] for one in waiting)
        if not any(waiting):
            del self.alone[key]
        return self._request(CopyRequest(pulls[0], partial(Broadcast, pulls)))

    def _pulls_alone(self) -> list[Up | Broadcast | Give]:
        late: list[m.Pull] = []
        for key, waiting in list(self.alone.items()):
            for one in waiting:
                while one and self.now - one[0][1] >= ALONE_S and not self._early(one[0][0]):
                    late.append(one.popleft()[0])
            if not any(waiting):
                del self.alone[key]
        out: list[Up | Broadcast | Give] = []
        for pull in late:
            out += self._request(CopyRequest(pull, partial(Give, pull)))
        return out

    def _early(self, pull: m.Pull) -> bool:
        """Whether its worker waits for others to ask for the chunk's update too: until then an
        answer may never come, and would keep a buffer from those that the others wait for."""
        chunk = self.chunks.get(pull.chunk)
        heard = () if chunk is None else chunk.heard[pull.worker]
        return any(isinstance(one.word, m.ApplyUpdate) for one in heard)

    # gradients

    def _gradient(self, word: GradientWord) -> list[FanInAction]:
        if not isinstance(word, m.DiscardGrad):
            self._nobody_lost()
        chunk = self.chunks.get(word.chunk)
        if chunk is None:
            chunk = ChunkQueue(word.chunk, [deque() for _ in range(self.workers)])
            self.chunks[word.chunk] = chunk
        chunk.heard[word.worker].append(Heard(word, self.now))
        return self._match(chunk)

    def _match(self, chunk: ChunkQueue) -> list[FanInAction]:
        """What all have said of a chunk by now."""
        out: list[FanInAction] = []
        while all(chunk.heard):
            heads = chunk.heads
            if chunk.dropped and not chunk.without:
                self._discard(chunk)
            elif any(isinstance(word, Announce) for word in heads):
                out += self._grant(chunk)
            elif any(isinstance(word, m.DiscardGrad) for word in heads):
                self._discard(chunk)
            elif any(isinstance(word, m.Close) for word in heads):
                self._close(chunk)
            else:
                self._update(chunk)
        return out + self._flush(chunk)

    def _grant(self, chunk: ChunkQueue) -> list[FanInAction]:
        """A round of those that have announced a gradient next."""
        words: list[Announce] = chunk.pop(Announce)
        for word in words:
            if word.fresh == (word.worker in chunk.announced):
                raise LoopError(
                    f"worker {word.worker} says that its gradient of chunk {chunk.number} is"
                    f" {'the first' if word.fresh else 'not the first'} of this step; the first was"
                    f" {'summed before' if word.fresh else 'not announced'}",
                    hint=SAME_LOOP,
                )
        chunk.rounds += 1
        round = SumRound(chunk.number, chunk.rounds, not chunk.summed, self.now)
        announced = frozenset(word.worker for word in words)
        self._check_apart(chunk, announced)
        chunk.announced |= announced
        chunk.summed, chunk.closed = True, False
        chunk.up.append(round)
        self.rounds[chunk.number, round.number] = round
        self.order.append(round)
        exponents, _ = self._packets(chunk.number)
        return [Grant(chunk.number, round.number, self._numbers(exponents), announced)]

    def _check_apart(self, chunk: ChunkQueue, announced: frozenset[int]) -> None:
        """NOTE alone."""
        late = announced & chunk.without
        self.apart += len(late)
        if late and self._replicated:
            raise LoopError(
                f"chunk {chunk.number} was summed without worker(s) {_listed(sorted(late))}, who"
                " waited with gradients of other chunks and have one of it after all: the server"
                " with the other copy may have summed it otherwise",
                hint="raise the host budget, so that workers need not wait, or leave fan_in out",
            )

    def _discard(self, chunk: ChunkQueue) -> None:
        """Who has a gradient in the sum drops it. What some of these have closed meanwhile is void;
        others have nothing to drop."""
        if not chunk.dropped:
            keep = chunk.announced - chunk.at(m.DiscardGrad)
            if closed := keep & chunk.at(m.Close):
                for worker in closed:
                    chunk.heard[worker].popleft()
                return
            drop = chunk.at(m.DiscardGrad)
            raise LoopError(
                f"worker(s) {_listed(sorted(drop))} drop their gradient of chunk {chunk.number},"
                f" worker(s) {_listed(sorted(keep))} do not: its sum is made of both already",
                hint=SAME_LOOP,
            )
        chunk.pop(m.DiscardGrad)
        if chunk.summed:
            chunk.up.append(m.DiscardGrad(chunk.number))
        chunk.begin()

    def _close(self, chunk: ChunkQueue) -> None:
        """All have closed it, some by asking for the update."""
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
        """That all mean. Raises LoopError."""
        steps = [word.step for word in chunk.heads if isinstance(word, (m.Close, m.ApplyUpdate))]
        if len(set(steps)) > 1:
            raise LoopError(
                f"workers 0 to {self.workers - 1} are in steps {_listed(steps)} with chunk"
                f" {chunk.number}",
                hint=SAME_LOOP,
            )
        return steps[0]

    def _flush(self, chunk: ChunkQueue) -> list[FanInAction]:
        """What can go to the server by now."""
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

    def _behind_updates(self, said: Sequence[Up]) -> list[Up]:
        """The end of a step goes on once all its updates have."""
        out = []
        for up in said:
            if isinstance(up.message, m.EndStep) and self.owed[up.message.step]:
                self.ended[up.message.step] = up.message
            else:
                out.append(up)
        return out

    def _paid(self, word: m.Close | m.ApplyUpdate | m.DiscardGrad) -> list[Up]:
        if not isinstance(word, m.ApplyUpdate):
            return []
        self.owed[word.step] -= 1
        if self.owed[word.step]:
            return []
        del self.owed[word.step]
        end = self.ended.pop(word.step, None)
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
        """The first of so many that nobody had."""
        first, self.next_number = self.next_number, self.next_number + count
        return first

    # who is late

    @property
    def partly(self) -> list[ChunkQueue]:
        """Chunks of which some workers are heard, and not matched."""
        return [chunk for chunk in self.chunks.values() if any(chunk.heard)]

    def _gradients_alone(self) -> list[FanInAction]:
        """NOTE alone."""
        waits = {
            chunk.number: {
                worker
                for worker in chunk.at(Announce)
                if self.now - chunk.heard[worker][0].since >= ALONE_S
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
        """Who lacks what others have said of a chunk; of each worker what is due longest."""
        found: dict[int, LateWorker] = {}
        for chunk in self.partly:
            since = min(heard[0].since for heard in chunk.heard if heard)
            for worker in chunk.lacking:
                if worker not in found or since < found[worker].since:
                    found[worker] = LateWorker(worker, chunk.number, since)
        return [found[worker] for worker in sorted(found)]

    def stuck(self, longer_s: float) -> int:
        """Rounds in the network that nothing has been heard of for so long."""
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
            assert chunk.number == number and not all(chunk.heard)
            assert not chunk.announced or chunk.summed
            assert not chunk.up or (
                isinstance(chunk.up[0], SumRound) and chunk.up[0].phase is not RoundPhase.SUMMED
            )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
