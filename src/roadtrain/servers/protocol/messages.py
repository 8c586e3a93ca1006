"""The words that state machines speak: messages between worker and server, what a server's doers
report, what it tells them.

Messages travel over a link; events come from the server's own doers; actions go to them. All are
frozen values, so a schedule can be written down, compared and simulated. What numbers are made of
is opaque here (a memoryview or an array in the real run, None in a simulated one). `worker` is who
sent a message: the server's end of the link sets it. A `ticket` is a number that its sender chose;
the answer carries it back.

With one worker a server reports the sum of squares of each push (GradAccumulated), and acts on each
ApplyUpdate. With several it waits until every worker has closed a chunk's gradient (by Close, or by
ApplyUpdate), sums in worker order and tells all; an update begins when every worker has asked for
it. Then a trainable chunk gets one version a step, gradient or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

# messages of a worker to a server


class Pull(msgspec.Struct, frozen=True):
    """Copy the chunk's weights part as soon as it is new enough."""

    chunk: int
    version: int  # the least number of updates that must have been applied
    into: Any  # where the weights part goes
    ticket: int
    worker: int = 0


class Push(msgspec.Struct, frozen=True):
    """A gradient: dense, sparse (compressed), or waiting on the spill file."""

    chunk: int
    grad: Any  # dense: memory; sparse: (indices, values)
    fresh: bool  # the first of its step: it replaces what is held
    # The server may keep `grad` where it lies until the update; else it moves it to its own place.
    # BufferFree(ticket) says when the memory is free.
    keep: bool
    ticket: int
    sums: Any = None  # of a sparse one: the sums of squares before compression
    worker: int = 0
    # Of a dense gradient that was downcast from the chunk's dtype: its values are the first half
    # of `grad`.
    dtype: str = ""
    spill_slot: int | None = None  # where on the spill file it waits; `grad` is None then

    @property
    def sent(self) -> Any:
        """What travels of a dense gradient."""
        return self.grad[: len(self.grad) // 2] if self.dtype else self.grad


class Close(msgspec.Struct, frozen=True):
    """My gradient of the chunk is whole, or there is none. Said only where there are several
    workers."""

    chunk: int
    step: int
    worker: int = 0


class ApplyUpdate(msgspec.Struct, frozen=True):
    """Apply the update rule to the held gradient."""

    chunk: int
    step: int  # that this update is part of
    hyper: tuple[float, ...]  # hyperparameters of the rule
    scales: Sequence[float | None]  # one a span of the chunk; None: no gradient in this step
    order: int  # the smaller, the sooner it is wanted
    worker: int = 0


class DiscardGrad(msgspec.Struct, frozen=True):
    """Drop my held gradient of the chunk."""

    chunk: int
    worker: int = 0


class EndStep(msgspec.Struct, frozen=True):
    """I ask for no more updates in this step.

    `word`: bytes that all workers get once all have ended it (StepWords), to the first server only;
    a relay's: those of its workers, in their order.
    """

    step: int
    worker: int = 0
    word: Any = b""


class Commit(msgspec.Struct, frozen=True):
    """To the first server: all others are prepared. With replicas also to the others, before they
    prepare and once all are known to have written the same."""

    step: int
    blob: Any  # this worker's part of the job's own state after the step
    worker: int = 0


class CommitDone(msgspec.Struct, frozen=True):
    """The step is committed. From the first server to the workers, and from them to all servers."""

    step: int


# messages of a server to a worker


class StepWords(msgspec.Struct, frozen=True):
    """All workers have ended the step. From the first server, where they said something with it."""

    step: int
    words: Sequence[bytes]  # of each worker


class Pulled(msgspec.Struct, frozen=True):
    """The weights part is where the pull wanted it."""

    ticket: int  # of the pull
    chunk: int


class GradAccumulated(msgspec.Struct, frozen=True):
    """The gradient is held: the worker's own, or (of several workers) their sum."""

    chunk: int
    sums: Any  # its sums of squares, one a segment of the chunk


class BufferFree(msgspec.Struct, frozen=True):
    """The server no longer reads the memory of a push."""

    ticket: int  # of the push


class Prepared(msgspec.Struct, frozen=True):
    """All of the step is written here, and durable but on the first server, which has to commit."""

    server: int
    step: int


class Written(msgspec.Struct, frozen=True):
    """All of the step is written here. Said only with replicas, before the server prepares."""

    server: int
    step: int
    # For every owner of chunks held here: (owner, sum, weighted sum) of the checksums of what the
    # step made of them. servers/protocol/commit.py compares these.
    sums: Sequence[tuple[int, int, int]] = ()


class Failed(msgspec.Struct, frozen=True):
    """The server has ended."""

    server: int
    error: BaseException  # why


# actions: what the state machine tells the doers


class Hold(msgspec.Struct, frozen=True):
    """Put the gradient where it rests until the update, or add it to what is held of its worker.
    Result: (sums of squares of the worker's gradient, a segment each; whether the pushed memory is
    in use until the update)."""

    push: Push


class Spill(msgspec.Struct, frozen=True):
    """Write what was pushed to the spill file, until its step's turn."""

    push: Push
    spill_slot: int  # the first slots are those of the workers' held gradients

    @property
    def chunk(self) -> int:
        return self.push.chunk

    @property
    def worker(self) -> int:
        return self.push.worker


class Discard(msgspec.Struct, frozen=True):
    """Drop held gradients of the chunk. Nothing is reported."""

    chunk: int
    worker: int | None  # whose; None: those of all


class Total(msgspec.Struct, frozen=True):
    """Add up what the workers pushed, in their order. Result: (the sums of squares of the sum, a
    segment each,)."""

    chunk: int


class Answer(msgspec.Struct, frozen=True):
    """Copy the weights part to `pull.into`."""

    pull: Pull
    memory: bool  # from the record buffer or what is kept in memory; else from the file
    newest: bool = False  # cast from the master, which is one update ahead (staleness 1)


class Read(msgspec.Struct, frozen=True):
    """Read the record of the chunk."""

    chunk: int
    buffer: int  # the record buffer that it goes to


class Update(msgspec.Struct, frozen=True):
    """Run the update rule on the record in memory. Result: (with replicas, the checksum of what it
    made,)."""

    chunk: int
    apply_update: ApplyUpdate


class Write(msgspec.Struct, frozen=True):
    """Write the record of the chunk to the slot that is not committed."""

    chunk: int


class Prepare(msgspec.Struct, frozen=True):
    """Make everything written so far durable; on the first server this is the commit."""

    step: int
    blobs: Sequence[Any]  # of the workers in order, where the job's own state is kept here


class Send(msgspec.Struct, frozen=True):
    """A message to a worker. Nothing is reported."""

    message: ServerMessage
    to: int | None = None  # None: to all


A = TypeVar("A")

# events, besides messages


class Done(msgspec.Struct, Generic[A], frozen=True):
    """A doer has carried an action out."""

    action: A
    result: tuple[Any, ...] = ()  # what the action says of it


class PeerLost(msgspec.Struct, frozen=True):
    """The link of a worker has ended."""

    worker: int
    why: str


GradientMessage: TypeAlias = Push | Close | ApplyUpdate | DiscardGrad
WorkerMessage: TypeAlias = Pull | GradientMessage | EndStep | Commit | CommitDone
ServerMessage: TypeAlias = (
    Pulled | GradAccumulated | BufferFree | Written | Prepared | CommitDone | StepWords | Failed
)
Action: TypeAlias = Answer | Hold | Spill | Discard | Total | Read | Update | Write | Prepare | Send
Event: TypeAlias = WorkerMessage | PeerLost | Done[Action]
