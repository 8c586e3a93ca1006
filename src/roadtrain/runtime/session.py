"""Cluster: the servers of a job on other hosts, as an Engine is the one in this process; and which
worker this is.

Worker 0 makes the store or opens it, and fills a new one; the others wait until it is there. From
then on all workers do the same, and the servers wait for all of them. A lost server or worker is an
error here: whoever started this process (torchrun) starts it again, and it goes on at the last
committed step.

With replicas worker 0 then leaves out a server that does not answer, and fills one that has missed
steps up again from those that have not; the others go by what it did. Where all that is left in the
servers' stores is not the newest step, it sends all of them back to a snapshot, if they have one.
protocol/history.py says what may be gone on from, and who knows.

Does NOT convert a store to another number of servers, chunk size or dtype: that is refused, with
what is there.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import msgspec
import numpy as np
import torch

from roadtrain.chunks import Block
from roadtrain.config.budgets import Budgets, RelayBudgets
from roadtrain.device.buffers import array_in
from roadtrain.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    ForeignError,
    ForkedError,
    LostError,
    PeerError,
    StaleError,
    WireError,
)
from roadtrain.kernels.rules import described
from roadtrain.protocol import messages
from roadtrain.protocol.history import (
    Doubt,
    Histories,
    HistoryLink,
    Resume,
    ServerHoldings,
    Witness,
    back_to,
    lost_chunks,
)
from roadtrain.runtime import frames as m
from roadtrain.runtime import health
from roadtrain.runtime import relay as relays
from roadtrain.runtime.compress import Compressor
from roadtrain.runtime.local_session import StorePlan, check_same, fill_record
from roadtrain.runtime.residuals import Residuals
from roadtrain.runtime.server import Server
from roadtrain.runtime.trace import Stages
from roadtrain.runtime.worker import Worker
from roadtrain.storage.convert import RecordView, Source, gather_param, param_pieces
from roadtrain.storage.ledger import StoreMeta
from roadtrain.storage.mark import Mark
from roadtrain.storage.tier import WEIGHTS
from roadtrain.transport import shm
from roadtrain.transport.address import local_options
from roadtrain.transport.link import Link
from roadtrain.transport.tcp import Address, TcpOptions, connect
from roadtrain.units import show_bytes

FILLS_AT_ONCE = 4
GRACE_S = 5.0  # for a server to answer once others that hold every chunk have
DIAL_S = 2.0  # for one try to reach a host that may be dead
BEAT_S = (
    2.0  # between two signs of life; servers bear SILENT_S of silence (runtime/session_host.py)
)
SAY_S = 10.0  # between two lines about what all wait for


@dataclass(frozen=True)
class WorkerGroup:
    """Which worker this is. `session`: the same for all workers of one start, another after each
    restart. `local`: how many workers this host has, and each other; 1 where they have different
    numbers."""

    rank: int = 0
    workers: int = 1
    session: str = ""
    local: int = 1

    @staticmethod
    def of_environment(environ: Mapping[str, str] = os.environ) -> WorkerGroup:
        """As torchrun says it. Raises ConfigError."""
        try:
            rank, workers = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
            local = int(environ.get("LOCAL_WORLD_SIZE", "1"))
            hosts = int(environ.get("GROUP_WORLD_SIZE", workers // max(local, 1)))
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE or LOCAL_WORLD_SIZE is no number: {error}"
            ) from error
        if not 0 <= rank < workers:
            raise ConfigError(
                f"RANK is {rank} and WORLD_SIZE {workers}", hint="start the workers with torchrun"
            )
        parts = [environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT")]
        alone = uuid.uuid4().hex if workers == 1 else ""
        session = ":".join([*parts, environ.get("MASTER_PORT", ""), alone])
        return WorkerGroup(rank, workers, session, local if local * hosts == workers else 1)


class RemoteServer:
    """The worker's end of the link to one server: a MessageLink, and the Receiver of its frames.
    `all`: the job's servers by number; whoever waits for any of them hears of the first that fails.
    """

    def __init__(self, number: int, peer: str, all: Mapping[int, RemoteServer]) -> None:
        self.number, self.peer, self._all = number, peer, all
        self.link: Link | None = None
        self.deliver: Callable[[Any], None] = lambda message: None  # until there is a worker
        # ticket -> chunk, where its parameters go
        self._into: dict[int, tuple[int, memoryview]] = {}
        self._inbox: queue.SimpleQueue[tuple[int, Any, bytes | memoryview]] = queue.SimpleQueue()
        # what is under way there, how much of how much is done
        self.progress: tuple[str, int, int] = "", 0, 0
        self.moved = -math.inf  # when that changed
        self._error: BaseException | None = None
        self._told = False  # it said itself that it ends
        self.gone = False  # its link ended without a word

    def send(self, message: Any) -> None:
        if isinstance(message, messages.Pull):
            self._into[message.ticket] = (message.chunk, message.into)
        kind, header, parts = m.frame(message)
        sent = (
            (lambda: self.deliver(messages.BufferFree(message.ticket)))
            if isinstance(message, messages.Push)
            else None
        )
        self._post(kind, header, parts, sent)

    def say(self, kind: int, fields: tuple[Any, ...], payload: bytes | memoryview = b"") -> None:
        self._post(kind, m.encode(fields), [memoryview(payload)])

    def _post(
        self,
        kind: int,
        header: bytes,
        parts: Sequence[memoryview],
        sent: Callable[[], None] | None = None,
    ) -> None:
        assert self.link is not None
        try:
            # a pull names the version that it needs: it may overtake the pushes that give it
            self.link.send(kind, header, parts, sent, urgent=kind == m.PULL)
        except LostError:
            # else whoever waits next hears what the server said before it hung up
            if self._error is None:
                raise

    def wait(self, kind: int, what: str, deadline_s: float) -> tuple[Any, Any]:
        """The next session frame, which must be of `kind`: (fields, payload). The deadline is
        for no progress."""
        begin = time.monotonic()
        while True:
            left_s = max(begin, self.moved) + deadline_s - time.monotonic()
            try:
                got, fields, payload = self._inbox.get(timeout=max(0.0, left_s))
                break
            except queue.Empty:
                if time.monotonic() >= max(begin, self.moved) + deadline_s:
                    raise DeadlineError(
                        f"waited {deadline_s:.0f} s for {what} from {self.peer}{self.how_far()}"
                    ) from None
        if got == m.FAILED:
            raise LostError(
                f"waiting for {what}: {self._error or f'{self.peer} ended'}"
            ) from self._error
        if got != kind:
            raise WireError(f"{self.peer} sent a frame of kind {got} instead of {what}")
        return fields, payload

    def how_far(self) -> str:
        """For people: what it waits for itself."""
        what, done, of = self.progress
        amount = f", {show_bytes(done)} of {show_bytes(of)}" if done else ""
        return f", which waits for {what}{amount}" if what else ""

    def beat(self) -> None:
        if self.link is not None:
            with suppress(PeerError):
                self.link.send(m.BEAT, m.encode(()), urgent=True)

    def has_spoken(self) -> bool:
        """Whether `wait` would not wait."""
        return not self._inbox.empty()

    def close(self) -> None:
        """Where this worker ends because of a server, the others hear of it, for the sentences
        of their workers."""
        if self.link is None:
            return
        if self._error is not None:
            with suppress(PeerError):
                self.link.send(
                    m.FAILED, m.encode((type(self._error).__name__, str(self._error))), urgent=True
                )
        self.link.close()

    # the Receiver of its link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        fields = m.header(kind, header)
        if kind == m.PULLED:
            ticket, chunk = fields
            expected, into = self._into.get(ticket, (-1, memoryview(b"")))
            if expected != chunk or len(into) != nbytes:
                raise WireError(
                    f"{nbytes} bytes of chunk {chunk} came for ticket {ticket}, {len(into)} were"
                    " asked for"
                )
            return into
        if kind not in (m.WELCOME, m.READY, m.GRAD_ACCUMULATED, m.RECORD):
            raise WireError(f"a frame of kind {kind} has no payload, {nbytes} bytes came")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields = m.header(kind, header)
        match kind:
            case m.PULLED:
                ticket, chunk = fields
                del self._into[ticket]
                self.deliver(messages.Pulled(ticket, chunk))
            case m.GRAD_ACCUMULATED:
                self.deliver(
                    messages.GradAccumulated(fields[0], np.frombuffer(payload, np.float64))
                )
            case m.WRITTEN:
                self.deliver(messages.Written(self.number, *fields))
            case m.PREPARED:
                self.deliver(messages.Prepared(self.number, fields[0]))
            case m.COMMITTED:
                self.deliver(messages.CommitDone(fields[0]))
            case m.FAILED:
                self._failed(LostError(f"{self.peer} ended: {fields[1]}"))
            case m.RECORD:
                self._inbox.put((kind, fields, payload))
            case m.PROGRESS:
                if fields != self.progress:
                    self.progress, self.moved = fields, time.monotonic()
            case m.WELCOME | m.FILLED | m.SETTLED | m.READY:
                self._inbox.put((kind, fields, bytes(payload)))
            case _:
                raise WireError(f"a frame of kind {kind} goes the other way")

    def lost(self, error: PeerError) -> None:
        self.gone = not self._told
        self._failed(error)

    def _failed(self, error: PeerError) -> None:
        self._told = True
        for server in (self, *list(self._all.values())):
            server._error = server._error or error
            server._inbox.put((m.FAILED, (), b""))
        self.deliver(messages.Failed(self.number, error))


class RemoteSession:
    """What an Engine is, with its servers elsewhere. `step`: the last committed one when it was
    opened. Raises ForeignError where the servers hold another job, LostError, DeadlineError."""

    store = None

    def __init__(
        self,
        store_plan: StorePlan,
        budgets: Budgets,
        servers: Sequence[Address],
        options: TcpOptions,
        group: WorkerGroup,
        device: torch.device,
        *,
        compute_blocks: Sequence[int],
        compressor: Compressor | None,
        deadline_s: float,
        holds_gradients: bool,
        relay: RelayBudgets | None = None,
        residuals: Residuals | None = None,
        mark: Mark | None = None,
        give_up: Sequence[int] = (),
        report: Callable[[str], None] = print,
    ) -> None:
        self.store_plan, self.group, self.stages, self._deadline_s = (
            store_plan,
            group,
            Stages(),
            deadline_s,
        )
        self.names = tuple(
            f"server {number} ({host}:{port})" for number, (host, port) in enumerate(servers)
        )
        self.meta = replace(store_plan.meta(), owners=store_plan.owners, directories=self.names)
        self.new, self.step, self.blob = False, 0, b""
        self.servers: dict[int, RemoteServer] = {}  # those that take part
        # newest step, description; -1, None: holds nothing
        self._found: dict[int, tuple[int, StoreMeta | None]] = {}
        self._welcomes: dict[int, tuple[int, tuple[int, ...], int, str]] = {}
        self._said: dict[int, tuple[Any, Any]] = {}  # Ready, of whom it has come
        self._covered_since: float | None = None
        self._decided: Resume | Doubt | None = None  # of `_found`; None: not known yet
        # servers whose contents are not to count where that is in doubt
        self._give_up = tuple(give_up)
        self._given_up: tuple[int, ...] = ()  # those of them for which it was
        self._addresses, self._options = servers, options
        self._begun: set[int] = set()  # servers that have written down that this session began
        self._unfilled = dict.fromkeys(range(len(servers)), 0)
        # which are filled up again -> what was committed with the last step
        self._behind: dict[int, bytes] = {}
        self._mark = mark  # what the run directory knows of the store
        self.history = ""  # what this run is a witness of, from when its session has begun
        self._relay: Popen[bytes] | None = None  # that this worker started
        self._sockets: Path | None = None  # where this host's relay listens
        host = group.rank // group.local
        if relay is not None:
            self._sockets = relays.sockets_of(group.session, host, servers)
            if group.rank % group.local == 0:
                self._relay = relays.start(
                    relays.Orders(
                        str(self._sockets),
                        servers,
                        options,
                        group.session,
                        host,
                        group.workers // group.local,
                        group.local,
                        self.meta.to_json(),
                        relay,
                        deadline_s,
                    )
                )
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._beats.start()
        self._report = report
        try:
            missing = self._reach(servers, options)
            self.rests = "; ".join(
                dict.fromkeys(rests for _, _, _, rests in self._welcomes.values())
            )
            if group.rank == 0:
                self._open(
                    missing, [described(r) for r in store_plan.rules], holds_gradients, report
                )
            self._own_tier = (
                None if residuals is None else residuals.open(self.meta.job, self.step, report)
            )
            holders = [
                tuple(s for s in self.meta.holders(c.id) if s in self.servers)
                for c in store_plan.table.chunks
            ]
            table, own = store_plan.table, None
            if residuals is not None:
                table, own = residuals.table, residuals.number
                holders += [(own,)] * (len(table.chunks) - residuals.base)
            self.worker = Worker(
                table,
                budgets,
                holders,
                device,
                self.stages,
                committed=self.step,
                servers=[*sorted(self.servers), *([] if own is None else [own])],
                own=own,
                deadline_s=deadline_s,
                compute_blocks=compute_blocks,
                compressor=compressor,
                workers=group.workers,
                staleness=store_plan.staleness,
                replicas=store_plan.replicas,
            )
            self._own: Server | None = None  # whose chunks are this worker's residuals
            if residuals is not None and self._own_tier is not None:
                self._own = residuals.server(
                    self._own_tier, budgets, self.worker.deliver, self.stages, report
                )
                self.worker.links[residuals.number] = self._own
            for server in self.servers.values():
                server.deliver = self.worker.deliver
                self.worker.links[server.number] = server
                if server._error is not None:
                    self.worker.deliver(messages.Failed(server.number, server._error))
        except BaseException:
            self._still()
            for server in self.servers.values():
                server.close()
            if self._relay is not None:
                self._relay.kill()
            raise

    def _beat(self) -> None:
        """This process runs, whatever its main thread does: servers end the session of one that
        is stopped."""
        while not self._over.wait(BEAT_S):
            for server in list(self.servers.values()):
                server.beat()

    def _still(self) -> None:
        self._over.set()
        self._beats.join()

    # who takes part

    def _reach(
        self, addresses: Sequence[Address], options: TcpOptions
    ) -> dict[int, PeerError | None]:
        """Connects to the servers until `_enough`. Returns the missing ones, with what was wrong
        last. Tries again for `retry_s` while nobody listens, or while a server is busy with workers
        that may be leaving.
        """
        spare = self.meta.replicas > 1
        once = (
            replace(options, retry_s=0.0, connect_s=min(options.connect_s, DIAL_S))
            if spare
            else options
        )
        missing: dict[int, PeerError | None] = dict.fromkeys(range(len(addresses)))
        begin = said = time.monotonic()
        while True:
            for number in list(missing):
                try:
                    self._join(number, addresses[number], once)
                    del missing[number]
                except (LostError, DeadlineError, WireError) as error:
                    if not isinstance(error, BusyError) and (
                        not spare or isinstance(error, WireError)
                    ):
                        raise
                    missing[number] = error
            if self._enough(missing):
                return missing
            # for worker 0 to begin
            waiting = not missing or (self.group.rank > 0 and len(self.servers) > 0)
            limit_s = (options.retry_s or 0.0) + self._deadline_s * waiting
            moved = max([begin, *(server.moved for server in self.servers.values())], default=begin)
            if time.monotonic() - (moved if waiting else begin) > limit_s:
                break
            if time.monotonic() - said > SAY_S:
                said = self._say_how_far()
            time.sleep(0.05)
        if waiting:
            raise DeadlineError(
                f"waited {limit_s:.0f} s for worker 0 to begin with {self._names(self.servers)}"
            )
        why = next(e for e in missing.values() if e is not None)
        if not spare:
            raise why
        doubt = self._decide() if self._found else None
        which = f"; {doubt.why}" if isinstance(doubt, Doubt) else ", which others do not replace"
        raise LostError(
            f"no answer for {limit_s:.0f} s from {self._names(missing)}{which}: {why}",
            hint=(doubt.hint if isinstance(doubt, Doubt) else "")
            or "a new store needs all its servers, later each chunk needs one of its two",
        ) from why

    def _say_how_far(self) -> float:
        for server in self.servers.values():
            if words := server.how_far():
                self._report(f"{server.peer}{words}")
                break
        return time.monotonic()

    def _join(self, number: int, address: Address, options: TcpOptions) -> None:
        server = RemoteServer(number, self.names[number], self.servers)
        g, name = self.group, f"server {number}"
        hello = m.encode((g.session, g.rank, g.workers, g.local, number, self.meta.signature))
        if self._sockets is None:
            server.link = connect(
                address, server, options, hello=hello, name=name, language=m.LANGUAGE
            )
        else:
            near = local_options(options)
            server.link = shm.connect(
                self._sockets / str(number),
                server,
                near,
                hello=hello,
                name=f"relay to {name}",
                language=m.LANGUAGE,
            )
        try:
            fields, description = server.wait(m.WELCOME, "a welcome", self._deadline_s)
        except BaseException:
            server.close()
            raise
        self.servers[number], self._welcomes[number] = server, fields
        if self.group.rank == 0:
            self._found[number] = (
                fields[0],
                StoreMeta.from_json(description, server.peer) if description else None,
            )
            self._decided = None

    def _enough(self, missing: Mapping[int, PeerError | None]) -> bool:
        """Worker 0: whether all are here, or for GRACE_S those that hold every chunk, nobody
        being busy. Another worker: whether all of whom worker 0 took are here and ready; it
        leaves the rest."""
        if self.group.rank == 0:
            busy = any(isinstance(error, WireError) for error in missing.values())
            covered = not busy and self.meta.replicas > 1 and isinstance(self._decide(), Resume)
            now = time.monotonic()
            self._covered_since = (self._covered_since or now) if covered else None
            return not missing or (
                self._covered_since is not None and now - self._covered_since >= GRACE_S
            )
        for number, server in self.servers.items():
            if number not in self._said and server.has_spoken():
                self._said[number] = server.wait(
                    m.READY, "word that worker 0 has opened the store", self._deadline_s
                )
        members = next((members for (_, members, _), _ in self._said.values()), ())
        if not members or not self._said.keys() >= set(members):
            return False
        for number in self.servers.keys() - set(members):
            self.servers.pop(number).close()
        (self.step, _, job), self.blob = self._said[members[0]]
        self.meta = replace(self.meta, job=job)
        return True

    def _decide(self) -> Resume | Doubt:
        """What those who are here may go on from. Raises ForkedError, StaleError."""
        if self._decided is None:
            decided: Resume | Doubt | None = None
            try:
                decided = self._histories(()).resume(self._witness())
            except (ForkedError, StaleError):
                if not self._give_up:
                    raise
            self._given_up = () if isinstance(decided, Resume) else self._give_up
            if decided is None or self._given_up:
                decided = self._histories(self._given_up).resume(None, self._given_up)
            self._decided = decided
        return self._decided

    def _histories(self, given_up: Sequence[int]) -> Histories:
        found = {}
        for number, (step, meta) in self._found.items():
            if number not in given_up:
                kept = max(self._welcomes[number][1], default=-1)
                held = ServerHoldings(step, kept=kept)
                if meta is not None:
                    held = ServerHoldings(step, meta.history, kept, meta.without, meta.sessions)
                found[number] = held
        return Histories(found, self.names, self._holders())

    def _witness(self) -> Witness | None:
        """What this run's directory knows of the history of those who are here."""
        jobs = {meta.job for _, meta in self._found.values() if meta is not None}
        known = None if self._mark is None else self._mark.known
        return Witness.of(known.history) if known is not None and known.job in jobs else None

    def _snapshot(self) -> tuple[int, tuple[int, ...]]:
        """The newest step of which those who are here have every chunk in snapshots, -1 for
        none, and who has it."""
        kept = {number: steps for number, (_, steps, _, _) in sorted(self._welcomes.items())}
        for step in sorted({step for steps in kept.values() for step in steps}, reverse=True):
            having = tuple(number for number, steps in kept.items() if step in steps)
            if not self._lost(having):
                return step, having
        return -1, ()

    def _lost(self, members: Sequence[int]) -> list[int]:
        """Who held chunks that none of `members` holds."""
        return lost_chunks(self._holders(), members)

    def _holders(self) -> set[tuple[int, ...]]:
        return {self.meta.holders(chunk.id) for chunk in self.store_plan.table.chunks}

    def _names(self, numbers: Iterable[int]) -> str:
        return ", ".join(self.names[number] for number in numbers)

    # the store

    def _open(
        self,
        missing: Iterable[int],
        rules: Any,
        holds_gradients: bool,
        report: Callable[[str], None],
    ) -> None:
        """Worker 0: the servers make a store, or open the one that they hold, or go back to a
        snapshot."""
        names = self.names
        newest = [step for _, (step, _) in sorted(self._found.items())]
        if len(every := sorted({every for _, _, every, _ in self._welcomes.values()})) > 1:
            raise ConfigError(
                f"the servers take snapshots every {every} steps (0: never)",
                hint="give all servers of a job the same --snapshot-every",
            )
        decided = self._decide()
        kept, having = self._snapshot()
        back = kept >= 0 and isinstance(decided, Doubt) and bool(decided.lost)
        self.new = isinstance(decided, Doubt) and not back and not missing and self._unborn()
        if isinstance(decided, Resume):
            self.step, members, history = decided.step, decided.members, decided.history
        elif back:
            self.step, members, history = (
                kept,
                having,
                back_to(self._histories(self._given_up).history, kept),
            )
            again = max(newest) - kept if max(newest) >= kept else f"fewer than {2 * every[0]}"
            report(
                f"memory was lost: the servers hold steps {', '.join(map(str, newest))} (-1: none)."
                f" All go back to the snapshot of step {kept}, {again} steps are trained again"
            )
        elif self.new:
            if self._mark is not None:
                self._mark.check("", -1, self._names(self.servers))
            self.step, members, history = 0, tuple(self.servers), ()
        elif decided.lost:
            raise ForeignError(
                decided.why,
                hint=(
                    "name the servers in the order in which they were named first; where memory was"
                    " lost before there was a snapshot of all, begin anew in empty directories"
                ),
            )
        else:
            raise StaleError(decided.why, hint=decided.hint)
        if not self.new:
            held = self._found[members[0]][1]
            assert held is not None
            check_same(names[members[0]], held, self.store_plan)
            if held.signature != self.meta.signature or len(held.directories) != len(names):
                raise ConfigError(
                    f"{names[members[0]]} holds a store of {len(held.directories)} servers and"
                    f" chunks of {held.chunk_elements} elements; asked for are {len(names)} and"
                    f" {self.meta.chunk_elements}, or another dtype",
                    hint="name the same servers, chunk size and dtype as when the store was made",
                )
            if self._mark is not None:
                self._mark.check(
                    held.job, self.step, self._names(members), back=back or bool(self._given_up)
                )
            self.meta = held
            behind = sorted(self.servers.keys() - set(members))
            self._behind = dict.fromkeys(self.servers if back else behind, b"")
        if self._given_up:
            report(f"given up: what {self._names(self._given_up)} may hold beyond step {self.step}")
        link = HistoryLink(
            uuid.uuid4().hex[:16], self.step, tuple(sorted(self.servers)), int(time.time())
        )
        self.meta = replace(self.meta, history=(*history, link), sessions=(), without=())
        self.history = str(Witness(history[-1].id if history else "", link.id, link.members))
        for number, server in self.servers.items():
            body = msgspec.json.encode(
                {"meta": replace(self.meta, index=number).to_json(), "rules": rules}
            )
            new = self.new or number in self._behind
            # what was kept elsewhere may be another's
            ours = kept if number in having and (back or not new) else -1
            given_up = new and number in self._given_up
            server.say(m.OPEN, (new, self.step, len(names), holds_gradients, ours, given_up), body)
        if missing:
            report(
                f"replicas: no answer from {self._names(missing)}: left out, its chunks have one"
                " copy until a start finds it again"
            )
        for number in self._behind:
            if not back or number not in having:  # else it restores that itself
                report(f"replicas: {names[number]} is filled up again at step {self.step}")
                self._fill_up(number, members)

    def _unborn(self) -> bool:
        """Whether no session has begun on what is here: a store that was never finished is made
        anew."""
        steps, metas = zip(*self._found.values())
        if max(steps) > 0 or min(steps) >= 0:
            return False
        return self.meta.replicas == 1 or not any(
            meta is not None and meta.history for meta in metas
        )

    def _fill_up(self, number: int, members: Sequence[int]) -> None:
        """All that server `number` is to hold, from `members`, whose contents count."""
        for chunk in self.meta.owned(number):
            source = next(s for s in self.meta.holders(chunk) if s in members)
            self._put(number, chunk, self._read(source, chunk, f"chunk {chunk}"))
        self._behind[number] = bytes(self._read(members[0], -1, "the job's own state"))

    def fill(
        self, block: Block, source: Source, hyperparameters: Sequence[Sequence[float]]
    ) -> None:
        """First contents of one block of a new store."""
        for chunk in block.chunks:
            record = fill_record(self.meta, self.store_plan, chunk, source, hyperparameters)
            for number in self.worker.owners[chunk.id]:
                self._put(number, chunk.id, record)

    def _put(self, number: int, chunk: int, record: memoryview) -> None:
        while self._unfilled[number] >= FILLS_AT_ONCE:
            self._filled(number)
        self._unfilled[number] += 1
        self.servers[number].say(m.FILL, (chunk,), record)

    def _filled(self, number: int) -> None:
        self.servers[number].wait(m.FILLED, "a chunk to be stored", self._deadline_s)
        self._unfilled[number] -= 1

    def start(self, blob: bytes) -> None:
        """Worker 0: step 0 of a new store is committed with `blob`, server 0 last; then the
        servers write down that this session begins, and serve."""
        if self._own is not None:
            self._own.start()
        if self.group.rank:
            return
        first = self.meta.members[0]
        order = sorted(self.servers, reverse=True)
        for number in order:
            while self._unfilled[number]:
                self._filled(number)
            if self.new or number in self._behind:
                own = blob if self.new and (number == first or self.meta.replicas > 1) else b""
                self.servers[number].say(m.SETTLE, (), self._behind.get(number, own))
                self.servers[number].wait(m.SETTLED, "a new part to be whole", self._deadline_s)
        if self._mark is not None and not self.new:  # before anybody else can know of this session
            self._mark.adopt(self.meta.job, self.step, self.history)
        for number in order:  # all have what the link says that they have
            self.servers[number].say(m.BEGIN, ())
            _, given = self.servers[number].wait(m.READY, "the store to be ready", self._deadline_s)
            self._begun.add(number)
            self.blob = given if number == first else self.blob

    def read(self, name: str, what: str) -> np.ndarray:
        """As Engine.read: a parameter's values from its servers, between steps."""
        return gather_param(self.meta, name, what, self._record_of)

    def pieces(self, name: str, what: str) -> Iterator[tuple[int, np.ndarray]]:
        """As Engine.pieces; of the weights part without waiting for a commit, which needs all
        workers."""
        if what != WEIGHTS:
            yield from param_pieces(self.meta, name, what, self._record_of)
            return
        for chunk, _, span in self.meta.where.get(name, ()):
            view = self.worker.pull_newest(chunk)
            yield span.origin, array_in(view, chunk.dtype, 0, chunk.numel)[span.start : span.stop]

    def _record_of(self, chunk: Any) -> RecordView:
        record = self._read(self.worker.owners[chunk.id][0], chunk.id, f"chunk {chunk.id}")
        return RecordView(self.meta, chunk, record)

    def _read(self, number: int, chunk: int, what: str) -> memoryview:
        self.servers[number].say(m.READ, (chunk,))
        return self.servers[number].wait(m.RECORD, what, self._deadline_s)[1]

    def nbytes(self) -> int:
        return self.worker.nbytes() + (self._own.nbytes() if self._own is not None else 0)

    def close(self) -> None:
        self._still()
        for server in self.servers.values():
            server.close()
        self._bear_witness()
        if self._own is not None and self._own_tier is not None:
            self._own.stop(self._deadline_s)
            self._own_tier.close()
        self.worker.close()
        relays.end(self._relay)

    def _bear_witness(self) -> None:
        """Worker 0 of two servers, without a run directory: one of them at most is told that it may
        go on without the other, the one that is left or else the first. Whoever has not begun this
        session cannot know of it.
        """
        pair = self.meta.replicas > 1 and len(self.names) == len(self.servers) == 2
        if self.group.rank or self._mark is not None or not pair:
            return
        gone = [number for number, server in self.servers.items() if server.gone]
        other = gone[0] if gone else max(self.servers)
        if len(gone) > 1 or other not in self._begun:
            return
        word = m.encode((self.meta.job, self.meta.history[-1].id, (other,)))
        health.ask(self._addresses[1 - other], self._options, m.WITHOUT + word)
