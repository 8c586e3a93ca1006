"""ParallelTraining: what parallelize() returns: one process's part of a model that is trained in
stages, and the step that all processes take together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import distributed, nn

from roadtrain.errors import LoopError, StaleError
from roadtrain.stages.parallel_parts import Joined
from roadtrain.stages.pipeline import Pipeline, StepTimes
from roadtrain.stages.snapshot_choice import ParamEntry
from roadtrain.stages.snapshots import JobSnapshots, SnapshotOptions
from roadtrain.stages.stage_buffers import buffers_blob, restore_buffers
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_optimizer import StageOptimizer
from roadtrain.storage.mark import Mark
from roadtrain.streaming.split import NAMES

Batch = Callable[[int], MicroBatch]
Report = Callable[[str], None]


@dataclass(frozen=True)
class StepResult:
    """Of one step, the same on all ranks but for `times`, which are of this rank. loss: mean over
    the micro-batches. grad_norm: global, before clipping."""

    loss: float
    grad_norm: float
    times: StepTimes
    stop: bool  # whether any rank asked to stop after this step

    def __float__(self) -> float:
        return self.loss


class WatchedSizes(Protocol):
    """What moves blocks between stages (stages/parallel_sizes.py)."""

    def own_pass_s(self, times: StepTimes) -> float: ...
    def step(self, passes_s: Sequence[float]) -> None: ...


class ParallelTraining:
    """`optimizer.param_groups` are the user's optimizer's; a scheduler made of that one works."""

    def __init__(
        self,
        joined: Joined,
        stage_model: StageModel,
        optimizer: StageOptimizer,
        pipeline: Pipeline,
    ) -> None:
        self.committed_step = 0
        self.sizes: WatchedSizes | None = None  # where speeds are measured
        self._snapshots: JobSnapshots | None = None
        self._closed = False
        self._failed = ""  # what ended with an error here, in the midst of the others' work
        self._begun = False  # a step has begun here
        self.adopt(joined, stage_model, optimizer, pipeline)

    @property
    def model(self) -> nn.Module:
        """The user's model, with this stage's parameters."""
        return self.stage_model.model

    @property
    def rank(self) -> int:
        return self.joined.rank

    @property
    def steps_done(self) -> int:
        return self.optimizer.steps_done

    def step(
        self, batch: Batch, clip_norm: float | None = None, *, stop: bool = False
    ) -> StepResult:
        """One step of the whole job; every process calls it.

        batch: the micro-batch of a number, 0 to num_microbatches - 1; asked for those that this
        process runs. clip_norm: the most that the global norm of the gradients may be. stop: this
        process wants this step to be the last; every process hears whether one did. Raises
        PeerError where another process is gone or late (Rule 5); the step has no effect then, and
        none follows it, whatever the error was.
        """
        with self._in_time(f"step {self.steps_done}"):
            return self._step(batch, clip_norm, stop)

    @contextlib.contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        """What all processes do together. After an error in the midst of it their messages would
        be taken for others (Rule 6)."""
        if self._closed:
            raise LoopError("this training is closed")
        if self._failed:
            raise LoopError(
                f"{self._failed} ended with an error on this process, which is out of time with"
                " the others since then",
                hint="end all processes and start again, from the last snapshot",
            )
        try:
            yield
        except BaseException:
            self._failed = what
            raise

    def _step(self, batch: Batch, clip_norm: float | None, stop: bool) -> StepResult:
        if not self._begun:
            self._check_same_step()
            self._begun = True
        at = self.joined.position
        total = self.joined.options.num_microbatches
        own = self.joined.groups.parallelism.micro_batches(at.stage, at.replica, total)
        self.optimizer.begin_step(len(own))
        loss = self.pipeline.step(self.steps_done, batch)
        # every tensor rank of the last stage has the same loss
        squares = self.optimizer.sum_squares()
        pass_s = 0.0 if self.sizes is None else self.sizes.own_pass_s(self.pipeline.times)
        told = self._told([loss if at.tensor == 0 else 0.0, squares, float(stop), pass_s])
        sums = [math.fsum(one) for one in zip(*told, strict=True)]
        norm = math.sqrt(sums[1]) if sums[1] >= 0 else math.nan
        scale = 1.0
        if clip_norm is not None and norm > clip_norm:
            scale = clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        self.optimizer.step(scale)
        if self.sizes is not None:
            self.sizes.step([one[3] for one in told])
        return StepResult(sums[0], norm, self.pipeline.times, sums[2] > 0)

    def keep(
        self, directory: Path, options: SnapshotOptions, mark: Mark | None, report: Report
    ) -> Mapping[str, bytes]:
        """From now on `snapshot` writes into the run directory; what is committed there is
        loaded. Returns what else the step consisted of, as `snapshot` was given it. Raises
        StoreError where what is there cannot be gone on with."""
        parallelism = str(self.joined.groups.parallelism)
        self._snapshots = JobSnapshots(
            directory,
            self.joined.control,
            self._entries(),
            options,
            parallelism=parallelism,
            mark=mark,
            report=report,
        )
        report(self._snapshots.describe())
        found = self._snapshots.find()
        if found is None:
            self._check_same_step()
            if self.joined.options.stores:
                # a placed stage commits by itself: there is always a snapshot that it can go
                # back to
                self._snapshots.save(self.steps_done, self.optimizer, self._buffers())
            return {}
        self.optimizer.load(found.pieces(self.optimizer.needed()), found.step)
        restore_buffers(found.blobs, self.stage_model)
        self.committed_step = found.step
        report(f"resumed at step {found.step}, which ran as {found.parallelism}")
        return found.blobs

    def due(self) -> bool:
        """Whether a snapshot is to be written after this step."""
        return self._snapshots is not None and self._snapshots.due(self.steps_done)

    def snapshot(self, blobs: Mapping[str, bytes]) -> None:
        """Commit the step on all ranks. blobs: what else it consists of. Raises StoreError."""
        if self._snapshots is None:
            raise LoopError("no directory for snapshots was given", hint="call keep() first")
        if self.steps_done != self.committed_step:
            self._snapshots.save(self.steps_done, self.optimizer, {**blobs, **self._buffers()})
            self.committed_step = self.steps_done

    def _buffers(self) -> dict[str, bytes]:
        """Of this stage; every stage's are in a snapshot."""
        return buffers_blob(self.stage_model, self.joined.position.stage)

    def _check_same_step(self) -> None:
        """Raises StaleError where a stage's store has steps that the others do not."""
        steps = self.joined.control.agree(self.steps_done, "the step at which each rank is")
        if len({*steps}) > 1:
            where = (f"{self.joined.control.name(r)} at step {n}" for r, n in enumerate(steps))
            raise StaleError(
                f"no snapshot is gone on from, and the stages are at several steps:"
                f" {', '.join(where)}",
                hint="give placed stages the run directory that they were trained with, or empty"
                " directories and servers",
            )

    def _entries(self) -> list[ParamEntry]:
        """This stage's parameters, as the whole model calls them."""
        rules: dict[nn.Parameter, str] = {}
        for group in self.optimizer.param_groups:
            rules |= dict.fromkeys(group["params"], self.joined.rule)
        shapes = self.stage_model.shapes  # before layers were split
        return [
            ParamEntry(name, shapes[name], NAMES[p.dtype], rules.get(p, ""))
            for name, p in self.model.named_parameters()
        ]

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The mean loss over num_microbatches micro-batches; nothing is trained."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with self._in_time(f"the evaluation after step {self.steps_done}"):
                loss = self.pipeline.evaluate(batch)
                own = loss if self.joined.position.tensor == 0 else 0.0
                return math.fsum(one[0] for one in self._told([own]))
        finally:
            for module, training in modes.items():
                module.training = training

    def abandon(self) -> None:
        """After an error: end without waiting for others, who may be gone; they hear of it when
        this process ends. What is committed stays."""
        if not self._closed:
            self._closed = True
            self.stage_model.detach()
            self.optimizer.abandon()

    def close(self) -> None:
        """End threads and process groups; the model's parameters stay as they are."""
        if self._closed:
            return
        self._closed = True
        self.stage_model.detach()
        try:
            self.optimizer.close()
        finally:
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()

    def __enter__(self) -> ParallelTraining:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _told(self, values: list[float]) -> list[list[float]]:
        """Of all ranks, in their order."""
        return self.joined.control.agree(values, f"sums of step {self.steps_done}")

    def adopt(
        self,
        joined: Joined,
        stage_model: StageModel,
        optimizer: StageOptimizer,
        pipeline: Pipeline,
    ) -> None:
        """Another part of the model is this process's, from the next step on."""
        self.joined, self.stage_model = joined, stage_model
        self.optimizer, self.pipeline = optimizer, pipeline
        stage_model.attach()
