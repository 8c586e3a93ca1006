"""The connection of a worker at a parameter server or relay, which converts frames to messages for
a state machine.

While no buffer is free for a gradient, receiving blocks, which slows the worker down.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from roadtrain.chunks import PAGE, Block, Chunk
from roadtrain.device.buffers import Buffer
from roadtrain.device.pool import BufferPool
from roadtrain.errors import DeadlineError, LostError, PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers.connection import HostedSession, WorkerConnection
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.blocks import bit_of, chunks_in
from roadtrain.transport.link import Link
from roadtrain.units import round_up

# kinds of frames with which worker 0 opens the store, and with which workers read the store
SETS_UP = (m.OPEN, m.FILL, m.SETTLE, m.BEGIN, m.READ)
MOST_WORDS = 1 << 16  # most bytes of the words that a connection sends with EndStep
# Kinds of frames whose payload may have any length. Apart from these, only Push, Fill and EndStep
# have a payload.
_ANY_PAYLOAD = (m.OPEN, m.SETTLE, m.COMMIT, m.APPLY_UPDATE)


class PullReply:
    """The destination of pulled parameters if the worker is in another process. It takes the place
    of the worker's memory in `Pull.into`.
    """

    def __init__(self, connection: ParameterConnection, ticket: int, chunk: Chunk) -> None:
        self.connection, self.ticket, self.chunk = connection, ticket, chunk
        self.since = time.monotonic()
        self.nbytes = round_up(chunk.weights_nbytes, PAGE)
        self._buffer: Buffer | None = None

    def buffer(self) -> memoryview:
        self._buffer = self.connection.session.answers.get()
        return self._buffer.view[: self.nbytes]

    def send(self, view: memoryview, done: Callable[[], None]) -> int:
        def sent() -> None:
            if self._buffer is not None:
                self.connection.session.answers.put(self._buffer)
            done()

        with suppress(PeerError):  # if the worker is lost, the link also calls `lost`
            self.connection.link.send(
                m.PULLED, m.encode((self.ticket, self.chunk.id)), [view[: self.nbytes]], sent
            )
        return self.nbytes


class ParameterConnection(WorkerConnection):
    """The connection of one worker at a parameter server or relay."""

    session: ParameterSession

    def __init__(self, session: ParameterSession, rank: int, link: Link) -> None:
        super().__init__(session, rank, link)
        self.signature = ""  # digest of the worker's layout
        self.pool: BufferPool | None = None  # set once the store is open
        self._following: deque[Chunk] = deque()  # chunks of the current push without a frame so far
        # chunks whose gradients are being received, in order, with the buffers of dense gradients
        self._coming: deque[tuple[Chunk, Buffer | None]] = deque()
        self._tickets = itertools.count(1)  # of dense pushes
        self._kept: dict[int, Buffer] = {}  # ticket -> buffer that the server still needs
        self._update: messages.BlockUpdate | None = None  # follows the gradients of the next push
        self._reason: LostError | None = None  # the reason that the worker sent before it ended

    def find_room(self, kind: int, fields: Any, nbytes: int) -> memoryview:
        if kind == m.PUSH:
            return self._room_for_push(fields, nbytes)
        if kind == m.FILL:
            return Buffer(nbytes).view[:nbytes]
        if kind == m.END_STEP and nbytes <= MOST_WORDS:
            return memoryview(bytearray(nbytes))
        if kind not in _ANY_PAYLOAD:
            raise WireError(f"a frame of kind {kind} must have no payload, but has {nbytes} bytes")
        return memoryview(bytearray(nbytes))

    def _room_for_push(self, fields: m.PushHeader, nbytes: int) -> memoryview:
        if not self._following:
            self._following += chunks_in(*self.named(fields))
        chunk = self._following.popleft()
        # sums that a relay sends are in fp32
        dense = 4 * chunk.numel if self.session.local < 0 else chunk.weights_nbytes
        expected = m.push_nbytes(fields, chunk, round_up(dense, PAGE)) if chunk.trainable else -1
        if nbytes != expected:
            raise WireError(f"a push of chunk {chunk.id} has {nbytes} bytes instead of {expected}")
        assert self.pool is not None
        buffer = self.pool.get() if fields.dense else None
        self._coming.append((chunk, buffer))
        return memoryview(bytearray(nbytes)) if buffer is None else buffer.view[:nbytes]

    def named(self, fields: Any) -> tuple[Block, int]:
        """Return the block and the chunks (a bitmap) that a header names. Raises WireError if there
        are no such chunks here.
        """
        blocks, bits = self.session.blocks, int.from_bytes(fields.chunks, "little")
        block = blocks[fields.block] if 0 <= fields.block < len(blocks) else None
        if block is None or not bits or bits >> len(block.chunks):
            raise WireError(f"chunks {bits:#x} of block {fields.block} do not exist here")
        for chunk in chunks_in(block, bits):
            self.session.chunk(chunk.id)
        return block, bits

    def take(self, kind: int, fields: Any, payload: memoryview) -> None:
        if kind in SETS_UP:
            self.session.set_up(self, kind, fields, payload)
            return
        if kind not in _TAKES:
            raise WireError(f"a frame of kind {kind} must not be sent to a server")
        _TAKES[kind](self, fields, payload)

    def pull(self, fields: m.PullHeader, payload: memoryview) -> None:
        block, bits = self.named(fields)
        into = partial(PullReply, self, fields.ticket)
        pull = messages.BlockPull(block.index, bits, fields.version, into, fields.ticket)
        self.session.post(replace(pull, worker=self.rank))

    def push(self, fields: m.PushHeader, payload: memoryview) -> None:
        assert self.pool is not None
        if not payload:
            raise WireError(f"a push of block {fields.block} came without a gradient")
        chunk, buffer = self._coming.popleft()
        ticket = next(self._tickets)
        if buffer is not None:
            self._kept[ticket] = buffer
            if m.cast_dtype(fields, chunk):  # use the whole buffer, which has room for an fp32 sum
                payload = buffer.view[: chunk.weights_nbytes]
        self.session.post(m.push(fields, payload, chunk, self.pool.spare >= 2, ticket, self.rank))
        if fields.updated:
            self.update_after(chunk)

    def update_after(self, chunk: Chunk) -> None:
        """Update a chunk whose gradient has arrived."""
        update, block = self._update, self.session.blocks[chunk.block]
        if update is None or update.block != block.index:
            raise WireError(f"a push of block {block.index} came without the update after it")
        if bit := update.chunks & bit_of(block, chunk.id):
            self.session.post(replace(update, chunks=bit))

    def update(self, fields: m.ApplyUpdateHeader, payload: memoryview) -> None:
        update = m.apply_update(fields, payload, *self.named(fields), self.rank)
        if fields.with_push:
            self._update = update
        else:
            self.session.post(update)

    def close_grad(self, fields: m.CloseHeader, payload: memoryview) -> None:
        block, bits = self.named(fields)
        self.session.post(messages.BlockClose(block.index, bits, fields.step, self.rank))

    def discard(self, fields: m.ChunksHeader, payload: memoryview) -> None:
        block, bits = self.named(fields)
        self.session.post(messages.BlockDiscard(block.index, bits, self.rank))

    def failed(self, fields: m.FailedHeader, payload: memoryview) -> None:
        self._reason = LostError(f"the worker ended with {fields.error}: {fields.words}")

    def lost(self, error: PeerError) -> None:
        self.session.left(self, self._reason or error)

    def freed(self, ticket: int) -> None:
        """Give the buffer of the push with this ticket back to `pool`."""
        buffer = self._kept.pop(ticket, None)
        if buffer is not None and self.pool is not None:
            self.pool.put(buffer)


_TAKES: Mapping[int, Callable[[ParameterConnection, Any, memoryview], None]] = {
    m.BEAT: lambda self, fields, payload: self.session.beat(),
    m.PULL: ParameterConnection.pull,
    m.PUSH: ParameterConnection.push,
    m.APPLY_UPDATE: ParameterConnection.update,
    m.CLOSE: ParameterConnection.close_grad,
    m.DISCARD_GRAD: ParameterConnection.discard,
    m.END_STEP: lambda self, fields, payload: self.session.post(
        messages.EndStep(fields.step, self.rank, bytes(payload))
    ),
    m.COMMIT: lambda self, fields, payload: self.session.post(
        messages.Commit(fields.step, bytes(payload), self.rank)
    ),
    m.COMMITTED: lambda self, fields, payload: self.session.post(messages.CommitDone(fields.step)),
    m.FAILED: ParameterConnection.failed,
}


class ParameterSession(HostedSession[ParameterConnection]):
    """A session of workers at a parameter server or at a relay."""

    connection_class = ParameterConnection
    answers: BufferPool  # at a server: the buffers into which pulled parameters are read

    def __init__(self, workers: int, local: int) -> None:
        super().__init__(workers)
        # number of workers per host, whose gradients are summed first (Rule 1); negative if relays
        # have summed them
        self.local = local

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of the table; empty before the layout is known."""
        raise NotImplementedError

    def chunk(self, number: int) -> Chunk:
        """Return a chunk. Raises WireError if this server does not hold the chunk."""
        raise NotImplementedError

    def beat(self) -> None:
        """Handle the heartbeat of a worker's process."""

    def look(self, silent_s: float) -> None:
        """End the session if a worker has been silent for `silent_s` seconds. Called regularly."""
        for worker in self.everyone():
            if worker.rank not in self.lost_ranks and (for_s := worker.silent_for(silent_s)):
                self.end(
                    DeadlineError(
                        f"worker {worker.rank} has been silent for {for_s:.0f} s (limit"
                        f" {silent_s:.0f} s): its process is stopped, or its host hangs",
                        hint="kill its process; the next start resumes at the last committed step",
                    )
                )

    def set_up(
        self, worker: ParameterConnection, kind: int, fields: Any, payload: memoryview
    ) -> None:
        """Handle a frame that opens or reads the store."""
        raise NotImplementedError

    def post(self, message: Any) -> None:
        """Pass a message to the state machine."""
        raise NotImplementedError
