"""Hardware topology of this host, read from /sys: the NUMA nodes, and the accelerators, network
cards and disks with their PCIe paths. Facts that the system does not report, as on virtual
machines, are listed and are not errors. Does NOT measure rates."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roadtrain.sums.protocol.host_roots import choose
from roadtrain.units import KIB, show_bytes

SYS = Path("/sys")
NVIDIA = "0x10de"
# prefixes of PCI classes: display controllers and accelerators; network controllers
ACCELERATORS, CARDS = ("0x03", "0x12"), ("0x02",)
FUNCTION = re.compile(r"[0-9a-f]{4,}(:[0-9a-f]{2}){2}\.[0-7]")
# a PCI function without a PCIe link reports widths that this does not match (0, 63, 255)
LINK = re.compile(r"(\d+(?:\.\d+)? GT/s).* x(1|2|4|8|12|16|32)")
UNKNOWN = "unknown"


def _read(path: Path) -> str:
    """Read a file of /sys, or return "unknown" if the file cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return UNKNOWN


def functions(classes: Sequence[str], vendor: str = "0x", root: Path = SYS) -> list[str]:
    """List the paths in /sys of PCI functions, by address. Their class begins with one of
    `classes`, and their vendor with `vendor`."""
    places = [path.resolve() for path in sorted((root / "bus/pci/devices").glob("*"))]
    return [
        str(place)
        for place in places
        if _read(place / "class").startswith(tuple(classes))
        and _read(place / "vendor").startswith(vendor)
    ]


def interfaces(root: Path = SYS) -> list[Path]:
    """List the network interfaces of hardware devices, without virtual interfaces such as
    bridges."""
    return [path for path in sorted((root / "class/net").glob("*")) if (path / "device").exists()]


def cards(root: Path = SYS) -> tuple[list[dict[str, str]], list[str]]:
    """Find the network cards of this host in /sys.

    Returns:
        The cards that report a rate, as entries of a cluster.toml; and a list of missing facts.
    """
    found, missing = [], []
    for path in interfaces(root):
        if (mbit := _read(path / "speed")).isdigit() and int(mbit):  # "-1" if unknown
            kind = "infiniband" if _read(path / "type") == "32" else "ethernet"
            found.append({"kind": kind, "rate": f"{mbit}Mbit/s"})
        else:
            missing.append(f"the rate of network card {path.name}")
    return found, missing


def roots_here() -> list[int]:
    """Choose the workers of this host that sum, by the PCIe topology. Returns their numbers on the
    host, counted from 0. An empty list stands for all workers."""
    return choose(functions(ACCELERATORS, NVIDIA), functions(CARDS))


@dataclass(frozen=True)
class _Device:
    """An accelerator, network card or disk. Fields that the system does not report are
    "unknown"."""

    name: str
    path: str  # the PCI functions from the root port to the device
    node: str  # NUMA node
    link: str  # the current speed and width of the PCIe link
    most: str  # the greatest speed and width of the link

    def lines(self) -> list[str]:
        most = f" of at most {self.most}" if self.most != self.link else ""
        out = [f"{self.name}: NUMA node {self.node}, {self.path}, link {self.link}{most}"]
        lanes, of = (link.split(" x")[-1] for link in (self.link, self.most))
        if UNKNOWN not in (lanes, of) and lanes != of:
            out.append(f"note: {self.name} uses {lanes} of its {of} PCIe lanes")
        return out

    def gaps(self) -> list[str]:
        """List the facts about the device that are unknown."""
        facts = {"NUMA node": self.node, "PCIe path": self.path, "PCIe link": self.link + self.most}
        return [name for name, value in facts.items() if UNKNOWN in value]

    def is_far_from(self, other: _Device) -> bool:
        """Return True if both NUMA nodes are known and differ."""
        return UNKNOWN not in (self.node, other.node) and self.node != other.node


def _device(name: str, path: Path, nodes: Sequence[str]) -> _Device:
    """Read from /sys the facts about the device at `path`. `nodes` lists the host's NUMA nodes."""
    chain = [step for step in reversed((path, *path.parents)) if FUNCTION.fullmatch(step.name)]
    own = (chain or [path])[-1]
    links = [
        LINK.fullmatch(f"{_read(own / f'{when}_link_speed')} x{_read(own / f'{when}_link_width')}")
        for when in ("current", "max")
    ]
    node = _read(own / "numa_node")
    if node not in nodes:  # -1: unknown to Linux
        node = nodes[0] if len(nodes) == 1 else UNKNOWN
    return _Device(
        name,
        " > ".join(step.name for step in chain) or UNKNOWN,
        node,
        *(f"{link[1]} x{link[2]}" if link else UNKNOWN for link in links),
    )


def disks_of(block: Path) -> list[Path]:
    """Return the paths of the disks that a RAID array or logical volume consists of, or else
    `block`."""
    below = [disk for d in sorted((block / "slaves").glob("*")) for disk in disks_of(d.resolve())]
    return below or [block]


def topology(directories: Sequence[str | Path], root: Path = SYS) -> tuple[list[str], list[str]]:
    """Describe the topology of this host, including the disks under `directories`, which must
    exist.

    Returns:
        Lines to print, and a list of missing facts.
    """
    home, lines, missing = root / "devices/system/node", list[str](), list[str]()
    nodes = sorted((path.name[4:] for path in home.glob("node[0-9]*")), key=int)
    for node in nodes:
        memory = re.search(r"MemTotal:\s*(\d+) kB", _read(home / f"node{node}/meminfo"))
        lines.append(
            f"NUMA node {node}: cores {_read(home / f'node{node}/cpulist') or 'none'}, "
            f"memory {show_bytes(int(memory[1]) * KIB) if memory else UNKNOWN}"
        )
        if UNKNOWN in lines[-1]:
            missing.append(f"cores or memory of NUMA node {node}")
    if not nodes:
        missing.append("NUMA nodes")
    gpus = [
        _device(f"GPU {Path(place).name}", Path(place), nodes)
        for place in functions(ACCELERATORS, NVIDIA, root)
    ]
    others = [
        _device(f"network card {path.name}", path.resolve(), nodes) for path in interfaces(root)
    ]
    if not others:
        missing.append("network cards: there are none")
    for directory in directories:
        number = os.stat(directory).st_dev
        block = root / f"dev/block/{os.major(number)}:{os.minor(number)}"
        if block.exists():
            others += [
                _device(f"{directory} on {disk.name}", disk, nodes)
                for disk in disks_of(block.resolve())
            ]
        else:
            missing.append(f"the device under {directory}: its file system does not report it")
    for device in (*gpus, *others):
        lines += device.lines()
        if gaps := device.gaps():
            missing.append(f"{', '.join(gaps)} of {device.name}")
        far = [gpu.name for gpu in gpus if device.is_far_from(gpu)]
        if far and device in others:
            lines.append(f"note: {device.name} and {', '.join(far)} are on different NUMA nodes")
    return lines, missing
