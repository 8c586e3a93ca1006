"""A torch optimizer whose gradients are summed over the workers. The sum of a gradient begins as
soon as backward has computed the gradient.

    backward    begins the sum of each gradient as soon as the gradient is ready
    step()      waits for all sums, then runs the optimizer's own step

    With the argument `model`:
    step()      does not wait
    forward     of a module first waits for the sums of the module's parameters, and then updates
                only these parameters

Note "deferred steps" (BytePS's cross-barrier). A module's parameters are updated when the module's
forward begins, with the learning rates that the parameter groups had at step(). The first forward
of any module also updates shared parameters and parameters of modules that are never called. In
eval mode or under no_grad, the first forward updates all parameters.

Limits with `model`: code that reads a parameter outside of a forward gets the old value until
synchronize() is called; model.state_dict() updates the parameters first. `p.grad` is None after
step(). Hooks of the optimizer's step run once per module.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from roadtrain.errors import ConfigError, LoopError
from roadtrain.integrations.named_sums import SUMMED, Exchange, Handle


class _Sum(NamedTuple):
    """A gradient's sum in flight. `version` shows whether `grad` was changed during the sum."""

    grad: torch.Tensor
    handle: Handle
    version: int


class GradientSums:
    """The sums of one optimizer's gradients. `division`: gradients are divided by the first number
    before the sum, and the sum is multiplied by the second number."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        named: Iterable[tuple[str, nn.Parameter]] | None,
        division: tuple[float, float],
        format: str,
    ) -> None:
        self.optimizer, self.exchange, self.passes = optimizer, exchange, 1
        self._division, self._format = division, format
        self.names: dict[nn.Parameter, str] = {}  # names of all parameters with a hook
        # position in the model, because the next forward needs the first parameters first
        self._priority: dict[nn.Parameter, int] = {}
        self.seen: dict[nn.Parameter, int] = {}  # number of backward passes since the last step
        self.under_way: dict[nn.Parameter, _Sum] = {}
        self.complete = False  # all gradients are summed, and backward has computed no new ones
        self.late: Mapping[nn.Parameter, Any] = {}  # parameters with a deferred step
        self._watch(_checked(named, optimizer))

    def _watch(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, p in named:
            if p not in self.names:
                self._priority[p] = len(self.names)
                self.names[p] = f"gradient of {name}"
                p.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, p: nn.Parameter) -> None:
        if p in self.late:
            raise LoopError(
                f"{self.names[p]} was computed from an old value of the parameter, which was used"
                " outside its module's forward, before the last update was applied",
                hint="leave model= out, or call optimizer.synchronize() before using the parameter",
            )
        self.complete, self.seen[p] = False, self.seen.get(p, 0) + 1
        if p in self.under_way or self.seen[p] > self.passes:
            raise LoopError(
                f"{self.names[p]} was computed {self.seen[p]} times since the last step()",
                hint=f"call step() or zero_grad() after {self.passes} backward pass(es)",
            )
        # begin_all begins the sums of other dtypes, in the same order on all workers
        if self.seen[p] == self.passes and p.dtype in SUMMED:
            self._begin(p)

    def _begin(self, p: nn.Parameter) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)  # other workers may have a gradient of this parameter
        handle = self.exchange.begin(
            p.grad,
            self.names[p],
            out=p.grad,
            divisor=self._division[0],
            factor=self._division[1],
            priority=self._priority[p],
            format=self._format,
        )
        self.under_way[p] = _Sum(p.grad, handle, p.grad._version)

    def check_quiet(self, what: str, hint: str) -> None:
        if self.under_way:
            raise LoopError(
                f"{what} was called during the sums of {len(self.under_way)} gradients", hint=hint
            )

    def begin_all(self) -> None:
        """Begin the sums of all gradients whose sums backward has not begun."""
        self._watch(_trained(self.optimizer))
        for p in self.names:
            if p not in self.under_way and p.requires_grad:
                self._begin(p)
        self.seen.clear()

    def take(self) -> dict[nn.Parameter, _Sum]:
        """Return the sums in flight, by parameter. The caller must pass each sum to `arrive`.
        Raises LoopError if a gradient was changed during its sum."""
        sums, self.under_way = self.under_way, {}
        for p, total in sums.items():
            if p.grad is not total.grad or total.grad._version != total.version:
                raise LoopError(
                    f"{self.names[p]} was changed while it was being summed",
                    hint="call optimizer.synchronize() before clipping, unscale_() and the like",
                )
            p.grad = None
        return sums

    def arrive_all(self) -> None:
        for p, total in self.take().items():
            self.arrive(p, total)
        self.complete = True

    def arrive(self, p: nn.Parameter, total: _Sum) -> None:
        self.exchange.finish(total.handle)
        p.grad = total.grad


def _trained(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"group {i} parameter {j}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p.requires_grad
    ]


def _checked(
    named: Iterable[tuple[str, nn.Parameter]] | None, optimizer: torch.optim.Optimizer
) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's trainable parameters with their names. Raises ConfigError if `named`
    does not fit."""
    if named is None:
        return _trained(optimizer)
    pairs, needed = list(named), {p for _, p in _trained(optimizer)}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ConfigError("named_parameters repeats a name", hint="pass model.named_parameters()")
    if missing := len(needed - {p for _, p in pairs}):
        raise ConfigError(
            f"named_parameters lacks {missing} of the optimizer's {len(needed)} parameters",
            hint="pass model.named_parameters(), or None",
        )
    return [(name, p) for name, p in pairs if p in needed]


class DeferredSteps:
    """The deferred updates of an optimizer's steps: the forward of each module of `model` applies
    the updates of the module's parameters. `step` is the optimizer's own step. `num_steps` is the
    total number of calls of `defer`, 0 if unknown. The step of the last call is not deferred."""

    def __init__(
        self, gradients: GradientSums, model: nn.Module, step: Callable[[], Any], num_steps: int
    ) -> None:
        self._gradients, self._step, self._left = gradients, step, num_steps
        # the sums of the last step() that are not applied yet; `gradients.late` is this dict too
        self._due: dict[nn.Parameter, _Sum] = {}
        self._early: list[nn.Parameter] = []  # parameters to update at the first forward
        self._settings: list[dict[str, Any]] = []  # settings of the groups at step()
        self._group_of: dict[nn.Parameter, int] = {}
        self._called: set[nn.Module] = set()
        self._own = {module: list(module.parameters(recurse=False)) for module in model.modules()}
        self._homes: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
        for module, own in self._own.items():
            module.register_forward_pre_hook(self._before_forward, prepend=True)
            for p in own:
                self._homes[p].append(module)
        model.register_state_dict_pre_hook(lambda *_: self.apply_all())
        gradients.late = self._due

    def defer(self) -> None:
        """Begin a step whose updates are applied later, by the modules' next forwards."""
        self.apply_all()
        self._gradients.begin_all()
        groups = self._gradients.optimizer.param_groups
        self._settings = [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in groups
        ]
        self._group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        self._due |= self._gradients.take()
        self._early = [
            p
            for p in self._due
            if len(self._homes[p]) != 1 or self._homes[p][0] not in self._called
        ]
        self._left -= 1
        if self._left == 0:
            self.apply_all()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        training = module.training and torch.is_grad_enabled()
        if training:
            self._called.add(module)
        if self._due and training:
            early, self._early = self._early, []
            self._apply([*early, *self._own[module]])
        elif self._due:
            self.apply_all()

    def apply_all(self) -> None:
        self._apply(list(self._due))

    def _apply(self, params: Iterable[nn.Parameter]) -> None:
        optimizer, chosen = self._gradients.optimizer, [p for p in params if p in self._due]
        if not chosen:
            return
        groups: dict[int, list[nn.Parameter]] = defaultdict(list)
        for p in chosen:
            self._gradients.arrive(p, self._due.pop(p))
            groups[self._group_of[p]].append(p)
        partial = [{**self._settings[i], "params": own} for i, own in groups.items()]
        real, optimizer.param_groups = optimizer.param_groups, [dict(group) for group in partial]
        try:  # the update runs without the modes of the forward
            with torch.inference_mode(False), torch.autocast(chosen[0].device.type, enabled=False):
                self._step()
            kept = all(
                now.keys() == was.keys() and all(now[key] is was[key] for key in was)
                for now, was in zip(optimizer.param_groups, partial)
            )
        finally:
            optimizer.param_groups = real
        if not kept:
            raise LoopError(
                f"{type(optimizer).__name__} changes values in its parameter groups, so it cannot"
                " update the parameters of each module separately",
                hint="leave model= out",
            )
        for p in chosen:
            p.grad = None


class Distributed(torch.optim.Optimizer):
    """An optimizer whose gradients are summed over the workers. `distribute` makes it the base
    class of an optimizer's class."""

    _gradients: GradientSums
    _deferred: DeferredSteps | None = None
    _alone = False  # whether the code is within skip_synchronize()

    def synchronize(self) -> None:
        """Wait for the sums of all gradients, and apply deferred steps."""
        self.apply_all()
        self._gradients.begin_all()
        self._gradients.arrive_all()

    def apply_all(self) -> None:
        """Apply all deferred updates. If steps are not deferred, do nothing."""
        if self._deferred is not None:
            self._deferred.apply_all()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make step() use the gradients as they are while this context is active. Call
        synchronize() first; then the caller may change the summed gradients, for example clip them.
        """
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            return super().step(self._summed(closure))
        if self._alone:
            self._gradients.check_quiet(
                "step() within skip_synchronize()", "call optimizer.synchronize() first"
            )
        if not (self._alone or self._gradients.complete):
            if self._deferred is not None:
                return self._deferred.defer()
            self.synchronize()
        self.apply_all()
        self._gradients.complete = False
        return super().step()

    step.hooked = True  # type: ignore[attr-defined]  # tells torch that the base's step runs the step hooks

    def _summed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._deferred is not None:
            raise ConfigError("step(closure) with model= is not supported", hint="leave model= out")

        def whole() -> Any:
            loss = closure()
            if not self._alone:
                self.synchronize()
                self._gradients.complete = False
            return loss

        return whole

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients.check_quiet(
            "zero_grad()", "call it before backward(), or after step() or synchronize()"
        )
        self._gradients.seen.clear()
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step is {passes}, but must be at least 1")
        self._gradients.passes = passes

    def state_dict(self) -> dict[str, Any]:
        self.apply_all()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.apply_all()
        super().load_state_dict(state_dict)


class Asynchronous(torch.optim.Optimizer):
    """An optimizer for asynchronous training: no worker waits for others.

    A worker takes a step with its own gradients, and pushes the change of the parameters. Its new
    parameters are the initial values plus all changes that workers have pushed so far. With SGD,
    the result equals that of one process that applies the workers' steps in the order of their
    pushes. With momentum or Adam it differs, because a worker's moments come from its own gradients
    only.
    """

    _exchange: Exchange
    _named: list[tuple[str, nn.Parameter]]
    # the parameters at the first step, equal on all workers
    _first: dict[nn.Parameter, torch.Tensor] | None = None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        before = {p: p.detach().clone() for _, p in self._named}
        if self._first is None:
            self._first = before
        loss = super().step(closure)
        with torch.no_grad():
            under_way = [
                (
                    p,
                    self._exchange.begin(
                        p - before[p], f"change of {name}", priority=i, accumulate=True
                    ),
                )
                for i, (name, p) in enumerate(self._named)
            ]
            for p, handle in under_way:
                p.copy_(self._first[p] + self._exchange.finish(handle))
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Do nothing, because step() has already waited for the sum."""


def _become(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> Any:
    """Replace the optimizer's class by a subclass that has `kind` as a base; the object stays the
    same."""
    vars(optimizer).pop("step", None)  # a scheduler's wrapper of the old step
    cls = type(optimizer)
    optimizer.__class__ = type(cls.__name__, (kind, cls), {"__doc__": cls.__doc__})
    return optimizer


def distribute_asynchronously(
    optimizer: torch.optim.Optimizer,
    exchange: Exchange,
    named: Iterable[tuple[str, nn.Parameter]] | None,
) -> Asynchronous:
    """Make an optimizer Asynchronous, for a summation service with the rule "accumulate". Raises
    ConfigError."""
    pairs = _checked(named, optimizer)
    if unfit := [name for name, p in pairs if p.dtype not in SUMMED]:
        raise ConfigError(
            f"parameter {unfit[0]} has a dtype that cannot be summed", hint="use fp32, bf16 or fp16"
        )
    made = _become(optimizer, Asynchronous)
    made._exchange, made._named = exchange, pairs
    return made  # type: ignore[no-any-return]


def distribute(
    optimizer: torch.optim.Optimizer,
    exchange: Exchange,
    named: Iterable[tuple[str, nn.Parameter]] | None,
    *,
    passes: int,
    division: tuple[float, float],
    format: str,
    model: nn.Module | None,
    num_steps: int,
) -> Distributed:
    """Make an optimizer Distributed. Raises ConfigError.

    `passes`: number of backward passes per step. `division`: gradients are divided by the first
    number before the sum, and the sum is multiplied by the second number. `model`: if not None,
    updates are deferred to the next forward of this model. `num_steps`: total number of steps,
    0 if unknown; the last step is not deferred.
    """
    cls = type(optimizer)
    if isinstance(optimizer, Distributed):
        raise ConfigError(
            f"this {cls.__name__} is already distributed", hint="distribute each optimizer once"
        )
    if (
        model is not None
        and inspect.signature(cls.step).parameters["closure"].default is inspect.Parameter.empty
    ):
        raise ConfigError(
            f"{cls.__name__} needs a closure, so it cannot update each module separately",
            hint="leave model= out",
        )
    gradients = GradientSums(optimizer, exchange, named, division, format)
    made = _become(optimizer, Distributed)
    made._gradients = gradients
    made.set_backward_passes_per_step(passes)
    if model is not None:
        made._deferred = DeferredSteps(gradients, model, super(Distributed, made).step, num_steps)
    return made  # type: ignore[no-any-return]
