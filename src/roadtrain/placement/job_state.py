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
GENERATORS = ("torch", "cuda", "python", "numpy")
# hyperparameters that change no number of a placed optimizer
UNHEEDED = {"foreach", "fused", "capturable", "differentiable", "param_names"}


def generators(device: torch.device) -> dict[str, Any]:
    """The states of the process's random generators, that of `device` included."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    keys_as_tensor = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
        "python": random.getstate(),
        "numpy": [str(kind), keys_as_tensor, position, has_gauss, cached],
    }


def encode(
    model: nn.Module,
    device: torch.device,
    groups: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Stateful],
    history: str,
    **more: Any,
) -> bytes:
    """Encode the state of a job.

    Args:
        model: Its buffers are kept.
        device: Its generator is kept, beside the host's.
        groups: Parameter groups.
        extra: State dicts by name.
        history: Which values were loaded into the store.
        more: Entries that older stores lack.

    Raises:
        ConfigError: A value cannot be written as plain data.
    """
    state = generators(device) | {
        "buffers": persistent_buffers(model),
        "history": history,
        "groups": bare(groups),
        "extra": extra,
    }
    return plain.encode(state | more)


def decode(blob: bytes, step: int) -> dict[str, Any]:
    """What `encode` was given at `step`. Raises ForeignError where they are other bytes."""
    state = plain.decode(blob)
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise ForeignError(
            f"what was committed with step {step} is no state of a job: it is a "
            f"{type(state).__name__} without all of {', '.join(sorted(KEYS))}"
        )
    return state


def set_generators(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the process's random generators to what `generators` returned."""
    torch.set_rng_state(state["torch"])
    if (saved := state["cuda"]) and device.type == "cuda":
        # the first edition kept those of all devices that the process saw
        own = saved[min(device.index or 0, len(saved) - 1)]
        torch.cuda.set_rng_state(own, device)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def restore_buffers(state: Mapping[str, Any], model: nn.Module) -> None:
    """Set the model's buffers."""
    buffers = dict(model.named_buffers())
    for name, value in state["buffers"].items():
        buffers[name].copy_(value)


def bare(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def resumed_groups(
    state: Mapping[str, Any], script: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the parameter groups of a resumed step, and a line for each edited hyperparameter.

    A hyperparameter that the script gives as it did before has the value of the store, which the
    loop may have changed since. One that was edited has the script's value, unless a tracked
    scheduler had set it: the schedule goes on.
    """
    scheduled, groups = state.get("scheduled", False), [dict(group) for group in state["groups"]]
    found: dict[str, list[int]] = {}
    for number, (group, given) in enumerate(zip(groups, script)):
        before = given_as([group])[0] if "given" not in state else state["given"][number]
        for key, value in given_as([given])[0].items():
            if key not in before or key not in group or same(value, before[key]):
                group.setdefault(key, value)
                continue
            theirs = scheduled and not same(group[key], before[key])
            kept = theirs or (scheduled and key == "lr")
            now = "" if same(group[key], before[key]) else f" ({show(group[key])} now)"
            found.setdefault(
                f"{key} is {show(value)} in the script and {show(before[key])} in the store{now}: "
                + ("the store's schedule is used" if kept else "the script's is used"),
                [],
            ).append(number)
            if not kept:
                group[key] = value
                if key == "lr" and "initial_lr" in group:
                    group["initial_lr"] = value
        group |= {key: given[key] for key in UNHEEDED & given.keys()}
    return groups, [
        line if len(numbers) == len(groups) else f"parameter group {str(numbers)[1:-1]}: {line}"
        for line, numbers in found.items()
    ]


def given_as(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hyperparameters as a script gives them: `lr` before a scheduler changed it."""
    return [
        {
            key: group.get("initial_lr", value) if key == "lr" else value
            for key, value in group.items()
            if key not in {"params", "initial_lr"} | UNHEEDED
        }
        for group in groups
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two hyperparameters are equal, tensors or not, or two lists of tensors."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def show(value: Any) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict of `model` has, by their first names."""
    kept = {
        id(b)
        for m in model.modules()
        for n, b in m._buffers.items()
        if n not in m._non_persistent_buffers_set
    }
    return {name: b for name, b in model.named_buffers() if id(b) in kept}
