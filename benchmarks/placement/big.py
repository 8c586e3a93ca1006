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
from benchmarks.common.rows import buffers_row, row

LAYERS, WIDTH, INNER = 30, 2048, 5632  # 1.543 billion parameters
ROWS, SEQ, BUDGET = 1, 64, "1.2GiB"
GOAL_BYTES = 3 * 10**9
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
    resident = got["peak_bytes"]
    case = f"Llama {layers} x {width}, {got['compute']} compute, budget {budget}"
    plain = (got["memory"]["plain"], "parameters, gradients, state of plain training")
    limit, total = (GOAL_BYTES, "limit"), resident + peak_bytes()
    enough = None if quick else "ours >= 1500"
    rows = [
        row(case, "parameters", "millions", got["parameters"] / 1e6, goal=enough),
        row(case, "peak resident, the process that trains", "MB", resident, plain),
        row(
            case,
            "peak resident, all processes (sum of peaks)",
            "MB",
            total,
            limit,
            goal="ours <= 3000",
        ),
        buffers_row(case, got["memory"]["resident"], budget),
        Row(case, "make the first values, write them", "s", got["place_s"]),
    ]
    for number, (loss, step) in enumerate(zip(got["losses"], got["steps"]), 1):
        case = f"step {number}, {ROWS} x {SEQ} bytes of text"
        rows += [
            Row(case, "loss", "nats", loss),
            Row(case, "time", "s", step["step_s"]),
            row(case, "read", "GB", step["read_bytes"]),
            row(case, "written", "GB", step["written_bytes"]),
        ]
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
