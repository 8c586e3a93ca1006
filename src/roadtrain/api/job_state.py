"""What a step consists of beside parameters and optimizer state: random generators, the model's
buffers, the parameter groups, and what the user named as `extra`.

It is committed with each step as bytes that hold no code (streaming/plain.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import Field
from torch import nn

from roadtrain.errors import ForeignError
from roadtrain.streaming import plain


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is committed with each step, as a scheduler or a data loader."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


HasState = Annotated[
    Stateful, Field(description="an object with state_dict() and load_state_dict()")
]
KEYS = {"torch", "cuda", "python", "numpy", "buffers", "groups", "extra"}


def encode(
    model: nn.Module,
    device: torch.device,
    groups: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Stateful],
    history: str,
) -> bytes:
    """`device`: whose generator is kept. `history`: which values were loaded into the store. Raises
    ConfigError for what cannot be written as plain data."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    keys_as_tensor = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state = {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
        "python": random.getstate(),
        "numpy": [str(kind), keys_as_tensor, position, has_gauss, cached],
        "buffers": persistent_buffers(model),
        "history": history,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        "extra": {name: thing.state_dict() for name, thing in extra.items()},
    }
    return plain.encode(state)


def decode(blob: bytes, step: int) -> dict[str, Any]:
    """What `encode` was given at `step`. Raises ForeignError where they are other bytes."""
    state = plain.decode(blob)
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise ForeignError(
            f"what was committed with step {step} is no state of a job: it is a "
            f"{type(state).__name__} without all of {', '.join(sorted(KEYS))}"
        )
    return state


def restore(
    state: Mapping[str, Any], model: nn.Module, device: torch.device, extra: Mapping[str, Any]
) -> None:
    """Sets the generators, the model's buffers and the objects in `extra`."""
    torch.set_rng_state(state["torch"])
    if (generators := state["cuda"]) and device.type == "cuda":
        # the first edition kept those of all devices that the process saw
        own = generators[min(device.index or 0, len(generators) - 1)]
        torch.cuda.set_rng_state(own, device)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    buffers = dict(model.named_buffers())
    for name, value in state["buffers"].items():
        buffers[name].copy_(value)
    for name, thing in extra.items():
        if name in state["extra"]:
            thing.load_state_dict(state["extra"][name])


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict of `model` has, by their first names."""
    kept = {
        id(b)
        for m in model.modules()
        for n, b in m._buffers.items()
        if n not in m._non_persistent_buffers_set
    }
    return {name: b for name, b in model.named_buffers() if id(b) in kept}
