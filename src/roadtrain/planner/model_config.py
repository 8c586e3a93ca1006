"""The shape of a Hugging Face config: its model is built on `meta` and counted, nothing is
downloaded or filled.

Parameters are those of the modules, each once (tied ones too). FLOPs and activations are those of
two forwards on `meta`, one of twice as many tokens, from which any other length follows: what grows
with the square is attention's scores, of which fused kernels keep nothing, the rest grows with the
tokens. Experts are not run, since which tokens they get is not known: their weights say what a
token's cost.

Assumes the model takes token ids or pictures. Does NOT guess: what transformers does not know, what
a config leaves out that sizes the model, and a forward that needs real data are refused with a
sentence.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roadtrain.config.models import KEYS, BlockShape, ModelShape, chosen_length
from roadtrain.errors import ConfigError
from roadtrain.planner.measure import Counts, counted
from roadtrain.streaming.split import Split, split
from roadtrain.units import show_params

OWN = "--model MODULE:FUNCTION: a function that returns the model (on `meta`) and a batch"
# without which a config says nothing of its size
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
GUESSED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")
ACTIVE = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "top_k_experts",
    "moe_top_k",
    "moe_k",
    "num_selected_experts",
    "top_k",
    "router_top_k",
)
BOTH = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")  # encoders with decoders
ALL = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)
MOST_RUN = 512  # tokens of the longer forward: some models loop over them
FAILURES = (Exception,)  # of transformers, whose configs check themselves by errors of their own


@dataclass(frozen=True)
class Experts:
    """`params` of all `count` experts of a block; a token takes `active` of them, with `weights`
    elements of matrices and `widths` elements of activations each."""

    params: int = 0
    count: int = 1
    active: int = 0
    weights: int = 0
    widths: float = 0


def shape_of_config(
    config: Mapping[str, Any], *, seq_len: int | None = None, name: str = ""
) -> ModelShape:
    """Of the keys of a config.json. `seq_len`: tokens of a sample; None: a stated default
    (`chosen_length`). Raises ConfigError where transformers is missing or does not know the
    model, where a key that sizes it is missing, and where its forward cannot be run without
    data."""
    kind = str(config.get("model_type") or "")
    made, guessed = _config(kind, config)
    text = made.get_text_config(decoder=True)
    default = "(not in the config: transformers' default)"
    notes = [f"{key} {value} {default}" for key, value in guessed.items()]
    if ahead := config.get("num_nextn_predict_layers"):
        notes.append(
            f"{ahead} layer(s) that predict further tokens are not built by transformers and not"
            " counted"
        )
    model = _built(kind, config, made, notes)
    parts = split(model)
    experts = {part.name: _experts(part.module, text, kind) for part in parts.blocks}
    with _still(model):
        if model.main_input_name == "pixel_values":
            whole = _seen(kind, model, parts, made, notes)
            tokens, ran, half = whole.tokens, whole.tokens, None
        elif model.main_input_name == "input_ids":
            longest = getattr(text, "max_position_embeddings", None)
            tokens, said = chosen_length(
                seq_len, longest if isinstance(longest, int) and longest > 0 else None
            )
            notes += said
            ran = min(tokens + tokens % 2, MOST_RUN)
            whole, half = _read(kind, model, parts, ran), _read(kind, model, parts, ran // 2)
        else:
            raise ConfigError(
                f"a `{kind}` takes {model.main_input_name}, neither token ids nor pictures",
                hint=OWN,
            )
    if half is None and seq_len is not None:
        raise ConfigError(
            f"a `{kind}` takes pictures, its samples have no length", hint="leave --seq-len out"
        )
    blocks = _blocks(parts, whole, half, experts, tokens / ran, text)
    idle = [i for i, part in enumerate(parts.blocks, 1) if not blocks[i].flops]
    if idle:
        nbytes = sum(blocks[i].params for i in idle)
        notes.append(
            f"{len(idle)} blocks with {nbytes / 1e9:.3g} B parameters do not run on "
            f"{'pictures' if half is None else 'token ids'} alone: their time is not counted"
        )
    heads = getattr(text, "num_attention_heads", None) or 0
    return ModelShape(
        name or kind,
        blocks,
        tokens,
        whole.hidden,
        heads if isinstance(heads, int) else 0,
        tuple(notes),
    )


def _config(kind: str, config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """transformers' own config, and of GUESSED what it fills in for a key that is not given."""
    if not kind:
        raise ConfigError(
            "the config has no `model_type`",
            hint="the config.json of a transformers model; or " + OWN,
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as cause:
        raise ConfigError(
            f"the parameters of a `{kind}` cannot be counted: transformers is not installed",
            hint="pip install 'roadtrain[hf]', or " + OWN,
        ) from cause
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"transformers {transformers.__version__} does not know the model type `{kind}`",
            hint="a newer transformers, or " + OWN,
        )
    try:
        made = transformers.CONFIG_MAPPING[kind].from_dict(
            {k: v for k, v in config.items() if k != "model_type"}
        )
    except FAILURES as cause:
        raise ConfigError(
            f"transformers cannot read the config of a `{kind}`: {_line(cause)}",
            hint="the config.json as it was published",
        ) from cause
    return made, _guessed(kind, config, made)


def _guessed(kind: str, config: Mapping[str, Any], made: Any) -> dict[str, Any]:
    """Sizes that transformers' config has and the keys that are given do not say. Raises
    ConfigError for one without which they say nothing of the model's size."""
    text, parts = made.get_text_config(decoder=True), [made.attribute_map]
    inner = [value for value in config.values() if isinstance(value, Mapping)]
    for key in made.sub_configs:
        parts.append(getattr(getattr(made, key, None), "attribute_map", {}))
    guessed: dict[str, Any] = {}
    for what in (*SIZES, *GUESSED):
        names = {what, *KEYS.get(what, ()), *(own[what] for own in parts if what in own)}
        if any(tree.get(key) is not None for tree in (config, *inner) for key in names):
            continue
        # one of a part of the model its own class fills in; what sees pictures has none
        optional = what == "vocab_size" and (inner or hasattr(made, "patch_size"))
        if what in SIZES and hasattr(text, what) and not optional:
            raise ConfigError(
                f"the config of a `{kind}` has none of {', '.join(sorted(names))}",
                hint="a Hugging Face config.json of the model has them",
            )
        if isinstance(getattr(text, what, None), int):
            guessed[what] = getattr(text, what)
    heads = getattr(text, "num_attention_heads", 0)
    if guessed.get("num_key_value_heads") == heads:
        guessed.pop("num_key_value_heads", None)  # as many as heads: what leaving it out means
    whole = guessed.get("head_dim", 0) * heads == getattr(text, "hidden_size", 0)
    # what leaving it out means, or no width of any matrix
    if whole or hasattr(text, "qk_rope_head_dim"):
        guessed.pop("head_dim", None)
    return guessed


def _built(kind: str, config: Mapping[str, Any], made: Any, notes: list[str]) -> Any:
    """The model on `meta`, in training mode, of the class that the config names, else of the one
    with most parameters that takes it."""
    transformers: Any = importlib.import_module("transformers")
    named = [str(one) for one in config.get("architectures") or ()]
    classes = (getattr(transformers, name, None) for name in named)
    own = next((found for found in classes if found is not None), None)
    if own is not None and getattr(own, "config_class", None) is type(made):
        builds = [own._from_config]
    else:
        order = (*(BOTH if getattr(made, "is_encoder_decoder", False) else ()), *AUTO)
        known = [one for name in order if (one := getattr(transformers, name, None)) is not None]
        builds = [one.from_config for one in known if type(made) in one._model_mapping]
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
        # what has all parts
        model = max(found, key=lambda one: sum(p.numel() for p in one.parameters()))
        if (title := type(model).__name__) not in named:
            said = ", ".join(named) or "no class"
            notes.append(f"counted as {title} (the config names {said})")
        return model.train()
    why = "there is no model of it" if failure is None else _line(failure)
    raise ConfigError(
        f"transformers cannot build the `{kind}` of this config: {why}", hint=OWN
    ) from failure


class _Answers(TorchDispatchMode):
    """On `meta` there are no values; where a model asks whether all of its mask is 1, it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Experts release what they are given meanwhile."""

    def same(hidden: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return hidden * 1

    stilled: list[Any] = [module for module, _ in _holders(model)]
    for module in stilled:
        module.forward = same
    try:
        yield
    finally:
        for module in stilled:
            del module.forward


def _holders(block: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Modules with the matrices of all experts, and how many experts these say that there are
    (0: nothing)."""
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
    """Raises ConfigError where the config does not say how many experts a token takes."""
    holders = list(_holders(block))
    if not holders:
        return Experts()
    # DBRX has one for its MLP
    inner = [value for value in vars(text).values() if hasattr(value, "attribute_map")]

    def said(keys: Sequence[str]) -> int:
        found = (getattr(of, key, None) for key in keys for of in (text, *inner))
        return next((value for value in found if isinstance(value, int) and value > 0), 0)

    count, active = max(own for _, own in holders) or said(ALL), said(ACTIVE)
    if not 0 < active <= count:
        raise ConfigError(
            f"a block of this `{kind}` has {count or 'some'} experts, and of these a token takes "
            f"{active or 'who knows how many'}",
            hint=f"give {ACTIVE[0]}; or {OWN}",
        )
    params = [p for module, _ in holders for p in module.parameters()]
    matrices = [p for p in params if p.dim() > 1]
    # each with matrices of its own
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


def _read(kind: str, model: Any, parts: Split, tokens: int) -> Counts:
    """Of a forward of one sample of so many tokens."""
    with torch.device("meta"):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(model.config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = ids
    more = {} if getattr(model.config, "use_cache", None) is None else {"use_cache": False}
    return _forward(kind, model, parts, {**given, **more})


def _seen(kind: str, model: Any, parts: Split, made: Any, notes: list[str]) -> Counts:
    """Of a forward of one picture."""
    side = getattr(made, "image_size", None)
    if not isinstance(side, int | list | tuple):
        side = 224
        notes.append("pictures of 224 x 224 (the config does not say)")
    height, width = (side, side) if isinstance(side, int) else side
    with torch.device("meta"):
        picture = torch.zeros(
            1, getattr(made, "num_channels", 3), height, width, dtype=torch.bfloat16
        )
    return _forward(kind, model, parts, {"pixel_values": picture})


def _forward(kind: str, model: Any, parts: Split, given: Mapping[str, Any]) -> Counts:
    try:
        with _Answers(), torch.device("meta"):  # type: ignore[no-untyped-call]
            return counted(model, parts, (), given, samples=1, sized=True)
    except FAILURES as cause:
        params = sum(p.numel() for p in model.parameters())
        raise ConfigError(
            f"the forward of a `{kind}` ({show_params(params)} parameters) cannot be run without"
            f" data: {_line(cause)}",
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
    """`whole`, `half`: counts of so many tokens and of half as many; a sample has `times` as
    many."""
    heads = getattr(text, "num_attention_heads", None) or 0
    heads = heads if isinstance(heads, int) else 0
    width = getattr(text, "head_dim", None) or (whole.hidden // heads if heads else 0)
    kv = (getattr(text, "num_key_value_heads", None) or heads) * width
    if latent := getattr(text, "kv_lora_rank", None):
        kv = latent + (getattr(text, "qk_rope_head_dim", None) or 0)

    def grown(of: str, key: str) -> tuple[float, float]:
        """What of a sample grows with its tokens, and what with their square: of a t + b t t."""
        found = getattr(whole, of).get(key, 0.0)
        square = 0.0
        if half is not None:
            square = min(found, max(0.0, 2 * (found - 2 * getattr(half, of).get(key, 0.0))))
        return (found - square) * times, square * times * times

    def block(title: str, key: str, params: int) -> BlockShape:
        products, attention = grown("flops", key)
        own = experts.get(key, Experts())
        # masks and scores: not where it is fused
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


def _line(cause: Exception) -> str:
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
