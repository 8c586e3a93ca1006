"""A pipeline that is killed at any moment resumes from its last snapshot (Rule 3): bit for bit with
the same parallelism, to rounding with another. The remaining processes end with an error (Rule
5)."""

import random
import shutil
import time

import pytest

from roadtrain.stages.parallelism import Parallelism
from tests.support.pipeline_job import (
    EVERY,
    Fault,
    PipelineProcesses,
    PipelineSpec,
    losses,
    resumed,
    start,
)

pytestmark = pytest.mark.slow
STEPS = 5
TWO = Parallelism(pp=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    home = tmp_path_factory.mktemp("undisturbed") / "run"
    assert start(PipelineSpec(home, TWO, STEPS)) == ["ended"] * 2
    found = losses(home)
    assert sorted(found) == list(range(STEPS))
    return found


def killed_and_resumed(home, fault, separate=False):
    results = start(PipelineSpec(home, TWO, STEPS, separate, fault))
    assert results[fault.rank] == "", results
    other = results[1 - fault.rank]
    # only one rank does the last write of a snapshot, so the other may already have ended
    assert other == "ended" or other.startswith(("LostError: ", "DeadlineError: ")), results
    if fault.kind == "run":
        assert "step" in other and "stage" in other, other
    assert start(PipelineSpec(home, TWO, STEPS, separate)) == ["ended"] * 2


REST = pytest.mark.exhaustive
# a rank runs a part 8 times per step; a snapshot syncs about 10 times
POINTS = [
    pytest.param(Fault(0, "run", 3), marks=REST),
    Fault(1, "run", 8 * 2 + 5),
    pytest.param(Fault(0, "run", 8 * 4 + 1), marks=REST),
    pytest.param(Fault(0, "fsync", 1), marks=REST),
    pytest.param(Fault(1, "fsync", 3), marks=REST),
    pytest.param(Fault(1, "fsync", 6), marks=REST),
    Fault(0, "fsync", 8),
    pytest.param(Fault(1, "fsync", 9), marks=REST),
]


@pytest.mark.parametrize("fault", POINTS, ids=lambda f: f"{f.kind}-{f.at}-of-{f.rank}")
def test_a_pipeline_killed_at_a_point_repeats_its_losses(fault, undisturbed, tmp_path):  # Rule 3
    home = tmp_path / "run"
    killed_and_resumed(home, fault)
    assert losses(home) == undisturbed
    assert all(step % EVERY == 0 for step in resumed(home))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_a_pipeline_killed_at_random_on_hosts_with_their_own_disks(seed, undisturbed, tmp_path):
    choose = random.Random(seed)
    kind = choose.choice(["run", "fsync"])
    fault = Fault(
        choose.randrange(2), kind, choose.randrange(1, 8 * STEPS if kind == "run" else 12)
    )
    home = tmp_path / "run"
    killed_and_resumed(home, fault, separate=True)
    assert losses(home) == undisturbed


FILES_FAULTS = [
    Fault(0, "run", 8 + 3),
    pytest.param(Fault(1, "run", 8 * 2 + 5), marks=REST),
    pytest.param(Fault(0, "run", 8 * 4 + 3), marks=REST),
]


@pytest.mark.parametrize("fault", FILES_FAULTS, ids=lambda f: f"{f.at}-of-{f.rank}")
def test_a_stage_on_files_goes_back_to_the_snapshot(fault, tmp_path):  # Rule 3
    """The stage's store is ahead of the snapshot or behind it."""
    spec = PipelineSpec(tmp_path / "whole", TWO, STEPS, on_files=(1,))
    assert start(spec) == ["ended"] * 2
    home = tmp_path / "run"
    results = start(PipelineSpec(home, TWO, STEPS, fault=fault, on_files=(1,)))
    assert results[fault.rank] == ""
    assert start(PipelineSpec(home, TWO, STEPS, on_files=(1,))) == ["ended"] * 2
    assert losses(home) == losses(spec.home)
    assert resumed(home)[1] == (fault.at // 8 // EVERY) * EVERY
    # and the stage may move off files
    results = start(PipelineSpec(home, TWO, STEPS + 2))
    assert results == ["ended"] * 2
    assert resumed(home)[-1] == STEPS - STEPS % EVERY


def test_a_stage_ahead_of_every_snapshot_is_refused(tmp_path):  # Rule 6
    start(PipelineSpec(tmp_path / "run", TWO, STEPS, on_files=(1,)))
    (tmp_path / "run" / "stage-1").rename(tmp_path / "stage-1")
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "stage-1").rename(other / "stage-1")
    results = start(PipelineSpec(other, TWO, STEPS, on_files=(1,)))
    for message in results:
        assert message.startswith("StaleError: ") and f"at step {STEPS}" in message, results


def test_a_stage_on_servers_goes_back_to_the_snapshot(addresses, tmp_path):  # Rule 3
    shape, where = Parallelism(pp=2, widths=(1, 2)), {1: addresses(2)}
    whole, home = tmp_path / "whole", tmp_path / "run"
    assert start(PipelineSpec(whole, shape, STEPS, on_servers={1: addresses(1)})) == ["ended"] * 3
    fault = Fault(0, "run", 8 * 3 + 2)
    results = start(PipelineSpec(home, shape, STEPS, fault=fault, on_servers=where))
    assert results[0] == "" and all(
        message.startswith(("Lost", "Deadline")) for message in results[1:]
    ), results
    assert start(PipelineSpec(home, shape, STEPS, on_servers=where, again=True)) == ["ended"] * 3
    assert resumed(home) == [0, 2]
    assert losses(home) == losses(whole)


OTHERS = {
    "one process": Parallelism(),
    "two replicas": Parallelism(dp=2),
    "uneven stages": Parallelism(pp=2, stages=(1, 3)),
    "unequal widths": Parallelism(pp=2, widths=(1, 2)),
    "interleaved": Parallelism(pp=2, virtual_stages=2),
}


SAME = {"dropout": 0.0}  # dropout's random numbers depend on the layout


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Directory of a run of two steps, and the losses of a run of all steps."""
    home, whole = (tmp_path_factory.mktemp("begun") / name for name in ("run", "whole"))
    for spec in (
        PipelineSpec(home, TWO, 2, options=SAME),
        PipelineSpec(whole, TWO, STEPS, options=SAME),
    ):
        assert start(spec) == ["ended"] * 2
    return home, losses(whole)


MORE = {"two replicas", "uneven stages"}  # "unequal widths" has two replicas too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=REST if name in MORE else ()) for name in OTHERS]
)
def test_a_run_resumes_with_other_parallelism(name, two_steps, tmp_path):
    home, expected = tmp_path / "run", two_steps[1]
    shutil.copytree(two_steps[0], home)
    spec = PipelineSpec(home, OTHERS[name], STEPS, options=SAME)
    assert start(spec) == ["ended"] * spec.ranks
    assert resumed(home) == [0, 2]
    found = losses(home)
    assert sorted(found) == sorted(expected)
    for step, loss in expected.items():
        assert float.fromhex(found[step]) == pytest.approx(float.fromhex(loss), rel=2e-5)


@pytest.mark.parametrize(
    "stopped",
    [pytest.param((2, 3), id="second", marks=REST), pytest.param((0, 1), id="first")],
)
def test_a_cluster_that_stops_ends_the_others(stopped, tmp_path):  # Rule 5
    # together less than one wait for each of the two stopped ranks
    deadline_s, grace_s, room_s = (6.0, 1.0, 4.0)
    limits = {"deadline_s": deadline_s, "grace_s": grace_s}
    spec = PipelineSpec(tmp_path / "run", Parallelism(pp=2, dp=2), 1000, **limits)
    job = PipelineProcesses(spec)
    job.wait_for_step(3)
    stopped_at = time.monotonic()
    for rank in stopped:
        job.stop(rank)
    results = job.join(wait_s=2 * deadline_s, but=stopped)
    took = time.monotonic() - stopped_at
    # one wait and the end of a process
    assert took < deadline_s + grace_s + room_s, (took, results)
    for rank in {0, 1, 2, 3} - {*stopped}:
        assert results[rank].startswith(("DeadlineError: ", "LostError: ")), results
        assert "stage" in results[rank] and "step" in results[rank] and "rank" in results[rank], (
            results[rank]
        )
