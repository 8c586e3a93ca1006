"""Messages between a supervisor and its agents, and reports of the end of workers, without
processes."""

import os
import random

import msgspec
import pytest

from roadtrain.config.machines import Machines, PlanHost
from roadtrain.errors import WireError
from roadtrain.launch.agent_link import AgentHost
from roadtrain.launch.agent_messages import (
    FROM_AGENT,
    MESSAGE_LIMIT,
    TO_AGENT,
    AgentReady,
    BeginProcess,
    EndProcess,
    LineSplitter,
    OutputLine,
    ProcessExited,
    encode_line,
)
from roadtrain.launch.here import device_names, worker_threads
from roadtrain.launch.processes import HostFile, Process, Role
from roadtrain.launch.worker_run import ALL_END_S, WorkerRun


def test_messages_are_decoded_as_sent():
    files = (HostFile("/run/token", "geheim\n", secret=True),)
    process = Process("worker 0", Role.WORKER, "gpu0", ("-m", "x"), "/run", {"RANK": "0"}, files)
    for message in (BeginProcess(process), EndProcess("worker 0", 2.5)):
        line = encode_line(message)
        assert line.count(b"\n") == 1 and TO_AGENT.decode(line) == message
    for event in (AgentReady(8), ProcessExited("s", -9, "é\n"), OutputLine("w", "\x00")):
        assert FROM_AGENT.decode(encode_line(event)) == event


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Traceback",
        b"[]",
        b'{"type": "dance"}',
        b'{"type": "end", "name": "a"}',
        b'{"type": "end", "name": "a", "grace_s": "soon"}',
        b'{"type": "ready", "devices": 0, "processors": 1, "memory": 1}',
        b"\xff\xfe",
    ],
)
def test_invalid_messages_are_refused(line):
    """Rule 8"""
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        TO_AGENT.decode(line)


def test_a_message_beyond_the_limit_is_refused_with_both_numbers():
    with pytest.raises(WireError, match=f"more than the {MESSAGE_LIMIT}"):
        encode_line(OutputLine("a", "x" * MESSAGE_LIMIT))


def test_lines_do_not_depend_on_how_their_bytes_are_split():
    """Rule 4: an unfinished line is buffered only up to the limit."""
    rng = random.Random(3)
    text = b"".join(
        bytes(rng.choices(b"ab\n", weights=[5, 5, 1], k=rng.randrange(40))) for _ in "x" * 50
    )
    whole = [(line[:8], max(0, len(line) - 8)) for line in text.split(b"\n")]
    whole = whole if whole[-1][0] else whole[:-1]
    for _ in range(50):
        splitter, found, left = LineSplitter(8), [], text
        while left:
            n = rng.randrange(1, 30)
            found += splitter.feed(left[:n])
            splitter.check()
            left = left[n:]
        assert found + splitter.last() == whole
        assert splitter.last() == []


def ends_that_kill_others(run, *ends):
    """Report the ends of workers. Returns those whose end requires the others to be killed."""
    killing = []
    for name, code, at in ends:
        if run.end(name, code, f"{name} said", at):
            killing.append(name)
        run.check()
    return killing


def run_of(*names, **state):
    return WorkerRun(2, dict.fromkeys(names, "gpu0"), **state)


def test_the_first_worker_that_fails_ends_the_others_and_is_reported():
    run = run_of("a", "b", "c")
    assert ends_that_kill_others(run, ("b", 1, 5.0), ("c", -9, 5.1)) == ["b"]
    assert run.ended() is None
    assert ends_that_kill_others(run, ("a", -9, 5.2)) == []
    assert (end := run.ended()) is not None
    assert (end.attempt, end.code, end.first, end.last_line) == (2, 1, "b", "b said")


def test_workers_asked_to_end_are_left_alone():
    run = run_of("a", "b", stopping=True)
    assert ends_that_kill_others(run, ("a", 130, 1.0), ("b", 130, 2.0)) == []
    assert run.ended().code == 130


def test_a_worker_that_does_not_end_with_the_others_is_killed():
    """Rule 5"""
    run = run_of("a", "b")
    assert ends_that_kill_others(run, ("a", 0, 1.0)) == []
    assert run.end_late(1.0 + ALL_END_S - 0.1) == ""
    assert "b has not ended" in run.end_late(1.0 + ALL_END_S)
    assert run.end_late(1.0 + ALL_END_S + 1) == ""  # said once
    assert ends_that_kill_others(run, ("b", -9, 70.0)) == []
    assert (run.ended().code, run.ended().first) == (-9, "b")
    assert ends_that_kill_others(whole := run_of("a", "b"), ("a", 0, 1.0), ("b", 0, 2.0)) == []
    assert whole.ended().code == 0


def test_hosts_of_this_machine_share_its_devices_and_cores(monkeypatch):
    machines = Machines(
        hosts=(
            PlanHost("gpu0", "gpu", workers=2),
            PlanHost("spare", "spare", reducer=7000),
            PlanHost("gpu1", "gpu", workers=1),
        ),
        spares=(PlanHost("gpu2", "gpu", workers=1),),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert device_names(machines) == {"gpu0": "4,5", "gpu1": "6", "gpu2": ""}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_names(machines) == {}
    for processors, threads in ((12, 4), (2, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=processors: range(n))
        assert worker_threads(machines) == threads
    assert AgentHost("a", "").environment == {}
