"""A job with `[parallelism]`: every process of it, started by torchrun, trains its stage.

The same data, learning rates, metrics and table as `train`; micro-batch i of a step is what pass i
of one process alone would be, so that losses are the same (but for dropout, whose numbers `train`
draws in one stream a step, and stages by micro-batch and block). Process 0 writes the files of the
run directory; snapshots are written by all. Does NOT know how stages talk: that is `parallelize`.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from roadtrain.config.job import CompressSection, Job
from roadtrain.device.copies import own_device
from roadtrain.environment import LAUNCH_NAMES, launch_of
from roadtrain.errors import ConfigError
from roadtrain.placement.stores import Files, Memory, Servers
from roadtrain.progress import progress, show_table
from roadtrain.stages.job_parallelism import StagePlacement
from roadtrain.stages.parallel_options import ParallelOptions, StageStore
from roadtrain.stages.parallel_training import ParallelTraining, StepResult
from roadtrain.stages.parallelize import parallelize
from roadtrain.stages.snapshots import FOLDER, SnapshotOptions
from roadtrain.stages.stage_model import MicroBatch
from roadtrain.storage.direct import make_directory
from roadtrain.storage.mark import Mark
from roadtrain.streaming.plain import decode, encode
from roadtrain.streaming.split import DTYPES
from roadtrain.training.build import build_model, build_optimizer, fitted
from roadtrain.training.data import Tokens
from roadtrain.training.export_stages import newest
from roadtrain.training.memory_limit import limited
from roadtrain.training.metrics import Metrics, was_away
from roadtrain.training.predicted import promised
from roadtrain.training.schedule import learning_rate
from roadtrain.training.stop import Stop
from roadtrain.training.summary import Summary, Totals, going_on
from roadtrain.training.train import RETRY_S, mark_of, silent, write_job
from roadtrain.transport.address import token_of
from roadtrain.units import show_seconds

HELD_OUT_BATCHES = 8
DATA = "data"  # the name of the tokens' state in a snapshot
Report = Callable[[str], None]


@dataclass(frozen=True)
class StagedJob:
    """A job whose model is cut into stages, on one process."""

    job: Job
    training: ParallelTraining
    tokens: Tokens
    device: torch.device

    @property
    def num_microbatches(self) -> int:
        return self.training.joined.options.num_microbatches

    def blobs(self) -> dict[str, bytes]:
        """What a step consists of beside parameters and their state."""
        tokens = self.tokens.state_dict()
        return {DATA: encode({"tokens": tokens, "num_microbatches": self.num_microbatches})}

    def line(self, result: StepResult, lr: float, seconds: float) -> dict[str, Any]:
        """Of metrics.jsonl."""
        job, times = self.job, result.times
        loss, norm = result.loss, result.grad_norm
        tokens = job.data.batch_size * job.data.seq_len * self.num_microbatches
        stages = {"Forward": times.forward, "Backward": times.backward, "Wait": times.waiting}
        line: dict[str, Any] = {
            "step": self.training.steps_done,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": lr,
            "tokens": tokens,
            "seconds": round(seconds, 6),
            "stages": {k: {"seconds": round(v, 6), "bytes": 0} for k, v in stages.items()},
            "snapshot_every": job.parallelism.snapshot_every,
        }
        if job.predicted.seconds:
            at = self.training.joined.position
            line |= promised(job, at.stage, at.replica)
        return line | ({"lossy": job.lossy} if job.lossy else {})

    def step(self, *, stop: bool) -> tuple[StepResult, float]:
        """The next step and its learning rate. stop: as ParallelTraining.step's."""
        number, job = self.training.steps_done, self.job
        lr = learning_rate(job, number)
        for group in self.training.optimizer.param_groups:
            group["lr"] = lr

        def batch(micro: int) -> MicroBatch:
            rows, length = job.data.batch_size, job.data.seq_len
            return micro_batch(*self.tokens.batch(number, micro, rows, length), self.device)

        return self.training.step(batch, job.optimizer.clip_norm, stop=stop), lr

    def held_out_loss(self) -> float | None:
        """Mean over the held-out batches, those of one process; None where none are held out."""
        job, together = self.job, self.num_microbatches
        if not job.data.held_out:
            return None
        found = self.tokens.held_out_batches(
            HELD_OUT_BATCHES, job.data.batch_size, job.data.seq_len
        )
        batches = [micro_batch(x_BT, y_BT, self.device) for x_BT, y_BT in found]
        # so often that each batch has had as many turns as any other
        rounds = math.lcm(len(batches), together) // together
        losses = [self._evaluated(batches, n * together) for n in range(rounds)]
        return sum(losses) / len(losses)

    def _evaluated(self, batches: Sequence[MicroBatch], first: int) -> float:
        return self.training.evaluate(lambda micro: batches[(first + micro) % len(batches)])


def micro_batch(x_BT: torch.Tensor, y_BT: torch.Tensor, device: torch.device) -> MicroBatch:
    kwargs = {"input_ids": x_BT.to(device), "use_cache": False}
    return MicroBatch((), kwargs, y_BT.to(device))


def loss_of(result: Any, batch: MicroBatch) -> torch.Tensor:
    logits_BTV: torch.Tensor = result.logits
    return functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch.target.flatten())


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


def train_parallel(job: Job, report: Report = print, program: str = "roadtrain") -> Summary:
    """Train `job` from its last committed step up to run.steps; run.memory_limit is each process's.
    Raises RoadtrainError."""
    with limited(job.limit_nbytes):
        return _train(job, report, program)


def _train(job: Job, report: Report, program: str) -> Summary:
    stop = Stop(job.run.minutes, report)
    meet_alone(job)
    launch = launch_of(os.environ)
    say = report if launch.rank == 0 else silent
    make_directory(job.run_dir)
    mark = mark_of(job, report) if launch.rank == 0 else None
    staged = stage_job(job, launch.world_size, say)
    with staged.training, stop.heard():
        resume(staged, mark, say)
        why, totals = train_steps(staged, mark, stop, say)
        staged.training.snapshot(staged.blobs())
        held_out = None if "interrupted" in why else staged.held_out_loss()
        summary = Summary(staged.training.steps_done, *totals.first_and_last(), held_out, why)
        show_table(rows(staged, summary, totals, program), say)
        return summary


def stage_job(job: Job, processes: int, report: Report) -> StagedJob:
    """Text, model, optimizer, and the line that cuts them into stages. Raises RoadtrainError."""
    check(job)
    if idle := unused(job):
        report(f"a job in stages does not use {', '.join(idle)}")
    tokens = Tokens(job.data.paths, job.data.tokenizer, job.data.held_out, job.run.seed)
    trained, held = len(tokens.train), len(tokens.held_out)
    report(f"data: {trained:,} tokens of {len(tokens.files):,} files, {held:,} held out")
    job = fitted(job, tokens)
    device = own_device(job.run.device or ("cuda" if torch.cuda.is_available() else "cpu"), report)
    options = replace(options_of(job, processes), job=told_of(job, tokens))
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
    return StagedJob(job, training, tokens, device)


def check(job: Job) -> None:
    """Raises ConfigError for what a job of stages cannot have."""
    for key, given, hint in (
        ("compress", job.compress != CompressSection(), "parallelism.activations"),
        ("optimizer.delay", job.optimizer.delay, "leave it out"),
        ("budget.host", job.budget.host, "run.memory_limit, which holds for each process"),
        ("budget.device", job.budget.device, "more stages, or a placement for a stage"),
        ("servers.addresses", job.servers.addresses, "parallelism.placements, for each stage"),
        ("model.dtype = fp16", job.model.dtype == "fp16", "bf16, which needs no loss scaling"),
    ):
        if given:
            raise ConfigError(f"{key} and [parallelism] do not go together yet", hint=hint)


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


def options_of(job: Job, processes: int) -> ParallelOptions:
    """Raises ConfigError."""
    asked = job.parallelism
    degrees = asked.degrees(processes)
    total = asked.num_microbatches or job.optimizer.accumulate * max(degrees.replicas_of)
    return ParallelOptions(
        degrees,
        total,
        "even" if isinstance(asked.stages, list) else asked.stages,
        asked.resize_stages,
        {one.stage: store_of(one, job) for one in asked.placements},
        asked.reducers,
        asked.reducers_token_file,
        asked.reducers_alone,
        asked.networks,
        asked.data_groups,
        None if asked.activations is None else DTYPES[asked.activations],
        asked.overlap,
        blocks=job.model.blocks,
        dtype=DTYPES[job.model.dtype],
        weights=job.model.pretrained,
        seed=job.run.seed,
        deadline_s=asked.deadline,
    )


def store_of(placement: StagePlacement, job: Job) -> StageStore:
    if placement.servers:
        token = token_of(placement.token_file)
        return Servers(placement.servers, token=token, retry_s=RETRY_S)
    if placement.files:
        return Files([one.replace("{run}", job.run.dir) for one in placement.files])
    return Memory()


def snapshot_options(job: Job) -> SnapshotOptions:
    asked = job.parallelism
    return SnapshotOptions(asked.snapshot_every, asked.snapshot_replicas, job.run.new_store)


def resume(staged: StagedJob, mark: Mark | None, report: Report) -> None:
    """Go on from the last committed step of the run directory."""
    job, training = staged.job, staged.training
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
    if training.rank == 0:
        write_job(job)


def train_steps(
    staged: StagedJob, mark: Mark | None, stop: Stop, report: Report
) -> tuple[str, Totals]:
    """The steps that are left. Returns why it ended before run.steps, or nothing."""
    job, training, totals, stopped = staged.job, staged.training, Totals(), False
    lines = job.run_dir / (
        "metrics.jsonl" if training.rank == 0 else f"metrics.{training.rank}.jsonl"
    )
    fresh = training.steps_done == 0 or was_away(lines, training.steps_done)
    with (
        Metrics(lines, training.steps_done, fresh=fresh) as metrics,
        progress(job, training.steps_done, report) as show,
    ):
        if metrics.note:
            report(metrics.note)
        then = time.perf_counter()
        while training.steps_done < job.run.steps and not stopped:
            result, lr = staged.step(stop=bool(stop.why()))
            stopped = result.stop
            now = time.perf_counter()
            line = staged.line(result, lr, now - then)
            then = now
            metrics.append(line)
            show(line)
            totals.add(line, 0)
            if training.due() and not stopped:
                training.snapshot(staged.blobs())
    early = stopped and training.steps_done < job.run.steps
    return (why_of_all(training, stop.why()) if early else ""), totals


def why_of_all(training: ParallelTraining, why: str) -> str:
    """Why training ended before run.steps; all ranks hear of an interruption, so that all go on
    alike. why: of this one, "" where it would have gone on."""
    told = training.joined.control.agree(why, "why training ends")
    if "interrupted" in told:
        return why if why == "interrupted" else "another process was interrupted"
    return str(max(told))


def rows(
    staged: StagedJob, summary: Summary, totals: Totals, program: str
) -> list[tuple[str, str]]:
    """The table at the end."""
    job = staged.job
    out = [("steps done", f"{summary.steps} of {job.run.steps}")]
    first, last = summary.first_loss, summary.last_loss
    if math.isfinite(first):
        change = f"{'fell' if last <= first else 'rose'} by {abs(first - last):.2f} nats"
        out.append(("training loss, first and last steps", f"{first:.3f} -> {last:.3f}, {change}"))
    if summary.held_out_loss is not None:
        out.append(("held-out loss", f"{summary.held_out_loss:.3f}"))
    if steps := len(totals.losses):
        waited = totals.waited / steps
        out.append(
            (
                "a step took, on the first process",
                f"{show_seconds(totals.seconds / steps)}, of which it waited"
                f" {show_seconds(waited)} for others",
            )
        )
    out.append(("committed", f"step {staged.training.committed_step}, in {job.run_dir}"))
    command = f"torchrun ... {program} train {job.run_dir / 'job.toml'}"
    return [*out, ("to go on", going_on(summary, command))]
