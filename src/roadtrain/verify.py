"""verify(): the user's own job, a few steps in three ways, compared bit for bit: placed as the job says (in a temporary
store beside its own), placed in RAM, and plainly: the whole model in torch, the same rules on whole tensors.

The plain side shares the loop (`train.step`) and the rules' kernels, nothing of the stream, servers, stores or chunks.
Beside it torch's own optimizer gets the same gradients in fp32: its deviation is reported, it is rounding.
Assumes: memory for all this; refused otherwise. Does NOT compare plainly where the job is lossy.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from roadtrain.build import DTYPES, build_model, build_optimizer
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.kernels.generic import TorchRule, check_rule
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.rules import rules_for
from roadtrain.kernels.sum import sum_squares
from roadtrain.model.grads import PlacedGrad
from roadtrain.model.split import as_numpy, split, table
from roadtrain.probe import storage_rates
from roadtrain.spec.chunks import ChunkTable
from roadtrain.spec.job import Job, load_job
from roadtrain.train import Training, place_job, step
from roadtrain.units import show_bytes, show_rate

Report = Callable[[str], None]
Read = Callable[[str, str], np.ndarray]  # parameter's name, "master" or a state's name


def command(path: str, overrides: Mapping[str, Any], steps: int = 3, report: Report = print) -> int:
    return 0 if verify(load_job(path, overrides), steps, report) else 1


def verify(job: Job, steps: int, report: Report = print) -> bool:
    """Whether every loss and every tensor is the same, bit for bit, each way. Raises BudgetError, UserError."""
    with ExitStack() as stack:
        homes = [stack.enter_context(_beside(Path(d))) for d in job.store.dirs]
        if job.store.servers:
            report("the servers are left alone: verify runs on this host, in memory")
            job = job.changed({"store.servers": []})
        placed = place_job(job.changed({"store.dirs": homes}), report)
        stack.enter_context(placed.optimizer)
        _check_memory(placed.optimizer.memory()["plain"])
        names = _names(placed)
        start = {name: placed.optimizer.read(name, "master").copy() for name, what in names if what == "master"}
        losses = _run(placed, steps)
        resident = place_job(job.changed({"store.dirs": [], "budget.host": None}), lambda _: None)
        with resident.optimizer:
            theirs = _run(resident, steps)
            same = _same("placed", "in RAM", losses, theirs, names, placed, resident.optimizer.read, report)
        if job.compress.topk is not None:
            report("plain torch is not compared: the job is lossy on purpose")
            return same
        plain = _plain(placed, start)
        same &= _same("placed", "plain", losses, _run(plain, steps), names, placed, plain.optimizer.read, report)
        name, most = plain.optimizer.deviation()
        report(f"torch's own {type(plain.optimizer.torch).__name__} deviates by at most {most:.2e} (in {name})")
        return same


def check_rule_command(name: str, dir: str = ".", report: Report = print) -> int:
    """MODULE:NAME of a Rule, or the class of one or of a torch optimizer. `dir`: on the device to compare its rate
    with. 1 where it fails its check."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as cause:
        raise ConfigError(f"{name!r}: {cause}", hint="MODULE:NAME, importable from here") from cause
    group: Mapping[str, Any] = getattr(found, "example_group", {"lr": 1e-3})
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        try:
            optimizer = found([torch.nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
        except Exception as cause:
            raise ConfigError(f"{name} takes no flat parameter, or not by its defaults: {cause}") from cause
        rule, group = rules_for(optimizer)[0], optimizer.param_groups[0]
    else:
        rule = found() if isinstance(found, type) and issubclass(found, Rule) else found
        if not isinstance(rule, Rule):
            raise ConfigError(f"{name} is no Rule and no torch optimizer", hint="subclass roadtrain.kernels.rule.Rule")
    try:
        result = check_rule(rule, rule.hyper(group))
    except KeyError as cause:
        raise ConfigError(f"{name} reads {cause} from its group", hint="give it `example_group = {...}`") from cause
    general = " (run by torch on flat slices)" if isinstance(rule, TorchRule) else ""
    report(f"{result.name}{general}: {result.cases - len(result.failures)} of {result.cases} cases equal the reference")
    for failure in result.failures:
        report(f"  {failure}")
    rates = storage_rates(dir)
    report(f"one thread updates {show_rate(result.bytes_per_s)}; the storage at {dir} reads {show_rate(rates.read)}, "
           f"writes {show_rate(rates.write)}, both at once {show_rate(rates.mixed)}")
    if result.bytes_per_s < rates.mixed:
        report("slower than the storage: this rule is what an update waits for")
    return 1 if result.failures else 0


class PlainOptimizer(torch.optim.Optimizer):
    """The rules on whole tensors. `read` as a placed optimizer's. Global norms are summed over the same segments as on
    servers, since a sum's bits depend on its order; so before clipping gradients become handles, as when placed."""

    _step_supports_amp_scaling = True

    def __init__(self, job: Job, model: torch.nn.Module, start: Mapping[str, np.ndarray]) -> None:
        self.torch, self.staleness = build_optimizer(job, model.parameters()), job.optimizer.staleness
        super().__init__(self.torch.param_groups, self.torch.defaults)
        parts = split(model, job.model.blocks)
        groups = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self.table = table(parts, groups, DTYPES[job.model.dtype], job.store.chunk_elements)
        self.params = [p for part in (parts.root, *parts.blocks) for _, p in part.params]
        self.first_of_block = len(parts.root.params)
        self.rules = rules_for(self.torch)
        self.held: dict[int, np.ndarray] = {}
        self.parts: list[tuple[np.ndarray, list[np.ndarray], np.ndarray]] = []  # of each parameter: master, arrays, row
        for spec, p in zip(self.table.params, self.params):
            rule, master = self.rules[spec.group], start[spec.name].reshape(-1).astype(np.float32)
            arrays, row = [np.zeros_like(master) for _ in rule.arrays], np.zeros(len(rule.scalars))
            rule.start(master, arrays, row, rule.hyper(self.param_groups[spec.group]))
            self.parts.append((master, arrays, row))
            p.data = torch.from_numpy(master).view(p.shape).to(DTYPES[spec.dtype], copy=True)
        masters = [torch.from_numpy(master.copy()) for master, *_ in self.parts]
        self.shadow = [torch.nn.Parameter(m.view(p.shape)) for m, p in zip(masters, self.params)]
        self.torch = build_optimizer(job, self.shadow)
        self._lengths = _segment_lengths(self.table)

    def gather(self) -> None:
        """Gradients of blocks become handles; those of the root stay tensors, as when placed."""
        for i, p in enumerate(self.params):
            if i >= self.first_of_block and p.grad is not None and not isinstance(p.grad, PlacedGrad):
                self.held[i] = as_numpy(p.grad).reshape(-1).copy()
                p.grad = PlacedGrad(p, i, self, self.table.params[i].name)

    def sum_squares(self, param: int) -> float:
        flat, at, total = self.held[param], 0, 0.0
        for length in self._lengths[param]:
            total += sum_squares(flat[at : at + length], self.table.params[param].dtype)
            at += length
        return total

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.gather()
        scaler, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        unscale = 1.0 if scaler is None else 1.0 / float(scaler)
        for p, (master, *_) in zip(self.params if self.staleness else (), self.parts):
            p.data.copy_(torch.from_numpy(master).view(p.shape))  # the next step computes with what the masters are now
        if found is not None and bool(float(found)):
            return
        for i, (spec, p) in enumerate(zip(self.table.params, self.params)):
            shadow = self.shadow[i]
            shadow.grad = None
            if p.grad is None:
                continue
            flat = self.held[i] if isinstance(p.grad, PlacedGrad) else as_numpy(p.grad).reshape(-1)
            scale = (p.grad.scale if isinstance(p.grad, PlacedGrad) else 1.0) * unscale
            rule, (master, arrays, row) = self.rules[spec.group], self.parts[i]
            copy = None if spec.dtype == "fp32" or self.staleness else as_numpy(p.data).reshape(-1)
            hyper = rule.hyper(self.param_groups[spec.group])
            shadow.grad = torch.from_numpy(flat).view(p.dtype).float().mul(scale).view(p.shape)
            rule.apply(master, flat, spec.dtype, arrays, row, hyper, scale, copy, None if copy is None else spec.dtype)
            if copy is None and not self.staleness:
                p.data.copy_(torch.from_numpy(master).view(p.shape))
        for group, mine in zip(self.torch.param_groups, self.param_groups):
            group.update({k: v for k, v in mine.items() if k != "params"})
        self.torch.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.params:
            p.grad = None
        self.held.clear()

    def read(self, name: str, what: str) -> np.ndarray:
        i = next(i for i, spec in enumerate(self.table.params) if spec.name == name)
        rule, (master, arrays, row) = self.rules[self.table.params[i].group], self.parts[i]
        if what == "master":
            return master
        return arrays[rule.arrays.index(what)] if what in rule.arrays else row[[rule.scalars.index(what)]]

    def deviation(self) -> tuple[str, float]:
        """Where torch's own optimizer ended up farthest from the rules, and how far."""
        far = [float(np.abs(s.detach().numpy().reshape(-1) - m).max()) for s, (m, *_) in zip(self.shadow, self.parts)]
        return max(zip((p.name for p in self.table.params), far), key=lambda pair: pair[1])


class _PlainTraining(Training):
    def clip(self) -> None:
        self.optimizer.gather()
        super().clip()


def _plain(placed: Training, start: Mapping[str, np.ndarray]) -> Training:
    model = build_model(placed.job, "cpu").to(placed.device)
    scaler = torch.amp.GradScaler(placed.device.type, enabled=placed.job.model.dtype == "fp16")
    whole = PlainOptimizer(placed.job, model, start)
    return _PlainTraining(placed.job, model, whole, scaler, placed.tokens, replace(placed.data), placed.device)


def _run(training: Training, steps: int) -> list[float]:
    return [step(training, number)[0] for number in range(steps)]


def _names(placed: Training) -> list[tuple[str, str]]:
    """Every tensor to compare, parameters first: (parameter's name, what)."""
    meta = build_model(placed.job, "meta")
    optimizer = build_optimizer(placed.job, meta.parameters())
    rule, names = rules_for(optimizer)[0], [name for name, _ in meta.named_parameters()]
    return [(name, what) for what in ("master", *rule.arrays, *rule.scalars) for name in names]


def _same(
    left: str, right: str, mine: list[float], theirs: list[float], names: list[tuple[str, str]], placed: Training,
    other: Read, report: Report,
) -> bool:
    wrong = [d for name, what in names if (d := _difference(name, what, placed.optimizer.read, other)) is not None]
    steps = [i + 1 for i, (a, b) in enumerate(zip(mine, theirs)) if np.float64(a).tobytes() != np.float64(b).tobytes()]
    if not wrong and not steps:
        report(f"{left} = {right}: {len(mine)} losses and {len(names)} tensors are the same bits")
        return True
    if steps:
        report(f"{left} and {right} differ in the loss of step {steps[0]}: {mine[steps[0] - 1]!r} and "
               f"{theirs[steps[0] - 1]!r}")
    if wrong:
        report(f"{left} and {right} differ in {len(wrong)} of {len(names)} tensors, first in {wrong[0]}")
    return False


def _difference(name: str, what: str, left: Read, right: Read) -> str | None:
    a, b = (np.ascontiguousarray(read(name, what)).reshape(-1) for read in (left, right))
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return None
    bits = f"u{a.itemsize}"
    at = int(np.argmax(a.view(bits) != b.view(bits))) if a.dtype == b.dtype and a.size == b.size else 0
    return f"{name} ({what}): element {at} of {a.size} is {float(a[at])!r} and {float(b[at])!r}"


def _segment_lengths(chunks: ChunkTable) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for chunk in chunks.chunks:
        for param, start, stop in chunk.segments:
            out.setdefault(param, []).append(stop - start)
    return out


def _beside(directory: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary directory on the device that `directory` is on, or will be."""
    parent = directory.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    return tempfile.TemporaryDirectory(prefix="verify-", dir=parent)


def _check_memory(plain_nbytes: int) -> None:
    needed, free = 4 * plain_nbytes, psutil.virtual_memory().available
    if needed > free:
        raise BudgetError(
            f"verify holds the model four times: {show_bytes(needed)}, {show_bytes(free)} are free",
            hint="verify a shallower model of the same width: --model.config.num_hidden_layers 2",
        )
