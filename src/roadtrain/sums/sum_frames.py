"""Frames of the summation service. servers/frames.py defines the encoding, and Failed.

worker -> reducer: Part Moved GivenUp          reducer -> worker: Sum Failed
worker -> coordinator: ReducerLost State       coordinator -> worker: Ask Change
worker -> coordinator: Say Stall Has           coordinator -> worker: Agreed AskBegun Mismatch
                                                                      Failed
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

# worker <-> coordinator: spare hosts
REDUCER_LOST = 33
STATE = 34
ASK = 35
CHANGE = 36

# worker <-> coordinator: agreement
SAY = 38
STALL = 39
HAS = 40
AGREED = 41
ASK_BEGUN = 42
MISMATCH = 43


class SumHeader(NamedTuple):
    key: int  # of the tensor
    start: int  # first element of the part
    round: int
    summed: bool  # whether a worker pushed this sum; the payload is not encoded then


class ReducerLostHeader(NamedTuple):
    reducer: int
    why: str


class StateHeader(NamedTuple):
    number: int  # of the query
    refused: tuple[int, ...]  # reducers that this worker cannot reach


class ChangeHeader(NamedTuple):
    number: int
    removed: tuple[int, ...]  # reducers
    added: Spares


class SayHeader(NamedTuple):
    epoch: int
    identity: str  # of the operation
    use: int  # number of earlier operations with this identity in the epoch
    signature: str
    each: bool  # see Operation.each


class StallHeader(NamedTuple):
    epoch: int  # the payload is Stalled


class HasHeader(NamedTuple):
    epoch: int
    place: tuple[str, int]  # identity and use, from the AskBegun
    begun: bool
    blocked: list[tuple[str, int]]  # the operation that blocks the worker, or an empty list


class AgreedHeader(NamedTuple):
    epoch: int
    identity: str
    use: int
    signature: str


class AskBegunHeader(NamedTuple):
    epoch: int
    place: tuple[str, int]  # identity and use


class MismatchHeader(NamedTuple):
    epoch: int  # the new epoch
    why: str


HEADERS: Mapping[int, Any] = {
    PART: Arrived,
    MOVED: m.NO_FIELDS,  # after a Change, which may assign this worker's parts to other reducers
    GIVEN_UP: m.NO_FIELDS,  # the worker has abandoned all sums in progress
    SUM: SumHeader,
    REDUCER_LOST: ReducerLostHeader,
    STATE: StateHeader,
    ASK: AskRounds,
    CHANGE: ChangeHeader,
    SAY: SayHeader,
    STALL: StallHeader,
    HAS: HasHeader,
    AGREED: AgreedHeader,
    ASK_BEGUN: AskBegunHeader,
    MISMATCH: MismatchHeader,
}
m.declare(HEADERS)


class SumHello(NamedTuple):
    """A worker's greeting to a reducer or a coordinator."""

    session: str
    rank: int
    workers: int
    rule: str  # of the sum, or coordinator.TO_COORDINATOR


# Payload of a State: tensor -> (last round begun, whether this round is complete). Payload of a
# Change: tensor -> (last round that any worker has begun, first round that any worker lacks).
Rounds = dict[int, tuple[int, int]]
# Payload of a Stall: a list of all operations that a worker waits for, and a list with the
# operation that blocks its thread, if there is one. Each operation is (identity, use, signature).
Stalled = tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]

SUM_HELLO = msgspec.msgpack.Decoder(SumHello)
ROUNDS = msgspec.msgpack.Decoder(Rounds)
STALLED = msgspec.msgpack.Decoder(Stalled)


def rounds(payload: memoryview) -> dict[int, tuple[int, int]]:
    """Decode the payload of a State or Change frame: two numbers for each tensor.

    In a State, the last round begun, and whether this round is complete (0 or 1). In a Change, the
    last round that any worker has begun, and the first round that any worker lacks.
    """
    return m.decoded(ROUNDS, payload, "the payload of a State or Change")


def stalled(payload: memoryview) -> Stalled:
    return m.decoded(STALLED, payload, "the payload of a Stall")
