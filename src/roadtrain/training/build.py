"""The text, config, model, optimizer and loss of a job, built with torch and transformers.

The model must be a causal language model of `transformers`. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

from roadtrain.config.job import Job
from roadtrain.config.job_model import config_of, with_vocabulary
from roadtrain.device.choice import own_device
from roadtrain.environment import need
from roadtrain.errors import ConfigError
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.options.names import did_you_mean
from roadtrain.training.data import Tokens
from roadtrain.training.progress import Report

# keys that transformers accepts, but does not list
_OLD_CONFIG_KEYS = {"rope_theta", "rope_scaling", "torch_dtype", "bos_token_id", "eos_token_id"}


def prepared(job: Job, report: Report) -> tuple[Job, Tokens, torch.device]:
    """Return the job (with a vocabulary size), its text as tokens, and the device to train on.

    Raises ConfigError.
    """
    tokens = Tokens(job.data.paths, job.data.tokenizer, job.data.held_out, job.run.seed)
    report(
        f"data: {len(tokens.train):,} tokens of {len(tokens.files):,} files,"
        f" {len(tokens.held_out):,} held out"
    )
    job = fitted(job, tokens)
    return job, tokens, own_device(job.run.device or None, report)


def fitted(job: Job, tokens: Tokens) -> Job:
    """Return `job`, with the vocabulary size of `tokens` if it has none.

    Raises ConfigError if the text does not fit the model.
    """
    job = with_vocabulary(job, tokens.vocab_size)
    config = build_config(job).get_text_config(decoder=True)
    places = getattr(config, "max_position_embeddings", None) or job.data.seq_len
    if config.vocab_size < tokens.vocab_size or places < job.data.seq_len:
        raise ConfigError(
            f"the model has a vocabulary of {config.vocab_size} and {places} positions, but the"
            f" data needs a vocabulary of {tokens.vocab_size} and {job.data.seq_len} positions",
            hint="raise model.config.vocab_size or max_position_embeddings, or lower data.seq_len",
        )
    return job


def build_config(job: Job) -> Any:
    """Return the transformers config of `job`.

    Raises ConfigError if transformers does not accept the config, or the model is not a causal
    language model.
    """
    transformers = need("transformers", "hf")
    if job.model.pretrained:
        if not os.path.isfile(os.path.join(job.model.pretrained, "config.json")):
            raise ConfigError(f"model.pretrained: no config.json in {job.model.pretrained!r}")
        return _causal(transformers.AutoConfig.from_pretrained, job.model.pretrained)
    own = config_of(job)
    kind = own.pop("model_type")
    kinds = transformers.CONFIG_MAPPING.keys()
    if kind not in kinds:
        raise ConfigError(
            f"transformers has no model type {kind!r}", hint=did_you_mean(str(kind), kinds)
        )
    plain = transformers.AutoConfig.for_model(kind)
    keys = {*plain.to_dict(), *plain.attribute_map, *_OLD_CONFIG_KEYS}
    unknown = sorted(own.keys() - keys)
    for key in unknown:  # published configs have keys of other libraries, but no misspelled ones
        if meant := did_you_mean(key, keys, least=0.9):
            raise ConfigError(f"unknown key `model.config.{key}`", hint=meant)
    if unknown:
        _note(", ".join(unknown))
    return _causal(transformers.AutoConfig.for_model, kind, **own)


@functools.cache
def _note(keys: str) -> None:
    print(f"model.config: passed on, though transformers lists no {keys}", file=sys.stderr)


def _causal(make: Callable[..., Any], name: str, **own: Any) -> Any:
    try:
        config = make(name, **own)
    except Exception as cause:  # the configs of transformers raise errors of various classes
        why = " ".join(str(cause).split())
        raise ConfigError(f"transformers does not accept the config of {name}: {why}") from cause
    transformers = need("transformers", "hf")
    both_ways = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    masked = both_ways and not getattr(config, "is_decoder", False)
    if masked or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"`{config.model_type}` is not a causal language model, which `train` needs",
            hint="use place() in a script of your own for any other model",
        )
    return config


def build_model(job: Job, device: str) -> torch.nn.Module:
    """Build the model in fp32 on `device`, in training mode. On device "meta", the model takes no
    memory."""
    config, auto = build_config(job), need("transformers", "hf").AutoModelForCausalLM
    with torch.device(device):
        model: torch.nn.Module = auto.from_config(config, dtype=torch.float32)
    return model.train()


def build_optimizer(job: Job, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build the torch optimizer of the job. Raises ConfigError for an unknown class or argument."""
    o = job.optimizer
    cls = named(OPTIMIZERS[o.name].path if o.name in OPTIMIZERS else o.name, "optimizer.name")
    own = {name: getattr(o, name) for name in ("weight_decay", "betas", "eps", "momentum")}
    options = {name: value for name, value in (own | o.options).items() if value is not None}
    try:
        optimizer: torch.optim.Optimizer = cls(params, lr=o.lr, **options)
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"optimizer {o.name}: {cause}") from cause
    return optimizer


def named(text: str, where: str) -> Any:
    """Import and return the object that `text` names as MODULE:NAME.

    Raises ConfigError. Its message begins with `where`: the key or argument that contains `text`,
    such as "optimizer.name".
    """
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as cause:
        raise ConfigError(f"{where}: {cause}", hint="write MODULE:NAME, importable here") from cause


def token_loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of a language model's output. `y`: for each position, the id of
    the next token."""
    logits_BTV: torch.Tensor = output.logits
    return functional.cross_entropy(logits_BTV.float().flatten(0, 1), y.flatten())
