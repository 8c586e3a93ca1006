"""Frames of the summation service.

    worker <-> reducer  Part Moved GivenUp | Sum Failed
    worker <-> worker 0's coordinators  Gone State | Ask Change;  Say Stall Has | Agreed Asked
                                                                  Differ Failed

servers/frames.py has what all frames have in common, Failed among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from roadtrain.servers import frames as m
from roadtrain.sums.protocol.membership import AskRounds, Spares
from roadtrain.sums.protocol.reducer import Arrived

# worker <-> reducer
PART = 30
MOVED = 31
SUM = 32
GIVEN_UP = 37

# worker <-> coordinator of spare hosts
GONE = 33
STATE = 34
ASK = 35
CHANGE = 36

# worker <-> coordinator of agreement
SAY = 38
STALL = 39
HAS = 40
AGREED = 41
ASKED = 42
DIFFER = 43


class SumHeader(NamedTuple):
    key: int  # of the tensor
    start: int  # its first element
    round: int
    summed: bool  # a worker had the sum already: the payload is as it lies in memory


class GoneHeader(NamedTuple):
    reducer: int
    why: str


class StateHeader(NamedTuple):
    number: int  # of the question
    refused: tuple[int, ...]  # reducers that this worker could not reach


class ChangeHeader(NamedTuple):
    number: int
    gone: tuple[int, ...]  # reducers that are left out from now on
    added: Spares


class SayHeader(NamedTuple):
    epoch: int
    identity: str  # of the operation
    use: int  # how many of this identity came before in the epoch
    signature: str
    each: bool  # it is agreed each time


class StallHeader(NamedTuple):
    epoch: int  # the payload is Stalled


class HasHeader(NamedTuple):
    epoch: int
    place: tuple[str, int]  # identity and use that were asked for
    begun: bool
    blocked: list[tuple[str, int]]  # what the worker is blocked on: none or one


class AgreedHeader(NamedTuple):
    epoch: int
    identity: str
    use: int
    signature: str


class AskedHeader(NamedTuple):
    epoch: int
    place: tuple[str, int]  # identity and use


class DifferHeader(NamedTuple):
    epoch: int  # that begins
    why: str


HEADERS: Mapping[int, Any] = {
    PART: Arrived,
    MOVED: m.NO_FIELDS,  # this worker's parts go elsewhere from now on
    GIVEN_UP: m.NO_FIELDS,  # so is what this worker pushed and is not summed
    SUM: SumHeader,
    GONE: GoneHeader,
    STATE: StateHeader,
    ASK: AskRounds,
    CHANGE: ChangeHeader,
    SAY: SayHeader,
    STALL: StallHeader,
    HAS: HasHeader,
    AGREED: AgreedHeader,
    ASKED: AskedHeader,
    DIFFER: DifferHeader,
}
m.declare(HEADERS)


class SumHello(NamedTuple):
    """A worker's greeting to a reducer or a coordinator."""

    session: str
    rank: int
    workers: int
    rule: str  # of the sum, or coordinator.TO_COORDINATOR


# Payload of a State: tensor -> last round begun, whether it is complete. Of a Change: tensor ->
# last round that any worker has begun, first that any lacks.
Rounds = dict[int, tuple[int, int]]
# Payload of a Stall: all that a worker waits for, and what its thread does (none or one):
# identity, use, signature.
Stalled = tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]

SUM_HELLO = msgspec.msgpack.Decoder(SumHello)
ROUNDS = msgspec.msgpack.Decoder(Rounds)
STALLED = msgspec.msgpack.Decoder(Stalled)


def rounds(payload: memoryview) -> dict[int, tuple[int, int]]:
    """Of a state or a change."""
    return m.decoded(ROUNDS, payload, "the rounds of a change of spare hosts")


def stalled(payload: memoryview) -> Stalled:
    return m.decoded(STALLED, payload, "what a worker waits for")
