"""model.state_dict() and load_state_dict() of a placed model, whose values rest with the servers.

How the data goes. Out: every module that has placed parameters puts what is in the store into the
dict that it is asked to fill; asked directly, it gives a StateDict, whose tensors are read when
they are looked at. They lie in a scratch file that is mapped into memory (storage/scratch.py), so a
model larger than memory has a state dict. In: values that differ from the store's are put aside in
such a file; the next use of the model, its optimizer or the store writes them all at once
(PlacedOptimizer.rewrite), and a state of the optimizer that is refused first discards them.

Values are those after the last step() when the dict was made: it is read to its end before the next
step changes them.
Assumes: the hooks of torch.nn.Module are called, which every framework's wrapper does. Does NOT see
who reads a parameter itself (`p.data`, `p.clone()`): streaming/released.py does.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from roadtrain.chunks import ITEMSIZE, PAGE, ParamSpec
from roadtrain.errors import LoopError
from roadtrain.retry import undone_on_error
from roadtrain.storage.convert import MASTER
from roadtrain.storage.scratch import Scratch
from roadtrain.storage.tier import WEIGHTS
from roadtrain.streaming.split import DTYPES, NAMES, as_numpy
from roadtrain.units import round_up

# parameter, what -> (first element, values)
Pieces = Callable[[str, str], Iterator[tuple[int, np.ndarray]]]
# of PEFT: they write in place
MERGES = ("merge_and_unload", "merge_adapter", "unmerge_adapter", "merge", "unmerge")
_MARK = "_roadtrain_states"  # the attribute of a module that says whose hooks it has


class ValueSource(Protocol):
    """Who has the values: PlacedOptimizer."""

    def reading(self) -> AbstractContextManager[Pieces]:
        """What is inside reads values of the last step taken. Raises LoopError where there are
        none."""

    def write_staged(self) -> None:
        """What is put aside is now the store's."""

    def check_rewrite(self) -> None:
        """Raises LoopError where other values cannot be written to the store now."""

    @property
    def closed(self) -> bool: ...


class Values:
    """Tensors in one scratch file, by parameter; each has a storage of its own, tied ones share
    it."""

    def __init__(self, params: Sequence[ParamSpec], dtypes: Sequence[str], where: Path) -> None:
        self.params, self.dtypes = params, dtypes
        sizes = [round_up(p.numel * ITEMSIZE[d], PAGE) for p, d in zip(params, dtypes)]
        self._at = list(itertools.accumulate(sizes, initial=0))
        self._scratch = Scratch(where, self._at[-1])
        self._taken: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def take(self, index: int, pieces: Iterator[tuple[int, np.ndarray]]) -> torch.Tensor:
        """Of parameter `index`: what `pieces` say, or said before."""
        if (tensor := self._taken.get(index)) is not None:
            return tensor
        spec, dtype, at = self.params[index], self.dtypes[index], self._at[index]
        for first, values in pieces:
            self._scratch.write(values.view(np.uint8).data, at + first * ITEMSIZE[dtype])
        if not spec.numel:
            return torch.empty(spec.shape, dtype=DTYPES[dtype])
        flat = torch.frombuffer(self._scratch.map, dtype=DTYPES[dtype], count=spec.numel, offset=at)
        tensor = self._taken[index] = flat.view(spec.shape)
        nbytes = spec.numel * ITEMSIZE[dtype]
        weakref.finalize(tensor, self._scratch.let_go, at, nbytes).atexit = False
        return tensor


class _Later:
    """Stands for a tensor that nobody has looked at."""

    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self.take = take


class StateDict(OrderedDict[str, Any]):
    """An OrderedDict, as torch's state dicts are; a tensor is read from the store when it is
    first looked at. Copies and pickles are ordinary OrderedDicts."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, _Later):
            value = value.take()
            super().__setitem__(key, value)
        return value

    # through __getitem__, which OrderedDict's own methods pass by
    items, values = Mapping.items, Mapping.values  # type: ignore[assignment]
    get, setdefault = Mapping.get, MutableMapping.setdefault  # type: ignore[assignment]
    __eq__ = Mapping.__eq__

    def pop(self, key: str, *default: Any) -> Any:
        if key in self or not default:
            value = self[key]
            del self[key]
            return value
        return default[0]

    def popitem(self, last: bool = True) -> tuple[str, Any]:
        key = next(reversed(self) if last else iter(self), None)
        if key is None:
            raise KeyError("the state dict is empty")
        return key, self.pop(key)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        return OrderedDict(self.items())

    def __reduce__(self) -> Any:
        return OrderedDict, (), dict(vars(self)), None, iter(self.items())

    def read_all(self) -> None:
        for key in self:
            self[key]


class ModelStates:
    """The hooks of one placed model. `staged`: what was loaded and is not written yet, fp32
    where trainable."""

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        specs: Sequence[ParamSpec],
        source: ValueSource,
        scratch: Path | None,
        report: Callable[[str], None],
    ) -> None:
        self._model, self._params, self._specs, self._source = model, params, specs, source
        self._index = {p: i for i, p in enumerate(params)}
        self.where = scratch or Path(tempfile.gettempdir())
        self._report = report
        self._given: list[weakref.ref[StateDict]] = []  # that may still have values to read
        # the dict that is being filled, and its values
        self._last: tuple[weakref.ref[Any], Values] | None = None
        self._undo: list[Callable[[], None]] = []
        self._hidden: dict[str, int] = {}  # parameters of the module that is being loaded
        self.staged: dict[int, torch.Tensor] = {}
        self._stage: Values | None = None  # where they lie
        self._attach()

    def _attach(self) -> None:
        """Instead of the hooks of an earlier placement, if any."""
        for module in [
            m for m in self._model.modules() if any(p in self._index for p in m.parameters())
        ]:
            if (before := module.__dict__.get(_MARK)) is not None:
                before.detach()
            module.__dict__[_MARK] = self
            for name, take in (
                ("state_dict", self._state_dict),
                ("load_state_dict", self._load_state_dict),
                ("_apply", self._moved),
            ):
                original = getattr(module, name)
                module.__dict__[name] = functools.wraps(original)(
                    functools.partial(take, module, original)
                )
                self._undo.append(functools.partial(module.__dict__.pop, name, None))
            for name in ("__deepcopy__", "__reduce_ex__"):
                module.__dict__[name] = _refuse_copy
                self._undo.append(functools.partial(module.__dict__.pop, name, None))
            if type(module).__module__.startswith("peft."):
                for name in [n for n in MERGES if inspect.ismethod(getattr(module, n, None))]:
                    module.__dict__[name] = functools.partial(_refuse_merge, name)
                    self._undo.append(functools.partial(module.__dict__.pop, name, None))
            if self._direct(module):
                original = module._load_from_state_dict
                module.__dict__["_load_from_state_dict"] = functools.partial(
                    self._load_module, module, original
                )
                self._undo.append(
                    functools.partial(module.__dict__.pop, "_load_from_state_dict", None)
                )
                self._undo.append(module._register_state_dict_hook(self._fill).remove)
                pre = module.register_load_state_dict_pre_hook(self._stage_module)
                self._undo.append(pre.remove)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _direct(self, module: nn.Module) -> dict[str, int]:
        own = module._parameters.items()
        return {name: self._index[p] for name, p in own if p is not None and p in self._index}

    # out

    def _state_dict(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs.get("destination") is not None:
            return original(*args, **kwargs)
        out = StateDict()
        out._metadata = OrderedDict()  # type: ignore[attr-defined]
        self._source.write_staged()
        with self._source.reading():  # refused at once where it cannot be read
            result = original(**{**kwargs, "destination": out})
            if self._source.closed:
                out.read_all()
            self._given = [ref for ref in self._given if ref() is not None]
            self._given.append(weakref.ref(out))
            return result

    def _fill(self, module: nn.Module, destination: Any, prefix: str, _: Any) -> None:
        """The hook of a module with placed parameters of its own."""
        if not isinstance(destination, StateDict):
            self._source.write_staged()
        values = self._values_of(destination)
        for name, index in self._direct(module).items():
            key = prefix + name
            if key not in destination:
                continue
            with_grad = isinstance(destination[key], nn.Parameter)  # keep_vars=True
            later = _Later(functools.partial(self._read, values, index, with_grad))
            if isinstance(destination, StateDict):
                OrderedDict.__setitem__(destination, key, later)
            else:  # a module around the placed one: its dict is an ordinary one
                destination[key] = later.take()

    def _values_of(self, destination: Any) -> Values:
        """The same for all modules that fill one dict, so that tied parameters stay tied in it."""
        if self._last is not None and self._last[0]() is destination:
            return self._last[1]
        values = Values(self._specs, [s.dtype for s in self._specs], self.where)
        self._last = None
        if isinstance(destination, OrderedDict):
            self._last = weakref.ref(destination, self._filled), values
        return values

    def _filled(self, gone: weakref.ref[Any]) -> None:
        if self._last is not None and self._last[0] is gone:
            self._last = None

    def _read(self, values: Values, index: int, with_grad: bool) -> torch.Tensor:
        with self._source.reading() as pieces:
            tensor = values.take(index, pieces(self._specs[index].name, WEIGHTS))
        return nn.Parameter(tensor, self._params[index].requires_grad) if with_grad else tensor

    def settle(self) -> None:
        """Before the store's values change: state dicts that somebody still has are read to
        their end."""
        given, self._given, self._last = self._given, [], None
        for ref in given:
            if (out := ref()) is not None:
                out.read_all()

    # in

    def _load_state_dict(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with undone_on_error(self.discard):
            return original(*args, **kwargs)

    def _load_module(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        self._hidden = self._direct(module)
        # also where a module around the placed one is loaded
        with undone_on_error(self.discard), self._without(module):
            original(*args, **kwargs)

    @contextmanager
    def _without(self, module: nn.Module) -> Iterator[None]:
        """torch does not find the module's placed parameters inside."""
        before, placed = dict(module._parameters), self._direct(module)
        for name in placed:
            del module._parameters[name]
        try:
            yield
        finally:
            after = {n: p for n, p in module._parameters.items() if n not in before}
            module._parameters.clear()
            module._parameters.update({**before, **after})

    def _stage_module(
        self,
        module: nn.Module,
        state_dict: Any,
        prefix: str,
        _: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """The last of the module's own hooks: what it renames has its new name."""
        for name, index in self._hidden.items():
            key = prefix + name
            if key not in state_dict:
                if strict:
                    missing.append(key)
                continue
            given, spec = state_dict.pop(key), self._specs[index]
            if isinstance(given, torch.Tensor) and spec.shape == () and given.shape == (1,):
                given = given[0]
            if not isinstance(given, torch.Tensor):
                errors.append(
                    f'While loading "{key}", expected torch.Tensor but received {type(given)}'
                )
            elif tuple(given.shape) != spec.shape:
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {given.shape} from"
                    f" checkpoint, the shape in current model is {torch.Size(spec.shape)}."
                )
            elif given.is_meta or NAMES.get(given.dtype) is None:
                errors.append(
                    f'While loading "{key}": a tensor of {given.dtype} on {given.device} has no'
                    " values"
                )
            else:
                self.stage(index, given)

    def stage(self, index: int, given: torch.Tensor) -> None:
        """Puts `given` aside, unless the store has just that. A 16-bit value equal to the copy
        that the model computes with keeps the fp32 master behind it."""
        spec = self._specs[index]
        held = "fp32" if spec.trainable else spec.dtype
        exact = spec.trainable and given.dtype in (torch.float32, torch.float64)
        what, compared = (MASTER, "fp32") if exact else (WEIGHTS, spec.dtype)
        flat = given.detach().reshape(-1)
        self.staged.pop(index, None)
        with self._source.reading() as pieces:
            now = pieces(spec.name, what)
            if all(
                np.array_equal(bytes_of(old), bytes_of(flat_of(flat, a, a + old.size, compared)))
                for a, old in now
            ):
                return
        self._source.check_rewrite()
        if self._stage is None:
            specs = self._specs
            self._stage = Values(
                specs, ["fp32" if s.trainable else s.dtype for s in specs], self.where
            )
        pieces_of_it = ((a, flat_of(flat, a, a + n, held)) for a, n in steps_of(spec.numel))
        self.staged[index] = self._stage.take(index, pieces_of_it)

    def discard(self) -> None:
        """What was loaded and is not written yet."""
        self.staged.clear()
        self._stage = None

    # moves and casts

    def _moved(
        self, module: nn.Module, original: Callable[..., Any], fn: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """model.to(), half(), cuda()...: buffers follow, placed parameters stay as they are."""
        here = {(p.dtype, p.device) for p in module.parameters() if p in self._index}
        for dtype, device in here:
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            if probe.dtype != dtype:
                raise LoopError(
                    f"a placed model computes in {dtype} and cannot be cast to {probe.dtype}",
                    hint=(
                        "place(..., dtype=torch.bfloat16) says what parameters compute in; masters"
                        " stay fp32"
                    ),
                )
            if probe.device != device:
                self._report(
                    f"the placed model stays on {device}: place(..., device=...) says where it"
                    " computes"
                )
                return module
        with self._without(module):
            original(fn, *args, **kwargs)
        return module


def _refuse_copy(*_: Any) -> Any:
    raise LoopError(
        "a placed model cannot be copied or pickled: its parameters are elsewhere",
        hint=(
            "torch.save(model.state_dict()), model.save_pretrained() and `roadtrain export` have"
            " its values"
        ),
    )


def _refuse_merge(name: str, *_: Any, **__: Any) -> Any:
    raise LoopError(
        f"{name}() changes parameters in place, and those of a placed model are elsewhere: nothing"
        " can be merged",
        hint=(
            "save_pretrained() has the adapters: load them into a model that is not placed, and"
            " merge there"
        ),
    )


def steps_of(numel: int, most: int = 1 << 20) -> Iterator[tuple[int, int]]:
    return ((first, min(most, numel - first)) for first in range(0, numel, most))


def flat_of(values: torch.Tensor, start: int, stop: int, dtype: str) -> np.ndarray:
    """Elements [start, stop) of a flat or shaped tensor in `dtype`; 16-bit floats as uint16."""
    return as_numpy(values.reshape(-1)[start:stop].to(DTYPES[dtype]))


def bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
