"""What hangs where on this host, as Linux says under /sys: NUMA nodes; the PCIe place, link and
NUMA node of each accelerator, network card and disk under a directory.

Who sums inside a host is chosen by it (protocol/host_roots.py); `roadtrain probe` tells it. A
virtual machine says little: what it does not say is named, never an error. Does NOT measure.
"""

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
# classes of PCI functions: displays, accelerators; networks
ACCELERATORS, CARDS = ("0x03", "0x12"), ("0x02",)
FUNCTION = re.compile(r"[0-9a-f]{4,}(:[0-9a-f]{2}){2}\.[0-7]")
# other widths (0, 63, 255) say that it has none
LINK = re.compile(r"(\d+(?:\.\d+)? GT/s).* x(1|2|4|8|12|16|32)")
UNKNOWN = "unknown"


def _said(path: Path) -> str:
    """The content of a file of /sys."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return UNKNOWN


def functions(classes: Sequence[str], vendor: str = "0x", root: Path = SYS) -> list[str]:
    """Places of the PCI functions of some classes, in the order of their addresses."""
    places = [path.resolve() for path in sorted((root / "bus/pci/devices").glob("*"))]
    return [
        str(place)
        for place in places
        if _said(place / "class").startswith(tuple(classes))
        and _said(place / "vendor").startswith(vendor)
    ]


def interfaces(root: Path = SYS) -> list[Path]:
    """Network interfaces that are cards; those of software are not."""
    return [path for path in sorted((root / "class/net").glob("*")) if (path / "device").exists()]


def cards(root: Path = SYS) -> tuple[list[dict[str, str]], list[str]]:
    """Network cards that are up and say their rate, as a cluster.toml has them, and what the
    others do not say."""
    found, missing = [], []
    for path in interfaces(root):
        if (mbit := _said(path / "speed")).isdigit() and int(mbit):  # -1: it does not know
            kind = "infiniband" if _said(path / "type") == "32" else "ethernet"
            found.append({"kind": kind, "rate": f"{mbit}Mbit/s"})
        else:
            missing.append(f"the rate that network card {path.name} is made for")
    return found, missing


def roots_here() -> list[int]:
    """Which of this host's workers sum, by the topology of its accelerators and network cards;
    without accelerators all are alike, and the list is empty."""
    return choose(functions(ACCELERATORS, NVIDIA), functions(CARDS))


@dataclass(frozen=True)
class _Part:
    """`way`: the PCI functions that lead to it. `link`, `most`: its PCIe link now, and what it
    is made for."""

    name: str
    way: str
    node: str
    link: str
    most: str

    def lines(self) -> list[str]:
        """For people."""
        most = f" of at most {self.most}" if self.most != self.link else ""
        out = [f"{self.name}: NUMA node {self.node}, {self.way}, link {self.link}{most}"]
        lanes, of = (link.split(" x")[-1] for link in (self.link, self.most))
        if UNKNOWN not in (lanes, of) and lanes != of:
            out.append(f"note: {self.name} uses {lanes} of its {of} PCIe lanes")
        return out

    def gaps(self) -> list[str]:
        """What is not known of it."""
        told = {"NUMA node": self.node, "PCIe place": self.way, "PCIe link": self.link + self.most}
        return [what for what, said in told.items() if UNKNOWN in said]

    def is_far_from(self, other: _Part) -> bool:
        """On another NUMA node, as far as is known."""
        return UNKNOWN not in (self.node, other.node) and self.node != other.node


def _part(name: str, path: Path, nodes: Sequence[str]) -> _Part:
    """`path`: of it or of what it belongs to, resolved."""
    way = [one for one in reversed((path, *path.parents)) if FUNCTION.fullmatch(one.name)]
    own = (way or [path])[-1]
    links = [
        LINK.fullmatch(f"{_said(own / f'{when}_link_speed')} x{_said(own / f'{when}_link_width')}")
        for when in ("current", "max")
    ]
    node = _said(own / "numa_node")
    if node not in nodes:  # -1: Linux does not know
        node = nodes[0] if len(nodes) == 1 else UNKNOWN
    return _Part(
        name,
        " > ".join(one.name for one in way) or UNKNOWN,
        node,
        *(f"{link[1]} x{link[2]}" if link else UNKNOWN for link in links),
    )


def _disks(block: Path) -> list[Path]:
    """A block device, or those that an array or a volume is made of."""
    below = [disk for one in sorted((block / "slaves").glob("*")) for disk in _disks(one.resolve())]
    return below or [block]


def topology(directories: Sequence[str | Path], root: Path = SYS) -> tuple[list[str], list[str]]:
    """Lines for a person, and what is not known. The directories are there."""
    home, lines, missing = root / "devices/system/node", list[str](), list[str]()
    nodes = sorted((path.name[4:] for path in home.glob("node[0-9]*")), key=int)
    for node in nodes:
        memory = re.search(r"MemTotal:\s*(\d+) kB", _said(home / f"node{node}/meminfo"))
        lines.append(
            f"NUMA node {node}: cores {_said(home / f'node{node}/cpulist') or 'none'}, "
            f"memory {show_bytes(int(memory[1]) * KIB) if memory else UNKNOWN}"
        )
        if UNKNOWN in lines[-1]:
            missing.append(f"cores or memory of NUMA node {node}")
    if not nodes:
        missing.append("NUMA nodes")
    gpus = [
        _part(f"GPU {Path(place).name}", Path(place), nodes)
        for place in functions(ACCELERATORS, NVIDIA, root)
    ]
    others = [
        _part(f"network card {path.name}", path.resolve(), nodes) for path in interfaces(root)
    ]
    if not others:
        missing.append("network cards: there are none")
    for directory in directories:
        device = os.stat(directory).st_dev
        block = root / f"dev/block/{os.major(device)}:{os.minor(device)}"
        if block.exists():
            others += [
                _part(f"{directory} on {disk.name}", disk, nodes)
                for disk in _disks(block.resolve())
            ]
        else:
            missing.append(f"the device under {directory}: its file system does not say it")
    for part in (*gpus, *others):
        lines += part.lines()
        if gaps := part.gaps():
            missing.append(f"{', '.join(gaps)} of {part.name}")
        far = [gpu.name for gpu in gpus if part.is_far_from(gpu)]
        if far and part in others:
            lines.append(
                f"note: between {part.name} and {', '.join(far)} lies the link of two NUMA nodes"
            )
    return lines, missing
