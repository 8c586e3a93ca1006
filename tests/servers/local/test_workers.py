"""Servers in separate processes with one or several workers: the bits do not depend on the servers
(Rule 1), a death loses nothing (Rule 3), no process hangs (Rule 5) and a process without the token
is refused (Rule 8)."""

import random
import re
import time

import numpy as np
import pytest
import torch

from roadtrain import TopK
from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.lab.bad_link import Relay
from roadtrain.servers import frames as m
from roadtrain.servers.protocol import messages
from tests.support.models import Case, build, one_step, place
from tests.support.processes import HostProcess, Workers, losses

CASES = {
    "plain": Case(eager=True),
    "clipped, accumulated, groups": Case(clip=0.5, accumulate=2, groups=True),
    "frozen, bf16": Case(frozen=True, dtype=torch.bfloat16, eager=True),
    "tied, scaler": Case(tied=True, scaler=True, clip=1.0),
    "late, bf16": Case(dtype=torch.bfloat16, eager=True, staleness=1),
    "late, clipped, scaler": Case(clip=0.5, accumulate=2, scaler=True, groups=True, staleness=1),
}
OFTEN = ("plain", "clipped, accumulated, groups", "late, clipped, scaler")


def marks_of(name):
    return () if name in OFTEN else pytest.mark.exhaustive


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
@pytest.mark.parametrize("servers", [2])
def test_one_worker_trains_as_in_memory(name, servers, hosts, tmp_path):  # Rule 1
    case = CASES[name]
    model, placed, scaler = place(case, None)
    with placed:
        expected = [
            (one_step(case, model, placed, scaler, i).hex(), placed.grad_norm().hex())
            for i in range(5)
        ]
    workers = Workers(case, [h.where for h in hosts(servers)], tmp_path, 5, 1)
    # a single worker uses the seeds that one_step uses alone
    assert workers.join() == [0], workers.errors()
    seen = losses(workers.logs[0])
    assert [seen[str(i + 1)] for i in range(5)] == [{" ".join(e)} for e in expected]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        pytest.param(name, (1, 2, 4) if name == "plain" else (1, 3), marks=marks_of(name), id=name)
        for name in CASES
    ],
)
def test_losses_of_three_workers_do_not_depend_on_servers(name, counts, hosts, tmp_path):  # Rule 1
    case, results = CASES[name], []
    for servers in counts:
        home = tmp_path / f"with{servers}"
        home.mkdir()
        workers = Workers(case, [h.where for h in hosts(servers)], home, 4, 3)
        assert workers.join() == [0, 0, 0], workers.errors()
        results.append([losses(log) for log in workers.logs])
    assert all(r == results[0] for r in results)
    assert set(results[0][0]) == {"1", "2", "3", "4", "end"}
    norms = [
        {step: next(iter(v)).split()[-1] for step, v in seen.items() if step != "end"}
        for seen in results[0]
    ]
    assert norms[0] == norms[1] == norms[2], (
        "the workers report different norms of the mean gradient"
    )


def test_the_update_uses_the_mean_gradient_of_the_workers(hosts, tmp_path):
    """The losses match torch with the clipped mean gradient of three batches, to rounding."""
    case = Case(clip=0.3)
    workers = Workers(case, [h.where for h in hosts(2)], tmp_path, 4, 3)
    assert workers.join() == [0, 0, 0], workers.errors()
    model, optimizer = build(case)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    for step in range(4):
        batch_losses = []
        for rank in range(3):
            batch_losses.append(
                one_step(Case(), model, Skipped(), scaler, step, seed=1000 + 3 * step + rank)
            )
        for p in model.parameters():
            p.grad /= 3
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(3):
            loss, seen_norm = next(iter(losses(workers.logs[rank])[str(step + 1)])).split()
            assert float.fromhex(loss) == pytest.approx(batch_losses[rank], rel=1e-4)
            assert float.fromhex(seen_norm) == pytest.approx(float(norm), rel=1e-4)


class Skipped:
    """An optimizer that does nothing: gradients add up."""

    param_groups: list = []

    def step(self, *_): ...

    def zero_grad(self): ...


LONG, STEPS = Case(clip=0.5), 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of two workers without faults."""
    home = tmp_path_factory.mktemp("whole")
    host = HostProcess(home / "host")
    workers = Workers(LONG, [host.where], home, STEPS, 2)
    assert workers.join() == [0, 0], workers.errors()
    host.kill()
    return [losses(log) for log in workers.logs]


def wait_for(ready, what, seconds=60):
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "victim",
    [
        "worker 0",
        pytest.param("worker 1", marks=pytest.mark.exhaustive),
        "server 0",
        pytest.param("server 1", marks=pytest.mark.exhaustive),
        pytest.param("all", marks=pytest.mark.exhaustive),
    ],
)
def test_a_death_costs_no_step(victim, undisturbed, hosts, tmp_path):  # Rules 3 and 5
    """The victim is killed at a random moment. After a restart, with servers at other addresses,
    training continues with the same losses."""
    rng, two = random.Random(victim), hosts(2)
    workers = Workers(LONG, [h.where for h in two], tmp_path, STEPS * 100, 2)
    wait_for(lambda: len(losses(workers.logs[0])) > 3 + rng.randrange(10), "some steps")
    killed = time.monotonic()
    if victim in ("worker 0", "worker 1", "all"):
        for process in (
            workers.processes if victim == "all" else [workers.processes[int(victim[-1])]]
        ):
            process.kill()
    if victim == "all" or victim.startswith("server"):
        for i in (0, 1) if victim == "all" else [int(victim[-1])]:
            two[i].kill()
    codes = workers.join(30)
    assert time.monotonic() - killed < 10
    assert all(codes), codes
    if victim != "all":
        lost = [error for error, code in zip(workers.errors(), codes) if code == 3]
        doing = "(waiting for .*|sending)"
        message = re.compile(rf"error LostError: step \d+, {doing}: .*{victim} ")
        assert lost and all(map(message.match, lost)), lost

    for i, host in enumerate(two):
        if not host.process.is_alive():
            two[i] = HostProcess(host.directory)
    done = min(max(int(s) for s in losses(log) if s != "end") for log in workers.logs)
    again = Workers(LONG, [h.where for h in two], tmp_path, max(STEPS, done + 5), 2, session="2")
    assert again.join() == [0, 0], again.errors()
    for host in two:
        host.kill()
    for log, reference in zip(again.logs, undisturbed):
        seen = losses(log)
        assert all(len(v) == 1 for v in seen.values()), "a step was repeated with another loss"
        common = (set(seen) & set(reference)) - {"end"}
        assert len(common) == STEPS
        assert all(seen[s] == reference[s] for s in common)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "bad",
    [
        "cut in the middle of a frame",
        "flipped there",
        pytest.param("flipped back", marks=pytest.mark.exhaustive),
        pytest.param("stalled", marks=pytest.mark.exhaustive),
        pytest.param("slowed tenfold", marks=pytest.mark.exhaustive),
    ],
)
def test_a_bad_link_is_named_or_endured(bad, undisturbed, hosts, tmp_path):  # Rules 3 and 5
    (host,) = hosts(1)
    name, port = host.where.split(":")
    with Relay((name, int(port)), bytes_per_s=100e6) as relay:
        workers = Workers(LONG, ["{}:{}".format(*relay.address)], tmp_path, STEPS, 2, deadline_s=4)
        wait_for(lambda: len(losses(workers.logs[0])) > 5, "some steps")
        if bad == "slowed tenfold":
            relay.set_rate(10e6)
            assert workers.join() == [0, 0], workers.errors()
        else:
            if bad.startswith("flipped"):
                relay.flip(12_345, bad.split()[1], 3)
            elif bad.startswith("cut"):
                relay.cut(after_nbytes=1000)
            else:
                relay.stall()
            begin = time.monotonic()
            assert workers.join() == [3, 3]
            assert time.monotonic() - begin < 40
            assert all("server 0" in e for e in workers.errors()), workers.errors()
            assert relay.flipped == bad.startswith("flipped")
    if bad == "flipped there":
        wait_for(lambda: "does not match its checksum" in host.log.read_text(), "the host's line")
    if bad == "flipped back":
        assert any("does not match its checksum" in e for e in workers.errors()), workers.errors()
    if bad != "slowed tenfold":
        assert Workers(LONG, [host.where], tmp_path, STEPS, 2, session="2").join() == [0, 0]
    for log, reference in zip(workers.logs, undisturbed):
        seen = losses(log)
        assert all(len(v) == 1 for v in seen.values())
        assert all(seen[s] == reference[s] for s in reference if s != "end")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({1: "model"}, "model, dtype, chunk size or optimizer of"), ({1: "lr"}, "hyperparameters")],
)
def test_workers_of_different_jobs_are_refused(changes, words, hosts, tmp_path):
    workers = Workers(Case(), [h.where for h in hosts(1)], tmp_path, 5, 2, changes=changes)
    assert workers.join() == [3, 3]
    assert all(words in e for e in workers.errors()), workers.errors()


def test_a_worker_without_the_token_is_refused_and_disturbs_no_session(hosts, tmp_path):  # Rule 8
    (host,) = hosts(1, token=b"a secret of the job")
    workers = Workers(Case(), [host.where], tmp_path, 60, 1, token=b"a secret of the job")
    wait_for(lambda: len(losses(workers.logs[0])) > 2, "some steps")
    other = tmp_path / "other"
    other.mkdir()
    for token in (None, b"guessed by somebody"):
        stranger = Workers(Case(), [host.where], other, 5, 1, token=token)
        assert stranger.join() == [3]
        assert "AuthError" in stranger.errors()[0]
    assert workers.join() == [0], workers.errors()
    assert "refused" in host.log.read_text()


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_topk_losses_do_not_depend_on_the_number_of_servers(staleness, hosts, tmp_path):
    results = []
    for servers in (1, 2):
        home = tmp_path / f"with{servers}"
        home.mkdir()
        case = Case(eager=True, staleness=staleness)
        workers = Workers(case, [h.where for h in hosts(servers)], home, 4, 2, compress=TopK(0.05))
        assert workers.join() == [0, 0], workers.errors()
        results.append([losses(log) for log in workers.logs])
    assert results[0] == results[1]


def test_a_store_of_other_servers_is_refused_and_kept(hosts, tmp_path):
    two = [h.where for h in hosts(2)]
    assert Workers(Case(), two, tmp_path, 2, 1).join() == [0]
    for servers, words in (
        (two[:1], "a store of 2 servers"),
        (two[::-1], "holds the part of server"),
    ):
        home = tmp_path / f"wrong{len(servers)}"
        home.mkdir()
        workers = Workers(Case(), servers, home, 3, 1)
        assert workers.join() == [3]
        assert words in workers.errors()[0], workers.errors()
    assert Workers(Case(), two, tmp_path, 3, 1, session="3").join() == [0]


def test_the_numbers_of_an_update_are_sent_exactly():
    table = ChunkTable.build([("", [ParamSpec(f"p{i}", (3,), "fp32", True, 0) for i in range(4)])])
    scales = (None, float("nan"), -0.0, float("inf"))
    sent = messages.BlockUpdate(0, 1, 7, {0: (0.1, 1e-300)}, scales, 3, 2)
    kind, header, parts = m.frame(sent, table)
    payload = memoryview(b"".join(parts))
    got = m.apply_update(m.header(kind, header), payload, table.blocks[0], 1, 2)
    assert got.hyper == sent.hyper and got.order == 3 and got.scales[0] is None
    assert np.array(got.scales[1:]).tobytes() == np.array(sent.scales[1:]).tobytes()


def test_a_run_continues_with_another_number_of_workers(hosts, tmp_path):
    """Workers join or leave when the group restarts; each number of workers has a defined order of
    summation (Rule 1)."""
    results = []
    for servers in (1, 2):
        where = [h.where for h in hosts(servers)]
        for i, (steps, workers) in enumerate(((2, 2), (4, 3), (6, 1))):
            home = tmp_path / f"{servers}-{i}"
            home.mkdir()
            running = Workers(Case(clip=0.5), where, home, steps, workers, session=str(i))
            assert set(running.join()) == {0}, running.errors()
            results.append((i, [losses(log) for log in running.logs]))
    assert results[:3] == results[3:]
    assert [sorted(seen[0]) for _, seen in results[:3]] == [
        ["1", "2", "end"],
        ["3", "4", "end"],
        ["5", "6", "end"],
    ]


@pytest.mark.parametrize(
    "link", ["token alone", pytest.param("none", marks=pytest.mark.exhaustive)]
)
def test_restarted_workers_wait_for_servers_that_hold_the_old_session(link, hosts, tmp_path):
    """The link's options do not matter unless they set how long to retry (the README shows `token`
    alone)."""
    token = b"a secret of sixteen bytes" if link == "token alone" else None
    (host,) = hosts(1, token=token)
    first = Workers(Case(), [host.where], tmp_path, 10_000, 1, token=token, retry_s=None)
    wait_for(lambda: len(losses(first.logs[0])) > 2, "some steps")
    other = tmp_path / "restarted"
    other.mkdir()
    again = Workers(Case(), [host.where], other, 10_000, 1, token=token, retry_s=None, session="2")
    time.sleep(1.5)
    assert again.processes[0].is_alive(), again.errors()
    first.processes[0].kill()
    first.join()
    wait_for(lambda: len(losses(again.logs[0])) > 2, "steps of the restarted worker")
    again.processes[0].kill()
    again.join()
