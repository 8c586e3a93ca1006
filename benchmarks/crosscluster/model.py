"""The decoder of `crosscluster`, the data of a step, and the arguments of a run. Does NOT train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 20
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class ModelSize:
    """Size of a Llama. `hidden`: width of the residual stream; `inner`: width of the MLP."""

    layers: int = 16
    hidden: int = 512
    inner: int = 1024
    heads: int = 8
    vocabulary: int = 512

    def build(self) -> LlamaForCausalLM:
        """Build the model in fp32. Every process builds the same values."""
        torch.manual_seed(SEED)
        model: LlamaForCausalLM = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.hidden,
                intermediate_size=self.inner,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                tie_word_embeddings=False,
                use_cache=False,
            )
        )
        return model


@dataclass(frozen=True)
class Batch:
    """Data of a step: `rows` rows of `sequence` tokens, split into micro-batches of equal size."""

    rows: int = 32
    sequence: int = 128
    microbatches: int = 8

    @property
    def micro_rows(self) -> int:
        return self.rows // self.microbatches

    def tokens(self, step: int, vocabulary: int) -> torch.Tensor:
        """Return learnable random tokens for a step, int64 [rows, sequence]."""
        generator = torch.Generator().manual_seed(SEED + step)
        start = torch.randint(vocabulary, (self.rows, 1), generator=generator)
        stride = torch.randint(1, 8, (self.rows, 1), generator=generator)
        return (start + stride * torch.arange(self.sequence)) % vocabulary

    def micros(self, step: int, vocabulary: int) -> list[torch.Tensor]:
        """Return the micro-batches of a step, each int64 [micro_rows, sequence]."""
        return list(self.tokens(step, vocabulary).split(self.micro_rows))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross entropy over all tokens but the first of each row.

    Args:
        logits: float [rows, sequence, vocabulary]
        tokens: int64 [rows, sequence]
    """
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW or, for the name `sgd`, SGD with momentum. Only the updates of SGD depend on the
    scale of the gradients, so SGD shows whether this scale is right.
    """
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


@dataclass(frozen=True)
class RunSpec:
    """Arguments that every process of a run gets."""

    method: str
    """`ours`, or a peer: `ddp`, `torch_pipeline`; `single`: one process."""

    model: ModelSize = field(default_factory=ModelSize)
    batch: Batch = field(default_factory=Batch)
    optimizer: str = "adamw"
    warmup: int = 1
    """Steps before the measured ones."""

    steps: int = 3
    master: str = "127.0.0.1"
    port: int = 29400
    interface: str = "lo"
    """Network interface of a peer, which uses the same for all traffic."""

    parallelism: dict[str, Any] = field(default_factory=dict)
    """For `ours`: the fields of `Parallelism`. For torch's pipeline: `dp`, `pp`, `stages`."""

    networks: list[dict[str, Any]] = field(default_factory=list)
    """For `ours`: the job's `networks`, which describe the hosts' cards."""

    stages: str = "even"
    """For `ours`: how layers are divided when `parallelism` does not say so."""

    overlap: bool = True
    """For `ours`: the optimizer communicates during the backward and the next forward."""

    stage_stores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For `ours`: stage -> the store that keeps and updates it, instead of the
    stage's own ranks.
    """

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the spec with these fields, as a child process gets them."""
        model, batch = ModelSize(**fields["model"]), Batch(**fields["batch"])
        return cls(**{**fields, "model": model, "batch": batch})
