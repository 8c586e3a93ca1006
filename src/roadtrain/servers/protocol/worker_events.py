"""What a worker's state machine (servers/protocol/worker.py) is told, besides messages from
servers, and what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roadtrain.chunks import Chunk

# param -> what its gradient is multiplied by, None: it has no gradient
Scales = Callable[[int], float | None]

# events


@dataclass(frozen=True, slots=True)
class FetchBlock:
    """A forward or backward needs `block` now, in any slot."""

    block: int


@dataclass(frozen=True, slots=True)
class UseBlock:
    """It runs on `slot_of(block)` from now on."""

    block: int


@dataclass(frozen=True, slots=True)
class ReleaseBlock:
    """It no longer does."""

    block: int


@dataclass(frozen=True, slots=True)
class FetchInto:
    """`block` is wanted in a buffer of its own; `target` is opaque, but no slot's number."""

    block: int
    target: Hashable


@dataclass(frozen=True, slots=True)
class FetchNewest:
    """A chunk is wanted after every update that has begun."""

    chunk: int
    target: Hashable


@dataclass(frozen=True, slots=True)
class GradReady:
    """There is a gradient of `block`, of its parameters `present`."""

    block: int
    present: Sequence[int]


@dataclass(frozen=True, slots=True)
class TakeBuffer:
    """A gradient is computed into `next_buffer`."""


@dataclass(frozen=True, slots=True)
class ReturnBuffer:
    """Nobody reads what was computed into `buffer` any more."""

    buffer: Hashable


@dataclass(frozen=True, slots=True)
class SendDense:
    """The host copy of what was computed into `buffer` is complete. `pieces`: (chunk, its
    gradient, what it was downcast to). `fresh`: it begins a new sum. `then`: what is said right
    behind a chunk. `keep_always`: no gradient waits for step(), so none is moved elsewhere."""

    buffer: Hashable
    pieces: Sequence[tuple[Chunk, Any, str]]
    fresh: bool
    then: Mapping[int, Say]
    keep_always: bool


@dataclass(frozen=True, slots=True)
class SendPacked:
    """As SendDense, of one chunk compressed into arrays of its own."""

    chunk: int
    grad: Any
    sums: Any
    fresh: bool


@dataclass(frozen=True, slots=True)
class CloseGrad:
    """This worker's gradient of `block` is whole. Only where `may_say` and `is_open(block)`."""

    block: int


@dataclass(frozen=True, slots=True)
class DropGrad:
    """The gradient of `block` is not wanted. Only where `may_say`, and its sums are here."""

    block: int


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """The update of `block` as part of `step`: of every span whose `scales(param)` is not None."""

    block: int
    step: int
    hyperparameters: Mapping[int, tuple[float, ...]]
    scales: Scales


@dataclass(frozen=True, slots=True)
class EndUpdate:
    """All of it was said. Where chunks are `left_over`: only where `may_say`, and the sums of
    `block` are here."""

    block: int


@dataclass(frozen=True, slots=True)
class EndOpenStep:
    """All updates of `step` have begun. Only where `may_end`. `word`: for the other workers."""

    step: int
    word: bytes = b""


@dataclass(frozen=True, slots=True)
class JobState:
    """The job's own state after `step`."""

    step: int
    blob: Any


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """The servers hold other contents, as those of `step`; nothing is on its way."""

    step: int


# actions


@dataclass(frozen=True, slots=True)
class Say:
    message: Any
    servers: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChunkPull:
    chunk: Chunk
    version: int
    ticket: int
    server: int
    at: int  # in the target


@dataclass(frozen=True, slots=True)
class StartPulls:
    """As soon as the device no longer reads `target`; an int is a slot."""

    target: Hashable
    pulls: Sequence[ChunkPull]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """All that was pulled into `target` is there: to the device with it."""

    target: Hashable
    block: int


Action = Say | StartPulls | CopyIn
