"""ForwardWaits: hooks that make a module wait for its parameters before it runs.

A block waits for all of its parameters when it is called. A parameter outside of blocks, or in a
block that is never called itself, is waited for by the module that owns it, if the first step
called that module; otherwise by the nearest enclosing module that was called (the weight of a head
may be used without calling the head). A parameter that several modules own (a tied head's) is
waited for by the first module that runs, since any of them may read it. Until the first step has
shown which modules are called, and in evaluation, where other modules may be called, the first
module that runs waits for all parameters.

Assumes that parameters are used only while the model, or a block of it, runs. Reading the model's
state dict waits, too. Other code must wait before it reads a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ForwardWaits:
    """Hooks on all modules of `model`. `numbers_of`: the numbers of the buckets that each parameter
    is in. `wait(numbers)`: wait for these buckets; None: for all."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        numbers_of: Mapping[nn.Parameter, Collection[int]],
        wait: Callable[[Collection[int] | None], None],
    ) -> None:
        self.model, self.numbers_of, self._wait = model, numbers_of, wait
        self.blocks = {id(block) for block in blocks}
        self._called: set[int] = set()  # ids of modules called in training mode
        # id of a module -> buckets it waits for; None until a step has shown which are called
        self._needs: dict[int, set[int]] | None = None
        # buckets that every module waits for: parameters with several owners, or none called
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
        """Decide which module waits for which parameters, after the first whole step."""
        if self._needs is not None or not self._called:
            return
        self._needs = {}
        named = dict(self.model.named_modules(remove_duplicate=False))
        owners = Counter(p for m in self.model.modules() for p in m.parameters(recurse=False))
        for name, module in named.items():
            for p in module.parameters(recurse=False):
                self._need(self._runs(named, name) if owners[p] == 1 else None, p)

    def _runs(self, named: Mapping[str, nn.Module], name: str) -> nn.Module | None:
        """The block that contains `name`, if it is called; else the nearest called module, from
        `name` itself outwards."""
        parts = name.split(".") if name else []
        around = [named[".".join(parts[:n])] for n in range(len(parts), -1, -1)]
        called = [module for module in around if id(module) in self._called]
        blocks = [module for module in called if id(module) in self.blocks]
        return next(iter(blocks or called), None)

    def _need(self, module: nn.Module | None, p: nn.Parameter) -> None:
        assert self._needs is not None
        numbers = self.numbers_of.get(p, ())
        if module is None:
            self._by_all.update(numbers)
        elif numbers:
            self._needs.setdefault(id(module), set()).update(numbers)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
