"""Files for Slurm and Kubernetes written from a plan and a job. Nothing is started."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.job import Job, load_job, make_job
from roadtrain.config.machines import Machines, PlanHost, ServerPlace, SwitchPlace
from roadtrain.config.plan_file import Plan, PlanFile, placement
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.launch.resolve import ResolvedRun, resolve
from roadtrain.launch.torchrun import (
    first_worker,
    gpus_of,
    notes_for_user,
    torchrun_words,
    with_device,
)
from roadtrain.launch.write_kubernetes import as_yaml, kubernetes_objects, name_of, write_kubernetes
from roadtrain.launch.write_slurm import slurm_script, write_slurm
from roadtrain.stages.parallelism import Parallelism
from tests.support.needs import needs

TOKEN = "a token that nobody should read"
JOB = {
    "run": {"dir": "/scratch/run"},
    "model": {"config": {"model_type": "llama"}},
    "data": {"paths": ["/data/text/**/*.txt"]},
}
HOST = {"memory": "64GB", "nics": [{"rate": "1GB/s", "switch": "tor", "relay": True}]}


def cluster_with(device: Any) -> Cluster:
    return make_cluster(
        {
            "hosts": [
                {"name": "gpu", "count": 3, "devices": 2, "device": device, **HOST},
                {"name": "spare", "count": 2, **HOST},
            ],
            "switches": [{"name": "tor", "sums": True}],
        }
    )


CLUSTER = cluster_with("A100-80GB")
ON_CPU = cluster_with({"kind": "cpu", "flops": "1TFLOP/s", "memory": "1GB"})
DP3 = Parallelism(dp=3)
GPUS = (PlanHost("gpu-b", "gpu", "10.0.0.3", 2), PlanHost("gpu-a.rack_1", "gpu", "10.0.0.2", 1))
SERVER = PlanHost("spare0", "spare", "10.0.0.9", servers=(ServerPlace("/mnt/ssd0/run", 7000),))
IN_MEMORY = ServerPlace("/dev/shm/run", 7001, "/mnt/disk/copy")
SPARE = PlanHost("gpu9", "gpu", "10.0.0.8", 2)


def job_in(directory: str) -> Job:
    return make_job({**JOB, "run": {"dir": directory}})


def a_run(
    name: str, hosts: Iterable[PlanHost], job: Job | None = None, **words: Any
) -> ResolvedRun:
    machines = Machines((*GPUS, *hosts), (SPARE,), rendezvous_port=29511)
    plan = PlanFile(Plan(placement(name), **words), machines, cluster=CLUSTER)
    return resolve(plan, job or make_job(JOB), name="tiny", addresses={}, token=TOKEN)


def served_run() -> ResolvedRun:
    """Two servers on spare hosts, one of them in memory."""
    other = PlanHost("spare1", "spare", "10.0.0.10", servers=(IN_MEMORY,))
    return a_run("server", (SERVER, other), parallelism=Parallelism(dp=3))


def staged_run() -> ResolvedRun:
    """Two stages, one of each cluster."""
    return a_run("zero1", (), parallelism=Parallelism(pp=2, widths=(2, 1)), num_microbatches=4)


def switched_run() -> ResolvedRun:
    tor = PlanHost("tor", "spare", "10.0.0.1", switch=SwitchPlace(7100, "tor"))
    return a_run("optimizer-node", (SERVER, tor), parallelism=Parallelism(dp=3))


def summed_run() -> ResolvedRun:
    spare = PlanHost("spare0", "spare", "10.0.0.9", reducer=7003)
    return a_run("summation", (spare,), parallelism=Parallelism(dp=3))


RUNS = [served_run, staged_run, switched_run, summed_run]


@pytest.fixture(params=RUNS, ids=lambda make: make.__name__)
def run(request: pytest.FixtureRequest) -> ResolvedRun:
    made: ResolvedRun = request.param()
    return made


def texts(tree: Any) -> Iterator[str]:
    """All keys and values of a tree."""
    if isinstance(tree, dict):
        yield from tree
        for child in tree.values():
            yield from texts(child)
    elif isinstance(tree, list):
        for child in tree:
            yield from texts(child)
    else:
        yield str(tree)


# Every host name, path and port comes from the plan file or the job file.


def text_of_files(run: ResolvedRun) -> str:
    return run.plan_file.to_toml() + run.job.to_toml()


PATH = re.compile(r"(?<![\w./:$}\"~])(/[\w.-]+)+")
ADDRESS = re.compile(r"\b(\d+\.\d+\.\d+\.\d+)(?::(\d+))?")
KNOWN_PATHS = {"/bin/bash", "/dev/null"}


def check_paths_and_addresses(text: str, run: ResolvedRun) -> None:
    allowed = text_of_files(run)
    paths = {match[0] for match in PATH.finditer(text)} - KNOWN_PATHS
    unknown = {
        path
        for path in paths
        if path not in allowed and not path.startswith(f"{run.directory}/launch")
    }
    assert paths and not unknown
    for address, port in ADDRESS.findall(text):
        assert f'"{address}"' in allowed
        assert not port or re.search(rf"\b{port}\b", allowed)


def test_slurm_names_hosts_paths_and_ports_of_the_two_files_alone(run: ResolvedRun) -> None:
    script = slurm_script(run)
    check_paths_and_addresses(script.replace('"${1%/*}"', ""), run)
    hosts = [host.name for host in run.machines.hosts]
    nodes = re.findall(r"^#SBATCH --nodelist=(.*)", script, re.MULTILINE)
    assert ",".join(nodes).split(",") == hosts
    named = re.findall(r"^    service '[^']*' (\S+)", script, re.MULTILINE)
    assert named == [service.host for service in run.services()]
    assert re.findall(r"--master-port=(\d+)", script) == ["29511"]


def test_kubernetes_names_hosts_paths_and_ports_of_the_two_files_alone(run: ResolvedRun) -> None:
    objects = kubernetes_objects(run, "registry/roadtrain:1")
    check_paths_and_addresses(
        "\n".join(texts([tree for tree in objects if tree["kind"] != "Secret"])), run
    )
    hosts = {host.name for host in run.machines.hosts}
    pods = [pod_of(tree) for tree in objects if pod_of(tree)]
    assert {pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] for pod in pods} == hosts
    listed = {
        port["containerPort"]
        for pod in pods
        for port in pod["spec"]["containers"][0].get("ports", ())
        if port["protocol"] == "TCP"
    }
    assert listed == {29511} | {port for service in run.services() for port in service.ports}


# Slurm


@pytest.mark.parametrize("device", ["", "cpu"])
def test_the_script_is_bash(run: ResolvedRun, tmp_path: Path, device: str) -> None:
    write_slurm(replace(run, job=run.job.changed({"run.device": device})), tmp_path)
    subprocess.run(["bash", "-n", tmp_path / "run.sbatch"], check=True)


@needs("shellcheck", apt="shellcheck")
@pytest.mark.parametrize("device", ["", "cpu"])
@pytest.mark.slow
def test_the_script_has_no_warning_of_shellcheck(
    run: ResolvedRun, tmp_path: Path, device: str
) -> None:
    write_slurm(replace(run, job=run.job.changed({"run.device": device})), tmp_path)
    subprocess.run(["shellcheck", tmp_path / "run.sbatch"], check=True)


def run_after_preamble(script: str, then: str) -> list[str]:
    """Run `then` after the part of the script that describes the hosts; return the printed
    lines."""
    preamble = script.partition("\nset -uo")[0]
    out = subprocess.run(["bash", "-uc", f"{preamble}\n{then}"], check=True, capture_output=True)
    return out.stdout.decode().splitlines()


def test_each_host_finds_its_rank_in_the_plan() -> None:
    """The shell on each host looks up its rank in the plan, whatever order Slurm chose."""
    script = slurm_script(served_run())
    for host, line in (("gpu-b", "0 2"), ("gpu-a.rack_1", "1 1")):
        then = f'SLURMD_NODENAME={host}; eval "$places"; echo $rank $workers'
        assert run_after_preamble(script, then) == [line]


def test_workers_get_their_command_line_unchanged_by_the_shell() -> None:
    run = a_run("server", (SERVER,), job_in("/runs/o'neil $USER/`x`$rank"), parallelism=DP3)
    then = 'rank=1 workers=2 start="a b"; eval "set -- $torchrun"; printf "%s\\n" "$@"'
    words = run_after_preamble(slurm_script(run), then)
    assert words == ["python", *torchrun_words(run, "1", "2", "a b"), *first_worker(run).words]
    assert words[-1] == "/runs/o'neil $USER/`x`$rank/launch/job.toml"
    (query,) = run_after_preamble(slurm_script(run), 'echo "$asks_committed"')
    assert json.loads(query) == {"directory": run.directory}


def test_hosts_with_different_gpu_counts_form_separate_components() -> None:
    """Slurm applies a component's count to all its nodes, so hosts that only serve need their
    own."""
    script = slurm_script(served_run())
    parts = re.split("^#SBATCH hetjob$", script, flags=re.MULTILINE)
    requests = [
        re.findall(r"^#SBATCH --(?:nodelist|gres)=(.*)", part, re.MULTILINE) for part in parts
    ]
    assert requests == [["gpu-b", "gpu:2"], ["gpu-a.rack_1", "gpu:1"], ["spare0,spare1"]]
    then = (
        'for host in "${hosts[@]}"; do echo $host ${component_of[$host]} ${gpus_of[$host]-}; done'
    )
    assert run_after_preamble(script, then) == [
        "gpu-b --het-group=0 --gres=gpu:2",
        "gpu-a.rack_1 --het-group=1 --gres=gpu:1",
        "spare0 --het-group=2",
        "spare1 --het-group=2",
    ]
    assert run_after_preamble(script, 'printf "%s\\n" "${worker_steps[@]}"') == [
        "gpu-b",
        "gpu-a.rack_1",
    ]


def test_a_job_on_identical_hosts_has_no_components() -> None:
    run = served_run()
    script = slurm_script(replace(run, job=run.job.changed({"run.device": "cpu"})))
    assert run_after_preamble(script, 'printf "%s\\n" "${worker_steps[@]}"') == [
        "gpu-b,gpu-a.rack_1"
    ]
    assert "#SBATCH hetjob" not in script and "--het-group=0" not in script
    assert "--gres" not in script.partition("\nset -uo")[0]


@pytest.mark.parametrize(
    "stated, cluster, requested, device",
    [
        ("", CLUSTER, True, "cuda"),
        ("cuda", CLUSTER, True, "cuda"),
        ("cpu", CLUSTER, False, "cpu"),
        ("", None, False, ""),
        ("cuda", None, True, "cuda"),
        ("", ON_CPU, False, ""),
    ],
)
def test_gpus_are_requested_if_the_job_or_the_cluster_has_them(
    stated: str, cluster: Any, requested: bool, device: str
) -> None:  # Rule 6
    run = served_run()
    run = replace(run, plan_file=replace(run.plan_file, cluster=cluster))
    run = replace(run, job=run.job.changed({"run.device": stated}))
    assert gpus_of(run) == ({"gpu-b": 2, "gpu-a.rack_1": 1} if requested else {})
    assert with_device(run).job.run.device == device
    settings = kubernetes_objects(run, "x")[1]
    assert tomllib.loads(settings["data"]["job.toml"])["run"]["device"] == device
    unknown = any("no GPU is requested" in note for note in notes_for_user(run))
    assert unknown == (cluster is None and not stated)


def test_the_token_is_in_a_separate_file(tmp_path: Path) -> None:  # Rule 8
    write_slurm(served_run(), tmp_path)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    others = [path for path in tmp_path.iterdir() if path.name != "token"]
    assert {path.name for path in others} == {"job.toml", "run.sbatch"}
    assert not [path for path in others if TOKEN in path.read_text()]


def test_slurm_starts_each_service_with_its_command_line() -> None:
    run = switched_run()
    script = slurm_script(run)
    for process in run.services():
        assert f"{process.host} python {' '.join(process.words)} &" in script


# Kubernetes


def pod_of(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree.get("spec", {}).get("template", {})
    return found


@pytest.fixture
def objects(run: ResolvedRun, tmp_path: Path) -> list[dict[str, Any]]:
    """Write the Kubernetes file and parse it again."""
    write_kubernetes(run, tmp_path, "registry/roadtrain:1")
    assert (tmp_path / "run.yaml").stat().st_mode & 0o777 == 0o600  # Rule 8
    return list(yaml.safe_load_all((tmp_path / "run.yaml").read_text()))


@pytest.mark.slow
def test_kubernetes_schemas_accept_every_object(objects: list[dict[str, Any]]) -> None:
    for tree in objects:
        for version in ("1.29", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(tree, version, strict=True)


def test_the_written_file_holds_the_objects_and_only_the_secret_the_token(
    run: ResolvedRun, objects: list[dict[str, Any]]
) -> None:
    assert objects == kubernetes_objects(run, "registry/roadtrain:1")
    secret, settings = objects[:2]
    assert base64.b64decode(secret["data"]["token"]).decode() == TOKEN
    assert settings["data"]["job.toml"] == with_device(run).job.to_toml()
    assert not [tree for tree in objects[1:] if TOKEN in as_yaml([tree])]


def test_references_between_objects_resolve(objects: list[dict[str, Any]]) -> None:
    secret, settings, service, *owners = objects
    kinds = [tree["kind"] for tree in (secret, settings, service)]
    assert kinds == ["Secret", "ConfigMap", "Service"]
    names = [(tree["kind"], tree["metadata"]["name"]) for tree in objects]
    assert len({*names}) == len(names)
    for owner in owners:
        spec = pod_of(owner)["spec"]
        labels = pod_of(owner)["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        if owner["kind"] == "StatefulSet":
            selected = [
                other
                for other in owners
                if owner["spec"]["selector"]["matchLabels"].items()
                <= pod_of(other)["metadata"]["labels"].items()
            ]
            assert selected == [owner]
            assert owner["spec"]["serviceName"] == service["metadata"]["name"]
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == {*volumes}
        for source in volumes["files"]["projected"]["sources"]:
            ((kind, reference),) = source.items()
            of = {"secret": secret, "configMap": settings}[kind]
            assert reference["name"] == of["metadata"]["name"]
            assert {item["key"] for item in reference["items"]} <= {*of["data"]}
            assert kind == "configMap" or [item["mode"] for item in reference["items"]] == [0o600]


def test_each_file_that_a_command_names_is_mounted(
    run: ResolvedRun, objects: list[dict[str, Any]]
) -> None:
    for owner in objects[3:]:
        spec = pod_of(owner)["spec"]
        (container,) = spec["containers"]
        files = next(mount for mount in container["volumeMounts"] if mount["name"] == "files")
        (volume,) = [entry for entry in spec["volumes"] if entry["name"] == "files"]
        there = {
            f"{files['mountPath']}/{item['path']}"
            for source in volume["projected"]["sources"]
            for reference in source.values()
            for item in reference["items"]
        }
        mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
        for word in container["command"]:
            if word.startswith(files["mountPath"]):
                assert word in there
            elif word.startswith("/"):
                assert any(Path(word).is_relative_to(path) for path in mounted)


def test_the_reducers_file_is_mounted_so_that_kubernetes_updates_it() -> None:
    """A mount of a single file (`subPath`) would never change."""
    run = summed_run()
    _, settings, *_, job = kubernetes_objects(run, "x")
    assert settings["data"]["reducers.txt"] == "10.0.0.9:7003\n"
    mounts = pod_of(job)["spec"]["containers"][0]["volumeMounts"]
    assert not [mount for mount in mounts if "subPath" in mount]
    assert str(Path(run.reducers_path).parent) in {mount["mountPath"] for mount in mounts}


def test_pods_request_the_gpus_of_their_workers() -> None:
    jobs = [job for job in kubernetes_objects(served_run(), "x") if job["kind"] == "Job"]
    limits = [pod_of(job)["spec"]["containers"][0]["resources"]["limits"] for job in jobs]
    assert limits == [{"nvidia.com/gpu": 2}, {"nvidia.com/gpu": 1}]
    run = served_run()
    on_cpu = replace(run, job=run.job.changed({"run.device": "cpu"}))
    for tree in kubernetes_objects(on_cpu, "x"):
        assert "resources" not in str(tree)


def test_workers_have_the_ranks_of_the_plan() -> None:
    jobs = [job for job in kubernetes_objects(staged_run(), "x") if job["kind"] == "Job"]
    commands = [" ".join(pod_of(job)["spec"]["containers"][0]["command"]) for job in jobs]
    assert "--node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.3" in commands[0]
    assert "--node-rank=1 --nproc-per-node=1 --master-addr=10.0.0.3" in commands[1]


def test_a_switch_has_a_udp_port_for_each_job() -> None:
    (switch,) = [
        tree
        for tree in kubernetes_objects(switched_run(), "x")
        if tree["metadata"]["labels"].get("app.kubernetes.io/component") == "switch-tor"
    ]
    ports = pod_of(switch)["spec"]["containers"][0]["ports"]
    udp = [port["containerPort"] for port in ports if port["protocol"] == "UDP"]
    assert udp == list(range(7101, 7165))


def test_only_directories_that_a_run_writes_are_created_on_a_node() -> None:
    """A missing data directory must not be replaced by an empty one (Rule 6)."""
    (job, *_) = [tree for tree in kubernetes_objects(served_run(), "x") if tree["kind"] == "Job"]
    volumes = pod_of(job)["spec"]["volumes"]
    kinds = {
        volume["hostPath"]["path"]: volume["hostPath"]["type"]
        for volume in volumes
        if "hostPath" in volume
    }
    assert kinds == {"/scratch/run": "DirectoryOrCreate", "/data/text": "Directory"}


def hosts_read(**changes: Any) -> dict[str, str]:
    """Directories of the node mounted in the workers' pods, with their types."""
    run = a_run("server", (SERVER,), make_job(JOB).changed(changes), parallelism=DP3)
    (job, *_) = [tree for tree in kubernetes_objects(run, "x") if tree["kind"] == "Job"]
    volumes = [
        volume["hostPath"] for volume in pod_of(job)["spec"]["volumes"] if "hostPath" in volume
    ]
    return {mount["path"]: mount["type"] for mount in volumes if mount["path"] != "/scratch/run"}


@pytest.mark.parametrize("path", ["/data/enwik8", "/data/a.txt", "/data/*.txt", "/data/x?/a/*"])
def test_the_directory_that_holds_the_data_is_mounted(path: str) -> None:
    assert hosts_read(**{"data.paths": [path]}) == {"/data": "Directory"}


@pytest.mark.parametrize("path", ["/text.txt", "/*.txt", "/*/a.txt"])
def test_a_nodes_root_directory_is_not_mounted(path: str) -> None:
    with pytest.raises(ConfigError, match=r"is directly in /, but a pod cannot mount its node's /"):
        hosts_read(**{"data.paths": [path]})


def test_a_service_has_each_port_once() -> None:
    """A server may listen at the port at which workers meet on another host."""
    server = replace(SERVER, servers=(ServerPlace("/mnt/ssd0/run", 29511),))
    service = kubernetes_objects(a_run("server", (server,), parallelism=DP3), "x")[2]
    assert [port["name"] for port in service["spec"]["ports"]] == ["tcp-29511"]


RFC_1035 = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def test_names_are_valid_in_kubernetes_and_unique() -> None:
    names = ["tiny workers gpu-a.rack_1", "tiny workers gpu-a-rack-1", "Tiny workers", "x" * 90]
    names += ["7b", "run-7b", "7" * 64, "7.b", "-", "_", "a-"]
    made = [name_of(name) for name in names]
    assert len({*made}) == len(names)
    for name in made:
        assert RFC_1035.fullmatch(name) and len(name) <= 52


@pytest.mark.parametrize("name", ["7b", "A.b_C", "9" * 64])
def test_names_and_labels_of_all_objects_are_valid(name: str) -> None:
    hosts = (replace(SERVER, name="Spare_0." + "x" * 55),)
    run = replace(a_run("server", hosts, parallelism=DP3), name=name)
    label = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
    for tree in kubernetes_objects(run, "x"):
        spec = pod_of(tree).get("spec", {})
        named = [tree["metadata"]["name"], *(v["name"] for v in spec.get("volumes", ()))]
        assert all(RFC_1035.fullmatch(name) and len(name) <= 63 for name in named)
        labels = [tree["metadata"]["labels"], spec.get("nodeSelector", {})]
        assert all(label.fullmatch(value) for each in labels for value in each.values())


# existing files


def write(kind: str, out: Path) -> None:
    write_slurm(served_run(), out) if kind == "slurm" else write_kubernetes(served_run(), out, "x")


@pytest.mark.parametrize(
    "kind, name",
    [
        *(("slurm", name) for name in ("job.toml", "token", "run.sbatch")),
        ("kubernetes", "run.yaml"),
    ],
)
def test_a_file_of_the_user_is_not_overwritten(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / name).write_text("the user's\n")
    with pytest.raises(ConfigError, match=rf"{name} exists and was not .*\n.*for --out"):
        write(kind, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "the user's\n"}


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_an_out_that_is_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "out").write_text("a file\n")
    with pytest.raises(RoadtrainError, match=r"out cannot be a directory: .*out is a file"):
        write(kind, tmp_path / "out")


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_files_that_roadtrain_wrote_are_overwritten(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    write(kind, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    if kind == "slurm":
        written = load_job(tmp_path / "job.toml")
        assert written.to_toml() == with_device(served_run()).job.to_toml()
        (tmp_path / "job.toml").write_text("# the user's")
        with pytest.raises(ConfigError, match=r"job\.toml exists and was not written"):
            write(kind, tmp_path)


# unsupported plans


@pytest.mark.parametrize("write", [slurm_script, lambda run: kubernetes_objects(run, "x")])
def test_a_store_that_would_be_new_at_each_start_is_refused(write: Any) -> None:  # Rule 3
    run = served_run()
    with pytest.raises(ConfigError, match=r"new_store is true.*\n.*leave run\.new_store out"):
        write(replace(run, job=run.job.changed({"run.new_store": True})))


@pytest.mark.parametrize("name", ["gpu 0", "gpu[0-3]", "gpu0;reboot", "-gpu", "x" * 64])
def test_a_host_name_that_is_no_node_name_is_refused(name: str) -> None:
    run = a_run("server", (replace(SERVER, name=name),), parallelism=Parallelism(dp=3))
    with pytest.raises(ConfigError, match=r"is not a valid node name"):
        slurm_script(run)


def test_unused_spare_hosts_are_reported(tmp_path: Path) -> None:  # Rule 6
    for line in (
        write_slurm(served_run(), tmp_path),
        write_kubernetes(served_run(), tmp_path, "x"),
    ):
        assert "spare hosts are not used: gpu9" in line
