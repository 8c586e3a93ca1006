"""The gradients that a participant has announced, and the numbers that were granted to send them
with. No threads, no sockets.

    announce -> waits until the round that takes it is granted -> its exponents have numbers
    maxima of all participants -> its integers have numbers -> all acknowledged: free

A participant that has nothing for a round sends zeros. The memory of a gradient is read whenever
its packets are made, also again; so it is free only once all are acknowledged and none is being
made.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from roadtrain.chunks import Chunk
from roadtrain.errors import WireError
from roadtrain.servers import frames as m
from roadtrain.switch import fixed_point
from roadtrain.switch.packets import BLOCK, PAYLOAD_NBYTES, Kind

ROUNDS = 1 << 32  # a packet's count of rounds begins again after so many
Sent = Callable[[], None]


@dataclass(frozen=True)
class Gradient:
    """What was announced. `values`: flat, numel of them, fp32 or the bits of `dtype` as uint16."""

    values: np.ndarray
    dtype: str
    sent: Sent  # its memory is free


NOTHING = Gradient(np.empty(0, np.float32), "fp32", lambda: None)  # zeros


@dataclass
class Round:
    """One sum of a chunk."""

    chunk: int
    round: int
    elements: int
    gradient: Gradient
    maxima: np.ndarray  # uint8, padded to whole packets: greatest exponents of all participants
    missing: set[int]  # packets of `maxima` that have not come
    own: np.ndarray | None = None  # uint8, one a block: exponents of this participant's gradient

    @property
    def blocks(self) -> int:
        return -(-self.elements // BLOCK)

    def exponents(self) -> np.ndarray:
        """Computed when they are first needed; by one thread."""
        if self.own is None:
            self.own = np.zeros(self.blocks, np.uint8)
            if len(self.gradient.values):
                fixed_point.exponents(self.gradient.values, self.gradient.dtype, self.own)
        return self.own


@dataclass(order=True)
class Numbers:
    """A run of numbers: the packets of one kind of a round, in order."""

    first: int
    count: int = field(compare=False)
    kind: Kind = field(compare=False)
    round: Round = field(compare=False)

    @property
    def end(self) -> int:
        return self.first + self.count


class Granted:
    """All of one link.

    Invariants: runs of numbers do not overlap and are in order; below `ready` each number is of a
    run or acknowledged; the rounds in `_making` are not given back."""

    def __init__(self, chunks: Sequence[Chunk], width: int) -> None:
        self._chunks, self._width = chunks, width
        self._announced: dict[int, deque[Gradient]] = {}  # chunk -> not granted yet, in order
        self._rounds: dict[tuple[int, int], Round] = {}  # whose maxima have not all come
        self._runs: list[Numbers] = []  # not acknowledged, in order
        self._making: list[Round] = []  # whose packets are being made
        self.ready = 0  # all numbers below it can be sent
        self._acked = 0

    def announce(self, chunk: int, gradient: Gradient) -> None:
        self._announced.setdefault(chunk, deque()).append(gradient)

    def take_back(self, chunk: int) -> None:
        """The last one was not announced after all."""
        self._announced[chunk].pop()

    def grant(self, grant: m.GrantHeader) -> None:
        """Raises WireError for a chunk that cannot be summed."""
        if not 0 <= grant.chunk < len(self._chunks) or grant.first < self.ready:
            raise WireError(f"chunk {grant.chunk} was granted the number {grant.first}")
        gradient = NOTHING
        if grant.announced:
            if not (waiting := self._announced.get(grant.chunk)):
                raise WireError(f"round {grant.round} of chunk {grant.chunk} was not announced")
            gradient = waiting.popleft()
        elements = self._chunks[grant.chunk].numel
        count = fixed_point.exponent_packets_of(elements)
        maxima = np.zeros(count * PAYLOAD_NBYTES, np.uint8)
        round = Round(
            grant.chunk, grant.round, elements, gradient, maxima, missing=set(range(count))
        )
        self._rounds[grant.chunk, grant.round % ROUNDS] = round
        self._add(Numbers(grant.first, count, Kind.EXPONENTS, round))

    def maxima(self, chunk: int, number: int, index: int, first: int, payload: np.ndarray) -> None:
        """A packet of a round's maxima; all of them grant the numbers from `first` on. WireError
        where they are not waited for."""
        round = self._rounds.get((chunk, number))
        if round is None or index not in round.missing:
            raise WireError(f"maxima {index} of chunk {chunk}, round {number}, are not waited for")
        round.maxima[index * PAYLOAD_NBYTES : (index + 1) * PAYLOAD_NBYTES] = payload
        round.missing.remove(index)
        if not round.missing:
            del self._rounds[chunk, number]
            count = fixed_point.packets_of(round.elements, self._width)
            self._add(Numbers(first, count, Kind.GRADIENT, round))

    def _add(self, run: Numbers) -> None:
        if run.first < self.ready:
            raise WireError(f"the number {run.first} was granted twice, {self.ready} is next")
        insort(self._runs, run)
        at = bisect_right(self._runs, self.ready, key=lambda one: one.first) - 1
        while 0 <= at < len(self._runs) and self._runs[at].first == self.ready:
            self.ready = self._runs[at].end
            at += 1

    def make(self, first: int, count: int) -> list[tuple[Numbers, int, int]]:
        """(run, first packet of it, how many) of those numbers that are not acknowledged. They are
        being made until `made`."""
        out: list[tuple[Numbers, int, int]] = []
        at = max(0, bisect_right(self._runs, first, key=lambda one: one.first) - 1)
        for run in self._runs[at:]:
            begin, end = max(first, run.first), min(first + count, run.end)
            if begin < end:
                out.append((run, begin - run.first, end - begin))
            elif run.first >= first + count:
                break
        self._making = [run.round for run, _, _ in out]
        return out

    def made(self) -> list[Sent]:
        self._making = []
        return self._free()

    def acked(self, below: int) -> list[Sent]:
        """All numbers below it have been summed. What is to be called, as memory is free."""
        self._acked = max(self._acked, below)
        return self._free()

    def _free(self) -> list[Sent]:
        out: list[Sent] = []
        while self._runs and self._runs[0].end <= self._acked:
            if any(self._runs[0].round is round for round in self._making):
                break
            run = self._runs.pop(0)
            if run.kind is Kind.GRADIENT:
                out.append(run.round.gradient.sent)
        return out

    def give_up(self) -> list[Sent]:
        """The link has ended, and none is being made: all that was announced is free."""
        waiting = [g.sent for chunk in self._announced.values() for g in chunk]
        under_way = [round.gradient.sent for round in self._rounds.values()]
        granted = [r.round.gradient.sent for r in self._runs if r.kind is Kind.GRADIENT]
        self._announced, self._rounds, self._runs = {}, {}, []
        return waiting + under_way + granted

    @property
    def waiting(self) -> int:
        """Gradients that are announced and not granted."""
        return sum(map(len, self._announced.values()))

    def check(self) -> None:
        """Assert every invariant."""
        for one, other in zip(self._runs, self._runs[1:]):
            assert one.end <= other.first
        for round in self._rounds.values():
            assert round.missing
