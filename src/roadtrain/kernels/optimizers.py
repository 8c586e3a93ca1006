"""The optimizers that have a short name and a compiled rule.

A new optimizer needs a line in this file, a formula in update.py and a rule in rules.py. Does NOT
import torch or numba, which start slowly.
"""

from __future__ import annotations

from typing import NamedTuple


class NamedOptimizer(NamedTuple):
    path: str  # MODULE:CLASS
    state_nbytes: int  # state bytes per parameter element, without SGD's optional momentum


OPTIMIZERS = {
    "adamw": NamedOptimizer("torch.optim.adamw:AdamW", 8),
    "adam": NamedOptimizer("torch.optim.adam:Adam", 8),
    "sgd": NamedOptimizer("torch.optim.sgd:SGD", 0),
    "lion": NamedOptimizer("roadtrain.kernels.lion:Lion", 4),
    "adagrad": NamedOptimizer("torch.optim.adagrad:Adagrad", 4),
    "rmsprop": NamedOptimizer("torch.optim.rmsprop:RMSprop", 4),
}
SHORT_NAMES = {optimizer.path: name for name, optimizer in OPTIMIZERS.items()}
