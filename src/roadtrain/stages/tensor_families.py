"""The architectures that tensor parallelism knows: the layers that are split, and their styles
(tensor_styles.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from roadtrain.errors import ConfigError, ModelError
from roadtrain.stages.tensor_styles import Column, LocalHeads, Row, Summed, TensorStyle, Vocabulary

Styles = Mapping[str, TensorStyle]


@dataclass(frozen=True)
class SplitFamily:
    """A family of architectures of transformers.

    models: the names of the models' classes. layers: name of a module's class -> name of a layer
    inside it -> style of the layer. counts: key of the model's config -> words for messages; tp
    must divide the key's value. Subclasses of a named class match, too.
    """

    name: str
    models: tuple[str, ...]
    layers: Mapping[str, Styles]
    counts: Mapping[str, str]


_HEADS = {"num_attention_heads": "attention heads"}
_GROUPED_HEADS = {
    **_HEADS,
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "units of the MLP",
}


def _gated(name: str, prefix: str, more: Styles | None = None) -> SplitFamily:
    """Return the family of an architecture with the layer names of Llama. `more`: further layers of
    each block."""
    layer = {
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column(),
        "self_attn.v_proj": Column(),
        "self_attn.o_proj": Row(),
        "mlp.gate_proj": Column(),
        "mlp.up_proj": Column(),
        "mlp.down_proj": Row(),
        **(more or {}),
    }
    return SplitFamily(
        name,
        (f"{prefix}PreTrainedModel",),
        {
            f"{prefix}DecoderLayer": layer,
            f"{prefix}Model": {"embed_tokens": Vocabulary()},
            f"{prefix}ForCausalLM": {"lm_head": Column(gather=True)},
        },
        _GROUPED_HEADS,
    )


_GPT2_HEAD: Styles = {"lm_head": Column(gather=True)}

FAMILIES = (
    _gated("Llama", "Llama"),
    _gated("Mistral", "Mistral"),
    _gated("Qwen2", "Qwen2"),
    _gated("Qwen3", "Qwen3", {"self_attn.q_norm": Summed(), "self_attn.k_norm": Summed()}),
    SplitFamily(
        "GPT-2",
        ("GPT2PreTrainedModel",),
        {
            "GPT2Block": {
                "attn": LocalHeads("num_heads", "split_size"),
                "attn.c_attn": Column(parts=3),
                "attn.c_proj": Row(),
                "mlp.c_fc": Column(),
                "mlp.c_proj": Row(),
            },
            "GPT2Model": {"wte": Vocabulary()},
            "GPT2LMHeadModel": _GPT2_HEAD,
            "GPT2DoubleHeadsModel": _GPT2_HEAD,
        },
        {**_HEADS, "n_inner": "units of the MLP"},
    ),
    SplitFamily(
        "OPT",
        ("OPTPreTrainedModel",),
        {
            "OPTDecoderLayer": {
                "self_attn": LocalHeads("num_heads"),
                "self_attn.q_proj": Column(),
                "self_attn.k_proj": Column(),
                "self_attn.v_proj": Column(),
                "self_attn.out_proj": Row(),
                "fc1": Column(),
                "fc2": Row(),
            },
            "OPTDecoder": {"embed_tokens": Vocabulary()},
            "OPTForCausalLM": {"lm_head": Column(gather=True)},
        },
        {**_HEADS, "ffn_dim": "units of the MLP"},
    ),
)


def family_plan(model: nn.Module, degree: int) -> dict[str, TensorStyle]:
    """Return layer name -> style for all layers of this stage that are split. Raises ModelError for
    an unknown architecture or unexpected layer names, and ConfigError if `degree` does not divide a
    number in the model's config, such as the number of heads."""
    found = _family(model)
    if found is None:
        raise ModelError(
            f"tp {degree} cannot split a {type(model).__name__}: its layers are not known",
            hint=f"use {', '.join(family.name for family in FAMILIES)} of transformers, or"
            " pass your own plan: {name pattern: style}",
        )
    family, top = found
    _check_counts(family, top, degree)
    return dict(_styles(model, family))


def _family(model: nn.Module) -> tuple[SplitFamily, nn.Module] | None:
    for module in model.modules():
        names = _types(module)
        for family in FAMILIES:
            if not names.isdisjoint(family.models):
                return family, module
    return None


def _types(module: nn.Module) -> set[str]:
    return {
        kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("transformers")
    }


def _check_counts(family: SplitFamily, top: nn.Module, degree: int) -> None:
    for key, words in family.counts.items():
        count = getattr(top.config, key, None)
        if count is not None and count % degree:
            raise ConfigError(
                f"{count} {words} ({key}) cannot be split over tp {degree}",
                hint=f"set tp to a divisor of {count}",
            )


def _styles(model: nn.Module, family: SplitFamily) -> Iterator[tuple[str, TensorStyle]]:
    for name, module in model.named_modules():
        types = _types(module)
        for kind, styles in family.layers.items():
            if kind not in types:
                continue
            for inside, style in styles.items():
                try:
                    module.get_submodule(inside)
                except AttributeError as cause:
                    raise ModelError(
                        f"{name or kind} has no layer {inside!r}, which a {kind} should have",
                        hint="pass your own plan: {name pattern: style}",
                    ) from cause
                yield f"{name}.{inside}" if name else inside, style
