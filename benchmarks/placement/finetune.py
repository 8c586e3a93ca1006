"""Fine-tune a pretrained model end to end: convert SmolLM2-135M to a Hugging Face folder
(examples/finetune/smollm2.py says which packages that needs), place it with a budget of a quarter
of its training state, fine-tune it on the standard library's source, export it, and load it with
`transformers`. Then fine-tune the model again with top-k compression.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common.children import need_disk, peak_bytes, run_child
from benchmarks.common.model420 import disk_bytes
from benchmarks.common.report import Report, Row
from benchmarks.common.rows import buffers_row, row
from roadtrain.config.job import Job, make_job
from roadtrain.training.data import Tokens
from roadtrain.training.export import export_run
from roadtrain.training.placed_job import loss_of, place_job, step
from roadtrain.training.run_files import write_job
from roadtrain.units import parse_bytes

SMOLLM2 = Path(__file__).parents[2] / "examples/finetune/smollm2.py"
PARAMETERS = 134_515_008
# a quarter of parameters, gradients and two moments in fp32
BUDGET = f"{PARAMETERS * 16 // 4 // 10**6}MB"
# also holds the residual of the root block (its embedding: 113 MB), so it needs at least 614 MiB
FEEDBACK_BUDGET = "650MB"
TEXT = [f"{sysconfig.get_path('stdlib')}/a*.py", f"{sysconfig.get_path('stdlib')}/t*.py"]
ROWS, SEQ, HELD_OUT, HELD_OUT_BATCHES = 1, 128, 0.02, 16
STEPS, LEARNING_RATE = 30, 5e-5
# percent of the gradient's bytes that are sent, indices included
COMMUNICATED = (10.0, 5.0, 2.0, 1.0)
SAME = 1e-4  # nats between the placed model and the reloaded one


def run(quick: bool = False) -> Report:
    steps, cases = (
        (6, [(2.0, True)])
        if quick
        else (STEPS, [(c, ef) for c in COMMUNICATED for ef in (False, True)])
    )
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
        home = Path(name)
        need_disk(home, 8 * 10**9)
        folder, out = home / "pretrained", home / "exported"
        subprocess.run([sys.executable, SMOLLM2, folder], check=True)
        plain = run_child(train, folder=folder, run=home / "plain", steps=steps, out=out)
        again = run_child(reload, folder=out)
        shutil.rmtree(home / "plain")
        case = f"SmolLM2-135M, budget {BUDGET}, {steps} steps of {ROWS} x {SEQ} tokens"
        budget, loss, same = parse_bytes(BUDGET), "held-out loss", "the same"
        whole = (plain["plain"], "parameters, gradients, state of plain training")
        rows = [
            replace(row(case, "budget", "MB", budget, whole, goal="ratio >= 4"), goal="a quarter"),
            buffers_row(same, plain["resident"], BUDGET, goal="ratio >= 1"),
            Row(same, "peak resident of the process", "MB", plain["peak_bytes"] / 1e6),
            Row(
                same,
                loss,
                "nats",
                plain["after"],
                plain["before"],
                "before",
                goal="ours < before",
                met=plain["after"] < plain["before"],
            ),
            Row(
                "exported, loaded with transformers",
                loss,
                "nats",
                again["loss"],
                plain["after"],
                "the placed model",
                goal=f"within {SAME:g}",
                met=abs(again["loss"] - plain["after"]) <= SAME,
            ),
            Row(same, "step time", "s", plain["step_s"]),
            *_moved("no compression", plain, plain),
        ]
        for percent, feedback in cases:
            run_dir = home / "lossy"
            result = run_child(
                train, folder=folder, run=run_dir, steps=steps, topk=percent, feedback=feedback
            )
            shutil.rmtree(run_dir)
            how = f"error feedback, budget {FEEDBACK_BUDGET}" if feedback else "no error feedback"
            case = f"top-k, {percent:g} % communicated, {how}"
            there = (plain["after"], "no compression")
            rows.append(Row(case, loss, "nats", result["after"], *there))
            rows += _moved(case, result, plain)
    return Report("finetune", rows)


def _moved(case: str, result: dict[str, Any], plain: dict[str, Any]) -> Iterator[Row]:
    for key, metric in (
        ("sent_bytes", "gradient communicated a step"),
        ("read_bytes", "read on files a step"),
        ("written_bytes", "written on files a step"),
    ):
        yield row(case, metric, "MB", result[key], (plain[key], "no compression"))


def job_of(folder: str, run_dir: str, topk: float | None, feedback: bool) -> Job:
    compress: dict[str, Any] = (
        {} if topk is None else {"keep": topk / 200, "error_feedback": feedback}
    )
    return make_job(
        {
            "run": {"dir": run_dir, "device": "cpu"},
            "model": {"pretrained": folder},
            "budget": {"host": FEEDBACK_BUDGET if feedback else BUDGET},
            "data": {
                "paths": TEXT,
                "tokenizer": f"{folder}/tokenizer.json",
                "seq_len": SEQ,
                "batch_size": ROWS,
                "held_out": HELD_OUT,
            },
            "optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.0, "warmup_steps": 3},
            "compress": compress,
        }
    )


def train(
    folder: str,
    run: str,
    steps: int,
    topk: float | None = None,
    feedback: bool = False,
    out: str | None = None,
) -> dict[str, Any]:
    """Place the model, fine-tune it, and return the held-out losses before and after. If `out` is
    given, also export it.
    """
    job = job_of(folder, run, topk, feedback)
    job.run_dir.mkdir(parents=True)
    training = place_job(job)
    with training.optimizer as optimizer:
        write_job(training.job)
        before = training.held_out_loss(HELD_OUT_BATCHES)
        (read, written), began = disk_bytes(), time.perf_counter()
        losses = [step(training, number)[0] for number in range(steps)]
        optimizer.flush()
        step_s = (time.perf_counter() - began) / steps
        read_after, written_after = disk_bytes()
        worker = optimizer.session.worker
        after = training.held_out_loss(HELD_OUT_BATCHES)
        memory = optimizer.memory()
        sent = worker.compressor.sent_bytes / steps if worker.compressor else PARAMETERS * 4
    if out:
        export_run(run, out)
    return {
        "before": before,
        "after": after,
        "losses": losses,
        "step_s": step_s,
        "sent_bytes": sent,
        "resident": memory["resident"],
        "plain": memory["plain"],
        "peak_bytes": peak_bytes(),
        "read_bytes": (read_after - read) / steps,
        "written_bytes": (written_after - written) / steps,
    }


def reload(folder: str) -> dict[str, Any]:
    """Load the model in `folder` with `transformers`, and return its held-out loss."""
    job = job_of(folder, "", None, False)
    tokens = Tokens(job.data.paths, job.data.tokenizer, job.data.held_out, job.run.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [
            loss_of(model, x_BT, y_BT, torch.device("cpu")).item()
            for x_BT, y_BT in tokens.held_out_batches(HELD_OUT_BATCHES, ROWS, SEQ)
        ]
    return {"loss": sum(losses) / len(losses)}
