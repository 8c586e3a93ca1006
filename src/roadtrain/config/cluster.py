"""The cluster file: machines, devices and links, with measured, stated or assumed rates.

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

Every rate is for one direction, in bytes or bits per second. An SSD has three limits: its media
(`read`, `write` and `mixed`), the `internal` link to its own processor, and the `uplink` that all
SSDs of a host share. NICs of one kind that name no switch share a switch. The list `assumed` has
the keys of missing values, which are replaced by typical values; the list `measured` has the keys
of measured values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from roadtrain.config.catalogue import tables, template
from roadtrain.errors import ConfigError
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
    """An accelerator, or the CPUs of a host. `peaks`: the peak compute speed in FLOP/s by number
    format ("fp8", "nvfp4"), for formats other than 16 bits."""

    kind: str = Field(default="device", description="model of the device, such as A100-80GB")
    flops: Flops = Field(gt=0, description="peak compute speed in 16 bits")
    peaks: dict[str, Annotated[Flops, Field(gt=0)]] = Field(default_factory=dict)
    memory: Bytes = Field(gt=0, description="bytes of device memory")
    memory_rate: Rate = Field(default=0.0, description="memory bandwidth; 0: assumed from flops")
    copy_rate: Rate = Field(default=0.0, alias="copy", description="to and from host; 0: 12GB/s")
    idle_watts: Number = Field(default=0, description="watts when idle")
    peak_watts: Number = Field(default=0, description="watts when busy; 0: as when idle")

    @property
    def is_host(self) -> bool:
        """Whether the device is the CPUs of the host, and uses the host's memory."""
        return self.kind == "cpu"

    def peak(self, precision: str) -> float:
        """Return the peak compute speed in FLOP/s in the number format `precision`; "" means 16
        bits. Raises ConfigError if the device has no peak for the format."""
        if precision and precision not in self.peaks:
            raise ConfigError(
                f"device {self.kind} has no peak for {precision!r}",
                hint=f"`peaks` of the device: {', '.join(self.peaks) or 'none'}; add {precision!r}",
            )
        return self.peaks[precision] if precision else self.flops


class Ssd(Section):
    """SSDs of one kind. `mixed`: the combined rate of simultaneous reads and writes, as a multiple
    of the rate of reads alone. It is 1 if reads and writes share one rate, and 2 if they do not
    slow each other down. At most `depth` reads and `depth` writes run at the same time. `updates`:
    bytes of optimizer state per second that a processor in the SSD updates (near-storage); 0 if the
    SSD has none."""

    count: Count = Field(default=1, description="number of these SSDs in each machine")
    read: Rate = Field(gt=0, description="read rate of one SSD")
    write: Rate = Field(gt=0, description="write rate of one SSD")
    mixed: Real = Field(default=1.0, ge=1, le=2, description="1: reads and writes share a rate")
    capacity: Bytes = Field(default=0.0, description="bytes of one; needed to keep data on it")
    depth: Count = Field(default=2, description="limit of simultaneous reads, and of writes")
    internal: Rate = Field(default=0.0, description="rate to the SSD's processor; 0: as `read`")
    updates: Rate = Field(default=0.0, description="rate of updates by its processor; 0: none")
    price: Number = Field(default=0, description="cost of buying one SSD")
    directories: tuple[str, ...] = ()
    """mount point of each SSD, needed to run a plan and not to simulate it; `{host}` stands for the
    name of the machine"""

    @model_validator(mode="after")
    def _check_directories(self) -> Self:
        if self.directories and len(self.directories) != self.count:
            raise ValueError(
                f"{self.count} SSDs have {len(self.directories)} directories; give one for each SSD"
            )
        if relative := next((path for path in self.directories if not path.startswith("/")), None):
            raise ValueError(f"the directory {relative!r} of an SSD is not absolute")
        return self


class Nic(Section):
    """Network cards of one kind."""

    kind: Literal["infiniband", "roce", "ethernet"] = "ethernet"
    rate: Rate = Field(gt=0, description="rate of one card in each direction")
    count: Count = Field(default=1, description="number of these cards in each machine")
    latency: Seconds = Field(default=0.0, description="one-way latency; 0: usual for its kind")
    switch: str = Field(default="", description="switch it connects to; default: one for each kind")
    relay: Flag = Field(default=False, description="has a processor and memory (SmartNIC)")

    @property
    def total(self) -> float:
        return self.rate * self.count


def _without_port(address: str) -> str:
    if address.count(":") == 1:
        raise ConfigError(f"the address {address!r} has a port; remove the port")
    return address


Address = Annotated[str, AfterValidator(refusing(_without_port))]


class Switch(Section):
    """A switch of the network. If `rate` is set, the switch is a separate machine, which runs
    `roadtrain serve --switch` and is connected to the network by its own card."""

    name: str = Field(description="name, unique among switches")
    sums: Flag = False
    """it sums gradients on their way and copies parameters to all hosts"""
    multicasts: Flag = False
    """the network delivers one packet to many hosts"""
    slots: Whole = 0
    """number of packets that fit into its table; 0: as many as a plan needs"""
    packet_rate: Number = 0
    """packets per second that it can receive and send, counted together; 0: unlimited"""
    rate: Rate = 0.0
    """rate of its own network card in each direction, if it is a machine beside the network;
    0: it is a switch that all traffic crosses"""
    address: Address = ""
    """address at which hosts reach that machine, without a port"""


def _device(value: object) -> object:
    return template("device", value) if isinstance(value, str) else value


class Host(Section):
    """Machines of one kind. `fabric`: bytes per second that one device sends to, and receives from,
    the other devices of the machine. `updates`: bytes of optimizer state and gradients per second
    that the CPUs process in updates of parameters. `sums`: bytes of received gradients per second
    that the CPUs add up."""

    name: str = Field(description="name of this kind of host")
    count: Count = Field(default=1, description="number of machines")
    devices: Whole = Field(default=0, description="devices per machine; 1 if `device` is set")
    device: Annotated[Device | None, BeforeValidator(refusing(_device))] = None
    fabric: Rate = Field(default=0.0, description="rate between its devices (NVLink); 0: by `copy`")
    memory: Bytes = Field(gt=0, description="bytes of memory of one machine")
    memory_rate: Rate = Field(default=0.0, description="memory bandwidth; 0: 20GB/s is assumed")
    updates: Rate = Field(default=0.0, description="bytes that CPUs update; 0: 60 % of memory_rate")
    sums: Rate = Field(default=0.0, description="bytes that CPUs sum; 0: 60 % of memory_rate")
    ssds: tuple[Ssd, ...] = ()
    uplink: Rate = Field(default=0.0, description="rate that all its SSDs share; 0: 12GB/s")
    packet_rate: Number = Field(default=0, description="packets for switches a second; 0: no limit")
    nics: tuple[Nic, ...] = ()
    price: Number = 0
    """cost of buying one machine"""
    price_per_hour: Number = Field(default=0, description="cost of renting one machine for an hour")
    idle_watts: Number = Field(default=0, description="watts when idle, without devices")
    peak_watts: Number = Field(default=0, description="watts when busy, without devices")
    addresses: tuple[Address, ...] = ()
    """address at which the other hosts reach each machine, without a port"""

    @model_validator(mode="before")
    @classmethod
    def _one_device(cls, tree: Any) -> Any:
        has_device = isinstance(tree, Mapping) and tree.get("device") is not None
        return {"devices": 1, **tree} if has_device else tree

    @property
    def combined(self) -> Self:
        """A single machine with the combined resources of all `count` machines."""
        names = ("memory", "memory_rate", "updates", "sums", "uplink")
        more = {name: getattr(self, name) * self.count for name in names}
        ssds, nics = (
            tuple(part.model_copy(update={"count": part.count * self.count}) for part in parts)
            for parts in (self.ssds, self.nics)
        )
        return self.model_copy(update={**more, "count": 1, "ssds": ssds, "nics": nics})

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        if self.devices and self.device is None:
            raise ValueError(f"host {self.name!r} has devices = {self.devices}, but no `device`")
        if self.addresses and len(self.addresses) != self.count:
            raise ValueError(
                f"host {self.name!r} has count = {self.count} and {len(self.addresses)} addresses;"
                " give one address for each machine, or no addresses"
            )
        for part in (self, *([self.device] if self.device else ())):
            if 0 < part.peak_watts < part.idle_watts:
                raise ValueError(
                    f"host {self.name!r}: peak_watts = {part.peak_watts:g} is less than"
                    f" idle_watts = {part.idle_watts:g}"
                )
        return self


class LinkRate(Section):
    """A link between two switches."""

    between: tuple[str, str] = Field(description="names of the two switches")
    rate: Rate = Field(gt=0, description="rate in each direction, shared by all traffic")
    latency: Seconds = Field(default=0.0, description="one-way latency")


class Cluster(Section):
    name: str = Field(default="cluster", description="name in reports")
    hosts: tuple[Host, ...] = Field(min_length=1)
    switches: tuple[Switch, ...] = ()
    links: tuple[LinkRate, ...] = ()
    processors: Number = Field(default=0, description="processors that all hosts share, in a lab")
    measured: tuple[str, ...] = Field(default=(), description="keys whose values were measured")
    assumed: tuple[str, ...] = Field(default=(), description="keys whose values were assumed")
    price_per_kwh: Number = Field(default=0, description="cost of a kilowatt-hour")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [host.name for host in self.hosts]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two entries of `hosts` are named {twice!r}")
        switches = {switch.name for switch in self.switches}
        ends = [
            (f"a network card of host {host.name!r}", nic.switch)
            for host in self.hosts
            for nic in host.nics
            if nic.switch
        ]
        ends += [("a link", end) for link in self.links for end in link.between]
        for source, end in ends:
            if end not in switches:
                raise ValueError(
                    f"{source} leads to switch {end!r}, which is not defined; there are "
                    f"{len(switches)} switches ({', '.join(sorted(switches)) or 'none'})"
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
        """Return the name of the switch that a network card is connected to."""
        return nic.switch or nic.kind

    def common(self, hosts: Sequence[Host]) -> tuple[Nic, ...]:
        """Return the network card of each host that connects the hosts fastest.

        Cards of the same kind on the same switch are preferred (Yang et al., Holmes, section 3.2).
        Otherwise, the result has the fastest card of each host. The `rate` of these cards is
        limited to, and their `latency` includes, that of the slowest route between their switches.
        Raises ConfigError if the hosts are not connected.
        """
        cards = fastest_common([host.nics for host in hosts], self.switch_of, lambda nic: nic.total)
        if cards is not None:
            return cards
        best = tuple(max(host.nics, key=lambda n: n.total) for host in hosts if host.nics)
        link = self._slowest_route(best)
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
        """Return an error that says why the hosts cannot reach each other, and what to change."""
        names = list(dict.fromkeys(host.name for host in hosts))
        ends = {host.name: dict.fromkeys(map(self.switch_of, host.nics)) for host in hosts}
        bare = [name for name in names if not ends[name]]
        if bare:
            why = f"{' and '.join(bare)} {'has' if len(bare) == 1 else 'have'} no network card"
            hint = f'give {" and ".join(bare)} `nics = [{{ rate = "10Gbit/s" }}]`'
        else:
            why = "; ".join(f"{name} is connected to {', '.join(ends[name])}" for name in names)
            hint = "give them cards of one kind, or add a [[links]] between their switches"
        many = f"{len(hosts)} hosts named" if len(names) == 1 else "hosts"
        return ConfigError(
            f"{many} {', '.join(names)} have no network in common: {why}",
            hint=f"{hint} in the cluster file",
        )

    def between(self, nics: Sequence[Nic]) -> float:
        """Return the rate, in bytes per second, of the slowest route between the switches of
        `nics`. Returns infinity if all cards are on one switch, or if links do not connect all of
        the switches."""
        link = self._slowest_route(nics)
        return float("inf") if link is None else link.rate

    def _slowest_route(self, nics: Sequence[Nic]) -> LinkRate | None:
        """Return the slowest route between the switches of `nics`; None if there is no route or
        only one switch."""
        ends = sorted({self.switch_of(nic) for nic in nics})
        routes = [self.route(a, b) for a, b in itertools.combinations(ends, 2)]
        found = [route for route in routes if route is not None]
        return min(found, key=lambda r: r.rate) if found and len(found) == len(routes) else None

    def route(self, here: str, there: str) -> LinkRate | None:
        """Return the route with the fewest links between two switches: its lowest rate and total
        latency. Returns None if the switches are not connected."""
        routes = {here: LinkRate.model_construct(between=(here, here), rate=float("inf"))}
        front, links = [here], sorted(self.links, key=lambda link: link.rate)
        for at in front:  # breadth first: `front` grows while it is iterated
            for link in links:
                end = link.between[link.between[0] == at]
                if at in link.between and end not in routes:
                    rate, wait = min(routes[at].rate, link.rate), routes[at].latency + link.latency
                    ends = (here, end)
                    routes[end] = LinkRate.model_construct(between=ends, rate=rate, latency=wait)
                    front.append(end)
        return routes.get(there)

    def to_toml(self) -> str:
        return as_toml(self, exclude_defaults=True, by_alias=True)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, or the template named `path`. Raises ConfigError."""
    if not Path(path).suffix and str(path) in tables()["cluster"]:
        return make_cluster(template("cluster", str(path)))
    return make_cluster(read_toml(path, "cluster file"), str(path))


def make_cluster(tree: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """Build a cluster from a table. `where`: name of the file in error messages. Raises
    ConfigError, which names the invalid key."""
    return _filled(checked(Cluster, tree, where))


def _filled(cluster: Cluster) -> Cluster:
    """Return a copy with typical values for missing keys, which are also listed in `assumed`."""
    assumed, hosts = list(cluster.assumed), []
    for host in cluster.hosts:
        changes, names = _guessed(host)
        assumed += [f"hosts.{host.name}.{name}" for name in names]
        hosts.append(host.model_copy(update=changes))
    listed = tuple(dict.fromkeys(assumed))
    return cluster.model_copy(update={"hosts": tuple(hosts), "assumed": listed})


def _guessed(host: Host) -> tuple[dict[str, Any], list[str]]:
    """Return a dict from attributes of the host to typical values for missing keys, and the keys to
    list as assumed."""
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
            # without a fabric, devices reach each other through their host
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
        names.append("ssds.internal")  # assumed to be as fast as reads
    return changes, names


def guesses(cluster: Cluster) -> dict[str, tuple[float, str]]:
    """Return a dict from each key in `cluster.assumed` to the pair (value, text to print). Rates
    are in bytes per second, and latencies in seconds."""
    out = {}
    for host in cluster.hosts:
        prefix = f"hosts.{host.name}."
        for name in (name for name in cluster.assumed if name.startswith(prefix)):
            for what, value, text in _values(host, name.removeprefix(prefix)):
                out[f"{prefix}{what}"] = value, text
    return out


def _values(host: Host, what: str) -> list[tuple[str, float, str]]:
    """Return the values that were assumed for a key of a host, as tuples (key, value, text to
    print)."""
    device, ssds = host.device, host.ssds
    if what == "device":
        return [*_values(host, "device.copy"), *_values(host, "device.memory_rate")]
    if what in ("nics", "nics.latency"):
        return [("nics.latency", nic.latency, show_seconds(nic.latency)) for nic in host.nics][:1]
    if what == "ssds.mixed":
        words = "reads and writes share one rate" if ssds and ssds[0].mixed == 1 else "1 to 2"
        return [(what, ssd.mixed, f"{ssd.mixed:g} ({words})") for ssd in ssds][:1]
    if what == "ssds.depth":
        text = "{} reads and as many writes at once"
        return [(what, float(ssd.depth), text.format(ssd.depth)) for ssd in ssds][:1]
    values = {
        "device.copy": device.copy_rate if device else 0.0,
        "device.memory_rate": device.memory_rate if device else 0.0,
        "ssds.internal": max((ssd.internal or ssd.read for ssd in ssds), default=0.0),
    }
    value = values[what] if what in values else float(getattr(host, what, 0.0) or 0.0)
    return [(what, value, show_rate(value))]


def least_of(hosts: Sequence[Host]) -> Host:
    """Return an imaginary host that has the smallest amount of each resource among `hosts`, and the
    network cards of the first host."""
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
        # the largest number of devices, because they share their host's memory
        changes |= {"device": slowest.model_copy(update=own)}
        changes |= {"devices": max(host.devices for host in hosts)}
    if all(host.ssds for host in hosts):
        every = [ssd for host in hosts for ssd in host.ssds]
        own = _least(every, "mixed", "depth") | {"count": 1}
        for name in ("read", "write", "capacity", "internal", "updates"):
            # the sum over all SSDs of a host; an internal link without a rate is as fast as reads
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
    return {name: min(getattr(part, name) for part in parts) for name in names}
