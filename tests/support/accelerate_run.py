"""A loop with accelerate as in its guide, with everything tracked; a test runs and kills it.

    accelerate_run.py STORE STEPS KILL

Prints a line per step: its number, the loss, the learning rate, the rows of the batch.
"""

from __future__ import annotations

import os
import signal
import sys

import accelerate
import torch
from torch.utils.data import DataLoader

import roadtrain
from tests.support.models import VOCAB, Case, build

store, steps, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
accelerate.utils.set_seed(5)
accelerator = accelerate.Accelerator(cpu=True)
model, optimizer = build(Case())
placed = roadtrain.place(model, optimizer, store=store, host_budget="128MiB")
scheduler = torch.optim.lr_scheduler.LambdaLR(placed, lambda step: 1 - step / 20)
loader = DataLoader(range(10), batch_size=3, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, placed, loader, scheduler)
placed.track(scheduler=scheduler, loader=loader)
epoch = 0
while placed.steps_done < steps:
    for rows in loader:
        x = (rows[:, None] * torch.arange(1, 9)) % VOCAB
        loss = torch.nn.functional.dropout(model(x), 0.5).square().mean()
        accelerator.backward(loss)
        rate = scheduler.get_last_lr()[0]
        optimizer.step()
        if placed.steps_done == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        scheduler.step()
        optimizer.zero_grad()
        print(placed.steps_done, loss.item().hex(), rate, rows.tolist(), flush=True)
        if placed.steps_done == steps:
            break
placed.close()
