"""Training through a fan-in: workers, switches and a server in front of which the sums arrive. The
sums are those of integers, computed plainly (Rule 2: lossy by choice); the same whatever gets lost,
restarts or stands in between."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from roadtrain.errors import PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers import health
from roadtrain.storage.meta import StoreMeta
from roadtrain.switch import admission
from roadtrain.switch import registration as registration_module
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.greeting import hello_of
from roadtrain.switch.options import FanIn, SwitchNode
from roadtrain.switch.registration import JobTree, Registration
from roadtrain.switch.switch import SwitchHost
from roadtrain.switch.switch_job import SwitchJob
from roadtrain.transport.address import address_of
from roadtrain.transport.tcp import TcpOptions, connect
from roadtrain.units import MIB
from tests.support import switch_references as references
from tests.support.faulty import RandomFaults, faulty
from tests.support.models import Case, build
from tests.support.processes import Workers, free_port, losses

VOCAB = 50
SMALL = 64  # numbers under way: a chunk has more packets than that
TOKEN = b"a token of this job"


@pytest.fixture
def switches():
    """`switches()`: one more switch, in this process; its address. `switches.lines`: what they
    said; `switches.stop(address)` ends one."""
    made, lines = {}, []

    def make(port=0, nbytes=16 * MIB):
        switch = SwitchHost(("127.0.0.1", port), nbytes, TcpOptions(token=TOKEN), lines.append)
        made[switch.where] = switch
        return switch.where

    def stop(where):
        made.pop(where).__exit__()

    make.lines, make.stop = lines, stop
    yield make
    for where in list(made):
        stop(where)


@pytest.fixture
def lossy(monkeypatch):
    """Switches lose, double and delay packets, in both directions."""
    made = []

    def socket(*args, **options):
        made.append(RandomFaults(len(made), loss=0.02, duplicate=0.01, reorder=0.02))
        return faulty(DatagramSocket(*args, **options), made[-1])

    monkeypatch.setattr(admission, "DatagramSocket", socket)
    return made


def trained(case, host, home, steps, workers, fan_in, *others, **options):
    """step -> loss and norm, of each worker. `others`: more hosts that serve."""
    home.mkdir()
    servers = [one.where for one in (host, *others)]
    ran = Workers(case, servers, home, steps, workers, fan_in=fan_in, token=TOKEN, **options)
    codes = ran.join(60)
    assert codes == [0] * workers, (ran.errors(), host.log.read_text())
    return [losses(log) for log in ran.logs]


def only_losses(of_worker):
    """step -> loss."""
    return {int(s): next(iter(v)).split()[0] for s, v in of_worker.items() if s != "end"}


class PlainFanIn:
    """The same training in memory: every gradient as integers, added, and back."""

    def __init__(self, case, directory, width, workers):
        self.case, self.width, self.workers = case, width, workers
        [home] = directory.glob("gen-*")
        self.table = StoreMeta.load(home).table
        self.model, self.optimizer = build(case)

    def losses(self, steps):
        """step -> loss, of each worker."""
        found = [{} for _ in range(self.workers)]
        for step in range(steps):
            grads = []
            for rank in range(self.workers):
                loss = self.backward(1000 + step * self.workers + rank)
                found[rank][step + 1] = loss.hex()
                grads.append({n: p.grad for n, p in self.model.named_parameters()})
                self.optimizer.zero_grad()
            summed = self.summed(grads)
            for name, parameter in self.model.named_parameters():
                parameter.grad = summed[name] / self.workers
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found

    def backward(self, seed):
        torch.manual_seed(seed)
        x = torch.randint(0, VOCAB, (4, 16))
        scores = self.model(x).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, x.roll(1, 1).flatten())
        loss.backward()
        return loss.item()

    def summed(self, grads):
        out = {name: torch.zeros_like(grad) for name, grad in grads[0].items()}
        for chunk in self.table.trainable:
            flat = [self.flat(chunk, grad) for grad in grads]
            maxima = np.max([references.reference_exponents(one, "fp32") for one in flat], axis=0)
            total = sum(
                references.reference_quantize(one, "fp32", maxima, self.workers, self.width).astype(
                    np.int64
                )
                for one in flat
            )
            back = references.reference_dequantize(total, maxima, self.workers, self.width)
            for span in chunk.spans:
                into = out[self.table.params[span.param].name].view(-1)
                size = span.stop - span.start
                into[span.origin : span.origin + size] = torch.from_numpy(
                    back[span.start : span.stop]
                )
        return out

    def flat(self, chunk, grads):
        values = np.zeros(chunk.numel, np.float32)
        for span in chunk.spans:
            grad = grads[self.table.params[span.param].name].reshape(-1)
            size = span.stop - span.start
            values[span.start : span.stop] = grad[span.origin : span.origin + size].numpy()
        return values


@pytest.mark.parametrize(("wire", "workers"), [("int8", 2), ("int32", 4)])
def test_the_sums_are_those_of_plain_integers(wire, workers, hosts, switches, tmp_path):  # Rule 2
    [host] = hosts(1, token=TOKEN)
    plan = FanIn((SwitchNode(switches()),), wire, SMALL)
    case = Case(eager=True, sgd=True)
    found = trained(case, host, tmp_path / "run", 3, workers, plan)
    plain = PlainFanIn(case, host.directory, plan.width, workers)
    assert [only_losses(one) for one in found] == plain.losses(3)


def test_what_workers_sent_to_a_switch_is_nothing_elsewhere(
    hosts, switches, tmp_path, monkeypatch
):  # Rule 8
    """Somebody records packets and sends them past their switch: they have the job's tag, and come
    before the sums of the same numbers."""
    real = vars(SwitchJob)["_take_run"]

    def recorded(job, run, sums):
        job.out.send(run.buffer, run.segment, (vars(job)["_parent"],))
        real(job, run, sums)

    monkeypatch.setattr(SwitchJob, "_take_run", recorded)
    [host] = hosts(1, token=TOKEN)
    root, rack, case = switches(), switches(), Case(eager=True, sgd=True)
    plan = FanIn((SwitchNode(root, "", (1,)), SwitchNode(rack, root, (0,))), "int32", SMALL)
    found = trained(case, host, tmp_path / "run", 2, 2, plan)
    plain = PlainFanIn(case, host.directory, plan.width, 2)
    assert [only_losses(one) for one in found] == plain.losses(2)


def test_a_tree_that_loses_packets_gives_the_same_bits(
    hosts, switches, tmp_path, lossy, monkeypatch
):  # Rule 1
    """Two levels; the server's end, switches and workers see losses, repetitions and disorder.
    Then one switch that loses nothing, and the network's multicast where it is to be had."""
    case = Case(clip=0.5, accumulate=2, groups=True)
    first, second = hosts(2, token=TOKEN)
    root, left, right = switches(), switches(), switches()
    tree = FanIn(
        (SwitchNode(root), SwitchNode(left, root, (2, 0)), SwitchNode(right, root, (1,))),
        "int16",
        SMALL,
        "off",
    )
    through_tree = trained(case, first, tmp_path / "tree", 3, 3, tree)
    assert sum(one.lost for one in lossy) > 100
    assert "fan-in: 3 switch(es) ready" in first.log.read_text()
    monkeypatch.undo()
    one = FanIn((SwitchNode(switches()),), "int16")
    assert trained(case, second, tmp_path / "one", 3, 3, one) == through_tree
    by = "the network (multicast" if multicast_comes_back() else "the switches"
    assert f"fan-in: parameters are copied by {by}" in second.log.read_text()


def multicast_comes_back():
    """Whether this host's loopback carries multicast."""
    group, options = ("239.192.1.2", free_port()), {"receive_nbytes": MIB, "send_nbytes": MIB}
    sender = DatagramSocket(("127.0.0.1", 0), **options)
    receiver = DatagramSocket(("127.0.0.1", 0), group=group, **options)
    sender.send(np.zeros(8, np.uint8), 8, group)
    came = receiver.receive(np.zeros(1 << 16, np.uint8), 1.0)
    sender.close()
    receiver.close()
    return came is not None


def test_the_switches_copy_once_the_network_does_not(hosts, switches, tmp_path):  # Rule 5
    """Where nobody asks them to remember, a network's devices forget who is in a group."""
    if not multicast_comes_back():
        pytest.skip("this host's loopback carries no multicast")
    [host] = hosts(1, token=TOKEN, fault=("forget",))
    trained(Case(eager=True), host, tmp_path / "run", 3, 2, [switches()])
    said = host.log.read_text()
    assert "parameters are copied by the network (multicast" in said
    assert "multicast stopped working" in said


CASES = {
    "late, bf16": (Case(dtype=torch.bfloat16, eager=True, staleness=1), 2, {}),
    "frozen, scaler": (Case(frozen=True, scaler=True, clip=1.0), 2, {}),
    "one worker, bf16": (Case(dtype=torch.bfloat16, eager=True), 1, {}),
    "relays": (Case(clip=0.5, accumulate=2), 4, {"local": 2, "relay": "96MiB"}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_job_trains_as_over_tcp(name, hosts, switches, tmp_path):
    """To the error of int32: a thousandth of the loss is a thousand times what rounding makes."""
    case, workers, options = CASES[name]
    first, second = hosts(2, token=TOKEN)
    plain = trained(case, first, tmp_path / "plain", 4, workers, None, **options)
    summed = trained(case, second, tmp_path / "fan-in", 4, workers, [switches()], **options)
    for mine, theirs in zip(map(only_losses, summed), map(only_losses, plain)):
        assert mine.keys() == theirs.keys() == {1, 2, 3, 4}
        for step in mine:
            assert float.fromhex(mine[step]) == pytest.approx(float.fromhex(theirs[step]), rel=1e-3)


def test_two_servers_hold_the_same(hosts, switches, tmp_path):
    """Each has an end of its own; with replicas they compare what they made of the sums."""
    case, plan, all_hosts = Case(eager=True, groups=True), [switches()], hosts(3, token=TOKEN)
    one = trained(case, all_hosts[0], tmp_path / "one", 3, 2, plan)
    two = trained(case, all_hosts[1], tmp_path / "two", 3, 2, plan, all_hosts[2], replicas=2)
    assert two == one


def test_a_run_goes_on_with_and_without_it(hosts, switches, tmp_path):  # Rule 3
    """Each worker finds its own state (its loss scaler) again, whoever committed it."""
    case, [first, second] = Case(scaler=True), hosts(2, token=TOKEN)
    plan = [switches()]
    whole = trained(case, first, tmp_path / "whole", 4, 2, plan)
    part = trained(case, second, tmp_path / "part0", 2, 2, plan)
    more = trained(case, second, tmp_path / "part1", 4, 2, plan, session="2")
    for rank in range(2):
        seen = {**only_losses(part[rank]), **only_losses(more[rank])}
        assert seen == only_losses(whole[rank]) and len(seen) == 4
    over_tcp = trained(case, second, tmp_path / "part2", 5, 2, None, session="3")
    assert [*only_losses(over_tcp[1])] == [5]


def until(what, deadline_s=40.0):
    end = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


def test_a_switch_that_restarts_loses_no_step(hosts, switches, tmp_path):  # Rule 3, Rule 5
    case, steps = Case(eager=True), 16
    first, second = hosts(2, token=TOKEN)
    whole = trained(case, first, tmp_path / "whole", steps, 2, [switches()])
    port, home = free_port(), tmp_path / "restarted"
    switch = switches(port)
    home.mkdir()
    ran = Workers(case, [second.where], home, steps, 2, fan_in=[switch], token=TOKEN)
    until(lambda: "2" in losses(ran.logs[1]))
    switches.stop(switch)
    time.sleep(0.5)
    assert switches(port) == switch
    assert ran.join(60) == [0, 0], (ran.errors(), second.log.read_text())
    assert [losses(log) for log in ran.logs] == whole
    said = second.log.read_text()
    assert f"switch {switch} is lost" in said and f"switch {switch} is connected again" in said


def test_a_worker_that_stops_is_named_and_one_that_dies_ends_the_session(
    hosts, switches, tmp_path
):  # Rule 3, Rule 5
    case, [host], plan = Case(eager=True), hosts(1, token=TOKEN), [switches()]
    ran = Workers(case, [host.where], tmp_path, 100000, 2, fan_in=plan, token=TOKEN)
    until(lambda: "2" in losses(ran.logs[1]))
    os.kill(ran.processes[1].pid, signal.SIGSTOP)
    begin, answers = time.monotonic(), []

    def named():
        answers.append(health.ask(address_of(host.where), TcpOptions(token=TOKEN)))
        return not isinstance(answers[-1], BaseException) and "worker 1 has " in answers[-1][0]

    until(named)
    assert time.monotonic() - begin < 30.0  # two seconds, else never: SILENT_S of a session is 60
    said = answers[-1]
    assert any(name.startswith("worker 0 (127.0.0.1") for name in said[1]), said
    assert "packets sent" in said[0] and "rounds stuck" in said[0]
    assert re.search(r"fan-in: worker 1 has ", host.log.read_text())
    os.kill(ran.processes[1].pid, signal.SIGKILL)
    codes = ran.join(30)
    assert codes[0] == 3 and "worker 1 was lost" in ran.errors()[0], ran.errors()
    until(lambda: "session over" in host.log.read_text())
    done = max(int(s) for s in losses(ran.logs[0]) if s.isdigit())
    home = tmp_path / "again"
    again = trained(case, host, home, done + 2, 2, plan, session="2")
    assert str(done + 2) in again[1]


def test_a_budget_that_is_too_small_is_said(hosts, switches, tmp_path):  # Rule 4
    [host] = hosts(1, token=TOKEN, budget=28 << 20)
    small = Workers(
        Case(eager=True), [host.where], tmp_path, 1, 1, fan_in=[switches()], token=TOKEN
    )
    assert small.join(40) == [3]
    words = r"needs at least \d+ MiB \(\d.* of it for its fan-in\), but its budget is 28"
    assert re.search(words, small.errors()[0]), small.errors()


class Nobody:
    """Hears nothing."""

    def room(self, kind, header, nbytes):
        return memoryview(bytearray(nbytes))

    def arrived(self, kind, header, payload):
        pass

    def lost(self, error):
        pass


def test_who_means_something_else_is_refused(hosts):  # Rule 6
    [host] = hosts(1, token=TOKEN)
    options = TcpOptions(token=TOKEN, retry_s=0.0)
    links = []

    def greet(hello):
        address = address_of(host.where)
        links.append(connect(address, Nobody(), options, hello=hello, language=m.LANGUAGE))

    def hello(rank, session="s", signature="x"):
        return m.Hello(session, rank, 3, 1, 0, signature)

    plan = FanIn((SwitchNode(f"127.0.0.1:{free_port()}"),))
    greet(hello_of(plan, hello(0)))
    for other, words in (
        (
            hello_of(replace(plan, window=64), hello(1)),
            r"worker 1 has fan_in.window = 64, but worker 0",
        ),
        (hello_of(replace(plan, wire="int8"), hello(1)), r"fan_in.wire = int8"),
        (hello_of(plan, hello(1, signature="y")), "another model"),
        (
            m.encode(hello(1)),
            "worker 1 has no fan_in, but others have one",
        ),
        (hello_of(plan, hello(1, "t")), "busy with a session of 3 participant"),
        (hello_of(plan, hello(0)), "busy"),
        (hello_of(plan, hello(5)), "worker 5 of 3"),
    ):
        with pytest.raises(WireError, match=words):
            greet(other)
    greet(hello_of(plan, hello(1)))
    for link in links:
        link.close()
    until(lambda: "session over" in host.log.read_text())
    greet(m.encode(hello(0, "u")))
    with pytest.raises(WireError, match="worker 1 has a fan_in, but the others have none"):
        greet(hello_of(plan, hello(1, "u")))
    links[-1].close()


def test_a_switch_that_is_not_there_is_named(switches, monkeypatch):  # Rule 5
    """Also one that has not as many slots as are asked for."""
    monkeypatch.setattr(registration_module, "SWITCH_S", 1.0)
    monkeypatch.setattr(registration_module, "BUSY_S", 1.0)
    nobody, little = f"127.0.0.1:{free_port()}", switches(nbytes=3 * MIB)
    refused = refused_by(nobody, 64)
    assert re.search(
        r"did not accept job s for [1-9]\d*\.\d s .since \d\d:\d\d:\d\d UTC.: .* refused", refused
    )
    assert f"hint: run `roadtrain serve {nobody} --switch` there" in refused
    assert "slots" in refused_by(little, 65536)


def refused_by(where, window):
    """Why the switch there does not take a job."""
    failed = queue.SimpleQueue()
    plan = FanIn((SwitchNode(where),), window=window)
    registration = Registration(
        JobTree(plan, 2, "s", 1, bytes(16), ("127.0.0.1", 9)),
        TcpOptions(token=TOKEN),
        ready=lambda ports: failed.put("ready"),
        failed=failed.put,
        report=print,
    )
    registration.start()
    error = failed.get(timeout=20)
    assert isinstance(error, PeerError) and where in str(error), error
    assert [*registration.absent] == [where]
    registration.close()
    return str(error)
