"""Measure the memory of a worker process that uses network servers, for models of different depth
and for different numbers of workers.

The results are the resident memory of a worker, minus that of a bare process, which has imported
all modules but has built no model. `peak` covers the whole life of the process; `while training`
begins after the model is placed. Of several workers, the worker with the most memory counts. Of
three runs, the median counts, because the layout of glibc's heap changes the memory of a run by
some percent.

The saved input of each block (rows x seq x width, fp32) must grow with depth, and is shown.
Roadtrain is compared with plain training, which has everything in memory: bf16 parameters, fp32
masters and AdamW's state.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import roadtrain
from benchmarks.common import model420
from benchmarks.common.children import (
    forget_peak,
    need_disk,
    peak_bytes,
    resident_bytes,
    run_child,
    run_children,
    serving,
)
from benchmarks.common.report import Report, Row
from roadtrain.device.buffers import Heap
from roadtrain.units import parse_bytes

DEPTHS, WIDTH, BUDGET = (8, 16, 32, 64), 512, "96MiB"
WORKERS, AT = (1, 2, 4), 16  # numbers of workers, and the depth used with them
SERVERS, SERVER_BUDGET = 2, "256MiB"
ROWS, SEQ, REPS = 1, 32, 3
VISITS, LEAST = 96, 3  # least number of blocks run forward, and of steps
GOAL = 0.05
BYTES = 14  # a parameter, in each of two slots


def run(quick: bool = False) -> Report:
    depths, width, budget, counts, at = (
        ((4, 16), 256, "40MiB", (1, 2), 4) if quick else (DEPTHS, WIDTH, BUDGET, WORKERS, AT)
    )
    cases = list(
        dict.fromkeys([*((1, blocks) for blocks in depths), *((count, at) for count in counts)])
    )
    got = measure(cases, width, budget, 1 if quick else REPS)
    plain = {
        blocks: measure_plain(blocks, width)
        for blocks in dict.fromkeys(blocks for _, blocks in cases)
    }
    rows = []
    for axis in ([(1, blocks) for blocks in depths], [(count, at) for count in counts]):
        rows += compare([got[case] for case in axis], plain, width, budget)
    return Report("workers", rows)


def compare(
    got: Sequence[dict[str, Any]], plain: dict[int, dict[str, Any]], width: int, budget: str
) -> list[Row]:
    """Build the rows for the results `got`, of which the first has the smallest depth or the fewest
    workers. `plain`: maps a depth to the result of plain training.
    """
    base, rows = got[0], []
    for result in got:
        peer = plain[result["blocks"]]
        case = (
            f"{result['workers']} worker(s), {result['blocks']} blocks x {width},"
            f" {result['parameters'] / 1e6:.0f} M parameters, budget {budget}, {SERVERS} servers"
        )
        rows += [
            Row(
                case,
                "peak of a worker beyond the bare process",
                "MB",
                result["peak"] / 1e6,
                peer=peer["peak"] / 1e6,
                peer_name="plain training",
                ratio=peer["peak"] / result["peak"],
            ),
            Row(
                case,
                "the same while training",
                "MB",
                result["training"] / 1e6,
                peer=peer["training"] / 1e6,
                peer_name="plain training",
                ratio=peer["training"] / result["training"],
            ),
            Row(
                case,
                "peak of the whole process",
                "MB",
                (result["peak"] + result["bare"]) / 1e6,
                peer=(peer["peak"] + peer["bare"]) / 1e6,
                peer_name="plain training",
            ),
            Row(
                case,
                "held by roadtrain's buffers",
                "MB",
                result["buffers"] / 1e6,
                peer=parse_bytes(budget) / 1e6,
                peer_name="budget",
            ),
            Row(case, "saved block inputs held at once", "MB", result["held"] / 1e6),
        ]
        if result is base:
            continue
        goal = f"< {100 * GOAL:g}" if result is got[-1] else None
        since = f"growth from {base['workers']} worker(s), {base['blocks']} blocks"
        for metric, keys in (
            ("of the peak", ("peak",)),
            ("while training", ("training",)),
            ("of the whole process", ("peak", "bare")),
            ("of the buffers", ("buffers",)),
        ):
            grown = sum(result[key] for key in keys) / sum(base[key] for key in keys) - 1
            rows.append(
                Row(
                    case,
                    f"{since}: {metric}",
                    "%",
                    100 * grown,
                    goal=goal,
                    met=grown < GOAL if goal else None,
                )
            )
    return rows


def steps_of(blocks: int) -> int:
    """Return the number of steps for a depth. Steps times blocks is about the same for every depth,
    so a leak per block shows at every depth.
    """
    return max(LEAST, VISITS // blocks)


def measure(
    cases: Sequence[tuple[int, int]], width: int, budget: str, reps: int
) -> dict[tuple[int, int], Any]:
    """Measure each case `reps` times. Returns a dict from the case (number of workers, number of
    blocks) to the result of the run with the median peak.
    """
    found: dict[tuple[int, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for rep in range(reps):
        for workers, blocks in cases:
            with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
                need_disk(Path(name), 2 * BYTES * blocks * 13 * width**2 + 10**9)
                with ExitStack() as stack:
                    addresses = [
                        stack.enter_context(
                            serving(
                                Path(name),
                                *("--store", f"{name}/store{i}", "--budget", SERVER_BUDGET),
                                name=f"server{i}",
                            )
                        ).address
                        for i in range(SERVERS)
                    ]
                    sizes = {"blocks": blocks, "width": width, "budget": budget}
                    each = [{**sizes, "servers": addresses}] * workers
                    envs = [
                        {"RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_PORT": "1"}
                        for rank in range(workers)
                    ]
                    results = run_children(child, each, envs=envs)
            most = {key: max(result[key] for result in results) for key in results[0]}
            found[workers, blocks].append(most | {"workers": workers})
            print(
                f"run {rep + 1} of {reps}, {workers} worker(s), {blocks} blocks:"
                f" {most['peak'] / 1e6:.0f} MB",
                flush=True,
            )
    return {
        case: sorted(runs, key=lambda result: result["peak"])[len(runs) // 2]
        for case, runs in found.items()
    }


def measure_plain(blocks: int, width: int) -> dict[str, Any]:
    result: dict[str, Any] = run_child(child, blocks=blocks, width=width)
    print(f"plain training, {blocks} blocks: {result['peak'] / 1e6:.0f} MB", flush=True)
    return result


def child(
    blocks: int, width: int, budget: str = BUDGET, servers: Sequence[str] = ()
) -> dict[str, Any]:
    """Train with these servers, or without roadtrain if there are none."""
    torch.set_num_threads(1)
    compute = model420.compute_default()
    sizes: dict[str, Any] = {"layers": blocks, "width": width, "inner": width * 11 // 4}
    model420.batch(0, ROWS, SEQ)  # reads the text before memory is measured
    Heap().trim(at_once=True)
    forget_peak()
    bare = resident_bytes()
    if not servers:
        model420.plain_losses(steps_of(blocks), ROWS, SEQ, compute, **sizes)
        return {"bare": bare, "peak": peak_bytes() - bare, "training": peak_bytes() - bare}
    with torch.device("meta"):
        model = model420.build(compute, **sizes)
    optimizer = roadtrain.place(
        model,
        model420.adamw(model.parameters()),
        store=roadtrain.Servers(list(servers)),
        host_budget=budget,
        dtype=torch.bfloat16,
        backwards_per_step=1,
        device="cpu",
    )
    with optimizer:
        placing = peak_bytes()
        forget_peak()
        model420.training(model, optimizer, range(steps_of(blocks)), ROWS, SEQ)
        optimizer.flush()
        training, buffers = peak_bytes(), optimizer.memory()["resident"]
        held = optimizer.memory()["activations"]
    return {
        "bare": bare,
        "blocks": blocks,
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak": max(placing, training) - bare,
        "training": training - bare,
        "buffers": buffers,
        "held": held,
    }
