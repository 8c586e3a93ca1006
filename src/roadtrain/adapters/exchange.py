"""Sums of named tensors over the workers: what Horovod's and BytePS's calls have in common.

    begin(tensor, name) -> Handle -> finish(handle) -> a tensor that is the caller's own

NOTE keys. A tensor's key is a hash of its name, so workers agree on it without talking and may call in any order. A
key's buffers stay for ever, so a name is used again and again; with another size or dtype than at first it is another.
NOTE unnamed. One without a name is named by its size, its dtype and the lowest number that none under way has: buffers
do not grow with the number of calls. Workers agree where all make their unnamed calls, and finish them, in the same
order; where that order depends on time (on `poll`), names are needed.

What the summation service does not sum (fp64, integers) goes through torch.distributed, where order always matters.
Assumes a Summation. Does NOT differentiate, and does NOT take sparse tensors.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from roadtrain.adapters.ddp import Summation
from roadtrain.errors import ConfigError, LoopError, PeerError, RoadtrainError
from roadtrain.model.split import DTYPES, NAMES
from roadtrain.node.device import own_device
from roadtrain.spec.chunks import TRAINABLE

SUMMED = {DTYPES[name] for name in TRAINABLE}


@dataclass(eq=False)
class Handle:
    """A sum under way. `out`: where it goes, None: into a new tensor. `factor`: of it, at the end."""

    name: str
    wait: Callable[[], torch.Tensor]
    done: Callable[[], bool]
    out: torch.Tensor | None
    factor: float


class Exchange:
    """`begin`, `finish`. `close` it before the process group ends."""

    def __init__(self, summation: Summation) -> None:
        self.summation, self.rank, self.workers = summation, summation.rank, summation.workers
        self._under_way: dict[str, Handle] = {}  # not finished
        self._first: dict[str, tuple[int, torch.dtype]] = {}  # of every name
        self._closed = False

    @torch.no_grad()
    def begin(
        self, tensor: torch.Tensor, name: str | None = None, *, out: torch.Tensor | None = None, divisor: float = 1,
        factor: float = 1.0, priority: int = 0, format: str = "", accumulate: bool = False,
    ) -> Handle:
        """Each worker's `tensor` is divided by `divisor` (in its place if it is `out` too), then summed. It must not
        change before the end. Smaller priorities go first. `accumulate`: an asynchronous service adds it to what is
        there; others' sums go through torch then. Raises ConfigError, LoopError."""
        if self._closed:
            raise ConfigError("a sum after shutdown()", hint="shutdown() comes after the last step")
        if tensor.layout is not torch.strided:
            raise ConfigError(f"{name or 'a tensor'} is sparse ({tensor.layout}), only dense tensors are summed",
                              hint="Embedding(..., sparse=False), or tensor.to_dense()")
        name = name or next(free for i in itertools.count()
                            if (free := f"unnamed {tensor.numel()} {tensor.dtype} {i}") not in self._under_way)
        if name in self._under_way:
            raise LoopError(f"{name!r} is being summed already",
                            hint="synchronize() its handle first; names of tensors under way together must differ")
        if tensor.dtype in SUMMED and accumulate == (self.summation.rule == "accumulate"):
            if divisor != 1:
                tensor = tensor.div_(divisor) if out is tensor else tensor / divisor
            options: dict[str, Any] = {"format": format} if format not in ("", NAMES[tensor.dtype]) else {}
            future = self.summation.sum(self._key(name, tensor), tensor.contiguous(), priority=priority, **options)
            handle = Handle(name, future.wait, future.done, out, factor)
        else:
            handle = Handle(name, *_by_torch(tensor, divisor), out, factor)
        self._under_way[name] = handle
        return handle

    @torch.no_grad()
    def finish(self, handle: Handle) -> torch.Tensor:
        """Waits. Raises what has failed, typed: LostError, DeadlineError and others of errors.py."""
        if self._under_way.pop(handle.name, None) is not handle:
            raise LoopError(f"the handle of {handle.name!r} was synchronized before", hint="once for each")
        try:
            found = handle.wait()
        except RuntimeError as error:  # torch's future keeps the words of an error, not its type
            raise self._why(error, handle.name) from error
        out = torch.empty_like(found) if handle.out is None else handle.out
        out.copy_(found)  # `found` is overwritten by the next sum of this name
        return out.mul_(handle.factor) if handle.factor != 1 else out

    def _key(self, name: str, tensor: torch.Tensor) -> int:
        """See NOTE keys. 62 bits."""
        size = tensor.numel(), tensor.dtype
        if self._first.setdefault(name, size) != size:
            name = f"{name} {size}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2

    def _why(self, error: RuntimeError, name: str) -> RoadtrainError:
        """A Summation that has failed says why to every further call."""
        told = self.summation.error
        why = told if isinstance(told, RoadtrainError) else PeerError(str(error))
        why.add_note(f"while {name!r} was waited for")
        return why

    def close(self) -> None:
        self._closed = True
        self.summation.close()


def _by_torch(tensor: torch.Tensor, divisor: float) -> tuple[Callable[[], torch.Tensor], Callable[[], bool]]:
    """Averages of integers are rounded down, as Horovod's are."""
    exact = tensor.is_floating_point() or tensor.is_complex()
    carried = on_link(tensor).clone()
    work: Any = dist.all_reduce(carried.div_(divisor) if exact else carried, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        if not exact and divisor != 1:
            carried.div_(divisor, rounding_mode="floor")
        return carried.to(tensor.device)

    return wait, work.is_completed


def on_link(tensor: torch.Tensor) -> torch.Tensor:
    """Where the process group can reach it: NCCL alone knows no host memory."""
    return tensor if tensor.is_cuda or dist.get_backend() != "nccl" else tensor.to(own_device("cuda"))
