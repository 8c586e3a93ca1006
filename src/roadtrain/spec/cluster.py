"""Cluster: what machines and links there are, with measured, stated or assumed rates. <-> cluster.toml

    name = "two servers and a spare host"
    [[hosts]]
    name = "gpu"
    count = 2
    devices = 8
    device = "A100-80GB"                       # a template, or a table: [hosts.device]
    memory = "512GB"
    nics = [{ kind = "ethernet", rate = "100Gbit/s" }]
    ssds = [{ count = 4, read = "6.5GB/s", write = "3.4GB/s", capacity = "3.84TB" }]
    [[hosts]]
    name = "spare"
    memory = "128GB"
    nics = [{ kind = "ethernet", rate = "25Gbit/s" }]

Every rate is of one direction and bytes (or bits) a second. An SSD has three limits: its media (`read`, `write`, and
`mixed`: 1 where reads and writes share one, 2 where they do not touch), the `internal` link to a processor of its own,
and the host's `uplink`, which all SSDs of a host share. NICs of one kind meet at one switch, unless they name others.
What the file leaves out is filled in and listed in `assumed`; what was measured, in `measured`. Arithmetic only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, model_validator

from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.spec.job import Section, did_you_mean, read_toml
from roadtrain.units import parse_bytes, parse_flops, parse_rate, parse_seconds

KINDS = ("infiniband", "roce", "ethernet")  # the fastest first, where rates are the same


def _with_unit(parse: Callable[[str], float]) -> BeforeValidator:
    def read(value: object) -> object:
        if isinstance(value, (int, float)) and value:
            raise ValueError(f"{value} has no unit; write a number and a unit")
        try:
            return parse(str(value)) if value else 0.0
        except RoadtrainError as error:
            raise ValueError(" ".join(str(error).replace("hint:", "").split())) from error

    return BeforeValidator(read)


Rate = Annotated[float, _with_unit(parse_rate), PlainSerializer(lambda v: f"{v:.0f}B/s" if v else 0)]
Bytes = Annotated[float, _with_unit(parse_bytes), PlainSerializer(lambda v: f"{v:.0f}B" if v else 0)]
Flops = Annotated[float, _with_unit(parse_flops), PlainSerializer(lambda v: f"{v / 1e12:.6f}TFLOP/s" if v else 0)]
Seconds = Annotated[float, _with_unit(parse_seconds), PlainSerializer(lambda v: f"{v * 1e9:.0f}ns" if v else 0)]


class Device(Section):
    """One accelerator. `flops`: peak of the 16-bit dtype that is computed in, `peaks`: of others by name ("fp8",
    "nvfp4"); `copy`: to and from its host (PCIe)."""

    kind: str = "device"
    flops: Flops
    peaks: dict[str, Flops] = Field(default_factory=dict)
    memory: Bytes
    memory_rate: Rate = 0.0
    copy_rate: Rate = Field(default=0.0, alias="copy")
    idle_watts: float = Field(default=0, ge=0)
    peak_watts: float = Field(default=0, ge=0)

    def peak(self, precision: str) -> float:
        """FLOP/s; "" is the 16-bit dtype. Raises ConfigError for one that it has no peak of."""
        if precision and precision not in self.peaks:
            raise ConfigError(f"device {self.kind} has no peak for {precision!r}",
                              hint=f"known are {', '.join(self.peaks) or 'none'}; give it in `peaks`")
        return self.peaks[precision] if precision else self.flops


class Ssd(Section):
    """`updates`: state bytes a second that a processor beside it updates (near-storage), over `internal`. `depth`: how
    many reads, and writes, share its rate at once; 1: in the order of arrival."""

    count: int = Field(default=1, ge=1)
    read: Rate
    write: Rate
    mixed: float = Field(default=1.0, ge=1, le=2)
    capacity: Bytes = 0.0
    depth: int = Field(default=2, ge=1)
    internal: Rate = 0.0
    updates: Rate = 0.0
    price: float = Field(default=0, ge=0)


class Nic(Section):
    """`count` cards of `rate` each. `relay`: it has a processor and memory of its own (SmartNIC)."""

    kind: Literal["infiniband", "roce", "ethernet"] = "ethernet"
    rate: Rate
    count: int = Field(default=1, ge=1)
    latency: Seconds = 0.0
    switch: str = ""
    relay: bool = False

    @property
    def total(self) -> float:
        return self.rate * self.count


class Switch(Section):
    name: str
    sums: bool = Field(default=False, description="adds gradients up on the way")
    multicasts: bool = Field(default=False, description="sends one packet to many")


class Host(Section):
    """`count` machines alike. `updates`: bytes of state and gradient a second that its processors update; `sums`: bytes
    of arriving gradient that they add up. `fabric`: between its devices, of one device's direction (NVLink)."""

    name: str
    count: int = Field(default=1, ge=1)
    devices: int = Field(default=0, ge=0)
    device: Device | None = None
    fabric: Rate = 0.0
    memory: Bytes
    memory_rate: Rate = 0.0
    updates: Rate = 0.0
    sums: Rate = 0.0
    ssds: tuple[Ssd, ...] = ()
    uplink: Rate = 0.0
    nics: tuple[Nic, ...] = ()
    price: float = Field(default=0, ge=0, description="of buying one")
    price_per_hour: float = Field(default=0, ge=0)
    idle_watts: float = Field(default=0, ge=0)
    peak_watts: float = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _templates(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping) or tree.get("device") is None:
            return tree
        device = tree["device"]
        return {"devices": 1, **tree, "device": template("device", device) if isinstance(device, str) else device}

    @property
    def together(self) -> Self:
        """One machine that has what all `count` have."""
        names = ("memory", "memory_rate", "updates", "sums", "uplink")
        more = {name: getattr(self, name) * self.count for name in names}
        ssds, nics = (tuple(one.model_copy(update={"count": one.count * self.count}) for one in every)
                      for every in (self.ssds, self.nics))
        return self.model_copy(update={**more, "count": 1, "ssds": ssds, "nics": nics})

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.devices and self.device is None:
            raise ValueError(f"host {self.name!r} has {self.devices} devices but no `device`")
        return self


class Link(Section):
    """Between two switches, all that crosses them together."""

    between: tuple[str, str]
    rate: Rate
    latency: Seconds = 0.0


class Cluster(Section):
    name: str = "cluster"
    hosts: tuple[Host, ...] = Field(min_length=1)
    switches: tuple[Switch, ...] = ()
    links: tuple[Link, ...] = ()
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    price_per_kwh: float = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _meets(self) -> Self:
        names = [host.name for host in self.hosts]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two kinds of hosts are called {twice!r}")
        known = {switch.name for switch in self.switches}
        ends = [(f"a card of host {host.name!r}", nic.switch) for host in self.hosts for nic in host.nics if nic.switch]
        ends += [("a link", end) for link in self.links for end in link.between]
        for what, end in ends:
            if end not in known:
                raise ValueError(f"{what} leads to a switch {end!r} that is not there; there are "
                                 f"{len(known)} ({', '.join(sorted(known)) or 'none'})")
        return self

    @property
    def workers(self) -> tuple[Host, ...]:
        return tuple(host for host in self.hosts if host.devices)

    @property
    def spares(self) -> tuple[Host, ...]:
        return tuple(host for host in self.hosts if not host.devices)

    @property
    def device_count(self) -> int:
        return sum(host.count * host.devices for host in self.hosts)

    def switch_of(self, nic: Nic) -> str:
        """The name of the switch where `nic` meets others; cards that name none meet those of their kind."""
        return nic.switch or nic.kind

    def common(self, hosts: Sequence[Host]) -> tuple[Nic, ...]:
        """The cards (one a host, in order) by which all of `hosts` reach each other fastest: of one kind and one switch
        (Yang et al. (Holmes), section 3.2, the general case), else of different kinds over links between switches.
        Raises ConfigError where there are none."""
        ways = []
        for nic in hosts[0].nics:
            nics = [max((n for n in host.nics if n.kind == nic.kind and self.switch_of(n) == self.switch_of(nic)),
                        key=lambda n: n.total, default=None) for host in hosts]
            own = [n for n in nics if n is not None]
            if len(own) == len(hosts):
                ways.append((min(n.total for n in own), -KINDS.index(nic.kind), tuple(own)))
        if ways:
            return max(ways, key=lambda way: way[:2])[2]
        best = tuple(max(host.nics, key=lambda n: n.total) for host in hosts if host.nics)
        joined = {frozenset(link.between) for link in self.links}
        ends = {self.switch_of(nic) for nic in best}
        if len(best) == len(hosts) and len(ends) == 2 and frozenset(ends) in joined:
            return best
        raise ConfigError(
            f"hosts {', '.join(dict.fromkeys(h.name for h in hosts))} have no network in common",
            hint="give them cards of one kind, or a [[links]] between their switches")

    def between(self, nics: Sequence[Nic]) -> float:
        """Bytes a second of the link between the switches of these cards; infinite where it is one switch."""
        ends = frozenset(self.switch_of(nic) for nic in nics)
        return min((link.rate for link in self.links if frozenset(link.between) == ends), default=float("inf"))

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, exclude_defaults=True, by_alias=True))


def load_cluster(path: str | Path) -> Cluster:
    """Raises ConfigError: what is wrong, with both numbers, in one sentence. A path that is no file may be the name of
    a template."""
    if not Path(path).suffix and str(path) in _templates()["cluster"]:
        return make_cluster(template("cluster", str(path)))
    return make_cluster(read_toml(path, "cluster file"))


def make_cluster(tree: Mapping[str, Any]) -> Cluster:
    """Raises ConfigError naming the key and the nearest valid one."""
    try:
        cluster = Cluster.model_validate(tree)
    except ValidationError as cause:
        raise _explained(cause) from cause
    return _filled(cluster)


def _filled(cluster: Cluster) -> Cluster:
    """What was left out, by what is common; all of it listed."""
    assumed, hosts = list(cluster.assumed), []
    for host in cluster.hosts:
        guesses: dict[str, Any] = {}
        for name, value in (("memory_rate", 20e9), ("updates", 0.6 * (host.memory_rate or 20e9)),
                            ("sums", 0.6 * (host.memory_rate or 20e9)), ("uplink", 12e9)):
            if not getattr(host, name) and (name != "uplink" or host.ssds):
                guesses[name] = value
        if (device := host.device) is not None and (not device.copy_rate or not device.memory_rate):
            guesses["device"] = device.model_copy(update={"copy_rate": device.copy_rate or 12e9,
                                                          "memory_rate": device.memory_rate or device.flops / 200})
        if any(not nic.latency for nic in host.nics):
            guesses["nics"] = tuple(nic.model_copy(update={"latency": nic.latency or (
                30e-6 if nic.kind == "ethernet" else 5e-6)}) for nic in host.nics)
        assumed += [f"hosts.{host.name}.{name}" for name in guesses]
        hosts.append(host.model_copy(update=guesses))
    return cluster.model_copy(update={"hosts": tuple(hosts), "assumed": tuple(dict.fromkeys(assumed))})


def template(kind: str, name: str) -> dict[str, Any]:
    """Of templates.toml: a `device` or a `cluster`, without its `source`. Raises ConfigError."""
    known = _templates()[kind]
    if name not in known:
        raise ConfigError(f"no {kind} is called {name!r}", hint=did_you_mean(name, known) or
                          f"known are {', '.join(known)}; or give its figures")
    return {key: value for key, value in known[name].items() if key != "source"} | (
        {"kind": name} if kind == "device" else {})


@cache
def _templates() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("roadtrain.spec").joinpath("templates.toml").read_text())


def _explained(cause: ValidationError) -> ConfigError:
    error = cause.errors()[0]
    where = [*error["loc"]]
    key = ".".join(str(part) for part in where)
    if error["type"] == "extra_forbidden":
        inside: Any = Cluster
        for part in where[:-1]:
            names = {"hosts": Host, "device": Device, "ssds": Ssd, "nics": Nic, "switches": Switch, "links": Link}
            inside = names.get(str(part), inside)
        known = [field.alias or name for name, field in inside.model_fields.items()]
        return ConfigError(f"unknown key `{key}` in the cluster file",
                           hint=did_you_mean(str(where[-1]), known) or f"keys here are {', '.join(known)}")
    if error["type"] == "missing":
        return ConfigError(f"`{key}` is missing in the cluster file")
    return ConfigError(f"`{key}`: {str(error['msg']).removeprefix('Value error, ')}" if key else
                       str(error["msg"]).removeprefix("Value error, "))
