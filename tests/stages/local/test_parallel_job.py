"""A job with [parallelism], started by torchrun: it has the losses of one process, resumes with other
stages and can be exported."""

import json
import os
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roadtrain import cli
from roadtrain.config.job import load_job
from roadtrain.environment import LAUNCH_NAMES
from roadtrain.errors import ConfigError
from roadtrain.servers.trace import Stages
from roadtrain.stages.networks import HostCards
from roadtrain.stages.parallel_training import StepResult
from roadtrain.stages.pipeline import StepTimes
from roadtrain.stages.rank_meeting import RankHello, check_same
from roadtrain.stages.snapshots import SnapshotOptions
from roadtrain.stages.stage_model import MicroBatch
from roadtrain.storage.mark import Mark
from roadtrain.storage.safetensors_io import open_dir
from roadtrain.training import staged_job
from roadtrain.training.command import idle_keys
from roadtrain.training.data import Tokens
from roadtrain.training.export import export_run
from roadtrain.training.export_stages import newest
from roadtrain.training.job_options import check
from roadtrain.training.staged_job import (
    StagedJob,
    as_stages,
    shared_lines,
    snapshot_options,
    unused,
)
from roadtrain.training.stop import Stop
from roadtrain.training.trackers import Trackers
from roadtrain.training.train import train, train_steps
from tests.support import world
from tests.support.processes import free_port
from tests.support.warm_python import warm_python

JOB = """
[run]
dir = "{run}"
steps = {steps}
[model.config]
model_type = "llama"
num_hidden_layers = 4
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
[data]
paths = ["{text}"]
seq_len = 32
batch_size = 2
[optimizer]
lr = 1e-3
clip_norm = 0.5
accumulate = 4
[parallelism]
num_microbatches = 4
snapshot_every = 2
"""


@pytest.fixture
def job(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A road train is one truck pulling many trailers. " * 400)

    def write(name, steps):
        path = tmp_path / f"{name}.toml"
        path.write_text(JOB.format(run=tmp_path / name, steps=steps, text=text))
        return path

    return write


def torchrun(path, ranks, *options):
    """Run the job and return its output; a failure shows all of it."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    module = ["--master-port", str(free_port()), "-m", "roadtrain.cli"]
    process = subprocess.run(
        [warm_python(), *launcher, *module, "train", str(path), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def staged_child(path, options, out, rank):
    os.dup2(os.open(f"{out}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    return cli.main(["train", str(path), *options])


def in_ranks(path, ranks, *options):
    """Like torchrun, with processes that have already imported torch; return rank 0's output."""
    out = path.with_suffix(".out")
    exit_codes = world.run(ranks, partial(staged_child, path, options, out))
    assert exit_codes == [0] * ranks, exit_codes
    return Path(f"{out}-0").read_text()


def losses(path):
    lines = (load_job(path).run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("budget.host", "1GiB"),
        ("budget.device", "1GiB"),
        ("compress.downcast", "bf16"),
        ("compress.error_feedback", True),
        ("optimizer.delay", 1),
    ],
)
def test_options_that_stages_do_not_support_are_refused(job, key, value):  # Rules 4 and 6
    with pytest.raises(ConfigError, match=key.partition(".")[0]):
        check(load_job(job("refused", 1), {key: value, "parallelism.pp": 2}))


def test_options_without_effect_in_a_single_stage_are_reported(job):  # Rule 6
    alone, staged = load_job(job("said", 1)), load_job(job("said", 1), {"parallelism.dp": 2})
    assert idle_keys(alone) == ["num_microbatches", "snapshot_every"]
    assert not idle_keys(staged)
    assert not load_job(job("said", 1), {"parallelism.activations": "bf16"}).lossy  # Rule 2


def test_a_job_in_stages_resumes_as_one_stage_without_torchrun(job, monkeypatch, capfd):
    """Rule 3. `--parallelism.pp 1` alone used to be refused, with the advice to start again."""
    whole, path = job("whole", 4), job("staged", 4)
    train(load_job(whole), lambda _: None)
    torchrun(path, 2, "--parallelism.pp", "2", "--run.steps", "2")
    for name in LAUNCH_NAMES:
        monkeypatch.setenv(name, "")  # so that monkeypatch removes values that are set later
        monkeypatch.delenv(name)
    command = ["train", str(path), "--run.steps"]
    assert cli.main([*command, "3", "--parallelism.pp", "1"]) == 0
    output = capfd.readouterr().out
    assert "at step 2, trained as dp 1 x tp 1 x pp 2: continuing as one stage" in output
    assert cli.main([*command, "4"]) == 0  # later starts need no option
    assert losses(path) == pytest.approx(losses(whole), abs=1e-5)
    assert cli.main(["export", str(path.with_suffix("")), str(path.parent / "out")]) == 0
    assert "exported step 4" in capfd.readouterr().out


def test_snapshots_of_an_earlier_run_in_stages_are_ignored(job):
    """The snapshots lie beside this run's own store, or an option asks for another start."""
    path = job("left", 1)
    in_ranks(path, 2, "--parallelism.pp", "2", "--run.steps", "2")
    loaded = load_job(path)
    assert as_stages(loaded).parallelism.dp == 1
    assert not as_stages(loaded.changed({"run.new_store": True})).parallelism.used
    assert not as_stages(loaded.changed({"servers.addresses": ["127.0.0.1:1"]})).parallelism.used
    Mark(loaded.run_dir).adopt("another store", 5)
    assert not as_stages(loaded).parallelism.used
    train(load_job(job("plain", 1)), lambda _: None)
    assert not as_stages(load_job(path.parent / "plain.toml")).parallelism.used


class SimulatedTraining:
    """A process of a job in stages; `answers` stand for the messages of the other processes."""

    def __init__(self, rank=0, steps_done=0, answers=("",), stop=False):
        self.rank, self.steps_done, self.committed_step = rank, steps_done, steps_done
        self.context = SimpleNamespace(
            options=SimpleNamespace(num_microbatches=5),
            position=SimpleNamespace(stage=0, replica=0),
            control=SimpleNamespace(agree=lambda own, what: [own, *answers]),
        )
        self.optimizer = SimpleNamespace(param_groups=[])
        self.pipeline = SimpleNamespace(trace=Stages())
        self.stop, self.turns = stop, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def keep(self, *_):
        return {}

    def due(self):
        return False

    def snapshot(self, blobs):
        self.committed_step = self.steps_done

    def step(self, batch, clip_norm, *, stop):
        self.steps_done += 1
        return StepResult(1.0, 1.0, StepTimes(0.0, 0.0, 0.0), self.stop)

    def evaluate(self, batch):
        values = [batch(micro).args[0] for micro in range(5)]
        self.turns += values
        return sum(values) / 5


def staged_job_of(job, training):
    loaded = load_job(job)
    return StagedJob(loaded, training, Tokens(loaded.data.paths), torch.device("cpu"))


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (["interrupted", ""], "another process was interrupted"),
        (["", "5 minutes are over"], "5 minutes are over"),
    ],
)
def test_every_process_learns_why_training_ends(job, monkeypatch, answers, why):
    """No process evaluates after an interrupt, because it would wait for the interrupted process."""
    training = SimulatedTraining(answers=answers, stop=True)
    staged = staged_job_of(job("ended", 4), training)
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "a"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(staged_job, "stage_job", lambda *_: staged)
    monkeypatch.setattr(staged_job, "micro_batch", lambda *_: MicroBatch((1.0,)))
    summary = train(staged.job.changed({"parallelism.dp": 1}), report=lambda _: None)
    assert (summary.stopped, summary.steps) == (why, 1)
    assert bool(training.turns) == ("interrupted" not in why)


def test_held_out_batches_have_equal_weights(job, monkeypatch):
    """Rule 1. The mean over 2 batches in turns of 5 equals that of one process."""
    training = SimulatedTraining()
    staged = staged_job_of(job("held", 4), training)
    numbers = iter(range(100))
    monkeypatch.setattr(staged_job, "micro_batch", lambda *_: MicroBatch((next(numbers),)))
    assert staged.held_out_loss() == 0.5
    assert Counter(training.turns) == {0: 5, 1: 5}


def test_a_rank_that_was_absent_resumes_its_metrics(job):
    """The job runs with 3 ranks, then 2, then 3, so the third rank's lines end at the first start."""
    staged = staged_job_of(job("away", 6), SimulatedTraining(rank=2, steps_done=6))
    home = staged.job.run_dir
    home.mkdir()
    (home / "metrics.2.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    lines = []
    staged.report = lines.append
    train_steps(staged, Stop(None), Trackers([], home))
    assert (home / "metrics.2.before-1.jsonl").exists() and "had lines of other steps" in lines[0]


def test_options_without_effect_in_stages_are_named(job):  # Rule 6
    plain = load_job(job("plain", 1), {"parallelism.pp": 2})
    changes = {"store.rates": [1.0], "store.chunk_elements": 4096, "servers.connections": 2}
    assert unused(plain) == []
    assert unused(plain.changed({**changes, "store.files": ["/mnt/ssd"]})) == [
        "store.files",
        "store.rates",
        "store.chunk_elements",
        "servers.connections",
    ]


def test_hosts_with_different_text_or_optimizers_are_refused(job):  # Rule 6
    """The last stage would compare the outputs for the first stage's rows with other targets."""
    own = load_job(job("own", 1))
    texts = [Tokens([str(path)]) for path in (*own.data.paths, job("other", 1))]
    slower = own.changed({"optimizer.lr": 1e-4})
    descriptions = [
        shared_lines(own, texts[0]),
        shared_lines(own, texts[1]),
        shared_lines(slower, texts[0]),
    ]
    hosts = HostCards("a", "a", ())
    for other in descriptions[1:]:
        with pytest.raises(
            ConfigError, match=r"different jobs: (text|optimizer) = .* on the first, \1 = "
        ):
            check_same(
                RankHello(0, 2, hosts, descriptions[0], 2), {}, RankHello(1, 2, hosts, other, 2)
            )


def test_snapshot_options_of_a_job(job):
    path = job("snapshots", 1)
    assert snapshot_options(load_job(path)) == SnapshotOptions(every=2)
    changes = {"parallelism.snapshot_replicas": 2, "run.new_store": True}
    expected = SnapshotOptions(every=2, replicas=2, go_back=True)
    assert snapshot_options(load_job(path, changes)) == expected
    with pytest.raises(ConfigError, match="snapshot_replicas"):
        load_job(path, {"parallelism.snapshot_replicas": 3})


@pytest.mark.slow
def test_a_job_in_stages_resumes_with_other_stages(job, tmp_path):
    staged, plain = job("staged", 3), job("plain", 6)
    output = in_ranks(staged, 2, "--parallelism.pp", "2")
    assert "stages of 2, 2 blocks" in output and "a snapshot to files" in output  # Rule 3
    more = ("--parallelism.pp", "2", "--parallelism.widths", "2,1", "--parallelism.stages", "3,1")
    output = in_ranks(staged, 3, *more, "--run.steps", "6")
    assert "resumed at step 3, saved with dp 1 x tp 1 x pp 2" in output
    train(load_job(plain), report=lambda _: None)
    assert losses(staged) == pytest.approx(losses(plain), rel=1e-5)
    # with one rank per stage the bits are equal (Rule 1)
    assert losses(staged)[:3] == losses(plain)[:3]

    export_run(str(tmp_path / "staged"), str(tmp_path / "out"), report=lambda _: None)
    export_run(str(tmp_path / "plain"), str(tmp_path / "own"), report=lambda _: None)
    staged_model, own = open_dir(tmp_path / "out"), open_dir(tmp_path / "own")
    assert {name: tensor.shape for name, tensor in staged_model.items()} == {
        name: tensor.shape for name, tensor in own.items()
    }
    for name, tensor in own.items():
        assert np.allclose(staged_model[name].read(), tensor.read(), atol=1e-5), name
    reader, header = newest(tmp_path / "staged" / "snapshots")
    assert header.step == 6 and sorted(reader.parts) == [0, 1, 2]
