"""ForwardWaits: hooks that make a module wait for its parameters before it runs.

A block waits for all of its parameters. Any other parameter is awaited by its module or, if the
first step did not call this module, by the nearest enclosing module that was called. If several
modules own a parameter (a tied head), every module waits for it. In the first step and in
evaluation, every module waits for all parameters, because other modules may be called.

Assumes that parameters are used only while the model or one of its blocks runs, or by `state_dict`.
Other code must wait before it reads a parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ForwardWaits:
    """Hooks on all modules of `model`. `numbers_of`: for each parameter, the numbers of the buckets
    (stages/flat_layout.py) that contain it. `wait`: waits until the buckets with the given numbers
    have arrived, or all buckets if it receives None."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        numbers_of: Mapping[nn.Parameter, Collection[int]],
        wait: Callable[[Collection[int] | None], None],
    ) -> None:
        self.model, self.numbers_of, self._wait = model, numbers_of, wait
        self.blocks = {id(block) for block in blocks}
        self._called: set[int] = set()  # ids of modules that have been called in training mode
        # id of a module -> buckets for which it waits; None until the first step has shown which
        # modules are called
        self._needs: dict[int, set[int]] | None = None
        # buckets for which every module waits, because they have parameters with several owners, or
        # parameters whose owner and enclosing modules are never called
        self._by_all: set[int] = set()
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before, prepend=True)
            for module in model.modules()
        ]
        self._handles.append(model.register_state_dict_pre_hook(lambda *_: self._wait(None)))

    def _before(self, module: nn.Module, _: Any) -> None:
        training = self.model.training
        if self._needs is None and training:
            self._called.add(id(module))
        if self._needs is None or not training:
            self._wait(None)
        elif needed := self._needs.get(id(module), set()) | self._by_all:
            self._wait(needed)

    def learn(self) -> None:
        """Decide which module waits for which parameters. Called after each step; only the first
        call has an effect."""
        if self._needs is not None or not self._called:
            return
        needs = self._needs = defaultdict[int, set[int]](set)
        named = dict(self.model.named_modules(remove_duplicate=False))
        owners = Counter(p for m in self.model.modules() for p in m.parameters(recurse=False))
        for name, module in named.items():
            for p in module.parameters(recurse=False):
                runs = self._runs(named, name) if owners[p] == 1 else None
                waits = self._by_all if runs is None else needs[id(runs)]
                waits.update(self.numbers_of.get(p, ()))

    def _runs(self, named: Mapping[str, nn.Module], name: str) -> nn.Module | None:
        """Return the block that contains the module `name` if it was called, otherwise the nearest
        module at or above `name` that was called, or None."""
        parts = name.split(".") if name else []
        around = [named[".".join(parts[:n])] for n in range(len(parts), -1, -1)]
        called = [module for module in around if id(module) in self._called]
        blocks = [module for module in called if id(module) in self.blocks]
        return next(iter(blocks or called), None)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
