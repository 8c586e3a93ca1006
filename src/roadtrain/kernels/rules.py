"""The rules that run as compiled kernels.

The state arrays of a rule are fixed when it is built. All other options are read from the parameter
group at each step, so schedulers work. Scalars are computed in float64, as in torch, and rounded
once to float32.

Options have torch's names; `foreach`, `fused`, `capturable` and `differentiable` do not affect
results. Does NOT import torch, because servers run these rules; torch_rules.py builds them from a
torch optimizer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from roadtrain.errors import RuleError
from roadtrain.kernels import update
from roadtrain.kernels.cast import fence, reference_downcast, reference_widen, typed, uncached
from roadtrain.kernels.optimizers import SHORT_NAMES
from roadtrain.kernels.rule import Array, Arrays, Hyper, Rule

# The arrays of a formula (None for an array that the rule does not keep), the sign of the gradient,
# and the scalars of the formula.
Scaled = tuple[list[np.ndarray | None], float, list[float | None]]


def _floats(group: Mapping[str, Any], *names: str) -> tuple[float, ...]:
    return tuple(float(group[name]) for name in names)


class _Native(Rule):
    """A rule that calls a formula of update.py, compiled (`apply`) or plain (`reference`)."""

    formula: Any
    # names in OPTIMIZERS; subclasses of these optimizers are not included, as they may differ
    optimizers: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, optimizer: str, group: Mapping[str, Any]) -> Rule:
        """Build the rule for a parameter group. `optimizer` is one of the names in `optimizers`."""
        return cls()

    @abstractmethod
    def scaled(self, arrays: Arrays, row: Array, hyper: Hyper) -> Scaled:
        """Advance the row of scalars by one step. Returns the arrays that `formula` takes (None for
        an array that the rule does not keep), the sign by which the gradient is multiplied (-1 to
        maximize, otherwise 1), and the scalars that `formula` takes."""

    def _rounded(
        self, arrays: Arrays, row: Array, hyper: Hyper, grad_scale: float
    ) -> tuple[list[Array | None], np.float32, tuple[np.float32 | None, ...]]:
        """Return the three arrays that `formula` takes, the factor by which the gradient is
        multiplied, and the scalars that `formula` takes. All scalars are float32."""
        held, sign, scalars = self.scaled(arrays, row, hyper)
        narrow = tuple(None if s is None else np.float32(s) for s in scalars)
        return [*held, None, None, None][:3], np.float32(sign * grad_scale), narrow

    # types as in Rule
    def apply(self, p, grad, grad_dtype, arrays, row, hyper, grad_scale, copy, copy_dtype):  # type: ignore[no-untyped-def]
        held, scale, scalars = self._rounded(arrays, row, hyper, grad_scale)
        out = None if copy is None else uncached(typed(copy, copy_dtype or "bf16"))
        update.KERNELS[self.formula](p, typed(grad, grad_dtype), *held, out, scale, scalars)
        if out is not None:
            fence()

    def reference(self, p, grad, grad_dtype, arrays, row, hyper, grad_scale, copy, copy_dtype):  # type: ignore[no-untyped-def]
        held, scale, scalars = self._rounded(arrays, row, hyper, grad_scale)
        with np.errstate(all="ignore"):
            p[:], *new = self.formula(p, reference_widen(grad, grad_dtype) * scale, *held, *scalars)
        for array, value in zip(held, new):
            if array is not None:
                array[:] = value
        if copy is not None:
            copy[:] = reference_downcast(p, copy_dtype or "bf16")


def _sign(maximize: float) -> float:
    return -1.0 if maximize else 1.0


@dataclass(frozen=True)
class SgdRule(_Native):
    momentum: bool = False
    formula = staticmethod(update.sgd)
    optimizers = ("sgd",)
    name = "sgd"

    @classmethod
    def of(cls, optimizer: str, group: Mapping[str, Any]) -> SgdRule:
        return cls(group["momentum"] != 0)

    @property
    def arrays(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def scalars(self) -> tuple[str, ...]:
        return ("step",) if self.momentum else ()

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        if group["momentum"] and not self.momentum:
            hint = "start training with a momentum above 0"
            raise RuleError("momentum was 0 when training began and cannot be raised", hint=hint)
        return _floats(group, "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

    def scaled(self, arrays: Arrays, row: Array, hyper: Hyper) -> Scaled:
        lr, momentum, dampening, weight_decay, nesterov, maximize = hyper
        buf = arrays[0] if momentum else None
        keep, intake = None, None
        if momentum:
            row[0] += 1
            if row[0] > 1:
                keep, intake = momentum, 1 - dampening
        lookahead = momentum if momentum and nesterov else None
        return [buf], _sign(maximize), [weight_decay or None, keep, intake, lookahead, -lr]


@dataclass(frozen=True)
class AdamRule(_Native):
    """The rule of Adam, or of AdamW if `decoupled`."""

    decoupled: bool = True
    amsgrad: bool = False
    formula = staticmethod(update.adam)
    optimizers = ("adam", "adamw")
    scalars = ("step",)

    @classmethod
    def of(cls, optimizer: str, group: Mapping[str, Any]) -> AdamRule:
        decoupled = group.get("decoupled_weight_decay", optimizer == "adamw")
        return cls(bool(decoupled), bool(group["amsgrad"]))

    @property
    def name(self) -> str:
        return "adamw" if self.decoupled else "adam"

    @property
    def arrays(self) -> tuple[str, ...]:
        moments = ("exp_avg", "exp_avg_sq")
        return (*moments, "max_exp_avg_sq") if self.amsgrad else moments

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        if bool(group["amsgrad"]) != self.amsgrad:
            hint = "keep amsgrad as it was at the start"
            raise RuleError("the option amsgrad changed after training began", hint=hint)
        floats = _floats(group, "lr", "weight_decay", "eps", "maximize")
        return (*floats, *map(float, group["betas"]))

    def scaled(self, arrays: Arrays, row: Array, hyper: Hyper) -> Scaled:
        lr, weight_decay, eps, maximize, beta1, beta2 = hyper
        row[0] += 1
        step = float(row[0])
        decay = 1 - lr * weight_decay if weight_decay and self.decoupled else None
        coupled = weight_decay if weight_decay and not self.decoupled else None
        step_size = -(lr / (1 - beta1**step))
        root = 1 / (1 - beta2**step) ** 0.5
        scalars = [decay, coupled, *update.mix(1 - beta1), beta2, 1 - beta2, root, step_size, eps]
        return [*arrays, None][:3], _sign(maximize), scalars


@dataclass(frozen=True)
class AdagradRule(_Native):
    formula = staticmethod(update.adagrad)
    optimizers = ("adagrad",)
    name = "adagrad"
    arrays = ("sum",)
    scalars = ("step",)

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return _floats(
            group, "lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value", "maximize"
        )

    def start(self, p: Array, arrays: Arrays, row: Array, hyper: Hyper) -> None:
        arrays[0][:] = hyper[4]

    def scaled(self, arrays: Arrays, row: Array, hyper: Hyper) -> Scaled:
        lr, lr_decay, weight_decay, eps, _, maximize = hyper
        row[0] += 1
        step_size = -(lr / (1 + (row[0] - 1) * lr_decay))
        return list(arrays), _sign(maximize), [weight_decay or None, step_size, eps]


@dataclass(frozen=True)
class RmspropRule(_Native):
    centered: bool = False
    momentum: bool = False
    formula = staticmethod(update.rmsprop)
    optimizers = ("rmsprop",)
    name = "rmsprop"
    scalars = ("step",)

    @classmethod
    def of(cls, optimizer: str, group: Mapping[str, Any]) -> RmspropRule:
        return cls(bool(group["centered"]), group["momentum"] > 0)

    @property
    def arrays(self) -> tuple[str, ...]:
        means = ("square_avg", "grad_avg") if self.centered else ("square_avg",)
        return (*means, "momentum_buffer") if self.momentum else means

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        if bool(group["centered"]) != self.centered or (group["momentum"] and not self.momentum):
            hint = "keep both as they were at the start"
            raise RuleError("option centered or momentum changed after training began", hint=hint)
        return _floats(group, "lr", "alpha", "eps", "weight_decay", "momentum", "maximize")

    def scaled(self, arrays: Arrays, row: Array, hyper: Hyper) -> Scaled:
        lr, alpha, eps, weight_decay, momentum, maximize = hyper
        row[0] += 1
        mean = arrays[1] if self.centered else None
        buf = arrays[-1] if momentum else None
        intake, rest = update.mix(1 - alpha)
        scalars = [weight_decay or None, alpha, intake, rest, momentum or None, -lr, eps]
        return [arrays[0], mean, buf], _sign(maximize), scalars


@dataclass(frozen=True)
class LionRule(_Native):
    formula = staticmethod(update.lion)
    optimizers = ("lion",)
    name = "lion"
    arrays = ("exp_avg",)

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (*_floats(group, "lr", "weight_decay", "maximize"), *map(float, group["betas"]))

    def scaled(self, arrays: Arrays, row: Array, hyper: Hyper) -> Scaled:
        lr, weight_decay, maximize, beta1, beta2 = hyper
        decay = 1 - lr * weight_decay if weight_decay else None
        return list(arrays), _sign(maximize), [decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr]


NATIVE: dict[str, type[_Native]] = {
    r.__name__: r for r in (SgdRule, AdamRule, AdagradRule, RmspropRule, LionRule)
}


def native_rule(optimizer: str, group: Mapping[str, Any]) -> Rule | None:
    """Return the compiled rule for a parameter group of the optimizer MODULE:CLASS, or None if it
    has none."""
    name = SHORT_NAMES.get(optimizer, "")
    kind = next((kind for kind in NATIVE.values() if name in kind.optimizers), None)
    return None if kind is None else kind.of(name, group)


def described(rule: Rule) -> list[Any]:
    """Convert a rule of this file to plain data: [name of the class, dict of the fields]. Raises
    RuleError for any other rule, since code is never sent to servers (Rule 8)."""
    if type(rule).__name__ not in NATIVE:
        raise RuleError(
            f"{rule.name} cannot run in a server process: only roadtrain's own rules can",
            hint=f"use one of {', '.join(sorted(NATIVE))}, or place the state on this host",
        )
    return [type(rule).__name__, vars(rule)]


def rule_of(description: Sequence[Any]) -> Rule:
    """Rebuild a rule from the output of `described`. Raises RuleError if the data is invalid."""
    try:
        name, fields = description
        return NATIVE[name](**{str(key): bool(value) for key, value in fields.items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuleError(f"{description!r} does not describe a rule") from error
