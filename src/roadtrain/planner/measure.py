"""Measure the shape of any nn.Module with one forward pass: the parameters, FLOPs and activations
of its blocks. The module may be on the device `meta`.

torch's FlopCounterMode counts the FLOPs (of products, convolutions and attention). Saved bytes are
the bytes of the tensors that autograd keeps for backward, without parameters. The root block is
split into the part that runs before the first block and the part that runs after the last block. By
default, fp32 elements count as 2 bytes, as if the model had 16-bit elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from roadtrain.config.models import BlockShape, ModelShape
from roadtrain.errors import ModelError
from roadtrain.streaming.split import Split, split


@dataclass(frozen=True)
class Counts:
    """The counts of one forward pass, per sample. Each mapping has one number for each block, by
    the block's name. "before" and "after" stand for what the root block runs before the first block
    and after the last block."""

    flops: Mapping[str, float]
    saved: Mapping[str, float]  # bytes that autograd keeps
    inputs: Mapping[str, float]  # bytes of the block's inputs
    logits: float  # number of elements of the output
    hidden: int  # width of the activations between blocks
    tokens: int  # number of tokens of a sample between blocks

    def blocks(
        self, parts: Split, shape: Callable[[str, str, int], BlockShape]
    ) -> tuple[BlockShape, ...]:
        """Return the shapes of the blocks, between those of the root block's parts before and after
        them. `shape`: returns the shape of a part from its name, its key in these counts, and its
        number of parameters."""
        root, before = self._root(parts)
        layers = [
            shape(f"layer.{i}", part.name, sum(p.numel() for _, p in part.params))
            for i, part in enumerate(parts.blocks)
        ]
        output = replace(shape("output", "after", root - before), logits=self.logits)
        return (shape("embedding", "before", before), *layers, output)

    @staticmethod
    def _root(parts: Split) -> tuple[int, int]:
        """Return the number of parameters of the root block, and how many of them are in
        embeddings."""
        own = {id(p): p.numel() for _, p in parts.root.params}
        modules = parts.root.module.modules()
        tables = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
        return sum(own.values()), sum(own.get(key, 0) for key in tables)


def count_forward(
    model: nn.Module,
    parts: Split,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    samples: int,
    sized: bool = False,
) -> Counts:
    """Run one forward pass of a model and return its counts.

    Args:
        model: The model.
        parts: The division of the model into blocks.
        args: The arguments of the model.
        kwargs: The keyword arguments of the model.
        samples: The number of samples in the arguments.
        sized: If True, elements have the size of their dtype. If False, fp32 elements count as
            2 bytes.
    """
    hooks = _Counter(model, samples, sized)
    handles: list[Any] = []
    for part in parts.blocks:
        enter = partial(hooks.enter, part.name)
        handles.append(part.module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(part.module.register_forward_hook(hooks.leave))
    keeping = torch.autograd.graph.saved_tensors_hooks(hooks.pack, lambda t: t)
    try:
        with hooks.counter, torch.enable_grad(), keeping:
            result = model(*args, **kwargs)
            hooks.note()
    finally:
        for hook in handles:
            hook.remove()
    logits = result if isinstance(result, torch.Tensor) else getattr(result, "logits", None)
    elements = 0.0
    if isinstance(logits, torch.Tensor) and logits.is_floating_point():
        elements = logits.numel() / samples
    flops, saved, inputs = (
        {key: n / samples for key, n in counts.items()}
        for counts in (hooks.flops, hooks.saved, hooks.inputs)
    )
    return Counts(flops, saved, inputs, elements, *hooks.hidden)


class _Counter:
    """The hooks that count the FLOPs and bytes of each block during a forward pass. `hidden`: the
    width and the number of tokens of the activations between blocks."""

    def __init__(self, model: nn.Module, samples: int, sized: bool) -> None:
        self.samples, self.sized = samples, sized
        self.own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
        self.seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self.flops, self.saved = defaultdict[str, float](float), defaultdict[str, float](float)
        self.inputs: dict[str, float] = {}
        self.running, self.hidden = ["before"], (0, 1)
        self.counter, self.counted = FlopCounterMode(display=False), 0.0
        self.kept: list[torch.Tensor] = []  # references that keep counted memory from being reused

    def note(self) -> None:
        total = float(self.counter.get_total_flops())
        self.flops[self.running[-1]] += total - self.counted
        self.counted = total

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # views of the same memory are counted once
        if id(tensor) not in self.own and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.kept.append(tensor)
            width = tensor.element_size()
            elements = min(tensor.numel(), storage.nbytes() // width)
            halved = tensor.dtype == torch.float32 and not self.sized
            self.saved[self.running[-1]] += (2 if halved else width) * elements
        return tensor

    def enter(
        self, block: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self.note()
        self.running.append(block)
        tensors = [t for t in (*args, *named.values()) if isinstance(t, torch.Tensor)]
        nbytes = sum(2 * t.numel() for t in tensors if t.is_floating_point())
        self.inputs.setdefault(block, float(nbytes))
        if tensors and tensors[0].dim() > 1 and tensors[0].is_floating_point():
            whole, last = tensors[0].numel() // self.samples, tensors[0].shape[-1]
            # an image has no tokens
            self.hidden = (last, max(1, whole // last)) if tensors[0].dim() == 3 else (whole, 1)

    def leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self.note()
        self.running.pop()
        self.running[0] = "after"


def shape_of(
    model: nn.Module,
    *args: Any,
    samples: int,
    blocks: Sequence[str] | None = None,
    name: str = "",
) -> ModelShape:
    """Measure the shape of a model with one forward pass `model(*args)`. If the model is on the
    device `meta`, the pass takes no memory and almost no time.

    Args:
        model: The model.
        args: The arguments of the model, a batch.
        samples: The number of samples in the batch.
        blocks: The names of the blocks, as in place().
        name: The name of the shape. If "", the name of the model's class is used.

    Raises ModelError if the forward pass fails.
    """
    parts = split(model, blocks)
    try:
        found = count_forward(model, parts, args, {}, samples=samples)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as cause:
        raise ModelError(
            f"{type(model).__name__}'s forward failed: {cause}",
            hint="pass the arguments that the model takes, on the model's device",
        ) from cause

    def block(title: str, key: str, params: int) -> BlockShape:
        flops, saved = found.flops.get(key, 0.0), found.saved.get(key, 0.0)
        return BlockShape(title, params, flops, saved, found.inputs.get(key, 0.0))

    shapes, title = found.blocks(parts, block), name or type(model).__name__
    return ModelShape(title, shapes, found.tokens, found.hidden)
