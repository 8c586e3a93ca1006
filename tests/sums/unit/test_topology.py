"""The PCIe topology read from fake trees of /sys: every gap is named, and none is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roadtrain.sums.host_topology import ACCELERATORS, CARDS, NVIDIA, cards, functions, topology
from roadtrain.sums.protocol.host_roots import choose

GPU, GPU_2 = "pci0000:40/0000:40:01.1/0000:41:00.0", "pci0000:c0/0000:c0:01.1/0000:c1:00.0"
CARD, SSD = "pci0000:80/0000:80:03.1/0000:82:00.0", "pci0000:40/0000:40:03.2/0000:44:00.0"


class Tree:
    """Builds a fake /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def link(self, path: str, to: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / to).mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(self.root / to)

    def node(self, number: int, cores: str, kib: int) -> None:
        self.write(f"devices/system/node/node{number}/cpulist", cores)
        self.write(
            f"devices/system/node/node{number}/meminfo",
            f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree: 1 kB",
        )

    def function(
        self,
        place: str,
        of: str,
        vendor: str,
        node: int,
        now: tuple[str, int],
        most: tuple[str, int],
    ) -> None:
        self.link(f"bus/pci/devices/{place.rsplit('/', 1)[-1]}", f"devices/{place}")
        files = {"class": of, "vendor": vendor, "numa_node": node}
        for when, (speed, lanes) in (("current", now), ("max", most)):
            files |= {f"{when}_link_speed": speed, f"{when}_link_width": lanes}
        for name, word in files.items():
            self.write(f"devices/{place}/{name}", str(word))

    def card(self, name: str, place: str, speed: str) -> None:
        self.link(f"class/net/{name}", f"devices/{place}/net/{name}")
        self.link(f"class/net/{name}/device", f"devices/{place}")
        self.write(f"class/net/{name}/speed", speed)
        self.write(f"class/net/{name}/type", "1")

    def under(self, directory: Path, place: str) -> None:
        """Place the directory on the block device at `place`."""
        device = os.stat(directory).st_dev
        self.link(f"dev/block/{os.major(device)}:{os.minor(device)}", f"devices/{place}")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "sys")


@pytest.fixture
def server(tree: Tree, tmp_path: Path) -> Tree:
    tree.node(0, "0-15,32-47", 264 * 1024 * 1024)
    tree.node(1, "16-31,48-63", 128 * 1024 * 1024)
    tree.function(GPU, "0x030200", NVIDIA, 0, ("2.5 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16))
    tree.function(CARD, "0x020000", "0x15b3", 1, ("16.0 GT/s PCIe", 8), ("16.0 GT/s PCIe", 16))
    tree.function(SSD, "0x010802", "0x144d", 0, ("16.0 GT/s PCIe", 4), ("16.0 GT/s PCIe", 4))
    tree.card("ens1", CARD, "100000")
    tree.write("class/net/lo/speed", "")  # no card
    tree.under(tmp_path, f"{SSD}/nvme/nvme0/nvme0n1")
    return tree


def test_two_nodes_a_gpu_a_card_and_an_ssd(server: Tree, tmp_path: Path) -> None:
    lines, missing = topology([tmp_path], server.root)
    assert lines == [
        "NUMA node 0: cores 0-15,32-47, memory 264.0 GiB",
        "NUMA node 1: cores 16-31,48-63, memory 128.0 GiB",
        (
            "GPU 0000:41:00.0: NUMA node 0, 0000:40:01.1 > 0000:41:00.0, link 2.5 GT/s x16 of at"
            " most 32.0 GT/s x16"
        ),
        (
            "network card ens1: NUMA node 1, 0000:80:03.1 > 0000:82:00.0, link 16.0 GT/s x8 of at"
            " most 16.0 GT/s x16"
        ),
        "note: network card ens1 uses 8 of its 16 PCIe lanes",
        "note: network card ens1 and GPU 0000:41:00.0 are on different NUMA nodes",
        f"{tmp_path} on nvme0n1: NUMA node 0, 0000:40:03.2 > 0000:44:00.0, link 16.0 GT/s x4",
    ]
    assert not missing
    assert cards(server.root) == ([{"kind": "ethernet", "rate": "100000Mbit/s"}], [])


def test_roots_are_found_from_the_same_topology(server: Tree) -> None:
    server.function(GPU_2, "0x030200", NVIDIA, 1, ("32.0 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16))
    # a display adapter, not from NVIDIA
    server.function("pci0000:00/0000:00:02.0", "0x030000", "0x1a03", 0, ("", 0), ("", 0))
    found = functions(ACCELERATORS, NVIDIA, server.root)
    assert [Path(place).name for place in found] == ["0000:41:00.0", "0000:c1:00.0"]
    assert choose(found, functions(CARDS, root=server.root)) == [0, 1]
    server.function(
        "pci0000:c0/0000:c0:01.1/0000:c1:00.1", "0x020700", "0x15b3", 1, ("", 0), ("", 0)
    )
    assert choose(found, functions(CARDS, root=server.root)) == [0]


def test_an_array_is_its_disks(server: Tree, tmp_path: Path) -> None:
    (block,) = (server.root / "dev/block").iterdir()
    block.unlink()
    server.under(tmp_path, "virtual/block/dm-0")
    server.link("devices/virtual/block/dm-0/slaves/md0", "devices/virtual/block/md0")
    server.link(
        "devices/virtual/block/md0/slaves/nvme0n1p1", f"devices/{SSD}/nvme/nvme0/nvme0n1/nvme0n1p1"
    )
    server.link("devices/virtual/block/md0/slaves/loop0", "devices/virtual/block/loop0")
    lines, missing = topology([tmp_path], server.root)
    assert (
        f"{tmp_path} on nvme0n1p1: NUMA node 0, 0000:40:03.2 > 0000:44:00.0, link 16.0 GT/s x4"
        in lines
    )
    assert f"{tmp_path} on loop0: NUMA node unknown, unknown, link unknown" in lines
    assert missing == [f"NUMA node, PCIe path, PCIe link of {tmp_path} on loop0"]


def test_a_virtual_machine(tree: Tree, tmp_path: Path) -> None:
    """One node; a card and a disk without PCIe links or NUMA nodes."""
    tree.node(0, "0-1", 8 * 1024 * 1024)
    tree.link("bus/pci/devices/0000:00:03.0", "devices/pci0000:00/0000:00:03.0")
    tree.write("devices/pci0000:00/0000:00:03.0/numa_node", "-1")
    tree.card("eth0", "pci0000:00/0000:00:03.0/virtio2", "-1")
    lines, missing = topology([tmp_path], tree.root)
    assert lines == [
        "NUMA node 0: cores 0-1, memory 8.0 GiB",
        "network card eth0: NUMA node 0, 0000:00:03.0, link unknown",
    ]
    assert missing == [
        f"the device under {tmp_path}: its file system does not report it",
        "PCIe link of network card eth0",
    ]
    assert cards(tree.root) == ([], ["the rate of network card eth0"])


def test_nothing_at_all(tmp_path: Path) -> None:
    lines, missing = topology([tmp_path], tmp_path / "none")
    assert lines == [] and missing == [
        "NUMA nodes",
        "network cards: there are none",
        f"the device under {tmp_path}: its file system does not report it",
    ]
    assert (
        cards(tmp_path / "none") == ([], [])
        and functions(ACCELERATORS, NVIDIA, tmp_path / "none") == []
    )


@pytest.mark.parametrize(
    ("file", "gap"),
    [
        ("devices/system/node/node1/cpulist", "cores or memory of NUMA node 1"),
        ("devices/system/node/node1/meminfo", "cores or memory of NUMA node 1"),
        (f"devices/{GPU}/numa_node", "NUMA node of GPU 0000:41:00.0"),
        (f"devices/{GPU}/max_link_speed", "PCIe link of GPU 0000:41:00.0"),
        (f"devices/{CARD}/current_link_width", "PCIe link of network card ens1"),
        (f"devices/{CARD}/current_link_speed", "PCIe link of network card ens1"),
        (f"devices/{SSD}/numa_node", "NUMA node of {} on nvme0n1"),
    ],
)
@pytest.mark.parametrize("content", [None, b"\xff\xfe not text", b"Unknown\n", b"63\n"])
@pytest.mark.slow
def test_an_unusable_file_is_a_gap(
    server: Tree, tmp_path: Path, file: str, gap: str, content: bytes | None
) -> None:
    """A file that cannot be read (a directory in its place), is no text, or contains "unknown"."""
    if file.endswith("cpulist") and content in (b"Unknown\n", b"63\n"):
        content = None  # a list of cores is never Unknown, and 63 is valid
    (server.root / file).unlink()
    if content is None:
        (server.root / file).mkdir()
    else:
        (server.root / file).write_bytes(content)
    assert topology([tmp_path], server.root)[1] == [gap.format(tmp_path)]


@pytest.mark.parametrize("what", ["class", "vendor"])
def test_a_function_without_a_class_or_vendor_is_not_listed(server: Tree, what: str) -> None:
    (server.root / f"devices/{GPU}/{what}").unlink()
    assert functions(ACCELERATORS, NVIDIA, server.root) == []


def test_a_card_whose_link_is_down(server: Tree) -> None:
    (server.root / f"devices/{CARD}/net/ens1/speed").unlink()
    assert cards(server.root) == ([], ["the rate of network card ens1"])
    server.write(f"devices/{CARD}/net/ens1/speed", "-1")
    assert cards(server.root) == ([], ["the rate of network card ens1"])
