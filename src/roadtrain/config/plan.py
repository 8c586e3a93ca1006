"""Placement: where parameters and optimizer state rest, where gradients are summed, where the
update runs; and the plan that it is part of. <-> plan.toml

The systems are named choices of the same duties (docs/concepts/design.md), baselines too.
Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from roadtrain.config.job import read_toml
from roadtrain.config.names import did_you_mean
from roadtrain.config.parallelism import Parallelism
from roadtrain.errors import ConfigError

PARAMETERS = ("device", "split", "host", "ssd", "server")
STATES = ("device", "split", "host", "ssd", "server")
# of each device's and host's memory, that a plan leaves free where nobody says otherwise
HEADROOM = 0.05
SUMS = ("ring", "switch", "spares", "separate", "relay", "server")
UPDATES = ("device", "host", "ssd", "server")
KINDS: dict[str, tuple[tuple[type, ...], str]] = {  # of a plan's fields, by how they are written
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "float | None": ((int, float), "a number"),
    "str": ((str,), "a text"),
    "Mapping[str, str]": ((dict,), "a table"),
}


@dataclass(frozen=True)
class Placement:
    """`parameters`: all on each device, split over the devices, in the hosts' memory, on their
    SSDs, at the server.
    `sum`: "ring" (all-reduce, or reduce-scatter where the state is split), "switch" (in the
    network), "spares" (the summation service, shares by protocol/shares.py), "separate" (servers on
    the spare hosts alone), "relay" (cards that compute), "server". `gradients`: where they wait
    for the update: "memory" or "ssd"."""

    name: str
    parameters: str
    state: str
    sum: str
    update: str
    gradients: str = "memory"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("parameters", self.parameters, PARAMETERS),
            ("state", self.state, STATES),
            ("sum", self.sum, SUMS),
            ("update", self.update, UPDATES),
        ):
            if value not in known:
                raise ConfigError(
                    f"placement {self.name}: {what} = {value!r}",
                    hint=f"known are {', '.join(known)}",
                )

    @property
    def streamed(self) -> bool:
        """Whether parameters come to the device block by block."""
        return self.parameters != "device"

    @property
    def served(self) -> bool:
        """Whether a server of its own has the state."""
        return self.state == "server"


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


def _check_fields(part: Any, least: Mapping[str, int]) -> None:
    """Raises ConfigError where a field has another type than it is written with, or is below 0 or
    its `least`."""
    for own in fields(part):
        value, kind = getattr(part, own.name), str(own.type)
        if kind not in KINDS or (value is None and "None" in kind):
            continue
        (kinds, words), low = KINDS[kind], least.get(own.name, 0)
        if type(value) not in kinds or (
            isinstance(value, int | float) and not low <= value < float("inf")
        ):
            more = f", {low} or more" if "number" in words else ""
            raise ConfigError(f"`{own.name}` is {value!r} in the plan", hint=words + more)


@dataclass(frozen=True)
class PlanMemory:
    """What is in memory, and for how long."""

    slots: int = 3  # blocks of parameters that are on the device at once
    buffers: int = 3  # records that a server works on at once
    pushes: int = 0  # buffers for a block's gradients
    kept: int = 0  # blocks that a relay keeps from forward to backward
    chunk: int = 0  # elements of a record; 0: a few records a block
    root: bool = True  # embeddings and the output layer stay on the device and take no slot
    offload: bool = False  # activations go to the host
    file_slots: int = 2  # of a record on files; 2: a step never overwrites the last one
    resident: float = 0  # the share of records on files that memory keeps too
    public: float = 1  # the share of which memory keeps the parameters

    def __post_init__(self) -> None:
        _check_fields(self, {"slots": 2, "buffers": 1})


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element."""

    parameter_bytes: float = 2
    gradient_bytes: float = 2  # on the wire
    held_bytes: float = 4  # of a gradient at rest
    upstream_bytes: float = 2  # of a parameter that comes back from a processor beside an SSD
    state_bytes: float = 12
    host_bytes: float = 0  # what hosts keep besides

    def __post_init__(self) -> None:
        _check_fields(self, {})


@dataclass(frozen=True)
class Framework:
    """What a framework does besides."""

    precision: str = ""  # of the layers' products; "": 16 bits, as attention and the output
    # of each layer "products" (all but attention and every second product), or all of every second
    # of the "layers", is computed again; "": see Plan.recompute
    selective: str = ""
    sequence: bool = True  # tensor-parallel ranks split norms and inputs too
    hidden: float = 0  # the share of tensor-parallel traffic that products hide
    passes: float = 1  # how often kernels cross the device's memory, over what the constants say
    logit_bytes: float = 6  # a logit, on the device while the loss is made
    output_bytes: float = 0  # a parameter of the output layer, likewise
    outputs: bool = False  # what goes to the next stage stays until its backward
    context_bytes: float = 1e9  # of a device's memory, that nobody asked for
    fragmentation: float = 1.0  # of a device's memory: what is taken over what was asked for

    def __post_init__(self) -> None:
        _check_fields(self, {})
        if self.selective not in ("", "products", "layers"):
            raise ConfigError(
                f"`selective` is {self.selective!r} in the plan", hint='"products", "layers" or ""'
            )


@dataclass(frozen=True)
class Plan:
    """One way to train a model on a cluster. Raises ConfigError."""

    placement: Placement
    parallelism: Parallelism = field(default_factory=Parallelism)
    micro_batch: int = 1  # samples a device and pass
    micros: int = 1  # passes a step
    recompute: bool = False  # blocks' inputs alone are kept for backward
    staleness: int = 0  # updates that a step's parameters may lack
    # "gradient": each block's update begins as its gradient is there; "step": when all are there,
    # so that norms are known
    update_at: str = "step"
    overlap: bool = True  # gradients leave while backward runs, else after it
    in_turn: bool = False  # updates in the order of their gradients, not of the next forward
    keep: float | None = None  # fraction of a gradient's elements that travels; None: all
    # kind of card for a group ("dp", "pp"); for what is not named one is chosen
    networks: Mapping[str, str] = field(default_factory=dict, hash=False)
    headroom: float = 0.0  # share of each device's and host's memory that stays free
    memory: PlanMemory = PlanMemory()
    sizes: ElementBytes = ElementBytes()
    framework: Framework = Framework()

    def __post_init__(self) -> None:
        _check_fields(self, {"micro_batch": 1, "micros": 1})
        if self.headroom >= 1:
            raise ConfigError(
                f"`headroom` is {self.headroom!r} in the plan",
                hint="a share of memory: 0 or more, below 1",
            )

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
        return self.micro_batch * self.micros * self.parallelism.dp

    def to_toml(self) -> str:
        tree = {name: value for name, value in asdict(self).items() if value is not None}
        return tomli_w.dumps({**tree, "placement": self.placement.name})


def placement(name: str) -> Placement:
    """Raises ConfigError for a name that is not known."""
    if name not in PLACEMENTS:
        raise ConfigError(
            f"no placement is called {name!r}",
            hint=did_you_mean(name, PLACEMENTS) or f"known are {', '.join(PLACEMENTS)}",
        )
    return PLACEMENTS[name]


# parts of a plan -> names of their fields, no two of which are the same
PARTS = {
    part: frozenset(f.name for f in fields(kind))
    for part, kind in (("memory", PlanMemory), ("sizes", ElementBytes), ("framework", Framework))
}


def make_plan(tree: Mapping[str, Any]) -> Plan:
    """Of plain data, as in a plan.toml; what says no `headroom` keeps HEADROOM. Raises
    ConfigError naming the key."""
    tree = {"headroom": HEADROOM, **_in_words_of_now(tree)}
    if "placement" not in tree:
        raise ConfigError(
            "`placement` is missing in the plan", hint=f"known are {', '.join(PLACEMENTS)}"
        )
    parallelism = tree.pop("parallelism", {})
    try:
        ranks = Parallelism(**{**parallelism, "stages": tuple(parallelism.get("stages", ()))})
    except (TypeError, AttributeError) as cause:
        raise ConfigError(
            f"`parallelism` of the plan is {parallelism!r}",
            hint="its keys are dp, tp, pp, stages, cp, ep, vp",
        ) from cause
    plan = Plan(placement(str(tree.pop("placement"))), ranks)
    for part, names in PARTS.items():
        own = tree.pop(part, {})
        if not isinstance(own, Mapping) or own.keys() - names:
            raise ConfigError(
                f"`{part}` of the plan is {own!r}", hint=f"its keys are {', '.join(sorted(names))}"
            )
        plan = plan.changed(**own)
    return plan.changed(**tree)


def _in_words_of_now(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the first edition's plan.toml, which had no parts, are read too. Raises ConfigError
    for one that nobody knows."""
    known = {f.name for f in fields(Plan)}.union(*PARTS.values())
    out = {}
    for key, value in tree.items():
        if key == "layout":
            out["parallelism"] = value
        elif key == "topk":
            out["keep"] = value / 200 if type(value) in (int, float) else value
        elif key in known:
            out[key] = value
        else:
            raise ConfigError(
                f"unknown key `{key}` in the plan",
                hint=did_you_mean(key, known) or f"keys are {', '.join(sorted(known))}",
            )
    return out


def load_plan(path: str | Path) -> Plan:
    return make_plan(read_toml(path, "plan"))
