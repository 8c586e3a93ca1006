"""Unchanged models of transformers: a tiny model of each kind trains on files as it does in plain
torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import roadtrain

VOCAB, SEQ = 64, 16
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
ENCODER = {
    k: DECODER[k]
    for k in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "pad_token_id",
    )
}
PICTURES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 2,
}
BOTH = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
STAGES = {"hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2], "num_labels": 2}


def text() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, SEQ))
    return {"input_ids": ids, "labels": ids}


def pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 2, (8,))}


def sound() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 8, 40), "labels": text()["labels"]}


def pairs() -> dict[str, Any]:
    return {
        "input_ids": text()["input_ids"],
        "pixel_values": pictures()["pixel_values"][:2],
        "return_loss": True,
    }


CASES: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "phi3",
            "olmo2",
            "stablelm",
            "cohere",
            "granite",
            "smollm3",
        ),
        ("AutoModelForCausalLM", DECODER, text),
    ),
    "gemma2": ("AutoModelForCausalLM", {**DECODER, "head_dim": 8}, text),
    "mixtral": ("AutoModelForCausalLM", {**DECODER, "num_local_experts": 4}, text),
    "qwen2_moe": (
        "AutoModelForCausalLM",
        {
            **DECODER,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        text,
    ),
    "gpt2": (
        "AutoModelForCausalLM",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4},
        text,
    ),
    "gpt_neox": (
        "AutoModelForCausalLM",
        {k: v for k, v in DECODER.items() if k != "num_key_value_heads"},
        text,
    ),
    "bloom": (
        "AutoModelForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4},
        text,
    ),
    "opt": ("AutoModelForCausalLM", {**ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, text),
    "mamba": (
        "AutoModelForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3},
        text,
    ),
    **dict.fromkeys(
        ("bert", "roberta", "modernbert", "deberta-v2"), ("AutoModelForMaskedLM", ENCODER, text)
    ),
    "albert": ("AutoModelForMaskedLM", {**ENCODER, "embedding_size": 32}, text),
    "t5": ("AutoModelForSeq2SeqLM", T5, text),
    "bart": ("AutoModelForSeq2SeqLM", BOTH, text),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **BOTH,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "num_mel_bins": 8,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        sound,
    ),
    "vit": ("AutoModelForImageClassification", PICTURES, pictures),
    "dinov2": ("AutoModelForImageClassification", PICTURES, pictures),
    "swin": (
        "AutoModelForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 2,
        },
        pictures,
    ),
    "resnet": ("AutoModelForImageClassification", {"embedding_size": 8, **STAGES}, pictures),
    "convnext": ("AutoModelForImageClassification", STAGES, pictures),
    "clip": (
        "CLIPModel",
        {
            "projection_dim": 16,
            "text_config": {**ENCODER, "eos_token_id": 2},
            "vision_config": PICTURES,
        },
        pairs,
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_model_placed_on_files_trains_as_in_plain_torch(kind, tmp_path):
    cls, config, batch = CASES[kind]
    results = []
    for store in (None, tmp_path):
        settings, auto = (
            transformers.AutoConfig.for_model(kind, **config),
            getattr(transformers, cls),
        )
        torch.manual_seed(0)
        model = (auto.from_config(settings) if cls.startswith("Auto") else auto(settings)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if store is not None:
            optimizer = roadtrain.place(
                model, optimizer, store=store, host_budget="200MiB", report=lambda _: None
            )
            # albert runs a single layer repeatedly
            assert len(optimizer.table.blocks) > 1 or kind == "albert"
        losses = []
        for step in range(3):
            torch.manual_seed(100 + step)
            loss = model(**batch()).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if store is not None:
            optimizer.close()
        results.append(losses)
    assert results[0][0] == results[1][0]  # Rule 1
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
