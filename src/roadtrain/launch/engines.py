"""ENGINES: what a run can be launched on. Each makes a LaunchEngine of a plan and of what was
launched. Their modules are imported when they are used: Ray is an extra. Does NOT start anything.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from roadtrain.config.job import load_job
from roadtrain.config.machines import Machines
from roadtrain.config.plan_file import PlanFile
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.engine import LaunchEngine
from roadtrain.launch.home import CHECKED, LaunchRecord, RunHome
from roadtrain.storage import mark

LOCAL = ("localhost", "")
TAKES_OVER_S = 0.3  # a standby has the run's lock so soon after its supervisor is gone


@dataclass(frozen=True)
class EngineKind:
    make: Callable[[PlanFile, LaunchRecord], LaunchEngine]
    # "module:function" that starts the supervisor of a run where it is not a process of this
    # launcher; it gets the RunHome.
    supervise: str = ""
    # The same, returns whether a run is alive whose supervisor is away: something starts it again.
    alive: str = ""


def machines_of(plan_file: PlanFile) -> Machines:
    """Raises ConfigError for a plan that names none."""
    if plan_file.machines is None:
        raise ConfigError(
            "the plan names no machines: it can be simulated, not launched",
            hint="roadtrain plan CLUSTER.toml --job JOB.toml writes one that can",
        )
    return plan_file.machines


def mark_of(record: LaunchRecord) -> str:
    """Of this run's processes on a host: a supervisor finds what the one before has left."""
    return f"roadtrain:{RunHome.of(record.name).path}"


def _here(plan_file: PlanFile, record: LaunchRecord) -> LaunchEngine:
    make = importlib.import_module("roadtrain.launch.here").here_engine
    engine: LaunchEngine = make(machines_of(plan_file), mark_of(record))
    return engine


def _lab(plan_file: PlanFile, record: LaunchRecord) -> LaunchEngine:
    module = importlib.import_module("roadtrain.launch.lab")
    home = RunHome.of(record.name)
    directory = home.path / "lab"
    begun = CHECKED in home.state().stamps  # by a supervisor before this one
    if record.start == 0 and not begun and not _has_trained(home, record):
        module.remove_directories(mark_of(record), directory)
    engine: LaunchEngine = module.lab_engine(plan_file, mark_of(record), directory)
    return engine


def _has_trained(home: RunHome, record: LaunchRecord) -> bool:
    """Whether the run's directory knows of anything. Of one that does not, what a run of this name
    has left on a lab's hosts is another run's, and nobody else can reach it."""
    job = load_job(home.job_path)
    directory = Path(record.directory, job.run.dir)
    return any((directory / name).exists() for name in (mark.NAME, "metrics.jsonl"))


def _ray(plan_file: PlanFile, record: LaunchRecord) -> LaunchEngine:
    make = importlib.import_module("roadtrain.launch.ray.engine").ray_engine
    home = RunHome.of(record.name)
    state = home.state()
    begun = CHECKED in state.stamps
    engine: LaunchEngine = make(
        machines_of(plan_file),
        f"roadtrain:{record.name}",
        record.ray_address,
        # an older run of this name may have left them, where this one never had workers
        known=home.addresses() if begun or state.attempt >= 0 else {},
        begun=begun,
        directory=home.path / "ray",
    )
    return engine


RAY = "roadtrain.launch.ray.start"
ENGINES: Mapping[str, EngineKind] = {
    "here": EngineKind(_here),
    "lab": EngineKind(_lab),
    "ray": EngineKind(_ray, f"{RAY}:start_supervisor", f"{RAY}:is_alive"),
}


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
    time.sleep(TAKES_OVER_S)
    return home.is_supervised()


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
