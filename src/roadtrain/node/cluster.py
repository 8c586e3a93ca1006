"""Cluster: the servers of a job on other hosts, as an Engine is the one in this process; and which worker this is.

Worker 0 makes the store or opens it, and fills a new one; the others wait until it is there. From then on all workers
do the same, and the servers wait for all of them. A lost server or worker is an error here: whoever started this
process (torchrun) starts it again, and it goes on at the last committed step.

Does NOT convert a store to another number of servers, chunk size or dtype: that is refused, with what is there.
"""

from __future__ import annotations

import os
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from roadtrain.errors import ConfigError, DeadlineError, ForeignError, LostError, PeerError, WireError
from roadtrain.flow import ops
from roadtrain.kernels.rules import described
from roadtrain.node import messages as m
from roadtrain.node.compress import Compressor
from roadtrain.node.engine import Layout, check_same, fill_record
from roadtrain.node.worker import Worker
from roadtrain.spec.chunks import Block
from roadtrain.spec.plan import Budgets
from roadtrain.store.buffers import Buffer
from roadtrain.store.convert import RecordView, Source, gather_param
from roadtrain.store.ledger import StoreMeta
from roadtrain.trace import Stages
from roadtrain.wire.link import Link
from roadtrain.wire.tcp import Address, Options, connect

FILLS_AT_ONCE = 4


@dataclass(frozen=True)
class Group:
    """Which worker this is. `session`: the same for all workers of one start, another after each restart."""

    rank: int = 0
    workers: int = 1
    session: str = ""

    @staticmethod
    def of_environment(environ: Mapping[str, str] = os.environ) -> Group:
        """As torchrun says it. Raises ConfigError."""
        try:
            rank, workers = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        except ValueError as error:
            raise ConfigError(f"RANK and WORLD_SIZE are no numbers: {error}") from error
        if not 0 <= rank < workers:
            raise ConfigError(f"RANK is {rank} and WORLD_SIZE {workers}", hint="start the workers with torchrun")
        parts = [environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT")]
        alone = uuid.uuid4().hex if workers == 1 else ""
        return Group(rank, workers, ":".join([*parts, environ.get("MASTER_PORT", ""), alone]))


def address_of(text: str) -> Address:
    """HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address", hint="HOST:PORT, as 10.0.0.3:7000")
    return host.strip("[]"), int(port)


def token_of(path: str | None) -> bytes | None:
    """The job's token: the content of a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror}") from error


class RemoteServer:
    """The worker's end of the link to one server: a MessageLink, and the Receiver of its frames.
    `all`: the job's servers; whoever waits for any of them hears of the first that fails."""

    def __init__(self, number: int, where: str, all: list[RemoteServer]) -> None:
        self.number, self.peer, self._all = number, f"server {number} ({where})", all
        self.link: Link | None = None
        self.deliver: Callable[[Any], None] | None = None
        self._into: dict[int, tuple[int, memoryview]] = {}  # ticket -> chunk, where its parameters go
        self._inbox: queue.SimpleQueue[tuple[int, Any, bytes | Buffer]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._coming: list[Buffer] = []

    def send(self, message: Any) -> None:
        if isinstance(message, ops.Pull):
            self._into[message.ticket] = (message.chunk, message.into)
        kind, header, parts = m.frame(message)
        sent = None
        if isinstance(message, ops.Push):
            ticket = message.ticket
            sent = lambda: self._say(ops.Freed(ticket))  # noqa: E731
        self._post(kind, header, parts, sent)

    def say(
        self, kind: int, fields: tuple[Any, ...], payload: Any = b"", sent: Callable[[], None] | None = None
    ) -> None:
        self._post(kind, m.encode(fields), [memoryview(payload)] if len(payload) else (), sent)

    def _post(self, kind: int, header: bytes, parts: Sequence[memoryview], sent: Callable[[], None] | None) -> None:
        assert self.link is not None
        try:
            self.link.send(kind, header, parts, sent)
        except LostError as error:
            raise self._error or error from None  # what the server said before it hung up tells more

    def wait(self, kind: int, what: str, deadline_s: float) -> tuple[Any, Any]:
        """The next session frame, which must be of `kind`: (fields, payload)."""
        try:
            got, fields, payload = self._inbox.get(timeout=deadline_s)
        except queue.Empty:
            raise DeadlineError(f"waited {deadline_s:.0f} s for {what} from {self.peer}") from None
        if got == m.FAILED:
            raise self._error or LostError(f"{self.peer} ended")
        if got != kind:
            raise WireError(f"{self.peer} sent a frame of kind {got} instead of {what}")
        return fields, payload

    def close(self) -> None:
        if self.link is not None:
            self.link.close()

    # the Receiver of its link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        fields = m.header(kind, header)
        if kind == m.PULLED:
            ticket, chunk = fields
            expected, into = self._into.get(ticket, (-1, memoryview(b"")))
            if expected != chunk or len(into) != nbytes:
                raise WireError(f"{nbytes} bytes of chunk {chunk} came for ticket {ticket}, {len(into)} were asked for")
            return into
        if kind == m.RECORD:
            self._coming.append(Buffer(nbytes))
            return self._coming[-1].view[:nbytes]
        if kind not in (m.WELCOME, m.READY, m.HELD):
            raise WireError(f"a frame of kind {kind} has no payload, {nbytes} bytes came")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields = m.header(kind, header)
        match kind:
            case m.PULLED:
                ticket, chunk = fields
                del self._into[ticket]
                self._say(ops.Pulled(ticket, chunk))
            case m.HELD:
                self._say(ops.Held(fields[0], np.frombuffer(payload, np.float64)))
            case m.PREPARED:
                self._say(ops.Prepared(self.number, fields[0]))
            case m.COMMITTED:
                self._say(ops.CommitDone(fields[0]))
            case m.FAILED:
                self._fail(LostError(f"{self.peer} ended: {fields[1]}"))
            case m.WELCOME | m.FILLED | m.READY:
                self._inbox.put((kind, fields, bytes(payload)))
            case m.RECORD:
                self._inbox.put((kind, fields, self._coming.pop(0)))
            case _:
                raise WireError(f"a frame of kind {kind} goes the other way")

    def lost(self, error: PeerError) -> None:
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        for server in self._all:
            server._error = server._error or error
            server._inbox.put((m.FAILED, (), b""))
        self._say(ops.Failed(self.number, error))

    def _say(self, message: Any) -> None:
        if self.deliver is not None:
            self.deliver(message)


def _connect(address: Address, server: RemoteServer, options: Options, hello: bytes) -> Link:
    """Tries again for `retry_s` while the server is busy with workers that may be leaving."""
    until = time.monotonic() + options.retry_s
    while True:
        try:
            return connect(address, server, options, hello=hello, name=f"server {server.number}")
        except WireError as error:
            if m.BUSY not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.2)


class Cluster:
    """What an Engine is, with its servers elsewhere. `step`: the last committed one when it was opened. Raises
    ForeignError where the servers hold another job, LostError, DeadlineError."""

    store = None

    def __init__(
        self, layout: Layout, budgets: Budgets, servers: Sequence[Address], options: Options, group: Group,
        device: torch.device, *, compute_blocks: Sequence[int], compressor: Compressor | None, deadline_s: float,
        holds_gradients: bool, report: Callable[[str], None],
    ) -> None:
        self.layout, self.group, self.stages, self._deadline_s = layout, group, Stages(), deadline_s
        self.meta, self.blob = layout.meta(), b""
        rules = [described(r) for r in layout.rules]
        self.servers: list[RemoteServer] = []
        with ExitStack() as undo:
            for number, address in enumerate(servers):
                server = RemoteServer(number, f"{address[0]}:{address[1]}", self.servers)
                hello = m.encode((group.session, group.rank, group.workers, number, self.meta.signature))
                server.link = _connect(address, server, options, hello)
                undo.callback(server.close)
                self.servers.append(server)
            found = [s.wait(m.WELCOME, "a welcome", deadline_s) for s in self.servers]
            if len(every := {every for (_, _, every, _), _ in found}) > 1:
                raise ConfigError(f"the servers take snapshots every {sorted(every)} steps (0: never)",
                                  hint="give all servers of a job the same --snapshot-every")
            self.rests = "; ".join(dict.fromkeys(rests for (_, _, _, rests), _ in found))
            self.new = False
            if group.rank == 0:
                self.step = self._open(found, rules, holds_gradients, report)
            else:
                self.step = self._ready()
            undo.pop_all()
        self.records = self.meta.records
        self.worker = Worker(
            layout.table, budgets, self.meta.owners or layout.owners, device, self.stages, servers=len(servers),
            committed=self.step, deadline_s=deadline_s, compute_blocks=compute_blocks, compressor=compressor,
            workers=group.workers, staleness=layout.staleness,
        )
        self._unfilled = [0] * len(servers)
        for server in self.servers:
            server.deliver = self.worker.deliver
            self.worker.links.append(server)
            if server._error is not None:
                self.worker.deliver(ops.Failed(server.number, server._error))

    def _open(
        self, found: Sequence[tuple[Any, bytes]], rules: Any, holds_gradients: bool, report: Callable[[str], None]
    ) -> int:
        """Worker 0: the servers make a store, or open the one that they hold, or go back to a snapshot."""
        names = tuple(s.peer for s in self.servers)
        kept = min(newest for (_, newest, _, _), _ in found)
        back = kept >= 0 and self._go_back(found, kept, report)
        step = kept if back else found[0][0][0]
        self.new = step < 0
        if self.new:
            for server, ((newest, *_), _) in zip(self.servers, found):
                if newest > 0:
                    raise ForeignError(f"{server.peer} holds step {newest} of a store, {names[0]} holds nothing",
                                       hint="name the servers in the order in which they were named first")
            self.meta = replace(self.meta, owners=self.layout.owners, directories=names)
        else:
            held = StoreMeta.from_json(found[0][1], names[0])
            check_same(names[0], held, self.layout)
            if held.signature != self.meta.signature or len(held.directories) != len(names):
                raise ConfigError(
                    f"{names[0]} holds a store of {len(held.directories)} servers and chunks of {held.chunk_elements} "
                    f"elements; asked for are {len(names)} and {self.meta.chunk_elements}, or another dtype",
                    hint="name the same servers, chunk size and dtype as when the store was made")
            self.meta = held
        for number, server in enumerate(self.servers):
            body = msgspec.json.encode({"meta": replace(self.meta, index=number).to_json(), "rules": rules})
            server.say(m.OPEN, (self.new, max(step, 0), len(names), holds_gradients, kept, back), body)
        return max(step, 0)

    def _go_back(self, found: Sequence[tuple[Any, bytes]], kept: int, report: Callable[[str], None]) -> bool:
        """Whether a server has lost what others hold, so that all go back to the snapshot of step `kept`, the newest
        that all have (store/snapshot.py, Note "same steps")."""
        held, every = [step for (step, *_), _ in found], found[0][0][2]
        if held[0] >= 0 and all(step in (held[0], held[0] + 1) for step in held):
            return False  # others may have prepared a step that server 0 did not commit
        jobs = {StoreMeta.from_json(text, s.peer).job for s, (_, text) in zip(self.servers, found)}
        if len(jobs) > 1:
            raise ForeignError(f"the servers hold parts of {len(jobs)} jobs: {jobs}", hint="name those of this job")
        steps = f"fewer than {2 * every}" if max(held) < 0 else max(held) - kept
        report(f"memory was lost: the servers hold steps {', '.join(map(str, held))} (-1: none). All go back to the "
               f"snapshot of step {kept}, {steps} steps are trained again")
        return True

    def _ready(self) -> int:
        """Waits until every server serves; what server 0 gives to go on from."""
        step = 0
        for server in reversed(self.servers):
            (step,), self.blob = server.wait(m.READY, "the store to be ready", self._deadline_s)
        return step

    def fill(self, block: Block, source: Source, hypers: Sequence[Sequence[float]]) -> None:
        """First contents of one block of a new store."""
        for chunk in block.chunks:
            buffer = fill_record(self.meta, self.layout, chunk, source, hypers)
            number = self.worker.owners[chunk.id]
            while self._unfilled[number] >= FILLS_AT_ONCE:
                self._filled(number)
            self._unfilled[number] += 1
            self.servers[number].say(m.FILL, (chunk.id,), buffer.view[: self.records[chunk.id].nbytes], buffer.close)

    def _filled(self, number: int) -> None:
        self.servers[number].wait(m.FILLED, "a chunk to be stored", self._deadline_s)
        self._unfilled[number] -= 1

    def start(self, blob: bytes) -> None:
        """Worker 0: step 0 of a new store is committed with `blob`, server 0 last; then the servers serve."""
        if self.group.rank:
            return
        for number in range(len(self.servers)):
            while self._unfilled[number]:
                self._filled(number)
        for server in reversed(self.servers):
            server.say(m.BEGIN, (), blob if self.new and server.number == 0 else b"")
            _, self.blob = server.wait(m.READY, "the store to be ready", self._deadline_s)

    def read(self, name: str, what: str) -> np.ndarray:
        """As Engine.read: a parameter's values from its servers, between steps."""
        def record_of(chunk: Any) -> RecordView:
            server = self.servers[self.meta.owners[chunk.id]]
            server.say(m.READ, (chunk.id,))
            _, buffer = server.wait(m.RECORD, f"chunk {chunk.id}", self._deadline_s)
            return RecordView(self.meta, chunk, buffer.view)

        return gather_param(self.meta, name, what, record_of)

    def nbytes(self) -> int:
        return self.worker.nbytes()

    def close(self) -> None:
        self.worker.close()
