"""ForwardWaits: a module that is about to run waits for the parameters that it needs.

A block waits for all of its parameters when it is called, whatever uses them inside. A parameter
outside of blocks, or in one that is reached into instead of called, is waited for by the module
that owns it, if the first step showed that this module is called; else by the nearest module around
it that is (a weight may be used without its owner, as that of a head). A parameter that several
modules own (a tied head's) is waited for by whatever runs first, since each of them, and what is
around them, may read it. Before the first step has shown which modules are called, and in
evaluation, where modules may take other ways, whatever runs first waits for everything.

Assumes: parameters are used only while the model, or a block of it, runs; reading its state dict
waits as well. Who reads a parameter elsewhere waits by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ForwardWaits:
    """`numbers_of`: what (bucket numbers) each parameter is in. `wait(numbers)`: wait for these,
    None for all."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        numbers_of: Mapping[nn.Parameter, Collection[int]],
        wait: Callable[[Collection[int] | None], None],
    ) -> None:
        self.model, self.numbers_of, self._wait = model, numbers_of, wait
        self.blocks = {id(block) for block in blocks}
        self._called: set[int] = set()  # ids of modules, while the model trains
        # id of a module -> what it waits for; None until it is known which modules are called
        self._needs: dict[int, set[int]] | None = None
        self._by_all: set[int] = set()  # of parameters that no called module has, or several have
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
        """A whole step has run: which modules are called is known."""
        if self._needs is not None or not self._called:
            return
        self._needs = {}
        named = dict(self.model.named_modules(remove_duplicate=False))
        owners = Counter(p for m in self.model.modules() for p in m.parameters(recurse=False))
        for name, module in named.items():
            for p in module.parameters(recurse=False):
                self._need(self._runs(named, name) if owners[p] == 1 else None, p)

    def _runs(self, named: Mapping[str, nn.Module], name: str) -> nn.Module | None:
        """The block around `name` if it is called, else the nearest module around it, or itself,
        that is."""
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
