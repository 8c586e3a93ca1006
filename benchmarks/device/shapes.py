"""Large models for the device benchmarks, with the configs of their authors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from roadtrain.chunks import ChunkTable
from roadtrain.streaming.split import split, table

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        **HEADS,
    },
    "Llama-3-70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
        **HEADS,
        "num_attention_heads": 64,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **HEADS,
    },
}
RANK = 16  # of LoRA


def build(config: Mapping[str, Any], *, lora: bool) -> nn.Module:
    """Build a model in bf16 on the meta device. `lora`: whether only adapters of rank RANK of all
    linear layers are trained."""
    with torch.device("meta"):
        whole = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16)
        if lora:
            model.requires_grad_(requires_grad=False)
            for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
                module.adapter_a = nn.Linear(module.in_features, RANK, False, dtype=torch.bfloat16)
                module.adapter_b = nn.Linear(RANK, module.out_features, False, dtype=torch.bfloat16)
                module.__class__ = Adapted
    move_buffers(model, "cpu")
    return model  # type: ignore[no-any-return]


def move_buffers(model: nn.Module, device: str) -> None:
    """Give the rotary embedding, the only module with buffers, values on `device`."""
    inner: Any = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config=model.config).to(device)


class Adapted(nn.Linear):
    """A linear layer with an adapter (LoRA)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapter_a: Any = self.adapter_a
        adapter_b: Any = self.adapter_b
        adapter: torch.Tensor = adapter_b(adapter_a(x))
        return super().forward(x) + adapter


def chunk_table(model: nn.Module) -> ChunkTable:
    groups = {p: 0 for p in model.parameters() if p.requires_grad}
    return table(split(model), groups, torch.bfloat16)
