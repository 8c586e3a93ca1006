"""A released parameter answers queries that need no values and refuses the rest (Rule 6)."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from roadtrain.errors import LoopError
from roadtrain.streaming.released import (
    has_released_value,
    is_released,
    released_value,
    set_fetched,
    set_released,
)


class Special(nn.Parameter):
    """A parameter subclass of a third party."""


@pytest.fixture(params=[nn.Parameter, Special])
def released(request):
    p = request.param(torch.ones(3, 2))
    p.data = released_value((3, 2), torch.float32, torch.device("cpu"))
    set_released(p)
    return p


def test_queries_that_need_no_values_are_answered(released):
    p = released
    assert isinstance(p, nn.Parameter) and is_released(p) and has_released_value(p)
    assert (
        p.shape == (3, 2) and p.numel() == 6 and p.dtype == torch.float32 and p.device.type == "cpu"
    )
    assert (
        p.requires_grad and p.is_leaf and p.grad is None and not p.is_meta and p.is_floating_point()
    )
    assert torch.numel(p) == 6 and torch.is_floating_point(p) and len(p) == 3
    assert p in {p} and p in [p] and "released parameter" in repr(p) and "(3, 2)" in f"{p}"


# torch's methods and functions named "is_..."
QUESTIONS = {
    *("is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_distributed"),
    *("is_floating_point", "is_inference", "is_neg", "is_nonzero", "is_pinned", "is_same_size"),
    *("is_set_to", "is_shared", "is_signed", "is_tensor", "is_storage"),
}


def test_no_other_query_than_is_nonzero_needs_values(released):
    """A query new in torch is missing in QUESTIONS: decide whether it needs values."""
    found = {
        name
        for home in (torch.Tensor, torch)
        for name in dir(home)
        if name.startswith("is_")
        and callable(getattr(home, name))
        and not name.endswith(("_enabled", "_available"))  # these do not query a tensor
    }
    assert found <= QUESTIONS
    with pytest.raises(LoopError, match="in memory only while its block runs"):
        released.is_nonzero()
    with pytest.raises(LoopError, match="in memory only while its block runs"):
        torch.is_nonzero(released)
    for name in QUESTIONS - {"is_nonzero", "is_coalesced"}:  # of sparse tensors
        if hasattr(torch.Tensor, name):
            other = (released,) if name in ("is_same_size", "is_set_to") else ()
            assert getattr(released, name)(*other) in (False, True), name


def test_the_gradient_of_a_released_parameter_is_an_ordinary_tensor(released):
    released.grad = torch.full((3, 2), 2.0)
    assert not is_released(released.grad)
    norm = nn.utils.clip_grad_norm_([released], 1.0)
    assert norm.item() == pytest.approx(24**0.5) and released.grad.norm().item() == pytest.approx(1)
    released.grad = None


READS = {
    "clone": lambda p: p.clone(),
    "add": lambda p: torch.ones(3, 2) + p,
    "product": lambda p: torch.ones(1, 3) @ p,
    "linear": lambda p: nn.functional.linear(torch.ones(1, 2), p),
    "cat": lambda p: torch.cat([torch.ones(1, 2), p]),
    "item": lambda p: p[0, 0].item(),
    "equal": lambda p: p == 1,
    "equal tensors": lambda p: torch.equal(p, torch.ones(3, 2)),
    "numpy": lambda p: p.detach().numpy(),
    "data": lambda p: p.data.sum(),
    "list": lambda p: p.tolist(),
    "bool": lambda p: bool(p[0, 0] > 0),
    "transposed": lambda p: p.T,
    "view": lambda p: p.view(-1),
    "cast": lambda p: p.to(torch.float16),
    "cpu": lambda p: p.detach().cpu(),
    "write": lambda p: p.detach().zero_(),
    "norm": lambda p: p.norm(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "array": lambda p: np.asarray(p.detach()),
}


@pytest.mark.parametrize("how", READS)
def test_reading_a_released_parameter_is_refused(released, how):
    with pytest.raises(LoopError, match="in memory only while its block runs"):
        READS[how](released)


def test_a_fetched_parameter_is_as_before(released):
    kind = next(k for k in type(released).__mro__ if k in (nn.Parameter, Special))
    set_released(released)  # a second call changes nothing
    set_fetched(released)
    released.data = torch.full((3, 2), 3.0)
    assert type(released) is kind and released.sum().item() == 18 and not is_released(released.data)
    released.sum().backward()
    assert torch.equal(released.grad, torch.ones(3, 2))
