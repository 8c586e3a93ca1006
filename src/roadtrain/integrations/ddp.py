"""DDP over the summation service: the user's model, loop and optimizer stay; gradients meet at
CPUs.

    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(roadtrain.Summation(spares=["10.0.0.9:7000"]), roadtrain.sum_hook)

Each worker runs a reducer for the others in its own process; `spares` are hosts that run `roadtrain
serve HOST:PORT --sum`. Workers of one host sum through shared memory first. Gradients are divided
by the number of workers, then summed in their order: with two workers the bits of DDP's own
all-reduce, with more equal to rounding. Assumes an initialized process group, used at the start,
for addresses.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import psutil
import torch
import torch.distributed as dist

from roadtrain.chunks import TRAINABLE
from roadtrain.device.copies import own_device
from roadtrain.errors import ConfigError
from roadtrain.kernels.codecs import format_of
from roadtrain.protocol.reducer import RULES
from roadtrain.runtime.agreement import OperationTicket
from roadtrain.runtime.rendezvous import SumSetup, Wanted, connect
from roadtrain.streaming.split import NAMES
from roadtrain.transport.address import token_of
from roadtrain.transport.tcp import Tls
from roadtrain.units import parse_bytes


@dataclass(eq=False, repr=False, kw_only=True)
class Summation:
    """The state of `sum_hook`: this worker's end of the summation service. Raises ConfigError,
    PeerError. `close` it before the process group ends."""

    # HOST:PORT of spare hosts, or the path of a file with one a line (and its rate, if any). Worker
    # 0 reads the file again while training goes on: a host that is added is used, one that is
    # removed is left out. A host that dies is gone round, and used again when it is back.
    spares: Sequence[str] | str = ()
    # of the links of the workers' hosts (by rank) and of the spare ones, in any unit; parts of the
    # sums are placed by them; None: all equal
    rates: Sequence[float] | None = None
    spare_rates: Sequence[float] | None = None
    # how fp32 travels between hosts: "" (as it is), bf16, fp16, topk:0.01, onebit, dither:4, or one
    # of your own (kernels/codecs.py)
    format: str = ""
    local: bool = True  # the workers of a host sum through shared memory first
    # which workers of a host do so, by their place on it; None: as its topology says
    roots: Sequence[int] | None = None
    rule: str = "sum"  # or "accumulate", for asynchronous training
    # of this host, as the others reach it; None: the one that reaches MASTER_ADDR
    address: str | None = None
    # the token of the spare hosts, by which the workers of several hosts know each other too;
    # needed beyond this host
    token_file: str | None = None
    budget: str | int | None = None  # bytes for this process's reducers; None: half of what is free
    deadline_s: float = 600.0  # how long a sum may take
    # this host's certificate and key, and who signs the others'; to spare hosts and other workers
    tls: Tls | None = None
    rank: int = field(init=False)
    workers: int = field(init=False)

    def __post_init__(self) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "no process group", hint="torch.distributed.init_process_group() comes first"
            )
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        if self.format:
            format_of(self.format)
        if self.rule not in RULES or (self.format and self.rule == "accumulate"):
            raise ConfigError(
                f"rule={self.rule!r} with format={self.format!r}",
                hint=(
                    "sum, or accumulate without a format: what stays at a reducer would be rounded"
                ),
            )
        wanted = Wanted(self.spares, self.spare_rates, token_of(self.token_file), self.tls)
        free = psutil.virtual_memory().available
        self._ends: list[Callable[[], None]] = []
        try:
            setup = SumSetup(
                rank=self.rank,
                workers=self.workers,
                inside=self.local,
                rule=self.rule,
                address=self.address or _address_here(),
                nbytes=parse_bytes(free // 2 if self.budget is None else self.budget),
                deadline_s=self.deadline_s,
                rates=self.rates,
                roots=self.roots,
            )
            sums = connect(wanted, setup, tell_all, self._ends)
        except BaseException:
            _close(self._ends)
            raise
        self._sums, self._above, self._agreement = sums.near, sums.above, sums.agreement
        self._results: dict[int, torch.Tensor] = {}  # of this epoch, as the next
        self._host: dict[int, torch.Tensor] = {}  # pinned copies of what is on a device
        self._epoch = 0  # the agreement's, that the buffers are of
        self._copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._copier: threading.Thread | None = None
        self._closed = False
        weakref.finalize(self, _close, self._ends)

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
            _close(self._ends)

    def __enter__(self) -> Summation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Named:
    """What `Summation.sum` may be asked for instead of a number alone. `identity`: what the workers
    must mean the same by, in words; `says`: beside type and shape; `ticket`: of the agreement about
    it, from `sum` on.
    """

    number: int
    identity: str
    says: str = ""
    ticket: OperationTicket | None = None


def described(tensor: torch.Tensor) -> str:
    """Type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return " ".join("x".join(map(str, tensor.shape)) for tensor in tensors)


def key_of(text: str) -> int:
    """62 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2


def _close(ends: list[Callable[[], None]]) -> None:
    while ends:
        ends.pop()()


def sum_hook(state: Summation, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `register_comm_hook`. What DDP gives last is nearest the input, and wanted first by
    the next forward."""
    if state.rule != "sum":
        raise ConfigError(
            f"DDP's gradients under rule={state.rule!r}",
            hint="asynchronous training: roadtrain.hvd",
        )
    if bucket.index() == 0:  # of another backward than one that has failed
        state.begins_anew()
    grads = bucket.buffer()
    grads.div_(state.workers)
    key = bucket.index() << 40 | grads.numel()  # another after DDP has grouped anew
    shapes = _shapes(bucket.gradients())
    says = f" of gradients {shapes}{', the last' * bucket.is_last()}"
    return state.sum(
        Named(key, f"DDP's bucket {bucket.index()}", says), grads, priority=-bucket.index()
    )


# DDP compares them with the classes themselves
sum_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def _address_here() -> str:
    """The address of this host on the way to MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((master, 9))
        return str(sock.getsockname()[0])


def tell_all(words: bytes) -> list[bytes]:
    """What every worker says, by rank."""
    device = own_device("cuda" if dist.get_backend() == "nccl" else "cpu")
    workers = range(dist.get_world_size())
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in workers]
    dist.all_gather(lengths, torch.tensor([len(words)], device=device))
    most = max(1, *(int(length) for length in lengths))
    found = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in workers]
    mine = torch.frombuffer(bytearray(words.ljust(most, b"\0")), dtype=torch.uint8)
    dist.all_gather(found, mine.to(device))
    return [bytes(one.cpu().numpy())[: int(length)] for one, length in zip(found, lengths)]
