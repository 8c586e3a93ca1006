"""Imported by the process from which tests fork others: the modules that they need, and the kernels that
most of them call, compiled or read from numba's cache."""

import gc

import numpy as np
import torch

from roadtrain.kernels.rules import AdamRule
from roadtrain.kernels.sum import accumulate, sum_squares


def _call_kernels() -> None:
    p, grad, m, v = np.zeros((4, 16), np.float32)
    (group,) = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).param_groups
    rule = AdamRule.of("torch.optim.adamw:AdamW", group)
    row = np.zeros(len(rule.scalars))
    rule.apply(p, grad, "fp32", [m, v], row, rule.hyper(group), 1.0, None, None)
    accumulate(p, grad, "fp32")
    sum_squares(grad, "fp32")


torch.set_num_threads(1)
_call_kernels()
gc.collect()
gc.freeze()  # forked processes neither look through what they share, nor copy it for that
