"""DDP over the summation service: model, loop and optimizer stay the same; gradients are summed on
CPUs.

    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(roadtrain.Summation(spares=["10.0.0.9:7000"]), roadtrain.sum_hook)

Each worker runs a reducer for all in its own process; `spares` are additional hosts that run
`roadtrain serve HOST:PORT --sum`. Workers of one host sum through shared memory first. Gradients
are divided by the number of workers, then summed in the order of ranks: with two workers the result
has the bits of DDP's own all-reduce, with more it is equal up to rounding. Needs an initialized
process group, which is used at the start to exchange addresses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import torch
import torch.distributed as dist

from roadtrain.device.copies import own_device
from roadtrain.errors import ConfigError
from roadtrain.options.check import Deadline, PathLike, Size, check_options
from roadtrain.sums.formats import format_of
from roadtrain.sums.protocol.reducer import RULES
from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.sums.sums import SumSetup, connect
from roadtrain.sums.tensor_sums import TensorSums
from roadtrain.transport.address import own_address, token_of
from roadtrain.transport.tcp import Tls
from roadtrain.units import parse_bytes

ANY_PORT = 9


@dataclass(eq=False, repr=False, kw_only=True)
class Summation(TensorSums):
    """A worker's end of the summation service: the state of `sum_hook`.

    Call close() before the process group is destroyed.

    Args:
        spares: HOST:PORT of spare hosts, or the path of a file with one per line (and its rate, if
            any). Worker 0 rereads the file during training: added hosts are used, removed ones
            are left out. A host that dies is bypassed, and used again when it is back.
        rates: Link rates of the workers' hosts, by rank, in any unit; parts of the sums are
            distributed accordingly. None: all equal.
        spare_rates: Link rates of the spare hosts, in the same unit. None: all equal.
        format: How fp32 is sent between hosts: "" (as it is), "bf16", "fp16", "topk:0.01",
            "onebit", "dither:4", or a format of your own (sums/formats.py).
        local: Whether the workers of a host sum through shared memory first.
        roots: Which workers of a host do so, by their local rank. None: according to its topology.
        rule: "sum", or "accumulate" for asynchronous training.
        address: Address of this host for the others. None: the one that reaches MASTER_ADDR.
        token_file: File with the token of the spare hosts, by which workers of several hosts also
            authenticate each other. Needed with more than one host.
        budget: Bytes for this process's reducers. None: half of the free memory.
        deadline_s: Seconds that a sum may take.
        tls: Certificate and key of this host, and the authority of the others, for links to spare
            hosts and other workers.

    Attributes:
        rank: This worker's rank in the process group.
        workers: The number of workers.

    Raises:
        ConfigError: There is no process group, or options contradict each other.
        PeerError: A host cannot be reached.
    """

    spares: Sequence[str] | str = ()
    rates: Sequence[float] | None = None
    spare_rates: Sequence[float] | None = None
    format: str = ""
    local: bool = True
    roots: Sequence[int] | None = None
    rule: str = "sum"
    address: str | None = None
    token_file: PathLike | None = None
    budget: Size | None = None
    deadline_s: Deadline = 600.0
    tls: Tls | None = None
    rank: int = field(init=False)
    workers: int = field(init=False)

    def __post_init__(self) -> None:
        check_options(Summation, vars(self))
        if not dist.is_initialized():
            raise ConfigError(
                "no process group", hint="call torch.distributed.init_process_group() first"
            )
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        if self.format:
            format_of(self.format)
        if self.rule not in RULES or (self.format and self.rule == "accumulate"):
            raise ConfigError(
                f"rule={self.rule!r} with format={self.format!r}",
                hint=("use sum, or accumulate without a format, which would round stored values"),
            )
        spares = SpareHosts(self.spares, self.spare_rates, token_of(self.token_file), self.tls)
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        free = psutil.virtual_memory().available
        setup = SumSetup(
            rank=self.rank,
            workers=self.workers,
            inside=self.local,
            rule=self.rule,
            address=self.address or own_address((master, ANY_PORT)),
            nbytes=parse_bytes(free // 2 if self.budget is None else self.budget),
            deadline_s=self.deadline_s,
            rates=self.rates,
            roots=self.roots,
        )
        super().__init__(connect(spares, setup, exchange), self.format)


def sum_hook(state: Summation, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a gradient bucket of DDP over all workers, as the hook of `register_comm_hook`.

    Buckets that the next forward needs first, which DDP passes last, have priority.

    Args:
        state: The summation service.
        bucket: DDP's bucket of gradients.

    Returns:
        A future of the bucket's tensor, averaged over the workers.

    Raises:
        ConfigError: The service has another rule than "sum".
    """
    if state.rule != "sum":
        raise ConfigError(
            f"DDP's gradients need rule='sum', not rule={state.rule!r}",
            hint="use roadtrain.hvd for asynchronous training",
        )
    if bucket.index() == 0:  # a new backward, perhaps after a failed one
        state.resume()
    grads = bucket.buffer()
    grads.div_(state.workers)
    key = bucket.index() << 40 | grads.numel()  # changes when DDP regroups its buckets
    shapes = " ".join("x".join(map(str, tensor.shape)) for tensor in bucket.gradients())
    suffix = f" of gradients {shapes}{', the last' * bucket.is_last()}"
    identity, priority = f"DDP's bucket {bucket.index()}", -bucket.index()
    return state.sum(key, identity, grads, detail=suffix, priority=priority).future


# DDP compares the annotations with the classes themselves
sum_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def exchange(words: bytes) -> list[bytes]:
    """Send `words` to all workers; return those of every worker, by rank."""
    device = own_device("cuda" if dist.get_backend() == "nccl" else "cpu")
    workers = range(dist.get_world_size())
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in workers]
    dist.all_gather(lengths, torch.tensor([len(words)], device=device))
    most = max(1, *(int(length) for length in lengths))
    found = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in workers]
    mine = torch.frombuffer(bytearray(words.ljust(most, b"\0")), dtype=torch.uint8)
    dist.all_gather(found, mine.to(device))
    return [bytes(row.cpu().numpy())[: int(length)] for row, length in zip(found, lengths)]
