"""`roadtrain lab up | run | down`: a lab that a lab file describes. Starts no process on the hosts.

`up` makes the lab, and writes a file `lab.json` by which `run` and `down` find the lab. The process
that makes the lab waits for Ctrl-C or `lab down`, and then removes the lab. Rates and sizes in the
lab file are checked but kept as written, for display.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from roadtrain.errors import ConfigError, DeadlineError
from roadtrain.lab.cpus import MIN_CPUS, cpus_available
from roadtrain.lab.hosts import inside
from roadtrain.lab.leftovers import sweep
from roadtrain.lab.network import Network, network_available
from roadtrain.lab.nics import LabNic
from roadtrain.lab.resource import folder, folders, start_time
from roadtrain.lab.storage import LoopDevice, Throttle, lab_available
from roadtrain.options.schema import Count, RateText, Section, SizeText, checked, read_toml
from roadtrain.retry import undone_on_error
from roadtrain.training.progress import show_table
from roadtrain.units import parse_bytes, parse_rate

DOWN_TIMEOUT_S = 60.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NicSection(Section):
    rate: RateText = Field(description="rate in each direction")
    in_rate: RateText | None = Field(default=None, description="of incoming data, if different")
    switch: str = Field(default="", description="default: the first switch")
    loss: float = Field(
        default=0.0, ge=0, lt=1, description="share of packets lost in each direction: 0.001"
    )


class StorageSection(Section):
    size: SizeText = Field(description="size, which is allocated on the disk at once")
    read: RateText = Field(description="rate of direct I/O")
    write: RateText
    dir: str = Field(
        default="", description="directory of the image file; default: the temporary directory"
    )


class HostSection(Section):
    name: str
    count: Count | None = Field(
        default=None, le=1000, description="number of such hosts, called NAME0, NAME1, ..."
    )
    nics: list[NicSection] = Field(min_length=1)
    cpus: float | None = Field(
        default=None, ge=MIN_CPUS, description="CPUs for all its processes together: 0.4"
    )
    storage: StorageSection | None = None

    @property
    def names(self) -> list[str]:
        return [self.name] if self.count is None else [f"{self.name}{n}" for n in range(self.count)]


class LinkSection(Section):
    between: tuple[str, str]
    rate: RateText = Field(description="in each direction")


class LabFile(Section):
    switches: list[str] = Field(default=["switch"], min_length=1)
    links: list[LinkSection] = []
    hosts: list[HostSection] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        named = [nic.switch for host in self.hosts for nic in host.nics if nic.switch]
        for switch in named + [switch for link in self.links for switch in link.between]:
            if switch not in self.switches:
                raise ValueError(f"there is no switch {switch!r}, only {', '.join(self.switches)}")
        names = [name for host in self.hosts for name in host.names]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"several hosts have the same name: {', '.join(sorted(twice))}")
        return self

    def nics(self, host: HostSection) -> list[LabNic]:
        return [
            LabNic(
                parse_rate(nic.rate),
                nic.switch or self.switches[0],
                parse_rate(nic.in_rate or nic.rate),
                nic.loss,
            )
            for nic in host.nics
        ]

    def cpus(self) -> dict[str, float]:
        return {name: host.cpus for host in self.hosts if host.cpus for name in host.names}


def load_lab(path: str | Path) -> LabFile:
    """Read a lab file. Raises ConfigError, which names the wrong key and the nearest valid key."""
    return checked(LabFile, read_toml(path, "lab file"), str(path))


def up(path: str, detach: bool = False) -> None:
    """Make the cluster that the file describes on this machine. Remove the cluster at Ctrl-C or
    `lab down`.

    Prints the hosts, and returns when a signal has ended the lab.

    Args:
        detach: return when the lab is up; the lab stays until `lab down`
    """
    lab = load_lab(path)
    if why := _lacking(lab):
        raise ConfigError(f"a lab cannot be made here: {why}")
    sweep()
    if _found(path):
        raise ConfigError(f"the lab {path} is already up", hint=f"roadtrain lab down {path}")
    if detach:
        return _detached(path)
    for end in ENDS:
        signal.signal(end, signal.default_int_handler)
    with contextlib.ExitStack() as made:
        try:
            _show(lab, _make(lab, path, made))
            print(f"{path} is up; Ctrl-C here or `roadtrain lab down {path}` ends it")
            while True:  # not signal.pause(), which would miss a signal just before it
                time.sleep(0.5)
        except KeyboardInterrupt:
            pass
        finally:
            for end in ENDS:  # the removal must not be interrupted
                signal.signal(end, signal.SIG_IGN)


def run(path: str, host: str, argv: list[str]) -> None:
    """Run a command on a host of a lab that is up. The command uses the network, the storage rates
    and the CPU limit of the host, and shares everything else with this machine.

    Replaces this process by the command."""
    _, _, hosts = _up(path)
    if host not in hosts:
        raise ConfigError(f"the lab {path} has no host {host!r}", hint=f"hosts: {', '.join(hosts)}")
    its = hosts[host]
    if its["group"]:
        Path(its["group"], "cgroup.procs").write_text(str(os.getpid()))
    words = [*inside(host, its["net"], its["names"], its["cpus"]), *argv]
    os.execvp(words[0], words)


def down(path: str) -> None:
    """End a lab, and remove the remains of killed labs.

    Waits until the lab is removed."""
    if not _found(path) and (swept := sweep()):
        print(f"{path} was not up; removed the remains of killed labs: {', '.join(swept)}")
        return
    home, pid, _ = _up(path)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while home.exists() and start_time(pid):
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"process {pid} has not removed the lab {path} within {DOWN_TIMEOUT_S:.0f} s"
            )
        time.sleep(0.05)
    sweep()


def _lacking(lab: LabFile) -> str | None:
    """Return the reason why this lab cannot be made on this machine, or None."""
    why = network_available()
    if not why and lab.cpus():
        why = cpus_available()
    if not why and any(host.storage for host in lab.hosts):
        why = lab_available()
    return why


def _make(lab: LabFile, path: str, made: contextlib.ExitStack) -> dict[str, dict[str, Any]]:
    home = folder("up")
    made.callback(shutil.rmtree, home)  # removed last, since `down` waits for it
    sections = {name: section for section in lab.hosts for name in section.names}
    network = Network(
        {name: lab.nics(section) for name, section in sections.items()},
        {link.between: parse_rate(link.rate) for link in lab.links},
        lab.cpus(),
    )
    hosts: dict[str, dict[str, Any]] = {name: {"dir": "", "group": ""} for name in sections}
    for name, section in sections.items():
        if want := section.storage:
            image = Path(want.dir or home, f"{name}.img")
            device = made.enter_context(LoopDevice(image, parse_bytes(want.size)))
            limits = Throttle([device], parse_rate(want.read), parse_rate(want.write))
            rates = made.enter_context(limits)
            hosts[name] = {"dir": str(device.mount), "group": str(rates.group)}
    made.enter_context(network)  # removed first, because processes on hosts keep storage busy
    for name, host in network.hosts.items():
        hosts[name] |= {
            "net": str(host.net),
            "names": str(host.names),
            "cpus": host.group,
            "addresses": [nic.address for nic in host.nics],
        }
    (home / "new").write_text(json.dumps({"file": str(Path(path).resolve()), "hosts": hosts}))
    (home / "new").rename(home / "lab.json")
    return hosts


def _show(lab: LabFile, hosts: dict[str, dict[str, Any]]) -> None:
    limited = bool(lab.cpus())
    rows = [("host", "address", "NIC", *["CPUs"] * limited, "directory", "read, write")]
    for section in lab.hosts:
        rates = ", ".join(
            nic.rate
            + (f" (in {nic.in_rate})" if nic.in_rate else "")
            + (f" (loses {nic.loss:.2%})" if nic.loss else "")
            for nic in section.nics
        )
        storage = f"{section.storage.read}, {section.storage.write}" if section.storage else ""
        rows += [
            (
                name,
                ", ".join(hosts[name]["addresses"]),
                rates,
                *[str(section.cpus or "all")] * limited,
                hosts[name]["dir"],
                storage,
            )
            for name in section.names
        ]
    show_table(rows, print)


def _detached(path: str) -> None:
    argv = [sys.executable, "-m", "roadtrain.cli", "lab", "up", path]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with undone_on_error(process.terminate):
        for line in process.stdout:
            print(line, end="")
            if line.startswith(f"{path} is up"):
                return
    raise ConfigError(f"the lab {path} did not start: exit code {process.wait()}")


def _found(path: str) -> tuple[Path, int, dict[str, dict[str, Any]]] | None:
    """Return (directory of lab.json, PID of the lab's maker, hosts) of a lab that is up, or
    None."""
    if os.geteuid() != 0:
        raise ConfigError("labs need root, but this process is not root")
    for home, kind, pid, alive in folders():
        with contextlib.suppress(FileNotFoundError):  # the lab is not up yet, or no longer up
            if kind == "up" and alive:
                lab: dict[str, Any] = json.loads((home / "lab.json").read_text())
                if lab["file"] == str(Path(path).resolve()):
                    return home, pid, lab["hosts"]
    return None


def _up(path: str) -> tuple[Path, int, dict[str, dict[str, Any]]]:
    if (found := _found(path)) is None:
        raise ConfigError(f"the lab {path} is not up", hint=f"roadtrain lab up {path} --detach")
    return found
