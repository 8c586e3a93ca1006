"""The training processes of the benchmark `fit` that use place() in a script."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import roadtrain

STEPS = 8


def train_placed(
    way: str,
    config: Mapping[str, Any],
    store: str | None,
    budget: str,
    samples: int,
    tokens: int,
    rank: int,
) -> None:
    """Train STEPS steps with place()."""
    torch.manual_seed(0)
    if way == "lora":
        model, inputs = _adapted(config, rank), None
    else:
        model, batch = globals()[way.rpartition(":")[2]]("cpu")
        inputs = batch[:1].expand(samples, *batch.shape[1:]).clone()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = roadtrain.place(
        model, torch.optim.AdamW(parameters, lr=1e-4), store=store, host_budget=budget, device="cpu"
    )
    for _ in range(STEPS):
        if inputs is None:
            ids = torch.randint(256, (samples, tokens))
            results = model(input_ids=ids, use_cache=False).logits.float().flatten(0, 1)
            targets = ids.flatten()
        else:
            results = model(inputs)
            results = getattr(results, "logits", results)
            targets = torch.zeros(samples, dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(results, targets)
        del results
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def _adapted(config: Mapping[str, Any], rank: int) -> Any:
    peft, transformers = map(importlib.import_module, ("peft", "transformers"))
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        adapters = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model.train(), adapters)


def vision(device: str = "meta") -> tuple[Any, Any]:
    """Return a ViT-B of 12 blocks for images of 224 x 224, and a batch of one."""

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 768, 16, 16)
            self.places = nn.Parameter(torch.zeros(1, 196, 768))
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
                for _ in range(12)
            )
            self.head = nn.Linear(768, 1000)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2) + self.places
            for layer in self.layers:
                x = layer(x)
            result: torch.Tensor = self.head(x.mean(1))
            return result

    with torch.device(device):
        return ViT().train(), torch.zeros(1, 3, 224, 224)


def bert(device: str = "meta") -> tuple[Any, Any]:
    """Return BERT's base model with two classes, and a batch of one sample of 128 tokens."""
    return _classifier("bert", device), torch.zeros(1, 128, dtype=torch.long, device=device)


def dino(device: str = "meta") -> tuple[Any, Any]:
    """Return DINOv2's base model with two classes, and a batch of one image."""
    return _classifier("dinov2", device), torch.zeros(1, 3, 224, 224, device=device)


def _classifier(kind: str, device: str) -> Any:
    transformers = importlib.import_module("transformers")
    config = transformers.CONFIG_MAPPING[kind](num_labels=2)
    images = kind == "dinov2"
    made = "AutoModelForImageClassification" if images else "AutoModelForSequenceClassification"
    with torch.device(device):
        return getattr(transformers, made).from_config(config, dtype=torch.float32).train()
