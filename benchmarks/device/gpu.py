"""Train the shape of Llama-3-8B, or of its first layers, on a CUDA device, with a device_budget of
22 GiB. Its peers are plain torch with activation checkpointing, and the version of roadtrain whose
`src` folder is named by the environment variable ROADTRAIN_BEFORE.

State is in host memory. AdamW's state of all 8 billion parameters does not fit in 128 GiB, so all
parameters are trained by SGD with momentum.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common.children import Child
from benchmarks.common.report import Row
from benchmarks.common.rows import row
from benchmarks.device import shapes
from benchmarks.device.training import train
from roadtrain.errors import RoadtrainError
from roadtrain.options.budgets import derive_device
from roadtrain.units import GIB

MODEL = "Llama-3-8B"
BEFORE = "ROADTRAIN_BEFORE"
BUDGET, LIMIT_S = 22 * GIB, 300.0


@dataclass(frozen=True)
class Case:
    layers: int
    steps: int
    lora: bool = False
    sgd: bool = False
    has_peers: bool = True

    def __str__(self) -> str:
        name = MODEL if self.layers == 32 else f"{self.layers} layers of {MODEL}"
        return f"{name}, {'LoRA' if self.lora else 'SGD' if self.sgd else 'AdamW'}"

    @property
    def config(self) -> Mapping[str, Any]:
        return {**shapes.MODELS[MODEL], "num_hidden_layers": self.layers}


CASES = {
    "lora": Case(32, 4, lora=True),
    "adamw": Case(2, 4),
    "sgd": Case(32, 2, sgd=True, has_peers=False),
}


def gpu(case: Case, quick: bool) -> list[Row]:
    """Compare the systems. `quick`: only the model's first two layers."""
    if not torch.cuda.is_available():
        print(f"{case}: not run, because torch sees no CUDA device")
        return []
    case = replace(case, layers=2) if quick else case
    machine = f"{torch.cuda.get_device_name()}, {os.cpu_count()} processors"
    return rows_of(case, machine, _measured(case))


def _measured(case: Case) -> dict[str, Any]:
    """Train with each system, and return the results of `train` by system."""
    systems: dict[str, dict[str, str]] = {"roadtrain": {}}
    if case.has_peers:
        systems["plain"] = {}
        if before := os.environ.get(BEFORE):
            paths = (before, os.environ.get("PYTHONPATH", ""))
            systems["before"] = {"PYTHONPATH": os.pathsep.join(paths)}
    found = {}
    for system, env in systems.items():
        arguments = {"system": system, "config": case.config, "lora": case.lora, "sgd": case.sgd}
        child = Child(train, {**arguments, "budget": BUDGET, "steps": case.steps}, env=env)
        try:
            found[system] = child.wait_for("result", LIMIT_S)
            print(f"{case}: {system}: {found[system]}", flush=True)
        except RoadtrainError as error:
            print(f"{case}: {system}: {error}", flush=True)
        finally:
            child.end()
    return found


def rows_of(case: Case, machine: str, found: dict[str, Any]) -> list[Row]:
    if "roadtrain" not in found:
        return [row(str(case), "trained", "runs", 0, goal="ours == 1")]
    name, ours = f"{case} ({machine})", found.pop("roadtrain")
    made = shapes.chunk_table(shapes.build(case.config, lora=case.lora))
    buffers = derive_device(made, made.blocks[1:], BUDGET)
    least = buffers.total - buffers.activation_bytes, "planned besides block inputs"
    rows = [
        row(name, "held at its peak", "GB", ours["held"], least, goal=f"ours <= {BUDGET / 1e9}"),
        row(
            name,
            "share of a step in optimizer.step()",
            "%",
            ours["optimizer.step()"] / ours["step"],
        ),
    ]
    for what, unit in (("step", "s"), ("device memory", "GB")):
        rows += [row(name, what, unit, ours[what], (of[what], peer)) for peer, of in found.items()]
        rows += [] if found else [row(name, what, unit, ours[what])]
    for peer, of in found.items():
        difference = abs(ours["losses"][0] - of["losses"][0])
        rows.append(
            row(name, f"first loss, difference to {peer}", "", difference, goal="ours == 0")
        )
    return rows
