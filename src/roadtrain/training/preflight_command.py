"""`roadtrain preflight`: test the networks of a job's hosts before the job is started on them.

The participating ranks come from torchrun's environment or a list of hosts. The tests are in
stages/preflight.py.
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
from roadtrain.stages.networks import override
from roadtrain.stages.preflight import preflight
from roadtrain.stages.rank_groups import Groups, RankGroup
from roadtrain.stages.rank_meeting import MEET_S, meet

PORT = 29500  # torchrun's default


def command(
    path: str = "",
    hosts: str = "",
    devices: int = 1,
    port: int = PORT,
    patience: float = MEET_S,
) -> int:
    """Test every pair of hosts in every group over the network that the group will use, and print
    the measured matrix or the problem. Start the command on every host, under torchrun or with
    --hosts.

    With torchrun, run `torchrun ... --no-python roadtrain preflight JOB.toml` on every host. With
    --hosts, pass the same list on every host. The command reads only [parallelism] of the job. If
    the job has no [parallelism], every pair of hosts is tested over the fastest network that all
    hosts have.

    Args:
        hosts: names or addresses HOST,HOST,... of all hosts, this host included, in rank order
        devices: ranks of each host (with --hosts)
        port: port of the first host at which the ranks meet (with --hosts)
        patience: seconds to wait for all ranks
    """
    begin = time.monotonic()
    if devices < 1 or not patience > 0:
        raise ConfigError(
            f"--devices ({devices}) must be 1 or more and --patience ({patience:g}) must be above 0"
        )
    launch = launch_among(hosts.split(","), port) if hosts else launch_of(os.environ)
    per_rank = devices if hosts else 1
    section = load_job(path).parallelism if path else ParallelismSection()
    section.check_known()
    needed = needed_ranks(section, per_rank)
    meeting = meet(launch, job=in_lines(section, per_rank), needed=needed, deadline_s=patience)
    of_ranks = [host for host in override(meeting.hosts, section.networks) for _ in range(per_rank)]
    places = meeting.host_devices(of_ranks)
    parallelism = section.degrees(len(of_ranks)) if section.used else None
    groups: Sequence[RankGroup] = ()
    if parallelism is not None:
        groups = Groups.of(parallelism, places, data_groups=DataGroups.ANYWHERE).to_create
    preflight(meeting, groups, of_ranks)
    # checked last, because a wrong network card can look like a separate cluster
    if parallelism is not None:
        check_ranks(parallelism, places, data_groups=section.data_groups)
    if meeting.rank == 0:
        print(f"preflight: all is well ({time.monotonic() - begin:.1f} s)")
    return 0


def in_lines(section: ParallelismSection, per_rank: int) -> str:
    """Return the options that must be equal on all ranks, one per line."""
    options = {**section.model_dump(mode="json"), "devices": per_rank}
    return "\n".join(f"{key} = {value}" for key, value in options.items())


def needed_ranks(section: ParallelismSection, per_rank: int) -> int:
    """Return the number of ranks that must meet, where each stands for `per_rank` ranks of the job;
    0 for any number. Raises ConfigError."""
    if not section.used or (section.dp is None and not section.widths):
        return 0
    parallelism = section.degrees(0)
    ranks, rest = divmod(parallelism.devices, per_rank)
    if rest:
        raise ConfigError(
            f"{parallelism} has {parallelism.devices} ranks, not a multiple of {per_rank} per host",
            hint="set --devices to the number of ranks of each host",
        )
    return ranks


def launch_among(names: Sequence[str], port: int) -> Launch:
    """Return the Launch of this host, with one rank per host in the order of `names`.

    Raises ConfigError if this host is not listed exactly once, or if the name of another host
    resolves to the loopback address.
    """
    me = socket.gethostname()
    own = {card.address for card in this_host().cards}
    found = []
    for rank, name in enumerate(names):
        addresses = _addresses(name)
        loopback = [ip for ip in addresses if ipaddress.ip_address(ip).is_loopback]
        if name == me or own & addresses:
            found.append(rank)
        elif len(loopback) == len(addresses) and len(names) > 1:
            raise ConfigError(
                f"on host {me}, the name {name} resolves to {loopback[0]}, a loopback address (lo):"
                f" {me} would connect to itself instead of {name}",
                hint=f"map {name} to its network card's address in /etc/hosts, or use that address",
            )
    if len(found) != 1:
        have = ", ".join(sorted(own)) or "none"
        raise ConfigError(
            f"--hosts {','.join(names)} must name host {me} ({have}) once, not {len(found)} times",
            hint="list each host once, by its own host name or an address",
        )
    return Launch(found[0], len(names), names[0], port, agent=False, attempt="0")


def _addresses(name: str) -> set[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host {socket.gethostname()} cannot resolve {name}: {error.strerror or error}"
        ) from error
    return {str(info[4][0]).partition("%")[0] for info in found}
