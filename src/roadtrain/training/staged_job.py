"""A job with `[parallelism]`: torchrun starts the processes, and each process trains its stage.

A staged job has the same losses as a placed job, except with dropout, because the micro-batches of
a step have the same data. Process 0 writes the files of the run directory, and all processes write
snapshots.
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
from roadtrain.servers.trace import Interval, StageTotals, as_words
from roadtrain.servers.usage import process_usage
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
from roadtrain.training.metrics import missed_steps
from roadtrain.training.progress import Report, silent
from roadtrain.training.run_files import mark_of
from roadtrain.training.run_lines import RunLines
from roadtrain.training.schedule import set_learning_rate
from roadtrain.training.step_record import StepRecord
from roadtrain.training.stop import INTERRUPTED, Stop
from roadtrain.training.summary import Summary, loss_rows, resume_command
from roadtrain.units import show_seconds

HELD_OUT_BATCHES = 8
DATA = "data"  # name of the tokens' state in a snapshot


def as_stages(job: Job, report: Report = print) -> Job:
    """Return the job with which to continue a run.

    A run that was trained in stages continues as a single stage if `job` does not set parallelism.
    """
    other = job.parallelism.used or job.servers.addresses or job.run.new_store
    if other or not (folder := job.run_dir / FOLDER).is_dir():
        return job
    try:
        snapshot = newest(folder)[1]
    except ConfigError:  # nothing is committed
        return job
    rank = os.environ.get("RANK", "0")
    ours = Mark(job.run_dir, reads=True, report=silent).record.job
    if ours != snapshot.job and (rank == "0" or ours):  # only rank 0 has a mark
        return job
    dp = int(os.environ.get("WORLD_SIZE", "1"))
    if rank == "0":
        report(
            f"{folder} has the state of this run at step {snapshot.step}, trained as"
            f" {snapshot.parallelism}: continuing as one stage, parallelism.dp = {dp}"
        )
    return job.changed({"parallelism.dp": dp})


def meet_alone(job: Job) -> None:
    """Set torchrun's environment variables, if they are not set, for a job that needs only one
    process."""
    asks = job.parallelism
    single = (asks.dp, asks.tp, asks.pp, asks.widths) == (1, 1, 1, [])
    if single and not any(os.environ.get(name) for name in LAUNCH_NAMES):
        with socket.create_server(("127.0.0.1", 0)) as server:
            where = server.getsockname()
        values = ("0", "1", *map(str, where))
        os.environ.update(zip(LAUNCH_NAMES, values, strict=True))


def open_staged(job: Job, report: Report) -> StagedJob:
    """Open this process's stage of the job at the last committed step. Raises RoadtrainError."""
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
    """This process's stage of a job. `stopped`: whether a rank asked in the last step to stop
    training."""

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

    def is_stale(self, lines: Path) -> bool:
        return missed_steps(lines, self.steps_done)

    def begin(self) -> None:
        """Do nothing: parallelize() has reported the plan."""

    def why(self, stop: Stop) -> str:
        """Return why training ends, or "" to continue. All ranks agree on whether training ends."""
        if not self.stopped:
            return ""
        own = stop.why()
        reasons = self.training.context.control.agree(own, "why training ends")
        if INTERRUPTED in reasons:
            return own if own == INTERRUPTED else "another process was interrupted"
        return str(max(reasons))

    def step(self, stop: Stop) -> StepRecord:
        number, job, training = self.steps_done, self.job, self.training
        lr = set_learning_rate(training.optimizer.param_groups, job, number)

        def batch(micro: int) -> MicroBatch:
            rows, length = job.data.batch_size, job.data.seq_len
            return micro_batch(*self.tokens.batch(number, micro, rows, length), self.device)

        result = training.step(batch, job.optimizer.clip_norm, stop=bool(stop.why()))
        self.stopped, times, at = result.stop, result.times, training.context.position
        seconds = {"Forward": times.forward, "Backward": times.backward, "Wait": times.waiting}
        norm = result.grad_norm
        measured = {
            "grad_norm": norm if math.isfinite(norm) else None,
            "stages": as_words({name: StageTotals(own) for name, own in seconds.items()}),
            "memory": {"process": process_usage()},
            "committed": training.committed_step,
        }
        return StepRecord(
            result.loss,
            lr,
            job.data.batch_size * job.data.seq_len * self.num_microbatches,
            measured,
            (at.stage, at.replica),
            {"snapshot_every": job.parallelism.snapshot_every},
        )

    def intervals(self) -> list[Interval]:
        """Return the intervals since the last call."""
        lane = f"{self.device} of rank {self.rank}"
        intervals = self.training.pipeline.trace.intervals(take=True)
        return [interval._replace(lane=lane) for interval in intervals]

    def keep(self) -> None:
        if self.training.due() and not self.stopped:
            self.training.snapshot(self.blobs())

    def abandon(self) -> None:
        self.training.abandon()

    def finish(self, why: str) -> None:
        self.training.snapshot(self.blobs())

    def blobs(self) -> dict[str, bytes]:
        """Return the job's state apart from parameters and optimizer state, by name."""
        tokens = self.tokens.state_dict()
        return {DATA: encode({"tokens": tokens, "num_microbatches": self.num_microbatches})}

    def held_out_loss(self) -> float | None:
        """Return the mean loss of the same held-out batches as in a placed job, or None if no text
        is held out."""
        job, together = self.job, self.num_microbatches
        if not job.data.held_out:
            return None
        rows, length = job.data.batch_size, job.data.seq_len
        found = self.tokens.held_out_batches(HELD_OUT_BATCHES, rows, length)
        batches = [micro_batch(x_BT, y_BT, self.device) for x_BT, y_BT in found]
        # enough rounds that every batch is evaluated equally often
        rounds = math.lcm(len(batches), together) // together
        losses = [self._evaluated(batches, n * together) for n in range(rounds)]
        return sum(losses) / len(losses)

    def _evaluated(self, batches: Sequence[MicroBatch], first: int) -> float:
        return self.training.evaluate(lambda micro: batches[(first + micro) % len(batches)])

    def rows(self, summary: Summary, lines: RunLines, program: str) -> list[tuple[str, str]]:
        out = loss_rows(self.job, summary)
        if steps := len(lines.curves["loss"]):
            took, waited = show_seconds(lines.seconds / steps), show_seconds(lines.waited_s / steps)
            took += f", of which it waited {waited} for other processes"
            out.append(("a step took, on the first process", took))
        run = self.job.run_dir
        out.append(("committed", f"step {self.training.committed_step}, in {run}"))
        command = f"torchrun ... {program} train {run / 'job.toml'}"
        return [*out, ("to continue", resume_command(summary, command))]

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
    """Prepare the text, model and optimizer of a job, and split the model into stages.

    Raises RoadtrainError.
    """
    check(job)
    if idle := unused(job):
        report(f"a job in stages does not use {', '.join(idle)}")
    job, tokens, device = prepared(job, report)
    options = stage_options(job, processes, shared_lines(job, tokens))
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
    """Return the keys of [store] and [servers] that are set, but have no effect in a job with
    stages."""
    plain = job.changed({"store": {}, "servers": {}})
    return [
        f"{section}.{key}"
        for section in ("store", "servers")
        for key, value in getattr(job, section)
        if value != getattr(getattr(plain, section), key)
    ]


def shared_lines(job: Job, tokens: Tokens) -> str:
    """Return the options that must be equal on all processes, one per line, without paths, which
    may differ between hosts."""
    shared = {
        "text": tokens.fingerprint,
        "data": job.data.model_dump(exclude={"paths", "tokenizer"}),
        "model": job.model.model_dump(exclude={"pretrained"}),
        "optimizer": job.optimizer.model_dump(),
        "run.steps": job.run.steps,
        "parallelism.snapshot_every": job.parallelism.snapshot_every,
    }
    return "\n".join(f"{key} = {value}" for key, value in shared.items())


def snapshot_options(job: Job) -> SnapshotOptions:
    own = job.parallelism
    return SnapshotOptions(own.snapshot_every, own.snapshot_replicas, job.run.new_store)


def resume(staged: StagedJob, mark: Mark | None) -> None:
    """Resume from the last committed step of the run directory. `mark`: the record of this step
    (storage/mark.py)."""
    job, training, report = staged.job, staged.training, staged.report
    blobs = training.keep(job.run_dir, snapshot_options(job), mark, report)
    if DATA in blobs:
        state = decode(blobs[DATA])
        staged.tokens.load_state_dict(state["tokens"])
        if (then := state["num_microbatches"]) != staged.num_microbatches:
            report(
                f"a step had {then} micro-batches and now has {staged.num_microbatches}: losses"
                " will differ; set parallelism.num_microbatches to keep the number"
            )
    staged.tokens.begun = True
