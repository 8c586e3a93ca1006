"""A relay beside the workers of a host changes no bit (Rule 1), and its death is detected (Rule
5)."""

import os
import signal
import time

import psutil
import pytest
import torch

import roadtrain
from roadtrain import Servers
from roadtrain.errors import BudgetError, ConfigError
from tests.support.models import Case, build
from tests.support.processes import Workers, losses

CASES = {
    "plain": Case(eager=True),
    "clipped, accumulated, scaler": Case(clip=0.5, accumulate=2, scaler=True, groups=True),
    "late, bf16": Case(dtype=torch.bfloat16, eager=True, staleness=1),
    "frozen, bf16": Case(frozen=True, dtype=torch.bfloat16, eager=True),
}
RELAY = "96MiB"


def trained(case, servers, home, steps, workers, **options):
    home.mkdir()
    running = Workers(case, servers, home, steps, workers, **options)
    assert running.join() == [0] * workers, running.errors()
    return [losses(log) for log in running.logs]


@pytest.mark.parametrize(
    ("name", "workers", "local"),
    [
        pytest.param("plain", 1, 1, marks=pytest.mark.exhaustive),
        pytest.param("late, bf16", 2, 1, marks=pytest.mark.exhaustive),
        pytest.param("frozen, bf16", 2, 2, marks=pytest.mark.exhaustive),
        ("clipped, accumulated, scaler", 4, 2),
        pytest.param("late, bf16", 4, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_a_relay_changes_no_bit(name, workers, local, addresses, tmp_path):  # Rule 1
    case = CASES[name]
    without = trained(case, addresses(2), tmp_path / "without", 3, workers, local=local)
    assert (
        trained(case, addresses(1), tmp_path / "with", 3, workers, local=local, relay=RELAY)
        == without
    )


def test_a_run_resumes_with_and_without_a_relay(addresses, tmp_path):  # Rule 3
    """Each worker also gets its own state back, whether a relay or a worker packed it."""
    case = Case(eager=True)
    whole = trained(case, addresses(1), tmp_path / "whole", 4, 4, local=2)
    servers, seen = addresses(1), [{} for _ in range(4)]
    for i, relay in enumerate((RELAY, None, RELAY, None)):
        part = trained(
            case, servers, tmp_path / f"part{i}", i + 1, 4, local=2, relay=relay, session=str(i)
        )
        for log, new in zip(seen, part):
            log.update(new)
    assert seen == whole


def wait_for_step(workers, step):
    deadline = time.monotonic() + 60
    while str(step) not in losses(workers.logs[1]):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.01)


@pytest.mark.parametrize("killed", ["relay", pytest.param("worker", marks=pytest.mark.exhaustive)])
def test_a_kill_is_detected_and_loses_nothing(killed, addresses, tmp_path):  # Rule 3, Rule 5
    case, steps = Case(eager=True), 20
    whole = trained(case, addresses(1), tmp_path / "whole", steps, 2, local=2)
    servers, home = addresses(1), tmp_path / "killed"
    home.mkdir()
    workers = Workers(case, servers, home, 1000, 2, local=2, relay=RELAY)
    wait_for_step(workers, 1)  # the relay has started by then
    if killed == "relay":
        [victim] = [
            c.pid
            for p in workers.processes
            for c in psutil.Process(p.pid).children()
            if "roadtrain.relay.relay" in " ".join(c.cmdline())
        ]
    else:
        victim = workers.processes[1].pid
    wait_for_step(workers, 3)
    os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    codes = workers.join(30)
    assert time.monotonic() - begin < 20 and 0 not in codes and 3 in codes
    assert "relay" in workers.errors()[0] or "was lost" in workers.errors()[0], workers.errors()
    done = max(int(s) for s in losses(workers.logs[0]) if s.isdigit())
    last = steps if done < steps else done + 5
    again = Workers(case, servers, home, last, 2, local=2, relay=RELAY, session="2")
    assert again.join() == [0, 0], again.errors()
    for seen, expected in zip((losses(log) for log in workers.logs), whole):
        common = [s for s in expected if s != "end" or last == steps]
        assert {s: seen[s] for s in common} == {s: expected[s] for s in common}


def test_a_relay_without_servers_or_memory_is_refused():
    model, optimizer = build(Case())
    with pytest.raises(ConfigError, match=r"`relay` is an option of Servers\n"):
        roadtrain.place(model, optimizer, relay="1GiB")
    message = r"a relay of 1 worker\(s\) .* needs at least \d+ MiB of memory, but has only 1"
    with pytest.raises(BudgetError, match=message):
        roadtrain.place(model, optimizer, store=Servers(["127.0.0.1:1"], relay="1MiB"))
    assert all(not p.is_meta for p in model.parameters())
