"""Cluster: what machines and links there are, with measured, stated or assumed rates. <->
cluster.toml

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

Every rate is of one direction and bytes (or bits) a second. An SSD has three limits: its media
(`read`, `write`, and
`mixed`: 1 where reads and writes share one, 2 where they do not touch), the `internal` link to a
processor of its own, and the host's `uplink`, which all SSDs of a host share. NICs of one kind meet
at one switch, unless they name others. What the file leaves out is filled in and listed in
`assumed` (`guesses` has the values); what was measured, in `measured`. Arithmetic only.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from roadtrain.errors import ConfigError
from roadtrain.options.names import did_you_mean
from roadtrain.options.schema import (
    Bytes,
    Count,
    Flag,
    Flops,
    Number,
    Rate,
    Real,
    Seconds,
    Section,
    Whole,
    as_toml,
    checked,
    read_toml,
    refusing,
)
from roadtrain.stages.networks import fastest_common
from roadtrain.units import show_rate, show_seconds


class Device(Section):
    """One accelerator. `flops`: peak of the 16-bit dtype that is computed in, `peaks`: of others
    by name ("fp8", "nvfp4"); `copy`: to and from its host (PCIe)."""

    kind: str = "device"
    flops: Flops = Field(gt=0)
    peaks: dict[str, Annotated[Flops, Field(gt=0)]] = Field(default_factory=dict)
    memory: Bytes = Field(gt=0)
    memory_rate: Rate = 0.0
    copy_rate: Rate = Field(default=0.0, alias="copy")
    idle_watts: Number = 0
    peak_watts: Number = 0

    @property
    def is_host(self) -> bool:
        """Whether it is the host's processors, so that its memory is the host's."""
        return self.kind == "cpu"

    def peak(self, precision: str) -> float:
        """FLOP/s; "" is the 16-bit dtype. Raises ConfigError for one that it has no peak of."""
        if precision and precision not in self.peaks:
            raise ConfigError(
                f"device {self.kind} has no peak for {precision!r}",
                hint=f"known are {', '.join(self.peaks) or 'none'}; give it in `peaks`",
            )
        return self.peaks[precision] if precision else self.flops


class Ssd(Section):
    """`updates`: state bytes a second that a processor beside it updates (near-storage), over
    `internal`. `depth`: how many reads, and writes, share its rate at once; 1: in the order of
    arrival."""

    count: Count = 1
    read: Rate = Field(gt=0)
    write: Rate = Field(gt=0)
    mixed: Real = Field(default=1.0, ge=1, le=2)
    capacity: Bytes = 0.0
    depth: Count = 2
    internal: Rate = 0.0
    updates: Rate = 0.0
    price: Number = 0
    directories: tuple[str, ...] = ()
    """where each is mounted, which `plan` needs for what runs; `{host}` stands for the name of the
    machine"""

    @model_validator(mode="after")
    def _one_directory_each(self) -> Self:
        if self.directories and len(self.directories) != self.count:
            raise ValueError(
                f"{self.count} SSDs have {len(self.directories)} directories, give one each or none"
            )
        if relative := next((one for one in self.directories if not one.startswith("/")), None):
            raise ValueError(f"the directory {relative!r} of an SSD does not begin with /")
        return self


class Nic(Section):
    """`count` cards of `rate` each. `relay`: it has a processor and memory of its own
    (SmartNIC)."""

    kind: Literal["infiniband", "roce", "ethernet"] = "ethernet"
    rate: Rate = Field(gt=0)
    count: Count = 1
    latency: Seconds = 0.0
    switch: str = ""
    relay: Flag = False

    @property
    def total(self) -> float:
        return self.rate * self.count


def _without_port(address: str) -> str:
    if address.count(":") == 1:
        raise ConfigError(f"the address {address!r} has a port, give it none")
    return address


Address = Annotated[str, AfterValidator(refusing(_without_port))]


class Switch(Section):
    """Of the network, or a machine beside it that runs `roadtrain serve --switch` (`rate`)."""

    name: str
    sums: Flag = False
    """adds gradients up on the way, and copies parameters to all"""
    multicasts: Flag = False
    """the network sends one packet to many"""
    slots: Whole = 0
    """packets that its table has room for; 0: all that a plan asks for"""
    packet_rate: Number = 0
    """that it takes in and sends out a second, together; 0: any number"""
    rate: Rate = 0.0
    """of its own card, each way, where it is a machine beside the network; 0: it is in the way of
    all that crosses it"""
    address: Address = ""
    """by which hosts reach the machine that it is, without a port"""


def _device(given: object) -> object:
    return template("device", given) if isinstance(given, str) else given


class Host(Section):
    """`count` machines alike. `updates`: bytes of state and gradient a second that its processors
    update; `sums`: bytes of arriving gradient that they add up. `fabric`: between its devices, of
    one device's direction (NVLink).
    """

    name: str
    count: Count = 1
    devices: Whole = 0
    device: Annotated[Device | None, BeforeValidator(refusing(_device))] = None
    fabric: Rate = 0.0
    memory: Bytes = Field(gt=0)
    memory_rate: Rate = 0.0
    updates: Rate = 0.0
    sums: Rate = 0.0
    ssds: tuple[Ssd, ...] = ()
    uplink: Rate = 0.0
    nics: tuple[Nic, ...] = ()
    price: Number = 0
    """of buying one"""
    price_per_hour: Number = 0
    idle_watts: Number = 0
    peak_watts: Number = 0
    addresses: tuple[Address, ...] = ()
    """by which the others reach each of them, without a port"""

    @model_validator(mode="before")
    @classmethod
    def _one_device(cls, tree: Any) -> Any:
        has_device = isinstance(tree, Mapping) and tree.get("device") is not None
        return {"devices": 1, **tree} if has_device else tree

    @property
    def together(self) -> Self:
        """One machine that has what all `count` have."""
        names = ("memory", "memory_rate", "updates", "sums", "uplink")
        more = {name: getattr(self, name) * self.count for name in names}
        ssds, nics = (
            tuple(one.model_copy(update={"count": one.count * self.count}) for one in every)
            for every in (self.ssds, self.nics)
        )
        return self.model_copy(update={**more, "count": 1, "ssds": ssds, "nics": nics})

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.devices and self.device is None:
            raise ValueError(f"host {self.name!r} has {self.devices} devices but no `device`")
        if self.addresses and len(self.addresses) != self.count:
            raise ValueError(
                f"host {self.name!r} is there {self.count} times and has {len(self.addresses)}"
                " addresses, give one each or none"
            )
        for what in (self, *([self.device] if self.device else ())):
            if 0 < what.peak_watts < what.idle_watts:
                raise ValueError(
                    f"host {self.name!r}: {what.peak_watts:g} W at most are less than"
                    f" {what.idle_watts:g} W idle"
                )
        return self


class LinkRate(Section):
    """Between two switches, all that crosses them together."""

    between: tuple[str, str]
    rate: Rate = Field(gt=0)
    latency: Seconds = 0.0


class Cluster(Section):
    name: str = "cluster"
    hosts: tuple[Host, ...] = Field(min_length=1)
    switches: tuple[Switch, ...] = ()
    links: tuple[LinkRate, ...] = ()
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    price_per_kwh: Number = 0

    @model_validator(mode="after")
    def _meets(self) -> Self:
        names = [host.name for host in self.hosts]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two kinds of hosts are called {twice!r}")
        known = {switch.name for switch in self.switches}
        ends = [
            (f"a card of host {host.name!r}", nic.switch)
            for host in self.hosts
            for nic in host.nics
            if nic.switch
        ]
        ends += [("a link", end) for link in self.links for end in link.between]
        for what, end in ends:
            if end not in known:
                raise ValueError(
                    f"{what} leads to a switch {end!r} that is not there; there are "
                    f"{len(known)} ({', '.join(sorted(known)) or 'none'})"
                )
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
        """The name of the switch where `nic` meets others; cards that name none meet those of
        their kind."""
        return nic.switch or nic.kind

    def common(self, hosts: Sequence[Host]) -> tuple[Nic, ...]:
        """The cards (one a host, in order) by which all of `hosts` reach each other fastest: of one
        kind and one switch (Yang et al. (Holmes), section 3.2, the general case), else of different
        kinds or switches over links between these, with what the slowest link leaves of their rate
        and with all latency. Raises ConfigError where there are none.
        """
        way = fastest_common([host.nics for host in hosts], self.switch_of, lambda nic: nic.total)
        if way is not None:
            return way
        best = tuple(max(host.nics, key=lambda n: n.total) for host in hosts if host.nics)
        link = self._slowest_way(best)
        if len(best) == len(hosts) and link is not None:
            return tuple(
                nic.model_copy(
                    update={
                        "rate": min(nic.total, link.rate),
                        "count": 1,
                        "latency": nic.latency + link.latency,
                    }
                )
                for nic in best
            )
        raise self._apart(hosts)

    def _apart(self, hosts: Sequence[Host]) -> ConfigError:
        """Say why hosts cannot reach each other, and which keys of the file would change it."""
        names = list(dict.fromkeys(host.name for host in hosts))
        ends = {host.name: dict.fromkeys(map(self.switch_of, host.nics)) for host in hosts}
        bare = [name for name in names if not ends[name]]
        if bare:
            why = f"{' and '.join(bare)} {'has' if len(bare) == 1 else 'have'} no network card"
            hint = f'give {" and ".join(bare)} `nics = [{{ rate = "10Gbit/s" }}]`'
        else:
            why = "; ".join(f"{name} is at {', '.join(ends[name])}" for name in names)
            hint = "give them cards of one kind, or a [[links]] between their switches"
        many = f"{len(hosts)} hosts called" if len(names) == 1 else "hosts"
        return ConfigError(
            f"{many} {', '.join(names)} have no network in common: {why}",
            hint=f"{hint} in the cluster file",
        )

    def between(self, nics: Sequence[Nic]) -> float:
        """Bytes a second of the slowest way between the switches of these cards; infinite where it
        is one switch, or where no links lead from one to another."""
        link = self._slowest_way(nics)
        return float("inf") if link is None else link.rate

    def _slowest_way(self, nics: Sequence[Nic]) -> LinkRate | None:
        """Between any two of the cards' switches, as one link; None where it is one switch, or
        where two are not connected."""
        ends = sorted({self.switch_of(nic) for nic in nics})
        ways = [self.way(a, b) for a, b in itertools.combinations(ends, 2)]
        found = [way for way in ways if way is not None]
        return min(found, key=lambda way: way.rate) if found and len(found) == len(ways) else None

    def way(self, here: str, there: str) -> LinkRate | None:
        """From one switch to another by the fewest links, as one link; None where none lead
        there."""
        ways = {here: LinkRate.model_construct(between=(here, here), rate=float("inf"))}
        front, links = [here], sorted(self.links, key=lambda link: link.rate)
        for at in front:  # grows meanwhile
            for link in links:
                end = link.between[link.between[0] == at]
                if at in link.between and end not in ways:
                    rate, latency = min(ways[at].rate, link.rate), ways[at].latency + link.latency
                    ends = (here, end)
                    ways[end] = LinkRate.model_construct(between=ends, rate=rate, latency=latency)
                    front.append(end)
        return ways.get(there)

    def to_toml(self) -> str:
        return as_toml(self, exclude_defaults=True, by_alias=True)


def load_cluster(path: str | Path) -> Cluster:
    """Raises ConfigError: what is wrong, with both numbers, in one sentence. A path that is no
    file may be the name of a template."""
    if not Path(path).suffix and str(path) in _templates()["cluster"]:
        return make_cluster(template("cluster", str(path)))
    return make_cluster(read_toml(path, "cluster file"), str(path))


def make_cluster(tree: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """`where`: the file, for errors. Raises ConfigError naming the key."""
    return _filled(checked(Cluster, tree, where))


def _filled(cluster: Cluster) -> Cluster:
    """What was left out, by what is common; all of it listed."""
    assumed, hosts = list(cluster.assumed), []
    for host in cluster.hosts:
        changes, names = _guessed(host)
        assumed += [f"hosts.{host.name}.{name}" for name in names]
        hosts.append(host.model_copy(update=changes))
    listed = tuple(dict.fromkeys(assumed))
    return cluster.model_copy(update={"hosts": tuple(hosts), "assumed": listed})


def _guessed(host: Host) -> tuple[dict[str, Any], list[str]]:
    """Values of what the host's tables leave out, and what `assumed` calls them."""
    processed = 0.6 * (host.memory_rate or 20e9)
    usual = {"memory_rate": 20e9, "updates": processed, "sums": processed}
    usual |= {"uplink": 12e9} if host.ssds else {}
    changes: dict[str, Any] = {k: rate for k, rate in usual.items() if not getattr(host, k)}
    names = [*changes]
    if (device := host.device) is not None:
        own = {"copy_rate": 12e9, "memory_rate": device.flops / 200}
        own = {key: rate for key, rate in own.items() if not getattr(device, key)}
        names += [f"device.{'copy' if key == 'copy_rate' else key}" for key in own]
        changes["device"] = device.model_copy(update=own)
        if host.devices > 1 and not host.fabric:
            # they reach each other as they reach their host
            changes["fabric"] = changes["device"].copy_rate
            names.append("fabric")
    if any(not nic.latency for nic in host.nics):
        common = {"ethernet": 30e-6, "roce": 5e-6, "infiniband": 5e-6}
        changes["nics"] = tuple(
            nic.model_copy(update={"latency": nic.latency or common[nic.kind]}) for nic in host.nics
        )
        names.append("nics.latency")
    for name in ("mixed", "depth"):
        if any(name not in ssd.model_fields_set for ssd in host.ssds):
            names.append(f"ssds.{name}")
    if any(ssd.updates and not ssd.internal for ssd in host.ssds):
        names.append("ssds.internal")  # as fast as its reads
    return changes, names


def guesses(cluster: Cluster) -> dict[str, tuple[float, str]]:
    """Of all that is assumed: its value (bytes a second, seconds, a number) and how people say
    it."""
    out = {}
    for host in cluster.hosts:
        prefix = f"hosts.{host.name}."
        for name in (name for name in cluster.assumed if name.startswith(prefix)):
            for what, value, said in _values(host, name.removeprefix(prefix)):
                out[f"{prefix}{what}"] = value, said
    return out


def _values(host: Host, what: str) -> list[tuple[str, float, str]]:
    """What is called so of a host, with its value; `nics` and `device` are all that could be
    left out of them."""
    device, ssds = host.device, host.ssds
    if what == "device":
        return [*_values(host, "device.copy"), *_values(host, "device.memory_rate")]
    if what in ("nics", "nics.latency"):
        return [("nics.latency", nic.latency, show_seconds(nic.latency)) for nic in host.nics][:1]
    if what == "ssds.mixed":
        words = "reads and writes share one rate" if ssds and ssds[0].mixed == 1 else "of at most 2"
        return [(what, ssd.mixed, f"{ssd.mixed:g} ({words})") for ssd in ssds][:1]
    if what == "ssds.depth":
        said = "{} reads at once, and writes"
        return [(what, float(ssd.depth), said.format(ssd.depth)) for ssd in ssds][:1]
    values = {
        "device.copy": device.copy_rate if device else 0.0,
        "device.memory_rate": device.memory_rate if device else 0.0,
        "ssds.internal": max((ssd.internal or ssd.read for ssd in ssds), default=0.0),
    }
    value = values[what] if what in values else float(getattr(host, what, 0.0) or 0.0)
    return [(what, value, show_rate(value))]


def least_of(hosts: Sequence[Host]) -> Host:
    """One host that has of each thing what the one with least has: what a group of them can rely
    on. Its cards are the first host's."""
    first = hosts[0]
    if all(host is first or host == first for host in hosts):
        return first
    changes = _least(hosts, "memory", "memory_rate", "updates", "sums", "uplink", "fabric")
    changes |= {"name": " and ".join(dict.fromkeys(host.name for host in hosts)), "ssds": ()}
    devices = [host.device for host in hosts if host.device is not None]
    if devices:
        slowest = min(devices, key=lambda device: device.flops)
        own: dict[str, Any] = _least(devices, "memory", "memory_rate", "copy_rate")
        own["peaks"] = {
            name: min(device.peaks[name] for device in devices)
            for name in slowest.peaks
            if all(name in device.peaks for device in devices)
        }
        # of which each takes of its host's memory
        changes |= {"device": slowest.model_copy(update=own)}
        changes |= {"devices": max(host.devices for host in hosts)}
    if all(host.ssds for host in hosts):
        every = [ssd for host in hosts for ssd in host.ssds]
        own = _least(every, "mixed", "depth") | {"count": 1}
        for name in ("read", "write", "capacity", "internal", "updates"):
            # of a host all together; an internal link without a rate is as fast as reads
            own[name] = min(
                sum(
                    s.count * (getattr(s, name) or s.read * (name == "internal")) for s in host.ssds
                )
                for host in hosts
            )
        if not all(ssd.updates for ssd in every):
            own["updates"] = 0.0
        changes["ssds"] = (every[0].model_copy(update=own),)
    return first.model_copy(update=changes)


def _least(parts: Sequence[Any], *names: str) -> dict[str, Any]:
    """The least of what parts have of each name."""
    return {name: min(getattr(part, name) for part in parts) for name in names}


def template(kind: str, name: str) -> dict[str, Any]:
    """Of devices.toml: a `device` or a `cluster`, without its `source`. Raises ConfigError."""
    known = _templates()[kind]
    if name not in known:
        raise ConfigError(
            f"no {kind} is called {name!r}",
            hint=did_you_mean(name, known) or f"known are {', '.join(known)}; or give its figures",
        )
    named = {"kind": name} if kind == "device" else {}
    return {key: value for key, value in known[name].items() if key != "source"} | named


@cache
def _templates() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("roadtrain.config").joinpath("devices.toml").read_text())
