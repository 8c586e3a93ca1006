"""Detect this host's network cards: their interfaces, addresses, kinds and rates.

The kind (InfiniBand, RoCE or Ethernet) is certain for an RDMA device and for an InfiniBand
interface. Any other card counts as Ethernet. Interfaces that are down, the loopback interface,
bridges without a card (container networks) and link-local addresses are left out. Assumes Linux.
Does NOT choose among cards (stages/networks.py).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from roadtrain.environment import host_identity
from roadtrain.stages.networks import ETHERNET, INFINIBAND, ROCE, HostCard, HostCards

ARPHRD_INFINIBAND = "32"  # if_arp.h
MBIT = 1e6 / 8


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device."""

    device: str
    kind: str
    bytes_per_s: float


def this_host(sys: Path = Path("/sys")) -> HostCards:
    """Return this host's identity, name and network cards. sys: the mount point of sysfs."""
    ports = rdma_ports(sys)
    states = psutil.net_if_stats()
    cards = []
    for interface, addresses in psutil.net_if_addrs().items():
        state = states.get(interface)
        if state is None or not state.isup:
            continue
        ours = _in_sysfs(sys, interface, addresses)
        if ours is not None and (ours / "bridge").exists() and not _has_card(sys, ours):
            continue
        port = ports.get(interface) if ours is not None else None
        kind = _kind(ours, port)
        rate = max(state.speed, 0) * MBIT if port is None else port.bytes_per_s
        cards += [
            HostCard(
                interface,
                address,
                prefix,
                kind=kind or ETHERNET,
                bytes_per_s=rate,
                mtu=state.mtu,
                found=kind,
                device=port.device if port else "",
            )
            for address, prefix in _addresses(addresses)
        ]
    return HostCards(host_identity(), socket.gethostname(), tuple(cards))


def rdma_ports(sys: Path) -> dict[str, RdmaPort]:
    """Return the ports of the host's RDMA devices, by the name of their network interface."""
    found = {}
    for link_layer in sorted(sys.glob("class/infiniband/*/ports/*/link_layer")):
        port = link_layer.parent
        kind = INFINIBAND if link_layer.read_text().strip() == "InfiniBand" else ROCE
        rate = re.match(r"([0-9.]+) Gb/sec", _read(port / "rate"))
        made = RdmaPort(port.parents[1].name, kind, float(rate[1]) * 1e3 * MBIT if rate else 0.0)
        for path in port.glob("gid_attrs/ndevs/*"):
            if name := _read(path):
                found[name] = made
        for path in port.parents[1].glob("device/net/*"):
            found.setdefault(path.name, made)
    return found


def _read(path: Path) -> str:
    """Return the content of a file of sysfs, or "" if it cannot be read, as for unused ports."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _addresses(addresses: list[psutil._common.snicaddr]) -> list[tuple[str, int]]:
    """Return all IPv4 addresses with their prefix lengths, or else the first IPv6 address."""
    found: dict[int, list[tuple[str, int]]] = {4: [], 6: []}
    for entry in addresses:
        if entry.family not in (socket.AF_INET, socket.AF_INET6) or not entry.netmask:
            continue
        address = ipaddress.ip_address(entry.address.partition("%")[0])
        if not (address.is_loopback or address.is_link_local):
            mask = int(ipaddress.ip_address(entry.netmask))
            found[address.version].append((str(address), mask.bit_count()))
    return found[4] or found[6][:1]


def _in_sysfs(sys: Path, interface: str, addresses: list[psutil._common.snicaddr]) -> Path | None:
    """Return the interface's directory in sysfs, or None if sysfs shows another network
    namespace."""
    path = sys / "class" / "net" / interface
    own = next((entry.address for entry in addresses if entry.family == psutil.AF_LINK), "")
    return path if _read(path / "address").lower() == own.lower() != "" else None


def _has_card(sys: Path, bridge: Path) -> bool:
    ports = [sys / "class" / "net" / port.name for port in (bridge / "brif").glob("*")]
    return any((port / "device").exists() or (port / "bonding").exists() for port in ports)


def _kind(ours: Path | None, port: RdmaPort | None) -> str:
    """Return the kind of a card, or "" if it is not certain. ours: the card's directory in
    sysfs."""
    if port is not None:
        return port.kind
    return INFINIBAND if ours and _read(ours / "type") == ARPHRD_INFINIBAND else ""
