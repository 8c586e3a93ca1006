"""Choice of the workers of a host that sum for the other workers, by the PCIe topology of the host.
No I/O.

See Jiang et al. (BytePS, OSDI 2020), section 4.2. Devices below one PCIe switch share the switch's
link to host memory. If only some switches have a network card, only the devices below the other
switches sum. Otherwise all devices sum.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose(devices: Sequence[str], nics: Sequence[str]) -> list[int]:
    """Choose the devices that sum.

    Args:
        devices: For each local worker, the path in /sys of the PCI function of the worker's device,
            such as /sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0. Functions below the same root
            port share a link.
        nics: Paths of the network cards.

    Returns:
        The numbers of the local workers whose devices sum.
    """
    used = {_port(place) for place in nics}
    without = [number for number, place in enumerate(devices) if _port(place) not in used]
    return without or [*range(len(devices))]


def _port(place: str) -> tuple[str, ...]:
    """Return the root complex and the root port in `place`, the path of a PCI function in /sys."""
    parts = [part for part in place.split("/") if part]
    at = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts) - 1)
    return tuple(parts[at : at + 2])
