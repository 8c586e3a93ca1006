"""Worker of a run of `fanin`: trains with roadtrain or torch, and writes its step times and losses.

    python -m benchmarks.fanin.worker SPEC.json RANK WORLD

The process prints `imported` at the start, `ready` before the first step, `warm` after the warm-up
steps, and `done` after the last step. After each of these lines it waits for a line on stdin. At
the end it prints `result {...}`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import roadtrain
from benchmarks.common.children import peak_bytes
from benchmarks.common.model420 import adamw, batch, build
from roadtrain.switch.options import FanIn, SwitchNode

TIMEOUT = timedelta(seconds=300)
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
    """`ours`; `ddp`: torch's data parallel, all-reduce by gloo."""

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
    servers: tuple[str, ...] = ()
    token: str = ""
    """Path of the token file."""

    fan_in: dict[str, Any] | None = None
    """The tree as in a job's file; None: workers send gradients to the servers directly."""

    budget: str = "1500MiB"
    master: str = "127.0.0.1"
    port: int = 29511

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))

    def build(self) -> nn.Module:
        """Build the model. Every process builds the same values."""
        if not self.computes:
            return Transferred(self.layers, _block_elements(self), DTYPES[self.dtype])
        compute = self.dtype
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


def _block_elements(spec: WorkerSpec) -> int:
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


class Method(Protocol):
    def step(self, number: int) -> float:
        """Train a step and return the loss of this worker's tokens."""

    def close(self) -> None:
        """Stop and release everything that this object started."""


class Ours:
    def __init__(self, spec: WorkerSpec, rank: int, world: int) -> None:
        self.loss = losses_of(spec, rank, world)
        self.model = spec.build()
        self.optimizer = roadtrain.place(
            self.model,
            adamw(self.model.parameters()),
            store=_store(spec),
            host_budget=spec.budget,
            backwards_per_step=1,
            delay=roadtrain.Delay(spec.staleness) if spec.staleness else None,
            chunk_elements=CHUNK,
            deadline_s=DEADLINE_S,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )

    def step(self, number: int) -> float:
        loss = self.loss(self.model, number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def close(self) -> None:
        self.optimizer.close()


class Ddp:
    """Training with torch's DistributedDataParallel over gloo."""

    def __init__(self, spec: WorkerSpec, rank: int, world: int) -> None:
        self.loss = losses_of(spec, rank, world)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{spec.master}:{spec.port}",
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
        )
        self.model = DistributedDataParallel(spec.build(), init_sync=False)
        self.optimizer = adamw(self.model.parameters())

    def step(self, number: int) -> float:
        loss = self.loss(self.model, number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def close(self) -> None:
        distributed.destroy_process_group()


METHODS: dict[str, Callable[[WorkerSpec, int, int], Method]] = {"ours": Ours, "ddp": Ddp}


def losses_of(spec: WorkerSpec, rank: int, world: int) -> Callable[[Any, int], torch.Tensor]:
    """Return a function that computes the loss of this worker's tokens from (model, number of the
    step).
    """

    def of(model: Any, number: int) -> torch.Tensor:
        if not spec.computes:
            out: torch.Tensor = model(torch.ones(1, dtype=DTYPES[spec.dtype]))
            return out
        tokens = batch(number * world + rank, 1, spec.tokens)
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    return of


def _store(spec: WorkerSpec) -> roadtrain.Servers:
    more: dict[str, Any] = {}
    if spec.fan_in is not None:
        more["fan_in"] = fan_in_of(spec.fan_in)
    return roadtrain.Servers(spec.servers, token=spec.token, **more)


def fan_in_of(tree: dict[str, Any]) -> FanIn:
    nodes = [SwitchNode(**{**node, "workers": tuple(node["workers"])}) for node in tree["switches"]]
    return FanIn(**{**tree, "switches": tuple(nodes)})


def train(spec: WorkerSpec, rank: int, world: int, pause: Callable[[str], None]) -> dict[str, Any]:
    """Train, and return the end time and the loss of each step.

    Args:
        pause: called with "ready" before the first step, with "warm" after the warm-up, and with
            "done" after the last step
    """
    method = METHODS[spec.method](spec, rank, world)
    pause("ready")
    ends, losses = list[float](), list[float]()
    for number in range(spec.steps):
        losses.append(method.step(number))
        ends.append(time.perf_counter())
        if number + 1 == WARM_UP:
            pause("warm")
    result = {"ends": ends, "losses": losses, "peak": peak_bytes()}
    pause("done")
    method.close()
    return result


def _pause(what: str) -> None:
    print(what, flush=True)
    sys.stdin.readline()


def main() -> None:
    path, rank, world = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": "1"}
    _pause("imported")
    result = train(WorkerSpec.read(Path(path)), int(rank), int(world), _pause)
    print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
