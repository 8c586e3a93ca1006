"""A training script as a user would write it, with everything tracked; a test runs and kills it.

    tracked_run.py STORE STEPS OPTIONS

OPTIONS are JSON. Prints a line per step: its number, the loss, the learning rate, the batch, a
random number.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import roadtrain
from tests.support.models import VOCAB, Case, build


class Noisy(Dataset):
    """Items that draw from all random generators when read."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        return torch.tensor([float(index), noise])


class Streamed:
    """Batches of an endless stream with a state dict."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield torch.tensor([[float(self.at), 0.0]])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 - s / 12),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, 30),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def main(store, steps, options):
    if options.get("streamed"):
        loader = Streamed()
    else:
        generator = torch.Generator().manual_seed(3) if options.get("generator") else None
        loader = DataLoader(
            Noisy(), batch_size=4, shuffle=True, generator=generator, num_workers=options["workers"]
        )
    model, optimizer = build(Case())
    for group in optimizer.param_groups:
        group |= options.get("edited", {})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in tests of a shell's job
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    optimizer = roadtrain.place(model, optimizer, store=store, host_budget="128MiB")
    scheduler = SCHEDULERS[options["scheduler"]](optimizer)
    if options.get("tracked", True):
        optimizer.track(scheduler=scheduler, loader=loader)
    torch.rand(3)  # random numbers that a script may draw before its loop
    micro = options.get("accumulate", 1)
    count = 0
    while optimizer.steps_done < steps:
        for batch in loader:
            count += 1
            loss = step_loss(model, (batch * 997).long() % VOCAB)
            loss.backward()
            if count % micro:
                continue
            optimizer.step()
            kill(options, optimizer.steps_done, "step")
            rate = optimizer.param_groups[0]["lr"]
            by_loss = options["scheduler"] == "ReduceLROnPlateau"
            scheduler.step(*([loss.item()] if by_loss else []))
            optimizer.zero_grad()
            print(
                optimizer.steps_done,
                loss.item().hex(),
                float(rate).hex(),
                [int(i) for i in batch[:, 0]],
                torch.rand(()).item(),
                flush=True,
            )
            if options.get("evaluates"):
                torch.rand(optimizer.steps_done)
            kill(options, optimizer.steps_done, "end")
            if optimizer.steps_done == steps:
                break
    optimizer.close()


def step_loss(model, x):
    """The loss with dropout from the process's generator."""
    return torch.nn.functional.dropout(model(x), 0.5).square().mean()


def kill(options, step, where):
    if options.get("kill") == [step, where]:
        os.kill(os.getpid(), getattr(signal, options.get("signal", "SIGKILL")))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
