"""Files, Memory and Servers: where place() puts parameters and optimizer state.

Each value checks itself when it is made; nothing is opened or connected here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from roadtrain.errors import ConfigError
from roadtrain.options.check import PathLike, PositiveInt, Size, check_options
from roadtrain.servers.routes import DirectRoute, Route, load
from roadtrain.transport.address import address_of, token_of
from roadtrain.transport.tcp import Address, TcpOptions, Tls
from roadtrain.units import parse_bytes


@dataclass(frozen=True)
class Files:
    """The state rests in directories of this host, with one server for each. A store that is
    found there is resumed. Raises ConfigError."""

    directories: PathLike | Sequence[PathLike]
    # relative rates by which a new store's chunks are spread; None: evenly; "measured": now
    rates: Sequence[float] | Literal["measured"] | None = None
    direct: bool = True  # direct I/O, where the file system takes it
    # directories that the store has rested in and shall leave; only these and `directories` are
    # read, written or removed
    moved_from: Sequence[PathLike] = ()

    def __post_init__(self) -> None:
        check_options(Files, vars(self))
        if not self.paths:
            raise ConfigError(
                f"Files: `directories` cannot be {self.directories!r}",
                hint="name one or more, or leave store out to keep the state in RAM",
            )
        if len({*map(os.path.realpath, self.paths)}) < len(self.paths):
            raise ConfigError(
                f"Files: `directories` cannot be {self.directories!r}",
                hint="name each directory once",
            )
        if self.rates is None or self.rates == "measured":
            return
        if len(self.rates) != len(self.paths) or min(self.rates) <= 0:
            raise ConfigError(
                f"rates {self.rates!r} for {len(self.paths)} directories",
                hint="'measured', or a number above 0 for each",
            )

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        return _paths(self.directories)

    @cached_property
    def left(self) -> tuple[Path, ...]:
        """`moved_from` as paths."""
        return _paths(self.moved_from)


@dataclass(frozen=True)
class Memory:
    """The state rests in the memory of this process: it is lost when the process ends."""


@dataclass(frozen=True)
class Servers:
    """The state rests with `roadtrain serve` processes. All workers of a torchrun share them, and
    each update takes the mean of their gradients. Raises ConfigError."""

    addresses: Sequence[str]  # HOST:PORT of every server that takes part, always in the same order
    # the job's secret, or a file with it (mode 600)
    token: bytes | PathLike | None = field(default=None, repr=False)
    tls: Tls | None = None  # whom a server is known by, and this worker's certificate
    connections: PositiveInt = 1  # TCP connections to each server
    retry_s: Annotated[float, Field(ge=0)] | None = (
        None  # how long to try again; None: as long as place's deadline_s
    )
    # instead of the four above: all that a link can be told
    link: TcpOptions | None = field(default=None, repr=False)
    replicas: int = 1  # 1 or 2: a second server holds each chunk and applies the same pushes
    # addresses whose contents are not to count at a start where that is in doubt: one that is away
    # is left out all the same, the store of one that answers is moved aside and filled up again
    give_up: Sequence[str] = ()
    relay: Size | None = None  # host bytes of a process that communicates for the workers here
    # gradients are summed, and parameters copied, by switches on the way: a FanIn, or the HOST:PORT
    # of the only switch in a list
    fan_in: Any = None
    # which blocks are kept from forward to backward, which then pulls nothing: as many as fit where
    # that is faster than the network (auto), all, or none
    buffering: Literal["auto", "all", "none"] = "auto"
    # the directory of this host where what error feedback has not sent rests
    residuals: PathLike | Files | None = None

    def __post_init__(self) -> None:
        check_options(Servers, vars(self))
        if not self.addresses:
            raise ConfigError(
                f"Servers of {self.addresses!r}", hint="a list of one HOST:PORT or more"
            )
        own = (self.token, self.tls, self.connections, self.retry_s)
        if self.link is not None and own != (None, None, 1, None):
            raise ConfigError(
                "Servers(link=...) together with token, tls, connections or retry_s",
                hint="say all of them in link",
            )
        if self.residual_files and len(self.residual_files.paths) != 1:
            raise ConfigError(
                f"residuals in {len(self.residual_files.paths)} directories",
                hint="what was not sent rests in one directory of this host",
            )
        self._check_replicas()
        self.route.check_links(self.link or TcpOptions(tls=self.tls), self.replicas)

    def _check_replicas(self) -> None:
        count, given_up = len(self.resolved), set(self.given_up)
        if self.replicas not in (1, 2) or self.replicas > count:
            raise ConfigError(
                f"replicas = {self.replicas} with {count} server(s)", hint="2 needs 2 or more"
            )
        unknown = not given_up <= set(self.resolved)
        if given_up and (unknown or self.replicas == 1 or len(given_up) == count):
            raise ConfigError(
                f"give_up = {list(self.give_up)} of servers {list(self.addresses)} with replicas ="
                f" {self.replicas}",
                hint="addresses as in addresses, not all of them, with replicas = 2",
            )

    @cached_property
    def route(self) -> Route:
        """How this worker reaches the servers: directly, or by what `fan_in` and `relay` select."""
        route: Route = DirectRoute()
        if self.fan_in is not None:
            route = load("fan-in")(self.fan_in)
        if self.relay is not None:
            route = load("relay")(parse_bytes(self.relay), route)
        return route

    @property
    def resolved(self) -> list[Address]:
        return [address_of(text) for text in self.addresses]

    @property
    def given_up(self) -> list[Address]:
        return [address_of(text) for text in self.give_up]

    @property
    def residual_files(self) -> Files | None:
        given = self.residuals
        return given if given is None or isinstance(given, Files) else Files(given)

    def options(self, deadline_s: float) -> TcpOptions:
        """Of the links. They are as patient as the user's deadline where nothing else is said:
        servers may still be starting, or hold the session of workers that are leaving."""
        token = self.token if isinstance(self.token, bytes | None) else token_of(str(self.token))
        own = TcpOptions(
            token=token, tls=self.tls, connections=self.connections, retry_s=self.retry_s
        )
        link = self.link or own
        return link if link.retry_s is not None else replace(link, retry_s=deadline_s)


Store = Files | Memory | Servers


def store_of(given: Store | PathLike | Sequence[PathLike] | None) -> Store:
    """Make Files of one or several paths, and Memory of none."""
    if isinstance(given, Files | Memory | Servers):
        return given
    return Files(given) if given else Memory()


def _paths(given: PathLike | Sequence[PathLike]) -> tuple[Path, ...]:
    return tuple(map(Path, [given] if isinstance(given, str | Path) else given))
