"""The processes that a plan and a job need, and their hosts (launch/resolve.py). No process is
started."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.job import Job, make_job
from roadtrain.config.machines import (
    Machines,
    PlanHost,
    PlannedModel,
    Predicted,
    ServerPlace,
    SwitchPlace,
)
from roadtrain.config.plan_file import Plan, PlanFile, placement
from roadtrain.errors import ConfigError
from roadtrain.launch.dry_run import dry_run
from roadtrain.launch.home import RunHome
from roadtrain.launch.launch import check_batch
from roadtrain.launch.processes import Role
from roadtrain.launch.resolve import ResolvedRun, absolute_job, resolve
from roadtrain.planner.machines_of import machines_of
from roadtrain.stages.parallelism import Parallelism

TOKEN = "a token that nobody should read"
TWO = (
    PlanHost("gpu0", "gpu", "10.0.0.2", 2),
    PlanHost("gpu1", "gpu", "10.0.0.3", 2),
)
SERVER = PlanHost("spare0", "spare", "10.0.0.9", servers=(ServerPlace("/mnt/ssd0/run", 7000),))
SPARE = PlanHost("gpu9", "gpu", "10.0.0.8", 2)
DP4 = Parallelism(dp=4)


def a_job(**words: Any) -> Job:
    base = {"run": {"dir": "runs/x"}, "model": {"config": {"model_type": "llama"}}}
    return make_job({**base, **words})


def a_cluster() -> Cluster:
    host = {"memory": "64GB", "nics": [{"rate": "1GB/s", "switch": "tor", "relay": True}]}
    gpu = {"name": "gpu", "count": 4, "devices": 2, "device": "A100-80GB", **host}
    tor = {"name": "tor", "sums": True}
    return make_cluster({"hosts": [gpu, {"name": "spare", **host}], "switches": [tor]})


def a_plan(name: str, hosts: tuple[PlanHost, ...], **words: Any) -> PlanFile:
    machines = Machines(hosts, (SPARE,))
    return PlanFile(Plan(placement(name), **words), machines, None, a_cluster())


FOUR = a_plan("server", (*TWO, SERVER), parallelism=DP4, num_microbatches=2)


def resolved(plan: PlanFile, job: Job | None = None) -> ResolvedRun:
    return resolve(plan, job or a_job(), name="x", addresses={}, token=TOKEN)


def served_run() -> ResolvedRun:
    return resolved(FOUR)


def staged_run(widths: tuple[int, ...] = (2, 2), **words: Any) -> ResolvedRun:
    parallelism = Parallelism(pp=len(widths), widths=widths)
    return resolved(
        a_plan("zero1", TWO, parallelism=parallelism, num_microbatches=4), a_job(**words)
    )


@pytest.mark.parametrize(
    ("name", "workers", "services"),
    [
        ("server", 4, ["server spare 0"]),
        ("optimizer-node", 4, ["switch tor", "server spare 0"]),
        ("smartnic", 4, ["server gpu0 0", "server gpu1 0"]),
        ("zero1", 4, []),
        ("summation", 4, ["reducer spare"]),
        ("parameter-server", 4, ["reducer spare"]),
        ("files", 1, []),
        ("zero-offload", 1, []),
    ],
)
def test_every_placement_that_is_launched_becomes_processes(
    name: str, workers: int, services: list[str]
) -> None:
    plan = Plan(placement(name), Parallelism(dp=workers))
    found = PlanFile(plan, machines_of(plan, a_cluster()), None, a_cluster())
    addresses = {name: f"10.0.0.{n}" for n, name in enumerate(("gpu0", "gpu1", "spare", "tor"))}
    run = resolve(found, a_job(), name="x", addresses=addresses, token=TOKEN)
    assert [service.name for service in run.services()] == services
    assert len(run.workers(run.worker_hosts, 0).processes) == workers
    job_of(run, *run.worker_hosts)  # as `train` reads it


def test_servers_are_started_as_the_plan_says() -> None:
    (server,) = served_run().services()
    assert (server.name, server.role, server.host) == ("server spare0 0", Role.SERVER, "spare0")
    token = os.path.abspath("runs/x/launch/token")
    assert server.words == (
        *("-m", "roadtrain.cli", "serve", "10.0.0.9:7000"),
        *("--store", "/mnt/ssd0/run", "--token-file", token),
    )
    assert server.ports == (7000,)
    assert [(file.path, file.secret) for file in server.files] == [(token, True)]


def test_a_snapshot_of_a_store_in_memory_is_named() -> None:
    place = ServerPlace("/dev/shm/run", 7000, "/mnt/ssd0/copy")
    host = PlanHost("spare0", "spare", "10.0.0.9", servers=(place,))
    (server,) = resolved(a_plan("server", (*TWO, host), parallelism=DP4)).services()
    assert server.words[server.words.index("--snapshot") + 1] == "/mnt/ssd0/copy"


def test_switches_start_before_servers_and_workers_know_them() -> None:
    tor = PlanHost("tor", "tor", "10.0.0.1", switch=SwitchPlace(7100, "tor"))
    run = resolved(a_plan("optimizer-node", (*TWO, SERVER, tor), parallelism=DP4))
    assert [service.name for service in run.services()] == ["switch tor", "server spare0 0"]
    assert [switch.address for switch in run.job.servers.switches] == ["10.0.0.1:7100"]


def test_workers_get_the_environment_of_torchrun() -> None:
    workers = served_run().workers(("gpu0", "gpu1"), 3).processes
    last = workers[-1]
    assert [worker.name for worker in workers] == [f"worker {rank}" for rank in range(4)]
    assert last.host == "gpu1"
    assert dict(last.environment) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }


def test_the_token_is_in_no_command_line_and_no_environment() -> None:  # Rule 8
    run = served_run()
    for process in (*run.services(), *run.workers(("gpu0", "gpu1"), 0).processes):
        assert TOKEN not in " ".join([*process.words, *process.environment.values()])
        assert [file.secret for file in process.files if TOKEN in file.content] == [True]


def test_the_job_of_workers_names_the_servers_and_where_their_token_is() -> None:
    job = job_of(served_run(), "gpu0", "gpu1")
    assert job.servers.addresses == ["10.0.0.9:7000"]
    assert job.servers.token_file == os.path.abspath("runs/x/launch/token")
    assert job.run.dir == os.path.abspath("runs/x")


def job_of(run: ResolvedRun, *hosts: str) -> Job:
    (file,) = [each for each in run.workers(hosts, 0).processes[0].files if "job.toml" in each.path]
    return make_job(tomllib.loads(file.content))


@pytest.mark.parametrize(
    ("hosts", "accumulate"), [(("gpu0", "gpu1"), 2), (("gpu1",), 4), (("gpu0", "gpu9"), 2)]
)
def test_a_step_at_servers_has_as_many_micro_batches_on_any_hosts(
    hosts: tuple[str, ...], accumulate: int
) -> None:  # Rule 1
    assert job_of(served_run(), *hosts).optimizer.accumulate == accumulate


@pytest.mark.parametrize(
    ("hosts", "promised"),
    [
        (("gpu0", "gpu1"), 2.0),
        (("gpu0", "gpu9"), 2.0),
        (("gpu1",), 0.0),
        (("gpu1", "gpu0"), 0.0),
        (("gpu0", "gpu1", "gpu9"), 0.0),
    ],
)
def test_predictions_hold_only_for_the_width_of_the_plan(
    hosts: tuple[str, ...], promised: float
) -> None:
    """A spare host that replaces a planned host is assumed to be like it."""
    stages = {"stage 0": {"Forward": 0.5}}
    batches = replace(FOUR.plan, num_microbatches=3)  # 12 per step, which 6 workers can share too
    run = resolved(replace(FOUR, plan=batches, predicted=Predicted(seconds=2.0, stages=stages)))
    found = job_of(run, *hosts).predicted
    assert (found.seconds, found.stages) == (promised, stages if promised else {})


def test_micro_batches_that_do_not_divide_are_refused_with_both_numbers() -> None:
    three = (*TWO, PlanHost("gpu2", "gpu", "10.0.0.4", 2), SERVER)
    run = resolved(a_plan("server", three, parallelism=Parallelism(dp=6)))
    assert (
        run.can_run_on(["gpu0", "gpu1"])
        == "6 micro-batches per step cannot be divided among 4 workers"
    )
    with pytest.raises(ConfigError, match=r"6 micro-batches .* 4 workers"):
        run.workers(("gpu0", "gpu1"), 0)


def test_narrower_stages_keep_the_micro_batches_of_a_step() -> None:
    run = staged_run()
    assert job_of(run, "gpu0", "gpu1").parallelism.num_microbatches == 8
    fewer = job_of(replace(run, shared=True), "gpu1").parallelism
    assert (fewer.dp, fewer.pp, fewer.num_microbatches) == (1, 2, 8)


def test_stages_of_unequal_widths_do_not_shrink() -> None:
    run = staged_run((3, 1))
    assert run.can_run_on(["gpu0", "gpu1"]) == ""
    assert (
        "2 workers cannot be divided among the pipeline stages of the plan (dp 3+1"
        in run.can_run_on(["gpu0"])
    )


def test_snapshots_on_a_host_tie_its_stage_to_that_host() -> None:  # Rule 3
    assert "snapshots are in" in staged_run().can_run_on(["gpu0", "gpu9"])


def test_compression_residuals_stay_on_their_host() -> None:
    run = resolved(FOUR, a_job(compress={"keep": 0.1, "error_feedback": True}))
    assert "residuals of compression" in run.can_run_on(["gpu0", "gpu9"])


def test_a_joined_host_can_replace_another() -> None:
    run = served_run().with_host("new", "10.0.0.77", 2)
    assert run.can_run_on(["new", "gpu1"]) == ""
    first = run.workers(("new", "gpu1"), 1).processes[0]
    assert first.environment["MASTER_ADDR"] == "10.0.0.77"
    assert run.reducer("new").words[3] == "10.0.0.77:7000"
    assert run.reducer_lines(["new"]) == "10.0.0.77:7000\n"


def test_a_larger_spare_host_runs_as_many_workers_as_the_host_it_replaces() -> None:
    run = served_run().with_host("large", "10.0.0.77", 8)
    workers = run.workers(("gpu0", "large"), 1).processes
    assert [worker.host for worker in workers] == ["gpu0", "gpu0", "large", "large"]
    assert run.can_run_on(["gpu0", "large"]) == ""


def test_hosts_that_are_unknown_idle_or_named_twice_are_refused() -> None:
    run = served_run()
    assert "no host 'gpu7'" in run.can_run_on(["gpu7"])
    assert "0 workers can run on spare0" in run.can_run_on(["gpu0", "spare0"])
    assert "named 2 times" in run.can_run_on(["gpu0", "gpu0"])
    assert "0 hosts are left for the workers" in run.can_run_on([])


def test_a_plan_without_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no machines"):
        resolved(PlanFile(Plan(placement("server"))))


def test_a_host_without_an_address_is_refused_unless_the_engine_knows_it() -> None:
    plan = a_plan("server", (PlanHost("gpu0", "gpu", "", 1), SERVER))
    with pytest.raises(ConfigError, match="gpu0 of the plan has no address"):
        resolved(plan)
    run = resolve(plan, a_job(), name="x", addresses={"gpu0": "fd00::2"}, token="")
    assert run.workers(("gpu0",), 0).processes[0].environment["MASTER_ADDR"] == "fd00::2"


def test_a_plan_for_other_machines_or_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 ranks .* but 4 workers on its hosts"):
        resolved(a_plan("server", (*TWO, SERVER), parallelism=Parallelism(dp=8)))
    plan = a_plan("zero1", TWO, parallelism=Parallelism(dp=2, pp=2, stages=(3, 3)))
    four = a_job(model={"config": {"model_type": "llama", "num_hidden_layers": 4}})
    with pytest.raises(ConfigError, match="a model with 6 layers, but the job's model has 4"):
        resolved(plan, four)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"parallelism": {"tp": 2}}, "parallelism.tp = 2, the plan is 1"),
        ({"parallelism": {"dp": 4}}, "parallelism.dp = 4, the plan is 2"),
        ({"parallelism": {"stages": [1, 1]}}, r"stages = \[1, 1\], the plan is even"),
    ],
)
def test_degrees_that_the_job_contradicts_are_refused(words: dict[str, Any], sentence: str) -> None:
    plan = a_plan("zero1", TWO, parallelism=Parallelism(dp=2, pp=2))
    with pytest.raises(ConfigError, match=sentence):
        resolved(plan, a_job(**words))


def test_degrees_and_a_plan_without_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallelism\.dp is 4 in the job, but unset in"):
        resolved(FOUR, a_job(parallelism={"dp": 4}))


def test_a_job_that_names_other_servers_than_the_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"servers\.addresses is .*:9'\] in the job"):
        resolved(FOUR, a_job(servers={"addresses": ["10.0.0.9:9"]}))


def test_workers_read_the_reducers_from_a_file_that_changes() -> None:
    host = PlanHost("spare0", "spare", "10.0.0.9", reducer=7000)
    run = resolved(a_plan("summation", (*TWO, host), parallelism=Parallelism(dp=4)))
    (reducer,) = run.services()
    assert reducer.words[2:5] == ("serve", "10.0.0.9:7000", "--sum")
    assert run.sums_at_reducers
    parallelism = run.job.parallelism
    assert (parallelism.reducers, parallelism.reducers_token_file) == (
        os.path.abspath("runs/x/launch/reducers.txt"),
        os.path.abspath("runs/x/launch/token"),
    )
    files = {
        file.path: file.content for file in run.workers(("gpu0", "gpu1"), 0).processes[0].files
    }
    assert files[run.reducers_path] == "10.0.0.9:7000\n"
    files = {f.path: f.content for f in run.workers(("gpu0", "gpu1"), 0, ()).processes[0].files}
    assert files[run.reducers_path] == ""


def test_hosts_that_hold_state_of_a_stage() -> None:
    assert staged_run().hosts_of_stages(("gpu0", "gpu1")) == ["gpu0", "gpu1"]
    assert served_run().hosts_of_stages(("gpu0", "gpu1")) == ["gpu0"]
    assert staged_run().hosts_of_stages(()) == []


def test_workers_get_the_committed_step() -> None:
    """Rule 3: on a host without the run's files they must not begin at step 0."""
    files = served_run().workers(("gpu0", "gpu1"), 1, committed=7).processes[0].files
    (text,) = (file.content for file in files if file.path.endswith("job.toml"))
    assert make_job(tomllib.loads(text)).launched.committed == 7


def test_a_server_host_that_returns_at_another_address() -> None:
    run = served_run().with_host("spare0", "10.9.9.9", 0)
    assert run.services()[0].words[3] == "10.9.9.9:7000"
    assert run.job.servers.addresses == ["10.9.9.9:7000"]


def test_a_dry_run_lists_processes_with_hosts_and_files(tmp_path: Path) -> None:
    run, home = replace(served_run(), token=TOKEN), RunHome(tmp_path / "x")
    text = dry_run(run, home)
    assert TOKEN not in text  # Rule 8
    assert text.startswith("run x: 4 workers and 1 service on 3 hosts, spare hosts: gpu9\n")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    launched = os.path.abspath("runs/x/launch")
    assert (
        "spare0 (10.0.0.9) server python -m roadtrain.cli serve 10.0.0.9:7000 --store"
        f" /mnt/ssd0/run --token-file {launched}/token" in lines
    )
    assert (
        lines.count(f"gpu1 (10.0.0.3) worker python -m roadtrain.cli train {launched}/job.toml")
        == 2
    )
    for host in ("gpu0", "gpu1", "spare0"):
        assert f"{host} {launched}/token mode 600, a secret that is generated at the start" in lines
    assert f"gpu1 {launched}/job.toml mode 644" in lines
    assert "spare0 /mnt/ssd0/run/ by its server" in lines
    assert f"here {home.token_path} mode 600, a secret that is generated at the start" in lines
    assert not os.path.exists(launched) and not home.path.exists()


def test_paths_of_a_job_are_relative_to_where_it_is_launched() -> None:
    words = {
        "data": {"paths": ["text/*.txt"], "tokenizer": "t.json"},
        "store": {"files": ["{run}/store", "other"]},
    }
    job = make_job(tomllib.loads(absolute_job(a_job(**words)).to_toml()))
    here = os.getcwd()
    assert job.run.dir == f"{here}/runs/x"
    assert job.store.files == [f"{here}/runs/x/store", f"{here}/other"]
    assert (job.data.paths, job.data.tokenizer) == ([f"{here}/text/*.txt"], f"{here}/t.json")


def test_servers_on_worker_hosts_stay_there() -> None:
    hosts = tuple(replace(host, servers=(ServerPlace("/dev/shm/x", 7000),)) for host in TWO)
    run = resolved(a_plan("server", hosts, parallelism=DP4))
    assert "the state is on servers on the workers' hosts" in run.can_run_on(["gpu0", "gpu9"])
    assert run.can_run_on(["gpu1", "gpu0"]) == ""


def test_a_tree_of_switches_names_workers_by_rank() -> None:
    run = served_run()
    tree = [{"address": "10.0.0.1:7100", "workers": [0, 1, 2, 3]}]
    run = replace(run, job=run.job.changed({"servers.switches": tree}))
    assert run.can_run_on(["gpu0", "gpu9"]) == ""
    assert "is set up for 4 workers, but there are 2" in run.can_run_on(["gpu0"])


def test_a_files_plan_of_two_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement files runs one worker, .* has 2"):
        resolved(a_plan("files", TWO[:1], parallelism=Parallelism(dp=2)), a_job())


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 256}
GPT2 |= {"n_positions": 64}
GPT2_PARAMS = 256 * 8 + 64 * 8 + 2 * (12 * 64 + 13 * 8) + 2 * 8


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        (PlannedModel(GPT2_PARAMS, 32, 2), ""),
        (PlannedModel(GPT2_PARAMS, 32), ""),
        (PlannedModel(GPT2_PARAMS, 32, 3), "3 layers, but the job's model has 2"),
        (PlannedModel(99, 32), f"99 parameters, but the job's model has {GPT2_PARAMS:,}"),
        (PlannedModel(GPT2_PARAMS, 64), "64 tokens per sample, but the job's model has 32"),
    ],
)
def test_a_plan_is_launched_only_for_its_model(planned: PlannedModel, message: str) -> None:
    mine = a_job(model={"config": GPT2}, data={"seq_len": 32})
    plan = replace(FOUR, model=planned)
    if not message:
        assert resolved(plan, mine).worker_count == 4
        return
    with pytest.raises(ConfigError) as caught:
        resolved(plan, mine)
    assert str(caught.value).startswith(f"the plan is for a model with {message}\n")


def test_files_of_a_stage_are_relative_to_the_users_directory() -> None:
    placements = [
        {"stage": 0, "files": ["disk/run", "{run}/store"]},
        {"stage": 1, "servers": ["10.0.0.9:7000"], "token_file": "token"},
    ]
    job = absolute_job(a_job(parallelism={"pp": 2, "placements": placements}))
    here, (files, servers) = os.getcwd(), job.parallelism.placements
    assert files.files == [f"{here}/disk/run", f"{here}/runs/x/store"]
    assert servers.token_file == f"{here}/token"


def test_a_host_with_both_copies_of_a_chunk_cannot_be_dropped() -> None:  # Rule 3
    two = (ServerPlace("/mnt/a", 7000), ServerPlace("/mnt/b", 7001))
    both = replace(TWO[1], servers=two)
    plan = a_plan("server", (TWO[0], both), parallelism=DP4, num_microbatches=2)
    run = resolved(plan, a_job(servers={"replicas": 2}))
    assert "servers on the workers' hosts" in run.can_run_on(["gpu0"])


def test_a_batch_stated_by_the_job_must_be_that_of_the_plan() -> None:
    stated = a_job(data={"batch_size": 16}, optimizer={"accumulate": 4})
    with pytest.raises(ConfigError, match=r"64 samples .* the plan has 8"):
        check_batch(FOUR, stated)
    check_batch(FOUR, a_job())
    check_batch(FOUR, a_job(data={"batch_size": 8}))


@pytest.mark.parametrize(
    ("name", "hosts", "sentence"),
    [
        (
            "server",
            TWO[:1],
            "the plan's machines have 0 servers, but placement server needs at least 1",
        ),
        ("smartnic", TWO[:1], "have 0 servers, but placement smartnic"),
        ("summation", TWO, "have 0 reducers, but placement summation"),
        ("zero1", (*TWO, SERVER), "have 1 servers, but placement zero1 needs none"),
        ("zero1", (*TWO, PlanHost("s", "spare", "10.0.0.9", reducer=7000)), "have 1 reducers"),
        ("optimizer-node", (*TWO, SERVER), "have 0 switches, but placement optimizer-node"),
    ],
)
def test_a_plan_has_the_services_that_its_placement_uses_and_no_others(
    name: str, hosts: tuple[PlanHost, ...], sentence: str
) -> None:
    workers = sum(host.workers for host in hosts)
    with pytest.raises(ConfigError, match=sentence):
        resolved(a_plan(name, hosts, parallelism=Parallelism(dp=workers)))


def test_a_plan_may_contain_servers_of_a_stage() -> None:
    placements = [{"stage": 0, "servers": ["10.0.0.9:7000"], "token_file": "token"}]
    job = a_job(parallelism={"pp": 2, "placements": placements})
    plan = a_plan("zero1", (*TWO, SERVER), parallelism=Parallelism(dp=2, pp=2), num_microbatches=4)
    assert [service.name for service in resolved(plan, job).services()] == ["server spare0 0"]


def test_servers_and_reducers_of_the_job_contradict_a_plan_also_with_auto() -> None:
    for own in ({"servers": {"addresses": ["10.0.0.9:9"]}}, {"parallelism": {"reducers": "r"}}):
        auto = {"auto": True, **own.get("parallelism", {})}
        with pytest.raises(ConfigError, match=r"(addresses|reducers) is .* in the job, but"):
            resolved(FOUR, a_job(**{**own, "parallelism": auto}))


def test_equal_widths_count_the_micro_batches_of_all_replicas() -> None:
    plan = a_plan("zero1", TWO, parallelism=Parallelism(dp=2, pp=2), num_microbatches=4)
    run = resolved(plan, a_job(parallelism={"pp": 2, "widths": [2, 2], "num_microbatches": 4}))
    assert run.job.parallelism.num_microbatches == 8
