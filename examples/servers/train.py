"""A worker: train with parameters and optimizer state on servers. run.sh starts two of them."""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import roadtrain

STEPS, VOCAB, WIDTH = 40, 32, 64
rank = int(os.environ["RANK"])  # set by torchrun


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)  # the same first values on all workers
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
servers = roadtrain.Servers(
    ["127.0.0.1:7000", "127.0.0.1:7001"],
    token="runs/servers/token",
    replicas=2,  # each server holds the other's state too: one of them may be lost
)
optimizer = roadtrain.place(
    model, optimizer, store=servers, report=print if rank == 0 else lambda line: None
)

cipher = torch.randperm(VOCAB)  # the model learns this substitution
for step in range(optimizer.steps_done, optimizer.steps_done + STEPS):
    # Other data on each worker; the servers average the gradients of both.
    generator = torch.Generator().manual_seed(2 * step + rank)
    x = torch.randint(VOCAB, (16, 12), generator=generator)
    loss = cross_entropy(model(x).flatten(0, 1), cipher[x].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}, loss {loss:.4f}", flush=True)
optimizer.close()  # commits the last step
