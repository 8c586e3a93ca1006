"""Tensor parallelism: models that are split over 2 and 4 processes compute what the whole model
does, and train as it does."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import transformers
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from roadtrain.parallel.tensor import tensor_parallel
from roadtrain.parallel.tensor_styles import Column, LocalHeads, Row

pytestmark = pytest.mark.slow

WORLD = 4
STEPS = 3
# the largest difference over the largest value: fp32 rounding of sums in another order
CLOSE = 2e-6


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(WORLD)
    yield made
    made.close()


@cache
def tensor_mesh(degree):
    """This rank's tensor group: ranks that follow each other."""
    return init_device_mesh("cpu", (WORLD // degree, degree), mesh_dim_names=("data", "tensor"))[
        "tensor"
    ]


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 61,  # does not divide
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
OPT = {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,  # does not divide by 4
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "pad_token_id": 1,
}
CASES = {
    "llama": ("llama", LLAMA),
    "llama, grouped heads": ("llama", LLAMA | {"num_key_value_heads": 4}),
    "llama, tied, biases": (
        "llama",
        LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2, own head": ("gpt2", GPT2 | {"tie_word_embeddings": False, "n_inner": 40}),
    "opt": ("opt", OPT),
    "opt, projected": (
        "opt",
        OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "mistral": ("mistral", LLAMA | {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", LLAMA | {"num_key_value_heads": 4, "head_dim": 8}),
}


def built(kind, config, seed=0):
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(kind, **config)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    for p in model.parameters():  # biases and norms too: nothing is hidden by zeros and ones
        p.data += 0.02 * torch.randn_like(p)
    return model.train()


def batch(vocabulary, seed=0):
    torch.manual_seed(100 + seed)
    return torch.randint(vocabulary, (3, 16))


def far(own, right, least=1e-12):
    """The largest difference over the largest value, or over `least`."""
    return ((own - right).abs().max() / right.abs().max().clamp_min(least)).item()


def optimizer_of(model):
    # eps: an element whose gradient is rounding alone would else move by a whole step
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def trained(rank, kind, config, degree):
    """How far losses, gradients, parameters are from those of the whole model, and names."""
    whole = built(kind, config)
    model = copy.deepcopy(whole)
    split = tensor_parallel(model, tensor_mesh(degree))
    optimizers = [optimizer_of(whole), optimizer_of(model)]
    losses, gradients = [], {}
    for step in range(STEPS):
        tokens = batch(config["vocab_size"], step)
        right, own = (m(tokens, labels=tokens).loss for m in (whole, model))
        right.backward()
        own.backward()
        losses.append(far(own, right))
        # the gradient of a bias of keys is rounding alone
        least = 1e-3 * max(p.grad.abs().max().item() for p in whole.parameters())
        for (name, p), q in zip(whole.named_parameters(), model.parameters()):
            found = far(split.whole_value(name, q.grad), p.grad, least)
            gradients[name] = max(gradients.get(name, 0.0), found)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parameters = {
        name: far(split.whole_value(name, q), p)
        for (name, p), q in zip(whole.named_parameters(), model.parameters())
    }
    same = [n for n, _ in model.named_parameters()] == [n for n, _ in whole.named_parameters()]
    numel = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in whole.parameters())
    return losses, gradients, parameters, same, numel


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_trains_as_the_whole_model(ranks, case, degree):
    for losses, gradients, parameters, same, numel in ranks.run(trained, *CASES[case], degree):
        assert same, "names are the whole model's"
        assert max(losses) < CLOSE
        assert max(gradients.values()) < 10 * CLOSE, max(gradients, key=gradients.get)
        assert max(parameters.values()) < 10 * CLOSE, max(parameters, key=parameters.get)
        assert numel < 1.5 / degree, "most of it is split"
