"""Routes: how a worker reaches its servers. This module has the direct route; optional packages
register others.

    [project.entry-points."roadtrain.routes"]
    relay = "roadtrain.relay.route:RelayRoute"
    fan-in = "roadtrain.switch.route:SwitchRoute"

                worker                                                  server
    Route       checks itself when `Servers` is made, and the job
    OpenRoute   one link to each server, for one session
    RouteEnd                          stands before the session if workers use this route

A route is a value, loaded by name when an option selects it (transport/plugins.py). If a route has
an end at the server, its hello starts with `greeting_of(name)`, followed by bytes of its own; the
server then loads the route of that name.
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
    """The two ends of a route in one session: a participant, and the servers of its job."""

    addresses: Sequence[Address]  # by number of the server
    options: TcpOptions
    group: WorkerIdentity  # the participant: a worker, or a relay that stands for a host's workers
    meta: StoreMeta  # the layout
    deadline_s: float
    holds_gradients: bool = False  # all gradients wait for the global norm
    adds: bool = False  # gradients are fp32 sums of several workers, whatever the chunk's dtype


class OpenRoute(Protocol):
    """A participant's route to its servers during one session."""

    via: str  # appended to a server's name in messages, as " by switch HOST:PORT"; "" if direct

    def connect(
        self, number: int, receiver: Receiver, options: TcpOptions, hello: m.Hello, report: Report
    ) -> Link:
        """Return a link to server `number`. `report` gets a line from time to time while the server
        does not listen. Raises PeerError."""

    def close(self) -> None:
        """End everything that `open` started, after the links are closed."""

    def abort(self) -> None:
        """End it immediately."""


class RouteEnd(Protocol):
    """The server's end of a route. The first participant creates it; it stands before `server`,
    the session. The class is called with the greeting, the server and the options of its links."""

    name: str  # of the route
    server: Any

    @staticmethod
    def greeting(rest: bytes) -> Any:
        """Decode the bytes after `greeting_of(name)` into a value whose `hello` is a worker's
        Hello. Raises WireError."""

    def is_of(self, hello: m.Hello) -> bool:
        """Whether that participant belongs to this start of the job."""

    def busy(self) -> RoadtrainError: ...
    def accept(self, link: Link, greeting: Any) -> Receiver: ...
    def status(self) -> m.Status: ...
    def look(self, silent_s: float) -> None: ...
    def tear_down(self, error: BaseException) -> None: ...


class Route(Protocol):
    """An option value, which checks itself when it is made."""

    name: str  # of its entry point
    end: Any  # the class of its RouteEnd; None: nothing differs at the server

    def check_links(self, options: TcpOptions, replicas: int) -> None:
        """Raise ConfigError for links or replicas that this route cannot serve."""

    def check_workers(self, group: WorkerIdentity, compressed: str) -> None:
        """Raise ConfigError for workers that cannot use this route. `compressed`: the option that
        makes their gradients sparse; "" if they are dense."""

    def lossy(self, group: WorkerIdentity) -> str:
        """Describe what this route loses, for the user (Rule 2); "" if nothing."""

    def open(self, ends: RouteEnds) -> OpenRoute: ...

    def to_json(self) -> str:
        """Serialize the value for another process, which reads it with `from_json`."""


@dataclass(frozen=True)
class DirectRoute:
    """A TCP link to each server: a Route that is also its OpenRoute."""

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
    """Return the class of the route of this name. Raises ConfigError."""
    return plugins.load(GROUP, name)


def from_json(name: str, text: str) -> Route:
    route: Route = load(name).from_json(text) if name else DirectRoute()
    return route


def greeting_of(name: str) -> bytes:
    """Return the prefix of a hello for a route that has an end at the server."""
    return f"roadtrain {name} ".encode()


def named_in(hello: bytes) -> tuple[str, bytes] | None:
    """Split a hello into the route's name and the rest; None if it is a plain worker's."""
    words = hello.split(b" ", 2)
    if len(words) < 3 or words[0] != b"roadtrain":
        return None
    return words[1].decode(errors="replace"), words[2]
