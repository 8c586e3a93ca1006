"""Routes: the ways in which workers reach their servers. This module has the direct route. Optional
packages register further routes, which are loaded by name when an option selects them:

    [project.entry-points."roadtrain.routes"]
    relay = "roadtrain.relay.route:RelayRoute"
    fan-in = "roadtrain.switch.route:SwitchRoute"

A route consists of three classes:

    Route       at the worker: the value of an option, with checks against the job and other options
    OpenRoute   at the worker: one link to each server, for one session
    RouteEnd    at the server: accepts the links of workers that use this route

If a route has a RouteEnd, the hello of a worker starts with `greeting_of(name)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roadtrain.environment import WorkerIdentity
from roadtrain.errors import RoadtrainError
from roadtrain.servers import frames as m
from roadtrain.storage.meta import StoreMeta
from roadtrain.transport import plugins, tcp
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.tcp import Address, TcpOptions

GROUP = "roadtrain.routes"
Report = Callable[[str], None]


@dataclass(frozen=True)
class RouteEnds:
    """A participant (a worker or a relay) and the servers of its job, which a route connects in one
    session.
    """

    addresses: Sequence[Address]  # by number of the server
    options: TcpOptions
    group: WorkerIdentity  # the participant: a worker, or a relay in place of a host's workers
    meta: StoreMeta  # the layout of the store
    deadline_s: float
    holds_gradients: bool = False  # whether all gradients wait for the global norm
    # whether gradients are fp32 sums of several workers, instead of having the chunk's dtype
    adds: bool = False


class OpenRoute(Protocol):
    """A participant's route to its servers during one session."""

    # appended to a server's name in messages, for example " by switch HOST:PORT"; "" if direct
    via: str

    def connect(
        self, number: int, receiver: Receiver, options: TcpOptions, hello: m.Hello, report: Report
    ) -> Link:
        """Return a link to server `number`. Raises PeerError.

        While the server does not listen, `report` is called with a line from time to time.
        """

    def close(self) -> None:
        """Wait until all threads and processes of the route have ended. Close the links first."""

    def abort(self) -> None:
        """End all threads and processes of the route, without waiting."""


class RouteEnd(Protocol):
    """The class of a route that runs at a server: it accepts participants (workers or relays), and
    passes their messages to a session.

    The server creates an instance for the first participant, with three arguments: the greeting,
    the SessionHost and the options of links.
    """

    name: str  # name of the route
    server: Any  # the ServerSession

    @staticmethod
    def greeting(rest: bytes) -> Any:
        """Decode the bytes that follow `greeting_of(name)` in a hello. Raises WireError.

        The result must have an attribute `hello`, the Hello of a worker.
        """

    def is_of(self, hello: m.Hello) -> bool:
        """Return whether the participant that sent `hello` belongs to this start of the job."""

    def busy(self) -> RoadtrainError: ...
    def accept(self, link: Link, greeting: Any) -> Receiver: ...
    def status(self) -> m.Status: ...
    def look(self, silent_s: float) -> None: ...
    def tear_down(self, error: BaseException) -> None: ...


class Route(Protocol):
    """A way to reach servers: the value of an option that the user sets."""

    name: str  # name of the entry point
    end: Any  # class of the RouteEnd; None if links arrive at the server as direct links do

    def check_links(self, options: TcpOptions, replicas: int) -> None:
        """Raise ConfigError if this route cannot be used with these links or replicas."""

    def check_workers(self, group: WorkerIdentity, compressed: str) -> None:
        """Raise ConfigError if these workers cannot use this route.

        `compressed` names the option that makes gradients sparse; "" if gradients are dense.
        """

    def lossy(self, group: WorkerIdentity) -> str:
        """Return a text that tells the user how this route makes gradients inexact, or "" if it
        does not.
        """

    def open(self, ends: RouteEnds) -> OpenRoute: ...

    def to_json(self) -> str:
        """Serialize the route, for `from_json` in another process."""


@dataclass(frozen=True)
class DirectRoute:
    """The route of TCP links from the worker to each server: a Route and an OpenRoute."""

    ends: RouteEnds | None = None
    name, end, via = "", None, ""

    def check_links(self, options: TcpOptions, replicas: int) -> None: ...
    def check_workers(self, group: WorkerIdentity, compressed: str) -> None: ...

    def lossy(self, group: WorkerIdentity) -> str:
        return ""

    def open(self, ends: RouteEnds) -> OpenRoute:
        return DirectRoute(ends)

    def to_json(self) -> str:
        return ""

    def connect(
        self, number: int, receiver: Receiver, options: TcpOptions, hello: m.Hello, report: Report
    ) -> Link:
        assert self.ends is not None
        where = self.ends.addresses[number]
        return dial(where, receiver, options, m.encode(hello), number, report)

    def close(self) -> None: ...
    def abort(self) -> None: ...


def dial(
    address: Address,
    receiver: Receiver,
    options: TcpOptions,
    greeting: bytes,
    number: int,
    report: Report,
) -> Link:
    """Open a TCP link to server `number`."""
    return tcp.connect(
        address,
        receiver,
        options,
        hello=greeting,
        name=f"server {number}",
        language=m.LANGUAGE,
        report=report,
    )


def load(name: str) -> Any:
    """Return the class of the route with this name. Raises ConfigError."""
    return plugins.load(GROUP, name)


def from_json(name: str, text: str) -> Route:
    route: Route = load(name).from_json(text) if name else DirectRoute()
    return route


def greeting_of(name: str) -> bytes:
    """Return the first bytes of a worker's hello, which tell the server the route."""
    return f"roadtrain {name} ".encode()


def named_in(hello: bytes) -> tuple[str, bytes] | None:
    """Split a hello into the name of the route and the bytes after it, or return None if the route
    is direct.
    """
    words = hello.split(b" ", 2)
    if len(words) < 3 or words[0] != b"roadtrain":
        return None
    return words[1].decode(errors="replace"), words[2]
