"""The machines of a plan: which host runs which processes, in which directories, at which ports;
and what the planner promised of it, for which model. <-> the tables `machines`, `predicted` and
`model` of a plan.toml

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

All that `roadtrain launch` needs of machines is here: no name, path or port is made up later.
Does NOT know a job, nor how processes are started.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from roadtrain.errors import ConfigError
from roadtrain.options.schema import Integer, Number, Section, Whole, refusing, value

PORT = 7000  # the first port of a host's processes that listen
RENDEZVOUS_PORT = 29500
LAUNCHED_AS = "ROADTRAIN_RUN"  # tells a worker the name of its run, where a supervisor is
FILES = "launch"  # the directory, in the run's, with what a launch writes there
LOOPBACK = {"localhost": "127.0.0.1"}
Port = Annotated[Integer, Field(ge=1, le=65535)]


class LostHost(StrEnum):
    """What workers do when a host of theirs is lost and no spare one takes its place."""

    SHRINK = "shrink"  # the others begin again at the committed step, where the batch divides
    WAIT = "wait"  # all wait until it is back


@value
class ServerPlace:
    """One `roadtrain serve --store`."""

    store: str  # directory of its own; one in /dev/shm rests in memory
    port: Port
    snapshot: str = ""  # directory on files that a store in memory is copied to

    @model_validator(mode="after")
    @refusing
    def _absolute(self) -> Self:
        for key, path in (("store", self.store), ("snapshot", self.snapshot or "/")):
            if not path.startswith("/"):
                raise ConfigError(
                    f"{key} = {path!r} of the server at port {self.port} is no absolute path",
                    hint="servers run in other directories, and as other users, than this one",
                )
        return self


@value
class SwitchPlace:
    """One `roadtrain serve --switch`."""

    port: Port
    switch: str = ""  # the name of the cluster file's switch that it is


@value
class PlanHost:
    """One machine. Hosts with workers stand in the order of ranks."""

    name: str
    kind: str  # the name of its [[hosts]] in the cluster file
    address: str = ""  # by which the others reach it; "": the engine knows it (Ray)
    workers: Whole = 0  # processes that compute, one a device
    servers: tuple[ServerPlace, ...] = ()
    reducer: Annotated[Whole, Field(le=65535)] = (
        0  # the port of its `roadtrain serve --sum`; 0: none runs here
    )
    switch: SwitchPlace | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """At which its servers, its reducer and its switch listen."""
        reducer = (self.reducer,) if self.reducer else ()
        switch = (self.switch.port,) if self.switch is not None else ()
        return (*(server.port for server in self.servers), *reducer, *switch)

    @property
    def directories(self) -> tuple[str, ...]:
        """Those of its stores, and those that stores in memory are copied to."""
        found = [name for server in self.servers for name in (server.store, server.snapshot)]
        return tuple(filter(None, found))


@value
class Machines:
    """All machines of a run. Invariant: names are unique, and so are ports and directories at one
    address."""

    hosts: tuple[PlanHost, ...]
    spares: tuple[PlanHost, ...] = ()  # run nothing until they take a lost host's place
    rendezvous_port: Port = RENDEZVOUS_PORT  # on the first host with workers
    lost_host: LostHost = LostHost.SHRINK
    stores_of: str = ""  # the run in the names of its stores, where it is not to find another's

    @property
    def worker_hosts(self) -> tuple[PlanHost, ...]:
        """Those that compute, in the order of ranks."""
        return tuple(host for host in self.hosts if host.workers)

    @model_validator(mode="after")
    @refusing
    def _each_once(self) -> Self:
        _once((host.name for host in (*self.hosts, *self.spares)), "hosts are called")
        if not self.worker_hosts:
            raise ConfigError(
                f"{len(self.hosts)} hosts have 0 workers", hint="give a host `workers = 1`"
            )
        for host in self.spares:
            if host.ports:
                raise ConfigError(
                    f"spare host {host.name!r} listens at {len(host.ports)} ports, a spare host"
                    " runs nothing until it takes a lost host's place",
                    hint="a host that serves stands in `hosts`",
                )
        meeting = self.worker_hosts[0]
        at_one: dict[str, list[PlanHost]] = {}
        for host in self.hosts:
            address = host.address or host.name
            at_one.setdefault(LOOPBACK.get(address, address), []).append(host)
        for address, hosts in at_one.items():
            ports = [port for host in hosts for port in host.ports]
            if meeting in hosts:
                ports.append(self.rendezvous_port)
            _once(ports, f"processes at {address} listen at port")
            _once((name for host in hosts for name in host.directories), f"stores at {address} are")
        return self


def host_port(address: str, port: int) -> str:
    """HOST:PORT, as a job writes it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _once(given: Iterable[str | int], what: str) -> None:
    """Raises ConfigError where something is given more than once."""
    found = list(given)
    if (twice := next((one for one in found if found.count(one) > 1), None)) is not None:
        raise ConfigError(f"{found.count(twice)} {what} {twice!r}", hint="give each its own")


class Predicted(Section):
    """What the simulator says of a step; `roadtrain launch` writes it into the job that it runs."""

    seconds: Number
    """of a step, by the plan that is run; 0: nothing is predicted"""
    stages: dict[str, dict[str, Number]] = {}
    """of each pipeline stage (`stage 0`) seconds of Forward, Wait, ..."""


@value
class PlannedModel:
    """What the plan is for, so that it is not launched for another."""

    parameters: Whole
    seq_len: Whole  # tokens of a sample; 1 where it has none
    layers: Whole = 0  # 0: the planner was told none
