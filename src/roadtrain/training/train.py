"""train(): a job's training loop. The step (`step`) fits one screen; it is the loop that any user
would write.

Batches, learning rates and dropout are functions of the step's number, so a resumed run repeats
them. A step's line is in metrics.jsonl before that step can be committed (the commit waits for the
next forward, or for flush). Does NOT know how parameters travel: that is `place`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from roadtrain.config.job import Job
from roadtrain.config.machines import LAUNCHED_AS
from roadtrain.device.copies import own_device
from roadtrain.environment import WorkerGroup
from roadtrain.errors import ConfigError
from roadtrain.options.lossy import Delay, Downcast, TopK
from roadtrain.placement.place import place
from roadtrain.placement.stores import Files, Memory, Servers
from roadtrain.progress import progress, show_table
from roadtrain.servers.trace import NetStages, Stages
from roadtrain.storage.direct import make_directory, replace_file
from roadtrain.storage.history import Witness
from roadtrain.storage.mark import Mark
from roadtrain.streaming.split import DTYPES
from roadtrain.training.build import build_model, build_optimizer, fitted
from roadtrain.training.data import Tokens
from roadtrain.training.memory_limit import ENFORCED_BY, limited
from roadtrain.training.metrics import Metrics, committed_by, sessions_in, was_away
from roadtrain.training.predicted import promised
from roadtrain.training.schedule import learning_rate
from roadtrain.training.step_words import StepOfAll, WorkerWords
from roadtrain.training.stop import INTERRUPTED, Stop
from roadtrain.training.summary import Summary, Totals, disk_bytes, rows
from roadtrain.transport.address import tls_of, token_of
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import show_bytes

HELD_OUT_BATCHES = 8
RETRY_S = 120.0
MOST_THREADS = 16  # under run.memory_limit: a stack counts 8 MiB, touched or not
Report = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """A job with its model placed. `optimizer`: what place() returned."""

    job: Job
    model: torch.nn.Module
    optimizer: Any
    scaler: torch.amp.GradScaler
    tokens: Tokens
    device: torch.device
    group: WorkerGroup = field(default_factory=WorkerGroup)
    # what workers tell each other; None: there is one
    words: WorkerWords | None = None
    # Forward and Backward, without what was waited in them; the rest is the optimizer's
    stages: Stages = field(default_factory=Stages)

    def clip(self) -> None:
        """Loss scaling is still on the gradients, so the limit is scaled too (torch refuses to
        unscale fp16)."""
        limit = self.job.optimizer.clip_norm
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit * self.scaler.get_scale())


def train(job: Job, report: Report = print, program: str = "roadtrain") -> Summary:
    """Train `job` from its last committed step up to run.steps. `program`: how the command that
    goes on begins. Raises RoadtrainError."""
    if WorkerGroup.of_environment().rank:
        report = silent  # worker 0 speaks for all
    with limited(job.limit_nbytes):
        if job.limit_nbytes is not None and torch.get_num_threads() > MOST_THREADS:
            torch.set_num_threads(MOST_THREADS)
            report(f"memory: {MOST_THREADS} threads compute, the stack of each counts")
        return _train(job, report, program)


def _train(job: Job, report: Report, program: str) -> Summary:
    stop = Stop(job.run.minutes, report)  # its time runs from here
    make_directory(job.run_dir)
    mark = mark_of(job, report)
    training = place_job(job, report, mark)
    optimizer = training.optimizer
    rank = optimizer.group.rank
    # of one worker each
    lines = job.run_dir / (f"metrics.{rank}.jsonl" if rank else "metrics.jsonl")
    done = optimizer.steps_done
    away = bool(job.servers.addresses) and was_away(lines, done)  # others went on without it
    with optimizer, Metrics(lines, done, fresh=mark.fresh or away) as metrics, stop.heard():
        if rank == 0:
            write_job(training.job)  # now that nothing was refused
            mark.advance(optimizer.steps_done)
        if metrics.note:
            report(metrics.note)
        _report_needs(training, report)
        totals = Totals()
        with progress(job, optimizer.steps_done, report) as show:
            then = time.perf_counter()
            training.tokens.begun = True
            # of the step before, with staleness 1: asking waits
            late, norms = job.optimizer.delay, list[float]()

            def ask() -> None:
                norms.append(optimizer.grad_norm())

            words, stopped = training.words, ""

            def before(loss: float) -> None:
                if late == 1:
                    ask()
                if words is not None:
                    words.say(loss, tokens_of(job), stop.why())

            while optimizer.steps_done < job.run.steps and not (stopped if words else stop.why()):
                loss, lr = step(training, optimizer.steps_done, before)
                if not late:
                    ask()
                told = words.hear(optimizer.steps_done) if words else None
                stopped = _why(told, stop.why())
                now = time.perf_counter()
                norm = norms.pop() if norms else math.nan
                line = _line(training, loss, lr, norm, now - then) | _of_all(training, told)
                then = now
                try:
                    metrics.append(line)
                except BaseException:
                    optimizer.abandon()  # a committed step has its line
                    raise
                if rank == 0:
                    mark.advance(optimizer.committed_step)
                show(line)
                totals.add(line, optimizer.memory()["resident"])
        stopped = stopped if words else stop.why()
        stopped = stopped if optimizer.steps_done < job.run.steps else ""
        optimizer.flush()
        if rank == 0:
            mark.advance(optimizer.committed_step, now=True)
        if stopped:
            report(
                f"{stopped}: step {optimizer.committed_step} is committed; the same command goes on"
                " from there"
            )
        held_out = None if INTERRUPTED in stopped else held_out_loss(training)
        summary = Summary(optimizer.steps_done, *totals.first_and_last(), held_out, stopped)
        plain = optimizer.memory()["plain"]
        show_table(rows(training.job, summary, totals, plain, program), report)
        return summary


def _report_needs(training: Training, report: Report) -> None:
    """What the run takes of the disk, and what its memory is limited to."""
    job, plain = training.job, show_bytes(training.optimizer.memory()["plain"])
    if used := disk_bytes(job):
        report(f"files: {show_bytes(used)} in {', '.join(job.store.files)}")
    if job.limit_nbytes is not None:
        report(
            f"memory: this process gets at most {show_bytes(job.limit_nbytes)}, enforced by"
            f" {ENFORCED_BY}; plain training of this model needs {plain}"
        )


def silent(_: str) -> None: ...


def step(
    training: Training, number: int, before: Callable[[float], None] | None = None
) -> tuple[float, float]:
    """Step `number` (from 0): its mean loss and its learning rate. `before`: called with the loss
    before the optimizer's step."""
    job, model, optimizer, scaler = (
        training.job,
        training.model,
        training.optimizer,
        training.scaler,
    )
    lr = learning_rate(job, number)
    for group in optimizer.param_groups:
        group["lr"] = lr
    group = training.group
    torch.manual_seed((job.run.seed * 1_000_003 + number) * group.workers + group.rank)  # dropout
    total = 0.0
    for micro in range(job.optimizer.accumulate):
        # the step's batches, in an order that all workers agree on
        turn = micro * group.workers + group.rank
        x_BT, y_BT = training.tokens.batch(number, turn, job.data.batch_size, job.data.seq_len)
        with training.stages.timed("Forward"):
            loss = loss_of(model, x_BT, y_BT, training.device) / job.optimizer.accumulate
            total += loss.item()
        with training.stages.timed("Backward"):
            scaler.scale(loss).backward()  # gradients leave as each block finishes
    if before is not None:
        before(total)
    training.clip()
    scaler.step(optimizer)  # updates run, and the step is committed, while the next one computes
    scaler.update()
    optimizer.zero_grad()
    return total, lr


def loss_of(
    model: torch.nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor, device: torch.device
) -> torch.Tensor:
    logits_BTV = model(input_ids=x_BT.to(device), use_cache=False).logits
    return functional.cross_entropy(logits_BTV.float().flatten(0, 1), y_BT.to(device).flatten())


@torch.no_grad()
def held_out_loss(training: Training, batches: int = HELD_OUT_BATCHES) -> float | None:
    """Mean over at most `batches` held-out batches; None where none are held out."""
    job, model = training.job, training.model
    if not job.data.held_out:
        return None
    rows = training.tokens.held_out_batches(batches, job.data.batch_size, job.data.seq_len)
    model.eval()
    losses = [loss_of(model, x_BT, y_BT, training.device).item() for x_BT, y_BT in rows]
    model.train()
    return sum(losses) / len(losses) if losses else None


def mark_of(job: Job, report: Report = print, *, reads: bool = False) -> Mark:
    """What the job's run directory, or its launcher, knows of its store. `reads`: none shall be
    made. A worker that torchrun has started again has said `new_store` once before; a launched
    one is told by its job whether it holds."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    again = restarted and LAUNCHED_AS not in os.environ
    lines = job.run_dir / "metrics.jsonl"
    witness = max(committed_by(lines), job.launched.committed or -1)
    return Mark(
        job.run_dir,
        witness=witness,
        sessions=sessions_in(lines),
        new_store=job.run.new_store and not again,
        reads=reads,
        report=report,
    )


def place_job(job: Job, report: Report = print, mark: Mark | None = None) -> Training:
    """Text, model, optimizer, and the one line that places them. `mark`: of the run directory,
    where the state that it knows of is meant. Raises RoadtrainError."""
    tokens = Tokens(job.data.paths, job.data.tokenizer, job.data.held_out, job.run.seed)
    report(
        f"data: {len(tokens.train):,} tokens of {len(tokens.files):,} files,"
        f" {len(tokens.held_out):,} held out"
    )
    job = fitted(job, tokens)
    device = own_device(job.run.device or ("cuda" if torch.cuda.is_available() else "cpu"), report)
    if (
        device.type == "cpu"
        and job.model.dtype != "fp32"
        and not torch.cpu._is_avx512_bf16_supported()
    ):
        report(
            f"this CPU has no {job.model.dtype} arithmetic, torch emulates it slowly: --model.dtype"
            " fp32 is faster"
        )
    torch.manual_seed(job.run.seed)
    model = build_model(job, "meta")
    scaler = torch.amp.GradScaler(device.type, enabled=job.model.dtype == "fp16")
    optimizer = place(
        model,
        build_optimizer(job, model.parameters()),
        store=store_of(job, moves=mark is not None),
        compress=compression_of(job),
        delay=delay_of(job),
        host_budget=job.host_nbytes,
        device_budget=job.device_nbytes,
        dtype=DTYPES[job.model.dtype],
        blocks=job.model.blocks,
        backwards_per_step=promise(job),
        chunk_elements=job.store.chunk_elements,
        device=device,
        weights=job.model.pretrained,
        extra={"scaler": scaler, "data": tokens},
        mark=mark,
        report=report,
    )
    stages = NetStages(optimizer.session.stages)
    words = WorkerWords(optimizer) if optimizer.group.workers > 1 else None
    group = optimizer.group
    return Training(job, model, optimizer, scaler, tokens, device, group, words, stages)


def store_of(job: Job, moves: bool) -> Files | Memory | Servers:
    """`moves`: whether the store may leave directories that it rested in. Raises ConfigError."""
    own, servers = job.store, job.servers
    if not servers.addresses:
        if (
            servers.relay
            or servers.give_up
            or servers.replicas > 1
            or servers.buffering != "auto"
            or servers.switches
        ):
            raise ConfigError(
                "relay, give_up, replicas, buffering or switches, and no servers are given",
                hint="name them in servers.addresses",
            )
        left = own.moved_from if moves else ()
        return Files(own.files, own.rates, own.direct, left) if own.files else Memory()
    if own.rates is not None or own.moved_from:
        raise ConfigError(
            "store.rates or store.moved_from, together with servers",
            hint="the state rests here (store.files) or there (servers.addresses)",
        )
    residuals = Files(job.run_dir / "residuals", direct=own.direct)
    return Servers(
        servers.addresses,
        link=link_of(job),
        replicas=servers.replicas,
        give_up=servers.give_up,
        relay=servers.relay,
        fan_in=servers.fan_in,
        buffering=servers.buffering,
        residuals=residuals if job.compress.error_feedback else None,
    )


def link_of(job: Job) -> TcpOptions:
    """How the servers are reached: tried again for RETRY_S, since they may be starting too."""
    tls = tls_of(job.servers.cert, job.servers.key, job.servers.ca)
    return TcpOptions(
        retry_s=RETRY_S,
        token=token_of(job.servers.token_file),
        tls=tls,
        connections=job.servers.connections,
    )


def compression_of(job: Job) -> TopK | Downcast | None:
    """Raises ConfigError."""
    own = job.compress
    if own.keep is not None and own.downcast is not None:
        raise ConfigError(
            f"compress.keep = {own.keep} and compress.downcast = {own.downcast!r}",
            hint="what is kept of a gradient travels as it is: leave one out",
        )
    if own.keep is not None:
        return TopK(own.keep, own.error_feedback)
    if own.error_feedback:
        raise ConfigError(
            "compress.error_feedback without compress.keep", hint="give keep, or leave it out"
        )
    return Downcast(own.downcast) if own.downcast else None


def delay_of(job: Job) -> Delay | None:
    allowed = job.optimizer.delay
    return Delay(None if allowed == "none" else allowed) if allowed else None


def promise(job: Job) -> int | None:
    """Backward passes a step, where nothing scales gradients after backward: updates then begin
    in it."""
    scaled = job.optimizer.clip_norm is not None or job.model.dtype == "fp16"
    return None if scaled else job.optimizer.accumulate


def tokens_of(job: Job) -> int:
    """Tokens of a worker's step."""
    return job.data.batch_size * job.data.seq_len * job.optimizer.accumulate


def _why(told: StepOfAll | None, own: str) -> str:
    """Why the run ends after this step, which all workers say alike; "" where it goes on."""
    return (own or told.why) if told is not None and told.why else ""


def _of_all(training: Training, told: StepOfAll | None) -> dict[str, Any]:
    """Keys of worker 0's line that are those of the whole run: the mean loss and all tokens. With a
    delay the other losses of the step are not known yet, and the line says whose loss it has."""
    if training.words is None or training.group.rank:
        return {}
    if training.words.lag or told is None:
        return {"tokens": tokens_of(training.job) * training.group.workers, "loss_of": "worker 0"}
    return {"loss": told.loss if math.isfinite(told.loss) else None, "tokens": told.tokens}


def _line(
    training: Training, loss: float, lr: float, norm: float, seconds: float
) -> dict[str, Any]:
    job, optimizer = training.job, training.optimizer
    stages = training.stages.take() | optimizer.stages()
    line: dict[str, Any] = {
        "step": optimizer.steps_done,
        "loss": loss if math.isfinite(loss) else None,
        "grad_norm": norm if math.isfinite(norm) else None,
        "lr": lr,
        "tokens": tokens_of(job),
        "seconds": round(seconds, 6),
        "stages": {
            k: {"seconds": round(v.seconds, 6), "bytes": v.nbytes} for k, v in stages.items()
        },
    }
    if witness := Witness.of(optimizer.session.servers.history):
        line["session"] = witness.last
    line |= promised(job, 0, optimizer.group.rank)
    return line | ({"lossy": job.lossy} if job.lossy else {})


def write_job(job: Job) -> None:
    said_once = job.changed(
        {
            "run.new_store": None,
            "launched.committed": None,
            "store.moved_from": None,
            "servers.give_up": None,
        }
    )
    replace_file(job.run_dir / "job.toml", said_once.to_toml().encode(), "writing")
    if job.data.tokenizer != "bytes":
        kept = job.run_dir / "tokenizer.json"
        if Path(job.data.tokenizer).resolve() != kept.resolve():
            replace_file(kept, Path(job.data.tokenizer).read_bytes(), "writing")
