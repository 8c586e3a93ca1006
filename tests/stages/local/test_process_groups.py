"""Process groups over separate networks, in real processes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from roadtrain.errors import LostError
from roadtrain.stages.host_cards import this_host
from roadtrain.stages.networks import CONTROL, choose_networks
from roadtrain.stages.process_groups import make_process_groups, start_processes
from tests.support import world

pytestmark = pytest.mark.slow
RANKS = 3


@dataclass(frozen=True)
class Ranks:
    name: str
    ranks: tuple[int, ...]


GROUPS = (Ranks("dp", (0, 1)), Ranks("activations", (0, 1, 2)), Ranks("gradients", (0, 1, 2)))


def started(rank, deadline_s=10.0):
    networks = choose_networks(GROUPS, [this_host()] * RANKS)
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=20)))
    start_processes(networks[CONTROL], store, rank, RANKS, deadline_s)
    return networks, store


def use_every_operation(rank):
    groups = make_process_groups(GROUPS, started(rank)[0], 10.0)
    results = {"names": list(groups.of), "control": dist.get_world_size(groups.control)}
    forward, backward = groups[GROUPS[1]], groups[GROUPS[2]]
    if rank < 2:
        sent = dist.isend(torch.full((3,), rank + 1.0), group=forward, group_dst=2)
        back = torch.empty(3)
        dist.irecv(back, group=backward, group_src=2).wait()
        sent.wait()
        results["back"] = back.tolist()
        pair = groups[GROUPS[0]]
        whole, part = torch.arange(4.0) * (rank + 1), torch.empty(2)
        dist.reduce_scatter_single(part, whole, group=pair)
        dist.all_gather_single(whole, part, group=pair)
        results["sum"] = whole.tolist()
        swapped = torch.empty(2)
        dist.all_to_all_single(swapped, torch.tensor([10.0, 20.0]) + rank, group=pair)
        results["swapped"] = swapped.tolist()
        half = torch.ones(2, dtype=torch.bfloat16)
        work = dist.all_reduce(half, group=pair, async_op=True)
        work.wait()
        results["half"] = half.tolist()
    else:
        for source in (1, 0):  # peers may be received from in any order
            received = torch.empty(3)
            dist.irecv(received, group=forward, group_src=source).wait()
            dist.isend(received * 10, group=backward, group_dst=source).wait()
        assert GROUPS[0] not in groups
    dist.barrier(group=groups.control)
    dist.destroy_process_group()
    return results


def test_groups_support_every_operation_of_training() -> None:
    first, second, third = world.run(RANKS, use_every_operation)
    assert first["names"] == second["names"] == ["dp", "activations", "gradients"]
    assert third["names"] == ["activations", "gradients"]
    assert first["control"] == 3
    assert (first["back"], second["back"]) == ([10.0] * 3, [20.0] * 3)
    assert first["sum"] == second["sum"] == [0.0, 3.0, 6.0, 9.0]
    assert (first["swapped"], second["swapped"]) == ([10.0, 11.0], [20.0, 21.0])
    assert first["half"] == [2.0, 2.0]


def wait_in_vain(rank):
    """Wait for a message that no rank sends, then make groups with a wrong address of rank 1."""
    networks, store = started(rank)
    groups = make_process_groups(GROUPS, networks, 2.0)
    begin, timeout, connect_error = time.monotonic(), "", "made"
    if rank == 0:
        try:
            dist.irecv(torch.empty(1), group=groups[GROUPS[1]], group_src=2).wait()
        except RuntimeError as error:
            timeout = str(error)
    waited = time.monotonic() - begin
    store.add("over", 1)
    while store.add("over", 0) < RANKS:
        time.sleep(0.05)
    cards = networks["dp"].cards
    wrong = replace(networks["dp"], cards=(cards[0], replace(cards[1], address="192.0.2.77")))
    try:
        make_process_groups(GROUPS, networks | {"dp": wrong}, 2.0)
    except LostError as error:
        connect_error = str(error)
    return timeout, waited, connect_error


def test_waits_end_at_the_deadline_and_name_rank_and_address() -> None:  # Rule 5
    results = world.run(RANKS, wait_in_vain)
    timeout, waited, _ = results[0]
    assert "Timed out waiting 2000ms" in timeout
    assert 1.8 < waited < 13
    assert "dp did not connect within 2 s over inside a host" in results[1][2]
    assert "rank 1 at 192.0.2.77" in results[1][2]
