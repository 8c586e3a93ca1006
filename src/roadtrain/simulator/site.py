"""The resources of hosts and of summing switches, and the ranks of a pipeline stage on such hosts.

Equal hosts are simulated as one *site* with a multiplicity: what each of `hosts` sites sends to one
server counts `hosts` times there.
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

BATCH = 44  # packets (64 KiB) that a switch on a machine receives before it sends them on
BEAT_S = 0.01  # longest time between two acknowledging heartbeats while packets arrive


class Site:
    """The resources of one host of a kind. Device resources are those of one device, since all do
    the same."""

    def __init__(
        self,
        engine: Engine,
        host: Host,
        nic: Nic | None,
        constants: Constants,
        name: str,
        resource: Callable[[str, float], Resource] | None = None,
    ) -> None:
        """`resource`: returns a resource by name, if sites share it; None: each site has its
        own."""
        if resource is None:

            def resource(what: str, capacity: float) -> Resource:
                return engine.resource(f"{name} {what}", capacity)

        self.host, self.name, self.nic = host, name, nic
        rate = nic.total * constants.network if nic is not None else float("inf")
        self.out, self.into = resource("out", rate), resource("in", rate)
        self.latency = nic.latency if nic is not None else 0.0
        self.memory = resource("memory", host.memory_rate)
        self.updates, self.sums = resource("updates", host.updates), resource("sums", host.sums)
        # shared by computing and updates, if CPUs compute
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
        """Return the resource uses of a byte from the SSDs to host memory, or to processors in the
        SSDs."""
        media = [(self.read, 1.0), (self.mixed, 1.0 / self.read.capacity)]
        return media + ([(self.inside, 1.0)] if beside else [(self.up, 1.0), (self.memory, 1.0)])

    def writes(self, *, beside: bool = False) -> Uses:
        media = [(self.write, 1.0), (self.mixed, 1.0 / self.write.capacity)]
        return media + ([(self.inside, 1.0)] if beside else [(self.down, 1.0), (self.memory, 1.0)])


class SwitchResources:
    """The resources of the switches of one tree, each created once. `packets`: the plan's packets.

    Upwards, each link carries one sum; downwards, one copy of the parameters. A switch of the
    network is on the path of its packets. A machine beside it (`rate`) receives each child's
    packets and sends one copy to each child over its own network card, unless the network makes the
    copies.
    """

    def __init__(
        self,
        resource: Callable[[str, float], Resource],
        tree: SwitchTree,
        packets: SwitchPackets,
        constants: Constants,
    ) -> None:
        """`resource`: returns the resource with this name and capacity, creating it once."""
        self.tree, self.packets = tree, packets
        self.up, self.down = Uses(), Uses()  # per byte on the wire that every worker sends or gets
        for name, parent in tree.parents.items():
            rate = tree.links[name].rate * constants.network
            self.up.append((resource(f"{name} to {parent} link", rate), 1.0))
            self.down.append((resource(f"{parent} to {name} link", rate), 1.0))
        self.packet_nbytes = packets.payload + packets.overhead
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
                self.up.append((handled, (children + 1) / self.packet_nbytes))
                self.down.append((handled, (copies + 1) / self.packet_nbytes if copies else 0.0))

    def on_wire(self, nbytes: float) -> float:
        """Return the bytes that links carry for `nbytes` of data, in whole packets."""
        return float(self.packets_of(nbytes) * self.packet_nbytes)

    def packets_of(self, nbytes: float) -> int:
        """Return the number of packets for `nbytes` of data."""
        return int(-(-nbytes // self.packets.payload))

    def latency(self, rate: float) -> float:
        """Return the one-way latency in seconds over links of `rate` bytes a second; switches on
        machines forward whole batches."""
        machines = sum(bool(switch.rate) for switch in self.tree.switches.values())
        batch = BATCH * self.packet_nbytes / rate
        return self.tree.latency + min(machines, self.tree.levels) * batch

    def beat_s(self, rate: float) -> float:
        """Return the seconds until arrival is acknowledged: after a quarter of a window, at most
        BEAT_S, but not before a packet has arrived."""
        return max(min(self._window_nbytes / 4 / rate, BEAT_S), self.packet_nbytes / rate)

    def most(self, rate: float) -> float:
        """Return the bytes a second on the wire that a window of packets allows: it moves on when a
        heartbeat acknowledges packets."""
        trip = 2 * self.latency(rate)
        by_time = self._window_nbytes / (trip + BEAT_S)
        return max(by_time, 0.75 * self._window_nbytes / trip if trip else float("inf"))

    @property
    def _window_nbytes(self) -> float:
        return float(self.packets.window * self.packet_nbytes)


@dataclass(frozen=True)
class FlowGroup:
    """The ranks of one pipeline stage that have the same parameters.

    Attributes:
        server: The server with the stage's state, if there is one.
        hosts: Number of hosts.
        ranks: Ranks on each host (the most, if hosts differ), each with `tp` devices there.
        replicas: Ranks of the group in total.
        beside: Ranks of the group on this host, including those whose costs are not counted.
        server_share: This task's part of work that the server does once for all hosts.
        touch: CPU seconds per byte that enters or leaves a host.
        rates: Rate of each host's network card.
        switches: The switches that sum what the hosts send.
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

    @cached_property
    def to_device(self) -> Uses:
        return [(self.site.to_device, 1.0), (self.site.memory, float(self.ranks * self.tp))]

    @cached_property
    def from_device(self) -> Uses:
        return [(self.site.from_device, 1.0), (self.site.memory, float(self.ranks * self.tp))]

    @property
    def card(self) -> float:
        """How often a byte that a host sends once for all its ranks crosses its network card in one
        task."""
        return self.tp * self.ranks / self.beside

    def at_server(self, *, once: bool) -> float:
        """Return how much of a byte between each host and the server crosses the server's card for
        one task. `once`: a switch sums it, or copies it to all hosts."""
        return self.server_share * (1.0 if once else float(self.hosts))

    def inside(self, weight: float) -> Uses:
        """Return the resource uses of a byte between the ranks of this host."""
        return [(self.site.fabric, weight)] if self.beside > 1 else []

    def touched(self, crossings: float) -> Uses:
        """Return the CPU use of a byte that enters or leaves the host `crossings` times."""
        if self.site.cores is None or not self.touch:
            return []
        return [(self.site.cores, crossings * self.touch)]
