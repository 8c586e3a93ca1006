"""Data-parallel training whose gradients are summed by reducers: the losses are bit-identical to those
without reducers, even when reducers die, join or leave (Rule 1)."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace

import pytest
from test_parallel_job import losses as job_losses
from test_parallel_job import torchrun

from roadtrain.errors import ConfigError
from roadtrain.launch import status_command as status
from roadtrain.servers import health
from roadtrain.stages.parallel_options import ParallelOptions
from roadtrain.stages.parallelism import Parallelism
from roadtrain.transport.address import address_of, write_token
from roadtrain.transport.tcp import TcpOptions
from tests.support.pipeline_job import PipelineProcesses, PipelineSpec, losses, resumed, start
from tests.support.warm_python import warm_python

SECRET = b"a secret of the job"
WIDE = {"width": 96}  # gradients of several parts
STEPS = 6


@contextlib.contextmanager
def reducer(token):
    """Run `roadtrain serve --sum`; yield the process and its address."""
    command = [warm_python(), "-m", "roadtrain.cli", "serve", "127.0.0.1:0", "--sum"]
    options = ["--budget", "64MiB", "--token-file", str(token)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command + options, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process, re.search(r"summing at (\S+),", process.stdout.readline())[1]
        finally:
            process.kill()


def sums_for(where):
    """Return the number of jobs for which that reducer sums."""
    text = health.ask(address_of(where), TcpOptions(token=SECRET))[0]
    return int(re.match(r"sums for (\d+) job", text)[1])


def wait_until(condition, wait_s=30):
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    path = tmp_path_factory.mktemp("token") / "token"
    write_token(path, SECRET)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of two workers without reducers."""
    spec = PipelineSpec(tmp_path_factory.mktemp("plain"), Parallelism(dp=2), STEPS, options=WIDE)
    assert start(spec) == ["ended"] * 2
    return losses(spec.home)


def spec_of(home, token, reducers, **more):
    sums = {"reducers": reducers, "reducers_token_file": str(token)}
    return PipelineSpec(home, Parallelism(dp=2), STEPS, options=WIDE, sums=sums, **more)


def lines_of(spec):
    return (spec.home / "lines-0").read_text()


def test_training_continues_while_reducers_die_and_join(tmp_path, token, plain):  # Rules 1, 5
    """Training begins with a reducer; a second reducer is added to the file and the first is killed.
    The last two steps follow afterwards."""
    listed, killed = tmp_path / "reducers.txt", tmp_path / "killed"
    with reducer(token) as (first, old), reducer(token) as (_, new):
        listed.write_text(f"{old}\n")
        spec = spec_of(tmp_path / "run", token, str(listed), pace_s=0.7, until=(STEPS - 2, killed))
        processes = PipelineProcesses(spec)
        try:
            processes.wait_for_step(1)
            assert (sums_for(old), sums_for(new)) == (1, 0)
            listed.write_text(f"{old}\n{new} 2  # of twice the rate\n")
            wait_until(lambda: sums_for(new) == 1)
            first.kill()
            killed.touch()
            assert processes.join() == ["ended"] * 2
        finally:
            processes.end()
    assert losses(processes.spec.home) == plain
    lines = lines_of(processes.spec)
    assert f"reducers: {old} ({listed}) sum gradients, and so do the workers" in lines
    assert f"spare host {new} begins to sum" in lines
    assert re.search(f"# spare host {old} .*: not used any more", lines)


@pytest.mark.slow
def test_reducers_sum_alone_and_a_run_resumes_without_them(tmp_path, token, plain):  # Rules 1, 3
    """This is the placement parameter-server. A rank still has only its share of a snapshot."""
    with reducer(token) as (_, where):
        spec = spec_of(tmp_path, token, [where])
        spec.sums["reducers_alone"] = True
        assert start(replace(spec, steps=4)) == ["ended"] * 2
    assert f"reducers: {where} sum gradients, workers only if there is no spare host" in lines_of(
        spec
    )
    assert start(replace(spec, sums={})) == ["ended"] * 2
    assert (losses(tmp_path), resumed(tmp_path)) == (plain, [0, 4])


def test_another_token_is_refused_at_the_start(tmp_path, token):  # Rule 8
    write_token(tmp_path / "token", b"another secret of a job")
    with reducer(token) as (_, where):
        ends = start(spec_of(tmp_path, tmp_path / "token", [where]))
    assert [end.partition(":")[0] for end in ends] == ["AuthError"] * 2, ends
    assert all(where in end for end in ends)


def test_a_missing_file_of_reducers_is_reported_by_all_ranks(tmp_path, token):  # Rules 5, 6
    ends = start(spec_of(tmp_path, token, str(tmp_path / "none")))
    assert (
        ends[0].startswith("ConfigError: cannot read the spare hosts in")
        and "No such file" in ends[0]
    )
    assert ends[1].startswith("LostError: the reducers: rank 0") and "No such file" in ends[1]


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}])
def test_reducers_with_pipeline_or_tensor_parallelism_are_refused(degrees):  # Rule 6
    with pytest.raises(ConfigError, match="reducers need pp 1, tp 1"):
        ParallelOptions(Parallelism(dp=2, **degrees), 4, reducers=["h:1"])


def test_one_worker_needs_no_reducers(tmp_path, token):  # Rule 6
    """This happens after a run has shrunk to one host."""
    spec = spec_of(tmp_path, token, ["127.0.0.1:1"])
    spec = replace(spec, parallelism=Parallelism(), steps=1)
    assert start(spec) == ["ended"]
    assert "reducers: not used, as there is only one worker" in lines_of(spec)


JOB = """
[run]
dir = "{run}"
steps = 3
[model.config]
model_type = "llama"
num_hidden_layers = 2
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
[data]
paths = ["{text}"]
seq_len = 32
batch_size = 2
[optimizer]
clip_norm = 0.5
accumulate = 2
"""


@pytest.mark.exhaustive
def test_a_job_and_its_status_use_the_file_of_reducers(tmp_path, token):  # Rules 1 and 6
    """The file of reducers is in the run directory; `status` of the run asks the reducers in it."""
    text, path, run = tmp_path / "text.txt", tmp_path / "job.toml", tmp_path / "run"
    text.write_text("A road train is one truck pulling many trailers. " * 400)
    path.write_text(JOB.format(run=run, text=text))
    torchrun(path, 2, "--parallelism.dp", "2")
    plain = job_losses(path)
    shutil.rmtree(run)
    run.mkdir()
    with reducer(token) as (_, where):
        (run / "reducers.txt").write_text(where)
        options = ["--parallelism.reducers", "{run}/reducers.txt"]
        output = torchrun(path, 2, *options, "--parallelism.reducers_token_file", str(token))
        table = list[str]()
        assert status.command(str(run), report=table.append) == 0
    assert f"reducers: {where} ({run}/reducers.txt) sum gradients" in output
    assert job_losses(path) == plain and len(plain) == 3
    assert any(re.match(rf"reducer 0 +{where}, sums for 0 job", line) for line in table), table
    assert status.command(str(run), report=table.append) == 1  # the reducer has ended
    assert any(re.match(r"reducer 0 +does not answer", line) for line in table), table
