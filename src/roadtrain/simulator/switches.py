"""What a packet takes of switches that sum, and of the links between them.

Up, each link carries one sum; down, one copy of the parameters. A switch of the network has its
packets in its way; a machine beside it (`rate`) gets each child's packets, and sends one copy to
each child, over its own card. Copies that the network makes (`multicasts`) do not come to it.
"""

from __future__ import annotations

from collections.abc import Callable

from roadtrain.config.plan import SwitchPackets
from roadtrain.config.switch_tree import SwitchTree
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Resource, Uses

BATCH = 44  # packets of one run (64 KiB): a machine that sums has them all before it sends them on
BEAT_S = 0.01  # between two heartbeats while packets come, at most


class SwitchResources:
    """Of the switches of one tree, each made once. `packets`: as the plan has them."""

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
        nbytes = packets.payload + packets.overhead
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
                self.up.append((handled, (children + 1) / nbytes))
                self.down.append((handled, (copies + 1) / nbytes if copies else 0.0))

    def on_wire(self, nbytes: float) -> float:
        """Bytes that links carry for so many of data: whole packets."""
        nbytes_of_one = self.packets.payload + self.packets.overhead
        return float(self.packets_of(nbytes) * nbytes_of_one)

    def packets_of(self, nbytes: float) -> int:
        """Packets of so many bytes of data."""
        return int(-(-nbytes // self.packets.payload))

    def latency(self, rate: float) -> float:
        """Seconds of one way, at links of `rate` bytes a second: machines pass on whole batches."""
        machines = sum(bool(switch.rate) for switch in self.tree.switches.values())
        batch = BATCH * (self.packets.payload + self.packets.overhead) / rate
        return self.tree.latency + min(machines, self.tree.levels) * batch

    def beat_s(self, rate: float) -> float:
        """Seconds until what came is told: after a quarter of a window, at most a moment, but never
        before a packet has come."""
        nbytes = self.packets.payload + self.packets.overhead
        return max(min(self._window_nbytes / 4 / rate, BEAT_S), nbytes / rate)

    def most(self, rate: float) -> float:
        """Bytes a second on the wire that a window of packets allows: it opens again when a
        heartbeat has told that they came."""
        trip = 2 * self.latency(rate)
        by_time = self._window_nbytes / (trip + BEAT_S)
        return max(by_time, 0.75 * self._window_nbytes / trip if trip else float("inf"))

    @property
    def _window_nbytes(self) -> float:
        return float(self.packets.window * (self.packets.payload + self.packets.overhead))
