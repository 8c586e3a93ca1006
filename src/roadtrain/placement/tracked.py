"""Objects whose state is committed with each step: schedulers, loaders, generators, loss scalers.

When states are captured: The loop may change a state after step(), for example with
scheduler.step(). Therefore most states are captured when the next forward begins. But the next
batch is drawn before that. So the sources of batches and the random generators are captured when
step() ends. They are captured again just before a tracked DataLoader draws the next batch, because
an evaluation may have drawn random numbers.

`LoaderPosition` keeps the position of a DataLoader, which has no state of its own. If a loop draws
batches for later steps in advance, a resumed run skips these batches without an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from roadtrain.device.accelerator import random_state, set_random_state
from roadtrain.errors import ConfigError

HOST = torch.device("cpu")
COUNTERS = ("epoch", "iteration")  # attributes of samplers that shuffle by seed and epoch
SAMPLERS = ("sampler", "batch_sampler")


def generators(device: torch.device) -> dict[str, Any]:
    """Return the states of the process's random generators, including that of `device`."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    keys_as_tensor = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        # the key of any device, because the first version of the format had only CUDA devices
        "cuda": [] if device == HOST else [random_state(device)],
        "python": random.getstate(),
        "numpy": [str(kind), keys_as_tensor, position, has_gauss, cached],
    }


def set_generators(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the process's random generators to `state`, a result of `generators`."""
    torch.set_rng_state(state["torch"])
    if (saved := state["cuda"]) and device != HOST:
        # the first version of the format stored the generators of all devices
        own = saved[min(device.index or 0, len(saved) - 1)]
        if own.numel() == random_state(device).numel():  # else it was another kind of device
            set_random_state(own, device)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def trackable(
    name: str, thing: Any, before_batch: Callable[[], None], settle: Callable[[], None]
) -> Any:
    """Return an object with `state_dict` and `load_state_dict`: `thing` itself, or a wrapper.
    Raises ConfigError if the state of `thing` cannot be saved or restored.

    A DataLoader calls `before_batch` before each batch. `settle` sets the random generators to
    their states at the end of the resumed step.
    """
    if _has_state(thing):
        return thing
    if isinstance(thing, torch.Generator):
        return GeneratorState(thing)
    if isinstance(thing, DataLoader):
        return LoaderPosition(thing, before_batch, settle)
    raise ConfigError(
        f"{name!r} is a {type(thing).__name__}, whose state cannot be committed with each step",
        hint="track a torch DataLoader, a torch.Generator, or an object with state_dict() and"
        " load_state_dict()",
    )


def _has_state(thing: Any) -> bool:
    """Whether `thing` can save and restore its state. A DataLoader is tested with a call, because
    wrappers of accelerate may have methods that fail."""
    save, load = (getattr(thing, method, None) for method in ("state_dict", "load_state_dict"))
    if not callable(save) or not callable(load) or isinstance(thing, torch.optim.Optimizer):
        return False
    try:
        if isinstance(thing, DataLoader):
            save()
    except AttributeError:
        return False
    return True


def is_data(thing: Any) -> bool:
    """Whether `thing` is a source of batches, whose state is captured when step() ends."""
    iterable = hasattr(thing, "__iter__") or hasattr(thing, "__next__")
    mine = isinstance(thing, (LoaderPosition, GeneratorState))
    return mine or (iterable and not isinstance(thing, torch.nn.Module))


def is_scheduler(thing: Any) -> bool:
    """Whether `thing` is a learning-rate scheduler."""
    inner = getattr(thing, "scheduler", thing)  # accelerate wraps schedulers
    return isinstance(inner, LRScheduler) or (
        hasattr(inner, "optimizer") and hasattr(inner, "step")
    )


class GeneratorState:
    """A wrapper that gives a torch.Generator the methods state_dict and load_state_dict."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["state"])


class LoaderPosition:
    """The position of a DataLoader in its current epoch: the number of batches `served`, and the
    state `began` of generators and samplers at the start of the epoch. The DataLoader's class is
    replaced by a subclass that counts batches."""

    def __init__(
        self, loader: DataLoader[Any], before_batch: Callable[[], None], settle: Callable[[], None]
    ) -> None:
        if "_position" not in vars(loader):
            # accelerate's loaders have a property named __class__
            vars(object)["__class__"].__set__(loader, _counted(type(loader)))
        vars(loader)["_position"] = self
        self._loader, self.before_batch, self._settle = loader, before_batch, settle
        self.began: Mapping[str, Any] = {}
        self.served = 0
        # the position at which the next iteration resumes; None after a step or the end of an epoch
        self.resumed: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return dict(self.resumed or {"began": self.began, "served": self.served})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.resumed = state if state["served"] else None

    def iterate(self, begin: Callable[[], Iterator[Any]]) -> _Batches:
        """Return an iterator that begins at the resumed position, or at the start of an epoch.
        `begin` is the loader's own `__iter__`."""
        self.before_batch()
        if self.resumed is None:
            return _Batches(self, self.begin_epoch(begin), None)
        self.began, self.served = self.resumed["began"], self.resumed["served"]
        self._set_order(self.began)
        batches = begin()
        _skip(batches, self.served)
        self._settle()
        return _Batches(self, batches, begin)

    def begin_epoch(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self.resumed, self.served = None, 0
        own = [generator.get_state() for generator in self._generators()]
        counters = [getattr(owner, key) for owner, key in self._counters()]
        self.began = {"global": generators(HOST), "own": own, "counters": counters}
        return begin()

    def _set_order(self, began: Mapping[str, Any]) -> None:
        set_generators(began["global"], HOST)
        for generator, state in zip(self._generators(), began["own"]):
            generator.set_state(state)
        for (owner, key), value in zip(self._counters(), began["counters"]):
            setattr(owner, key, value)

    def _owners(self) -> list[Any]:
        """Return the loader and its samplers without duplicates."""
        found: list[Any] = [self._loader]
        for owner in found:
            inner = (getattr(owner, name, None) for name in SAMPLERS)
            found += [i for i in inner if i is not None and all(i is not o for o in found)]
        return found

    def _generators(self) -> list[torch.Generator]:
        held = (getattr(owner, "generator", None) for owner in self._owners())
        return list({id(g): g for g in held if isinstance(g, torch.Generator)}.values())

    def _counters(self) -> list[tuple[Any, str]]:
        pairs = ((owner, key) for owner in self._owners() for key in COUNTERS)
        return [(owner, key) for owner, key in pairs if type(getattr(owner, key, None)) is int]


def _counted(cls: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """Return a subclass of `cls` with the same name that counts batches."""

    def __iter__(self: Any) -> _Batches:
        position: LoaderPosition = self._position
        return position.iterate(partial(cls.__iter__, self))

    return type(cls.__name__, (cls,), {"__iter__": __iter__, "__doc__": cls.__doc__})


class _Batches:
    """The iterator over the batches of one epoch. If a resumed epoch has no batch left, `begin`
    starts the next epoch."""

    def __init__(
        self,
        position: LoaderPosition,
        batches: Iterator[Any],
        begin: Callable[[], Iterator[Any]] | None,
    ) -> None:
        self._position, self._batches, self._begin = position, batches, begin

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        position = self._position
        position.before_batch()
        try:
            batch = next(self._batches)
        except StopIteration:
            position.resumed = None
            if self._begin is None:
                raise
            # the resumed step was the last step of its epoch
            self._batches, self._begin = position.begin_epoch(self._begin), None
            batch = next(self._batches)
        self._begin = None
        position.served += 1
        return batch


def _skip(batches: Iterator[Any], count: int) -> None:
    """Skip `count` batches, without reading their items if the loader has no worker processes."""
    source: Iterator[Any] = batches
    if getattr(batches, "_num_workers", 1) == 0:
        by_index = hasattr(getattr(batches, "_dataset", None), "__getitem__")
        source = getattr(batches, "_sampler_iter", batches) if by_index else batches
    for _ in range(count):
        next(source, None)
