"""Measure the peak memory of training for models with 8, 32 and 128 blocks of the same width. State
is in files, and all models have the same budget.

The saved inputs of all blocks (rows x seq x width, fp32) grow with depth. Apart from these inputs,
memory should not grow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import roadtrain
from benchmarks.common import model420
from benchmarks.common.children import need_disk, peak_bytes, run_child
from benchmarks.common.report import Report, Row
from benchmarks.common.rows import buffers_row, row

DEPTHS, WIDTH, BUDGET, STEPS = (8, 32, 128), 512, "256MiB", 3
ROWS, SEQ = 1, 256
GOAL = "ours < 5"  # %
REPS = 3


def run(quick: bool = False) -> Report:
    depths, width, budget = ((4, 16), 256, "96MiB") if quick else (DEPTHS, WIDTH, BUDGET)
    return Report(
        "depth", compare(measure(depths, width, budget, 1 if quick else REPS), width, budget)
    )


def compare(got: list[dict[str, Any]], width: int, budget: str) -> list[Row]:
    base, rows = got[0], []
    for result in got:
        case = (
            f"{result['blocks']} blocks x {width}, {result['parameters'] / 1e6:.0f} M parameters,"
            f" budget {budget}"
        )
        plain = (result["plain"], "parameters, gradients, state of plain training")
        held, inputs = result["held"] / 1e6, result["inputs"] / 1e6
        rows += [
            row(case, "peak memory of the process", "MB", result["peak_bytes"], plain),
            buffers_row(case, result["resident"], budget),
            Row(case, "all saved block inputs, and held at once", "MB", held, inputs, "all"),
        ]
        if result is not base:
            metric = f"growth from {base['blocks']} blocks"
            whole = result["peak_bytes"] / base["peak_bytes"] - 1
            beyond, goal = growth(base, result), GOAL if result is got[-1] else None
            rows += [
                row(case, metric, "%", whole),
                row(case, f"{metric} beyond saved block inputs", "%", beyond, goal=goal),
            ]
    return rows


def measure(depths: Sequence[int], width: int, budget: str, reps: int = 1) -> list[dict[str, Any]]:
    """Measure each depth with `reps` processes, and return the results with the median peak, in
    ascending order of depth.
    """
    got: list[list[dict[str, Any]]] = [[] for _ in depths]
    for _ in range(reps):
        for blocks, results in zip(depths, got):
            with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
                need_disk(Path(name), 2 * 12 * blocks * 12 * width**2 + 10**9)
                results.append(
                    run_child(child, blocks=blocks, width=width, directory=name, budget=budget)
                )
    return [
        sorted(results, key=lambda result: result["peak_bytes"] - result["held"])[len(results) // 2]
        for results in got
    ]


def growth(base: dict[str, Any], result: dict[str, Any]) -> float:
    """Return the growth of the peak memory as a fraction of `base`. The block inputs in memory are
    subtracted from both peaks.
    """
    return (result["peak_bytes"] - result["held"]) / (base["peak_bytes"] - base["held"]) - 1


def child(
    blocks: int, width: int, directory: str, budget: str, steps: int = STEPS
) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        intermediate_size=width * 11 // 4,
        max_position_embeddings=SEQ,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).train()  # type: ignore[no-untyped-call]
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with roadtrain.place(
        model,
        adamw,
        store=Path(directory) / "store",
        host_budget=budget,
        backwards_per_step=1,
        device="cpu",
    ) as optimizer:
        losses, _ = model420.training(model, optimizer, range(steps), ROWS, SEQ)
        optimizer.flush()
        memory = optimizer.memory()
    return {
        "blocks": blocks,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "resident": memory["resident"],
        "plain": memory["plain"],
        "held": memory["activations"],
        "inputs": blocks * ROWS * SEQ * width * 4,
        "peak_bytes": peak_bytes(),
    }
