"""The checks before a start (launch/checks.py, host_report.py), each with a one-sentence error. The
engine runs `report_host` in this process, on temporary directories and free ports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roadtrain.chunks import ParamSpec
from roadtrain.config.cluster import make_cluster
from roadtrain.config.job import make_job
from roadtrain.config.job_model import shape_of
from roadtrain.config.machines import Machines, PlanHost, PlannedModel, ServerPlace
from roadtrain.config.plan_file import Plan, PlanFile, placement
from roadtrain.device.buffers import Buffer
from roadtrain.errors import LaunchError
from roadtrain.launch import checks
from roadtrain.launch.checks import check, directory_is_shared, without_unfit_spares
from roadtrain.launch.host_report import HostQuery, report_host
from roadtrain.launch.launch_engine import HostSeen
from roadtrain.launch.resolve import ResolvedRun, resolve
from roadtrain.planner.job_plans import JobPlans
from roadtrain.stages.parallelism import Parallelism
from roadtrain.storage.generation import create_part, publish_part
from roadtrain.storage.lock import Locks
from roadtrain.storage.mark import Mark
from roadtrain.storage.meta import GroupRule, StoreMeta
from roadtrain.units import GIB
from tests.support.ports import free_port

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
OURS, THEIRS = (f"{prefix}-0000-4000-8000-000000000000" for prefix in ("11111111", "22222222"))
PARAMS = 2 * 256 * 8 + 8 + 2 * (4 * 64 + 3 * 128 + 16)


@dataclass
class OneProcess:
    """An engine whose hosts are all this process. changed: Fields to replace in the report of a
    host."""

    seen: dict[str, HostSeen]
    silent: Sequence[str] = ()
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    questions: dict[str, HostQuery] = field(default_factory=dict)

    def hosts(self) -> list[HostSeen]:
        return [*self.seen.values()]

    def ask(self, host: str, words: Sequence[str], request: Mapping[str, Any]) -> Any:
        assert words == checks.REPORT
        if host in self.silent:
            raise LaunchError(f"{host} answered nothing within 30 s", hint="is it up?")
        query = self.questions[host] = msgspec.convert(request, HostQuery)
        return {**msgspec.to_builtins(report_host(query)), **self.changed.get(host, {})}


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LEAVE_S", ())


def a_run(tmp_path: Path, *stores: str, workers: int = 1, **words: Any) -> ResolvedRun:
    (tmp_path / "text.txt").write_text("some text")
    base: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"config": LLAMA},
        "data": {"paths": [str(tmp_path / "text.txt")], "seq_len": 16},
    }
    places = tuple(
        ServerPlace(store, free_port()) for store in stores or (str(tmp_path / "store"),)
    )
    hosts = (
        PlanHost("gpu0", "gpu", "127.0.0.1", workers),
        PlanHost("spare0", "spare", "127.0.0.1", servers=places),
    )
    plan = PlanFile(Plan(placement("server"), Parallelism(dp=workers)), Machines(hosts))
    return resolve(plan, make_job({**base, **words}), name="x", addresses={}, token="")


def an_engine(run: ResolvedRun, devices: int = 0, **about: Any) -> OneProcess:
    seen = HostSeen("", "127.0.0.1", devices)
    return OneProcess({h.name: replace(seen, name=h.name) for h in run.machines.hosts}, **about)


def refusal_of(run: ResolvedRun, engine: OneProcess) -> str:
    with pytest.raises(LaunchError) as caught:
        check(run, engine)
    return str(caught.value)


def a_store(directory: Path, width: int = PARAMS, job: str = OURS) -> None:
    """Create the part of a server that has committed step 3."""
    blocks = (("", (ParamSpec("w", (width,), "fp32", True, 0),)),)
    meta = StoreMeta(job, blocks, 65536, (GroupRule("sgd"),), directories=("a",))
    meta = replace(meta, owners=(0,) * len(meta.table.chunks))
    tier = create_part(directory, meta, direct=False)
    for chunk, record in meta.records.items():
        tier.write(chunk, "record", Buffer(record.nbytes).view[: record.nbytes])
    tier.prepare(3, b"")
    tier.committed(3)
    tier.close()
    publish_part(directory)


def test_a_valid_run_passes_and_no_file_is_changed(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert check(run, an_engine(run)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_the_parameter_formula_equals_the_size_of_a_store() -> None:
    shape = shape_of(make_job({"model": {"config": LLAMA}, "data": {"seq_len": 16}}))
    assert shape is not None and shape.params == PARAMS


def test_a_missing_host_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    engine = an_engine(run)
    del engine.seen["spare0"]
    assert refusal_of(run, engine) == (
        "host spare0 (127.0.0.1) cannot be reached; 1 of the plan's 2 hosts are up"
    )


def test_a_plan_for_other_machines(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    engine = OneProcess({"a": HostSeen("a", "127.0.0.1", 0)})
    assert refusal_of(run, engine) == (
        "none of the plan's 2 hosts (gpu0, spare0) is up; the engine has 1 other host (a)"
    )


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:  # Rule 5
    run = a_run(tmp_path)
    assert refusal_of(run, an_engine(run, silent=("gpu0",))) == (
        "host gpu0 does not answer: gpu0 answered nothing within 30 s; is it up?"
    )


def test_too_few_devices(tmp_path: Path) -> None:
    run = a_run(tmp_path, workers=2, run={"dir": str(tmp_path / "run"), "device": "cuda"})
    message = "host gpu0 has 1 device, but the plan places 2 workers on it"
    assert refusal_of(run, an_engine(run, devices=1)) == message
    assert check(run, an_engine(run, devices=2)) == []


def test_workers_that_share_cores_are_reported(tmp_path: Path) -> None:
    run = a_run(tmp_path, workers=3)
    engine = an_engine(run, changed={"gpu0": {"processors": 2}, "spare0": {"processors": 1}})
    assert check(run, engine) == ["host gpu0: 3 workers share 2 processors"]


def test_too_little_memory(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    plan = run.plan_file.plan.changed(host_bytes=1e9)
    run = replace(run, plan_file=replace(run.plan_file, plan=plan))
    # and not the memory that an engine hands out
    message = "host gpu0 has 1.0 GiB of memory, but the plan needs"
    assert refusal_of(run, an_engine(run, changed={"gpu0": {"memory": GIB}})).startswith(message)


def with_cluster(run: ResolvedRun, device: str) -> ResolvedRun:
    made = {"flops": "1TFLOP/s", "memory": "8GB", "kind": device}
    hosts = [
        {"name": "gpu", "memory": "64GB", "device": made},
        {"name": "spare", "memory": "64GB"},
    ]
    return replace(run, plan_file=replace(run.plan_file, cluster=make_cluster({"hosts": hosts})))


def test_a_host_whose_devices_are_not_visible(tmp_path: Path) -> None:
    run = with_cluster(a_run(tmp_path), "A100")
    alone = {"spare0": {"machine": "another"}}
    assert refusal_of(run, an_engine(run, changed=alone)) == (
        "host gpu0 has 0 devices, but the plan places 1 worker on it (A100); run.device ="
        ' "cpu" in the job makes its workers compute on processors'
    )
    # the hosts of a lab are one machine, and its devices are not emulated
    assert check(run, an_engine(run)) == [
        "host gpu0 has A100 in the plan's cluster, but no device is visible: the host's workers"
        " compute on processors"
    ]
    meant = replace(run, job=run.job.changed({"run.device": "cpu"}))
    assert check(meant, an_engine(meant, changed=alone)) == []
    of_processors = with_cluster(run, "cpu")
    assert check(of_processors, an_engine(of_processors, changed=alone)) == []


def test_a_host_without_the_devices_that_the_others_have(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    hosts = (*run.machines.hosts, PlanHost("gpu1", "gpu", "127.0.0.1", 1))
    plan = PlanFile(Plan(placement("server"), Parallelism(dp=2)), Machines(hosts))
    run = replace(run, plan_file=plan)
    engine = an_engine(run)
    engine.seen["gpu0"] = replace(engine.seen["gpu0"], devices=1)
    assert refusal_of(run, engine).startswith(
        "host gpu1 has 0 devices, but the plan places 1 worker on it;"
    )


def test_differences_between_job_and_plan_are_reported(tmp_path: Path) -> None:
    run = with_cluster(a_run(tmp_path), "cpu")
    cluster = run.plan_file.cluster
    assert cluster is not None
    plan = JobPlans(run.job, cluster).as_it_runs(run.plan_file.plan)
    planned = replace(run.plan_file, plan=plan, model=PlannedModel(PARAMS, 16))
    run = replace(run, plan_file=planned)
    assert check(run, an_engine(run)) == []
    words = {"model.dtype": "bf16", "compress.keep": 0.1, "optimizer.delay": 1}
    other = replace(run, job=run.job.changed(words))
    assert check(other, an_engine(other)) == [
        "the plan was made for a job with other numbers, so its predictions may be wrong: bytes of"
        " a parameter 4 (here 2), bytes of a gradient in transfer 4 (here 2), bytes of a"
        " parameter's optimizer state 8 (here 12), fraction of a gradient that is sent 1 (here"
        " 0.1), updates that a step may miss 0 (here 1)"
    ]


def a_staged_run(tmp_path: Path) -> ResolvedRun:
    (tmp_path / "text.txt").write_text("x")
    words: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"config": LLAMA},
        "data": {"paths": [str(tmp_path / "text.txt")], "seq_len": 16},
        "parallelism": {
            "pp": 2,
            "placements": [{"stage": n, "files": [str(tmp_path / f"s{n}")]} for n in (0, 1)],
        },
    }
    hosts = tuple(PlanHost(f"g{n}", "gpu", "127.0.0.1", 1) for n in (0, 1))
    plan = Plan(placement("zero1"), Parallelism(pp=2), num_microbatches=8)
    plan_file = PlanFile(plan, Machines(hosts))
    return resolve(plan_file, make_job(words), name="x", addresses={}, token="")


def test_each_stage_stores_its_part_of_the_model(tmp_path: Path) -> None:
    run = a_staged_run(tmp_path)
    a_store(tmp_path / "s0", PARAMS // 2, OURS)
    a_store(tmp_path / "s1", PARAMS - PARAMS // 2, THEIRS)
    (tmp_path / "run").mkdir()
    Mark(tmp_path / "run").adopt("33333333-0000-4000-8000-000000000000", 3)
    assert check(run, an_engine(run)) == []


def test_a_store_whose_disk_is_not_mounted(tmp_path: Path) -> None:
    run = a_run(tmp_path, f"{tmp_path}/mnt/store")
    assert refusal_of(run, an_engine(run)) == (
        f"host spare0: store {tmp_path}/mnt/store does not exist, nor does its parent"
        f" {tmp_path}/mnt: is the disk mounted?"
    )


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = a_run(tmp_path, f"{tmp_path}/file")
    message = (
        f"host spare0: store {tmp_path}/file is not writable: {tmp_path}/file is not a directory"
    )
    assert refusal_of(run, an_engine(run)) == message


def test_a_store_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/nope/store")
    run = a_run(tmp_path, f"{tmp_path}/link")
    message = f"host spare0: store {tmp_path}/link is not writable: {tmp_path}/link is a dangling"
    assert refusal_of(run, an_engine(run)).startswith(message)


def test_a_store_that_is_too_full(tmp_path: Path) -> None:
    huge = {**LLAMA, "hidden_size": 2**20}
    run = a_run(tmp_path, model={"config": huge})
    message = refusal_of(run, an_engine(run))
    assert message.startswith(f"store {tmp_path}/store on spare0: ")
    assert "will be stored, but" in message and message.endswith("are free")


def test_a_store_that_another_run_uses(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    run = a_run(tmp_path)
    with closing(Locks([tmp_path / "store"])):
        message = f"host spare0: store {tmp_path}/store is in use by another run"
        assert refusal_of(run, an_engine(run)) == message
    assert check(run, an_engine(run)) == []


def test_a_store_in_use_a_moment_ago_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    run, locks = a_run(tmp_path), Locks([tmp_path / "store"])
    monkeypatch.setattr(checks, "LEAVE_S", (1.0,))
    monkeypatch.setattr(checks.time, "sleep", lambda _: locks.close())
    assert check(run, an_engine(run)) == []


def test_a_store_of_another_model(tmp_path: Path) -> None:
    a_store(tmp_path / "store", width=100)
    run = a_run(tmp_path)
    assert refusal_of(run, an_engine(run)) == (
        f"host spare0: store {tmp_path}/store is of a different model: the store holds 100"
        f" parameters, but the job's model has {PARAMS:,}"
    )


def test_a_store_that_is_damaged(tmp_path: Path) -> None:
    a_store(tmp_path / "store")
    (tmp_path / "store" / "gen-1" / "store.json").write_bytes(b"{}")
    run = a_run(tmp_path)
    assert f"store {tmp_path}/store cannot be opened: " in refusal_of(run, an_engine(run))


def test_a_store_of_another_run(tmp_path: Path) -> None:  # Rule 3
    a_store(tmp_path / "store")
    run = a_run(tmp_path)
    assert refusal_of(run, an_engine(run)) == (
        f"host spare0: store {tmp_path}/store belongs to another run: the store is of job {OURS}, at"
        f" step 3, but {tmp_path}/run has no mark of any job; give the plan another directory, or"
        " set run.new_store = true to go on from this store"
    )
    meant = replace(run, job=run.job.changed({"run.new_store": True}))
    assert check(meant, an_engine(meant)) == [
        f"host spare0: the run goes on from the state in {tmp_path}/store, job {OURS} at step 3"
    ]
    (tmp_path / "run").mkdir()
    Mark(tmp_path / "run").adopt(THEIRS, 9)
    assert refusal_of(run, an_engine(run)) == (
        f"host spare0: store {tmp_path}/store belongs to another run: the store is of job {OURS}, at"
        f" step 3, but the run in {tmp_path}/run is of job {THEIRS}, at step 9"
    )


def test_a_former_worker_host_vouches_for_the_run_of_a_store(tmp_path: Path) -> None:
    a_store(tmp_path / "store")
    run = a_run(tmp_path)
    spares = (PlanHost("old", "gpu", "127.0.0.1", 1),)
    machines = replace(run.machines, spares=spares)
    run = replace(run, plan_file=replace(run.plan_file, machines=machines))
    engine = an_engine(run)
    mine = engine.seen["gpu0"]
    engine.seen["old"] = replace(mine, name="old")
    engine.changed["old"] = {"marked_job": OURS, "marked_step": 3}
    assert any("goes on from" in line for line in check(run, engine))
    engine.changed["old"] = {}
    assert "belongs to another run" in refusal_of(run, engine)


def test_stores_of_two_runs(tmp_path: Path) -> None:
    a_store(tmp_path / "a", job=OURS)
    a_store(tmp_path / "b", job=THEIRS)
    run = a_run(tmp_path, f"{tmp_path}/a", f"{tmp_path}/b")
    assert "the stores belong to 2 different runs: " in refusal_of(run, an_engine(run))


def test_a_store_that_has_vanished(tmp_path: Path) -> None:  # Rule 3
    run = a_run(tmp_path)
    (tmp_path / "run").mkdir()
    Mark(tmp_path / "run").adopt(THEIRS, 9)
    assert refusal_of(run, an_engine(run)) == (
        f"the run in {tmp_path}/run has committed step 9, but its stores ({tmp_path}/store) are"
        " empty: are their disks mounted?"
    )


@pytest.mark.parametrize("second", ["a", "a/b", "link"])
def test_two_servers_in_one_directory(tmp_path: Path, second: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    run = a_run(tmp_path, f"{tmp_path}/a", f"{tmp_path}/other")
    places = (ServerPlace(f"{tmp_path}/{second}", free_port()),)
    # at another address, as with hosts emulated on one machine
    more = PlanHost("spare1", "spare", "127.0.0.2", servers=places)
    machines = replace(run.machines, hosts=(*run.machines.hosts, more))
    run = replace(run, plan_file=replace(run.plan_file, machines=machines))
    assert refusal_of(run, an_engine(run)) == (
        f"stores {tmp_path}/a on spare0 and {tmp_path}/{second} on spare1 are the same"
        " directory or nested: each server needs a directory of its own"
    )


def test_a_store_that_would_be_made_inside_another(tmp_path: Path) -> None:
    run = a_run(tmp_path, f"{tmp_path}/run/a", f"{tmp_path}/run/a/b", f"{tmp_path}/run/ab")
    message = refusal_of(run, an_engine(run))
    assert message.startswith(f"stores {tmp_path}/run/a on spare0 and {tmp_path}/run/a/b on spare0")
    assert "\n" not in message


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    port = run.machines.hosts[1].servers[0].port
    with closing(socket.create_server(("127.0.0.1", port))):
        message = f"host spare0: port {port} of 127.0.0.1 is in use by another process"
        assert refusal_of(run, an_engine(run)) == message


def test_an_address_that_the_host_does_not_have(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    port = run.machines.hosts[1].servers[0].port
    run = replace(run, addresses={**run.addresses, "spare0": "198.51.100.1"})
    message = f"port {port} of 198.51.100.1 cannot be bound: this host does not have the address"
    assert message in refusal_of(run, an_engine(run))


def test_text_and_tokenizer_that_a_host_lacks(tmp_path: Path) -> None:
    data = {"paths": [f"{tmp_path}/none/*.txt"], "tokenizer": f"{tmp_path}/tokenizer.json"}
    run = a_run(tmp_path, data={**data, "seq_len": 16})
    assert refusal_of(run, an_engine(run)) == (
        "2 problems, nothing is started:\n"
        f"  host gpu0 does not have {tmp_path}/none/*.txt, which the job names\n"
        f"  host gpu0 does not have {tmp_path}/tokenizer.json, which the job names"
    )


def test_other_versions_are_reported(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    engine = an_engine(run, changed={"gpu0": {"versions": {**checks.versions(), "torch": "2.0"}}})
    assert [line.partition(", ")[0] for line in check(run, engine)] == ["host gpu0 has torch 2.0"]


def test_a_directory_of_all_hosts(tmp_path: Path) -> None:
    run = a_run(tmp_path, workers=1)
    hosts = (*run.machines.hosts, PlanHost("gpu1", "gpu", "127.0.0.1", 1))
    plan = PlanFile(Plan(placement("server"), Parallelism(dp=2)), Machines(hosts))
    run = replace(run, plan_file=plan)
    assert directory_is_shared(run, an_engine(run))
    assert not directory_is_shared(run, an_engine(run, changed={"gpu1": {"machine": "another"}}))
    assert not directory_is_shared(run, an_engine(run, silent=("gpu1",)))


def meeting(tmp_path: Path) -> ResolvedRun:
    """One worker, whose snapshots are in the run's directory, and a spare host."""
    run = a_run(tmp_path)
    spare = PlanHost("gpu1", "gpu", "127.0.0.1", 1)
    machines = Machines((PlanHost("gpu0", "gpu", "127.0.0.1", 1),), (spare,))
    plan = PlanFile(Plan(placement("zero1")), machines)
    job = run.job.changed({"parallelism.dp": 1, "servers.addresses": []})
    assert job.parallelism.used
    return replace(run, plan_file=plan, job=job, shared=True)


def with_spare(run: ResolvedRun, **about: Any) -> OneProcess:
    engine = an_engine(run, **about)
    engine.seen["gpu1"] = replace(engine.seen["gpu0"], name="gpu1")
    return engine


def test_a_spare_host_without_the_run_directory_runs_no_workers(tmp_path: Path) -> None:
    """Rule 3: its workers would begin at step 0."""
    run = meeting(tmp_path)
    used, lines = without_unfit_spares(run, with_spare(run))
    assert [host.name for host in used.machines.spares] == ["gpu1"] and not lines
    apart = {"gpu1": {"machine": "another"}}
    used, (line,) = without_unfit_spares(run, with_spare(run, changed=apart))
    assert not used.machines.spares
    assert (
        line.startswith("spare host gpu1 is not used for workers: ")
        and "on host gpu1 is not" in line
    )
    used, (line,) = without_unfit_spares(run, with_spare(run, silent=("gpu1",)))
    assert not used.machines.spares and "answered nothing" in line


def test_a_spare_host_that_lacks_the_text_runs_no_workers(tmp_path: Path) -> None:
    run = meeting(tmp_path)
    lacking = {"gpu1": {"lacking": ["/data/text"]}}
    _, (line,) = without_unfit_spares(run, with_spare(run, changed=lacking))
    assert "host gpu1 does not have /data/text, which the job names" in line


def test_a_silent_host_shares_a_directory_on_a_network_file_system(tmp_path: Path) -> None:
    run = meeting(tmp_path)
    about = msgspec.to_builtins(report_host(HostQuery(run.directory)))
    about["directory"]["files"] = "nfs server:/runs /runs"
    engine = with_spare(run, changed={"gpu0": about}, silent=("gpu1",))
    assert directory_is_shared(run, engine, ("gpu1",))
    engine = with_spare(run, silent=("gpu1",))
    assert not directory_is_shared(run, engine, ("gpu1",))


def test_the_host_report_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from roadtrain.launch.host_report import main; main(); print('torch' in sys.modules)"
    query = json.dumps({"directory": str(tmp_path), "files": ["/nope"]})
    out = subprocess.run(
        [sys.executable, "-c", code],
        input=query,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=dict(os.environ),
    ).stdout.splitlines()
    assert json.loads(out[0])["lacking"] == ["/nope"]
    assert out[1] == "False"
