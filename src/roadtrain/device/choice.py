"""The choice of the device on which a worker computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import nn

from roadtrain.device.accelerator import accelerator_of
from roadtrain.environment import local_rank_of
from roadtrain.errors import ConfigError, ModelError
from roadtrain.units import parse_bytes, show_bytes

RESERVE = 4  # a fourth of a device's memory is for computing, unless device_budget is set


def own_device(
    requested: torch.device | str | None = None,
    report: Callable[[str], None] = lambda _: None,
    environ: Mapping[str, str] = os.environ,
) -> torch.device:
    """Return the requested device with an index, by default the accelerator of this host, or the
    CPU if there is none. Raises ConfigError if the device is missing or not supported.

    If `requested` is an accelerator without an index, such as `cuda`, the first of these rules that
    applies chooses the device, which then becomes torch's current device: torch's current device,
    if its index is above 0; the only device, if torch sees only one; the device whose index is the
    environment variable LOCAL_RANK.
    """
    found = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = "cuda" if found is None else found.type
    try:
        device = torch.device(requested or (kind if count else "cpu"))
    except RuntimeError as error:
        raise ConfigError(
            f"`device` cannot be {requested!r}",
            hint=f"`device` must be {kind!r}, '{kind}:N' or 'cpu'",
        ) from error
    if device.type in ("cpu", "meta"):
        return torch.device("cpu")
    if device.type != kind:
        raise ConfigError(
            f"device {device} is not supported, only {kind} and cpu are supported here",
            hint=f"use device={kind!r} or device='cpu'",
        )
    index = device.index or 0
    if device.index is None and count:
        index = _own_index(kind, count, report, environ)
    if index >= count:
        hides = "check CUDA_VISIBLE_DEVICES, which hides devices, or " if kind == "cuda" else ""
        raise ConfigError(
            f"device {kind}:{index} is requested, but torch sees {count} {kind} device(s) here",
            hint=f"{hides}use device='cpu'",
        )
    if device.index is None:
        torch.accelerator.set_device_index(index)
    elif count > 1:
        rank, workers = local_rank_of(environ)
        # for example if each process of a script calls model.cuda()
        if workers > 1 and rank != index:
            report(
                f"worker {rank} of {workers} on this host computes on {kind}:{index}, which another"
                f" worker may use, too: device={kind!r} gives each worker its own device, and"
                f" torch.accelerator.set_device_index({rank}) sets it for the whole program"
            )
    return torch.device(kind, index)


def _own_index(
    kind: str, count: int, report: Callable[[str], None], environ: Mapping[str, str]
) -> int:
    rank, workers = local_rank_of(environ)
    if chosen := torch.accelerator.current_device_index():
        return chosen
    if count == 1:  # perhaps the launcher has made a different device visible to each worker
        if workers > 1:
            report(
                f"this host has {workers} workers and this one sees 1 {kind} device, which it uses"
            )
        return 0
    if not 0 <= rank < count:
        raise ConfigError(
            f"there is no {kind}:{rank}: torch sees {count} {kind} devices, but LOCAL_RANK is"
            f" {rank}",
            hint=f"start one worker per device on each host, or name a device (device='{kind}:0')",
        )
    return rank


def device_of(
    model: nn.Module, requested: torch.device | str | None, report: Callable[[str], None]
) -> torch.device:
    """Return the device for the blocks of `model`: `requested`, or by default the device of its
    parameters. Raises ConfigError if the device is missing or not supported, and ModelError if the
    parameters are on several devices."""
    if requested is not None:
        return own_device(requested, report)
    found = {p.device for p in model.parameters()} - {torch.device("meta")}
    if len(found) > 1:
        raise ModelError(
            f"the model's parameters are on several devices, {sorted(map(str, found))}",
            hint="move the model to one device",
        )
    device = next(iter(found), torch.device("cpu"))
    if line := idle_accelerator(device):
        report(line)
    return own_device(device, report)


def idle_accelerator(device: torch.device) -> str:
    """Return a warning if the model computes on the CPU of a host with an accelerator, else ""."""
    if device.type != "cpu" or not torch.accelerator.is_available():
        return ""
    kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    return (
        f"the model computes on the CPU, but this host has {count} {kind} device(s): place(...,"
        f" device='{kind}') or model.to('{kind}') uses them, device='cpu' turns this warning off"
    )


def device_bytes_of(
    budget: str | int | None, device: torch.device, report: Callable[[str], None]
) -> int | None:
    """Return a budget of device memory in bytes, or None on the CPU. If `budget` is None, the
    budget is the free memory without a reserve for computing, and is reported."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        if budget is None:
            return None
        raise ConfigError(
            f"device_budget = {show_bytes(parse_bytes(budget))}, but the blocks run on the CPU, in"
            " host memory",
            hint=f"use host_budget={budget!r}",
        )
    accelerator.report = report
    if lacks := accelerator.lacks():
        report(lacks)
    if budget is not None:
        return parse_bytes(budget)
    free, total = accelerator.memory()
    reserve = total // RESERVE
    found = max(0, free - reserve)
    report(
        f"device_budget: {show_bytes(found)}, which is the free memory of {device},"
        f" {show_bytes(free)}, without {show_bytes(reserve)} for computing"
    )
    return found
