"""`roadtrain serve --switch` on real sockets: sums and copies through a single switch and through a
tree, several jobs at once, restarts, and reports of silent peers."""

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from roadtrain import cli
from roadtrain.errors import AuthError, BusyError, ConfigError, LostError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers import health, serve
from roadtrain.switch import switch_command, switch_frames
from roadtrain.switch.admission import SlotQuota
from roadtrain.switch.packets import PACKET_NBYTES, Kind, PacketKey
from roadtrain.switch.streams import beat_packet
from roadtrain.switch.switch import SwitchHost
from roadtrain.switch.switch_job import UNKNOWN_RANK
from roadtrain.transport.address import write_token
from roadtrain.transport.link import Receiver
from roadtrain.transport.tcp import TcpOptions, connect
from roadtrain.units import MIB
from tests.support.fan_in_fakes import (
    HOST,
    TOKEN,
    WINDOW,
    End,
    Worker,
    copies_are_right,
    pumped,
    sums_are_right,
)
from tests.support.faulty import RandomFaults
from tests.support.processes import free_port

OPTIONS = TcpOptions(token=TOKEN)
COUNT = 400


@pytest.fixture
def switches():
    """`switches(...)` starts another SwitchHost; `switches.lines` are the lines they printed."""
    hosts, lines = [], []

    def make(port=0, nbytes=16 * MIB, options=OPTIONS):
        hosts.append(SwitchHost((HOST, port), nbytes, options, lines.append))
        return hosts[-1]

    make.lines = lines
    yield make
    for switch in hosts:
        switch.__exit__()


@pytest.fixture
def peers():
    """`peers(x)` returns x, which is closed after the test."""
    opened = []

    def make(peer):
        opened.append(peer)
        return peer

    yield make
    for peer in opened:
        peer.close()


def address(switch):
    return HOST, switch.port


def job(peers, switch, workers=2, number=7, faults=None):
    """Make an end and its workers below one switch. faults: The faults of each, the end first."""
    faults = faults or [None] * (workers + 1)
    end = peers(End(number, f"job{number}", faults=faults[0]))
    port = end.register(address(switch), workers)
    return end, [
        peers(Worker(end.key, end.job, rank, rank, (HOST, port), faults=faults[rank + 1]))
        for rank in range(workers)
    ]


def run(end, workers, count, deadline_s=30.0):
    """Send sums up and parameters down at the same time."""
    for peer in (end, *workers):
        peer.sender.may_send(count)

    def done():
        return all(len(peer.got) == count for peer in (end, *workers))

    assert pumped([end, *workers], done, deadline_s), [len(p.got) for p in (end, *workers)]
    sums_are_right(end, range(len(workers)), count)
    copies_are_right(workers, count)


def status(switch):
    answer = health.ask(address(switch), OPTIONS)
    assert isinstance(answer, tuple), answer
    return answer[0]


def status_matching(switch, pattern, peers=(), deadline_s=10.0):
    """Return the status once it matches `pattern`."""
    deadline = time.monotonic() + deadline_s
    while not re.search(pattern, answer := status(switch)):
        assert time.monotonic() < deadline, answer
        pumped(peers, lambda: False, 0.2)
    return answer


@contextlib.contextmanager
def pumping(peers):
    """Pump the peers in a separate thread while the caller waits for something."""
    over = threading.Event()
    thread = threading.Thread(target=pumped, args=(peers, over.is_set, 60.0))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_sums_go_up_and_parameters_go_down(switches, peers):
    switch = switches()
    end, workers = job(peers, switch, 3)
    run(end, workers, COUNT)
    (of_switch,) = switch.jobs
    assert of_switch.table.counters["completed"] == COUNT
    assert of_switch.table.counters["added"] == 2 * COUNT
    assert of_switch.counters.strangers == of_switch.counters.refused == 0
    answer = status_matching(switch, rf"{COUNT} sums(.|\n)*stuck slots: none")
    assert "1 job(s), 64 slots in use" in answer and "job7: 64 slots, 3 children" in answer


def test_lost_doubled_and_overtaken_packets_make_no_sum_wrong(switches, peers):
    switch = switches()
    faults = [RandomFaults(i, loss=0.03, duplicate=0.03, reorder=0.03) for i in range(4)]
    end, workers = job(peers, switch, 3, faults=faults)
    run(end, workers, COUNT, 60.0)
    assert all(min(link.lost, link.doubled, link.overtaken) > 3 for link in faults)
    counters = switch.jobs[0].table.counters
    assert counters["repeated"] + counters["dropped_old"] + counters["answered"] > 10


def test_a_switch_can_have_a_switch_as_parent(switches, peers):
    root, *racks = (switches() for _ in range(3))
    end = peers(End())
    up = end.register(address(root), 2)
    workers = []
    for child, rack in enumerate(racks):
        port = end.register(address(rack), 2, parent=(HOST, up), child=child)
        workers += [
            peers(Worker(end.key, end.job, 2 * child + i, i, (HOST, port))) for i in range(2)
        ]
    run(end, workers, COUNT)
    assert [host.jobs[0].table.counters["completed"] for host in (root, *racks)] == [COUNT] * 3
    # each link carries S once: no packet is doubled unless it was resent
    sent = root.jobs[0].table.counters["added"] + COUNT
    assert sent == 2 * COUNT


def test_a_stalled_worker_below_a_rack_is_named_at_the_end(switches, peers):
    """The heartbeats that go up carry its rank and its silence in milliseconds."""
    root, rack = switches(), switches()
    end = peers(End())
    up = end.register(address(root), 1)
    port = end.register(address(rack), 2, parent=(HOST, up))
    alive, stalled = (peers(Worker(end.key, end.job, 4 + i, i, (HOST, port))) for i in range(2))
    assert pumped([end, alive, stalled], lambda: end.below[1] in (4, 5))
    # this thread may stall itself, and then the switches name more than the stalled worker
    status_matching(rack, "silent: none", [end, alive, stalled])
    status_matching(root, "silent: none", [end, alive, stalled])
    before = len(switches.lines)
    assert pumped([end, alive], lambda: end.below[1] == 5 and end.below[0] > 1000)
    answer = status_matching(rack, "silent: child 1", [end, alive])
    assert re.search(r"silent: child 1 \(worker 5, 127.0.0.1:\d+\) for [1-9]", answer)
    assert "worker 5" in status_matching(root, "silent: child 0", [end, alive])
    alive_at = re.escape("{}:{}".format(*alive.where))
    lines = [x for x in switches.lines[before:] if not re.search(alive_at, x)]
    for child in (r"child 1 .worker 5, ", r"child 0 .worker \d, "):
        silent = [x for x in lines if re.search(child + r".* has been silent for \d", x)]
        again = [x for x in lines if re.search(child + ".* sends packets again", x)]
        assert len(silent) == len(again) + 1, lines  # one line per switch, not per check
    status_matching(rack, "silent: none", [end, alive, stalled])
    assert any("sends packets again" in line for line in switches.lines)


def test_a_child_that_never_sent_a_packet_is_named(switches, peers):
    switch = switches()
    end = peers(End())
    end.register(address(switch), 2)
    answer = status_matching(switch, "silent: child 0", [end])
    assert "child 1 (no packet yet)" in answer
    assert pumped([end], lambda: end.below[1] == UNKNOWN_RANK and end.below[0] > 1000)


def test_a_worker_that_dies_amid_sums_is_named_and_its_slots_are_freed(switches, peers):
    switch = switches()
    end, workers = job(peers, switch, 2)
    workers[0].sender.may_send(3)
    answer = status_matching(switch, "stuck slots: 3", [end, *workers])
    assert "number 0 lacks child 1" in answer and "number 2 lacks child 1" in answer
    assert any("stuck slots: 3" in line for line in switches.lines)
    assert switch.quota.used_slots == WINDOW
    end.leave()
    status_matching(switch, "0 job.s., 0 slots in use")
    assert switch.quota.used_nbytes == SlotQuota(switch.quota.nbytes).used_nbytes
    again, others = job(peers, switch, 2, number=8)
    run(again, others, 100)


def test_a_restart_in_the_middle_of_sums_changes_no_sum(switches, peers):
    port = free_port()
    switch = switches(port)
    end, workers = job(peers, switch, 2)
    for peer in (end, *workers):
        peer.sender.may_send(COUNT)
    everyone = [end, *workers]
    assert pumped(everyone, lambda: len(end.got) > 100)
    before = end.port
    workers[0].pump()  # the table holds half of a sum
    switch.__exit__()
    end.leave()
    pumped(everyone, lambda: False, 0.1)
    switches(port)
    assert end.register((HOST, port), 2, port=before) == before
    run(end, workers, COUNT)


def test_an_end_that_reconnects_before_its_link_is_lost_keeps_its_port(switches, peers):
    switch = switches()
    end, workers = job(peers, switch, 2)
    run(end, workers, 100)
    first = end.port
    assert end.register(address(switch), 2, port=first) == first
    assert len(switch.jobs) == 1 and switch.quota.used_slots == WINDOW
    run(end, workers, 200)
    older = end.links[0][1]
    assert pumped([end, *workers], lambda: isinstance(older.over, LostError))


def test_jobs_are_isolated(switches, peers):
    switch = switches()
    jobs = [job(peers, switch, 2, number) for number in (7, 8)]
    assert len({end.port for end, _ in jobs}) == 2
    for end, workers in jobs:
        run(end, workers, 100)
    # at another job's port a packet counts as a stranger's
    (first, _), (second, _) = jobs
    before = [of_switch.counters.strangers for of_switch in switch.jobs]
    first.socket.send(first.packets(range(3)), PACKET_NBYTES, (HOST, second.port))
    assert pumped([first], lambda: switch.jobs[1].counters.strangers == before[1] + 3)
    assert switch.jobs[0].counters.strangers == before[0]


FLOOD = """
import socket, sys
packets = [bytes.fromhex(line) for line in sys.stdin.read().split("\\n")]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    while True:
        for packet in packets:
            sock.sendto(packet, (sys.argv[1], int(sys.argv[2])))
"""


@contextlib.contextmanager
def flood(packets, to):
    """Run a process that repeatedly sends `packets` to one port as fast as it can."""
    command = [sys.executable, "-S", "-c", FLOOD, to[0], str(to[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        try:
            process.stdin.write("\n".join(packet.hex() for packet in packets))
            process.stdin.close()
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize(("listens", "at"), [("::1", "::1"), ("::", "::1"), ("::", HOST)])
def test_a_switch_serves_ipv6(listens, at, peers):
    with SwitchHost((listens, 0), 16 * MIB, OPTIONS, [].append) as switch:
        end = peers(End(7, "job7", host=at))
        root = at, end.register((at, switch.port), 2)
        workers = [peers(Worker(end.key, end.job, n, n, root, host=at)) for n in range(2)]
        run(end, workers, 100)


@pytest.mark.parametrize("inside", [False, True], ids=["stranger", "its own worker"])
def test_flooding_a_job_does_not_stop_another_job(switches, peers, inside):
    """Rule 8: packets of a stranger change nothing and are counted."""
    switch = switches()
    flooded, workers = job(peers, switch, 2, 7)
    calm, others = job(peers, switch, 2, 8)
    junk = [b"", b"x", bytes(2000)]
    sender = workers[0]
    if not inside:
        key = PacketKey.derive(b"the token of somebody else", bytes(16))
        sender = peers(Worker(key, 7, 0, 0, (HOST, flooded.port)))
    raw = sender.packets(range(8)).tobytes()
    if inside:  # the worker has sent them: heartbeats report their arrival
        assert pumped([flooded, *workers], lambda: sender.sender.beat.credit >= 8)
        sender.sender.may_send(8)
        sender.sender.next_numbers(8)
    junk += [raw[i : i + PACKET_NBYTES] for i in range(0, len(raw), PACKET_NBYTES)]
    first, second = switch.jobs
    with flood(junk, (HOST, flooded.port)):
        assert pumped([], lambda: first.counters.strangers > 1000)
        before = first.counters.strangers
        run(calm, others, 200)
        assert first.counters.strangers > before + 100
    assert second.counters.strangers == 0
    if inside:
        assert first.table.counters["repeated"] > 100
    else:
        assert first.counters.received == 0 and not any(first.table.counters.values())
    run(flooded, workers, 100)  # the sums of the flooded job are right, too


def test_short_lived_jobs_do_not_stop_another_job(switches, peers):
    switch = switches()
    end, workers = job(peers, switch, 2)
    for peer in (end, *workers):
        peer.sender.may_send(COUNT)
    for number in range(20, 26):
        short, children = job(peers, switch, 2, number)
        children[0].sender.may_send(5)
        pumped([end, *workers, short, *children], lambda: False, 0.03)
        short.leave()
    run(end, workers, COUNT)
    assert pumped(
        [end, *workers], lambda: [of_switch.name for of_switch in switch.jobs] == ["job7"]
    )


def test_a_job_that_requests_more_slots_than_are_free_is_refused(switches, peers):
    switch = switches(nbytes=4 * MIB)
    end, workers = job(peers, switch, 2)
    free = switch.quota.free_slots
    greedy = peers(End(9, "greedy"))
    with pytest.raises(
        BusyError, match=f"asks this switch for {free + 1} slots, but only {free} are free"
    ):
        greedy.register(address(switch), 2, slots=free + 1)
    with pytest.raises(
        WireError, match=f"asks this switch for 65536 slots, but only {free} are free"
    ) as refusal:
        greedy.register(address(switch), 2, slots=65536)
    assert not isinstance(refusal.value, BusyError), "the request would be retried in vain"
    assert switch.quota.free_slots == free and len(switch.jobs) == 1
    run(end, workers, 100)
    greedy.register(address(switch), 2, slots=free)
    assert switch.quota.free_slots == 0 and switch.quota.used_nbytes <= 4 * MIB  # Rule 4


def hello(end, **changes):
    default = switch_frames.SwitchHello("x", 7, bytes(16), 2, 64, 0, (HOST, 9), 0)
    return switch_frames.SWITCH_GREETING + m.encode(default._replace(**changes))


def refused(switch, greeting, error=WireError, words=""):
    with pytest.raises(error, match=words):
        connect(address(switch), Silent(), OPTIONS, hello=greeting, language=m.LANGUAGE)
    assert not switch.jobs and not switch.quota.used_slots


class Silent(Receiver):
    def room(self, kind, header, nbytes):
        return memoryview(bytearray(nbytes))

    def arrived(self, kind, header, payload):
        pass

    def lost(self, error):
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"children": 0}, "fan-in end: Expected `int` >= 1"),
        ({"children": 65}, "<= 64"),
        ({"slots": 0}, ">= 1"),
        ({"slots": 1 << 20}, "<= 65536"),
        ({"nonce": b"short"}, "length >= 16"),
        ({"child": -1}, ">= 0"),
        ({"job": 1 << 40}, "<= 4294967295"),
        ({"first": 65535}, "the first child's number 65535 exceeds 655"),
        ({"parent": (HOST, 0)}, ">= 1"),
        ({"parent": ("no such host.invalid", 5)}, "no such host"),
        ({"port": 1}, "asks for port 1, but this switch has"),
        ({"session": 5}, "invalid greeting of a fan-in end"),
    ],
)
def test_wrong_greetings_are_refused(switches, changes, words):
    refused(switches(), hello(None, **changes), words=words)


# Rule 8
def test_peers_other_than_a_fan_in_end_are_refused(switches):
    switch = switches()
    worker = m.encode(m.Hello("s", 0, 1, 1, 0, "x"))
    refused(switch, worker, words="is a switch: it sums and copies packets")
    refused(
        switch,
        switch_frames.SWITCH_GREETING + b"\xff\xff",
        words="invalid greeting of a fan-in end",
    )
    other = TcpOptions(token=b"the token of somebody else")
    with pytest.raises(AuthError):
        connect(address(switch), Silent(), other, hello=hello(None), language=m.LANGUAGE)


def test_a_server_listed_as_a_switch_is_reported(tmp_path):  # Rule 6
    with serve.SessionHost((HOST, 0), tmp_path, 64 * MIB, OPTIONS, [].append) as server:
        where = server.where.rpartition(":")
        with pytest.raises(
            WireError, match=f"{server.where} is a server with a store, not a switch"
        ):
            connect(
                (where[0], int(where[2])),
                Silent(),
                OPTIONS,
                hello=hello(None),
                language=m.LANGUAGE,
            )


def test_a_port_of_another_job_is_refused(switches, peers):
    switch = switches()
    end, _ = job(peers, switch, 2)
    other = peers(End(8))
    with pytest.raises(BusyError, match=f"port {end.port} of this switch is in use by job job7"):
        other.register(address(switch), 2, port=end.port)


def test_a_busy_port_can_be_requested_again(switches, peers):
    """The job's own socket may be about to close, or another process may release the port."""
    switch = switches()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as occupied:
        occupied.bind((HOST, switch.port + 1))
        end = peers(End(7))
        with pytest.raises(
            BusyError, match=f"cannot open a UDP socket at {HOST}:{switch.port + 1}"
        ):
            end.register(address(switch), 2, port=switch.port + 1)
        assert not switch.quota.used_slots
    assert end.register(address(switch), 2, port=switch.port + 1) == switch.port + 1


def test_misdirected_packets_change_nothing(switches, peers):
    """They have the job's tag but an unknown child number, or the parent's role but not its
    address."""
    switch = switches()
    end, workers = job(peers, switch, 2)
    pumped([end, *workers], lambda: False, 0.05)
    (of_switch,) = switch.jobs
    wrong = peers(Worker(end.key, end.job, 9, 9, (HOST, end.port)))
    wrong.socket.send(wrong.packets(range(2)), PACKET_NBYTES, wrong.to[0])
    wrong.beat()
    trial = wrong.packets(range(1), Kind.TRIAL)
    wrong.socket.send(trial, PACKET_NBYTES, wrong.to[0])
    assert pumped([end, *workers], lambda: of_switch.counters.refused == 2)
    assert of_switch.table.counters["mismatched"] == 2
    assert wrong.where not in of_switch.children.addresses
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as elsewhere:
        elsewhere.bind(("127.0.0.2", 0))
        elsewhere.sendto(end.packets(range(1)).tobytes(), (HOST, end.port))
    assert pumped([end, *workers], lambda: of_switch.counters.refused == 3)
    words = f"from 127.0.0.2, because the address of the parent is {HOST}"
    assert pumped([end, *workers], lambda: any(words in x for x in switches.lines))  # Rule 6
    assert of_switch.counters.copied == 0 or not workers[0].got
    run(end, workers, 100)


# Rule 8
def test_a_replayed_heartbeat_does_not_move_a_child(switches, peers):
    switch = switches()
    end, workers = job(peers, switch, 2)
    run(end, workers, 50)
    (of_switch,) = switch.jobs
    beat = workers[0].receiver.heartbeat()
    assert pumped([end, *workers], lambda: of_switch.children.merged == beat)
    recorded = beat_packet(end.key, end.job, Kind.PARAMETER_BEAT, beat, sender=0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
        attacker.bind((HOST, 0))
        before = of_switch.counters.refused
        attacker.sendto(recorded.tobytes(), (HOST, end.port))
        assert pumped([end, *workers], lambda: of_switch.counters.refused == before + 1)
        assert attacker.getsockname() not in of_switch.children.addresses
    assert workers[0].where in of_switch.children.addresses
    run(end, workers, 100)


def test_a_failure_in_a_job_ends_that_job_alone(switches, peers, monkeypatch):
    switch = switches()
    end, workers = job(peers, switch, 2, 7)
    broken, others = job(peers, switch, 2, 8)
    run(broken, others, 20)

    def fails(*_):
        raise ZeroDivisionError("of this job")

    monkeypatch.setattr(switch.jobs[1], "take", fails)
    others[0].beat()
    assert pumped([broken, *others], lambda: broken.links[0][1].over is not None)
    assert "ZeroDivisionError: of this job" in broken.links[0][1].failed
    assert [of_switch.name for of_switch in switch.jobs] == ["job7"]
    assert switch.quota.used_slots == WINDOW
    words = "job job8 has ended: this switch failed: ZeroDivision"
    assert pumped([end, *workers], lambda: any(words in x for x in switches.lines))
    run(end, workers, 100)


# Rule 5
def test_a_job_that_cannot_send_does_not_stop_another_job(switches, peers, monkeypatch):
    switch = switches()
    slow, children = job(peers, switch, 2, 7)
    calm, others = job(peers, switch, 2, 8)
    run(slow, children, 50)
    of_switch = switch.jobs[0]
    monkeypatch.setattr(of_switch.socket, "has_room", lambda: False)
    for peer in (slow, *children):
        peer.sender.may_send(150)
    assert pumped([slow, *children], lambda: of_switch.out.waits)
    run(calm, others, 100)
    assert pumped([slow, *children], lambda: of_switch.out.given_up > 0, 5.0)
    assert "not sent" in status(switch)
    monkeypatch.undo()
    run(slow, children, 150)


def test_memory_is_bounded_under_stuck_slots(switches, peers):
    """Rule 4: every granted slot stays partial, and more numbers arrive."""
    switch = switches()
    end, workers = job(peers, switch, 2)
    worker = workers[0]
    used, table = switch.quota.used_nbytes, switch.jobs[0].table.nbytes
    (of_switch,) = switch.jobs
    for at in range(0, 1024, 32):
        worker.socket.send(worker.packets(range(at, at + 32)), PACKET_NBYTES, worker.to[0])
        assert pumped([], lambda count=at + 32: of_switch.table.counters["added"] == count)
    answer = status_matching(switch, f"stuck slots: {WINDOW},", [end, *workers])
    assert "..." in answer
    assert (switch.quota.used_nbytes, switch.jobs[0].table.nbytes) == (used, table)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"switch": True, "store": "/tmp/x"}, "--switch cannot be combined with --store"),
        ({"switch": True, "sum": True}, "--switch cannot be combined with --sum"),
        ({"switch": True, "snapshot": "/tmp/x"}, "--switch cannot be combined with --snapshot"),
        ({"switch": True, "budget": "1GiB"}, "--switch cannot be combined with --budget"),
        ({"switch": True, "link": "rdma"}, "--switch cannot be combined with --link rdma"),
        ({"sum": True, "memory": "64MiB"}, "--memory 64MiB without --switch"),
        ({"sum": True, "xdp": "eth0"}, "--xdp eth0 without --switch"),
        ({"switch": True, "memory": "64KiB"}, "64.0 KiB of memory"),
    ],
)
def test_contradictory_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        serve.command(f"{HOST}:0", **options)


def test_the_status_of_a_run_includes_its_switches(switches, peers, tmp_path, capsys):
    switch = switches()
    end, workers = job(peers, switch, 2)
    run(end, workers, 50)
    write_token(tmp_path / "token", TOKEN)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.toml").write_text(
        f"""
        [run]
        dir = "{tmp_path}/run"
        [model.config]
        model_type = "llama"
        [servers]
        addresses = ["127.0.0.1:1"]
        switches = ["{switch.where}"]
        token_file = "{tmp_path}/token"
        """
    )
    deadline, out = time.monotonic() + 20, ""
    with pumping([end, *workers]):
        # on a slow machine a sum was stuck or a worker silent until the next check of the switch
        while not re.search("stuck slots: none silent: none", out):
            assert time.monotonic() < deadline, out
            assert cli.main(["status", str(tmp_path / "run")]) == 1  # no server answers
            out = " ".join(capsys.readouterr().out.split())
    assert "server 0 does not answer" in out
    assert re.search(rf"switch 1 {switch.where}, 1 job.s., .* job job7: 64 slots, 2 children", out)
    assert "50 sums" in out
    switch.__exit__()
    assert cli.main(["status", str(tmp_path / "run")]) == 1
    assert "switch 1 does not answer" in " ".join(capsys.readouterr().out.split())


def test_the_command_prints_its_address_and_status(tmp_path, capsys, monkeypatch):
    """The commands of a user: serve --switch, then status."""
    write_token(tmp_path / "token", TOKEN)
    hosts = []

    class RecordedHost(SwitchHost):
        def __init__(self, *args):
            super().__init__(*args)
            hosts.append(self)

    monkeypatch.setattr(switch_command, "SwitchHost", RecordedHost)
    secret = ["--token-file", str(tmp_path / "token")]
    serve = ["serve", f"{HOST}:0", "--switch", "--memory", "32MiB", "--xdp", "no0", *secret]
    thread = threading.Thread(target=cli.main, args=(serve,))
    thread.start()
    try:
        assert pumped([], lambda: bool(hosts) and hasattr(hosts[0], "where"))
        assert cli.main(["status", hosts[0].where, *secret]) == 0
    finally:
        hosts[0].stop()
        thread.join()
    out = " ".join(capsys.readouterr().out.split())
    assert "no sums in the kernel on no0: " in out  # Rule 6
    assert f"summing and copying packets at {hosts[0].where}" in out
    assert re.search(r"switch 0 127.0.0.1:\d+, 0 job.s., 0 slots in use, \d+ free", out)


def test_sums_in_the_kernel_need_their_plugin(monkeypatch):
    monkeypatch.setattr(switch_command, "plugin_names", lambda group: [])
    with pytest.raises(ConfigError, match=r"--xdp eth0.*\n.*plugins/switch_offload"):
        serve.command(f"{HOST}:0", switch=True, xdp="eth0")
