"""What an action of the flow takes of a cluster: the traffic of each placement, a byte of a block
at a time.

Hosts that do the same are one *site* with a multiplicity: what each of `hosts` sites sends to one
server weighs `hosts` times there. Collectives are closed-form traffic, with n ranks and M bytes, in
each direction of a card: ring all-reduce 2 (n - 1) / n M, all-gather and reduce-scatter (n - 1) / n
M, a sum in switches M (fan_in_costs.py), the summation service (1 + (n - 2) x) M with x from
sums/protocol/shares.py, servers n M. A transfer takes all that it crosses at once (it is cut into
pieces that follow each other), so its slowest part sets its pace. `latency` counts the steps of the
algorithm.
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
from roadtrain.simulator.site import FlowGroup, Site

INSIDE_S = 2e-6  # latency of a step of a collective between devices of a host
# that one pass of AdamW moves for a parameter: gradient 2, three arrays in and out 24, copy 2
UPDATE_BYTES = 28.0


def check_placement(place: Placement, cluster: Cluster, hosts: Sequence[Host]) -> None:
    """Raises ConfigError where the placement needs what the cluster, or one of the `hosts` that
    compute, has not."""
    if place.served and not cluster.spares:
        raise ConfigError(
            f"placement {place.name} needs a host without devices, the cluster has none",
            hint="add one to the cluster, or choose a placement on the workers' hosts",
        )
    rests = "ssd" in (place.parameters, place.state)
    if place.sum == "separate" and not any(host.nics for host in cluster.spares):
        raise ConfigError(
            f"placement {place.name} sums on hosts without devices, the cluster has none"
            " with a card",
            hint="add a host without devices, or choose placement summation",
        )
    if place.sum == "switch":
        _check_switches(place, cluster, hosts)
    for host in {host.name: host for host in hosts}.values():
        if place.sum == "relay" and not any(nic.relay for nic in host.nics):
            raise ConfigError(
                f"placement {place.name} has a relay on each host's card, host {host.name} has no"
                " card with a processor",
                hint="give a card `relay = true`, or choose placement zero-offload",
            )
        if rests and not host.ssds:
            raise ConfigError(
                f"placement {place.name} rests on SSDs, host {host.name} has none",
                hint="give it `ssds`, or choose a placement in memory",
            )
        if place.update == "ssd" and not all(s.updates for s in host.ssds):
            raise ConfigError(
                f"placement {place.name} updates beside the SSDs, those of host {host.name} have no"
                " processor",
                hint="give them `updates`, or choose placement files",
            )
    resting = [*cluster.spares[:1]] if place.served else []
    for host in [*hosts] if rests else resting:
        if not all(ssd.capacity for ssd in host.ssds):
            raise ConfigError(
                f"placement {place.name} rests on SSDs, those of host {host.name} have no"
                " `capacity`",
                hint="give it in the cluster file",
            )


def _check_switches(place: Placement, cluster: Cluster, hosts: Sequence[Host]) -> None:
    try:
        switch_tree(cluster, hosts, cluster.spares[0] if place.served else None)
    except ConfigError as error:
        other = "server" if place.served else "ddp"
        raise ConfigError(
            f"placement {place.name} sums in switches: {str(error).splitlines()[0]}",
            hint=f"{error.hint}; or choose placement {other}",
        ) from error


class Fabric:
    """`plan`'s costs on one stage's group, the server (if any) and the spare hosts. All sizes are
    in parameters of a block that one device has (1 / tp of it); costs are of one device, or of one
    host where they say so.

    Attributes:
        fan_in: What the packets through switches that sum cost.
        sums: Where reducers on several hosts sum.
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

    # the network

    def _network(self, ring: float, exchanged: float = 0.0) -> Uses:
        """Uses of a byte of which each device passes `ring` on to the next one, and sends
        `exchanged` to the others, each its part; both ways. Here both cross a host's card once for
        all its ranks."""
        group, site, per_device = self.group, self.site, ring + exchanged
        inside = [(site.fabric, per_device)] if group.ranks > 1 else []
        if group.hosts == 1:
            return inside
        weight = per_device * group.tp
        return [(site.out, weight), (site.into, weight), *inside]

    @property
    def gathers(self) -> bool:
        """Whether parameters that the devices updated in parts come together during the forward."""
        place = self.plan.placement
        split = place.parameters == "device" and place.state == "split"
        return split and self.plan.gather == "forward" and self.group.replicas > 1

    def _ring(self, passes: float, exchanges: float = 0.0) -> tuple[Uses, float]:
        """Uses and latency of a byte that goes round so often. `exchanges`: of these, those in
        which processors send each part straight to who needs it (stages/data_group.py)."""
        n, hosts = self.group.replicas, self.group.hosts
        if n == 1:
            return [], 0.0
        if self.site.cores is None:
            exchanges = 0.0
        # between hosts, inside one
        steps = (hosts if hosts > 1 else 0), n - (hosts if hosts > 1 else 1)
        each = (n - 1) / n
        return self._network((passes - exchanges) * each, exchanges * each), passes * (
            steps[0] * self.site.latency + steps[1] * INSIDE_S
        )

    def tensor(self, nbytes: float) -> float:
        """Seconds of a layer's pass in which its tensor-parallel ranks add activations of
        `nbytes` up, twice; but for the plan's share, nothing hides that. A ring that leaves the
        host has all of its cards."""
        t, site = self.plan.parallelism.tp, self.site
        if t == 1:
            return 0.0
        out = t > self.group.tp
        rate = min(site.fabric.capacity, site.out.capacity) if out else site.fabric.capacity
        steps = 2 * (t - 1) * INSIDE_S + out * 2 * (t // self.group.tp - 1) * site.latency
        return 2 * (2 * (t - 1) / t * nbytes / rate + steps) * (1 - self.plan.framework.hidden)

    def _side_by_side(self, ranks: int) -> tuple[float, float]:
        """(bytes a second, latency) of a device to others among `ranks` that follow each other
        in the group."""
        if ranks <= self.group.ranks:
            return self.site.fabric.capacity, INSIDE_S
        devices = self.group.ranks * self.group.tp
        return min(self.site.fabric.capacity, self.site.out.capacity / devices), self.site.latency

    def context(self, nbytes: float) -> float:
        """Seconds in which keys and values, a device's own of `nbytes`, go round its
        context-parallel ranks."""
        c = self.plan.parallelism.cp
        rate, latency = self._side_by_side(c)
        return (c - 1) * (nbytes / rate + latency)

    def experts(self, nbytes: float) -> float:
        """Seconds in which a device's tokens of `nbytes` go to their experts, and what these
        give comes back."""
        e = self.plan.parallelism.ep
        rate, latency = self._side_by_side(e)
        return 2 * (e - 1) * (nbytes / e / rate + latency)

    # actions

    def handed(self, params: float) -> Cost:
        """Parameters from a server to whom it answers: to every device, or to the fan-in end that
        stands before it."""
        if self.fan_in is not None and self.server is not None:
            return self.fan_in.handed(params)
        return self.answer(params)

    def answer(self, params: float, kept: bool = False) -> Cost:
        """Parameters to every device. `kept`: they are in this host's memory already."""
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
        own = 1.0 / group.replicas  # of a block, that each device's host memory has for it
        # the card takes it from memory; it gives the whole to the device (`kept`)
        if place.sum == "relay":
            memory = (self.site.memory, own * group.ranks * group.tp)
            return Cost(nbytes, [*uses, memory], latency)
        if place.parameters == "ssd":
            uses = uses + [(r, w * own * group.ranks * group.tp) for r, w in self.site.reads()]
        if group.hosts > 1:
            # without a card that computes, the device fetches its part and gives it to the
            # network: PCIe carries it again
            copies = [(self.site.from_device, own), (self.site.to_device, 1.0)]
        else:
            copies = [(resource, weight * own) for resource, weight in group.to_device]
        return Cost(nbytes, [*uses, *copies], latency)

    def push(self, params: float) -> Cost:
        """A block's gradient from every device to where it is summed and, where it rests in
        memory, to there."""
        plan, place, group, site = self.plan, self.plan.placement, self.group, self.site
        nbytes, n = params * plan.sizes.gradient_bytes, group.replicas
        if plan.keep is not None:
            nbytes = params * plan.sizes.held_bytes * plan.travels
        if place.sum == "ring":
            back = 0.0
            if place.parameters == "device" and not self.gathers:
                back = plan.sizes.parameter_bytes / plan.sizes.gradient_bytes
            whole = place.state == "device"  # an all-reduce; else each gets its part of the sum
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
        """All-to-all of rows of tables that are spread over all devices; of one device's share
        of the batch."""
        n = self.group.replicas
        uses = self._network(0.0, (n - 1) / n) if n > 1 else []
        return Cost(nbytes, uses, (self.group.hosts - 1) * self.site.latency)

    @property
    def _own(self) -> float:
        """Of a device's block, the part that one host's site holds the state of, all its
        devices together."""
        group = self.group
        if self.plan.placement.state == "server":
            return group.server_share * group.tp
        return group.tp * group.ranks / group.replicas

    def hold(self, params: float) -> Cost:
        """The gradient to where it rests until the update; of one host."""
        place = self.plan.placement
        if place.gradients != "ssd":
            return Cost(0, [])
        nbytes = params * self._own * self.plan.sizes.held_bytes * self.plan.travels
        return Cost(nbytes, self.site.writes())

    def _state_site(self) -> Site:
        if self.plan.placement.state == "server":
            assert self.server is not None
            return self.server
        return self.site

    @property
    def on_files(self) -> bool:
        state = self.plan.placement.state
        return state == "ssd" or (state == "server" and bool(self._state_site().host.ssds))

    def read(self, params: float) -> Cost:
        """State, and a gradient that rests on SSDs, to where the update runs."""
        place, nbytes = self.plan.placement, self.plan.sizes.state_bytes
        if place.gradients == "ssd":
            nbytes += self.plan.sizes.held_bytes * self.plan.travels
        uses = self._state_site().reads(beside=place.update == "ssd")
        return Cost(params * self._own * nbytes, uses)

    def update(self, params: float) -> Cost:
        place, site = self.plan.placement, self._state_site()
        share = self._own
        if place.update == "device":
            share = 1.0 if place.state == "device" else 1.0 / self.group.replicas
            if site.cores is None:
                return Cost(params * share * UPDATE_BYTES, [(site.device_memory, 1.0)])
            share *= self.group.ranks * self.group.tp  # the host's processors do that of all
        if place.update == "ssd":
            sizes = self.plan.sizes
            nbytes = params * self._own * (sizes.state_bytes + sizes.held_bytes)
            return Cost(nbytes, [(site.beside, 1.0)])
        nbytes = params * share * UPDATE_BYTES
        busy = [] if site.cores is None else [(site.cores, 1.0 / site.updates.capacity)]
        return Cost(nbytes, [(site.updates, 1.0), (site.memory, 1.0), *busy])

    def upstream(self, params: float) -> Cost:
        """Updated parameters from a processor beside an SSD to the host's memory."""
        if self.plan.placement.update != "ssd":
            return Cost(0, [])
        return Cost(params * self._own * self.plan.sizes.upstream_bytes, self.site.reads())

    def write(self, params: float) -> Cost:
        place = self.plan.placement
        copy = self.plan.sizes.parameter_bytes if place.parameters in ("ssd", "server") else 0.0
        nbytes = params * self._own * (self.plan.sizes.state_bytes + copy)
        return Cost(nbytes, self._state_site().writes(beside=place.update == "ssd"))

    def public(self, params: float) -> Cost:
        """Parameters that rest on the server's files, to its memory."""
        nbytes = params * self._own * self.plan.sizes.parameter_bytes
        return Cost(nbytes, self._state_site().reads())

    @property
    def depth(self) -> int:
        """How many reads, and how many writes, the SSDs do at once."""
        return max((ssd.depth for ssd in self._state_site().host.ssds), default=1)

    def weights_share(self, params: float) -> float:
        """Of the parameters of state on files, what memory keeps too; a server keeps all in
        half of it, or none."""
        if self.plan.placement.parameters != "server" or not self.on_files:
            return self.plan.memory.public
        nbytes = params * self.group.tp * self.plan.sizes.parameter_bytes
        return nbytes <= self._state_site().host.memory / 2

    def tax(self, cost: Cost) -> float:
        """Seconds that the devices do not compute because they communicate."""
        place = self.plan.placement
        alone = self.group.replicas == 1 or place.served
        if alone or not self.constants.tax or place.sum in ("relay", "server"):
            return 0.0
        network = [r.capacity / w for r, w in cost.uses if r in (self.site.out, self.site.fabric)]
        return self.constants.tax * cost.work / min(network) if network else 0.0


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of each block's pass on a device."""

    forward: Sequence[float]  # its own arithmetic
    tensor: Sequence[float]  # tensor-parallel ranks add activations up
    routed: Sequence[float]  # tokens go to their experts and come back
    ring: Sequence[float]  # keys and values go round: what attention does not hide


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
