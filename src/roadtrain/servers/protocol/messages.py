"""Messages between worker and server, and the events and actions of the state machines.

Messages travel over a link; events are reported by the server's own doers; actions are carried out
by them. All are frozen values, so a schedule can be written down, compared and simulated. Tensors
are opaque here: memoryviews or arrays in a real run, None in a simulated one. `worker` is the
sender of a message, set by the server's end of the link. A `ticket` is a number that the sender
chose; the answer repeats it.

With one worker, the server reports the sums of squares of each push (GradAccumulated) and acts on
each ApplyUpdate. With several, it waits until every worker has closed the gradient of a chunk (by
Close or ApplyUpdate), sums in worker order and reports to all; an update begins when every worker
has sent ApplyUpdate. A trainable chunk then gets one version per step, with or without a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

# messages of a worker to a server


class Pull(msgspec.Struct, frozen=True):
    """Copy the weights part of a chunk once it has this version or a newer one."""

    chunk: int
    version: int  # the least number of updates that must have been applied
    into: Any  # destination of the weights part
    ticket: int
    worker: int = 0


class Push(msgspec.Struct, frozen=True):
    """A gradient: dense, sparse (compressed), or in the spill file."""

    chunk: int
    grad: Any  # dense: memory; sparse: (indices, values)
    fresh: bool  # the first of its step: it replaces what is held
    # The server may keep `grad` in place until the update; otherwise it copies or spills it.
    # BufferFree(ticket) reports when the memory is free.
    keep: bool
    ticket: int
    sums: Any = None  # of a sparse gradient: the sums of squares before compression
    worker: int = 0
    # Set if a dense gradient was downcast from the chunk's dtype: its values are the first half of
    # `grad`.
    dtype: str = ""
    spill_slot: int | None = None  # slot of the spill file that holds it; `grad` is None then

    @property
    def sent(self) -> Any:
        """The bytes of a dense gradient that travel."""
        return self.grad[: len(self.grad) // 2] if self.dtype else self.grad


class Close(msgspec.Struct, frozen=True):
    """The sender's gradient of the chunk is complete, or it has none. Sent only with several
    workers."""

    chunk: int
    step: int
    worker: int = 0


class ApplyUpdate(msgspec.Struct, frozen=True):
    """Apply the update rule to the held gradient."""

    chunk: int
    step: int  # the step that this update belongs to
    hyper: tuple[float, ...]  # hyperparameters of the rule
    scales: Sequence[float | None]  # one per span of the chunk; None: no gradient in this step
    order: int  # smaller numbers are needed sooner
    worker: int = 0


class DiscardGrad(msgspec.Struct, frozen=True):
    """Drop the sender's gradient of the chunk."""

    chunk: int
    worker: int = 0


class EndStep(msgspec.Struct, frozen=True):
    """The sender requests no more updates in this step.

    `word`: bytes for all workers, delivered (StepWords) when all have ended the step. Sent to the
    first server only. A relay sends the words of its workers, in their order.
    """

    step: int
    worker: int = 0
    word: Any = b""


class Commit(msgspec.Struct, frozen=True):
    """Commit a step. Sent to the first server when all others are prepared. With replicas also sent
    to the others, before they prepare and after all reported equal checksums."""

    step: int
    blob: Any  # this worker's part of the job state after the step
    worker: int = 0


class CommitDone(msgspec.Struct, frozen=True):
    """The step is committed. From the first server to the workers, and from them to all servers."""

    step: int


# messages of a server to a worker


class StepWords(msgspec.Struct, frozen=True):
    """All workers have ended the step. Sent by the first server if any worker sent a word."""

    step: int
    words: Sequence[bytes]  # one per worker


class Pulled(msgspec.Struct, frozen=True):
    """The weights part has been copied to its destination."""

    ticket: int  # of the pull
    chunk: int


class GradAccumulated(msgspec.Struct, frozen=True):
    """A gradient is held: the worker's own, or with several workers their sum."""

    chunk: int
    sums: Any  # its sums of squares, one per segment of the chunk


class BufferFree(msgspec.Struct, frozen=True):
    """The server no longer reads the memory of a push."""

    ticket: int  # of the push


class Prepared(msgspec.Struct, frozen=True):
    """The server has written the step. It is durable, except on the first server, which commits."""

    server: int
    step: int


class Written(msgspec.Struct, frozen=True):
    """The server has written the step. Sent only with replicas, before the server prepares it."""

    server: int
    step: int
    # (owner, sum, weighted sum) for every owner of chunks held here: checksums of the records that
    # the step wrote. servers/protocol/commit.py compares them.
    sums: Sequence[tuple[int, int, int]] = ()


class Failed(msgspec.Struct, frozen=True):
    """The server has ended."""

    server: int
    error: BaseException  # the cause


# actions: requests of a server's state machine to its doers


class Hold(msgspec.Struct, frozen=True):
    """Store a pushed gradient until the update, or add it to what is held of its worker.
    Result: (sums of squares of the worker's gradient, one per segment; whether the pushed memory
    stays in use until the update)."""

    push: Push


class Spill(msgspec.Struct, frozen=True):
    """Write a pushed gradient to the spill file until its step is due."""

    push: Push
    spill_slot: int  # the first slots belong to the workers' held gradients

    @property
    def chunk(self) -> int:
        return self.push.chunk

    @property
    def worker(self) -> int:
        return self.push.worker


class Discard(msgspec.Struct, frozen=True):
    """Drop held gradients of a chunk. Nothing is reported."""

    chunk: int
    worker: int | None  # None: those of all workers


class Total(msgspec.Struct, frozen=True):
    """Sum the gradients of all workers, in worker order. Result: (the sums of squares of the sum,
    one per segment,)."""

    chunk: int


class Answer(msgspec.Struct, frozen=True):
    """Copy the weights part to `pull.into`."""

    pull: Pull
    memory: bool  # read from the record buffer or resident memory; otherwise from the file
    newest: bool = False  # cast from the master, which is one update ahead (staleness 1)


class Read(msgspec.Struct, frozen=True):
    """Read the record of the chunk."""

    chunk: int
    buffer: int  # the record buffer to read into


class Update(msgspec.Struct, frozen=True):
    """Run the update rule on a record in memory. Result: with replicas (the checksum of the new
    record,)."""

    chunk: int
    apply_update: ApplyUpdate


class Write(msgspec.Struct, frozen=True):
    """Write the record of a chunk to the slot that does not hold the committed record."""

    chunk: int


class Prepare(msgspec.Struct, frozen=True):
    """Make everything written so far durable. On the first server this commits the step."""

    step: int
    blobs: Sequence[Any]  # of the workers in order, if the job state is kept here


class Send(msgspec.Struct, frozen=True):
    """A message to a worker. Nothing is reported."""

    message: ServerMessage
    to: int | None = None  # None: to all


A = TypeVar("A")

# events, besides messages


class Done(msgspec.Struct, Generic[A], frozen=True):
    """A doer has finished an action."""

    action: A
    result: tuple[Any, ...] = ()  # see the action's docstring


class PeerLost(msgspec.Struct, frozen=True):
    """The link of a worker is closed."""

    worker: int
    why: str


GradientMessage: TypeAlias = Push | Close | ApplyUpdate | DiscardGrad
WorkerMessage: TypeAlias = Pull | GradientMessage | EndStep | Commit | CommitDone
ServerMessage: TypeAlias = (
    Pulled | GradAccumulated | BufferFree | Written | Prepared | CommitDone | StepWords | Failed
)
Action: TypeAlias = Answer | Hold | Spill | Discard | Total | Read | Update | Write | Prepare | Send
Event: TypeAlias = WorkerMessage | PeerLost | Done[Action]
