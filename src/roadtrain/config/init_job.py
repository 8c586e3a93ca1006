"""`roadtrain init`: write a job file with a comment above each key. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from roadtrain.config.job import Job, make_job
from roadtrain.config.job_model import replaced
from roadtrain.config.models import KEYS, SMALL, TRANSFORMERS, published_config, read_config
from roadtrain.errors import ConfigError
from roadtrain.options.names import did_you_mean
from roadtrain.options.schema import keys_of, meaning_of
from roadtrain.storage.direct import replace_file

# keys of a config.json that describe the files beside it, or that the job sets itself
LEFT_OUT = ("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path")


def command(model: str = "", out: str = "job.toml", report: Callable[[str], None] = print) -> int:
    """Write a commented job for MODEL: a Hugging Face folder or config.json, or a published shape
    such as GPT-2. Without MODEL, the job trains a small byte-level model.

    Args:
        out: the file to write, which must not exist (default: job.toml)
    """
    path, tree = Path(out), _model(model)
    if path.exists():
        raise ConfigError(f"{out} exists", hint="name another file with --out")
    config = tree["model"].get("config", {}) or _config_of(Path(model))
    lengths = (config.get(key) for key in KEYS["max_position_embeddings"])
    longest = min(filter(None, lengths), default=256)
    run = {"dir": f"runs/{path.stem}", "steps": 100, "report_to": []}
    tree["data"] |= {"paths": Job.model_fields["data"].default.paths, "seq_len": min(256, longest)}
    tree["data"] |= {"batch_size": 2, "tokenizer": tree["data"].get("tokenizer", "bytes")}
    rate = 1e-5 if "pretrained" in tree["model"] else 1e-3
    tree["optimizer"] = {"name": "adamw", "lr": rate, "warmup_steps": 10, "clip_norm": 1.0}
    tree["store"] = {"files": ["{run}/store"]}
    tree = {"run": run, **tree}
    make_job(tree, out)
    replace_file(path, _commented(tree).encode(), "writing")
    report(f"wrote {out}; train it with: roadtrain train {out}")
    return 0


def _model(model: str) -> dict[str, dict[str, Any]]:
    """Return the [model] and [data] tables for MODEL."""
    path, data = Path(model), dict[str, Any]()
    if not model or model in TRANSFORMERS:
        own = _published(model) if model else SMALL
        return {"model": {"dtype": "fp32", "config": own}, "data": data}
    config = _config_of(path)
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer.json").is_file():
        data["tokenizer"] = str(folder / "tokenizer.json")
    if path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("*.bin"))):
        return {"model": {"pretrained": model, "dtype": "fp32"}, "data": data}
    # TOML has no null; config_of() puts it back
    own = replaced({k: v for k, v in config.items() if k not in LEFT_OUT}, None, "null")
    return {"model": {"dtype": "fp32", "config": own}, "data": data}


def _config_of(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{path} is no folder with a config.json, no config.json and no published shape",
            hint=did_you_mean(str(path), TRANSFORMERS) or "roadtrain init writes a small model",
        )
    config = read_config(file)
    if "model_type" not in config:
        raise ConfigError(f"{file} has no model_type, so it is no config of transformers")
    return config


def _published(name: str) -> dict[str, Any]:
    """Return the transformers config of a published shape."""
    config = published_config(name)
    if config["model_type"] != "llama" and not name.startswith("GPT-2"):
        raise ConfigError(
            f"{name} is a shape for plans: a job needs the config of its transformers model",
            hint="pass the model's folder or config.json",
        )
    return config


def _commented(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the tables, with the description of each key from its declaration."""
    lines = ["# A job for `roadtrain train`; `roadtrain train --help` lists all keys."]
    for section, table in tree.items():
        lines += ["", f"[{section}]"]
        keys, inner = keys_of(Job.model_fields[section].annotation), list[str]()
        for key, value in table.items():
            comment = f"# {meaning_of(keys[key])}"
            if isinstance(value, Mapping):  # a table follows the plain keys of its section
                inner += ["", comment, tomli_w.dumps({section: {key: value}}).rstrip()]
            else:
                lines += [comment, tomli_w.dumps({key: value}).rstrip()]
        lines += inner
    return "\n".join([*lines, ""])
