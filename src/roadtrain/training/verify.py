"""verify(): trains a few steps of the user's job in three variants, and compares the results bit
for bit.

The model is placed as in the job (in a temporary store), placed in RAM, or an ordinary torch model
with the same update rules. The deviation of torch's own optimizer, which is due to rounding, is
also reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from roadtrain.chunks import SEGMENT, ParamSpec
from roadtrain.config.job import Job, load_job
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.sum import sum_squares
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.placement.optimizer import amp_of
from roadtrain.storage.convert import MASTER
from roadtrain.storage.direct import beside
from roadtrain.streaming.grads import PlacedGrad
from roadtrain.streaming.split import DTYPES, as_numpy, split, table
from roadtrain.training.build import build_model, build_optimizer
from roadtrain.training.placed_job import PlacedJob, place_job, step
from roadtrain.training.progress import Report, silent
from roadtrain.units import show_bytes


def command(path: str, overrides: Mapping[str, Any], steps: int = 3, report: Report = print) -> int:
    """Train a few steps with the model placed as in the job, placed in RAM, and in plain torch, and
    compare every loss and every tensor bit for bit. The exit code is 1 if there is a difference.

    Raises RoadtrainError.

    Args:
        steps: number of steps to train (default: 3)
    """
    return 0 if verify(load_job(path, overrides), steps, report) else 1


def verify(job: Job, steps: int, report: Report = print) -> bool:
    """Return whether every loss and every tensor is bit-identical in all variants of training.
    Raises BudgetError if less memory is free than four times what ordinary training needs. Raises
    UserError."""
    if job.optimizer.delay not in (0, 1):
        raise ConfigError(
            f"with optimizer.delay {job.optimizer.delay}, no two runs are equal",
            hint="use --optimizer.delay 0 or 1",
        )
    if steps < 1:
        raise ConfigError(f"--steps must be 1 or more, but is {steps}", hint="use --steps 3")
    with ExitStack() as stack:
        homes = [stack.enter_context(beside(Path(d), "verify-")) for d in job.store.files]
        if job.servers.addresses:
            report("the servers are not used: verify runs on this host, in memory")
            if job.servers.switches:
                report(
                    f"verify does not compare sums of switches as {job.servers.wire}, whose"
                    " deviation is bounded but not zero"
                )
            job = job.changed({"servers": {}, "compress.downcast": None})
        placed = place_job(job.changed({"store.files": homes}), report)
        stack.enter_context(placed.optimizer)
        _check_memory(placed.optimizer.memory()["plain"])
        names = [p.name for p in placed.optimizer.params]
        rule = rules_for(build_optimizer(job, [torch.nn.Parameter(torch.zeros(1))]))[0]
        things = [(name, what) for what in (MASTER, *rule.arrays, *rule.scalars) for name in names]
        start = {name: placed.optimizer.read(name).copy() for name in names}
        mine = _run("placed", placed, steps)
        resident = place_job(job.changed({"store.files": [], "budget.host": None}), silent)
        with resident.optimizer:
            same = _same(mine, _run("in RAM", resident, steps), things, report)
        if job.compress.keep is not None:
            report("plain torch is not compared, because the job is lossy")
            return same
        model = build_model(placed.job, "cpu").to(placed.device)
        if job.model.compile:
            for part in split(model, job.model.blocks).blocks:
                part.module.compile()
        plain = PlainOptimizer(placed.job, model, start)
        scaler = torch.amp.GradScaler(placed.device.type, enabled=job.model.dtype == "fp16")
        training = _PlainJob(placed.job, model, plain, scaler, placed.tokens, placed.device)
        same &= _same(mine, _run("plain", training, steps), things, report)
        name, most = plain.deviation()
        report(
            f"torch's own {type(plain.torch).__name__} deviates by at most {most:.2e} (in {name})"
        )
        return same


@dataclass
class _RefParam:
    """A parameter of the plain variant, with the state of its update rule.

    Attributes:
        master: The fp32 values, flat.
        arrays: The rule's state arrays.
        row: The rule's scalars.
        shadow: A copy of the parameter that is trained by torch's own optimizer.
        grid: Offsets of the segments whose sums of squares are added, the same as on servers.
        held: The values of the gradient while `p.grad` is a PlacedGrad (without values), else None.
    """

    spec: ParamSpec
    p: torch.nn.Parameter
    rule: Rule
    master: np.ndarray
    arrays: list[np.ndarray]
    row: np.ndarray
    shadow: torch.nn.Parameter
    grid: range
    held: np.ndarray | None = None


class PlainOptimizer(torch.optim.Optimizer):
    """An optimizer that applies the update rules to whole tensors. It sums the norm of the
    gradients in the same order as servers, because the bits of a sum depend on the order."""

    _step_supports_amp_scaling = True

    def __init__(self, job: Job, model: torch.nn.Module, start: Mapping[str, np.ndarray]) -> None:
        own, self.staleness = build_optimizer(job, model.parameters()), job.optimizer.delay
        super().__init__(own.param_groups, own.defaults)
        parts, rules = split(model, job.model.blocks), rules_for(own)
        groups = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self.table = table(parts, groups, DTYPES[job.model.dtype], job.store.chunk_elements)
        self.root_params = len(parts.root.params)
        runs = [run for block in self.table.blocks for run in block.runs]
        at = {span.param: span.start for run in runs for span in run.spans}
        self.all: list[_RefParam] = []  # all parameters, in the order of table.params
        params = [p for part in (parts.root, *parts.blocks) for _, p in part.params]
        for i, (p, spec) in enumerate(zip(params, self.table.params, strict=True)):
            rule, master = rules[spec.group], start[spec.name].reshape(-1).astype(np.float32)
            arrays, row = [np.zeros_like(master) for _ in rule.arrays], np.zeros(len(rule.scalars))
            rule.start(master, arrays, row, rule.hyper(self.param_groups[spec.group]))
            values = torch.from_numpy(master).view(p.shape)
            p.data = values.to(p.device, DTYPES[spec.dtype], copy=True)
            shadow = torch.nn.Parameter(torch.from_numpy(master.copy()).view(p.shape))
            grid = range(SEGMENT - at.get(i, 0) % SEGMENT, master.size, SEGMENT)
            self.all.append(_RefParam(spec, p, rule, master, arrays, row, shadow, grid))
        self.torch = build_optimizer(job, [ref.shadow for ref in self.all])

    def gather(self) -> None:
        """Replace the gradient tensors of all blocks except the root block by PlacedGrad objects,
        as in a placed model."""
        for i, ref in enumerate(self.all):
            if i >= self.root_params and ref.p.grad is not None:
                ref.held = as_numpy(ref.p.grad).reshape(-1).copy()
                ref.p.grad = PlacedGrad(ref.p, i, self, ref.spec.name)

    def sum_squares(self, param: int) -> float:
        ref = self.all[param]
        assert ref.held is not None
        return sum(sum_squares(piece, ref.spec.dtype) for piece in np.split(ref.held, ref.grid))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        unscale, skip = amp_of(self)
        if self.staleness:
            self._publish()  # the next step computes with the current masters
        if skip:
            return
        for ref in self.all:
            ref.shadow.grad, grad = None, ref.p.grad
            if grad is None:
                continue
            scale = (grad.scale if isinstance(grad, PlacedGrad) else 1.0) * unscale
            flat = as_numpy(grad).reshape(-1) if ref.held is None else ref.held
            values = torch.from_numpy(flat).view(grad.dtype).float()
            ref.shadow.grad = values.mul(scale).view_as(ref.p)
            hyper = ref.rule.hyper(self.param_groups[ref.spec.group])
            ref.rule.apply(
                ref.master, flat, ref.spec.dtype, ref.arrays, ref.row, hyper, scale, None, None
            )
        if not self.staleness:
            self._publish()
        for group, mine in zip(self.torch.param_groups, self.param_groups):
            group.update({k: v for k, v in mine.items() if k != "params"})
        self.torch.step()

    def _publish(self) -> None:
        for ref in self.all:
            ref.p.data.copy_(torch.from_numpy(ref.master).view_as(ref.p))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for ref in self.all:
            ref.p.grad = ref.held = None

    def read(self, name: str, what: str = MASTER) -> np.ndarray:
        ref = next(ref for ref in self.all if ref.spec.name == name)
        if what in ref.rule.scalars:
            return ref.row[[ref.rule.scalars.index(what)]]
        return ref.master if what == MASTER else ref.arrays[ref.rule.arrays.index(what)]

    def deviation(self) -> tuple[str, float]:
        """Return the parameter in which torch's own optimizer deviates most from the update rules,
        and the deviation."""
        far = []
        for ref in self.all:
            apart = np.abs(ref.shadow.detach().numpy().reshape(-1) - ref.master)
            far.append((ref.spec.name, float(apart.max())))
        return max(far, key=lambda pair: pair[1])


class _PlainJob(PlacedJob):
    def clip(self) -> None:
        self.optimizer.gather()
        super().clip()


@dataclass(frozen=True)
class _Variant:
    """The results of one variant of training. `read(name, what)` returns the fp32 masters
    ("master") or a state array of the parameter `name`."""

    name: str
    losses: list[float]
    read: Callable[[str, str], np.ndarray]


def _run(name: str, training: PlacedJob, steps: int) -> _Variant:
    losses = [step(training, number)[0] for number in range(steps)]
    return _Variant(name, losses, training.optimizer.read)


def _same(left: _Variant, right: _Variant, things: list[tuple[str, str]], report: Report) -> bool:
    losses = _difference(np.array(left.losses), np.array(right.losses))
    pairs = (
        (f"{name} ({what})", _difference(left.read(name, what), right.read(name, what)))
        for name, what in things
    )
    wrong = [f"{thing}: {difference}" for thing, difference in pairs if difference]
    if losses:
        report(f"{left.name} and {right.name} differ in the losses of the steps: {losses}")
    if wrong:
        report(
            f"{left.name} and {right.name} differ in {len(wrong)} of {len(things)} tensors, first"
            f" in {wrong[0]}"
        )
    if not losses and not wrong:
        report(
            f"{left.name} = {right.name}: {len(left.losses)} losses and {len(things)} tensors are"
            " bit-identical"
        )
    return not losses and not wrong


def _difference(a: np.ndarray, b: np.ndarray) -> str:
    """Describe the first element whose bits differ; "" if all bits are equal."""
    a, b = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return ""
    bits, at = f"u{a.itemsize}", 0
    if a.dtype == b.dtype and a.size == b.size:
        at = int(np.argmax(a.view(bits) != b.view(bits)))
    return f"element {at} of {a.size} is {float(a[at])!r} and {float(b[at])!r}"


def _check_memory(plain_nbytes: int) -> None:
    needed, free = 4 * plain_nbytes, psutil.virtual_memory().available
    if needed > free:
        raise BudgetError(
            f"four copies of the model need {show_bytes(needed)}, but {show_bytes(free)} are free",
            hint="verify a model with fewer layers: --model.config.num_hidden_layers 2",
        )
