"""Train with a schedule, gradient clipping and validation; run it again and it goes on."""

import argparse
import os
import signal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import roadtrain

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--store", default="runs/resume")
options.add_argument("--die-at", type=int, help="kill this process after that many steps")
args = options.parse_args()
STEPS, WIDTH, VOCAB = 60, 64, 32


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def next_token_loss(rows: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


torch.manual_seed(0)
# Arithmetic sequences: each row has a start and a difference of its own.
starts, differences = torch.randint(VOCAB, (2, 640, 1))
rows = (starts + differences * torch.arange(17)) % VOCAB
held_out = rows[512:]
loader = DataLoader(TensorDataset(rows[:512]), batch_size=32, shuffle=True)

model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
optimizer = roadtrain.place(model, optimizer, store=args.store, host_budget="64MiB")
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS + 1)
# Committed with each step and restored now, so that a killed run repeats its own losses.
# The random generators, which shuffle and drop out, are part of each step anyway.
optimizer.track(scheduler=scheduler, loader=loader)

while optimizer.steps_done < STEPS:
    for (batch,) in loader:  # after a restart: the rest of the epoch
        model.train()
        loss = next_token_loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step = optimizer.steps_done
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                validation = next_token_loss(held_out)
            print(
                f"step {step}, loss {loss:.4f}, gradient norm {norm:.3f},"
                f" lr {scheduler.get_last_lr()[0]:.2e}, validation loss {validation:.4f}",
                flush=True,
            )
        if step == args.die_at:
            os.kill(os.getpid(), signal.SIGKILL)  # stands for a power cut
        if step == STEPS:
            break
optimizer.close()  # commits the last step
