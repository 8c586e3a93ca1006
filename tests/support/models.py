"""Small models and loops for tests of whole steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import roadtrain

VOCAB = 50


class Net(nn.Module):
    """A small encoder. tied: Use the embedding as the head. frozen: Train only biases and norms,
    LoRA style."""

    def __init__(self, depth=3, width=64, tied=False, frozen=False, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
                for _ in range(depth)
            ]
        )
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(width, VOCAB)
        self.skipped = -1  # layer that this worker skips, which then has no gradient
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            for name, p in self.named_parameters():
                p.requires_grad_("norm" in name or "bias" in name)

    def forward(self, x):
        self.seen += 1
        h = self.embed(x)
        for number, layer in enumerate(self.layers):
            h = h if number == self.skipped else layer(h)
        return self.head(h)


@dataclass(frozen=True)
class Case:
    """A combination of options. dtype: Compute dtype of parameters. scaler: fp16-style loss scaling
    with an inf. sgd: Plain SGD with a power of two, so that torch's update has the same bits.
    device: Device of the blocks."""

    accumulate: int = 1
    clip: float | None = None
    groups: bool = False
    frozen: bool = False
    tied: bool = False
    scaler: bool = False
    dtype: torch.dtype | None = None
    eager: bool = False
    staleness: int = 0
    sgd: bool = False
    dropout: float = 0.1
    device: str = "cpu"


def build(case, seed=0):
    torch.manual_seed(seed)
    model = Net(tied=case.tied, frozen=case.frozen, dropout=case.dropout)
    params = [p for p in model.parameters() if p.requires_grad]
    if case.groups:
        wide, thin = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
        decay = 0.0 if case.sgd else 0.1
        params = [{"params": g, "weight_decay": wd} for g, wd in ((wide, decay), (thin, 0.0)) if g]
    if case.sgd:
        return model, torch.optim.SGD(params, lr=0.125, foreach=False)
    return model, torch.optim.AdamW(params, lr=1e-2, foreach=False)


def place(case, store, seed=0, **options):
    model, optimizer = build(case, seed)
    scaler = new_scaler(case)
    extra = {"scaler": scaler} if case.scaler else {}
    placed = roadtrain.place(
        model,
        optimizer,
        store=store,
        dtype=case.dtype,
        extra=extra,
        backwards_per_step=case.accumulate if case.eager else None,
        delay=delay_of(case),
        device=case.device,
        **{"report": lambda _: None, "deadline_s": 60, **options},
    )
    return model, placed, scaler


def delay_of(case):
    allowed = case.staleness
    return roadtrain.Delay(None if allowed == "none" else allowed) if allowed else None


def new_scaler(case):
    return torch.amp.GradScaler(
        case.device, init_scale=2.0**10, growth_interval=2, enabled=case.scaler
    )


def one_step(case, model, optimizer, scaler, number, seed=None, bad=True):
    """Run step `number` of the common loop; with a scaler, step 2 has an inf (if `bad`) and is
    skipped."""
    torch.manual_seed(1000 + number if seed is None else seed)
    total = 0.0
    for _ in range(case.accumulate):
        x = torch.randint(0, VOCAB, (4, 16)).to(case.device)
        loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(1, 1).flatten())
        blown = loss * float("inf") if case.scaler and number == 2 and bad else loss
        scaler.scale(blown / case.accumulate).backward()
        total += loss.item()
    if case.clip is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total


def run(case, model, optimizer, scaler, first, last):
    return [one_step(case, model, optimizer, scaler, i) for i in range(first, last)]


def contents(model, placed):
    """Every tensor of the training by name."""
    out = {}
    for name, p in model.named_parameters():
        out[name] = placed.read(name)
        if p.requires_grad:
            out |= {
                f"{name}:{what}": placed.read(name, what)
                for what in ("exp_avg", "exp_avg_sq", "step")
            }
    return out | {name: b.cpu().numpy().copy() for name, b in model.named_buffers()}
