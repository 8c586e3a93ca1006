"""DDP over the summation service: the user's model, loop and optimizer stay; gradients meet at CPUs.

    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(roadtrain.Summation(spares=["10.0.0.9:7000"]), roadtrain.sum_hook)

Each worker runs a summer for the others in its own process; `spares` are hosts that run `roadtrain serve HOST:PORT
--sum`. Gradients are divided by the number of workers, then summed in their order: with two workers the bits of DDP's
own all-reduce, with more equal to rounding. Assumes an initialized process group, used once, for addresses. Does NOT
sum the workers of a host first.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from roadtrain.errors import ConfigError
from roadtrain.flow.shares import optimum
from roadtrain.model.split import NAMES
from roadtrain.node.dial import address_of, token_of
from roadtrain.node.summation import Summation as Sums
from roadtrain.node.summing import Summers
from roadtrain.spec.chunks import TRAINABLE
from roadtrain.units import parse_bytes
from roadtrain.wire.tcp import Options, listen

WORDS = 512  # bytes that a worker tells the others at the start
LEAVE_S = 10.0  # for the other workers to leave, at the end


class Summation:
    """The state of `sum_hook`. spares: HOST:PORT of spare hosts. rates, spare_rates: of the links of the workers' hosts
    (by rank) and of the spare ones, in any unit (None: all equal); parts are placed by them. address: of this host as
    the others reach it (None: the one that reaches MASTER_ADDR). token_file: the token of the spare hosts; the workers
    make one for themselves. budget: bytes of memory for this process's summer (None: half of what is free).
    deadline_s: how long a sum may take. Raises ConfigError, PeerError. `close` it before the process group ends."""

    def __init__(
        self, *, spares: Sequence[str] = (), rates: Sequence[float] | None = None,
        spare_rates: Sequence[float] | None = None, address: str | None = None, token_file: str | None = None,
        budget: str | int | None = None, deadline_s: float = 600.0,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("no process group", hint="torch.distributed.init_process_group() comes first")
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        given = list(rates or [1.0] * self.workers), list(spare_rates or [1.0] * len(spares))
        if (len(given[0]), len(given[1])) != (self.workers, len(spares)):
            raise ConfigError(f"{len(given[0])} rates for {self.workers} workers, {len(given[1])} for {len(spares)} "
                              "spare hosts", hint="one for each")
        self.shares = optimum(*given)
        others = [address_of(spare) for spare in spares]
        self._summers = Summers(parse_bytes(psutil.virtual_memory().available // 2 if budget is None else budget))
        here = address or _address_here()
        own_token, session = _tell_all(f"{secrets.token_hex()} {secrets.token_hex(8)}")[0].split()  # rank 0's
        options = Options(token=own_token.encode(), retry_s=30.0)
        self._listener = listen((here, 0), self._summers.accept, options)
        try:
            found = _tell_all("{}:{}".format(*self._listener.address))
            sites = [None if rank == self.rank else address_of(text) for rank, text in enumerate(found)]
            self._sums = Sums(self.rank, self.workers, [*sites, *others], self.shares.all, self._summers,
                              session=session, options=options, spare=replace(options, token=token_of(token_file)),
                              deadline_s=deadline_s)
        except BaseException:
            self._summers.close()
            self._listener.close()
            raise
        self._results: dict[int, torch.Tensor] = {}
        self._host: dict[int, torch.Tensor] = {}  # pinned twins of what is on a device
        self._copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._copier: threading.Thread | None = None
        self._closed = False
        weakref.finalize(self, _close, self._sums, self._summers, self._listener)

    def sum(self, key: int, tensor: torch.Tensor, *, priority: int = 0) -> torch.futures.Future[torch.Tensor]:
        """A future of the sum over all workers of `tensor` (fp32, bf16 or fp16, contiguous; not to be changed before).
        It is valid until the same key is summed again."""
        dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
        if dtype not in TRAINABLE:
            raise ConfigError(f"tensor {key} is {tensor.dtype}, summed are {', '.join(TRAINABLE)}")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[tensor.device] if tensor.is_cuda else None)
        flat = tensor.detach().reshape(-1)
        result = self._buffer(self._results, key, flat, pinned=tensor.is_cuda)
        if not tensor.is_cuda:
            self._begin(key, flat, result, dtype, priority, lambda: future.set_result(result.view_as(tensor)))
            return future.then(self._checked)
        host = self._buffer(self._host, key, flat, pinned=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        stream = torch.cuda.Stream(tensor.device)

        def back() -> None:
            with torch.cuda.stream(stream):
                out = torch.empty_like(tensor)
                out.view(-1).copy_(result, non_blocking=True)
                future.set_result(out)

        if self._copier is None:
            self._copier = threading.Thread(target=self._copy_all, name="summation", daemon=True)
            self._copier.start()
        self._copied.put((event, (key, host, result, dtype, priority, back)))
        return future.then(self._checked)

    def _checked(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """What is raised here, whoever waits gets; DDP takes an exception that is set for a value."""
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
        self, key: int, grad: torch.Tensor, result: torch.Tensor, dtype: str, priority: int, done: Callable[[], None]
    ) -> None:
        pushed, summed = (t.view(torch.uint8).numpy().data for t in (grad, result))
        self._sums.sum(key, pushed, summed, dtype, done, priority=priority)

    @staticmethod
    def _buffer(kept: dict[int, torch.Tensor], key: int, like: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        """Made once and used again."""
        if key not in kept or kept[key].numel() != like.numel() or kept[key].dtype != like.dtype:
            kept[key] = torch.empty(like.numel(), dtype=like.dtype, pin_memory=pinned)
        return kept[key]

    def close(self) -> None:
        """Waits a little for the other workers, who may still need this one's summer."""
        if not self._closed:
            self._closed = True
            self._copied.put(None)
            _close(self._sums, self._summers, self._listener)

    def __enter__(self) -> Summation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(sums: Sums, summers: Summers, listener: Any) -> None:
    sums.close()
    summers.close(LEAVE_S)
    listener.close()


def sum_hook(state: Summation, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `register_comm_hook`. What DDP gives last is nearest the input, and wanted first by the next forward."""
    grads = bucket.buffer()
    grads.div_(state.workers)
    key = bucket.index() << 40 | grads.numel()  # another after DDP has grouped anew
    return state.sum(key, grads, priority=-bucket.index())


# DDP compares them with the classes themselves
sum_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def _address_here() -> str:
    """The address of this host on the way to MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((master, 9))
        return str(sock.getsockname()[0])


def _tell_all(text: str) -> list[str]:
    """What every worker says, by rank."""
    raw = text.encode()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.zeros(WORDS, dtype=torch.uint8)
    mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    found = [torch.zeros(WORDS, dtype=torch.uint8, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine.to(device))
    return [bytes(one.cpu().numpy()).rstrip(b"\0").decode() for one in found]
