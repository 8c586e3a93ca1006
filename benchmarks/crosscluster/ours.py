"""Process of `crosscluster` that trains with roadtrain.parallelize(), as a user would."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.crosscluster.model import RunSpec, next_token_loss, optimizer_of
from roadtrain.placement.stores import Files, Servers
from roadtrain.stages.networks import NetworkStatement
from roadtrain.stages.parallel_options import ParallelOptions
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.parallelize import parallelize
from roadtrain.stages.stage_model import MicroBatch

DEADLINE_S = 240.0


def loss_of(result: Any, batch: MicroBatch) -> torch.Tensor:
    return next_token_loss(result.logits, batch.target)


def parallelism_of(fields: dict[str, Any]) -> Parallelism:
    """Build a Parallelism from fields read from JSON, with lists converted to tuples."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Parallelism(**values)


class Ours:
    """Training by roadtrain. The measured seconds of a step include everything that a user waits
    for.
    """

    def __init__(self, spec: RunSpec, rank: int, world: int) -> None:
        self.spec, self.notes = spec, list[str]()
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": spec.master,
            "MASTER_PORT": str(spec.port),
        }
        model = spec.model.build()
        options = ParallelOptions(
            parallelism=parallelism_of(spec.parallelism),
            num_microbatches=spec.batch.microbatches,
            stages=spec.stages,  # type: ignore[arg-type]
            stores={int(stage): _store(fields) for stage, fields in spec.stage_stores.items()},
            networks=[NetworkStatement(**fields) for fields in spec.networks],
            overlap=spec.overlap,
            deadline_s=DEADLINE_S,
        )
        self.training = parallelize(
            model,
            optimizer_of(spec.optimizer, model),
            options,
            example=self._micro(0, 0),
            loss=loss_of,
            report=self.notes.append,
        )

    def _micro(self, step: int, micro: int) -> MicroBatch:
        tokens = self.spec.batch.micros(step, self.spec.model.vocabulary)[micro]
        return MicroBatch((tokens,), target=tokens)

    def step(self, number: int) -> float:
        return self.training.step(lambda micro: self._micro(number, micro)).loss

    def settle(self) -> None:
        optimizer = self.training.optimizer
        optimizer.piece(optimizer.extents()[0])  # waits until the last step has ended
        self.training.context.control.agree(None, "the end of the measurement")

    def details(self) -> dict[str, Any]:
        layout = self.training.context.layout
        return {
            "notes": self.notes,
            "stages": [segment.stop - segment.begin for segment in layout.segments],
        }

    def close(self) -> None:
        self.training.close()


def _store(fields: dict[str, Any]) -> Files | Servers:
    """Build a store from `files` (a list of directories), or from `servers` (addresses) and their
    secret `token`.
    """
    if "files" in fields:
        return Files(fields["files"])
    return Servers(fields["servers"], token=fields["token"].encode())
