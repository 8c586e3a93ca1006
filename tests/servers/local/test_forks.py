"""Histories have identities: a server that lagged does not continue alone, servers that were trained
separately are refused, and two servers that compute different bytes for a chunk are detected before
the step is committed (Rules 3 and 6).
"""

import shutil
import time
from functools import partial

import pytest
from test_replicas import LONG, Cluster, assert_same_losses
from test_replicas import alone as alone
from test_replicas import cluster as cluster

from tests.support.processes import Workers, losses

ONE_WORKER = {"workers": 1}


def contents(directory):
    """Return path -> bytes of every file in the directory of a server."""
    files = [p for p in sorted(directory.rglob("*")) if p.is_file()]
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def refused(two: Cluster, steps, **options):
    """Return the error of a refused start, and check that it changed nothing."""
    before = [contents(host.directory) for host in two.hosts]
    running = two.start(steps, **ONE_WORKER, **options)
    assert running.join() == [3], running.notes()
    assert [contents(host.directory) for host in two.hosts] == before, (
        "a refused start changes nothing"
    )
    return running.errors()[0]


def test_a_server_that_lagged_waits_for_the_other(cluster, alone):
    """Server 1 missed two steps. It is refused while it is alone, and refilled from server 0 when
    that server answers late."""
    two = cluster(2)
    two.train(2, **ONE_WORKER)
    two.lose(1, keep=True)
    # server 0 may train alone: the last session ended in order and permitted it
    two.train(4, **ONE_WORKER)
    two.lose(0, keep=True)
    two.restart(1)
    error = refused(two, 6, retry_s=2)
    assert "LostError" in error and "server 1 (" in error and "is at step 2; server 0 (" in error, (
        error
    )
    assert "may hold a later step" in error and "give_up" in error, error
    late = two.start(6, **ONE_WORKER)
    time.sleep(4.0)  # long enough to have started without server 0
    two.restart(0)
    assert late.join() == [0], late.errors()
    assert any("server 1" in n and "being refilled at step 4" in n for n in late.notes()), (
        late.notes()
    )
    assert {int(s) for s in losses(late.logs[0]) if s != "end"} == set(range(1, 7))
    assert_same_losses(late, alone, 6)


def test_a_run_directory_records_the_servers_of_its_last_session(cluster, alone, tmp_path):
    """The mark records the servers: whichever server dies between two runs, an up-to-date server
    continues and a server that lagged does not."""
    two, run = cluster(2), {"run": str(tmp_path / "run"), **ONE_WORKER}
    (tmp_path / "run").mkdir()
    two.train(2, **run)
    two.lose(0, keep=True)
    running = two.train(4, **run)
    assert any("server 0" in n and "left out" in n for n in running.notes()), running.notes()
    two.lose(1, keep=True)
    two.restart(0)
    error = refused(two, 6, retry_s=2, run=run["run"])
    assert "the run's last session included server 1 (" in error and "server 0 (" in error, error
    two.restart(1)
    running = two.train(6, **run)
    assert any("server 0" in n and "being refilled at step 4" in n for n in running.notes()), (
        running.notes()
    )
    two.lose(0)  # its disk is lost too, while no training runs
    assert_same_losses(two.train(8, **run), alone, 8)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_an_older_copy_is_refused_unless_a_new_store_is_requested(
    replicas, cluster, alone, tmp_path
):  # Rule 6
    """All servers were restored to their contents before the last two sessions."""
    two = cluster(2)
    run = {"run": str(tmp_path / "run"), "replicas": replicas, **ONE_WORKER}
    (tmp_path / "run").mkdir()
    two.train(2, **run)
    two.lose(0, 1, keep=True)
    copies = [shutil.copytree(h.directory, two.home / f"old{i}") for i, h in enumerate(two.hosts)]
    two.restart(0, 1)
    two.train(3, **run)
    two.train(4, **run)
    two.lose(0, 1, keep=True)
    for host, copy in zip(two.hosts, copies):
        shutil.rmtree(host.directory)
        copy.rename(host.directory)
    two.restart(0, 1)
    error = refused(two, 6, run=run["run"], replicas=replicas)
    assert (
        "StaleError" in error
        and "in no server's history; the newest step that a server holds is 2" in error
    )
    assert "--new-store goes back to the step that the servers hold" in error, error
    assert_same_losses(two.train(6, new_store=True, **run), alone, 6)
    two.train(7, **run)


def test_two_histories_are_refused_until_one_is_given_up(cluster, alone):
    two = cluster(2)
    two.train(2, **ONE_WORKER)
    two.lose(1, keep=True)
    two.train(4, **ONE_WORKER)
    two.lose(0, keep=True)
    two.restart(1)
    running = two.train(5, give_up=[two.where[0]], **ONE_WORKER)  # the user declares server 0 lost
    assert any("discarded: contents of server 0 (" in n for n in running.notes()), running.notes()
    two.restart(0)
    error = refused(two, 6)
    for number, step in ((0, 4), (1, 5)):
        assert (
            f"server {number} ({two.where[number]}) is at step {step} on a history of its own since"
            " step 2" in error
        )
    assert (
        "ForkedError" in error
        and "these two servers were trained separately" in error
        and "give_up" in error
    ), error
    kept = contents(two.hosts[0].directory)
    running = two.train(6, give_up=[two.where[0]], **ONE_WORKER)
    assert any("server 0" in n and "being refilled at step 5" in n for n in running.notes()), (
        running.notes()
    )
    aside = [p for p in two.hosts[0].directory.iterdir() if ".aside" in p.name]
    assert len(aside) == 1, "contents that were given up are moved aside"
    for name, content in contents(aside[0]).items():
        assert "ledger" in name or content == kept[f"gen-1/{name}"], name
    assert_same_losses(running, alone, 6)
    two.train(7, **ONE_WORKER)


@pytest.mark.timeout(120)
def test_of_four_servers_three_are_needed(cluster):
    four = cluster(4)
    four.train(2, **ONE_WORKER)
    four.lose(1, 3, keep=True)  # the other two hold every chunk
    error = refused(four, 4, retry_s=2)
    assert (
        "server 1 (" in error
        and "server 3 (" in error
        and "2 of 4 servers" in error
        and "majority" in error
    ), error
    four.restart(1)
    four.train(4, **ONE_WORKER)
    four.lose(1)
    four.restart(3)
    running = four.train(6, **ONE_WORKER)
    assert any("server 3" in n and "being refilled at step 4" in n for n in running.notes()), (
        running.notes()
    )


@pytest.mark.parametrize(
    "byte",
    [
        pytest.param(0, id="first byte"),
        pytest.param(100, id="later byte", marks=pytest.mark.exhaustive),
        pytest.param(-100, id="state part"),
    ],
)
def test_a_flipped_bit_of_one_replica_is_found_at_the_commit(byte, cluster, alone):
    two = cluster(2)
    two.lose(1)
    two.restart(1, fault=("flip", 40, byte))
    running = two.start(100, **ONE_WORKER)
    assert running.join() == [3], running.notes()
    error = running.errors()[0]
    assert "DivergedError" in error and "different bytes for chunk" in error, error
    assert f"server 0 ({two.where[0]})" in error and f"server 1 ({two.where[1]})" in error, error
    step = int(error.split(" in step ")[1].split(":")[0])
    # the next step may have computed with the damaged bytes and ended together with this step
    for log in running.logs:
        lines = log.read_text().splitlines(keepends=True)
        log.write_text(
            "".join(x for x in lines if not (x.split()[0].isdigit() and int(x.split()[0]) > step))
        )
    two.lose(1, keep=True)
    two.restart(1)
    running = two.train(step + 2, **ONE_WORKER)
    assert f"step {step - 1};" in next(
        n for n in reversed(running.notes()) if n.startswith("placed")
    )
    assert_same_losses(running, alone, step + 2)


def test_copies_of_one_store_are_not_mixed(cluster):
    """Server 0 of one copy of the run is started beside server 1 of another copy at the same step,
    without replicas."""
    ours = cluster(2)
    start = partial(Workers, LONG, ours.where, ours.home, workers=1)
    assert start(steps=2, session="a").join() == [0]
    ours.lose(0, 1, keep=True)
    copies = [
        shutil.copytree(h.directory, ours.home / f"copy{i}") for i, h in enumerate(ours.hosts)
    ]
    ours.restart(0, 1)
    assert start(steps=4, session="b").join() == [0]
    ours.lose(0, 1, keep=True)
    ours.hosts[1].directory.rename(ours.home / "first1")
    ours.hosts[0].directory.rename(ours.home / "first0")
    for host, copy in zip(ours.hosts, copies):
        copy.rename(host.directory)
    ours.restart(0, 1)
    assert start(steps=4, session="c").join() == [0]
    ours.lose(1, keep=True)
    shutil.rmtree(ours.hosts[1].directory)
    (ours.home / "first1").rename(ours.hosts[1].directory)
    ours.restart(1)
    running = start(steps=6, session="d")
    assert running.join() == [3]
    error = running.errors()[0]
    assert (
        "ForkedError" in error
        and error.count("is at step 4 on a history of its own since step 2") == 2
    ), error
    assert "give_up" not in error and "directories that were trained together" in error, error
    ours.lose(0, keep=True)
    ours.hosts[0].directory.rename(ours.home / "third0")
    (ours.home / "first0").rename(ours.hosts[0].directory)
    ours.restart(0)
    assert start(steps=6, session="e").join() == [0]
