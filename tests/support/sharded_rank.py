"""A rank of test_sharded_overlap.py: trains two copies of a model in turn, with and without
overlap, and records the time and the sent bytes of each step.

python sharded_rank.py STORE RANK WIDTH NIC DEPTH STEPS
"""

import json
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from roadtrain.stages.sharded_optimizer import ShardedOptimizer, ShardedOptions

WIDTH, TOKENS = 512, 384
WARM = 2  # warm-up steps; the first records the order


def build_model(depth):
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(depth)
    )
    return nn.Sequential(*blocks)


def sent_bytes(nic):
    with open(f"/sys/class/net/{nic}/statistics/tx_bytes") as file:
        return int(file.read())


def one_step(model, optimizer, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    optimizer.begin_step(1)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def main(store, rank, width, nic, depth, steps):
    torch.set_num_threads(1)
    store = dist.FileStore(store, width)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=width, timeout=timedelta(seconds=60)
    )
    found = {}
    made = {}
    for overlap in (True, False):
        model = build_model(depth)
        options = ShardedOptions(bucket_bytes=4 << 20, overlap=overlap)
        user = torch.optim.AdamW(model.parameters(), lr=1e-4)
        made[overlap] = model, ShardedOptimizer(model, user, dist.new_group(), options=options)
        found[str(overlap)] = {"losses": [], "seconds": [], "sent": 0, "steps": 0}
    rounds = 3
    for _ in range(rounds):
        for overlap, (model, optimizer) in made.items():
            out = found[str(overlap)]
            first = optimizer.steps_done
            dist.barrier()
            before = sent_bytes(nic)
            for step in range(first, first + steps + WARM):
                if step == first + WARM:
                    optimizer.wait_parameters()
                    dist.barrier()
                    began = time.perf_counter()
                out["losses"].append(one_step(model, optimizer, step, rank))
            optimizer.wait_parameters()
            dist.barrier()
            out["seconds"].append((time.perf_counter() - began) / steps)
            out["sent"] += sent_bytes(nic) - before
            out["steps"] += steps + WARM
    numel = sum(p.numel() for p in model.parameters())
    for out in found.values():
        out["sent"] /= out["steps"] * 4 * numel
        out["median"] = statistics.median(out["seconds"])
    found["numel"] = numel
    a, b = (list(model.parameters()) for model, _ in made.values())
    found["same"] = all(torch.equal(p, q) for p, q in zip(a, b))
    for _, optimizer in made.values():
        optimizer.close()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    rank, width, depth, steps = (int(numbers[i]) for i in (0, 1, 3, 4))
    main(path, rank, width, numbers[2], depth, steps)
