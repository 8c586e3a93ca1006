"""The resources of hosts and of switches that sum, and the ranks of a pipeline stage on such hosts.

Equal hosts are simulated as one *site* with a multiplicity `hosts`: each byte that the site sends
to a server counts `hosts` times at the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from roadtrain.config.cluster import Host, Nic
from roadtrain.config.plan_file import SwitchPackets
from roadtrain.config.switch_tree import SwitchTree
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Engine, Resource, Uses
from roadtrain.switch.protocol.timed_sender import BEAT_S

# number of packets (64 KiB in total) that a switch on a machine receives before it forwards them
BATCH = 44


class Site:
    """The resources of one host, which stands for all hosts of its kind. Only one of the host's
    devices is modeled, because all devices do the same work."""

    def __init__(
        self,
        engine: Engine,
        host: Host,
        nic: Nic | None,
        constants: Constants,
        name: str,
        resource: Callable[[str, float], Resource] | None = None,
    ) -> None:
        """Create the resources of the host. `resource`: returns the resource with a given name and
        capacity, for sites that share resources. If None, this site has its own resources."""
        resource = resource or (lambda what, rate: engine.resource(f"{name} {what}", rate))
        self.host, self.name, self.nic = host, name, nic
        rate = nic.total * constants.network if nic is not None else float("inf")
        self.out, self.into = resource("out", rate), resource("in", rate)
        self.latency = nic.latency if nic is not None else 0.0
        self.memory = resource("memory", host.memory_rate)
        self.updates, self.sums = resource("updates", host.updates), resource("sums", host.sums)
        if host.packet_rate:
            self.packets = resource("packets", host.packet_rate)
        # if CPUs compute: the CPUs, which computing and updates share
        self.cores: Resource | None = None
        if host.device is not None:
            if host.device.is_host:
                self.cores = resource("processors", 1.0)
            self.to_device = resource("to device", host.device.copy_rate)
            self.from_device = resource("from device", host.device.copy_rate)
            self.fabric = resource("fabric", host.fabric or host.device.copy_rate)
            self.device_memory = resource("memory of the device", host.device.memory_rate)
        if host.ssds:
            self.read = resource("ssd read", sum(s.count * s.read for s in host.ssds))
            self.write = resource("ssd write", sum(s.count * s.write for s in host.ssds))
            self.mixed = resource("ssd mixed", min(s.mixed for s in host.ssds))
            self.up = resource("uplink in", host.uplink)
            self.down = resource("uplink out", host.uplink)
            if all(s.updates for s in host.ssds):
                internal = sum(s.count * (s.internal or s.read) for s in host.ssds)
                self.inside = resource("ssd internal", internal)
                self.beside = resource("ssd updates", sum(s.count * s.updates for s in host.ssds))

    def reads(self, *, beside: bool = False) -> Uses:
        """Return the resources that are used when a byte is read from the SSDs. If `beside` is
        false, the byte is read into host memory. If true, the processors in the SSDs read it."""
        media = [(self.read, 1.0), (self.mixed, 1.0 / self.read.capacity)]
        return media + ([(self.inside, 1.0)] if beside else [(self.up, 1.0), (self.memory, 1.0)])

    def writes(self, *, beside: bool = False) -> Uses:
        media = [(self.write, 1.0), (self.mixed, 1.0 / self.write.capacity)]
        return media + ([(self.inside, 1.0)] if beside else [(self.down, 1.0), (self.memory, 1.0)])


class SwitchResources:
    """The resources of the switches of one tree. `packets`: the plan's settings for packets.

    Upwards, each link carries one sum; downwards, each link carries one copy of the parameters. A
    switch without a `rate` is a switch of the network itself, so its sums and copies cause no
    additional traffic. A switch with a `rate` is a machine that is attached to the network. Its
    network card receives the packets of all children. It also sends a copy to each child, unless
    the network makes the copies.
    """

    def __init__(
        self,
        resource: Callable[[str, float], Resource],
        tree: SwitchTree,
        packets: SwitchPackets,
        constants: Constants,
        machine: Resource | None = None,
    ) -> None:
        """Create the resources of the links and switches of `tree`. `resource`: returns the
        resource with a given name and capacity, and creates each resource only once. `machine`: see
        FlowGroup."""
        self.tree, self.packets = tree, packets
        # resource uses of a byte on the wire that every worker sends (up) or receives (down)
        self.up, self.down = Uses(), Uses()
        for name, parent in tree.parents.items():
            rate = tree.links[name].rate * constants.network
            self.up.append((resource(f"{name} to {parent} link", rate), 1.0))
            self.down.append((resource(f"{parent} to {name} link", rate), 1.0))
        self.packet_nbytes = packets.payload + packets.overhead
        self._window_nbytes = float(packets.window * self.packet_nbytes)
        for name, switch in tree.switches.items():
            children = tree.children(name)
            copies = 0 if tree.multicasts else children
            if switch.rate:
                card = switch.rate * constants.network
                into, out = (resource(f"{name} {way}", card) for way in ("in", "out"))
                self.up += [(into, float(children)), (out, 1.0)]
                self.down += [(into, float(copies > 0)), (out, float(copies))]
            if switch.packet_rate:
                handled = resource(f"{name} packets", switch.packet_rate)
                copied = (copies + 1) / self.packet_nbytes if copies else 0.0
                self.up += handling(handled, (children + 1) / self.packet_nbytes, machine)
                self.down += handling(handled, copied, machine)

    def on_wire(self, nbytes: float) -> float:
        """Return the bytes on the wire, including packet headers, for `nbytes` of data."""
        return float(self.packets_of(nbytes) * self.packet_nbytes)

    def packets_of(self, nbytes: float) -> int:
        """Return the number of packets for `nbytes` of data."""
        return int(-(-nbytes // self.packets.payload))

    def latency(self, rate: float) -> float:
        """Return the one-way latency in seconds over links of `rate` bytes/s. A switch that is a
        machine adds the time for receiving a batch of packets."""
        machines = sum(bool(switch.rate) for switch in self.tree.switches.values())
        batch = BATCH * self.packet_nbytes / rate
        return self.tree.latency + min(machines, self.tree.levels) * batch

    def beat_s(self, rate: float) -> float:
        """Return the seconds from one heartbeat (an acknowledgement of packets) to the next: the
        time for a quarter of a window, at most 10 ms, but at least the time for one packet. `rate`:
        the rate of the packets in bytes/s."""
        return max(min(self._window_nbytes / 4 / rate, BEAT_S), self.packet_nbytes / rate)

    def most(self, rate: float) -> float:
        """Return the highest rate, in bytes/s on the wire, at which packets can be sent. At most a
        window of packets may be unacknowledged. `rate`: the rate of the network cards in
        bytes/s."""
        trip = 2 * self.latency(rate)
        by_time = self._window_nbytes / (trip + BEAT_S)
        return max(by_time, 0.75 * self._window_nbytes / trip if trip else float("inf"))


def handling(packets: Resource, count: float, machine: Resource | None, times: float = 1.0) -> Uses:
    """Return what `count` packets use at a host or switch that handles `packets`: its own
    processors, and those of the `machine`, on which `times` such hosts run."""
    shared = [] if machine is None else [(machine, count * times / packets.capacity)]
    return [(packets, count), *shared]


@dataclass(frozen=True)
class FlowGroup:
    """The data-parallel ranks of one pipeline stage, which all have the same parameters.

    Attributes:
        site: The resources of the host of the ranks.
        server: The resources of the server that keeps the stage's state; None if no server keeps
            the state.
        hosts: Number of hosts of the group.
        ranks: Number of ranks on each host; if hosts differ, the number on the host with the most
            ranks.
        tp: Number of devices that each rank has on its host.
        replicas: Number of ranks of the group on all hosts together.
        beside: Number of ranks of the stage on the site's host. If ranks are simulated separately,
            the ranks of other FlowGroups are included.
        server_share: The fraction of the server's work for the stage that the tasks of this group
            simulate; less than 1 if ranks are simulated separately.
        touch: CPU seconds per byte that enters or leaves a host.
        rates: The usable rate of each host's network card in bytes/s.
        switches: The resources of the switches that sum the gradients of the hosts; None if no
            switch sums.
        machine: The processors that all hosts and switches share; None if each has its own.
    """

    site: Site
    server: Site | None
    hosts: int
    ranks: int
    tp: int
    replicas: int
    beside: int
    server_share: float = 1.0
    touch: float = 0.0
    rates: tuple[float, ...] = ()
    switches: SwitchResources | None = None
    machine: Resource | None = None

    @cached_property
    def to_device(self) -> Uses:
        return [(self.site.to_device, 1.0), (self.site.memory, float(self.ranks * self.tp))]

    @cached_property
    def from_device(self) -> Uses:
        return [(self.site.from_device, 1.0), (self.site.memory, float(self.ranks * self.tp))]

    @property
    def card(self) -> float:
        """The number of bytes that one task of this group sends over the host's network card, for
        each byte of a device's data. The host sends the data of all its ranks only once."""
        return self.tp * self.ranks / self.beside

    def at_server(self, *, once: bool) -> float:
        """Return the number of bytes that cross the server's network card in one task, for each
        byte that each host sends or receives. If `once` is true, switches sum or copy the bytes, so
        a single byte crosses the card for all hosts together."""
        return self.server_share * (1.0 if once else float(self.hosts))

    @property
    def computing(self) -> float:
        """The number of hosts whose computing takes time of the same CPUs."""
        return self.at_server(once=False) if self.machine else 1.0

    def inside(self, weight: float) -> Uses:
        """Return the resource uses of a byte that the ranks on this host exchange with each other.
        `weight`: the amount of the resource per byte."""
        return [(self.site.fabric, weight)] if self.beside > 1 else []

    def touched(self, crossings: float) -> Uses:
        """Return the use of the host's CPUs for a byte that enters or leaves the host `crossings`
        times. Devices other than CPUs use no CPU time."""
        if self.site.cores is None or not self.touch:
            return []
        return [(self.site.cores, crossings * self.touch)]
