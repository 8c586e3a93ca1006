"""A worker's link to one server in another process. remote_servers.py decides which servers take
part.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from roadtrain.chunks import Chunk, ChunkTable
from roadtrain.errors import DeadlineError, LostError, PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers.connection import NO_ANSWER, SLOW
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.blocks import bit_of, destination
from roadtrain.servers.trace import Stages
from roadtrain.storage.ledger import unpack
from roadtrain.transport.link import Link
from roadtrain.units import show_bytes


class RemoteServer:
    """A worker's link to one server, and the Receiver of the link.

    `all` has the RemoteServers of the job by number. If one server fails, `wait` raises an error on
    all.
    """

    def __init__(
        self, number: int, peer: str, all: Mapping[int, RemoteServer], table: ChunkTable
    ) -> None:
        self.number, self.peer, self._all, self._table = number, peer, all, table
        self.link: Link | None = None
        self.deliver: Callable[[Any], None] = lambda message: None  # set by `connect`
        self._pulls: dict[int, messages.BlockPull] = {}  # by ticket
        self._missing: dict[int, int] = {}  # ticket -> chunks of the pull that have not arrived
        self._begun: dict[int, float] = {}  # ticket -> when its first chunk began to arrive
        self._fetched_at = 0.0  # when the last pull was complete
        self._stages, self._lane = Stages(), ""
        self._inbox: queue.SimpleQueue[tuple[int, Any, bytes | memoryview]] = queue.SimpleQueue()
        # the operation in progress at the server, how much of it is done, and its total
        self.progress: tuple[str, int, int] = "", 0, 0
        self.moved = -math.inf  # time of the last change of `progress`
        # name of the peer that the server waits for and that does not answer, by the server's last
        # report; "" if there is none
        self.silent = ""
        self._error: BaseException | None = None
        self._reported = False  # whether the server has reported a failure, or the link is lost
        self.link_lost = False  # whether the link was lost without a report of the server

    def connect(self, deliver: Callable[[Any], None], stages: Stages) -> None:
        """Set the function that receives the server's messages, and report an earlier failure to
        it. The intervals of the link are added to `stages`.
        """
        self.deliver, self._stages = deliver, stages
        self._lane = f"link of {stages.lane} to {self.peer}"
        if self._error is not None:
            deliver(messages.Failed(self.number, self._error))

    def send(self, message: Any) -> None:
        sent: Callable[[], None] | None = None
        kind, header, payload = m.frame(message, self._table)
        parts = list(payload)
        match message:
            case messages.BlockPull():
                self._pulls[message.ticket] = message
                self._missing[message.ticket] = message.chunks
            case messages.BlockPush(update=update):
                if update is not None:
                    self._post(*m.update_frame(update, with_push=True))
                sent = partial(
                    self._pushed,
                    message.ticket,
                    time.perf_counter(),
                    sum(part.nbytes for part in parts),
                )
        self._post(kind, header, parts, sent, each=sent is not None)

    def _pushed(self, ticket: int, start: float, nbytes: int) -> None:
        self._stages.interval("Push", self._lane, start, nbytes)
        self.deliver(messages.BufferFree(ticket))

    def say(self, kind: int, fields: tuple[Any, ...], payload: bytes | memoryview = b"") -> None:
        self._post(kind, m.encode(fields), [memoryview(payload)])

    def _post(
        self,
        kind: int,
        header: bytes,
        parts: Iterable[memoryview],
        sent: Callable[[], None] | None = None,
        *,
        each: bool = False,
    ) -> None:
        assert self.link is not None
        try:
            # A pull may overtake pushes, because it names the version that it needs.
            self.link.send(kind, header, parts, sent, urgent=kind == m.PULL, each=each)
        except LostError:
            # If the server sent a reason before it closed the link, the next wait raises it.
            if self._error is None:
                raise

    def wait(self, kind: int, what: str, deadline_s: float) -> tuple[Any, Any]:
        """Wait for the next frame that sets up the session, which must be of `kind`.

        Returns (fields, payload). Raises DeadlineError if the server makes no progress for
        `deadline_s`, and LostError if a server fails. `what` names the frame in messages to the
        user.
        """
        begin = time.monotonic()
        while True:
            left_s = max(begin, self.moved) + deadline_s - time.monotonic()
            try:
                got, fields, payload = self._inbox.get(timeout=max(0.0, left_s))
                break
            except queue.Empty:
                if time.monotonic() >= max(begin, self.moved) + deadline_s:
                    raise DeadlineError(
                        f"waited {deadline_s:.0f} s for {what} from {self.peer}{self.waits_for()}",
                        hint=NO_ANSWER if self.silent else SLOW,
                    ) from None
        if got == m.FAILED:
            why = self._error or f"{self.peer} ended"
            raise LostError(f"stopped waiting for {what}: {why}") from self._error
        if got != kind:
            raise WireError(f"expected {what} from {self.peer}, but got a frame of kind {got}")
        return fields, payload

    def waits_for(self) -> str:
        """Return the reason why the server waits; see MessageLink.waits_for."""
        what, done, of = self.progress
        amount = f", {show_bytes(done)} of {show_bytes(of)}" if done else ""
        what = self.silent or what
        return f", which waits for {what}{'' if self.silent else amount}" if what else ""

    def beat(self) -> None:
        if self.link is not None:
            with suppress(PeerError):
                self.link.send(m.BEAT, m.encode(()), urgent=True)

    def has_spoken(self) -> bool:
        """Return whether `wait` would not block."""
        return not self._inbox.empty()

    def close(self) -> None:
        """Close the link. If a server of the job has failed, first send the error, which this
        server passes on to the other workers.
        """
        if self.link is None:
            return
        if self._error is not None:
            why = type(self._error).__name__, str(self._error)
            with suppress(PeerError):
                self.link.send(m.FAILED, m.encode(why), urgent=True)
        self.link.close()

    # the Receiver's methods

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        fields = m.header(kind, header)
        if kind == m.PULLED:
            pull, chunk = self._pulled(fields)
            into = destination(pull, chunk)
            if len(into) != nbytes:
                raise WireError(
                    f"pull {pull.ticket} requested {len(into)} bytes of chunk {chunk.id}, but"
                    f" {nbytes} bytes arrived"
                )
            self._begun.setdefault(pull.ticket, time.perf_counter())
            return into
        if kind not in (m.WELCOME, m.READY, m.GRAD_ACCUMULATED, m.STEP_WORDS, m.RECORD):
            raise WireError(f"a frame of kind {kind} must have no payload, but has {nbytes} bytes")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields = m.header(kind, header)
        match kind:
            case m.FAILED:
                self._failed(LostError(f"{self.peer} ended: {fields[1]}"))
            case m.RECORD:
                self._inbox.put((kind, fields, payload))
            case m.PROGRESS if fields.of == m.WAITS_ONLY:
                self.silent = fields.doing
            case m.PROGRESS:
                if fields != self.progress:
                    self.progress, self.moved = fields, time.monotonic()
            case m.WELCOME | m.FILLED | m.SETTLED | m.READY:
                if kind == m.READY:
                    self.progress = "", 0, 0
                self._inbox.put((kind, fields, bytes(payload)))
            case m.PULLED:
                self._chunk_arrived(*self._pulled(fields))
            case _:
                self.deliver(self._message(kind, fields, payload))

    def _pulled(self, fields: m.PulledHeader) -> tuple[messages.BlockPull, Chunk]:
        """Return the pull that a frame answers, and the chunk in it."""
        ticket, number = fields
        pull, missing = self._pulls.get(ticket), self._missing.get(ticket, 0)
        if pull is not None and 0 <= number < len(self._table.chunks):
            chunk, block = self._table.chunks[number], self._table.blocks[pull.block]
            if chunk.block == pull.block and missing & bit_of(block, number):
                return pull, chunk
        raise WireError(f"chunk {number} arrived for pull {ticket}, but is not awaited")

    def _chunk_arrived(self, pull: messages.BlockPull, chunk: Chunk) -> None:
        ticket, block = pull.ticket, self._table.blocks[pull.block]
        self._missing[ticket] &= ~bit_of(block, chunk.id)
        if not self._missing[ticket]:
            del self._pulls[ticket], self._missing[ticket]
            chunks = [chunk for chunk in block.chunks if pull.chunks & bit_of(block, chunk.id)]
            nbytes = sum(chunk.weights_nbytes for chunk in chunks)
            start = max(self._begun.pop(ticket), self._fetched_at)
            self._fetched_at = time.perf_counter()
            self._stages.add("Fetch", self._fetched_at - start, nbytes)
            self._stages.interval("Fetch", self._lane, start, nbytes)
            self.deliver(messages.BlockPulled(ticket))

    def _message(self, kind: int, fields: tuple[Any, ...], payload: memoryview) -> Any:
        match kind:
            case m.GRAD_ACCUMULATED:
                sums = np.frombuffer(payload, np.float64)
                return messages.BlockAccumulated(self.number, fields[0], sums)
            case m.WRITTEN:
                return messages.Written(self.number, *fields)
            case m.PREPARED:
                return messages.Prepared(self.number, fields[0])
            case m.COMMITTED:
                return messages.CommitDone(fields[0])
            case m.STEP_WORDS:
                return messages.StepWords(fields[0], unpack(bytes(payload)))
        raise WireError(f"a frame of kind {kind} must not be sent to a worker")

    def lost(self, error: PeerError) -> None:
        self.link_lost = not self._reported
        self._failed(error)

    def _failed(self, error: PeerError) -> None:
        self._reported = True
        for server in (self, *list(self._all.values())):
            server._error = server._error or error
            server._inbox.put((m.FAILED, (), b""))
        self.deliver(messages.Failed(self.number, error))
