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


def choose(devices: Sequence[str], nics: Sequence[str]) -> list[int]:
    """The devices (of the local workers of the same number) that sum. All by the places of their
    PCI functions as Linux names them (/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0): those
    that share the port nearest the processor share a link."""
    taken = {_port(place) for place in nics}
    without = [number for number, place in enumerate(devices) if _port(place) not in taken]
    return without or [*range(len(devices))]


def _port(place: str) -> tuple[str, ...]:
    parts = [part for part in place.split("/") if part]
    at = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts) - 1)
    return tuple(parts[at : at + 2])
