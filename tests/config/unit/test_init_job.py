"""`roadtrain init`: jobs that load, with the declared description above each key."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from roadtrain import cli
from roadtrain.config.init_job import command
from roadtrain.config.job import all_keys, load_job
from roadtrain.config.job_model import config_of
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
