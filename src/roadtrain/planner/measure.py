"""Measure the shape of any nn.Module with one forward pass: the parameters, FLOPs and activations
of its blocks. The module may be on the device `meta`.

torch's FlopCounterMode counts the FLOPs (of products, convolutions and attention). Saved bytes are
the bytes of the tensors that autograd keeps for backward, without parameters. The root block is
split into the part that runs before the first block and the part that runs after the last block. By
default, fp32 elements count as 2 bytes, as if the model had 16-bit elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

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
        root = {id(p): p.numel() for _, p in parts.root.params}
        modules = parts.root.module.modules()
        tables = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
        before = sum(root.get(key, 0) for key in tables)
        layers = [
            shape(f"layer.{i}", part.name, sum(p.numel() for _, p in part.params))
            for i, part in enumerate(parts.blocks)
        ]
        output = replace(shape("output", "after", sum(root.values()) - before), logits=self.logits)
        return (shape("embedding", "before", before), *layers, output)


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
    counter = _Counter(model, samples, sized)
    blocks = [(part.name, part.module) for part in parts.blocks]
    runs = {
        block: partial(counter.run, name, block.forward, _kind(block)) for name, block in blocks
    }
    keeping = torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda t: t)
    with replaced_forwards(runs), counter, torch.enable_grad(), keeping:
        result = model(*args, **kwargs)
    logits = result if isinstance(result, torch.Tensor) else getattr(result, "logits", None)
    elements = 0.0
    if isinstance(logits, torch.Tensor) and logits.is_floating_point():
        elements = logits.numel() / samples
    flops, saved, inputs = (
        {key: n / samples for key, n in counts.items()}
        for counts in (counter.flops, counter.saved, counter.inputs)
    )
    return Counts(flops, saved, inputs, elements, *counter.hidden)


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the `with` statement, replace the forward of each of these modules."""
    own = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, before in own.items():
            del module.forward
            if before is not None:
                module.forward = before


class _Counter(TorchDispatchMode):
    """Counts the FLOPs and bytes of each block during a forward pass. `block`: the block that runs,
    or "before" or "after". `hidden`: the width and the number of tokens of the activations between
    blocks."""

    def __init__(self, model: nn.Module, samples: int, sized: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples, self.sized = samples, sized
        self.seen = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.flops, self.saved = defaultdict[str, float](float), defaultdict[str, float](float)
        self.inputs: dict[str, float] = {}
        self.block, self.hidden = "before", (0, 1)
        # kind and inputs of blocks -> FLOPs, saved bytes and result of each run
        self.runs = defaultdict[Any, list[tuple[float, float, Any]]](list)
        self.kept: list[Any] = []  # references that keep counted memory from being reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1  # all elements of a mask are 1
        result = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(getattr(func, "_overloadpacket", func)):
            self.flops[self.block] += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # views of the same memory are counted once
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.kept.append(tensor)
            width = tensor.element_size()
            elements = min(tensor.numel(), storage.nbytes() // width)
            halved = tensor.dtype == torch.float32 and not self.sized
            self.saved[self.block] += (2 if halved else width) * elements
        return tensor

    def run(
        self, block: str, forward: Callable[..., Any], kind: str, *args: Any, **named: Any
    ) -> Any:
        """Run the forward of a block. Where two blocks of this kind have run with such inputs, copy
        the counts and the result of the second: the first also counts what all blocks share."""
        self._note_inputs(block, [*args, *named.values()])
        key = kind, repr([_plain(leaf) for leaf in tree_leaves((args, named))])
        earlier, self.block = self.runs[key], block
        flops, saved = self.flops[block], self.saved[block]
        if len(earlier) < 2:
            self.kept.append((args, named))  # an object that is kept keeps its id
            result = forward(*args, **named)
            earlier.append((self.flops[block] - flops, self.saved[block] - saved, result))
        else:
            more_flops, more_saved, result = earlier[1]
            self.flops[block], self.saved[block] = flops + more_flops, saved + more_saved
            result = tree_map_only(torch.Tensor, torch.clone, result)
        self.block = "after"
        return result

    def _note_inputs(self, block: str, inputs: Sequence[Any]) -> None:
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        nbytes = sum(2 * t.numel() for t in tensors if t.is_floating_point())
        self.inputs.setdefault(block, float(nbytes))
        if tensors and tensors[0].dim() > 1 and tensors[0].is_floating_point():
            whole, last = tensors[0].numel() // self.samples, tensors[0].shape[-1]
            # an image has no tokens
            self.hidden = (last, max(1, whole // last)) if tensors[0].dim() == 3 else (whole, 1)


def _kind(module: nn.Module) -> str:
    """Describe what a module computes, but not with which values: blocks of the same kind have the
    same counts."""
    usual = {*vars(nn.Module()), "layer_idx"} - {"training"}
    parts = []
    for name, part in module.named_modules():
        own = [(key, _plain(value)) for key, value in vars(part).items() if key not in usual]
        tensors = [_plain(p) for p in (*part._parameters.values(), *part._buffers.values())]
        parts.append((name, type(part), own, tensors))
    return repr(parts)


def _plain(value: Any) -> object:
    """Return what counts depend on: the value, a tensor's shape, or the identity of an object."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    return value if isinstance(value, int | float | str | tuple | None) else id(value)


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
