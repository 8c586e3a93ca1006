"""`roadtrain calibrate`: real steps of a job beside simulated ones; the file then says what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roadtrain import cli
from roadtrain.spec.cluster import load_cluster

JOB = """
[model.config]
model_type = "llama"
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 128
[data]
paths = ["{text}"]
seq_len = 128
batch_size = 2
[store]
dirs = {dirs}
"""
CLUSTER = """
name = "here"
[[hosts]]
name = "here"
devices = 1
memory = "16GB"
memory_rate = "10GB/s"
updates = "10GB/s"
uplink = "2GB/s"
ssds = [{ read = "1GB/s", write = "1GB/s", capacity = "100GB" }]
[hosts.device]
kind = "cpu"
flops = "0.000100TFLOP/s"
memory = "16GB"
"""


@pytest.fixture
def files(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be, that is the question. " * 2000)

    def make(dirs: str) -> tuple[str, str]:
        (tmp_path / "cluster.toml").write_text(CLUSTER)
        (tmp_path / "job.toml").write_text(JOB.replace("{text}", str(text)).replace("{dirs}", dirs))
        return str(tmp_path / "cluster.toml"), str(tmp_path / "job.toml")

    return make


@pytest.mark.parametrize(("dirs", "name"), [('["{run}/store"]', "files"), ("[]", "zero-offload")])
def test_rates_are_learnt(files, dirs, name, capsys):
    cluster, job = files(dirs)
    assert cli.main(["calibrate", cluster, job, "--steps", "3"]) == 0
    told = capsys.readouterr().out
    assert f"placement {name}" in told
    real, by_file, calibrated = (
        float(number) * (1e-3 if unit == "ms" else 1) for number, unit in
        re.findall(r"([\d.]+) (s|ms)", next(line for line in told.splitlines() if "a step" in line)))
    assert by_file > 5 * real  # the file said that this machine computes 0.1 GFLOP/s
    assert 0.5 < calibrated / real < 2
    better = load_cluster(cluster).hosts[0]
    assert better.device is not None and better.device.flops > 1e9
    assert {"hosts.here.device", "hosts.here.updates"} <= set(load_cluster(cluster).measured)


def test_what_the_job_has_trained_is_not_touched(files, tmp_path):
    """Its store and its run directory are as they were, and nothing else is left."""
    cluster, job = files(f'["{tmp_path}/store"]')
    Path(job).write_text(f'[run]\ndir = "{tmp_path}/run"\nsteps = 2\n' + Path(job).read_text())
    assert cli.main(["train", job]) == 0

    def contents():
        return {path: path.read_bytes() for path in tmp_path.rglob("*")
                if path.is_file() and path.name != "cluster.toml"}

    before = contents()
    assert cli.main(["calibrate", cluster, job, "--steps", "1"]) == 0
    assert contents() == before


def test_where_nothing_can_be_written(files, tmp_path, capsys):
    _, job = files("[]")
    assert cli.main(["calibrate", "workstation", job]) == 2
    assert "is a template" in capsys.readouterr().err
    assert cli.main(["simulate", "workstation", "--model", "GPT-2", "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "x.json" in capsys.readouterr().err


def test_what_it_cannot_run(files, capsys):
    cluster, job = files('["{run}/store"]')
    Path(job).write_text(Path(job).read_text().replace("[store]", "[compress]\ntopk = 2.0\n[store]"))
    assert cli.main(["calibrate", cluster, job]) == 2
    assert "nothing compressed" in capsys.readouterr().err
