"""`roadtrain preflight`: test the networks of a job's hosts before it is started on them.

Which ranks meet, the environment that torchrun sets says, or a list of hosts. Does NOT test
itself (stages/preflight.py).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Sequence

from roadtrain.config.job import load_job
from roadtrain.environment import Launch, launch_of
from roadtrain.errors import ConfigError
from roadtrain.stages.host_cards import this_host
from roadtrain.stages.host_ranks import DataGroups, check_ranks
from roadtrain.stages.job_parallelism import ParallelismSection
from roadtrain.stages.networks import NamedRanks, override
from roadtrain.stages.preflight import preflight
from roadtrain.stages.rank_groups import Groups
from roadtrain.stages.rank_meeting import MEET_S, meet

PORT = 29500  # torchrun's own


def command(
    path: str = "",
    hosts: str = "",
    devices: int = 1,
    port: int = PORT,
    patience: float = MEET_S,
) -> int:
    """Test every pair of hosts of every group over the network that it will use; print the matrix,
    or what is wrong. Started on every host, under torchrun or with --hosts.

    Under torchrun on every host (`torchrun ... --no-python roadtrain preflight JOB.toml`), or
    started on every host with the same --hosts. Of the job it reads `parallelism`; without it
    every pair of hosts is tested over the fastest network of all.

    Args:
        hosts: HOST,HOST,...: names or addresses in the order of ranks; this host is found in it
        devices: ranks of each host, with --hosts
        port: of the first host, where they meet, with --hosts
        patience: seconds to wait for all ranks
    """
    begin = time.monotonic()
    if devices < 1 or not patience > 0:
        raise ConfigError(
            f"--devices {devices}, --patience {patience:g}: 1 device or more, seconds above 0"
        )
    launch = launch_among(hosts.split(","), port) if hosts else launch_of(os.environ)
    per_rank = devices if hosts else 1
    asked = load_job(path).parallelism if path else ParallelismSection()
    asked.check_known()
    needed = needed_ranks(asked, per_rank)
    meeting = meet(launch, job=in_lines(asked, per_rank), needed=needed, deadline_s=patience)
    of_ranks = [host for host in override(meeting.hosts, asked.networks) for _ in range(per_rank)]
    places = meeting.host_devices(of_ranks)
    parallelism = asked.degrees(len(of_ranks)) if asked.used else None
    groups: Sequence[NamedRanks] = ()
    if parallelism is not None:
        groups = Groups.of(parallelism, places, data_groups=DataGroups.ANYWHERE).to_create
    preflight(meeting, groups, of_ranks)
    if parallelism is not None:  # last: a wrong card can make a cluster of its own
        check_ranks(parallelism, places, data_groups=asked.data_groups)
    if meeting.rank == 0:
        print(f"preflight: all is well ({time.monotonic() - begin:.1f} s)")
    return 0


def in_lines(asked: ParallelismSection, per_rank: int) -> str:
    """What must be the same on all ranks."""
    said = {**asked.model_dump(mode="json"), "devices": per_rank}
    return "\n".join(f"{key} = {value}" for key, value in said.items())


def needed_ranks(asked: ParallelismSection, per_rank: int) -> int:
    """That meet, where each stands for `per_rank` of the job; 0 where the job takes what comes.
    Raises ConfigError."""
    if not asked.used or (asked.dp is None and not asked.widths):
        return 0
    parallelism = asked.degrees(0)
    ranks, rest = divmod(parallelism.devices, per_rank)
    if rest:
        raise ConfigError(
            f"{parallelism} is {parallelism.devices} ranks, which {per_rank} a host do not divide",
            hint="--devices is the number of ranks of each host",
        )
    return ranks


def launch_among(names: Sequence[str], port: int) -> Launch:
    """One rank a host of `names`; which one this is, this host's name or addresses say. Raises
    ConfigError, also for the name of another host that means this one's loopback here."""
    me = socket.gethostname()
    own = {card.address for card in this_host().cards}
    found = []
    for rank, name in enumerate(names):
        addresses = _addresses(name)
        loopback = [one for one in addresses if ipaddress.ip_address(one).is_loopback]
        if name == me or own & addresses:
            found.append(rank)
        elif len(loopback) == len(addresses) and len(names) > 1:
            raise ConfigError(
                f"the name {name} resolves to {loopback[0]} on host {me}, which is its loopback"
                f" (lo): {me} would look for {name} in itself",
                hint=f"give {name} the address of its card in /etc/hosts, or give the address",
            )
    if len(found) != 1:
        have = ", ".join(sorted(own)) or "none"
        raise ConfigError(
            f"host {me} (addresses {have}) is {len(found)} of {', '.join(names)}, not one",
            hint="name each host once, as it calls itself or by an address",
        )
    return Launch(found[0], len(names), names[0], port, agent=False, attempt="0")


def _addresses(name: str) -> set[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host {socket.gethostname()} knows no address of {name}: {error.strerror or error}"
        ) from error
    return {str(one[4][0]).partition("%")[0] for one in found}
