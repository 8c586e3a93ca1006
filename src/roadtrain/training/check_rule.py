"""`roadtrain check-rule`: compare an update rule with its reference bit by bit, and time the
rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import reference_downcast
from roadtrain.kernels.generic import RuleRun, TorchRule, bytes_per_s
from roadtrain.kernels.rule import Hyper, Rule
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.storage.rates import storage_rates
from roadtrain.training.build import named
from roadtrain.training.progress import Report
from roadtrain.units import show_rate

# pairs of the dtype of a gradient and the dtype of the copy of new parameters (None: no copy)
FORMATS = (*product(("fp32", "bf16", "fp16"), (None, "bf16", "fp16")),)


def command(name: str, dir: str = ".", report: Report = print) -> int:
    """Compare an update rule with its reference implementation on random data, and compare the
    speed of the rule with the speed of the storage.

    `name` is MODULE:NAME of a Rule object, a Rule class or a torch optimizer class. The exit code
    is 1 if the rule differs from its reference.

    Args:
        dir: a directory on the storage device to measure (default: the current directory)
    """
    found = named(name, repr(name))
    group: Mapping[str, Any] = getattr(found, "example_group", {"lr": 1e-3})
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        try:
            optimizer = found([torch.nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
        except Exception as cause:
            raise ConfigError(
                f"cannot make a {name} with default options for one flat parameter: {cause}"
            ) from cause
        rule, group = rules_for(optimizer)[0], optimizer.param_groups[0]
    else:
        rule = found() if isinstance(found, type) and issubclass(found, Rule) else found
        if not isinstance(rule, Rule):
            raise ConfigError(
                f"{name} is neither a Rule nor a torch optimizer",
                hint="subclass roadtrain.kernels.rule.Rule",
            )
    try:
        result = check_rule(rule, rule.hyper(group))
    except KeyError as cause:
        raise ConfigError(
            f"{name} needs the option {cause}", hint="define `example_group = {...}` in the class"
        ) from cause
    general = " (run by torch on flat slices)" if isinstance(rule, TorchRule) else ""
    report(
        f"{result.name}{general}: {result.cases - len(result.failures)} of {result.cases} cases"
        " equal the reference"
    )
    for failure in result.failures:
        report(f"  {failure}")
    rates = storage_rates(dir)
    report(
        f"one thread updates {show_rate(result.bytes_per_s)}; the storage at {dir} reads"
        f" {show_rate(rates.read)}, writes {show_rate(rates.write)}, both at once"
        f" {show_rate(rates.mixed)}"
    )
    if result.bytes_per_s < rates.mixed:
        report("the rule is slower than the storage, so it will limit updates")
    return 1 if result.failures else 0


@dataclass(frozen=True)
class CheckReport:
    """The result of checking a rule. `cases`: the number of compared cases. `failures`: a line for
    each difference. `bytes_per_s`: bytes that one thread reads and writes per second when it
    applies the rule."""

    name: str
    cases: int
    failures: tuple[str, ...]
    bytes_per_s: float


def check_rule(
    rule: Rule,
    hyper: Hyper,
    elements: int = 1 << 20,
    formats: Sequence[tuple[str, str | None]] = FORMATS,
) -> CheckReport:
    """Compare `rule` with its reference implementation on random arrays of several sizes, and time
    the rule. A rule also fails if its result depends on how the array is split. `formats`: pairs of
    the dtype of the gradient, and the dtype of the 16-bit copy of the parameters (None for no
    copy)."""
    rng = np.random.default_rng(3)
    failures = []
    cases = [*product((1, 7, 64, 1000, 4099), formats)]
    for n, (grad_dtype, copy_dtype) in cases:
        scale = 0.37 if copy_dtype == "bf16" else 1.0
        p = rng.standard_normal(n, dtype=np.float32)
        sides = [RuleRun(rule, p, hyper) for _ in range(3)]
        for _ in range(4):
            grad = reference_downcast(rng.standard_normal(n, dtype=np.float32), grad_dtype)
            sides[0].step(rule.apply, grad, grad_dtype, scale, copy_dtype, [0, n])
            sides[1].step(rule.reference, grad, grad_dtype, scale, copy_dtype, [0, n])
            sides[2].step(rule.apply, grad, grad_dtype, scale, copy_dtype, sorted({0, n // 3, n}))
        case = f"{n} elements, gradient {grad_dtype}, copy {copy_dtype}"
        if sides[0] != sides[1]:
            failures.append(f"{case}: differs from its reference")
        if sides[0] != sides[2]:
            failures.append(f"{case}: depends on how the range is split")
    return CheckReport(rule.name, len(cases), tuple(failures), bytes_per_s(rule, hyper, elements))
