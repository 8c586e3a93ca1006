"""LabHost: a host of a lab, which is a network namespace with NICs, host names and a CPU limit.
network.py makes the hosts.

Note "inside a host". A process on a host enters the host's network namespace, and gets mount and
host-name namespaces that end with the process. It sees the lab host's name, NICs and file of names
(as /etc/hosts).
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

# $1 is the name of the host, $2 the host's file of names, and $3 the host's control group or "".
# The command follows. In this namespace only, sysfs is mounted over the directory of $2, because
# after the bind mount of $2 nothing in that directory is needed.
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
DROPPED = ("tcp", "udp", "icmp")  # without ARP, so that addresses can still be resolved


def inside(name: str, net: str | Path, names: str | Path, group: str | Path = "") -> list[str]:
    """Return the words to put before a command so that it runs on a host.

    `name`: the host's name. `net`: the file of the host's network namespace. `names`: the file that
    the command sees as /etc/hosts. `group`: the directory of the host's control group, or "".
    """
    return ["nsenter", f"--net={net}", "--", *ISOLATED, name, str(names), str(group)]


@dataclass(frozen=True)
class LabHost:
    name: str

    net: Path
    """The file of the host's network namespace."""

    nics: tuple[LabLink, ...]

    names: Path
    """The host's file of names, which its processes see as /etc/hosts."""

    limit: CpuLimit | None = None
    """The CPU limit of all processes of the host together; None if there is no limit."""

    _addresses: dict[str, str] = field(default_factory=dict)
    """The address of each name in the file of names."""

    @property
    def address(self) -> str:
        """The address of the host's first NIC."""
        return self.nics[0].address

    @property
    def group(self) -> str:
        """The directory of the host's control group, or "" if the host has no CPU limit."""
        return str(self.limit.group) if self.limit else ""

    def run(self, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a command, and return its process once it is on this host. The process is killed
        when the lab's Network ends. `popen`: options of subprocess.Popen."""
        words = [*inside(self.name, self.net, self.names, self.group), *argv]
        process = subprocess.Popen(words, **popen)
        with contextlib.suppress(FileNotFoundError):  # the process has already ended
            while not os.path.samefile(f"/proc/{process.pid}/ns/net", self.net):
                time.sleep(0.001)
        return process

    def set_cpus(self, cpus: float) -> None:
        """Change the host's CPU limit, also for running processes. Raises ConfigError if the host
        was made without a limit."""
        if self.limit is None:
            raise ConfigError(
                f"host {self.name} was made without a CPU limit",
                hint=f"set `cpus` in the lab file, or Network(..., cpus={{{self.name!r}: {cpus}}})",
            )
        self.limit.set_cpus(cpus)

    def set_names(self, addresses: Mapping[str, str]) -> None:
        """Set the addresses of these names on this host, also for running processes. Other names
        keep their addresses."""
        self._addresses.update(addresses)
        lines = ["127.0.0.1 localhost", *(f"{to} {name}" for name, to in self._addresses.items())]
        self.names.write_text("\n".join(lines) + "\n")  # in place, because the file is mounted

    def drop_from(self, other: LabHost) -> None:
        """Drop all packets from `other` to this host, like a firewall. Packets from this host to
        `other` still arrive. Existing connections stall."""
        _enter(self.net, "echo 0 > /proc/sys/net/ipv4/ip_early_demux")
        self._rules("add", other)

    def pass_from(self, other: LabHost) -> None:
        """Let packets from `other` pass again, after `drop_from`."""
        self._rules("del", other)

    def _rules(self, verb: str, other: LabHost) -> None:
        rule = f"rule {verb} pref 0 from {{}} ipproto {{}} blackhole"
        batch(self.net, [rule.format(nic.address, kind) for nic in other.nics for kind in DROPPED])


def batch(net: Path, lines: Sequence[str]) -> None:
    """Run iproute2's `ip` in a network namespace, once for each line of arguments. `net`: the file
    of the namespace."""
    _enter(net, "ip -batch -", "\n".join(lines) + "\n")


def _enter(net: Path, line: str, text: str | None = None) -> None:
    command("nsenter", f"--net={net}", "--", "sh", "-c", line, text=text)
