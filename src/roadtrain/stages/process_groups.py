"""Process groups, each over a network of its own: gloo bound to an address, NCCL to one of its
network modules, in the group's own options. No environment variable is set.

A group's operations wait for `deadline_s` at most (Rule 5). gloo is bound through torch's public
way for a backend with options of its own (`register_backend`, `new_group(pg_options=...)`).

Note: what NCCL can choose per communicator. `NCCLConfig.net_name` chooses "IB" (InfiniBand and
RoCE) or "Socket"; the card is of the process (NCCL_IB_HCA, NCCL_SOCKET_IFNAME), so that a rank's
InfiniBand, or RoCE, groups share their cards. Where these variables do not name the card that was
chosen, `NcclNetwork.unbound` says so; nothing is set silently.

Assumes: every rank makes the same calls in the same order. Does NOT choose networks
(stages/networks.py) nor prove that they work (preflight.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from roadtrain.errors import LostError
from roadtrain.stages.networks import CONTROL, ETHERNET, INSIDE, GroupNetwork, NamedRanks

GLOO = "roadtrain_gloo"  # gloo whose groups have an address each


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's process groups, by the names of their groups."""

    control: ProcessGroup  # of all ranks, gloo: moves host tensors
    replies: ProcessGroup  # another one like it, for what comes back
    of: Mapping[str, ProcessGroup]  # those that this rank is in
    networks: Mapping[str, GroupNetwork]  # of all groups

    def __getitem__(self, group: NamedRanks) -> ProcessGroup:
        return self.of[group.name]

    def __contains__(self, group: NamedRanks) -> bool:
        return group.name in self.of


@dataclass(frozen=True)
class NcclNetwork:
    """What NCCL is told about a group, and what it cannot be told."""

    net_name: str | None  # of NCCLConfig; None: it chooses, inside a host
    unbound: str  # a line for people; "": all is as chosen


def start_processes(
    network: GroupNetwork, store: dist.Store, rank: int, world_size: int, deadline_s: float
) -> None:
    """Makes the default process group, of all ranks, over `network` by gloo. network: of all
    ranks. Raises LostError."""
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
    groups: Sequence[NamedRanks],
    networks: Mapping[str, GroupNetwork],
    deadline_s: float,
    *,
    device_type: str = "cpu",
    say: Callable[[str], None] = print,
) -> ProcessGroups:
    """Makes every group, in order. Collective over all ranks of the default process group, which
    is there already (`start_processes`, or the user's own).

    networks: by group name, and one called CONTROL that all ranks are in; every rank gives the
    same. device_type: "cpu" (gloo) or "cuda" (NCCL; the control group is gloo). say: gets a line
    for each group whose network is not wholly as chosen. Raises LostError where a group's ranks do
    not connect within the deadline.
    """
    rank, made = dist.get_rank(), dict[str, ProcessGroup]()
    control, replies = (_gloo_group(networks[CONTROL], deadline_s) for _ in range(2))
    for group in groups:
        network = networks[group.name]
        if device_type == "cpu":
            process_group = _gloo_group(network, deadline_s)
        else:
            choice = nccl_network(network, rank, os.environ)
            if choice.unbound and rank in network.ranks:
                say(choice.unbound)
            options: Any = dist.ProcessGroupNCCL.Options()
            if choice.net_name is not None:
                options.config.net_name = choice.net_name
            process_group = _new_group(network, "nccl", options, deadline_s)
        if rank in network.ranks:
            made[group.name] = process_group
    return ProcessGroups(control, replies, made, dict(networks))


def nccl_network(network: GroupNetwork, rank: int, environment: Mapping[str, str]) -> NcclNetwork:
    """For a group that `rank` is in; else only the name. environment: the process's."""
    if network.kind == INSIDE:
        return NcclNetwork(None, "")
    net_name, variable = (
        ("Socket", "NCCL_SOCKET_IFNAME") if network.kind == ETHERNET else ("IB", "NCCL_IB_HCA")
    )
    if rank not in network.ranks:
        return NcclNetwork(net_name, "")
    card = network.card_of(rank)
    bound = environment.get(variable, "")
    wanted = card.interface if net_name == "Socket" else card.device
    if wanted and bound.lstrip("=").partition(":")[0] == wanted:
        return NcclNetwork(net_name, "")
    has = f"is {bound!r}" if bound else "is not set, so that it takes what it finds"
    return NcclNetwork(
        net_name,
        f"{network.group}: NCCL goes by {net_name}; that its card is"
        f" {wanted or card.interface} cannot be said per group: {variable} {has}",
    )


def _gloo_group(network: GroupNetwork, deadline_s: float) -> Any:
    _register_gloo()
    rank = dist.get_rank()
    address = network.card_of(rank).address if rank in network.ranks else ""
    return _new_group(network, GLOO, address, deadline_s)


def _new_group(network: GroupNetwork, backend: str, options: Any, deadline_s: float) -> Any:
    with _connecting(network, deadline_s):
        return dist.new_group(
            list(network.ranks),
            timeout=timedelta(seconds=deadline_s),
            backend=backend,
            pg_options=options,
            group_desc=network.group,
        )


@contextmanager
def _connecting(network: GroupNetwork, deadline_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own errors too
        who = ", ".join(
            f"rank {rank} at {card.address} of {host}"
            for rank, host, card in zip(network.ranks, network.hosts, network.cards)
        )
        raise LostError(
            f"{network.group} did not connect within {deadline_s:.0f} s over {network.kind}"
            f" ({who}): {str(error).splitlines()[0]}",
            hint="`roadtrain preflight` tests every pair",
        ) from error


def _register_gloo() -> None:
    if GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(GLOO, _make_gloo, extended_api=True, devices=["cpu"])


def _make_gloo(options: Any, address: str) -> Any:
    """A torch backend. options: torch's for any backend: store, ranks, timeout."""
    gloo = dist.ProcessGroupGloo
    own: Any = gloo._Options()  # type: ignore[attr-defined]
    own._devices = [gloo.create_device(hostname=address)]
    own._timeout = options.timeout
    own.global_ranks_in_group = options.global_ranks_in_group
    own.group_name = options.group_id
    return gloo(options.store, options.group_rank, options.group_size, own)
