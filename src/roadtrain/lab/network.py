"""Network of a lab: hosts as network namespaces, NICs with set rates, and switches with slower
links.

Requires Linux, root, iproute2 and util-linux; `network_available()` reports what is missing. A rate
counts the bytes of Ethernet frames; at an MTU of 1500, TCP payload gets 0.956 of the rate. Latency
is not emulated (but bad_link.py can delay a link). Hosts share file systems and process ids, and
reach nothing outside the lab. A host's name resolves to the address of its first NIC that can be
reached, and `NAME-ethK` to the address of its NIC K.

Note "wiring". All switches are bridges in one namespace, `+switch`. A NIC is a pair of veths: the
device `ethN` in the host and a port `pN` of the bridge. A link between switches is a pair of ports.
tc's tbf limits both ends, so each direction has its own rate.

Switches that are linked form one network 10.F.0.0/16, in which NIC K of host H has the address
10.F.K.H. A host replies from the address to which a request was sent, and a connection that is
bound to a NIC's address uses this NIC. On each host, the routing rule for local addresses has
preference 1 instead of 0, because the rules of `LabHost.drop_from`, with preference 0, must come
first.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab.cpus import CpuLimit, cpus_available
from roadtrain.lab.hosts import ISOLATED, LabHost, batch
from roadtrain.lab.nics import (
    ETHERNET,
    FILTER,
    IP,
    MTU,
    TCP,
    End,
    LabLink,
    LabNic,
    limit_of,
    losing,
)
from roadtrain.lab.resource import LabResource, command, folder, retry_undo, why_not

CARRIED = (MTU - IP - TCP) / (ETHERNET + MTU)  # share of a rate that TCP carries as payload
SWITCH = "+switch"  # not a valid host name
# Each NIC answers ARP for its own address only. Congestion control is cubic, Linux's default, even
# if this machine uses another algorithm. On such a machine, Linux may allow a namespace only reno,
# which is much the same on links without loss.
HOST = (
    "cd /proc/sys/net/ipv4 && echo 1 > conf/all/arp_ignore && "
    "(echo cubic > tcp_congestion_control || echo reno > tcp_congestion_control) 2> /dev/null"
)
TRIAL = (
    f"{HOST} && ip link add name b0 type bridge && ip link add name v0 type veth peer name v1 && "
    f"tc qdisc add dev v0 {limit_of(125_000)} && ip rule add from 10.1.0.1 table 100 && "
    "ip rule add pref 1 lookup local && ip rule del pref 0 && "
    "ip rule add pref 0 from 10.1.0.1 ipproto tcp blackhole && "
    "ip link set v0 mtu 9000 gso_max_segs 1"
)
LOSS_TRIAL = (
    "ip link add name v0 type veth peer name v1 && tc qdisc add dev v0 clsact && "
    f"tc filter replace dev v0 {FILTER} '{losing(0.5)}'"
)


def network_available() -> str | None:
    """Return the reason why no network can be emulated on this machine, or None. Makes and removes
    a small network to find out."""
    return why_not("ip", "tc", "unshare", "nsenter", "mount", "umount") or _refused(TRIAL)


def loss_available() -> str | None:
    """Return the reason why NICs cannot lose packets on this machine, or None."""
    return network_available() or _refused(LOSS_TRIAL)


def _refused(script: str) -> str | None:
    """Run a shell script in new namespaces. Return a sentence with its error output, or None if it
    succeeds."""
    with tempfile.TemporaryDirectory() as home:
        names = Path(home, "names")
        names.touch()
        trial = ["unshare", "--net", *ISOLATED, "trial", str(names), "", "sh", "-c", script]
        done = subprocess.run(trial, capture_output=True, text=True, check=False)
    return f"the kernel refuses: {' '.join(done.stderr.split())}" if done.returncode else None


class Network(LabResource):
    """An emulated network of hosts and switches.

    Arguments: `hosts`: host name -> NICs of the host. `links`: (switch, switch) -> rate of the link
    between the two, in bytes per second in each direction. `cpus`: host name -> number of CPUs that
    all processes of the host may use together.

    Within the context, `hosts` maps host names to LabHosts, and `links` maps (switch, switch) to
    LabLinks.

    Raises ConfigError for an invalid host name, for links that form a cycle, and if CPUs cannot be
    limited.
    """

    def __init__(
        self,
        hosts: Mapping[str, Sequence[LabNic]],
        links: Mapping[tuple[str, str], float] = {},
        cpus: Mapping[str, float] = {},
    ) -> None:
        self._nics, self._rates = hosts, links
        self._limits = {name: CpuLimit(share) for name, share in cpus.items()}
        if unknown := sorted(cpus.keys() - hosts.keys()):
            raise ConfigError(f"`cpus` names hosts that do not exist: {', '.join(unknown)}")
        if cpus and (why := cpus_available()):
            raise ConfigError(f"the CPUs of hosts cannot be limited here: {why}")
        for name, nics in hosts.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) or not nics:
                raise ConfigError(
                    f"host {name!r} needs a NIC and a name of letters, digits, `.`, `_`, `-`"
                )
        if len(hosts) > 254:
            raise ConfigError(f"{len(hosts)} hosts are too many: there are only 254 addresses")
        # each switch -> a representative of all switches that are linked with it
        self._root = {nic.switch: nic.switch for nics in hosts.values() for nic in nics}
        for pair in self._rates:
            first, second = (self._root.setdefault(switch, switch) for switch in pair)
            if first == second:
                raise ConfigError(
                    f"the link between {pair[0]} and {pair[1]} closes a cycle of switches"
                )
            self._root = {
                switch: first if root == second else root for switch, root in self._root.items()
            }

    def _begin(self) -> Callable[[], None]:
        self.home = folder("net")
        self._made = contextlib.ExitStack()
        self._made.callback(partial(undo_network, self.home))
        return self._made.close

    def _make(self) -> None:
        self.hosts: dict[str, LabHost] = {}
        self.links: dict[tuple[str, str], LabLink] = {}
        self._bridges = {name: f"b{n}" for n, name in enumerate(self._root)}
        self._networks = list(dict.fromkeys(self._root.values()))
        self._switch = self._namespace(SWITCH)
        bridge = "link add name {} up type bridge mcast_snooping 0"
        batch(self._switch, [bridge.format(at) for at in self._bridges.values()])
        ports = (End(self._switch, f"p{n}") for n in range(1 << 16))
        for h, (name, nics) in enumerate(self._nics.items(), 1):
            self.hosts[name] = self._host(name, h, nics, ports)
        for pair, rate in self._rates.items():
            self.links[pair] = self._link(pair, LabLink(next(ports), next(ports)))
            self.links[pair].set_rate(rate)
        for host in self.hosts.values():
            host.set_names(self._names(host))

    def _host(self, name: str, h: int, nics: Sequence[LabNic], ports: Iterator[End]) -> LabHost:
        net, made = self._namespace(name), []
        for k, nic in enumerate(nics):
            f = self._networks.index(self._root[nic.switch]) + 1
            link = LabLink(End(net, f"eth{k}"), next(ports), f"10.{f}.{k}.{h}")
            port, own, address = link.far.device, link.near.device, link.address
            batch(
                self._switch,
                [
                    f"link add name {port} type veth peer name {own} netns {net}",
                    f"link set {port} master {self._bridges[nic.switch]} up",
                ],
            )
            batch(
                net,
                [
                    f"link set {own} up",
                    f"addr add {address}/16 dev {own}",
                    f"rule add from {address} table {100 + k}",
                    f"route add 10.{f}.0.0/16 dev {own} src {address} table {100 + k}",
                ],
            )
            link.set_rate(nic.bytes_per_s, nic.in_bytes_per_s)
            if nic.loss:
                link.set_loss(nic.loss)
            made.append(link)
        batch(net, ["rule add pref 1 lookup local", "rule del pref 0"])
        limit = self._limits.get(name)
        if limit:
            self._made.enter_context(limit)
        return LabHost(name, net, tuple(made), self.home / f"+names.{name}", limit)

    def _link(self, pair: tuple[str, str], link: LabLink) -> LabLink:
        lines = [f"link add name {link.near.device} type veth peer name {link.far.device}"]
        for end, name in zip((link.near, link.far), pair):
            lines.append(f"link set {end.device} master {self._bridges[name]} up")
        batch(self._switch, lines)
        return link

    def _names(self, host: LabHost) -> dict[str, str]:
        reached = {_network_of(nic) for nic in host.nics}
        names: dict[str, str] = {}
        for other in self.hosts.values():
            shared = [nic.address for nic in other.nics if _network_of(nic) in reached]
            names[other.name] = shared[0] if shared else other.address
            names |= {f"{other.name}-{nic.near.device}": nic.address for nic in other.nics}
        return names

    def _namespace(self, name: str) -> Path:
        net = self.home / name
        net.touch()
        command("unshare", f"--net={net}", "sh", "-c", HOST)
        batch(net, ["link set lo up"])
        return net


def _network_of(nic: LabLink) -> str:
    return nic.address.split(".")[1]


def undo_network(home: Path) -> None:
    """Kill all processes in the network's namespaces except this process, and remove the
    namespaces."""
    # an open namespace keeps its inode number from being reused
    with contextlib.ExitStack() as held:
        namespaces = [os.fstat(held.enter_context(file.open()).fileno()) for file in home.iterdir()]

        def kill_all() -> None:
            found = []
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    its, pid = (process / "ns" / "net").stat(), int(process.name)
                    ours = any(os.path.samestat(its, net) for net in namespaces)
                    if ours and pid != os.getpid():
                        found.append(process.name)
                        os.kill(pid, signal.SIGKILL)
            if found:
                raise RoadtrainError(
                    f"processes {', '.join(found)} on hosts of the lab {home} do not end"
                )

        retry_undo(kill_all)
        for file in home.iterdir():
            if os.path.ismount(file):
                command("umount", "--lazy", str(file))
        shutil.rmtree(home)
        retry_undo(kill_all)  # kill processes that have entered a namespace in the meantime
