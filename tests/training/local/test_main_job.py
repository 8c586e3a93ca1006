"""The main job in small: the final table of a run, and plain training stopped by the limit."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from roadtrain.config.job import load_job
from roadtrain.errors import BudgetError
from roadtrain.training import placed_job
from roadtrain.training.train import train

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
SMALL = {
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 32,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 2,
    "model.config.num_local_experts": 4,
    "data.seq_len": 16,
    "run.steps": 2,
}


@pytest.fixture
def overrides(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "text").write_text("a line of the text\n" * 500)
    return {**SMALL, "run.dir": str(tmp_path / "run"), "data.paths": [str(tmp_path / "text")]}


def test_the_final_table_reports_memory_traffic_and_the_bottleneck(
    overrides: dict[str, object],
) -> None:
    lines: list[str] = []
    job = load_job(ROOT / "examples" / "moe.toml", {**overrides, "run.memory_limit": "64GiB"})
    train(job, lines.append, "bin/roadtrain")
    text = "\n".join(lines)
    assert "memory: this process gets at most 64.0 GiB, enforced by Linux (RLIMIT_DATA)" in text
    table = dict(line.split("   ", 1) for line in lines if "   " in line)
    rows = {name: " ".join(value.split()) for name, value in table.items()}
    assert rows["steps done"] == "2 of 2"
    # the peak includes earlier tests in this process
    assert re.search("[MG]iB", rows["peak memory of the process, torch and text included"])
    assert "from files" in rows["moved in this run"] and "to files" in rows["moved in this run"]
    assert re.fullmatch(
        r"[\d.]+ \w+: computing [\d.]+ \w+, waiting [\d.]+ \w+; limited by (computing|files|updates)",
        rows["a step took"],
    )
    assert rows["to continue"] == f"bin/roadtrain train {job.run_dir}/job.toml --run.steps 4"
    assert f"rm -r {job.run_dir} removes it" in rows["on disk"]
    assert load_job(job.run_dir / "job.toml").run.memory_limit == "64GiB"


def test_refused_memory_ends_training_with_both_numbers(
    overrides: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(placed_job, "step", refused)
    job = load_job(ROOT / "examples" / "moe.toml", {**overrides, "run.memory_limit": "64GiB"})
    with pytest.raises(BudgetError, match=r"the process holds .* run.memory_limit is 64.0 GiB"):
        train(job, lambda _: None)


def test_plain_training_stops_only_beyond_the_limit(
    overrides: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{key}={value}" for key, value in overrides.items() if key != "data.paths"]
    words.append(f"--data.paths={overrides['data.paths'][0]}")  # type: ignore[index]
    script = ROOT / "examples" / "train_plain.py"
    job = str(ROOT / "examples" / "moe.toml")
    main = runpy.run_path(str(script))["main"]
    assert main(job, *words, "--run.memory_limit=64GiB") == 0
    assert "step 2/2" in capsys.readouterr().out
    more = [*words, "--model.config.intermediate_size=1000000", "--run.memory_limit=800MiB"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, script, job, *more], capture_output=True, text=True, timeout=120, env=env
    )
    assert result.returncode == 3, result.stderr
    assert "stopped by the limit while making the model" in result.stdout
    assert "the limit is 800.0 MiB" in result.stdout
