"""Train the same job in plain PyTorch, under the same memory limit: `make train-plain`.

Model, text, optimizer and learning rates are those of the job file. Within the limit, it trains up
to run.steps or run.minutes and exits with code 0. If an allocation is refused, it prints what it
was doing and how much is needed, and exits with code 3. Other errors exit with 2. The printed need
of plain training assumes AdamW.

    python examples/train_plain.py JOB.toml [--run.memory_limit 8GiB ...]
"""

import sys
import time

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from roadtrain.config.job import load_job, parse_overrides
from roadtrain.errors import BudgetError, RoadtrainError
from roadtrain.training.build import build_model, build_optimizer, fitted
from roadtrain.training.data import Tokens
from roadtrain.training.memory_limit import ENFORCED_BY, limited, peak
from roadtrain.training.placed_job import loss_of
from roadtrain.training.schedule import learning_rate
from roadtrain.units import show_bytes

STOPPED_BY_THE_LIMIT = 3
ARRAYS = {"parameters": 1, "gradients": 1, "the optimizer's state": 2}  # of AdamW, all in fp32


class Progress:
    """The current activity, for the message when the limit stops it."""

    doing = "making the model"
    made = 0  # number of parameters created so far

    def count(self, module, name, parameter):
        self.made += 0 if parameter is None else parameter.numel()


def main(path, *options):
    job = load_job(path, parse_overrides(options))
    tokens = Tokens(job.data.paths, job.data.tokenizer, job.data.held_out, job.run.seed)
    job = fitted(job, tokens)
    numel = sum(p.numel() for p in build_model(job, "meta").parameters())
    shares = ", ".join(f"{name} {show_bytes(4 * n * numel)}" for name, n in ARRAYS.items())
    needed = show_bytes(4 * sum(ARRAYS.values()) * numel)
    print(f"plain training needs {needed}: {shares}")
    if job.limit_nbytes is not None:
        print(f"limit: {show_bytes(job.limit_nbytes)} for this process, enforced by {ENFORCED_BY}")
    progress = Progress()
    try:
        with limited(job.limit_nbytes):
            train(job, tokens, progress)
    except BudgetError:
        print(
            f"stopped by the limit while {progress.doing}, with {progress.made / 1e6:.0f} of"
            f" {numel / 1e6:.0f} million parameters created: the limit is"
            f" {show_bytes(job.limit_nbytes)}, plain training needs {needed} besides the"
            " interpreter, torch and the text"
        )
        return STOPPED_BY_THE_LIMIT
    print(f"trained within the limit; peak memory {show_bytes(peak())}")
    return 0


def train(job, tokens, progress):
    torch.manual_seed(job.run.seed)
    device = torch.device("cpu")
    counting = register_module_parameter_registration_hook(progress.count)
    model = build_model(job, "cpu")
    counting.remove()
    optimizer = build_optimizer(job, model.parameters())
    until = time.monotonic() + 60 * (job.run.minutes or float("inf"))
    for number in range(job.run.steps):
        if time.monotonic() > until:
            return
        progress.doing = f"doing step {number + 1}"
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, number)
        total = 0.0
        for micro in range(job.optimizer.accumulate):
            x_BT, y_BT = tokens.batch(number, micro, job.data.batch_size, job.data.seq_len)
            loss = loss_of(model, x_BT, y_BT, device) / job.optimizer.accumulate
            loss.backward()
            total += loss.item()
        if job.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number + 1}/{job.run.steps}  loss {total:.3f}")


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except RoadtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
