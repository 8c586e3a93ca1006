"""The agreement of pods on a start before workers run in them (launch/pod.py), in one process with
torch's in-memory store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from roadtrain.errors import LostError
from roadtrain.launch.pod import agreed_start


def a_store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    return store


def test_all_ranks_agree_on_the_name_of_a_start_and_the_next_start_has_another() -> None:
    names = []
    for _ in range(2):
        store = a_store()
        (name,) = {agreed_start(store, rank) for rank in (0, 1, 2)}
        names.append(name)
    assert names[0] != names[1]


def test_a_rank_that_restarts_alone_is_refused() -> None:
    store = a_store()
    agreed_start(store, 0)
    agreed_start(store, 1)
    with pytest.raises(LostError, match=r"worker 1 was restarted, but worker 0 was not"):
        agreed_start(store, 1)


def test_a_rank_does_not_wait_for_ever() -> None:  # Rule 5
    with pytest.raises(LostError, match=r"worker 1 waited 0 s for worker 0 to start"):
        agreed_start(a_store(), 1, 0.05)
