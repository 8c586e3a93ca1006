"""The parameters of transformer families: the name and shape of each parameter, computed from a
Hugging Face config without importing torch or transformers.

The names are those of transformers' causal language models. tests/config/unit/test_families.py
compares them with the modules that transformers builds. A config whose keys add parameters that are
not described here has no layout, so that a wrong size is never returned.

    layout({"model_type": "llama", "hidden_size": 4096, ...}).blocks["model.layers.0"]
"""

# h = width, q, kv = widths of queries and of keys, f = inner width of the MLP, E = experts

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

Shape = tuple[int, ...]
Params = dict[str, Shape]
ROOT = "root"
SCORE_BYTES = 10  # bytes kept per score by attention that is not fused: scores, softmax, dropout
# the last matrix of attention or of an MLP
_LAST = re.compile(r"(o_proj|out_proj|dense|c_proj|down_proj|fc2|fc_out|dense_4h_to_h)\.weight$")
# parameters that belong to the embedding rather than to the output layer
_TABLES = re.compile(r"(embed_tokens|embed_in|embed_positions|wte|wpe|project_in|embeddings)\.")
# tensors of published files that are buffers, not parameters
_BUFFERS = re.compile(r"(inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")


@dataclass(frozen=True)
class Layout:
    """The parameters of a model, by block. The first block is the root block.

    Attributes:
        blocks: Name of the block -> name of the parameter -> shape.
        active: Number of experts that a token uses; 0 if unknown or without experts.
        vocab: Number of logits per token; 0 if unknown.
        hidden: Width of the activations between blocks.
        heads: Number of attention heads; 0 if unknown.
        attention: Width of the results of all heads together; 0 if unknown.
        kv: Width of the keys, and also of the values; 0 if unknown.
        steps: Number of tensors of the MLP's inner width that its activation function keeps, if
            the function is computed in several steps; else 0.
        scores: Whether attention keeps a matrix of tokens x tokens for each head.
    """

    blocks: Mapping[str, Params]
    active: int = 0
    vocab: int = 0
    hidden: int = 0
    heads: int = 0
    attention: int = 0
    kv: int = 0
    steps: int = 0
    scores: bool = False

    @property
    def tables(self) -> list[str]:
        """Names of the root block's embedding tables."""
        return [name for name in self.blocks[ROOT] if _TABLES.search(name)]

    @property
    def tied(self) -> bool:
        """Whether the output layer uses the matrix of the embedding."""
        root = self.blocks[ROOT]
        wide = [name for name, shape in root.items() if len(shape) == 2 and shape[0] == self.vocab]
        return len(wide) == 1 and wide[0] in self.tables

    def params(self, block: str) -> int:
        """Return the number of parameters of a block."""
        return sum(map(prod, self.blocks[block].values()))

    def used(self, block: str) -> int:
        """Return the number of elements of the matrices that a token uses in a block."""
        shapes = self.blocks[block].values()
        dense = sum(prod(shape) for shape in shapes if len(shape) == 2)
        routed = (prod(shape) // shape[0] for shape in shapes if len(shape) == 3)
        return dense + self.active * sum(routed)

    def saved(self, block: str, tokens: int, itemsize: int) -> float:
        """Return the bytes per token that autograd keeps for the backward of a block: the distinct
        inputs and the results of its matrices, and what norms and activation functions keep.

        Args:
            block: Name of the block.
            tokens: Number of tokens of a sample.
            itemsize: Bytes of an element of the activations.
        """
        elements, modules = 0.0, dict[str, list[tuple[str, Shape]]]()
        params = self.blocks[block]
        for name, shape in params.items():
            if len(shape) == 1 and name.endswith("weight"):
                # norms without a bias are computed in fp32, step by step
                steps = 2 if itemsize == 4 else 3
                elements += shape[0] * (
                    1 if f"{name.removesuffix('weight')}bias" in params else steps
                )
            elif len(shape) == 3:  # the experts of a token, each with its own copy of the input
                elements += self.active * (shape[1] + shape[2] * (2 if "down" in name else 1))
            elif len(shape) == 2:
                modules.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(
                    (name, shape)
                )
        elements += sum(self._of_matrices(members) for members in modules.values())
        return elements * itemsize + SCORE_BYTES * self.heads * tokens * self.scores

    def _of_matrices(self, members: Sequence[tuple[str, Shape]]) -> float:
        """Return the elements per token that the matrices of a module, such as an MLP, keep."""
        inner = [shape for name, shape in members if not _LAST.search(name)]
        last = [shape for name, shape in members if _LAST.search(name)]
        h = self.hidden
        results = sum(sum(shape) - (h if h in shape else 0) for shape in inner)
        inputs = sum(sum(shape) - h for shape in last)
        name = members[0][0]
        steps = ("gate" in name) + ("att" not in name) * self.steps
        return float(h + results + (1 + steps) * inputs)


@dataclass(frozen=True)
class FamilyTraits:
    """The properties in which a family differs from Llama.

    `tied`, `head`: defaults of the config. `qkv`, `out`, `mlp`: whether linear layers have biases,
    or the config's key that says so. `norms`: names of a layer's normalizations. `vectors`: number
    of vectors of a normalization (2: with bias). `qk`: width of normalized queries and keys, "head"
    or "all". `packed`: q, k and v are one matrix, as are gate and up. `fc`: names of the matrices
    of an MLP without a gate. `dense`: name of the attention's output matrix. `experts`: the
    config's key for the number of experts. `refused`: keys that add parameters which are not
    described here.
    """

    tied: bool = False
    head: int = 0
    qkv: bool | str = False
    out: bool | str = False
    mlp: bool | str = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    vectors: int = 1
    qk: str = ""
    packed: bool = False
    fc: tuple[str, str] = ("", "")
    dense: str = "o_proj"
    final: str = "norm"
    head_bias: bool = False
    experts: tuple[str, ...] = ()
    refused: tuple[str, ...] = field(default=())


_ATTENTION = {"qkv": "attention_bias", "out": "attention_bias"}
_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_LLAMA = FamilyTraits(qkv="attention_bias", out="attention_bias", mlp="mlp_bias")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ROUTED = ("n_routed_experts",)
_HF_EXPERTS = ("num_experts", "num_local_experts")
FAMILIES: Mapping[str, FamilyTraits] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "smollm3": FamilyTraits(tied=True, qkv="attention_bias", out="attention_bias", mlp="mlp_bias"),
    "mistral": FamilyTraits(),
    "qwen2": FamilyTraits(qkv=True),
    "qwen3": FamilyTraits(head=128, qk="head", **_ATTENTION),  # type: ignore[arg-type]
    "phi3": FamilyTraits(packed=True),
    "gemma": FamilyTraits(tied=True, head=256, **_ATTENTION),  # type: ignore[arg-type]
    "gemma2": FamilyTraits(tied=True, head=256, norms=_FOUR_NORMS, **_ATTENTION),  # type: ignore[arg-type]
    "gemma3_text": FamilyTraits(
        tied=True,
        head=256,
        qk="head",
        norms=_FOUR_NORMS,
        **_ATTENTION,  # type: ignore[arg-type]
    ),
    "olmo2": FamilyTraits(
        qk="all",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        **_ATTENTION,  # type: ignore[arg-type]
    ),
    "phi": FamilyTraits(
        qkv=True,
        out=True,
        mlp=True,
        norms=("input_layernorm",),
        vectors=2,
        fc=("fc1", "fc2"),
        dense="dense",
        final="final_layernorm",
        head_bias=True,
        refused=("qk_layernorm",),
    ),
    "starcoder2": FamilyTraits(
        tied=True, qkv="use_bias", out="use_bias", mlp="use_bias", vectors=2, fc=("c_fc", "c_proj")
    ),
    "mixtral": FamilyTraits(experts=_HF_EXPERTS),
    "qwen2_moe": FamilyTraits(qkv="qkv_bias", experts=_HF_EXPERTS),
    "qwen3_moe": FamilyTraits(qk="head", experts=_HF_EXPERTS, **_ATTENTION),  # type: ignore[arg-type]
    "deepseek_v2": FamilyTraits(experts=_ROUTED, refused=("attention_bias", "mlp_bias")),
    "deepseek_v3": FamilyTraits(experts=_ROUTED, refused=("attention_bias",)),
}
_ON_BY_DEFAULT = ("use_bias", "qkv_bias")
_TIED = {kind: family.tied for kind, family in FAMILIES.items()}
TIED = {**_TIED, "gpt2": True, "opt": True, "gpt_neox": False}  # model type -> default
_GELU_NEW = ("gpt2", "phi")  # families whose default activation function is gelu_new
# families whose number of key-value heads is, by default, that of the query heads
_ALL_HEADS = ("llama", "granite", "phi", "phi3", "olmo2", "deepseek_v2", "deepseek_v3")
_REFUSED = ("add_cross_attention", "quantization_config")


def layout(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Layout | None:
    """Return the parameters of the model that a config describes, or None if its family, or one of
    its keys, is not described here.

    Args:
        config: The content of config.json.
        sizes: The model's sizes by their common names (config/models.py, `sizes_of`).
    """
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind, FamilyTraits())
    if kind not in TIED or any(config.get(key) for key in (*_REFUSED, *family.refused)):
        return None
    n, h, vocab = sizes["num_hidden_layers"], sizes["hidden_size"], sizes["vocab_size"]
    other = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "opt": _opt}.get(kind)
    tied = bool(config.get("tie_word_embeddings", TIED[kind]))
    if other is not None:
        made = other(config, sizes)
        if made is None:
            return None
        root, prefix, layer, head = made
        layers = [layer] * n
    else:
        prefix, head = "model.layers", "lm_head"
        root = {"model.embed_tokens.weight": (vocab, h)}
        root |= _norm(f"model.{family.final}", h, family.vectors)
        layers = [_layer(config, sizes, family, kind, i) for i in range(n)]
        if any(layer is None for layer in layers):
            return None
    if not tied:
        root |= {f"{head}.weight": (vocab, h)}
    if family.head_bias:
        root |= {f"{head}.bias": (vocab,)}
    blocks = {
        f"{prefix}.{i}": {f"{prefix}.{i}.{name}": shape for name, shape in layer.items()}
        for i, layer in enumerate(layers)
        if layer is not None
    }
    if n == 1:  # streaming/split.py makes no block of a list with one item
        root |= blocks.popitem()[1]
    heads = sizes["num_attention_heads"]
    head_width = int(config.get("head_dim") or family.head or h // heads)
    width, kv = heads * head_width, int(config.get("num_key_value_heads") or heads) * head_width
    if kind.startswith("deepseek"):
        _, _, *widths = (int(config[key] or 0) for key in LATENT)
        width, kv = heads * sum(widths) // 2, int(config[LATENT[1]]) + int(config[LATENT[3]])
    named = config.get("hidden_act") or config.get("activation_function")
    slow = named == "gelu_new" or (named is None and kind in _GELU_NEW)
    drops = config.get("attn_pdrop", config.get("attention_dropout", 0.1 * (kind == "gpt2")))
    scores = bool(drops) or (
        kind == "gemma2" and config.get("attn_logit_softcapping", 1) is not None
    )
    active = int(config.get("num_experts_per_tok") or 0)
    blocks = {ROOT: root, **blocks}
    return Layout(blocks, active, vocab, h, heads, width, kv, 3 * slow, scores)


def of_tensors(shapes: Mapping[str, Shape], tied: bool = False) -> Layout:
    """Return the layout of a model from the names and shapes of its stored tensors: modules that
    are numbered at the same place are the blocks."""
    blocks: dict[str, Params] = {ROOT: {}}
    own = {n: s for n, s in shapes.items() if not _BUFFERS.search(n)}
    if tied:
        own.pop("lm_head.weight", None)
    for name, shape in own.items():
        numbered = re.match(r"(.*?\.\d+|\d+)\.", name)
        blocks.setdefault(numbered[1] if numbered else ROOT, {})[name] = shape
    lists = [re.sub(r"\d+$", "", name) for name in blocks]
    for name in [name for name in blocks if name != ROOT]:
        if lists.count(re.sub(r"\d+$", "", name)) < 2:
            blocks[ROOT] |= blocks.pop(name)
    tables = [s for s in blocks[ROOT].values() if len(s) == 2]
    rows, width = max(tables, key=prod, default=(0, 0))
    return Layout(blocks, 0, rows if rows > 4 * width else 0, width)


def _layer(
    config: Mapping[str, Any], sizes: Mapping[str, int], family: FamilyTraits, kind: str, i: int
) -> Params | None:
    """Return the parameters of layer `i`, or None if the config lacks a size."""
    h, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = int(config.get("head_dim") or family.head or h // heads)
    shared = config.get("num_key_value_heads")
    if shared is None and kind not in _ALL_HEADS:
        return None
    q, kv = heads * head, int(shared or heads) * head

    def on(flag: bool | str) -> bool:
        return bool(config.get(flag, flag in _ON_BY_DEFAULT)) if isinstance(flag, str) else flag

    out: Params = {}
    for norm in family.norms:
        out |= _norm(norm, h, family.vectors)
    if kind.startswith("deepseek"):
        latent = _latent(config, h, heads)
        if latent is None:
            return None
        out |= latent
    elif family.packed:
        out |= _linear("self_attn.qkv_proj", q + 2 * kv, h) | _linear("self_attn.o_proj", h, q)
    else:
        for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            out |= _linear(f"self_attn.{name}", width, h, on(family.qkv))
        out |= _linear(f"self_attn.{family.dense}", h, q, on(family.out))
    if family.qk:
        whole = family.qk == "all"
        out |= _norm("self_attn.q_norm", q if whole else head)
        out |= _norm("self_attn.k_norm", kv if whole else head)
    if family.experts and _sparse(config, i):
        experts = _experts(config, sizes, family)
        return None if experts is None else out | experts
    return out | _mlp("mlp", h, sizes["intermediate_size"], family, on(family.mlp))


def _sparse(config: Mapping[str, Any], i: int) -> bool:
    """Return whether layer `i` has experts."""
    step = int(config.get("decoder_sparse_step") or 1)
    dense = i < int(config.get("first_k_dense_replace") or 0)
    return not dense and i not in (config.get("mlp_only_layers") or ()) and (i + 1) % step == 0


def _experts(
    config: Mapping[str, Any], sizes: Mapping[str, int], family: FamilyTraits
) -> Params | None:
    h, inner = sizes["hidden_size"], config.get("moe_intermediate_size")
    count = next((int(config[key]) for key in family.experts if config.get(key)), 0)
    f = int(inner or (sizes["intermediate_size"] if config["model_type"] == "mixtral" else 0))
    if not (count and f and config.get("num_experts_per_tok")):
        return None
    out = {
        "mlp.gate.weight": (count, h),
        "mlp.experts.gate_up_proj": (count, 2 * f, h),
        "mlp.experts.down_proj": (count, h, f),
    }
    if shared := int(config.get("shared_expert_intermediate_size") or 0):
        out |= _mlp("mlp.shared_expert", h, shared, family)
        out |= _linear("mlp.shared_expert_gate", 1, h)
    if several := int(config.get("n_shared_experts") or 0):
        out |= _mlp("mlp.shared_experts", h, several * f, family)
    return out


def _latent(config: Mapping[str, Any], h: int, heads: int) -> Params | None:
    """Return the parameters of latent attention (DeepSeek-AI, 2024, section 2.1.2)."""
    if any(key not in config for key in LATENT):
        return None
    rank, latent, plain, turned, value = (int(config[key] or 0) for key in LATENT)
    out: Params = {}
    if rank:
        out |= _linear("self_attn.q_a_proj", rank, h) | _norm("self_attn.q_a_layernorm", rank)
        out |= _linear("self_attn.q_b_proj", heads * (plain + turned), rank)
    else:
        out |= _linear("self_attn.q_proj", heads * (plain + turned), h)
    out |= _linear("self_attn.kv_a_proj_with_mqa", latent + turned, h)
    out |= _norm("self_attn.kv_a_layernorm", latent)
    out |= _linear("self_attn.kv_b_proj", heads * (plain + value), latent)
    return out | _linear("self_attn.o_proj", h, heads * value)


def _mlp(name: str, h: int, f: int, family: FamilyTraits, bias: bool = False) -> Params:
    if family.fc[0]:
        first, second = family.fc
        return _linear(f"{name}.{first}", f, h, bias) | _linear(f"{name}.{second}", h, f, bias)
    if family.packed:
        return _linear(f"{name}.gate_up_proj", 2 * f, h) | _linear(f"{name}.down_proj", h, f)
    gate, up = _linear(f"{name}.gate_proj", f, h, bias), _linear(f"{name}.up_proj", f, h, bias)
    return gate | up | _linear(f"{name}.down_proj", h, f, bias)


def _gpt2(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    h, at = sizes["hidden_size"], "transformer"
    f = int(config.get("n_inner") or 4 * h)
    root: Params = {
        f"{at}.wte.weight": (sizes["vocab_size"], h),
        f"{at}.wpe.weight": (sizes["max_position_embeddings"], h),
        **_norm(f"{at}.ln_f", h, 2),
    }
    layer = _norm("ln_1", h, 2) | _norm("ln_2", h, 2)
    for name, inputs, outputs in (
        ("attn.c_attn", h, 3 * h),
        ("attn.c_proj", h, h),
        ("mlp.c_fc", h, f),
        ("mlp.c_proj", f, h),
    ):
        layer |= {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}
    return root, f"{at}.h", layer, "lm_head"


def _gpt_neox(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    h, f, bias = sizes["hidden_size"], sizes["intermediate_size"], config.get("attention_bias", 1)
    root: Params = {"gpt_neox.embed_in.weight": (sizes["vocab_size"], h)}
    root |= _norm("gpt_neox.final_layer_norm", h, 2)
    layer = _norm("input_layernorm", h, 2) | _norm("post_attention_layernorm", h, 2)
    layer |= _linear("attention.query_key_value", 3 * h, h, bool(bias))
    layer |= _linear("attention.dense", h, h, bool(bias))
    layer |= _linear("mlp.dense_h_to_4h", f, h, True) | _linear("mlp.dense_4h_to_h", h, f, True)
    return root, "gpt_neox.layers", layer, "lm_head"


def _opt(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    if not config.get("ffn_dim"):
        return None
    h, f, bias = sizes["hidden_size"], int(config["ffn_dim"]), config.get("enable_bias", True)
    vectors = 2 if config.get("layer_norm_elementwise_affine", True) else 0
    at, narrow = "model.decoder", int(config.get("word_embed_proj_dim") or h)
    root: Params = {
        f"{at}.embed_tokens.weight": (sizes["vocab_size"], narrow),
        f"{at}.embed_positions.weight": (sizes["max_position_embeddings"] + 2, h),
    }
    if narrow != h:
        root |= _linear(f"{at}.project_in", h, narrow) | _linear(f"{at}.project_out", narrow, h)
    if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm"):
        root |= _norm(f"{at}.final_layer_norm", h, vectors)
    layer = _norm("self_attn_layer_norm", h, vectors) | _norm("final_layer_norm", h, vectors)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer |= _linear(f"self_attn.{name}", h, h, bool(bias))
    layer |= _linear("fc1", f, h, bool(bias)) | _linear("fc2", h, f, bool(bias))
    return root, f"{at}.layers", layer, "lm_head"


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Params:
    matrix: Params = {f"{name}.weight": (outputs, inputs)}
    return matrix | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name: str, width: int, vectors: int = 1) -> Params:
    kinds: Iterable[str] = ("weight", "bias")[:vectors]
    return {f"{name}.{kind}": (width,) for kind in kinds}
