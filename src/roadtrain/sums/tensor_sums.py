"""TensorSums: sums of torch's tensors over all workers, by what a rendezvous has made
(rendezvous.py): a future of each, on the tensor's own device.

What is on an accelerator is copied to pinned memory and back; a thread waits for these copies.
Does NOT divide by the number of workers, and does NOT know models or process groups.
"""

from __future__ import annotations

import contextlib
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
from roadtrain.sums.agreement import OperationTicket
from roadtrain.sums.rendezvous import HostSums


@dataclass
class Named:
    """What `TensorSums.sum` may be asked for instead of a number alone. `identity`: what the
    workers must mean the same by, in words; `says`: beside type and shape; `ticket`: of the
    agreement about it, from `sum` on.
    """

    number: int
    identity: str
    says: str = ""
    ticket: OperationTicket | None = None


def described(tensor: torch.Tensor) -> str:
    """Type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class TensorSums:
    """`format`: how fp32 travels between hosts where a sum does not say it. `ends`: what ends all
    this, from the last on; they are called by `close`, or when nobody holds this any more."""

    def __init__(self, sums: HostSums, format: str, ends: list[Callable[[], None]]) -> None:
        self.format, self._ends = format, ends
        self._sums, self._above, self._agreement = sums.near, sums.above, sums.agreement
        self._results: dict[int, torch.Tensor] = {}  # of this epoch, as the next
        self._host: dict[int, torch.Tensor] = {}  # pinned copies of what is on a device
        self._epoch = 0  # the agreement's, that the buffers are of
        self._copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._copier: threading.Thread | None = None
        self._closed = False
        weakref.finalize(self, end_all, ends)

    def sum(
        self, key: int | Named, tensor: torch.Tensor, *, priority: int = 0, format: str = ""
    ) -> torch.futures.Future[torch.Tensor]:
        """A future of the sum over all workers of `tensor` (fp32, bf16 or fp16, contiguous; not
        to be changed before). It is valid until the same key is summed again, and not to be
        written to: others may need it. `format`: instead of that of all, for fp32. The future
        raises DifferError, soon and on all workers, where they mean different things by it;
        other sums may follow."""
        dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
        named = key if isinstance(key, Named) else Named(key, f"tensor {key}")
        if dtype not in TRAINABLE:
            raise ConfigError(
                f"{named.identity} is {tensor.dtype}, summed are {', '.join(TRAINABLE)}"
            )
        if self._sums.error is not None:
            raise self._sums.error
        signature = f"{described(tensor)}{named.says}{f', as {format}' if format else ''}"
        named.ticket = ticket = self._agreement.begin(named.identity, signature)
        if self._epoch != ticket.epoch:
            self._epoch = ticket.epoch
            self._results.clear()
            self._host.clear()
        key = key_of(f"{named.number} {signature} {ticket.epoch}")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[tensor.device] if tensor.is_cuda else None
        )
        flat = tensor.detach().reshape(-1)
        how = priority, (format or self.format) if dtype == "fp32" else ""
        result = self._buffer(self._results, key, flat, pinned=tensor.is_cuda)
        if not tensor.is_cuda:
            self._begin(
                ticket,
                key,
                flat,
                result,
                dtype,
                how,
                lambda: future.set_result(result.view_as(tensor)),
            )
            return future.then(partial(self._checked, ticket))
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
        self._copied.put((event, (ticket, key, host, result, dtype, how, back)))
        return future.then(partial(self._checked, ticket))

    def agree(self, identity: str, signature: str) -> None:
        """Waits until all workers have come to this. Raises DifferError on all where they do not
        mean the same by it, DeadlineError, LostError."""
        self._agreement.agree(identity, signature)

    def begins_anew(self) -> None:
        """Where nobody waits by `waiting`: the program knows of a disagreement that there was
        before."""
        self._agreement.program_goes_on()

    def waiting(self, ticket: OperationTicket) -> contextlib.AbstractContextManager[None]:
        """Around a wait for a sum: the calling thread begins nothing before it has that."""
        return self._agreement.waiting(ticket)

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
            event, words = item
            try:
                event.synchronize()
                self._begin(*words)
            except BaseException as error:
                self._sums.fail(error)
                words[-1]()  # `_checked` tells whoever waits

    def _begin(
        self,
        ticket: OperationTicket,
        key: int,
        grad: torch.Tensor,
        result: torch.Tensor,
        dtype: str,
        how: tuple[int, str],
        done: Callable[[], None],
    ) -> None:
        """Once all workers agree about it."""
        pushed, summed = (t.view(torch.uint8).numpy().data for t in (grad, result))

        def complete() -> None:
            self._agreement.done(ticket)
            done()

        def ready() -> None:
            format = how[1]
            if self._above is not None:
                self._above.how[key] = how  # formats are between hosts
                format = ""
            self._sums.sum(key, pushed, summed, dtype, complete, priority=how[0], format=format)

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
        if not self._closed:
            self._closed = True
            self._copied.put(None)
            end_all(self._ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key_of(text: str) -> int:
    """62 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2


def end_all(ends: list[Callable[[], None]]) -> None:
    while ends:
        ends.pop()()
