"""Ten of the faults of `roadtrain soak --sums`: spare hosts die, join, leave and are slow, and
every sum stays right (Rules 1 and 5). The soak also detects a worker that ends."""

import random
from contextlib import ExitStack

import pytest

from benchmarks.soak import soak
from benchmarks.soak import sums as soak_sums
from roadtrain.errors import ConfigError, RoadtrainError


@pytest.mark.exhaustive
def test_faults():
    faults, lines = 10, []
    ends = soak_sums.soak(faults, seed=0, say=lines.append)
    assert [end.how for end in ends] == ["went on"] * faults, lines
    assert {end.kind for end in ends} == set(soak_sums.KINDS[:faults])


@pytest.mark.exhaustive
def test_a_worker_that_ends_is_detected():
    with ExitStack() as stack:
        scene = soak_sums.Scene(2, random.Random(0), stack)
        scene.processes[1].kill()
        with pytest.raises(RoadtrainError, match=r"worker [01] ended"):
            scene.further(10**6, 0.0)


def test_faults_of_sums_cannot_be_selected():
    with pytest.raises(ConfigError, match="--sums"):
        soak.command(sums=True, only="3")
