"""The tables `machines`, `predicted` and `model` of a plan.toml.

`machines` lists the hosts, and the processes of each host with their directories and ports.
`predicted` has the simulated time of a step. `model` describes the model that the plan is for.

    [machines]
    rendezvous_port = 29500
    [[machines.hosts]]
    name = "gpu0"
    kind = "gpu"                                   # name of a [[hosts]] entry of the cluster file
    address = "10.0.0.2"
    workers = 1
    [[machines.hosts]]
    name = "spare0"
    kind = "spare"
    address = "10.0.0.9"
    servers = [{ store = "/mnt/ssd0/run", port = 7000 }]
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
    """The reaction of workers if a worker host is lost and no spare host replaces it."""

    # the remaining workers continue from the committed step, if they can divide the batch
    SHRINK = "shrink"
    WAIT = "wait"  # all workers wait until the lost host is back


@value
class ServerPlace:
    """A `roadtrain serve --store` process of a host."""

    store: str  # directory of the store; a directory in /dev/shm keeps the store in memory
    port: Port
    # directory on disk to which a store in memory is copied; "" if it is not copied
    snapshot: str = ""

    @model_validator(mode="after")
    @refusing
    def _absolute(self) -> Self:
        for key, path in (("store", self.store), ("snapshot", self.snapshot or "/")):
            if not path.startswith("/"):
                raise ConfigError(
                    f"{key} = {path!r} of the server at port {self.port} is not an absolute path",
                    hint="start it with /: servers can run in other directories than this command",
                )
        return self


@value
class SwitchPlace:
    """A `roadtrain serve --switch` process of a host."""

    port: Port
    switch: str = ""  # name of the process among the switches of the cluster file


@value
class PlanHost:
    """A machine and the processes that run on it."""

    name: str
    kind: str  # name of the [[hosts]] entry of the cluster file that describes the machine
    # address at which other hosts reach the machine; if "", the launch engine (Ray) provides it
    address: str = ""
    workers: Whole = 0  # number of processes that compute, one per device
    servers: tuple[ServerPlace, ...] = ()
    # port of the `roadtrain serve --sum` process; 0 if the machine runs no such process
    reducer: Annotated[Whole, Field(le=65535)] = 0
    switch: SwitchPlace | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """Listening ports of the machine's servers, reducer and switch."""
        reducer = (self.reducer,) if self.reducer else ()
        switch = (self.switch.port,) if self.switch is not None else ()
        return (*(server.port for server in self.servers), *reducer, *switch)

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories of the machine's stores, and the directories on disk to which stores in
        memory are copied."""
        found = [name for server in self.servers for name in (server.store, server.snapshot)]
        return tuple(filter(None, found))


@value
class Machines:
    """All machines of a run. The names of hosts are unique. So are ports and directories at each
    address."""

    hosts: tuple[PlanHost, ...]  # the hosts with workers are in the order of their workers' ranks
    spares: tuple[PlanHost, ...] = ()  # hosts that are idle until they replace a lost host
    rendezvous_port: Port = RENDEZVOUS_PORT  # port of the first host with workers
    lost_host: LostHost = LostHost.SHRINK
    stores_of: str = ""  # part of the names of the run's stores, so that it finds no other stores

    @property
    def worker_hosts(self) -> tuple[PlanHost, ...]:
        """Hosts that run workers, in the order of the workers' ranks."""
        return tuple(host for host in self.hosts if host.workers)

    @model_validator(mode="after")
    @refusing
    def _check_all_unique(self) -> Self:
        _check_unique((host.name for host in (*self.hosts, *self.spares)), "hosts are called")
        if not self.worker_hosts:
            raise ConfigError(
                f"none of {len(self.hosts)} hosts has workers", hint="set `workers = 1` for a host"
            )
        for host in self.spares:
            if host.ports:
                raise ConfigError(
                    f"spare host {host.name!r} listens at {len(host.ports)} ports, but a spare"
                    " host runs nothing until it replaces a lost host",
                    hint="list a host that runs servers under `hosts`, not under `spares`",
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
            _check_unique([d for h in hosts for d in h.directories], f"stores at {address} use")
        return self


def host_port(address: str, port: int) -> str:
    """Format HOST:PORT, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _check_unique(values: Iterable[str | int], what: str) -> None:
    found = list(values)
    if (twice := next((v for v in found if found.count(v) > 1), None)) is not None:
        hint = "use each name, port and directory only once"
        raise ConfigError(f"{found.count(twice)} {what} {twice!r}", hint=hint)


class Predicted(Section):
    """The simulated step times of a plan, which `roadtrain launch` copies into the job."""

    seconds: Number
    """seconds of a step of the plan; 0: no prediction"""
    stages: dict[str, dict[str, Number]] = {}
    """for each pipeline stage (`stage 0`), the seconds of Forward, Wait, ..."""


@value
class PlannedModel:
    """The sizes of the model that a plan is for, to compare with the model of a job."""

    parameters: Whole
    seq_len: Whole  # tokens per sample; 1 if samples have no tokens
    layers: Whole = 0  # 0 if the planner does not know the number
