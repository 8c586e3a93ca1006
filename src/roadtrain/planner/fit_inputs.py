"""The two things that `roadtrain fit` is asked about: a model and a machine.

A model's parameters come from the first of these sources that has them: the formula of its family,
the headers of its safetensors files, or its modules, which transformers builds on `meta`. Only the
last source, and MODULE:FUNCTION, import torch. The machine is this one, as the system describes it,
or the one that the options describe.
"""

from __future__ import annotations

import gc
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from roadtrain.config.catalogue import device_name, template
from roadtrain.config.families import TIED, Layout, of_tensors
from roadtrain.config.models import (
    ModelShape,
    chosen_length,
    from_config,
    layout_of_config,
    named_layout,
    named_shape,
    read_config,
    shape_of_layout,
)
from roadtrain.environment import control_group_limit, free_memory
from roadtrain.errors import ConfigError
from roadtrain.retry import slow_work
from roadtrain.storage.safetensors_io import open_dir
from roadtrain.units import MIB, parse_bytes, parse_rate, show_bytes, show_params

USABLE = 0.9  # fraction of a described machine's memory; the rest is the system's
_SSD = re.compile(r"(?:([1-9]\d*)\s*x)?\s*([\d.]+\s*\w+/s)?,?\s*([\d.]+\s*\w+)?")


@dataclass(frozen=True)
class FitModel:
    """A model for `fit`.

    Attributes:
        name: Name for the user.
        layout: The parameters.
        shape: The costs of a sample, with notes on what was assumed.
        measured: Whether a forward pass measured the bytes that the backward of a block needs.
        pretrained: The path that the user gave, for `roadtrain init`; "" if only place() trains
            this model.
        transformers: Whether the training process imports transformers.
        samples: Number of samples of the batch that MODULE:FUNCTION returned; else 1.
    """

    name: str
    layout: Layout
    shape: ModelShape
    measured: bool = False
    pretrained: str = ""
    transformers: bool = True
    samples: int = 1


def model_of(name: str, seq_len: int | None = None) -> FitModel:
    """Return the model called `name`. Raises ConfigError and ModelError.

    Args:
        name: The name of a shape, a config.json, a directory with a config.json or safetensors
            files, a safetensors file, or MODULE:FUNCTION.
        seq_len: The number of tokens of a sample. If None, a default is used, and the shape's
            `notes` state the default.
    """
    if not name:
        raise ConfigError(
            "no model is given", hint="give --model NAME, or the path of a Hugging Face config.json"
        )
    module, _, function = name.partition(":")
    path = Path(name)
    if function and "/" not in name:
        if seq_len is not None:
            raise ConfigError(
                f"{name} provides its own samples, so --seq-len {seq_len} would have no effect",
                hint="omit --seq-len",
            )
        return _of_function(module, function)
    config_file = path / "config.json" if path.is_dir() else path
    has_headers = path.suffix == ".safetensors" or any(path.glob("*.safetensors"))
    if config_file.suffix == ".json" and (config_file.exists() or not has_headers):
        return _of_config(path, config_file, has_headers and path.is_dir(), seq_len)
    if has_headers:
        return replace(_of_headers(path, path.stem, seq_len), transformers=False)
    layout, shape = named_layout(name), named_shape(name, seq_len)
    return FitModel(shape.name, layout, shape, shape.tokens == 1, transformers=shape.tokens > 1)


def _of_config(at: Path, path: Path, has_headers: bool, seq_len: int | None) -> FitModel:
    """`at`: the path that the user gave. `path`: its config.json."""
    config = read_config(path)
    kind, name = str(config.get("model_type") or ""), path.resolve().parent.name or str(path)
    named = config.get("architectures") or ["CausalLM"] * (kind in TIED)
    trained = any(re.search(r"CausalLM|(?<!With)LMHead", str(own)) for own in named)
    pretrained = str(at) * trained
    if trained and (layout := layout_of_config(config)) is not None:
        shape = from_config(config, seq_len=seq_len)
        return FitModel(name, layout, replace(shape, name=name), pretrained=pretrained)
    why = f"no formula for a `{kind}`" + " with these keys" * (kind in TIED)
    why += " (quantized, but counted in full precision)" * ("quantization_config" in config)
    if has_headers:
        model = _of_headers(path.parent, name, seq_len, config)
        why += ": its parameters are read from the headers of its safetensors files"
        shape = replace(model.shape, notes=(why, *model.shape.notes))
        return replace(model, shape=shape, pretrained=pretrained)
    gc.disable()  # collecting garbage takes a fifth of the time of importing transformers
    try:
        with slow_work("counting the model's modules", report=partial(print, file=sys.stderr)):
            counting = importlib.import_module("roadtrain.planner.model_config")
            layout, shape = counting.counted(config, seq_len=seq_len, name=name)
    finally:
        gc.freeze()  # what was imported stays
        gc.enable()
    notes = (f"{why}: its modules were counted with transformers", *shape.notes)
    shape = replace(shape, notes=notes)
    return FitModel(name, layout, shape, True, pretrained)


def _of_headers(
    path: Path, name: str, seq_len: int | None, config: Mapping[str, Any] | None = None
) -> FitModel:
    own = config or {}
    shapes = {tensor: header.shape for tensor, header in open_dir(path).items()}
    layout = of_tensors(shapes, bool(own.get("tie_word_embeddings")))
    tokens, notes = chosen_length(seq_len, own.get("max_position_embeddings"))
    return FitModel(name, layout, shape_of_layout(layout, tokens, name, tuple(notes)))


def _of_function(module: str, function: str) -> FitModel:
    """Measure the model that MODULE:FUNCTION returns. Imports torch."""
    try:
        model, *args = getattr(importlib.import_module(module), function)()
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        samples = len(args[0]) if args else 1
        if not samples:
            raise ValueError("the batch has no samples")
    except Exception as cause:
        raise ConfigError(
            f"{module}:{function} does not return a model and arguments: {cause}",
            hint="give a function without arguments that returns (model, batch, ...)",
        ) from cause
    measure = importlib.import_module("roadtrain.planner.measure")
    counting = importlib.import_module("roadtrain.planner.model_config")
    shape = measure.shape_of(model, *args, samples=samples, name=function)
    note = f"{show_params(frozen)} frozen parameters are counted as if they were trained"
    shape = replace(shape, notes=(note,) * (frozen > 0))
    layout = counting.layout_of(measure.split(model), shape.hidden)
    imports = any(type(m).__module__.startswith("transformers.") for m in model.modules())
    return FitModel(function, layout, shape, True, transformers=imports, samples=samples)


@dataclass(frozen=True)
class Machine:
    """The memory of a machine.

    Attributes:
        name: Name for the user.
        ram: Bytes of host memory that a job may use.
        device: Name of the accelerator; "" if the CPUs compute, in host memory.
        device_bytes: Bytes of one accelerator's memory.
        disk: Bytes of free disk space; None if unknown.
        ssds: Number of SSDs, each with a directory of its own.
        ssd_rate: Bytes/s of all SSDs together; 0 if unknown.
    """

    name: str
    ram: float
    device: str = ""
    device_bytes: float = 0.0
    disk: float | None = None
    ssds: int = 1
    ssd_rate: float = 0.0
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        disk = "disk of unknown size" if self.disk is None else f"{show_bytes(self.disk)} of disk"
        memory = show_bytes(self.device_bytes)
        device = f"{self.device} with {memory}" if self.device else "no device"
        return f"{self.name}: {device}, {show_bytes(self.ram)} of memory to use, {disk}"


def machine_of(device: str, ram: str, ssd: str) -> Machine:
    """Return the machine that the options describe; this machine without options."""
    machine = this_machine()
    if not (device or ram or ssd):
        return machine
    if device or ram:
        machine = Machine("the machine", machine.ram)
    if device and device.lower() not in ("cpu", "none"):
        name = device_name(device)
        memory = parse_bytes(template("device", name)["memory"])
        machine = replace(machine, name=name, device=name, device_bytes=memory)
    if ram:
        if (nbytes := parse_bytes(ram)) < MIB:
            raise ConfigError(f"--ram {ram} is {nbytes} bytes", hint=f"write --ram {ram}GB")
        machine = replace(machine, ram=USABLE * nbytes)
    if ssd:
        machine = replace(machine, **_ssds(ssd))
    return machine


def _ssds(text: str) -> dict[str, Any]:
    """Parse SSDs such as `2x7GB/s`, `4TB` or `2x7GB/s,2TB`."""
    found = _SSD.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise ConfigError(f"--ssd {text!r} is not a number of SSDs", hint="write 2x7GB/s,2TB")
    count = int(found[1] or 1)
    rate = count * parse_rate(found[2]) if found[2] else 0.0
    disk = float(count * parse_bytes(found[3])) if found[3] else None
    return {"ssds": count, "ssd_rate": rate, "disk": disk}


def this_machine() -> Machine:
    """Return this machine, as the system describes it, without importing torch."""
    limit = control_group_limit()
    notes = () if limit is None else (f"the control group limits memory to {show_bytes(limit)}",)
    disk = float(shutil.disk_usage(".").free)
    machine = Machine("this machine", float(free_memory()), disk=disk, notes=notes)
    if (found := _nvidia()) is not None:
        machine = replace(machine, device=found[0], device_bytes=found[1])
    return machine


def _nvidia() -> tuple[str, float] | None:
    """Return the name and the free memory in bytes of the first NVIDIA device, or None."""
    query = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=3, check=True).stdout
        name, _, free = text.splitlines()[0].rpartition(",")
        return name.strip(), float(free) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
