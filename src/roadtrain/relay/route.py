"""The route to the servers through a relay, selected by the option `Servers(relay=SIZE)`. Worker 0
of each host starts the relay (relay/relay.py); the workers reach it over shared memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from roadtrain.chunks import ChunkTable
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.options.budgets import buffer_for
from roadtrain.servers import frames as m
from roadtrain.servers.routes import OpenRoute, Report, Route, RouteEnds
from roadtrain.transport import shm
from roadtrain.transport.address import local_options
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.tcp import Address, TcpOptions
from roadtrain.units import MIB, show_bytes

END_S = 10.0  # time for the relay to exit after its workers have left


@dataclass(frozen=True)
class RelayRoute:
    """The route to the servers through this host's relay. Implements the interface Route.

    Args:
        host_bytes: Memory for the relay's buffers.
        onward: The route from the relay to the servers.
    """

    host_bytes: int
    onward: Route
    name, end = "relay", None

    def check_links(self, options: TcpOptions, replicas: int) -> None:
        if replicas > 1:
            raise ConfigError(
                f"a relay cannot be combined with replicas = {replicas}",
                hint="leave out relay or replicas",
            )
        if type(options) is not TcpOptions:
            raise ConfigError(
                "a relay reaches the servers over TCP, but the option `link` is"
                f" {type(options).__module__}.{type(options).__name__}",
                hint="leave out relay, or pass a roadtrain.transport.tcp.TcpOptions as link",
            )
        self.onward.check_links(options, replicas)

    def check_workers(self, group: WorkerIdentity, compressed: str) -> None:
        self.onward.check_workers(_hosts(group), compressed)
        if compressed and group.local > 1:
            raise ConfigError(
                f"a relay sums whole gradients of {group.local} workers, but TopK sends only parts",
                hint="leave out relay or TopK",
            )

    def lossy(self, group: WorkerIdentity) -> str:
        return self.onward.lossy(_hosts(group))

    def open(self, ends: RouteEnds) -> OpenRoute:
        """Open the route from a worker to the relay of its host. Worker 0 of the host also starts
        the relay. Raises BudgetError if `host_bytes` is too small."""
        group = ends.group
        budgets = derive_relay(
            ends.meta.table,
            self.host_bytes,
            servers=len(ends.addresses),
            local=group.local,
            holds_gradients=ends.holds_gradients,
        )
        hosts = _hosts(group)
        directory = directory_of(group.session, hosts.rank, ends.addresses)
        orders = Orders(
            str(directory),
            replace(ends, group=hosts, adds=group.local > 1),
            group.local,
            budgets,
            (self.onward.name, self.onward.to_json()),
        )
        first = group.rank % group.local == 0
        return OpenRelayRoute(directory, start(orders) if first else None)

    def to_json(self) -> str:
        raise AssertionError("a relay cannot reach its servers through another relay")


@dataclass(frozen=True)
class OpenRelayRoute:
    """The open route from a worker to the servers through the relay of its host."""

    directory: Path  # contains the sockets of the relay
    process: subprocess.Popen[bytes] | None  # the relay, in worker 0 of the host; else None
    via = ""

    def connect(
        self, number: int, receiver: Receiver, options: TcpOptions, hello: m.Hello, report: Report
    ) -> Link:
        return shm.connect(
            self.directory / str(number),
            receiver,
            local_options(options),
            hello=m.encode(hello),
            name=f"relay to server {number}",
            language=m.LANGUAGE,
        )

    def close(self) -> None:
        """Wait until the relay has exited, and kill it after 10 s."""
        if self.process is not None:
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def abort(self) -> None:
        if self.process is not None:
            self.process.kill()


def _hosts(group: WorkerIdentity) -> WorkerIdentity:
    """Return the identity of this host's relay among the relays of all hosts. `group` is the
    identity of a worker of this host."""
    return replace(
        group, rank=group.rank // group.local, workers=group.workers // group.local, local=1
    )


def directory_of(session: str, host: int, servers: Sequence[Address]) -> Path:
    """Return the directory for the sockets of a host's relay: the same for all workers of the host,
    and different for each start of a job."""
    name = hashlib.sha256(repr((session, host, list(servers))).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"roadtrain-relay-{os.geteuid()}-{name}"


# the relay's process


@dataclass(frozen=True)
class RelayBudgets:
    """The memory that a relay uses for each server."""

    copies: int  # number of buffers for parameters
    pool: int  # number of gradient buffers per worker
    piece_bytes: int  # size of each buffer for parameters or gradients
    scratch_bytes: int  # size of the buffer for one sum


@dataclass(frozen=True)
class Orders:
    """The input of a relay process, which reads this object as JSON from its standard input."""

    directory: str  # directory of the sockets that the relay listens on
    ends: RouteEnds  # the ends of the route onward; its participants are the relays, one per host
    local: int  # number of workers of this host
    budgets: RelayBudgets
    onward: tuple[str, str]  # the route to the servers: its name and options (routes.from_json)


def start(orders: Orders) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "roadtrain.relay.relay"], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(orders, enc_hook=str))
    process.stdin.close()
    return process


def derive_relay(
    table: ChunkTable, host_bytes: int, *, servers: int, local: int, holds_gradients: bool
) -> RelayBudgets:
    """Divide the memory of a relay, `host_bytes`, among its buffers. Raises BudgetError if
    `host_bytes` is too small."""
    least, own = least_relay(table, servers=servers, local=local, holds_gradients=holds_gradients)
    if host_bytes < least:
        raise BudgetError(
            f"a relay of {local} worker(s) and {servers} server(s) needs at least"
            f" {-(-least // MIB)} MiB of memory, but has only {show_bytes(host_bytes)}",
            hint="give the relay more memory (the option `relay`), or use smaller chunks",
        )
    more = (host_bytes - least) // (servers * own.piece_bytes)
    return replace(own, copies=own.copies + min(more, len(table.chunks)))


def least_relay(
    table: ChunkTable, *, servers: int, local: int, holds_gradients: bool
) -> tuple[int, RelayBudgets]:
    """Return the minimum memory of a relay in bytes, and the sizes of the relay's buffers with this
    memory. `holds_gradients`: all gradients wait for the global norm."""
    share = -(-len(table.trainable) // servers) + 2  # most trainable chunks of a server
    piece = buffer_for(chunk.weights_nbytes for chunk in table.chunks)
    scratch = buffer_for(chunk.numel * 4 for chunk in table.trainable) if local > 1 else 0
    pool = min(share, 8) if local == 1 or not holds_gradients else share
    copies = 4
    least = servers * ((local * pool + copies) * piece + 2 * scratch)
    return least, RelayBudgets(copies, pool, piece, scratch)
