"""A preflight on hosts of a lab passes intact clusters and refuses broken ones on every rank with the
same sentence (Rule 5)."""

from __future__ import annotations

import pytest

from benchmarks.crosscluster import broken
from roadtrain.lab import network_available
from roadtrain.stages.rank_meeting import MEET_S

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]
SENTENCES = {
    "wrong interface": (
        "host a1: eth0 (ethernet, 10.1.0.2) cannot reach",
        "if eth0 of a1 or",
    ),
    "one-way firewall": (
        "host a1: eth1 (ethernet, 10.2.1.2) cannot reach 10.2.1.4 (eth1) of host b1",
        "packets from b1 arrive at a1, but packets from a1 do not arrive at b1",
    ),
    "mixed kinds": ("which is infiniband, and eth0 of host b", "NCCL would hang there"),
    "wrong world size": (
        "rank 3 of host b1 was started as one of 6 ranks (WORLD_SIZE), rank 0 of host a0 as one of"
        " 4; the job's parallelism has 4",
    ),
    "clock skew": ("the clock of host b0 is 60.0 s ahead of that of the others",),
    "MTU": (
        "host a0: eth0 (infiniband, 10.1.0.1) exchanges small messages with 10.1.0.2",
        "carries smaller frames only",
    ),
    "missing host": ("3 of 4 ranks have reached", "(of a0, a1, b0), rank 3 has not"),
    "name that resolves to loopback": ("MASTER_ADDR a0 resolves to 127.0.1.1, which is loopback",),
}
OFTEN = ("one-way firewall", "missing host")


@pytest.fixture(scope="module")
def lab():
    # a rank that waits longer ends with the same sentence
    with broken.clusters(patience=5.0) as clusters:
        yield clusters


def test_intact_clusters_pass_at_once(lab) -> None:
    results = lab.run()
    assert not any(result.sentence for result in results.values())
    assert max(result.seconds for result in results.values()) < 6  # 1.1 s on an idle machine
    printed = results["a0"].printed
    # each group uses the fastest network that its hosts share (Yang et al., section 3.2)
    assert "dp stage 0 tensor index 0: infiniband at 100 MB/s (eth0 of a0 a1)" in printed
    assert "dp stage 1 tensor index 0: roce at 75 MB/s (eth0 of b0 b1)" in printed
    assert "activations stage 0 to 1: ethernet at 6.2 MB/s" in printed
    assert "tp stage 0 replica 0: inside host a0" in printed
    assert not results["b1"].printed


def test_there_is_a_sentence_for_each_scenario() -> None:
    assert SENTENCES.keys() == broken.SCENARIOS.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.exhaustive)
        for name in SENTENCES
    ],
)
def test_broken_clusters_are_refused(lab, name) -> None:
    results = broken.SCENARIOS[name](lab)
    sentences = {result.sentence for result in results.values()}
    assert len(sentences) == 1, sentences  # the same on every rank
    for part in SENTENCES[name]:
        assert part in min(sentences)
    left_s = MEET_S - lab.patience  # the time that a rank of a job waits for further ranks
    assert max(result.seconds for result in results.values()) < broken.LIMIT_S - left_s
    assert not any(result.printed for result in results.values())


def test_the_repaired_clusters_pass_again(lab) -> None:
    """The scenarios repair their changes, so these changes were the reason for the refusals."""
    assert not any(result.sentence for result in lab.run().values())
