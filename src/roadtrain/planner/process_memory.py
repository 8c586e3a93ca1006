"""Predict the memory of a whole training process: the libraries, roadtrain's buffers, the inputs of
blocks that are kept for backward, and the temporary tensors of torch.

The buffers are those of `options.budgets.derive`, which the run itself calls, so the prediction
needs the budgets of the run. Everything else follows from the names and shapes of the parameters
(config/families.py) and the size of a batch. Does NOT import torch.

The process holds the libraries, the buffers and the kept inputs all the time. On top come the
temporary tensors of one of three moments, whichever needs most: the loss, the backward of a block,
and the gradient of the embeddings. benchmarks/planner/fit.py compares the sum with processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from roadtrain.chunks import ITEMSIZE, ChunkTable, ParamSpec, Record, record
from roadtrain.config.families import ROOT, Layout
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.options.budgets import (
    HUGE,
    LEAST_ACTIVATIONS,
    Budgets,
    BudgetTerms,
    DeviceBudgets,
    derive,
)
from roadtrain.units import MIB, round_up

# Resident memory of a process that has run a step of a tiny model, without buffers: torch, numba,
# roadtrain and their code; measured with torch 2.13 on x86-64.
LIBRARIES = 480 * MIB
TRANSFORMERS = 110 * MIB  # what importing transformers and a model of it adds; measured
DRIVER = 1500 * MIB  # host memory of an accelerator's driver and libraries; assumed
CONTEXT = 1000 * MIB  # device memory of the driver and libraries; assumed
SLACK = 16 * MIB  # the first slack of device.buffers.Heap
_NOT_ADAPTED = re.compile(r"(mlp\.gate|router|shared_expert_gate)\.weight$")


@dataclass(frozen=True)
class Work:
    """The batches of a training process.

    Attributes:
        samples: Number of samples of a micro-batch.
        tokens: Number of tokens of a sample.
        holds: Whether updates wait for step(), as they do without `backwards_per_step`.
        transformers: Whether the process imports transformers.
        saved: Bytes per sample, with 16-bit elements, that the backward of the largest block
            needs, if they were measured; else 0.
        logits: Number of results per sample, if they were measured; else 0.
    """

    samples: int
    tokens: int
    holds: bool = False
    transformers: bool = True
    saved: float = 0.0
    logits: float = 0.0


@dataclass(frozen=True)
class PlacedLayout:
    """The parameters of a model in roadtrain's layout.

    `dtype`: dtype of parameters while they compute. `rank`: rank of the LoRA adapters on all
    matrices of the blocks; 0 trains all parameters instead.
    """

    layout: Layout
    dtype: str = "fp32"
    optimizer: str = "adamw"
    rank: int = 0

    @cached_property
    def table(self) -> ChunkTable:
        return ChunkTable.build([(name, self._specs(name)) for name in self.layout.blocks])

    def _specs(self, block: str) -> list[ParamSpec]:
        params, frozen = self.layout.blocks[block], self.rank > 0
        specs = [ParamSpec(n, s, self.dtype, not frozen, -frozen) for n, s in params.items()]
        for name, shape in params.items() if frozen and block != ROOT else ():
            if len(shape) == 2 and not _NOT_ADAPTED.search(name):
                for part, size in (("A", (self.rank, shape[1])), ("B", (shape[0], self.rank))):
                    specs.append(ParamSpec(f"{name}.lora_{part}", size, self.dtype, True, 0))
        return specs

    @cached_property
    def records(self) -> dict[int, Record]:
        arrays = OPTIMIZERS[self.optimizer].state_nbytes // 4
        made: dict[tuple[Any, ...], Record] = {}  # large models have many chunks of few kinds
        out = {}
        for chunk in self.table.chunks:
            key = chunk.numel, chunk.dtype, chunk.trainable, len(chunk.spans)
            if key not in made:
                made[key] = record(chunk, arrays, min(arrays, 1))
            out[chunk.id] = made[key]
        return out

    def params(self, *, trained: bool = False) -> int:
        """Return the number of parameters, or of trained parameters."""
        return sum(prod(p.shape) for p in self.table.params if p.trainable or not trained)

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of the store's files: two slots for what an update writes, one for the rest."""
        pairs = zip(self.table.chunks, self.records.values())
        return sum(own.nbytes * (1 + chunk.trainable) for chunk, own in pairs)

    def budgets(
        self, work: Work, state: str, host: int, device: int | None = None, directories: int = 1
    ) -> Budgets:
        """Divide the budgets as the run does. `state`: "RAM", "SSDs" or "server". Raises
        BudgetError."""
        served = state == "server"
        terms = BudgetTerms(state != "RAM", work.holds, not served)
        owners = tuple(range(directories)) if state == "SSDs" else ()
        return derive(self.table, {} if served else self.records, owners, terms, host, device)

    def least_budget(self, work: Work, state: str, kept: float, budgets: Budgets) -> int:
        """Return the smallest host budget with which the job runs. In RAM there is no file for
        inputs of blocks that do not fit, and `derive` gives them half of what is left."""
        more = max(0, int(kept) - LEAST_ACTIVATIONS) if state == "RAM" else 0
        return round_up(budgets.least_bytes + 2 * more, MIB)


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a process by part. `device` is empty if the CPUs compute: their memory is host
    memory, so nothing is counted twice."""

    host: Mapping[str, float]
    device: Mapping[str, float] = field(default_factory=dict)

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())


def process_memory(placed: PlacedLayout, work: Work, budgets: Budgets) -> ProcessMemory:
    """Predict the peak memory of a process that trains with `budgets`."""
    libraries = float(LIBRARIES + TRANSFORMERS * work.transformers)
    # `temporaries` counts torch's own gradients of the root block
    root = round_up(placed.table.blocks[0].push_nbytes, HUGE)
    worker, kept = budgets.worker, kept_inputs(placed, work)
    buffers = float(budgets.total - worker.activation_bytes)
    if worker.device is None:
        kept = min(kept, worker.activation_bytes)
        parts = {"libraries": libraries, "buffers": buffers - root, "kept inputs": kept}
        return ProcessMemory({**parts, "temporary tensors": temporaries(placed, work, kept)})
    here = min(kept, worker.device.activation_bytes)
    there = min(kept - here, worker.activation_bytes)
    host = {"libraries": libraries + DRIVER, "buffers": buffers - root, "kept inputs": there}
    device = {
        "libraries": float(CONTEXT),
        "buffers": float(worker.device.total - worker.device.activation_bytes)
        - placed.table.blocks[0].push_nbytes,
        "kept inputs": here,
        "temporary tensors": temporaries(placed, work, here),
    }
    return ProcessMemory(host, device)


def least_device_budget(device: DeviceBudgets) -> int:
    """Return the smallest device budget with which the job runs."""
    least = replace(device, slots=2, activation_bytes=LEAST_ACTIVATIONS)
    return round_up(least.total, MIB)


def kept_inputs(placed: PlacedLayout, work: Work) -> float:
    """Return the bytes of the inputs of all blocks of a micro-batch, and of the root block's last
    norm and its results."""
    layout, tokens = placed.layout, float(work.samples * work.tokens)
    return tokens * layout.hidden * ITEMSIZE[placed.dtype] * (len(layout.blocks) + 2)


def temporaries(placed: PlacedLayout, work: Work, kept: float) -> float:
    """Return the most bytes of temporary tensors that torch holds at once, with the gradients of
    the root block. `kept`: bytes of kept inputs in the same memory."""
    layout, n, size = placed.layout, work.samples * work.tokens, ITEMSIZE[placed.dtype]
    root = float(placed.table.blocks[0].push_nbytes)
    # log_softmax in fp32, its gradient, and the gradient of its input
    logits = 12.0 * (work.logits * work.samples or n * layout.vocab)
    blocks = [name for name in layout.blocks if name != ROOT] or [ROOT]
    largest = max(blocks, key=layout.params)
    measured = work.saved * work.samples * size / 2
    saved = measured or n * layout.saved(largest, work.tokens, size)
    pushed = max((block.push_nbytes for block in placed.table.blocks[1:]), default=0)
    shapes = [shape[-2:] for shape in layout.blocks[largest].values() if len(shape) > 1]
    # the gradients of two activations, and then gradients of parameters instead of activations
    block = max(saved + 2.0 * n * max(map(max, shapes), default=0) * size, saved / 2 + pushed)
    # autograd adds the two gradients of tied embeddings in a third tensor
    heap = min(_heap_slack(block), 2 * kept)
    return max(logits + heap, block + root, root * (3 if layout.tied else 1))


def _heap_slack(block: float) -> float:
    """Return the bytes of freed tensors that the C heap may hold between kept inputs when the loss
    is computed: `device.buffers.Heap` doubles its slack while it returns more than half of it."""
    slack = SLACK
    while slack < 2 * block:
        slack *= 2
    return float(slack)
