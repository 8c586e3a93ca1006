"""Cuts: find where a model can be cut into stages, and the tensors and parameters of each stage.
Does NOT read the values of the user's parameters.

One forward is recorded, with parameters and all tensors computed from them on the `meta` device,
which takes no memory and no time. A cut is the point after a block: the tensors that the block
returns cross the cut. The parameters of a stage are found by tracing its results back to the cut
before it. No cut is possible where a tensor bypasses it (a skip connection). An unused parameter
belongs to the stage of its block, or else to the first stage. A block that cannot run on `meta`
(experts that sort their tokens) runs once on the host, on zeros.

Assumes that blocks run in the recorded order, each once, and that a block returns the same shapes
in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from roadtrain.errors import ModelError
from roadtrain.streaming.leaves import distinct, flatten
from roadtrain.streaming.split import split


@dataclass(frozen=True)
class BlockOutput:
    """The return value of a block: its tensors, and the structure that contains them."""

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[tuple[int, Any], ...]  # (index of a tensor, None) or (-1, the leaf itself)
    spec: pytree.TreeSpec

    @staticmethod
    def of(value: Any) -> BlockOutput:
        leaves, spec = flatten(value)
        tensors, form = distinct(leaves)
        return BlockOutput(tuple(tensors), tuple(form), spec)

    @property
    def shapes(self) -> tuple[torch.Tensor, ...]:
        """Empty tensors on `meta`, with the shape, dtype and requires_grad of each tensor of the
        output."""
        return tuple(
            torch.empty(x.shape, dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
            for x in self.tensors
        )

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the structure that the block returned, with `tensors` in place of the original
        tensors."""
        leaves = [tensors[i] if i >= 0 else leaf for i, leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Segment:
    """Blocks [begin, stop) of a model, and all other code that runs between the cut before the
    first of these blocks and the cut after the last one."""

    begin: int
    stop: int

    def __str__(self) -> str:
        return f"blocks {self.begin} to {self.stop - 1}"


class DataFlow(TorchDispatchMode):
    """The graph of a forward: which tensors were computed from which other tensors. Its nodes are
    numbers.

    Operations with a `meta` argument run on `meta`, and others on the host, so that the model can
    read their results (positions, masks). Values that the model reads with `Tensor.item` are not
    traced.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # for each node, the nodes from which it was computed
        self._before: list[tuple[int, ...]] = []
        self._node_of: dict[StorageWeakRef, int] = {}
        self._paused = False
        self.draws = False  # whether an operation drew random numbers

    def node(self, tensor: torch.Tensor) -> int:
        """Return the number of the newest node of the tensor's storage; add one if there is
        none."""
        key = StorageWeakRef(tensor.untyped_storage())
        if key not in self._node_of:
            self._before.append(())
            self._node_of[key] = len(self._before) - 1
        return self._node_of[key]

    def computed(self, tensors: Iterable[torch.Tensor], of: Iterable[torch.Tensor]) -> None:
        """Record that `tensors` were computed from the tensors `of`."""
        before = tuple({self.node(x) for x in of})
        for x in tensors:
            self._before.append(before)
            self._node_of[StorageWeakRef(x.untyped_storage())] = len(self._before) - 1

    def ancestors(self, ends: Sequence[int], stops: Sequence[int]) -> set[int]:
        """Return the nodes `ends` and all nodes from which they were computed, without the nodes
        `stops` and nodes found only through them."""
        todo, found = [*ends], set[int]()
        while todo:
            node = todo.pop()
            if node not in found and node not in stops:
                found.add(node)
                todo += self._before[node]
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Add no operations to the graph while this context is active."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch calls this method for each operation
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.is_meta for x in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        elif kwargs.get("device") is not None and not self._paused:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        value = func(*args, **kwargs)
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        if not self._paused:
            made = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
            self.computed(made, () if _only_shape(func) else tensors)
        return value


class Cuts:
    """The recorded forward of `model`, and its possible cuts.

    blocks: the names of the model's blocks, in the order in which they run. returned: the output of
    each block. blocks_before: for each module, by name, the number of blocks that had returned when
    the module first ran.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        blocks: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Record the forward of one micro-batch.

        args, kwargs: the model's arguments for the micro-batch. blocks: names or patterns of the
        blocks (default: found as in `place`). dtype: the compute dtype of floating-point parameters
        (default: unchanged). Raises ModelError if the forward fails on `meta`, if a block runs
        twice or not at all, or if no result has a gradient. Raises ConfigError for a block name
        that matches nothing.
        """
        parts = split(model, blocks)
        self._dtype = dtype
        self._block_of = {name: part.name for part in parts.blocks for name, _ in part.params}
        self._flow = DataFlow()
        self._name_of: dict[int, str] = {}  # node of a parameter -> the parameter's name
        self._of_block: dict[int, int] = {}  # node -> number of the block that returned it
        self._crossed: list[list[int]] = []  # for each block, the nodes that it returned
        self._alike: dict[Any, BlockOutput] = {}  # kind of block that fails on `meta` -> its output
        self.blocks: list[str] = []
        self.returned: list[BlockOutput] = []
        self.blocks_before: dict[str, int] = {}
        result = self._record(model, parts.blocks, args, kwargs)
        self.draws = self._flow.draws  # whether the forward draws random numbers, as dropout does
        if missing := [part.name for part in parts.blocks if part.name not in self.blocks]:
            raise ModelError(
                f"{len(missing)} of the model's {len(parts.blocks)} blocks did not run"
                f" ({missing[0]!r} is the first)",
                hint="name the blocks that run with blocks=[...]",
            )
        self._index = {name: i for i, name in enumerate(self.blocks)}
        leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._results = [self._flow.node(x) for x in leaves if x.requires_grad]
        if not self._results:
            raise ModelError(f"{type(model).__name__} returned no tensor that has a gradient")
        self._unused: dict[str, int] = {}  # name of an unused parameter -> number of its block
        self._unused = {
            name: self._index.get(self._block_of.get(name, ""), 0)
            for name in {*self._name_of.values()} - self.parameters(Segment(0, len(self.blocks)))
        }

    def dtype_of(self, p: torch.Tensor) -> torch.dtype:
        """Return the compute dtype of a parameter."""
        cast_to = self._dtype if p.is_floating_point() else None
        return p.dtype if cast_to is None else cast_to

    def crossing(self, cut: int) -> tuple[torch.Tensor, ...]:
        """Return empty tensors on `meta`, with the shapes and dtypes of the tensors that cross the
        cut after block `cut` - 1."""
        return self.returned[cut - 1].shapes

    def parameters(self, segment: Segment) -> frozenset[str]:
        """Return the names of the parameters that `segment` uses. A tied parameter has the first of
        its names. Raises ModelError if the segment uses a result of an earlier block that does not
        cross the cut before the segment."""
        last = segment.stop == len(self.blocks)
        ends = self._results if last else self._crossed[segment.stop - 1]
        stops = self._crossed[segment.begin - 1] if segment.begin else []
        nodes = self._flow.ancestors(ends, stops)
        names = {self._name_of[node] for node in nodes & self._name_of.keys()}
        past = {self._of_block[node] for node in nodes & self._of_block.keys()}
        past |= {self._index[self._block_of[name]] for name in names & self._block_of.keys()}
        if past := {block for block in past if block < segment.begin}:
            raise ModelError(
                f"no cut is possible before {segment}: block {self.blocks[segment.begin - 1]!r}"
                f" does not pass on results of {self.blocks[max(past)]!r} that these blocks use",
                hint="keep these blocks in one stage, or cut elsewhere with stages=[...]",
            )
        unused = {n for n, block in self._unused.items() if segment.begin <= block < segment.stop}
        return frozenset(names | unused)

    def _record(
        self,
        model: nn.Module,
        parts: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        values: dict[int, torch.Tensor] = {}
        for name, p in model.named_parameters():
            copy = torch.empty_like(p, device="meta", dtype=self.dtype_of(p))
            copy.requires_grad_(p.is_floating_point())
            values[id(p)] = copy
            self._name_of[self._flow.node(copy)] = name
        inputs = pytree.tree_map_only(torch.Tensor, _on_host, (tuple(args), dict(kwargs)))
        values |= {id(b): _on_host(b) for b in model.buffers()}
        try:
            with torch.enable_grad(), self._watched(model, parts), _held(model, values), self._flow:
                return model(*inputs[0], **inputs[1])
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as cause:
            raise ModelError(
                f"{type(model).__name__}'s forward failed on the meta device: {cause}",
                hint="outside of its blocks, the forward of a model in stages must not use the"
                " values of parameters for shapes or branches",
            ) from cause

    @contextmanager
    def _watched(self, model: nn.Module, parts: Sequence[Any]) -> Iterator[None]:
        """Record the blocks (`parts`) and modules that run while this context is active."""
        own = {part.module: part.module.__dict__.get("forward") for part in parts}
        named = model.named_modules()
        hooks = [m.register_forward_pre_hook(partial(self._begins, name)) for name, m in named]
        for part in parts:
            hooks.append(part.module.register_forward_hook(partial(self._returns, part.name)))
            part.module.forward = partial(self._through, part.module, part.module.forward)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, forward in own.items():
                module.__dict__.pop("forward")
                if forward is not None:
                    module.forward = forward

    def _begins(self, name: str, module: nn.Module, args: Any) -> None:
        self.blocks_before.setdefault(name, len(self.blocks))

    def _returns(self, name: str, module: nn.Module, args: Any, value: Any) -> Any:
        if name in self.blocks:
            raise ModelError(
                f"block {name!r} runs twice in one forward, which stages do not support",
                hint="name larger blocks with blocks=[...]",
            )
        found = BlockOutput.of(value)
        # copies have nodes of their own, even if the block returns its input
        copies = tuple(x.clone() for x in found.tensors)
        self._crossed.append([self._flow.node(x) for x in copies])
        self._of_block |= dict.fromkeys(self._crossed[-1], len(self.blocks))
        self.blocks.append(name)
        self.returned.append(BlockOutput(copies, found.leaves, found.spec))
        return self.returned[-1].rebuild(copies)

    def _through(self, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a block. If it cannot run on `meta`, return empty outputs in the shapes that it
        returns on the host."""
        try:
            return forward(*args, **kwargs)
        except RuntimeError:
            leaves, spec = flatten((args, kwargs))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            parameters = [*block.parameters()]
            kind = type(block), *((x.shape, x.dtype) for x in (*tensors, *parameters))
            if kind not in self._alike:
                # a key-value cache is left out, because the failed call has already filled it
                rest = [None if hasattr(x, "get_seq_length") else x for x in leaves]
                inputs = [_zeros(x) if isinstance(x, torch.Tensor) else x for x in rest]
                values = {id(x): _zeros(x) for x in (*parameters, *block.buffers())}
                a, k = pytree.tree_unflatten(inputs, spec)
                with self._flow.paused(), _held(block, values):
                    self._alike[kind] = BlockOutput.of(forward(*a, **k))
            with self._flow.paused():
                copies = self._alike[kind].shapes
            self._flow.computed(copies, [*tensors, *parameters])
            return self._alike[kind].rebuild(copies)


@contextmanager
def _held(module: nn.Module, values: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace a module's parameters and buffers while this context is active. values: the
    replacement of each tensor, by the `id` of the original tensor."""
    # torch's functional_call is not used, because it does not restore a module that has two names
    before = [(held, {**held}) for m in module.modules() for held in (m._parameters, m._buffers)]
    for held, own in before:
        held |= {key: values[id(x)] for key, x in own.items() if x is not None}
    try:
        yield
    finally:
        for held, own in before:
            held.clear()
            held |= own


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros on the host if `tensor` is on `meta`, otherwise `tensor`."""
    if not tensor.is_meta:
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the host, to which the model may write. A `meta` tensor stays on
    `meta`."""
    return tensor.detach() if tensor.is_meta else tensor.detach().to("cpu", copy=True)


def _only_shape(func: Any) -> bool:
    """Return whether an operation uses only the shape, dtype and device of its arguments."""
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")
