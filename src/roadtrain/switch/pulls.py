"""What a participant has asked its server for and does not have yet. Parameters come to all by
datagrams, or, where the others do not ask for the same, to one by the TCP link. No threads.

NOTE which pull. A broadcast names chunk and version, not a ticket: it is that of the first pull of
these that no other broadcast has begun to fill. The packets of one have consecutive numbers, so
`number - index` tells it from another. As each pull is answered once, an answer over TCP finds one
that no broadcast has begun to fill; it takes the last, whichever ticket it names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roadtrain.errors import WireError
from roadtrain.servers import frames as m
from roadtrain.switch.packets import PAYLOAD_NBYTES

VERSIONS = 1 << 32  # a packet has that many of them
Key = tuple[int, int]  # chunk, version modulo VERSIONS


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
        self._left: dict[Key, int] = {}  # pulls without their whole answer

    def ask(self, pull: m.PullHeader, into: np.ndarray) -> None:
        """`into`: uint8, as long as the answer."""
        key = (pull.chunk, pull.version % VERSIONS)
        count = -(-into.size // PAYLOAD_NBYTES)
        asked = Asked(pull.ticket, key, into, np.zeros(count, bool), count)
        self._waiting.setdefault(key, []).append(asked)
        self._keys[pull.ticket] = key
        self._left[key] = self._left.get(key, 0) + 1

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
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
            self._waiting.pop(key, None)
            self._keys = {ticket: of for ticket, of in self._keys.items() if of != key}

    def check(self) -> None:
        """Assert every invariant."""
        begun = [asked.key for asked in self._begun.values()]
        for key, left in self._left.items():
            assert left == len(self._waiting.get(key, ())) + begun.count(key) > 0
        assert set(self._keys.values()) == set(self._left) >= set(self._waiting) | set(begun)
