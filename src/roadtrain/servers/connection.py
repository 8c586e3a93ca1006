"""MessageLink: a worker's link to a server. WorkerConnection and HostedSession: the workers of one
start of a job, as seen by a server, relay, reducer or coordinator.

    listener: a link and its hello --> HostedSession.join --> WorkerConnection, the link's Receiver
    link:     room, arrived        --> the header is checked --> HostedSession.take
    link:     lost                 --> HostedSession.left --> end, once, with the reason
    end                            --> every worker is told the reason, every link is closed

A session has one place per rank: a second connection for the same rank, or one from another start
of the job, is refused with BusyError. An invalid frame from one worker ends the session for all.
Assumes that the listener has checked the hello. Does NOT know what frames mean.
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
COMING_S = 600.0  # the longest time that receiving one frame may take, on a slow link
# Hints for a wait that exceeded its deadline
NO_ANSWER = "restart the silent process, then the job; it resumes at the last committed step"
SLOW = (
    "`roadtrain status` shows what each server waits for; if only the device or the network is"
    " slow, raise deadline_s"
)


class MessageLink(Protocol):
    """A link to one server, which is a Server of this process or elsewhere. Messages refer to bulk
    data by memoryviews (`into`, `grad`)."""

    peer: str  # name in messages to the user: "server 0 (/mnt/ssd0/run)"

    def send(self, message: Any) -> None:
        """Queue a message; order is kept. Does not block. Raises LostError once closed."""

    def waits_for(self) -> str:
        """Return ", which waits for ..." if the server itself waits for somebody, else an empty
        string. For messages to the user."""


class WorkerConnection:
    """The place of one worker in a session: the Receiver of its link.

    Invariant: each frame with a payload gets a buffer and then arrives, in order, so `_arrived` is
    at most `_buffered`."""

    def __init__(self, session: Any, rank: int, link: Link) -> None:
        self.session, self.rank, self.link = session, rank, link
        self.last_seen = time.monotonic()  # when its last frame arrived
        self._buffered = 0  # frames with a payload that got a buffer
        self._arrived = 0  # frames with a payload that arrived
        # While this thread waits for a buffer or handles a frame, the worker is not silent.
        self._allocating = False
        self._handling = False

    def say(self, kind: int, fields: tuple[Any, ...], payload: bytes | memoryview = b"") -> None:
        """Send a frame ahead of bulk data. If the worker is lost, `lost` reports it."""
        with suppress(PeerError):
            self.link.send(kind, m.encode(fields), [memoryview(payload)], urgent=True)

    def silent_for(self, limit_s: float) -> float:
        """Return the seconds since its last frame if they exceed `limit_s` (COMING_S while a frame
        is being received), else 0."""
        if self._allocating or self._handling:
            return 0.0
        if self._buffered != self._arrived:
            limit_s = max(limit_s, COMING_S)
        silent_s = time.monotonic() - self.last_seen
        return silent_s if silent_s > limit_s else 0.0

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        self._allocating = True
        try:
            return self.find_room(kind, m.header(kind, header), nbytes)
        finally:
            self.last_seen, self._allocating = time.monotonic(), False
            self._buffered += 1

    def find_room(self, kind: int, fields: Any, nbytes: int) -> memoryview:
        if nbytes > self.session.payloads.get(kind, 0):
            raise WireError(f"a frame of kind {kind} came with {nbytes} bytes")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self._handling = True
        try:
            self.take(kind, m.header(kind, header), payload)
        except RoadtrainError as error:
            self.session.end(error)
        except Exception as error:  # a bug here: without this nobody would end the session
            self.session.end(LostError(f"this server failed: {type(error).__name__}: {error}"))
        finally:
            self.last_seen, self._handling = time.monotonic(), False
            self._arrived += bool(payload)

    def take(self, kind: int, fields: Any, payload: memoryview) -> None:
        self.session.take(self, kind, fields, payload)

    def lost(self, error: PeerError) -> None:
        self.session.left(self, error)


C = TypeVar("C", bound=WorkerConnection)


class HostedSession(Generic[C]):
    """The workers `0..workers-1` of one start of a job.

    Invariants, under `lock`: `lost_ranks` is a subset of `connections`; once `over` is set it
    stays, and no worker joins any more."""

    connection_class: ClassVar[type[Any]] = WorkerConnection
    payloads: ClassVar[Mapping[int, int]] = {}  # kind of frame -> its largest payload, in bytes

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.connections: dict[int, C] = {}
        self.lost_ranks: set[int] = set()  # ranks whose link is closed
        self.over: BaseException | None = None  # why the session has ended; None: it has not
        self.threads: list[threading.Thread] = []  # they close links, and end soon after `end`
        self.lock = threading.Condition()  # notified when a link is closed

    def join(self, rank: int, link: Link) -> C:
        """Add a worker. Raises BusyError if its place is taken."""
        with self.lock:
            if not self.takes(rank):
                raise self.busy()
            link.peer = f"{self.name_of(rank)} ({link.peer})"
            connection = self.connections[rank] = self.new_connection(rank, link)
        return connection

    def takes(self, rank: int) -> bool:
        """Return whether a worker may take this place. Call under `lock`."""
        return self.over is None and 0 <= rank < self.workers and rank not in self.connections

    def busy(self) -> BaseException:
        """Return the error for a worker that cannot join."""
        return BusyError("busy with another start of this job")

    def name_of(self, rank: int) -> str:
        """Return the name of a worker in messages to the user."""
        return f"worker {rank}"

    def new_connection(self, rank: int, link: Link) -> C:
        return self.connection_class(self, rank, link)

    def take(self, connection: C, kind: int, fields: Any, payload: memoryview) -> None:
        """Handle a frame. An exception ends the session."""
        raise NotImplementedError

    def everyone(self) -> list[C]:
        with self.lock:
            return list(self.connections.values())

    def left(self, connection: C, error: PeerError) -> None:
        """Record that the link of a worker is closed."""
        with self.lock:
            self.lost_ranks.add(connection.rank)
            all_gone = len(self.lost_ranks) == len(self.connections)
            self.lock.notify_all()
        self.one_left(connection.rank, error, all_gone)

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        if all_gone:
            self.end(error)

    def end(self, error: BaseException) -> None:
        """End the session. Only the first call has an effect."""
        with self.lock:
            if self.over is not None:
                return
            self.over = error
        self.ended(error)

    def ended(self, error: BaseException) -> None:
        """Handle the end of the session. Called once, from any thread including those of links, so
        it must not block."""
        self.dismiss(error)

    def dismiss(self, error: BaseException) -> None:
        """Send the reason to all workers and close their links, each from a new thread, because a
        link cannot be closed by its own thread."""
        for connection in self.everyone():
            connection.say(m.FAILED, (type(error).__name__, str(error)))
            self.threads.append(
                threading.Thread(target=connection.link.close, name="close", daemon=True)
            )
            self.threads[-1].start()

    def wait_for_the_end(self, wait_s: float | None = None) -> None:
        """Join the threads that close links, each for at most `wait_s`."""
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
    """Connect to a reducer or its coordinator. With no address, connect to `own`, which accepts
    links of this process."""
    greeting = m.encode(hello)
    if isinstance(address, str):
        near = local_options(options)
        return shm.connect(address, receiver, near, hello=greeting, name=name, language=m.LANGUAGE)
    if address is not None:
        return connect(address, receiver, options, hello=greeting, name=name, language=m.LANGUAGE)
    assert own is not None
    return local.connect(own, receiver, hello=greeting, name=name)
