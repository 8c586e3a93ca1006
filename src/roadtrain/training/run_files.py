"""The files that training writes in a run directory beside the state: job.toml, the tokenizer, a
metrics file for each rank, and mark.json (a record of the store)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from roadtrain.config.job import Job
from roadtrain.config.machines import LAUNCHED_AS
from roadtrain.storage.direct import replace_file
from roadtrain.storage.mark import Mark
from roadtrain.training.metrics import committed_by, sessions_in

ONE_START = ("run.new_store", "launched.committed", "store.moved_from", "servers.give_up")


def lines_of(job: Job, rank: int = 0) -> Path:
    """Return the path of a rank's metrics file."""
    return job.run_dir / (f"metrics.{rank}.jsonl" if rank else "metrics.jsonl")


def mark_of(job: Job, report: Callable[[str], None] = print, *, reads: bool = False) -> Mark:
    """Open the mark of the job's run directory: the record of the run's store (storage/mark.py).
    `reads`: whether the caller only reads the store, so that a missing store is an error."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    again = restarted and LAUNCHED_AS not in os.environ
    lines = lines_of(job)
    witness = max(committed_by(lines), job.launched.committed or -1)
    return Mark(
        job.run_dir,
        witness=witness,
        sessions=sessions_in(lines),
        new_store=job.run.new_store and not again,
        reads=reads,
        report=report,
    )


def write_job(job: Job) -> None:
    """Write job.toml, without keys that apply to a single start (such as run.new_store), and the
    tokenizer."""
    lasting = job.changed(dict.fromkeys(ONE_START))
    replace_file(job.run_dir / "job.toml", lasting.to_toml().encode(), "writing")
    if job.data.tokenizer != "bytes":
        kept = job.run_dir / "tokenizer.json"
        if Path(job.data.tokenizer).resolve() != kept.resolve():
            replace_file(kept, Path(job.data.tokenizer).read_bytes(), "writing")
