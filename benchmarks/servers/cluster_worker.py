"""Worker of the benchmark `cluster`: trains a Llama with roadtrain or FSDP2 and writes its step
times and losses.

    roadtrain:
    RANK=0 WORLD_SIZE=4 python -m benchmarks.servers.cluster_worker --servers H:P --steps N
        --json OUT
    FSDP2:
    RANK=0 WORLD_SIZE=4 MASTER_ADDR=A MASTER_PORT=P ... --fsdp

roadtrain and FSDP2 both send bf16 parameters and gradients. FSDP2 keeps its parameters in bf16, and
roadtrain keeps fp32 masters on the servers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import roadtrain
from benchmarks.common.children import peak_bytes
from benchmarks.common.model420 import adamw, batch, build, compute_default
from roadtrain.errors import DeadlineError

WAIT_S = 300.0


def carried() -> tuple[int, int]:
    """Return (received bytes, sent bytes) of this host's NIC so far, counted as whole frames."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            fields = counts.split()
            return int(fields[0]), int(fields[8])
    return 0, 0


def wait_at(gate: Path, rank: int) -> None:
    """Report in the directory `gate` that this worker has placed its model, and wait until training
    may begin. Raises DeadlineError after 300 seconds.
    """
    (gate / f"here{rank}").touch()
    until = time.monotonic() + WAIT_S
    while not (gate / "open").exists():
        if time.monotonic() > until:
            raise DeadlineError(
                f"not all workers have placed their models within {WAIT_S:.0f} s",
                hint="see the logs of the other workers",
            )
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("servers", "token", "json", "budget", "gate"):
        parser.add_argument(f"--{name}", default="")
    for name, value in (
        ("steps", 8),
        ("layers", 10),
        ("width", 512),
        ("inner", 1536),
        ("rows", 1),
        ("seq", 32),
        ("staleness", 0),
        ("chunk", 1 << 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--relay", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = build(compute_default(), layers=args.layers, width=args.width, inner=args.inner)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    block = 2 * sum(p.numel() for p in layers[0].parameters())
    if args.fsdp:
        distributed.init_process_group("gloo")
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=2e-5, foreach=False
        )
    else:
        optimizer = roadtrain.place(
            model,
            adamw(model.parameters()),
            store=roadtrain.Servers(
                args.servers.split(","), token=args.token, retry_s=60, relay=args.relay
            ),
            host_budget=args.budget or None,
            backwards_per_step=1,
            delay=roadtrain.Delay(args.staleness) if args.staleness else None,
            chunk_elements=args.chunk,
            report=lambda line: print(line, flush=True),
        )
    if args.gate:
        wait_at(Path(args.gate), rank)
    seconds, losses, parts, cpu, moved = [], [], [], time.process_time(), [carried()]
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
        moved.append(carried())
        parts.append((forward - then, backward - forward, now - backward))
        then = now
    kept = 0
    if isinstance(optimizer, roadtrain.PlacedOptimizer):
        kept = len(optimizer.session.worker.buffers.slots)
        optimizer.close()
    Path(args.json).write_text(
        json.dumps(
            {
                "seconds": seconds,
                "losses": losses,
                "parts": parts,
                "peak": peak_bytes(),
                "cpu": time.process_time() - cpu,
                "received": [b[0] - a[0] for a, b in pairwise(moved)],
                "sent": [b[1] - a[1] for a, b in pairwise(moved)],
                "kept_blocks": kept,
                "blocks": args.layers,
                "block_bytes": block,
                "parameters": sum(p.numel() for p in model.parameters()),
            }
        )
    )
    if args.fsdp:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
