"""The shape of any nn.Module, also on `meta`: its blocks' parameters, FLOPs and activations, from
one forward.

FLOPs are those that torch's own counter knows (products, convolutions, attention). Saved bytes are
those of the tensors that autograd keeps, each once and no parameters. The root block is split into
what runs before the first block and what runs after the last. Bytes are scaled to 2-byte elements
where the model has 4.
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
    """Of a sample of one forward, by block ("before" and "after": of the root, before the first
    block and after): `flops`, `saved` bytes, `inputs` bytes; `logits`: elements of the output,
    `hidden` and `tokens` of what passes.
    """

    flops: Mapping[str, float]
    saved: Mapping[str, float]
    inputs: Mapping[str, float]
    logits: float
    hidden: int
    tokens: int

    def blocks(
        self, parts: Split, shape: Callable[[str, str, int], BlockShape]
    ) -> tuple[BlockShape, ...]:
        """What `shape` makes of the name, the key in these counts and the parameters of each: what
        runs before the first block, the blocks, and what runs after the last."""
        root, before = self._root(parts)
        layers = [
            shape(f"layer.{i}", part.name, sum(p.numel() for _, p in part.params))
            for i, part in enumerate(parts.blocks)
        ]
        output = replace(shape("output", "after", root - before), logits=self.logits)
        return (shape("embedding", "before", before), *layers, output)

    @staticmethod
    def _root(parts: Split) -> tuple[int, int]:
        """Parameters of the root block, and of these the embeddings'."""
        own = {id(p): p.numel() for _, p in parts.root.params}
        modules = parts.root.module.modules()
        tables = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
        return sum(own.values()), sum(own.get(key, 0) for key in tables)


def counted(
    model: nn.Module,
    parts: Split,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    samples: int,
    sized: bool = False,
) -> Counts:
    """One forward of `samples` samples, with what it does counted. `sized`: each element has its
    dtype's bytes, else fp32 counts as 2. Raises what the model's forward raises."""
    noted = _Noted(model, samples, sized)
    hooks: list[Any] = []
    for part in parts.blocks:
        enter = partial(noted.enter, part.name)
        hooks.append(part.module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(part.module.register_forward_hook(noted.leave))
    keeping = torch.autograd.graph.saved_tensors_hooks(noted.pack, lambda t: t)
    try:
        with noted.counter, torch.enable_grad(), keeping:
            result = model(*args, **kwargs)
            noted.note()
    finally:
        for hook in hooks:
            hook.remove()
    logits = result if isinstance(result, torch.Tensor) else getattr(result, "logits", None)
    elements = 0.0
    if isinstance(logits, torch.Tensor) and logits.is_floating_point():
        elements = logits.numel() / samples
    flops, saved, inputs = (
        {key: n / samples for key, n in one.items()}
        for one in (noted.flops, noted.saved, noted.inputs)
    )
    return Counts(flops, saved, inputs, elements, *noted.hidden)


class _Noted:
    """What hooks see of a forward, by the block that runs. `hidden`: width and tokens of what
    passes between blocks."""

    def __init__(self, model: nn.Module, samples: int, sized: bool) -> None:
        self.samples, self.sized = samples, sized
        self.own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
        self.seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self.flops, self.saved = defaultdict[str, float](float), defaultdict[str, float](float)
        self.inputs: dict[str, float] = {}
        self.running, self.hidden = ["before"], (0, 1)
        self.counter, self.counted = FlopCounterMode(display=False), 0.0
        self.kept: list[torch.Tensor] = []  # so that no other gets their memory

    def note(self) -> None:
        total = float(self.counter.get_total_flops())
        self.flops[self.running[-1]] += total - self.counted
        self.counted = total

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # views of one memory keep it once
        if id(tensor) not in self.own and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.kept.append(tensor)
            width = tensor.element_size()
            elements = min(tensor.numel(), storage.nbytes() // width)
            halved = tensor.dtype == torch.float32 and not self.sized
            self.saved[self.running[-1]] += (2 if halved else width) * elements
        return tensor

    def enter(
        self, block: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self.note()
        self.running.append(block)
        tensors = [t for t in (*given, *named.values()) if isinstance(t, torch.Tensor)]
        nbytes = sum(2 * t.numel() for t in tensors if t.is_floating_point())
        self.inputs.setdefault(block, float(nbytes))
        if tensors and tensors[0].dim() > 1 and tensors[0].is_floating_point():
            whole, last = tensors[0].numel() // self.samples, tensors[0].shape[-1]
            # a picture has no tokens
            self.hidden = (last, max(1, whole // last)) if tensors[0].dim() == 3 else (whole, 1)

    def leave(self, module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
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
    """The ModelShape of `model(*args)`, a batch of `samples`. `blocks`: as in place().
    Runs one forward, on `meta` without memory or time. Raises ModelError where the model's own
    forward fails, or gives no tensor that has a gradient."""
    parts = split(model, blocks)
    try:
        found = counted(model, parts, args, {}, samples=samples)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as cause:
        raise ModelError(
            f"{type(model).__name__}'s forward failed: {cause}",
            hint="give the arguments that the model takes, on its own device",
        ) from cause

    def block(title: str, key: str, params: int) -> BlockShape:
        flops, saved = found.flops.get(key, 0.0), found.saved.get(key, 0.0)
        return BlockShape(title, params, flops, saved, found.inputs.get(key, 0.0))

    shapes, title = found.blocks(parts, block), name or type(model).__name__
    return ModelShape(title, shapes, found.tokens, found.hidden)
