"""What a participant of a fan-in has under way. No threads, no sockets.

Granted: the gradients that it has announced, and the numbers to send them with.

    announce -> waits until the round that takes it is granted -> its exponents have numbers
    maxima of all participants -> its integers have numbers -> all acknowledged: free

A participant that has nothing for a round sends zeros. The memory of a gradient is read whenever
its packets are made, also again; so it is free only once all are acknowledged and none is being
made.

Pulls: what it has asked its server for and does not have yet. Parameters come to all by datagrams,
or, where the others do not ask for the same, to one by the TCP link.

NOTE which pull. A broadcast names chunk and version, not a ticket: it is that of the first pull of
these that no other broadcast has begun to fill. The packets of one have consecutive numbers, so
`number - index` tells it from another. As each pull is answered once, an answer over TCP finds one
that no broadcast has begun to fill; it takes the last, whichever ticket it names.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roadtrain.chunks import Chunk
from roadtrain.errors import WireError
from roadtrain.servers import frames as m
from roadtrain.switch import fixed_point, switch_frames
from roadtrain.switch.packets import PAYLOAD_NBYTES, Kind
from roadtrain.switch.protocol.numbered import NumberRun, overlapping

ROUNDS = 1 << 32  # a packet's count of rounds begins again after so many
VERSIONS = 1 << 32  # and so does its version of parameters
Sent = Callable[[], None]
Key = tuple[int, int]  # chunk, version modulo VERSIONS


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
        return fixed_point.blocks_of(self.elements)

    def exponents(self) -> np.ndarray:
        """Computed when they are first needed; by one thread."""
        if self.own is None:
            self.own = np.zeros(self.blocks, np.uint8)
            if len(self.gradient.values):
                fixed_point.exponents(self.gradient.values, self.gradient.dtype, self.own)
        return self.own


@dataclass(slots=True)
class Numbers(NumberRun):
    """The packets of one kind of a round, in order."""

    kind: Kind
    round: Round


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

    def grant(self, grant: switch_frames.GrantHeader) -> None:
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
        insort(self._runs, run, key=lambda other: other.first)
        for granted in self._runs:
            if granted.first == self.ready:
                self.ready = granted.end

    def make(self, first: int, count: int) -> list[tuple[Numbers, int, int]]:
        """(run, first packet of it, how many) of those numbers that are not acknowledged. They are
        being made until `made`."""
        out = list(overlapping(self._runs, first, first + count))
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

    def check(self) -> None:
        """Assert every invariant."""
        for one, other in zip(self._runs, self._runs[1:]):
            assert one.end <= other.first
        for round in self._rounds.values():
            assert round.missing


@dataclass
class Asked:
    """A pull. Invariant: `missing` counts the packets whose `here` is False."""

    ticket: int
    key: Key
    into: np.ndarray  # uint8: where it goes
    here: np.ndarray  # bool, one a packet: it has come
    missing: int

    @property
    def header(self) -> bytes:
        """Of the PULLED that answers it."""
        return m.encode((self.ticket, self.key[0]))

    def take(self, index: np.ndarray) -> None:
        """The packets `index` of it have come. WireError where it has no such."""
        if len(index) and int(index.max()) >= len(self.here):
            raise WireError(
                f"packet {int(index.max())} of chunk {self.key[0]} came, it has {len(self.here)}"
            )
        self.here[index] = True
        self.missing = len(self.here) - int(np.count_nonzero(self.here))


class Pulls:
    """All of one link. Invariants: of a key, those in `_begun` are in none of `_waiting`; tickets
    in `_keys` are those of keys that have a pull left."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[Asked]] = {}  # no packet of a broadcast has come; in order
        self._begun: dict[tuple[Key, int], Asked] = {}  # by the first number of its broadcast
        self._keys: dict[int, Key] = {}  # ticket -> what was asked for with it

    def ask(self, pull: m.PullHeader, into: np.ndarray) -> None:
        """`into`: uint8, as long as the answer."""
        key = (pull.chunk, pull.version % VERSIONS)
        count = -(-into.size // PAYLOAD_NBYTES)
        asked = Asked(pull.ticket, key, into, np.zeros(count, bool), count)
        self._waiting.setdefault(key, []).append(asked)
        self._keys[pull.ticket] = key

    def broadcast(self, key: Key, base: int) -> Asked:
        """The pull that is filled by the broadcast whose first packet has the number `base`.
        WireError where nobody has asked."""
        found = self._begun.get((key, base))
        if found is None:
            if not (waiting := self._waiting.get(key)):
                raise WireError(
                    f"parameters of chunk {key[0]}, version {key[1]}, came and were not asked for"
                )
            found = self._begun[key, base] = waiting.pop(0)
        return found

    def whole(self, asked: Asked, base: int) -> None:
        """It has come by a broadcast."""
        del self._begun[asked.key, base]
        self._answered(asked.key)

    def over_tcp(self, ticket: int, chunk: int) -> Asked:
        """The pull that an answer over TCP goes to. WireError where none is waited for."""
        key = self._keys.get(ticket, (-1, 0))
        waiting = self._waiting.get(key)
        if key[0] != chunk or not waiting:
            raise WireError(f"chunk {chunk} came for ticket {ticket}, which did not ask for it")
        taker = waiting.pop()
        self._answered(key)
        return taker

    def _answered(self, key: Key) -> None:
        if not self._waiting.get(key) and all(begun != key for begun, _ in self._begun):
            self._waiting.pop(key, None)
            self._keys = {ticket: of for ticket, of in self._keys.items() if of != key}

    def check(self) -> None:
        """Assert every invariant."""
        assert all(asked.key == key for (key, _), asked in self._begun.items())
        assert set(self._keys.values()) == set(self._waiting) | {key for key, _ in self._begun}
