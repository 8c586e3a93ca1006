"""Sums of named tensors over the workers: what Horovod's and BytePS's calls have in common.

    begin(tensor, name) -> Handle -> finish(handle) -> a tensor that is the caller's own

NOTE keys. A tensor's key is a hash of its name, type, shape and operation, so workers may call in
any order. A key's buffers stay for ever, so a name is used again and again; with another size or
dtype than at first it is another key. NOTE unnamed. One without a name is named by its size, its
dtype and the lowest number that none under way has: buffers do not grow with the number of calls.
Workers agree where all make their unnamed calls, and finish them, in the same order; where that
order depends on time (on `poll`), names are needed. NOTE agreement. That all mean the same by a
name (or by the n-th unnamed call) is checked when it is new, and while a call waits
(sums/agreement.py): who differs, and those who wait for each other, all get a DifferError within
seconds, and may go on. What is then under way anywhere is given up.

What the summation service does not sum (fp64, integers) goes through torch.distributed, where order
always matters: all workers come to such a call before it begins. Assumes a Summation. Does NOT
differentiate, and does NOT take sparse tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from roadtrain.chunks import TRAINABLE
from roadtrain.device.copies import own_device
from roadtrain.errors import ConfigError, LoopError, PeerError, RoadtrainError, TwiceError
from roadtrain.integrations.ddp import Summation
from roadtrain.streaming.split import DTYPES, NAMES
from roadtrain.sums.agreement import OperationTicket
from roadtrain.sums.tensor_sums import described, key_of

AT_ONCE = "unnamed, waited for"  # one call at a time: nothing to number
UNNAMED = "an unnamed sum"  # to the other workers, by its number
SUMMED = {DTYPES[name] for name in TRAINABLE}


@dataclass(eq=False)
class Handle:
    """A sum under way. `out`: where it goes, None: into a new tensor. `factor`: of it, at the
    end."""

    name: str
    wait: Callable[[], torch.Tensor]
    done: Callable[[], bool]
    out: torch.Tensor | None
    factor: float
    ticket: OperationTicket | None = None  # of what all must agree about


class Exchange:
    """`begin`, `finish`. `close` it before the process group ends."""

    def __init__(self, summation: Summation) -> None:
        self.summation, self.rank, self.workers = summation, summation.rank, summation.workers
        self._under_way: dict[str, Handle] = {}  # not finished
        self._closed = False

    @torch.no_grad()
    def begin(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        *,
        out: torch.Tensor | None = None,
        divisor: float = 1,
        factor: float = 1.0,
        priority: int = 0,
        format: str = "",
        accumulate: bool = False,
    ) -> Handle:
        """Each worker's `tensor` is divided by `divisor` (in its place if it is `out` too), then
        summed. It must not change before the end. Smaller priorities go first. `accumulate`: an
        asynchronous service adds it to what is there; others' sums go through torch then. Raises
        ConfigError, LoopError."""
        if self._closed:
            raise ConfigError("a sum after shutdown()", hint="shutdown() comes after the last step")
        identity = UNNAMED if name in (None, AT_ONCE) else name
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name or 'a tensor'} is sparse ({tensor.layout}), only dense tensors are summed",
                hint="Embedding(..., sparse=False), or tensor.to_dense()",
            )
        name = name or next(
            free
            for i in itertools.count()
            if (free := f"unnamed {tensor.numel()} {tensor.dtype} {i}") not in self._under_way
        )
        before = self._under_way.get(name)
        # else it was given up
        if before is not None and (before.ticket is None or before.ticket.error is None):
            raise TwiceError(
                f"{name!r} is being summed already",
                hint=(
                    "synchronize() its handle first; names of tensors under way together must"
                    " differ"
                ),
            )
        if tensor.dtype in SUMMED and accumulate == (self.summation.rule == "accumulate"):
            if divisor != 1:
                tensor = tensor.div_(divisor) if out is tensor else tensor / divisor
            begun = self.summation.sum(
                key_of(name),
                identity,
                tensor.contiguous(),
                detail=_says(divisor, factor),
                priority=priority,
                format="" if format == NAMES[tensor.dtype] else format,
            )
            handle = Handle(name, begun.wait, begun.future.done, out, factor, begun.ticket)
        else:
            self.summation.agree(identity, described(tensor) + _says(divisor, factor))
            handle = Handle(name, *_by_torch(tensor, divisor), out, factor)
        self._under_way[name] = handle
        return handle

    @torch.no_grad()
    def finish(self, handle: Handle) -> torch.Tensor:
        """Waits. Raises what has failed, typed: LostError, DeadlineError and others of
        errors.py."""
        if self._under_way.pop(handle.name, None) is not handle:
            raise LoopError(
                f"the handle of {handle.name!r} was synchronized before", hint="once for each"
            )
        try:
            found = handle.wait()
        except RuntimeError as error:  # torch's future keeps the words of an error, not its type
            raise self._why(error, handle) from error
        out = torch.empty_like(found) if handle.out is None else handle.out
        out.copy_(found)  # `found` is overwritten by the next sum of this name
        return out.mul_(handle.factor) if handle.factor != 1 else out

    def _why(self, error: RuntimeError, handle: Handle) -> RoadtrainError:
        """What ended that alone, or all: a Summation that has failed says why to every further
        call."""
        told = handle.ticket.error if handle.ticket is not None else None
        told = told or self.summation.error
        why = told if isinstance(told, RoadtrainError) else PeerError(str(error))
        why.add_note(f"while {handle.name!r} was waited for")
        return why

    def close(self) -> None:
        self._closed = True
        self.summation.close()


def _says(divisor: float, factor: float) -> str:
    """What is done, for people and to compare."""
    return (f", divided by {divisor:g}" if divisor != 1 else "") + (
        f", times {factor:g}" if factor != 1 else ""
    )


def _by_torch(
    tensor: torch.Tensor, divisor: float
) -> tuple[Callable[[], torch.Tensor], Callable[[], bool]]:
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
    return (
        tensor if tensor.is_cuda or dist.get_backend() != "nccl" else tensor.to(own_device("cuda"))
    )
