"""The session of a job's workers at one parameter server, until all workers have left or one is
lost.

    Open, Begin -> served                       the store exists
    Open, Fill, Settle, Begin -> served         the store is new, or is filled again

Worker 0 sends these frames. The other workers wait for Ready and get Progress frames meanwhile. At
Begin, the server records in its store that it takes part in this session (storage/history.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from roadtrain.chunks import Block, Chunk
from roadtrain.device.buffers import Buffer
from roadtrain.device.pool import BufferPool
from roadtrain.errors import BusyError, ForeignError, LostError, PeerError, WireError
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.rules import rule_of
from roadtrain.options.budgets import derive_server
from roadtrain.servers import frames as m
from roadtrain.servers.hosted_store import HostedStore
from roadtrain.servers.parameter_connection import ParameterConnection, ParameterSession
from roadtrain.servers.protocol import messages
from roadtrain.servers.server import Server, ServerConfig
from roadtrain.servers.trace import Stages
from roadtrain.storage.convert import RecordView
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import create_part, open_part, publish_part
from roadtrain.storage.ledger import pack, unpack
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.snapshot import Snapshots, open_snapshot, restore
from roadtrain.transport.link import Link
from roadtrain.units import show_bytes

END_S = 10.0  # limit of the wait for the end of a session's threads


class StoreHost(Protocol):
    """The process that runs a session."""

    store: HostedStore
    nbytes: int  # memory that a session may use, in bytes
    where: str  # HOST:PORT
    report: Callable[[str], None]

    def session_ended(self, session: ServerSession, error: BaseException) -> None:
        """Arrange that a thread of this process calls the session's `tear_down` later."""


# A function of the layout, the server's number and the session's memory in bytes. It returns the
# bytes of this memory that the server must leave for another use.
MemoryBeside = Callable[[StoreMeta, int, int], int]


class ServerSession(ParameterSession):
    """The session of one start of a job. `server` is set when Begin arrives.

    `host` provides memory and files. When the session ends, `host` is notified once, and must then
    call `tear_down`.
    """

    def __init__(self, hello: m.Hello, host: StoreHost, beside: MemoryBeside | None = None) -> None:
        """Create the session. `beside` is called when the layout of the store is known, and
        returns the number of bytes of memory that the session must not use.
        """
        super().__init__(hello.workers, hello.local)
        self.name, self.number, self._beside = hello.session, hello.server, beside
        self.host, self.store = host, host.store
        self.stages, self.began = Stages(), time.monotonic()
        self.server: Server | None = None
        self.meta: StoreMeta | None = None
        self.tier: FileTier | None = None
        self.kept: FileTier | None = None  # the files of the snapshots
        self.snapshots: Snapshots | None = None
        self.answers = BufferPool(0, 1)
        self.pools: list[BufferPool] = []  # for the gradients of each worker
        self.ready = False
        self.config: ServerConfig
        self._new = False  # whether this server's files of the store are new
        self._step = 0  # the step at which worker 0 opens or makes the files
        self._storing = threading.RLock()  # held while the session itself uses the tiers
        self._closed = False  # under `_storing`: whether the tiers are, or must be, closed
        self._doing = "worker 0 to open the store"  # the event that workers wait for until `ready`
        self._done = 0  # progress towards this event, in bytes
        self._all = 0  # total of `_done`

    @property
    def step(self) -> int:
        return -1 if self.tier is None else self.tier.step

    # workers

    def admit(self, rank: int, link: Link, signature: str) -> ParameterConnection:
        with self.lock:
            worker = self.join(rank, link)
            worker.signature = signature
        try:
            self._welcome(worker)
        except BaseException as error:
            self._refused(worker, error)
            raise
        return worker

    @property
    def deserted(self) -> bool:
        """Whether all workers that joined have left, and others may still join."""
        with self.lock:
            return self.over is None and self.lost_ranks >= self.connections.keys()

    def is_of(self, hello: m.Hello) -> bool:
        """Return whether the worker that sent `hello` belongs to this start of the job."""
        theirs = hello.session, hello.workers, hello.local
        return theirs == (self.name, self.workers, self.local)

    def busy(self) -> BusyError:
        return BusyError(f"busy with a session of {self.workers} worker(s), at step {self.step}")

    def _refused(self, worker: ParameterConnection, error: BaseException) -> None:
        """Remove a worker that cannot join. For worker 0, or without further workers, end the
        session.
        """
        with self.lock:
            self.connections.pop(worker.rank, None)
            over = worker.rank == 0 or self.lost_ranks >= self.connections.keys()
        if over:
            self.end(error)

    def _welcome(self, worker: ParameterConnection) -> None:
        # Only worker 0 needs the steps of the store. Other workers need not wait for the store's
        # lock.
        step, kept, meta = self.store.held(self.tier) if worker.rank == 0 else (-1, (), None)
        about = meta.to_json().encode() if meta else b""
        worker.say(m.WELCOME, (step, kept, self.store.every, self.store.rests), about)
        if self.ready and (error := self._greet(worker)) is not None:
            raise error

    def _greet(self, worker: ParameterConnection) -> ForeignError | None:
        """Send Ready and the worker's job state. If the worker runs another job, end the session
        and return the error.
        """
        assert self.meta is not None and self.tier is not None
        if worker.signature != self.meta.signature:
            error = ForeignError(
                f"the model, dtype, chunk size or optimizer of {worker.link.peer} does not fit the"
                f" store (signatures {worker.signature} and {self.meta.signature})",
                hint="run the same job on every worker",
            )
            self.end(error)
            return error
        worker.pool = self.pools[worker.rank]
        blobs, n = unpack(self.tier.blob), max(-self.local, 1)
        mine = blobs[n * worker.rank : n * (worker.rank + 1)]
        fields = self.tier.step, self.meta.members, self.meta.job
        worker.say(m.READY, fields, pack(mine if len(mine) == n else blobs[:1]))
        return None

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        """End the session if a step is in progress or no further worker can join. Between steps,
        all workers may be leaving, and others may join late only to find no step left.
        """
        if self.server is None or (all_gone and len(self.connections) == self.workers):
            self.end(error)
        else:
            self.server.receive(messages.PeerLost(rank, str(error)))

    # until the store is open

    @property
    def blocks(self) -> Sequence[Block]:
        return () if self.meta is None else self.meta.table.blocks

    def chunk(self, number: int) -> Chunk:
        meta = self.meta
        held = meta is not None and 0 <= number < len(meta.owners)
        if meta is None or not held or self.number not in meta.holders(number):
            raise WireError(f"server {self.number} does not hold chunk {number}")
        return meta.table.chunks[number]

    def set_up(
        self, worker: ParameterConnection, kind: int, fields: Any, payload: memoryview
    ) -> None:
        _SETS_UP[kind](self, worker, fields, payload)

    def _open(self, worker: ParameterConnection, fields: m.OpenHeader, payload: memoryview) -> None:
        """Make this server's files of the store, or open them at the requested step."""
        meta, rules = _described(bytes(payload))
        fits = meta.index == self.number and len(meta.directories) == fields.servers
        if worker.rank or self.tier or not fits:
            raise WireError(
                f"worker {worker.rank} opened server {meta.index} of {fields.servers}, but the Open"
                f" frame must come once, from worker 0, for server {self.number} of"
                f" {len(meta.directories)}"
            )
        self._new, self._step = fields.new, fields.step
        self._doing = f"worker 0 to {'make' if fields.new else 'open'} the store"
        self._done, self._all = 0, sum(record.nbytes for record in meta.owned(self.number).values())
        with self._stored(), self.store.storing():
            self._open_tiers(fields, replace(meta, history=meta.history[:-1]))
        self._doing, self._done = "worker 0 to fill the store", 0
        tier = self._own_tier(meta)
        self.meta = replace(tier.meta, history=meta.history, without=())
        if self.kept is not None:
            self.snapshots = Snapshots(tier, self.kept, self.store.every, self.host.report)
        self._plan_memory(tier, self.meta, rules, fields.holds_gradients)
        for part in (tier, self.kept):
            if part is not None and part.note:
                self.host.report(part.note)

    def _open_tiers(self, fields: m.OpenHeader, meta: StoreMeta) -> None:
        directory = self.store.directory
        if self.store.every:
            self.kept = open_snapshot(self.store.snapshot, meta, fields.snapshot)
        if not fields.new:
            self.tier = open_part(directory, fields.step)
            return
        self.tier = tier = create_part(directory, meta, keep=fields.given_up)
        if self.kept is None or fields.snapshot != fields.step:
            return
        self._doing = "the snapshot to be copied back"
        counted = tier.on_write
        tier.on_write = lambda chunk: self._count(meta.records[chunk].nbytes)
        restore(self.kept, tier)
        tier.on_write = counted
        self.host.report(
            f"{directory}: back to step {fields.snapshot} of the snapshot in {self.store.snapshot}"
        )

    def _own_tier(self, meta: StoreMeta) -> FileTier:
        """Return the open files of the store. Raises ForeignError if `meta` does not assign them to
        this server.
        """
        tier = self.tier
        if tier is not None and (tier.meta.job, tier.meta.index) == (meta.job, self.number):
            return tier
        there = f"server {tier.meta.index} of job {tier.meta.job}" if tier else "no server"
        raise ForeignError(
            f"{self.store.directory} holds the part of {there}, but the part of server"
            f" {self.number} of job {meta.job} is requested",
            hint="name the servers in the original order",
        )

    def _plan_memory(
        self, tier: FileTier, meta: StoreMeta, rules: list[Rule], holds_gradients: bool
    ) -> None:
        nbytes = self.host.nbytes - (self.snapshots.nbytes if self.snapshots else 0)
        budgets = derive_server(
            meta.table,
            meta.owned(self.number),
            nbytes,
            workers=self.workers,
            holds_gradients=holds_gradients,
            wide=self.local < 0,
            beside=self._beside(meta, self.number, nbytes) if self._beside else 0,
        )
        tier.spill_workers = self.workers
        self.answers = BufferPool(budgets.answers, budgets.piece_bytes)
        self.pools = [BufferPool(budgets.pool, budgets.piece_bytes) for _ in range(self.workers)]
        self.config = ServerConfig(
            self.number,
            f"server {self.number} ({self.host.where}, {self.store.directory})",
            meta,
            rules,
            tier,
            budgets.records,
            self.host.report,
            self.workers,
            self.local,
            answers=budgets.answers,
        )

    def _fill(
        self, worker: ParameterConnection, fields: m.ChunkHeader, payload: memoryview
    ) -> None:
        """Write the initial record of a chunk."""
        chunk = self.chunk(fields.chunk)
        if worker.rank or self.tier is None or self.tier.step >= 0:
            raise WireError("a Fill frame must come from worker 0, into a new, incomplete part")
        if len(payload) != (expected := self.config.meta.records[chunk.id].nbytes):
            raise WireError(f"chunk {chunk.id} has {expected} bytes, but {len(payload)} arrived")
        with self._stored():
            self.tier.write(chunk.id, "record", payload)
        self._count(len(payload))
        worker.say(m.FILLED, (chunk.id,))

    def _settle(self, worker: ParameterConnection, fields: tuple[()], payload: memoryview) -> None:
        """Publish the new files of the store, which are now complete."""
        if worker.rank or self.tier is None or not self._new or self.ready:
            raise WireError("a Settle frame must come once, from worker 0, and for a new part")
        with self._stored():
            if self.tier.step < 0:
                self.tier.prepare(self._step, bytes(payload))
                self.tier.committed(self._step)
            with self.store.storing():
                for line in publish_part(self.store.directory):
                    self.host.report(line)
        worker.say(m.SETTLED, ())

    def _begin(self, worker: ParameterConnection, fields: tuple[()], payload: memoryview) -> None:
        tier, meta = self.tier, self.meta
        if worker.rank or tier is None or meta is None or tier.step < 0 or self.ready:
            raise WireError("a Begin frame must come once, from worker 0, to a complete store")
        with self._stored():
            self._serve(tier, meta)

    def _serve(self, own: FileTier, meta: StoreMeta) -> None:
        # recorded before the first step, so a server without the record has missed the session
        with self.store.storing():
            for tier in filter(None, (own, self.kept)):
                replace(tier.meta, history=meta.history, without=()).write(tier.directory)
        if self.snapshots is not None:
            self.snapshots.start()
        self._doing, self._done = "the server to load what it keeps in memory", 0
        self.server = Server(self.config, self.deliver, self.stages, own.step)
        self._all = sum(map(len, self.server.memory.values()))
        self.server.start(self._count)
        with self.lock:
            self.ready = True
            workers = self.everyone()
        self.host.report(
            f"{self.config.name}: step {own.step}, {self.workers} worker(s), "
            f"{len(self.server.chunks)} chunks, {show_bytes(self.server.nbytes())} of buffers"
        )
        for worker in workers:
            self._greet(worker)

    def _read(
        self, worker: ParameterConnection, fields: m.ChunkHeader, payload: memoryview
    ) -> None:
        """Send a record to a worker between steps. For chunk -1, send the blobs of the last
        commit.
        """
        if self.meta is None or self.tier is None:
            raise WireError("a Read frame arrived before the store was opened")
        if fields.chunk == -1:
            worker.say(m.RECORD, (-1,), self.tier.blob)
            return
        chunk = self.chunk(fields.chunk)
        record = Buffer(self.meta.records[chunk.id].nbytes).view
        with self._stored():
            self.tier.read(chunk.id, "record", record)
        # With staleness 1 the weights part is one update behind the master, except if the last step
        # did not update the chunk. Both are then equal.
        delayed = self.meta.staleness and chunk.trainable
        unchanged = delayed and self.tier.written_in(chunk.id) < self.tier.step
        if unchanged or not self.tier.has_weights(chunk.id):
            RecordView(self.meta, chunk, record).cast_weights()
        worker.say(m.RECORD, (chunk.id,), record)

    @contextmanager
    def _stored(self) -> Iterator[None]:
        """Keep the files of the store and of its snapshots open. Raises LostError if they are
        closed.
        """
        with self._storing:
            if self._closed:
                raise LostError("the session has ended")
            try:
                yield
            finally:
                # the session has ended meanwhile, without waiting for this thread
                if self._closed:
                    self._close_tiers()

    def _close_tiers(self) -> None:
        """Stop the server, and close the files of the store and its snapshots. The caller holds
        `_storing`.
        """
        if self.server is not None:
            self.server.stop(END_S)
        tiers, self.tier, self.kept = (self.tier, self.kept), None, None
        for tier in filter(None, tiers):
            tier.close()

    def _count(self, done: int) -> None:
        self._done += done

    # while serving

    def post(self, message: Any) -> None:
        if self.server is None:
            raise WireError("a message about chunks arrived before worker 0 began the session")
        self.server.receive(message)

    def deliver(self, message: Any, to: int | None) -> None:
        """Send a message of the server to its workers. Called by the server's loop thread."""
        workers = self.everyone() if to is None else [self.connections[to]]
        match message:
            case messages.BufferFree(ticket):
                workers[0].freed(ticket)
            case messages.Failed(_, error):
                self.end(error)
            case messages.BlockPulled():
                pass  # PullReply has sent the frame
            case _:
                kind, fields, payload = m.reply(message)
                for worker in workers:
                    worker.say(kind, fields, payload)

    def look(self, silent_s: float) -> None:
        """End the session if a worker is silent. Send Progress while workers wait for the store."""
        if not self.ready and self.over is None:
            done = self._done or (self.store.file_bytes() if self.tier is None else 0)
            for worker in self.everyone():
                worker.say(m.PROGRESS, (self._doing, done, self._all))
        if self.deserted and all(worker.silent_for(silent_s) for worker in self.everyone()):
            self.end(LostError("its workers have left"))
        super().look(silent_s)

    def status(self) -> m.Status:
        """Return the status of this server, and what each worker or relay waits for."""
        with self.lock:
            here, now = dict(self.connections), time.monotonic()
        role = "worker" if self.local > 0 else "relay of host"
        names = {rank: f"{role} {rank}" for rank in range(self.workers)}
        for rank, worker in here.items():
            names[rank] += f" ({worker.link.peer.partition('(')[2].rpartition(':')[0]})"
        if self._beside is not None:
            names = {0: "the fan-in"}  # its status names the late worker
        pulls, owed = self.server.waits() if self.server else ([], [(0, "the opened store")])
        text, late = f"step {self.step}, {self.workers} worker(s)", dict[str, float]()
        if owed:
            since = {rank: here[rank].last_seen if rank in here else self.began for rank, _ in owed}
            late = {names[rank]: now - began for rank, began in since.items()}
            seconds, rank, what = max((now - since[rank], rank, what) for rank, what in owed)
            text += f"; waiting {seconds:.1f} s for {what} of {names[rank]}"
        waits = {names[rank]: (0.0, "") for rank in here}
        for pull in pulls:
            name = names[pull.worker]
            waits[name] = max(waits[name], (now - pull.into.since, f"chunk {pull.chunk}"))
        totals = self.stages.totals()
        figures = m.Figures(
            self.server.machine.steps.newest if self.server else self.step,
            self.step,
            self.workers,
            len(here),
            self.nbytes(),
            self.host.nbytes,
            {name: stage.nbytes for name, stage in totals.items()},
            late,
        )
        return text, waits, {name: stage.seconds for name, stage in totals.items()}, figures

    def nbytes(self) -> int:
        """Return the bytes of this session's buffers."""
        pools = [buffer.nbytes for p in [self.answers, *self.pools] for buffer in p.buffers]
        return sum(pools) + (self.server.nbytes() if self.server else 0)

    # the end

    def ended(self, error: BaseException) -> None:
        self.host.session_ended(self, error)

    def tear_down(self, error: BaseException) -> None:
        """Free all resources. Called by the host's own thread. Uncommitted contents are dropped
        when the store is opened the next time.
        """
        self.dismiss(error)
        for pool in [self.answers, *self.pools]:
            pool.close()
        self.wait_for_the_end()
        if self.snapshots is not None:
            self.snapshots.close()
        if self.server is not None:
            self.server.stop(END_S)
        self._closed = True
        if self._storing.acquire(timeout=END_S):
            self._close_tiers()
            self._storing.release()
        else:  # a device hangs; the thread that waits for the device will close the tiers
            self.host.report(f"{self.store.directory} is still in use by the session that ended")
        for pool in [self.answers, *self.pools]:
            for buffer in pool.buffers:
                buffer.close()


_SETS_UP: Mapping[int, Callable[[ServerSession, ParameterConnection, Any, memoryview], None]] = {
    m.OPEN: ServerSession._open,
    m.FILL: ServerSession._fill,
    m.SETTLE: ServerSession._settle,
    m.BEGIN: ServerSession._begin,
    m.READ: ServerSession._read,
}


def _described(body: bytes) -> tuple[StoreMeta, list[Rule]]:
    """Decode worker 0's description of a store into its metadata and update rules."""
    try:
        tree = msgspec.json.decode(body, type=dict[str, Any])
        meta = StoreMeta.from_json(tree["meta"], "the store that worker 0 describes")
        return meta, [rule_of(rule) for rule in tree["rules"]]
    except (msgspec.DecodeError, KeyError) as error:
        raise WireError(f"worker 0 sent an invalid description of a store: {error}") from error
