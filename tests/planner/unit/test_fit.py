"""`roadtrain fit`: models and machines, rows that fit and do not, changes, commands, and the table
of the README. Nothing here trains."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.planner.hardware_table import hardware_table
from roadtrain import cli
from roadtrain.config.job import load_job, parse_overrides
from roadtrain.errors import ConfigError
from roadtrain.options.budgets import LEAST_ACTIVATIONS
from roadtrain.planner import fit_inputs
from roadtrain.planner.fit import (
    Ask,
    Fitting,
    best_of,
    command,
    command_of,
    fit,
    speed,
)
from roadtrain.planner.fit_inputs import Machine, machine_of, model_of
from roadtrain.planner.process_memory import PlacedLayout, Work, kept_inputs, process_memory
from roadtrain.units import GIB, MIB

ROOT = Path(__file__).parents[3]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
}
BIG = Machine("a big machine", 100.0 * GIB, disk=1000.0 * GIB)


def silent(line: str) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_config_is_enough_and_torch_is_not_imported(folder: Path) -> None:
    """Measured as a user does, with the start of the interpreter."""
    code = "import sys; from roadtrain.cli import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code or 10 * bool({'torch', 'transformers', 'numba'} & sys.modules.keys()))"
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - begin < 60  # 1 s on an idle machine; others may compute here
    assert "LoRA, rank 16" in done.stdout and "not measured" in done.stdout


def test_json_has_the_bytes_and_the_commands(folder: Path, capsys: Any) -> None:
    assert cli.main(["fit", str(folder), "--json", "-", "--batch", "2"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["params"] == 5_590_272 and tree["batch"] == 2 and tree["tokens"] == 1024
    assert [row["state"] for row in tree["rows"]] == ["RAM", "SSDs", "server"] * 2
    row = tree["rows"][tree["best"]]
    assert row["host_bytes"] == sum(row["host"].values()) and row["fits"]
    path = folder / "answer.json"
    assert cli.main(["fit", str(folder), "--json", str(path)]) == 0
    assert json.loads(path.read_text())["schema"] == 1


def test_the_command_runs_with_the_budget_that_was_counted(folder: Path) -> None:  # Rule 4
    """`train` accepts every key of the command, and its budget is the estimate's."""
    model = model_of(str(folder), 256, silent)
    rows, _ = fit(model, BIG, batch=2)
    for row in rows[:2]:
        init, _, train = command_of(row, BIG).partition(" && ")
        assert init == f"roadtrain init {folder / 'config.json'} --out job.toml"
        job = folder / "job.toml"
        job.write_text("[model]\nconfig = { model_type = 'llama' }\n")
        made = load_job(job, parse_overrides(shlex.split(train)[3:]))
        assert (made.data.seq_len, made.data.batch_size) == (256, 2)
        assert made.budget.host == f"{row.host_budget // MIB}MiB"
        assert bool(made.store.files) == (row.state == "SSDs")


def test_the_same_buffers_as_the_run() -> None:  # Rule 7
    """The least budget is accepted by `derive`, and half a MiB less is not."""
    model = model_of("GPT-2", 128, silent)
    placed, work = PlacedLayout(model.layout), Work(1, 128)
    least = placed.budgets(work, "SSDs", 1 << 50).least_bytes
    assert placed.budgets(work, "SSDs", least).total <= least
    with pytest.raises(Exception, match="needs at least"):
        placed.budgets(work, "SSDs", least - MIB // 2)
    # in RAM there is no file for inputs of blocks: the least budget holds all of them
    work = Work(64, 128)
    kept = kept_inputs(placed, work)
    whole = placed.budgets(work, "RAM", 1 << 50)
    found = placed.budgets(work, "RAM", placed.least_budget(work, "RAM", kept, whole))
    assert kept > LEAST_ACTIVATIONS and found.worker.activation_bytes >= kept


def test_host_memory_is_not_counted_twice() -> None:
    model = model_of("GPT-2", 128, silent)
    on_cpu = Fitting(BIG).evaluate(Ask(model, 1, "fp32", "adamw"), "SSDs")
    assert not on_cpu.memory.device and on_cpu.device_budget is None
    assert "temporary tensors" in on_cpu.memory.host
    gpu = machine_of("RTX 4090", "64GB", "2x7GB/s,2TB")
    on_gpu = Fitting(gpu).evaluate(Ask(model, 1, "fp32", "adamw"), "SSDs")
    assert "temporary tensors" in on_gpu.memory.device
    assert "temporary tensors" not in on_gpu.memory.host


def test_more_of_anything_needs_no_less_memory() -> None:
    model = model_of("Qwen2.5-0.5B", 256, silent)
    base = Ask(model, 1, "fp32", "adamw")

    def host(ask: Ask, state: str = "SSDs") -> float:
        return Fitting(BIG).evaluate(ask, state).least

    more = Ask(model, 4, "fp32", "adamw")
    longer = Ask(model.with_tokens(1024), 1, "fp32", "adamw")
    assert host(base) < host(more) and host(base) < host(longer)
    assert host(base) < host(base, "RAM")
    assert host(Ask(model, 1, "bf16", "adamw")) < host(base)
    assert host(Ask(model, 1, "fp32", "adamw", rank=8), "RAM") < host(base, "RAM")
    assert host(Ask(model, 1, "fp32", "sgd"), "RAM") < host(base, "RAM")


def test_lora_counts_adapters_and_frozen_weights() -> None:
    model = model_of("GPT-2", 128, silent)
    full, lora = PlacedLayout(model.layout), PlacedLayout(model.layout, rank=16)
    # c_attn, c_proj, c_fc, c_proj of 12 layers, each with (in + out) x 16
    adapters = 12 * 16 * ((768 + 2304) + (768 + 768) + (768 + 3072) * 2)
    assert lora.params(trained=True) == adapters
    assert lora.params() == full.params() + adapters and full.params(trained=True) == full.params()
    assert lora.file_bytes < full.file_bytes / 5


def test_what_lacks_and_the_smallest_change() -> None:
    model = model_of("Qwen2.5-0.5B", 2048, silent)
    small = Machine("a small machine", 7.0 * GIB, disk=100.0 * GIB)
    rows, _ = fit(model, small, batch=4)
    ram, ssds = rows[:2]
    assert "more host memory" in ram.change and "--batch" not in ram.change
    lacking = dict(ssds.lacking)["host memory"]
    assert lacking > 0 and ssds.change.endswith("or --batch 1")
    enough = Machine("enough", small.ram + lacking + 1, disk=small.disk)
    assert not Fitting(enough).evaluate(ssds.ask, "SSDs").lacking
    assert fit(model, small, batch=1)[0][1].lacking == ()
    no_disk = Machine("no disk", 100.0 * GIB, disk=1.0 * GIB)
    assert "more disk" in fit(model, no_disk)[0][1].change
    tiny = Machine("a tiny machine", 0.5 * GIB)
    assert best_of(fit(model, tiny)[0]) is None


def test_devices_and_machines() -> None:
    machine = machine_of("NVIDIA GeForce RTX 4090", "64GB", "2x7GB/s,2TB")
    assert machine.device == "RTX-4090" and machine.device_bytes == 24 * GIB
    assert (machine.ssds, machine.ssd_rate, machine.disk) == (2, 14e9, 4e12)
    assert machine_of("cpu", "16GB", "").device == "" and machine_of("", "", "4TB").disk == 4e12
    for device, message, hint in (
        ("RTX 4091", "not in the device catalogue", "did you mean `RTX-4090`"),
        ("A100", "could be several devices", "A100-40GB, A100-80GB"),
        ("abacus", "not in the device catalogue", ""),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            machine_of(device, "64GB", "")
        assert hint in caught.value.hint
    with pytest.raises(ConfigError, match="--ram 8 is 8 bytes"):
        machine_of("", "8", "")
    with pytest.raises(ConfigError, match="--ssd 'fast' is not"):
        machine_of("", "", "fast")


def test_a_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_inputs, "control_group_limit", lambda: 300 * MIB)
    machine = fit_inputs.this_machine()
    assert machine.ram == 300 * MIB and "300.0 MiB" in machine.notes[0]


def _write(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    at, header = 0, {}
    for name, shape in tensors.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def test_headers_of_safetensors(tmp_path: Path) -> None:
    tensors: dict[str, tuple[int, ...]] = {"embed.weight": (1000, 64)}
    tensors |= {f"layers.{i}.w.weight": (64, 64) for i in range(3)}
    _write(tmp_path / "model.safetensors", tensors)
    lines: list[str] = []
    bare = model_of(str(tmp_path), 128, lines.append)
    assert not bare.pretrained and list(bare.layout.blocks)[1:] == [f"layers.{i}" for i in range(3)]
    assert model_of(str(tmp_path / "model.safetensors"), 128, silent).layout == bare.layout
    unknown = {"model_type": "unheard_of", "max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps(unknown))
    named = model_of(str(tmp_path), None, lines.append)
    assert any("read from the headers" in line for line in lines)  # Rule 6
    assert named.shape.tokens == 99 and named.layout == bare.layout
    (tmp_path / "model.safetensors").write_bytes(b"12345678garbage")
    with pytest.raises(Exception, match="not safetensors"):
        model_of(str(tmp_path), None, silent)


def test_wrong_models_and_options(folder: Path) -> None:
    for arguments, message in (
        (["LLaMA-8B"], "no model is called"),
        ([str(folder / "absent.json")], "cannot read"),
        ([str(folder), "--seq-len", "4096"], "the model allows 1 to 1024"),
        ([str(folder), "--dtype", "bf17"], "unknown dtype `bf17`"),
        ([str(folder), "--optimizer", "adamx"], "unknown optimizer `adamx`"),
        ([str(folder), "--batch", "0"], "--batch is 0"),
        (["math:sqrt"], "does not return a model"),
    ):
        words, keywords = cli.parse("fit", arguments)
        with pytest.raises(ConfigError, match=message):
            command(*words, **keywords)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is not a model's config"):
        model_of(str(folder), None, silent)


def test_tokens_per_second_only_where_rates_were_measured(tmp_path: Path) -> None:
    text = """
name = "here"
measured = ["hosts.here.device"]
[[hosts]]
name = "here"
memory = "64GB"
device = { flops = "100TFLOP/s", memory = "24GB", copy = "20GB/s" }
ssds = [{ read = "3GB/s", write = "2GB/s", capacity = "2TB" }]
"""
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    model = model_of("GPT-2", 512, silent)
    rows, _ = fit(model, BIG, batch=4)
    ram, ssds, server, lora, *_ = (speed(row, str(path)) for row in rows)
    assert ram is not None and ssds is not None and 0 < ssds[0] < ssds[1] and ssds[0] <= ram[0]
    assert server is None and lora is None
    path.write_text(text.replace('measured = ["hosts.here.device"]', ""))
    assert speed(rows[0], str(path)) is None


def test_prediction_of_a_process_has_all_parts() -> None:
    model = model_of("GPT-2", 1024, silent)
    placed, work = PlacedLayout(model.layout), Work(1, 1024)
    memory = process_memory(placed, work, placed.budgets(work, "RAM", 8 * GIB))
    # the loss of 1,024 tokens over 50,257 words takes three fp32 tensors
    assert memory.host["temporary tensors"] >= 12 * 1024 * 50257
    assert memory.host["buffers"] >= 16 * placed.params()  # values, two moments, and slots


@pytest.mark.slow
def test_the_table_of_the_readme() -> None:
    _, _, rest = (ROOT / "README.md").read_text().partition("<!-- fit table -->\n")
    table = rest.partition("\n\n")[0].strip()
    assert table == hardware_table(), (
        "copy the output of python -m benchmarks.planner.hardware_table to README.md"
    )
