"""The shape of any nn.Module, also on `meta`: its blocks' parameters, FLOPs and activations, from one forward.

FLOPs are those that torch's own counter knows (products, convolutions, attention). Saved bytes are those of the tensors
that autograd keeps, each once and no parameters. The root block is split into what runs before the first block and what
runs after the last. Bytes are scaled to 2-byte elements where the model has 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from roadtrain.errors import ModelError
from roadtrain.model.split import split
from roadtrain.spec.shapes import BlockShape, ModelShape


def shape_of(model: nn.Module, *args: Any, samples: int, blocks: Sequence[str] | None = None, name: str = "",
             kwargs: Mapping[str, Any] | None = None) -> ModelShape:
    """The ModelShape of `model(*args, **kwargs)`, a batch of `samples`. `blocks`: as in place(). Runs one forward, on
    `meta` without memory or time. Raises ModelError where the model's own forward fails, or gives no tensor that has a
    gradient."""
    parts = split(model, blocks)
    own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    storages = {p.untyped_storage()._cdata for p in model.parameters()}
    flops, saved, inputs = dict[str, float](), dict[str, float](), dict[str, float]()
    running, seen = ["before"], set[int]()
    last = {"flops": 0.0}
    hidden = [0, 1]
    counter = FlopCounterMode(display=False)

    def note() -> None:
        total = float(counter.get_total_flops())
        flops[running[-1]] = flops.get(running[-1], 0.0) + total - last["flops"]
        last["flops"] = total

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in own and tensor.untyped_storage()._cdata not in storages and id(tensor) not in seen:
            seen.add(id(tensor))
            kept.append(tensor)  # so that no other gets its id
            size = 2 if tensor.dtype == torch.float32 else tensor.element_size()
            saved[running[-1]] = saved.get(running[-1], 0.0) + size * tensor.numel()
        return tensor

    def enter(block: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            note()
            running.append(block)
            tensors = [t for t in (*given, *named.values()) if isinstance(t, torch.Tensor)]
            inputs.setdefault(block, float(sum(2 * t.numel() for t in tensors if t.is_floating_point())))
            if tensors and tensors[0].dim() > 1 and tensors[0].is_floating_point():
                hidden[0], hidden[1] = tensors[0].shape[-1], tensors[0].numel() // tensors[0].shape[-1] // samples

        return hook

    def leave(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        note()
        running.pop()
        running[0] = "after"

    kept: list[torch.Tensor] = []
    hooks = [part.module.register_forward_pre_hook(enter(part.name), with_kwargs=True) for part in parts.blocks]
    hooks += [part.module.register_forward_hook(leave) for part in parts.blocks]
    try:
        with counter, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(*args, **(kwargs or {}))
            note()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as cause:
        raise ModelError(f"{type(model).__name__}'s forward failed: {cause}",
                         hint="give the arguments that the model takes, on its own device") from cause
    finally:
        for hook in hooks:
            hook.remove()
    root = sum(p.numel() for _, p in parts.root.params)
    before = sum(m.weight.numel() for m in parts.root.module.modules() if isinstance(m, nn.Embedding)
                 and any(m.weight is p for _, p in parts.root.params))

    def block(title: str, key: str, params: int) -> BlockShape:
        return BlockShape(title, params, flops.get(key, 0.0) / samples, saved.get(key, 0.0) / samples,
                          inputs.get(key, 0.0) / samples)

    return ModelShape(
        name or type(model).__name__,
        (block("embedding", "before", before), *(block(f"layer.{i}", part.name, sum(p.numel() for _, p in part.params))
                                                 for i, part in enumerate(parts.blocks)),
         block("output", "after", root - before)), max(1, hidden[1]), hidden[0], source="measured")
