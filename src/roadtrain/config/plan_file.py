"""Plan: how to train a model on a cluster; and PlanFile, all of a plan.toml: the plan, the machines
that run it (`Machines`), what the planner promised (`Predicted`), and the cluster and the model
that it was planned for.

A `Placement` says where parameters and optimizer state rest, where gradients are summed, where the
update runs. The systems are named choices of the same duties (docs/concepts/design.md), baselines
too. The plan's keys stand at the top of the file, the rest in tables of their own. Arithmetic only.
Does NOT know a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.machines import Machines, PlannedModel, Predicted
from roadtrain.errors import ConfigError
from roadtrain.options.names import did_you_mean
from roadtrain.options.schema import (
    Count,
    Flag,
    Integer,
    Number,
    Whole,
    as_tree,
    checked,
    read_toml,
    refusing,
    value,
)
from roadtrain.stages.parallelism import Parallelism
from roadtrain.switch.options import WIDTH, WINDOW, Wire

# of each device's and host's memory, that a plan leaves free where nobody says otherwise
HEADROOM = 0.05
Where = Literal["device", "split", "host", "ssd", "server"]
NetworkGroup = Literal["dp", "pp"]


@value
class Placement:
    """Where parameters and optimizer state rest, where gradients are summed, where they are
    applied."""

    name: str
    # all on each device, split over the devices, in the hosts' memory, on their SSDs, at the server
    parameters: Where
    state: Where
    # "ring": all-reduce, or reduce-scatter where the state is split; "switch": in the network;
    # "spares": the summation service, shares by sums/protocol/shares.py; "separate": servers on the
    # spare hosts alone; "relay": cards that compute
    sum: Literal["ring", "switch", "spares", "separate", "relay", "server"]
    update: Literal["device", "host", "ssd", "server"]
    gradients: Literal["memory", "ssd"] = "memory"  # where they wait for the update

    @property
    def streamed(self) -> bool:
        """Whether parameters come to the device block by block."""
        return self.parameters != "device"

    @property
    def served(self) -> bool:
        """Whether a server of its own has the state."""
        return self.state == "server"

    @property
    def fans_in(self) -> bool:
        """Whether switches stand between workers and that server: the network's, or machines that
        run `roadtrain serve --switch`."""
        return self.served and self.sum == "switch"


PLACEMENTS = {
    p.name: p
    for p in (
        Placement("ddp", "device", "device", "ring", "device"),
        Placement("zero1", "device", "split", "ring", "device"),
        Placement("zero3", "split", "split", "ring", "device"),
        Placement("zero-offload", "host", "host", "ring", "host"),
        Placement("zero-infinity", "ssd", "ssd", "ring", "host", "ssd"),
        Placement("raid0", "host", "ssd", "ring", "host", "ssd"),
        Placement("parameter-server", "device", "device", "separate", "device"),
        Placement("switch-sum", "device", "device", "switch", "device"),
        Placement("summation", "device", "device", "spares", "device"),
        Placement("files", "host", "ssd", "ring", "host"),
        Placement("near-storage", "host", "ssd", "ring", "ssd", "ssd"),
        Placement("smartnic", "host", "host", "relay", "host"),
        Placement("optimizer-node", "server", "server", "switch", "server"),
        Placement("server", "server", "server", "server", "server"),
    )
}


def placement(name: str) -> Placement:
    """Raises ConfigError for a name that is not known."""
    if name not in PLACEMENTS:
        raise ConfigError(
            f"no placement is called {name!r}",
            hint=did_you_mean(name, PLACEMENTS) or f"known are {', '.join(PLACEMENTS)}",
        )
    return PLACEMENTS[name]


def _named(given: object) -> object:
    return placement(given) if isinstance(given, str) else given


def _known(name: str) -> str:
    return placement(name).name


@value
class PlanMemory:
    """What is in memory, and for how long."""

    slots: Integer = Field(default=3, ge=2)  # blocks of parameters that are on the device at once
    buffers: Count = 3  # records that a server works on at once
    pushes: Whole = 0  # buffers for a block's gradients
    kept: Whole = 0  # blocks that a relay keeps from forward to backward
    chunk: Whole = 0  # elements of a record; 0: a few records a block
    root: Flag = True  # embeddings and the output layer stay on the device and take no slot
    offload: Flag = False  # activations go to the host
    file_slots: Whole = 2  # of a record on files; 2: a step never overwrites the last one
    resident: Number = 0  # the share of records on files that memory keeps too
    public: Number = 1  # the share of which memory keeps the parameters


@value
class ElementBytes:
    """Bytes of one element."""

    parameter_bytes: Number = 2
    gradient_bytes: Number = 2  # on the wire
    activation_bytes: Number = 2  # between stages, on the wire
    held_bytes: Number = 4  # of a gradient at rest
    upstream_bytes: Number = 2  # of a parameter that comes back from a processor beside an SSD
    state_bytes: Number = 12
    host_bytes: Number = 0  # what hosts keep besides


@value
class SwitchPackets:
    """How data crosses switches that sum. As roadtrain's own packets (switch/packets.py), unless a
    plan describes others'."""

    wire: Wire = "int32"  # what an element of a gradient travels as
    window: Count = WINDOW  # packets under way of a stream, at most
    payload: Count = 1408  # bytes of data in a packet
    overhead: Whole = 90  # bytes of a packet besides: our header 48, UDP 8, IP 20, Ethernet 14
    block: Whole = 352  # elements that share an exponent, which is a byte; 0: scales are fixed

    @property
    def width(self) -> int:
        """Bytes of an element on the wire."""
        return WIDTH[self.wire]


@value
class Framework:
    """What a framework does besides."""

    precision: str = ""  # of the layers' products; "": 16 bits, as attention and the output
    # of each layer "products" (all but attention and every second product), or all of every second
    # of the "layers", is computed again; "": as the plan says
    selective: Literal["", "products", "layers"] = ""
    sequence: Flag = True  # tensor-parallel ranks split norms and inputs too
    hidden: Number = 0  # the share of tensor-parallel traffic that products hide
    passes: Number = 1  # how often kernels cross the device's memory, over what the constants say
    logit_bytes: Number = 6  # a logit, on the device while the loss is made
    output_bytes: Number = 0  # a parameter of the output layer, likewise
    outputs: Flag = False  # what goes to the next stage stays until its backward
    context_bytes: Number = 1e9  # of a device's memory, that nobody asked for
    fragmentation: Number = 1.0  # of a device's memory: what is taken over what was asked for


@value
class Plan:
    """One way to train a model on a cluster. Raises ConfigError."""

    placement: Annotated[
        Placement,
        BeforeValidator(refusing(_named)),
        PlainSerializer(lambda one: one.name),
        Field(description=f"known are {', '.join(PLACEMENTS)}"),
    ]
    parallelism: Parallelism = Parallelism()
    micro_batch: Count = 1  # samples a device and pass
    # passes a step; of all replicas of a stage together, where `parallelism.widths` gives each
    # stage its own number of them
    num_microbatches: Count = 1
    # of each pipeline stage the name of its placement, where it is not `placement` for all
    stage_placements: tuple[Annotated[str, AfterValidator(refusing(_known))], ...] = ()
    activation_checkpointing: Flag = False  # blocks' inputs alone are kept for backward
    staleness: Whole = 0  # updates that a step's parameters may lack
    # "gradient": each block's update begins as its gradient is there; "step": when all are there,
    # so that norms are known
    update_at: Literal["gradient", "step"] = "step"
    overlap: Flag = True  # gradients leave while backward runs, else after it
    # where each device updates its part: parameters are gathered as the update ends; or, block by
    # block, during the next forward
    gather: Literal["update", "forward"] = "update"
    in_turn: Flag = False  # updates in the order of their gradients, not of the next forward
    keep: Number | None = None  # fraction of a gradient's elements that travels; None: all
    # kind of card for a group; for what is not named one is chosen
    networks: Mapping[NetworkGroup, Literal["infiniband", "roce", "ethernet"]] = field(
        default_factory=dict, hash=False
    )
    headroom: Number = Field(default=0.0, lt=1)  # share of devices' and hosts' memory left free
    memory: PlanMemory = PlanMemory()
    sizes: ElementBytes = ElementBytes()
    framework: Framework = Framework()
    packets: SwitchPackets = SwitchPackets()  # of placements that sum in switches

    @model_validator(mode="after")
    @refusing
    def _one_placement_a_stage(self) -> Self:
        if self.stage_placements and len(self.stage_placements) != self.parallelism.pp:
            raise ConfigError(
                f"{len(self.stage_placements)} stages have a placement, pp is"
                f" {self.parallelism.pp}",
                hint="stage_placements has one name a stage; or `placement` alone is of all",
            )
        return self

    def changed(self, **changes: Any) -> Plan:
        """With other values of fields, of its own or of one of its parts."""
        for part, names in PARTS.items():
            if mine := {name: changes.pop(name) for name in names & changes.keys()}:
                changes[part] = replace(changes.get(part, getattr(self, part)), **mine)
        return replace(self, **changes)

    @property
    def travels(self) -> float:
        """The share of a gradient's bytes that travels: an element that is kept has its index
        beside it."""
        return 1.0 if self.keep is None else 2 * self.keep

    @property
    def samples(self) -> int:
        """Of one step."""
        return self.micro_batch * self.step_microbatches

    @property
    def step_microbatches(self) -> int:
        """Of one step, over all replicas."""
        replicas = 1 if self.parallelism.widths else self.parallelism.dp
        return self.num_microbatches * replicas

    @property
    def widths(self) -> tuple[int, ...]:
        """Data-parallel replicas of each stage."""
        return self.parallelism.widths or (self.parallelism.dp,) * self.parallelism.pp

    def placement_of(self, stage: int) -> Placement:
        return placement(self.stage_placements[stage]) if self.stage_placements else self.placement

    def of_stage(self, stage: int) -> Plan:
        """The plan as one stage has it: its own placement, and its own replicas as all."""
        if not (self.stage_placements or self.parallelism.widths):
            return self
        parallelism = replace(self.parallelism, dp=self.widths[stage], widths=())
        place = self.placement_of(stage)
        return replace(self, placement=place, stage_placements=(), parallelism=parallelism)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Those of its stages, each once."""
        return tuple(dict.fromkeys(map(self.placement_of, range(self.parallelism.pp))))


# parts of a plan -> names of their fields, no two of which are the same
PARTS = {
    part: frozenset(f.name for f in fields(kind))
    for part, kind in (
        ("memory", PlanMemory),
        ("sizes", ElementBytes),
        ("framework", Framework),
        ("packets", SwitchPackets),
    )
}
# what a plan.toml has beside the plan
OTHER_TABLES = ("machines", "predicted", "cluster", "model")


def make_plan(tree: Mapping[str, Any], where: str = "plan") -> Plan:
    """Of plain data, as in a plan.toml; what says no `headroom` keeps HEADROOM. Raises ConfigError
    naming the key."""
    return checked(Plan, {"headroom": HEADROOM, **tree}, where)


def load_plan(path: str | Path) -> Plan:
    """The plan alone of a plan.toml, whatever else the file has. Raises ConfigError."""
    return make_plan(_own_keys(read_toml(path, "plan")), where=str(path))


def _own_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: given for key, given in tree.items() if key not in OTHER_TABLES}


@dataclass(frozen=True)
class PlanFile:
    """`machines`: None for a plan that is simulated only."""

    plan: Plan
    machines: Machines | None = None
    predicted: Predicted | None = None
    cluster: Cluster | None = None
    model: PlannedModel | None = None

    def to_toml(self) -> str:
        """The file that this is read from."""
        tree = as_tree(self.plan)
        for name in ("machines", "predicted", "model"):
            if (table := getattr(self, name)) is not None:
                tree[name] = as_tree(table, exclude_defaults=True)
        if self.cluster is not None:
            # with what was filled in, and no more: so that `assumed` stays what it is
            tree["cluster"] = as_tree(self.cluster, exclude_unset=True, by_alias=True)
        return tomli_w.dumps(tree)


def make_plan_file(tree: Mapping[str, Any], where: str = "plan") -> PlanFile:
    """Raises ConfigError naming the key."""
    machines, predicted, cluster, model = (tree.get(name) for name in OTHER_TABLES)
    return PlanFile(
        make_plan(_own_keys(tree), where),
        None if machines is None else checked(Machines, machines, f"{where}, [machines]"),
        None if predicted is None else checked(Predicted, predicted, f"{where}, [predicted]"),
        None if cluster is None else make_cluster(cluster, f"{where}, [cluster]"),
        None if model is None else checked(PlannedModel, model, f"{where}, [model]"),
    )


def load_plan_file(path: str | Path) -> PlanFile:
    """Raises ConfigError."""
    return make_plan_file(read_toml(path, "plan"), where=str(path))
