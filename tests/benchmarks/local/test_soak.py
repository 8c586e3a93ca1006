"""Faults of `roadtrain soak`, of each kind that ends soon: the run continues with the same bits or
reports why it cannot (Rules 3 and 5), and no process hangs. The soak itself detects wrong runs.
`roadtrain soak` runs all kinds.
"""

import os
import signal
import time

import pytest

from benchmarks.soak import alone as soak_alone
from benchmarks.soak import soak
from benchmarks.soak.fault import ALONE
from benchmarks.soak.scene import Hung, Scene, WorkerLog, Wrong

WAITS = {  # these wait for deadlines of the job, which takes seconds each
    "another dtype",
    "another model",
    "disk full at the start",
    "killed twice",
    "link stalled",
    "process stopped",
    "relay killed",
    "second servers",
    "second trainer",
    "server moved",
    "stale replica",
    "wrong token",
}


SOME = (
    "worker killed",
    "server killed",
    "bit flipped on a link",
    "disk full",
    "killed and power cut",
)
SOON = {
    kind: number
    for number, kind in reversed([*enumerate(soak.CYCLE)])  # the first of each kind
    if kind not in WAITS
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kinds",
    [SOME, tuple(sorted({*SOON} - {*SOME}))],
    ids=["some", "the others"],
)
@pytest.mark.exhaustive
def test_a_fault_of_every_kind(kinds):
    ends = soak.soak(sorted(SOON[kind] for kind in kinds), seed=0)
    assert not [end for end in ends if end.how in ("failed", "hung")]
    for end in ends:
        if end.how != "skipped":
            assert soak.KINDS[end.fault.kind].ends in ("any", end.how), end


def test_a_fault_depends_only_on_seed_and_number():
    assert soak.drawn(3, 17) == soak.drawn(3, 17) != soak.drawn(4, 17)
    assert len(soak.CYCLE) <= 44  # so any 44 successive faults include every kind
    for first in (0, 7, 100):
        drawn = {soak.drawn(0, number).kind for number in range(first, first + len(soak.CYCLE))}
        assert drawn == set(soak.KINDS) >= WAITS


@pytest.fixture
def scene():
    with Scene("plain", 1) as made:
        made.attempt = 1
        yield made


LINES = [
    f"{attempt} {step} 0x1p+{step} 0x1p+0 {max(0, step - 1)} {step}.5"
    for attempt, steps in ((0, (1, 2)), (1, (2, 3)))
    for step in steps
]


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        (None, None, None),
        ("1 3 0x1p+3 ", "1 3 0x1p+4 ", "worker 1, attempt 1, step 3: loss and norm are"),
        ("1 3 ", "1 error ", "worker 1 has not trained steps .3."),
        (
            "1 2 0x1p+2 0x1p+0 1",
            "1 1 0x1p+1 0x1p+0 1",
            "attempt 1 trained step 1 again, although step 1 was committed",
        ),
        ("1 end same", "1 end other", "the digest of the state at the end"),
        ("1 closed", "Traceback (most recent call last):", "worker1.log has a traceback"),
    ],
)
def test_a_wrong_log_is_detected(scene, line, instead, words):
    text = "\n".join([*LINES, "1 end same", "1 closed", ""])
    for rank in range(2):
        scene.log(rank).write_text(text)
    whole = [WorkerLog.read(scene.log(rank)) for rank in range(2)]
    if line is None:
        return scene.check(whole)
    assert line in text
    scene.log(1).write_text(text.replace(line, instead))
    with pytest.raises(Wrong, match=words):
        scene.check(whole)
    return None


HEX_1, HEX_2, HEX_4 = (float(n).hex() for n in (1, 2, 4))
ALONE_LINES = [
    "0 job one 0",
    f"0 1 {HEX_2} {HEX_1} 0 1.0",
    f"0 2 {HEX_4} {HEX_1} 1 2.0",
    "1 job one 1",
    f"1 2 {HEX_4} {HEX_1} 1 3.0",
    "1 end same",
]


@pytest.mark.parametrize(
    ("log", "metrics", "words"),
    [
        ({}, {}, None),
        (
            {"1 job one 1": "1 job two 1"},
            {},
            "attempt 1 goes on from step 1 of store two, but store one has committed step 1",
        ),
        (
            {"1 job one 1": "1 job one 0"},
            {},
            "attempt 1 goes on from step 0 of store one, but store one has committed step 1",
        ),
        ({"1 end same": "1 end other"}, {}, "the digest of the state at the end"),
        ({}, {2: None}, r"metrics.jsonl has \[\(1,"),
        ({}, {2: 5.0}, r"metrics.jsonl has \[\(1,"),
    ],
)
def test_a_wrong_log_of_a_trainer_alone_is_detected(log, metrics, words):
    with soak_alone.AloneScene(ALONE, 1) as scene:
        scene.attempt = 1
        scene.log(0).write_text("\n".join([*ALONE_LINES, "1 closed", ""]))
        whole = scene.logs()
        scene.log(0).write_text("\n".join([log.get(line, line) for line in ALONE_LINES]) + "\n")
        losses = {1: 2.0, 2: 4.0} | metrics
        scene.run.joinpath("metrics.jsonl").write_text(
            "".join(
                f'{{"step": {step}, "loss": {loss}, "grad_norm": 1.0}}\n'
                for step, loss in losses.items()
                if loss
            )
        )
        if words is None:
            return scene.check(whole)
        with pytest.raises(Wrong, match=words):
            scene.check(whole)
    return None


def test_pieces_of_a_soak_make_one_table(tmp_path):
    path, faults = tmp_path / "soak.json", [soak.drawn(0, number) for number in range(3)]
    ends = [
        soak.Outcome(fault, how, ("a",), 1.5, 0.1, 2.0)
        for fault, how in zip(faults, ("went on", "hung", "failed"))
    ]
    for end in reversed(ends):
        soak.keep_end(path, end, 0)
    body = soak.loads(path.read_text())
    assert [row["fault"]["number"] for row in body["faults"]] == [0, 1, 2]
    assert body["table"] == soak.table(ends) and body["table"][-1].split()[:5] == [
        "all",
        "3",
        "1",
        "1",
        "1",
    ]


@pytest.mark.exhaustive
def test_a_hang_shows_the_stacks():
    with Scene("plain", 60) as scene:
        scene.start(deadline_s=50)
        os.kill(scene.servers[0].process.pid, signal.SIGSTOP)
        scene.until = time.monotonic() + 2
        with pytest.raises(
            Hung,
            match=r"(?s)while waiting for worker 0 .*server0.log.*Thread 0x.*soak.log.*Thread 0x",
        ):
            scene.wait_workers()
