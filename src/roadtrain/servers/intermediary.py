"""A session of several participants whose requests are forwarded to a server. The participants of a
relay are the workers of a host. The participants of a fan-in are all workers of a job, or all
relays.

Subclasses handle gradients. The decisions are in servers/protocol/intermediary.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from roadtrain.chunks import PAGE, ChunkTable
from roadtrain.device.buffers import Buffer
from roadtrain.errors import LostError, PeerError, RoadtrainError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers.parameter_connection import ParameterConnection, ParameterSession
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.blocks import divided, gathered
from roadtrain.servers.protocol.intermediary import Give, Up
from roadtrain.storage.ledger import pack, unpack
from roadtrain.transport.link import Link
from roadtrain.units import round_up


class IntermediarySession(ParameterSession):
    """The session of the participants of one server, and the Receiver of the link to the server."""

    machine: Any  # an Intermediary; set before any pull or end of a step
    table: ChunkTable  # the layout; set once it is known
    _copies: list[Buffer]  # the buffers for parameters, by number

    def __init__(
        self, participants: int, *, stands_for: int = 1, deadline_s: float | None = None
    ) -> None:
        """Create the session.

        Args:
            participants: Number of participants.
            stands_for: Number of workers whose job state each participant commits.
            deadline_s: Longest time in seconds to wait for the link to the server.
        """
        super().__init__(participants, 1)
        self._stands_for, self._up_s = stands_for, deadline_s
        self._connected = threading.Event()  # set once `_up` is set
        self._up: Link  # the link to the server
        # Welcome and Ready frames, sent again to participants that join later; guarded by `lock`
        self._greetings: list[tuple[int, bytes, bytes]] = []
        # messages about chunks that are not sent yet, to become messages about blocks; empty unless
        # `post` runs
        self._unsent: list[Any] = []
        # participants that wait for a Record frame, in the order of requests; guarded by `lock`
        self._readers: deque[ParameterConnection] = deque()

    # participants

    def new_connection(self, rank: int, link: Link) -> ParameterConnection:
        worker = super().new_connection(rank, link)
        self.prepare(worker)
        for kind, header, payload in self._greetings:
            self._forward(worker, kind, header, payload)
        return worker

    def prepare(self, worker: ParameterConnection) -> None:
        """Prepare a participant for its first frame."""

    def takes(self, rank: int) -> bool:
        return not self.lost_ranks and super().takes(rank)

    # requests of the participants

    def beat(self) -> None:
        """Send a heartbeat of this process to the server."""
        if self._connected.is_set():
            with suppress(PeerError):
                self._up.send(m.BEAT, m.encode(()), urgent=True)

    def set_up(
        self, worker: ParameterConnection, kind: int, fields: Any, payload: memoryview
    ) -> None:
        with self.lock:
            if kind == m.READ:
                self._readers.append(worker)
            self._up.send(kind, m.encode(fields), [payload] if payload else [])

    def post(self, message: Any) -> None:
        try:
            with self.lock:
                for part in divided(message, self.blocks):
                    for action in self.machine.handle(part):
                        self._carry_out(action)
                self._send_unsent()
        except RoadtrainError as error:
            self.end(error)

    # the Receiver's methods, called by the link to the server

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        fields = m.header(kind, header)
        if kind != m.PULLED:
            return memoryview(bytearray(nbytes))
        ticket, number = fields
        with self.lock:
            buffer = self.machine.buffer_for(ticket, number)
            if buffer is None or nbytes != round_up(self.chunk(number).weights_nbytes, PAGE):
                raise WireError(f"ticket {ticket} got {nbytes} unrequested bytes of chunk {number}")
            return self._copies[buffer].view[:nbytes]

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields = m.header(kind, header)
        if kind == m.PULLED:
            self.post(messages.Pulled(*fields))
            return
        self._connected.wait(self._up_s)
        with self.lock:
            if kind in (m.WELCOME, m.READY):
                self._greetings.append((kind, header, bytes(payload)))
            if kind == m.RECORD:
                with suppress(PeerError):
                    self._readers.popleft().link.send(kind, header, [payload])
                return
            first = kind in (m.FILLED, m.SETTLED)
            for worker in [self.connections[0]] if first else self.everyone():
                self._forward(worker, kind, header, payload)
        if kind == m.FAILED:
            self.end(LostError(fields[1]))

    def lost(self, error: PeerError) -> None:
        self.end(error)

    def _forward(
        self, worker: ParameterConnection, kind: int, header: bytes, payload: bytes | memoryview
    ) -> None:
        if kind == m.READY and self.workers * self._stands_for > 1:
            payload = self._part_of(worker.rank, unpack(bytes(payload)))
        with suppress(PeerError):
            worker.link.send(kind, header, [memoryview(payload)], urgent=True)

    def _part_of(self, rank: int, blobs: list[bytes]) -> bytes:
        """Return the job states (blobs) of the workers of participant `rank`, packed.

        If the step was committed by a different number of workers, returns only the first blob.
        """
        each = self._stands_for
        mine = blobs[each * rank : each * (rank + 1)]
        return pack(mine if len(mine) == each else blobs[:1])

    # actions of the state machine

    def _carry_out(self, action: Any) -> None:
        """Carry out an action that all subclasses share. The caller holds `lock`."""
        match action:
            case Up(messages.Commit(step, blobs)):
                self._send(messages.Commit(step, pack(blobs)))
            case Up(messages.EndStep(step, _, words)) if words:
                self._send(messages.EndStep(step, word=pack(words)))
            case Up(messages.Pull() | messages.Close() | messages.ApplyUpdate() as message):
                self._unsent.append(message)
            case Up(messages.DiscardGrad() as message):
                self._unsent.append(message)
            case Up(message):
                self._send(message)
            case Give(pull, buffer):
                pull.into.send(self._copies[buffer].view, lambda: self.post(messages.Done(action)))
            case _:
                raise AssertionError(action)

    def _send(self, message: Any, sent: Callable[[], None] | None = None) -> None:
        """Send a message now, except that messages about the same chunk must not be overtaken."""
        of = message.chunk if isinstance(message, messages.Push) else None
        if of is None or any(unsent.chunk == of for unsent in self._unsent):
            self._send_unsent()
        self._up.send(*m.frame(message, self.table), sent)

    def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        for message in gathered(unsent, self.table):
            urgent = isinstance(message, messages.BlockPull)
            self._up.send(*m.frame(message, self.table), urgent=urgent)
