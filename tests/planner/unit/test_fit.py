"""`roadtrain fit`: models and machines, rows that fit and do not, changes, commands, and the table
of the README. Nothing here trains."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from benchmarks.planner.hardware_table import hardware_table
from roadtrain import cli, environment
from roadtrain.chunks import ChunkTable, record
from roadtrain.config.job import load_job, parse_overrides
from roadtrain.config.models import layout_of_config, shape_of_layout
from roadtrain.errors import BudgetError, ConfigError, ModelError
from roadtrain.options.budgets import (
    LEAST_ACTIVATIONS,
    BudgetTerms,
    derive,
    derive_server,
    host_bytes_of,
)
from roadtrain.planner import fit_inputs, process_memory
from roadtrain.planner.fit import best_of, command, command_of, evaluate, fit, speed, text_of
from roadtrain.planner.fit_inputs import FitModel, Machine, machine_of, model_of
from roadtrain.planner.model_config import layout_of
from roadtrain.planner.process_memory import PlacedLayout, Training
from roadtrain.streaming.split import split
from roadtrain.units import GIB, MIB, show_bytes, show_number

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


def training(model: Any, samples: int = 1, dtype: str = "fp32", **placed: Any) -> Training:
    return Training(model, PlacedLayout(model.layout, dtype, **placed), samples)


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
    model = model_of(str(folder), 256)
    rows = fit(model, BIG, batch=2)
    for row in rows[:2]:
        init, _, train = command_of(row, BIG).partition(" && ")
        assert init == f"roadtrain init {folder} --out job.toml"
        job = folder / "job.toml"
        job.write_text("[model]\nconfig = { model_type = 'llama' }\n")
        made = load_job(job, parse_overrides(shlex.split(train)[3:]))
        assert (made.data.seq_len, made.data.batch_size) == (256, 2)
        assert made.budget.host == f"{row.host_budget // MIB}MiB"
        assert bool(made.store.files) == (row.state == "SSDs")


def test_the_same_buffers_as_the_run() -> None:  # Rule 7
    """The least budget is accepted by `derive`, and half a MiB less is not."""
    model = model_of("GPT-2", 128)
    work = training(model)
    least = work.budgets("SSDs", 1 << 50).least_bytes
    assert work.budgets("SSDs", least).total <= least
    with pytest.raises(Exception, match="needs at least"):
        work.budgets("SSDs", least - MIB // 2)
    # in RAM there is no file for inputs of blocks: the least budget holds all of them
    work = training(model, 64)
    whole = work.budgets("RAM", 1 << 50)
    found = work.budgets("RAM", work.least_budget("RAM", whole))
    assert work.kept > LEAST_ACTIVATIONS and found.worker.activation_bytes >= work.kept


def whole_table(placed: PlacedLayout) -> tuple[ChunkTable, dict[int, Any]]:
    """The chunk table and the records of a run, with the chunks of every block."""
    specs = [(name, placed._specs(name)) for name in placed.layout.blocks]  # noqa: SLF001
    table = ChunkTable.build(specs)
    return table, {chunk.id: record(chunk, 2, 1) for chunk in table.chunks}


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize(("state", "budget"), [("RAM", 8), ("SSDs", 2), ("SSDs", 8), ("server", 2)])
def test_blocks_laid_out_once_give_the_budgets_of_the_run(
    state: str, budget: int, rank: int
) -> None:  # Rule 7
    work = training(model_of("GPT-2", 128), rank=rank)
    table, records = whole_table(work.placed)
    served = state == "server"
    terms = BudgetTerms(state != "RAM", True, not served)
    own = {} if served else records
    expected = derive(table, own, (0,) if state == "SSDs" else (), terms, budget * GIB)
    found = work.budgets(state, budget * GIB)
    assert found.worker == expected.worker and found.least_bytes == expected.least_bytes
    assert found.records.buffers == expected.records.buffers
    # what is kept in memory consists of whole chunks
    assert 0 <= found.records.resident_bytes - expected.records.resident_bytes <= 16 * MIB
    assert work.placed.record_bytes == sum(own.nbytes for own in records.values())
    assert work.placed.params == sum(spec.numel for spec in table.params)
    assert len(work.placed.table.chunks) < len(table.chunks) / 2


def test_the_largest_models_take_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """405 billion parameters are laid out as two kinds of blocks, each of them once."""
    laid_out = []
    build = ChunkTable.build
    monkeypatch.setattr(
        process_memory.ChunkTable,
        "build",
        staticmethod(lambda blocks: laid_out.append([n for n, _ in blocks]) or build(blocks)),
    )
    model = model_of("LLaMA-3-405B")
    begin = time.process_time()
    rows = fit(model, BIG)
    assert time.process_time() - begin < 20  # 1 s; others may compute here
    assert all(len(names) == 2 for names in laid_out)
    assert sum(len(row.training.placed.table.chunks) for row in rows[:4:3]) < 20_000
    assert rows[0].training.placed.params == pytest.approx(405.85e9, rel=1e-4)


def test_host_memory_is_not_counted_twice() -> None:
    model = model_of("GPT-2", 128)
    on_cpu = evaluate(training(model), "SSDs", BIG)
    assert not on_cpu.device and on_cpu.device_budget is None
    assert "temporary tensors" in on_cpu.host
    on_gpu = evaluate(training(model), "SSDs", machine_of("RTX 4090", "64GB", "2x7GB/s,2TB"))
    assert "temporary tensors" in on_gpu.device
    assert "temporary tensors" not in on_gpu.host


def test_more_of_anything_needs_no_less_memory() -> None:
    model = model_of("Qwen2.5-0.5B", 256)

    def host(work: Training, state: str = "SSDs") -> float:
        return evaluate(work, state, BIG).least_host_bytes

    base = host(training(model))
    longer = model_of("Qwen2.5-0.5B", 1024)
    assert base < host(training(model, 4)) and base < host(training(longer))
    assert base < host(training(model), "RAM")
    assert host(training(model, dtype="bf16")) < base
    assert host(training(model, rank=8), "RAM") < host(training(model), "RAM")
    assert host(training(model, optimizer="sgd"), "RAM") < host(training(model), "RAM")


def test_lora_counts_adapters_and_frozen_weights() -> None:
    model = model_of("GPT-2", 128)
    full, lora = PlacedLayout(model.layout), PlacedLayout(model.layout, rank=16)
    # c_attn, c_proj, c_fc, c_proj of 12 layers, each with (in + out) x 16
    adapters = 12 * 16 * ((768 + 2304) + (768 + 768) + (768 + 3072) * 2)
    assert lora.params == full.params + adapters
    assert lora.written_bytes < full.written_bytes / 20
    assert lora.file_bytes < full.file_bytes / 5


def test_the_budget_is_not_larger_than_what_is_of_use() -> None:
    """A small model on a large machine needs no half of its memory; inputs that the budget has
    room for are named."""
    model = model_of("GPT-2", 128)
    ssds = fit(model, BIG)[1]
    assert ssds.host_budget < 5 * GIB < BIG.ram / 2
    found = ssds.training.budgets("SSDs", ssds.host_budget)
    assert found.records.resident_bytes == ssds.training.placed.record_bytes
    assert ssds.host_bytes + ssds.unused >= ssds.host_budget
    assert "are not needed for inputs of blocks" in text_of([ssds], BIG)


def test_a_server_has_memory_of_its_own() -> None:
    work = training(model_of("GPT-2", 128))
    table, records = whole_table(work.placed)
    options: Any = {"workers": 1, "holds_gradients": True}
    least = work.placed.server_bytes - process_memory.SERVER
    derive_server(table, records, least, **options)
    with pytest.raises(BudgetError):
        derive_server(table, records, least - 1, **options)
    row = evaluate(work, "server", BIG)
    assert row.server_bytes == work.placed.server_bytes and "of memory there" in text_of([row], BIG)
    assert evaluate(work, "SSDs", BIG).server_bytes == 0


def test_a_row_that_barely_fits() -> None:
    model = model_of("GPT-2", 128)
    least = evaluate(training(model), "SSDs", BIG).least_host_bytes
    for room, answer in ((1.06, "yes"), (1.04, "barely"), (0.99, "no")):
        row = evaluate(training(model), "SSDs", Machine("near", least * room, disk=1e12))
        assert row.fits == answer
    nearly_full = Machine("disk", 100.0 * GIB, disk=1.02 * training(model).placed.file_bytes)
    assert evaluate(training(model), "SSDs", nearly_full).fits == "barely"


def test_described_ssds_limit_the_tokens_per_second() -> None:
    machine = machine_of("cpu", "64GB", "2x7GB/s,2TB")
    rows = fit(model_of("GPT-2", 128), machine)
    limit = rows[1].at_most
    assert limit == pytest.approx(128 * 14e9 / rows[1].training.placed.written_bytes)
    assert f"at most {show_number(limit)}" in text_of(rows, machine)
    assert rows[0].at_most == 0 and "at most" not in text_of(fit(rows[0].training.model, BIG), BIG)


def plain() -> Any:
    """A model with tied embeddings, and a batch of three samples."""
    with torch.device("meta"):
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
        embed, head = torch.nn.Embedding(500, 64), torch.nn.Linear(64, 500, bias=False)
        head.weight = embed.weight
        return torch.nn.Sequential(embed, torch.nn.Sequential(*layers), head), torch.zeros(
            3, 8, dtype=torch.long
        )


def test_a_function_gives_the_batch_and_the_tied_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stranger", SimpleNamespace(plain=plain))
    model = model_of("stranger:plain")
    assert model.samples == 3 and model.layout.tied
    assert fit(model, BIG)[0].training.samples == 3
    assert fit(model, BIG, batch=5)[0].training.samples == 5
    root = training(model).placed.table.blocks[0].push_nbytes
    assert training(model).temporaries >= 3 * root


def test_a_function_that_returns_no_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no such dataset")

    monkeypatch.setitem(sys.modules, "stranger", SimpleNamespace(text=lambda: "ab", fails=fails))
    for function, why in (("text", "has no attribute"), ("fails", "no such dataset")):
        with pytest.raises(ConfigError, match=f"does not return a model and arguments: .*{why}"):
            model_of(f"stranger:{function}")


def test_a_function_with_frozen_parts_or_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen() -> tuple[torch.nn.Module, torch.Tensor]:
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        model[0].requires_grad_(False)
        return model, torch.zeros(2, 8)

    found = {"frozen": frozen, "empty": lambda: (frozen()[0], torch.zeros(0, 8))}
    found |= {"number": lambda: (frozen()[0], 5), "lazy": lambda: (torch.nn.LazyLinear(8),)}
    monkeypatch.setitem(sys.modules, "stranger", SimpleNamespace(**found))
    assert model_of("stranger:frozen").shape.notes == (
        "72 frozen parameters are counted as if they were trained",
    )
    for function, why in (("empty", "no samples"), ("number", "no len"), ("lazy", "uninitialized")):
        with pytest.raises((ConfigError, ModelError), match=why):
            model_of(f"stranger:{function}")


def test_without_matrices_there_are_no_rows_of_lora() -> None:
    for name in ("ResNet-50", "VGG-16"):
        rows = fit(model_of(name), BIG)
        assert [row.kind for row in rows] == ["full"] * 3 and best_of(rows) is not None


def test_a_model_of_another_class_is_not_counted_by_the_formula(tmp_path: Path) -> None:
    config = LLAMA | {"num_hidden_layers": 2}
    for architecture, params in (("LlamaForCausalLM", 0), ("LlamaModel", -4000 * 256)):
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "architectures": [architecture]})
        )
        expected = shape_of_layout(layout_of_config(config), 64, "").params + params  # type: ignore[arg-type]
        assert model_of(str(tmp_path), 64).shape.params == expected


def test_embeddings_of_an_encoder_and_a_decoder_are_not_an_output_layer() -> None:
    whole = torch.nn.Module()
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)]
    whole.layers = torch.nn.ModuleList(layers)
    whole.encoder, whole.decoder = torch.nn.Embedding(50, 8), torch.nn.Embedding(50, 8)
    whole.decoder.weight = whole.encoder.weight
    assert not layout_of(split(whole), 8).tied
    whole.head = torch.nn.Linear(8, 50, bias=False)
    whole.head.weight = whole.encoder.weight
    assert layout_of(split(whole), 8).tied


def test_the_heap_keeps_what_blocks_free_unless_their_tensors_are_mapped() -> None:
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 256}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1536}
    config |= {"max_position_embeddings": 8192}

    def temporaries(tokens: int) -> float:
        made = layout_of_config(config)
        assert made is not None
        shape = shape_of_layout(made, tokens, "small")
        return Training(FitModel("small", made, shape), PlacedLayout(made)).temporaries

    made = layout_of_config(config)
    assert made is not None
    saved = made.saved("model.layers.0", 1024, 4)
    # holes between the tensors come on top of the bytes that autograd keeps
    assert temporaries(1024) >= 2 * 1024 * saved
    mapped = 8192 * made.saved("model.layers.0", 8192, 4)  # tensors of 48 MiB are returned at once
    assert mapped < temporaries(8192) < 1.5 * mapped


def test_what_lacks_and_the_smallest_change() -> None:
    model = model_of("Qwen2.5-0.5B", 2048)
    small = Machine("a small machine", 7.0 * GIB, disk=100.0 * GIB)
    rows = fit(model, small, batch=4)
    ram, ssds = rows[:2]
    assert "more host memory" in ram.change and "--batch" not in ram.change
    lacking = ssds.lacking["host memory"]
    assert lacking > 0 and ssds.change.endswith("or --batch 1")
    enough = Machine("enough", small.ram + lacking + 1, disk=small.disk)
    assert not evaluate(ssds.training, "SSDs", enough).lacking
    assert fit(model, small, batch=1)[1].lacking == {}
    no_disk = Machine("no disk", 100.0 * GIB, disk=1.0 * GIB)
    assert "more disk" in fit(model, no_disk)[1].change
    tiny = Machine("a tiny machine", 0.5 * GIB)
    assert best_of(fit(model, tiny)) is None


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
    for ssd in ("fast", "0x7GB/s"):
        with pytest.raises(ConfigError, match="is not a "):
            machine_of("", "", ssd)


def test_a_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:  # Rule 4
    """The process itself counts, also for the default budget of a run."""
    used = psutil.Process().memory_info().rss
    limit = used + 300 * MIB
    for module in (fit_inputs, environment):
        monkeypatch.setattr(module, "control_group_limit", lambda: limit)
    machine = fit_inputs.this_machine()
    assert 200 * MIB < machine.ram < 320 * MIB and show_bytes(limit) in machine.notes[0]
    assert 100 * MIB < host_bytes_of(None, whole=False) < 160 * MIB
    assert host_bytes_of(None, whole=True) < 320 * MIB
    monkeypatch.setattr(environment, "control_group_limit", lambda: 1)
    assert host_bytes_of(None, whole=True) == 0 and host_bytes_of("2GiB", whole=True) == 2 * GIB


def _write(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    at, header = 0, {}
    for name, shape in tensors.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def test_train_is_recommended_only_for_causal_language_models(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "vocab_size": 100, "hidden_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 96}
    (tmp_path / "pytorch_model.bin").write_bytes(b"")  # `init` of the folder does not ignore it
    cases = [
        ("llama", ["LlamaForCausalLM"], True),
        ("llama", None, True),
        ("gpt2", ["GPT2LMHeadModel"], True),
        ("t5", ["T5WithLMHeadModel"], False),
        ("llama", ["LlamaForSequenceClassification"], False),
    ]
    for kind, architectures, trained in cases:
        config = {"model_type": kind, "architectures": architectures, "n_positions": 64, **sizes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        row = fit(model_of(str(tmp_path), 32), BIG)[0]
        starts = f"roadtrain init {tmp_path} " if trained else "optimizer = roadtrain.place("
        assert command_of(row, BIG).startswith(starts)


def test_the_memory_in_ram_includes_gradients_that_wait_for_clipping() -> None:
    """The job of `roadtrain init` clips gradients."""
    row = fit(model_of("LLaMA-3-8B", 128), Machine("big", 1e12), dtype="bf16")[0]
    held = row.training.placed.params * 2
    assert row.state == "RAM" and row.least_host_bytes > row.training.placed.record_bytes + held


def test_headers_of_safetensors(tmp_path: Path) -> None:
    tensors: dict[str, tuple[int, ...]] = {"embed.weight": (1000, 64)}
    tensors |= {f"layers.{i}.w.weight": (64, 64) for i in range(3)}
    _write(tmp_path / "model.safetensors", tensors)
    bare = model_of(str(tmp_path), 128)
    assert not bare.pretrained and list(bare.layout.blocks)[1:] == [f"layers.{i}" for i in range(3)]
    assert model_of(str(tmp_path / "model.safetensors"), 128).layout == bare.layout
    unknown = {"model_type": "unheard_of", "max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps(unknown))
    named = model_of(str(tmp_path), None)
    assert any("read from the headers" in line for line in named.shape.notes)  # Rule 6
    assert named.shape.tokens == 99 and named.layout == bare.layout
    (tmp_path / "model.safetensors").write_bytes(b"12345678garbage")
    with pytest.raises(Exception, match="not safetensors"):
        model_of(str(tmp_path), None)


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
        model_of(str(folder), None)


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
    model = model_of("GPT-2", 512)
    rows = fit(model, BIG, batch=4)
    ram, ssds, server, lora, *_ = (speed(row, str(path)) for row in rows)
    assert ram is not None and ssds is not None and 0 < ssds[0] < ssds[1] and ssds[0] <= ram[0]
    assert server is None and lora is None
    path.write_text(text.replace('measured = ["hosts.here.device"]', ""))
    assert speed(rows[0], str(path)) is None


def test_prediction_of_a_process_has_all_parts() -> None:
    work = training(model_of("GPT-2", 1024))
    host, _ = work.memory(work.budgets("RAM", 8 * GIB))
    # the loss of 1,024 tokens over 50,257 words takes three fp32 tensors
    assert host["temporary tensors"] >= 12 * 1024 * 50257
    assert host["buffers"] >= 16 * work.placed.params  # values, two moments, and slots


def test_an_answer_that_cannot_be_written_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        command(str(folder), json=str(folder / "absent" / "answer.json"))


@pytest.mark.slow
def test_the_table_of_the_readme() -> None:
    _, _, rest = (ROOT / "README.md").read_text().partition("<!-- fit table -->\n")
    table = rest.partition("\n\n")[0].strip()
    assert table == hardware_table(), (
        "copy the output of python -m benchmarks.planner.hardware_table to README.md"
    )
