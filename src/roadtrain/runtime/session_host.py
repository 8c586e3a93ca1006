"""Host: what `roadtrain serve` runs. One storage directory, one session of workers at a time, one
Server beside it.

    listening -> a worker joins -> Session: Open, Begin -> serving -> the workers leave -> listening
                                            Open, Fill, Settle, Begin: a new store, or one that is
                                            filled up

Worker 0 opens the store and fills a new one; all others wait for Ready, and hear how far it is.
With Begin the server writes down that it takes part in this session, before the session's first
step (protocol/history.py). Workers beat: one whose process has stopped ends the session after
SILENT_S. A worker that is lost ends the session: what was not committed is dropped, the others are
told, and the next session begins at the last committed step (Rule 3). So does this process when it
is started again with the same directory.

Assumes: all workers of a session run the same job (checked). Does NOT restart workers: torchrun
does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from roadtrain.chunks import PAGE, Chunk
from roadtrain.config.budgets import derive_server
from roadtrain.device.buffers import Buffer
from roadtrain.device.pool import BufferPool
from roadtrain.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    ForeignError,
    LostError,
    PeerError,
    RoadtrainError,
    WireError,
)
from roadtrain.kernels.rules import rule_of
from roadtrain.protocol import messages
from roadtrain.runtime import frames as m
from roadtrain.runtime import health
from roadtrain.runtime.reducer import serve_sums
from roadtrain.runtime.server import Server, Setup
from roadtrain.runtime.trace import Stages
from roadtrain.storage.convert import RecordView
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import create_part, open_part, publish_part
from roadtrain.storage.ledger import StoreMeta, pack, unpack
from roadtrain.storage.snapshot import Snapshots, held_in, open_snapshot, restore, where_it_rests
from roadtrain.transport.address import address_of, tls_of, token_of
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.plugins import link_options
from roadtrain.transport.tcp import Address, TcpOptions, listen
from roadtrain.units import parse_bytes, round_up, show_bytes

Report = Callable[[str], None]
END_S = 10.0  # for a session's threads to end
# after which a worker that does not beat is taken for stopped, and the session ends
SILENT_S = 60.0
COMING_S = 600.0  # instead, while a frame of it is on its way: one link may be that slow
LOOK_S = 1.0  # between two looks at the session
LOCK_S = 5.0  # for the store to be free of the session before
EVERY = 100  # steps between two snapshots


def command(
    address: str,
    store: str | None = None,
    budget: str | None = None,
    token_file: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    ca: str | None = None,
    snapshot: str | None = None,
    snapshot_every: int | None = None,
    sum: bool = False,
    formats: str | None = None,
    client_ca: str | None = None,
    link: str = "tcp",
) -> int:
    """`roadtrain serve HOST:PORT --store DIR`, or `--sum`.

    Args:
        store: directory that the state rests in; one in /dev/shm rests in memory
        sum: instead: add up gradients for workers that keep their state (roadtrain.Summation)
        formats: with --sum: a module to import that registers formats of your own
        budget: bytes of memory for buffers, as 4GiB (half of what is free)
        snapshot: directory on files that a state in memory is copied to while training goes on
        snapshot_every: steps between two snapshots (100); the same at all servers of a job
        token_file: file (mode 600) with the token that workers must know; needed beyond this host
        cert: TLS: PEM file of this server's certificate
        key: TLS: PEM file of its key
        client_ca: TLS: PEM file that workers' certificates must be signed by (else they need none)
        ca: the older name of --client-ca
        link: tcp, or the name of a plugin's link, as rdma; the workers' too (tcp)
    """
    if (
        (store is None) != sum
        or (sum and snapshot is not None)
        or (formats is not None and not sum)
    ):
        raise ConfigError(
            f"--store {store}, --sum {sum}, --snapshot {snapshot}, --formats {formats}",
            hint=(
                "--store names a directory on the device that the state shall rest on (one in"
                " /dev/shm rests in memory and outlives this process, not the machine); --sum keeps"
                " no state"
            ),
        )
    twice = snapshot is not None and snapshot == store
    if twice or (snapshot_every is not None and (snapshot is None or snapshot_every < 1)):
        raise ConfigError(
            f"--snapshot {snapshot}, --snapshot-every {snapshot_every}, --store {store}",
            hint=(
                "--snapshot names a directory of its own on files, --snapshot-every steps, 1 or"
                " more"
            ),
        )
    every = 0 if snapshot is None else snapshot_every or EVERY
    if ca and client_ca:
        raise ConfigError(
            f"--ca {ca} and --client-ca {client_ca}",
            hint="--ca is the older name: --client-ca alone",
        )
    tls = tls_of(cert, key, client_ca or ca)
    if tls is not None and cert is None:
        raise ConfigError("TLS: a server needs --cert and --key")
    nbytes = parse_bytes(budget) if budget is not None else psutil.virtual_memory().available // 2
    options = link_options(link)(token=token_of(token_file), tls=tls)
    if store is None:
        return serve_sums(address_of(address), nbytes, options, formats)
    with SessionHost(
        address_of(address),
        Path(store),
        nbytes,
        options,
        snapshot=Path(snapshot or ""),
        every=every,
    ) as host:
        print(
            f"serving {store} at {host.where}, at most {show_bytes(nbytes)}; the state rests"
            f" {host.rests}"
        )
        host.run()
    return 0


class _Reply:
    """Where a remote worker's pull goes (`Pull.into`)."""

    def __init__(self, seat: Seat, ticket: int, chunk: Chunk) -> None:
        self.seat, self.ticket, self.chunk, self.asked = seat, ticket, chunk, time.monotonic()
        self.nbytes = round_up(chunk.weights_nbytes, PAGE)
        self._buffer: Buffer | None = None

    def buffer(self) -> memoryview:
        self._buffer = self.seat.session.answers.get()
        return self._buffer.view[: self.nbytes]

    def send(self, view: memoryview, done: Callable[[], None]) -> int:
        def sent() -> None:
            if self._buffer is not None:
                self.seat.session.answers.put(self._buffer)
            done()

        with suppress(PeerError):  # a lost worker ends the session where it is noticed
            self.seat.link.send(
                m.PULLED, m.encode((self.ticket, self.chunk.id)), [view[: self.nbytes]], sent
            )
        return self.nbytes


class Seat:
    """One worker's place in a session (or at a relay, which has the same methods): the Receiver
    of its link. Gradients arrive in buffers of `pool`, in order."""

    def __init__(self, session: Any, rank: int, signature: str, link: Link) -> None:
        self.session, self.rank, self.signature, self.link = session, rank, signature, link
        self.pool: BufferPool | None = None
        self.heard = time.monotonic()  # when its last message came
        self._roomed, self._taken = 0, 0  # frames with a payload: that got room, and that arrived
        # room for a frame, a frame: meanwhile its silence is not its own
        self._finding, self._taking = False, False
        self._coming: deque[Buffer] = deque()
        self._kept: dict[int, Buffer] = {}  # ticket -> buffer, until the server has let go of it
        self._reason: LostError | None = None  # why it ends, where it said so before

    def say(self, kind: int, fields: tuple[Any, ...], payload: bytes | memoryview = b"") -> None:
        with suppress(PeerError):
            self.link.send(kind, m.encode(fields), [memoryview(payload)], urgent=True)

    def silent_for(self, limit_s: float) -> float:
        """Seconds without a word from its process where those are more than `limit_s` (COMING_S
        while a frame of it is on its way), else 0."""
        silent_s = 0.0 if self._finding or self._taking else time.monotonic() - self.heard
        return (
            silent_s
            if silent_s > (max(limit_s, COMING_S) if self._roomed != self._taken else limit_s)
            else 0.0
        )

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        self._finding = True
        try:
            return self._room(kind, header, nbytes)
        finally:
            self.heard, self._finding = time.monotonic(), False
            self._roomed += 1

    def _room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        fields = m.header(kind, header)
        if kind == m.PUSH:
            chunk = self.session.chunk(fields[0])
            dense = round_up(
                4 * chunk.numel if self.session.local < 0 else chunk.weights_nbytes, PAGE
            )
            expected = m.push_nbytes(fields, chunk, dense) if chunk.trainable else -1
            if nbytes != expected:
                raise WireError(
                    f"a push of chunk {chunk.id} with {nbytes} bytes, {expected} expected"
                )
            if fields[3] < 0:
                assert self.pool is not None
                self._coming.append(self.pool.get())
                return self._coming[-1].view[:nbytes]
        elif kind == m.FILL:
            return Buffer(nbytes).view[:nbytes]
        elif kind not in (m.OPEN, m.SETTLE, m.COMMIT, m.APPLY_UPDATE):
            raise WireError(f"a frame of kind {kind} has no payload, {nbytes} bytes came")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        """What is wrong with it ends the session, and all its workers are told why."""
        self._taking = True
        try:
            self._take(kind, m.header(kind, header), payload)
        except RoadtrainError as error:
            self.session.end(error)
        except Exception as error:  # of this server: never a session that nobody ends
            self.session.end(LostError(f"this server failed: {type(error).__name__}: {error}"))
        finally:
            self.heard, self._taking = time.monotonic(), False
            self._taken += bool(payload)

    def _take(self, kind: int, fields: Any, payload: memoryview) -> None:
        session, me = self.session, self.rank
        match kind:
            case m.BEAT:
                session.beat()
            case m.OPEN:
                session.open(self, fields, bytes(payload))
            case m.FILL:
                session.fill(self, fields[0], payload)
            case m.SETTLE:
                session.settle(self, bytes(payload))
            case m.BEGIN:
                session.begin(self)
            case m.READ:
                session.read(self, fields[0])
            case m.PULL:
                number, version, ticket = fields
                reply = _Reply(self, ticket, session.chunk(number))
                session.tell(messages.Pull(number, version, reply, ticket, me))
            case m.PUSH:
                assert self.pool is not None
                chunk = session.chunk(fields[0])
                if fields[3] < 0 and not payload:
                    raise WireError(f"a push of chunk {chunk.id} without a gradient")
                # downcast: with the room for the fp32 sum that it may become
                if fields[3] < 0 and fields[4]:
                    payload = self._coming[0].view[: chunk.weights_nbytes]
                push = m.push(fields, payload, chunk, self.pool.spare >= 2, me)
                if fields[3] < 0:
                    if push.ticket in self._kept:  # freeing the one would free the other's memory
                        raise WireError(f"two pushes with the ticket {push.ticket}")
                    self._kept[push.ticket] = self._coming.popleft()
                session.tell(push)
            case m.APPLY_UPDATE:
                session.tell(m.apply_update(fields, payload, session.chunk(fields[0]), me))
            case m.CLOSE:
                session.tell(messages.Close(session.chunk(fields[0]).id, fields[1], me))
            case m.DISCARD_GRAD:
                session.tell(messages.DiscardGrad(session.chunk(fields[0]).id, me))
            case m.END_STEP:
                session.tell(messages.EndStep(fields[0], me))
            case m.COMMIT:
                session.tell(messages.Commit(fields[0], bytes(payload), me))
            case m.COMMITTED:
                session.tell(messages.CommitDone(fields[0]))
            case m.FAILED:
                self._reason = LostError(f"it ended with {fields[0]}: {fields[1]}")
            case _:
                raise WireError(f"a frame of kind {kind} goes the other way")

    def lost(self, error: PeerError) -> None:
        self.session.left(self, self._reason or error)

    def freed(self, ticket: int) -> None:
        buffer = self._kept.pop(ticket, None)
        if buffer is not None and self.pool is not None:
            self.pool.put(buffer)


class Session:
    """Workers `0..workers-1` of one incarnation of a job. `server` runs from `begin` on. Links'
    threads come in by the methods that Seat calls, the server's loop thread by `deliver`; the host
    is told once that it is over.
    `local`: how many workers of each host are summed first (Rule 1); negative where their relay has
    done that.
    """

    def __init__(self, name: str, workers: int, local: int, number: int, host: SessionHost) -> None:
        self.name, self.workers, self.local, self.number, self.host = (
            name,
            workers,
            local,
            number,
            host,
        )
        self.seats: dict[int, Seat] = {}
        self.stages, self.began = Stages(), time.monotonic()
        self.server: Server | None = None
        self.meta: StoreMeta | None = None
        self.tier: FileTier | None = None
        self.kept: FileTier | None = None  # the part that snapshots go to
        self.snapshots: Snapshots | None = None
        self.answers, self.pools = BufferPool(0, 1), list[BufferPool]()
        self.ready = False
        self._rules: list[Any] = []
        self._new, self._step = False, 0
        self.setup: Setup
        self._gone: set[int] = set()
        self._lock = threading.Lock()
        self._over = False
        self._storing = threading.RLock()  # whoever works with the tiers before the server does
        self._closed = False  # under `_storing`: the tiers are closed, or would be
        # until `ready`, for who waits
        self._doing, self._done, self._all = "worker 0 to open the store", 0, 0

    def join(self, seat: Seat) -> None:
        with self._lock:
            self.seats[seat.rank] = seat
        try:
            self._welcome(seat)
        except BaseException as error:
            self._refused(seat, error)
            raise

    def _refused(self, seat: Seat, error: BaseException) -> None:
        """It does not take part: without worker 0, or without anybody, nothing can."""
        with self._lock:
            self.seats.pop(seat.rank, None)
            over = seat.rank == 0 or self._gone >= set(self.seats)
        if over:
            self.end(error)

    def _welcome(self, seat: Seat) -> None:
        # only worker 0 goes by what is held: the others do not wait while a large store is being
        # made
        step, kept, meta = self.host.held() if seat.rank == 0 else (-1, (), None)
        seat.say(
            m.WELCOME,
            (step, kept, self.host.every, self.host.rests),
            meta.to_json().encode() if meta else b"",
        )
        if self.ready and (error := self._greet(seat)) is not None:
            raise error

    @property
    def step(self) -> int:
        return -1 if self.tier is None else self.tier.step

    def takes(self, name: str, rank: int, workers: int, local: int) -> bool:
        same = (name, workers, local) == (self.name, self.workers, self.local)
        return not self._over and same and rank not in self.seats

    def chunk(self, number: int) -> Chunk:
        meta = self.meta
        if (
            meta is None
            or not 0 <= number < len(meta.owners)
            or self.number not in meta.holders(number)
        ):
            raise WireError(f"chunk {number} is not of server {self.number}")
        return meta.table.chunks[number]

    def open(self, seat: Seat, fields: Any, body: bytes) -> None:
        """Worker 0 says what the store holds: makes it, or opens it at the step given."""
        new, step, servers, holds_gradients, kept, given_up = fields
        try:
            tree = msgspec.json.decode(body, type=dict[str, Any])
            meta = StoreMeta.from_json(tree["meta"], "the store that worker 0 describes")
            self._rules = [rule_of(r) for r in tree["rules"]]
        except (msgspec.DecodeError, KeyError) as error:
            raise WireError(f"worker 0 describes no store: {error}") from error
        if seat.rank or self.tier or meta.index != self.number or len(meta.directories) != servers:
            raise WireError("a store is opened by worker 0, once, with this server's number")
        directory, self._new, self._step = self.host.directory, new, step
        self._doing = f"worker 0 to {'make' if new else 'open'} the store"
        self._done, self._all = 0, sum(record.nbytes for record in meta.owned(self.number).values())
        with self._stored(), self.host.storing():
            unbegun = replace(meta, history=meta.history[:-1])
            if self.host.every:
                self.kept = open_snapshot(self.host.snapshot, unbegun, kept)
            self.tier = (
                create_part(directory, unbegun, keep=given_up)
                if new
                else open_part(directory, step)
            )
            if new and kept == step and self.kept is not None and self.tier is not None:
                counted, self.tier.on_write = (
                    self.tier.on_write,
                    lambda chunk: self._count(meta.records[chunk].nbytes),
                )
                self._doing = "the snapshot to be copied back"
                restore(self.kept, self.tier)
                self.tier.on_write = counted
                self.host.report(
                    f"{directory}: back to step {kept}, from the snapshot in {self.host.snapshot}"
                )
        self._doing, self._done = "worker 0 to fill the store", 0
        held = None if self.tier is None else self.tier.meta
        if self.tier is None or held is None or (held.job, held.index) != (meta.job, self.number):
            there = (
                "nothing" if held is None else f"the part of server {held.index} of job {held.job}"
            )
            raise ForeignError(
                f"{directory}: holds {there}, asked for is server {self.number} of job {meta.job}",
                hint="name the servers in the order in which they were named first",
            )
        self.meta = replace(held, history=meta.history, sessions=(), without=())
        if self.kept is not None:
            self.snapshots = Snapshots(self.tier, self.kept, self.host.every, self.host.report)
        budgets = derive_server(
            self.meta.table,
            meta.owned(self.number),
            self.host.nbytes - (self.snapshots.nbytes if self.snapshots else 0),
            workers=self.workers,
            holds_gradients=holds_gradients,
            wide=self.local < 0,
        )
        self.tier.spill_workers = self.workers
        self.answers = BufferPool(budgets.answers, budgets.piece_bytes)
        self.pools = [BufferPool(budgets.pool, budgets.piece_bytes) for _ in range(self.workers)]
        self.setup = Setup(
            self.number,
            f"server {self.number} ({self.host.where}, {directory})",
            self.meta,
            self._rules,
            self.tier,
            budgets,
            self.host.report,
            self.workers,
            self.local,
        )
        for note in [
            tier.note for tier in (self.tier, self.kept) if tier is not None and tier.note
        ]:
            self.host.report(note)

    def fill(self, seat: Seat, number: int, payload: memoryview) -> None:
        chunk = self.chunk(number)
        if seat.rank or self.tier is None or self.tier.step >= 0:
            raise WireError("only worker 0 fills, and only a new part")
        if len(payload) != (expected := self.setup.meta.records[chunk.id].nbytes):
            raise WireError(f"{len(payload)} bytes fill chunk {number}, {expected} expected")
        with self._stored():
            self.tier.write(number, "record", payload)
        self._count(len(payload))
        seat.say(m.FILLED, (number,))

    def settle(self, seat: Seat, blob: bytes) -> None:
        """A new part is whole: from now on it counts."""
        if seat.rank or self.tier is None or not self._new or self.ready:
            raise WireError("worker 0 settles a new part, once")
        with self._stored():
            self._settle(self.tier, blob)
        seat.say(m.SETTLED, ())

    def _settle(self, tier: FileTier, blob: bytes) -> None:
        self.tier = tier
        if self.tier.step < 0:
            self.tier.prepare(self._step, blob)
            self.tier.committed(self._step)
        with self.host.storing():
            for line in publish_part(self.host.directory):
                self.host.report(line)

    def begin(self, seat: Seat) -> None:
        if seat.rank or self.tier is None or self.meta is None or self.tier.step < 0 or self.ready:
            raise WireError(
                "worker 0 begins, once, after it has opened a store and settled a new one"
            )
        with self._stored():
            self._begin(self.tier, self.meta)

    def _begin(self, own: FileTier, meta: StoreMeta) -> None:
        self.tier, self.meta = own, meta
        with self.host.storing():  # before its first step: whoever is not here misses that
            for tier in filter(None, (self.tier, self.kept)):
                replace(tier.meta, history=meta.history, sessions=(), without=()).write(
                    tier.directory
                )
        if self.snapshots is not None:
            self.snapshots.start()
        self._doing, self._done = "the server to load what it keeps in memory", 0
        self.server = Server(self.setup, self.deliver, self.stages, self.tier.step)
        self._all = sum(map(len, self.server.memory.values()))
        self.server.start(self._count)
        with self._lock:
            self.ready = True
            seats = list(self.seats.values())
        self.host.report(
            f"{self.setup.name}: step {self.tier.step}, {self.workers} worker(s), "
            f"{len(self.server.chunks)} chunks, {show_bytes(self.server.nbytes())} of buffers"
        )
        for other in seats:
            self._greet(other)

    def _greet(self, seat: Seat) -> ForeignError | None:
        """Ready: what the worker needs to go on from here. A worker of another job ends the
        session."""
        assert self.meta is not None and self.tier is not None
        if seat.signature != self.meta.signature:
            error = ForeignError(
                f"{seat.link.peer} has another model, dtype, chunk size or optimizer than the store"
                f" ({seat.signature} and {self.meta.signature})",
                hint="every worker runs the same job",
            )
            self.end(error)
            return error
        seat.pool = self.pools[seat.rank]
        blobs, n = unpack(self.tier.blob), max(-self.local, 1)
        mine = blobs[n * seat.rank : n * (seat.rank + 1)]
        fields = self.tier.step, self.meta.members, self.meta.job
        seat.say(m.READY, fields, pack(mine if len(mine) == n else blobs[:1]))
        return None

    def read(self, seat: Seat, number: int) -> None:
        """A whole record, between steps; -1: what all workers committed with the last one."""
        if self.meta is None or self.tier is None:
            raise WireError("nothing is open yet")
        if number == -1:
            seat.say(m.RECORD, (number,), self.tier.blob)
            return
        chunk = self.chunk(number)
        record = Buffer(self.meta.records[chunk.id].nbytes).view
        with self._stored():
            self.tier.read(chunk.id, "record", record)
        # with staleness 1 the weights part is that before step s, as the master is where s updated
        # nothing of the chunk
        unchanged = (
            self.meta.staleness
            and chunk.trainable
            and self.tier.written_in(chunk.id) < self.tier.step
        )
        if unchanged or not self.tier.has_weights(chunk.id):
            RecordView(self.meta, chunk, record).cast_weights()
        seat.say(m.RECORD, (chunk.id,), record)

    @contextmanager
    def _stored(self) -> Iterator[None]:
        """The tiers stay open meanwhile. Raises LostError where they are closed."""
        with self._storing:
            if self._closed:
                raise LostError("the session has ended")
            try:
                yield
            finally:
                # it took too long: nobody waited, and nobody else ends what was begun
                if self._closed:
                    self._close_tiers()

    def _close_tiers(self) -> None:
        """Under `_storing`."""
        if self.server is not None:
            self.server.stop(END_S)
        tiers, self.tier, self.kept = (self.tier, self.kept), None, None
        for tier in filter(None, tiers):
            tier.close()

    def _count(self, done: int) -> None:
        self._done += done

    def look(self, silent_s: float) -> None:
        """Once in a while: tells who waits how far it is; a worker whose process has stopped
        ends the session."""
        with self._lock:
            seats = (
                []
                if self._over
                else [seat for rank, seat in self.seats.items() if rank not in self._gone]
            )
        if not self.ready:
            for seat in seats:
                seat.say(
                    m.PROGRESS,
                    (self._doing, self._done or self.host.made(self.tier is None), self._all),
                )
        for seat in seats:
            if for_s := seat.silent_for(silent_s):
                self.end(
                    DeadlineError(
                        f"worker {seat.rank} has been silent for {for_s:.0f} s: its process is"
                        " stopped, or its host hangs",
                        hint="end it; the next start goes on at the last committed step",
                    )
                )

    def beat(self) -> None:
        """A worker's process runs."""

    def tell(self, message: Any) -> None:
        if self.server is None:
            raise WireError("nothing is served yet")
        self.server.receive(message)

    def deliver(self, message: Any, to: int | None) -> None:
        """What the server says, from its loop thread."""
        seats = list(self.seats.values()) if to is None else [self.seats[to]]
        match message:
            case messages.BufferFree(ticket):
                seats[0].freed(ticket)
            case messages.GradAccumulated(chunk, sums):
                for seat in seats:
                    seat.say(m.GRAD_ACCUMULATED, (chunk,), m.as_bytes(sums))
            case messages.Written(_, step, chunk_sums):
                for seat in seats:
                    seat.say(m.WRITTEN, (step, chunk_sums))
            case messages.Prepared(_, step):
                for seat in seats:
                    seat.say(m.PREPARED, (step,))
            case messages.CommitDone(step):
                for seat in seats:
                    seat.say(m.COMMITTED, (step,))
            case messages.Failed(_, error):
                self.end(error)

    def left(self, seat: Seat, error: PeerError) -> None:
        """A link has ended. Where nothing is under way the others may be leaving too; else the
        session is over."""
        with self._lock:
            self._gone.add(seat.rank)
            all_gone = len(self._gone) == len(self.seats)
        if all_gone or self.server is None:
            self.end(error)
        else:
            self.server.receive(messages.PeerLost(seat.rank, str(error)))

    def status(self) -> health.Said:
        """What this server does, and what its workers (or their relays) wait for."""
        with self._lock:
            seats, now = dict(self.seats), time.monotonic()
        names = {
            rank: f"{'worker' if self.local > 0 else 'relay of host'} {rank}"
            for rank in range(self.workers)
        }
        names |= {
            r: f"{names[r]} ({s.link.peer.partition('(')[2].rpartition(':')[0]})"
            for r, s in seats.items()
        }
        pulls, owed = self.server.waits() if self.server else ([], [(0, "the opened store")])
        late = [
            (now - (seats[rank].heard if rank in seats else self.began), rank, what)
            for rank, what in owed
        ]
        text, waits = (
            f"step {self.step}, {self.workers} worker(s)",
            {names[rank]: (0.0, "") for rank in seats},
        )
        if late:
            seconds, rank, what = max(late)
            text += f"; waits since {seconds:.1f} s for {what} of {names[rank]}"
        for pull in pulls:
            waits[names[pull.worker]] = max(
                waits[names[pull.worker]], (now - pull.into.asked, f"chunk {pull.chunk}")
            )
        return text, waits, self.stages.seconds()

    def end(self, error: BaseException | None) -> None:
        with self._lock:
            first, self._over = not self._over, True
        if first:
            self.host.ended.put((self, error))

    def tear_down(self, error: BaseException | None) -> None:
        """From the host's own thread. What was not committed is dropped when the store is
        opened again."""
        words = (
            (type(error).__name__, str(error))
            if error is not None
            else ("LostError", "the server stops")
        )
        with self._lock:
            seats = list(self.seats.values())
        for seat in seats:
            seat.say(m.FAILED, words)
        for pool in [self.answers, *self.pools]:
            pool.close()
        for seat in seats:
            seat.link.close()
        if self.snapshots is not None:
            self.snapshots.close()
        if self.server is not None:
            self.server.stop(END_S)
        self._closed = True
        if self._storing.acquire(timeout=END_S):
            self._close_tiers()
            self._storing.release()
        else:  # a device hangs: whoever waits for it closes them
            self.host.report(f"{self.host.directory}: still at work for the session that is over")
        for pool in [self.answers, *self.pools]:
            for buffer in pool.buffers:
                buffer.close()


class SessionHost:
    """Listens; one session at a time. `run` returns after `stop`. `rests`: where the state
    does, and how durable."""

    def __init__(
        self,
        address: Address,
        directory: Path,
        nbytes: int,
        options: TcpOptions,
        report: Report = print,
        snapshot: Path = Path(),
        every: int = 0,
        silent_s: float = SILENT_S,
    ) -> None:
        self.directory, self.nbytes, self.report = directory, nbytes, report
        self.silent_s = silent_s  # how long a worker may be silent
        # where snapshots go, steps between two; 0: none are taken
        self.snapshot, self.every = snapshot, every
        self.rests = where_it_rests(directory, snapshot, every)
        self.ended: queue.SimpleQueue[tuple[Session | None, BaseException | None]] = (
            queue.SimpleQueue()
        )
        self.session: Session | None = None
        self._store_lock = threading.Lock()  # over opening and making the store
        self._lock = threading.Lock()
        self._listener = listen(address, self._accept, options, report, language=m.LANGUAGE)
        self.where = "{}:{}".format(*self._listener.address)

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Alone with the directory. BusyError while the session before is not done with it: a
        device hangs."""
        if not self._store_lock.acquire(timeout=LOCK_S):
            raise BusyError(f"{self.directory}: the session before is still at work there")
        try:
            yield
        finally:
            self._store_lock.release()

    def made(self, making: bool) -> int:
        """Bytes that its files have by now, while they are being made."""
        with suppress(OSError):
            return (
                sum(path.stat().st_size for path in self.directory.glob("gen-*/*")) if making else 0
            )
        return 0

    def held(self) -> tuple[int, tuple[int, ...], StoreMeta | None]:
        """Newest step of the store, -1 for none, those of its snapshots, and what they are of."""
        with self.storing():
            if self.session is not None and (tier := self.session.tier) is not None:
                return tier.step, (), tier.meta
            steps, meta = held_in(self.directory)
            kept, of = held_in(self.snapshot) if self.every else ((), None)
        # another job's is refused when it is opened
        ours = meta is None or of is None or meta.job == of.job
        return max(steps, default=-1), kept if ours else (), meta or of

    def go_on_without(self, job: str, link: str, servers: tuple[int, ...]) -> bool:
        """The witness of the session `link` says that it has ended, and that this server may go on
        without the others: nobody else is told so. Durable on return; False where that was not the
        last session here.
        """
        with self.storing():
            tier = None if self.session is None else self.session.tier
            opened = open_part(self.directory, look=True) if tier is None else None
            home = next((one.directory for one in (tier, opened) if one is not None), None)
            if opened is not None:
                opened.close()
            meta = None if home is None else StoreMeta.load(home)
            if (
                home is None
                or meta is None
                or meta.job != job
                or [one.id for one in meta.history[-1:]] != [link]
            ):
                return False
            replace(meta, without=servers).write(home)
        self.report(
            f"server {meta.index}: may go on without server(s) {', '.join(map(str, servers))}"
        )
        return True

    def _accept(self, link: Link, hello: bytes) -> Receiver:
        """Called by the listener for a link whose other side has proven the token."""
        if hello == health.HELLO:
            said: health.Said = (
                self.session.status() if self.session else ("no session: waits for workers", {}, {})
            )
            return health.answer(link, (f"state {self.rests}; {said[0]}", *said[1:]))
        if hello.startswith(m.WITHOUT):
            rest = hello[len(m.WITHOUT) :]
            done = self.go_on_without(*m.decoded(m.WITHOUT_REST, rest, "no word of a witness"))
            return health.answer(link, ("noted" if done else "not the last session here", {}, {}))
        name, rank, workers, local, number, signature = m.decoded(
            m.HELLO, hello, "no greeting of a worker"
        )
        if not 0 <= rank < workers <= 1 << 16:
            raise WireError(f"worker {rank} of {workers}")
        with self._lock:
            session = self.session
            if session is None:
                session = self.session = Session(name, workers, local, number, self)
            elif not session.takes(name, rank, workers, local):
                raise BusyError(
                    f"busy with a session of {session.workers} worker(s), at step {session.step}"
                )
            seat = Seat(session, rank, signature, link)
            link.peer = f"worker {rank} ({link.peer})"
            session.join(seat)
            return seat

    def run(self) -> None:
        """Ends sessions, one after the other, until `stop`."""
        while True:
            try:
                session, error = self.ended.get(timeout=LOOK_S)
            except queue.Empty:
                self._look()
                continue
            if session is None:
                return
            step = session.step
            try:
                session.tear_down(error)
            except Exception as failed:  # whatever it was, the next one finds a server that is free
                self.report(
                    f"ending the session: {type(failed).__name__}: {failed}".replace("\n", "; ")
                )
            self.report(f"session over at step {step}: {error}".replace("\n", "; "))
            with self._lock:
                self.session = None

    def _look(self) -> None:
        session = self.session
        if session is not None:
            session.look(self.silent_s)

    def stop(self) -> None:
        self.ended.put((None, None))

    def __enter__(self) -> SessionHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self.session is not None:
            self.session.tear_down(None)
