"""ForwardWaits: a module that is about to run waits for the parameters that it needs.

A block (an item of the model's outermost module lists, unless stated) waits for all of its
parameters when it is called, whatever uses them inside. A parameter outside of blocks is waited for
by the module that owns it, if the first step showed that this module is called; else by the nearest
module around it that is (a weight may be used without its owner, as that of a tied head). Before
the first step has shown that, and in evaluation, where modules may take other ways, whatever runs
first waits for everything.

Assumes: parameters are used only while the model, or a block of it, runs; reading its state dict
waits as well. Who reads a parameter elsewhere waits by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from roadtrain.errors import ModelError
from roadtrain.streaming.split import split


class ForwardWaits:
    """`numbers_of`: what (bucket numbers) each parameter is in. `wait(numbers)`: wait for these,
    None for all."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        blocks: Iterable[nn.Module] | None,
        numbers_of: Mapping[nn.Parameter, Collection[int]],
        wait: Callable[[Collection[int] | None], None],
    ) -> None:
        self.models, self.numbers_of, self._wait = models, numbers_of, wait
        found = _blocks_of(models) if blocks is None else blocks
        self.blocks = {id(block): block for block in found}
        self._called: set[int] = set()  # ids of modules outside of blocks
        # id of a module -> what it waits for; None until it is known which modules are called
        self._needs: dict[int, set[int]] | None = None
        self._handles: list[RemovableHandle] = []
        for model in models:
            self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        inside = {id(m) for block in self.blocks.values() for m in block.modules()}
        for module in model.modules():
            if id(module) in self.blocks or id(module) not in inside:
                self._handles.append(
                    module.register_forward_pre_hook(partial(self._before), prepend=True)
                )
        self._handles.append(model.register_state_dict_pre_hook(self._before_state_dict))

    def _before(self, module: nn.Module, _: Any) -> None:
        if self._needs is None:
            self._called.add(id(module))
        if self._needs is None or not module.training:
            self._wait(None)
        elif needed := self._needs.get(id(module)):
            self._wait(needed)

    def _before_state_dict(self, *_: Any) -> None:
        self._wait(None)

    def learn(self) -> None:
        """A whole step has run: which modules are called is known."""
        if self._needs is not None:
            return
        self._needs = {}
        for model in self.models:
            named = dict(model.named_modules(remove_duplicate=False))
            for name, module in named.items():
                for p in module.parameters(recurse=False):
                    self._need(self._runs(named, name), p)

    def _runs(self, named: Mapping[str, nn.Module], name: str) -> nn.Module:
        """The nearest module from `name` outwards that is a block or is called."""
        while name:
            module = named[name]
            if id(module) in self.blocks or id(module) in self._called:
                return module
            name = name.rpartition(".")[0]
        return named[""]

    def _need(self, module: nn.Module, p: nn.Parameter) -> None:
        assert self._needs is not None
        if numbers := self.numbers_of.get(p):
            self._needs.setdefault(id(module), set()).update(numbers)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _blocks_of(models: Sequence[nn.Module]) -> list[nn.Module]:
    found = []
    for model in models:
        try:
            found += [part.module for part in split(model).blocks]
        except ModelError:  # it has no parameters
            continue
    return found
