"""Groups as a torch DeviceMesh, on four processes over gloo: what is summed along a dimension of
the mesh is summed over the group that the arithmetic says."""

from __future__ import annotations

import torch
import torch.distributed as dist
import world
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from roadtrain.errors import ConfigError
from roadtrain.stages.groups import GroupKind, Groups, RankGroup
from roadtrain.stages.parallelism import Parallelism

HOSTS = [("a0", "a", 2), ("a1", "a", 2)]
CASES = (
    Parallelism(dp=2, tp=2),
    Parallelism(dp=2, pp=2),
    Parallelism(tp=2, pp=2),
    Parallelism(pp=4),
    Parallelism(pp=2, widths=(3, 1)),
    Parallelism(pp=3, widths=(1, 2, 1)),
)


def own_processes(groups: Groups, rank: int) -> dict[GroupKind, dist.ProcessGroup]:
    """All ranks create all groups in one order; this rank's data, tensor and pipeline groups."""
    made: dict[RankGroup, dist.ProcessGroup] = {
        one: dist.new_group(list(one.ranks)) for one in groups.to_create
    }
    return {
        one.kind: processes
        for one, processes in made.items()
        if rank in one.ranks and one.kind in (GroupKind.DATA, GroupKind.TENSOR, GroupKind.PIPELINE)
    }


def sums(groups: Groups, rank: int) -> list[str]:
    """What is wrong."""
    processes = own_processes(groups, rank)
    mesh = groups.mesh(rank, processes, "cpu")
    wrong = []
    for dim in mesh.mesh_dim_names or ():
        ranks = groups.group_of(GroupKind(dim), rank).ranks
        total = torch.tensor(float(10**rank))
        dist.all_reduce(total, group=mesh.get_group(dim))
        expected = sum(10.0**other for other in ranks)
        # the same through a DTensor, whose own redistribution runs on the mesh
        apart = DTensor.from_local(torch.full((2,), 10.0**rank), mesh[dim], [Partial()])
        whole = apart.redistribute(placements=[Replicate()]).to_local()
        rows = DTensor.from_local(torch.full((1,), float(rank)), mesh[dim], [Shard(0)])
        gathered = rows.full_tensor().tolist()
        if (total.item(), whole.tolist(), gathered) != (expected, [expected] * 2, [*ranks]):
            wrong.append(f"{groups.parallelism} {dim}: {total} {whole} {gathered} of {ranks}")
    at = groups.position(rank)
    where = (
        [at.replica, at.tensor] if groups.parallelism.widths else [at.stage, at.replica, at.tensor]
    )
    if list(mesh.get_coordinate() or ()) != where:
        wrong.append(f"{groups.parallelism}: {mesh.get_coordinate()} is not {where}")
    return wrong


def refusal(groups: Groups, rank: int, processes: dict) -> str:
    try:
        groups.mesh(rank, processes, "cpu")
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def on_meshes(rank: int) -> tuple[list[str], str, str]:
    dist.init_process_group("gloo")
    wrong = [one for case in CASES for one in sums(Groups.of(case, HOSTS), rank)]
    groups = Groups.of(Parallelism(dp=2, pp=2), HOSTS)
    processes = own_processes(groups, rank)
    others = processes | {GroupKind.DATA: processes[GroupKind.PIPELINE]}
    said = refusal(groups, rank, {}), refusal(groups, rank, others)
    dist.destroy_process_group()
    return wrong, *said


def test_sums_along_the_mesh_are_those_of_the_groups() -> None:
    for rank, found in enumerate(world.run(4, on_meshes)):
        assert not isinstance(found, str), found
        wrong, missing, other = found
        assert not wrong
        assert f"rank {rank} has 0 process groups and none for pp way {rank % 2}" in missing
        assert f"for dp stage {rank // 2} tensor index 0 has ranks" in other
