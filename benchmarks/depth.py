"""Depth: peak memory of training the same width at 8, 32 and 128 blocks, state on files, one fixed
budget.

Each depth is a process of its own, its peak is VmHWM. A block's saved input (rows x seq x width,
fp32) must be kept for every block; how many bytes of them were held at the peak is what the
activations' own counter says (under the budget, the rest rests on files), and growth beyond that
should be nothing: buffers are as many as the budget gives.

Each peak is the median of REPS processes: how glibc's heap happens to fall moves one by 5 %.

    python -m benchmarks.depth --child 8 --dir DIR --width 512 --json OUT
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import roadtrain
from benchmarks import model420
from benchmarks.apart import apart, need_disk, peak_bytes
from benchmarks.report import Report, Row
from roadtrain.units import parse_bytes

DEPTHS, WIDTH, BUDGET, STEPS = (8, 32, 128), 512, "256MiB", 3
ROWS, SEQ = 1, 256
GOAL = 0.05
REPS = 3


def run(quick: bool = False) -> Report:
    depths, width, budget = ((4, 16), 256, "96MiB") if quick else (DEPTHS, WIDTH, BUDGET)
    return Report(
        "depth", compare(measure(depths, width, budget, 1 if quick else REPS), width, budget)
    )


def compare(got: list[dict[str, Any]], width: int, budget: str) -> list[Row]:
    base, rows = got[0], []
    for one in got:
        case = (
            f"{one['blocks']} blocks x {width}, {one['parameters'] / 1e6:.0f} M parameters, budget"
            f" {budget}"
        )
        beyond = growth(base, one)
        rows += [
            Row(
                case,
                "peak memory of the process",
                "MB",
                one["peak_bytes"] / 1e6,
                one["plain"] / 1e6,
                "parameters, gradients, state of plain training",
                one["plain"] / one["peak_bytes"],
                None,
                None,
                None,
            ),
            Row(
                case,
                "held by roadtrain's buffers",
                "MB",
                one["resident"] / 1e6,
                parse_bytes(budget) / 1e6,
                "budget",
                parse_bytes(budget) / one["resident"],
                None,
                None,
                None,
            ),
            Row(
                case,
                "all saved block inputs, and held at once",
                "MB",
                one["held"] / 1e6,
                one["inputs"] / 1e6,
                "all",
                None,
                None,
                None,
                None,
            ),
        ]
        if one is not base:
            last = one is got[-1]
            plain = one["peak_bytes"] / base["peak_bytes"] - 1
            rows += [
                Row(
                    case,
                    f"growth from {base['blocks']} blocks",
                    "%",
                    100 * plain,
                    None,
                    None,
                    None,
                    None,
                    None,
                    None,
                ),
                Row(
                    case,
                    f"growth from {base['blocks']} blocks beyond saved block inputs",
                    "%",
                    100 * beyond,
                    None,
                    None,
                    None,
                    None,
                    f"< {100 * GOAL:g}" if last else None,
                    beyond < GOAL if last else None,
                ),
            ]
    return rows


def measure(depths: Sequence[int], width: int, budget: str, reps: int = 1) -> list[dict[str, Any]]:
    """One result a depth, shallowest first: the process with the median peak."""
    got: list[list[dict[str, Any]]] = [[] for _ in depths]
    for _ in range(reps):
        for blocks, results in zip(depths, got):
            with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
                need_disk(Path(name), 2 * 12 * blocks * 12 * width**2 + 10**9)
                results.append(
                    apart(
                        "benchmarks.depth",
                        "--child",
                        blocks,
                        "--dir",
                        name,
                        "--width",
                        width,
                        "--budget",
                        budget,
                    )
                )
    return [
        sorted(results, key=lambda one: one["peak_bytes"] - one["held"])[len(results) // 2]
        for results in got
    ]


def growth(base: dict[str, Any], one: dict[str, Any]) -> float:
    """Of the peak, as a fraction, without the block inputs that either process held."""
    return (one["peak_bytes"] - one["held"]) / (base["peak_bytes"] - base["held"]) - 1


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


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--child", type=int, required=True, help="number of blocks")
    parser.add_argument("--dir", required=True, help="directory for the state")
    parser.add_argument("--json", required=True, help="where the result goes")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--budget", default=BUDGET)
    args = parser.parse_args(argv)
    Path(args.json).write_text(json.dumps(child(args.child, args.width, args.dir, args.budget)))


if __name__ == "__main__":
    main(sys.argv[1:])
