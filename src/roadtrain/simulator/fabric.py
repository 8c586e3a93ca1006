"""Compute the costs of the transfers, updates, reads and writes of a step on a cluster, for one
block at a time. The placement decides which resources each of them uses.

Equal hosts are simulated as one *site* with a multiplicity `hosts`: each byte that the site sends
to a server counts `hosts` times at the server. The traffic of collectives is computed in closed
form. With n ranks and M bytes, each direction of a network card carries 2 (n - 1) / n M bytes for a
ring all-reduce, (n - 1) / n M for an all-gather or a reduce-scatter, M for a sum in switches, and
(1 + (n - 2) x) M for the summation service, if each of the n hosts sums the fraction x of the data
(sums/protocol/shares.py). A server's card carries n M. A transfer uses all resources on its path at
once, so the slowest resource determines its rate. The latency of a collective is the sum of the
latencies of all steps of its algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roadtrain.config.cluster import Cluster, Device, Host
from roadtrain.config.models import BlockShape
from roadtrain.config.plan_file import Placement, Plan
from roadtrain.config.switch_tree import switch_tree
from roadtrain.errors import ConfigError
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Cost, Uses
from roadtrain.simulator.fan_in_costs import FanInCosts
from roadtrain.simulator.simulated_sums import SimulatedSums
from roadtrain.simulator.site import FlowGroup

INSIDE_S = 2e-6  # seconds of latency per step of a collective between devices of a host
# bytes that AdamW moves per parameter: 2 for the gradient, 24 for reading and writing three arrays,
# and 2 for the copy of the parameter
UPDATE_BYTES = 28.0


def check_placement(place: Placement, cluster: Cluster, hosts: Sequence[Host]) -> None:
    """Raise ConfigError if the cluster lacks a host, a network card, SSDs or switches that the
    placement needs. `hosts`: the hosts that compute."""
    if place.served and not cluster.spares:
        raise ConfigError(
            f"placement {place.name} needs a host without devices, but the cluster has none",
            hint="add a host without devices, or choose a placement on the workers' hosts",
        )
    rests = "ssd" in (place.parameters, place.state)
    if place.sum == "separate" and not any(host.nics for host in cluster.spares):
        raise ConfigError(
            f"placement {place.name} sums on hosts without devices, but none has a network card",
            hint="add a host with a network card and no devices, or choose placement `summation`",
        )
    if place.sum == "switch":
        _check_switches(place, cluster, hosts)
    for host in {host.name: host for host in hosts}.values():
        if place.sum == "relay" and not any(nic.relay for nic in host.nics):
            raise ConfigError(
                f"placement {place.name} needs a relay on a network card of each host, but host"
                f" {host.name} has no card with a processor",
                hint="set `relay = true` for a card of the host, or use placement `zero-offload`",
            )
        if rests and not host.ssds:
            raise ConfigError(
                f"placement {place.name} keeps data on SSDs, but host {host.name} has no SSDs",
                hint="add `ssds` to the host, or choose a placement without SSDs",
            )
        if place.update == "ssd" and not all(s.updates for s in host.ssds):
            raise ConfigError(
                f"placement {place.name} updates in SSDs, but SSDs of {host.name} cannot compute",
                hint="set `updates` (bytes/s) of SSDs with processors, or choose placement `files`",
            )
    resting = [*cluster.spares[:1]] if place.served else []
    for host in [*hosts] if rests else resting:
        if not all(ssd.capacity for ssd in host.ssds):
            raise ConfigError(
                f"placement {place.name} keeps data on SSDs, but {host.name} states no `capacity`",
                hint="set the `capacity` of these `ssds` in the cluster file",
            )


def _check_switches(place: Placement, cluster: Cluster, hosts: Sequence[Host]) -> None:
    try:
        switch_tree(cluster, hosts, cluster.spares[0] if place.served else None)
    except ConfigError as error:
        other = "server" if place.served else "ddp"
        raise ConfigError(
            f"placement {place.name} cannot sum in switches: {str(error).splitlines()[0]}",
            hint=f"{error.hint}; or choose placement `{other}`",
        ) from error


class Fabric:
    """The costs of the transfers, updates, reads and writes of one stage's workers and of the
    server. In all methods, `params` is the number of a block's parameters divided by tp. A method
    returns the cost for one device, or the cost for one host if its docstring says so.

    Attributes:
        fan_in: The costs of packets through switches that sum; None if no switch sums.
        sums: The simulated summation service; None if the placement does not use it.
        gathers: Whether each device updates only a part of the parameters, so that the next forward
            has to gather all parts.
        on_files: Whether the state is on SSDs.
        depth: The maximum number of reads that the SSDs process at the same time, which is also the
            maximum number of writes.
    """

    def __init__(
        self, cluster: Cluster, plan: Plan, group: FlowGroup, constants: Constants
    ) -> None:
        self.plan, self.group, self.constants = plan, group, constants
        self.site, self.server = group.site, group.server
        self.fan_in = None if group.switches is None else FanInCosts(plan, group, group.switches)
        self.sums: SimulatedSums | None = None
        if plan.placement.sum in ("spares", "separate") and group.hosts > 1:
            extra: list[float] = []
            for host in cluster.spares:
                if host.nics:
                    rate = cluster.common([self.site.host, host])[1].total * constants.network
                    extra += [rate] * host.count
            separate = plan.placement.sum == "separate"
            self.sums = SimulatedSums(group.rates, extra, separate=separate)
        place = plan.placement
        split = place.parameters == "device" and place.state == "split"
        self.gathers = split and plan.gather == "forward" and group.replicas > 1
        state_site, own = group.site, group.tp * group.ranks / group.replicas
        if place.state == "server":
            assert group.server is not None
            state_site, own = group.server, group.server_share * group.tp
        self._state_site = state_site  # the host that keeps the state
        # the number of parameters whose state is on one host, divided by the number of parameters
        # on one device
        self._own = own
        self.on_files = place.state == "ssd" or (
            place.state == "server" and bool(state_site.host.ssds)
        )
        self.depth = max((ssd.depth for ssd in state_site.host.ssds), default=1)

    # the network

    def _network(self, ring: float, exchanged: float = 0.0) -> Uses:
        """Return the resources that one byte of a collective uses, in both directions. `ring`: the
        fraction of the byte that each device sends to the next device. `exchanged`: the fraction
        that each device sends to all other devices together."""
        group, site, per_device = self.group, self.site, ring + exchanged
        inside = [(site.fabric, per_device)] if group.ranks > 1 else []
        if group.hosts == 1:
            return inside
        weight = per_device * group.tp
        return [(site.out, weight), (site.into, weight), *inside]

    def _ring(self, passes: float, exchanges: float = 0.0) -> tuple[Uses, float]:
        """Return the resource uses per byte, and the latency in seconds, of a collective that
        passes data around a ring of all ranks `passes` times. `exchanges`: the number of these
        passes in which ranks send data directly to each other if CPUs run the model."""
        n, hosts = self.group.replicas, self.group.hosts
        if n == 1:
            return [], 0.0
        if self.site.cores is None:
            exchanges = 0.0
        # number of steps of a pass between hosts, and inside hosts
        steps = (hosts if hosts > 1 else 0), n - (hosts if hosts > 1 else 1)
        each = (n - 1) / n
        return self._network((passes - exchanges) * each, exchanges * each), passes * (
            steps[0] * self.site.latency + steps[1] * INSIDE_S
        )

    def tensor(self, nbytes: float) -> float:
        """Return the seconds for which a layer's forward or backward waits while the
        tensor-parallel ranks sum `nbytes` of activations twice. Time that overlaps with computing
        is not included."""
        t, site = self.plan.parallelism.tp, self.site
        if t == 1:
            return 0.0
        out = t > self.group.tp
        rate = min(site.fabric.capacity, site.out.capacity) if out else site.fabric.capacity
        steps = 2 * (t - 1) * INSIDE_S + out * 2 * (t // self.group.tp - 1) * site.latency
        return 2 * (2 * (t - 1) / t * nbytes / rate + steps) * (1 - self.plan.framework.hidden)

    def _side_by_side(self, ranks: int) -> tuple[float, float]:
        """Return the rate in bytes/s and the latency in seconds of transfers between devices of
        `ranks` consecutive ranks."""
        if ranks <= self.group.ranks:
            return self.site.fabric.capacity, INSIDE_S
        devices = self.group.ranks * self.group.tp
        return min(self.site.fabric.capacity, self.site.out.capacity / devices), self.site.latency

    def context(self, nbytes: float) -> float:
        """Return the seconds in which context-parallel ranks pass keys and values around a ring.
        `nbytes`: the bytes of keys and values on each device."""
        c = self.plan.parallelism.cp
        rate, latency = self._side_by_side(c)
        return (c - 1) * (nbytes / rate + latency)

    def experts(self, nbytes: float) -> float:
        """Return the seconds for sending tokens to their experts and the results back. `nbytes`:
        the bytes of the tokens on each device."""
        e = self.plan.parallelism.ep
        rate, latency = self._side_by_side(e)
        return 2 * (e - 1) * (nbytes / e / rate + latency)

    # actions

    def serve(self, params: float) -> Cost:
        """Cost of sending parameters from the server to every device. If the server sends through
        switches that sum, the result excludes the cost of the packets."""
        if self.fan_in is not None and self.server is not None:
            return self.fan_in.copy_out(params)
        return self.answer(params)

    def answer(self, params: float, kept: bool = False) -> Cost:
        """Cost of moving parameters to every device. If `kept` is true, the parameters are already
        in the memory of each host."""
        place, group = self.plan.placement, self.group
        nbytes = params * self.plan.sizes.parameter_bytes
        if place.parameters == "device":
            return Cost(nbytes, *self._ring(1)) if self.gathers else Cost(0, [])
        if kept:
            return Cost(nbytes, list(group.to_device))
        if place.parameters == "server":
            if self.fan_in is not None:
                return self.fan_in.parameters(params)
            assert self.server is not None
            uses = [
                (self.server.out, group.at_server(once=False) * group.tp),
                (self.server.memory, group.server_share * group.tp),
                (self.site.into, group.card),
                *group.to_device,
                *group.inside(1.0),
            ]
            return Cost(nbytes, uses, self.site.latency)
        uses, latency = self._ring(1)
        if place.parameters == "split":
            return Cost(nbytes, uses, latency)
        # the fraction of a block that each rank keeps in the memory of its host
        own = 1.0 / group.replicas
        # the network card only reads this fraction from memory here; it later passes the whole
        # block to the device (`kept`)
        if place.sum == "relay":
            memory = (self.site.memory, own * group.ranks * group.tp)
            return Cost(nbytes, [*uses, memory], latency)
        if place.parameters == "ssd":
            uses = uses + [(r, w * own * group.ranks * group.tp) for r, w in self.site.reads()]
        if group.hosts > 1:
            # without a processor on the card, the device copies its part from the host and sends it
            # to the network, so the part crosses PCIe twice
            copies = [(self.site.from_device, own), (self.site.to_device, 1.0)]
        else:
            copies = [(resource, weight * own) for resource, weight in group.to_device]
        return Cost(nbytes, [*uses, *copies], latency)

    def push(self, params: float) -> Cost:
        """Cost of summing a block's gradient, including the transfer from every device and to the
        memory that holds the sum."""
        plan, place, group, site = self.plan, self.plan.placement, self.group, self.site
        nbytes, n = params * plan.sizes.gradient_bytes, group.replicas
        if plan.keep is not None:
            nbytes = params * plan.sizes.held_bytes * plan.sent_share
        if place.sum == "ring":
            back = 0.0
            if place.parameters == "device" and not self.gathers:
                back = plan.sizes.parameter_bytes / plan.sizes.gradient_bytes
            whole = place.state == "device"  # true: an all-reduce; false: a reduce-scatter
            uses, latency = self._ring(2) if whole else self._ring(1 + back, 1)
            if place.update in ("host", "ssd"):
                uses = uses + [(r, weight / n) for r, weight in group.from_device]
            return Cost(nbytes, uses, latency)
        if place.sum == "relay":
            uses, latency = self._ring(1)
            return Cost(nbytes, [*uses, *group.from_device], latency)
        if place.sum in ("spares", "separate"):
            if self.sums is None:
                return Cost(nbytes, self._ring(2)[0])
            weight, here = self.sums.exchange * group.card, group.beside
            sums = [(site.sums, group.card)] if place.sum == "spares" else []
            copies = [(site.from_device, 1.0 / here), (site.to_device, 1.0 / here)]
            uses = [(site.out, weight), (site.into, weight), *copies]
            uses += [*group.inside(2 * (here - 1) / here), *sums]
            return Cost(nbytes, uses, 2 * site.latency)
        if self.fan_in is not None:
            served = self.server is not None
            return self.fan_in.sums(params) if served else self.fan_in.exchanged(params)
        assert self.server is not None
        there = group.at_server(once=False) * group.tp
        uses = [(site.out, group.card), *group.inside(1.0), *group.from_device]
        uses += [(self.server.into, there), (self.server.memory, there)]
        uses += [(self.server.sums, there)] if group.hosts > 1 else []
        return Cost(nbytes, uses, site.latency)

    def all_to_all(self, nbytes: float) -> Cost:
        """Cost of an all-to-all that sends rows of embedding tables to the devices that need them.
        `nbytes`: the bytes of the rows that one device needs for its share of the batch."""
        n = self.group.replicas
        uses = self._network(0.0, (n - 1) / n) if n > 1 else []
        return Cost(nbytes, uses, (self.group.hosts - 1) * self.site.latency)

    def hold(self, params: float) -> Cost:
        """Cost of storing one host's gradient on SSDs until the update; zero if the gradient stays
        in memory."""
        place = self.plan.placement
        if place.gradients != "ssd":
            return Cost(0, [])
        nbytes = params * self._own * self.plan.sizes.held_bytes * self.plan.sent_share
        return Cost(nbytes, self.site.writes())

    def read(self, params: float) -> Cost:
        """Cost of reading the state, and the gradient if it is on SSDs, from the SSDs for an
        update."""
        place, nbytes = self.plan.placement, self.plan.sizes.state_bytes
        if place.gradients == "ssd":
            nbytes += self.plan.sizes.held_bytes * self.plan.sent_share
        uses = self._state_site.reads(beside=place.update == "ssd")
        return Cost(params * self._own * nbytes, uses)

    def update(self, params: float) -> Cost:
        place, site = self.plan.placement, self._state_site
        share = self._own
        if place.update == "device":
            share = 1.0 if place.state == "device" else 1.0 / self.group.replicas
            if site.cores is None:
                return Cost(params * share * UPDATE_BYTES, [(site.device_memory, 1.0)])
            # CPUs update the parameters of all devices of the host
            share *= self.group.ranks * self.group.tp
        if place.update == "ssd":
            sizes = self.plan.sizes
            nbytes = params * self._own * (sizes.state_bytes + sizes.held_bytes)
            return Cost(nbytes, [(site.beside, 1.0)])
        nbytes = params * share * UPDATE_BYTES
        cores = site.cores or self.group.machine
        busy = [] if cores is None else [(cores, 1.0 / site.updates.capacity)]
        return Cost(nbytes, [(site.updates, 1.0), (site.memory, 1.0), *busy])

    def upstream(self, params: float) -> Cost:
        """Cost of moving updated parameters from the processor in an SSD to host memory; zero if
        the SSDs do not update parameters."""
        if self.plan.placement.update != "ssd":
            return Cost(0, [])
        return Cost(params * self._own * self.plan.sizes.upstream_bytes, self.site.reads())

    def write(self, params: float) -> Cost:
        place = self.plan.placement
        copy = self.plan.sizes.parameter_bytes if place.parameters in ("ssd", "server") else 0.0
        nbytes = params * self._own * (self.plan.sizes.state_bytes + copy)
        return Cost(nbytes, self._state_site.writes(beside=place.update == "ssd"))

    def public(self, params: float) -> Cost:
        """Cost of reading parameters from files on SSDs into memory."""
        nbytes = params * self._own * self.plan.sizes.parameter_bytes
        return Cost(nbytes, self._state_site.reads())

    def weights_share(self, params: float) -> float:
        """The fraction of the parameters that memory holds in addition to the copy in files."""
        if self.plan.placement.parameters != "server" or not self.on_files:
            return self.plan.memory.public
        nbytes = params * self.group.tp * self.plan.sizes.parameter_bytes
        return nbytes <= self._state_site.host.memory / 2

    def tax(self, cost: Cost) -> float:
        """Seconds in which devices cannot compute because they work on a transfer."""
        place = self.plan.placement
        alone = self.group.replicas == 1 or place.served
        if alone or not self.constants.tax or place.sum in ("relay", "server"):
            return 0.0
        network = [r.capacity / w for r, w in cost.uses if r in (self.site.out, self.site.fabric)]
        return self.constants.tax * cost.work / min(network) if network else 0.0


@dataclass(frozen=True)
class BlockTimes:
    """The seconds of each block's forward on a device, split into four parts: one sequence for each
    part, with one number per block."""

    forward: Sequence[float]  # the device computes
    tensor: Sequence[float]  # tensor-parallel ranks sum activations
    routed: Sequence[float]  # tokens are sent to their experts and back
    # keys and values are passed around, and attention has already been computed
    ring: Sequence[float]


def block_times(fabric: Fabric, blocks: Sequence[BlockShape], device: Device) -> BlockTimes:
    plan, constants, parallelism = fabric.plan, fabric.constants, fabric.plan.parallelism
    size, tp = plan.micro_batch / parallelism.cp, parallelism.tp
    split = tp * parallelism.cp
    forward = [constants.forward_of(block, plan, device) for block in blocks]
    scores = [constants.scores(block, plan.micro_batch, split, device) for block in blocks]
    rings = [fabric.context(block.kv * size / tp) for block in blocks]
    return BlockTimes(
        forward,
        [fabric.tensor(block.input * size) if "." in block.name else 0.0 for block in blocks],
        [fabric.experts(block.routed * size / tp) for block in blocks],
        [max(0.0, ring - hidden) for ring, hidden in zip(rings, scores)],
    )
