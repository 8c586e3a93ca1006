"""model.state_dict() and load_state_dict() of a placed model, whose values are in the store.

Saving: the tensors of a StateDict are read from the store on first access, into a memory-mapped
scratch file. So a state dict may be larger than memory. Before a step changes the store, all
tensors not accessed yet are read, so later steps do not change the dict.

Loading: values that differ from the store's are staged in a scratch file. The next use of the
model, its optimizer or the store writes all staged values (StoredOptimizer.write_staged). If the
optimizer's load_state_dict() fails before that, staged values are discarded.

Wrappers of frameworks must call the hooks of torch.nn.Module. streaming/released.py handles direct
reads of a parameter (`p.data`).
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

# A function that reads an array from the store. Its arguments are the names of a parameter and of
# an array; it yields pairs (index of the first element, values).
Pieces = Callable[[str, str], Iterator[tuple[int, np.ndarray]]]
# PEFT methods that write parameters in place
MERGES = ("merge_and_unload", "merge_adapter", "unmerge_adapter", "merge", "unmerge")
_MARK = "_roadtrain_states"  # attribute of a module: the ModelStates that hooked it


class ValueSource(Protocol):
    """The methods of PlacedOptimizer through which this module reads and writes the store."""

    closed: bool

    def reading(self) -> AbstractContextManager[Pieces]:
        """Context manager whose target is a function that reads values from the store. The values
        include the update of the last step(). Raises LoopError if they cannot be read now."""

    def write_staged(self) -> None:
        """Write staged values to the store."""

    def check_rewrite(self) -> None:
        """Raise LoopError if the values in the store cannot be replaced by new values now."""


class Values:
    """The tensors of parameters in one scratch file. Tied parameters share an index and a
    tensor."""

    def __init__(self, params: Sequence[ParamSpec], dtypes: Sequence[str], where: Path) -> None:
        self.params, self.dtypes = params, dtypes
        sizes = [round_up(p.numel * ITEMSIZE[d], PAGE) for p, d in zip(params, dtypes)]
        self._at = list(itertools.accumulate(sizes, initial=0))
        self._scratch = Scratch(where, self._at[-1])
        self._live: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def take(self, index: int, pieces: Iterator[tuple[int, np.ndarray]]) -> torch.Tensor:
        """Return the tensor of parameter `index`: that of an earlier call if it is still in use,
        otherwise a new tensor with the values of `pieces`."""
        if (tensor := self._live.get(index)) is not None:
            return tensor
        spec, dtype, at = self.params[index], self.dtypes[index], self._at[index]
        for first, values in pieces:
            self._scratch.write(values.view(np.uint8).data, at + first * ITEMSIZE[dtype])
        if not spec.numel:
            return torch.empty(spec.shape, dtype=DTYPES[dtype])
        flat = torch.frombuffer(self._scratch.map, dtype=DTYPES[dtype], count=spec.numel, offset=at)
        tensor = self._live[index] = flat.view(spec.shape)
        nbytes = spec.numel * ITEMSIZE[dtype]
        weakref.finalize(tensor, self._scratch.release, at, nbytes).atexit = False
        return tensor


class _LazyTensor:
    """Placeholder in a StateDict for a tensor that was not accessed yet."""

    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self.take = take


class StateDict(OrderedDict[str, Any]):
    """A state dict that reads each tensor from the store on first access. Its copies and pickles
    are ordinary OrderedDicts."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, _LazyTensor):
            value = value.take()
            super().__setitem__(key, value)
        return value

    # these methods call __getitem__, while those of OrderedDict do not
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
    """The state-dict hooks of one placed model.

    `staged` holds values that were loaded but not written to the store yet, by parameter index.
    Values of trainable parameters are in fp32.
    """

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
        self._out: list[weakref.ref[StateDict]] = []  # dicts that may have unread values
        # the dict that is being filled, and its values
        self._last: tuple[weakref.ref[Any], Values] | None = None
        self._undo: list[Callable[[], None]] = []
        self._hidden: dict[str, int] = {}  # placed parameters of the module being loaded
        self.staged: dict[int, torch.Tensor] = {}
        self._stage: Values | None = None  # the file of the staged values
        self._attach()

    def _attach(self) -> None:
        """Install the hooks, replacing those of an earlier placement."""
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
                replaced = functools.wraps(original)(functools.partial(take, module, original))
                self._replace(module, name, replaced)
            for name in ("__deepcopy__", "__reduce_ex__"):
                self._replace(module, name, _refuse_copy)
            if type(module).__module__.startswith("peft."):
                for name in [n for n in MERGES if inspect.ismethod(getattr(module, n, None))]:
                    self._replace(module, name, functools.partial(_refuse_merge, name))
            if self._direct(module):
                load = functools.partial(self._load_module, module, module._load_from_state_dict)
                self._replace(module, "_load_from_state_dict", load)
                self._undo.append(module._register_state_dict_hook(self._fill).remove)
                pre = module.register_load_state_dict_pre_hook(self._stage_module)
                self._undo.append(pre.remove)

    def _replace(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of a module until `detach`."""
        module.__dict__[name] = method
        self._undo.append(functools.partial(module.__dict__.pop, name, None))

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _direct(self, module: nn.Module) -> dict[str, int]:
        own = module._parameters.items()
        return {name: self._index[p] for name, p in own if p is not None and p in self._index}

    # saving

    def _state_dict(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs.get("destination") is not None:
            return original(*args, **kwargs)
        out = StateDict()
        out._metadata = OrderedDict()  # type: ignore[attr-defined]
        self._source.write_staged()
        with self._source.reading():  # raises now if the store cannot be read
            result = original(**{**kwargs, "destination": out})
            if self._source.closed:
                out.read_all()
            self._out = [ref for ref in self._out if ref() is not None]
            self._out.append(weakref.ref(out))
            return result

    def _fill(self, module: nn.Module, destination: Any, prefix: str, _: Any) -> None:
        """Add the parameters of `module` to the state dict `destination`. Torch calls this method
        as a state-dict hook of the module."""
        if not isinstance(destination, StateDict):
            self._source.write_staged()
        values = self._values_of(destination)
        for name, index in self._direct(module).items():
            key = prefix + name
            if key not in destination:
                continue
            with_grad = isinstance(destination[key], nn.Parameter)  # keep_vars=True
            lazy = _LazyTensor(functools.partial(self._read, values, index, with_grad))
            if isinstance(destination, StateDict):
                OrderedDict.__setitem__(destination, key, lazy)
            else:  # a module around the placed model has created an ordinary dict
                destination[key] = lazy.take()

    def _values_of(self, destination: Any) -> Values:
        """Return the Values object of a state dict, which all modules share, so that tied
        parameters stay tied."""
        if self._last is not None and self._last[0]() is destination:
            return self._last[1]
        values = Values(self._specs, [s.dtype for s in self._specs], self.where)
        self._last = None
        if isinstance(destination, OrderedDict):
            self._last = weakref.ref(destination, self._filled), values
        return values

    def _filled(self, ref: weakref.ref[Any]) -> None:
        if self._last is not None and self._last[0] is ref:
            self._last = None

    def _read(self, values: Values, index: int, with_grad: bool) -> torch.Tensor:
        with self._source.reading() as pieces:
            tensor = values.take(index, pieces(self._specs[index].name, WEIGHTS))
        return nn.Parameter(tensor, self._params[index].requires_grad) if with_grad else tensor

    def settle(self) -> None:
        """Read all tensors of existing state dicts. Called before the store's values change."""
        unread, self._out, self._last = self._out, [], None
        for ref in unread:
            if (out := ref()) is not None:
                out.read_all()

    # loading

    def _load_state_dict(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with undone_on_error(self.discard):
            return original(*args, **kwargs)

    def _load_module(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        self._hidden = self._direct(module)
        # discards here too, because load_state_dict of a module around the placed model may fail
        with undone_on_error(self.discard), self._without(module):
            original(*args, **kwargs)

    @contextmanager
    def _without(self, module: nn.Module) -> Iterator[None]:
        """Context manager that hides the module's placed parameters from torch."""
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
        """Stage the loaded values of the module's placed parameters. Torch calls this method after
        the module's other load-state-dict pre-hooks, which may rename keys."""
        for name, index in self._hidden.items():
            key = prefix + name
            if key not in state_dict:
                if strict:
                    missing.append(key)
                continue
            value, spec = state_dict.pop(key), self._specs[index]
            if isinstance(value, torch.Tensor) and spec.shape == () and value.shape == (1,):
                value = value[0]
            if not isinstance(value, torch.Tensor):
                errors.append(
                    f'While loading "{key}", expected torch.Tensor but received {type(value)}'
                )
            elif tuple(value.shape) != spec.shape:
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {value.shape} from"
                    f" checkpoint, the shape in current model is {torch.Size(spec.shape)}."
                )
            elif value.is_meta or NAMES.get(value.dtype) is None:
                errors.append(
                    f'While loading "{key}": cannot use the values of a {value.dtype} tensor on'
                    f" device {value.device}"
                )
            else:
                self.stage(index, value)

    def stage(self, index: int, value: torch.Tensor) -> None:
        """Stage `value` for a parameter, unless the store already has the same value.

        A 16-bit value is compared with the 16-bit copy in the store. If both are equal, the fp32
        master stays unchanged.
        """
        spec = self._specs[index]
        held = "fp32" if spec.trainable else spec.dtype
        exact = spec.trainable and value.dtype in (torch.float32, torch.float64)
        what, compared = (MASTER, "fp32") if exact else (WEIGHTS, spec.dtype)
        flat = value.detach().reshape(-1)
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
        """Discard loaded values that were not written to the store yet."""
        self.staged.clear()
        self._stage = None

    # moves and casts

    def _moved(
        self, module: nn.Module, original: Callable[..., Any], fn: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Replacement of Module._apply, which model.to(), half() and cuda() call. Changes only
        buffers. Raises LoopError if the call would change the dtype of placed parameters."""
        here = {(p.dtype, p.device) for p in module.parameters() if p in self._index}
        for dtype, device in here:
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            if probe.dtype != dtype:
                raise LoopError(
                    f"a placed model computes in {dtype} and cannot be cast to {probe.dtype}",
                    hint="set the compute dtype when placing, for example with place(...,"
                    " dtype=torch.bfloat16); master values stay in fp32",
                )
            if probe.device != device:
                self._report(
                    f"the placed model stays on {device}: choose its device with place(device=...)"
                )
                return module
        with self._without(module):
            original(fn, *args, **kwargs)
        return module


def _refuse_copy(*_: Any) -> Any:
    raise LoopError(
        "a placed model cannot be copied or pickled: its parameters are not in memory",
        hint="save its values with torch.save(model.state_dict()), model.save_pretrained() or"
        " `roadtrain export`",
    )


def _refuse_merge(name: str, *_: Any, **__: Any) -> Any:
    raise LoopError(
        f"{name}() changes parameters in place, but the parameters of a placed model are not in"
        " memory: nothing was merged",
        hint="save the adapters with save_pretrained(), load them into a model that is not placed,"
        " and merge there",
    )


def steps_of(numel: int, most: int = 1 << 20) -> Iterator[tuple[int, int]]:
    return ((first, min(most, numel - first)) for first in range(0, numel, most))


def flat_of(values: torch.Tensor, start: int, stop: int, dtype: str) -> np.ndarray:
    """Return elements [start, stop) of the flattened tensor `values`, converted to `dtype`.
    Elements of bf16 and fp16 are returned as uint16."""
    return as_numpy(values.reshape(-1)[start:stop].to(DTYPES[dtype]))


def bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
