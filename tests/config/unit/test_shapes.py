"""Model shapes (config/models.py) against published parameter counts, formulas, and torch's modules
on `meta`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.planner.paper_clusters import gpt
from roadtrain.config.models import NAMES, chosen_length, from_config, named_shape, shape
from roadtrain.errors import ConfigError

PUBLISHED = {  # billions
    "OPT-125M": 0.125,
    "OPT-1.3B": 1.316,
    "OPT-13B": 12.85,
    "OPT-175B": 175,
    "OPT-1.0T": 1000,
    "GPT-2": 0.124,
    "GPT-2-XL": 1.558,
    "GPT-3-175B": 175,
    "LLaMA-7B": 6.738,
    "LLaMA-65B": 65.2,
    "LLaMA-2-70B": 68.98,
    "LLaMA-3-8B": 8.03,
    "LLaMA-3-405B": 405.9,
    "BLOOM-176B": 176.2,
    "BERT-large": 0.335,
    "ViT-B": 0.0864,
    "Mixtral-8x7B": 46.7,
    "Mixtral-8x22B": 140.6,
    "Qwen2.5-0.5B": 0.494,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-72B": 72.7,
    "VGG-16": 0.1384,
    "ResNet-50": 0.0255,
    "DLRM-Kaggle": 0.540,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_numbers(name: str) -> None:
    assert shape(name).params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_every_name_has_a_shape() -> None:
    for name in NAMES:
        model = shape(name)
        assert (
            model.params > 0
            and model.flops > 0
            and all(b.params >= 0 and b.saved > 0 for b in model.blocks)
        ), name


def test_flops_equal_megatrons_formula() -> None:
    """Narayanan et al. (2021), equation 3: with activation checkpointing."""
    layers, h, s, v = 30, 3072, 2048, 51200
    published = 96 * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert gpt(layers, h, 32, vocab=v, seq_len=s).step_flops(
        activation_checkpointing=True
    ) == pytest.approx(published)


def test_a_transformer_layer_has_the_parameters_of_torchs() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, norm_first=True)
        x = torch.empty(1, 64, 256)
        with FlopCounterMode(display=False) as counted:
            q = k = v = x.view(1, 64, 8, 32).transpose(1, 2)
            attention = (q @ k.transpose(-1, -2)) @ v
            for linear in (nn.Linear(256, 768), nn.Linear(256, 256), layer.linear1):
                linear(x)
            layer.linear2(torch.empty(1, 64, 1024))
    ours = gpt(1, 256, 8, seq_len=64).blocks[1]
    assert attention.shape == (1, 8, 64, 32)
    assert ours.params == sum(p.numel() for p in layer.parameters())
    assert ours.flops == counted.get_total_flops()


def test_vgg_and_resnet_flops() -> None:
    """Per image of 224 x 224: 15.5 and 4.1 G multiply-adds (He et al., 2015, and its
    follow-ups)."""
    assert shape("VGG-16").flops / 2e9 == pytest.approx(15.5, rel=0.01)
    assert shape("ResNet-50").flops / 2e9 == pytest.approx(4.1, rel=0.02)


def test_a_hugging_face_config() -> None:
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    assert from_config(llama).params == shape("LLaMA-3-8B").params
    assert from_config(llama, seq_len=1024).tokens == 1024
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    assert from_config(gpt2).params == shape("GPT-2").params
    mixtral = {
        **llama,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }
    assert from_config(mixtral).params / 1e9 == pytest.approx(46.7, rel=0.01)


def test_impossible_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no model is called 'OPT-200B'") as caught:
        shape("OPT-200B")
    assert "OPT-175B" in caught.value.hint
    with pytest.raises(ConfigError, match=r"no model is called 'Lama-3-8B'") as caught:
        shape("Lama-3-8B")
    assert caught.value.hint.startswith("did you mean `llama-3-8b`?")
    with pytest.raises(ConfigError, match=r"has none of num_hidden_layers"):
        from_config({"model_type": "llama", "hidden_size": 4096})
    whole = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "vocab_size": 100,
        "intermediate_size": 100,
    }
    assert from_config(whole).params > 0
    for more, message in (
        ({"hidden_size": 4097}, "hidden_size 4097 is not divisible by 32 heads"),
        ({"add_cross_attention": True}, "parameters of a `llama`"),
        ({"model_type": "qwen3"}, "parameters of a `qwen3`"),
        ({"model_type": "gptj"}, "no formula gives the number of parameters of a `gptj`"),
        ({"head_dim": "wide"}, "the config of a `llama` cannot be read"),
        ({"model_type": "mixtral"}, "parameters of a `mixtral`"),
        ({"model_type": ""}, "parameters of a ``"),
        ({"vocab_size": None}, "has none of vocab_size"),
        ({"hidden_size": "wide"}, "`llama` cannot be read: .*'wide'"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_config({**whole, **more})


def test_the_sample_length_is_assumed_or_checked() -> None:
    assert named_shape("GPT-2").notes == (
        "samples of 1024 tokens (as published; change with --seq-len)",
    )
    assert named_shape("GPT-2", 512).tokens == 512 and not named_shape("GPT-2", 512).notes
    for name, length, message in (
        ("GPT-2", 2048, "but the model allows 1 to 1024"),
        ("GPT-2", -1, "samples have -1 tokens"),
        ("ResNet-50", 5, "have no tokens"),
        ("LLaMA-7B", 0, "samples have 0 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            named_shape(name, length)
    assert chosen_length(None, 131072)[0] == chosen_length(None, None)[0] == 4096
    assert "the model's longest is 131072" in chosen_length(None, 131072)[1][0]
    assert chosen_length(None, 512)[0] == 512 and chosen_length(131072, 131072) == (131072, [])
