"""Measure the path between host memory and a device.

    memory  device memory that a session plans for the shapes of large models
    races   changes of the code that cause a race, and what finds each
    bus     the step of a model of 420 M parameters behind an emulated bus, in both directions
    python  the worker's Python per block and step
    lora    adapters of an 8B-shaped model on a CUDA device (gpu.py)
    adamw   its first layers
    sgd     all of its parameters

The large models of `memory` are on the meta device. `races` and `bus` run on an emulated device. In
`bus`, the bus is so slow that the parameters and gradients of a step need as long as the
computation, half as long, or twice as long, if they use it one after the other. The code of the
second edition had a single stream for both directions; here, one stream is used for both instead of
two.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roadtrain
from benchmarks.common import model420
from benchmarks.common.report import Report, Row, within
from benchmarks.common.rows import row
from benchmarks.device import races, shapes
from benchmarks.device.gpu import CASES, gpu
from benchmarks.device.messages import python_time
from roadtrain.config.plan_file import PLACEMENTS, Plan
from roadtrain.device.accelerator import accelerator_of
from roadtrain.lab.emulated_device import EmulatedDevice
from roadtrain.options.budgets import DEVICE_GRADIENTS, LEAST_ACTIVATIONS, derive_device
from roadtrain.planner.model_config import shape_of_config
from roadtrain.simulator.memory import device_bytes
from roadtrain.streaming.split import split, table
from roadtrain.units import GIB

ITEMS = ("memory", "races", "bus", "python", *CASES)
DEVICE = 80 * GIB
MOST = {"Llama-3-8B": 8, "Llama-3-70B": 20}  # GiB besides block inputs
SECONDS, STEPS = 8.0, 4  # of a step of the model of 420 M parameters, and number of steps


def run(quick: bool = False, only: Sequence[str] = ()) -> Report:
    items = {"memory": memory, "races": found, "bus": bus, "python": python_time}
    items |= {name: functools.partial(gpu, case) for name, case in CASES.items()}
    rows = [line for item in only or ITEMS for line in items[item](quick)]
    return Report("device", rows)


# memory


def memory(quick: bool) -> list[Row]:
    rows = []
    for name, config in shapes.MODELS.items():
        for lora in (False, True):
            made = shapes.chunk_table(shapes.build(config, lora=lora))
            found = derive_device(made, made.blocks[1:], DEVICE)
            held = found.total - found.activation_bytes
            goal = f"ours <= {MOST[name] * GIB / 1e9}" if name in MOST else None
            case = f"{name}, {'LoRA' if lora else 'all parameters'}"
            rows.append(row(case, "buffers besides block inputs", "GB", held, goal=goal))
            if not lora:
                plan = Plan(PLACEMENTS["files"]).changed(device_gradients=DEVICE_GRADIENTS + 1)
                planned = device_bytes(plan, shape_of_config(config, seq_len=2048).blocks)
                line = row(case, "the same by the plan", "GB", planned, (held, "buffers"))
                rows.append(replace(line, **within(planned / held, 0.02)))
    return [*rows, *_peaks(quick)]


def _peaks(quick: bool) -> list[Row]:
    """Train a model on emulated devices with the least device_budget, and with twice as much."""
    layers, rows = 4 if quick else 12, []
    build = functools.partial(model420.build, "fp32", layers=layers, width=256, inner=1024)
    made = shapes.chunk_table(build())
    least = derive_device(made, made.blocks[1:], DEVICE)
    least_bytes = replace(least, slots=2, activation_bytes=LEAST_ACTIVATIONS).total
    for budget in (least_bytes, 2 * least_bytes):
        device = EmulatedDevice(checked=False, late_s=0.0, memory_bytes=budget)
        model = build()
        with device.active():
            optimizer = roadtrain.place(
                model,
                model420.adamw(model.parameters()),
                device_budget=budget,
                backwards_per_step=1,
                report=lambda _: None,
            )
            with optimizer:
                model420.training(model, optimizer, range(2), rows=16, seq=256)
        case, goal = f"{layers} layers of width 256", f"ours <= {budget / 1e6}"
        rows.append(
            row(case, "held at its peak", "MB", device.peak, (budget, "device_budget"), goal=goal)
        )
    return rows


# races


def found(quick: bool) -> list[Row]:
    @functools.cache
    def expected(**case: bool) -> list[float]:
        return races.train(None, **case)

    rows, missed = [], 0
    for change in races.CHANGES[:: 5 if quick else 1]:
        by = races.found_by(change, expected)
        missed += not by
        rows.append(row(f"race: {change.what}", by or "not found", "found", float(bool(by))))
    return [*rows, row("races", "not found", "changes", missed, goal="ours == 0")]


# the bus


def compute(seconds: float) -> None:
    """Let the stream that computes, or the host without a device, be busy for `seconds`."""
    device: Any = accelerator_of(torch.device("cpu"))
    sleep = functools.partial(time.sleep, seconds)
    sleep() if device is None else device.compute.put(sleep)


class Sleep(torch.autograd.Function):
    """Computes for `seconds` in forward, and twice as long in backward, without the processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        compute(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        compute(2 * ctx.seconds)
        return grad, torch.zeros_like(weight), None


class Layer(nn.Module):
    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = (
            nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16)),
            seconds,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call,no-any-return]


class Layers(nn.Module):
    """Layers of the size of those of the model of 420 M parameters. A step with recomputation takes
    `seconds`."""

    def __init__(self, seconds: float, layers: int) -> None:
        super().__init__()
        of_layer = 4 * model420.WIDTH**2 + 3 * model420.WIDTH * model420.INNER
        self.layers = nn.ModuleList(Layer(of_layer, seconds / 4 / layers) for _ in range(layers))
        self.last = nn.Linear(1, 1, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, run: Callable[..., torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            x = run(layer, x)
        return self.last(x).square().mean()


def bus(quick: bool) -> list[Row]:
    seconds, layers = (1.0, 4) if quick else (SECONDS, model420.LAYERS)
    plain = _step(Layers(seconds, layers), None), "plain torch"
    rows = [row("bus", "computation of a step", "s", seconds, plain)]
    return rows + [_bus(share, seconds, layers) for share in (0.5, 1.0, 2.0)]


def _bus(share: float, seconds: float, layers: int) -> Row:
    """Compare steps with one and with two streams. The bus needs `share` of the `seconds` of a
    step's computation for all bytes of the step, one after the other."""
    model = Layers(seconds, layers)
    made = table(split(model), dict.fromkeys(model.parameters(), 0), torch.bfloat16)
    block = made.blocks[1]
    # the last block stays on the device from forward to backward
    into, out = (2 * layers - 1) * block.pull_nbytes, layers * block.push_nbytes
    rate = (into + out) / (share * seconds)
    floor = max(seconds, into / rate, out / rate) + (block.pull_nbytes + block.push_nbytes) / rate
    steps = {}
    for streams in (1, 2):
        device = EmulatedDevice(
            into_rate=rate, out_rate=rate, late_s=0.0, checked=False, ahead=True
        )
        if streams == 1:
            device.out = device.into
        steps[streams] = _step(Layers(seconds, layers), device)
    case = f"bus: all bytes in {share:g} of the computation"
    step = row(case, "step", "s", steps[2], (steps[1], "one stream"), of_floor=steps[2] / floor)
    return replace(step, goal="of_floor <= 1.05", met=steps[2] <= 1.05 * floor)


def _step(model: Layers, device: EmulatedDevice | None) -> float:
    """Return the seconds of a step on the device, or in plain torch without an optimizer if
    `device` is None."""
    run = checkpoint if device is None else _call
    x, began = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True), 0.0
    with ExitStack() as stack:
        optimizer = None
        if device is not None:
            stack.enter_context(device.active())
            optimizer = roadtrain.place(
                model,
                model420.adamw(model.parameters()),
                backwards_per_step=1,
                device_budget="2GiB",
                report=lambda _: None,
            )
            stack.enter_context(optimizer)
        for step in range(STEPS):
            if step == 1:
                began = _idle(device)
            model(x, run).backward()  # type: ignore[no-untyped-call]
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
        return (_idle(device) - began) / (STEPS - 1)


def _idle(device: EmulatedDevice | None) -> float:
    """Wait until the device has computed everything, and return the time."""
    if device is not None:
        event = device.new_event()
        event.record(device.compute)
        event.synchronize()
    return time.monotonic()


def _call(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x)
