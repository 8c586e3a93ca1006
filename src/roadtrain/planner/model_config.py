"""Compute the shape of a model from its Hugging Face config, on the device `meta`, without
downloading or initializing anything.

FLOPs and activations are measured in two forward passes, the second with half as many tokens. The
counts for any number of tokens are computed from these two passes. The FLOPs of attention scores
grow with the square of the number of tokens, all other counts in proportion to the number. The
bytes of scores and masks do not count, because fused kernels do not keep them. Experts are not run,
because it is unknown which tokens each expert gets. Their FLOPs per token are computed from the
number of their weights.

Assumes that the model takes token ids or images. Instead of guessing, raises ConfigError for a
model type that transformers does not know, for a config without a key that determines the size, and
for a model whose forward pass needs real data.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from roadtrain.config.families import ROOT, Layout
from roadtrain.config.models import EXPERT_KEYS, KEYS, BlockShape, ModelShape, chosen_length
from roadtrain.environment import need
from roadtrain.errors import ConfigError
from roadtrain.planner.measure import Counts, count_forward, replaced_forwards
from roadtrain.streaming.split import Split, split
from roadtrain.units import show_params

OWN = "give MODULE:FUNCTION as the model, a function that returns the model (on `meta`) and a batch"
# keys that a config must have, because they determine the size
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
# keys that transformers may fill in with a default, which a note of the shape reports
GUESSED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")
BOTH = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")  # encoder-decoder models
AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)
MOST_RUN = 512  # most tokens of a forward pass; few, because some models loop over tokens
FAILURES = (Exception,)  # errors of transformers, whose configs raise many kinds of errors


@dataclass(frozen=True)
class Experts:
    """The sizes of the experts in a block of a mixture-of-experts model."""

    params: int = 0  # number of parameters of all experts
    count: int = 1  # number of experts
    active: int = 0  # number of experts that a token uses
    weights: int = 0  # number of elements of an expert's matrices
    widths: float = 0  # number of elements of an expert's activations per token


def shape_of_config(
    config: Mapping[str, Any], *, seq_len: int | None = None, name: str = ""
) -> ModelShape:
    """Compute the shape of a model from the keys of its config.json.

    Args:
        config: The content of config.json.
        seq_len: The number of tokens of a sample. If None, a default is used (`chosen_length`), and
            a note of the shape reports the default.
        name: The name of the shape. If "", the model type is used.

    Raises ConfigError if transformers is not installed or does not know the model, if a key that
    determines the size is missing, or if the forward pass cannot run without data.
    """
    return counted(config, seq_len=seq_len, name=name)[1]


def counted(
    config: Mapping[str, Any], *, seq_len: int | None = None, name: str = ""
) -> tuple[Layout, ModelShape]:
    """Return the parameters of the model, and what `shape_of_config` returns."""
    kind = str(config.get("model_type") or "")
    made, guessed = _config(kind, config)
    text = made.get_text_config(decoder=True)
    default = "(the default of transformers, as the config does not set it)"
    notes = [f"{key} {value} {default}" for key, value in guessed.items()]
    if ahead := config.get("num_nextn_predict_layers"):
        notes.append(
            f"{ahead} layer(s) that predict further tokens are not counted, as transformers does"
            " not build them"
        )
    model = _built(kind, config, made, notes)
    parts = split(model)
    experts = {part.name: _experts(part.module, text, kind) for part in parts.blocks}
    with replaced_forwards({module: _same for module, _ in _expert_modules(model)}):
        if model.main_input_name == "pixel_values":
            whole = _count_image(kind, model, parts, made, notes)
            tokens, ran, half = whole.tokens, whole.tokens, None
        elif model.main_input_name == "input_ids":
            longest = getattr(text, "max_position_embeddings", None)
            tokens, assumed = chosen_length(
                seq_len, longest if isinstance(longest, int) and longest > 0 else None
            )
            notes += assumed
            ran = min(tokens + tokens % 2, MOST_RUN)
            whole, half = (_count_tokens(kind, model, parts, n) for n in (ran, ran // 2))
        else:
            raise ConfigError(
                f"a `{kind}` takes {model.main_input_name}, but must take token ids or images",
                hint=OWN,
            )
    if half is None and seq_len is not None:
        raise ConfigError(f"a `{kind}` takes images instead of tokens", hint="omit --seq-len")
    blocks = _blocks(parts, whole, half, experts, tokens / ran, text)
    idle = [i for i, part in enumerate(parts.blocks, 1) if not blocks[i].flops]
    if idle:
        nbytes = sum(blocks[i].params for i in idle)
        notes.append(
            f"{len(idle)} blocks with {nbytes / 1e9:.3g} B parameters do not run on "
            f"{'images' if half is None else 'token ids'} alone: their time is not counted"
        )
    shape = ModelShape(name or kind, blocks, tokens, whole.hidden, _heads(text), tuple(notes))
    return layout_of(parts, whole.hidden, getattr(text, "vocab_size", None) or 0), shape


def layout_of(parts: Split, hidden: int, vocab: int = 0) -> Layout:
    """Return the parameters of a model that was divided into blocks."""
    blocks = {part.name: {n: tuple(p.shape) for n, p in part.params} for part in parts.blocks}
    root = {name: tuple(p.shape) for name, p in parts.root.params}
    tables, others = set[int](), set[int]()
    for module in parts.root.module.modules():
        own = tables if isinstance(module, nn.Embedding) else others
        own.update(id(p) for p in module.parameters(recurse=False))
    tied = not tables.isdisjoint(others)
    return Layout({ROOT: root, **blocks}, vocab=vocab, hidden=hidden, tied=tied)


def _config(kind: str, config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the config as an object of transformers, and the sizes that transformers has filled in
    because `config` does not set them."""
    if not kind:
        raise ConfigError(
            "the config has no `model_type`",
            hint="give the config.json of a transformers model; or " + OWN,
        )
    transformers: Any = need("transformers", "hf")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"transformers {transformers.__version__} does not know the model type `{kind}`",
            hint="install a newer transformers, or " + OWN,
        )
    try:
        made = transformers.CONFIG_MAPPING[kind].from_dict(
            {k: v for k, v in config.items() if k != "model_type"}
        )
    except FAILURES as cause:
        raise ConfigError(
            f"transformers cannot read the config of a `{kind}`: {_first_line(cause)}",
            hint="give the config.json as it was published",
        ) from cause
    return made, _guessed(kind, config, made)


def _guessed(kind: str, config: Mapping[str, Any], made: Any) -> dict[str, Any]:
    """Return the sizes that transformers has filled in. Raises ConfigError if `config` does not set
    the number of layers, the hidden size or the vocabulary size."""
    text, parts = made.get_text_config(decoder=True), [made.attribute_map]
    inner = [value for value in config.values() if isinstance(value, Mapping)]
    parts += [getattr(getattr(made, k, None), "attribute_map", {}) for k in made.sub_configs]
    guessed: dict[str, Any] = {}
    for what in (*SIZES, *GUESSED):
        names = {what, *KEYS.get(what, ()), *(own[what] for own in parts if what in own)}
        if any(tree.get(key) is not None for tree in (config, *inner) for key in names):
            continue
        # classes of parts of a model fill in vocab_size themselves; vision models have none
        optional = what == "vocab_size" and (inner or hasattr(made, "patch_size"))
        if what in SIZES and hasattr(text, what) and not optional:
            raise ConfigError(
                f"the config of a `{kind}` has none of the keys {', '.join(sorted(names))}",
                hint="give the Hugging Face config.json of the model, which has such a key",
            )
        if isinstance(getattr(text, what, None), int):
            guessed[what] = getattr(text, what)
    heads = getattr(text, "num_attention_heads", 0)
    if guessed.get("num_key_value_heads") == heads:
        guessed.pop("num_key_value_heads", None)  # the default is the number of heads
    whole = guessed.get("head_dim", 0) * heads == getattr(text, "hidden_size", 0)
    # head_dim is the default value, or is not the width of any matrix
    if whole or hasattr(text, "qk_rope_head_dim"):
        guessed.pop("head_dim", None)
    return guessed


def _built(kind: str, config: Mapping[str, Any], made: Any, notes: list[str]) -> Any:
    """Build the model on the device `meta`, in training mode. If transformers lacks the class that
    the config names, choose the class with the most parameters among those that accept the
    config."""
    transformers: Any = importlib.import_module("transformers")
    named = [str(name) for name in config.get("architectures") or ()]
    classes = (getattr(transformers, name, None) for name in named)
    own = next((found for found in classes if found is not None), None)
    if own is not None and getattr(own, "config_class", None) is type(made):
        builds = [own._from_config]
    else:
        order = (*(BOTH if getattr(made, "is_encoder_decoder", False) else ()), *AUTO)
        there = [c for name in order if (c := getattr(transformers, name, None)) is not None]
        builds = [c.from_config for c in there if type(made) in c._model_mapping]
    failure: Exception | None = None
    found: list[nn.Module] = []
    for build in builds:
        for way in ({"attn_implementation": "eager"}, {}):
            try:
                with torch.device("meta"):
                    found.append(build(made, dtype=torch.bfloat16, **way))
                break
            except FAILURES as cause:
                failure = failure or cause
    if found:
        # the largest model has all parts of the model
        model = max(found, key=lambda model: sum(p.numel() for p in model.parameters()))
        if (title := type(model).__name__) not in named:
            listed = ", ".join(named) or "no class"
            notes.append(f"counted as {title} (the config names {listed})")
        return model.train()
    why = "it has no class for it" if failure is None else _first_line(failure)
    raise ConfigError(
        f"transformers cannot build the `{kind}` of this config: {why}", hint=OWN
    ) from failure


def _same(hidden: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """Stand in for the forward of experts, which are counted separately."""
    return hidden * 1


def _expert_modules(block: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield each module that contains all experts of a layer, and the number of experts; 0 if the
    shapes of its matrices do not show this number."""
    inside = set[int]()
    for module in block.modules():
        title = type(module).__name__.lower()
        if id(module) in inside or "expert" not in title or "shared" in title:
            continue
        own = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3]
        rows = [count for count in own if count > 1]
        count = max(rows) if rows else len(module) if isinstance(module, nn.ModuleList) else 0
        if rows or title.endswith("experts"):
            inside.update(id(own) for own in module.modules())
            yield module, count


def _experts(block: nn.Module, text: Any, kind: str) -> Experts:
    """Return the sizes of the experts of a block. Raises ConfigError if the config lacks the number
    of experts that a token uses."""
    holders = list(_expert_modules(block))
    if not holders:
        return Experts()
    # DBRX has a separate config for its MLP
    inner = [value for value in vars(text).values() if hasattr(value, "attribute_map")]

    def stated(name: str) -> int:
        found = (getattr(of, key, None) for key in EXPERT_KEYS[name] for of in (text, *inner))
        return next((value for value in found if isinstance(value, int) and value > 0), 0)

    count = max(own for _, own in holders) or stated("num_experts")
    active = stated("num_experts_per_tok")
    if not 0 < active <= count:
        raise ConfigError(
            f"wrong or missing number of experts: a block of this `{kind}` has"
            f" {count or 'an unknown number'}, and a token uses {active or 'an unknown number'}",
            hint=f"set num_experts_per_tok; or {OWN}",
        )
    params = [p for module, _ in holders for p in module.parameters()]
    matrices = [p for p in params if p.dim() > 1]
    # experts in a list have separate matrices
    listed = any(isinstance(module, nn.ModuleList) for module, _ in holders)
    widths = sum(
        p.shape[-2] / (1 if p.dim() == 3 else count) + p.shape[-1] / (count if listed else 1)
        for p in matrices
    )
    return Experts(
        sum(p.numel() for p in params),
        count,
        active,
        sum(p.numel() for p in matrices) // count,
        widths,
    )


def _count_tokens(kind: str, model: Any, parts: Split, tokens: int) -> Counts:
    """Return the counts of a forward pass over one sample with this number of tokens."""
    with torch.device("meta"):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
    more = {} if getattr(model.config, "use_cache", None) is None else {"use_cache": False}
    return _forward(kind, model, parts, {**inputs, **more})


def _count_image(kind: str, model: Any, parts: Split, made: Any, notes: list[str]) -> Counts:
    """Return the counts of a forward pass over one image."""
    side = getattr(made, "image_size", None)
    if not isinstance(side, int | list | tuple):
        side = 224
        notes.append("images of 224 x 224 (the config does not set their size)")
    height, width = (side, side) if isinstance(side, int) else side
    with torch.device("meta"):
        image = torch.zeros(
            1, getattr(made, "num_channels", 3), height, width, dtype=torch.bfloat16
        )
    return _forward(kind, model, parts, {"pixel_values": image})


def _forward(kind: str, model: Any, parts: Split, inputs: Mapping[str, Any]) -> Counts:
    try:
        with torch.device("meta"):
            return count_forward(model, parts, (), inputs, samples=1, sized=True)
    except FAILURES as cause:
        params = sum(p.numel() for p in model.parameters())
        raise ConfigError(
            f"the forward pass of a `{kind}` ({show_params(params)} parameters) cannot run without"
            f" data: {_first_line(cause)}",
            hint=OWN,
        ) from cause


def _blocks(
    parts: Split,
    whole: Counts,
    half: Counts | None,
    experts: Mapping[str, Experts],
    times: float,
    text: Any,
) -> tuple[BlockShape, ...]:
    """Return the shapes of all blocks.

    Args:
        parts: The blocks of the model.
        whole: The counts of a forward pass.
        half: The counts of a forward pass with half as many tokens as `whole`, or None for images.
        experts: The sizes of the experts of each block, by the name of the block.
        times: The number of tokens of a sample divided by the number of tokens in `whole`.
        text: The config object (of transformers) of the text model.
    """
    heads = _heads(text)
    width = getattr(text, "head_dim", None) or (whole.hidden // heads if heads else 0)
    kv = (getattr(text, "num_key_value_heads", None) or heads) * width
    if latent := getattr(text, "kv_lora_rank", None):
        kv = latent + (getattr(text, "qk_rope_head_dim", None) or 0)

    def grown(of: str, key: str) -> tuple[float, float]:
        """Return two numbers whose sum is the count of a complete sample: the first grows in
        proportion to the number of tokens, the second with its square. `of`: an attribute of
        Counts. `key`: a block."""
        found = getattr(whole, of).get(key, 0.0)
        square = 0.0
        if half is not None:
            square = min(found, max(0.0, 2 * (found - 2 * getattr(half, of).get(key, 0.0))))
        return (found - square) * times, square * times * times

    def block(title: str, key: str, params: int) -> BlockShape:
        products, attention = grown("flops", key)
        own = experts.get(key, Experts())
        # masks and scores grow with t^2; fused attention does not keep them
        inputs, saved = grown("inputs", key)[0], grown("saved", key)[0]
        routed = 2.0 * whole.tokens * times * own.active
        flops, saved = products + attention + routed * own.weights, saved + routed * own.widths
        return BlockShape(
            title,
            params,
            flops,
            saved,
            inputs,
            attention=attention,
            experts=own.params,
            routed=routed * whole.hidden if own.params else 0.0,
            kv=4.0 * whole.tokens * times * kv if attention else 0.0,
            whole=min(saved, 4 * inputs),
            products=saved / 2,
            again=(flops - attention) / 2,
            matrices=own.count,
        )

    first, *layers, last = whole.blocks(parts, block)
    last = replace(last, logits=whole.logits * times, attention=0.0)
    return (replace(first, attention=0.0), *layers, last)


def _heads(text: Any) -> int:
    heads = getattr(text, "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def _first_line(cause: Exception) -> str:
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
