"""LabHost: a network namespace with its NICs, its names for the others, and its CPUs. Does NOT make
them (network.py).

Note: what a process on a host sees. `nsenter` brings it into the network namespace, `unshare` gives
it a mount and a host-name namespace of its own: its host name is the host's, /etc/hosts is the
host's file of names, and /sys shows the host's NICs. These namespaces end with their processes, so
nothing is left to undo. What was mounted when the process began stays mounted for it.
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
from roadtrain.lab.made import command
from roadtrain.lab.nics import LabLink

# $1 the host, $2 its names, $3 its control group or nothing, then the command. A sysfs is mounted
# where the names lay: in this namespace only, and nothing else is needed from there.
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
DROPPED = ("tcp", "udp", "icmp")  # not ARP: who is refused still finds the way


def inside(name: str, net: str | Path, names: str | Path, group: str | Path = "") -> list[str]:
    """The words before a command that run it on a host; the command replaces them in their
    process."""
    return ["nsenter", f"--net={net}", "--", *ISOLATED, name, str(names), str(group)]


@dataclass(frozen=True)
class LabHost:
    name: str

    net: Path
    """The file of its network namespace."""

    nics: tuple[LabLink, ...]

    names: Path
    """Its /etc/hosts."""

    limit: CpuLimit | None = None
    """Of its processes all together; None: as much as the machine gives."""

    _known: dict[str, str] = field(default_factory=dict)
    """Name -> address, as its file of names says."""

    @property
    def address(self) -> str:
        """Of the first NIC; `nics[k].address` has the others."""
        return self.nics[0].address

    @property
    def group(self) -> str:
        """Its control group, "" without a limit."""
        return str(self.limit.group) if self.limit else ""

    def run(self, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """A process, on this host when this returns: its PID is the command's own. Killed when
        the network ends."""
        words = [*inside(self.name, self.net, self.names, self.group), *argv]
        process = subprocess.Popen(words, **popen)
        with contextlib.suppress(FileNotFoundError):  # it has ended already
            while not os.path.samefile(f"/proc/{process.pid}/ns/net", self.net):
                time.sleep(0.001)
        return process

    def set_cpus(self, cpus: float) -> None:
        """From now on, also for the processes that run on it. Raises ConfigError where it was made
        without a limit."""
        if self.limit is None:
            raise ConfigError(
                f"host {self.name} was made without a limit of its CPUs",
                hint=f"make it with `cpus`, or Network(..., cpus={{{self.name!r}: {cpus}}})",
            )
        self.limit.set_cpus(cpus)

    def set_names(self, addresses: Mapping[str, str]) -> None:
        """From now on these names mean these addresses here, also for the processes that run;
        the other names stay."""
        self._known.update(addresses)
        lines = ["127.0.0.1 localhost", *(f"{to} {name}" for name, to in self._known.items())]
        self.names.write_text("\n".join(lines) + "\n")  # in place: it is mounted

    def drop_from(self, other: LabHost) -> None:
        """A firewall: no packet that `other` sends to this host arrives, while what this host sends
        to `other` does. Connections that are there stall."""
        _enter(self.net, "echo 0 > /proc/sys/net/ipv4/ip_early_demux")
        self._rules("add", other)

    def pass_from(self, other: LabHost) -> None:
        """Undoes `drop_from`."""
        self._rules("del", other)

    def _rules(self, verb: str, other: LabHost) -> None:
        rule = f"rule {verb} pref 0 from {{}} ipproto {{}} blackhole"
        batch(self.net, [rule.format(nic.address, kind) for nic in other.nics for kind in DROPPED])


def batch(net: Path, lines: Sequence[str]) -> None:
    """Lines for iproute2, carried out in a namespace."""
    _enter(net, "ip -batch -", "\n".join(lines) + "\n")


def _enter(net: Path, line: str, text: str | None = None) -> None:
    command("nsenter", f"--net={net}", "--", "sh", "-c", line, text=text)
