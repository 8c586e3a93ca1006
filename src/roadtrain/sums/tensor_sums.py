"""TensorSums: sums torch tensors over all connected workers (sums.py). Each sum is a future, whose
result is a tensor on the same device. Does NOT divide the sums by the number of workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Self

import torch

from roadtrain.chunks import TRAINABLE
from roadtrain.device.accelerator import Accelerator, AfterCopies, HostBuffer, accelerator_of
from roadtrain.errors import ConfigError
from roadtrain.streaming.split import NAMES
from roadtrain.sums.agreement import OperationTicket
from roadtrain.sums.host_sums import HostSums


@dataclass(frozen=True)
class TensorSum:
    """A sum of a tensor, in progress."""

    future: torch.futures.Future[torch.Tensor]
    ticket: OperationTicket
    sums: TensorSums

    def wait(self) -> torch.Tensor:
        """Wait for the sum. In contrast to `future.wait`, this method detects that workers wait for
        each other in a cycle, and keeps the types of errors.

        Returns:
            The sum, with the dtype, shape and device of the tensor.

        Raises:
            DifferError: The workers do not sum the same tensors.
            PeerError: A worker has ended, or the sum was not complete within the deadline.
        """
        with self.sums.waiting(self.ticket):
            try:
                return self.future.wait()
            except RuntimeError as error:  # torch's future keeps an error's text, not its type
                cause = self.ticket.error or self.sums.error
                if cause is None:
                    raise
                raise cause from error


class _Staged:
    """The host buffers of a tensor of a device and of its sum, which are closed with their last
    user."""

    def __init__(self, nbytes: int, accelerator: Accelerator) -> None:
        self.pushed, self.summed = (HostBuffer(nbytes, accelerator) for _ in range(2))
        for buffer in (self.pushed, self.summed):
            weakref.finalize(self, buffer.close)


def _end(end: Callable[[], None], after: Sequence[AfterCopies]) -> None:
    end()
    for thread in after:
        thread.close()


def _lost(
    fail: Callable[[BaseException], None],
    copying: set[torch.futures.Future[torch.Tensor]],
    error: BaseException,
) -> None:
    """End the summation, and all futures that wait for copies, because of an error of a device."""
    fail(error)
    for future in list(copying):
        if not future.done():
            # `_checked` raises the error of the summation
            future.set_exception(error)  # type: ignore[arg-type]


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
        self.format = format
        self._sums, self._above, self._agreement = sums.near, sums.above, sums.agreement
        self.waiting = sums.agreement.waiting
        self._results: dict[int, torch.Tensor] = {}  # by key; cleared when a new epoch begins
        self._epoch = 0  # the agreement's epoch to which the buffers belong
        self._staged: dict[int, _Staged] = {}  # by key, for tensors of a device
        self._copying: set[torch.futures.Future[torch.Tensor]] = set()  # for tensors of a device
        # the threads that wait for copies from the device, and for copies to the device
        self._after: list[AfterCopies] = []
        self._end = weakref.finalize(self, _end, sums.ends.close, self._after)

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
            self._staged.clear()
        key = key_of(f"{number} {signature} {ticket.epoch}")
        on_device = tensor.device.type != "cpu"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[tensor.device] if on_device else None
        )
        how = priority, (format or self.format) if dtype == "fp32" else ""
        begin = partial(self._begin, ticket, key, dtype, how)
        if ticket.error is not None:
            future.set_result(tensor)  # `_checked` raises the error
        elif (accelerator := accelerator_of(tensor.device)) is not None:
            self._copy(accelerator, tensor.detach(), key, future, begin)
        else:
            flat = tensor.detach().reshape(-1)
            if key not in self._results:
                self._results[key] = torch.empty_like(flat)
            result = self._results[key]
            pushed, summed = (t.view(torch.uint8).numpy().data for t in (flat, result))
            begin(pushed, summed, lambda: future.set_result(result.view_as(tensor)))
        return TensorSum(future.then(partial(self._checked, ticket)), ticket, self)

    def _copy(
        self,
        accelerator: Accelerator,
        tensor: torch.Tensor,
        key: int,
        future: torch.futures.Future[torch.Tensor],
        begin: Callable[[memoryview, memoryview, Callable[[], None]], None],
    ) -> None:
        """Copy `tensor` to the host, begin the sum, and complete `future` once the sum is on the
        device. The copies run beside the work of the device."""
        lost = partial(_lost, self._sums.fail, self._copying)
        if not self._after:
            names = "summation from the device", "summation to the device"
            self._after += [AfterCopies(name, accelerator, lost) for name in names]
        flat, (outgoing, incoming) = tensor.reshape(-1), self._after
        if key not in self._staged:
            self._staged[key] = _Staged(flat.nbytes, accelerator)
        staged = self._staged[key]
        pushed, summed = (b.view[: flat.nbytes] for b in (staged.pushed, staged.summed))
        # Allocated now, so that the memory belongs to the caller's stream. Earlier uses of the
        # memory have ended when the copy from the device has.
        out = torch.empty_like(flat)

        def arrived() -> None:
            with accelerator.on(accelerator.into):  # the future waits for the current stream
                future.set_result(out.view_as(tensor))
            self._copying.discard(future)

        def back() -> None:
            try:
                incoming.put(staged.summed.copy_to_tensor(out), arrived)
            except Exception as error:
                lost(error)

        self._copying.add(future)
        outgoing.put(staged.pushed.copy_from_tensor(flat), partial(begin, pushed, summed, back))

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

    def _begin(
        self,
        ticket: OperationTicket,
        key: int,
        dtype: str,
        how: tuple[int, str],
        pushed: memoryview,
        summed: memoryview,
        done: Callable[[], None],
    ) -> None:
        """Begin the sum of `pushed`, with the priority and wire format `how`, once all workers have
        begun the same operation. Then call `done`."""
        calls = iter((done,))  # called once, and then freed: WorkerSums keeps `complete`

        def finish() -> None:
            for call in calls:
                call()

        def complete() -> None:
            self._agreement.done(ticket)
            finish()

        def ready() -> None:
            priority, format = how
            if self._above is not None:
                self._above.how[key] = how  # the format applies between hosts only
                format = ""
            self._sums.sum(key, pushed, summed, dtype, complete, priority=priority, format=format)

        self._agreement.run(ticket, ready, lambda error: finish())  # `_checked` raises the error

    @property
    def error(self) -> BaseException | None:
        """The error that has ended the summation, or None."""
        return self._sums.error

    def close(self) -> None:
        """End the summation, after a few seconds for other workers that still need this worker's
        reducer."""
        self._end()
        self._staged.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key_of(text: str) -> int:
    """Hash a text to 62 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2
