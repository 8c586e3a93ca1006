"""MessageLink: a worker's end of its way to a server. WorkerConnection and HostedSession: the
workers of one start of a job, as a server, a relay, a reducer or a coordinator has them here.

    listener: a link and its hello --> HostedSession.join --> WorkerConnection, the link's Receiver
    link:     room, arrived        --> the header checked --> HostedSession.take
    link:     lost                 --> HostedSession.left --> end, once, with its reason
    end                            --> every worker is told why, every link is closed

A session is one rank's place each: who comes twice, or for another start of the job, is busy.
What is wrong with a worker's frame ends the session for all. Assumes that hellos are checked by
whoever listens. Does NOT know what frames mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from roadtrain.errors import BusyError, LostError, PeerError, RoadtrainError, WireError
from roadtrain.servers import frames as m
from roadtrain.transport import local, shm
from roadtrain.transport.address import local_options
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.tcp import Address, TcpOptions, connect

MOST_WORKERS = 1 << 16
COMING_S = 600.0  # a frame may be on its way for so long: one link may be that slow
# What to do after a wait that passed its deadline
NO_ANSWER = "start again what does not answer, then the job: it goes on at the last committed step"
SLOW = (
    "`roadtrain status` says what each server waits for; where only the device or the network is"
    " slow, give a longer deadline_s"
)


class MessageLink(Protocol):
    """To one server: a Server of this process, or the end of a link to one elsewhere. Bulk bytes
    are named by messages as memoryviews (`into`, `grad`)."""

    peer: str  # for messages to people: "server 0 (/mnt/ssd0/run)"

    def send(self, message: Any) -> None:
        """Keeps the order, does not block. LostError once it is closed."""

    def waits_for(self) -> str:
        """For people: ", which waits for ..." where somebody keeps the server from answering, else
        empty."""


class WorkerConnection:
    """One worker's place in a session: the Receiver of its link.

    Invariant: frames with a payload first get room, then arrive, both in order: `_taken` is at
    most `_roomed`."""

    def __init__(self, session: Any, rank: int, link: Link) -> None:
        self.session, self.rank, self.link = session, rank, link
        self.heard = time.monotonic()  # when its last message came
        self._roomed = 0  # frames with a payload that got room
        self._taken = 0  # frames with a payload that arrived
        self._finding = False  # room for a frame: meanwhile its silence is not its own
        self._taking = False  # a frame: the same

    def say(self, kind: int, fields: tuple[Any, ...], payload: bytes | memoryview = b"") -> None:
        """Before all that is not urgent. A worker that is lost is noticed by `lost`."""
        with suppress(PeerError):
            self.link.send(kind, m.encode(fields), [memoryview(payload)], urgent=True)

    def silent_for(self, limit_s: float) -> float:
        """Seconds without a word from its process where those are more than `limit_s` (COMING_S
        while a frame of it is on its way), else 0."""
        if self._finding or self._taking:
            return 0.0
        if self._roomed != self._taken:
            limit_s = max(limit_s, COMING_S)
        silent_s = time.monotonic() - self.heard
        return silent_s if silent_s > limit_s else 0.0

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        self._finding = True
        try:
            return self.find_room(kind, m.header(kind, header), nbytes)
        finally:
            self.heard, self._finding = time.monotonic(), False
            self._roomed += 1

    def find_room(self, kind: int, fields: Any, nbytes: int) -> memoryview:
        if nbytes > self.session.payloads.get(kind, 0):
            raise WireError(f"{nbytes} bytes came with a frame of kind {kind}")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self._taking = True
        try:
            self.take(kind, m.header(kind, header), payload)
        except RoadtrainError as error:
            self.session.end(error)
        except Exception as error:  # of this host: never a session that nobody ends
            self.session.end(LostError(f"this server failed: {type(error).__name__}: {error}"))
        finally:
            self.heard, self._taking = time.monotonic(), False
            self._taken += bool(payload)

    def take(self, kind: int, fields: Any, payload: memoryview) -> None:
        self.session.take(self, kind, fields, payload)

    def lost(self, error: PeerError) -> None:
        self.session.left(self, error)


C = TypeVar("C", bound=WorkerConnection)


class HostedSession(Generic[C]):
    """Workers `0..workers-1` of one start of a job.

    Invariants, under `lock`: `gone` are ranks of `connections`; once `over` is set it stays, and
    nobody joins."""

    connection_class: ClassVar[type[Any]] = WorkerConnection
    payloads: ClassVar[Mapping[int, int]] = {}  # kind -> bytes that may come with it

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.connections: dict[int, C] = {}
        self.gone: set[int] = set()  # ranks whose link has ended
        self.over: BaseException | None = None  # why it has ended
        self.threads: list[threading.Thread] = []  # that end soon after `end`
        self.lock = threading.Condition()  # notified when somebody has gone

    def join(self, rank: int, link: Link) -> C:
        """Raises BusyError where that place is not free."""
        with self.lock:
            if not self.takes(rank):
                raise self.busy()
            link.peer = f"{self.name_of(rank)} ({link.peer})"
            connection = self.connections[rank] = self.new_connection(rank, link)
        return connection

    def takes(self, rank: int) -> bool:
        """Under `lock`."""
        return self.over is None and 0 <= rank < self.workers and rank not in self.connections

    def busy(self) -> BaseException:
        """Why nobody can join."""
        return BusyError("busy with another start of this job")

    def name_of(self, rank: int) -> str:
        """For people."""
        return f"worker {rank}"

    def new_connection(self, rank: int, link: Link) -> C:
        return self.connection_class(self, rank, link)

    def take(self, connection: C, kind: int, fields: Any, payload: memoryview) -> None:
        """A frame. What it raises ends the session."""
        raise NotImplementedError

    def everyone(self) -> list[C]:
        with self.lock:
            return list(self.connections.values())

    def left(self, connection: C, error: PeerError) -> None:
        """The link of a worker has ended."""
        with self.lock:
            self.gone.add(connection.rank)
            all_gone = len(self.gone) == len(self.connections)
            self.lock.notify_all()
        self.one_left(connection.rank, error, all_gone)

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        if all_gone:
            self.end(error)

    def end(self, error: BaseException) -> None:
        """The first reason counts."""
        with self.lock:
            if self.over is not None:
                return
            self.over = error
        self.ended(error)

    def ended(self, error: BaseException) -> None:
        """Once. From any thread, that of a link too: returns soon."""
        self.dismiss(error)

    def dismiss(self, error: BaseException) -> None:
        """Tells all workers why and closes their links, each in a thread of its own: this one may
        be one of theirs."""
        for connection in self.everyone():
            connection.say(m.FAILED, (type(error).__name__, str(error)))
            self.threads.append(
                threading.Thread(target=connection.link.close, name="close", daemon=True)
            )
            self.threads[-1].start()

    def wait_for_the_end(self, wait_s: float | None = None) -> None:
        """Of its threads; for each so long, or as long as it takes."""
        for thread in list(self.threads):
            if thread is not threading.current_thread():
                thread.join(wait_s)


def link_to(
    receiver: Receiver,
    address: Address | str | None,
    own: Callable[[Link, bytes], Receiver] | None,
    hello: tuple[str, int, int, str],
    options: TcpOptions,
    name: str = "the coordinator",
) -> Link:
    """To a reducer or its coordinator; without an address to `own`, which accepts links of this
    process."""
    greeting = m.encode(hello)
    if isinstance(address, str):
        near = local_options(options)
        return shm.connect(address, receiver, near, hello=greeting, name=name, language=m.LANGUAGE)
    if address is not None:
        return connect(address, receiver, options, hello=greeting, name=name, language=m.LANGUAGE)
    assert own is not None
    return local.connect(own, receiver, hello=greeting, name=name)
