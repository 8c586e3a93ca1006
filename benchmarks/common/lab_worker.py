"""Worker of a run in the lab (lab.py): trains with roadtrain or torch, and returns its step times
and losses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import roadtrain
from benchmarks.common.children import pause, peak_bytes
from benchmarks.common.gloo import start_gloo
from benchmarks.common.model420 import LEARNING_RATE, adamw, batch, build, compute_default
from roadtrain.switch.options import FanIn, SwitchNode

DEADLINE_S = 120.0
CHUNK = 1 << 20  # elements
WARM_UP = 1  # steps before the measured ones
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class WorkerSpec:
    """Arguments that every worker of a run gets. `computes`: if False, workers transfer bytes and
    compute almost nothing.
    """

    method: str
    """`ours`, or a peer over gloo: `ddp`, torch's data parallel, or `fsdp`, FSDP2."""

    steps: int
    dtype: str = "fp32"
    """Dtype of parameters and gradients: `fp32` or `bf16`."""

    computes: bool = True
    """False: blocks without matrix products, with constant gradients, to measure the transfer
    alone.
    """

    layers: int = 10
    width: int = 512
    inner: int = 1536
    tokens: int = 8
    """Tokens of a worker's batch in a step; few, because all workers share the machine's
    processors.
    """

    staleness: int = 1
    chunk: int = CHUNK
    servers: Sequence[str] = ()
    token: str = ""
    """Path of the token file."""

    fan_in: dict[str, Any] | None = None
    """The tree as in a job's file; None: workers send gradients to the servers directly."""

    relay: str | None = None
    """Budget of a relay on the worker's host; None: no relay."""

    budget: str = "1500MiB"
    """Host budget of the worker; empty: no limit."""

    master: str = "127.0.0.1"

    def build(self) -> nn.Module:
        """Build the model. Every process builds the same values."""
        if not self.computes:
            return Transferred(self.layers, block_elements(self), DTYPES[self.dtype])
        compute = compute_default() if self.dtype == "bf16" else self.dtype
        return build(compute, layers=self.layers, width=self.width, inner=self.inner).to(
            DTYPES[self.dtype]
        )

    @property
    def elements(self) -> int:
        """Number of parameters of the whole model."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.build().parameters())

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, equal to the bytes of one worker's gradients."""
        return self.elements * DTYPES[self.dtype].itemsize


def block_elements(spec: WorkerSpec) -> int:
    return 4 * spec.width**2 + 3 * spec.width * spec.inner + 2 * spec.width


class _Constant(torch.autograd.Function):
    """Autograd function that returns a copy of `x`. In backward, the gradient of `weight` is a
    constant.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.full_like(ctx.saved_tensors[0], 1e-3)


class Block(nn.Module):
    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Constant.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class Transferred(nn.Module):
    """A model with as many parameter bytes as a decoder, but almost nothing to compute."""

    def __init__(self, blocks: int, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(elements, dtype) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x.sum()


def loss_of(spec: WorkerSpec, model: Any, number: int) -> torch.Tensor:
    """Compute the loss of the tokens with this number."""
    if not spec.computes:
        out: torch.Tensor = model(torch.ones(1, dtype=DTYPES[spec.dtype]))
        return out
    tokens = batch(number, 1, spec.tokens)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def placed(spec: WorkerSpec, model: nn.Module) -> roadtrain.PlacedOptimizer:
    servers = roadtrain.Servers(
        tuple(spec.servers),
        token=spec.token,
        relay=spec.relay,
        fan_in=None if spec.fan_in is None else fan_in_of(spec.fan_in),
    )
    return roadtrain.place(
        model,
        adamw(model.parameters()),
        store=servers,
        host_budget=spec.budget or None,
        backwards_per_step=1,
        delay=roadtrain.Delay(spec.staleness) if spec.staleness else None,
        chunk_elements=spec.chunk,
        deadline_s=DEADLINE_S,
        report=lambda line: print(line, flush=True),
    )


def fan_in_of(tree: dict[str, Any]) -> FanIn:
    nodes = [SwitchNode(**{**node, "workers": tuple(node["workers"])}) for node in tree["switches"]]
    return FanIn(**{**tree, "switches": tuple(nodes)})


def peer_of(
    spec: WorkerSpec, model: nn.Module, rank: int, world: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of a peer that communicates over gloo."""
    start_gloo(rank, world, spec.master)
    if spec.method == "ddp":
        return DistributedDataParallel(model, init_sync=False), adamw(model.parameters())
    for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)


def train(spec: WorkerSpec, rank: int, world: int, pause: Callable[[str], None]) -> dict[str, Any]:
    """Train, and return the end time and the loss of each step, the peak memory, and for roadtrain
    the number of blocks that stay from forward to backward.

    Args:
        pause: called with "ready" before the first step, with "warm" after the warm-up, and with
            "done" after the last step
    """
    model = spec.build()
    optimizer: torch.optim.Optimizer
    if spec.method == "ours":
        optimizer = placed(spec, model)
    else:
        model, optimizer = peer_of(spec, model, rank, world)
    pause("ready")
    ends, losses = list[float](), list[float]()
    for number in range(spec.steps):
        loss = loss_of(spec, model, number * world + rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.perf_counter())
        if number + 1 == WARM_UP:
            pause("warm")
    result = {"ends": ends, "losses": losses, "peak": peak_bytes()}
    pause("done")
    if isinstance(optimizer, roadtrain.PlacedOptimizer):
        result["kept_blocks"] = len(optimizer.session.worker.buffers.slots)
        optimizer.close()
    else:
        distributed.destroy_process_group()
    return result


def work(spec: Mapping[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Train in a process of a run. Pauses at "imported", and where `train` does."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": "1"}
    pause("imported")
    return train(WorkerSpec(**spec), rank, world, pause)
