"""Process of a run of `crosscluster`: trains with roadtrain or a peer, and returns its step times
and losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.children import pause
from benchmarks.common.gloo import start_gloo
from benchmarks.crosscluster.model import ModelSize, RunSpec, next_token_loss, optimizer_of
from benchmarks.crosscluster.ours import Ours

BUCKET_ELEMENTS = 25 << 18  # 25 MiB, like torch's DDP


class Training(Protocol):
    """A method of training: roadtrain or a library that it is compared with."""

    def step(self, number: int) -> float:
        """Train a step and return its loss, or NaN on a rank that does not compute the loss."""

    def settle(self) -> None:
        """Wait until all work of the last step has ended."""
        return

    def details(self) -> dict[str, Any]:
        """Return further results of this rank."""
        return {}

    def close(self) -> None:
        """Stop and release everything that this object started."""
        return


class OverGloo(Training):
    """A method of training by torch, whose processes communicate over gloo."""

    def __init__(self, spec: RunSpec, rank: int, world: int) -> None:
        start_gloo(rank, world, spec.master, spec.port, spec.interface)

    def settle(self) -> None:
        distributed.barrier()

    def close(self) -> None:
        distributed.destroy_process_group()


class Single(Training):
    """Training of the whole model in this process, one micro-batch after another."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.model = spec, spec.model.build()
        self.optimizer = optimizer_of(spec.optimizer, self.model)

    def step(self, number: int) -> float:
        total = 0.0
        micros = self.spec.batch.micros(number, self.spec.model.vocabulary)
        for tokens in micros:
            loss = next_token_loss(self.model(tokens).logits, tokens) / len(micros)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class PlainData(OverGloo):
    """Training with torch's DistributedDataParallel, without micro-batches."""

    def __init__(self, spec: RunSpec, rank: int, world: int) -> None:
        self.spec, self.rank, self.world = spec, rank, world
        super().__init__(spec, rank, world)
        self.model = DistributedDataParallel(spec.model.build(), init_sync=False)
        self.optimizer = optimizer_of(spec.optimizer, self.model)

    def step(self, number: int) -> float:
        tokens = self.spec.batch.tokens(number, self.spec.model.vocabulary)
        own = tokens.chunk(self.world)[self.rank]
        loss = next_token_loss(self.model(own).logits, own)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / self.world
        distributed.all_reduce(mean)
        return mean.item()


class LlamaStage(nn.Module):
    """Layers [begin, stop) of a Llama. The first stage also has the embedding, and the last stage
    also has the norm and the head.
    """

    def __init__(self, size: ModelSize, begin: int, stop: int) -> None:
        super().__init__()
        whole = size.build()
        self.embed = whole.model.embed_tokens if begin == 0 else None
        self.rotary = whole.model.rotary_emb
        self.layers = whole.model.layers[begin:stop]
        last = stop == size.layers
        self.norm = whole.model.norm if last else None
        self.head = whole.lm_head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = self.rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
        for layer in self.layers:
            x = layer(x, position_embeddings=positions)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class TorchPipeline(OverGloo):
    """Training with torch's 1F1B schedule. All processes communicate over the one network interface
    that gloo is configured with.
    """

    def __init__(self, spec: RunSpec, rank: int, world: int) -> None:
        self.spec = spec
        pp, self.dp = spec.parallelism["pp"], spec.parallelism["dp"]
        self.stage, self.replica = divmod(rank, self.dp)
        self.last = self.stage == pp - 1
        super().__init__(spec, rank, world)
        data = [distributed.new_group([s * self.dp + r for r in range(self.dp)]) for s in range(pp)]
        pipelines = [
            distributed.new_group([s * self.dp + r for s in range(pp)]) for r in range(self.dp)
        ]
        self.data = data[self.stage]
        stops = [sum(spec.parallelism["stages"][: s + 1]) for s in range(pp)]
        begin = stops[self.stage - 1] if self.stage else 0
        self.module = LlamaStage(spec.model, begin, stops[self.stage])
        self.optimizer = optimizer_of(spec.optimizer, self.module)
        stage = PipelineStage(
            self.module, self.stage, pp, torch.device("cpu"), group=pipelines[self.replica]
        )
        own = spec.batch.microbatches // self.dp
        self.schedule = Schedule1F1B(stage, own, loss_fn=next_token_loss)

    def step(self, number: int) -> float:
        tokens = self.spec.batch.tokens(number, self.spec.model.vocabulary)
        own, losses = tokens.chunk(self.dp)[self.replica], list[torch.Tensor]()
        inputs = (own,) if self.stage == 0 else ()
        self.schedule.step(*inputs, target=own if self.last else None, losses=losses)
        self._sum_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        mean /= self.dp
        distributed.all_reduce(mean)
        return mean.item()

    def _sum_gradients(self) -> None:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        for part in flat.split(BUCKET_ELEMENTS):
            distributed.all_reduce(part, group=self.data)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_((summed / self.dp).view_as(gradient))


METHODS: dict[str, Callable[[RunSpec, int, int], Training]] = {
    "ours": Ours,
    "single": lambda spec, rank, world: Single(spec),
    "ddp": PlainData,
    "torch_pipeline": TorchPipeline,
}


def train(spec: RunSpec, rank: int, world: int, pause: Callable[[str], None]) -> dict[str, Any]:
    """Train, and return the seconds and the loss of each measured step, with further results.

    Args:
        pause: called with "ready" before the first step, and with "done" after all work of the last
            step has ended
    """
    training = METHODS[spec.method](spec, rank, world)
    pause("ready")
    losses, ends = list[float](), list[float]()
    for number in range(spec.warmup + spec.steps):
        losses.append(training.step(number))
        ends.append(time.perf_counter())
    # deferred work of a step counts in the next step, so the last step's seconds lack it
    seconds = [after - before for before, after in pairwise(ends[max(spec.warmup - 1, 0) :])]
    training.settle()
    pause("done")
    details = training.details()
    training.close()
    return {"seconds": seconds, "losses": losses, **details}


def work(spec: Mapping[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Train in a process of a run. Pauses at "imported", and where `train` does."""
    torch.set_num_threads(1)
    pause("imported")
    return train(RunSpec.of(spec), rank, world, pause)
