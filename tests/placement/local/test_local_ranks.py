"""Several ranks of one host without servers: none trains a model of its own, and none resumes the
store of another rank (Rule 6)."""

import hashlib
import os
import time
from functools import partial

import pytest

from roadtrain.environment import WorkerIdentity
from roadtrain.errors import StoreError
from roadtrain.storage import lock
from tests.support import world
from tests.support.models import Case, one_step, place

CASE = Case()
BUDGET = {"host_budget": "128MiB", "chunk_elements": 1 << 16}


def on_disk(directory):
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {f: (f.stat().st_mtime_ns, hashlib.sha256(f.read_bytes()).hexdigest()) for f in files}


def train(store, steps, between=lambda: None, **options):
    model, placed, scaler = place(CASE, store, **BUDGET, **options)
    losses = []
    with placed:
        for number in steps:
            losses.append(one_step(CASE, model, placed, scaler, number))
            placed.flush()
            between()
        assert placed.steps_done == steps.stop
    return losses


def resume(store, rank):
    return train(store, range(2, 3))


@pytest.mark.parametrize("store", ["s", None])
def test_ranks_without_servers_are_refused_and_nothing_changes(store, tmp_path):
    store = store and tmp_path / store
    train(store, range(2))
    before = on_disk(tmp_path)
    for text in world.run(2, partial(resume, store)):
        sentence, hint = text.split("\nhint: ")
        assert sentence == (
            "ConfigError: 2 workers were started (WORLD_SIZE), but there are 0 servers that would"
            " sum their gradients, so each worker would train a model of its own"
        )
        ways = ("start 1 worker", "Servers([...])", "`roadtrain serve`", "parallelize()", "DDP")
        assert all(way in hint for way in ways)
    assert on_disk(tmp_path) == before
    if store:
        resume(store, 0)  # alone it still can


def alone(home, rank):
    """Train on one store, as rank 0 without a launcher's variables; or try to, as rank 1 that claims
    to be alone, while rank 0 trains."""
    lock.LOCK_WAIT_S = 0.1  # in this process only
    begun, refused = home / "begun", home / "refused"

    def wait_for(path):
        while not path.exists():
            time.sleep(0.02)

    if rank == 0:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        return train(home / "s", range(2), lambda: begun.touch() or wait_for(refused))
    wait_for(begun)
    before = on_disk(home / "s")
    with pytest.raises(StoreError) as caught:
        train(home / "s", range(2), group=WorkerIdentity())
    unchanged = on_disk(home / "s") == before
    refused.touch()
    return str(caught.value), unchanged


def test_a_rank_is_refused_the_store_that_another_rank_has(tmp_path):
    losses, (sentence, unchanged) = world.run(2, partial(alone, tmp_path))
    assert unchanged
    assert f"{tmp_path / 's'}: in use by another process" in sentence
    assert sentence.count("\n") == 1 and "hint: end the other run of this job first" in sentence
    assert losses == train(None, range(2))
