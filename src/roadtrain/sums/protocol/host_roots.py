"""Inside a host: which of its workers' devices sum for the others, by where devices and network
cards hang.

Jiang et al. (BytePS, OSDI 2020), section 4.2. A device's way to the processor's memory is its
switch's link. Where some switches with devices have a network card and others do not, the cards'
links are left to the network: all gradients meet at devices on the others (reduce and broadcast,
roots in turn). Where all are alike, each device meets the others for its own piece (reduce-scatter,
all-gather). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PcieSwitch:
    """What hangs on one PCIe switch or root port: local numbers of devices, whether a network
    card."""

    devices: tuple[int, ...]
    nic: bool = False


def choose(switches: Sequence[PcieSwitch]) -> tuple[int, ...]:
    """The devices (of the local workers of the same number) that sum."""
    devices = sorted(device for switch in switches for device in switch.devices)
    without = sorted(device for switch in switches if not switch.nic for device in switch.devices)
    return tuple(without or devices)


def switches_of(devices: Sequence[str], nics: Sequence[str]) -> list[PcieSwitch]:
    """From the places of PCI functions as Linux names them
    (/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0): those that share the port nearest the
    processor share a link."""
    ports: dict[tuple[str, ...], list[int]] = {}
    for number, place in enumerate(devices):
        ports.setdefault(_port(place), []).append(number)
    taken = {_port(place) for place in nics}
    return [PcieSwitch(tuple(own), port in taken) for port, own in ports.items()]


def _port(place: str) -> tuple[str, ...]:
    parts = [part for part in place.split("/") if part]
    at = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts) - 1)
    return tuple(parts[at : at + 2])
