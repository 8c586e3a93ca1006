"""State of a fan-in participant: gradients to send and parameters to receive. No threads, no I/O.

Granted has the announced gradients, and the packet numbers that the fan-in end has granted for
them. The memory of a gradient is released when all its packets are acknowledged:

    announce -> wait for the grant of a round -> packet numbers for the exponents
    maxima of all participants -> packet numbers for the integers -> all acknowledged: release

Pulls has the requests for parameters that have not arrived yet. Requested parameters are broadcast
in datagrams, or sent over TCP if the other participants do not request them.

NOTE matching pulls. A broadcast names a chunk and a version, but no ticket. It fills the oldest
pull of this chunk and version that no other broadcast has begun to fill. A packet's number minus
its index in the chunk identifies the broadcast. An answer over TCP fills the newest pull of the
same chunk and version that no broadcast has begun to fill. Such a pull exists, because each pull
gets exactly one answer.
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

ROUNDS = 1 << 32  # modulus of round numbers in packets
VERSIONS = 1 << 32  # modulus of versions of parameters in packets
Sent = Callable[[], None]
Key = tuple[int, int]  # chunk, version modulo VERSIONS


@dataclass(frozen=True)
class Gradient:
    """An announced gradient: [numel], fp32 or the bits of `dtype` as uint16."""

    values: np.ndarray
    dtype: str
    sent: Sent  # called when the memory of `values` may be reused


NOTHING = Gradient(np.empty(0, np.float32), "fp32", lambda: None)  # stands for zeros


@dataclass
class Round:
    """A participant's state of one sum of a chunk's gradients."""

    chunk: int
    round: int
    elements: int
    gradient: Gradient
    maxima: np.ndarray  # uint8, padded to whole packets: largest exponents of all participants
    missing: set[int]  # packets of `maxima` that have not arrived
    own: np.ndarray | None = None  # uint8 [blocks]: exponents of this participant's gradient

    @property
    def blocks(self) -> int:
        return fixed_point.blocks_of(self.elements)

    def exponents(self) -> np.ndarray:
        """Return the exponents of this participant's gradient. Not thread-safe."""
        if self.own is None:
            self.own = np.zeros(self.blocks, np.uint8)
            if len(self.gradient.values):
                fixed_point.exponents(self.gradient.values, self.gradient.dtype, self.own)
        return self.own


@dataclass(slots=True)
class Numbers(NumberRun):
    """The packet numbers that were granted for the exponents or for the integers of a round."""

    kind: Kind
    round: Round


class Granted:
    """The announced gradients of one link, and the packet numbers that were granted for them."""

    def __init__(self, chunks: Sequence[Chunk], width: int) -> None:
        self._chunks, self._width = chunks, width
        self._announced: dict[int, deque[Gradient]] = {}  # chunk -> gradients not granted, in order
        self._rounds: dict[tuple[int, int], Round] = {}  # rounds that lack packets of maxima
        self._runs: list[Numbers] = []  # not acknowledged, sorted
        self._making: list[Round] = []  # rounds whose packets are being made
        self.ready = 0  # all numbers below it may be sent
        self._acked = 0

    def announce(self, chunk: int, gradient: Gradient) -> None:
        self._announced.setdefault(chunk, deque()).append(gradient)

    def take_back(self, chunk: int) -> None:
        """Undo the last `announce` of a chunk."""
        self._announced[chunk].pop()

    def grant(self, grant: switch_frames.GrantHeader) -> None:
        """Process a grant of packet numbers for a round's exponents. Raises WireError if it is
        invalid.
        """
        if not 0 <= grant.chunk < len(self._chunks) or grant.first < self.ready:
            raise WireError(
                f"the fan-in end granted packet {grant.first} for chunk {grant.chunk}; the lowest"
                f" free number is {self.ready}, and the last chunk is {len(self._chunks) - 1}"
            )
        gradient = NOTHING
        if grant.announced:
            if not (waiting := self._announced.get(grant.chunk)):
                raise WireError(
                    f"round {grant.round} of chunk {grant.chunk} was granted, but not announced"
                )
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
        """Process a packet with maxima of a round. After the last of them, the round's gradient
        packets get the numbers from `first` on. Raises WireError for an unexpected packet.
        """
        round = self._rounds.get((chunk, number))
        if round is None or index not in round.missing:
            raise WireError(f"unexpected maxima: packet {index} of chunk {chunk}, round {number}")
        round.maxima[index * PAYLOAD_NBYTES : (index + 1) * PAYLOAD_NBYTES] = payload
        round.missing.remove(index)
        if not round.missing:
            del self._rounds[chunk, number]
            count = fixed_point.packets_of(round.elements, self._width)
            self._add(Numbers(first, count, Kind.GRADIENT, round))

    def _add(self, run: Numbers) -> None:
        if run.first < self.ready:
            raise WireError(f"the fan-in end granted packet {run.first} for a second time")
        insort(self._runs, run, key=lambda other: other.first)
        for granted in self._runs:
            if granted.first == self.ready:
                self.ready = granted.end

    def make(self, first: int, count: int) -> list[tuple[Numbers, int, int]]:
        """Find the unacknowledged numbers in [first, first + count). Their gradients are not
        released until `made` is called.

        Returns:
            For each run: (run, first packet in the run, number of packets).
        """
        out = list(overlapping(self._runs, first, first + count))
        self._making = [run.round for run, _, _ in out]
        return out

    def made(self) -> list[Sent]:
        self._making = []
        return self._free()

    def acked(self, below: int) -> list[Sent]:
        """Note that all packets with numbers less than `below` were summed. Returns the callbacks
        to call.
        """
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
        """Release all gradients after the link has ended, and return the callbacks to call. No
        packets may be in the making.
        """
        waiting = [g.sent for chunk in self._announced.values() for g in chunk]
        under_way = [round.gradient.sent for round in self._rounds.values()]
        granted = [r.round.gradient.sent for r in self._runs if r.kind is Kind.GRADIENT]
        self._announced, self._rounds, self._runs = {}, {}, []
        return waiting + under_way + granted

    def check(self) -> None:
        """Assert every invariant."""
        for run, following in zip(self._runs, self._runs[1:]):
            assert run.end <= following.first
        for round in self._rounds.values():
            assert round.missing


@dataclass
class PendingPull:
    """A pull whose answer is incomplete."""

    ticket: int
    key: Key
    into: np.ndarray  # uint8: the destination
    here: np.ndarray  # bool, one per packet: it has arrived
    missing: int

    @property
    def header(self) -> bytes:
        """The header of the PULLED frame that answers this pull."""
        return m.encode((self.ticket, self.key[0]))

    def take(self, index: np.ndarray) -> None:
        """Note that the packets `index` of the answer have arrived. Raises WireError if there is no
        such packet.
        """
        if len(index) and int(index.max()) >= len(self.here):
            raise WireError(
                f"the fan-in end sent packet {int(index.max())} of chunk {self.key[0]}, but the"
                f" last packet of this chunk is {len(self.here) - 1}"
            )
        self.here[index] = True
        self.missing = len(self.here) - int(np.count_nonzero(self.here))


class Pulls:
    """The pending pulls of one link."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[PendingPull]] = {}  # no broadcast has begun; oldest first
        self._begun: dict[tuple[Key, int], PendingPull] = {}  # by the first number of its broadcast
        self._keys: dict[tuple[int, int], Key] = {}  # by ticket and chunk

    def ask(self, ticket: int, key: Key, into: np.ndarray) -> None:
        """Add a pull of a chunk. `into` is the memory for the answer, uint8."""
        key = (key[0], key[1] % VERSIONS)
        count = -(-into.size // PAYLOAD_NBYTES)
        pending = PendingPull(ticket, key, into, np.zeros(count, bool), count)
        self._waiting.setdefault(key, []).append(pending)
        self._keys[ticket, key[0]] = key

    def broadcast(self, key: Key, base: int) -> PendingPull:
        """Return the pull that a broadcast of `key` fills. Raises WireError if there is no such
        pull.

        `base` is the number of the broadcast's first packet.
        """
        found = self._begun.get((key, base))
        if found is None:
            if not (waiting := self._waiting.get(key)):
                raise WireError(
                    f"the fan-in end sent chunk {key[0]}, version {key[1]}, which was not requested"
                )
            found = self._begun[key, base] = waiting.pop(0)
        return found

    def whole(self, pull: PendingPull, base: int) -> None:
        """Remove a pull that a broadcast has filled."""
        del self._begun[pull.key, base]
        self._answered(pull.key)

    def over_tcp(self, ticket: int, chunk: int) -> PendingPull:
        """Remove and return the pull that an answer over TCP fills. Raises WireError if there is
        none.
        """
        waiting = self._waiting.get(key := self._keys.get((ticket, chunk), (-1, 0)))
        if not waiting:
            raise WireError(f"chunk {chunk} came over TCP for ticket {ticket}, but no pull waits")
        pull = waiting.pop()
        self._answered(key)
        return pull

    def _answered(self, key: Key) -> None:
        if not self._waiting.get(key) and all(begun != key for begun, _ in self._begun):
            self._waiting.pop(key, None)
            self._keys = {ticket: of for ticket, of in self._keys.items() if of != key}

    def check(self) -> None:
        """Assert every invariant."""
        assert all(pull.key == key for (key, _), pull in self._begun.items())
        assert set(self._keys.values()) == set(self._waiting) | {key for key, _ in self._begun}
