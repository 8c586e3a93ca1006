"""Use `roadtrain.place` in Hugging Face's Trainer and in TRL's trainers, which then stream their
models from a store. Does NOT start workers.

    Trainer(..., optimizer_cls_and_kwargs=(Placed, dict(optimizer=torch.optim.AdamW, lr=1e-3,
    store=DIR)))

Needs transformers 5. Repeating the command resumes a killed run (trainer_progress.py). The Trainer
does checkpoints, gradient clipping and gradient accumulation (docs/guides/integrations.md).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from roadtrain.errors import ConfigError
from roadtrain.integrations.trainer_progress import follow
from roadtrain.placement.optimizer import PlacedOptimizer
from roadtrain.placement.place import place
from roadtrain.placement.stores import Memory, store_of
from roadtrain.retry import undone_on_error

# parameters with these words in their names have no weight decay, as in the Trainer; norms are also
# found by their class
NOT_DECAYED = ("bias", "layernorm", "rmsnorm")
OPTIONS = {*inspect.signature(place).parameters} - {"model", "optimizer", "unknown"}


class Placed:
    """A factory that makes the optimizer for the Trainer.

    The optimizer has the Trainer's parameter groups, with weight decay for all parameters but
    biases and norms. Hyperparameters that are not passed (`lr`, and `betas` and `eps` for Adam and
    AdamW) are taken from the TrainingArguments. Without the Trainer, the weight decay is the
    argument `weight_decay` (default 0).
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        whole_checkpoints: bool | None = None,
        **kwargs: Any,
    ) -> PlacedOptimizer:
        """Make the optimizer and place the model.

        Args:
            model: The model to train.
            optimizer: The class of the optimizer: a class of torch, or another elementwise torch
                optimizer (see `roadtrain check-rule`).
            whole_checkpoints: If True, the file optimizer.pt of a checkpoint has the whole state,
                and the checkpoint does not need the store. If False, optimizer.pt only refers to a
                step of the store. The default is True if the state is in RAM, and False otherwise.
            **kwargs: Options of `place`. Options that `place` does not have are passed to the
                optimizer's class.

        Returns:
            The placed optimizer.

        Raises:
            ConfigError: `optimizer` is not a class of optimizers. `place` raises other errors.
        """
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise ConfigError(
                f"{optimizer!r} is no optimizer class", hint="pass a class like torch.optim.AdamW"
            )
        options = {key: value for key, value in kwargs.items() if key in OPTIONS}
        own = {key: value for key, value in kwargs.items() if key not in OPTIONS}
        frame = sys._getframe(1)
        groups = _trainers_groups(frame, model)
        if groups is None or "weight_decay" in own:
            groups = groups_of(model, own.pop("weight_decay", 0.0))
        made = optimizer([g for g in groups if g["params"]], **_arguments(frame, optimizer) | own)
        placed = place(model, made, **options)
        store = store_of(options.get("store"))
        in_ram = isinstance(store, Memory) and options.get("servers") is None
        placed.whole_states = in_ram if whole_checkpoints is None else whole_checkpoints
        if (trainer := _of_trainer(frame, "self")) is not None:
            with undone_on_error(placed.close):
                follow(trainer, placed, frame)
        return placed


def groups_of(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of trainable parameters. The second group has the biases and the parameters
    of norms, without weight decay. The first group has all others, with `weight_decay`."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    norms = {
        id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters()
    }
    plain = {
        id(p)
        for name, p in named
        if id(p) in norms or any(word in name.lower() for word in NOT_DECAYED)
    }
    return [
        {"params": [p for _, p in named if id(p) not in plain], "weight_decay": weight_decay},
        {"params": [p for _, p in named if id(p) in plain], "weight_decay": 0.0},
    ]


def _of_trainer(frame: FrameType, name: str) -> Any:
    """Return the local variable `name` of `frame` if the frame belongs to code of transformers or
    TRL, else None."""
    ours = str(frame.f_globals.get("__name__", "")).startswith(("transformers.", "trl."))
    return frame.f_locals.get(name) if ours else None


def _trainers_groups(frame: FrameType, model: nn.Module) -> list[dict[str, Any]] | None:
    """Return the parameter groups that the Trainer has just made, read from its frame, or None if
    they do not cover the model."""
    groups = _of_trainer(frame, "optimizer_grouped_parameters")
    needed = {id(p) for p in model.parameters() if p.requires_grad}
    if not isinstance(groups, Sequence) or not all(
        isinstance(g, dict) and "params" in g for g in groups
    ):
        return None
    return (
        [dict(g) for g in groups]
        if {id(p) for g in groups for p in g["params"]} == needed
        else None
    )


def _arguments(frame: FrameType, optimizer: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the optimizer's hyperparameters from the Trainer's TrainingArguments, or {} without a
    Trainer."""
    arguments = getattr(_of_trainer(frame, "self"), "args", None)
    if arguments is None:
        return {}
    out = {"lr": arguments.learning_rate}
    if optimizer in (torch.optim.Adam, torch.optim.AdamW):
        out |= {
            "betas": (arguments.adam_beta1, arguments.adam_beta2),
            "eps": arguments.adam_epsilon,
        }
    return out
