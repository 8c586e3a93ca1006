"""A worker's connections to the servers of a job in other processes.

Worker 0 makes or opens the store, and fills a new store; the other workers wait. If a server or a
worker is lost, an error is raised. The launcher then restarts the process, and training resumes at
the last committed step.

With replicas, worker 0 leaves out a server that does not answer, and refills a server that has
missed steps. If the newest step cannot be restored, worker 0 sends all servers back to a snapshot
(opening.py). A store with another number of servers, chunk size or dtype is refused, not converted.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from roadtrain.chunks import Chunk
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import BusyError, DeadlineError, LostError, PeerError, WireError
from roadtrain.kernels.rules import described
from roadtrain.retry import SAY_S, SAY_SOON_S, undone_on_error
from roadtrain.servers import frames as m
from roadtrain.servers import health
from roadtrain.servers.opening import FoundStore, FoundStores, Opening, StartMode
from roadtrain.servers.remote_server import RemoteServer
from roadtrain.servers.routes import DirectRoute, Route, RouteEnds
from roadtrain.servers.store_plan import StorePlan
from roadtrain.servers.trace import Stages
from roadtrain.storage.convert import RecordView
from roadtrain.storage.generation import OpenedStore
from roadtrain.storage.history import HistoryLink, Resume, Unclear, Witness
from roadtrain.storage.mark import Mark
from roadtrain.storage.meta import StoreMeta
from roadtrain.transport.tcp import Address, TcpOptions

FILLS_AT_ONCE = 4  # most chunks in flight to a server
GRACE_S = 5.0  # extra time for absent servers, once the servers that answer hold every chunk
DIAL_S = 2.0  # timeout of one attempt to connect to a host that may be down
BEAT_S = 2.0  # time between heartbeats; servers tolerate SILENT_S without one (servers/serve.py)


@dataclass(frozen=True)
class Reach:
    """The addresses of a job's servers, and how this worker connects to them."""

    addresses: Sequence[Address]  # by number of the server
    options: TcpOptions
    group: WorkerIdentity
    route: Route = field(default_factory=DirectRoute)
    mark: Mark | None = None  # the run directory's record of the store
    give_up: Sequence[int] = ()  # servers whose contents are ignored if the servers disagree


class RemoteServers:
    """The servers of a job in other processes, with the methods of LocalServers.

    Raises ForeignError if a server holds the store of another job, LostError if one is lost, and
    DeadlineError if one does not answer in time.
    """

    local = False
    store: OpenedStore | None = None

    def __init__(
        self,
        store_plan: StorePlan,
        reach: Reach,
        *,
        deadline_s: float,
        holds_gradients: bool,
        report: Callable[[str], None] = print,
        anew: int | None = None,
    ) -> None:
        """Connect to the servers. On worker 0, also open the store.

        If `anew` is a step, worker 0 fills the servers again with the contents of this step.
        """
        self.store_plan, self.reach, self.group = store_plan, reach, reach.group
        self._deadline_s, self._report = deadline_s, report
        self._holds_gradients, self._anew = holds_gradients, anew
        self.names = tuple(
            f"server {number} ({host}:{port})"
            for number, (host, port) in enumerate(reach.addresses)
        )
        self.meta = replace(store_plan.meta(), owners=store_plan.owners, directories=self.names)
        self.new, self.step, self.blob = False, 0, b""
        self.servers: dict[int, RemoteServer] = {}
        self._stores = FoundStores(store_plan, self.meta, reach.mark, reach.give_up)
        self._rests: list[str] = []  # location of the state of each server joined, as text
        self._ready: dict[int, tuple[Any, Any]] = {}  # server -> its Ready frame
        # time since which the servers that answer hold every chunk
        self._covered_since: float | None = None
        self._begun: set[int] = set()  # servers that have recorded the begin of this session
        # server -> number of Fill frames without an answer
        self._unfilled = dict.fromkeys(range(len(self.names)), 0)
        # servers that are being refilled -> the blobs of the last commit
        self._refilled: dict[int, bytes] = {}
        self.history = ""  # the witness of this run, once its session has begun
        addresses, options, group = reach.addresses, reach.options, reach.group
        ends = RouteEnds(addresses, options, group, self.meta, deadline_s, holds_gradients)
        self._route = reach.route.open(ends)
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._beats.start()
        with undone_on_error(self.abort):
            missing = self._join_all()
            if self.group.rank == 0:
                self._open(missing)

    def again(self, step: int) -> RemoteServers:
        """Start a new session, and fill the same servers with the contents of `step`.

        All workers must call this method, after closing the old session.
        """
        group = replace(self.group, session=f"{self.group.session}:from step {step}")
        return RemoteServers(
            self.store_plan,
            replace(self.reach, group=group),
            deadline_s=self._deadline_s,
            holds_gradients=self._holds_gradients,
            report=self._report,
            anew=step,
        )

    @property
    def numbers(self) -> Sequence[int]:
        return sorted(self.servers)

    @property
    def rests(self) -> str:
        return "; ".join(dict.fromkeys(self._rests))

    def connect(self, deliver: Callable[[Any], None], stages: Stages) -> Mapping[int, RemoteServer]:
        for server in self.servers.values():
            server.connect(deliver, stages)
        return self.servers

    def _beat(self) -> None:
        """Send heartbeats regularly, so that servers notice if this process is stopped."""
        while not self._over.wait(BEAT_S):
            for server in list(self.servers.values()):
                server.beat()

    # membership

    def _join_all(self) -> dict[int, PeerError | None]:
        """Connect to the servers until enough have joined. Returns the missing servers and the last
        error of each.
        """
        options = self.reach.options
        missing: dict[int, PeerError | None] = dict.fromkeys(range(len(self.names)))
        begin = time.monotonic()
        say_at = begin + SAY_SOON_S
        while True:
            self._try_to_join(missing)
            if self._enough_for_first(missing) if self.group.rank == 0 else self._enough():
                return missing
            # whether this worker only waits until worker 0 has opened the store
            waiting = not missing or (self.group.rank > 0 and len(self.servers) > 0)
            limit_s = (options.retry_s or 0.0) + self._deadline_s * waiting
            moved = max([begin, *(server.moved for server in self.servers.values())], default=begin)
            since = moved if waiting else begin
            if time.monotonic() - since > limit_s:
                break
            if time.monotonic() >= say_at:
                self._report_wait(missing, since + limit_s - time.monotonic())
                say_at = time.monotonic() + SAY_S
            time.sleep(0.05)
        if waiting:
            raise DeadlineError(
                f"waited {limit_s:.0f} s for worker 0 to open {self._names(self.servers)}"
            )
        raise self._no_answer(missing, limit_s)

    def _try_to_join(self, missing: dict[int, PeerError | None]) -> None:
        """Try once to connect to each server in `missing`, and remove the connected servers from
        it.
        """
        options, spare = self.reach.options, self.meta.replicas > 1
        if spare:
            options = replace(options, retry_s=0.0, connect_s=min(options.connect_s, DIAL_S))
        for number in list(missing):
            try:
                self._join(number, options)
                del missing[number]
            except (LostError, DeadlineError, WireError) as error:
                if not isinstance(error, BusyError) and (not spare or isinstance(error, WireError)):
                    raise
                missing[number] = error

    def _no_answer(self, missing: Mapping[int, PeerError | None], limit_s: float) -> PeerError:
        why = next(e for e in missing.values() if e is not None)
        if self.meta.replicas == 1:
            return why
        doubt = self._stores.decide() if self._stores.found else None
        which = f"; {doubt.why}" if isinstance(doubt, Unclear) else ", the only holder(s) of chunks"
        error = LostError(
            f"no answer for {limit_s:.0f} s from {self._names(missing)}{which}: {why}",
            hint=(doubt.hint if isinstance(doubt, Unclear) else "")
            or "start these servers; a new store needs all, an existing store one of each pair",
        )
        error.__cause__ = why
        return error

    def _report_wait(self, missing: Mapping[int, PeerError | None], left_s: float) -> None:
        for why in filter(None, missing.values()):
            reason = str(why).partition("\n")[0]
            self._report(f"waiting: {reason}. Retrying for another {left_s:.0f} s")
            return
        for server in self.servers.values():
            if words := server.waits_for():
                self._report(f"{server.peer}{words}")
                return

    def _join(self, number: int, options: TcpOptions) -> None:
        server = RemoteServer(
            number, self.names[number] + self._route.via, self.servers, self.meta.table
        )
        g = self.group
        hello = m.Hello(g.session, g.rank, g.workers, g.local, number, self.meta.signature)
        server.link = self._route.connect(number, server, options, hello, self._report)
        with undone_on_error(server.close):
            fields, description = server.wait(m.WELCOME, "a welcome", self._deadline_s)
        newest, snapshots, every, rests = fields
        self.servers[number] = server
        self._rests.append(rests)
        if self.group.rank == 0:
            meta = StoreMeta.from_json(description, server.peer) if description else None
            self._stores.add(number, FoundStore(newest, snapshots, every, meta))

    def _enough_for_first(self, missing: Mapping[int, PeerError | None]) -> bool:
        """Return whether enough servers have joined for worker 0 to open the store.

        After 5 seconds, servers that together hold every chunk are enough.
        """
        busy = any(isinstance(error, WireError) for error in missing.values())
        covered = not busy and self.meta.replicas > 1 and isinstance(self._stores.decide(), Resume)
        now = time.monotonic()
        self._covered_since = (self._covered_since or now) if covered else None
        return not missing or (
            self._covered_since is not None and now - self._covered_since >= GRACE_S
        )

    def _enough(self) -> bool:
        """Return whether all servers that worker 0 has chosen are ready. If so, close all other
        links.
        """
        for number, server in self.servers.items():
            if number not in self._ready and server.has_spoken():
                self._ready[number] = server.wait(
                    m.READY, "the report that the store is open", self._deadline_s
                )
        members = next((members for (_, members, _), _ in self._ready.values()), ())
        if not members or not self._ready.keys() >= set(members):
            return False
        for number in self.servers.keys() - set(members):
            self.servers.pop(number).close()
        (self.step, _, job), self.blob = self._ready[members[0]]
        self.meta = replace(self.meta, job=job)
        return True

    def _names(self, numbers: Iterable[int]) -> str:
        return self._stores.names_of(numbers)

    # the store

    def _open(self, missing: Mapping[int, PeerError | None]) -> None:
        """Let the servers make a store, open their store, or go back to a snapshot. Only for worker
        0.
        """
        opening = self._stores.opening(missing, self._report)
        if self._anew is not None:
            opening = opening.refilled(self._anew)
        self.new, self.step = opening.mode is StartMode.NEW, opening.step
        back = opening.mode is StartMode.SNAPSHOT
        behind = self.servers if back else sorted(self.servers.keys() - set(opening.members))
        self._refilled = {} if self.new else dict.fromkeys(behind, b"")
        if given_up := self._stores.given_up:
            self._report(f"discarded: contents of {self._names(given_up)} after step {self.step}")
        link = HistoryLink(uuid.uuid4().hex[:16], self.step, tuple(self.numbers), int(time.time()))
        history = opening.history
        self.meta = replace(opening.meta, history=(*history, link), without=())
        self.history = str(Witness(history[-1].id if history else "", link.id, link.members))
        for number in self.servers:
            self._send_open(number, opening)
        if missing:
            self._report(
                f"replicas: no answer from {self._names(missing)}, which is left out; its chunks"
                " have only one copy until a later start finds the server again"
            )
        for number in self._refilled:
            # a server that holds the snapshot restores it by itself
            if not back or number not in opening.holders:
                name = self.names[number]
                self._report(f"replicas: {name} is being refilled at step {self.step}")
                self._fill_up(number, opening.members)

    def _send_open(self, number: int, opening: Opening) -> None:
        rules = [described(rule) for rule in self.store_plan.rules]
        meta = replace(self.meta, index=number).to_json()
        new = self.new or number in self._refilled
        # snapshots of servers that are not in `holders` may belong to another job
        ours = number in opening.holders and (opening.mode is StartMode.SNAPSHOT or not new)
        given_up = new and number in self._stores.given_up
        kept, holds = opening.kept if ours else -1, self._holds_gradients
        fields = m.OpenHeader(new, self.step, len(self.names), holds, kept, given_up)
        described_store = msgspec.json.encode({"meta": meta, "rules": rules})
        self.servers[number].say(m.OPEN, fields, described_store)

    def _fill_up(self, number: int, members: Sequence[int]) -> None:
        """Fill server `number` with chunks read from servers in `members`."""
        for chunk in self.meta.owned(number):
            source = next(s for s in self.meta.holders(chunk) if s in members)
            self.fill(number, chunk, self._read(source, chunk, f"chunk {chunk}"))
        self._refilled[number] = bytes(self._read(members[0], -1, "the job state"))

    def fill(self, number: int, chunk: int, record: memoryview) -> None:
        while self._unfilled[number] >= FILLS_AT_ONCE:
            self._filled(number)
        self._unfilled[number] += 1
        self.servers[number].say(m.FILL, (chunk,), record)

    def _filled(self, number: int) -> None:
        self.servers[number].wait(m.FILLED, "a chunk to be stored", self._deadline_s)
        self._unfilled[number] -= 1

    def start(self, blob: bytes) -> None:
        """Commit step 0 of a new store with `blob`, and start the session on all servers.

        The first server is the last to commit and to begin. Does nothing on workers other than 0.
        """
        if self.group.rank:
            return
        first = self.meta.members[0]
        order = sorted(self.servers, reverse=True)
        for number in order:
            while self._unfilled[number]:
                self._filled(number)
            if self.new or number in self._refilled:
                own = blob if self.new and (number == first or self.meta.replicas > 1) else b""
                self.servers[number].say(m.SETTLE, (), self._refilled.get(number, own))
                self.servers[number].wait(m.SETTLED, "a new part to be complete", self._deadline_s)
        # record the session in the run directory before a server does
        if self.reach.mark is not None and not self.new:
            self.reach.mark.adopt(self.meta.job, self.step, self.history)
        for number in order:  # all servers now hold the step in the history link
            self.servers[number].say(m.BEGIN, ())
            _, state = self.servers[number].wait(m.READY, "the store to be ready", self._deadline_s)
            self._begun.add(number)
            self.blob = state if number == first else self.blob

    def record_of(self, chunk: Chunk, what: str) -> RecordView:
        holder = next(s for s in self.meta.holders(chunk.id) if s in self.servers)
        return RecordView(self.meta, chunk, self._read(holder, chunk.id, f"chunk {chunk.id}"))

    def _read(self, number: int, chunk: int, what: str) -> memoryview:
        self.servers[number].say(m.READ, (chunk,))
        return self.servers[number].wait(m.RECORD, what, self._deadline_s)[1]

    def nbytes(self) -> int:
        return 0

    def stop(self) -> list[str]:
        self._hang_up()
        self._leave_witness()
        return []

    def close(self) -> None:
        self._route.close()

    def abort(self) -> None:
        """Close everything immediately, if no session was started."""
        self._hang_up()
        self._route.abort()

    def _hang_up(self) -> None:
        self._over.set()
        self._beats.join()
        for server in self.servers.values():
            server.close()

    def _leave_witness(self) -> None:
        """If there are two servers and no run directory, record at one server that this server
        may resume without the other server.
        """
        pair = self.meta.replicas > 1 and len(self.names) == len(self.servers) == 2
        if self.group.rank or self.reach.mark is not None or not pair:
            return
        lost = [number for number, server in self.servers.items() if server.link_lost]
        other = lost[0] if lost else max(self.servers)
        if len(lost) > 1 or other not in self._begun:
            return
        witness = m.encode((self.meta.job, self.meta.history[-1].id, (other,)))
        hello = m.WITHOUT + witness
        health.ask(self.reach.addresses[1 - other], self.reach.options, hello=hello)
