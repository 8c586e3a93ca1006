"""config/families.py: names and shapes of parameters equal those of the modules that transformers
builds; configs with parts that are not described have no layout."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from roadtrain.config.families import FAMILIES, ROOT, TIED, of_tensors
from roadtrain.config.models import (
    NAMES,
    from_config,
    layout_of_config,
    named_layout,
    shape,
)
from roadtrain.errors import ConfigError
from roadtrain.streaming.split import split

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 72}
ROUTED = {key: LATENT[key] for key in LATENT if key.startswith(("n_", "num", "moe", "first"))}
HEAD = {"head_dim": 24}
NEEDED: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 72},
    "ernie4_5": HEAD,
    "seed_oss": HEAD,
    "hunyuan_v1_dense": HEAD,
}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    *((kind, NEEDED.get(kind, {})) for kind in TIED if "sparse" not in FAMILIES[kind]),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 32}),
    ("qwen3", {"head_dim": 8, "attention_bias": True}),
    ("gpt2", {"n_inner": 80}),
    ("opt", {"ffn_dim": 80, "word_embed_proj_dim": 32, "enable_bias": False}),
    ("opt", {"ffn_dim": 80, "do_layer_norm_before": False}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("starcoder2", {"use_bias": False}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    ("cohere", {"num_key_value_heads": None, "head_dim": 24}),
    ("cohere2", {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 24}),
    ("olmo", {"attention_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("olmo3", {"attention_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("glm", {"attention_bias": False, "head_dim": 24, "tie_word_embeddings": True}),
    ("glm4", {"attention_bias": False, "head_dim": 24, "tie_word_embeddings": True}),
    ("stablelm", {"use_qkv_bias": True, "tie_word_embeddings": True}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("exaone4", {"head_dim": 24, "tie_word_embeddings": True}),
    ("exaone4", {"attention_bias": True}),  # ignored
    ("ernie4_5", {**HEAD, "use_bias": True, "tie_word_embeddings": False}),
    ("seed_oss", {**HEAD, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("hunyuan_v1_dense", {**HEAD, "attention_bias": True, "tie_word_embeddings": True}),
    ("helium", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2_moe", {**SHARED, "mlp_only_layers": [1]}),
    ("qwen2_moe", {**SHARED, "decoder_sparse_step": 2}),
    ("qwen3_moe", EXPERTS),
    ("qwen3_moe", {**EXPERTS, "attention_bias": True, "tie_word_embeddings": True}),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ("olmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    ("glm4_moe", ROUTED),
    ("glm4_moe", {**ROUTED, **HEAD, "attention_bias": True, "first_k_dense_replace": 0}),
    ("dots1", ROUTED),
    ("dots1", {**ROUTED, **HEAD, "attention_bias": True, "tie_word_embeddings": True}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": 32}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 32}),
    ("llama", {"num_hidden_layers": 1}),
]
QUICK = {"llama", "gpt2", "gemma3_text", "glm4_moe", "deepseek_v2"}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param(kind, more, marks=() if kind in QUICK else pytest.mark.exhaustive)
        for kind, more in CONFIGS
    ],
)
def test_parameters_equal_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = {**BASE, **more}
    made = transformers.CONFIG_MAPPING[kind].from_dict(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    layout = layout_of_config({**config, "model_type": kind})
    assert layout is not None
    mine = {n: s for params in layout.blocks.values() for n, s in params.items()}
    assert mine == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert [part.name for part in split(model).blocks] == list(layout.blocks)[1:]
    assert layout.tied == bool(made.tie_word_embeddings)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gptj", {}),  # no formula
        ("llama", {"add_cross_attention": True}),
        ("llama", {"quantization_config": {"bits": 4}}),
        ("phi", {"qk_layernorm": True}),
        ("cohere", {"use_qk_norm": True}),
        ("olmoe", {**EXPERTS, "moe_intermediate_size": None, "head_dim": 24}),
        ("olmoe", EXPERTS),  # transformers ignores moe_intermediate_size
        ("granitemoe", EXPERTS),
        ("olmoe", {}),  # no experts
        ("stablelm", {"qk_layernorm": True}),
        ("stablelm", {"use_parallel_residual": True}),
        ("stablelm", HEAD),  # ignored by transformers
        *((kind, {}) for kind in ("ernie4_5", "seed_oss", "hunyuan_v1_dense")),  # no head_dim
        ("ernie4_5", {**HEAD, "num_key_value_heads": None}),
        ("glm4_moe", {**ROUTED, "use_qk_norm": True}),
        *(("glm4_moe", {**ROUTED, key: None}) for key in ROUTED),
        ("dots1", {**ROUTED, "n_shared_experts": None}),
        *(
            (kind, {**ROUTED, "num_key_value_heads": None})
            for kind in ("glm", "glm4", "stablelm", "nemotron", "exaone4", "helium", "dots1")
        ),
        ("qwen3", {"num_key_value_heads": None}),  # transformers has a default of its own
        ("opt", {}),  # no ffn_dim
        ("qwen3_moe", {}),  # no experts
        ("deepseek_v3", LATENT),  # no q_lora_rank
    ],
)
def test_what_is_not_described_has_no_layout(kind: str, more: dict[str, Any]) -> None:  # Rule 6
    config = {**BASE, **more, "model_type": kind}
    assert layout_of_config(config) is None
    with pytest.raises(
        ConfigError, match=f"no formula gives the number of parameters of a `{kind}"
    ):
        from_config(config)


def test_dropout_in_attention_keeps_scores() -> None:
    config = {**BASE, **HEAD, "model_type": "seed_oss"}
    for more, scores in (({}, True), ({"attention_dropout": 0.0}, False)):
        layout = layout_of_config({**config, **more})
        assert layout is not None and layout.scores is scores


def test_named_models_have_the_published_size() -> None:
    for name in NAMES:
        layout = named_layout(name)
        params = sum(layout.params(block) for block in layout.blocks)
        assert params == pytest.approx(shape(name).params, rel=1e-6), name


def test_the_formula_of_llama_gives_the_published_flops() -> None:
    config = {**BASE, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
    config |= {"model_type": "llama", "max_position_embeddings": 4096}
    assert from_config(config, seq_len=2048).flops == shape("LLaMA-7B").flops


def test_tensors_of_files_give_blocks() -> None:
    tensors = {
        "h.0.attn.bias": (1, 1, 128, 128),  # a mask, not a parameter
        "h.0.attn.c_attn.weight": (64, 192),
        "h.1.attn.c_attn.weight": (64, 192),
        "h.1.experts.0.w.weight": (8, 64),
        "wte.weight": (1000, 64),
        "lm_head.weight": (1000, 64),
        "tower.0.weight": (5, 5),  # the only item of its list
    }
    layout = of_tensors(tensors, tied=True)
    assert list(layout.blocks) == [ROOT, "h.0", "h.1"]
    assert set(layout.blocks[ROOT]) == {"wte.weight", "tower.0.weight"}
    assert (layout.vocab, layout.hidden, layout.tied) == (1000, 64, True)
    assert layout.params("h.1") == 64 * 192 + 8 * 64
    untied = of_tensors(tensors)
    assert not untied.tied and untied.params(ROOT) == layout.params(ROOT) + prod((1000, 64))
