"""Predict the memory of a whole training process: the libraries, roadtrain's buffers, the inputs of
blocks that are kept for backward, and the temporary tensors of torch.

The buffers are those of `options.budgets.derive`, which the run itself calls, so the prediction
needs the budgets of the run. Everything else follows from the names and shapes of the parameters
(config/families.py) and the size of a batch. Does NOT import torch.

The process holds the libraries, the buffers and the kept inputs all the time, and after some steps
also the free memory that the C heap does not return. On top come the temporary tensors of one of
three moments, whichever needs most: the loss, the backward of a block, and the gradient of the
embeddings. benchmarks/planner/fit.py compares the sum with processes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from roadtrain.chunks import ITEMSIZE, Chunk, ChunkTable, ParamSpec, Record, record
from roadtrain.config.families import ROOT, Layout
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.options.budgets import (
    HUGE,
    LEAST_ACTIVATIONS,
    Budgets,
    BudgetTerms,
    derive,
    derive_server,
)
from roadtrain.planner.fit_inputs import FitModel
from roadtrain.units import MIB, round_up

# Resident memory of a process that has run a step of a tiny model, without buffers: torch, numba,
# roadtrain and their code; measured with torch 2.13 on x86-64.
LIBRARIES = 480 * MIB
TRANSFORMERS = 110 * MIB  # what importing transformers and a model of it adds; measured
# Resident memory of a server process with its kernels, without buffers; measured
SERVER = 170 * MIB
DRIVER = 1500 * MIB  # host memory of an accelerator's driver and libraries; assumed
CONTEXT = 1000 * MIB  # device memory of the driver and libraries; assumed
SLACK = 16 * MIB  # the first slack of device.buffers.Heap
MAPPED = 32 * MIB  # larger tensors are not in the C heap: glibc maps them
# Free bytes that the C heap keeps between blocks, per byte that autograd keeps in a block and per
# byte of its gradients; twelve blocks of seven families kept 0.8 to 1.4 times as much; measured
SAVED_IN_HEAP, PUSHED_IN_HEAP = 3.2, 2.4
_NOT_ADAPTED = re.compile(r"(mlp\.gate|router|shared_expert_gate)\.weight$")
Parts = dict[str, float]  # bytes by the part of the process that needs them


@dataclass(frozen=True, eq=False)
class PlacedLayout:
    """The parameters of a model in roadtrain's layout. Blocks of equal shape are laid out once.

    `dtype`: dtype of parameters while they compute. `rank`: rank of the LoRA adapters on all
    matrices of the blocks; 0 trains all parameters instead.
    """

    layout: Layout
    dtype: str = "fp32"
    optimizer: str = "adamw"
    rank: int = 0

    @cached_property
    def table(self) -> ChunkTable:
        """The chunk table. Blocks of equal shape are the same object, whose chunks `chunks` has
        only once."""
        named = {name: self._specs(name) for name in self.layout.blocks}
        keys = {
            name: (name == ROOT, *((spec.shape, spec.group) for spec in specs))
            for name, specs in named.items()
        }
        first = {key: name for name, key in reversed(keys.items())}
        table = ChunkTable.build([(n, named[n]) for n in named if first[keys[n]] == n])
        laid_out = {block.name: block for block in table.blocks}
        return replace(table, blocks=tuple(laid_out[first[key]] for key in keys.values()))

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
        return {chunk.id: record(chunk, arrays, min(arrays, 1)) for chunk in self.table.chunks}

    def total(self, of: Callable[[Chunk], int]) -> int:
        """Return the sum of `of` over the chunks of all blocks."""
        many = Counter(block.index for block in self.table.blocks)
        return sum(many[chunk.block] * of(chunk) for chunk in self.table.chunks)

    @property
    def params(self) -> int:
        """The number of parameters, with those of adapters."""
        return self.total(lambda chunk: sum(span.stop - span.start for span in chunk.spans))

    @cached_property
    def record_bytes(self) -> int:
        return self.total(lambda chunk: self.records[chunk.id].nbytes)

    @cached_property
    def written_bytes(self) -> int:
        """Bytes that the updates of a step write."""
        return self.total(lambda chunk: chunk.trainable * self.records[chunk.id].nbytes)

    @property
    def file_bytes(self) -> int:
        """Bytes of the store's files: two slots for what an update writes, one for the rest."""
        return self.record_bytes + self.written_bytes

    @property
    def server_bytes(self) -> int:
        """The least memory of a server for one worker, in bytes."""
        found = derive_server(self.table, self.records, 1 << 50, workers=1, holds_gradients=True)
        return SERVER + found.least_bytes


@dataclass(frozen=True)
class Training:
    """The training of a model with batches of `samples` samples, wherever its state is."""

    model: FitModel
    placed: PlacedLayout
    samples: int = 1

    @property
    def by_train(self) -> bool:
        """Whether `roadtrain train` can run it; otherwise place() in a script can."""
        return bool(self.model.pretrained) and not self.placed.rank

    @property
    def kept(self) -> int:
        """Bytes of the inputs of all blocks of a micro-batch, and of the root block's last norm and
        its results."""
        layout, tokens = self.placed.layout, self.samples * self.model.shape.tokens
        return tokens * layout.hidden * ITEMSIZE[self.placed.dtype] * (len(layout.blocks) + 2)

    def budgets(
        self, state: str, host: int, device: int | None = None, directories: int = 1
    ) -> Budgets:
        """Divide the budgets as the run does. `state`: "RAM", "SSDs" or "server". Raises
        BudgetError."""
        placed, served = self.placed, state == "server"
        # clipping holds gradients until all are there, as a script does until step()
        terms = BudgetTerms(state != "RAM", True, not served)
        owners = tuple(range(directories)) if state == "SSDs" else ()
        records = {} if served else placed.records
        # `derive` sees the records of blocks of equal shape once
        again = placed.record_bytes - sum(own.nbytes for own in records.values())
        more = again if state == "RAM" else 0
        found = derive(placed.table, records, owners, terms, host - more, device)
        resident = found.records.resident_bytes + more
        if state == "SSDs":
            resident = min(placed.record_bytes, host - found.total + resident)
        divided = replace(found.records, resident_bytes=resident)
        return replace(found, records=divided, least_bytes=found.least_bytes + more)

    def least_budget(self, state: str, found: Budgets) -> int:
        """Return the smallest host budget with which the job runs. In RAM there is no file for
        inputs of blocks that do not fit, and `derive` gives them half of what is left."""
        on_device = 0 if found.worker.device is None else found.worker.device.activation_bytes
        more = max(0, self.kept - on_device - LEAST_ACTIVATIONS) if state == "RAM" else 0
        return round_up(found.least_bytes + 2 * more, MIB)

    def memory(self, budgets: Budgets) -> tuple[Parts, Parts]:
        """Predict the peak memory of a process that trains with `budgets`: bytes of the host, and
        of the device; {} if the CPUs compute, whose memory is the host's and counted once."""
        worker, push = budgets.worker, self.placed.table.blocks[0].push_nbytes
        # `temporaries` counts torch's own gradients of the root block
        buffers = budgets.total - worker.activation_bytes - round_up(push, HUGE)
        if budgets.records.resident_bytes >= self.placed.record_bytes:
            # a record that is kept in memory is updated there, without a buffer
            buffers -= budgets.records.buffers * budgets.records.buffer_bytes
        loads = self.model.transformers or self.placed.rank > 0
        host: Parts = {"libraries": LIBRARIES + TRANSFORMERS * loads, "buffers": buffers}
        if (own := worker.device) is None:
            kept = min(self.kept, worker.activation_bytes)
            return {**host, "kept inputs": kept, "temporary tensors": self.temporaries}, {}
        here = min(self.kept, own.activation_bytes)
        host["libraries"] += DRIVER
        host["kept inputs"] = min(self.kept - here, worker.activation_bytes)
        buffers = own.total - own.activation_bytes - push
        device: Parts = {"libraries": CONTEXT, "buffers": buffers, "kept inputs": here}
        return host, {**device, "temporary tensors": self.temporaries}

    @property
    def temporaries(self) -> float:
        """The most bytes of temporary tensors that torch holds at once, with the gradients of the
        root block and what the C heap does not return."""
        model, layout, size = self.model, self.placed.layout, ITEMSIZE[self.placed.dtype]
        table, tokens = self.placed.table, model.shape.tokens
        n, root = self.samples * tokens, float(table.blocks[0].push_nbytes)
        # log_softmax in fp32, its gradient, and the gradient of its input
        logits = 12.0 * self.samples * model.shape.blocks[-1].logits
        blocks = [name for name in layout.blocks if name != ROOT] or [ROOT]
        largest = max(blocks, key=layout.params)
        saved = n * layout.saved(largest, tokens, size)
        if model.measured:
            saved = max(own.saved for own in model.shape.blocks) * self.samples * size / 2
        pushed = max((block.push_nbytes for block in table.blocks[1:]), default=0)
        shapes = [shape for shape in layout.blocks[largest].values() if len(shape) > 1]
        widest = n * size * max((max(shape[-2:]) for shape in shapes), default=0)
        in_heap = max(widest, size * max(map(prod, shapes), default=0)) < MAPPED
        heap = in_heap * (SAVED_IN_HEAP * saved + PUSHED_IN_HEAP * pushed)
        # the gradients of two activations, and then gradients of parameters instead of activations
        mapped = 0.0 if in_heap else max(saved + 2 * widest, saved / 2 + pushed)
        # autograd adds the two gradients of tied embeddings in a third tensor
        gradients = max(mapped + root, root * (3 if layout.tied else 1))
        return max(logits, gradients) + max(heap, SLACK)
