"""Any elementwise torch optimizer on flat slices: bits equal to torch's; optimizers that are not
elementwise are refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from roadtrain.errors import RuleError
from roadtrain.kernels.generic import TorchRule
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.training.check_rule import check_rule

O = torch.optim  # noqa: E741


class Lazy(O.Optimizer):
    """A user's optimizer that replaces tensors, creates state late, counts in Python and keeps a
    setting outside its groups."""

    def __init__(self, params, power, lr=0.1):
        self.power = power
        super().__init__(params, {"lr": lr, "period": 3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"], state["slow"], state["fast"] = 0, None, torch.zeros_like(p)
                state["count"] += 1
                state["fast"] = 0.9 * state["fast"] + p.grad * self.power
                if state["count"] % group["period"] == 0:
                    state["slow"] = p.clone() if state["slow"] is None else (state["slow"] + p) / 2
                p.data = p - group["lr"] * state["fast"]
                if state["slow"] is not None:
                    p.lerp_(state["slow"], 0.1)


class Normed(Lazy):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad / p.grad.norm())


class Secretive(Lazy):
    calls = 0

    def step(self, closure=None):
        self.power = self.power * 0.99
        super().step()


class Widened(O.SGD):
    """A subclass of a natively supported optimizer that changes the step, so that the native rule
    is wrong for it."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad.sign(), alpha=self.param_groups[0]["lr"])


CASES = [
    (O.Adadelta, {}),
    (O.Adadelta, {"weight_decay": 0.1, "maximize": True}),
    (O.Adamax, {"weight_decay": 0.1}),
    (O.ASGD, {"lr": 0.1, "t0": 3}),
    (O.NAdam, {}),
    (O.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (O.RAdam, {"lr": torch.tensor(0.01), "foreach": True}),
    (O.Rprop, {}),
    (Lazy, {"power": 0.7}),
    (Widened, {"lr": 0.1}),
]


@pytest.mark.parametrize(("cls", "options"), CASES, ids=[f"{c.__name__}{len(o)}" for c, o in CASES])
@pytest.mark.slow
def test_fifty_steps_have_the_bits_of_torch(cls, options):
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(37, 29, generator=generator))
    optimizer = cls([param], **{**options, **({"foreach": False} if "foreach" in options else {})})
    (rule,) = rules_for(optimizer)
    rule = pickle.loads(pickle.dumps(rule))
    schedule = O.lr_scheduler.StepLR(optimizer, 7, 0.7)
    cuts = [0, 100, 611, param.numel()]
    p = param.detach().numpy().reshape(-1).copy()
    arrays = [np.zeros_like(p) for _ in rule.arrays]
    rows = [np.zeros(len(rule.scalars)) for _ in cuts[1:]]
    for step in range(50):
        param.grad = torch.randn(param.shape, generator=generator)
        grad = param.grad.numpy().reshape(-1).copy()
        hyper = rule.hyper(optimizer.param_groups[0])
        optimizer.step()
        schedule.step()
        for a, b, row in zip(cuts, cuts[1:], rows):
            rule.apply(
                p[a:b], grad[a:b], "fp32", [x[a:b] for x in arrays], row, hyper, 1.0, None, None
            )
        assert np.array_equal(p, param.detach().numpy().reshape(-1)), step
    for name, array in zip(rule.arrays, arrays):
        assert np.array_equal(array, optimizer.state[param][name].numpy().reshape(-1))
    assert check_rule(rule, hyper, 1000).failures == ()


@pytest.mark.parametrize(("cls", "why"), [(Normed, "elementwise"), (Secretive, "outside")])
def test_optimizers_that_are_not_elementwise_are_refused(cls, why):
    with pytest.raises(RuleError, match=why):
        rules_for(cls([torch.nn.Parameter(torch.ones(3))], power=0.7))


def test_options_that_are_no_numbers_must_not_change():
    optimizer = O.NAdam([torch.nn.Parameter(torch.ones(3))])
    (rule,) = rules_for(optimizer)
    assert isinstance(rule, TorchRule)
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(RuleError, match="maximize"):
        rule.hyper(optimizer.param_groups[0])


class Halving(Rule):
    """A user's update rule. wrong: Make its kernel differ from its reference."""

    name, arrays, wrong = "halving", ("seen",), False

    def hyper(self, group):
        return (float(group["lr"]),)

    def apply(self, p, grad, grad_dtype, arrays, row, hyper, grad_scale, copy, copy_dtype):
        self.reference(p, grad, grad_dtype, arrays, row, hyper, grad_scale, copy, copy_dtype)
        if self.wrong and p.size > 10:
            p[:] = p - p.mean()

    def reference(self, p, grad, grad_dtype, arrays, row, hyper, grad_scale, copy, copy_dtype):
        p *= np.float32(0.5)
        arrays[0][:] += 1


def test_check_rule_finds_a_wrong_kernel():
    assert check_rule(Halving(), (0.1,), 1000).failures == ()
    wrong = Halving()
    wrong.wrong = True
    failures = check_rule(wrong, (0.1,), 1000).failures
    assert any("reference" in f for f in failures) and any("split" in f for f in failures)
