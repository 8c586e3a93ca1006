"""Cuts: where a model can be cut into stages, what crosses a cut, and which parameters each stage
uses.

One forward is recorded with autograd on; parameters and all that is computed of them are on `meta`
(no memory, no time), token numbers and masks have their values, since models look at these. A cut
lies behind a block: what crosses it are the tensors that the block returned. The graph behind a
stage's results, up to the tensors that came over the cut before it, ends in just the parameters
that the stage uses: also those that several stages use (tied embeddings), wherever they stand in
the model. Where it reaches a block of an earlier stage, something bypasses the cut (a skip
connection), which is refused.

Assumes: blocks run in the order in which they are recorded, each once; what a block returns has the
same shapes in every micro-batch. Does NOT run the user's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from roadtrain.errors import ModelError
from roadtrain.streaming.leaves import distinct, flatten
from roadtrain.streaming.split import split


@dataclass(frozen=True)
class Returned:
    """What a block returns: the form of it, and its tensors on `meta`."""

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[tuple[int, Any], ...]  # (index of a tensor, None) or (-1, the leaf itself)
    spec: pytree.TreeSpec

    @staticmethod
    def of(value: Any) -> Returned:
        leaves, spec = flatten(value)
        tensors, form = distinct(leaves)
        return Returned(tuple(tensors), tuple(form), spec)

    @property
    def shapes(self) -> tuple[torch.Tensor, ...]:
        """Of its tensors, on `meta`, each with whether it has a gradient."""
        return tuple(
            torch.empty(x.shape, dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
            for x in self.tensors
        )

    def made_of(self, tensors: Sequence[torch.Tensor]) -> Any:
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
        self._name_of: dict[int, str] = {}
        self.blocks: list[str] = []
        self.returned: list[Returned] = []
        self.begun: dict[str, int] = {}
        result = self._record(model, parts.blocks, args, kwargs)
        if missing := [part.name for part in parts.blocks if part.name not in self.blocks]:
            raise ModelError(
                f"{len(missing)} of the model's {len(parts.blocks)} blocks did not run"
                f" ({missing[0]!r} is the first)",
                hint="name the blocks that run with blocks=[...]",
            )
        self._index = {name: i for i, name in enumerate(self.blocks)}
        self._results = _with_gradient(pytree.tree_leaves(result))
        if not self._results:
            raise ModelError(f"{type(model).__name__} returned no tensor that has a gradient")

    def dtype_of(self, p: torch.Tensor) -> torch.dtype:
        """What a parameter computes in."""
        wanted = self._dtype if p.is_floating_point() else None
        return p.dtype if wanted is None else wanted

    def whole(self) -> Segment:
        return Segment(0, len(self.blocks))

    def crossing(self, cut: int) -> tuple[torch.Tensor, ...]:
        """The shapes of what crosses the cut behind block `cut` - 1, as tensors on `meta`."""
        return self.returned[cut - 1].shapes

    def parameters(self, segment: Segment) -> frozenset[str]:
        """Names (the first in named_parameters()) of those that `segment` uses. Raises ModelError
        where it uses what a block before it computed, other than what crosses the cut."""
        last = segment.stop == len(self.blocks)
        ends = self._results if last else _with_gradient(self.returned[segment.stop - 1].tensors)
        stops = _with_gradient(self.returned[segment.begin - 1].tensors) if segment.begin else []
        names = {self._name_of[id(p)] for p in _reached(ends, stops)}
        self._check_own(segment, names)
        return frozenset(names)

    def _check_own(self, segment: Segment, names: Iterable[str]) -> None:
        for name in sorted(names):
            block = self._block_of.get(name)
            if block is not None and self._index[block] < segment.begin:
                raise ModelError(
                    f"{segment} use what {block!r} computed past what"
                    f" {self.blocks[segment.begin - 1]!r} returns: the model cannot be cut there",
                    hint="keep both in one stage, or cut elsewhere with stages=[...]",
                )

    def _record(
        self,
        model: nn.Module,
        parts: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        values: dict[str, torch.Tensor] = {}
        for name, p in model.named_parameters():
            copy = torch.empty_like(p, device="meta", dtype=self.dtype_of(p))
            copy.requires_grad_(p.is_floating_point())
            values[name] = copy
            self._name_of[id(copy)] = name
        hooks = [part.module.register_forward_hook(self._returns(part.name)) for part in parts]
        hooks += [m.register_forward_pre_hook(self._begins(n)) for n, m in model.named_modules()]
        given = pytree.tree_map_only(torch.Tensor, _on_host, (tuple(args), dict(kwargs)))
        # copies: this forward counts for nothing
        values |= {name: _on_host(b).clone() for name, b in model.named_buffers()}
        try:
            with torch.enable_grad(), _WithoutParameters():  # type: ignore[no-untyped-call]
                return functional_call(model, values, given[0], given[1])
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as cause:
            raise ModelError(
                f"{type(model).__name__}'s forward failed on meta: {cause}",
                hint="a pipeline needs a forward whose shapes do not depend on values",
            ) from cause
        finally:
            for hook in hooks:
                hook.remove()

    def _begins(self, name: str) -> Any:
        def hook(module: nn.Module, given: Any) -> None:
            self.begun.setdefault(name, len(self.blocks))

        return hook

    def _returns(self, name: str) -> Any:
        def hook(module: nn.Module, given: Any, value: Any) -> None:
            if name in self.blocks:
                raise ModelError(
                    f"block {name!r} runs twice in one forward: it cannot be in a stage",
                    hint="name larger blocks with blocks=[...]",
                )
            self.blocks.append(name)
            self.returned.append(Returned.of(value))

        return hook


class _WithoutParameters(TorchDispatchMode):
    """An operation on anything from `meta` is one on `meta`; what is made without it (positions,
    masks) is made on the host, where its values can be looked at."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the name and the arguments are torch's
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.is_meta for x in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        elif kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()


def _with_gradient(values: Iterable[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]


def _reached(ends: Sequence[torch.Tensor], stops: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves of the graph behind `ends`, on ways that do not lead through `stops`."""
    edges = torch.autograd.graph.get_gradient_edge
    closed = {(edge.node, edge.output_nr) for edge in map(edges, stops)}
    todo = [edge for edge in map(edges, ends) if (edge.node, edge.output_nr) not in closed]
    nodes = [edge.node for edge in todo]
    seen: set[Any] = set(nodes)
    leaves: list[torch.Tensor] = []
    while nodes:
        node: Any = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        for following, number in node.next_functions:
            if following is None or (following, number) in closed or following in seen:
                continue
            seen.add(following)
            nodes.append(following)
    return leaves
