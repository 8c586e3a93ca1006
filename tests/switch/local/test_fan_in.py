"""Training through a fan-in: workers, switches, and a server that receives the sums. The sums equal
those of plain integers (Rule 2: lossy by choice), regardless of lost packets, restarts and the
switches in between."""

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
SMALL = 64  # window: fewer numbers in flight than a chunk has packets
TOKEN = b"a token of this job"
REST = pytest.mark.exhaustive


@pytest.fixture
def switches():
    """`switches()` starts another switch in this process and returns its address. `switches.lines`
    are the lines that the switches printed; `switches.stop(address)` ends a switch."""
    hosts, lines = {}, []

    def make(port=0, nbytes=16 * MIB):
        switch = SwitchHost(("127.0.0.1", port), nbytes, TcpOptions(token=TOKEN), lines.append)
        hosts[switch.where] = switch
        return switch.where

    def stop(where):
        hosts.pop(where).__exit__()

    make.lines, make.stop = lines, stop
    yield make
    for where in list(hosts):
        stop(where)


@pytest.fixture
def lossy(monkeypatch):
    """Switches lose, double and delay packets, in both directions."""
    faults = []

    def socket(*args, **options):
        faults.append(RandomFaults(len(faults), loss=0.02, duplicate=0.01, reorder=0.02))
        return faulty(DatagramSocket(*args, **options), faults[-1])

    monkeypatch.setattr(admission, "DatagramSocket", socket)
    return faults


def trained(case, host, home, steps, workers, fan_in, *others, **options):
    """Train and return step -> loss and norm for each worker. `others`: more hosts that serve."""
    home.mkdir()
    servers = [server.where for server in (host, *others)]
    run = Workers(case, servers, home, steps, workers, fan_in=fan_in, token=TOKEN, **options)
    codes = run.join(60)
    assert codes == [0] * workers, (run.errors(), host.log.read_text())
    return [losses(log) for log in run.logs]


def only_losses(of_worker):
    """Return step -> loss of a worker."""
    return {int(s): next(iter(v)).split()[0] for s, v in of_worker.items() if s != "end"}


class PlainFanIn:
    """The same training in memory: gradients are quantized, added as integers and dequantized."""

    def __init__(self, case, directory, width, workers):
        self.case, self.width, self.workers = case, width, workers
        [home] = directory.glob("gen-*")
        self.table = StoreMeta.load(home).table
        self.model, self.optimizer = build(case)

    def losses(self, steps):
        """Return step -> loss for each worker."""
        of_workers = [{} for _ in range(self.workers)]
        for step in range(steps):
            grads = []
            for rank in range(self.workers):
                loss = self.backward(1000 + step * self.workers + rank)
                of_workers[rank][step + 1] = loss.hex()
                grads.append({n: p.grad for n, p in self.model.named_parameters()})
                self.optimizer.zero_grad()
            summed = self.summed(grads)
            for name, parameter in self.model.named_parameters():
                parameter.grad = summed[name] / self.workers
            self.optimizer.step()
            self.optimizer.zero_grad()
        return of_workers

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
            maxima = np.max([references.reference_exponents(grad, "fp32") for grad in flat], axis=0)
            total = sum(
                references.reference_quantize(
                    grad, "fp32", maxima, self.workers, self.width
                ).astype(np.int64)
                for grad in flat
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


@pytest.mark.parametrize(("wire", "workers"), [pytest.param("int8", 2, marks=REST), ("int32", 4)])
def test_sums_equal_plain_integer_sums(wire, workers, hosts, switches, tmp_path):  # Rule 2
    [host] = hosts(1, token=TOKEN)
    plan = FanIn((SwitchNode(switches()),), wire, SMALL)
    case = Case(eager=True, sgd=True)
    of_workers = trained(case, host, tmp_path / "run", 3, workers, plan)
    plain = PlainFanIn(case, host.directory, plan.width, workers)
    assert [only_losses(worker) for worker in of_workers] == plain.losses(3)


def test_packets_for_a_switch_are_ignored_elsewhere(
    hosts, switches, tmp_path, monkeypatch
):  # Rule 8
    """An attacker records packets and sends them past their switch: they have the job's tag and
    arrive before the sums of the same numbers."""
    real = vars(SwitchJob)["_take_run"]

    def recorded(job, run, sums):
        job.out.send(run.buffer, run.segment, (vars(job)["_parent"],))
        real(job, run, sums)

    monkeypatch.setattr(SwitchJob, "_take_run", recorded)
    [host] = hosts(1, token=TOKEN)
    root, rack, case = switches(), switches(), Case(eager=True, sgd=True)
    plan = FanIn((SwitchNode(root, "", (1,)), SwitchNode(rack, root, (0,))), "int32", SMALL)
    of_workers = trained(case, host, tmp_path / "run", 2, 2, plan)
    plain = PlainFanIn(case, host.directory, plan.width, 2)
    assert [only_losses(worker) for worker in of_workers] == plain.losses(2)


@REST  # lossy links and trees are tested apart in test_fan_in_train.py
def test_a_lossy_tree_gives_the_same_bits(hosts, switches, tmp_path, lossy, monkeypatch):  # Rule 1
    """The tree has two levels, and its packets are lost, repeated and reordered. The reference is
    a single switch without loss, with the network's multicast where it is available."""
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
    assert sum(faults.lost for faults in lossy) > 100
    assert "fan-in: 3 switch(es) ready" in first.log.read_text()
    monkeypatch.undo()
    single = FanIn((SwitchNode(switches()),), "int16")
    assert trained(case, second, tmp_path / "one", 3, 3, single) == through_tree
    copier = "the network (multicast" if multicast_works() else "the switches"
    assert f"fan-in: parameters are copied by {copier}" in second.log.read_text()


def multicast_works():
    """Return whether this host's loopback carries multicast."""
    group, options = ("239.192.1.2", free_port()), {"receive_nbytes": MIB, "send_nbytes": MIB}
    sender = DatagramSocket(("127.0.0.1", 0), **options)
    receiver = DatagramSocket(("127.0.0.1", 0), group=group, **options)
    sender.send(np.zeros(8, np.uint8), 8, group)
    packet = receiver.receive(np.zeros(1 << 16, np.uint8), 1.0)
    sender.close()
    receiver.close()
    return packet is not None


def test_switches_copy_once_multicast_stops(hosts, switches, tmp_path):  # Rule 5
    """Without an IGMP querier a network's devices forget the members of a group."""
    if not multicast_works():
        pytest.skip("this host's loopback carries no multicast")
    [host] = hosts(1, token=TOKEN, fault=("forget",))
    trained(Case(eager=True), host, tmp_path / "run", 3, 2, [switches()])
    log = host.log.read_text()
    assert "parameters are copied by the network (multicast" in log
    assert "multicast stopped working" in log


CASES = {
    "late, bf16": (Case(dtype=torch.bfloat16, eager=True, staleness=1), 2, {}),
    "frozen, scaler": (Case(frozen=True, scaler=True, clip=1.0), 2, {}),
    "one worker, bf16": (Case(dtype=torch.bfloat16, eager=True), 1, {}),
    "relays": (Case(clip=0.5, accumulate=2), 4, {"local": 2, "relay": "96MiB"}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=REST if n == "one worker, bf16" else ()) for n in CASES],
)
def test_every_kind_of_job_trains_as_over_tcp(name, hosts, switches, tmp_path):
    """Within the error of int32: the tolerance of 1e-3 is a thousand times the rounding error."""
    case, workers, options = CASES[name]
    first, second = hosts(2, token=TOKEN)
    plain = trained(case, first, tmp_path / "plain", 4, workers, None, **options)
    summed = trained(case, second, tmp_path / "fan-in", 4, workers, [switches()], **options)
    for ours, exact in zip(map(only_losses, summed), map(only_losses, plain)):
        assert ours.keys() == exact.keys() == {1, 2, 3, 4}
        for step in ours:
            assert float.fromhex(ours[step]) == pytest.approx(float.fromhex(exact[step]), rel=1e-3)


def test_two_servers_hold_the_same_state(hosts, switches, tmp_path):
    """Each server has its own fan-in end; replicas compare the results of the sums."""
    case, plan, all_hosts = Case(eager=True, groups=True), [switches()], hosts(3, token=TOKEN)
    single = trained(case, all_hosts[0], tmp_path / "one", 3, 2, plan)
    pair = trained(case, all_hosts[1], tmp_path / "two", 3, 2, plan, all_hosts[2], replicas=2)
    assert pair == single


def test_a_run_continues_with_and_without_the_fan_in(hosts, switches, tmp_path):  # Rule 3
    """Each worker restores its own state (its loss scaler), whichever worker committed it."""
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


def until(condition, deadline_s=40.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.02)


def test_a_switch_restart_loses_no_step(hosts, switches, tmp_path):  # Rule 3, Rule 5
    case, steps = Case(eager=True), 16
    first, second = hosts(2, token=TOKEN)
    whole = trained(case, first, tmp_path / "whole", steps, 2, [switches()])
    port, home = free_port(), tmp_path / "restarted"
    switch = switches(port)
    home.mkdir()
    run = Workers(case, [second.where], home, steps, 2, fan_in=[switch], token=TOKEN)
    until(lambda: "2" in losses(run.logs[1]))
    switches.stop(switch)
    time.sleep(0.5)
    assert switches(port) == switch
    assert run.join(60) == [0, 0], (run.errors(), second.log.read_text())
    assert [losses(log) for log in run.logs] == whole
    log = second.log.read_text()
    assert f"switch {switch} is lost" in log and f"switch {switch} is connected again" in log


def test_a_stopped_worker_is_named_and_a_dead_worker_ends_the_session(
    hosts, switches, tmp_path
):  # Rule 3, Rule 5
    case, [host], plan = Case(eager=True), hosts(1, token=TOKEN), [switches()]
    run = Workers(case, [host.where], tmp_path, 100000, 2, fan_in=plan, token=TOKEN)
    until(lambda: "2" in losses(run.logs[1]))
    os.kill(run.processes[1].pid, signal.SIGSTOP)
    begin, answers = time.monotonic(), []

    def is_named():
        answers.append(health.ask(address_of(host.where), TcpOptions(token=TOKEN)))
        return not isinstance(answers[-1], BaseException) and "worker 1 has " in answers[-1][0]

    until(is_named)
    # the worker is named after two seconds or never: SILENT_S of a session is 60
    assert time.monotonic() - begin < 30.0
    answer = answers[-1]
    assert any(name.startswith("worker 0 (127.0.0.1") for name in answer[1]), answer
    assert "packets sent" in answer[0] and "rounds stuck" in answer[0]
    assert re.search(r"fan-in: worker 1 has ", host.log.read_text())
    os.kill(run.processes[1].pid, signal.SIGKILL)
    codes = run.join(30)
    assert codes[0] == 3 and "worker 1 was lost" in run.errors()[0], run.errors()
    until(lambda: "session over" in host.log.read_text())
    done = max(int(s) for s in losses(run.logs[0]) if s.isdigit())
    home = tmp_path / "again"
    again = trained(case, host, home, done + 2, 2, plan, session="2")
    assert str(done + 2) in again[1]


def test_a_budget_that_is_too_small_is_reported(hosts, switches, tmp_path):  # Rule 4
    [host] = hosts(1, token=TOKEN, budget=28 << 20)
    workers = Workers(
        Case(eager=True), [host.where], tmp_path, 1, 1, fan_in=[switches()], token=TOKEN
    )
    assert workers.join(40) == [3]
    words = r"needs at least \d+ MiB \(\d.* of it for its fan-in\), but its budget is 28"
    assert re.search(words, workers.errors()[0]), workers.errors()


class IgnoringReceiver:
    """A receiver that ignores every frame."""

    def room(self, kind, header, nbytes):
        return memoryview(bytearray(nbytes))

    def arrived(self, kind, header, payload):
        pass

    def lost(self, error):
        pass


def test_a_worker_whose_fan_in_differs_is_refused(hosts):  # Rule 6
    [host] = hosts(1, token=TOKEN)
    options = TcpOptions(token=TOKEN, retry_s=0.0)
    links = []

    def greet(hello):
        address = address_of(host.where)
        links.append(
            connect(address, IgnoringReceiver(), options, hello=hello, language=m.LANGUAGE)
        )

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


def test_an_absent_switch_is_named(switches, monkeypatch):  # Rule 5
    """A switch with fewer slots than requested is named, too."""
    monkeypatch.setattr(registration_module, "SWITCH_S", 1.0)
    monkeypatch.setattr(registration_module, "BUSY_S", 1.0)
    absent, small = f"127.0.0.1:{free_port()}", switches(nbytes=3 * MIB)
    refused = refused_by(absent, 64)
    assert re.search(
        r"did not accept job s for [1-9]\d*\.\d s .since \d\d:\d\d:\d\d UTC.: .* refused", refused
    )
    assert f"hint: run `roadtrain serve {absent} --switch` there" in refused
    assert "slots" in refused_by(small, 65536)


def refused_by(where, window):
    """Return why the switch at `where` refuses a job."""
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
