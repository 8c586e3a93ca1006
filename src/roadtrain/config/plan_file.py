"""The file plan.toml, which contains a `Plan` for training a model on a cluster. Its tables may
contain the machines that run the plan (`Machines`), the predicted step time (`Predicted`), the
cluster and the model.

A `Placement` defines where parameters and optimizer state are stored, where gradients are summed
and where the update runs. Each name in the table PLACEMENTS, such as "ddp" or "zero3", stands for
one combination of these choices (docs/design.md).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
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

# default fraction of each device's and host's memory that a plan leaves free
HEADROOM = 0.05
Where = Literal["device", "split", "host", "ssd", "server"]
NetworkGroup = Literal["dp", "pp"]


@value
class Placement:
    """The places where parameters and optimizer state are stored, where gradients are summed, and
    where the update runs."""

    name: str
    # "device": a copy on each device; "split": divided among the devices; "host": in host memory;
    # "ssd": on the hosts' SSDs; "server": at the server
    parameters: Where
    state: Where
    # "ring": by all-reduce, or by reduce-scatter if the state is split; "switch": in switches of
    # the network; "spares": by the summation service, with shares from sums/protocol/shares.py;
    # "separate": by parameter servers on the spare hosts; "relay": by network cards with
    # processors; "server": at the server
    sum: Literal["ring", "switch", "spares", "separate", "relay", "server"]
    update: Literal["device", "host", "ssd", "server"]
    gradients: Literal["memory", "ssd"] = "memory"  # where gradients are held until the update

    @property
    def streamed(self) -> bool:
        """Whether parameters are transferred to the device block by block."""
        return self.parameters != "device"

    @property
    def served(self) -> bool:
        """Whether a separate server holds the state."""
        return self.state == "server"

    @property
    def fans_in(self) -> bool:
        """Whether gradients pass summing switches on the way to the server: switches of the
        network, or machines that run `roadtrain serve --switch`."""
        return self.served and self.sum == "switch"


_FILE = tomllib.loads(files("roadtrain.config").joinpath("placements.toml").read_text())
PLACEMENTS = {name: Placement(name, **parts) for name, parts in _FILE.items()}


def placement(name: str) -> Placement:
    """Return the placement with this name. Raises ConfigError for an unknown name."""
    if name not in PLACEMENTS:
        raise ConfigError(
            f"no placement is called {name!r}",
            hint=did_you_mean(name, PLACEMENTS) or f"available are {', '.join(PLACEMENTS)}",
        )
    return PLACEMENTS[name]


def _named(value: object) -> object:
    return placement(value) if isinstance(value, str) else value


def _checked_name(name: str) -> str:
    return placement(name).name


@value
class PlanMemory:
    """The buffers that a plan uses, and the data that stays in memory."""

    slots: Integer = Field(default=3, ge=2)  # number of blocks with parameters on the device
    buffers: Count = 3  # number of records that a server processes at once
    pushes: Whole = 0  # number of buffers, each for the gradients of one block
    # number of blocks whose gradients are on the device at once, if parameters are streamed; 0: one
    # tensor's gradient
    device_gradients: Whole = 0
    kept: Whole = 0  # number of blocks that a relay keeps from forward to backward
    chunk: Whole = 0  # elements per record; 0 divides each block into a few records
    root: Flag = True  # embeddings and output layer stay on the device and use no slot
    offload: Flag = False  # activations are moved to host memory
    # number of versions of each record that files hold; with 2, no step overwrites the last version
    file_slots: Whole = 2
    resident: Number = 0  # fraction of the records on files that is also kept in memory
    public: Number = 1  # fraction of the records whose parameters are kept in memory


@value
class ElementBytes:
    """Bytes per element of each kind of data."""

    parameter_bytes: Number = 2
    gradient_bytes: Number = 2  # of a gradient while it is transferred
    activation_bytes: Number = 2  # of an activation while it is transferred between stages
    held_bytes: Number = 4  # of a gradient that is held until the update
    upstream_bytes: Number = 2  # of a parameter that a processor in an SSD returns
    state_bytes: Number = 12  # of the optimizer state, per parameter
    host_bytes: Number = 0  # of additional host memory, per parameter


@value
class SwitchPackets:
    """The format of the packets in which data crosses summing switches. The defaults describe
    roadtrain's own packets (switch/packets.py)."""

    wire: Wire = "int32"  # number format of a gradient's elements
    window: Count = WINDOW  # largest number of packets in flight per stream
    payload: Count = 1408  # data bytes per packet
    overhead: Whole = 90  # header bytes per packet: roadtrain 48, UDP 8, IP 20, Ethernet 14
    block: Whole = 352  # number of elements that share a one-byte exponent; 0 if scales are fixed

    @property
    def width(self) -> int:
        """Bytes per element in a packet."""
        return WIDTH[self.wire]


@value
class Framework:
    """Properties of the training framework that the simulation uses."""

    # number format of the layers' matrix products; "" means 16 bits, which attention and the output
    # layer always use
    precision: str = ""
    # the part that backward recomputes. "products": in each layer, everything except attention and
    # every second matrix product; "layers": all of every second layer; "": all or nothing, as
    # `activation_checkpointing` says
    selective: Literal["", "products", "layers"] = ""
    sequence: Flag = True  # whether tensor-parallel ranks also split norms and inputs
    hidden: Number = 0  # fraction of tensor-parallel traffic that overlaps with matrix products
    passes: Number = 1  # device memory traffic of kernels, relative to the calibrated constants
    logit_bytes: Number = 6  # bytes of device memory per logit while the loss is computed
    # bytes of device memory per parameter of the output layer while the loss is computed
    output_bytes: Number = 0
    outputs: Flag = False  # whether outputs sent to the next stage are kept until their backward
    context_bytes: Number = 1e9  # device memory taken by the driver and libraries
    fragmentation: Number = 1.0  # device memory reserved, relative to what is allocated


@value
class Plan:
    """A way to train a model on a cluster. Raises ConfigError for an invalid value."""

    placement: Annotated[
        Placement,
        BeforeValidator(refusing(_named)),
        PlainSerializer(lambda placement: placement.name),
        Field(description=f"one of {', '.join(PLACEMENTS)}"),
    ]
    parallelism: Parallelism = Parallelism()
    micro_batch: Count = 1  # number of samples per device and pass
    # number of passes per step and replica; if `parallelism.widths` gives each stage its own number
    # of replicas, the number of passes per step of all replicas of a stage together
    num_microbatches: Count = 1
    # name of the placement of each pipeline stage; empty if all stages use `placement`
    stage_placements: tuple[Annotated[str, AfterValidator(refusing(_checked_name))], ...] = ()
    activation_checkpointing: Flag = False  # whether only blocks' inputs are kept for backward
    staleness: Whole = 0  # number of updates that may be missing from the parameters of a step
    # "gradient": a block's update starts once its gradient has arrived; "step": updates start once
    # all gradients have arrived, so that norms can be computed
    update_at: Literal["gradient", "step"] = "step"
    overlap: Flag = True  # True sends gradients during backward, False sends them after backward
    # when updated parameters are gathered, if each device updates a part of them: after the update,
    # or block by block during the next forward
    gather: Literal["update", "forward"] = "update"
    # True updates blocks in the order of their gradients, False in the order of the next forward
    in_turn: Flag = False
    keep: Number | None = None  # fraction of a gradient's elements that is sent; None sends all
    # kind of network card for each group; a group that is not listed uses its fastest choice
    networks: Mapping[NetworkGroup, Literal["infiniband", "roce", "ethernet"]] = field(
        default_factory=dict, hash=False
    )
    headroom: Number = Field(default=0.0, lt=1)  # fraction of device and host memory left free
    memory: PlanMemory = PlanMemory()
    sizes: ElementBytes = ElementBytes()
    framework: Framework = Framework()
    packets: SwitchPackets = SwitchPackets()  # used by placements that sum in switches

    @model_validator(mode="after")
    @refusing
    def _check_stage_placements(self) -> Self:
        if self.stage_placements and len(self.stage_placements) != self.parallelism.pp:
            raise ConfigError(
                f"stage_placements has {len(self.stage_placements)} names, but there are"
                f" {self.parallelism.pp} stages (pp)",
                hint="give one name per stage, or only `placement` for all stages",
            )
        return self

    def changed(self, **changes: Any) -> Plan:
        """Return a copy of the plan with the values `changes`. Their names are fields of Plan, or
        of the objects that a Plan contains, such as PlanMemory."""
        for part, names in PARTS.items():
            if mine := {name: changes.pop(name) for name in names & changes.keys()}:
                changes[part] = replace(changes.get(part, getattr(self, part)), **mine)
        return replace(self, **changes)

    @property
    def sent_share(self) -> float:
        """Ratio of the bytes that are sent for a gradient to the bytes of the gradient. With top-k
        compression, each sent element counts twice, because its index is sent too."""
        return 1.0 if self.keep is None else 2 * self.keep

    @property
    def samples(self) -> int:
        """Number of samples per step."""
        return self.micro_batch * self.step_microbatches

    @property
    def step_microbatches(self) -> int:
        """Number of micro-batches per step, over all replicas."""
        replicas = 1 if self.parallelism.widths else self.parallelism.dp
        return self.num_microbatches * replicas

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of data-parallel replicas of each stage."""
        return self.parallelism.widths or (self.parallelism.dp,) * self.parallelism.pp

    def placement_of(self, stage: int) -> Placement:
        return placement(self.stage_placements[stage]) if self.stage_placements else self.placement

    def of_stage(self, stage: int) -> Plan:
        """Return the plan of one stage, with this stage's placement and number of replicas."""
        if not (self.stage_placements or self.parallelism.widths):
            return self
        parallelism = replace(self.parallelism, dp=self.widths[stage], widths=())
        place = self.placement_of(stage)
        return replace(self, placement=place, stage_placements=(), parallelism=parallelism)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of all stages, without duplicates."""
        return tuple(dict.fromkeys(map(self.placement_of, range(self.parallelism.pp))))


# parts of a plan -> names of their fields, which are unique over all parts
PARTS = {
    part: frozenset(f.name for f in fields(kind))
    for part, kind in (
        ("memory", PlanMemory),
        ("sizes", ElementBytes),
        ("framework", Framework),
        ("packets", SwitchPackets),
    )
}
# tables of a plan.toml that are not part of the plan
OTHER_TABLES = ("machines", "predicted", "cluster", "model")


def make_plan(tree: Mapping[str, Any], where: str = "plan") -> Plan:
    """Build a plan from the tables of a plan.toml, with 5 % `headroom` if it is missing. Raises
    ConfigError, which names the invalid key."""
    return checked(Plan, {"headroom": HEADROOM, **tree}, where)


def load_plan(path: str | Path) -> Plan:
    """Read the plan of a plan.toml and ignore its other tables. Raises ConfigError."""
    return make_plan(_own_keys(read_toml(path, "plan")), where=str(path))


def _own_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in OTHER_TABLES}


@dataclass(frozen=True)
class PlanFile:
    """The contents of a plan.toml. `machines` is None for a plan that is only simulated."""

    plan: Plan
    machines: Machines | None = None
    predicted: Predicted | None = None
    cluster: Cluster | None = None
    model: PlannedModel | None = None

    def to_toml(self) -> str:
        """Format the file as TOML, which `load_plan_file` reads back without loss."""
        tree = as_tree(self.plan)
        for name in ("machines", "predicted", "model"):
            if (table := getattr(self, name)) is not None:
                tree[name] = as_tree(table, exclude_defaults=True)
        if self.cluster is not None:
            # write filled-in values, but no defaults, so that `assumed` stays the same
            tree["cluster"] = as_tree(self.cluster, exclude_unset=True, by_alias=True)
        return tomli_w.dumps(tree)


def make_plan_file(tree: Mapping[str, Any], where: str = "plan") -> PlanFile:
    """Build a plan file from tables. Raises ConfigError, which names the invalid key."""
    machines, predicted, cluster, model = (tree.get(name) for name in OTHER_TABLES)
    return PlanFile(
        make_plan(_own_keys(tree), where),
        None if machines is None else checked(Machines, machines, f"{where}, [machines]"),
        None if predicted is None else checked(Predicted, predicted, f"{where}, [predicted]"),
        None if cluster is None else make_cluster(cluster, f"{where}, [cluster]"),
        None if model is None else checked(PlannedModel, model, f"{where}, [model]"),
    )


def load_plan_file(path: str | Path) -> PlanFile:
    """Read a plan.toml. Raises ConfigError."""
    return make_plan_file(read_toml(path, "plan"), where=str(path))
