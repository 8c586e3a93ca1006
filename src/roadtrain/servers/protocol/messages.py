"""Messages between worker and server, and the events and actions of the state machines. All are
frozen values; in a simulated run, their tensors are None.

A worker sends one message about a block to each server that holds chunks of it: BlockPull,
BlockPush, BlockClose, BlockUpdate or BlockDiscard. Bit i of `chunks` stands for the block's i-th
chunk in the order of the table, and a message names only chunks that the server holds. The server
gives one answer to each message. It works on chunks: servers/protocol/blocks.py divides a message
into messages about chunks, and joins the answers.

The server's threads carry out actions, and report events when actions are done. `worker` is the
sender of a message, which the server sets. A `ticket` is a number that the sender chooses; the
answer has the same ticket.

With several workers, every worker must close its gradient of a chunk (Close or ApplyUpdate). The
server then sums the gradients in worker order, and sends GradAccumulated to all workers. An update
begins when every worker has sent ApplyUpdate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

# messages of a worker about a block


class BlockPull(msgspec.Struct, frozen=True):
    """Copy the weights parts of chunks, once all have `version` or a newer version. The answer is
    BlockPulled.
    """

    block: int
    chunks: int
    version: int  # the least number of updates that must have been applied to each chunk
    # Destination: the flat buffer of the block's parameters from byte `first` on. At a server in
    # another process, a function that makes the destination of a chunk.
    into: Any
    ticket: int
    first: int = 0
    worker: int = 0


class BlockUpdate(msgspec.Struct, frozen=True):
    """Apply the update rule to the held gradients."""

    block: int
    chunks: int
    step: int  # the step that this update belongs to
    hyper: Mapping[int, tuple[float, ...]]  # hyperparameters of each parameter group of the block
    # factor for the gradient of each parameter of the block's trainable runs, in the order of the
    # runs; None for a parameter without a gradient
    scales: Sequence[float | None]
    order: int  # blocks with smaller numbers are needed sooner
    worker: int = 0


class BlockPush(msgspec.Struct, frozen=True):
    """Dense gradients. The answers are BlockAccumulated and BufferFree; see Push for the fields."""

    block: int
    chunks: int
    grad: Any  # memory of the flat gradient of the whole block
    fresh: bool
    keep: bool
    ticket: int
    dtype: str = ""  # dtype of fp32 gradients that were downcast, else ""
    # Updates of chunks, each of which follows the gradient of its chunk
    update: BlockUpdate | None = None
    worker: int = 0


class BlockClose(msgspec.Struct, frozen=True):
    """The sender's gradients of the chunks are complete, or there are none."""

    block: int
    chunks: int
    step: int
    worker: int = 0


class BlockDiscard(msgspec.Struct, frozen=True):
    """Drop the sender's gradients of the chunks."""

    block: int
    chunks: int
    worker: int = 0


# messages of a worker about a chunk; of these, a worker sends only a Push of a sparse gradient


class Pull(msgspec.Struct, frozen=True):
    """Copy the weights part of a chunk, once the chunk has `version` or a newer version."""

    chunk: int
    version: int  # the least number of updates that must have been applied
    into: Any  # destination of the weights part
    ticket: int
    worker: int = 0


class Push(msgspec.Struct, frozen=True):
    """A gradient: dense, sparse (compressed), or in the spill file."""

    chunk: int
    grad: Any  # memory of a dense gradient, or (indices, values) of a sparse gradient
    fresh: bool  # whether the push replaces the held gradient (False: the push is added)
    # Whether the server may keep `grad` in place until the update. Otherwise the server copies or
    # spills it. BufferFree(ticket) reports when the memory is free.
    keep: bool
    ticket: int
    sums: Any = None  # sums of squares of a sparse gradient before compression
    worker: int = 0
    # Dtype of a dense gradient that was downcast, else "". The values of a downcast gradient are in
    # the first half of `grad`.
    dtype: str = ""
    # slot of the spill file that holds the gradient; `grad` is then None
    spill_slot: int | None = None

    @property
    def sent(self) -> Any:
        """The bytes to send: all of `grad`, or its first half after a downcast. Only for dense
        gradients.
        """
        return self.grad[: len(self.grad) // 2] if self.dtype else self.grad


class Close(msgspec.Struct, frozen=True):
    """The sender's gradient of the chunk is complete, or there is none. Sent only with several
    workers.
    """

    chunk: int
    step: int
    worker: int = 0


class ApplyUpdate(msgspec.Struct, frozen=True):
    """Apply the update rule to the held gradient."""

    chunk: int
    step: int  # the step that this update belongs to
    hyper: tuple[float, ...]  # hyperparameters of the rule
    # factor for the gradient of each span of the chunk; None for a span without a gradient
    scales: Sequence[float | None]
    order: int  # chunks with smaller numbers are needed sooner
    worker: int = 0


class DiscardGrad(msgspec.Struct, frozen=True):
    """Drop the sender's gradient of the chunk."""

    chunk: int
    worker: int = 0


class EndStep(msgspec.Struct, frozen=True):
    """The sender requests no more updates in this step.

    The first server passes `word` on to all workers (StepWords) when all have ended the step. A
    relay sends a list of its workers' words.
    """

    step: int
    worker: int = 0
    word: Any = b""


class Commit(msgspec.Struct, frozen=True):
    """Commit a step. Sent to the first server when all other servers have prepared the step.

    With replicas, the other servers get this message first, and then prepare the step.
    """

    step: int
    blob: Any  # this worker's job state after the step
    worker: int = 0


class CommitDone(msgspec.Struct, frozen=True):
    """The step is committed. The first server tells the workers, and they tell the other
    servers.
    """

    step: int


# answers to messages about a block


class BlockPulled(msgspec.Struct, frozen=True):
    """The weights parts of all chunks of a pull have been copied to their destination."""

    ticket: int  # of the pull


class BlockAccumulated(msgspec.Struct, frozen=True):
    """The server holds the worker's gradients of all chunks of the block that this server holds or,
    with several workers, the sums of all gradients.
    """

    server: int
    block: int
    sums: Any  # sums of squares, one per segment of these chunks, in the order of the table


# messages of a server to a worker


class StepWords(msgspec.Struct, frozen=True):
    """All workers have ended the step. Sent only if the `word` of any worker's EndStep was not
    empty.
    """

    step: int
    words: Sequence[bytes]  # one per worker


class Pulled(msgspec.Struct, frozen=True):
    """The weights part has been copied to its destination."""

    ticket: int  # of the pull
    chunk: int


class GradAccumulated(msgspec.Struct, frozen=True):
    """The server holds the worker's gradient or, with several workers, the sum of all gradients."""

    chunk: int
    sums: Any  # sums of squares of the gradient, one per segment of the chunk


class BufferFree(msgspec.Struct, frozen=True):
    """The server no longer reads the memory of a push. A worker gets this message once for all
    chunks of a BlockPush.
    """

    ticket: int  # of the push


class Prepared(msgspec.Struct, frozen=True):
    """The step is durable on this server. The first server sends CommitDone instead of Prepared."""

    server: int
    step: int


class Written(msgspec.Struct, frozen=True):
    """The server has written the step. Sent only with replicas, before the step is prepared."""

    server: int
    step: int
    # (owner, sum, weighted sum) for every owner of chunks on this server: sums of the checksums of
    # the records written in this step, which servers/protocol/commit.py compares.
    sums: Sequence[tuple[int, int, int]] = ()


class Failed(msgspec.Struct, frozen=True):
    """The server has ended because of `error`."""

    server: int
    error: BaseException  # the cause


# actions: requests of a server's state machine to the server's threads


class Hold(msgspec.Struct, frozen=True):
    """Store a pushed gradient until the update, or add it to the worker's earlier gradient.

    Result: (sums of squares of the worker's gradient, one per segment; whether the pushed memory
    stays in use until the update).
    """

    push: Push


class Spill(msgspec.Struct, frozen=True):
    """Write a pushed gradient to the spill file, because it belongs to a later step."""

    push: Push
    spill_slot: int  # at least the number of workers, since lower slots are for held gradients

    @property
    def chunk(self) -> int:
        return self.push.chunk

    @property
    def worker(self) -> int:
        return self.push.worker


class Discard(msgspec.Struct, frozen=True):
    """Drop held gradients of a chunk. No Done event follows."""

    chunk: int
    worker: int | None  # the worker whose gradient is dropped; None for all workers


class Total(msgspec.Struct, frozen=True):
    """Sum the gradients of all workers, in worker order.

    Result: (sums of squares of the summed gradient, one per segment,).
    """

    chunk: int


class Answer(msgspec.Struct, frozen=True):
    """Copy the weights part to `pull.into`."""

    pull: Pull
    memory: bool  # whether to copy from the record buffer or resident memory, not from the file
    # whether to cast the master instead, which is one update ahead (staleness 1)
    newest: bool = False


class Read(msgspec.Struct, frozen=True):
    """Read the record of the chunk."""

    chunk: int
    buffer: int  # the record buffer to read into


class Update(msgspec.Struct, frozen=True):
    """Run the update rule on a record in memory.

    Result: (checksum of the new record,), computed only with replicas.
    """

    chunk: int
    apply_update: ApplyUpdate


class Write(msgspec.Struct, frozen=True):
    """Write the record of a chunk to the slot that does not hold the committed record."""

    chunk: int


class Prepare(msgspec.Struct, frozen=True):
    """Make all records of the step durable. On the first server, this action commits the step."""

    step: int
    blobs: Sequence[Any]  # job state of each worker; empty if this server does not keep it


class Send(msgspec.Struct, frozen=True):
    """Send a message to a worker. No Done event follows."""

    message: ServerMessage
    to: int | None = None  # the worker; None for all workers


A = TypeVar("A")

# events that are not messages


class Done(msgspec.Struct, Generic[A], frozen=True):
    """An action was carried out."""

    action: A
    result: tuple[Any, ...] = ()  # described in the docstring of the action


class PeerLost(msgspec.Struct, frozen=True):
    """The link of a worker is closed."""

    worker: int
    why: str


BlockMessage: TypeAlias = BlockPull | BlockPush | BlockClose | BlockUpdate | BlockDiscard
GradientMessage: TypeAlias = Push | Close | ApplyUpdate | DiscardGrad
WorkerMessage: TypeAlias = Pull | GradientMessage | EndStep | Commit | CommitDone
ServerMessage: TypeAlias = (
    Pulled | GradAccumulated | BufferFree | Written | Prepared | CommitDone | StepWords | Failed
)
Action: TypeAlias = Answer | Hold | Spill | Discard | Total | Read | Update | Write | Prepare | Send
Event: TypeAlias = WorkerMessage | PeerLost | Done[Action]
