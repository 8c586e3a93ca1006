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
    # of your own (sums/formats.py)
    format: str = ""
    local: bool = True  # the workers of a host sum through shared memory first
    # which workers of a host do so, by their place on it; None: as its topology says
    roots: Sequence[int] | None = None
    rule: str = "sum"  # or "accumulate", for asynchronous training
    # of this host, as the others reach it; None: the one that reaches MASTER_ADDR
    address: str | None = None
    # the token of the spare hosts, by which the workers of several hosts know each other too;
    # needed beyond this host
    token_file: PathLike | None = None
    budget: Size | None = None  # bytes for this process's reducers; None: half of what is free
    deadline_s: Deadline = 600.0  # how long a sum may take
    # this host's certificate and key, and who signs the others'; to spare hosts and other workers
    tls: Tls | None = None
    rank: int = field(init=False)
    workers: int = field(init=False)

    def __post_init__(self) -> None:
        check_options(Summation, vars(self))
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
        wanted = SpareHosts(self.spares, self.spare_rates, token_of(self.token_file), self.tls)
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
        super().__init__(connect(wanted, setup, tell_all), self.format)


def sum_hook(state: Summation, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `register_comm_hook`. What DDP gives last is nearest the input, and wanted first by
    the next forward."""
    if state.rule != "sum":
        raise ConfigError(
            f"DDP's gradients under rule={state.rule!r}",
            hint="asynchronous training: roadtrain.hvd",
        )
    if bucket.index() == 0:  # of another backward than one that has failed
        state.resume()
    grads = bucket.buffer()
    grads.div_(state.workers)
    key = bucket.index() << 40 | grads.numel()  # another after DDP has grouped anew
    shapes = " ".join("x".join(map(str, tensor.shape)) for tensor in bucket.gradients())
    says = f" of gradients {shapes}{', the last' * bucket.is_last()}"
    identity, priority = f"DDP's bucket {bucket.index()}", -bucket.index()
    return state.sum(key, identity, grads, detail=says, priority=priority).future


# DDP compares them with the classes themselves
sum_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


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
