"""TorchRule, for torch optimizers that have no compiled rule: it runs torch's own step on flat
slices. This module also checks rules that are not part of roadtrain, and measures their speed.

For each update, the user's optimizer is rebuilt with one flat parameter, and with views of the
state arrays as its state. A trial run finds out which state the optimizer's class keeps.

All state must be in `optimizer.state[p]`. Each entry must be an fp32 tensor with the shape of p, or
a single number. Closures, sparse or complex parameters and 8-bit state are not supported.
"""

from __future__ import annotations

import copy as copying
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch

from roadtrain.errors import RuleError
from roadtrain.kernels.cast import cast, reference_downcast, reference_widen
from roadtrain.kernels.rule import Array, Arrays, Hyper, Rule
from roadtrain.units import show_rate

HINT = "use one of torch's elementwise optimizers, or write a Rule (roadtrain check-rule)"
# options that affect speed but not results
SPEED_ONLY = ("foreach", "fused", "capturable", "differentiable")
NOT_OPTIONS = ("params", "param_names")
# attributes that are not copied to rebuilt optimizers; schedulers set the last two
NOT_ATTRIBUTES = ("defaults", "state", "param_groups", "step", "_opt_called", "_step_count")
PROBE_STEPS = 8
SAMPLE = 1 << 18  # number of elements with which the speed of a rule is measured


@dataclass(frozen=True)
class Field:
    """An entry of `optimizer.state[p]`. `kind` is "array" (shaped like p), "tensor" (a tensor with
    one element) or "number"."""

    key: str
    kind: str
    dtype: Any  # torch dtype of a tensor, Python type of a number
    shape: tuple[int, ...]
    nullable: bool  # whether the entry is None until the optimizer first sets it


class TorchRule(Rule):
    """A rule that runs the torch optimizer class `cls` with the options `defaults`. `attributes`
    are further attributes that `cls.__init__` has set.

    The row of a parameter holds its scalars. The last scalar, "present", is a bitmap of the state
    entries that exist; it is 0 before the first step.
    """

    # __init__ sets these three; a trial run of the class finds out the arrays and scalars
    name = ""
    arrays: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        options = {key: value for key, value in defaults.items() if key not in NOT_OPTIONS}
        self.cls, self.attributes = cls, dict(attributes or {})
        self.options = {key: _plain(value) for key, value in options.items()}
        self.options.update({key: False for key in SPEED_ONLY if key in options})
        self.fields = self._probe()
        self.name = cls.__name__.lower()
        self.arrays = tuple(f.key for f in self.fields if f.kind == "array")
        self.scalars = (*(f.key for f in self.fields if f.kind != "array"), "present")

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> TorchRule:
        """Build the rule for one parameter group of the user's optimizer."""
        kept = {
            key: value
            for key, value in vars(optimizer).items()
            if key not in NOT_ATTRIBUTES
            and not key.startswith(("_optimizer_", "_warned", "_zero_grad", "_hook"))
        }
        return TorchRule(type(optimizer), group, kept)

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        out: list[float] = []
        for key, value in self.options.items():
            now = _plain(group[key]) if key not in SPEED_ONLY else value
            if len(_numbers(now)) != len(_numbers(value)) or (not _numbers(value) and now != value):
                raise RuleError(
                    f"{self.cls.__name__}: the option {key} changed from {value!r} to {now!r}",
                    hint=f"keep {key} at {value!r} during the whole training",
                )
            out.extend(_numbers(now))
        return tuple(out)

    def build(self, params: Sequence[torch.Tensor], hyper: Hyper) -> torch.optim.Optimizer:
        """Build an optimizer for `params` with the user's options, without a call of `__init__`,
        whose arguments are unknown."""
        group: dict[str, Any] = {"params": list(params)}
        at = iter(hyper)
        for key, value in self.options.items():
            group[key] = _filled(value, at)
        optimizer = self.cls.__new__(self.cls)
        optimizer.__dict__.update(copying.deepcopy(self.attributes))
        optimizer.__setstate__(
            {"defaults": dict(self.options), "state": defaultdict(dict), "param_groups": [group]}
        )
        return optimizer

    # types as in Rule
    def apply(self, p, grad, grad_dtype, arrays, row, hyper, grad_scale, copy, copy_dtype):  # type: ignore[no-untyped-def]
        wide = np.empty(p.size, np.float32)
        cast(grad, grad_dtype, wide, "fp32")
        if grad_scale != 1.0:
            wide *= np.float32(grad_scale)
        self._step(p, wide, arrays, row, hyper)
        if copy is not None:
            cast(p, "fp32", copy, copy_dtype or "bf16")

    def reference(self, p, grad, grad_dtype, arrays, row, hyper, grad_scale, copy, copy_dtype):  # type: ignore[no-untyped-def]
        wide = reference_widen(grad, grad_dtype) * np.float32(grad_scale)
        start = row.copy()
        for i in range(0, max(p.size, 1), 1000):  # the rule itself, on pieces of another size
            row[:] = start
            part = slice(i, i + 1000)
            self._step(p[part], wide[part], [a[part] for a in arrays], row, hyper)
        if copy is not None:
            copy[:] = reference_downcast(p, copy_dtype or "bf16")

    def _step(self, p: Array, grad: Array, arrays: Arrays, row: Array, hyper: Hyper) -> None:
        param = torch.nn.Parameter(torch.from_numpy(p))
        param.grad = torch.from_numpy(grad)
        optimizer = self.build([param], hyper)
        held = {key: torch.from_numpy(a) for key, a in zip(self.arrays, arrays)}
        numbers = dict(zip(self.scalars[:-1], row))
        present = int(row[-1])
        for bit, f in enumerate(self.fields):
            if present >> bit & 1:
                optimizer.state[param][f.key] = (
                    held[f.key] if f.kind == "array" else _number(f, numbers[f.key])
                )
            elif present and f.nullable:
                optimizer.state[param][f.key] = None
        with torch.no_grad():
            optimizer.step()
        if param.data_ptr() != p.ctypes.data:
            p[:] = param.detach().numpy()
        self._keep(optimizer.state[param], held, row)

    def _keep(self, state: Mapping[str, Any], held: Mapping[str, torch.Tensor], row: Array) -> None:
        """Copy the optimizer's state after the step to `held` (the state arrays) and `row` (the
        scalars)."""
        present = 0
        for key in state.keys() - {f.key for f in self.fields}:
            if state[key] is not None:
                raise RuleError(
                    f"{self.cls.__name__} added state {key!r} after more than {PROBE_STEPS} steps",
                    hint=HINT,
                )
        for bit, f in enumerate(self.fields):
            value = state.get(f.key)
            if value is None:
                continue
            present |= 1 << bit
            if f.kind != "array":
                row[self.scalars.index(f.key)] = float(value)
            elif value.data_ptr() != held[f.key].data_ptr():
                held[f.key].copy_(value)
        row[-1] = present

    def _probe(self) -> tuple[Field, ...]:
        """Run the optimizer's class on a small parameter, and return the state entries that it
        keeps. Raises RuleError if the class cannot run on flat slices."""
        generator = torch.Generator().manual_seed(1)
        param = torch.nn.Parameter(torch.randn(12, generator=generator))
        begin = param.detach().clone()
        seen: dict[str, Any] = {}
        absent: set[str] = set()
        with _runs(self.cls, "a flat slice"):
            optimizer = self.build([param], self.hyper(self.options))
            before = _fingerprint(optimizer, self.attributes)
            for _ in range(PROBE_STEPS):
                param.grad = torch.randn(12, generator=generator)
                with torch.no_grad():
                    optimizer.step()
                state = dict(optimizer.state.get(param, {}))
                absent |= {key for key, value in state.items() if value is None}
                seen.update({key: value for key, value in state.items() if value is not None})
        if set(optimizer.state) - {param} or _fingerprint(optimizer, self.attributes) != before:
            raise RuleError(
                f"{self.cls.__name__} keeps state outside optimizer.state[parameter]", hint=HINT
            )
        if torch.equal(begin, param) and self.options.get("lr") != 0:
            raise RuleError(
                f"{self.cls.__name__} did not change a parameter in {PROBE_STEPS} steps", hint=HINT
            )
        if len(seen) > 50:
            raise RuleError(
                f"{self.cls.__name__} keeps {len(seen)} state entries, more than 50", hint=HINT
            )
        return tuple(self._field(key, value, key in absent) for key, value in seen.items())

    def _field(self, key: str, value: Any, nullable: bool) -> Field:
        what = type(value).__name__
        if isinstance(value, torch.Tensor):
            shape, dtype = tuple(value.shape), value.dtype
            what = f"{dtype} {shape}"
            if shape == (12,) and dtype == torch.float32:
                return Field(key, "array", dtype, shape, nullable)
            if value.numel() == 1 and not value.is_complex():
                return Field(key, "tensor", dtype, shape, nullable)
        if isinstance(value, (bool, int, float)):
            return Field(key, "number", type(value), (), nullable)
        raise RuleError(
            f"{self.cls.__name__} keeps {key!r} as {what}; only fp32 arrays and numbers work",
            hint=HINT,
        )


@contextmanager
def _runs(cls: type, where: str) -> Iterator[None]:
    """Turn any exception of the user's class into a RuleError. `where` names the input in the
    message, such as "flat slices"."""
    try:
        yield
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(f"{cls.__name__} failed on {where}: {error}", hint=HINT) from error


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else tuple(value.tolist())
    return tuple(_plain(v) for v in value) if isinstance(value, (tuple, list)) else value


def _numbers(value: Any) -> list[float]:
    """Return the numbers inside an option's value; [] for a bool, a string or None."""
    if isinstance(value, tuple):
        return [n for v in value for n in _numbers(v)]
    return [float(value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def _filled(value: Any, numbers: Any) -> Any:
    """Return `value` with each number inside it replaced by the next number of the iterator
    `numbers`. Integers stay integers if the new number is whole."""
    if isinstance(value, tuple):
        return tuple(_filled(v, numbers) for v in value)
    if not _numbers(value):
        return value
    number = next(numbers)
    return int(number) if isinstance(value, int) and float(number).is_integer() else float(number)


def _number(f: Field, value: float) -> Any:
    if f.kind == "tensor":
        return torch.full(f.shape, float(value), dtype=f.dtype)
    return f.dtype(value)


def _fingerprint(optimizer: torch.optim.Optimizer, attributes: Mapping[str, Any]) -> bytes:
    """Return bytes that change if a step modifies attributes or options of the optimizer."""
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    try:
        return pickle.dumps(({key: vars(optimizer).get(key) for key in attributes}, group))
    except Exception:  # not picklable (a lambda, a lock): compare the options only
        return repr(sorted(group.items(), key=str)).encode()


def check_elementwise(rule: TorchRule) -> None:
    """Check that updates of flat pieces give the same bits as one torch optimizer for whole
    parameters. Raises RuleError if the bits differ."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(29, 67), (131,), (5, 3, 11)]
    whole = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    hyper = rule.hyper(rule.options)
    sides = [RuleRun(rule, p.detach().numpy().reshape(-1), hyper) for p in whole]
    with _runs(rule.cls, "flat slices"):
        optimizer = rule.build(whole, hyper)
        for step in range(PROBE_STEPS):
            for p in whole:
                p.grad = torch.randn(p.shape, generator=generator) * (1 + step % 3)
            grads = [p.grad.numpy().reshape(-1).copy() for p in whole]  # type: ignore[union-attr]
            with torch.no_grad():
                optimizer.step()
            for p, grad, mine in zip(whole, grads, sides):
                cuts = sorted({0, min(77, grad.size), grad.size // 2, grad.size})
                mine.step(rule.apply, grad, "fp32", 1.0, None, cuts)
                flat = p.detach().numpy().reshape(-1)
                if not np.array_equal(flat.view(np.uint32), mine.p.view(np.uint32)):
                    raise RuleError(
                        f"{rule.cls.__name__} is not elementwise: its update of flat pieces differs"
                        f" from that of whole parameters at step {step + 1}",
                        hint=HINT,
                    )


def bytes_per_s(rule: Rule, hyper: Hyper, elements: int, times: int = 5) -> float:
    """Measure the memory traffic of a step in bytes/s on one thread, with bf16 gradients and
    copies. Returns the median of `times` steps on `elements` elements."""
    side = RuleRun(
        rule, np.random.default_rng(4).standard_normal(elements, dtype=np.float32), hyper
    )
    grad = reference_downcast(side.p, "bf16")
    seconds = []
    for _ in range(times):
        begin = perf_counter()
        side.step(rule.apply, grad, "bf16", 1.0, "bf16", [0, elements])
        seconds.append(perf_counter() - begin)
    return elements * (8 + 8 * len(rule.arrays) + 4) / sorted(seconds)[times // 2]


def report_generic(rules: Sequence[Rule], report: Callable[[str], None]) -> None:
    """Report each optimizer class that has no compiled rule, with its measured speed, because a
    slower path must not be silent (Rule 6)."""
    generic = {rule.cls.__name__: rule for rule in rules if isinstance(rule, TorchRule)}
    for name, rule in generic.items():
        rate = bytes_per_s(rule, rule.hyper(rule.options), SAMPLE, times=3)
        report(
            f"{name} has no compiled rule, so torch's own step runs on every slice: its speed class"
            f" is generic (measured {show_rate(rate)} on one thread; only memory bandwidth limits"
            " compiled rules)"
        )


class RuleRun:
    """A slice of parameters that a rule updates, with its state arrays, scalars and 16-bit copy.
    `==` compares parameters, state and copies."""

    def __init__(self, rule: Rule, p: Array, hyper: Hyper) -> None:
        self.p, self.hyper = p.copy(), hyper
        self.arrays = [np.zeros(p.size, np.float32) for _ in rule.arrays]
        self.row, self.copy = np.zeros(len(rule.scalars)), np.zeros(p.size, np.uint16)
        rule.start(self.p, self.arrays, self.row, hyper)

    def step(
        self,
        function: Any,
        grad: Array,
        grad_dtype: str,
        scale: float,
        copy_dtype: str | None,
        cuts: list[int],
    ) -> None:
        row = self.row.copy()
        for a, b in pairwise(cuts):
            self.row[:] = row
            out = self.copy[a:b] if copy_dtype else None
            held = [array[a:b] for array in self.arrays]
            p, g = self.p[a:b], grad[a:b]
            function(p, g, grad_dtype, held, self.row, self.hyper, scale, out, copy_dtype)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, RuleRun)
        mine, theirs = ([s.p, *s.arrays, s.row, s.copy] for s in (self, other))
        pairs = zip(mine, theirs)
        return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)
