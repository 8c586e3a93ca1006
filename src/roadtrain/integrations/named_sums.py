"""Sums of named tensors over the workers, with which horovod.py implements the calls of Horovod and
BytePS. Sums are not differentiable, and sparse tensors are not supported.

    begin(tensor, name) -> Handle -> finish(handle) -> a tensor that belongs to the caller

Note "keys". A tensor's key is a hash of its name, type, shape and operation, so workers may make
their calls in any order. The buffers of a key are kept forever, so a name should be reused for
tensors of the same size and dtype.

Note "unnamed". An unnamed tensor gets a name from its size, its dtype and the lowest free number.
So all workers must make and finish their unnamed calls in the same order. If the order of calls
depends on time (as with `poll`), use names.

Note "agreement". The workers check that they make the same calls (sums/agreement.py). If they
disagree or wait for each other, every worker gets a DifferError within seconds. All calls in flight
are abandoned, and the workers may continue.

Tensors that the summation service cannot sum (fp64, integers) are summed by torch.distributed once
all workers have made the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from roadtrain.chunks import TRAINABLE
from roadtrain.device.choice import own_device
from roadtrain.errors import ConfigError, LoopError, PeerError, RoadtrainError, TwiceError
from roadtrain.integrations.ddp import Summation
from roadtrain.stages.data_group import deadline_of
from roadtrain.stages.op_queue import typed
from roadtrain.streaming.split import DTYPES, NAMES
from roadtrain.sums.agreement import OperationTicket
from roadtrain.sums.tensor_sums import described, key_of

AT_ONCE = "unnamed, waited for"  # name of an unnamed call that waits; a worker has one at a time
UNNAMED = "an unnamed sum"  # name for comparison among workers, which add a number
SUMMED = {DTYPES[name] for name in TRAINABLE}


@dataclass(eq=False)
class Handle:
    """A sum in flight. `out`: the tensor that receives the result; if None, the result is a new
    tensor. `factor`: number by which the result is multiplied."""

    name: str
    wait: Callable[[], torch.Tensor]
    done: Callable[[], bool]
    out: torch.Tensor | None
    factor: float
    ticket: OperationTicket | None = None  # how all workers agree on this sum


class Exchange:
    """Sums of tensors over all workers. Each worker has its own Exchange. Call close() before the
    process group is destroyed."""

    def __init__(self, summation: Summation) -> None:
        self.summation, self.rank, self.workers = summation, summation.rank, summation.workers
        self._under_way: dict[str, Handle] = {}  # not finished yet
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
        """Divide each worker's `tensor` by `divisor`, and begin to sum the tensors. If `out` is
        `tensor`, the division is in place.

        The tensor must not change before `finish` returns. Sums with smaller priorities go first.
        If `accumulate` is set, the tensor is added to the value that an asynchronous service
        stores. Raises ConfigError or LoopError.
        """
        if self._closed:
            raise ConfigError("a sum was requested after shutdown()", hint="call shutdown() last")
        identity = UNNAMED if name in (None, AT_ONCE) else name
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name or 'a tensor'} is sparse ({tensor.layout}), but must be dense to be summed",
                hint="use Embedding(..., sparse=False), or tensor.to_dense()",
            )
        name = name or next(
            free
            for i in itertools.count()
            if (free := f"unnamed {tensor.numel()} {tensor.dtype} {i}") not in self._under_way
        )
        before = self._under_way.get(name)
        # a call that was abandoned may be repeated
        if before is not None and (before.ticket is None or before.ticket.error is None):
            raise TwiceError(
                f"{name!r} is already being summed",
                hint="synchronize() its handle first; tensors that are summed at the same time need"
                " different names",
            )
        if tensor.dtype in SUMMED and accumulate == (self.summation.rule == "accumulate"):
            if divisor != 1:
                tensor = tensor.div_(divisor) if out is tensor else tensor / divisor
            begun = self.summation.sum(
                key_of(name),
                identity,
                tensor.contiguous(),
                detail=_scaling(divisor, factor),
                priority=priority,
                format="" if format == NAMES[tensor.dtype] else format,
            )
            handle = Handle(name, begun.wait, begun.future.done, out, factor, begun.ticket)
        else:
            self.summation.agree(identity, described(tensor) + _scaling(divisor, factor))
            handle = Handle(name, *_by_torch(tensor, divisor), out, factor)
        self._under_way[name] = handle
        return handle

    @torch.no_grad()
    def finish(self, handle: Handle) -> torch.Tensor:
        """Wait for the sum and return it. Raises an error of roadtrain, such as LostError or
        DeadlineError, if the sum fails."""
        if self._under_way.pop(handle.name, None) is not handle:
            raise LoopError(
                f"the handle of {handle.name!r} was already synchronized", hint="synchronize once"
            )
        try:
            found = handle.wait()
        except RoadtrainError as error:
            error.add_note(f"while waiting for {handle.name!r}")
            raise
        out = torch.empty_like(found) if handle.out is None else handle.out
        out.copy_(found)  # `found` is overwritten by the next sum of this name
        return out.mul_(handle.factor) if handle.factor != 1 else out

    def close(self) -> None:
        self._closed = True
        self.summation.close()


def _scaling(divisor: float, factor: float) -> str:
    """Describe the scaling of a sum, for comparison among workers."""
    return (f", divided by {divisor:g}" if divisor != 1 else "") + (
        f", times {factor:g}" if factor != 1 else ""
    )


def _by_torch(
    tensor: torch.Tensor, divisor: float
) -> tuple[Callable[[], torch.Tensor], Callable[[], bool]]:
    """Begin a sum by torch.distributed, and return two functions: wait for the sum, and tell
    whether it is done."""
    exact = tensor.is_floating_point() or tensor.is_complex()
    carried = on_link(tensor).clone()
    work: Any = dist.all_reduce(carried.div_(divisor) if exact else carried, async_op=True)

    def wait() -> torch.Tensor:
        try:
            work.wait()
        except RuntimeError as error:
            group = dist.group.WORLD
            assert group is not None
            why = typed(
                error, f"the sum of a {described(tensor)}", deadline_of(group, carried.device)
            )
            raise why if isinstance(why, RoadtrainError) else PeerError(str(error)) from error
        if not exact and divisor != 1:
            carried.div_(divisor, rounding_mode="floor")
        return carried.to(tensor.device)

    return wait, work.is_completed


def on_link(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy on the GPU if the process group (NCCL) cannot send host
    memory."""
    return (
        tensor if tensor.is_cuda or dist.get_backend() != "nccl" else tensor.to(own_device("cuda"))
    )
