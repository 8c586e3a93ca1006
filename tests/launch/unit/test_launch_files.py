"""Files for Slurm and Kubernetes that a plan and a job are written to. Nothing is started."""

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


def served() -> ResolvedRun:
    """Two servers on spare hosts, one of them in memory."""
    other = PlanHost("spare1", "spare", "10.0.0.10", servers=(IN_MEMORY,))
    return a_run("server", (SERVER, other), parallelism=Parallelism(dp=3))


def staged() -> ResolvedRun:
    """Two stages, one of each cluster."""
    return a_run("zero1", (), parallelism=Parallelism(pp=2, widths=(2, 1)), num_microbatches=4)


def switched() -> ResolvedRun:
    tor = PlanHost("tor", "spare", "10.0.0.1", switch=SwitchPlace(7100, "tor"))
    return a_run("optimizer-node", (SERVER, tor), parallelism=Parallelism(dp=3))


def summed() -> ResolvedRun:
    spare = PlanHost("spare0", "spare", "10.0.0.9", reducer=7003)
    return a_run("summation", (spare,), parallelism=Parallelism(dp=3))


RUNS = [served, staged, switched, summed]


@pytest.fixture(params=RUNS, ids=lambda make: make.__name__)
def run(request: pytest.FixtureRequest) -> ResolvedRun:
    made: ResolvedRun = request.param()
    return made


def texts(tree: Any) -> Iterator[str]:
    """All keys and values of a tree."""
    if isinstance(tree, dict):
        yield from tree
        for one in tree.values():
            yield from texts(one)
    elif isinstance(tree, list):
        for one in tree:
            yield from texts(one)
    else:
        yield str(tree)


# every host name, path and port is of the two files


def of_files(run: ResolvedRun) -> str:
    return run.plan_file.to_toml() + run.job.to_toml()


PATH = re.compile(r"(?<![\w./:$}\"~])(/[\w.-]+)+")
ADDRESS = re.compile(r"\b(\d+\.\d+\.\d+\.\d+)(?::(\d+))?")
KNOWN_PATHS = {"/bin/bash", "/dev/null"}


def check_paths_and_addresses(text: str, run: ResolvedRun) -> None:
    known = of_files(run)
    paths = {one[0] for one in PATH.finditer(text)} - KNOWN_PATHS
    unknown = {
        path
        for path in paths
        if path not in known and not path.startswith(f"{run.directory}/launch")
    }
    assert paths and not unknown
    for address, port in ADDRESS.findall(text):
        assert f'"{address}"' in known
        assert not port or re.search(rf"\b{port}\b", known)


def test_slurm_names_hosts_paths_and_ports_of_the_two_files_alone(run: ResolvedRun) -> None:
    script = slurm_script(run)
    check_paths_and_addresses(script.replace('"${1%/*}"', ""), run)
    hosts = [host.name for host in run.machines.hosts]
    nodes = re.findall(r"^#SBATCH --nodelist=(.*)", script, re.MULTILINE)
    assert ",".join(nodes).split(",") == hosts
    named = re.findall(r"^    service '[^']*' (\S+)", script, re.MULTILINE)
    assert named == [one.host for one in run.services()]
    assert re.findall(r"--master-port=(\d+)", script) == ["29511"]


def test_kubernetes_names_hosts_paths_and_ports_of_the_two_files_alone(run: ResolvedRun) -> None:
    objects = kubernetes_objects(run, "registry/roadtrain:1")
    check_paths_and_addresses(
        "\n".join(texts([one for one in objects if one["kind"] != "Secret"])), run
    )
    hosts = {host.name for host in run.machines.hosts}
    pods = [pod_of(one) for one in objects if pod_of(one)]
    assert {pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] for pod in pods} == hosts
    listed = {
        port["containerPort"]
        for pod in pods
        for port in pod["spec"]["containers"][0].get("ports", ())
        if port["protocol"] == "TCP"
    }
    assert listed == {29511} | {port for one in run.services() for port in one.ports}


# Slurm


@pytest.mark.parametrize("device", ["", "cpu"])
def test_the_script_is_bash(run: ResolvedRun, tmp_path: Path, device: str) -> None:
    write_slurm(replace(run, job=run.job.changed({"run.device": device})), tmp_path)
    subprocess.run(["bash", "-n", tmp_path / "run.sbatch"], check=True)


@needs("shellcheck", apt="shellcheck")
@pytest.mark.parametrize("device", ["", "cpu"])
def test_the_script_has_no_warning_of_shellcheck(
    run: ResolvedRun, tmp_path: Path, device: str
) -> None:
    write_slurm(replace(run, job=run.job.changed({"run.device": device})), tmp_path)
    subprocess.run(["shellcheck", tmp_path / "run.sbatch"], check=True)


def known_to(script: str, then: str) -> list[str]:
    """Lines of `then`, behind what the script knows of hosts."""
    known = script.partition("\nset -uo")[0]
    out = subprocess.run(["bash", "-uc", f"{known}\n{then}"], check=True, capture_output=True)
    return out.stdout.decode().splitlines()


def test_what_hosts_run_is_bash_that_knows_its_place() -> None:
    """The shell of each host gets the plan's rank of it, whatever Slurm's order is."""
    script = slurm_script(served())
    for host, said in (("gpu-b", "0 2"), ("gpu-a.rack_1", "1 1")):
        then = f'SLURMD_NODENAME={host}; eval "$places"; echo $rank $workers'
        assert known_to(script, then) == [said]


def test_words_reach_workers_as_they_are_whatever_a_path_is_called() -> None:
    run = a_run("server", (SERVER,), job_in("/runs/o'neil $USER/`x`$rank"), parallelism=DP3)
    then = 'rank=1 workers=2 start="a b"; eval "set -- $torchrun"; printf "%s\\n" "$@"'
    said = known_to(slurm_script(run), then)
    assert said == ["python", *torchrun_words(run, "1", "2", "a b"), *first_worker(run).words]
    assert said[-1] == "/runs/o'neil $USER/`x`$rank/launch/job.toml"
    (asked,) = known_to(slurm_script(run), 'echo "$asks_committed"')
    assert json.loads(asked) == {"directory": run.directory}


def test_hosts_that_need_other_numbers_of_gpus_are_components_of_their_own() -> None:
    """A number is of every node of a component, also of those that only serve."""
    script = slurm_script(served())
    parts = re.split("^#SBATCH hetjob$", script, flags=re.MULTILINE)
    asked = [re.findall(r"^#SBATCH --(?:nodelist|gres)=(.*)", part, re.MULTILINE) for part in parts]
    assert asked == [["gpu-b", "gpu:2"], ["gpu-a.rack_1", "gpu:1"], ["spare0,spare1"]]
    then = (
        'for host in "${hosts[@]}"; do echo $host ${component_of[$host]} ${gpus_of[$host]-}; done'
    )
    assert known_to(script, then) == [
        "gpu-b --het-group=0 --gres=gpu:2",
        "gpu-a.rack_1 --het-group=1 --gres=gpu:1",
        "spare0 --het-group=2",
        "spare1 --het-group=2",
    ]
    assert known_to(script, 'printf "%s\\n" "${worker_steps[@]}"') == ["gpu-b", "gpu-a.rack_1"]


def test_a_job_of_hosts_alike_has_no_components() -> None:
    run = served()
    script = slurm_script(replace(run, job=run.job.changed({"run.device": "cpu"})))
    assert known_to(script, 'printf "%s\\n" "${worker_steps[@]}"') == ["gpu-b,gpu-a.rack_1"]
    assert "#SBATCH hetjob" not in script and "--het-group=0" not in script
    assert "--gres" not in script.partition("\nset -uo")[0]


@pytest.mark.parametrize(
    "stated, cluster, asked, device",
    [
        ("", CLUSTER, True, "cuda"),
        ("cuda", CLUSTER, True, "cuda"),
        ("cpu", CLUSTER, False, "cpu"),
        ("", None, False, ""),
        ("cuda", None, True, "cuda"),
        ("", ON_CPU, False, ""),
    ],
)
def test_gpus_are_asked_for_as_the_job_states_or_the_cluster_has(
    stated: str, cluster: Any, asked: bool, device: str
) -> None:  # Rule 6
    run = served()
    run = replace(run, plan_file=replace(run.plan_file, cluster=cluster))
    run = replace(run, job=run.job.changed({"run.device": stated}))
    assert gpus_of(run) == ({"gpu-b": 2, "gpu-a.rack_1": 1} if asked else {})
    assert with_device(run).job.run.device == device
    settings = kubernetes_objects(run, "x")[1]
    assert tomllib.loads(settings["data"]["job.toml"])["run"]["device"] == device
    unknown = any("no GPU is requested" in note for note in notes_for_user(run))
    assert unknown == (cluster is None and not stated)


def test_the_token_is_in_a_file_of_its_own(tmp_path: Path) -> None:  # Rule 8
    write_slurm(served(), tmp_path)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    others = [path for path in tmp_path.iterdir() if path.name != "token"]
    assert {path.name for path in others} == {"job.toml", "run.sbatch"}
    assert not [path for path in others if TOKEN in path.read_text()]


def test_slurm_starts_each_service_with_its_words() -> None:
    run = switched()
    script = slurm_script(run)
    for process in run.services():
        assert f"{process.host} python {' '.join(process.words)} &" in script


# Kubernetes


def pod_of(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree.get("spec", {}).get("template", {})
    return found


@pytest.fixture
def objects(run: ResolvedRun, tmp_path: Path) -> list[dict[str, Any]]:
    """As they are read back."""
    write_kubernetes(run, tmp_path, "registry/roadtrain:1")
    assert (tmp_path / "run.yaml").stat().st_mode & 0o777 == 0o600  # Rule 8
    return list(yaml.safe_load_all((tmp_path / "run.yaml").read_text()))


def test_kubernetes_own_schemas_accept_all(objects: list[dict[str, Any]]) -> None:
    for one in objects:
        for version in ("1.29", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(one, version, strict=True)


def test_what_is_written_is_what_is_meant(run: ResolvedRun, objects: list[dict[str, Any]]) -> None:
    assert objects == kubernetes_objects(run, "registry/roadtrain:1")
    secret, settings = objects[:2]
    assert base64.b64decode(secret["data"]["token"]).decode() == TOKEN
    assert settings["data"]["job.toml"] == with_device(run).job.to_toml()
    assert not [one for one in objects[1:] if TOKEN in as_yaml([one])]


def test_the_objects_fit_each_other(objects: list[dict[str, Any]]) -> None:
    secret, settings, service, *owners = objects
    kinds = [one["kind"] for one in (secret, settings, service)]
    assert kinds == ["Secret", "ConfigMap", "Service"]
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
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
        volumes = {one["name"]: one for one in spec["volumes"]}
        assert {one["name"] for one in container["volumeMounts"]} == {*volumes}
        for source in volumes["files"]["projected"]["sources"]:
            ((kind, told),) = source.items()
            of = {"secret": secret, "configMap": settings}[kind]
            assert told["name"] == of["metadata"]["name"]
            assert {item["key"] for item in told["items"]} <= {*of["data"]}
            assert kind == "configMap" or [item["mode"] for item in told["items"]] == [0o600]


def test_each_file_that_a_command_names_is_mounted(
    run: ResolvedRun, objects: list[dict[str, Any]]
) -> None:
    for owner in objects[3:]:
        spec = pod_of(owner)["spec"]
        (container,) = spec["containers"]
        files = next(one for one in container["volumeMounts"] if one["name"] == "files")
        (volume,) = [one for one in spec["volumes"] if one["name"] == "files"]
        there = {
            f"{files['mountPath']}/{item['path']}"
            for source in volume["projected"]["sources"]
            for told in source.values()
            for item in told["items"]
        }
        mounted = [one["mountPath"] for one in container["volumeMounts"]]
        for word in container["command"]:
            if word.startswith(files["mountPath"]):
                assert word in there
            elif word.startswith("/"):
                assert any(Path(word).is_relative_to(one) for one in mounted)


def test_workers_read_reducers_that_kubernetes_keeps_up_to_date() -> None:
    """A mount of a single file (`subPath`) would never change."""
    run = summed()
    _, settings, *_, job = kubernetes_objects(run, "x")
    assert settings["data"]["reducers.txt"] == "10.0.0.9:7003\n"
    mounts = pod_of(job)["spec"]["containers"][0]["volumeMounts"]
    assert not [one for one in mounts if "subPath" in one]
    assert str(Path(run.reducers_path).parent) in {one["mountPath"] for one in mounts}


def test_pods_ask_for_the_gpus_of_their_workers() -> None:
    jobs = [one for one in kubernetes_objects(served(), "x") if one["kind"] == "Job"]
    asked = [pod_of(one)["spec"]["containers"][0]["resources"]["limits"] for one in jobs]
    assert asked == [{"nvidia.com/gpu": 2}, {"nvidia.com/gpu": 1}]
    run = served()
    on_cpu = replace(run, job=run.job.changed({"run.device": "cpu"}))
    for one in kubernetes_objects(on_cpu, "x"):
        assert "resources" not in str(one)


def test_workers_ranks_are_the_plans() -> None:
    jobs = [one for one in kubernetes_objects(staged(), "x") if one["kind"] == "Job"]
    commands = [" ".join(pod_of(one)["spec"]["containers"][0]["command"]) for one in jobs]
    assert "--node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.3" in commands[0]
    assert "--node-rank=1 --nproc-per-node=1 --master-addr=10.0.0.3" in commands[1]


def test_a_switch_has_a_udp_port_for_each_job() -> None:
    (switch,) = [
        one
        for one in kubernetes_objects(switched(), "x")
        if one["metadata"]["labels"].get("app.kubernetes.io/component") == "switch-tor"
    ]
    ports = pod_of(switch)["spec"]["containers"][0]["ports"]
    udp = [one["containerPort"] for one in ports if one["protocol"] == "UDP"]
    assert udp == list(range(7101, 7165))


def test_only_what_a_run_writes_is_made_on_a_node() -> None:
    """A directory of data that is missing must not become an empty one (Rule 6)."""
    (job, *_) = [one for one in kubernetes_objects(served(), "x") if one["kind"] == "Job"]
    volumes = pod_of(job)["spec"]["volumes"]
    kinds = {
        one["hostPath"]["path"]: one["hostPath"]["type"] for one in volumes if "hostPath" in one
    }
    assert kinds == {"/scratch/run": "DirectoryOrCreate", "/data/text": "Directory"}


def hosts_read(**changes: Any) -> dict[str, str]:
    """Directories of a node that the workers' pods have, with their types."""
    run = a_run("server", (SERVER,), make_job(JOB).changed(changes), parallelism=DP3)
    (job, *_) = [one for one in kubernetes_objects(run, "x") if one["kind"] == "Job"]
    volumes = [one["hostPath"] for one in pod_of(job)["spec"]["volumes"] if "hostPath" in one]
    return {one["path"]: one["type"] for one in volumes if one["path"] != "/scratch/run"}


@pytest.mark.parametrize("path", ["/data/enwik8", "/data/a.txt", "/data/*.txt", "/data/x?/a/*"])
def test_what_is_mounted_is_a_directory_that_has_the_data(path: str) -> None:
    assert hosts_read(**{"data.paths": [path]}) == {"/data": "Directory"}


@pytest.mark.parametrize("path", ["/text.txt", "/*.txt", "/*/a.txt"])
def test_a_node_is_not_mounted_whole(path: str) -> None:
    with pytest.raises(ConfigError, match=r"is directly in /, but a pod cannot mount its node's /"):
        hosts_read(**{"data.paths": [path]})


def test_a_service_has_each_port_once() -> None:
    """A server may listen at the port at which workers meet on another host."""
    server = replace(SERVER, servers=(ServerPlace("/mnt/ssd0/run", 29511),))
    service = kubernetes_objects(a_run("server", (server,), parallelism=DP3), "x")[2]
    assert [one["name"] for one in service["spec"]["ports"]] == ["tcp-29511"]


RFC_1035 = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def test_names_are_kubernetes_own_and_differ() -> None:
    names = ["tiny workers gpu-a.rack_1", "tiny workers gpu-a-rack-1", "Tiny workers", "x" * 90]
    names += ["7b", "run-7b", "7" * 64, "7.b", "-", "_", "a-"]
    made = [name_of(name) for name in names]
    assert len({*made}) == len(names)
    for name in made:
        assert RFC_1035.fullmatch(name) and len(name) <= 52


@pytest.mark.parametrize("name", ["7b", "A.b_C", "9" * 64])
def test_names_and_labels_of_all_objects_are_possible(name: str) -> None:
    hosts = (replace(SERVER, name="Spare_0." + "x" * 55),)
    run = replace(a_run("server", hosts, parallelism=DP3), name=name)
    label = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
    for one in kubernetes_objects(run, "x"):
        spec = pod_of(one).get("spec", {})
        named = [one["metadata"]["name"], *(v["name"] for v in spec.get("volumes", ()))]
        assert all(RFC_1035.fullmatch(name) and len(name) <= 63 for name in named)
        labels = [one["metadata"]["labels"], spec.get("nodeSelector", {})]
        assert all(label.fullmatch(value) for each in labels for value in each.values())


# what is there already


def write(kind: str, out: Path) -> None:
    write_slurm(served(), out) if kind == "slurm" else write_kubernetes(served(), out, "x")


@pytest.mark.parametrize(
    "kind, name",
    [
        *(("slurm", name) for name in ("job.toml", "token", "run.sbatch")),
        ("kubernetes", "run.yaml"),
    ],
)
def test_a_file_of_the_users_is_not_replaced(tmp_path: Path, kind: str, name: str) -> None:
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
def test_what_was_written_is_written_anew(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    write(kind, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    if kind == "slurm":
        written = load_job(tmp_path / "job.toml")
        assert written.to_toml() == with_device(served()).job.to_toml()
        (tmp_path / "job.toml").write_text("# the user's")
        with pytest.raises(ConfigError, match=r"job\.toml exists and was not written"):
            write(kind, tmp_path)


# what such files cannot do


@pytest.mark.parametrize("write", [slurm_script, lambda run: kubernetes_objects(run, "x")])
def test_a_store_that_would_be_new_at_each_start_is_refused(write: Any) -> None:  # Rule 3
    run = served()
    with pytest.raises(ConfigError, match=r"new_store is true.*\n.*leave run\.new_store out"):
        write(replace(run, job=run.job.changed({"run.new_store": True})))


@pytest.mark.parametrize("name", ["gpu 0", "gpu[0-3]", "gpu0;reboot", "-gpu", "x" * 64])
def test_a_host_name_that_no_node_has_is_refused(name: str) -> None:
    run = a_run("server", (replace(SERVER, name=name),), parallelism=Parallelism(dp=3))
    with pytest.raises(ConfigError, match=r"is not a valid node name"):
        slurm_script(run)


def test_the_user_hears_what_is_not_done(tmp_path: Path) -> None:  # Rule 6
    for told in (write_slurm(served(), tmp_path), write_kubernetes(served(), tmp_path, "x")):
        assert "spare hosts are not used: gpu9" in told
