"""The machines of a plan: which host runs which processes, in which directories, at which ports;
and what the planner promised of it. <-> the tables `machines` and `predicted` of a plan.toml

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

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from roadtrain.config.schema import Count, Number, Whole, value

PORT = 7000  # the first port of a host's processes that listen
RENDEZVOUS_PORT = 29500


class LostHost(StrEnum):
    """What workers do when a host of theirs is lost and no spare one takes its place."""

    SHRINK = "shrink"  # the others begin again at the committed step, where the batch divides
    WAIT = "wait"  # all wait until it is back


@value
class ServerPlace:
    """One `roadtrain serve --store`."""

    store: str  # directory of its own; one in /dev/shm rests in memory
    port: Count
    snapshot: str = ""  # directory on files that a store in memory is copied to


@value
class SwitchPlace:
    """One `roadtrain serve --switch`."""

    port: Count
    switch: str = ""  # the name of the cluster file's switch that it is


@value
class PlanHost:
    """One machine. Hosts with workers stand in the order of ranks."""

    name: str
    kind: str  # the name of its [[hosts]] in the cluster file
    address: str = ""  # by which the others reach it; "": the engine knows it (Ray)
    workers: Whole = 0  # processes that compute, one a device
    servers: tuple[ServerPlace, ...] = ()
    reducer: Whole = 0  # the port of its `roadtrain serve --sum`; 0: none runs here
    switch: SwitchPlace | None = None


@value
class Machines:
    """All machines of a run. Invariant: names are unique, and so are ports at one address."""

    hosts: tuple[PlanHost, ...]
    spares: tuple[PlanHost, ...] = ()  # run nothing until they take a lost host's place
    rendezvous_port: Count = RENDEZVOUS_PORT  # on the first host with workers
    lost_host: LostHost = LostHost.SHRINK


@value
class Predicted:
    """What the simulator says of a step."""

    seconds: Number
    # where ("stage 0") -> stage of the step ("Forward") -> seconds of a step
    stages: Mapping[str, Mapping[str, Number]] = field(default_factory=dict, hash=False)
