"""DataFlow: which tensors each tensor of a forward was computed of, with or without gradients.

Does NOT look at values that leave tensors (`item`, which parameters on `meta` refuse).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class DataFlow(TorchDispatchMode):
    """A graph of numbered nodes: of each storage a new one for each operation that wrote to it.

    An operation on anything from `meta` is one on `meta`; what is made without it (positions,
    masks) is made on the host, where its values can be looked at.
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

    def behind(self, ends: Sequence[int], stops: Sequence[int]) -> set[int]:
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


def _only_shape(func: Any) -> bool:
    """Whether an operation looks at no values, but at shape, dtype and device."""
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")
