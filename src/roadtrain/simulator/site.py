"""Resources of a host and of switches that sum, and the ranks of a pipeline stage on such hosts.

Hosts that do the same are one *site* with a multiplicity: what each of `hosts` sites sends to one
server weighs `hosts` times there.
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

BATCH = 44  # packets of one run (64 KiB): a machine that sums has them all before it sends them on
BEAT_S = 0.01  # between two heartbeats while packets come, at most


class Site:
    """The resources of one host of a kind; those of a device are of one device, as all do the
    same."""

    def __init__(
        self,
        engine: Engine,
        host: Host,
        nic: Nic | None,
        constants: Constants,
        name: str,
        resource: Callable[[str, float], Resource] | None = None,
    ) -> None:
        """`resource`: gives what is called so, where sites share it; None: each is its own."""
        if resource is None:

            def resource(what: str, capacity: float) -> Resource:
                return engine.resource(f"{name} {what}", capacity)

        self.host, self.name, self.nic = host, name, nic
        rate = nic.total * constants.network if nic is not None else float("inf")
        self.out, self.into = resource("out", rate), resource("in", rate)
        self.latency = nic.latency if nic is not None else 0.0
        self.memory = resource("memory", host.memory_rate)
        self.updates, self.sums = resource("updates", host.updates), resource("sums", host.sums)
        # where processors compute, they update for a part of their time
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
        """A byte from the SSDs to the host's memory, or to the processors beside them."""
        media = [(self.read, 1.0), (self.mixed, 1.0 / self.read.capacity)]
        return media + ([(self.inside, 1.0)] if beside else [(self.up, 1.0), (self.memory, 1.0)])

    def writes(self, *, beside: bool = False) -> Uses:
        media = [(self.write, 1.0), (self.mixed, 1.0 / self.write.capacity)]
        return media + ([(self.inside, 1.0)] if beside else [(self.down, 1.0), (self.memory, 1.0)])


class SwitchResources:
    """Resources of the switches of one tree, each made once. `packets`: as the plan has them.

    Up, each link carries one sum; down, one copy of the parameters. A switch of the network has its
    packets in its way; a machine beside it (`rate`) gets each child's packets, and sends one copy
    to each child, over its own card. Copies that the network makes do not come to it.
    """

    def __init__(
        self,
        resource: Callable[[str, float], Resource],
        tree: SwitchTree,
        packets: SwitchPackets,
        constants: Constants,
    ) -> None:
        """`resource`: gives what has this name and capacity, made once."""
        self.tree, self.packets = tree, packets
        self.up, self.down = Uses(), Uses()  # of a byte on the wire that every worker sends or gets
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
        """Bytes that links carry for so many of data: whole packets."""
        return float(self.packets_of(nbytes) * self.packet_nbytes)

    def packets_of(self, nbytes: float) -> int:
        """Packets of so many bytes of data."""
        return int(-(-nbytes // self.packets.payload))

    def latency(self, rate: float) -> float:
        """Seconds of one way, at links of `rate` bytes a second: machines pass on whole batches."""
        machines = sum(bool(switch.rate) for switch in self.tree.switches.values())
        batch = BATCH * self.packet_nbytes / rate
        return self.tree.latency + min(machines, self.tree.levels) * batch

    def beat_s(self, rate: float) -> float:
        """Seconds until what came is told: after a quarter of a window, at most a moment, but never
        before a packet has come."""
        return max(min(self._window_nbytes / 4 / rate, BEAT_S), self.packet_nbytes / rate)

    def most(self, rate: float) -> float:
        """Bytes a second on the wire that a window of packets allows: it opens again when a
        heartbeat has told that they came."""
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
        server: With the stage's state, where a server of its own has it.
        hosts: How many there are.
        ranks: On each host, with `tp` devices each there; the most, where hosts have different
            numbers of them.
        replicas: Ranks of the group in all.
        beside: Ranks of the group on this host, those included that costs are not of.
        server_share: Of what the server does once for all hosts, the part of one task.
        touch: Seconds of a host's processors that a byte takes to leave or to enter it.
        rates: Of each host's card.
        switches: That sum what its hosts send.
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
        """How often a byte that a host sends once for all its ranks crosses its card in one
        task."""
        return self.tp * self.ranks / self.beside

    def at_server(self, *, once: bool) -> float:
        """Of a byte that each host sends the server, or gets from it, what crosses the server's
        card for one task. `once`: the switch sums it, or sends it to all."""
        return self.server_share * (1.0 if once else float(self.hosts))

    def inside(self, weight: float) -> Uses:
        """A byte's way between the ranks of this host."""
        return [(self.site.fabric, weight)] if self.beside > 1 else []

    def touched(self, crossings: float) -> Uses:
        """What a byte that leaves or enters the host so often takes of processors that compute."""
        if self.site.cores is None or not self.touch:
            return []
        return [(self.site.cores, crossings * self.touch)]
