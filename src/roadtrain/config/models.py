"""Model shapes: parameters, FLOPs and activation bytes of every block, computed without building a
model.

The costs of a block are given per sample (a sequence, an image or a row). `flops` is the number of
FLOPs of one forward, where a multiply-add counts as 2; backward takes twice as many. `saved` is the
number of bytes that backward needs. `input` is the number of bytes of the block's input; activation
checkpointing keeps only the input. Activations have 2-byte elements.

A transformer layer with s tokens, width h and a heads saves s h (34 + 5 a s / h) bytes (Korthikanti
et al., 2022, section 4). The second term is absent if attention is fused and keeps no s x s matrix.
A layer with a gated MLP has no dropout. Per token, it saves the inputs and outputs of two norms (4
h elements), queries, keys, values, the attention's result, and 3 vectors of the MLP's inner width.
Attention is counted in full, although the causal mask needs only half of the scores.

    shape("OPT-175B").params                            # 174.6e9
    shape("LLaMA-2-13B", seq_len=2048)
    from_config({"model_type": "llama", "hidden_size": 4096, ...})
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from roadtrain.config.families import LATENT, ROOT, TIED, Layout, Params, layout
from roadtrain.errors import ConfigError
from roadtrain.options.names import did_you_mean


@dataclass(frozen=True)
class BlockShape:
    """The costs of one block. The module's docstring explains `flops`, `saved` and `input`. Bytes,
    FLOPs and elements are per sample.

    `params`: number of parameters.
    `tables`: number of parameters in embedding tables.
    `touched`: bytes of the rows of embedding tables that a sample reads.
    `attention`: FLOPs for attention scores and their products with values; included in `flops`.
    `experts`: number of parameters of experts; included in `params`.
    `routed`: bytes of a sample's tokens that are sent to experts.
    `kv`: bytes of keys and values.
    `logits`: number of logits; 0 except for the output layer.
    `whole`: bytes of `saved` that every tensor-parallel rank holds in full if tensor parallelism
        does not split the sequence.
    `products`: bytes kept for backward if backward recomputes everything except attention and
        every second matrix product.
    `again`: FLOPs of that recomputation.
    `matrices`: number of experts; 1 without experts.
    `passing`: bytes of results of earlier blocks that later blocks still need; not included in
        `input`.
    """

    name: str
    params: int
    flops: float
    saved: float
    input: float
    tables: int = 0
    touched: float = 0.0
    attention: float = 0.0
    experts: int = 0
    routed: float = 0.0
    kv: float = 0.0
    logits: float = 0.0
    whole: float = 0.0
    products: float = 0.0
    again: float = 0.0
    matrices: int = 1
    passing: float = 0.0

    def times(self, n: int) -> tuple[BlockShape, ...]:
        return tuple(replace(self, name=f"{self.name}.{i}") for i in range(n))


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model's blocks. `tokens`: number of tokens per sample; 1 if samples have no
    tokens. `hidden`: width of the activations between blocks. `notes`: lines for the user about
    values that were assumed or not counted."""

    name: str
    blocks: tuple[BlockShape, ...]
    tokens: int
    hidden: int = 0
    heads: int = 0
    notes: tuple[str, ...] = ()

    @property
    def params(self) -> int:
        return sum(block.params for block in self.blocks)

    @property
    def flops(self) -> float:
        """Number of FLOPs of one sample's forward."""
        return sum(block.flops for block in self.blocks)

    @property
    def layers(self) -> int:
        return sum("." in block.name for block in self.blocks)

    def step_flops(self, activation_checkpointing: bool = False) -> float:
        """Return the number of FLOPs of one sample's forward and backward. With activation
        checkpointing, all blocks except the first and the output layer run forward twice (Narayanan
        et al., 2021: 96 s l h^2 (1 + s / 6h + V / 16lh))."""
        again = sum(block.flops for block in self.blocks[1:-1]) if activation_checkpointing else 0.0
        return 3 * self.flops + again


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer.

    `kv`: width of the keys, and also of the values. `ff`: inner width of the MLP. `gated`: whether
    the MLP has three matrices instead of two. `positions`: number of rows of learned position
    embeddings. `fused`: whether attention keeps no s x s matrix. `score_bytes`: bytes per score
    that attention keeps if it is not fused. `biases`: whether linear layers have biases. `norms`:
    number of normalization vectors per layer. `dense`: number of layers at the start that have an
    MLP of width `dense_ff` instead of experts. `latent`: None, or five sizes of latent attention
    (DeepSeek-AI, 2024, section 2.1.2): the rank of queries, the rank of keys and values, and three
    widths of each head: without positions, with positions, and of the values.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    ff: int = 0
    kv: int = 0
    gated: bool = False
    tied: bool = True
    positions: int = 0
    fused: bool = False
    biases: bool = True
    norms: int = 4
    experts: int = 1
    active: int = 1  # number of experts used per token
    shared: int = 0  # number of additional experts that every token uses
    dense: int = 0
    dense_ff: int = 0
    latent: Sequence[int] | None = None
    score_bytes: float = 5

    def layer(self) -> BlockShape:
        h, s, a = self.hidden, self.seq_len, self.heads
        ff, kv = self.ff or 4 * h, self.kv or h
        matrices = 3 if self.gated else 2
        attention, mlp, widths = 2 * h * h + 2 * h * kv, matrices * h * ff, 2 * h + 2 * kv
        scores = 4.0 * s * s * h
        if self.latent is not None:
            q, latent, head, turned, value = self.latent
            attention = h * (q + latent + turned) + a * (
                q * (head + turned) + latent * (head + value) + value * h
            )
            widths = 2 * q + 2 * latent + turned + 2 * a * (head + turned + value)
            scores, kv = 2.0 * s * s * a * (head + turned + value), latent + turned
        biases = (2 * h + 2 * kv + (matrices - 1) * ff + h) * self.biases
        router = h * self.experts if self.experts > 1 else 0
        experts = mlp * self.experts if self.experts > 1 else 0
        params = attention + mlp * (self.experts + self.shared) + router + biases + self.norms * h
        flops = 2.0 * s * (attention + mlp * (self.active + self.shared)) + scores
        saved = s * h * (34.0 + (not self.fused) * self.score_bytes * a * s / h)
        inputs = h * (self.active if self.experts > 1 else 0)
        if self.gated:
            saved = 2.0 * s * (4 * h + widths + inputs + 3 * ff * (self.active + self.shared))
        return BlockShape(
            "layer",
            params,
            flops,
            saved,
            2.0 * s * h,
            attention=scores,
            experts=experts,
            routed=2.0 * s * inputs,
            kv=4.0 * s * kv,
            whole=(8.0 if self.gated else 10.0) * s * h,
            products=2.0 * s * (4 * h + kv + ff * self.active),
            again=2.0 * s * h * (kv + h + ff * self.active),
            matrices=self.experts,
        )

    def shape(self, name: str) -> ModelShape:
        h, s, v = self.hidden, self.seq_len, self.vocab
        plain = replace(self, experts=1, active=1, shared=0, ff=self.dense_ff or self.ff)
        layers = [(plain if i < self.dense else self).layer() for i in (0, self.dense)]
        layers = [replace(layers[i >= self.dense], name=f"layer.{i}") for i in range(self.layers)]
        embedding = BlockShape("embedding", v * h + self.positions * h, 0.0, 2.0 * s * h, 8.0 * s)
        final = self.norms // 2 * h + (0 if self.tied else v * h)
        hidden = 2.0 * s * h
        output = BlockShape("output", final, hidden * v, hidden, hidden, logits=1.0 * s * v)
        return ModelShape(name, (embedding, *layers, output), s, h, self.heads)


_FILE = tomllib.loads(files("roadtrain.config").joinpath("models.toml").read_text())


def _published() -> Iterator[tuple[str, Transformer]]:
    for family in _FILE["families"]:
        shared = {key: held for key, held in family.items() if key not in ("source", "models")}
        for name, own in family["models"].items():
            yield name, Transformer(**shared | own)


TRANSFORMERS = dict(_published())


def _block(name: str, layers: Sequence[Sequence[int]]) -> BlockShape:
    """Return the shape of a block of layers, which are described in models.toml."""
    params, flops, saved = 0, 0.0, 0.0
    for inside, outside, kernel, side, *_ in layers:
        weights = kernel**2 * inside * outside
        params += weights
        flops += 2.0 * weights * side**2
        saved += 4.0 * outside * side**2
    inside, *_, side = layers[0]
    return BlockShape(name, params, flops, saved, 2.0 * inside * side**2)


def _dlrm() -> ModelShape:
    """Return the shape of DLRM, Naumov et al. (2019), with the tables for the Criteo Kaggle
    data."""
    rows, width = _FILE["criteo_kaggle"], 16
    params, touched = sum(rows) * width, 2.0 * len(rows) * width
    tables = BlockShape("tables", params, 0.0, touched, 8.0 * len(rows), params, touched)
    pairs, vectors = (len(rows) + 1) * len(rows) // 2, (len(rows) + 1) * width
    saved = 2.0 * (vectors + pairs + width)
    interaction = BlockShape("interaction", 0, 2.0 * pairs * width, saved, 2.0 * vectors)

    def mlp(kind: str, widths: Sequence[int]) -> list[BlockShape]:
        return [
            _block(f"{kind}.{i}", [(inside, outside, 1, 1)])
            for i, (inside, outside) in enumerate(pairwise(widths))
        ]

    bottom = mlp("bottom", (13, 512, 256, 64, width))
    below = [replace(block, passing=tables.touched) for block in bottom]
    blocks = [tables, *below, interaction, *mlp("top", (pairs + width, 512, 256, 1))]
    return ModelShape("DLRM-Kaggle", tuple(blocks), 1)


_OTHERS = {
    name: ModelShape(name, tuple(_block(*block) for block in network.items()), 1)
    for name, network in _FILE["networks"].items()
} | {"DLRM-Kaggle": _dlrm()}
NAMES = (*TRANSFORMERS, *_OTHERS)


def named_shape(name: str, seq_len: int | None = None) -> ModelShape:
    """Return the shape of a named model for samples of `seq_len` tokens, by default of the
    published length. Raises ConfigError for an unknown name, and for a length that the model does
    not support."""
    own = shape(name)
    if seq_len is None:
        note = f"samples of {own.tokens} tokens (as published; change with --seq-len)"
        return replace(own, notes=(note,) if own.tokens > 1 else ())
    if own.name not in TRANSFORMERS:
        raise ConfigError(
            f"samples of {own.name} have no tokens, but seq_len is {seq_len}", hint="omit --seq-len"
        )
    chosen_length(seq_len, TRANSFORMERS[own.name].positions or None)
    return shape(name, seq_len=seq_len)


def named_layout(name: str) -> Layout:
    """Return the parameters of a named model. Models that are not transformers have a parameter for
    each block. Raises ConfigError for an unknown name."""
    own = shape(name)
    if own.name not in TRANSFORMERS:
        blocks: dict[str, Params] = {b.name: {b.name: (b.params,)} for b in own.blocks}
        return Layout({ROOT: {}, **blocks})
    config = published_config(own.name)
    made = layout({**config, "attn_pdrop": 0.0}, config)
    assert made is not None, own.name
    return made


def published_config(name: str) -> dict[str, Any]:
    """Return a transformers config with the sizes of a published transformer: that of GPT-2 for
    models without a gated MLP."""
    own = TRANSFORMERS[name]
    config = {
        "model_type": "llama" if own.gated else "gpt2",
        "hidden_size": own.hidden,
        "num_hidden_layers": own.layers,
        "num_attention_heads": own.heads,
        "max_position_embeddings": own.positions or own.seq_len,
        "vocab_size": own.vocab,
        "intermediate_size": own.dense_ff or own.ff or 4 * own.hidden,
        "tie_word_embeddings": own.tied,
    }
    if own.gated:
        config["num_key_value_heads"] = (own.kv or own.hidden) * own.heads // own.hidden
    if own.experts > 1:
        config |= {"model_type": "mixtral", "num_local_experts": own.experts}
        config |= {"num_experts_per_tok": own.active, "moe_intermediate_size": own.ff}
    if own.latent is not None:
        config |= {"model_type": "deepseek_v3", "first_k_dense_replace": own.dense}
        config |= {"n_shared_experts": own.shared, **dict(zip(LATENT, own.latent))}
    return config


def shape(name: str, **changes: Any) -> ModelShape:
    """Return the shape of a named model. `name` ignores case and may have `_` for `-`. `changes`:
    fields of Transformer that differ from the published values, such as `seq_len`, `layers` or
    `fused`; None keeps the published value. Raises ConfigError for an unknown name."""
    key = name.lower().replace("_", "-")
    found = next((n for n in NAMES if n.lower() == key), None)
    if found in _OTHERS:
        return _OTHERS[found]
    if found is not None:
        changed = {field: value for field, value in changes.items() if value is not None}
        return replace(TRANSFORMERS[found], **changed).shape(found)
    family = [n for n in NAMES if key.split("-")[0] == n.lower().split("-")[0]]
    near = "" if family else did_you_mean(key, map(str.lower, NAMES))
    raise ConfigError(
        f"no model is called {name!r}",
        hint=(near or f"available are {', '.join(family or NAMES)};")
        + " or give the path of a Hugging Face config.json",
    )


SMALL: Mapping[str, Any] = _FILE["small"]  # the model of `roadtrain init`
KEYS: Mapping[str, Sequence[str]] = _FILE["keys"]
EXPERT_KEYS: Mapping[str, Sequence[str]] = _FILE["expert_keys"]
TOKENS = 4096  # number of tokens per sample if no length is given


def chosen_length(seq_len: int | None, longest: int | None) -> tuple[int, list[str]]:
    """Return the number of tokens per sample, and notes for the user if the number was assumed.
    `longest`: the largest number that the model supports; None if there is no limit. Raises
    ConfigError if `seq_len` is less than 1 or more than `longest`."""
    if seq_len is None:
        tokens = min(TOKENS, longest or TOKENS)
        limit = f"the model's longest is {longest or 'unknown'}"
        return tokens, [f"samples of {tokens} tokens ({limit}; change with --seq-len)"]
    if seq_len < 1 or seq_len > (longest or seq_len):
        raise ConfigError(
            f"samples have {seq_len} tokens, but the model allows 1 to {longest or 'any number'}",
            hint="give a --seq-len of 1 or more" + (f" and at most {longest}" if longest else ""),
        )
    return seq_len, []


def from_config(config: Mapping[str, Any], *, seq_len: int | None = None) -> ModelShape:
    """Compute by formula the shape of the model that a Hugging Face config (a config.json)
    describes.

    The formula is exact for the families in config/families.toml. For others, this function raises
    ConfigError; use `planner/model_config.py`, which counts the parameters of the model's modules.
    Also raises ConfigError if a required key is missing.
    """
    kind = str(config.get("model_type", ""))
    layout = layout_of_config(config)
    if layout is None:
        raise ConfigError(f"no formula gives the number of parameters of a `{kind}`")
    longest = sizes_of(config, kind)["max_position_embeddings"]
    tokens, notes = chosen_length(seq_len, longest or None)
    return shape_of_layout(layout, tokens, kind, tuple(notes))


def read_config(path: Path) -> dict[str, Any]:
    """Read a Hugging Face config.json. Raises ConfigError."""
    try:
        config = json.loads(path.read_text(), object_hook=_with_floats)
    except OSError as cause:
        raise ConfigError(f"cannot read {path}: {cause.strerror}") from cause
    except ValueError as cause:
        raise ConfigError(f"{path} cannot be parsed as JSON: {cause}") from cause
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path} is not a model's config: {str(config)[:40]!r}",
            hint="give a Hugging Face config.json",
        )
    return config


def _with_floats(table: dict[str, Any]) -> Any:
    """Return the number that transformers writes as {"__float__": "Infinity"}; else the table."""
    return float(table["__float__"]) if "__float__" in table else table


def layout_of_config(config: Mapping[str, Any]) -> Layout | None:
    """Return the names and shapes of the parameters of the model that a Hugging Face config
    describes, or None if no formula is exact for it. Raises ConfigError if a size is missing or
    wrong."""
    kind = str(config.get("model_type", ""))
    if kind not in TIED:
        return None
    try:
        found = sizes_of(config, kind)
        hidden, heads = found["hidden_size"], found["num_attention_heads"]
        if hidden % heads and not config.get("head_dim"):
            raise ConfigError(f"hidden_size {hidden} is not divisible by {heads} heads")
        return layout(config, found)
    except (TypeError, ValueError, OverflowError) as cause:
        raise ConfigError(
            f"the config of a `{kind}` cannot be read: {cause}",
            hint="give the config.json as it was published",
        ) from cause


def shape_of_layout(
    layout: Layout, tokens: int, name: str, notes: tuple[str, ...] = ()
) -> ModelShape:
    """Return the shape of a model for samples of `tokens` tokens from its parameters."""
    s, h, (root, *layers) = tokens, layout.hidden, layout.blocks
    scores = 4.0 * s * s * (layout.attention or h)
    hidden, blocks = 2.0 * s * h, []
    for i, block in enumerate(layers):
        shapes = [shape for shape in layout.blocks[block].values() if len(shape) == 3]
        experts, active = sum(map(prod, shapes)), layout.active if shapes else 0
        saved = s * layout.saved(block, s, 2)
        blocks.append(
            BlockShape(
                f"layer.{i}",
                layout.params(block),
                2.0 * s * layout.used(block) + scores,
                saved,
                hidden,
                attention=scores,
                experts=experts,
                routed=hidden * active,
                kv=4.0 * s * layout.kv,
                whole=min(saved, 4 * hidden),
                products=saved / 2,
                again=s * float(layout.used(block)),
                matrices=shapes[0][0] if shapes else 1,
            )
        )
    rest = layout.params(root)
    after = rest - sum(prod(layout.blocks[root][name]) for name in layout.tables)
    embedding = BlockShape("embedding", rest - after, 0.0, hidden, 8.0 * s)
    output = BlockShape(
        "output", after, hidden * layout.vocab, hidden, hidden, logits=1.0 * s * layout.vocab
    )
    return ModelShape(name, (embedding, *blocks, output), s, h, layout.heads, notes)


def sizes_of(config: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Return the sizes of a model by Hugging Face's usual names, such as "hidden_size"; missing
    optional keys are 0. Raises ConfigError if a required key is missing."""
    found = {
        name: next((int(config[key]) for key in keys if config.get(key)), 0)
        for name, keys in KEYS.items()
    }
    # gpt2 has an embedding row for each position; the other models need no maximum
    optional = ("intermediate_size",) if kind == "gpt2" else ("max_position_embeddings",)
    for name, value in found.items():
        if value < 1 and (value or name not in optional):
            raise ConfigError(
                f"the config of a `{kind}` has none of {', '.join(KEYS[name])}",
                hint="a Hugging Face config.json of a transformer has one of these keys",
            )
    return found
