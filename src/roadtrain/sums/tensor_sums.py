"""TensorSums: sums torch tensors over all connected workers (sums.py). Each sum is a future, whose
result is a tensor on the same device. Does NOT divide the sums by the number of workers."""

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
    """A sum of a tensor, in progress."""

    future: torch.futures.Future[torch.Tensor]
    ticket: OperationTicket
    agreement: Agreement

    def wait(self) -> torch.Tensor:
        """Wait for the sum. In contrast to `future.wait`, this method detects that workers wait for
        each other in a cycle.

        Returns:
            The sum, with the dtype, shape and device of the tensor.

        Raises:
            DifferError: The workers do not sum the same tensors.
        """
        with self.agreement.waiting(self.ticket):
            return self.future.wait()


def described(tensor: torch.Tensor) -> str:
    """Format the dtype and shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class TensorSums:
    """Sums tensors over all workers. The summation ends when this object is closed or
    garbage-collected.

    Args:
        sums: The connection to the other workers.
        format: Default wire format of fp32 tensors between hosts (sums/formats.py).
    """

    def __init__(self, sums: HostSums, format: str) -> None:
        self.format, self._end = format, sums.ends.close
        self._sums, self._above, self._agreement = sums.near, sums.above, sums.agreement
        self._results: dict[int, torch.Tensor] = {}  # by key; cleared when a new epoch begins
        # pinned copies of tensors on a device, by key; cleared when a new epoch begins
        self._host: dict[int, torch.Tensor] = {}
        self._epoch = 0  # the agreement's epoch to which the buffers belong
        self._copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._copier: threading.Thread | None = None
        weakref.finalize(self, self._end)

    def sum(
        self,
        number: int,
        identity: str,
        tensor: torch.Tensor,
        *,
        detail: str = "",
        priority: int = 0,
        format: str = "",
    ) -> TensorSum:
        """Begin the sum of a tensor over all workers.

        Args:
            number: Number of the result buffer. The result must not be written to, and is valid
                until `sum` is called again with the same number.
            identity: Name of the operation. Must be the same on all workers.
            tensor: A contiguous tensor of fp32, bf16 or fp16. Must not be changed until the sum is
                complete.
            detail: A text that must be the same on all workers, like the dtype and the shape.
            priority: Sums with smaller priorities are sent first.
            format: Wire format of an fp32 tensor. If empty, the default is used.

        Returns:
            The sum in progress. If the workers do not sum the same tensors, waiting for the sum
            raises DifferError on all workers. Other sums may be begun after such an error.

        Raises:
            ConfigError: The dtype cannot be summed.
        """
        dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
        if dtype not in TRAINABLE:
            raise ConfigError(
                f"{identity} has {tensor.dtype}, but only {', '.join(TRAINABLE)} can be summed"
            )
        if self._sums.error is not None:
            raise self._sums.error
        signature = f"{described(tensor)}{detail}{f', as {format}' if format else ''}"
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
        host = self._buffer(self._host, key, flat, pinned=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        # on the stream that `copy_` uses: the tensor's device may not be the current device
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
        """Wait until all workers have called `agree` with the same arguments.

        Args:
            identity: Name of the operation.
            signature: Details that must be the same on all workers.

        Raises:
            DifferError: The signatures differ. Raised on all workers.
            DeadlineError: Another worker did not call `agree` in time.
            LostError: A worker has left.
        """
        self._agreement.agree(identity, signature)

    def resume(self) -> None:
        """Note that the program continues after a DifferError, and may begin sums again. Needed if
        the program waits for futures instead of calling `TensorSum.wait`."""
        self._agreement.resume()

    def _checked(
        self, ticket: OperationTicket, future: torch.futures.Future[torch.Tensor]
    ) -> torch.Tensor:
        """Return the sum that `future` holds, or raise the error of the failed operation. An error
        is never stored in `future`, because DDP would use it as the sum."""
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
                back()  # `_checked` raises the error

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
        """Begin the sum, with the priority and wire format `how`, once all workers have begun the
        same operation."""
        pushed, summed = (t.view(torch.uint8).numpy().data for t in (grad, result))

        def complete() -> None:
            self._agreement.done(ticket)
            done()

        def ready() -> None:
            priority, format = how
            if self._above is not None:
                self._above.how[key] = how  # the format applies between hosts only
                format = ""
            self._sums.sum(key, pushed, summed, dtype, complete, priority=priority, format=format)

        self._agreement.run(ticket, ready, lambda error: done())  # `_checked` raises the error

    @staticmethod
    def _buffer(
        kept: dict[int, torch.Tensor], key: int, like: torch.Tensor, *, pinned: bool
    ) -> torch.Tensor:
        """Return the buffer of `key` in `kept`, which is allocated if it does not fit `like`."""
        if key not in kept or kept[key].numel() != like.numel() or kept[key].dtype != like.dtype:
            kept[key] = torch.empty(like.numel(), dtype=like.dtype, pin_memory=pinned)
        return kept[key]

    @property
    def error(self) -> BaseException | None:
        """The error that has ended the summation, or None."""
        return self._sums.error

    def close(self) -> None:
        """End the summation, after a few seconds for other workers that still need this worker's
        reducer."""
        self._copied.put(None)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key_of(text: str) -> int:
    """Hash a text to 62 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2
