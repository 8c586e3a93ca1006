"""A job whose model is placed by place(), with parameters and optimizer state in files, in RAM or
on servers.

The function `step` is an ordinary PyTorch training step, without code for moving parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from roadtrain.config.job import Job
from roadtrain.environment import WorkerIdentity
from roadtrain.placement.place import place
from roadtrain.servers.trace import Interval, Stages, as_words
from roadtrain.storage.history import Witness
from roadtrain.storage.mark import Mark
from roadtrain.streaming.split import DTYPES
from roadtrain.training.build import build_model, build_optimizer, prepared, token_loss
from roadtrain.training.data import Tokens
from roadtrain.training.job_options import placed_options
from roadtrain.training.memory_limit import ENFORCED_BY
from roadtrain.training.metrics import missed_steps
from roadtrain.training.progress import Report, silent
from roadtrain.training.run_files import mark_of
from roadtrain.training.run_lines import RunLines
from roadtrain.training.schedule import set_learning_rate
from roadtrain.training.step_exchange import GlobalStep, StepExchange
from roadtrain.training.step_record import StepRecord
from roadtrain.training.stop import Stop
from roadtrain.training.summary import Summary, disk_bytes, rows
from roadtrain.units import show_bytes

HELD_OUT_BATCHES = 8
MOST_THREADS = 16  # of torch, with run.memory_limit, which counts 8 MiB of stack for each thread


@dataclass
class PlacedJob:
    """A job whose model is placed. `optimizer` is the result of place()."""

    job: Job
    model: torch.nn.Module
    optimizer: Any
    scaler: torch.amp.GradScaler
    tokens: Tokens
    device: torch.device
    group: WorkerIdentity = field(default_factory=WorkerIdentity)
    # exchanges losses and stop requests with the other workers; None if there is only one worker
    words: StepExchange | None = None
    # times of Forward and Backward without waiting; the optimizer measures the other stages
    stages: Stages = field(default_factory=Stages)
    mark: Mark | None = None  # the run directory's mark; None if no run directory is resumed
    report: Report = silent
    stopped: str = ""  # why all workers stop now, after the step just trained; "" to continue

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def steps_done(self) -> int:
        return int(self.optimizer.steps_done)

    def is_stale(self, lines: Path) -> bool:
        """Return whether no lines may be appended to the metrics file `lines`: it belongs to
        another store, or this worker has missed steps."""
        served = bool(self.job.servers.addresses)
        fresh = self.mark is not None and self.mark.fresh
        return fresh or (served and missed_steps(lines, self.steps_done))

    def begin(self) -> None:
        """Report disk usage and the memory limit."""
        job, plain = self.job, show_bytes(self._plain_nbytes)
        self.keep()
        if used := disk_bytes(job):
            self.report(f"files: {show_bytes(used)} in {', '.join(job.store.files)}")
        if job.limit_nbytes is not None:
            self.report(
                f"memory: this process gets at most {show_bytes(job.limit_nbytes)}, enforced by"
                f" {ENFORCED_BY}; plain training of this model needs {plain}"
            )
        self.tokens.begun = True

    def why(self, stop: Stop) -> str:
        """Return why training ends now, or "" to continue. All workers return the same reason."""
        return self.stopped if self.words else stop.why()

    def step(self, stop: Stop) -> StepRecord:
        """Train the next step."""
        optimizer, words, late = self.optimizer, self.words, self.job.optimizer.delay
        norm: float | None = None

        def before(loss: float) -> None:
            nonlocal norm
            if late == 1:  # the previous step's norm, because this step's norm is not known yet
                norm = optimizer.grad_norm()
            if words is not None:
                words.send(loss, tokens_of(self.job), stop.why())

        loss, lr = step(self, self.steps_done, before)
        common = words.receive(self.steps_done) if words else None
        self.stopped = (stop.why() or common.why) if common is not None and common.why else ""
        measured = optimizer.metrics()
        measured["stages"] = as_words(self.stages.take()) | measured["stages"]
        if norm is not None and math.isfinite(norm):
            measured["grad_norm"] = norm
        witness = Witness.of(optimizer.session.servers.history)
        record = StepRecord(
            loss,
            lr,
            tokens_of(self.job),
            measured,
            (0, self.rank),
            {} if witness is None else {"session": witness.last},
        )
        return self._of_all(record, common)

    def _of_all(self, own: StepRecord, common: GlobalStep | None) -> StepRecord:
        """Return `own` with the mean loss and the total number of tokens of all workers; with a
        delay, with the loss of worker 0. Other workers than worker 0 return `own` unchanged."""
        if self.words is None or self.rank:
            return own
        if self.words.lag or common is None:
            more = {**own.more, "loss_of": "worker 0"}
            return replace(own, tokens=own.tokens * self.group.workers, more=more)
        return replace(own, loss=common.loss, tokens=common.tokens)

    def intervals(self) -> list[Interval]:
        """Return the intervals since the last call."""
        trace: Stages = self.optimizer.session.stages
        return self.stages.intervals(take=True) + trace.intervals(take=True)

    def keep(self, *, now: bool = False) -> None:
        """Record the committed step in mark.json. Call this method after the step's metrics line
        was written."""
        if self.rank == 0 and self.mark is not None:
            self.mark.advance(self.optimizer.committed_step, now=now)

    def abandon(self) -> None:
        """Do not commit the last step, because its metrics line could not be written."""
        self.optimizer.abandon()

    def finish(self, why: str) -> None:
        """Commit the last step. `why`: the reason why training ends early, or ""."""
        self.optimizer.flush()
        self.keep(now=True)
        if why:
            self.report(
                f"{why}: step {self.optimizer.committed_step} is committed; run the same command"
                " to continue from there"
            )

    @torch.no_grad()
    def held_out_loss(self, batches: int = HELD_OUT_BATCHES) -> float | None:
        """Return the mean loss of at most `batches` held-out batches, or None if no text is held
        out."""
        job, model = self.job, self.model
        if not job.data.held_out:
            return None
        held_out = self.tokens.held_out_batches(batches, job.data.batch_size, job.data.seq_len)
        model.eval()
        losses = [loss_of(model, x_BT, y_BT, self.device).item() for x_BT, y_BT in held_out]
        model.train()
        return sum(losses) / len(losses)

    @property
    def _plain_nbytes(self) -> int:
        return int(self.optimizer.memory()["plain"])

    def rows(self, summary: Summary, lines: RunLines, program: str) -> list[tuple[str, str]]:
        """Return the rows (name, value) of the table that is printed after training. `program`: the
        command that starts roadtrain."""
        program = f"torchrun ... {program}" if self.group.workers > 1 else program
        return rows(self.job, summary, lines, self._plain_nbytes, program)

    def __enter__(self) -> Self:
        self.optimizer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.optimizer.__exit__(*error)

    def clip(self) -> None:
        """Clip the gradients, before torch divides them by the loss scale."""
        limit = self.job.optimizer.clip_norm
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit * self.scaler.get_scale())


def open_placed(job: Job, report: Report) -> PlacedJob:
    """Open the job at its last committed step. Raises RoadtrainError."""
    if WorkerIdentity.of_environment().rank:
        report = silent
    if job.limit_nbytes is not None and torch.get_num_threads() > MOST_THREADS:
        torch.set_num_threads(MOST_THREADS)
        report(f"memory: using {MOST_THREADS} threads, because the stack of each counts")
    return place_job(job, report, mark_of(job, report))


def place_job(job: Job, report: Report = print, mark: Mark | None = None) -> PlacedJob:
    """Prepare the text, model and optimizer of a job, and place the model and the optimizer.

    `mark`: the run directory's record of its store (storage/mark.py). If None, no earlier training
    is resumed. Raises RoadtrainError.
    """
    job, tokens, device = prepared(job, report)
    narrow = device.type == "cpu" and job.model.dtype != "fp32"
    if narrow and not torch.cpu._is_avx512_bf16_supported():
        report(
            f"this CPU has no {job.model.dtype} arithmetic, so torch emulates it slowly:"
            " --model.dtype fp32 is faster"
        )
    torch.manual_seed(job.run.seed)
    model = build_model(job, "meta")
    scaler = torch.amp.GradScaler(device.type, enabled=job.model.dtype == "fp16")
    optimizer = place(
        model,
        build_optimizer(job, model.parameters()),
        **placed_options(job, moves=mark is not None),
        dtype=DTYPES[job.model.dtype],
        blocks=job.model.blocks,
        device=device,
        weights=job.model.pretrained,
        extra={"scaler": scaler, "data": tokens},
        mark=mark,
        report=report,
    )
    group = optimizer.group
    stages = NetStages(f"{device} of worker {group.rank}", optimizer.session.stages)
    words = StepExchange(optimizer) if group.workers > 1 else None
    placed = (job, model, optimizer, scaler, tokens, device, group, words, stages)
    return PlacedJob(*placed, mark, report)


class NetStages(Stages):
    """Times of Forward and Backward without waiting; their intervals include it. `other`: the
    Stages that measure "Wait"."""

    def __init__(self, lane: str, other: Stages) -> None:
        super().__init__(lane)
        self._other = other

    @contextmanager
    def timed(self, name: str, nbytes: int = 0) -> Iterator[None]:
        before = self._other.seconds().get("Wait", 0.0)
        with super().timed(name, nbytes):
            yield
        self.add(name, before - self._other.seconds().get("Wait", 0.0))


def step(
    training: PlacedJob, number: int, before: Callable[[float], None] | None = None
) -> tuple[float, float]:
    """Train step `number`, counted from 0. Returns the mean loss and the learning rate of the step.

    `before`: a function that is called with the loss before the optimizer's step.
    """
    job, optimizer, scaler = training.job, training.optimizer, training.scaler
    lr = set_learning_rate(optimizer.param_groups, job, number)
    group = training.group
    torch.manual_seed((job.run.seed * 1_000_003 + number) * group.workers + group.rank)  # dropout
    losses: list[torch.Tensor] = []
    for micro in range(job.optimizer.accumulate):
        # index of the batch in the step: the batches are distributed over workers in a fixed order
        turn = micro * group.workers + group.rank
        x_BT, y_BT = training.tokens.batch(number, turn, job.data.batch_size, job.data.seq_len)
        with training.stages.timed("Forward"):
            loss = loss_of(training.model, x_BT, y_BT, training.device) / job.optimizer.accumulate
            losses.append(loss.detach())
        with training.stages.timed("Backward"):
            scaler.scale(loss).backward()  # gradients of a block leave once the block is done
    total = sum(loss.item() for loss in losses)  # waits for a device, so not in the loop
    if before is not None:
        before(total)
    training.clip()
    scaler.step(optimizer)  # updates and commits happen while the next step computes
    scaler.update()
    optimizer.zero_grad()
    return total, lr


def loss_of(
    model: torch.nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor, device: torch.device
) -> torch.Tensor:
    return token_loss(model(input_ids=x_BT.to(device), use_cache=False), y_BT.to(device))


def tokens_of(job: Job) -> int:
    """Return the number of tokens that one worker trains in a step."""
    return job.data.batch_size * job.data.seq_len * job.optimizer.accumulate
