"""`roadtrain init`: jobs that load, with the declared description above each key."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from roadtrain import cli
from roadtrain.config.init_job import command
from roadtrain.config.job import all_keys, load_job
from roadtrain.config.job_model import config_of, with_vocabulary
from roadtrain.config.models import named_shape
from roadtrain.errors import ConfigError
from roadtrain.training.build import build_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 300,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}


def written(model: str, out: Path) -> str:
    assert command(model, str(out), lambda line: None) == 0
    return out.read_text()


def folder(path: Path, weights: bool) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.mark.parametrize("model", ["", "GPT-2", "LLaMA-2-70B", "folder", "folder/config.json"])
def test_each_key_has_its_description(model: str, tmp_path: Path) -> None:
    if model.startswith("folder"):
        folder(tmp_path / "folder", weights=False)
        model = str(tmp_path / model)
    text = written(model, tmp_path / "mine.toml")
    job = load_job(tmp_path / "mine.toml")
    assert job.run.dir == "runs/mine"
    meanings = {key: meaning for key, _, meaning in all_keys()}
    lines = text.splitlines()
    for section, table in tomllib.loads(text).items():
        for key, value in table.items():
            at = f"[{section}.{key}]" if isinstance(value, dict) else f"{key} ="
            number = next(i for i, line in enumerate(lines) if line.startswith(at))
            assert lines[number - 1] == f"# {meanings[f'{section}.{key}']}"


def test_the_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    written("LLaMA-2-70B", tmp_path / "a.toml")
    config = load_job(tmp_path / "a.toml").model.config
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (80, 8)
    assert named_shape("LLaMA-2-70B").hidden == config["hidden_size"]
    home = folder(tmp_path / "model", weights=False)
    written(str(home), tmp_path / "b.toml")
    job = load_job(tmp_path / "b.toml")
    assert job.model.config["vocab_size"] == 300 and "torch_dtype" not in job.model.config
    assert job.data.seq_len == 64 and job.data.tokenizer == str(home / "tokenizer.json")


def test_tables_and_nulls_of_a_config(tmp_path: Path) -> None:
    """TOML lacks null, but a missing key is transformers' default, such as a sliding window of 4096
    (Rule 6)."""
    scaling = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": None}
    config = {**CONFIG, "model_type": "mistral", "rope_scaling": scaling, "sliding_window": None}
    source = tmp_path / "config.json"
    source.write_text(json.dumps(config))
    written(str(source), tmp_path / "a.toml")
    job = load_job(tmp_path / "a.toml")
    assert job.model.config["sliding_window"] == "null"
    assert config_of(job)["rope_scaling"] == scaling
    assert build_config(job).sliding_window is None


def test_keys_that_transformers_does_not_list(tmp_path: Path, capsys: Any) -> None:
    """Published configs have keys that only a model's code reads, or nobody; a misspelled key is
    refused (Rule 6)."""
    more = {"use_mrope": False, "aux_loss_alpha": 0.5, "eos_token_id": [1, 2]}
    source = tmp_path / "config.json"
    source.write_text(json.dumps(CONFIG | more | {"x": [1, None], "y": {"null": 1}}))
    written(str(source), tmp_path / "a.toml")
    config = build_config(load_job(tmp_path / "a.toml"))
    assert {key: getattr(config, key) for key in more} == more
    assert config.x == [1, None] and config.y == {"null": 1}
    assert "aux_loss_alpha, use_mrope, x, y" in capsys.readouterr().err
    source.write_text(json.dumps(CONFIG | {"num_hiden_layers": 3}))
    written(str(source), tmp_path / "b.toml")
    with pytest.raises(ConfigError, match="num_hiden_layers`\nhint: did you mean `num_hidden_lay"):
        build_config(load_job(tmp_path / "b.toml"))


def test_infinity_in_a_list(tmp_path: Path) -> None:
    """transformers 4 and 5 write it in two ways; the run's own job.toml keeps it."""
    sizes = {"num_heads": 8, "head_dim": 8, "vocab_size": 300, "num_hidden_layers": 2}
    for text in ("Infinity", '{"__float__": "Infinity"}'):
        config = json.dumps({"model_type": "mamba2", "hidden_size": 32, **sizes})
        (tmp_path / "config.json").write_text(f'{config[:-1]}, "time_step_limit": [0.0, {text}]}}')
        (tmp_path / "a.toml").unlink(missing_ok=True)
        written(str(tmp_path / "config.json"), tmp_path / "a.toml")
        job = load_job(tmp_path / "a.toml")
        (tmp_path / "again.toml").write_text(job.to_toml())
        limit = build_config(load_job(tmp_path / "again.toml")).time_step_limit
        assert list(limit) == [0.0, math.inf]


@pytest.mark.parametrize("kind", ["bert", "roberta", "vit"])
def test_models_that_see_the_next_token_are_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 32}))
    written(str(tmp_path / "config.json"), tmp_path / "a.toml")
    with pytest.raises(ConfigError, match=f"`{kind}` is not a causal language model"):
        build_config(load_job(tmp_path / "a.toml"))


def test_the_vocabulary_of_a_model_with_images_is_that_of_its_text(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"vocab_size": 300, "hidden_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    written(str(tmp_path / "config.json"), tmp_path / "a.toml")
    job = load_job(tmp_path / "a.toml")
    assert with_vocabulary(job) == job
    assert build_config(job).get_text_config().vocab_size == 300


def test_weights_that_cannot_be_read_are_not_replaced_by_random_values(tmp_path: Path) -> None:
    home = folder(tmp_path / "model", weights=False)  # Rule 6
    (home / "pytorch_model.bin").write_bytes(b"")
    written(str(home), tmp_path / "a.toml")
    assert load_job(tmp_path / "a.toml").model.pretrained == str(home)  # `train` refuses it


def test_a_folder_with_weights_is_fine_tuned(tmp_path: Path) -> None:
    home = folder(tmp_path / "model", weights=True)
    (home / "config.json").write_text(json.dumps({**CONFIG, "max_seq_len": None}))
    written(str(home), tmp_path / "a.toml")
    job = load_job(tmp_path / "a.toml")
    assert job.model.pretrained == str(home) and not job.model.config
    assert job.optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("GPT-3", "did you mean|no folder"),
        ("OPT-125M", "is a shape for plans"),
        ("nowhere", "no folder with a config.json"),
        ("bad.json", "cannot be parsed as JSON"),
        ("list.json", "is not a model.s config"),
    ],
)
def test_other_models_are_refused(
    model: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{")
    Path("list.json").write_text("[]")
    with pytest.raises(ConfigError, match=words):
        command(model, "job.toml")
    assert not Path("job.toml").exists()


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.toml"
    assert cli.main(["init", "--out", str(out)]) == 0
    before = out.read_text()
    assert cli.main(["init", "GPT-2", "--out", str(out)]) == 2
    assert out.read_text() == before and "exists" in capsys.readouterr().err
