"""A job with [parallelism], started by torchrun: the losses of one process, gone on with by other
stages, exported."""

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
    """The output of rank 0's lines; fails with all of it."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    where = ["--master-port", str(free_port()), "-m", "roadtrain.cli"]
    done = subprocess.run(
        [warm_python(), *launcher, *where, "train", str(path), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def staged_child(path, options, out, rank):
    os.dup2(os.open(f"{out}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    return cli.main(["train", str(path), *options])


def in_ranks(path, ranks, *options):
    """As torchrun, from processes that have imported torch already."""
    out = path.with_suffix(".out")
    found = world.run(ranks, partial(staged_child, path, options, out))
    assert found == [0] * ranks, found
    return Path(f"{out}-0").read_text()


def losses(path):
    lines = (load_job(path).run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("budget.host", "1GiB"),
        ("budget.device", "1GiB"),
        ("compress.downcast", "bf16"),
        ("compress.error_feedback", True),
        ("optimizer.delay", 1),
    ],
)
def test_what_stages_do_not_keep_is_refused(job, key, given):  # Rules 4 and 6
    with pytest.raises(ConfigError, match=key.partition(".")[0]):
        check(load_job(job("refused", 1), {key: given, "parallelism.pp": 2}))


def test_what_has_no_effect_without_stages_is_said(job):  # Rule 6
    alone, staged = load_job(job("said", 1)), load_job(job("said", 1), {"parallelism.dp": 2})
    assert idle_keys(alone) == ["num_microbatches", "snapshot_every"]
    assert not idle_keys(staged)
    assert not load_job(job("said", 1), {"parallelism.activations": "bf16"}).lossy  # Rule 2


def test_a_job_in_stages_goes_on_as_one_without_torchrun(job, monkeypatch, capfd):
    """`--parallelism.pp 1` alone was refused, with advice to begin anew. Rule 3."""
    whole, path = job("whole", 4), job("staged", 4)
    train(load_job(whole), lambda _: None)
    torchrun(path, 2, "--parallelism.pp", "2", "--run.steps", "2")
    for name in LAUNCH_NAMES:
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    told = ["train", str(path), "--run.steps"]
    assert cli.main([*told, "3", "--parallelism.pp", "1"]) == 0
    said = capfd.readouterr().out
    assert "at step 2, trained as dp 1 x tp 1 x pp 2: continuing as one stage" in said
    assert cli.main([*told, "4"]) == 0  # the same once more
    assert losses(path) == pytest.approx(losses(whole), abs=1e-5)
    assert cli.main(["export", str(path.with_suffix("")), str(path.parent / "out")]) == 0
    assert "exported step 4" in capfd.readouterr().out


def test_what_is_left_of_another_run_in_stages_is_not_gone_on_from(job):
    """Snapshots that a run before has left beside this run's store, or that are asked away."""
    path = job("left", 1)
    in_ranks(path, 2, "--parallelism.pp", "2", "--run.steps", "2")
    asked = load_job(path)
    assert as_stages(asked).parallelism.dp == 1
    assert not as_stages(asked.changed({"run.new_store": True})).parallelism.used
    assert not as_stages(asked.changed({"servers.addresses": ["127.0.0.1:1"]})).parallelism.used
    Mark(asked.run_dir).adopt("another store", 5)
    assert not as_stages(asked).parallelism.used
    train(load_job(job("plain", 1)), lambda _: None)
    assert not as_stages(load_job(path.parent / "plain.toml")).parallelism.used


class OneOf:
    """A process of a job in stages whose others are made up: it hears `told` of them."""

    def __init__(self, rank=0, steps_done=0, told=("",), stop=False):
        self.rank, self.steps_done, self.committed_step = rank, steps_done, steps_done
        self.context = SimpleNamespace(
            options=SimpleNamespace(num_microbatches=5),
            position=SimpleNamespace(stage=0, replica=0),
            control=SimpleNamespace(agree=lambda mine, what: [mine, *told]),
        )
        self.optimizer = SimpleNamespace(param_groups=[])
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
        got = [batch(micro).args[0] for micro in range(5)]
        self.turns += got
        return sum(got) / 5


def one_of(job, training):
    given = load_job(job)
    return StagedJob(given, training, Tokens(given.data.paths), torch.device("cpu"))


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (["interrupted", ""], "another process was interrupted"),
        (["", "5 minutes are over"], "5 minutes are over"),
    ],
)
def test_all_hear_why_training_ends(job, monkeypatch, told, why):
    """Where one process is interrupted nobody evaluates: the others would wait for it."""
    training = OneOf(told=told, stop=True)
    staged = one_of(job("ended", 4), training)
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


def test_held_out_batches_count_alike(job, monkeypatch):
    """2 batches, 5 in each turn: their mean is that of one process (Rule 1)."""
    training = OneOf()
    staged = one_of(job("held", 4), training)
    numbers = iter(range(100))
    monkeypatch.setattr(staged_job, "micro_batch", lambda *_: MicroBatch((next(numbers),)))
    assert staged.held_out_loss() == 0.5
    assert Counter(training.turns) == {0: 5, 1: 5}


def test_a_rank_that_was_away_goes_on(job):
    """With 3 ranks, then 2, then 3: the lines of the third one end at the first start."""
    staged = one_of(job("away", 6), OneOf(rank=2, steps_done=6))
    home = staged.job.run_dir
    home.mkdir()
    (home / "metrics.2.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    said = []
    staged.report = said.append
    train_steps(staged, Stop(None))
    assert (home / "metrics.2.before-1.jsonl").exists() and "had lines of other steps" in said[0]


def test_what_has_no_effect_is_named(job):  # Rule 6
    plain = load_job(job("plain", 1), {"parallelism.pp": 2})
    given = {"store.rates": [1.0], "store.chunk_elements": 4096, "servers.connections": 2}
    assert unused(plain) == []
    assert unused(plain.changed({**given, "store.files": ["/mnt/ssd"]})) == [
        "store.files",
        "store.rates",
        "store.chunk_elements",
        "servers.connections",
    ]


def test_hosts_whose_text_or_optimizer_differs_do_not_mean_the_same(job):  # Rule 6
    """The last stage would compare the first one's rows with others."""
    own = load_job(job("own", 1))
    texts = [Tokens([str(path)]) for path in (*own.data.paths, job("other", 1))]
    slower = own.changed({"optimizer.lr": 1e-4})
    told = [
        shared_lines(own, texts[0]),
        shared_lines(own, texts[1]),
        shared_lines(slower, texts[0]),
    ]
    hosts = HostCards("a", "a", ())
    for there in told[1:]:
        with pytest.raises(
            ConfigError, match=r"different jobs: (text|optimizer) = .* on the first, \1 = "
        ):
            check_same(RankHello(0, 2, hosts, told[0], 2), {}, RankHello(1, 2, hosts, there, 2))


def test_what_a_job_says_of_snapshots(job):
    path = job("snapshots", 1)
    assert snapshot_options(load_job(path)) == SnapshotOptions(every=2)
    given = {"parallelism.snapshot_replicas": 2, "run.new_store": True}
    asked = SnapshotOptions(every=2, replicas=2, go_back=True)
    assert snapshot_options(load_job(path, given)) == asked
    with pytest.raises(ConfigError, match="snapshot_replicas"):
        load_job(path, {"parallelism.snapshot_replicas": 3})


@pytest.mark.slow
def test_a_job_in_stages_goes_on_with_other_stages(job, tmp_path):
    staged, plain = job("staged", 3), job("plain", 6)
    said = in_ranks(staged, 2, "--parallelism.pp", "2")
    assert "stages of 2, 2 blocks" in said and "a snapshot to files" in said  # Rule 3
    more = ("--parallelism.pp", "2", "--parallelism.widths", "2,1", "--parallelism.stages", "3,1")
    said = in_ranks(staged, 3, *more, "--run.steps", "6")
    assert "resumed at step 3, saved with dp 1 x tp 1 x pp 2" in said
    train(load_job(plain), report=lambda _: None)
    assert losses(staged) == pytest.approx(losses(plain), rel=1e-5)
    assert losses(staged)[:3] == losses(plain)[:3]  # one rank a stage: the same bits (Rule 1)

    export_run(str(tmp_path / "staged"), str(tmp_path / "out"), report=lambda _: None)
    export_run(str(tmp_path / "plain"), str(tmp_path / "own"), report=lambda _: None)
    staged_model, own = open_dir(tmp_path / "out"), open_dir(tmp_path / "own")
    assert {name: one.shape for name, one in staged_model.items()} == {
        name: one.shape for name, one in own.items()
    }
    for name, one in own.items():
        assert np.allclose(staged_model[name].read(), one.read(), atol=1e-5), name
    reader, told = newest(tmp_path / "staged" / "snapshots")
    assert told.step == 6 and sorted(reader.parts) == [0, 1, 2]
