"""A torch optimizer whose gradients are summed over the workers, each from the moment backward has
it.

    backward: ready(p) -> sum begins        step(): all sums come into p.grad, then the optimizer's
                                            own step
    with `model`:  step(): nothing waits    before the forward of a module: its sums, the step of
                                            its parameters alone

NOTE later steps (BytePS's cross-barrier). A module's parameters are brought up to date when its
forward begins, while later modules' gradients still travel, with the settings that the groups had
at step(). At the first forward of any module come those that a module of their own cannot bring in
time: parameters of several modules, of none, and of modules whose forward was not seen to be called
(others read their weights, as MultiheadAttention does). All at once where nothing is trained: in
eval mode, without gradients. Limits: what reads parameters without any forward of a module reads
old ones, until synchronize(), which model.state_dict() does by itself; a parameter that was used
too early is an error as soon as its gradient comes; `p.grad` is gone after step(); hooks of the
optimizer's step run once for every module.

Assumes that all workers train the same model. Does NOT fuse small gradients.
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
    """Of one gradient. `version`: of its memory as it was sent."""

    grad: torch.Tensor
    handle: Handle
    version: int


class GradientSums:
    """One optimizer's, on their way. division: before the sum on every worker; a factor of the
    sum."""

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
        self.names: dict[nn.Parameter, str] = {}  # of all that are watched
        # the first named is nearest the input, wanted first
        self._priority: dict[nn.Parameter, int] = {}
        self.seen: dict[nn.Parameter, int] = {}  # backward passes since the last step
        self.under_way: dict[nn.Parameter, _Sum] = {}
        self.complete = False  # all are summed, and none has come since
        self.late: Mapping[nn.Parameter, Any] = {}  # what the parameter lacks still
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
                f"{self.names[p]} came, its last one is not applied: the parameter was used without"
                " its module's forward",
                hint="leave model= out, or optimizer.synchronize() before forward",
            )
        self.complete, self.seen[p] = False, self.seen.get(p, 0) + 1
        if p in self.under_way or self.seen[p] > self.passes:
            raise LoopError(
                f"{self.names[p]} came {self.seen[p]} times before step()",
                hint=f"backward_passes_per_step is {self.passes}; step() or zero_grad() between",
            )
        if self.seen[p] == self.passes and p.dtype in SUMMED:  # others need an order: begin_all's
            self._begin(p)

    def _begin(self, p: nn.Parameter) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)  # another worker may have one
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
                f"{what} while {len(self.under_way)} gradients are being summed", hint=hint
            )

    def begin_all(self) -> None:
        """Also of those that backward did not reach here, and those that joined the optimizer
        since."""
        self._watch(_trained(self.optimizer))
        for p in self.names:
            if p not in self.under_way and p.requires_grad:
                self._begin(p)
        self.seen.clear()

    def take(self) -> dict[nn.Parameter, _Sum]:
        """They are the caller's to `arrive`; `p.grad` is free for the next backward."""
        taken, self.under_way = self.under_way, {}
        for p, one in taken.items():
            if p.grad is not one.grad or one.grad._version != one.version:
                raise LoopError(
                    f"{self.names[p]} was changed while it was being summed",
                    hint="optimizer.synchronize() comes before clipping, unscale_() and the like",
                )
            p.grad = None
        return taken

    def arrive_all(self) -> None:
        for p, one in self.take().items():
            self.arrive(p, one)
        self.complete = True

    def arrive(self, p: nn.Parameter, one: _Sum) -> None:
        self.exchange.finish(one.handle)
        p.grad = one.grad


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
    """The optimizer's own by the names given, in the order given."""
    if named is None:
        return _trained(optimizer)
    pairs, wanted = list(named), {p for _, p in _trained(optimizer)}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ConfigError(
            "named_parameters has a name twice", hint="model.named_parameters() has each once"
        )
    if missing := len(wanted - {p for _, p in pairs}):
        raise ConfigError(
            f"named_parameters lacks {missing} of the optimizer's {len(wanted)} parameters",
            hint="give model.named_parameters(), or None",
        )
    return [(name, p) for name, p in pairs if p in wanted]


class Later:
    """See NOTE later steps. `step`: the optimizer's own, over whatever is in its groups."""

    def __init__(
        self, gradients: GradientSums, model: nn.Module, step: Callable[[], Any], num_steps: int
    ) -> None:
        self._gradients, self._step, self._left = gradients, step, num_steps
        # of the last step(), not applied yet; one object for ever
        self._due: dict[nn.Parameter, _Sum] = {}
        self._early: list[nn.Parameter] = []  # of them, at the first forward
        self._settings: list[dict[str, Any]] = []  # of the groups, at step()
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
        """step() without waiting."""
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
        given = [{**self._settings[i], "params": own} for i, own in groups.items()]
        real, optimizer.param_groups = optimizer.param_groups, [dict(group) for group in given]
        try:  # forward's modes are not those of a step
            with torch.inference_mode(False), torch.autocast(chosen[0].device.type, enabled=False):
                self._step()
            kept = all(
                now.keys() == was.keys() and all(now[key] is was[key] for key in was)
                for now, was in zip(optimizer.param_groups, given)
            )
        finally:
            optimizer.param_groups = real
        if not kept:
            raise LoopError(
                f"{type(optimizer).__name__} keeps numbers of its own in its groups",
                hint="leave model= out: its steps cannot be taken module by module",
            )
        for p in chosen:
            p.grad = None


class Distributed(torch.optim.Optimizer):
    """What `distribute` makes of an optimizer, whose class it keeps as its base."""

    _gradients: GradientSums
    _later: Later | None = None
    _alone = False  # inside skip_synchronize()

    def synchronize(self) -> None:
        """Every gradient is the sum after this; and every parameter up to date."""
        self.apply_all()
        self._gradients.begin_all()
        self._gradients.arrive_all()

    def apply_all(self) -> None:
        """What `model=` put off."""
        if self._later is not None:
            self._later.apply_all()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() takes the gradients as they are: after synchronize(), and what was done to
        them since."""
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
                "step() inside skip_synchronize()", "optimizer.synchronize() comes first"
            )
        if not (self._alone or self._gradients.complete):
            if self._later is not None:
                return self._later.defer()
            self.synchronize()
        self.apply_all()
        self._gradients.complete = False
        return super().step()

    step.hooked = True  # type: ignore[attr-defined]  # torch's mark: the base's step runs the hooks of steps

    def _summed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._later is not None:
            raise ConfigError("step(closure) with model=", hint="leave model= out")

        def whole() -> Any:
            loss = closure()
            if not self._alone:
                self.synchronize()
                self._gradients.complete = False
            return loss

        return whole

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients.check_quiet(
            "zero_grad()", "it comes before backward(), or after step() or synchronize()"
        )
        self._gradients.seen.clear()
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes}", hint="1 or more")
        self._gradients.passes = passes

    def state_dict(self) -> dict[str, Any]:
        self.apply_all()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.apply_all()
        super().load_state_dict(state_dict)


class Asynchronous(torch.optim.Optimizer):
    """Nobody waits for anybody: a step is taken with this worker's own gradients, what it
    changed is pushed, and the parameters become what they began as plus all that all workers
    have pushed so far. The same as one process that applies the workers' steps in the order of
    their pushes where a step depends on the gradient alone (SGD). Momentum and Adam's moments
    are each worker's own and see only its gradients: that is another method."""

    _exchange: Exchange
    _named: list[tuple[str, nn.Parameter]]
    # at the first step: the same on all workers by then
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
        """There is nothing to wait for."""


def _become(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> Any:
    """The same object, so that schedulers see it, with a class of the same name between it and
    its own."""
    vars(optimizer).pop("step", None)  # a scheduler's wrapper of the old one
    cls = type(optimizer)
    optimizer.__class__ = type(cls.__name__, (kind, cls), {"__doc__": cls.__doc__})
    return optimizer


def distribute_asynchronously(
    optimizer: torch.optim.Optimizer,
    exchange: Exchange,
    named: Iterable[tuple[str, nn.Parameter]] | None,
) -> Asynchronous:
    """As `distribute`, with a service whose rule is accumulate."""
    pairs = _checked(named, optimizer)
    if unfit := [name for name, p in pairs if p.dtype not in SUMMED]:
        raise ConfigError(
            f"{unfit[0]} is of a dtype that the service does not sum", hint="fp32, bf16 or fp16"
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
    """Raises ConfigError. num_steps: the last step, which `model` does not put off (0: unknown)."""
    cls = type(optimizer)
    if isinstance(optimizer, Distributed):
        raise ConfigError(
            f"this {cls.__name__} is distributed already", hint="once for each optimizer"
        )
    if (
        model is not None
        and inspect.signature(cls.step).parameters["closure"].default is inspect.Parameter.empty
    ):
        raise ConfigError(
            f"{cls.__name__} needs a closure: its steps cannot be taken module by module",
            hint="leave model= out",
        )
    gradients = GradientSums(optimizer, exchange, named, division, format)
    made = _become(optimizer, Distributed)
    made._gradients = gradients
    made.set_backward_passes_per_step(passes)
    if model is not None:
        made._later = Later(gradients, model, super(Distributed, made).step, num_steps)
    return made  # type: ignore[no-any-return]
