"""The shape of any nn.Module, also on `meta`: its blocks' parameters, FLOPs and activations, from
one forward.

FLOPs are those that torch's own counter knows (products, convolutions, attention). Saved bytes are
those of the tensors that autograd keeps, each once and no parameters. The root block is split into
what runs before the first block and what runs after the last. Bytes are scaled to 2-byte elements
where the model has 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
        own = {id(p) for _, p in parts.root.params}
        tables = {
            id(m.weight): m.weight.numel()
            for m in parts.root.module.modules()
            if isinstance(m, nn.Embedding)
        }
        return sum(p.numel() for _, p in parts.root.params), sum(
            n for key, n in tables.items() if key in own
        )


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
    own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    storages = {p.untyped_storage()._cdata for p in model.parameters()}
    flops, saved, inputs = dict[str, float](), dict[str, float](), dict[str, float]()
    running, seen = ["before"], set[int]()
    before = {"flops": 0.0}
    hidden = [0, 1]
    counter = FlopCounterMode(display=False)

    def note() -> None:
        total = float(counter.get_total_flops())
        flops[running[-1]] = flops.get(running[-1], 0.0) + total - before["flops"]
        before["flops"] = total

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata  # views of one memory keep it once
        if id(tensor) not in own and storage not in storages and storage not in seen:
            seen.add(storage)
            kept.append(tensor)  # so that no other gets its memory
            size = 2 if tensor.dtype == torch.float32 and not sized else tensor.element_size()
            elements = min(
                tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size()
            )
            saved[running[-1]] = saved.get(running[-1], 0.0) + size * elements
        return tensor

    def enter(block: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            note()
            running.append(block)
            tensors = [t for t in (*given, *named.values()) if isinstance(t, torch.Tensor)]
            inputs.setdefault(
                block, float(sum(2 * t.numel() for t in tensors if t.is_floating_point()))
            )
            if tensors and tensors[0].dim() > 1 and tensors[0].is_floating_point():
                whole, last = tensors[0].numel() // samples, tensors[0].shape[-1]
                # a picture has no tokens
                hidden[:] = (last, whole // last) if tensors[0].dim() == 3 else (whole, 1)

        return hook

    def leave(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        note()
        running.pop()
        running[0] = "after"

    kept: list[torch.Tensor] = []
    hooks = [
        part.module.register_forward_pre_hook(enter(part.name), with_kwargs=True)
        for part in parts.blocks
    ]
    hooks += [part.module.register_forward_hook(leave) for part in parts.blocks]
    try:
        with (
            counter,
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            result = model(*args, **kwargs)
            note()
    finally:
        for hook in hooks:
            hook.remove()
    logits = result if isinstance(result, torch.Tensor) else getattr(result, "logits", None)
    elements = (
        logits.numel() / samples
        if isinstance(logits, torch.Tensor) and logits.is_floating_point()
        else 0.0
    )
    flops, saved, inputs = (
        {key: n / samples for key, n in one.items()} for one in (flops, saved, inputs)
    )
    return Counts(flops, saved, inputs, elements, hidden[0], max(1, hidden[1]))


def shape_of(
    model: nn.Module,
    *args: Any,
    samples: int,
    blocks: Sequence[str] | None = None,
    name: str = "",
    kwargs: Mapping[str, Any] | None = None,
) -> ModelShape:
    """The ModelShape of `model(*args, **kwargs)`, a batch of `samples`. `blocks`: as in place().
    Runs one forward, on `meta` without memory or time. Raises ModelError where the model's own
    forward fails, or gives no tensor that has a gradient."""
    parts = split(model, blocks)
    try:
        found = counted(model, parts, args, kwargs or {}, samples=samples)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as cause:
        raise ModelError(
            f"{type(model).__name__}'s forward failed: {cause}",
            hint="give the arguments that the model takes, on its own device",
        ) from cause

    def block(title: str, key: str, params: int) -> BlockShape:
        return BlockShape(
            title,
            params,
            found.flops.get(key, 0.0),
            found.saved.get(key, 0.0),
            found.inputs.get(key, 0.0),
        )

    return ModelShape(
        name or type(model).__name__,
        found.blocks(parts, block),
        found.tokens,
        found.hidden,
        source="measured",
    )
