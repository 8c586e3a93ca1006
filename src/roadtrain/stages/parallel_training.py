"""ParallelTraining: one process's part of a model that is trained in stages, as `parallelize`
returns it. All processes call `step` together."""

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
from roadtrain.stages.parallel_parts import RankContext
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
    """Result of one step, equal on all ranks except for `times`. `float(result)` is the loss.

    Attributes:
        loss: Mean over all micro-batches of the step.
        grad_norm: Global norm of the gradients, before clipping.
        times: Seconds of the phases of the step on this rank.
        stop: Whether any rank requested to stop after this step.
    """

    loss: float
    grad_norm: float
    times: StepTimes
    stop: bool

    def __float__(self) -> float:
        return self.loss


class WatchedSizes(Protocol):
    """The methods of StageSizes (stages/parallel_sizes.py) that ParallelTraining calls."""

    def own_pass_s(self, times: StepTimes) -> float: ...
    def step(self, passes_s: Sequence[float]) -> None: ...


class ParallelTraining:
    """The part of a model that one process trains, as returned by `parallelize`.

    Use the object as a context manager, or call `close` at the end and `abandon` after an error.
    `optimizer.param_groups` are the groups of the user's optimizer, so the user's learning-rate
    schedulers work.
    """

    def __init__(
        self,
        context: RankContext,
        stage_model: StageModel,
        optimizer: StageOptimizer,
        pipeline: Pipeline,
    ) -> None:
        self.committed_step = 0
        self.sizes: WatchedSizes | None = None  # None if speeds are not measured
        self._snapshots: JobSnapshots | None = None
        self._closed = False
        self._failed = ""  # name of the collective operation that failed on this process
        self._begun = False  # whether any step has started
        self.adopt(context, stage_model, optimizer, pipeline)

    @property
    def model(self) -> nn.Module:
        """The user's model, with the parameters of this stage only."""
        return self.stage_model.model

    @property
    def rank(self) -> int:
        """The rank of this process in the job."""
        return self.context.rank

    @property
    def steps_done(self) -> int:
        """The number of steps that the job has taken, over all of its starts."""
        return self.optimizer.steps_done

    def step(
        self, batch: Batch, clip_norm: float | None = None, *, stop: bool = False
    ) -> StepResult:
        """Run one training step of the whole job. Collective: every process calls it.

        Args:
            batch: Function from the number of a micro-batch (0 to num_microbatches - 1) to the
                micro-batch. It is called for the micro-batches of this process only.
            clip_norm: Maximum of the norm over all gradients of the job. If None, gradients are not
                clipped.
            stop: Whether this process requests that the job stops after this step.
                `StepResult.stop` is True on all processes if any process requests this.

        Returns:
            The loss, the gradient norm and timings of the step.

        Raises:
            PeerError: Another process ended or timed out (Rule 5). The step has no effect. After
                any error, no further step can run.
        """
        with self._collective(f"step {self.steps_done}"):
            return self._step(batch, clip_norm, stop)

    @contextlib.contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """Run one collective operation. After an error, no further operation may start, since ranks
        could take messages of one operation for messages of another (Rule 6). what: the operation's
        name, for errors."""
        if self._closed:
            raise LoopError("this ParallelTraining is closed, so no step can run")
        if self._failed:
            raise LoopError(
                f"{self._failed} failed on this process, which is now out of sync with the others",
                hint="end all processes and restart from the last snapshot",
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
        at = self.context.position
        total = self.context.options.num_microbatches
        own = self.context.groups.parallelism.micro_batches(at.stage, at.replica, total)
        self.optimizer.begin_step(len(own))
        loss = self.pipeline.step(self.steps_done, batch)
        # all tensor ranks of the last stage have the same loss, so only that of tensor rank 0 is
        # added
        squares = self.optimizer.sum_squares()
        pass_s = 0.0 if self.sizes is None else self.sizes.own_pass_s(self.pipeline.times)
        rows = self._gather([loss if at.tensor == 0 else 0.0, squares, float(stop), pass_s])
        sums = [math.fsum(column) for column in zip(*rows, strict=True)]
        norm = math.sqrt(sums[1]) if sums[1] >= 0 else math.nan
        scale = 1.0
        if clip_norm is not None and norm > clip_norm:
            scale = clip_norm / (norm + 1e-6)  # like torch.nn.utils.clip_grad_norm_
        self.optimizer.step(scale)
        if self.sizes is not None:
            self.sizes.step([row[3] for row in rows])
        return StepResult(sums[0], norm, self.pipeline.times, sums[2] > 0)

    def keep(
        self, directory: Path, options: SnapshotOptions, mark: Mark | None, report: Report
    ) -> Mapping[str, bytes]:
        """Enable snapshots, and load the last committed snapshot if there is one. Collective.

        Args:
            directory: Run directory of the snapshots.
            options: Interval and replication of snapshots.
            mark: Record of the job's last step in the run directory. Only the first process passes
                the record. None on other processes, or if there is no record.
            report: Called with each line of the log.

        Returns:
            The blobs that were passed to `snapshot` at the loaded step; empty if no snapshot was
                loaded.

        Raises:
            StoreError: The directory has snapshots, but the job cannot resume from them.
        """
        parallelism = str(self.context.groups.parallelism)
        self._snapshots = JobSnapshots(
            directory,
            self.context.control,
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
            if self.context.options.stores:
                # a placed stage commits each step on its own, so there must be a snapshot to which
                # it can return
                self._snapshots.save(self.steps_done, self.optimizer, self._buffers())
            return {}
        self.optimizer.load(found.pieces(self.optimizer.needed()), found.step)
        restore_buffers(found.blobs, self.stage_model)
        self.committed_step = found.step
        report(f"resumed at step {found.step}, saved with {found.parallelism}")
        return found.blobs

    def due(self) -> bool:
        """Return whether `snapshot` should be called after this step."""
        return self._snapshots is not None and self._snapshots.due(self.steps_done)

    def snapshot(self, blobs: Mapping[str, bytes]) -> None:
        """Save and commit the current step on all ranks. Collective.

        Args:
            blobs: Further state of the job, by name. `keep` returns it after a restart.

        Raises:
            LoopError: `keep` was not called.
            StoreError: The snapshot cannot be written.
        """
        if self._snapshots is None:
            raise LoopError("snapshots are not enabled", hint="call keep() before snapshot()")
        if self.steps_done != self.committed_step:
            self._snapshots.save(self.steps_done, self.optimizer, {**blobs, **self._buffers()})
            self.committed_step = self.steps_done

    def _buffers(self) -> dict[str, bytes]:
        return buffers_blob(self.stage_model, self.context.position.stage)

    def _check_same_step(self) -> None:
        """Raise StaleError if the ranks are at different steps, as stages with stores may be,
        because each store commits its steps by itself."""
        steps = self.context.control.agree(self.steps_done, "the step at which each rank is")
        if len({*steps}) > 1:
            where = (f"{self.context.control.name(r)} at step {n}" for r, n in enumerate(steps))
            raise StaleError(
                f"there is no snapshot to resume from, and the stages are at different steps:"
                f" {', '.join(where)}",
                hint="use the run directory that the placed stages were trained with, or empty"
                " directories and servers",
            )

    def _entries(self) -> list[ParamEntry]:
        rules: dict[nn.Parameter, str] = {}
        for group in self.optimizer.param_groups:
            rules |= dict.fromkeys(group["params"], self.context.rule)
        shapes = self.stage_model.shapes  # the shapes before layers were split
        return [
            ParamEntry(name, shapes[name], NAMES[p.dtype], rules.get(p, ""))
            for name, p in self.model.named_parameters()
        ]

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Compute the mean loss over num_microbatches micro-batches in eval mode. Collective.

        Args:
            batch: Function from the number of a micro-batch to the micro-batch, as in `step`.

        Returns:
            The mean loss, equal on all ranks.

        Raises:
            PeerError: Another process ended or timed out.
        """
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with self._collective(f"the evaluation after step {self.steps_done}"):
                loss = self.pipeline.evaluate(batch)
                own = loss if self.context.position.tensor == 0 else 0.0
                return math.fsum(row[0] for row in self._gather([own]))
        finally:
            for module, training in modes.items():
                module.training = training

    def abandon(self) -> None:
        """End the training after an error, without waiting for other processes. Other processes
        notice the error when this process ends. Committed snapshots stay."""
        if not self._closed:
            self._closed = True
            self.stage_model.detach()
            self.optimizer.abandon()

    def close(self) -> None:
        """Finish pending work, and end threads and process groups. The model's parameters are not
        changed."""
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

    def _gather(self, values: list[float]) -> list[list[float]]:
        return self.context.control.agree(values, f"sums of step {self.steps_done}")

    def adopt(
        self,
        context: RankContext,
        stage_model: StageModel,
        optimizer: StageOptimizer,
        pipeline: Pipeline,
    ) -> None:
        """Replace this process's stage, with its optimizer and pipeline, from the next step on."""
        self.context, self.stage_model = context, stage_model
        self.optimizer, self.pipeline = optimizer, pipeline
        stage_model.attach()
