"""A job with `[parallelism]`: every process of it, started by torchrun, trains its stage.

Micro-batch i of a step is what pass i of one process alone would be, so that losses are the same
(but for dropout, whose numbers a placed job draws in one stream a step, and stages by micro-batch
and block). Process 0 writes the files of the run directory; snapshots are written by all. Does NOT
know how stages talk: that is `parallelize`.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from roadtrain.config.job import Job
from roadtrain.environment import LAUNCH_NAMES, launch_of
from roadtrain.errors import ConfigError
from roadtrain.retry import undone_on_error
from roadtrain.stages.parallel_training import ParallelTraining
from roadtrain.stages.parallelize import parallelize
from roadtrain.stages.snapshots import FOLDER, SnapshotOptions
from roadtrain.stages.stage_model import MicroBatch
from roadtrain.storage.mark import Mark
from roadtrain.streaming.plain import decode, encode
from roadtrain.training.build import build_model, build_optimizer, prepared, token_loss
from roadtrain.training.data import Tokens
from roadtrain.training.export_stages import newest
from roadtrain.training.job_options import check, stage_options
from roadtrain.training.metrics import was_away
from roadtrain.training.progress import Report, silent
from roadtrain.training.run_files import mark_of
from roadtrain.training.schedule import set_learning_rate
from roadtrain.training.step_record import StepRecord
from roadtrain.training.stop import INTERRUPTED, Stop
from roadtrain.training.summary import Summary, Totals, going_on, loss_rows
from roadtrain.units import show_seconds

HELD_OUT_BATCHES = 8
DATA = "data"  # the name of the tokens' state in a snapshot


def as_stages(job: Job, report: Report = print) -> Job:
    """Return `job` as it is, or with parallelism.dp: where it names no degrees, but its run
    directory holds the state of a job in stages, that state is gone on from as one stage."""
    other = job.parallelism.used or job.servers.addresses or job.run.new_store
    if other or not (folder := job.run_dir / FOLDER).is_dir():
        return job
    try:
        told = newest(folder)[1]
    except ConfigError:  # nothing is committed
        return job
    rank = os.environ.get("RANK", "0")
    ours = Mark(job.run_dir, reads=True, report=silent).known.job
    if ours != told.job and (rank == "0" or ours):  # the first rank alone has a mark
        return job
    dp = int(os.environ.get("WORLD_SIZE", "1"))
    if rank == "0":
        report(
            f"{folder} holds this run's state, of step {told.step}, trained as"
            f" {told.parallelism}: it goes on from there as one stage, parallelism.dp = {dp}"
        )
    return job.changed({"parallelism.dp": dp})


def meet_alone(job: Job) -> None:
    """Where one process is all that the job asks for, it needs no torchrun."""
    asked = job.parallelism
    one = (asked.dp, asked.tp, asked.pp, asked.widths) == (1, 1, 1, [])
    if one and not any(os.environ.get(name) for name in LAUNCH_NAMES):
        with socket.create_server(("127.0.0.1", 0)) as server:
            where = server.getsockname()
        values = ("0", "1", *map(str, where))
        os.environ.update(zip(LAUNCH_NAMES, values, strict=True))


def open_staged(job: Job, report: Report) -> StagedJob:
    """The job's stage of this process, at the last committed step. Raises RoadtrainError."""
    meet_alone(job)
    launch = launch_of(os.environ)
    say = report if launch.rank == 0 else silent
    mark = mark_of(job, report) if launch.rank == 0 else None
    staged = stage_job(job, launch.world_size, say)
    with undone_on_error(staged.abandon):
        resume(staged, mark)
    return staged


@dataclass
class StagedJob:
    """What training/train.py's loop drives. `stopped`: a rank asked to stop after the last step."""

    job: Job
    training: ParallelTraining
    tokens: Tokens
    device: torch.device
    report: Report = print
    stopped: bool = False

    @property
    def rank(self) -> int:
        return self.training.rank

    @property
    def steps_done(self) -> int:
        return self.training.steps_done

    @property
    def num_microbatches(self) -> int:
        return self.training.context.options.num_microbatches

    def is_away(self, lines: Path) -> bool:
        return was_away(lines, self.steps_done)

    def begin(self) -> None:
        """Nothing is to be said: parallelize() has."""

    def why(self, stop: Stop) -> str:
        """All ranks hear of an interruption, so that all go on alike."""
        if not self.stopped:
            return ""
        own = stop.why()
        told = self.training.context.control.agree(own, "why training ends")
        if INTERRUPTED in told:
            return own if own == INTERRUPTED else "another process was interrupted"
        return str(max(told))

    def step(self, stop: Stop) -> StepRecord:
        number, job, training = self.steps_done, self.job, self.training
        lr = set_learning_rate(training.optimizer.param_groups, job, number)

        def batch(micro: int) -> MicroBatch:
            rows, length = job.data.batch_size, job.data.seq_len
            return micro_batch(*self.tokens.batch(number, micro, rows, length), self.device)

        result = training.step(batch, job.optimizer.clip_norm, stop=bool(stop.why()))
        self.stopped, times, at = result.stop, result.times, training.context.position
        seconds = {"Forward": times.forward, "Backward": times.backward, "Wait": times.waiting}
        return StepRecord(
            result.loss,
            result.grad_norm,
            lr,
            job.data.batch_size * job.data.seq_len * self.num_microbatches,
            {name: (own, 0) for name, own in seconds.items()},
            (at.stage, at.replica),
            {"snapshot_every": job.parallelism.snapshot_every},
        )

    def keep(self) -> None:
        if self.training.due() and not self.stopped:
            self.training.snapshot(self.blobs())

    def abandon(self) -> None:
        self.training.abandon()

    def finish(self, why: str) -> None:
        self.training.snapshot(self.blobs())

    def blobs(self) -> dict[str, bytes]:
        """What a step consists of beside parameters and their state."""
        tokens = self.tokens.state_dict()
        return {DATA: encode({"tokens": tokens, "num_microbatches": self.num_microbatches})}

    def held_out_loss(self) -> float | None:
        """Mean over the held-out batches, those of one process; None where none are held out."""
        job, together = self.job, self.num_microbatches
        if not job.data.held_out:
            return None
        rows, length = job.data.batch_size, job.data.seq_len
        found = self.tokens.held_out_batches(HELD_OUT_BATCHES, rows, length)
        batches = [micro_batch(x_BT, y_BT, self.device) for x_BT, y_BT in found]
        # so often that each batch has had as many turns as any other
        rounds = math.lcm(len(batches), together) // together
        losses = [self._evaluated(batches, n * together) for n in range(rounds)]
        return sum(losses) / len(losses)

    def _evaluated(self, batches: Sequence[MicroBatch], first: int) -> float:
        return self.training.evaluate(lambda micro: batches[(first + micro) % len(batches)])

    def rows(self, summary: Summary, totals: Totals, program: str) -> list[tuple[str, str]]:
        out = loss_rows(self.job, summary)
        if steps := len(totals.losses):
            took, waited = show_seconds(totals.seconds / steps), show_seconds(totals.waited / steps)
            took += f", of which it waited {waited} for others"
            out.append(("a step took, on the first process", took))
        run = self.job.run_dir
        out.append(("committed", f"step {self.training.committed_step}, in {run}"))
        command = f"torchrun ... {program} train {run / 'job.toml'}"
        return [*out, ("to go on", going_on(summary, command))]

    def __enter__(self) -> Self:
        self.training.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.training.__exit__(*error)


def micro_batch(x_BT: torch.Tensor, y_BT: torch.Tensor, device: torch.device) -> MicroBatch:
    kwargs = {"input_ids": x_BT.to(device), "use_cache": False}
    return MicroBatch((), kwargs, y_BT.to(device))


def loss_of(result: Any, batch: MicroBatch) -> torch.Tensor:
    return token_loss(result, batch.target)


def stage_job(job: Job, processes: int, report: Report) -> StagedJob:
    """Text, model, optimizer, and the line that cuts them into stages. Raises RoadtrainError."""
    check(job)
    if idle := unused(job):
        report(f"a job in stages does not use {', '.join(idle)}")
    job, tokens, device = prepared(job, report)
    options = stage_options(job, processes, told_of(job, tokens))
    model = build_model(job, "meta")
    x_BT, y_BT = tokens.batch(0, 0, job.data.batch_size, job.data.seq_len)
    training = parallelize(
        model,
        build_optimizer(job, model.parameters()),
        options,
        example=micro_batch(x_BT, y_BT, device),
        loss=loss_of,
        device=device,
        report=report,
    )
    return StagedJob(job, training, tokens, device, report)


def unused(job: Job) -> list[str]:
    """Keys that say something and have no effect (Rule 6): a stage's state rests beside its ranks,
    or where parallelism.placements says."""
    plain = job.changed({"store": {}, "servers": {}})
    return [
        f"{section}.{key}"
        for section in ("store", "servers")
        for key, value in getattr(job, section)
        if value != getattr(getattr(plain, section), key)
    ]


def told_of(job: Job, tokens: Tokens) -> str:
    """What all processes must have alike, a line each: each host has its own text and job file."""
    said = {
        "text": tokens.fingerprint,
        "data": job.data.model_dump(exclude={"paths", "tokenizer"}),
        "model": job.model.model_dump(exclude={"pretrained"}),
        "optimizer": job.optimizer.model_dump(),
        "run.steps": job.run.steps,
        "parallelism.snapshot_every": job.parallelism.snapshot_every,
    }
    return "\n".join(f"{key} = {value}" for key, value in said.items())


def snapshot_options(job: Job) -> SnapshotOptions:
    asked = job.parallelism
    return SnapshotOptions(asked.snapshot_every, asked.snapshot_replicas, job.run.new_store)


def resume(staged: StagedJob, mark: Mark | None) -> None:
    """Go on from the last committed step of the run directory."""
    job, training, report = staged.job, staged.training, staged.report
    blobs = training.keep(job.run_dir, snapshot_options(job), mark, report)
    if DATA in blobs:
        state = decode(blobs[DATA])
        staged.tokens.load_state_dict(state["tokens"])
        if (then := state["num_microbatches"]) != staged.num_microbatches:
            report(
                f"a step was of {then} micro-batches and is of {staged.num_microbatches} now: its"
                " loss is another one (parallelism.num_microbatches keeps it)"
            )
    staged.tokens.begun = True
