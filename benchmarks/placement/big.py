"""Train real steps of a model of more than 1.5 billion parameters. All processes together use at
most 3 GB of memory.

The model is a Llama of transformers with 30 layers of width 2048. The bf16 parameters, fp32 masters
and AdamW state take 28 bytes a parameter on disk, in two copies. The store's directory is created
in the current directory and removed afterwards.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import roadtrain
from benchmarks.common import model420
from benchmarks.common.children import need_disk, peak_bytes, run_child
from benchmarks.common.report import Report, Row
from roadtrain.units import parse_bytes

LAYERS, WIDTH, INNER = 30, 2048, 5632  # 1.543 billion parameters
ROWS, SEQ, BUDGET = 1, 64, "1.2GiB"
GOAL_PARAMETERS, GOAL_BYTES = 1.5e9, 3 * 10**9
BYTES = 14  # a parameter, in each of two slots


def run(quick: bool = False) -> Report:
    layers, width, inner, budget, steps = (
        (6, 1024, 2816, "400MiB", 2) if quick else (LAYERS, WIDTH, INNER, BUDGET, 3)
    )
    parameters = layers * width * (4 * width + 3 * inner)
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
        need_disk(Path(name), 2 * BYTES * parameters + 2 * 10**9)
        got = run_child(
            child,
            directory=name,
            layers=layers,
            width=width,
            inner=inner,
            budget=budget,
            steps=steps,
        )
    case, resident = (
        f"Llama {layers} x {width}, {got['compute']} compute, budget {budget}",
        got["peak_bytes"],
    )
    total, plain = resident + peak_bytes(), got["memory"]["plain"]
    rows = [
        Row(
            case,
            "parameters",
            "millions",
            got["parameters"] / 1e6,
            goal=">= 1500",
            met=None if quick else got["parameters"] >= GOAL_PARAMETERS,
        ),
        Row(
            case,
            "peak resident, the process that trains",
            "MB",
            resident / 1e6,
            peer=plain / 1e6,
            peer_name="parameters, gradients, state of plain training",
            ratio=plain / resident,
        ),
        Row(
            case,
            "peak resident, all processes (sum of peaks)",
            "MB",
            total / 1e6,
            peer=GOAL_BYTES / 1e6,
            peer_name="limit",
            ratio=GOAL_BYTES / total,
            goal="ours <= 3000",
            met=total <= GOAL_BYTES,
        ),
        Row(
            case,
            "held by roadtrain's buffers",
            "MB",
            got["memory"]["resident"] / 1e6,
            peer=parse_bytes(budget) / 1e6,
            peer_name="budget",
            ratio=parse_bytes(budget) / got["memory"]["resident"],
        ),
        Row(case, "make the first values, write them", "s", got["place_s"]),
    ]
    for number, (loss, step) in enumerate(zip(got["losses"], got["steps"]), 1):
        for metric, unit, value in (
            ("loss", "nats", loss),
            ("time", "s", step["step_s"]),
            ("read", "GB", step["read_bytes"] / 1e9),
            ("written", "GB", step["written_bytes"] / 1e9),
        ):
            rows.append(Row(f"step {number}, {ROWS} x {SEQ} bytes of text", metric, unit, value))
    return Report("big", rows)


def child(
    directory: str, layers: int, width: int, inner: int, budget: str, steps: int
) -> dict[str, Any]:
    compute = model420.compute_default()
    began = time.perf_counter()
    with torch.device("meta"):
        model = model420.build(compute, layers=layers, width=width, inner=inner)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = roadtrain.place(
        model,
        model420.adamw(model.parameters()),
        store=Path(directory) / "store",
        dtype=torch.bfloat16,
        host_budget=budget,
        backwards_per_step=1,
        device="cpu",
    )
    place_s = time.perf_counter() - began
    losses, measured = model420.training(model, optimizer, range(steps), ROWS, SEQ)
    (read, written), began = model420.disk_bytes(), time.perf_counter()
    memory = optimizer.memory()
    optimizer.close()  # pending writes belong to the last step
    read_after, written_after = model420.disk_bytes()
    measured[-1]["step_s"] += time.perf_counter() - began
    measured[-1]["read_bytes"] += read_after - read
    measured[-1]["written_bytes"] += written_after - written
    return {
        "parameters": parameters,
        "losses": losses,
        "steps": measured,
        "memory": memory,
        "place_s": place_s,
        "compute": compute,
        "peak_bytes": peak_bytes(),
    }
