"""`roadtrain calibrate`: real steps of a job beside simulated steps; the file then holds the
measured rates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.common.buffers import buffer_bytes
from roadtrain import cli
from roadtrain.config.cluster import Cluster, load_cluster
from roadtrain.config.job import load_job
from roadtrain.config.models import from_config
from roadtrain.config.plan_file import ElementBytes, Framework, Plan, PlanMemory, placement
from roadtrain.planner.calibrate import EXACT, fit_rates, stages_of
from roadtrain.planner.calibrate_steps import Measured, plan_of
from roadtrain.simulator.run import simulate
from roadtrain.training.placed_job import place_job

pytestmark = pytest.mark.alone

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
files = {dirs}
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
def test_rates_are_measured(files, dirs, name, capsys):
    cluster, job = files(dirs)
    assert cli.main(["calibrate", cluster, job, "--steps", "9"]) == 0
    out = capsys.readouterr().out
    assert f"placement {name}" in out
    real, by_file, calibrated = (
        float(number) * {"ms": 1e-3, "s": 1, "min": 60, "h": 3600}[unit]
        for number, unit in re.findall(
            r"([\d.]+) (s|ms|min|h)\b", next(line for line in out.splitlines() if "a step" in line)
        )
    )
    assert by_file > 5 * real  # the file sets 0.1 GFLOP/s for this machine
    assert 0.5 < calibrated / real < 2
    if not dirs.strip("[]"):  # no wait for a device: a step is only compute
        assert calibrated == pytest.approx(real, rel=0.05)
    better = load_cluster(cluster).hosts[0]
    assert better.device is not None and better.device.flops > 1e9
    assert {"hosts.here.device", "hosts.here.updates"} <= set(load_cluster(cluster).measured)


def test_a_trained_job_is_not_changed(files, tmp_path):
    """The store and the run directory are unchanged, and no other file is left."""
    cluster, job = files(f'["{tmp_path}/store"]')
    Path(job).write_text(f'[run]\ndir = "{tmp_path}/run"\nsteps = 2\n' + Path(job).read_text())
    assert cli.main(["train", job]) == 0

    def contents():
        return {
            path: path.read_bytes()
            for path in tmp_path.rglob("*")
            if path.is_file() and path.name != "cluster.toml"
        }

    before = contents()
    assert cli.main(["calibrate", cluster, job, "--steps", "1"]) == 0
    assert contents() == before


def test_outputs_that_cannot_be_written_are_refused(files, tmp_path, capsys):
    _, job = files("[]")
    assert cli.main(["calibrate", "workstation", job]) == 2
    assert "is a template" in capsys.readouterr().err
    assert (
        cli.main(
            [
                "simulate",
                "workstation",
                "--model",
                "GPT-2",
                "--json",
                str(tmp_path / "no" / "x.json"),
            ]
        )
        == 2
    )
    assert "x.json" in capsys.readouterr().err


def test_unsupported_jobs_are_refused(files, capsys):
    cluster, job = files('["{run}/store"]')
    Path(job).write_text(
        Path(job).read_text().replace("[store]", "[compress]\nkeep = 0.01\n[store]")
    )
    assert cli.main(["calibrate", cluster, job]) == 2
    assert "without compression" in capsys.readouterr().err
    Path(job).write_text(
        Path(job)
        .read_text()
        .replace("keep = 0.01", "")
        .replace("[store]", '[servers]\naddresses = ["h:1"]\n[store]')
    )
    assert cli.main(["calibrate", cluster, job]) == 2
    assert "or add --lab" in capsys.readouterr().err
    cluster, job = files("[]")
    assert cli.main(["calibrate", cluster, job, "--steps", "0"]) == 2
    assert "--steps is 0" in capsys.readouterr().err
    Path(cluster).write_text('[[hosts]]\nname = "here"\nmemory = "16GB"\n')
    assert cli.main(["calibrate", cluster, job]) == 2
    assert "0 entries with a device" in capsys.readouterr().err


def test_a_missing_lab_is_explained(files, capsys, monkeypatch):
    cluster, job = files("[]")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert cli.main(["calibrate", cluster, job, "--lab"]) == 2
    assert (
        "no lab can be created here: not root\nhint: run as root on Linux, or omit --lab"
        in capsys.readouterr().err
    )
    assert cli.main(["plan", cluster, "--model", "OPT-125M", "--lab"]) == 2
    assert "--lab needs --verify" in capsys.readouterr().err


@pytest.mark.parametrize(("late", "updating"), [(0, 0.02), (1, 0.02), (1, 0.08)])
def test_the_simulation_reproduces_the_measured_times(files, late, updating):
    """Computing and updating on the same processors slow each other down, both in the measurement
    and in the simulator. Rates computed as plain quotients would count that twice."""
    cluster, _ = files("[]")
    config = {
        "model_type": "llama",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "vocab_size": 256,
    }
    plan = Plan(
        placement("zero-offload"),
        activation_checkpointing=True,
        staleness=late,
        update_at="gradient",
        sizes=ElementBytes(parameter_bytes=4, gradient_bytes=4),
        memory=PlanMemory(chunk=1 << 18),
        framework=Framework(context_bytes=0),
    )
    measured = Measured(
        0.24, 0.235, {"Update": updating}, 0, plan, from_config(config, seq_len=256)
    )

    def stages(cluster: Cluster) -> tuple[float, float, float]:
        result = simulate(plan, cluster, measured.shape, EXACT, checked=False)
        times = stages_of(result)
        return result.seconds, times["Forward"] + times["Backward"], times["Update"]

    Path(cluster).write_text(CLUSTER.replace('memory_rate = "10GB/s"', 'memory_rate = "60GB/s"'))
    raw = load_cluster(cluster)
    host = raw.hosts[0]
    assert host.device is not None
    quotient = {
        "updates": 28 * measured.shape.params / updating,
        "device": host.device.model_copy(
            update={"flops": measured.shape.step_flops(True) / measured.compute_s}
        ),
    }
    _, computes, updates = stages(
        raw.model_copy(update={"hosts": (host.model_copy(update=quotient),)})
    )
    assert computes > 1.03 * measured.compute_s and updates > 1.5 * updating
    step, computes, updates = stages(fit_rates(raw, measured))
    assert computes == pytest.approx(measured.compute_s, rel=0.01) and updates == pytest.approx(
        updating, rel=0.01
    )
    assert step == pytest.approx(measured.step_s, rel=0.02)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"optimizer.delay": 1},
        {"model.dtype": "bf16"},
        {"compress.keep": 0.01, "store.chunk_elements": 1 << 17},
        {"budget.host": "150MiB"},
    ],
)
@pytest.mark.parametrize("dirs", ['["{run}/store"]', "[]"])
def test_a_plan_predicts_the_memory_of_buffers(files, dirs, words, tmp_path):  # Rule 4
    _, path = files(dirs)
    job = load_job(path, {"run.dir": str(tmp_path / "run"), "budget.host": "100MiB", **words})
    training = place_job(job, report=lambda _: None)
    with training.optimizer:
        shape = from_config(training.model.config.to_dict(), seq_len=job.data.seq_len)
        predicted = buffer_bytes(plan_of(training), shape.blocks)
        assert predicted == pytest.approx(training.optimizer.memory()["resident"], rel=0.02)


def test_a_plan_is_verified_by_real_steps(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster, _ = files("[]")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 3,
                "vocab_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 64,
                "pad_token_id": None,
            }
        )
    )
    words = ["plan", cluster, "--model", "config.json", "--batch", "2", "--verify", "--placements"]
    for name in ("zero-offload", "files"):
        assert cli.main([*words, name]) == 0
        out = capsys.readouterr().out
        assert re.search(rf"placement {name}\b", out) and re.search(r"a step +\d.*\d.*\d", out)
    assert "hosts.here.device" in load_cluster(cluster).measured
    assert (
        cli.main([*words, "ddp"]) == 2
        and "cannot be run with one worker" in capsys.readouterr().err
    )
    assert (
        cli.main([word if word != "config.json" else "OPT-125M" for word in words] + ["files"]) == 2
    )
    assert "is a shape and cannot run" in capsys.readouterr().err
