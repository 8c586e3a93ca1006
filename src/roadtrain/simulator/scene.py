"""Lay a plan out on a cluster: choose the hosts of each stage, compute what the plan needs of every
memory, and create the resources, stages and links of a simulated step.

The ranks of a stage are simulated as one rank with a multiplicity, or each rank is simulated
separately (apart.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache

from roadtrain.config.cluster import Cluster, Device, Host, Nic, least_of
from roadtrain.config.models import BlockShape, ModelShape
from roadtrain.config.plan_file import NetworkGroup, Plan
from roadtrain.config.switch_tree import SwitchTree, switch_tree
from roadtrain.errors import ConfigError
from roadtrain.simulator.apart import (
    RankFabric,
    RankOf,
    ReplicaExchange,
    SharedHost,
    SwitchLinks,
)
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Cost, Engine, Resource
from roadtrain.simulator.fabric import Fabric, check_placement
from roadtrain.simulator.memory import cut, needs, shared_needs
from roadtrain.simulator.simulated_fan_in import SimulatedFanIn
from roadtrain.simulator.simulated_server import block_pieces
from roadtrain.simulator.site import FlowGroup, Site, SwitchResources
from roadtrain.simulator.step import SimulatedStage
from roadtrain.stages.protocol.pipeline import BACKWARD, FORWARD, RunBlocks
from roadtrain.switch.options import MOST_CHILDREN


class Scene:
    """A plan that is laid out on a cluster. `needs`: the bytes that the plan needs of every memory.
    If `apart` is true, or if the plan has `widths`, each replica of a stage is simulated
    separately. Raises ConfigError for a plan that is impossible on this cluster."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        model: ModelShape,
        constants: Constants,
        *,
        apart: bool = False,
    ) -> None:
        self.plan, self.cluster, self.model, self.constants = plan, cluster, model, constants
        parallelism = plan.parallelism
        self.apart = apart or bool(parallelism.widths)
        # number of micro-batches of a step: those of all replicas if replicas are simulated
        # separately, otherwise those of one replica
        self.num_microbatches = plan.step_microbatches if self.apart else plan.num_microbatches
        if self.apart:
            parallelism.check_micro_batches(self.num_microbatches)
        hosts = [host for host in cluster.workers for _ in range(host.count)]
        slots = [i for i, host in enumerate(hosts) for _ in range(host.devices)]
        self.hosts, self.slots = hosts, slots
        if parallelism.devices > len(slots):
            raise ConfigError(
                f"{parallelism} needs {parallelism.devices} devices, the cluster has {len(slots)}",
                hint="choose a smaller parallelism, or add hosts",
            )
        self.used_hosts = [hosts[i] for i in dict.fromkeys(slots[: parallelism.devices])]
        first = parallelism.first_ranks
        # for each stage and each of its devices, the index of the device's host
        self.slots_of = [slots[begin:stop] for begin, stop in itertools.pairwise(first)]
        self.groups_of = [[hosts[i] for i in dict.fromkeys(own)] for own in self.slots_of]
        self._check_placements()
        self.cuts = cut(model.blocks, plan)
        self.least = [least_of(group) for group in self.groups_of]
        stages_on = Counter(slot for own in self.slots_of for slot in set(own))
        sharing = [max(stages_on[slot] for slot in own) for own in self.slots_of]
        blocks = [[b for part in parts for b in part] for parts in self.cuts]
        self.needs = [
            *needs(plan, cluster, blocks, self.least, sharing),
            *shared_needs(plan, blocks, hosts, self.slots_of),
        ]

    def _check_placements(self) -> None:
        mine = [(self.plan.placement, self.used_hosts)]
        if self.plan.stage_placements:
            mine = [(self.plan.placement_of(n), group) for n, group in enumerate(self.groups_of)]
        for place, hosts in mine:
            check_placement(place, self.cluster, hosts)
        for number, place in enumerate(map(self.plan.placement_of, range(len(self.groups_of)))):
            if place.sum == "switch":
                self._check_packets(place.name, self._tree(number))

    def _check_packets(self, name: str, tree: SwitchTree | None) -> None:
        """Raise ConfigError if a real run with these switches would refuse the plan's packets."""
        assert tree is not None
        window = self.plan.packets.window
        for switch in tree.switches.values():
            if 0 < switch.slots < window:
                raise ConfigError(
                    f"{name} needs {window} slots, but switch {switch.name} has {switch.slots}",
                    hint="use a smaller packets.window, or a switch with more slots",
                )
            if (children := tree.children(switch.name)) > MOST_CHILDREN:
                raise ConfigError(
                    f"switch {switch.name} has {children} children, but may have {MOST_CHILDREN}",
                    hint="add a level of switches",
                )
        if self.plan.keep is not None:
            raise ConfigError(
                f"placement {name} sums whole gradients, but keep = {self.plan.keep:g} sends parts",
                hint="omit keep, or choose the placement `server`",
            )

    def check_networks(self) -> None:
        """Raise ConfigError if hosts that exchange data have no network in common, or if the
        placement sums between hosts but all devices are on one host."""
        groups = self.groups_of
        places = [self.plan.placement_of(number) for number in range(len(groups))]
        for number, group in enumerate(groups):
            self._nics(group, "dp", number)
        for here, there in itertools.pairwise(self.slots_of):
            if here[-1] != there[0]:
                self._nics([self.hosts[here[-1]], self.hosts[there[0]]], "pp")
        for stage in self._served_hosts():
            self._server_nics(stage, self.cluster.spares[0].combined)
        sums = {place.sum for place in places if not place.served}
        if len(self.used_hosts) == 1 and sums & {"spares", "separate", "switch"}:
            raise ConfigError(
                f"placement {places[0].name} sums between hosts, but all devices are on one host",
                hint="choose the placement `ddp`, which sums inside a host",
            )

    @property
    def served(self) -> bool:
        """True if the server keeps the state of at least one stage."""
        return any(place.served for place in self.plan.placements)

    def build(self, engine: Engine) -> None:
        """Create all resources, stages and links of a step. Raises ConfigError if the hosts have no
        network in common, or if their devices cannot be divided into tensor-parallel groups."""
        cluster = self.cluster
        self.engine = engine
        self._switch = cache(engine.resource)  # the resources of switches, which stages share
        self.switch_links = SwitchLinks(engine, cluster, self.constants)
        self.machine = engine.resource("processors", n) if (n := cluster.processors) else None
        self.server: Site | None = None
        if self.served:
            node = cluster.spares[0].combined
            nics = [nic for hosts in self._served_hosts() for nic in self._server_nics(hosts, node)]
            server_nic = min(nics, key=lambda n: n.total)
            self.server = Site(engine, node, server_nic, self.constants, "server")
        self.shared = self._shared_hosts() if self.apart else {}
        self.exchanges: list[ReplicaExchange] = []
        self.stages: list[SimulatedStage] = []
        for number in range(self.plan.parallelism.pp):
            self._check_tensor_groups(number)
            if self.apart:
                self._build_replicas(number)
            else:
                self._build_stage(number)
        self.stage_at = {(stage.number, stage.replica): stage for stage in self.stages}
        # the lanes between replicas that are simulated separately; a lane keeps messages in order
        self._lane = cache(engine.lane)
        # if the replicas of a stage are simulated as one: (sender's stage, receiver's stage,
        # direction) -> link
        self.between = {} if self.apart else self._boundaries()

    def _served_hosts(self) -> list[tuple[int, Sequence[Host]]]:
        """Return the number and the hosts of each stage that the server serves."""
        stages = enumerate(self.groups_of)
        return [(n, hosts) for n, hosts in stages if self.plan.placement_of(n).served]

    def _server_nics(self, stage: tuple[int, Sequence[Host]], node: Host) -> list[Nic]:
        """Return the network cards of the server `node` over which hosts of the stage reach it."""
        number, hosts = stage
        if (tree := self._tree(number)) is not None:
            assert tree.node is not None
            return [tree.node]
        return [self.cluster.common([host, node])[1] for host in hosts]

    def _tree(self, stage: int) -> SwitchTree | None:
        """Return the tree of switches that sum a stage's gradients, or None if no switch sums
        them."""
        place = self.plan.placement_of(stage)
        if place.sum != "switch":
            return None
        node = self.cluster.spares[0].combined if place.served else None
        return switch_tree(self.cluster, self.groups_of[stage], node)

    def _switches(self, stage: int) -> SwitchResources | None:
        if (tree := self._tree(stage)) is None:
            return None
        packets, constants = self.plan.packets, self.constants
        return SwitchResources(self._switch, tree, packets, constants, self.machine)

    def _end(self, stage: int, workers: int) -> SimulatedFanIn | None:
        """Create the fan-in between a stage's server and the switches, or return None if the
        placement has none. `workers`: the number of workers whose gradients are summed."""
        plan = self.plan.of_stage(stage)
        if not plan.placement.fans_in:
            return None
        blocks = [block for part in self.cuts[stage] for block in part]
        return SimulatedFanIn(self.engine, f"stage {stage}", workers, block_pieces(plan, blocks))

    def _build_stage(self, number: int) -> None:
        """Create pipeline stage `number`, whose workers are simulated as one worker."""
        plan, cluster, constants = self.plan.of_stage(number), self.cluster, self.constants
        parallelism, mine = plan.parallelism, self.groups_of[number]
        first = self.least[number]  # the host with the least resources sets the pace
        nics = self._nics(mine, "dp", number)
        slowest = min(nics, key=lambda n: n.total) if nics else None
        # the slowest link between hosts also limits the card; links of a switch tree are resources
        # of their own
        most = cluster.between(nics) if self._tree(number) is None else float("inf")
        if slowest is not None and most < slowest.total:
            slowest = slowest.model_copy(update={"rate": most, "count": 1})
        devices = Counter(self.slots_of[number]).values()  # per host
        ranks = min(parallelism.replicas, max(devices) // parallelism.tp or 1)
        many = len(devices) if parallelism.tp <= first.devices else parallelism.replicas // ranks
        # the slowest host also sets the pace of computing
        tables = [constants.of_host(host.name) for host in mine]
        own = max(tables, key=lambda of: sum(of.table.values()))
        group = FlowGroup(
            Site(self.engine, first, slowest, constants, f"stage {number}"),
            self.server,
            many,
            ranks,
            min(parallelism.tp, first.devices),
            parallelism.replicas,
            beside=ranks,
            touch=own.touch,
            rates=tuple((n.total if n else 1.0) * constants.network for n in nics),
            switches=self._switches(number),
            machine=self.machine,
        )
        fabric = Fabric(cluster, plan, group, own)
        self._add(fabric, number, self._end(number, many))

    def _build_replicas(self, number: int) -> None:
        """Create the replicas of pipeline stage `number`, each as a separate SimulatedStage."""
        plan, slots = self.plan.of_stage(number), self.slots_of[number]
        parallelism, widths = plan.parallelism, self.plan.widths
        hosts = list(dict.fromkeys(slots))
        nics = dict(zip(hosts, self._nics(self.groups_of[number], "dp", number)))
        switches = self._switches(number)
        across = self._across([nics[s] for s in slots[:: parallelism.tp] if s in nics])
        exchange = ReplicaExchange(self.engine, f"stage {number}", plan.placement.sum == "ring")
        self.exchanges.append(exchange)
        # for each replica, the index of its first device's host
        at = slots[:: self._devices_of_replica]
        rates = tuple((nics[s].total if s in nics else 1.0) * self.constants.network for s in hosts)
        end = self._end(number, len(at))
        for replica, slot in enumerate(at):
            host = self.hosts[slot]
            own = self.constants.of_host(host.name)
            tp = min(parallelism.tp, host.devices)
            ranks = min(parallelism.cp, max(1, host.devices // tp))
            group = FlowGroup(
                self.shared[slot].site(nics.get(slot), f"stage {number} replica {replica}"),
                self.server,
                len(hosts) if tp == parallelism.tp else parallelism.replicas,
                ranks,
                tp,
                parallelism.replicas,
                beside=at.count(slot) * ranks,
                # of the server's work, one replica's share
                server_share=parallelism.cp / parallelism.replicas,
                touch=own.touch,
                rates=rates,
                switches=switches,
                machine=self.machine,
            )
            fabric = RankFabric(self.cluster, plan, group, own, across)
            self._add(fabric, number, end, RankOf(replica, widths, exchange))

    def _add(
        self,
        fabric: Fabric,
        number: int,
        end: SimulatedFanIn | None,
        rank: RankOf | None = None,
    ) -> None:
        parts, send = self.cuts[number], self._send
        stage = SimulatedStage(self.engine, fabric, parts, number, send, end=end, rank=rank)
        self.stages.append(stage)

    def _check_tensor_groups(self, number: int) -> None:
        tp, fewest = self.plan.parallelism.tp, min(h.devices for h in self.groups_of[number])
        if (tp % fewest or fewest < self.least[number].devices) and fewest % tp:
            raise ConfigError(
                f"tensor-parallel groups of {tp} devices do not fit on hosts with {fewest} devices",
                hint=f"use a tp that divides {fewest} or, on equal hosts, a multiple of {fewest}",
            )

    def _shared_hosts(self) -> dict[int, SharedHost]:
        """Return the resources of each host that the plan uses, by the host's index."""
        found, named = dict[int, SharedHost](), Counter[str]()
        for slot in dict.fromkeys(itertools.chain.from_iterable(self.slots_of)):
            host = self.hosts[slot]
            name = f"{host.name} {named[host.name]}" if host.count > 1 else host.name
            named[host.name] += 1
            found[slot] = SharedHost(self.engine, host, name, self.constants)
        return found

    def _across(self, nics: Sequence[Nic]) -> Counter[Resource]:
        """Return the links between switches that connect ranks with these network cards. The count
        of a link is the number of pairs of ranks that use it."""
        found = Counter[Resource]()
        for (a, n), (b, m) in itertools.permutations(Counter(nics).items(), 2):
            found.update({link: n * m for link, _ in self.switch_links.uses(a, b)})
        return found

    # between stages

    def _send(self, stage: SimulatedStage, run: RunBlocks) -> None:
        assert stage.machine is not None
        if (to := stage.machine.consumer(run)) is None:
            return
        receiver, lane = self.stage_at[to.stage, to.replica], None
        if self.apart:
            lane = self._lane(f"{run.what} of {stage.name} to {receiver.name}")
        # the part that begins with the first block after the boundary, whatever the direction
        number, part = (to.stage, to.part) if run.what == FORWARD else (stage.number, run.part)
        nbytes = boundary_bytes(self.plan, self.model, self.cuts[number][part][0])
        self.engine.task(
            "Activations",
            self._crossing(stage, receiver, run.what, nbytes),
            lane=lane,
            then=lambda: receiver.arrived(run.what, run.micro, to.part),
            where=stage.name,
        )

    def _crossing(
        self, sender: SimulatedStage, receiver: SimulatedStage, what: str, nbytes: float
    ) -> Cost:
        """Return the cost of sending `nbytes` from each device of `sender` to `receiver`. `what`:
        the direction, FORWARD or BACKWARD."""
        if not self.apart:
            link = self.between.get((sender.number, receiver.number, what))
            return Cost(0.0) if link is None else Cost(nbytes, [(link[0], 1.0)], link[1])
        here, there = self._slot(sender), self._slot(receiver)
        if here == there:
            return Cost(0.0)
        nics = self._nics([self.hosts[here], self.hosts[there]], "pp")
        uses = [
            (self.shared[here].card(nics[0], "out"), 1.0),
            (self.shared[there].card(nics[1], "in"), 1.0),
            *self.switch_links.uses(*nics),
            *sender.fabric.group.touched(1.0),
            *receiver.fabric.group.touched(1.0),
        ]
        nbytes = nbytes * self.plan.parallelism.tp * self.plan.parallelism.cp
        return Cost(nbytes, uses, max(nic.latency for nic in nics))

    def _boundaries(self) -> dict[tuple[int, int, str], tuple[Resource, float]]:
        """Return the links between consecutive stages on different hosts: (sender's stage,
        receiver's stage, direction) -> link and latency."""
        found: dict[tuple[int, int, str], tuple[Resource, float]] = {}
        each = len(self.slots_of[0])
        for here, there in self.plan.parallelism.boundaries:
            hosts, a, b = self.hosts, self.slots_of[here][-1], self.slots_of[there][0]
            if a == b:
                continue
            nics = self._nics([hosts[a], hosts[b]], "pp")
            rate = min(*(n.total for n in nics), self.cluster.between(nics))
            flows = self.stages[0].fabric.group.ranks  # number of parallel transfers of each host
            link = rate * self.constants.network / flows
            name, latency = f"between {there * each}", max(n.latency for n in nics)
            forth = self.engine.resource(f"{name} forth", link)
            back = self.engine.resource(f"{name} back", link)
            found[here, there, FORWARD] = forth, latency
            found[there, here, BACKWARD] = back, latency
        return found

    def _slot(self, stage: SimulatedStage) -> int:
        """Return the index of the host that has the first device of the replica `stage`."""
        return self.slots_of[stage.number][stage.replica * self._devices_of_replica]

    @property
    def _devices_of_replica(self) -> int:
        return self.plan.parallelism.tp * self.plan.parallelism.cp

    def _nics(self, hosts: Sequence[Host], group: NetworkGroup, stage: int = 0) -> list[Nic]:
        """Return, for each host, the network card for the traffic of `group`: "dp" (parameters and
        gradients of `stage`) or "pp" (activations between stages)."""
        kind, place = self.plan.networks.get(group), self.plan.placement_of(stage)

        def fits(nic: Nic) -> bool:
            return kind in (None, nic.kind) and (nic.relay or not relayed)

        if group == "dp" and (tree := self._tree(stage)) is not None:
            return list(tree.cards)
        if self.apart and place.served and group == "dp":
            node = self.cluster.spares[0].combined
            return [self.cluster.common([host, node])[0] for host in hosts]
        relayed = place.sum == "relay" and group == "dp"
        if relayed or kind is not None:
            hosts = [h.model_copy(update={"nics": tuple(filter(fits, h.nics))}) for h in hosts]
        if len(hosts) == 1:
            return [max(hosts[0].nics, key=lambda n: n.total)] if hosts[0].nics else []
        return list(self.cluster.common(hosts))

    def bound(self) -> float:
        """Return a lower bound for the seconds of a step."""
        bounds, before = [stage.bound() for stage in self.stages], 0.0
        # the first micro-batch passes all previous stages before it arrives at this stage, and the
        # last micro-batch passes them on its way back
        for number in range(self.plan.parallelism.pp):
            own = [stage for stage in self.stages if stage.number == number]
            bounds += [before + stage.passes * stage.pass_s for stage in own]
            before += min(stage.first_s for stage in own)
        return max(bounds) + self.constants.fixed

    def watts(self, busy: dict[str, float]) -> float:
        """Return the power in watts of all hosts and devices that the plan uses. Power rises from
        idle power to peak power in proportion to the fraction of busy time."""
        total, n = 0.0, max(1, len(self.stages))
        for stage in self.stages:
            device, site = stage.device, stage.fabric.site
            share = busy.get(stage.lane.name, 0.0)
            devices = len(self.slots_of[stage.number]) // stage.width
            total += devices * _watts(device, share)
            work = max(busy.get(r.name, 0.0) for r in (site.updates, site.sums, site.out))
            total += len(self.used_hosts) / n * _watts(site.host, work)
        if self.uses_spares:
            for host in self.cluster.spares:
                total += host.count * _watts(host, busy.get("server updates", 0.0))
        return total

    @property
    def uses_spares(self) -> bool:
        return self.served or any(p.sum in ("spares", "separate") for p in self.plan.placements)

    def check(self) -> None:
        """Assert the invariants of the stages."""
        for stage in self.stages:
            stage.check()
        for exchange in self.exchanges:
            exchange.check()

    def price_per_s(self) -> float:
        """Return the price per second of the hosts that the plan uses."""
        hosts = [*self.used_hosts]
        if self.uses_spares:
            hosts += [host for host in self.cluster.spares for _ in range(host.count)]
        return sum(host.price_per_hour for host in hosts) / 3600


def boundary_bytes(plan: Plan, model: ModelShape, following: BlockShape) -> float:
    """Return the bytes of activations that a device sends to the next stage for each micro-batch.
    `following`: the first block of the next stage."""
    samples = plan.micro_batch / plan.parallelism.cp
    if model.hidden:
        return plan.sizes.activation_bytes * model.hidden * model.tokens * samples
    # blocks have different widths; shapes count 2 bytes per element
    return plan.sizes.activation_bytes / 2 * (following.input + following.passing) * samples


def _watts(of: Host | Device, share: float) -> float:
    """Return the power in watts of a host or device that is busy for the fraction `share` of the
    time. If the peak power is unknown, return the idle power."""
    return of.idle_watts + max(0.0, of.peak_watts - of.idle_watts) * share
