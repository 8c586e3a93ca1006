"""Processes of `roadtrain soak` that train without servers: one runs `roadtrain train`, the other a
script with Hugging Face's Trainer. The store has two directories, and its syncs and writes are
tracked.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak.job import REFUSED, _redirect_output
from benchmarks.soak.power import Power, Strike
from benchmarks.soak.scene import STEPS
from roadtrain.config.job import Job
from roadtrain.errors import RoadtrainError
from roadtrain.integrations.huggingface import Placed
from roadtrain.storage.convert import MASTER, read_param
from roadtrain.storage.generation import open_store
from roadtrain.storage.mark import Mark
from roadtrain.training.metrics import Metrics
from roadtrain.training.train import train

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 150
NEVER = 1 << 30  # number of a call that never happens
PAD = 4096  # bytes added to each line of metrics.jsonl, so that it needs a page of its own


@dataclass(frozen=True)
class TrainerArgs:
    """Arguments for one start of a trainer. `roots`: directories that lose their power
    together.
    """

    home: str
    run: str
    stores: tuple[str, ...]
    attempt: int
    steps: int
    log: str
    shadow: str
    roots: tuple[str, ...]
    strikes: tuple[Strike, ...] = ()
    new_store: bool = False
    lr: float = 1e-2


def job_of(errand: TrainerArgs) -> Job:
    llama = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return Job.model_validate(
        {
            "run": {
                "dir": errand.run,
                "steps": errand.steps,
                "device": "cpu",
                "new_store": errand.new_store,
            },
            "model": {"config": llama},
            "data": {
                "paths": [f"{errand.home}/text"],
                "seq_len": 16,
                "batch_size": 4,
                "held_out": 0,
            },
            "optimizer": {"lr": errand.lr},
            "store": {"files": list(errand.stores), "chunk_elements": 1 << 16},
            "budget": {"host": "96MiB"},
        }
    )


def train_alone(errand: TrainerArgs) -> None:
    """Train, and log a line for each step: attempt, step, loss, norm, committed step, monotonic
    seconds. At the end, log `end` or `error`.
    """
    _write_down(errand.attempt)
    _watched(errand, lambda: train(job_of(errand)))


def train_by_trainer(errand: TrainerArgs) -> None:
    """Train with Hugging Face's Trainer, and log like `train_alone`, with the learning rate in
    place of the norm.
    """
    _watched(errand, lambda: _train_by_trainer(errand))


def _train_by_trainer(start: TrainerArgs) -> None:
    """Run a script of Hugging Face's Trainer with dropout, shuffled rows, a schedule and
    checkpoints. The script is the same at every start.
    """
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, n_positions=16, vocab_size=64)
    model = transformers.GPT2LMHeadModel(config)
    rows = [
        {"input_ids": row, "labels": row}
        for row in torch.randint(0, 64, (10, 16), generator=torch.Generator().manual_seed(1))
    ]

    class RecordingTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            out = super().compute_loss(*args, **options)
            self.last = float(out)
            return out

    class StepLogger(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            lr, placed = options["lr_scheduler"].get_last_lr()[0], trainer.optimizer.optimizer
            words = trainer.last.hex(), float(lr).hex(), placed.committed_step, time.monotonic()
            print(start.attempt, state.global_step, *words)

    args = transformers.TrainingArguments(
        output_dir=start.run,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_steps=4,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    options = {"store": start.stores, "chunk_elements": 1 << 16, "host_budget": "96MiB"}
    trainer = RecordingTrainer(
        model,
        args,
        train_dataset=rows,
        callbacks=[StepLogger()],
        optimizer_cls_and_kwargs=(Placed, {"optimizer": torch.optim.AdamW, **options}),
    )
    trainer.train()
    trainer.optimizer.optimizer.close()


def _watched(errand: TrainerArgs, train: Callable[[], object]) -> None:
    _redirect_output(errand.log)
    torch.set_num_threads(1)
    counted = Strike("sync", NEVER, "kill before", "ledger")
    power = Power(
        Path(errand.shadow), [Path(root) for root in errand.roots], (*errand.strikes, counted)
    )
    power.install()
    try:
        train()
    except RoadtrainError as error:
        print(errand.attempt, "error", f"{type(error).__name__}: {error}".replace("\n", "; "))
        # as if killed: without atexit handlers, so that the scene sees what hangs
        os._exit(REFUSED)
    print(
        errand.attempt, "calls", power.totals["sync"], power.totals["write"], power.counts[counted]
    )
    print(errand.attempt, "end", digest_of(errand.stores))
    print(errand.attempt, "closed")


def digest_of(stores: tuple[str, ...]) -> str:
    """Compute a digest of all parameters and all optimizer state in a store."""
    opened = open_store(stores)
    assert opened is not None
    out = hashlib.sha256()
    try:
        for param in opened.table.params:
            rule = opened.meta.groups[param.group]
            for what in (MASTER, *rule.arrays, *rule.scalars):
                out.update(read_param(opened, param.name, what).tobytes())
    finally:
        opened.close()
    return out.hexdigest()


def _write_down(attempt: int) -> None:
    """Make this process log each step when metrics.jsonl gets the step's line, and again with the
    number of the committed step.
    """
    last: dict[str, Any] = {}
    append, advance, adopt = Metrics.append, Mark.advance, Mark.adopt

    def appended(self: Metrics, line: dict[str, Any]) -> None:
        append(self, line | {"pad": "." * PAD})
        last.update(line)
        say(-1)

    def advanced(self: Mark, step: int, **options: Any) -> None:
        advance(self, step, **options)
        if last:
            say(step)

    def adopted(self: Mark, job: str, step: int, history: str = "") -> None:
        adopt(self, job, step, history)
        print(attempt, "job", job, step)

    def say(committed: int) -> None:
        words = float(last["loss"]).hex(), float(last["grad_norm"]).hex()
        print(attempt, last["step"], *words, committed, time.monotonic())

    Metrics.append, Mark.advance, Mark.adopt = appended, advanced, adopted  # type: ignore[method-assign]
