"""A job with [parallelism], started by torchrun: the losses of one process, gone on with by other
stages, exported."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from processes import free_port

from roadtrain.config.job import load_job
from roadtrain.errors import ConfigError
from roadtrain.storage.safetensors_io import open_dir
from roadtrain.training.export import export_run
from roadtrain.training.export_stages import newest
from roadtrain.training.train import train
from roadtrain.training.train_parallel import check

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
        [sys.executable, *launcher, *where, "train", str(path), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(path):
    lines = (load_job(path).run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(
    "key", ["budget.host", "budget.device", "compress.downcast", "optimizer.delay"]
)
def test_what_stages_do_not_keep_is_refused(job, key):  # Rules 4 and 6
    given = {"compress.downcast": "bf16", "optimizer.delay": 1}.get(key, "1GiB")
    with pytest.raises(ConfigError, match=key.partition(".")[0]):
        check(load_job(job("refused", 1), {key: given, "parallelism.pp": 2}))


@pytest.mark.slow
def test_a_job_in_stages_goes_on_with_other_stages(job, tmp_path):
    staged, plain = job("staged", 3), job("plain", 6)
    said = torchrun(staged, 2, "--parallelism.pp", "2")
    assert "stages of 2, 2 blocks" in said and "a snapshot to files" in said  # Rule 3
    more = ("--parallelism.pp", "2", "--parallelism.widths", "2,1", "--parallelism.stages", "3,1")
    said = torchrun(staged, 3, *more, "--run.steps", "6")
    assert "resumed at step 3, which ran as dp 1 x tp 1 x pp 2" in said
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
