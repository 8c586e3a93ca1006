"""Modules that the README of 0.1.0 named: their former paths work in this version, with one printed
line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


@dataclass(frozen=True)
class FormerModule:
    """Where a module is now. `names`: former name -> its name now, of those that changed."""

    now: str
    names: Mapping[str, str] = field(default_factory=dict)


FORMER_MODULES: Mapping[str, FormerModule | None] = {
    "roadtrain.node": None,  # a room that is gone
    "roadtrain.node.formats": FormerModule("roadtrain.kernels.codecs"),
    "roadtrain.wire": None,
    "roadtrain.wire.tcp": FormerModule("roadtrain.transport.tcp", {"Options": "TcpOptions"}),
}


class FormerPaths(MetaPathFinder, Loader):
    """Finds the modules of FORMER_MODULES."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in FORMER_MODULES:
            return None
        return ModuleSpec(name, self, is_package=FORMER_MODULES[name] is None)

    def exec_module(self, module: ModuleType) -> None:
        if (former := FORMER_MODULES[module.__name__]) is None:
            return
        print(f"`{module.__name__}` is `{former.now}` now; the former name works in this version")
        now = vars(import_module(former.now))
        vars(module).update({name: now[name] for name in now if not name.startswith("__")})
        vars(module).update({name: now[new] for name, new in former.names.items()})
