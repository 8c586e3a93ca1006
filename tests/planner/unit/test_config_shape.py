"""planner/model_config.py: parameter counts equal the published ones for every architecture; FLOPs
and experts equal the formula where it is exact; unknown configs are refused, never mis-sized.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from roadtrain import cli
from roadtrain.config.families import TIED
from roadtrain.config.models import ModelShape, from_config, shape
from roadtrain.errors import ConfigError
from roadtrain.planner.fit_inputs import model_of
from roadtrain.planner.model_config import shape_of_config


def keys(
    hidden: int, layers: int, heads: int, ff: int, vocab: int, kv: int = 0, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ff,
        "vocab_size": vocab,
        "num_key_value_heads": kv or heads,
        **more,
    }


LLAMA = keys(
    4096,
    32,
    32,
    14336,
    128256,
    8,
    max_position_embeddings=131072,
    architectures=["LlamaForCausalLM"],
)
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# name -> model_type, config, parameters
PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {
    "Llama-3.1-8B": ("llama", LLAMA, 8.030261248e9),
    "Mistral-7B": ("mistral", keys(4096, 32, 32, 14336, 32000, 8), 7.241732096e9),
    "Mixtral-8x7B": (
        "mixtral",
        keys(4096, 32, 32, 14336, 32000, 8, num_local_experts=8, num_experts_per_tok=2),
        46.702792704e9,
    ),
    "Qwen2-7B": (
        "qwen2",
        keys(3584, 28, 28, 18944, 152064, 4, tie_word_embeddings=False),
        7.615616512e9,
    ),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        keys(
            2048,
            24,
            16,
            5632,
            151936,
            16,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
        ),
        14.315784192e9,
    ),
    "Qwen3-0.6B": (
        "qwen3",
        keys(1024, 28, 16, 3072, 151936, 8, head_dim=128, tie_word_embeddings=True),
        0.59604992e9,
    ),
    "Qwen3-0.6B untied": (
        "qwen3",
        keys(1024, 28, 16, 3072, 151936, 8, head_dim=128, tie_word_embeddings=False),
        0.751632384e9,
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        keys(
            2048,
            48,
            32,
            6144,
            151936,
            4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            tie_word_embeddings=False,
            max_position_embeddings=40960,
        ),
        30.532122624e9,
    ),
    "gemma-2b": ("gemma", keys(2048, 18, 8, 16384, 256000, 1, head_dim=256), 2.506172416e9),
    "gemma-2-9b": ("gemma2", keys(3584, 42, 16, 14336, 256000, 8, head_dim=256), 9.241705984e9),
    "gemma-3-1b": ("gemma3_text", keys(1152, 26, 4, 6912, 262144, 1, head_dim=256), 0.999885952e9),
    "gemma-3-4b": (
        "gemma3",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "mm_tokens_per_image": 256,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
            },
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        4.300079472e9,
    ),
    "Phi-3-mini": ("phi3", keys(3072, 32, 32, 8192, 32064), 3.821079552e9),
    "phi-2": ("phi", keys(2560, 32, 32, 10240, 51200, partial_rotary_factor=0.4), 2.77968384e9),
    "gpt2": (
        "gpt2",
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        0.124439808e9,
    ),
    "gpt-j-6b": (
        "gptj",
        {
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "n_positions": 2048,
            "vocab_size": 50400,
            "rotary_dim": 64,
        },
        6.050882784e9,
    ),
    "opt-1.3b": (
        "opt",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "ffn_dim": 8192,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
        },
        1.31575808e9,
    ),
    "opt-350m": (
        "opt",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        0.331196416e9,
    ),
    "gpt-neox-20b": (
        "gpt_neox",
        keys(6144, 44, 64, 24576, 50432, tie_word_embeddings=False),
        20.55456768e9,
    ),
    "falcon-7b": (
        "falcon",
        {
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "bias": False,
            "alibi": False,
        },
        6.921720704e9,
    ),
    "bloom-560m": (
        "bloom",
        {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
        0.559214592e9,
    ),
    "starcoder2-3b": ("starcoder2", keys(3072, 30, 24, 12288, 49152, 2), 3.030371328e9),
    "OLMo-2-7B": (
        "olmo2",
        keys(4096, 32, 32, 11008, 100352, tie_word_embeddings=False),
        7.298617344e9,
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        keys(
            2048,
            27,
            16,
            10944,
            102400,
            **MLA,
            q_lora_rank=None,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            norm_topk_prob=False,
        ),
        15.706484224e9,
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        keys(
            7168,
            61,
            128,
            18432,
            129280,
            **MLA,
            q_lora_rank=1536,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            n_group=8,
            topk_group=4,
            max_position_embeddings=163840,
            tie_word_embeddings=False,
        ),
        671.0264e9,
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 6144,
            "n_layers": 40,
            "n_heads": 48,
            "vocab_size": 100352,
            "max_seq_len": 32768,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        131.59652352e9,
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        keys(
            2880,
            24,
            64,
            2880,
            201088,
            8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            tie_word_embeddings=False,
        ),
        20.914757184e9,
    ),
    "t5-base": (
        "t5",
        {
            "d_model": 768,
            "num_layers": 12,
            "num_heads": 12,
            "d_ff": 3072,
            "d_kv": 64,
            "vocab_size": 32128,
        },
        0.222903552e9,
    ),
    "bart-large": (
        "bart",
        {
            "d_model": 1024,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "vocab_size": 50265,
            "max_position_embeddings": 1024,
            "num_hidden_layers": 12,
        },
        0.406291456e9,
    ),
    "bert-base": (
        "bert",
        keys(
            768, 12, 12, 3072, 30522, max_position_embeddings=512, architectures=["BertForMaskedLM"]
        ),
        0.109514298e9,
    ),
    "vit-base": (
        "vit",
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 224,
            "intermediate_size": 3072,
            "patch_size": 16,
            "architectures": ["ViTForImageClassification"],
            "id2label": {str(i): str(i) for i in range(1000)},
        },
        0.086567656e9,
    ),
    "llava-1.5-7b": (
        "llava",
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "image_token_index": 32000,
            "text_config": {
                "model_type": "llama",
                "max_position_embeddings": 4096,
                "vocab_size": 32064,
            },
            "vision_config": {
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "patch_size": 14,
                "model_type": "clip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "projection_dim": 768,
                "vocab_size": 32000,
            },
        },
        7.063427072e9,
    ),
}


@functools.cache
def found(name: str, seq_len: int | None = None) -> ModelShape:
    kind, config, _ = PUBLISHED[name]
    return shape_of_config({"model_type": kind, **config}, seq_len=seq_len)


QUICK = ("gpt2", "vit-base")
MORE = ("Llama-3.1-8B", "t5-base", "Mixtral-8x7B", "gemma-3-4b")
# caches models that several tests count
LENGTHS = dict.fromkeys(("Llama-3.1-8B", "Mixtral-8x7B", "DeepSeek-V3", "gpt2"), 1000)
COUNTED = [
    pytest.param(
        name,
        marks=() if name in QUICK else pytest.mark.slow if name in MORE else pytest.mark.exhaustive,
    )
    for name in PUBLISHED
]


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.slow
def test_parameters_equal_the_published_numbers(name: str) -> None:
    model = found(name, LENGTHS.get(name))
    assert model.params == pytest.approx(PUBLISHED[name][2], rel=1e-4)
    assert model.flops > 0 and all(b.params >= 0 and b.saved >= 0 for b in model.blocks)
    assert model.layers == sum("." in block.name for block in model.blocks) > 0
    if name == "gemma-3-4b":
        idle = "27 blocks", "do not run on token ids alone"
        assert any(all(words in note for words in idle) for note in model.notes)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        pytest.param("Llama-3.1-8B", "LLaMA-3-8B", marks=pytest.mark.slow),
        pytest.param("Mixtral-8x7B", "Mixtral-8x7B", marks=pytest.mark.slow),
        pytest.param("DeepSeek-V3", "DeepSeek-V3", marks=pytest.mark.exhaustive),
        ("gpt2", "GPT-2"),
    ],
)
def test_flops_and_experts_equal_the_formula(name: str, same: str) -> None:
    """FLOPs are counted at 512 tokens and scaled to another length."""
    counted, expected = found(name, 1000), shape(same, seq_len=1000)
    assert counted.flops == pytest.approx(expected.flops, rel=0.01)
    for what in ("attention", "experts", "routed", "kv"):
        ours, theirs = (
            sum(getattr(block, what) for block in model.blocks) for model in (counted, expected)
        )
        assert ours == pytest.approx(theirs, rel=0.01), what
    assert (
        counted.blocks[-1].logits == expected.blocks[-1].logits
        and counted.hidden == expected.hidden
    )
    assert counted.blocks[-2].input == expected.blocks[-2].input
    # the formula keeps the attention scores; plain modules keep more than fused kernels
    if name != "gpt2":
        assert 0.9 < counted.blocks[-2].saved / expected.blocks[-2].saved < 2.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "active"),
    [
        pytest.param("Qwen3-30B-A3B", 3.3e9, marks=pytest.mark.exhaustive),
        ("DeepSeek-V3", 37e9),
    ],
)
def test_a_token_takes_the_active_parameters(name: str, active: float) -> None:
    """Published: 3.3 of 30.5 B, 37 of 671 B. Two FLOPs each, except for embeddings."""
    model = found(name, 1000)
    products = sum(block.flops - block.attention for block in model.blocks) / 2 / 1000
    assert products + model.blocks[0].params == pytest.approx(active, rel=0.05)


@pytest.mark.slow
def test_the_formula_is_used_only_where_it_is_exact() -> None:
    for name in ("Llama-3.1-8B", "Mistral-7B", "Mixtral-8x7B", "gpt2", "DeepSeek-V2-Lite"):
        kind, config, _ = PUBLISHED[name]
        model = from_config({"model_type": kind, **config}, seq_len=1000)
        assert [b.params for b in model.blocks] == [b.params for b in found(name, 1000).blocks]
    for kind, config, params in PUBLISHED.values():
        if kind in TIED:
            assert from_config({"model_type": kind, **config}).params == pytest.approx(params, 1e-6)
        else:
            message = f"no formula gives the number of parameters of a `{kind}`"
            with pytest.raises(ConfigError, match=message):
                from_config({"model_type": kind, **config})


@pytest.mark.slow
def test_an_assumed_length_is_reported() -> None:
    short = {"model_type": "llama", **LLAMA, "num_hidden_layers": 2}
    assumed, stated = shape_of_config(short), shape_of_config(short, seq_len=8192)
    assert assumed.tokens == 4096 and "the model's longest is 131072" in assumed.notes[0]
    assert not stated.notes and stated.tokens == 8192
    kind, deepseek, _ = PUBLISHED["DeepSeek-V3"]
    notes = shape_of_config(
        {"model_type": kind, **deepseek, "num_hidden_layers": 4, "num_nextn_predict_layers": 1},
        seq_len=64,
    ).notes
    assert any("1 layer(s) that predict further tokens" in note for note in notes)
    assert not any("head_dim" in note for note in notes)
    bare = {k: v for k, v in LLAMA.items() if k not in ("intermediate_size", "architectures")}
    notes = shape_of_config({"model_type": "llama", **bare, "num_hidden_layers": 2}).notes
    assert any("intermediate_size 11008 (the default of" in note for note in notes)
    assert any("counted as LlamaForCausalLM (the config names no class)" in note for note in notes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has no `model_type`"),
        ({"model_type": "gpt5"}, "does not know the model type `gpt5`"),
        ({"model_type": "llama"}, "of a `llama` has none of .*num_hidden_layers"),
        (
            {"model_type": "llama", **LLAMA, "hidden_size": None},
            "has none of .*hidden_size|cannot read",
        ),
        (
            {"model_type": "llama", **LLAMA, "hidden_size": "wide"},
            "transformers cannot (read|build)",
        ),
        (
            {
                "model_type": "deepseek_v2",
                **{
                    k: v
                    for k, v in PUBLISHED["DeepSeek-V2-Lite"][1].items()
                    if k != "num_experts_per_tok"
                },
            },
            "has 64, and a token uses",
        ),
        (
            {
                "model_type": "whisper",
                "d_model": 384,
                "num_hidden_layers": 2,
                "vocab_size": 51865,
                "architectures": ["WhisperForConditionalGeneration"],
            },
            "a `whisper` takes input_features",
        ),
    ],
)
def test_unsupported_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        shape_of_config(config)
    assert caught.value.hint


@pytest.mark.slow
def test_samples_longer_than_the_model() -> None:
    with pytest.raises(ConfigError, match="have 2048 tokens, but the model allows 1 to 1024"):
        shape_of_config({"model_type": "gpt2", **PUBLISHED["gpt2"][1]}, seq_len=2048)
    with pytest.raises(ConfigError, match="takes images instead of tokens"):
        found("vit-base", 12)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula is used where it is exact; otherwise the error names the missing
    package and a remedy."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name, (kind, config, params) in PUBLISHED.items():
        if name in ("Llama-3.1-8B", "gpt-oss-20b"):
            (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **config}))
            if kind == "llama":
                assert model_of(str(tmp_path), 1024).shape.params == params
                continue
            with pytest.raises(ConfigError, match="transformers is not installed") as caught:
                model_of(str(tmp_path))
            assert "roadtrain[hf]" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "is not a model's config"),
        ("{", "cannot be parsed as JSON"),
        ('{"model_type": "nothing"}', "model type `nothing`"),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert (
        cli.main(
            ["plan", "workstation", "--model", str(tmp_path), "--out", str(tmp_path / "p.toml")]
        )
        == 2
    )
    assert message in capsys.readouterr().err
