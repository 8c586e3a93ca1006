"""A model of 420 M parameters for the benchmarks that keep state on disk. Roadtrain, DeepSpeed and
plain torch train this model with the same config, seed and data.

The model is a Llama of transformers. Parameters and gradients are bf16, and AdamW updates fp32
masters. The text is the standard library's source, read as bytes. This module does NOT import
DeepSpeed.

Note: wide compute. A CPU without bf16 matrix instructions multiplies bf16 matrices at 1-15 GFLOP/s
(measured: torch 2.13, AVX2), so a step would measure little besides these products. On such a CPU
the bf16 parameters are converted to fp32 for each product, activations are fp32, and gradients are
rounded to bf16. All three systems compute in the same way: results have `compute`, "fp32" or
"bf16".
"""

from __future__ import annotations

import functools
import sysconfig
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import roadtrain

LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 32, 1024, 16, 2896, 256  # 419.5 M parameters
SEED, LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 0, 2e-5, (0.9, 0.999), 1e-8, 0.01
BATCH, SEQ = 1, 32
WARM_UP = 2  # steps that do not count: they fill caches and touch memory for the first time


def compute_default() -> str:
    """Return "bf16" if the processor has instructions for products of bf16 matrices, else
    "fp32".
    """
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


def build(
    compute: str,
    *,
    layers: int = LAYERS,
    width: int = WIDTH,
    inner: int = INNER,
    checkpoint: bool = False,
) -> nn.Module:
    """Build the model with bf16 parameters; the whole model never exists in fp32. Call it as
    `model(input_ids=x, labels=x).loss`.

    Args:
        checkpoint: enable activation checkpointing
    """
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        intermediate_size=inner,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM._from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.train()
    if compute == "fp32":
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = WideLinear
            elif type(module) is nn.Embedding:
                module.__class__ = WideEmbedding
    if checkpoint:
        # the new name, else the old one
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    return cast(nn.Module, model)


class WideLinear(nn.Linear):
    """Linear layer with a bf16 weight that computes its product in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, _WideProduct.apply(x, self.weight))  # type: ignore[no-untyped-call]


class WideEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).float()


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.float().t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return torch.matmul(grad, weight.float()), grad_weight.to(weight.dtype)


@functools.cache
def _text() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(step: int, rows: int = BATCH, seq: int = SEQ) -> torch.Tensor:
    """Return the tokens of step `step` (from 0), int64 [rows, seq], which depend only on the
    arguments. Each token is a byte of the text.
    """
    text = _text()
    begin = step * rows * seq % (len(text) - rows * seq)
    return text[begin : begin + rows * seq].long().view(rows, seq)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        params, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )


def plain_losses(
    steps: int, rows: int = BATCH, seq: int = SEQ, compute: str | None = None, **sizes: int
) -> list[float]:
    """Train in plain torch with bf16 parameters and fp32 masters, and return the losses.

    Each parameter is updated as soon as its gradient is complete, so the gradients of the whole
    model never exist at the same time.
    """
    model = build(compute or compute_default(), checkpoint=True, **sizes)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_master_update(param))  # type: ignore[no-untyped-call]
    return [run_step(model, lambda: None, batch(step, rows, seq))[0] for step in range(steps)]


def _master_update(param: nn.Parameter) -> Callable[[torch.Tensor], None]:
    master = nn.Parameter(param.detach().float())
    optimizer = adamw([master])

    def update(_: torch.Tensor) -> None:
        assert param.grad is not None
        master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        master.grad = None
        with torch.no_grad():
            param.copy_(master)

    return update


def run_step(
    model: nn.Module,
    update: Callable[[], None],
    x: torch.Tensor,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> tuple[float, dict[str, float]]:
    """Train a step. Returns (loss, measurements): the seconds of forward, backward and update and
    of the whole step, and the bytes read from and written to disk.
    """
    read, written = disk_bytes()
    t0 = time.perf_counter()
    loss = model(input_ids=x, labels=x).loss
    t1 = time.perf_counter()
    backward(loss)
    t2 = time.perf_counter()
    update()
    t3 = time.perf_counter()
    read_after, written_after = disk_bytes()
    return loss.item(), {
        "forward_s": t1 - t0,
        "backward_s": t2 - t1,
        "update_s": t3 - t2,
        "step_s": t3 - t0,
        "read_bytes": read_after - read,
        "written_bytes": written_after - written,
    }


def disk_bytes() -> tuple[int, int]:
    """Return (bytes read, bytes written) on disks by this process so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    rows: int = BATCH,
    seq: int = SEQ,
) -> tuple[list[float], list[dict[str, float]]]:
    """Train the given steps as a user would. Returns (losses, measurements of each step as in
    `run_step`).
    """

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    results = [run_step(model, update, batch(step, rows, seq)) for step in steps]
    return [loss for loss, _ in results], [parts for _, parts in results]


def train_ours(steps: int, store: str, host_budget: str) -> dict[str, Any]:
    """Train the model by roadtrain with its state in the directory `store`. Returns the name of the
    system, and the losses and measurements of all steps.
    """
    model = build(compute_default())
    optimizer = roadtrain.place(
        model,
        adamw(model.parameters()),
        store=store,
        dtype=torch.bfloat16,
        host_budget=host_budget,
        backwards_per_step=1,
    )
    losses, seconds = training(model, optimizer, range(min(WARM_UP, steps)))
    optimizer.flush()  # writes of the warm-up steps do not count in the measured ones
    more, timed = training(model, optimizer, range(WARM_UP, steps))
    losses, seconds = losses + more, seconds + timed
    (read, written), began = disk_bytes(), time.perf_counter()
    optimizer.close()  # pending writes belong to the last step
    seconds[-1]["step_s"] += time.perf_counter() - began
    seconds[-1]["read_bytes"] += disk_bytes()[0] - read
    seconds[-1]["written_bytes"] += disk_bytes()[1] - written
    return {"system": "roadtrain", "losses": losses, "steps": seconds}
