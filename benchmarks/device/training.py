"""Train a large model for a few steps on a CUDA device, in a process of its own (gpu.py). Uses
public names of roadtrain only, because it also runs with an earlier version."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import roadtrain
from benchmarks.device import shapes

ROWS, TOKENS = 1, 2048
PATTERN = 1 << 22  # number of random values with which parameters are filled


def train(
    system: str, config: Mapping[str, Any], lora: bool, sgd: bool, budget: int, steps: int
) -> dict[str, Any]:
    """Train a model and return measurements: seconds of a step and of optimizer.step() without the
    first step, bytes of device memory at its peak, and the losses.

    Args:
        system: "plain" for plain torch, else a version of roadtrain.
        config: The model's config, see shapes.py.
        lora: Whether only adapters are trained.
        sgd: Whether the optimizer is SGD with momentum, else AdamW.
        budget: roadtrain's device_budget in bytes.
        steps: Number of steps.
    """
    torch.manual_seed(0)
    model: Any = shapes.build(config, lora=lora)
    if system == "plain":
        model.to_empty(device="cuda")
        shapes.move_buffers(model, "cuda")
        for module in model.modules():
            fill(module)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = (
        torch.optim.SGD(trained, lr=1e-4, momentum=0.9)
        if sgd
        else torch.optim.AdamW(trained, lr=1e-5, fused=True)
    )
    if system != "plain":
        optimizer = roadtrain.place(
            model,
            optimizer,
            device="cuda",
            device_budget=budget,
            backwards_per_step=1,
            init=fill,
            report=partial(print, file=sys.stderr),
        )
    x = torch.randint(config["vocab_size"], (ROWS, TOKENS), device="cuda")
    losses, began, in_step = [], 0.0, 0.0
    for step in range(steps):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began, in_step = time.perf_counter(), 0.0
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        at = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        in_step += time.perf_counter() - at
        losses.append(loss.detach())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    found = {
        "step": seconds / (steps - 1),
        "optimizer.step()": in_step / (steps - 1),
        "device memory": torch.cuda.max_memory_allocated(),
        "losses": [loss.item() for loss in losses],
    }
    if system == "roadtrain":
        device = importlib.import_module("roadtrain.device.accelerator").accelerator_of(
            torch.device("cuda", 0)
        )
        found["held"] = device.peak
    if system != "plain":
        optimizer.close()
    return found


def fill(module: nn.Module) -> None:
    """Initialize the module's own parameters: norms with 1, others with the same random numbers
    again and again, because torch draws random numbers slowly."""
    for param in module.parameters(recurse=False):
        with torch.no_grad():
            if param.dim() < 2:
                param.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(param.numel())
            values = (torch.randn(PATTERN, generator=generator) * 0.02).to(param)
            for part in param.view(-1).split(PATTERN):
                part.copy_(values[: part.numel()])
