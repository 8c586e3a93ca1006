"""LabHost: a network namespace with NICs, host names and CPUs. network.py makes it.

Note "inside a host". `nsenter` enters the network namespace, `unshare` makes a mount and a
host-name namespace for each process: its host name is the host's, /etc/hosts is the host's file of
names, and /sys shows the host's NICs. These namespaces end with their processes, so nothing has to
be undone. A process keeps the mounts that existed when it began.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roadtrain.errors import ConfigError
from roadtrain.lab.cpus import CpuLimit
from roadtrain.lab.nics import LabLink
from roadtrain.lab.resource import command

# $1: the host, $2: its file of names, $3: its control group or "", then the command. The sysfs is
# mounted over the directory of the names, in this namespace only; nothing else in it is needed.
ENTER = """
echo "$1" > /proc/sys/kernel/hostname &&
mount --bind "$2" /etc/hosts && at=$(dirname "$2") &&
mount -t sysfs sysfs "$at" &&
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup "$at/fs/cgroup"; fi &&
mount --move "$at" /sys &&
if [ -n "$3" ]; then echo $$ > "$3/cgroup.procs"; fi &&
shift 3 && exec "$@"
"""
ISOLATED = ["unshare", "--mount", "--uts", "--propagation", "slave", "sh", "-c", ENTER, "sh"]
DROPPED = ("tcp", "udp", "icmp")  # not ARP, so that addresses can still be resolved


def inside(name: str, net: str | Path, names: str | Path, group: str | Path = "") -> list[str]:
    """Return the words to put before a command, to run it on a host in the same process."""
    return ["nsenter", f"--net={net}", "--", *ISOLATED, name, str(names), str(group)]


@dataclass(frozen=True)
class LabHost:
    name: str

    net: Path
    """The file of its network namespace."""

    nics: tuple[LabLink, ...]

    names: Path
    """The file of its /etc/hosts."""

    limit: CpuLimit | None = None
    """The limit of all its processes together; None: no limit."""

    _addresses: dict[str, str] = field(default_factory=dict)
    """Address of each name in its file of names."""

    @property
    def address(self) -> str:
        """The address of the first NIC. `nics[k].address` has the others."""
        return self.nics[0].address

    @property
    def group(self) -> str:
        """Its control group, "" without a limit."""
        return str(self.limit.group) if self.limit else ""

    def run(self, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a process and wait until it runs on this host. Its PID is that of the command. It
        is killed when the network ends."""
        words = [*inside(self.name, self.net, self.names, self.group), *argv]
        process = subprocess.Popen(words, **popen)
        with contextlib.suppress(FileNotFoundError):  # it has already ended
            while not os.path.samefile(f"/proc/{process.pid}/ns/net", self.net):
                time.sleep(0.001)
        return process

    def set_cpus(self, cpus: float) -> None:
        """Change the CPU limit, also for running processes. Raises ConfigError for a host made
        without a limit."""
        if self.limit is None:
            raise ConfigError(
                f"host {self.name} was made without a CPU limit",
                hint=f"make it with `cpus`, or Network(..., cpus={{{self.name!r}: {cpus}}})",
            )
        self.limit.set_cpus(cpus)

    def set_names(self, addresses: Mapping[str, str]) -> None:
        """Set the addresses of these names on this host, also for running processes. Other names
        are kept."""
        self._addresses.update(addresses)
        lines = ["127.0.0.1 localhost", *(f"{to} {name}" for name, to in self._addresses.items())]
        self.names.write_text("\n".join(lines) + "\n")  # in place, because it is mounted

    def drop_from(self, other: LabHost) -> None:
        """Drop all packets from `other` to this host, like a firewall, but not those in the
        opposite direction. Existing connections stall."""
        _enter(self.net, "echo 0 > /proc/sys/net/ipv4/ip_early_demux")
        self._rules("add", other)

    def pass_from(self, other: LabHost) -> None:
        """Undo `drop_from`."""
        self._rules("del", other)

    def _rules(self, verb: str, other: LabHost) -> None:
        rule = f"rule {verb} pref 0 from {{}} ipproto {{}} blackhole"
        batch(self.net, [rule.format(nic.address, kind) for nic in other.nics for kind in DROPPED])


def batch(net: Path, lines: Sequence[str]) -> None:
    """Run lines of iproute2 in a namespace."""
    _enter(net, "ip -batch -", "\n".join(lines) + "\n")


def _enter(net: Path, line: str, text: str | None = None) -> None:
    command("nsenter", f"--net={net}", "--", "sh", "-c", line, text=text)
