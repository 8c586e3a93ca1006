"""Cuts: where a model can be cut into stages, what crosses a cut, and which parameters each stage
uses.

One forward is recorded; parameters and all that is computed of them are on `meta` (no memory, no
time), token numbers and masks have their values, since models look at these. A cut lies behind a
block: what crosses it are the tensors that the block returned. What a stage's results were computed
of, back to the tensors that came over the cut before it, are just the parameters that the stage
uses, with or without a gradient: also those that several stages use (tied embeddings), wherever
they stand in the model. Where that way back leads to a block of an earlier stage, something
bypasses the cut (a skip connection), which is refused. A parameter that nothing was computed of is
of the stage that has its block, else of the first.

A block whose inner shapes depend on values (experts that sort their tokens) cannot run on `meta`:
the first one of its kind runs once on zeros on the host, to see what it returns.

Assumes: blocks run in the order in which they are recorded, each once; what a block returns has the
same shapes in every micro-batch. Does NOT run the user's values.
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
    """What a block returns: the form of it, and its tensors on `meta`."""

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
        """Of its tensors, on `meta`, each with whether it has a gradient."""
        return tuple(
            torch.empty(x.shape, dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
            for x in self.tensors
        )

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same form with other tensors."""
        leaves = [tensors[i] if i >= 0 else leaf for i, leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Segment:
    """Blocks [begin, stop) of a model, with all that runs between the cuts around them."""

    begin: int
    stop: int

    def __str__(self) -> str:
        return f"blocks {self.begin} to {self.stop - 1}"


class DataFlow(TorchDispatchMode):
    """Which tensors each tensor of a forward was computed of, with or without gradients: a graph of
    numbered nodes, of each storage a new one for each operation that wrote to it.

    An operation on anything from `meta` is one on `meta`; what is made without it (positions,
    masks) is made on the host, where its values can be looked at. Values that leave tensors by
    `item` (which parameters on `meta` refuse) are not followed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: list[tuple[int, ...]] = []  # the nodes that each node was computed of
        self._node_of: dict[StorageWeakRef, int] = {}
        self._paused = False
        self.draws = False  # whether an operation drew random numbers

    def node(self, tensor: torch.Tensor) -> int:
        """The newest one of the tensor's storage."""
        key = StorageWeakRef(tensor.untyped_storage())
        if key not in self._node_of:
            self._before.append(())
            self._node_of[key] = len(self._before) - 1
        return self._node_of[key]

    def computed(self, tensors: Iterable[torch.Tensor], of: Iterable[torch.Tensor]) -> None:
        """`tensors` were computed of others."""
        before = tuple({self.node(x) for x in of})
        for x in tensors:
            self._before.append(before)
            self._node_of[StorageWeakRef(x.untyped_storage())] = len(self._before) - 1

    def ancestors(self, ends: Sequence[int], stops: Sequence[int]) -> set[int]:
        """`ends`, and all that they were computed of, on ways that do not lead through `stops`."""
        todo, found = [*ends], set[int]()
        while todo:
            node = todo.pop()
            if node not in found and node not in stops:
                found.add(node)
                todo += self._before[node]
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside it are none of the forward's."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the name and the arguments are torch's
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
    """The recorded forward of `model`.

    blocks: the names of its blocks in the order in which they run. returned: what each returns.
    begun: of each module, how many blocks had returned when it first ran.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        blocks: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """args, kwargs: of one micro-batch (only shapes and dtypes count). blocks: as in place().
        dtype: what floating parameters will compute in; None: their own.
        Raises ModelError for a forward that fails on `meta`, a block that runs twice or not at
        all, or a result without a gradient; ConfigError for a name that matches nothing."""
        parts = split(model, blocks)
        self._dtype = dtype
        self._block_of = {name: part.name for part in parts.blocks for name, _ in part.params}
        self._flow = DataFlow()
        self._name_of: dict[int, str] = {}  # of a parameter, by its node
        self._of_block: dict[int, int] = {}  # the number of the block that returned the node
        self._crossed: list[list[int]] = []  # the nodes that each block returned
        self._alike: dict[Any, BlockOutput] = {}  # what blocks that cannot run on `meta` return
        self.blocks: list[str] = []
        self.returned: list[BlockOutput] = []
        self.blocks_before: dict[str, int] = {}
        result = self._record(model, parts.blocks, args, kwargs)
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
        self._unused: dict[str, int] = {}  # parameters, and the number of their block
        self._unused = {
            name: self._index.get(self._block_of.get(name, ""), 0)
            for name in {*self._name_of.values()} - self.parameters(Segment(0, len(self.blocks)))
        }

    @property
    def draws(self) -> bool:
        """Whether the forward draws random numbers, as dropout does."""
        return self._flow.draws

    def dtype_of(self, p: torch.Tensor) -> torch.dtype:
        """What a parameter computes in."""
        wanted = self._dtype if p.is_floating_point() else None
        return p.dtype if wanted is None else wanted

    def crossing(self, cut: int) -> tuple[torch.Tensor, ...]:
        """The shapes of what crosses the cut behind block `cut` - 1, as tensors on `meta`."""
        return self.returned[cut - 1].shapes

    def parameters(self, segment: Segment) -> frozenset[str]:
        """Names (the first in named_parameters()) of those that `segment` uses. Raises ModelError
        where it uses what a block before it computed, other than what crosses the cut."""
        last = segment.stop == len(self.blocks)
        ends = self._results if last else self._crossed[segment.stop - 1]
        stops = self._crossed[segment.begin - 1] if segment.begin else []
        nodes = self._flow.ancestors(ends, stops)
        names = {self._name_of[node] for node in nodes & self._name_of.keys()}
        past = {self._of_block[node] for node in nodes & self._of_block.keys()}
        past |= {self._index[self._block_of[name]] for name in names & self._block_of.keys()}
        if past := {block for block in past if block < segment.begin}:
            raise ModelError(
                f"{segment} use what {self.blocks[max(past)]!r} computed past what"
                f" {self.blocks[segment.begin - 1]!r} returns: the model cannot be cut there",
                hint="keep both in one stage, or cut elsewhere with stages=[...]",
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
        given = pytree.tree_map_only(torch.Tensor, _on_host, (tuple(args), dict(kwargs)))
        values |= {id(b): _on_host(b) for b in model.buffers()}
        try:
            with torch.enable_grad(), self._watched(model, parts), _held(model, values), self._flow:
                return model(*given[0], **given[1])
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as cause:
            raise ModelError(
                f"{type(model).__name__}'s forward failed on meta: {cause}",
                hint="outside of blocks, no shape and no choice of a model in stages may depend on"
                " parameters' values",
            ) from cause

    @contextmanager
    def _watched(self, model: nn.Module, parts: Sequence[Any]) -> Iterator[None]:
        """Hooks of all modules; the model is as before after it."""
        own = {part.module: part.module.__dict__.get("forward") for part in parts}
        hooks = [m.register_forward_pre_hook(self._begins(n)) for n, m in model.named_modules()]
        for part in parts:
            hooks.append(part.module.register_forward_hook(self._returns(part.name)))
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

    def _begins(self, name: str) -> Any:
        def hook(module: nn.Module, given: Any) -> None:
            self.blocks_before.setdefault(name, len(self.blocks))

        return hook

    def _returns(self, name: str) -> Any:
        def hook(module: nn.Module, given: Any, value: Any) -> Any:
            if name in self.blocks:
                raise ModelError(
                    f"block {name!r} runs twice in one forward: it cannot be in a stage",
                    hint="name larger blocks with blocks=[...]",
                )
            found = BlockOutput.of(value)
            # of their own, also where a block returns what it was given
            copies = tuple(x.clone() for x in found.tensors)
            self._crossed.append([self._flow.node(x) for x in copies])
            self._of_block |= dict.fromkeys(self._crossed[-1], len(self.blocks))
            self.blocks.append(name)
            self.returned.append(BlockOutput(copies, found.leaves, found.spec))
            return self.returned[-1].rebuild(copies)

        return hook

    def _through(self, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of a block; where it cannot run on `meta`, results like those that it, or
        one of its kind, gives on the host."""
        try:
            return forward(*args, **kwargs)
        except RuntimeError:
            leaves, spec = flatten((args, kwargs))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            parameters = [*block.parameters()]
            kind = type(block), *((x.shape, x.dtype) for x in (*tensors, *parameters))
            if kind not in self._alike:
                # a key-value cache is of no use, which the first try has filled
                rest = [None if hasattr(x, "get_seq_length") else x for x in leaves]
                given = [_zeros(x) if isinstance(x, torch.Tensor) else x for x in rest]
                values = {id(x): _zeros(x) for x in (*parameters, *block.buffers())}
                a, k = pytree.tree_unflatten(given, spec)
                with self._flow.paused(), _held(block, values):
                    self._alike[kind] = BlockOutput.of(forward(*a, **k))
            with self._flow.paused():
                copies = self._alike[kind].shapes
            self._flow.computed(copies, [*tensors, *parameters])
            return self._alike[kind].rebuild(copies)


@contextmanager
def _held(module: nn.Module, values: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Inside it parameters and buffers are others. values: by id."""
    # torch's functional_call leaves a module that has two names with what it was given
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
    """On the host; a tensor that is there already as it is."""
    if not tensor.is_meta:
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, which the model may write to."""
    return tensor.detach() if tensor.is_meta else tensor.detach().to("cpu", copy=True)


def _only_shape(func: Any) -> bool:
    """Whether an operation looks at no values, but at shape, dtype and device."""
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")
