"""One worker of `bench cluster`: trains the decoder, ours or FSDP2's, and writes its step times and losses.

    RANK=0 WORLD_SIZE=4 python -m roadtrain.bench.cluster_worker --servers H:P,... --steps N --json OUT        ours
    RANK=0 WORLD_SIZE=4 MASTER_ADDR=A MASTER_PORT=P ... --fsdp                                                 torch

Both: bf16 parameters and gradients on the wire, products as bench/model420.py says. FSDP2 keeps bf16 parameters, as its
users do who save traffic; ours keeps fp32 masters, on the servers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import roadtrain
from roadtrain.bench.apart import peak_bytes
from roadtrain.bench.model420 import adamw, batch, build, compute_default
from roadtrain.node.dial import token_of
from roadtrain.wire.tcp import Options


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("servers", "token", "json", "budget"):
        parser.add_argument(f"--{name}", default="")
    for name, value in (("steps", 8), ("layers", 10), ("width", 512), ("inner", 1536), ("rows", 1), ("seq", 32),
                        ("staleness", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fsdp", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = build(compute_default(), layers=args.layers, width=args.width, inner=args.inner)
    if args.fsdp:
        distributed.init_process_group("gloo")
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, foreach=False)
    else:
        optimizer = roadtrain.place(
            model, adamw(model.parameters()), servers=args.servers.split(","), budget=args.budget or None,
            link=Options(token=token_of(args.token), retry_s=60), backwards_per_step=1, staleness=args.staleness,
            chunk_elements=1 << 20,
            report=lambda line: print(line, flush=True),
        )
    seconds, losses, parts, cpu = [], [], [], time.process_time()
    then = time.perf_counter()
    for step in range(args.steps):
        x = batch(step * workers + rank, args.rows, args.seq)
        loss = model(input_ids=x, labels=x).loss
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        now = time.perf_counter()
        seconds.append(now - then)
        parts.append((forward - then, backward - forward, now - backward))
        then = now
    if isinstance(optimizer, roadtrain.PlacedOptimizer):
        optimizer.close()
    Path(args.json).write_text(json.dumps(
        {"seconds": seconds, "losses": losses, "parts": parts, "peak": peak_bytes(), "cpu": time.process_time() - cpu,
         "parameters": sum(p.numel() for p in model.parameters())}))
    if args.fsdp:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
