"""The commands with a small real model: train and resume, verify, export and import (Rules 1, 2 and
3)."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from roadtrain import cli
from roadtrain.config.job import Job, job_of_run, load_job
from roadtrain.errors import (
    ConfigError,
    ForeignError,
    ForkedError,
    FullError,
    GoneError,
    StaleError,
)
from roadtrain.training import verify
from roadtrain.training.metrics import Metrics, read_metrics
from roadtrain.training.train import train
from tests.support.warm_python import warm_python

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()  # the bar leaves a thread running

JOB = """
[run]
dir = "{home}/run"
steps = 5
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64
[data]
paths = ["{home}/text"]
seq_len = 16
batch_size = 2
held_out = 0.2
[optimizer]
lr = 1e-2
schedule = "cosine"
warmup_steps = 2
clip_norm = 1.0
[budget]
host = "60MiB"
"""


def quiet(_: str) -> None:
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(
        "".join(f"line {i} of the text, {i * i}\n" for i in range(600))
    )
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(home=tmp_path))
    return path


def job_of(path: Path, **overrides: Any) -> Job:
    return load_job(path, {key.replace("__", "."): value for key, value in overrides.items()})


def lines_of(job: Job) -> list[dict[str, Any]]:
    return read_metrics(job.run_dir / "metrics.jsonl")


def losses(job: Job) -> list[tuple[int, float, float, float]]:
    return [(line["step"], line["loss"], line["lr"], line["grad_norm"]) for line in lines_of(job)]


def test_metrics_of_a_run(path: Path) -> None:
    job = job_of(path)
    shown: list[str] = []
    summary = train(job, shown.append)
    lines = lines_of(job)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        keys = {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "stages", "session"}
        assert set(line) == keys | {"memory", "committed"}
        assert 0 <= line["committed"] < line["step"]
        assert set(line["memory"]) == {"host", "process", "disk"}
        for used in line["memory"].values():  # Rule 4
            assert 0 < used["bytes"] <= (used["budget"] or used["bytes"])
        assert line["tokens"] == 32 and line["seconds"] > 0
        assert {"Forward", "Backward", "Push"} <= set(line["stages"])
    assert summary.steps == 5 and summary.last_loss < summary.first_loss and not summary.stopped
    assert any("plain training needs" in text for text in shown)
    assert load_job(job.run_dir / "job.toml").changed({"model.config.vocab_size": None}) == job


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model.config.attention_dropout": 0.3},
        {"model.dtype": "fp16"},
        {"optimizer.accumulate": 2},
        {"optimizer.clip_norm": None},
        {"compress.keep": 0.1, "compress.error_feedback": True},
    ],
    ids=lambda more: next(iter(more), "plain"),
)
def test_a_resumed_run_repeats_the_losses(path: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    """Rule 3. The learning rate's schedule spans all 5 steps, so the first part is interrupted
    rather than configured with fewer steps."""
    whole = load_job(path, {**more, "run.dir": str(tmp_path / "whole")})
    parts = load_job(path, {**more, "run.dir": str(tmp_path / "parts")})
    train(whole, quiet)
    stop_after(parts, 2)
    assert len(lines_of(parts)) == 2
    train(parts, quiet)
    assert losses(parts) == losses(whole) and len(losses(whole)) == 5


def test_an_unmounted_store_is_not_replaced(path: Path) -> None:
    """The directory of the store exists but is empty: the error names the step, and no line of
    metrics is lost."""
    job = job_of(path)
    stop_after(job, 3)
    lines = lines_of(job)
    (job.run_dir / "store").rename(path.parent / "elsewhere")
    (job.run_dir / "store").mkdir()
    with pytest.raises(
        GoneError, match="there is no store, but this run has committed step 3"
    ) as raised:
        train(job, quiet)
    assert "--new-store" in str(raised.value)
    assert lines_of(job) == lines and not list((job.run_dir / "store").iterdir())
    output: list[str] = []
    train(job_of(path, run__new_store=True), output.append)
    assert len(lines_of(job)) == 5 and any("metrics.before-1.jsonl" in line for line in output)
    assert read_metrics(job.run_dir / "metrics.before-1.jsonl") == lines
    assert not load_job(job.run_dir / "job.toml").run.new_store  # the option applies once


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "mark lost"])
def test_an_older_store_is_refused(path: Path, marked: bool) -> None:
    job = job_of(path)
    stop_after(job, 1)
    shutil.copytree(job.run_dir / "store", path.parent / "older")
    train(job, quiet)
    lines = lines_of(job)
    shutil.rmtree(job.run_dir / "store")
    (path.parent / "older").rename(job.run_dir / "store")
    if not marked:
        (job.run_dir / "mark.json").unlink()
    before = contents(job.run_dir)
    with pytest.raises(
        StaleError, match=f"at step 1, but this run has committed step {5 if marked else 3}"
    ):
        train(job, quiet)
    with pytest.raises(StaleError):
        cli.run(["export", str(job.run_dir), str(path.parent / "out")])
    assert contents(job.run_dir) == before and not (path.parent / "out").exists()
    train(job_of(path, run__new_store=True), quiet)
    # the first step is that of the older store
    assert lines_of(job)[0] == lines[0] and len(lines_of(job)) == 5
    note, *aside = (job.run_dir / "metrics.uncommitted.jsonl").read_text().splitlines()
    assert "from step 1" in note and [json.loads(line) for line in aside] == lines[1:]


def test_a_foreign_store_is_refused(path: Path) -> None:
    job, other = job_of(path), job_of(path, run__dir=str(path.parent / "other"))
    for each in (job, other):
        stop_after(each, 2)
    shutil.rmtree(job.run_dir / "store")
    shutil.copytree(other.run_dir / "store", job.run_dir / "store")
    with pytest.raises(
        ForeignError, match=r"has step 2 of store .*, but this run has committed step 2 of store"
    ):
        train(job, quiet)
    train(job_of(path, run__new_store=True), quiet)
    assert [line["step"] for line in lines_of(job)] == [3, 4, 5]


def test_a_run_in_memory_starts_over(path: Path) -> None:
    job = job_of(path, store__files=[])
    train(job, quiet)
    output: list[str] = []
    train(job, output.append)
    assert any("metrics.before-1.jsonl" in line for line in output) and len(lines_of(job)) == 5
    files = job_of(path, run__dir=str(path.parent / "files"))
    train(files, quiet)
    with pytest.raises(GoneError, match="RAM"):
        train(job_of(path, run__dir=str(path.parent / "files"), store__files=[]), quiet)


def test_a_copied_run_uses_its_own_store(path: Path) -> None:
    """The copied job.toml names the original's run directory. Reading the copy reads the copied
    store, and training the original through the copy is refused."""
    job, copy = job_of(path), path.parent / "copy"
    stop_after(job, 2)
    shutil.copytree(job.run_dir, copy)
    before = contents(job.run_dir)
    (copy / "store" / "gen-1" / "store.json").unlink()  # damaged: the original does not replace it
    with pytest.raises(GoneError, match=r"copy/store/gen-1/store.json"):
        cli.run(["export", str(copy), str(path.parent / "out")])
    shutil.rmtree(copy)
    shutil.copytree(job.run_dir, copy)
    with pytest.raises(ConfigError, match=r"not for .*copy") as raised:
        cli.run(["train", str(copy / "job.toml")])
    assert f"--run.dir {copy} --store.files {copy}/store" in str(raised.value)
    # `{run}` means the copy
    assert cli.run(["train", str(copy / "job.toml"), "--run.dir", str(copy)]) == 0
    assert contents(job.run_dir) == before
    assert len(read_metrics(copy / "metrics.jsonl")) == 5
    assert cli.run(["export", str(copy), str(path.parent / "out")]) == 0
    edition1 = (
        (copy / "job.toml")
        .read_text()
        .replace("{run}", str(job.run_dir))
        .replace(str(copy), str(job.run_dir))
    )
    (copy / "job.toml").write_text(edition1)
    with pytest.raises(ConfigError, match=r"belong to that run"):
        cli.run(["train", str(copy / "job.toml"), "--run.dir", str(copy)])
    assert job_of_run(str(copy)).store.files == [str(copy / "store")]


@pytest.mark.parametrize("ahead", [0, 1], ids=["at the same step", "a step ahead"])
def test_a_copy_that_was_trained_elsewhere_is_refused(path: Path, ahead: int) -> None:
    """The job and the step of the store match this run. No file is changed, and `--new-store`
    accepts the store with a new metrics.jsonl."""
    job, copy = job_of(path), path.parent / "copy"
    stop_after(job, 2)
    shutil.copytree(job.run_dir, copy)
    elsewhere = job_of(path, run__dir=str(copy), optimizer__lr=0.02)
    stop_after(elsewhere, 3 + ahead)
    stop_after(job, 3)
    lines = lines_of(job)
    (job.run_dir / "store").rename(path.parent / "own")
    (copy / "store").rename(job.run_dir / "store")
    before = contents(job.run_dir)
    with pytest.raises(
        ForkedError, match=f"step {3 + ahead} of the store was trained outside of this run"
    ):
        train(job, quiet)
    with pytest.raises(ForkedError):
        cli.run(["export", str(job.run_dir), str(path.parent / "out")])
    assert contents(job.run_dir) == before
    (job.run_dir / "store").rename(path.parent / "theirs")
    (path.parent / "own").rename(job.run_dir / "store")
    stop_after(job, 4)
    assert lines_of(job)[:3] == lines
    (job.run_dir / "store").rename(path.parent / "own")
    (path.parent / "theirs").rename(job.run_dir / "store")
    train(job_of(path, run__new_store=True), quiet)
    assert [line["step"] for line in lines_of(job)] == list(range(4 + ahead, 6))
    assert read_metrics(job.run_dir / "metrics.before-1.jsonl")[:3] == lines


def test_every_start_is_a_session_of_the_store(path: Path) -> None:
    """The ledger, the lines of metrics and the mark name the session."""
    job = job_of(path)
    for steps in (1, 3):
        stop_after(job, steps)
    train(job, quiet)
    train(job, quiet)  # runs no step
    sessions = [line["session"] for line in lines_of(job)]
    assert len(set(sessions)) == 3 and sessions[1] == sessions[2] and sessions[3] == sessions[4]
    mark = json.loads((job.run_dir / "mark.json").read_text().splitlines()[0])
    assert mark["history"].split(" ")[0] == sessions[4]


def test_servers_without_the_store_of_a_run_are_refused(path: Path, hosts: Any) -> None:
    """The error is raised before the server creates any file, as without servers."""
    first, empty = hosts(2)
    job = job_of(path, servers__addresses=[first.where])
    stop_after(job, 2)
    lines = lines_of(job)
    other = job_of(path, servers__addresses=[empty.where])
    for call in (
        lambda: train(other, quiet),
        lambda: cli.run(["export", str(other_run(job, empty)), "out"]),
    ):
        with pytest.raises(GoneError, match="there is no store"):
            call()
    assert lines_of(job) == lines and not list(empty.directory.glob("gen-*"))
    train(job, quiet)
    assert len(lines_of(job)) == 5


def test_a_worker_of_servers_continues_after_an_absence(path: Path, hosts: Any) -> None:
    """Other workers continued without its host; its earlier lines are kept in a separate file (Rule
    3)."""
    job = job_of(path, servers__addresses=[hosts(1)[0].where])
    stop_after(job, 3)
    file = job.run_dir / "metrics.jsonl"
    before = file.read_text().splitlines(keepends=True)[:1]
    file.write_text("".join(before))
    train(job, quiet)
    assert [line["step"] for line in lines_of(job)] == [4, 5]
    assert file.with_name("metrics.before-1.jsonl").read_text() == "".join(before)


def other_run(job: Job, host: Any) -> Path:
    """Copy the run directory, with `host` as the server of the job."""
    run = job.run_dir.parent / "other"
    shutil.copytree(job.run_dir, run)
    file = run / "job.toml"
    file.write_text(
        file.read_text()
        .replace(job.servers.addresses[0], host.where)
        .replace(job.run.dir, str(run))
    )
    return run


FILLS = ("mark.json", "job.toml", "metrics.jsonl")


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_full_run_directory_is_an_error_and_loses_no_step(path: Path) -> None:
    """A typed error is raised, each line is complete or absent, and the run continues once there is
    space."""
    whole = job_of(path, run__dir=str(path.parent / "whole"))
    train(whole, quiet)
    job = job_of(path, store__files=[str(path.parent / "store")])
    job.run_dir.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(job.run_dir)]
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        for room in (0, 1, 5000):  # bytes beyond whole pages do not count on a tmpfs
            filler = job.run_dir / "filler"
            with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(4096))
            os.truncate(filler, max(0, filler.stat().st_size - room))
            with pytest.raises(FullError, match="are free"):
                train(job, quiet)
            for name in FILLS:
                content = (
                    (job.run_dir / name).read_bytes() if (job.run_dir / name).exists() else b""
                )
                assert not content or content.endswith(b"\n"), name
            filler.unlink()
        train(job, quiet)
        assert losses(job) == losses(whole) and not list(job.run_dir.glob("*.new"))
    finally:
        subprocess.run(["umount", str(job.run_dir)], check=True)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_delayed_updates_do_not_wait_for_the_norm(path: Path) -> None:
    """With a delay of 1 each line has the norm of the previous step; with a longer delay it has
    none."""
    norms = {}
    for delay in (1, 2):
        job = job_of(path, optimizer__delay=delay, run__dir=str(path.parent / f"late{delay}"))
        train(job, quiet)
        norms[delay] = [line["grad_norm"] for line in lines_of(job)]
    first, *others = norms[1]
    assert first is None and len(others) == 4 and all(norm > 0 for norm in others)
    assert norms[2] == [None] * 5


def stop_after(job: Job, steps: int) -> None:
    """Train, and interrupt as Ctrl-C does once step `steps` is reported."""
    seen: list[str] = []

    def report(text: str) -> None:
        seen.append(text)
        if text.startswith(f"step {steps}/"):
            os.kill(os.getpid(), signal.SIGINT)

    summary = train(job, report)
    assert (summary.stopped, summary.steps) == ("interrupted", steps)
    assert f"interrupted: step {steps} is committed" in "".join(seen)


class InterruptedFile(io.RawIOBase):
    """A file that the process is writing when Ctrl-C comes."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if b"step 3/" in bytes(data):
            os.kill(os.getpid(), signal.SIGINT)
        return len(data)


def test_ctrl_c_may_come_while_a_line_is_written(path: Path) -> None:  # Rule 3
    with io.TextIOWrapper(io.BufferedWriter(InterruptedFile()), line_buffering=True) as out:
        summary = train(job_of(path), lambda text: print(text, file=out))
    assert (summary.stopped, summary.steps) == ("interrupted", 3)


def test_ctrl_c_ends_the_command_after_a_commit(path: Path) -> None:
    job = job_of(path)
    command = [warm_python(), "-m", "roadtrain.cli", "train", str(path), "--run.steps", "1000000"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait(60) == 130, text + rest
    assert "interrupted: step" in rest and "Traceback" not in rest
    assert [line["step"] for line in lines_of(job)] == list(range(1, len(lines_of(job)) + 1))


def test_minutes_limit_a_run(path: Path) -> None:
    job = job_of(path, run__steps=10**6, run__minutes=0.02)
    start = time.monotonic()
    assert train(job, quiet).stopped == "0.02 minutes are over"
    assert time.monotonic() - start < 60


def test_a_finished_run_changes_nothing(path: Path) -> None:
    job = job_of(path)
    train(job, quiet)
    before = losses(job)
    train(job, quiet)
    assert losses(job) == before


def test_other_text_is_refused(path: Path, tmp_path: Path) -> None:
    train(job_of(path, run__steps=2), quiet)
    (tmp_path / "text" / "b.txt").write_text("more\n" * 99)
    with pytest.raises(ConfigError, match="the text has changed"):
        train(job_of(path), quiet)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.config.model_type": "lama"}, "did you mean `llama`"),
        (
            {"model.config.hidden_sise": 3},
            "unknown key `model.config.hidden_sise`\nhint: did you mean `hidden_size`",
        ),
        (
            {"model.config.vocab_size": 100},
            "vocabulary of 100 and 64 positions, but the data needs a vocabulary of 256 and 16 pos",
        ),
        ({"data.seq_len": 65}, "the data needs a vocabulary of 256 and 65"),
        ({"optimizer.momentum": 0.9}, "optimizer adamw: .*momentum"),
        ({"optimizer.name": "no.such:Thing"}, "optimizer.name: No module"),
        ({"model.pretrained": "/no/such", "model.config": {}}, "no config.json"),
    ],
)
def test_mistakes_are_reported_before_any_file_is_written(
    path: Path, overrides: dict[str, Any], message: str
) -> None:
    job = load_job(path, overrides)
    with pytest.raises(ConfigError, match=message):
        train(job, quiet)
    assert not (job.run_dir / "job.toml").exists() and not (job.run_dir / "store").exists()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model.dtype": "bf16"},
        {"model.dtype": "fp16"},
        {"optimizer.accumulate": 3, "optimizer.clip_norm": None},
        {"optimizer.name": "lion", "model.config.attention_dropout": 0.2},
        {"model.config.tie_word_embeddings": True},
        {"optimizer.name": "torch.optim:NAdam", "store.chunk_elements": 65536},
    ],
    ids=lambda more: next(iter(more.values()), "plain"),
)
def test_verify(path: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    """Rule 1, for the job of the user."""
    shown: list[str] = []
    assert verify.verify(load_job(path, more), 3, shown.append)
    assert sum("are bit-identical" in text for text in shown) == 2
    assert not [*tmp_path.glob("**/verify-*")], "the temporary store is removed"
    deviation = float(shown[-1].split("at most ")[1].split(" ")[0])
    assert deviation < 1e-5


# torch's compiler reads .grad of the inputs of plain models
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_verify_compiles_the_blocks_of_plain_torch_as_well(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 1."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    shown: list[str] = []
    assert verify.verify(load_job(path, {"model.compile": True}), 2, shown.append)
    assert sum("are bit-identical" in text for text in shown) == 2
    assert counters["frames"]["ok"] == 2, "once for both placed models, once for plain torch"
    torch.compiler.reset()


def test_verify_of_a_lossy_job_compares_placements_only(path: Path) -> None:
    shown: list[str] = []
    assert verify.verify(job_of(path, compress__keep=0.05), 2, shown.append)
    assert "because the job is lossy" in shown[-1]


def test_verify_names_the_first_tensor_that_differs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = verify.PlainOptimizer.read

    def off_by_one_bit(self: verify.PlainOptimizer, name: str, what: str) -> np.ndarray:
        values = read(self, name, what)
        if name == "model.layers.1.mlp.up_proj.weight" and what == "exp_avg":
            values = values.copy()
            values.view(np.uint32)[5] ^= 1
        return values

    monkeypatch.setattr(verify.PlainOptimizer, "read", off_by_one_bit)
    shown: list[str] = []
    assert not verify.verify(job_of(path), 2, shown.append)
    assert any(
        "in model.layers.1.mlp.up_proj.weight (exp_avg): element 5 of 2048" in text
        for text in shown
    )
    assert cli.main(["verify", str(path), "--steps", "1"]) == 1


def test_export_reloads_in_transformers_and_imports_again(path: Path, tmp_path: Path) -> None:
    job = job_of(path, run__steps=3)
    summary = train(job, quiet)
    out = tmp_path / "exported"
    assert cli.main(["export", str(job.run_dir), str(out)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 256
    assert all(torch.isfinite(p).all() for p in model.parameters())
    more = [
        "--data.paths",
        str(tmp_path / "text"),
        "--data.seq_len",
        "16",
        "--data.held_out",
        "0.2",
        "--data.batch_size",
        "2",
    ]
    again = tmp_path / "again"
    assert cli.main(["import", str(out), "--run.dir", str(again), *more]) == 0
    tuned = train(load_job(again / "job.toml", {"run.steps": 0}), quiet)
    assert tuned.held_out_loss == pytest.approx(summary.held_out_loss, abs=1e-6)
    train(load_job(again / "job.toml", {"run.steps": 2}), quiet)
    # the run has been trained
    assert cli.main(["import", str(out), "--run.dir", str(again), *more]) == 2
    assert cli.main(["export", str(tmp_path / "text"), str(out)]) == 2  # not a run directory


def test_an_imported_model_of_few_positions_gets_shorter_rows(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.GPT2Config(
        vocab_size=300,
        n_positions=24,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "short")
    more = ["--data.paths", str(tmp_path / "text"), "--run.dir", str(tmp_path / "run")]
    assert cli.main(["import", str(tmp_path / "short"), *more]) == 0
    assert "data.seq_len is lowered to 24" in capsys.readouterr().out
    assert load_job(tmp_path / "run" / "job.toml").data.seq_len == 24
    more[3] += "2"
    assert cli.main(["import", str(tmp_path / "short"), *more, "--data.seq_len", "25"]) == 2


def test_an_export_of_masters_is_exact(path: Path, tmp_path: Path) -> None:
    job = job_of(path, run__steps=2, model__dtype="bf16")
    train(job, quiet)
    for name in ("masters", "copies"):
        options = ["--masters"] * (name == "masters")
        assert cli.main(["export", str(job.run_dir), str(tmp_path / name), *options]) == 0
    masters, copies = (
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype="auto"
        ).state_dict()
        for name in ("masters", "copies")
    )
    assert {t.dtype for t in masters.values()} == {torch.float32}
    assert {t.dtype for t in copies.values()} == {torch.bfloat16}
    assert all(torch.equal(masters[name].bfloat16(), copies[name]) for name in masters)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("torch.optim:AdamW", 0),
        ("roadtrain.kernels.rules:LionRule", 2),
        ("no.such:Rule", 2),
        ("json:dumps", 2),
        ("torch.optim:Muon", 2),
    ],
)
def test_check_rule(name: str, code: int) -> None:
    assert cli.main(["check-rule", name]) == code


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_whose_line_cannot_be_written_is_not_committed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """The run directory is full: the step is repeated once there is space, and no line is missing
    from metrics.jsonl."""
    overrides = {"optimizer.delay": staleness, "optimizer.clip_norm": None}
    whole = job_of(path, **overrides, **{"run.dir": str(tmp_path / "whole")})
    train(whole, quiet)
    job = job_of(path, **overrides)
    append = Metrics.append

    def full(self: Metrics, line: dict[str, Any]) -> None:
        if line["step"] == 3:
            raise FullError(f"{self.path}: no room")
        append(self, line)

    monkeypatch.setattr(Metrics, "append", full)
    with pytest.raises(FullError, match="no room"):
        train(job, quiet)
    monkeypatch.undo()
    assert [line["step"] for line in lines_of(job)] == [1, 2]
    train(job, quiet)
    assert [row[:2] for row in losses(job)] == [row[:2] for row in losses(whole)]
