"""ENGINES: the engines on which `roadtrain launch --on` can run processes: this host ("here"), a
lab, or Ray. Modules are imported on first use, because Ray is optional. Does NOT start anything."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from roadtrain.config.machines import Machines
from roadtrain.config.plan_file import PlanFile
from roadtrain.environment import need
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.home import RunHome
from roadtrain.launch.waiting import wait_until

LOCAL = ("localhost", "")
STANDBY = "roadtrain.launch.standby_main"  # the main module of the standby process
TAKES_OVER_S = 10.0  # how long a standby may take to get the run's lock when the supervisor ends


@dataclass(frozen=True)
class EngineKind:
    """The functions that create an engine and supervise its runs, each as a text
    "module:function"."""

    # (PlanFile, LaunchRecord) -> LaunchEngine: create the engine
    make: str
    # (RunHome) -> None: start the supervisor. If "", it is started as a process of this host.
    supervise: str = ""
    # (RunHome) -> bool: True if the engine will restart the supervisor of a run that has none
    alive: str = ""


RAY = "roadtrain.launch.ray"
ENGINES: Mapping[str, EngineKind] = {
    "here": EngineKind("roadtrain.launch.here:here_engine"),
    "lab": EngineKind("roadtrain.launch.lab_engine:lab_engine"),
    "ray": EngineKind(
        f"{RAY}.ray_engine:ray_engine", f"{RAY}.start:start_supervisor", f"{RAY}.start:is_alive"
    ),
}


def machines_of(plan_file: PlanFile) -> Machines:
    """Return the machines of a plan. Raises ConfigError if the plan has no machines."""
    if plan_file.machines is None:
        raise ConfigError(
            "the plan names no machines, so it can be simulated but not launched",
            hint="roadtrain plan CLUSTER.toml --job JOB.toml writes a plan with machines",
        )
    return plan_file.machines


def default_engine(machines: Machines) -> str:
    """Return "here" if all addresses of the plan belong to this machine, else raise ConfigError."""
    own = {address.address for all in psutil.net_if_addrs().values() for address in all}
    hosts = (*machines.hosts, *machines.spares)
    others = [host for host in hosts if not _is_own(host.address, own)]
    if not others:
        return "here"
    raise ConfigError(
        f"launch needs --on or --write, because {len(others)} of the plan's {len(hosts)} hosts are"
        f" not this machine, such as {others[0].name} at {others[0].address}",
        hint=f"use --on {' or --on '.join(ENGINES)}, or --write slurm or --write kubernetes",
    )


def _is_own(address: str, own: set[str]) -> bool:
    if address in LOCAL or address == os.uname().nodename or address in own:
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_alive(home: RunHome) -> bool:
    """Return True if the run has a supervisor, or will get one from its engine or its standby
    process."""
    if home.is_supervised():
        return True
    if alive := ENGINES[home.record().engine].alive:
        return home.state().phase != "ended" and bool(function_of(alive)(home))
    with suppress(LaunchError):  # an unreadable state does not mean that the run has ended
        if home.state().phase == "ended":
            return False
    wait_until(lambda: home.is_supervised() or not _has_standby(home), TAKES_OVER_S, 0.05)
    return home.is_supervised()


def _has_standby(home: RunHome) -> bool:
    """Return True if this host has a standby process of the run, or a supervisor that was one."""
    of_home = [STANDBY, str(home.path)]
    return any((p.info["cmdline"] or [])[-2:] == of_home for p in psutil.process_iter(["cmdline"]))


def function_of(target: str) -> Callable[..., Any]:
    """Import and return a function. `target`: the text "module:function". Raises ConfigError if an
    optional dependency is not installed."""
    module, _, function = target.partition(":")
    found: Callable[..., Any] = getattr(need(module, "ray"), function)
    return found
