"""The Triton kernels under Triton's interpreter, in a separate process (the interpreter is chosen
at import)."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from roadtrain.errors import RuleError
from roadtrain.kernels import gpu
from roadtrain.kernels.cast import reference_widen
from roadtrain.kernels.rules import SgdRule
from roadtrain.kernels.torch_rules import rules_for

CASES = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "betas": (0.3, 0.9), "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
]
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compare(device: str, n: int) -> None:
    """Compare each Triton kernel on `device` with its CPU kernel bit for bit."""
    rng = np.random.default_rng(0)
    for cls, options in CASES:
        optimizer = cls([torch.nn.Parameter(torch.ones(1))], **options)
        (rule,) = rules_for(optimizer)
        hyper = rule.hyper(optimizer.param_groups[0])
        for dtype, copy_dtype in (("fp32", None), ("bf16", "bf16"), ("fp16", "fp16")):
            mine = rng.standard_normal(n, dtype=np.float32)
            his = torch.from_numpy(mine).to(device, copy=True)
            arrays, row = (
                [np.zeros(n, np.float32) for _ in rule.arrays],
                np.zeros(len(rule.scalars)),
            )
            held, column = [torch.zeros(n, device=device) for _ in rule.arrays], row.copy()
            copy = None if copy_dtype is None else np.zeros(n, np.uint16)
            out = None if copy_dtype is None else his.to(KINDS[copy_dtype])
            for _ in range(3):
                grad = torch.from_numpy(rng.standard_normal(n, dtype=np.float32)).to(KINDS[dtype])
                bits = (
                    grad.numpy()
                    if dtype == "fp32"
                    else grad.view(torch.int16).numpy().view(np.uint16)
                )
                rule.apply(mine, bits, dtype, arrays, row, hyper, 0.37, copy, copy_dtype)
                gpu.apply(rule, his, grad.to(device), held, column, hyper, 0.37, out)
                case = f"{cls.__name__} {options} {dtype}"
                assert np.array_equal(mine, his.cpu().numpy()), case
                assert all(np.array_equal(a, b.cpu().numpy()) for a, b in zip(arrays, held)), case
                if copy is not None and out is not None:
                    theirs = out.cpu().view(torch.int16).numpy().view(np.uint16)
                    assert np.array_equal(copy, theirs), (
                        case,
                        reference_widen(copy, copy_dtype or ""),
                    )


@pytest.mark.slow
@pytest.mark.skipif(gpu.triton is None, reason="no triton: pip install triton")
def test_triton_kernels_equal_the_cpu_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


def test_a_missing_triton_is_reported(monkeypatch):
    monkeypatch.setattr(gpu, "triton", None)
    p = torch.ones(3)
    with pytest.raises(RuleError, match="triton"):
        gpu.apply(SgdRule(), p, p, [], np.zeros(0), ())


if __name__ == "__main__":
    compare("cpu", 1500)
    print("equal")
