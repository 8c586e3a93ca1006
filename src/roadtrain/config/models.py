"""Model shapes: of every block the parameters, the FLOPs and the activations. Arithmetic only,
nothing is built.

Per sample (a sequence, an image, a row) and block: `flops` of one forward (a multiply-add is 2;
backward takes twice as many), `saved` bytes that backward needs of it, `input` bytes of its input,
all that activation checkpointing keeps. Activations are of 2-byte elements; those of a transformer
layer as in Korthikanti et al. (2022), section 4: s h (34 + 5 a s / h) bytes, without the second
term where attention is fused (it then takes no s x s matrix). A gated layer has no dropout: two
norms' inputs and outputs (4 h a token), queries, keys, values and what attention gives, and 3 ff.
Logits are counted apart. Attention is counted in full, as is usual, not as half for its causal
mask.

    shape("OPT-175B").params                            # 174.6e9
    shape("LLaMA-2-13B", seq_len=2048)
    from_config({"model_type": "llama", "hidden_size": 4096, ...})
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from typing import Any

from roadtrain.errors import ConfigError


@dataclass(frozen=True)
class BlockShape:
    """`attention`: of `flops`, those of scores and values. `tables`: of `params`, rows that are
    looked up (embeddings), of which a sample touches `touched` bytes. `experts`: of `params`, those
    of experts, of a sample's tokens to which
    `routed` bytes go. `kv`: bytes of keys and values. `logits`: elements of the output. `whole`:
    of `saved`, what each tensor-parallel rank has unless the sequence is split too. `products`:
    bytes that stay where all but attention and every second product are computed again, which
    are `again` FLOPs. `matrices`: experts that are multiplied side by side, each with its part
    of the tokens. `passing`: bytes that later blocks need of earlier ones, besides `input`."""

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
    """`tokens`: of a sample; 1 where it has none. `hidden`: width of what passes between blocks.
    `notes`: what of it was assumed or not counted, each a line for people."""

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
        """Of one sample's forward."""
        return sum(block.flops for block in self.blocks)

    @property
    def layers(self) -> int:
        return sum("." in block.name for block in self.blocks)

    def step_flops(self, activation_checkpointing: bool = False) -> float:
        """Of one sample's forward and backward; with activation checkpointing the blocks' forward
        runs twice, the output layer's once (so Narayanan et al., 2021: 96 s l h^2 (1 + s / 6h + V /
        16lh))."""
        again = sum(block.flops for block in self.blocks[1:-1]) if activation_checkpointing else 0.0
        return 3 * self.flops + again


@dataclass(frozen=True)
class Transformer:
    """`kv`: width of keys, and of values. `ff`: width inside the MLP; `gated`: it has three
    matrices. `positions`: rows of learnt positions. `fused`: attention keeps no s x s matrix, else
    `score_bytes` a score. `biases`: linear layers have them; `norms`: vectors of normalisation a
    layer. `dense`: so many of the first layers have no experts but an
    MLP of `dense_ff`. `latent`: ranks of queries and of keys and values, widths of a head
    without and with positions and of its values (DeepSeek-AI, 2024, section 2.1.2)."""

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
    active: int = 1  # experts that a token takes
    shared: int = 0  # experts that every token takes besides
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


_TRANSFORMERS = dict(_published())


def _layer(name: str, weights: int, outputs: int, spatial: int, inputs: float) -> BlockShape:
    """`weights` used at `spatial` places, giving `outputs` elements (2 bytes each; the
    activation keeps them too)."""
    return BlockShape(name, weights, 2.0 * weights * spatial, 4.0 * outputs, 2.0 * inputs)


def _vgg16() -> ModelShape:
    """Simonyan and Zisserman (2014)."""
    blocks, side, channels = [], 224, 3
    for i, (count, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))):
        for j in range(count):
            area, weights = side * side, 9 * channels * width
            blocks.append(_layer(f"conv.{i}.{j}", weights, width * area, area, channels * area))
            channels = width
        side //= 2
    for i, (inside, outside) in enumerate(((512 * 49, 4096), (4096, 4096), (4096, 1000))):
        blocks.append(_layer(f"linear.{i}", inside * outside, outside, 1, inside))
    return ModelShape("VGG-16", tuple(blocks), 1)


def _resnet50() -> ModelShape:
    """He et al. (2015)."""
    blocks = [_layer("stem", 49 * 3 * 64, 64 * 112 * 112, 112 * 112, 3 * 224 * 224)]
    side, channels = 56, 64
    for i, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for j in range(count):
            # the first of a stage halves the side
            before, area = channels, side * side * (4 if i and not j else 1)
            after = side * side
            reduce, middle, expand = before * width, 9 * width * width, 4 * width * width
            match = before * 4 * width if not j else 0
            flops = 2.0 * (reduce * area + (middle + expand + match) * after)
            saved = 4.0 * (width * area + width * after + 4 * width * after * (2 if match else 1))
            params, inputs = reduce + middle + expand + match, 2.0 * before * area
            blocks.append(BlockShape(f"block.{i}.{j}", params, flops, saved, inputs))
            channels = 4 * width
        side //= 2
    blocks.append(_layer("linear", 2048 * 1000, 1000, 1, 2048))
    return ModelShape("ResNet-50", tuple(blocks), 1)


def _dlrm() -> ModelShape:
    """Each sample looks one row up in every table; rows go to where the sample is (all-to-all).
    Then each two of these and the bottom MLP's result are multiplied (the interaction). Naumov et
    al. (2019); rows of the Criteo Kaggle data."""
    rows, width = _FILE["criteo_kaggle"], 16
    params, touched = sum(rows) * width, 2.0 * len(rows) * width
    tables = BlockShape("tables", params, 0.0, touched, 8.0 * len(rows), params, touched)
    pairs, vectors = (len(rows) + 1) * len(rows) // 2, (len(rows) + 1) * width
    saved = 2.0 * (vectors + pairs + width)
    interaction = BlockShape("interaction", 0, 2.0 * pairs * width, saved, 2.0 * vectors)

    def mlp(kind: str, widths: Sequence[int]) -> list[BlockShape]:
        return [
            _layer(f"{kind}.{i}", inside * outside, outside, 1, inside)
            for i, (inside, outside) in enumerate(pairwise(widths))
        ]

    bottom = mlp("bottom", (13, 512, 256, 64, width))
    below = [replace(block, passing=tables.touched) for block in bottom]
    blocks = [tables, *below, interaction, *mlp("top", (pairs + width, 512, 256, 1))]
    return ModelShape("DLRM-Kaggle", tuple(blocks), 1)


_OTHERS = {"VGG-16": _vgg16, "ResNet-50": _resnet50, "DLRM-Kaggle": _dlrm}
NAMES = (*_TRANSFORMERS, *_OTHERS)


def named_shape(name: str, seq_len: int | None = None) -> ModelShape:
    """A named shape for samples of `seq_len` tokens (None: as published, which its notes say).
    Raises ConfigError for a name that is not known, and for a length that its samples cannot
    have."""
    own = shape(name)
    if seq_len is None:
        said = f"samples of {own.tokens} tokens (as published; --seq-len says otherwise)"
        return replace(own, notes=(said,) if own.tokens > 1 else ())
    if own.name not in _TRANSFORMERS:
        raise ConfigError(
            f"samples of {own.name} have no tokens, given are {seq_len}", hint="leave --seq-len out"
        )
    chosen_length(seq_len, _TRANSFORMERS[own.name].positions or None)
    return shape(name, seq_len=seq_len)


def shape(name: str, **changes: Any) -> ModelShape:
    """A named shape, in the spelling of NAMES but for case and `_`. `changes`: a transformer's,
    instead of what is published (None: as published), as `seq_len`, `layers`, `fused`: whether
    attention keeps no s x s matrix. Raises ConfigError for a name that is not known."""
    wanted = name.lower().replace("_", "-")
    found = next((known for known in NAMES if known.lower() == wanted), None)
    if found in _OTHERS:
        return _OTHERS[found]()
    if found is not None:
        given = {what: value for what, value in changes.items() if value is not None}
        return replace(_TRANSFORMERS[found], **given).shape(found)
    near = [known for known in NAMES if wanted.split("-")[0] == known.lower().split("-")[0]]
    known = f"known are {', '.join(near or NAMES)}"
    raise ConfigError(
        f"no model is called {name!r}",
        hint=f"{known}; or give the path of a Hugging Face config.json",
    )


KEYS = {  # of a Hugging Face config, by transformers' common name
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
    ),
    "vocab_size": ("vocab_size",),
}
TOKENS = 4096  # of a sample, where nobody says
# -> whether embeddings are tied
_EXACT = {"llama": False, "mistral": False, "mixtral": False, "gpt2": True}
# keys that the formula does not count
_NEVER = ("attention_bias", "mlp_bias", "add_cross_attention")
_COUNT_MODULES = "pip install 'roadtrain[hf]' counts the parameters of its modules"


def chosen_length(seq_len: int | None, longest: int | None) -> tuple[int, list[str]]:
    """Tokens of a sample, and what of that was assumed. `longest`: positions that the model has.
    Raises ConfigError where a sample is longer, or has no tokens."""
    if seq_len is None:
        tokens = min(TOKENS, longest or TOKENS)
        most = f"the model's longest is {longest or 'not known'}"
        return tokens, [f"samples of {tokens} tokens ({most}; --seq-len says otherwise)"]
    if seq_len < 1 or seq_len > (longest or seq_len):
        raise ConfigError(
            f"samples of {seq_len} tokens, the model's longest is {longest or 'not known'}",
            hint="--seq-len of 1 or more" + (f" and at most {longest}" if longest else ""),
        )
    return seq_len, []


def _whole(config: Mapping[str, Any], key: str, instead: int = 0) -> int:
    """instead: where it is not said. Raises ConfigError."""
    value = config.get(key) or instead
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError) as cause:
        raise ConfigError(
            f"{key} of a model's config is {value!r}, and should be a whole number"
        ) from cause


def from_config(config: Mapping[str, Any], *, seq_len: int | None = None) -> ModelShape:
    """The shape of a Hugging Face config (its keys, from config.json) by formula, for the few
    architectures that the formula is exact for; `planner/model_config.py` counts the modules of
    all others. `seq_len`: as in `chosen_length`. Raises ConfigError for any other model type,
    and where a key that is needed is missing."""
    kind = str(config.get("model_type", ""))
    if kind not in _EXACT:
        raise ConfigError(
            f"the parameters of a `{kind or 'model without model_type'}` are not known by formula",
            hint=(
                "pip install 'roadtrain[hf]' counts those of its modules; or --model"
                " MODULE:FUNCTION"
            ),
        )
    if uncounted := next((key for key in _NEVER if config.get(key)), None):
        raise ConfigError(
            f"the formula of a `{kind}` does not count `{uncounted}`", hint=_COUNT_MODULES
        )
    found, gated = _sizes(config, kind), kind != "gpt2"
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    if hidden % heads:
        raise ConfigError(f"a width of {hidden} does not divide into {heads} heads")
    if (head := _whole(config, "head_dim", hidden // heads)) * heads != hidden:
        raise ConfigError(
            f"the formula of a `{kind}` has heads of {hidden // heads}, the config says {head}",
            hint=_COUNT_MODULES,
        )
    experts = _whole(config, "num_local_experts")
    active = _whole(config, "num_experts_per_tok")
    if kind == "mixtral" and not 0 < active <= experts:
        raise ConfigError(
            f"a `mixtral` of {experts} experts, of which a token takes {active}",
            hint="give num_local_experts and num_experts_per_tok",
        )
    longest = found["max_position_embeddings"]
    tokens, notes = chosen_length(seq_len, longest or None)
    transformer = Transformer(
        found["num_hidden_layers"],
        hidden,
        heads,
        found["vocab_size"],
        tokens,
        found["intermediate_size"],
        _whole(config, "num_key_value_heads", heads) * head,
        gated,
        bool(config.get("tie_word_embeddings", _EXACT[kind])),
        0 if gated else longest,
        fused=gated,
        biases=not gated,
        norms=2 if gated else 4,
        experts=experts or 1,
        active=active or 1,
    )
    return replace(transformer.shape(kind), notes=tuple(notes))


def _sizes(config: Mapping[str, Any], kind: str) -> dict[str, int]:
    """The numbers of KEYS. Raises ConfigError where one is missing."""
    found = {
        name: next((_whole(config, key) for key in keys if config.get(key)), 0)
        for name, keys in KEYS.items()
    }
    if kind == "gpt2":
        found["intermediate_size"] = found["intermediate_size"] or 4 * found["hidden_size"]
    for name, value in found.items():
        # gpt2 has a row of each
        if not value and (kind == "gpt2" or name != "max_position_embeddings"):
            raise ConfigError(
                f"the config of a `{kind}` has none of {', '.join(KEYS[name])}",
                hint="a Hugging Face config.json of a transformer has them",
            )
    return found
