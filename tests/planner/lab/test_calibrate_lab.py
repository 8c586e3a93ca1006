"""`roadtrain calibrate --lab` and `plan --verify --lab`: real steps on an emulated cluster
beside simulated ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from roadtrain import cli
from roadtrain.config.cluster import load_cluster
from roadtrain.lab import PREFIX, lab_available, network_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.alone,
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]
needs_devices = pytest.mark.skipif(lab_available() is not None, reason=str(lab_available()))

CONFIG = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}
WORKER = """
name = "mine"
[[hosts]]
name = "gpu"
count = {count}
devices = 1
memory = "16GB"
memory_rate = "10GB/s"
nics = [{{ rate = "{rate}" }}]
ssds = [{{ read = "80MB/s", write = "40MB/s", capacity = "1TB" }}]
[hosts.device]
kind = "A100"
flops = "312TFLOP/s"
memory = "40GB"
"""
SPARE = """
[[hosts]]
name = "spare"
memory = "16GB"
memory_rate = "10GB/s"
nics = [{{ rate = "{rate}" }}]
"""
JOB = "[data]\nseq_len = 64\nbatch_size = 1\n{store}\n[model.config]\n" + "\n".join(
    f"{key} = {json.dumps(value)}" for key, value in CONFIG.items()
)


def stores() -> set[Path]:
    return set(Path("/dev/shm").glob("roadtrain-calibrate-*"))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Paths of a cluster's and a job's file, in an empty current directory; nothing of a lab is
    left at the end."""
    monkeypatch.chdir(tmp_path)

    def make(
        store: str, *, count: int = 1, rate: str = "200Mbit/s", spare: bool = True
    ) -> tuple[str, str]:
        Path("mine.toml").write_text((WORKER + SPARE * spare).format(count=count, rate=rate))
        Path("job.toml").write_text(JOB.format(store=store))
        Path("config.json").write_text(json.dumps(CONFIG))
        return "mine.toml", "job.toml"

    before = stores()
    yield make
    own = [
        path
        for place in (tempfile.gettempdir(), "/sys/fs/cgroup/blkio")
        for path in Path(place).glob(f"{PREFIX}{os.getpid()}-*")
    ]
    assert own == [] and list(tmp_path.glob("*roadtrain-*")) == [] and stores() <= before
    loops = Path("/sys/block").glob("loop*/loop/backing_file")
    assert [loop for loop in loops if str(tmp_path) in loop.read_text()] == []
    running = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert str(tmp_path) not in running


def rows(told: str) -> dict[str, list[float]]:
    """Of what is told: stage -> seconds measured, by the file, calibrated."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    return {
        line[2:12].strip(): [
            float(number) * units[unit]
            for number, unit in re.findall(r"([\d.]+) (s|ms|us)\b", line[12:])
        ]
        for line in told.splitlines()
        if re.match(r"  \w.* m?u?s", line)
    }


@pytest.mark.exhaustive
def test_two_workers_and_a_server(files, capsys):
    cluster, job = files('[servers]\naddresses = ["HOST:PORT"]', count=2)
    before = Path(cluster).read_text()
    assert cli.main(["calibrate", cluster, job, "--lab"]) == 0
    told = capsys.readouterr().out
    found = rows(told)
    assert "placement server, 2 worker(s)" in told and "so their rates were not measured" in told
    assert {"a step", "Forward", "Backward", "Wait", "Update"} <= set(found)
    real, by_file, calibrated = found["a step"]
    assert calibrated == pytest.approx(real, rel=0.25)
    assert by_file < calibrated  # the file's device computes at once
    computing = [sum(found[name][k] for name in ("Forward", "Backward")) for k in (0, 2)]
    assert computing[1] == pytest.approx(computing[0], rel=0.25)
    assert Path(cluster).read_text() == before
    lab = load_cluster("mine.lab.toml")
    assert lab.measured == ("hosts.gpu.device", "hosts.spare.updates")
    worker, spare = lab.hosts
    assert (
        worker.device is not None
        and worker.device.kind == "cpu"
        and 1e9 < worker.device.flops < 5e12
    )
    assert worker.nics[0].rate == 25e6 and spare.updates > 1e8


@pytest.mark.exhaustive
@needs_devices
def test_a_worker_with_an_ssd(files, capsys):
    cluster, job = files('[store]\nfiles = ["anywhere"]', spare=False)
    Path(job).write_text('[budget]\nhost = "64MiB"\n' + Path(job).read_text())
    # writes of steps run into each other
    assert cli.main(["calibrate", cluster, job, "--lab", "--steps", "15"]) == 0
    told = capsys.readouterr().out
    found = rows(told)
    print(told)
    assert "placement files" in told and {"Read", "Write", "Update"} <= set(found)
    assert found["a step"][2] == pytest.approx(found["a step"][0], rel=0.25)
    assert {"hosts.gpu.device", "hosts.gpu.updates"} <= set(load_cluster("mine.lab.toml").measured)


@pytest.mark.exhaustive
def test_a_plan_is_verified(files, capsys):
    cluster, _ = files("[store]\nfiles = []")
    words = [
        "plan",
        cluster,
        "--model",
        "config.json",
        "--batch",
        "1",
        "--verify",
        "--lab",
        "--placements",
    ]
    assert cli.main([*words, "server"]) == 0
    told = capsys.readouterr().out
    print(told)
    found = rows(told)
    assert (
        "placement server, 1 worker(s)" in told
        and "wrote the measured rates to mine.lab.toml" in told
    )
    assert found["a step"][2] == pytest.approx(found["a step"][0], rel=0.25)
    assert cli.main([*words, "ddp"]) == 2 and "cannot be run in the lab" in capsys.readouterr().err
    assert cli.main([word for word in words if word != "--verify"] + ["ddp"]) == 2
    assert "--lab needs --verify" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("store", "cluster", "says"),
    [
        ('[servers]\naddresses = ["HOST:PORT"]', {"spare": False}, "0 kind(s) without devices"),
        ("[store]\nfiles = []", {"count": 2}, "2 device(s) of the first kind"),
        (
            '[servers]\naddresses = ["HOST:PORT"]',
            {"rate": "100Gbit/s"},
            "12.50 GB/s cannot be emulated on this machine: the maximum is 500 MB/s",
        ),
        ('[servers]\naddresses = ["HOST:PORT"]\nreplicas = 2', {}, "without compression"),
    ],
)
def test_what_the_lab_cannot_be(files, capsys, store, cluster, says):
    assert cli.main(["calibrate", *files(store, **cluster), "--lab"]) == 2
    assert says in capsys.readouterr().err and not Path("mine.lab.toml").exists()


def test_a_model_too_large_is_refused_with_both_numbers(files, capsys):
    cluster, job = files("[store]\nfiles = []")
    Path(job).write_text(Path(job).read_text().replace("hidden_size = 192", "hidden_size = 65536"))
    assert cli.main(["calibrate", cluster, job, "--lab"]) == 2
    assert re.search(r"need [\d.]+ TiB of memory, but [\d.]+ GiB are free", capsys.readouterr().err)


def test_what_a_failed_worker_said_is_told(files, capsys):
    cluster, job = files("[store]\nfiles = []")
    Path(job).write_text('[budget]\nhost = "1KiB"\n' + Path(job).read_text())
    assert cli.main(["calibrate", cluster, job, "--lab"]) == 2
    assert (
        "worker 0 exited with code 1" in (said := capsys.readouterr().err)
        and "budget" in said
        and "Traceback" not in said
    )
