"""Process of `roadtrain soak` that trains without servers, as `roadtrain train` does. The store has
two directories, and its syncs and writes are tracked.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak.job import errors_logged, redirect_output
from benchmarks.soak.power import Power, Strike
from benchmarks.soak.scene import STEPS
from roadtrain.config.job import Job
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
    log: str
    shadow: str
    roots: tuple[str, ...]
    attempt: int = 0
    steps: int = STEPS
    strikes: tuple[Strike, ...] = ()
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
            "run": {"dir": errand.run, "steps": errand.steps, "device": "cpu"},
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
    redirect_output(errand.log)
    torch.set_num_threads(1)
    counted = Strike("sync", NEVER, "kill before", "ledger")
    power = Power(
        Path(errand.shadow), [Path(root) for root in errand.roots], (*errand.strikes, counted)
    )
    power.install()
    with errors_logged(errand.attempt):
        train(job_of(errand))
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
