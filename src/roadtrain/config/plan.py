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


@dataclass(frozen=True)
class Plan:
    """`micro_batch`: samples a device and pass; `micros`: passes a step. `slots`: blocks of
    parameters on the device at once, `buffers`: records that a server works on at once, `kept`: how
    many blocks a relay keeps from forward to backward. `update_at`: "gradient" (each block's as its
    gradient is there) or "step" (all are there, so norms are known). `topk`: percent of a
    gradient's bytes that travel. `networks`: kind of card for a group ("dp", "pp"); what is not
    named is chosen. Bytes an element: of parameters, of gradients on the wire, of gradients at
    rest, of parameters that come back from a processor beside an SSD, of state, of what hosts keep
    besides
    (`host_bytes`). `in_turn`: updates in the order of their gradients, not of the next forward.
    `overlap`: gradients leave while backward runs, else after it. `offload`: activations go to the
    host. `resident`: the share of records on files that memory keeps too, `public` that of
    parameters alone. `chunk`: elements of a record (0: a few a block).
    `pushes`: buffers for a block's gradients. `root`: embeddings and the output layer stay on the
    device for a step and take no slot. `file_slots`: 2 where a step never overwrites the last one.
    `context_bytes`, `fragmentation`: of a device's memory, what nobody asked for; `headroom`: the
    share of each device's and host's that stays free.

    What a framework does: `precision` of the layers' products ("" is 16 bits; attention and the
    output stay there).
    `selective`: of each layer "products" (all but attention and every second product), or all of
    every second of the "layers", is computed again. `sequence`: tensor-parallel ranks split
    norms and inputs too. `logit_bytes` a logit and `output_bytes` a parameter of the output
    layer are on the device while the loss is made. `outputs`: what goes to the next stage stays
    until its backward. `hidden`: the share of tensor-parallel traffic that products hide.
    `passes`: how often its kernels cross the device's memory, over what the constants say."""

    placement: Placement
    parallelism: Parallelism = field(default_factory=Parallelism)
    micro_batch: int = 1
    micros: int = 1
    recompute: bool = False
    slots: int = 3
    buffers: int = 3
    kept: int = 0
    staleness: int = 0
    update_at: str = "step"
    overlap: bool = True
    in_turn: bool = False
    topk: float | None = None
    networks: Mapping[str, str] = field(default_factory=dict, hash=False)
    parameter_bytes: float = 2
    gradient_bytes: float = 2
    held_bytes: float = 4
    upstream_bytes: float = 2
    state_bytes: float = 12
    host_bytes: float = 0
    offload: bool = False
    file_slots: int = 2
    resident: float = 0
    public: float = 1
    chunk: int = 0
    pushes: int = 0
    root: bool = True
    context_bytes: float = 1e9
    fragmentation: float = 1.0
    headroom: float = 0.0
    precision: str = ""
    selective: str = ""
    sequence: bool = True
    logit_bytes: float = 6
    output_bytes: float = 0
    outputs: bool = False
    hidden: float = 0
    passes: float = 1

    def __post_init__(self) -> None:
        if isinstance(self.headroom, int | float) and not 0 <= self.headroom < 1:
            raise ConfigError(
                f"`headroom` is {self.headroom!r} in the plan",
                hint="a share of memory: 0 or more, below 1",
            )
        if self.selective not in ("", "products", "layers"):
            raise ConfigError(
                f"`selective` is {self.selective!r} in the plan", hint='"products", "layers" or ""'
            )

    def changed(self, **changes: Any) -> Plan:
        return replace(self, **changes)

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


# keys of a plan.toml of the first edition -> their names now
FORMER_KEYS = {"layout": "parallelism"}


def make_plan(tree: Mapping[str, Any]) -> Plan:
    """Of plain data, as in a plan.toml; what says no `headroom` keeps HEADROOM. Raises
    ConfigError naming the key."""
    tree = {"headroom": HEADROOM, **{FORMER_KEYS.get(key, key): tree[key] for key in tree}}
    known = {f.name for f in fields(Plan)}
    if wrong := next((key for key in tree if key not in known), None):
        raise ConfigError(
            f"unknown key `{wrong}` in the plan",
            hint=did_you_mean(wrong, known) or f"keys are {', '.join(sorted(known))}",
        )
    if "placement" not in tree:
        raise ConfigError(
            "`placement` is missing in the plan", hint=f"known are {', '.join(PLACEMENTS)}"
        )
    parallelism = tree.pop("parallelism", {})
    try:
        ranks = Parallelism(**{**parallelism, "stages": tuple(parallelism.get("stages", ()))})
        plan = Plan(placement(str(tree.pop("placement"))), ranks, **tree)
    except (TypeError, AttributeError) as cause:
        raise ConfigError(
            f"`parallelism` of the plan is {parallelism!r}",
            hint="its keys are dp, tp, pp, stages, cp, ep, vp",
        ) from cause
    least = {"micro_batch": 1, "micros": 1, "slots": 2, "buffers": 1}
    for own in fields(Plan):
        value, kind = getattr(plan, own.name), str(own.type)
        if kind not in KINDS or (value is None and "None" in kind):
            continue
        (kinds, words), low = KINDS[kind], least.get(own.name, 0)
        if type(value) not in kinds or (
            isinstance(value, int | float) and not low <= value < float("inf")
        ):
            more = f", {low} or more" if "number" in words else ""
            raise ConfigError(f"`{own.name}` is {value!r} in the plan", hint=words + more)
    return plan


def load_plan(path: str | Path) -> Plan:
    return make_plan(read_toml(path, "plan"))
