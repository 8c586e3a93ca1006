"""Two workers that train on servers together, each in a process of its own: a rank is the environment's."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cases
import surface
import torch

CASE = cases.Case(where="2 servers", options=cases.CHUNK)
STEPS = 4
FORK = multiprocessing.get_context("forkserver")


def work(rank: int, workers: int, servers: list[str], out: Connection) -> None:
    """Sends its losses and norms; rank 0 also what the servers hold in the end."""
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    os.environ |= {name: str(number) for name, number in ranks.items()} | {"MASTER_PORT": "1"}
    model, optimizer, scaler = cases.build(CASE.variant)
    found: dict[str, Any] = {"losses": [], "norms": []}
    with surface.place(model, optimizer, servers=servers, **CASE.options) as placed:
        for i in range(STEPS):
            loss = cases.one_step(CASE.variant, model, placed, scaler, workers * i + rank)
            found["losses"].append(loss.hex())
            found["norms"].append(float(placed.grad_norm()).hex())
        if rank == 0:
            found["contents"] = cases.digest(cases.contents(CASE, model, placed))
    out.send(found)


def run(home: Path, workers: int = 2) -> list[dict[str, Any]]:
    """What each worker found."""
    with surface.serving([home / "server0", home / "server1"]) as servers:
        pipes = [FORK.Pipe(duplex=False) for _ in range(workers)]
        processes = [
            FORK.Process(target=work, args=(rank, workers, servers, pipes[rank][1]), daemon=True)
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        for _, there in pipes:
            there.close()
        found = [here.recv() for here, _ in pipes if here.poll(120)]
        for process in processes:
            process.join(30)
        for here, _ in pipes:
            here.close()
    assert len(found) == workers
    return found
