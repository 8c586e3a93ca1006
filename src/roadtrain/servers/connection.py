"""Links and sessions: a MessageLink is a worker's link to a server. A HostedSession is a session of
workers in the process of a server, relay, reducer or coordinator.

A session has one connection per rank. An invalid frame from any worker ends the session for all
workers. Subclasses of HostedSession handle the contents of frames.
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
COMING_S = 600.0  # the longest time that receiving a frame may take; for slow links
# Hints for a wait that exceeded its deadline
NO_ANSWER = "restart the silent process, then the job; it resumes at the last committed step"
SLOW = (
    "`roadtrain status` shows what each server waits for; if only the device or the network is"
    " slow, raise deadline_s"
)


class MessageLink(Protocol):
    """A link to one server, in this process or in another. Parameters and gradients are not part of
    a message: `Pull.into` and `Push.grad` are memoryviews of their memory.
    """

    peer: str  # name in messages to the user: "server 0 (/mnt/ssd0/run)"

    def send(self, message: Any) -> None:
        """Queue a message without blocking. Messages arrive in the order of the calls.

        Raises LostError if the link is closed.
        """

    def waits_for(self) -> str:
        """Return the reason why the server itself waits, for messages to the user.

        The text begins with ", which waits for", or is empty if the server does not wait.
        """


class WorkerConnection:
    """The connection of one worker in a session, and the Receiver of the worker's link."""

    def __init__(self, session: Any, rank: int, link: Link) -> None:
        self.session, self.rank, self.link = session, rank, link
        self.last_seen = time.monotonic()  # time at which the worker's last frame arrived
        self._buffered = 0  # number of frames with a payload that got a buffer
        self._arrived = 0  # number of frames with a payload that arrived
        # Whether the link's thread waits for a buffer, or handles a frame. The worker does not
        # count as silent meanwhile, because the thread cannot receive frames.
        self._allocating = False
        self._handling = False

    def say(self, kind: int, fields: tuple[Any, ...], payload: bytes | memoryview = b"") -> None:
        """Send a frame to the worker, ahead of queued parameters. Does not raise if the link is
        lost.
        """
        with suppress(PeerError):
            self.link.send(kind, m.encode(fields), [memoryview(payload)], urgent=True)

    def silent_for(self, limit_s: float) -> float:
        """Return the seconds since the worker's last frame if they exceed `limit_s`, else 0.

        The limit is at least 600 seconds while a frame is being received over a slow link.
        """
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
            raise WireError(f"a payload of {nbytes} bytes is too large for a frame of kind {kind}")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self._handling = True
        try:
            self.take(kind, m.header(kind, header), payload)
        except RoadtrainError as error:
            self.session.end(error)
        except Exception as error:  # a bug in this process, which must also end the session
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
    """The session of the workers `0..workers-1` of one start of a job.

    Once `over` is set, it does not change, and no worker can join. `lock` guards the attributes.
    """

    connection_class: ClassVar[type[Any]] = WorkerConnection
    # kind of frame -> size of its largest payload in bytes; other kinds have no payload
    payloads: ClassVar[Mapping[int, int]] = {}

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.connections: dict[int, C] = {}
        self.lost_ranks: set[int] = set()  # ranks whose link is closed
        # the reason for which the session has ended; None while the session is running
        self.over: BaseException | None = None
        self.threads: list[threading.Thread] = []  # threads that close links after `end`
        self.lock = threading.Condition()  # notified when a link is closed

    def join(self, rank: int, link: Link) -> C:
        """Add a worker. Raises BusyError if the rank is connected, or the session is over."""
        with self.lock:
            if not self.takes(rank):
                raise self.busy()
            link.peer = f"{self.name_of(rank)} ({link.peer})"
            connection = self.connections[rank] = self.new_connection(rank, link)
        return connection

    def takes(self, rank: int) -> bool:
        """Return whether a worker may join with this rank. The caller holds `lock`."""
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
        """Handle a frame from a worker. An exception ends the session."""
        raise NotImplementedError

    def everyone(self) -> list[C]:
        with self.lock:
            return list(self.connections.values())

    def left(self, connection: C, error: PeerError) -> None:
        """Record that the link of a worker is closed. If all links are closed, this ends the
        session.
        """
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
        """Handle the end of the session. The session calls this method once, possibly in the thread
        of a link, so the method must not block.
        """
        self.dismiss(error)

    def dismiss(self, error: BaseException) -> None:
        """Send `error` to all workers, and close their links in new threads."""
        for connection in self.everyone():
            connection.say(m.FAILED, (type(error).__name__, str(error)))
            self.threads.append(
                threading.Thread(target=connection.link.close, name="close", daemon=True)
            )
            self.threads[-1].start()

    def wait_for_the_end(self, wait_s: float | None = None) -> None:
        """Wait until all links are closed, at most `wait_s` seconds for each link (None: without a
        limit).
        """
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
    """Connect to a reducer or coordinator, and return the link.

    If `address` is None, the peer is in this process, and `own` accepts the link. `hello` is the
    greeting to send. `name` names the peer in messages to the user.
    """
    greeting = m.encode(hello)
    if isinstance(address, str):
        near = local_options(options)
        return shm.connect(address, receiver, near, hello=greeting, name=name, language=m.LANGUAGE)
    if address is not None:
        return connect(address, receiver, options, hello=greeting, name=name, language=m.LANGUAGE)
    assert own is not None
    return local.connect(own, receiver, hello=greeting, name=name)
