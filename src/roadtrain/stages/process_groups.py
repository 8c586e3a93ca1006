"""Create process groups, each over its own network. Does NOT choose networks (stages/networks.py)
or test them (preflight.py).

Operations time out after the group's deadline (Rule 5). No environment variable is set. Every rank
must make the same calls in the same order.

Note "NCCL networks": an NCCL communicator can choose only between "IB" (InfiniBand and RoCE) and
"Socket". The card is chosen for the whole process by NCCL_IB_HCA and NCCL_SOCKET_IFNAME, which
roadtrain never sets. If they do not name the chosen card, roadtrain warns.

Note "NCCL communicators": all ranks create the groups in the same order, and with `device_id` each
new group connects at once. Otherwise NCCL would create a communicator for each pair of ranks when
the pair first exchanges a message, in an order that depends on the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from roadtrain.errors import ConfigError, LostError
from roadtrain.stages.networks import CONTROL, ETHERNET, INSIDE, GroupNetwork
from roadtrain.stages.op_queue import BACKSTOP
from roadtrain.stages.rank_groups import RankGroup

CPU = torch.device("cpu")
GLOO = "roadtrain_gloo"  # a gloo backend with an address per group


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's process groups, and the networks of all groups."""

    control: ProcessGroup  # a gloo group of all ranks, for host tensors
    replies: ProcessGroup  # a second such group, for replies only
    of: Mapping[str, ProcessGroup]  # by name, the groups of which this rank is a member
    networks: Mapping[str, GroupNetwork]  # by name, the networks of all groups

    def __getitem__(self, group: RankGroup) -> ProcessGroup:
        return self.of[group.name]

    def __contains__(self, group: RankGroup) -> bool:
        return group.name in self.of


@dataclass(frozen=True)
class NcclNetwork:
    """The NCCL settings of a group."""

    net_name: str | None  # for NCCLConfig; None inside a host, where NCCL itself chooses
    unbound: str  # a warning if NCCL may use another card than roadtrain chose, else ""


def check_device(device: torch.device) -> None:
    """Raise ConfigError if there are no collectives for tensors on `device`."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"parallelize() would compute on {device}, but supports only CUDA devices (NCCL) and"
            " the CPU (gloo)",
            hint="use device='cpu', or place() the model on this device",
        )


def start_processes(
    network: GroupNetwork, store: dist.Store, rank: int, world_size: int, deadline_s: float
) -> None:
    """Create the default process group of all ranks, with gloo over `network`. Raises LostError if
    the ranks do not connect in time."""
    _register_gloo()
    with _connecting(network, deadline_s):
        dist.init_process_group(
            GLOO,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=deadline_s),
            pg_options=network.card_of(rank).address,
        )


def make_process_groups(
    groups: Sequence[RankGroup],
    networks: Mapping[str, GroupNetwork],
    deadline_s: float,
    *,
    device: torch.device = CPU,
    say: Callable[[str], None] = print,
) -> ProcessGroups:
    """Create all groups, in order. Collective; the default process group must exist.

    networks: the network of each group by name, and of the group of all ranks, the same on every
    rank. device: this rank's device: a CPU (all groups use gloo) or a GPU with an index (all groups
    but that of all ranks use NCCL). say: called with a warning for each group that may not use the
    chosen card. Raises LostError if a group's ranks do not connect within the deadline.
    """
    rank, made = dist.get_rank(), dict[str, ProcessGroup]()
    control, replies = (_gloo_group(networks[CONTROL], deadline_s) for _ in range(2))
    for group in groups:
        network = networks[group.name]
        if device.type == "cpu":
            process_group = _gloo_group(network, deadline_s)
        else:
            choice = nccl_network(network, rank, os.environ)
            if choice.unbound and rank in network.ranks:
                say(choice.unbound)
            options: Any = dist.ProcessGroupNCCL.Options()
            if choice.net_name is not None:
                options.config.net_name = choice.net_name
            process_group = _new_group(network, "nccl", options, BACKSTOP * deadline_s, device)
        if rank in network.ranks:
            made[group.name] = process_group
    return ProcessGroups(control, replies, made, dict(networks))


def nccl_network(network: GroupNetwork, rank: int, environment: Mapping[str, str]) -> NcclNetwork:
    """Return the NCCL settings of a group, with a warning if the environment variables do not
    select the card of `rank`."""
    if network.kind == INSIDE:
        return NcclNetwork(None, "")
    net_name, variable = (
        ("Socket", "NCCL_SOCKET_IFNAME") if network.kind == ETHERNET else ("IB", "NCCL_IB_HCA")
    )
    if rank not in network.ranks:
        return NcclNetwork(net_name, "")
    card = network.card_of(rank)
    bound = environment.get(variable, "")
    chosen = card.interface if net_name == "Socket" else card.device
    if chosen and bound.lstrip("=").partition(":")[0] == chosen:
        return NcclNetwork(net_name, "")
    has = f"is {bound!r}" if bound else "is not set, so NCCL chooses a card by itself"
    return NcclNetwork(
        net_name,
        f"{network.group}: NCCL uses {net_name}, but its card {chosen or card.interface} cannot be"
        f" set per group: {variable} {has}",
    )


def _gloo_group(network: GroupNetwork, deadline_s: float) -> Any:
    _register_gloo()
    rank = dist.get_rank()
    address = network.card_of(rank).address if rank in network.ranks else ""
    return _new_group(network, GLOO, address, deadline_s)


def _new_group(
    network: GroupNetwork,
    backend: str,
    options: Any,
    deadline_s: float,
    device: torch.device | None = None,
) -> Any:
    with _connecting(network, deadline_s):
        return dist.new_group(
            list(network.ranks),
            timeout=timedelta(seconds=deadline_s),
            backend=backend,
            pg_options=options,
            group_desc=network.group,
            device_id=device,
        )


@contextmanager
def _connecting(network: GroupNetwork, deadline_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # includes torch's own errors
        who = ", ".join(
            f"rank {rank} at {card.address} of {host}"
            for rank, host, card in zip(network.ranks, network.hosts, network.cards)
        )
        raise LostError(
            f"the ranks of group {network.group} did not connect within {deadline_s:.0f} s over"
            f" {network.kind} ({who}): {str(error).splitlines()[0]}",
            hint="`roadtrain preflight` tests every pair of hosts",
        ) from error


def _register_gloo() -> None:
    if GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(GLOO, _make_gloo, extended_api=True, devices=["cpu"])


def _make_gloo(options: Any, address: str) -> Any:
    """Create a gloo backend that is bound to `address`. options: torch's options of any backend."""
    gloo = dist.ProcessGroupGloo
    own: Any = gloo._Options()  # type: ignore[attr-defined]
    own._devices = [gloo.create_device(hostname=address)]
    own._timeout = options.timeout
    own.global_ranks_in_group = options.global_ranks_in_group
    own.group_name = options.group_id
    return gloo(options.store, options.group_rank, options.group_size, own)
