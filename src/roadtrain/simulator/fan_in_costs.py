"""Compute the costs of the packet streams of a fan-in. The streams run between one stage's workers
and the stage's server, through a tree of switches.

    down   parameters, to all workers;          the largest exponents of each block
    up     each worker's exponents;             each worker's gradient as integers

A block is a group of gradient elements that share an exponent. Every link carries each of these
streams once (Sun et al. (LuWu), section 3.1). The work of a cost is the number of bytes on the
wire, including packet headers. In all methods, `params` is the number of a chunk's parameters on
one device.
"""

from __future__ import annotations

from collections import defaultdict

from roadtrain.config.plan_file import Plan
from roadtrain.simulator.engine import Cost, Resource, Uses
from roadtrain.simulator.site import FlowGroup, SwitchResources, handling

SUM_BYTES = 4  # bytes of each element of a sum in the server's memory


class FanInCosts:
    """The costs of the fan-in for one stage's group of workers."""

    def __init__(self, plan: Plan, group: FlowGroup, switches: SwitchResources) -> None:
        self.sizes, self.group, self.switches = plan.sizes, group, switches
        self.packets = switches.packets
        # rate in bytes/s of the slower network card: the worker's or the server's
        ends = (group.site, group.server)
        self._rate = rate = min(end.out.capacity for end in ends if end is not None)
        self.latency = switches.latency(rate)  # one-way latency of a packet in seconds
        # seconds from the arrival of a packet until the sender receives the acknowledgement
        self.acknowledged_s = self.latency + switches.beat_s(rate)
        self.message_s = group.site.latency  # one-way latency of a message over TCP in seconds
        # number of bytes that one task adds to the traffic of a link, for each byte of a device's
        # data: switches sum or copy the data, so one byte crosses the link for all workers together
        self._shared_part = group.at_server(once=True) * group.tp

    def gradient_packets(self, params: float) -> int:
        return self.switches.packets_of(params * self.packets.width)

    def exponent_packets(self, params: float) -> int:
        return self.switches.packets_of(self._blocks(params))

    def copy_out(self, params: float) -> Cost:
        """Cost of copying parameters from the server's state to the buffer for sending."""
        return Cost(params * self.sizes.parameter_bytes, self._server_memory(2.0))

    def copy_in(self, params: float) -> Cost:
        """Cost of copying a received sum to the server's state."""
        return Cost(params * SUM_BYTES, self._server_memory(2.0))

    def parameters(self, params: float) -> Cost:
        """Cost of sending parameters from the server to the devices of all workers."""
        group = self.group
        nbytes = params * self.sizes.parameter_bytes
        wire = self.switches.on_wire(nbytes)
        data = nbytes / wire if wire else 0.0
        uses = [*self._path(up=False), *self._server_memory(1.0), *group.inside(data)]
        return self._cost(wire, [*uses, *_times(group.to_device, data)])

    def alone(self, params: float) -> Cost:
        """Cost of sending parameters to one worker over TCP."""
        group, tp = self.group, float(self.group.tp)
        assert group.server is not None
        ends = [(group.server.out, tp), (group.server.memory, tp), (group.site.into, tp)]
        nbytes = params * self.sizes.parameter_bytes
        return Cost(nbytes, [*ends, *group.inside(1.0), *group.to_device], self.message_s)

    def maxima(self, params: float) -> Cost:
        """Cost of sending the largest exponent of each block of elements to all workers."""
        return self._cost(self.switches.on_wire(self._blocks(params)), self._path(up=False))

    def exponents(self, params: float) -> Cost:
        return self._cost(self.switches.on_wire(self._blocks(params)), self._path(up=True))

    def gradients(self, params: float) -> Cost:
        """Cost of sending gradients from each worker's devices to the server's memory, which
        receives the sum in fp32."""
        group, wire = self.group, self.switches.on_wire(params * self.packets.width)
        data = params * self.sizes.gradient_bytes / wire if wire else 0.0
        memory = 1.0 + params * SUM_BYTES / wire if wire else 0.0
        uses = [*self._path(up=True), *self._server_memory(memory)]
        uses += [] if group.server is None else [(group.server.sums, self._shared_part)]
        return self._cost(wire, [*uses, *group.inside(data), *_times(group.from_device, data)])

    def sums(self, params: float) -> Cost:
        """Cost of a complete sum: each worker sends its exponents, receives the largest exponents,
        and sends its gradient."""
        parts = [self.exponents(params), self.maxima(params), self.gradients(params)]
        whole = parts[-1].work
        uses = defaultdict[Resource, float](float)
        for part in parts if whole else ():
            for resource, weight in part.uses if part.work else ():
                uses[resource] += weight * part.work / whole
        return Cost(whole, list(uses.items()), max_rate=parts[-1].max_rate)

    def exchanged(self, params: float) -> Cost:
        """Cost of a complete sum in a placement without a server: the switches send the sum to all
        workers, as integers."""
        group, up = self.group, self.sums(params)
        data = params * self.sizes.gradient_bytes / up.work if up.work else 0.0
        back = self._cost(up.work, [*self._path(up=False), *_times(group.to_device, data)])
        return up._replace(uses=[*up.uses, *back.uses], latency=2 * self.latency)

    def _blocks(self, params: float) -> float:
        """Return the number of bytes of the exponents; 0 if the scale of the integers is fixed."""
        return -(-params // self.packets.block) if self.packets.block else 0.0

    def _cost(self, wire: float, uses: Uses) -> Cost:
        used = [(resource, weight) for resource, weight in uses if weight > 0]
        return Cost(wire, used, max_rate=self.switches.most(self._rate))

    def _path(self, *, up: bool) -> Uses:
        """Return the resources that a byte and its acknowledgement use on the way to the server (if
        `up` is true) or from the server."""
        group, once, beat = self.group, self._shared_part, self._heartbeats()
        card, links = [group.site.out, group.site.into], [self.switches.up, self.switches.down]
        server = [] if group.server is None else [group.server.into, group.server.out]
        if not up:
            card, links, server = card[::-1], links[::-1], server[::-1]
        uses = [(card[0], group.card), (card[1], group.card * beat)]
        uses += [*_times(links[0], once), *_times(links[1], once * beat)]
        uses += zip(server, (once, once * beat))
        workers = group.at_server(once=False)
        for end, weight, times in ((group.site, group.card, workers), (group.server, once, 1.0)):
            if end is not None and end.host.packet_rate:
                count = weight / self.switches.packet_nbytes
                uses += handling(end.packets, count, group.machine, times)
        return uses + group.touched(group.card)

    def _heartbeats(self) -> float:
        """Return the number of bytes of heartbeats that acknowledge one byte of packets."""
        rate = self._rate
        if rate == float("inf") or not self.packets.overhead:
            return 0.0
        return self.packets.overhead / (self.switches.beat_s(rate) * rate)

    def _server_memory(self, crossings: float) -> Uses:
        server = self.group.server
        return [] if server is None else [(server.memory, crossings * self._shared_part)]


def _times(uses: Uses, factor: float) -> Uses:
    return [(resource, weight * factor) for resource, weight in uses]
