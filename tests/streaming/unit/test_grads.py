"""PlacedGrad against torch's own functions on the same numbers."""

import copy

import pytest
import torch
from torch import nn

from roadtrain.errors import LoopError
from roadtrain.streaming.grads import PlacedGrad

SHAPES = [(7, 5), (33,), (4, 4, 2), (64, 3)]


class Book:
    def __init__(self, grads):
        self.grads = grads

    def sum_squares(self, param):
        return float(self.grads[param].double().square().sum())


def pair(dtype=torch.float32, placed=(0, 2), grads=None):
    """The same parameters twice: with plain gradients, and with some gradients placed."""
    torch.manual_seed(0)
    grads = grads or [torch.randn(s).to(dtype) * 3 for s in SHAPES]
    plain = [nn.Parameter(torch.zeros(g.shape, dtype=dtype)) for g in grads]
    mixed = copy.deepcopy(plain)
    book = Book(grads)
    for i, g in enumerate(grads):
        plain[i].grad = g.clone()
        mixed[i].grad = PlacedGrad(mixed[i], i, book, f"p{i}") if i in placed else g.clone()
    return plain, mixed, grads


def value(p, i, grads):
    return grads[i] * p.grad.scale if isinstance(p.grad, PlacedGrad) else p.grad


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("placed", [(0, 2), (0, 1, 2, 3), ()])
def test_clip_grad_norm(foreach, placed):
    plain, mixed, grads = pair(placed=placed)
    for limit in (1e9, 1.0):
        want = nn.utils.clip_grad_norm_(plain, limit, foreach=foreach)
        got = nn.utils.clip_grad_norm_(mixed, limit, foreach=foreach)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for i, (a, b) in enumerate(zip(plain, mixed)):
        torch.testing.assert_close(value(b, i, grads), a.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_total_norm(dtype):
    plain, mixed, _ = pair(dtype)
    want = nn.utils.get_total_norm([p.grad.float() for p in plain])
    got = nn.utils.get_total_norm([p.grad for p in mixed])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0)
    nn.utils.clip_grads_with_norm_(mixed, 1.0, got)
    assert mixed[0].grad.scale == pytest.approx(float(1 / (got + 1e-6)))


@pytest.mark.parametrize("foreach", [None, True, False])
def test_other_norms_are_refused(foreach):
    _, mixed, _ = pair()
    for order in (float("inf"), 1.0, 3.0):
        with pytest.raises(LoopError, match=r"order.*\n?.*hint"):
            nn.utils.clip_grad_norm_(mixed, 1.0, norm_type=order, foreach=foreach)
    with pytest.raises(LoopError, match="sent to its server"):
        mixed[0].grad.norm(dim=0)


def test_a_placed_gradient_behaves_like_a_tensor():
    plain, mixed, _ = pair()
    g = mixed[0].grad
    assert isinstance(g, PlacedGrad)
    assert (g.shape, g.dtype, g.device) == (torch.Size((7, 5)), torch.float32, torch.device("cpu"))
    assert "p0" in repr(g) and "p0" in f"{g}"
    assert not g.is_sparse and g.numel() == 35
    for norm in (
        g.norm(),
        g.norm(2),
        g.data.norm(2),
        g.detach().norm(),
        torch.linalg.vector_norm(g),
    ):
        torch.testing.assert_close(norm, plain[0].grad.norm())
    g.mul_(0.5)
    g.data.mul_(torch.tensor(4.0))
    g.div_(8)
    mixed[0].grad /= 2
    assert g.scale == mixed[0].grad.scale == 0.125
    torch._foreach_mul_([p.grad for p in mixed], 2.0)
    torch._foreach_div_([p.grad for p in mixed], torch.tensor(4.0))
    torch._foreach_mul_([p.grad for p in mixed], [2.0] * 4)
    assert g.scale == 0.125
    torch.testing.assert_close(mixed[1].grad, plain[1].grad)
    torch.testing.assert_close(g.norm(), plain[0].grad.norm() / 8)


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g + 1,
        lambda g: g.zero_(),
        lambda g: g.clone(),
        lambda g: g.abs().max(),
        lambda g: g.to(torch.float64),
        lambda g: torch.isfinite(g).all(),
        lambda g: g.mul_(torch.ones(7, 5)),
        lambda g: g.add_(g),
        lambda g: g[0],
        lambda g: torch.ones(7, 5).mul_(g),
        lambda g: g.sum(),
        lambda g: g.cpu().numpy(),
        lambda g: g.tolist(),
    ],
)
def test_elements_are_refused(use):
    _, mixed, _ = pair()
    with pytest.raises(LoopError, match="sent to its server"):
        use(mixed[0].grad)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_grad_scaler(bad):
    plain, mixed, grads = pair()
    if bad is not None:
        grads[bad].view(-1)[3] = float("inf")
        plain, mixed, grads = pair(grads=grads)
    results = []
    for params in (plain, mixed):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        optimizer = torch.optim.SGD(params, lr=0.0)
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]
        results.append([float(v) for v in found["found_inf_per_device"].values()])
    assert results[0] == results[1] == [0.0 if bad is None else 1.0]
    assert mixed[0].grad.scale == 1 / 1024
    if bad is None:
        for i, (a, b) in enumerate(zip(plain, mixed)):
            torch.testing.assert_close(value(b, i, grads), a.grad, rtol=0, atol=0)
