"""`roadtrain plan CLUSTER.toml --job JOB.toml`: plans that keep every value the job states."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from roadtrain import cli
from roadtrain.config.cluster import load_cluster, make_cluster
from roadtrain.config.job import Job, load_job, make_job
from roadtrain.config.plan_file import Plan, PlanFile, load_plan, load_plan_file, placement
from roadtrain.errors import ConfigError
from roadtrain.launch.launch import check_batch
from roadtrain.launch.resolve import resolve
from roadtrain.planner import plan as planner
from roadtrain.planner.job_keys import batch_of_job, job_keys, stated_degrees
from roadtrain.planner.job_plans import JobPlans, shape_of_job
from roadtrain.planner.machines_of import machines_of
from roadtrain.stages.parallelism import Parallelism
from tests.support.plans import lump

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
COMPILED = {"config": {"model_type": "llama"}, "compile": True}
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
    cluster, job_path = tmp_path / "cluster.toml", tmp_path / "job.toml"
    cluster.write_text(CLUSTER)
    job_path.write_text(JOB)
    return cluster, job_path


def plans(files: tuple[Path, Path], **tables: Any) -> JobPlans:
    return JobPlans(job(**tables), load_cluster(files[0]))


def plan(name: str, **changes: Any) -> Plan:
    return Plan(placement(name), Parallelism(dp=2)).changed(**changes)


def fitted_plan(job_plans: JobPlans, name: str, **changes: Any) -> Plan:
    found = job_plans.fitted(plan(name, **changes))
    assert isinstance(found, Plan), found
    return found


def test_the_batch_is_that_of_a_single_process() -> None:
    assert batch_of_job(job()) is None
    assert batch_of_job(job(data={"batch_size": 4})) == 4
    assert batch_of_job(job(optimizer={"accumulate": 3})) == 24
    tables = {"data": {"batch_size": 4}, "optimizer": {"accumulate": 2}}
    assert batch_of_job(job(**tables)) == 8
    assert batch_of_job(job(**tables, parallelism={"num_microbatches": 6})) == 24


def test_a_plan_uses_the_numbers_of_the_job(files: tuple[Path, Path]) -> None:  # Rule 2
    """Dtype, clipping and compression come from the job, not from the candidate."""
    plain = fitted_plan(plans(files), "server", update_at="step")
    assert plain.sizes.parameter_bytes == plain.sizes.gradient_bytes == 4
    assert (plain.sizes.state_bytes, plain.update_at) == (8, "gradient")
    assert plain.activation_checkpointing and not plain.staleness and plain.keep is None
    model = {"config": {"model_type": "llama"}, "dtype": "bf16"}
    own = {"model": model, "optimizer": {"clip_norm": 1.0, "name": "lion", "delay": 1}}
    made = fitted_plan(plans(files, **own, compress={"keep": 0.1}), "server")
    assert made.sizes.parameter_bytes == 2 and made.sizes.state_bytes == 8  # 4, and a copy
    assert (made.update_at, made.staleness, made.keep) == ("step", 1, 0.1)
    assert (
        fitted_plan(plans(files, compress={"downcast": "bf16"}), "server").sizes.gradient_bytes == 2
    )
    assert fitted_plan(plans(files), "zero1").sizes.gradient_bytes == 4


@pytest.mark.parametrize(
    ("tables", "name", "words"),
    [
        ({}, "zero3", "placement zero3 cannot be run"),
        ({}, "files", "is on 2 hosts"),
        ({"compress": {"keep": 0.1}}, "zero1", "compress and [parallelism]"),
        ({"optimizer": {"delay": 1}}, "zero1", "optimizer.delay and [parallelism]"),
        ({"budget": {"host": "1GiB"}}, "summation", "budget.host and [parallelism]"),
        ({"model": COMPILED}, "zero1", "model.compile and [parallelism]"),
        ({"optimizer": {"delay": "none"}}, "server", "cannot be simulated, as it does not"),
        ({"parallelism": {"pp": 2}}, "zero1", "the job has parallelism.pp = 2"),
        ({"parallelism": {"widths": [1, 1]}}, "zero1", "the job has parallelism.widths"),
        ({"parallelism": {"dp": 2}}, "server", "the job has [parallelism]"),
    ],
)
def test_candidates_that_contradict_the_job_are_refused(
    files: tuple[Path, Path], tables: dict[str, Any], name: str, words: str
) -> None:
    assert words in plans(files, **tables).fitted(plan(name))  # type: ignore[operator]


def test_degrees_that_the_job_states_are_kept(files: tuple[Path, Path]) -> None:
    stated = plans(files, parallelism={"dp": 2, "stages": "measured"})
    assert fitted_plan(stated, "zero1").parallelism.dp == 2
    even = plans(files, parallelism={"pp": 2, "stages": [1, 31]})
    ranks = Parallelism(pp=2, stages=(15, 17))
    assert fitted_plan(even, "zero1", parallelism=ranks).parallelism.stages == (1, 31)
    measured = plans(files, parallelism={"pp": 2, "stages": "measured"})
    assert fitted_plan(measured, "zero1", parallelism=ranks).parallelism.stages == ()
    wide = plans(files, parallelism={"pp": 2, "widths": [1, 1]})
    assert fitted_plan(wide, "zero1", parallelism=ranks).parallelism == Parallelism(pp=2)


def test_stages_of_other_widths_share_the_micro_batches_of_a_step() -> None:
    cluster = make_cluster({"hosts": [{**tomllib.loads(CLUSTER)["hosts"][0], "devices": 2}]})
    stated = JobPlans(job(parallelism={"pp": 2, "widths": [3, 1]}), cluster)
    made = stated.fitted(Plan(placement("zero1"), Parallelism(dp=2, pp=2), num_microbatches=4))
    assert isinstance(made, Plan), made
    assert made.parallelism.widths == (3, 1) and made.samples == 8


def test_a_degree_stated_at_its_default_still_counts_as_stated(files: tuple[Path, Path]) -> None:
    two = make_cluster({"hosts": [{**tomllib.loads(CLUSTER)["hosts"][0], "devices": 2}]})
    stated = job(parallelism={"tp": 1})
    split = Plan(placement("zero1"), Parallelism(dp=2, tp=2))
    assert JobPlans(stated, two).fitted(split) == "the job has parallelism.tp = 1"
    with pytest.raises(ConfigError, match=r"parallelism\.tp = 1, the plan is 2"):
        check_batch(PlanFile(split), stated)
    again = make_job(tomllib.loads(stated.to_toml()))  # a run's own job file lists all keys
    assert stated_degrees(again) == {} and stated_degrees(stated) == {"tp": 1}


def test_micro_batches_of_a_step_are_no_degree(files: tuple[Path, Path]) -> None:
    """The plan splits the samples of a step into micro-batches itself."""
    stated = job(data={"batch_size": 4}, parallelism={"dp": 2, "num_microbatches": 8})
    made = fitted_plan(JobPlans(stated, load_cluster(files[0])), "zero1", num_microbatches=16)
    assert made.samples == 32
    found = PlanFile(made, machines_of(made, load_cluster(files[0])))
    check_batch(found, stated)
    run = resolve(found, stated, name="x", addresses={}, token="")
    assert run.job.parallelism.num_microbatches == 32 and run.job.data.batch_size == 1


def test_a_batch_that_the_job_contradicts_is_refused(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, job_path = files
    assert cli.main(["plan", str(cluster), "--job", str(job_path), "--batch", "32"]) == 2
    assert "--batch is 32, but a step of the job has 8 samples" in capsys.readouterr().err


def hosts_of(*nics: str, devices: int = 2) -> Any:
    host = {"memory": "8GB", "device": "A100-80GB", "devices": devices}
    cards = [{"rate": "100Gbit/s", "kind": kind} for kind in nics]
    return [{**host, "name": f"h{n}", "nics": [card]} for n, card in enumerate(cards)]


def test_data_groups_stay_within_fast_networks() -> None:
    apart = make_cluster({"hosts": hosts_of("infiniband", "roce")})
    plan = Plan(placement("zero1"), Parallelism(dp=4))
    assert "mixes clusters" in JobPlans(job(), apart).fitted(plan)  # type: ignore[operator]
    across = job(parallelism={"dp": 4, "across_clusters": True})
    assert isinstance(JobPlans(across, apart).fitted(plan), Plan)
    stages = Plan(placement("zero1"), Parallelism(dp=2, pp=2), num_microbatches=2)
    assert isinstance(JobPlans(job(), apart).fitted(stages), Plan)
    joined = make_cluster({"hosts": hosts_of("roce", "roce")})
    assert isinstance(JobPlans(job(), joined).fitted(plan), Plan)


def test_served_workers_are_equally_many_on_each_host() -> None:
    spare = {"name": "s", "memory": "8GB", "nics": [{"rate": "1GB/s"}]}
    [first, second] = hosts_of("ethernet", "ethernet")
    where = make_cluster({"hosts": [first, {**second, "devices": 4}, spare]})
    for name in ("server", "smartnic"):
        why = JobPlans(job(), where).fitted(Plan(placement(name), Parallelism(dp=6)))
        assert isinstance(why, str) and why.endswith(
            "equally many workers on each host, but dp 6 x tp 1 x pp 1 has hosts with 2 and 4"
        )


@pytest.mark.parametrize(
    ("config", "degree", "sentence"),
    [
        ({"model_type": "gemma"}, 2, "cannot split a GemmaForCausalLM: its layers are not known"),
        ({"model_type": "llama", "num_key_value_heads": 1}, 2, "1 key-value heads"),
        ({"model_type": "llama", "num_key_value_heads": 2}, 2, ""),
    ],
)
def test_a_tensor_degree_must_suit_train(
    config: dict[str, Any], degree: int, sentence: str
) -> None:
    two = make_cluster({"hosts": [{**tomllib.loads(CLUSTER)["hosts"][0], "devices": 2}]})
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    stated = make_job({"model": {"config": {**sizes, "intermediate_size": 128, **config}}})
    made = JobPlans(stated, two).fitted(Plan(placement("zero1"), Parallelism(dp=2, tp=degree)))
    assert isinstance(made, Plan) if not sentence else sentence in made  # type: ignore[operator]


@pytest.mark.parametrize(
    ("tables", "name", "changes", "sentence"),
    [
        (
            {"compress": {"keep": 0.1, "error_feedback": True}},
            "server",
            {"num_microbatches": 2},
            "error feedback keeps one residual per step",
        ),
        ({"servers": {"replicas": 2}}, "server", {}, "replicas = 2 with 1 server"),
        ({"servers": {"replicas": 2}}, "smartnic", {}, "a relay cannot be combined"),
        ({"store": {"rates": "measured"}}, "server", {}, "store.rates or store.moved_from"),
        (
            {"parallelism": {"dp": 2, "resize_stages": 0.1}},
            "zero1",
            {"parallelism": Parallelism(dp=2, tp=2)},
            "but tp is 2",
        ),
        ({"servers": {"addresses": ["a:1"]}}, "server", {}, "the job sets servers.addresses"),
        (
            {"parallelism": {"pp": 2, "placements": [{"stage": 0, "files": ["s"]}]}},
            "zero1",
            {"parallelism": Parallelism(pp=2)},
            "[[parallelism.placements]]",
        ),
        ({"parallelism": {"reducers": "r.txt"}}, "zero1", {}, "parallelism.reducers"),
    ],
)
def test_plans_that_train_refuses_are_not_made(
    tables: dict[str, Any], name: str, changes: dict[str, Any], sentence: str
) -> None:
    hosts = tomllib.loads(CLUSTER)["hosts"]
    hosts[0]["nics"][0]["relay"] = True
    wide = "parallelism" in changes and changes["parallelism"].tp > 1
    where = make_cluster({"hosts": [hosts[0] | ({"devices": 2} if wide else {}), hosts[1]]})
    why = JobPlans(job(**tables), where).fitted(plan(name, **changes))
    assert isinstance(why, str) and sentence in why


def test_top_k_gradients_cannot_pass_a_relay() -> None:
    hosts = tomllib.loads(CLUSTER)["hosts"]
    where = make_cluster({"hosts": [{**hosts[0], "devices": 2}, hosts[1]]})
    stated = JobPlans(job(compress={"keep": 0.1}), where)
    why = stated.fitted(Plan(placement("server"), Parallelism(dp=4)))
    assert isinstance(why, str) and "sums whole gradients" in why


def test_files_and_local_gradients_are_not_compressed() -> None:
    host = {**tomllib.loads(CLUSTER)["hosts"][0], "count": 1, "addresses": ["a"], "devices": 2}
    where = make_cluster({"hosts": [host]})
    why = JobPlans(job(), where).fitted(Plan(placement("zero-offload"), Parallelism(dp=2)))
    assert isinstance(why, str) and "runs one worker" in why
    stated = JobPlans(job(compress={"downcast": "bf16"}), where)
    why = stated.fitted(Plan(placement("zero-offload")))
    assert isinstance(why, str) and "no gradients are sent" in why


def test_auto_leaves_all_degrees_to_the_plan() -> None:
    with pytest.raises(ConfigError, match='pp is set, but parallelism = "auto" plans all degrees'):
        job(parallelism={"auto": True, "pp": 2})


def test_servers_need_directories_of_their_ssds(files: tuple[Path, Path]) -> None:
    ssd = {"read": "1GB/s", "write": "1GB/s", "capacity": "1TB"}
    host = {"memory": "8GB", "nics": [{"rate": "1Gbit/s"}]}
    hosts = [
        {**host, "name": "gpu", "count": 2, "device": "A100-80GB"},
        {**host, "name": "spare", "ssds": [ssd]},
    ]
    why = JobPlans(job(), make_cluster({"hosts": hosts})).fitted(plan("server"))
    assert isinstance(why, str) and "have no directory in which" in why


@pytest.mark.parametrize("name", ["", "server", "summation"])
@pytest.mark.slow
def test_the_command_writes_a_plan_that_launches(
    files: tuple[Path, Path],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster, job_path = files
    out = cluster.with_name("plan.toml")
    monkeypatch.setattr(planner, "shape_of_job", lambda _: lump(1e6, 1e9))
    words = ["--job", str(job_path), "--out", str(out), *(["--placements", name] if name else [])]
    assert cli.main(["plan", str(cluster), *words]) == 0
    printed = capsys.readouterr().out
    assert f"roadtrain launch {out} {job_path}" in printed and "batch   8 samples" in printed
    whole = load_plan_file(out)
    assert whole.plan.samples == 8 and whole.cluster == load_cluster(cluster)
    assert whole.model is not None and whole.model.layers == 2 and whole.model.seq_len > 0
    assert whole.machines is not None
    assert whole.predicted is not None and whole.predicted.seconds > 0
    assert whole.predicted.stages["stage 0"]["Forward"] > 0
    made = load_job(job_path).changed({"parallelism.auto": False})
    for section, keys in job_keys(whole, load_job(job_path), {}).items():
        made = made.changed({f"{section}.{key}": value for key, value in keys.items()})
    assert made.predicted.stages == whole.predicted.stages
    assert made.servers.addresses == (["10.0.0.9:7000"] if name == "server" else [])
    assert bool(made.parallelism.reducers) == (name == "summation")
    assert load_plan(out) == whole.plan  # as simulate reads it
    stores = [place.store for host in whole.machines.hosts for place in host.servers]
    assert stores == (["/dev/shm/roadtrain-job-spare"] if name == "server" else [])


def test_if_nothing_can_be_launched_all_reasons_are_printed(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, job_path = files
    monkeypatch.setattr(planner, "shape_of_job", lambda _: lump(1e6, 1e9))
    words = ["--job", str(job_path), "--placements", "zero3,files"]
    assert cli.main(["plan", str(cluster), *words]) == 1
    printed = capsys.readouterr().out
    assert "placement zero3 cannot be run" in printed and "is on 2 hosts" in printed
    assert cli.main(["plan", str(cluster), *words, "--model", "GPT-2"]) == 2
    assert "cannot be combined with --job" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_job_the_command_says_why_a_plan_cannot_be_launched(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = files
    out = cluster.with_name("plan.toml")
    words = ["--model", "GPT-2", "--batch", "2", "--out", str(out), "--placements"]
    assert cli.main(["plan", str(cluster), *words, "ddp"]) == 0
    assert "launch  not possible: placement ddp cannot be run" in capsys.readouterr().out
    assert load_plan_file(out).machines is None
    assert cli.main(["plan", str(cluster), *words, "zero1"]) == 0
    assert load_plan_file(out).machines is not None


def test_the_model_comes_from_the_job(files: tuple[Path, Path]) -> None:
    shape = shape_of_job(load_job(files[1]))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert shape.params == 2 * layer + 2 * 256 * 64 + 64 and shape.tokens == 64
    with pytest.raises(ConfigError, match="vocab_size"):
        shape_of_job(load_job(files[1], {"data.tokenizer": "tokenizer.json"}))


def test_a_single_machine_gets_no_servers() -> None:
    alone = make_cluster({"hosts": [tomllib.loads(CLUSTER)["hosts"][0]]})
    found = JobPlans(job(), alone).fitted(Plan(placement("server"), Parallelism(dp=2)))
    assert found == "placement server needs a host without devices, but the cluster has none"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"num_hidden_layers": "4"},
            "does not accept the config of llama: .* expected int, got str",
        ),
        ({"num_attention_heads": 3}, "does not accept the config of llama: .* not a multiple"),
        ({"model_type": "t5"}, "`t5` is not a causal language model"),
    ],
)
def test_a_model_that_train_refuses_is_not_planned(
    files: tuple[Path, Path], changes: dict[str, Any], sentence: str
) -> None:
    stated = load_job(files[1])
    kept = {} if "model_type" in changes else stated.model.config
    with pytest.raises(ConfigError, match=sentence):
        shape_of_job(stated.changed({"model": {"config": {**kept, **changes}}}))
