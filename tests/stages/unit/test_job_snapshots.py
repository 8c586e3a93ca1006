"""Snapshots of a job of several ranks after a kill, a power cut, a lost host, a full disk, a copied
directory or a damaged byte. Ranks are threads; every host has its own directory."""

from __future__ import annotations

import errno
import queue
import shutil
import threading
import time

import pytest

from roadtrain.errors import (
    ConfigError,
    DamagedError,
    ForeignError,
    ForkedError,
    FullError,
    GoneError,
    LostError,
    StaleError,
)
from roadtrain.stages import snapshot_files
from roadtrain.stages.control_links import RankPlace
from roadtrain.stages.pieces import Extent
from roadtrain.stages.snapshot_choice import ParamEntry
from roadtrain.stages.snapshots import JobSnapshots, SnapshotOptions, buddies
from roadtrain.storage.mark import Mark
from tests.support.power import Disk
from tests.support.state_pieces import SIZES, RandomSource, same_as_whole, spread
from tests.support.thread_links import run_ranks

PARAMS = [ParamEntry(name, (size,), "fp32", "adamw") for name, size in SIZES.items()]


def places(ranks, hosts=None, clusters=1):
    hosts = hosts or ranks
    return [
        RankPlace(f"c{r * clusters // ranks}", f"h{r * hosts // ranks}", f"stage {r}")
        for r in range(ranks)
    ]


def snapshots(links, root, lines=None, **options):
    mark = options.pop("mark", None) if links.rank == 0 else options.pop("mark", None) and None
    params = options.pop("params", PARAMS)
    home = root / links.places[links.rank].host
    home.mkdir(exist_ok=True, parents=True)
    report = (lambda line: None) if lines is None else lines.append
    return JobSnapshots(
        home,
        links,
        params[links.rank :: links.size],
        SnapshotOptions(every=1, **options),
        mark=mark,
        report=report,
    )


def train(root, where, steps, seed=1, after_step=lambda step: None, **options):
    """Save a snapshot at each of `steps`, where a parameter's values are a function of the step.
    Returns for each rank the step from which it resumed."""

    def rank(links):
        kept = snapshots(links, root, **options)
        found = kept.find()
        for step in steps:
            source = RandomSource(spread(seed, links.size)[links.rank], version=step)
            kept.save(step, source, {"job": f"step {step}".encode(), f"of {links.rank}": b"x"})
            after_step(step)
        return found and found.step

    return run_ranks(where, rank)


def resume(root, where, seed=2, lines=None, **options):
    """Resume with other cuts than before and check all values. Returns the step that each rank
    found."""

    def rank(links):
        found = snapshots(links, root, lines, **options).find()
        if found is None:
            return None
        assert found.blobs["job"] == f"step {found.step}".encode()
        pieces = spread(seed, links.size)[links.rank]
        same_as_whole(found.pieces(pieces), pieces, version=found.step)
        return found.step

    return run_ranks(where, rank)


def assert_raised(found, kind, words):
    for error in found:
        assert isinstance(error, kind), found
        assert words in str(error), error


def test_another_number_of_ranks_resumes_from_the_same_disks(tmp_path):
    assert train(tmp_path, places(3), [1, 2, 3]) == [None] * 3
    assert resume(tmp_path, places(6, hosts=3)) == [3] * 6
    assert resume(tmp_path, places(3), seed=9) == [3] * 3
    for host in ("h0", "h1", "h2"):  # the two newest are kept
        names = sorted(path.name[:15] for path in (tmp_path / host / "snapshots").iterdir())
        assert names == ["step-0000000002", "step-0000000003"]


def test_hosts_that_share_a_file_system(tmp_path):
    for rank in range(4):
        (tmp_path / "all").mkdir(exist_ok=True)
        (tmp_path / f"h{rank}").symlink_to(tmp_path / "all")
    train(tmp_path, places(4), [1, 2, 3])
    assert resume(tmp_path, places(1)) == [3]
    assert resume(tmp_path, places(3)) == [3] * 3


@pytest.mark.slow
def test_a_power_cut_or_a_kill_at_any_moment_leaves_a_snapshot(tmp_path, monkeypatch):  # Rule 3
    root = tmp_path / "disks"
    root.mkdir()
    disk, states, lock, announced = Disk(root, monkeypatch), [], threading.Lock(), [0]

    def synced():
        with lock:
            states.append((disk.cut(tmp_path / f"cut{len(states)}"), announced[0]))

    def note_step(step):
        with lock:
            announced[0] = max(announced[0], step)

    disk.synced = synced
    train(root, places(2, clusters=2), [1, 2, 3], after_step=note_step, replicas=2)
    disk.close()
    monkeypatch.undo()
    assert len(states) > 30
    found_steps = set()
    for state, step in states:
        found = resume(state, places(2, clusters=2))
        assert found[0] == found[1] and not isinstance(found[0], BaseException), (state, found)
        assert (found[0] or 0) >= step
        found_steps.add(found[0])
    assert found_steps == {None, 1, 2, 3}


def test_an_incomplete_snapshot_is_reported_and_removed(tmp_path):
    train(tmp_path, places(2), [1, 2])
    for path in tmp_path.glob("h*/snapshots/step-0000000002.*/*.committed"):
        path.unlink()
    lines = []
    assert resume(tmp_path, places(2), lines=lines) == [1, 1]
    assert any("step 2 was not committed" in line for line in lines)  # Rule 6
    assert not [*tmp_path.glob("h*/snapshots/step-0000000002.*")]


def test_an_incomplete_snapshot_that_filled_the_disk_is_removed_first(tmp_path, monkeypatch):
    train(tmp_path, places(2), [1, 2])
    for path in tmp_path.glob("h*/snapshots/step-0000000002.*/*.committed"):
        path.unlink()
    replace = snapshot_files.replace_file

    def full(path, *args):
        if [*path.parent.parent.glob("step-0000000002.*")]:
            raise FullError(f"{path}: full")
        replace(path, *args)

    monkeypatch.setattr(snapshot_files, "replace_file", full)
    assert resume(tmp_path, places(2)) == [1, 1]


def test_a_single_marker_commits_a_snapshot(tmp_path):
    train(tmp_path, places(3), [1, 2])
    for host in ("h0", "h2"):
        for path in tmp_path.glob(f"{host}/snapshots/step-0000000002.*/*.committed"):
            path.unlink()
    assert resume(tmp_path, places(3)) == [2] * 3
    for host in ("h0", "h1", "h2"):  # resuming restored the marker on every host
        assert [*tmp_path.glob(f"{host}/snapshots/step-0000000002.*/*.committed")]


def test_a_lost_host_is_named_and_no_older_snapshot_is_used_silently(tmp_path):  # Rule 6
    train(tmp_path, places(3), [1, 2])
    shutil.rmtree(tmp_path / "h1")
    assert_raised(
        resume(tmp_path, places(2)),
        GoneError,
        "the missing parts were written by rank 1 (stage 1, host h1",
    )
    assert [*tmp_path.glob("h0/snapshots/step-0000000002.*/rank-0.pieces")]


def test_going_back_needs_an_option(tmp_path):
    train(tmp_path, places(2), [1, 2])
    for path in tmp_path.glob("h1/snapshots/step-0000000002.*/*.pieces"):
        path.write_bytes(path.read_bytes()[:-1])
    assert_raised(
        resume(tmp_path, places(2)), GoneError, "to go back to step 1 instead, set go_back"
    )
    lines = []
    assert resume(tmp_path, places(2), go_back=True, lines=lines) == [1, 1]
    assert any("step 2 is incomplete" in line and "go_back is set" in line for line in lines)
    assert [*tmp_path.glob("h0/snapshots/step-0000000002.*.aside/rank-0.pieces")]


def test_a_snapshot_that_was_never_announced_may_be_dropped(tmp_path):
    train(tmp_path, places(2), [1, 2])
    for path in tmp_path.glob("h1/snapshots/step-0000000002.*/*.committed"):
        path.unlink()
    for path in tmp_path.glob("h1/snapshots/step-0000000002.*/*.pieces"):
        path.unlink()
    lines = []
    assert resume(tmp_path, places(2), lines=lines) == [1, 1]
    assert any("it was not committed on every host" in line for line in lines)


def test_with_replicas_a_cluster_may_be_lost(tmp_path):
    train(tmp_path, places(4, clusters=2), [1, 2], replicas=2)
    for host in ("h2", "h3"):
        shutil.rmtree(tmp_path / host)
    assert resume(tmp_path, places(2)) == [2, 2]


def test_copies_are_in_another_cluster_or_host():
    assert buddies(places(4, clusters=2)) == (2, 3, 0, 1)
    assert buddies(places(4, hosts=2)) == (2, 3, 0, 1)
    three = [RankPlace(c, f"h{i}", "") for i, c in enumerate("aaab")]
    assert buddies(three) == (3, 3, 3, 0)
    with pytest.raises(ConfigError, match="all 2 ranks are on one host"):
        buddies(places(2, hosts=1))


def test_hosts_that_trained_on_independently_are_refused(tmp_path):
    first, other, both = (tmp_path / name for name in ("one", "other", "both"))
    train(first, places(2), [1, 2])
    shutil.copytree(first, other)
    assert train(first, places(2), [3]) == [2, 2]
    assert train(other, places(2), [3]) == [2, 2]
    both.mkdir()
    shutil.copytree(first / "h0", both / "h0")
    shutil.copytree(other / "h1", both / "h1")
    assert_raised(resume(both, places(2)), ForkedError, "independently")


def test_an_older_copy_of_the_other_host_is_no_fork(tmp_path):
    train(tmp_path, places(2), [1, 2])
    shutil.copytree(tmp_path / "h1", tmp_path / "old")
    train(tmp_path, places(2), [3])
    shutil.rmtree(tmp_path / "h1")
    (tmp_path / "old").rename(tmp_path / "h1")
    assert_raised(resume(tmp_path, places(2)), GoneError, "of step 3, is incomplete")


def test_snapshots_of_another_run_are_refused(tmp_path):
    train(tmp_path / "one", places(2), [1])
    train(tmp_path / "other", places(2), [1])
    shutil.rmtree(tmp_path / "one" / "h1")
    (tmp_path / "other" / "h1").rename(tmp_path / "one" / "h1")
    assert_raised(resume(tmp_path / "one", places(2)), ForeignError, "snapshots of two runs")


def test_another_model_is_refused_by_its_first_difference(tmp_path):
    train(tmp_path, places(2), [1])
    other = [ParamEntry("first.weight", (4000,), "bf16", "adamw"), *PARAMS[1:]]
    words = "'first.weight' is ((4000,), fp32, adamw) there and ((4000,), bf16, adamw) here"
    assert_raised(resume(tmp_path, places(2), params=other), ForeignError, words)
    fewer = PARAMS[:-1]
    assert_raised(resume(tmp_path, places(2), params=fewer), ForeignError, "'second.weight'")


def test_a_damaged_byte_is_found(tmp_path):
    train(tmp_path, places(2), [1])
    (path,) = tmp_path.glob("h1/snapshots/*/rank-1.pieces")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    found = resume(tmp_path, places(2))
    assert any(isinstance(error, DamagedError) and str(path) in str(error) for error in found), (
        found
    )
    assert not any(isinstance(error, int) for error in found[1:])


def test_a_full_disk_leaves_earlier_snapshots_intact(tmp_path, monkeypatch):
    train(tmp_path, places(2), [1])
    write = snapshot_files.write_all

    def full(fd, data):
        if threading.current_thread().name == "full" and len(data) > 1000:
            raise OSError(errno.ENOSPC, "no space")
        write(fd, data)

    monkeypatch.setattr(snapshot_files, "write_all", full)

    def rank(links):
        threading.current_thread().name = "full" if links.rank == 1 else "other"
        kept = snapshots(links, tmp_path)
        assert kept.find().step == 1
        kept.save(2, RandomSource(spread(1, 2)[links.rank], version=2), {})

    found = run_ranks(places(2), rank)
    assert isinstance(found[1], FullError)
    assert isinstance(found[0], LostError) and "rank 1" in str(found[0])
    assert not [*tmp_path.glob("h*/snapshots/step-0000000002.*")]
    monkeypatch.undo()
    assert resume(tmp_path, places(2)) == [1, 1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.slow
def test_a_rank_that_misses_the_commit_removes_nothing(tmp_path, shared):  # Rule 3
    """Other ranks may have received it and written their markers."""
    if shared:
        (tmp_path / "h0").mkdir()
        (tmp_path / "h1").symlink_to(tmp_path / "h0")
    train(tmp_path, places(2), [1])

    def rank(links):
        kept = snapshots(links, tmp_path)
        kept.find()
        rounds, gather = [], links.gather

        def breaks(message, what):
            """Lose rank 1's answer in the last round before the markers."""
            rounds.append(what)
            last = rounds.count("the snapshot of step 2") == 3
            try:
                answers = gather(message, what) if links.rank == 0 else cut(message, what, last)
            except (queue.Empty, LostError) as error:
                links.broken = True
                raise LostError("a cable") from error
            if last:
                links.patience_s = 0.5  # rank 1 no longer answers
            return answers

        def cut(message, what, last):
            answers = gather(message, what)
            if last:
                deadline = time.monotonic() + 20
                while not [*tmp_path.glob("h0/snapshots/step-0000000002.*/rank-0.committed")]:
                    assert time.monotonic() < deadline, "rank 0 wrote no marker"
                    time.sleep(0.01)
                raise LostError("a cable")
            return answers

        links.gather = breaks
        kept.save(2, RandomSource(spread(1, 2)[links.rank], version=2), {"job": b"step 2"})

    assert_raised(run_ranks(places(2), rank), LostError, "a cable")
    assert len([*tmp_path.glob("h*/snapshots/step-0000000002.*/*.committed")]) == 1 + shared
    assert resume(tmp_path, places(2)) == [2, 2]


def test_the_run_directory_knows_of_a_later_snapshot(tmp_path):
    root = tmp_path / "disks"
    run = tmp_path / "run"
    run.mkdir()
    train(root, places(2), [1, 2], mark=Mark(run))
    shutil.copytree(root, tmp_path / "copy")
    train(root, places(2), [3], mark=Mark(run))
    found = resume(tmp_path / "copy", places(2), mark=Mark(run))
    assert isinstance(found[0], StaleError) and "committed step 3" in str(found[0])
    assert isinstance(found[1], LostError) and "committed step 3" in str(found[1])
    shutil.rmtree(tmp_path / "copy")
    found = resume(tmp_path / "copy", places(2), mark=Mark(run))
    assert isinstance(found[0], GoneError)


def test_a_rank_without_a_part_gets_all_pieces_from_others(tmp_path):
    train(tmp_path, places(2), [1])
    assert resume(tmp_path, places(3)) == [1] * 3


def test_a_part_of_nothing(tmp_path):
    def rank(links):
        kept = snapshots(links, tmp_path)
        kept.find()
        mine = [Extent(name, 0, size) for name, size in SIZES.items()] if links.rank else []
        kept.save(1, RandomSource(mine, version=1), {"job": b"step 1"})

    assert run_ranks(places(2), rank) == [None, None]
    assert resume(tmp_path, places(2)) == [1, 1]


def test_going_back_needs_the_mark_of_the_run_directory_too(tmp_path):
    root, run = tmp_path / "disks", tmp_path / "run"
    run.mkdir()
    train(root, places(2), [1, 2], mark=Mark(run))
    for path in root.glob("h1/snapshots/step-0000000002.*/*.pieces"):
        path.unlink()
    found = resume(root, places(2), mark=Mark(run), go_back=True)
    assert isinstance(found[0], StaleError) and "committed step 2" in str(found[0])
    lines = []
    mark = Mark(run, new_store=True, report=lines.append)
    assert resume(root, places(2), mark=mark, go_back=True) == [1, 1]
    assert any("--new-store" in line for line in lines)
    assert Mark(run).record.step == 1


@pytest.mark.slow
def test_ranks_that_share_a_directory_remove_a_snapshot_together(tmp_path):  # Rule 3
    def rank(links):
        for step in range(200):
            home = tmp_path / f"step-{step:010}.a"
            snapshot_files.make_directory(home)
            (home / f"rank-{links.rank}.pieces").write_bytes(b"")
            links.together(lambda: None, "all have written")
            snapshot_files.remove_snapshot(home)

    assert run_ranks(places(4), rank) == [None] * 4
    assert not [*tmp_path.iterdir()]
