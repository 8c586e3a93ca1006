"""The parameters of transformer families: the name and shape of each parameter, computed from a
Hugging Face config without importing torch or transformers.

families.toml describes the families. A config whose keys add parameters that are not described
there has no layout, so that a wrong size is never returned.

    layout({"model_type": "llama", "hidden_size": 4096, ...}).blocks["model.layers.0"]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
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
        tied: Whether the output layer uses the matrix of the embedding.
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
    tied: bool = False

    @property
    def tables(self) -> list[str]:
        """Names of the root block's embedding tables."""
        return [name for name in self.blocks[ROOT] if _TABLES.search(name)]

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


_FILE = tomllib.loads(files("roadtrain.config").joinpath("families.toml").read_text())
_PARTS, FAMILIES = _FILE["parts"], _FILE["families"]
TIED = {kind: family.get("tied", False) for kind, family in FAMILIES.items()}  # the default
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_REFUSED = ("add_cross_attention", "quantization_config")


def layout(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Layout | None:
    """Return the parameters of the model that a config describes, or None if its family, or one of
    its keys, is not described in families.toml.

    Args:
        config: The content of config.json.
        sizes: The model's sizes by their common names (config/models.py, `sizes_of`).
    """
    kind = str(config.get("model_type", ""))
    if (family := FAMILIES.get(kind)) is None:
        return None
    unknown = any(config.get(key) for key in (*_REFUSED, *family.get("refused", ())))
    lacks = any(config.get(key) is None for key in family.get("needed", ()))
    if unknown or lacks or any(key not in config for key in family.get("stated", ())):
        return None
    own = _dimensions(config, sizes, family)
    active = int(config.get("num_experts_per_tok") or 0)
    if "sparse" in family and not 0 < active <= own["E"]:
        return None

    def params(parts: Iterable[str], prefix: str = "") -> Params:
        text = "\n".join(_PARTS[part] for part in parts)
        for key in ("norm", "qkv", "out", "mlp"):
            text = text.replace(f"${key}", family.get(key, ""))
        lines = (line.split() for line in text.splitlines() if line)
        return {f"{prefix}{n}": s for line in lines for n, s in _parameters(line, config, own)}

    root = params([family.get("root", "root")])
    if not (tied := bool(config.get("tie_word_embeddings", TIED[kind]))):
        root["lm_head.weight"] = own["V"], own["h"]
    blocks, prefix, common = {}, family.get("prefix", "model.layers"), family.get("layer", _LAYER)
    for i in range(sizes["num_hidden_layers"]):
        sparse = "sparse" in family and _sparse(config, i)
        parts = family["sparse"] if sparse else family.get("mlp_of", ["gated"])
        blocks[f"{prefix}.{i}"] = params([*common, *parts], f"{prefix}.{i}.")
    if len(blocks) == 1:  # streaming/split.py makes no block of a list with one item
        root |= blocks.popitem()[1]
    named = config.get("hidden_act") or config.get("activation_function")
    slow = named == "gelu_new" or (named is None and "steps" in family)
    drops = config.get("attn_pdrop", config.get("attention_dropout", "scores" in family))
    capped = family.get("scores_unless")
    return Layout(
        {ROOT: root, **blocks},
        active,
        own["V"],
        own["h"],
        sizes["num_attention_heads"],
        (own["x"] + own["z"]) // 2 if own["l"] else own["q"],
        own["l"] + own["t"] if own["l"] else own["k"],
        3 * slow,
        bool(drops or (capped and config.get(capped, 1) is not None)),
        tied,
    )


_LAYER = ("norms", "attention")


def _dimensions(
    config: Mapping[str, Any], sizes: Mapping[str, int], family: Mapping[str, Any]
) -> dict[str, int]:
    """Return the sizes in families.toml by their letters."""

    def of(*keys: str) -> int:
        return next((int(config[key]) for key in keys if config.get(key)), 0)

    h, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    f = sizes["intermediate_size"]
    if "inner" in family:
        f = of(family["inner"]) or 4 * h
    head = of("head_dim") or family.get("head") or h // heads
    m, s = of("moe_intermediate_size") or f, of("shared_expert_intermediate_size")
    r, latent, plain, turned, value = map(of, LATENT)
    x, narrow = heads * (plain + turned), of("word_embed_proj_dim") or h
    before = config.get("do_layer_norm_before", True) and not of("_remove_final_layer_norm")
    return {
        "h": h,
        "V": sizes["vocab_size"],
        "P": sizes["max_position_embeddings"],
        "f": f,
        "d": head,
        "q": heads * head,
        "k": (of("num_key_value_heads") or heads) * head,
        "E": of("n_routed_experts", "num_experts", "num_local_experts"),
        "m": m,
        "s": s,
        "o": int(s > 0),
        "S": of("n_shared_experts") * m,
        "n": narrow,
        "p": narrow * (narrow != h),
        "b": h * bool(before),
        "r": r,
        "l": latent,
        "t": turned,
        "x": x,
        "w": x * (r == 0),
        "y": heads * (plain + value),
        "z": heads * value,
    }


def _parameters(
    line: Sequence[str], config: Mapping[str, Any], sizes: Mapping[str, int]
) -> Iterator[tuple[str, Shape]]:
    """Yield the name and the shape of each parameter of a line of families.toml."""
    name, *words = line
    bias = words.pop() if words[-1].startswith("+") else ""
    shape = tuple(_size(word, sizes) for word in words)
    if 0 in shape:
        return
    yield (name if len(shape) == 3 or name.endswith(".bias") else f"{name}.weight"), shape
    key = bias.strip("+!")
    if bias == "+" or (key and config.get(key, bias.endswith("!"))):
        yield f"{name}.bias", shape[:1]


def _size(word: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum such as `q+2k` or `P+2`."""
    terms = (re.fullmatch(r"(\d*)(\w?)", term) for term in word.split("+"))
    return sum(int(t[1] or 1) * (sizes[t[2]] if t[2] else 1) for t in terms if t)


def _sparse(config: Mapping[str, Any], i: int) -> bool:
    """Return whether layer `i` has experts."""
    step = int(config.get("decoder_sparse_step") or 1)
    dense = i < int(config.get("first_k_dense_replace") or 0)
    return not dense and i not in (config.get("mlp_only_layers") or ()) and (i + 1) % step == 0


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
    vocab = rows if rows > 4 * width else 0
    alone = vocab > 0 and sum(shape[0] == vocab for shape in tables) == 1
    return Layout(blocks, vocab=vocab, hidden=width, tied=alone)
