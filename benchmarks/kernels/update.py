"""Compare roadtrain's optimizer updates with torch's. An update of roadtrain reads a bf16 gradient
and writes a bf16 copy of the parameters. An update of torch needs two casts for this.

The floor is the rate at which the same number of threads reads, changes and writes three fp32
arrays of the same size. Does NOT touch storage.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import Report, cores, interleave
from benchmarks.common.rows import row
from roadtrain.chunks import MAX_CHUNK
from roadtrain.device.buffers import Buffer, array_in
from roadtrain.kernels.cast import cast, kernel
from roadtrain.kernels.lion import Lion
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.units import MIB


@kernel
def _read_modify_write(a, b, c):
    for i in range(a.size):
        a[i] = a[i] * np.float32(0.999)
        b[i] = b[i] * np.float32(0.999)
        c[i] = c[i] * np.float32(0.999)


def _buffer(n: int, dtype: str) -> np.ndarray:
    return array_in(Buffer(n * (4 if dtype == "fp32" else 2)).view, dtype, 0, n)


class _Ours:
    """Roadtrain's update of flat arrays that are cut into chunks. A call runs one update."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, grad: np.ndarray, pool: ThreadPoolExecutor
    ) -> None:
        (self.rule,), n = rules_for(optimizer), grad.size
        self.hyper, self.grad, self.pool = self.rule.hyper(optimizer.param_groups[0]), grad, pool
        self.p, self.copy = _buffer(n, "fp32"), _buffer(n, "bf16")
        self.p[:] = 1
        self.arrays = [_buffer(n, "fp32") for _ in self.rule.arrays]
        self.rows = np.zeros((-(-n // MAX_CHUNK), len(self.rule.scalars)))
        # parameters and state in both directions, gradient in, copy out
        self.nbytes = n * (8 + 8 * len(self.arrays) + 4)

    def __call__(self) -> None:
        list(self.pool.map(self._chunk, range(len(self.rows))))

    def _chunk(self, i: int) -> None:
        part = slice(i * MAX_CHUNK, (i + 1) * MAX_CHUNK)
        arrays = [a[part] for a in self.arrays]
        self.rule.apply(
            self.p[part],
            self.grad[part],
            "bf16",
            arrays,
            self.rows[i],
            self.hyper,
            1.0,
            self.copy[part],
            "bf16",
        )


def _torch_fused(cls: type, options: dict[str, Any], grad: torch.Tensor) -> Callable[[], None]:
    param = torch.nn.Parameter(torch.ones(grad.numel()))
    param.grad, copy = torch.zeros_like(param), torch.zeros_like(grad)
    optimizer = cls([param], fused=True, **options)

    def step() -> None:
        assert param.grad is not None
        param.grad.copy_(grad)
        optimizer.step()
        copy.copy_(param.detach())

    return step


def _foreach_lion(grad: torch.Tensor) -> Callable[[], None]:
    flat = {name: torch.ones(grad.numel()) for name in ("p", "m", "g", "u")}
    p, m, g, u = (list(x.split(MAX_CHUNK)) for x in flat.values())
    copy = torch.zeros_like(grad)

    def step() -> None:
        flat["g"].copy_(grad)
        torch._foreach_copy_(u, m)
        torch._foreach_mul_(u, 0.9)
        torch._foreach_add_(u, g, alpha=0.1)
        torch._foreach_sign_(u)
        torch._foreach_add_(p, u, alpha=-1e-4)
        torch._foreach_mul_(m, 0.99)
        torch._foreach_add_(m, g, alpha=0.01)
        copy.copy_(flat["p"])

    return step


def run(quick: bool = False) -> Report:
    n, reps, threads = (4 if quick else 64) * MIB, 3 if quick else 9, cores()
    torch.set_num_threads(threads)
    noise = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    bits = _buffer(n, "bf16")
    cast(noise, "fp32", bits, "bf16")
    grad = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    dummy = [torch.nn.Parameter(torch.zeros(1))]
    fused: dict[str, tuple[type, dict[str, Any]]] = {
        "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
        "SGD, momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    }
    with ThreadPoolExecutor(threads) as pool:

        def touch(at: int) -> None:
            _read_modify_write(*(array[at : at + MAX_CHUNK] for array in arrays))

        def floor() -> None:
            list(pool.map(touch, range(0, n, MAX_CHUNK)))

        arrays = [_buffer(n, "fp32") for _ in range(3)]
        cases: list[tuple[str, torch.optim.Optimizer, Callable[[], None], str]] = [
            (name, cls(dummy, **options), _torch_fused(cls, options, grad), "torch fused")
            for name, (cls, options) in fused.items()
        ]
        cases.append(("Lion", Lion(dummy), _foreach_lion(grad), "torch foreach"))
        rows = []
        for name, optimizer, peer, peer_name in cases:
            ours = _Ours(optimizer, bits, pool)
            seconds = interleave({"ours": ours, "peer": peer, "floor": floor}, reps)
            rate, limit = ours.nbytes / seconds["ours"], n * 24 / seconds["floor"]
            case = f"{name}, bf16 in and out, {n // MIB} Mi, {threads} threads"
            took, theirs = seconds["ours"] / n, (seconds["peer"] / n, f"{peer_name} + 2 casts")
            of: dict[str, Any] = {"of_floor": rate / limit, "goal": "of_floor >= 0.9"}
            most = (limit, "read-modify-write of 3 arrays")
            rows += [
                row(case, "update", "ns/element", took, theirs, goal="ratio >= 1.5"),
                row(case, "bytes per second", "GB/s", rate, most, more_is_better=True, **of),
            ]
    return Report("update", rows)
