"""The tables `machines`, `predicted` and `model` of a plan.toml: which host runs which processes,
in which directories and at which ports; the predicted step; the model that the plan is for.

    [machines]
    rendezvous_port = 29500
    [[machines.hosts]]
    name = "gpu0"
    kind = "gpu"                                   # its [[hosts]] of the cluster file
    address = "10.0.0.2"
    workers = 1
    [[machines.hosts]]
    name = "spare0"
    kind = "spare"
    address = "10.0.0.9"
    servers = [{ store = "/mnt/ssd0/run", port = 7000 }]

`roadtrain launch` takes all names, paths and ports from here and chooses none itself. Does not
depend on a job or on how processes are started.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from roadtrain.errors import ConfigError
from roadtrain.options.schema import Integer, Number, Section, Whole, refusing, value

PORT = 7000  # first listening port of a host's processes
RENDEZVOUS_PORT = 29500
LAUNCHED_AS = "ROADTRAIN_RUN"  # environment variable with the run's name, set by a supervisor
FILES = "launch"  # directory inside the run directory for the files of `roadtrain launch`
LOOPBACK = {"localhost": "127.0.0.1"}
Port = Annotated[Integer, Field(ge=1, le=65535)]


class LostHost(StrEnum):
    """The reaction of workers when one of their hosts is lost and no spare host replaces it."""

    SHRINK = "shrink"  # the others continue from the committed step, if the batch can be divided
    WAIT = "wait"  # all wait until the host is back


@value
class ServerPlace:
    """A `roadtrain serve --store` process."""

    store: str  # its own directory; one in /dev/shm keeps the store in memory
    port: Port
    snapshot: str = ""  # directory on disk to which a store in memory is copied

    @model_validator(mode="after")
    @refusing
    def _absolute(self) -> Self:
        for key, path in (("store", self.store), ("snapshot", self.snapshot or "/")):
            if not path.startswith("/"):
                raise ConfigError(
                    f"{key} = {path!r} of the server at port {self.port} is not an absolute path",
                    hint="servers run in other directories, and as other users, than this command",
                )
        return self


@value
class SwitchPlace:
    """A `roadtrain serve --switch` process."""

    port: Port
    switch: str = ""  # its name among the switches of the cluster file


@value
class PlanHost:
    """A machine and its processes. Hosts with workers are in the order of ranks."""

    name: str
    kind: str  # the name of its [[hosts]] in the cluster file
    address: str = ""  # address that other hosts use; "": the launch engine (Ray) provides it
    workers: Whole = 0  # processes that compute, one per device
    servers: tuple[ServerPlace, ...] = ()
    reducer: Annotated[Whole, Field(le=65535)] = (
        0  # port of its `roadtrain serve --sum`; 0: none runs here
    )
    switch: SwitchPlace | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports at which its servers, reducer and switch listen."""
        reducer = (self.reducer,) if self.reducer else ()
        switch = (self.switch.port,) if self.switch is not None else ()
        return (*(server.port for server in self.servers), *reducer, *switch)

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories of its stores and of the copies of stores in memory."""
        found = [name for server in self.servers for name in (server.store, server.snapshot)]
        return tuple(filter(None, found))


@value
class Machines:
    """All machines of a run. Names are unique; so are ports and directories at each address."""

    hosts: tuple[PlanHost, ...]
    spares: tuple[PlanHost, ...] = ()  # idle until one replaces a lost host
    rendezvous_port: Port = RENDEZVOUS_PORT  # on the first host with workers
    lost_host: LostHost = LostHost.SHRINK
    stores_of: str = ""  # run name in store names, so that the run finds no other run's

    @property
    def worker_hosts(self) -> tuple[PlanHost, ...]:
        """Hosts that run workers, in the order of ranks."""
        return tuple(host for host in self.hosts if host.workers)

    @model_validator(mode="after")
    @refusing
    def _check_all_unique(self) -> Self:
        _check_unique((host.name for host in (*self.hosts, *self.spares)), "hosts are called")
        if not self.worker_hosts:
            raise ConfigError(
                f"{len(self.hosts)} hosts have 0 workers", hint="set `workers = 1` for a host"
            )
        for host in self.spares:
            if host.ports:
                raise ConfigError(
                    f"spare host {host.name!r} listens at {len(host.ports)} ports, but a spare"
                    " host runs nothing until it replaces a lost host",
                    hint="move a host that runs servers to `hosts`",
                )
        first = self.worker_hosts[0]
        by_address: dict[str, list[PlanHost]] = {}
        for host in self.hosts:
            address = host.address or host.name
            by_address.setdefault(LOOPBACK.get(address, address), []).append(host)
        for address, hosts in by_address.items():
            ports = [port for host in hosts for port in host.ports]
            ports += [self.rendezvous_port] if first in hosts else []
            _check_unique(ports, f"processes at {address} listen at port")
            _check_unique([d for h in hosts for d in h.directories], f"stores at {address} are")
        return self


def host_port(address: str, port: int) -> str:
    """Format HOST:PORT, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _check_unique(values: Iterable[str | int], what: str) -> None:
    """Raise ConfigError if a value occurs more than once."""
    found = list(values)
    if (twice := next((v for v in found if found.count(v) > 1), None)) is not None:
        raise ConfigError(f"{found.count(twice)} {what} {twice!r}", hint="give each its own")


class Predicted(Section):
    """The simulated step times of a plan, which `roadtrain launch` copies into the job."""

    seconds: Number
    """seconds of a step of the plan; 0: no prediction"""
    stages: dict[str, dict[str, Number]] = {}
    """for each pipeline stage (`stage 0`), the seconds of Forward, Wait, ..."""


@value
class PlannedModel:
    """The model of a plan, so that the plan is not launched for another model."""

    parameters: Whole
    seq_len: Whole  # tokens of a sample; 1 if it has none
    layers: Whole = 0  # 0: unknown to the planner
