"""`roadtrain plan CLUSTER.toml --job JOB.toml`: plans of a job, which keep what it states."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from test_simulated import lump

from roadtrain import cli
from roadtrain.config.cluster import load_cluster, make_cluster
from roadtrain.config.job import Job, load_job, make_job
from roadtrain.config.parallelism import Parallelism
from roadtrain.config.plan import Plan, load_plan, placement
from roadtrain.config.plan_file import load_plan_file
from roadtrain.errors import ConfigError
from roadtrain.planner import plan as planner
from roadtrain.planner.job_keys import batch_of_job, job_keys
from roadtrain.planner.job_plans import JobPlans, shape_of_job

CLUSTER = """
[[hosts]]
name = "gpu"
count = 2
addresses = ["10.0.0.2", "10.0.0.3"]
memory = "8GB"
device = { kind = "cpu", flops = "0.05TFLOP/s", memory = "8GB" }
nics = [{ rate = "1Gbit/s" }]
[[hosts]]
name = "spare"
addresses = ["10.0.0.9"]
memory = "8GB"
nics = [{ rate = "1Gbit/s" }]
"""
JOB = """
parallelism = "auto"
[model.config]
model_type = "llama"
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
intermediate_size = 128
[data]
seq_len = 64
batch_size = 4
[optimizer]
accumulate = 2
"""


def job(**tables: Any) -> Job:
    return make_job({"model": {"config": {"model_type": "llama"}}, **tables})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    cluster, one = tmp_path / "cluster.toml", tmp_path / "job.toml"
    cluster.write_text(CLUSTER)
    one.write_text(JOB)
    return cluster, one


def plans(files: tuple[Path, Path], **tables: Any) -> JobPlans:
    return JobPlans(job(**tables), load_cluster(files[0]))


def plan(name: str, **changes: Any) -> Plan:
    return Plan(placement(name), Parallelism(dp=2)).changed(**changes)


def fitted(one: JobPlans, name: str, **changes: Any) -> Plan:
    found = one.fitted(plan(name, **changes))
    assert isinstance(found, Plan), found
    return found


def test_the_batch_is_what_one_process_would_train() -> None:
    assert batch_of_job(job()) is None
    assert batch_of_job(job(data={"batch_size": 4})) == 4
    assert batch_of_job(job(optimizer={"accumulate": 3})) == 24
    said = {"data": {"batch_size": 4}, "optimizer": {"accumulate": 2}}
    assert batch_of_job(job(**said)) == 8
    assert batch_of_job(job(**said, parallelism={"num_microbatches": 6})) == 24


def test_a_plan_is_of_the_jobs_numbers(files: tuple[Path, Path]) -> None:  # Rule 2
    """Dtype, clipping and compression are the job's, whatever the candidate says."""
    plain = fitted(plans(files), "server", update_at="step")
    assert plain.sizes.parameter_bytes == plain.sizes.gradient_bytes == 4
    assert (plain.sizes.state_bytes, plain.update_at) == (8, "gradient")
    assert plain.activation_checkpointing and not plain.staleness and plain.keep is None
    model = {"config": {"model_type": "llama"}, "dtype": "bf16"}
    own = {"model": model, "optimizer": {"clip_norm": 1.0, "name": "lion", "delay": 1}}
    made = fitted(plans(files, **own, compress={"keep": 0.1}), "server")
    assert made.sizes.parameter_bytes == 2 and made.sizes.state_bytes == 8  # 4, and a copy
    assert (made.update_at, made.staleness, made.keep) == ("step", 1, 0.1)
    assert fitted(plans(files, compress={"downcast": "bf16"}), "server").sizes.gradient_bytes == 2
    assert fitted(plans(files), "zero1").sizes.gradient_bytes == 4


@pytest.mark.parametrize(
    ("tables", "name", "words"),
    [
        ({}, "zero3", "placement zero3 is not run"),
        ({}, "files", "is on 2 hosts"),
        ({"compress": {"keep": 0.1}}, "zero1", "the job has compress"),
        ({"optimizer": {"delay": 1}}, "zero1", "the job has optimizer.delay"),
        ({"budget": {"host": "1GiB"}}, "summation", "the job has budget"),
        ({"optimizer": {"delay": "none"}}, "server", "has no step to be simulated"),
        ({"parallelism": {"pp": 2}}, "zero1", "the job says parallelism.pp = 2"),
        ({"parallelism": {"widths": [1, 1]}}, "zero1", "the job says parallelism.widths"),
        ({"parallelism": {"dp": 2}}, "server", "the job has [parallelism]"),
    ],
)
def test_what_does_not_go_with_the_job_is_refused(
    files: tuple[Path, Path], tables: dict[str, Any], name: str, words: str
) -> None:
    assert words in plans(files, **tables).fitted(plan(name))  # type: ignore[operator]


def test_degrees_that_the_job_states_are_kept(files: tuple[Path, Path]) -> None:
    stated = plans(files, parallelism={"dp": 2, "stages": "measured"})
    assert fitted(stated, "zero1").parallelism.dp == 2


def test_servers_need_directories_of_their_ssds(files: tuple[Path, Path]) -> None:
    ssd = {"read": "1GB/s", "write": "1GB/s", "capacity": "1TB"}
    host = {"memory": "8GB", "nics": [{"rate": "1Gbit/s"}]}
    hosts = [
        {**host, "name": "gpu", "count": 2, "device": "A100-80GB"},
        {**host, "name": "spare", "ssds": [ssd]},
    ]
    why = JobPlans(job(), make_cluster({"hosts": hosts})).fitted(plan("server"))
    assert isinstance(why, str) and "have 0 directories" in why


@pytest.mark.parametrize("name", ["", "server", "summation"])
def test_the_command_writes_what_is_launched(
    files: tuple[Path, Path],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster, one = files
    out = cluster.with_name("plan.toml")
    monkeypatch.setattr(planner, "shape_of_job", lambda _: lump(1e6, 1e9))
    words = ["--job", str(one), "--out", str(out), *(["--placements", name] if name else [])]
    assert cli.main(["plan", str(cluster), *words]) == 0
    said = capsys.readouterr().out
    assert f"roadtrain launch {out} {one}" in said and "batch   8 samples" in said
    whole = load_plan_file(out)
    assert whole.plan.samples == 8 and whole.cluster == load_cluster(cluster)
    assert whole.model is not None and whole.model.layers == 2 and whole.model.seq_len > 0
    assert whole.machines is not None
    assert whole.predicted is not None and whole.predicted.seconds > 0
    assert whole.predicted.stages["stage 0"]["Forward"] > 0
    made = load_job(one).changed({"parallelism.auto": False})
    for section, keys in job_keys(whole, {}).items():
        made = made.changed({f"{section}.{key}": value for key, value in keys.items()})
    assert made.predicted.stages == whole.predicted.stages
    assert made.servers.addresses == (["10.0.0.9:7000"] if name == "server" else [])
    assert bool(made.parallelism.reducers) == (name == "summation")
    assert load_plan(out) == whole.plan  # which simulate reads
    stores = [place.store for host in whole.machines.hosts for place in host.servers]
    assert stores == (["/dev/shm/roadtrain-job-spare"] if name == "server" else [])


def test_where_nothing_can_be_launched_all_reasons_are_told(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, one = files
    monkeypatch.setattr(planner, "shape_of_job", lambda _: lump(1e6, 1e9))
    words = ["--job", str(one), "--placements", "zero3,files"]
    assert cli.main(["plan", str(cluster), *words]) == 1
    said = capsys.readouterr().out
    assert "placement zero3 is not run" in said and "is on 2 hosts" in said
    assert cli.main(["plan", str(cluster), *words, "--model", "GPT-2"]) == 2
    assert "do not go with --job" in capsys.readouterr().err


def test_without_a_job_a_plan_says_why_it_is_not_launched(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = files
    out = cluster.with_name("plan.toml")
    words = ["--model", "GPT-2", "--batch", "2", "--out", str(out), "--placements"]
    assert cli.main(["plan", str(cluster), *words, "ddp"]) == 0
    assert "launch  not this plan: placement ddp is not run" in capsys.readouterr().out
    assert load_plan_file(out).machines is None
    assert cli.main(["plan", str(cluster), *words, "zero1"]) == 0
    assert load_plan_file(out).machines is not None


def test_the_model_is_the_jobs(files: tuple[Path, Path]) -> None:
    shape = shape_of_job(load_job(files[1]))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert shape.params == 2 * layer + 2 * 256 * 64 + 64 and shape.tokens == 64
    with pytest.raises(ConfigError, match="vocab_size"):
        shape_of_job(load_job(files[1], {"data.tokenizer": "tokenizer.json"}))


def test_a_machine_alone_has_no_servers_to_plan() -> None:
    alone = make_cluster({"hosts": [tomllib.loads(CLUSTER)["hosts"][0]]})
    found = JobPlans(job(), alone).fitted(Plan(placement("server"), Parallelism(dp=2)))
    assert found == "placement server needs a host without devices, the cluster has none"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": "4"}, "does not take the config of llama: .* expected int, got str"),
        ({"num_attention_heads": 3}, "does not take the config of llama: .* not a multiple"),
        ({"model_type": "t5"}, "a `t5` is no causal language model"),
    ],
)
def test_a_model_that_train_does_not_take_is_not_planned(
    files: tuple[Path, Path], changes: dict[str, Any], sentence: str
) -> None:
    asked = load_job(files[1])
    kept = {} if "model_type" in changes else asked.model.config
    with pytest.raises(ConfigError, match=sentence):
        shape_of_job(asked.changed({"model": {"config": {**kept, **changes}}}))
