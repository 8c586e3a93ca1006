"""Find the update rule of each parameter group of a torch optimizer (`rules_for`): a compiled rule,
or else a rule that runs torch's own step on flat slices.

Separate from rules.py, because servers do not import torch. Does NOT copy state out of a torch
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from roadtrain.errors import RuleError
from roadtrain.kernels.generic import TorchRule, check_elementwise, report_generic
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.rules import native_rule

IMPOSSIBLE = {
    "LBFGS": ("needs all parameters and several passes at once", "use AdamW or SGD"),
    "SparseAdam": ("needs sparse gradients", "use Adam with dense gradients"),
    "Adafactor": (
        "keeps row and column statistics of whole matrices",
        "use AdamW, or Lion with one state array",
    ),
    "Muon": ("orthogonalizes whole matrices", "use AdamW, or Lion with one state array"),
}


def rules_for(
    optimizer: torch.optim.Optimizer, report: Callable[[str], None] | None = None
) -> list[Rule]:
    """Return one rule per parameter group, and report the rules that are not compiled. Raises
    RuleError if the optimizer class cannot run on flat slices."""
    cls = type(optimizer)
    for base in cls.__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in IMPOSSIBLE:
            why, hint = IMPOSSIBLE[base.__name__]
            raise RuleError(
                f"{cls.__name__} cannot run on flat slices of parameters: it {why}", hint=hint
            )
    rules: list[Rule] = []
    for group in optimizer.param_groups:
        rule = native_rule(f"{cls.__module__}:{cls.__qualname__}", group)
        if rule is None:
            rule = TorchRule.of(optimizer, group)
            check_elementwise(rule)
        rule.hyper(group)
        rules.append(rule)
    if report is not None:
        report_generic(rules, report)
    return rules
