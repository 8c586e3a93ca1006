"""A rank of tests/stages/lab/test_group_networks.py: it meets the others, creates its groups, and
carries out commands on them, one per input line."""

import os
import sys

import torch
import torch.distributed as dist

from roadtrain.config.job import load_job
from roadtrain.environment import launch_of
from roadtrain.stages.host_ranks import DataGroups
from roadtrain.stages.networks import CONTROL, override
from roadtrain.stages.preflight import preflight
from roadtrain.stages.process_groups import make_process_groups, start_processes
from roadtrain.stages.rank_groups import GroupKind, Groups
from roadtrain.stages.rank_meeting import meet

NBYTES = 4 << 20


def main(job: str) -> None:
    options = load_job(job).parallelism
    met = meet(launch_of(os.environ), deadline_s=60)
    parallelism = options.degrees(met.world_size)
    hosts = override(met.hosts, options.networks)
    groups = Groups.of(parallelism, met.host_devices(hosts), data_groups=DataGroups.IN_ONE_CLUSTER)
    networks = preflight(met, groups.to_create, hosts, say=lambda _: None)
    start_processes(networks[CONTROL], met.store, met.rank, met.world_size, 60.0)
    made = make_process_groups(groups.to_create, networks, 60.0)
    data = made[groups.group_of(GroupKind.DATA, met.rank)]
    forward = made[groups.boundaries[0]]
    x = torch.ones(NBYTES // 4)
    for line in sys.stdin:
        match line.strip():
            case "sum":
                dist.all_reduce(x, group=data)
            case "pass on" if met.rank < 2:
                dist.isend(x, group=forward, group_dst=met.rank + 2).wait()
            case "pass on":
                dist.irecv(x, group=forward, group_src=met.rank - 2).wait()
        dist.barrier(group=made.control)
        print(f"done {x.sum().item()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
