"""TensorSums: sums of torch's tensors over all workers that have connected (sums.py): a future of
each, on the tensor's own device.

What is on an accelerator is copied to pinned memory and back; a thread waits for these copies.
Does NOT divide by the number of workers, and does NOT know models or process groups.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Self

import torch

from roadtrain.chunks import TRAINABLE
from roadtrain.errors import ConfigError
from roadtrain.streaming.split import NAMES
from roadtrain.sums.agreement import Agreement, OperationTicket
from roadtrain.sums.host_sums import HostSums


@dataclass(frozen=True)
class TensorSum:
    """The sum of one tensor under way. `ticket`: of the agreement about it."""

    future: torch.futures.Future[torch.Tensor]
    ticket: OperationTicket
    agreement: Agreement

    def wait(self) -> torch.Tensor:
        """The calling thread begins nothing before it has the sum."""
        with self.agreement.waiting(self.ticket):
            return self.future.wait()


def described(tensor: torch.Tensor) -> str:
    """Type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class TensorSums:
    """`format`: how fp32 travels between hosts where a sum does not say it. `close` ends all this,
    or that nobody holds it any more."""

    def __init__(self, sums: HostSums, format: str) -> None:
        self.format, self._end = format, sums.ends.close
        self._sums, self._above, self._agreement = sums.near, sums.above, sums.agreement
        self._results: dict[int, torch.Tensor] = {}  # of this epoch, as the next
        self._host: dict[int, torch.Tensor] = {}  # pinned copies of what is on a device
        self._epoch = 0  # the agreement's, that the buffers are of
        self._copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._copier: threading.Thread | None = None
        weakref.finalize(self, self._end)

    def sum(
        self,
        number: int,
        identity: str,
        tensor: torch.Tensor,
        *,
        says: str = "",
        priority: int = 0,
        format: str = "",
    ) -> TensorSum:
        """Begin the sum over all workers of `tensor` (fp32, bf16 or fp16, contiguous; not to be
        changed before). The sum is valid until the same number is summed again, and not to be
        written to: others may need it. `identity`: what the workers must mean the same by, in
        words; `says`: beside type and shape. `format`: instead of that of all, for fp32. The
        sum raises DifferError, soon and on all workers, where they mean different things by
        it; other sums may follow."""
        dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
        if dtype not in TRAINABLE:
            raise ConfigError(f"{identity} is {tensor.dtype}, summed are {', '.join(TRAINABLE)}")
        if self._sums.error is not None:
            raise self._sums.error
        signature = f"{described(tensor)}{says}{f', as {format}' if format else ''}"
        ticket = self._agreement.begin(identity, signature)
        if self._epoch != ticket.epoch:
            self._epoch = ticket.epoch
            self._results.clear()
            self._host.clear()
        key = key_of(f"{number} {signature} {ticket.epoch}")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[tensor.device] if tensor.is_cuda else None
        )
        flat = tensor.detach().reshape(-1)
        how = priority, (format or self.format) if dtype == "fp32" else ""
        result = self._buffer(self._results, key, flat, pinned=tensor.is_cuda)
        begin = partial(self._begin, ticket, key, dtype, how, result)
        if tensor.is_cuda:
            self._copy(tensor, flat, key, future, result, begin)
        else:
            begin(flat, lambda: future.set_result(result.view_as(tensor)))
        return TensorSum(future.then(partial(self._checked, ticket)), ticket, self._agreement)

    def _copy(
        self,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        key: int,
        future: torch.futures.Future[torch.Tensor],
        result: torch.Tensor,
        begin: Callable[[torch.Tensor, Callable[[], None]], None],
    ) -> None:
        """Begin once the tensor is on the host; the sum goes to the tensor's device."""
        host = self._buffer(self._host, key, flat, pinned=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        # where `copy_` ran, whatever the current device is
        event.record(torch.cuda.current_stream(tensor.device))
        stream = torch.cuda.Stream(tensor.device)

        def back() -> None:
            with torch.cuda.stream(stream):
                out = torch.empty_like(tensor)
                out.view(-1).copy_(result, non_blocking=True)
                future.set_result(out)

        if self._copier is None:
            self._copier = threading.Thread(target=self._copy_all, name="summation", daemon=True)
            self._copier.start()
        self._copied.put((event, partial(begin, host, back), back))

    def agree(self, identity: str, signature: str) -> None:
        """Waits until all workers have come to this. Raises DifferError on all where they do not
        mean the same by it, DeadlineError, LostError."""
        self._agreement.agree(identity, signature)

    def begins_anew(self) -> None:
        """Where nobody waits by `waiting`: the program knows of a disagreement that there was
        before."""
        self._agreement.program_goes_on()

    def _checked(
        self, ticket: OperationTicket, future: torch.futures.Future[torch.Tensor]
    ) -> torch.Tensor:
        """What is raised here, whoever waits gets; DDP takes an exception that is set for a
        value."""
        if ticket.error is not None:
            raise ticket.error
        if self._sums.error is not None:
            raise self._sums.error
        return future.value()

    def _copy_all(self) -> None:
        while (item := self._copied.get()) is not None:
            event, begin, back = item
            try:
                event.synchronize()
                begin()
            except BaseException as error:
                self._sums.fail(error)
                back()  # `_checked` tells whoever waits

    def _begin(
        self,
        ticket: OperationTicket,
        key: int,
        dtype: str,
        how: tuple[int, str],
        result: torch.Tensor,
        grad: torch.Tensor,
        done: Callable[[], None],
    ) -> None:
        """Once all workers agree about it."""
        pushed, summed = (t.view(torch.uint8).numpy().data for t in (grad, result))

        def complete() -> None:
            self._agreement.done(ticket)
            done()

        def ready() -> None:
            priority, format = how
            if self._above is not None:
                self._above.how[key] = how  # formats are between hosts
                format = ""
            self._sums.sum(key, pushed, summed, dtype, complete, priority=priority, format=format)

        self._agreement.run(ticket, ready, lambda error: done())  # `_checked` tells whoever waits

    @staticmethod
    def _buffer(
        kept: dict[int, torch.Tensor], key: int, like: torch.Tensor, *, pinned: bool
    ) -> torch.Tensor:
        """Made once and used again."""
        if key not in kept or kept[key].numel() != like.numel() or kept[key].dtype != like.dtype:
            kept[key] = torch.empty(like.numel(), dtype=like.dtype, pin_memory=pinned)
        return kept[key]

    @property
    def error(self) -> BaseException | None:
        """What has ended it."""
        return self._sums.error

    def close(self) -> None:
        """Waits a little for the other workers, who may still need this one's reducer."""
        self._copied.put(None)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key_of(text: str) -> int:
    """62 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2
