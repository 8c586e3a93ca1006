"""ENGINES: what a run can be launched on. Each makes a LaunchEngine of a plan and of what was
launched. Their modules are imported when they are used: Ray is an extra. Does NOT start anything.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from roadtrain.config.machines import Machines
from roadtrain.config.plan_file import PlanFile
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.home import RunHome
from roadtrain.launch.waiting import wait_until

LOCAL = ("localhost", "")
STANDBY = "roadtrain.launch.succeed"  # the module of a standby's process
TAKES_OVER_S = 10.0  # a standby has the run's lock so soon after its supervisor is gone


@dataclass(frozen=True)
class EngineKind:
    """Each field is a "module:function"."""

    # makes a LaunchEngine of a PlanFile and a LaunchRecord
    make: str
    # starts the supervisor of a run where it is not a process of this launcher; gets the RunHome
    supervise: str = ""
    # the same, returns whether a run is alive whose supervisor is away: something starts it again
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
    """Raises ConfigError for a plan that names none."""
    if plan_file.machines is None:
        raise ConfigError(
            "the plan names no machines: it can be simulated, not launched",
            hint="roadtrain plan CLUSTER.toml --job JOB.toml writes one that can",
        )
    return plan_file.machines


def default_engine(machines: Machines) -> str:
    """`here`, where all addresses of a plan are of this host. Raises ConfigError elsewhere."""
    own = {address.address for all in psutil.net_if_addrs().values() for address in all}
    hosts = (*machines.hosts, *machines.spares)
    others = [host for host in hosts if not _is_own(host.address, own)]
    if not others:
        return "here"
    raise ConfigError(
        f"{len(others)} of the plan's {len(hosts)} hosts are not this one: {others[0].name} at"
        f" {others[0].address}",
        hint=f"--on {' or --on '.join(ENGINES)}, or --write slurm or --write kubernetes",
    )


def _is_own(address: str, own: set[str]) -> bool:
    if address in LOCAL or address == os.uname().nodename or address in own:
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_alive(home: RunHome) -> bool:
    """Whether it has a supervisor, or will have one again by itself."""
    if home.is_supervised():
        return True
    if alive := ENGINES[home.record().engine].alive:
        return home.state().phase != "ended" and bool(function_of(alive)(home))
    with suppress(LaunchError):  # a state that cannot be read does not say that it has ended
        if home.state().phase == "ended":
            return False
    wait_until(lambda: home.is_supervised() or not _has_standby(home), TAKES_OVER_S, 0.05)
    return home.is_supervised()


def _has_standby(home: RunHome) -> bool:
    """Whether a process of this host waits to go on with the run, or goes on with it."""
    of_home = [STANDBY, str(home.path)]
    return any((p.info["cmdline"] or [])[-2:] == of_home for p in psutil.process_iter(["cmdline"]))


def function_of(target: str) -> Callable[..., Any]:
    """`module:function`: modules of one engine or format are imported when they are used."""
    module, _, function = target.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as cause:
        if not cause.name or cause.name.startswith("roadtrain"):
            raise
        raise LaunchError(
            f"{cause.name} is not installed here", hint=f"pip install 'roadtrain[{cause.name}]'"
        ) from cause
    return found
