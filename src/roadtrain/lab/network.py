"""Network of a lab: hosts as network namespaces, NICs with set rates, switches, slower links
between switches.

Assumes Linux, root, iproute2 and util-linux: `network_available()` says what is missing. A rate
counts whole Ethernet frames: of it TCP carries 0.956 at an MTU of 1500. Latency and loss are NOT
emulated (see relay.py); file systems, process numbers and host names are shared by all hosts;
nothing outside can be reached from a host. Undone as everything of a lab is (storage.py): the
processes on its hosts are killed, the namespaces removed.

Note: how it is wired. All switches are bridges in one namespace of their own, `+switch`. A NIC is a
pair of veths, `ethN` in the host and a port `pN` of the bridge; a link between switches is a pair
of ports. On both ends tc's tbf holds what leaves, so each direction has its rate. A namespace lives
through a bind mount in the network's directory, and through the processes in it. Switches that
links join are one network 10.F.0.0/16; NIC K of host H has 10.F.K.H there. A host with two NICs on
one network answers from the address it was asked at, and sends by the NIC whose address is bound.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab.made import Made, command, folder, insist, lacking

# a burst below 64 kB splits segments, which burns a core
TBF = "root tbf burst 256kb latency 20ms rate"
CARRIED = 1448 / 1514  # of a rate: what TCP carries of whole Ethernet frames
SWITCH = "+switch"  # no host can be called so
# Each NIC answers for its own address only; congestion control is cubic, as Linux comes, whatever
# this machine has set; where that has another default, Linux may allow a namespace only reno, which
# on links without loss is much the same.
HOST = (
    "cd /proc/sys/net/ipv4 && echo 1 > conf/all/arp_ignore && "
    "(echo cubic > tcp_congestion_control || echo reno > tcp_congestion_control) 2> /dev/null"
)
TRIAL = (
    f"{HOST} && ip link add name b0 type bridge && ip link add name v0 type veth peer name v1 && "
    f"tc qdisc add dev v0 {TBF} 1mbit && ip rule add from 10.1.0.1 table 100"
)


def network_available() -> str | None:
    """Why no network can be emulated here, in one sentence, or None when it can. Tries it,
    where nothing can remain."""
    if why := lacking("ip", "tc", "unshare", "nsenter", "umount"):
        return why
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", TRIAL], capture_output=True, text=True, check=False
    )
    return f"the kernel refuses: {' '.join(done.stderr.split())}" if done.returncode else None


@dataclass(frozen=True)
class LabNic:
    """What a host has: `bytes_per_s` leave it and, unless said otherwise, arrive."""

    bytes_per_s: float
    switch: str = "switch"
    in_bytes_per_s: float | None = None


@dataclass(frozen=True)
class End:
    """One end of a link: a device in a namespace (its file)."""

    net: Path
    device: str

    def do(self, tool: str, words: str) -> None:
        command("nsenter", f"--net={self.net}", tool, *words.split())


@dataclass(frozen=True)
class LabLink:
    """A NIC and its port, or two ports of different switches. `address` is empty between
    switches."""

    near: End
    far: End
    address: str = ""

    def set_rate(self, bytes_per_s: float, in_bytes_per_s: float | None = None) -> None:
        """From now on: what leaves the near end (the host, the switch named first), and what
        arrives there."""
        for end, rate in ((self.near, bytes_per_s), (self.far, in_bytes_per_s or bytes_per_s)):
            # tc's bps are bytes
            end.do("tc", f"qdisc replace dev {end.device} {TBF} {int(rate)}bps")

    def down(self) -> None:
        """A cut: what is sent is lost, both ways, and the host sees no carrier. Connections
        wait, they do not break."""
        self.far.do("ip", f"link set {self.far.device} down")

    def up(self) -> None:
        self.far.do("ip", f"link set {self.far.device} up")


@dataclass(frozen=True)
class LabHost:
    name: str
    net: Path
    nics: tuple[LabLink, ...]

    @property
    def address(self) -> str:
        """Of the first NIC; `nics[k].address` has the others."""
        return self.nics[0].address

    def run(self, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """A process, on this host when this returns: its PID is the command's own. Killed when
        the network ends."""
        process = subprocess.Popen([*inside(self.net), *argv], **popen)
        with contextlib.suppress(FileNotFoundError):  # it has ended already
            while not os.path.samefile(f"/proc/{process.pid}/ns/net", self.net):
                time.sleep(0.001)
        return process


def inside(net: str | Path) -> list[str]:
    """The words before a command that run it in the namespace; the command replaces them in
    their process."""
    return ["nsenter", f"--net={net}", "--"]


class Network(Made):
    """Hosts by name with their NICs; `links` joins two switches at a rate in bytes a second, the
    same both ways.

    Inside the context `.hosts` has the hosts by name and `.links` the links by (switch, switch).
    Raises ConfigError for a name that cannot be, and for links that form a circle.
    """

    def __init__(
        self, hosts: Mapping[str, Sequence[LabNic]], links: Mapping[tuple[str, str], float] = {}
    ) -> None:
        self._wanted, self._rates = hosts, links
        for name, nics in hosts.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) or not nics:
                raise ConfigError(
                    f"host {name!r} needs at least one NIC and a name of letters, digits, `.`,"
                    " `_`, `-`"
                )
        if len(hosts) > 254:
            raise ConfigError(f"{len(hosts)} hosts, at most 254 have addresses")
        # switch -> one joined with it
        self._root = {nic.switch: nic.switch for nics in hosts.values() for nic in nics}
        for pair in self._rates:
            first, second = (self._root.setdefault(switch, switch) for switch in pair)
            if first == second:
                raise ConfigError(
                    f"the link between {pair[0]} and {pair[1]} closes a circle of switches"
                )
            self._root = {
                switch: first if root == second else root for switch, root in self._root.items()
            }

    def _begin(self) -> Callable[[], None]:
        self.home = folder("net")
        return partial(undo_network, self.home)

    def _make(self) -> None:
        self.hosts: dict[str, LabHost] = {}
        self.links: dict[tuple[str, str], LabLink] = {}
        switch, bridge = (
            self._namespace(SWITCH),
            {name: f"b{n}" for n, name in enumerate(self._root)},
        )
        _batch(
            switch,
            [
                f"link add name {device} up type bridge mcast_snooping 0"
                for device in bridge.values()
            ],
        )
        ports = (End(switch, f"p{n}") for n in range(1 << 16))
        joined = list(dict.fromkeys(self._root.values()))
        for h, (name, nics) in enumerate(self._wanted.items(), 1):
            net, made = self._namespace(name), []
            for k, nic in enumerate(nics):
                f = joined.index(self._root[nic.switch]) + 1
                link = LabLink(End(net, f"eth{k}"), next(ports), f"10.{f}.{k}.{h}")
                port, own, address = link.far.device, link.near.device, link.address
                _batch(
                    switch,
                    [
                        f"link add name {port} type veth peer name {own} netns {net}",
                        f"link set {port} master {bridge[nic.switch]} up",
                    ],
                )
                _batch(
                    net,
                    [
                        f"link set {own} up",
                        f"addr add {address}/16 dev {own}",
                        f"rule add from {address} table {100 + k}",
                        f"route add 10.{f}.0.0/16 dev {own} src {address} table {100 + k}",
                    ],
                )
                link.set_rate(nic.bytes_per_s, nic.in_bytes_per_s)
                made.append(link)
            self.hosts[name] = LabHost(name, net, tuple(made))
        for pair, rate in self._rates.items():
            link = self.links[pair] = LabLink(next(ports), next(ports))
            near, far = link.near.device, link.far.device
            _batch(
                switch,
                [
                    f"link add name {near} type veth peer name {far}",
                    *(
                        f"link set {port} master {bridge[name]} up"
                        for port, name in zip((near, far), pair)
                    ),
                ],
            )
            link.set_rate(rate)

    def _namespace(self, name: str) -> Path:
        net = self.home / name
        net.touch()
        command("unshare", f"--net={net}", "sh", "-c", HOST)
        _batch(net, ["link set lo up"])
        return net


def _batch(net: Path, lines: Sequence[str]) -> None:
    command(*inside(net), "ip", "-batch", "-", text="\n".join(lines) + "\n")


def undo_network(home: Path) -> None:
    """Kills the processes in the network's namespaces, except this one, and removes the
    namespaces."""
    # while a namespace is held, its number belongs to no other
    with contextlib.ExitStack() as held:
        namespaces = [os.fstat(held.enter_context(file.open()).fileno()) for file in home.iterdir()]

        def nobody_left() -> None:
            found = []
            for pid in (
                process.name
                for process in Path("/proc").glob("[0-9]*")
                if process.name != str(os.getpid())
            ):
                with contextlib.suppress(OSError):
                    its = os.stat(f"/proc/{pid}/ns/net")
                    if any(os.path.samestat(its, net) for net in namespaces):
                        found.append(pid)
                        os.kill(int(pid), signal.SIGKILL)
            if found:
                raise RoadtrainError(
                    f"processes {', '.join(found)} do not end on the hosts of {home}"
                )

        insist(nobody_left)
        for file in home.iterdir():
            if os.path.ismount(file):
                command("umount", "--lazy", str(file))
        shutil.rmtree(home)
        insist(nobody_left)  # who was about to enter
