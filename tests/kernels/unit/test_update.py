"""Update rules: bits equal to the reference (Rule 1), agreement with torch over 50 steps,
refusals."""

from __future__ import annotations

import importlib
import pickle

import numpy as np
import pytest
import torch

from roadtrain.errors import RuleError
from roadtrain.kernels.cast import reference_downcast, uncached
from roadtrain.kernels.lion import Lion
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.kernels.rules import AdamRule, SgdRule
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.training.check_rule import FORMATS, check_rule

O = torch.optim  # noqa: E741
CASES = [
    (O.SGD, {"lr": 0.1}),
    (O.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    (O.Adam, {"lr": 0.01}),
    (O.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (O.Adam, {"lr": 0.01, "betas": (0.3, 0.9)}),
    (O.Adam, {"lr": 0.01, "betas": (0.0, 0.9)}),
    (O.AdamW, {"lr": torch.tensor(0.01)}),
    (O.AdamW, {"lr": 0.01, "weight_decay": 0.0, "maximize": True}),
    (O.AdamW, {"lr": 0.01, "amsgrad": True, "eps": 1e-3}),
    (O.Adagrad, {"lr": 0.1}),
    (
        O.Adagrad,
        {
            "lr": 0.1,
            "lr_decay": 0.1,
            "weight_decay": 0.1,
            "initial_accumulator_value": 0.5,
            "maximize": True,
        },
    ),
    (O.RMSprop, {"lr": 0.01}),
    (O.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5, "eps": 1e-3}),
    (O.RMSprop, {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.5, "alpha": 0.4, "maximize": True}),
    (Lion, {"lr": 0.01}),
    (Lion, {"lr": 0.01, "weight_decay": 0.3, "betas": (0.5, 0.95), "maximize": True}),
]
IDS = [f"{cls.__name__}-{'-'.join(map(str, options))}" for cls, options in CASES]
ADAMW = 8  # of CASES
# Cases whose rules have their own loops. The other cases use the loops of a neighbour, with other
# hyperparameters.
OTHER_LOOPS = (0, 3, 4, 5, 10, 12, 13, 14, 15, 17)
# Each pair of formats compiles its own loop. A case takes three of the nine pairs, which include
# every format of a gradient and of a copy; the next case takes another three.
SOME = [[FORMATS[3 * i + (i + k) % 3] for i in range(3)] for k in range(3)]
COMPILED = [
    pytest.param(
        *case,
        FORMATS if number == ADAMW else SOME[number % 3],
        id=name,
        marks=()
        if number == ADAMW
        else pytest.mark.slow
        if number in OTHER_LOOPS
        else pytest.mark.exhaustive,
    )
    for number, (case, name) in enumerate(zip(CASES, IDS))
] + [
    pytest.param(*case, FORMATS, id=f"{name}-all formats", marks=pytest.mark.exhaustive)
    for case, name in zip(CASES, IDS)
]


def make(cls, options, n=1003):
    generator = torch.Generator().manual_seed(5)
    param = torch.nn.Parameter(torch.randn(n, generator=generator))
    flags = {} if cls is Lion else {"foreach": False}
    return param, cls([param], **options, **flags), generator


@pytest.mark.parametrize(("cls", "options", "formats"), COMPILED)
@pytest.mark.slow
def test_kernel_equals_reference_in_any_cut(cls, options, formats):
    _, optimizer, _ = make(cls, options)
    (rule,) = rules_for(optimizer)
    report = check_rule(rule, rule.hyper(optimizer.param_groups[0]), 1 << 14, formats)
    assert report.failures == ()
    assert pickle.loads(pickle.dumps(rule)) == rule


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.slow
def test_a_copy_written_past_the_cache_has_the_same_bits(dtype):  # Rule 1
    """Only aligned copies are written past the cache; all lengths occur, so that the remainder of
    the vector loop is tested."""
    for n in (1, 31, 1003):
        raw = np.zeros(2 * n + 64, np.uint8)
        first = -raw.ctypes.data % 32
        copies = [raw[first : first + 2 * n].view(np.uint16), np.zeros(n + 1, np.uint16)[1:]]
        assert uncached(copies[0]).ndim == 2
        for copy in copies:
            (rule,) = rules_for(make(O.SGD, {"lr": 0.1}, n)[1])
            values, grad = np.linspace(-3, 3, n, dtype=np.float32), np.ones(n, np.float32)
            rule.apply(
                values,
                grad,
                "fp32",
                [],
                np.zeros(len(rule.scalars)),
                (0.1, 0.0, 0.0, 0.0, 0.0, 0.0),
                1.0,
                copy,
                dtype,
            )
            assert np.array_equal(copy, reference_downcast(values, dtype))


@pytest.mark.parametrize(("cls", "options"), CASES, ids=IDS)
@pytest.mark.slow
def test_torch_parity_two_ulp_a_step(cls, options):
    """Each step starts from torch's state. No sums cancel here (equal signs, parameters far from
    zero): with cancellation an ulp of the input becomes many ulp of the result, in torch as
    well."""
    param, optimizer, generator = make(cls, {**options, "lr": options["lr"] * 0.1})
    sign = -1 if options.get("maximize") else 1
    param.data.abs_().add_(8)
    (rule,) = rules_for(optimizer)
    row = np.zeros(len(rule.scalars))
    begin = [np.zeros(param.numel(), np.float32) for _ in rule.arrays]
    rule.start(param.detach().numpy(), begin, row, rule.hyper(optimizer.param_groups[0]))
    for _ in range(50):
        p = param.detach().numpy().copy()
        state = optimizer.state[param]
        old = [
            begin[i] if state.get(n) is None else state[n].numpy()
            for i, n in enumerate(rule.arrays)
        ]
        arrays = [a.copy() for a in old]
        param.grad = torch.randn(param.shape, generator=generator).abs_() * sign
        grad = param.grad.numpy().copy()
        before = [b.copy() for b in (p, *old)]
        optimizer.step()
        hyper = rule.hyper(optimizer.param_groups[0])
        rule.apply(p, grad, "fp32", arrays, row, hyper, 1.0, None, None)
        theirs = [param.detach().numpy(), *(optimizer.state[param][n].numpy() for n in rule.arrays)]
        for name, mine, his, was in zip(["p", *rule.arrays], [p, *arrays], theirs, before):
            # squares: relative to the value used in the update
            if name in ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg"):
                mine, his, was = np.sqrt(mine), np.sqrt(his), np.sqrt(was)
            ulp = np.max(np.abs([mine, his, was]), axis=0) * np.float32(2**-23)
            assert (np.abs(mine - his) / ulp).max() <= 2, name
    if "step" in rule.scalars:
        assert row[0] == 50


@pytest.mark.parametrize(("cls", "options"), CASES, ids=IDS)
def test_torch_parity_over_fifty_free_steps(cls, options):
    param, optimizer, generator = make(cls, options)
    (rule,) = rules_for(optimizer)
    p, row = param.detach().numpy().copy(), np.zeros(len(rule.scalars))
    arrays = [np.zeros_like(p) for _ in rule.arrays]
    rule.start(p, arrays, row, rule.hyper(optimizer.param_groups[0]))
    for _ in range(50):
        param.grad = torch.randn(param.shape, generator=generator)
        rule.apply(
            p,
            param.grad.numpy(),
            "fp32",
            arrays,
            row,
            rule.hyper(optimizer.param_groups[0]),
            1.0,
            None,
            None,
        )
        optimizer.step()
    np.testing.assert_allclose(p, param.detach().numpy(), rtol=2e-5, atol=2e-5)
    assert (cls is Lion) <= np.array_equal(p, param.detach().numpy())


def test_the_scheduler_is_read_at_each_step():
    param, optimizer, _ = make(O.AdamW, {"lr": 0.1})
    (rule,) = rules_for(optimizer)
    schedule = O.lr_scheduler.StepLR(optimizer, 1, 0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    schedule.step()
    assert rule.hyper(optimizer.param_groups[0])[0] == pytest.approx(0.05)


def test_each_group_has_its_rule():
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    rules = rules_for(O.SGD([{"params": [a], "momentum": 0.9}, {"params": [b]}], lr=0.1))
    assert rules == [SgdRule(True), SgdRule(False)]
    assert rules_for(O.AdamW([a], fused=True)) == [AdamRule(True, False)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_short_name_has_a_compiled_rule_of_the_documented_size(name):
    module, _, kind = OPTIMIZERS[name].path.partition(":")
    optimizer = getattr(importlib.import_module(module), kind)([torch.ones(1)], lr=0.1)
    (rule,) = rules_for(optimizer)
    assert rule.name == name and 4 * len(rule.arrays) == OPTIMIZERS[name].state_nbytes


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Adafactor", "Muon"])
def test_impossible_optimizers_are_refused_with_a_hint(name):
    param = torch.nn.Parameter(torch.ones(3, 4))
    with pytest.raises(RuleError, match="hint:"):
        rules_for(getattr(O, name)([param], lr=0.1))


def test_structure_must_not_change_in_training():
    _, optimizer, _ = make(O.SGD, {"lr": 0.1})
    (rule,) = rules_for(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuleError, match="momentum"):
        rule.hyper(optimizer.param_groups[0])
