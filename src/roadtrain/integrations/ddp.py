"""DDP over the summation service, which sums gradients on CPUs. The model, the loop and the
optimizer stay the same.

    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(roadtrain.Summation(spares=["10.0.0.9:7000"]), roadtrain.sum_hook)

Each worker's process also sums a share of the gradients. `spares` are additional hosts that run
`roadtrain serve HOST:PORT --sum`. With two workers, the result has the same bits as that of DDP's
own all-reduce; with more workers, the two are equal up to rounding. Needs an initialized process
group of torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from roadtrain.device.choice import own_device
from roadtrain.errors import ConfigError
from roadtrain.options.budgets import host_bytes_of
from roadtrain.options.check import Deadline, PathLike, Size, check_options
from roadtrain.sums.formats import format_of
from roadtrain.sums.protocol.reducer import RULES
from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.sums.sums import SumSetup, connect
from roadtrain.sums.tensor_sums import TensorSums
from roadtrain.transport.address import own_address, token_of
from roadtrain.transport.tcp import Tls

ANY_PORT = 9


@dataclass(eq=False, repr=False, kw_only=True)
class Summation(TensorSums):
    """A worker's connection to the summation service: the argument `state` of `sum_hook`. Call
    close() before the process group is destroyed.

    Args:
        spares: HOST:PORT of spare hosts, or the path of a file with a HOST:PORT (and optionally a
            rate) on each line. Worker 0 rereads the file during training, so hosts can be added and
            removed. If a host dies, training continues without the host until the host is back.
        rates: Link rates of the workers' hosts, by rank, in any unit. A host with a higher rate
            sums a larger part. If None, all rates are equal.
        spare_rates: Link rates of the spare hosts, in the unit of `rates`. If None, all are equal.
        format: How fp32 is sent between hosts: "" (unchanged), "bf16", "fp16", "topk:0.01",
            "onebit", "dither:4", or a format of your own (sums/formats.py).
        local: Whether the workers of a host first sum their gradients in shared memory.
        roots: Local ranks of the workers that sum in shared memory for their host. If None,
            roadtrain chooses these workers by the topology of the host.
        rule: "sum", or "accumulate" for asynchronous training.
        address: Address at which other hosts reach this host. If None, it is the address from which
            this host reaches MASTER_ADDR.
        token: The token of the spare hosts, or the path of a file that contains it (mode 600).
            Workers of several hosts use the token to authenticate each other, so several hosts need
            a token even without spare hosts.
        budget: Memory in bytes for this process's reducers. If None, half of the free memory.
        deadline_s: Timeout of a sum, in seconds.
        tls: Certificate and key of this host, and the authority that signed the certificates of
            other hosts, for links to spare hosts and workers.

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
    token: bytes | PathLike | None = None
    budget: Size | None = None
    deadline_s: Deadline = 600.0
    tls: Tls | None = None
    rank: int = field(init=False)
    workers: int = field(init=False)

    def __post_init__(self) -> None:
        check_options(Summation, vars(self))
        if not dist.is_initialized():
            raise ConfigError(
                "no process group exists", hint="call torch.distributed.init_process_group()"
            )
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        if self.format:
            format_of(self.format)
        if self.rule not in RULES or (self.format and self.rule == "accumulate"):
            raise ConfigError(
                f"rule={self.rule!r} is not possible with format={self.format!r}",
                hint="use rule='sum', or rule='accumulate' with format='' to store exact values",
            )
        spares = SpareHosts(self.spares, self.spare_rates, token_of(self.token), self.tls)
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        setup = SumSetup(
            rank=self.rank,
            workers=self.workers,
            inside=self.local,
            rule=self.rule,
            address=self.address or own_address((master, ANY_PORT)),
            nbytes=host_bytes_of(self.budget, whole=False),
            deadline_s=self.deadline_s,
            rates=self.rates,
            roots=self.roots,
        )
        super().__init__(connect(spares, setup, exchange), self.format)


def sum_hook(state: Summation, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a gradient bucket of DDP over all workers; a hook for DDP's `register_comm_hook`.

    Args:
        state: The summation service.
        bucket: DDP's bucket of gradients.

    Returns:
        A future of the bucket's tensor, averaged over the workers.

    Raises:
        ConfigError: The service's rule is not "sum".
    """
    if state.rule != "sum":
        raise ConfigError(
            f"DDP needs a Summation with rule='sum', not with rule={state.rule!r}",
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
    """Send the message `words` to all workers, and return the messages of all workers, by rank."""
    device = own_device("cuda" if dist.get_backend() == "nccl" else "cpu")
    workers = range(dist.get_world_size())
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in workers]
    dist.all_gather(lengths, torch.tensor([len(words)], device=device))
    most = max(1, *(int(length) for length in lengths))
    found = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in workers]
    mine = torch.frombuffer(bytearray(words.ljust(most, b"\0")), dtype=torch.uint8)
    dist.all_gather(found, mine.to(device))
    return [bytes(row.cpu().numpy())[: int(length)] for row, length in zip(found, lengths)]
