"""Routes: how a worker reaches its servers. The core has the direct one; wings register others.

    [project.entry-points."roadtrain.routes"]
    relay = "roadtrain.relay.route:RelayRoute"
    fan-in = "roadtrain.switch.route:SwitchRoute"

                worker                                                  server
    Route       checks itself when `Servers` is made, and the job
    OpenRoute   one link to each server, for one session
    RouteEnd                          stands in front of the session if workers come by this route

A route is a value. It is loaded by name when an option asks for it (transport/plugins.py). A route
that has an end at the server greets with `greeting_of(name)` and its own bytes; the server then
loads the route by that name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roadtrain.environment import WorkerGroup
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
    """The two ends of a route in one session: a participant, and the servers of its job."""

    addresses: Sequence[Address]  # by number of the server
    options: TcpOptions
    group: WorkerGroup  # the participant among all: a worker, or a relay that stands for a host's
    meta: StoreMeta  # the layout
    deadline_s: float
    holds_gradients: bool = False  # all gradients wait for the norm of all
    adds: bool = False  # gradients are fp32 sums of several workers, whatever the chunk's dtype


class OpenRoute(Protocol):
    """A participant's way to its servers during one session."""

    via: str  # follows a server's name in messages, as " by switch HOST:PORT"; "" if direct

    def connect(
        self, number: int, receiver: Receiver, options: TcpOptions, hello: m.Hello, report: Report
    ) -> Link:
        """A link to server `number`. `report` gets a line now and then while it does not listen.
        Raises PeerError."""

    def close(self) -> None:
        """End what `open` started, once the links are closed."""

    def abort(self) -> None:
        """End it at once."""


class RouteEnd(Protocol):
    """The server's end of a route, made by the first participant that comes: it stands in front of
    `server`, the session. Called with its `greeting`, the server, and the options of its links."""

    name: str  # of the route
    server: Any

    @staticmethod
    def greeting(rest: bytes) -> Any:
        """What follows `greeting_of(name)`: a value that has a worker's Hello as `hello`. Raises
        WireError."""

    def is_of(self, hello: m.Hello) -> bool:
        """Whether that participant belongs to this start of the job."""

    def busy(self) -> RoadtrainError: ...
    def accept(self, link: Link, greeting: Any) -> Receiver: ...
    def status(self) -> m.Status: ...
    def look(self, silent_s: float) -> None: ...
    def tear_down(self, error: BaseException) -> None: ...


class Route(Protocol):
    """An option value; it checks itself when it is made."""

    name: str  # of its entry point
    end: Any  # the class of its RouteEnd; None: the server notices no difference

    def check_links(self, options: TcpOptions, replicas: int) -> None:
        """Raise ConfigError for links or replicas that this route cannot serve."""

    def check_workers(self, group: WorkerGroup, compressed: str) -> None:
        """Raise ConfigError for workers that cannot take this route. `compressed`: the option by
        which their gradients are sparse; "" if they are whole."""

    def lossy(self, group: WorkerGroup) -> str:
        """What this route loses, for people (Rule 2); "" if nothing."""

    def open(self, ends: RouteEnds) -> OpenRoute: ...

    def to_json(self) -> str:
        """The value for another process, where `from_json` reads it."""


@dataclass(frozen=True)
class DirectRoute:
    """A TCP link to each server. A Route, and its OpenRoute."""

    ends: RouteEnds | None = None
    name, end, via = "", None, ""

    def check_links(self, options: TcpOptions, replicas: int) -> None: ...
    def check_workers(self, group: WorkerGroup, compressed: str) -> None: ...

    def lossy(self, group: WorkerGroup) -> str:
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
    """A TCP link to server `number`."""
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
    """The class of the route of this name. Raises ConfigError."""
    return plugins.load(GROUP, name)


def from_json(name: str, text: str) -> Route:
    route: Route = load(name).from_json(text) if name else DirectRoute()
    return route


def greeting_of(name: str) -> bytes:
    """Begins the greeting of a participant whose route has an end at the server."""
    return f"roadtrain {name} ".encode()


def named_in(hello: bytes) -> tuple[str, bytes] | None:
    """The name that a greeting begins with, and the rest of it; None for a worker's own."""
    words = hello.split(b" ", 2)
    if len(words) < 3 or words[0] != b"roadtrain":
        return None
    return words[1].decode(errors="replace"), words[2]
