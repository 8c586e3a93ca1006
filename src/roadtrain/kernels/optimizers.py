"""The optimizers that have a short name; each has a compiled rule.

A new optimizer needs a line here, its formula in update.py and its rule in rules.py. Imports
nothing heavy: whatever only reads a job needs neither torch nor numba.
"""

from __future__ import annotations

from typing import NamedTuple


class NamedOptimizer(NamedTuple):
    path: str  # MODULE:CLASS
    state_nbytes: int  # that an update keeps of a parameter, besides the parameter and momentum


OPTIMIZERS = {
    "adamw": NamedOptimizer("torch.optim.adamw:AdamW", 8),
    "adam": NamedOptimizer("torch.optim.adam:Adam", 8),
    "sgd": NamedOptimizer("torch.optim.sgd:SGD", 0),
    "lion": NamedOptimizer("roadtrain.kernels.lion:Lion", 4),
    "adagrad": NamedOptimizer("torch.optim.adagrad:Adagrad", 4),
    "rmsprop": NamedOptimizer("torch.optim.rmsprop:RMSprop", 4),
}
SHORT_NAMES = {optimizer.path: name for name, optimizer in OPTIMIZERS.items()}
