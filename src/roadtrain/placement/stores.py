"""Files, Memory and Servers: the places where place() keeps parameters and optimizer state. Opens
no files and no connections."""

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
    """Keep the state in directories of this host.

    A store that the directories already hold is resumed.

    Args:
        directories: One directory or several, usually one per SSD. Each directory gets a server
            thread.
        rates: Relative speeds of the directories, each above 0. A new store is distributed over the
            directories in proportion to the speeds. If "measured", the speeds are measured when a
            new store is made. If None, the store is distributed evenly.
        direct: Whether to use direct I/O if the file system supports it.
        moved_from: Directories that held the store before. place() moves the store from these
            directories to `directories`.

    Raises:
        ConfigError: A directory is named twice, no directory is named, or the number of `rates`
            differs from the number of directories.
    """

    directories: PathLike | Sequence[PathLike]
    rates: Sequence[float] | Literal["measured"] | None = None
    direct: bool = True
    moved_from: Sequence[PathLike] = ()

    def __post_init__(self) -> None:
        check_options(Files, vars(self))
        if not self.paths:
            raise ConfigError(
                f"Files: `directories` cannot be {self.directories!r}",
                hint="name at least one, or leave store out to keep the state in RAM",
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
                f"rates {self.rates!r} do not fit {len(self.paths)} directories",
                hint="use 'measured', or one number above 0 per directory",
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
    """Keep the state in the memory of this process. The state is lost when the process ends."""


@dataclass(frozen=True)
class Servers:
    """Keep the state on `roadtrain serve` processes, which all workers of a job share.

    Each update takes the mean of the workers' gradients.

    Args:
        addresses: HOST:PORT of every server, in the same order in every run.
        token: The job's secret, or the path of a file that contains the secret (mode 600).
        tls: The certificate authority of the servers, and this worker's certificate and key.
        connections: The number of TCP connections to each server.
        retry_s: The number of seconds during which a failed connection is retried. If None,
            `deadline_s` of place() is used.
        link: A `TcpOptions` object with all options of the connections. If `link` is set, `token`,
            `tls`, `connections` and `retry_s` cannot be set.
        replicas: The number of servers that hold each chunk, 1 or 2. With 2, both servers apply the
            same updates.
        give_up: Addresses of servers whose contents may be discarded if the servers disagree at the
            start. Such a server is left out if it does not answer. If it answers, its store is
            moved aside and filled again from its replica.
        relay: Host memory in bytes for a relay: a process that communicates with the servers for
            all workers of this host. If None, there is no relay.
        fan_in: Switches between workers and servers that sum gradients and copy parameters: a
            `FanIn`, or a list with the HOST:PORT of the only switch. If None, there is no switch.
        buffering: Which blocks are kept on the device from forward to backward instead of being
            fetched twice: "all", "none" or "auto". With "auto", as many blocks as fit are kept, or
            none if fetching a block twice is faster.
        residuals: A directory of this host for the residuals of error feedback (gradients that were
            not sent yet). Required with error feedback.

    Raises:
        ConfigError: Options contradict each other.
    """

    addresses: Sequence[str]
    token: bytes | PathLike | None = field(default=None, repr=False)
    tls: Tls | None = None
    connections: PositiveInt = 1
    retry_s: Annotated[float, Field(ge=0)] | None = None
    link: TcpOptions | None = field(default=None, repr=False)
    replicas: int = 1
    give_up: Sequence[str] = ()
    relay: Size | None = None
    fan_in: Any = None
    buffering: Literal["auto", "all", "none"] = "auto"
    residuals: PathLike | Files | None = None

    def __post_init__(self) -> None:
        check_options(Servers, vars(self))
        if not self.addresses:
            raise ConfigError(
                f"Servers({self.addresses!r}) has no addresses", hint="list at least one HOST:PORT"
            )
        own = (self.token, self.tls, self.connections, self.retry_s)
        if self.link is not None and own != (None, None, 1, None):
            raise ConfigError(
                "Servers(link=...) cannot be combined with token, tls, connections or retry_s",
                hint="set these options in link",
            )
        if self.residual_files and len(self.residual_files.paths) != 1:
            raise ConfigError(
                f"residuals need 1 directory, but {len(self.residual_files.paths)} are named",
                hint="name one directory of this host",
            )
        self._check_replicas()
        self.route.check_links(self.link or TcpOptions(tls=self.tls), self.replicas)

    def _check_replicas(self) -> None:
        count, given_up = len(self.resolved), set(self.given_up)
        if self.replicas not in (1, 2) or self.replicas > count:
            raise ConfigError(
                f"replicas = {self.replicas} with {count} server(s) is not possible",
                hint="set replicas to 1, or to 2 with at least 2 servers",
            )
        unknown = not given_up <= set(self.resolved)
        if given_up and (unknown or self.replicas == 1 or len(given_up) == count):
            raise ConfigError(
                f"give_up = {list(self.give_up)} with replicas = {self.replicas} is not possible"
                f" for the servers {list(self.addresses)}",
                hint="list some, but not all, of the servers, with replicas = 2",
            )

    @cached_property
    def route(self) -> Route:
        """The route from this worker to the servers: direct, or through a relay or switches."""
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
        files = self.residuals
        return files if files is None or isinstance(files, Files) else Files(files)

    def options(self, deadline_s: float) -> TcpOptions:
        """Return the options of the connections to the servers.

        If `retry_s` is not set, connections are retried for `deadline_s`, because a server may
        still be starting or busy.
        """
        own = TcpOptions(
            token=token_of(self.token),
            tls=self.tls,
            connections=self.connections,
            retry_s=self.retry_s,
        )
        link = self.link or own
        return link if link.retry_s is not None else replace(link, retry_s=deadline_s)


Store = Files | Memory | Servers


def store_of(store: Store | PathLike | Sequence[PathLike] | None) -> Store:
    """Convert one or several paths to Files, and None to Memory."""
    if isinstance(store, Files | Memory | Servers):
        return store
    return Files(store) if store else Memory()


def _paths(paths: PathLike | Sequence[PathLike]) -> tuple[Path, ...]:
    return tuple(map(Path, [paths] if isinstance(paths, str | Path) else paths))
