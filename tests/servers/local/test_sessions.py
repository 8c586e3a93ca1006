"""State of a server after a session, whatever happened in it: the failure is reported, and the next
session is accepted (Rule 5). Also how workers wait for a store that takes long to create."""

import os
import queue
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import roadtrain
from roadtrain import Servers, retry
from roadtrain.errors import BusyError, DamagedError, LostError
from roadtrain.servers import connection, hosted_store, remote_servers, serve, server_session
from roadtrain.servers import frames as m
from roadtrain.servers.serve import SessionHost
from roadtrain.storage.file import FileTier
from roadtrain.transport.tcp import TcpOptions
from tests.support.models import Case, build, new_scaler, one_step
from tests.support.processes import Workers, free_port, losses


@pytest.fixture
def host(tmp_path):
    """Make servers that run in this process, so that tests can break them. `lines` holds the lines that
    a server printed."""
    servers = []

    def make(**options):
        lines = []
        server = SessionHost(
            ("127.0.0.1", 0), tmp_path / "store", 96 << 20, TcpOptions(), lines.append, **options
        )
        server.lines = lines
        thread = threading.Thread(target=server.run)
        thread.start()
        servers.append((server, thread))
        return server

    yield make
    for server, thread in servers:
        server.stop()
        thread.join()
        server.__exit__()


def wait_for(ready, what, seconds=30):
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.02)


def run(host, tmp_path, name, workers=1, steps=2, **options):
    home = tmp_path / name
    home.mkdir()
    return Workers(Case(), [host.where], home, steps, workers, session=name, **options)


def check_next_session_trains(host, tmp_path, name):
    """Check that another session is accepted and trains."""
    again = run(host, tmp_path, name, steps=4, retry_s=40)
    assert again.join() == [0], again.errors()


class Mute:
    """A link without a peer; it records the messages."""

    def __init__(self, peer="somebody"):
        self.peer, self.sent_messages = peer, []

    def send(self, kind, header, parts=(), sent=None, *, urgent=False):
        self.sent_messages.append((kind, m.header(kind, header)))

    def close(self): ...


def hello(rank, workers=2):
    return m.encode(("s", rank, workers, 1, 0, "signature"))


def test_a_refused_join_leaves_the_server_free(host, tmp_path, monkeypatch):
    server = host()

    def damaged(directory):
        raise DamagedError(f"{directory}/CURRENT: its checksum does not match")

    monkeypatch.setattr(hosted_store, "held_in", damaged)
    refused = run(server, tmp_path, "refused")
    assert refused.join() == [3]
    assert "CURRENT" in refused.errors()[0], refused.errors()
    wait_for(lambda: server.session is None, "the server to be free")
    monkeypatch.undo()
    check_next_session_trains(server, tmp_path, "again")


@pytest.mark.parametrize("where", ["create_part", "derive_server", "Server"])
def test_a_server_that_fails_while_it_opens(where, host, tmp_path, monkeypatch):
    """This includes errors from outside the package, such as a thread that cannot be started."""
    server, real = host(), getattr(server_session, where)

    def broken(*_, **__):
        monkeypatch.setattr(server_session, where, real)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server_session, where, broken)
    failing = run(server, tmp_path, "failing", workers=1, deadline_s=5)
    assert failing.join() == [3]
    assert "can't start new thread" in failing.errors()[0], failing.errors()
    check_next_session_trains(server, tmp_path, "again")


def test_a_stopped_worker_does_not_keep_the_server(host, tmp_path):
    server = host(silent_s=3)
    stopped = run(server, tmp_path, "stopped", steps=10_000)
    wait_for(lambda: len(losses(stopped.logs[0])) > 2, "some steps")
    (process,) = stopped.processes
    os.kill(process.pid, signal.SIGSTOP)
    try:
        check_next_session_trains(server, tmp_path, "again")
        assert any("worker 0 has been silent" in line for line in server.lines), server.lines
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert stopped.join() == [3]
    assert "silent" in stopped.errors()[0] or "LostError" in stopped.errors()[0]


def test_a_worker_that_joins_and_sends_nothing_does_not_keep_the_server(host, tmp_path):
    server = host(silent_s=2)
    server._accept(Mute(), hello(1))
    assert server.session is not None
    wait_for(lambda: server.lines, "word of the session's end")
    assert "worker 1 has been silent" in server.lines[0]
    assert server.session is None, "the server is free"


def test_a_server_that_was_stopped_itself_does_not_check_silence_at_once(monkeypatch):
    """It has not yet read the messages that arrived meanwhile, so all workers look silent."""
    now, looks, waits = [0.0], [], iter([1.0, 90.0, 1.0])

    class Ended:
        def get(self, timeout):
            if (seconds := next(waits, None)) is None:
                return  # stop
            now[0] += seconds
            raise queue.Empty

    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now[0]))
    session = SimpleNamespace(look=lambda silent_s: looks.append(now[0]))
    SessionHost.run(SimpleNamespace(_ended=Ended(), front=None, session=session, silent_s=60.0))
    assert looks == [1.0, 92.0]


def test_a_worker_that_is_busy_with_a_step_is_not_silent(host, tmp_path):
    server = host(silent_s=5)
    workers = run(server, tmp_path, "slow", steps=2, deadline_s=30)
    assert workers.join() == [0], workers.errors()
    served = connection.WorkerConnection(None, 0, Mute())
    served.last_seen -= 100
    assert served.silent_for(5) > 99
    served._handling = True  # the server handles a message of it
    assert served.silent_for(5) == 0
    served._handling, served._buffered = False, 1  # a frame of it is arriving
    assert served.silent_for(5) == 0 and served.silent_for(connection.COMING_S) == 0


@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_soon_reports_which_server_it_waits_for(host, monkeypatch, busy):
    """Rule 5. The line names the server, its address, the reason and how long it will retry."""
    for module in (retry, remote_servers):
        monkeypatch.setattr(module, "SAY_SOON_S", 0.2)
    if busy:
        server = host(silent_s=100)
        server._accept(Mute(), hello(1))
        where, why, error = server.where, "busy with a session of 2 worker", BusyError
    else:
        where, why, error = f"127.0.0.1:{free_port()}", "nothing listens there", LostError
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    lines = []
    with pytest.raises(error):
        roadtrain.place(model, optimizer, store=Servers([where], retry_s=2.0), report=lines.append)
    waiting = [line for line in lines if line.startswith("waiting")]
    assert len(waiting) == 1 and where in waiting[0] and why in waiting[0], lines
    assert re.search(r"(tried|[Rr]etrying) for another [12] s", waiting[0])
    if busy:
        server.session.tear_down(LostError("the test is over"))


@pytest.mark.alone
def test_a_worker_can_join_while_the_store_is_created(host):
    """Worker 1 joins at once while worker 0's store is created. It used to wait until the
    handshake's deadline and then fail."""
    server = host()
    first = server._accept(Mute(), hello(0))
    with server.store.storing():  # held while the store is created
        first.session._doing = "worker 0 to make the store"
        begin = time.monotonic()
        server._accept(other := Mute(), hello(1))
        assert time.monotonic() - begin < 1
        assert other.sent_messages[0][0] == m.WELCOME
        wait_for(
            lambda: any(kind == m.PROGRESS for kind, _ in other.sent_messages),
            "word of how far it is",
            5,
        )
        assert (
            "make the store"
            in next(fields for kind, fields in other.sent_messages if kind == m.PROGRESS)[0]
        )


def slow_filling(monkeypatch, seconds):
    """Each chunk takes so long more. Returns the moments at which that begins and ends."""
    real, moments = FileTier.write, []

    def write(self, chunk, part, *rest):
        if part == "record" and self.step < 0:
            moments.append(time.monotonic())
            time.sleep(seconds)
            moments.append(time.monotonic())
        real(self, chunk, part, *rest)

    monkeypatch.setattr(FileTier, "write", write)
    return moments


def test_workers_wait_while_the_store_is_filled(host, tmp_path, monkeypatch):
    """Filling takes longer than their deadline; the server reports its progress."""
    server = host()
    pauses = slow_filling(monkeypatch, 1.2)
    workers = run(server, tmp_path, "slow", workers=2, deadline_s=4, retry_s=0.5)
    assert workers.join() == [0, 0], workers.errors()
    assert pauses[-1] - pauses[0] > 4.5


def test_workers_end_at_their_deadline_without_progress(host, tmp_path, monkeypatch):  # Rule 5
    """The server is free again once its device answers."""
    server, go, real = host(), threading.Event(), server_session.create_part
    monkeypatch.setattr(
        server_session,
        "create_part",
        lambda *args, **options: (go.wait(60), real(*args, **options))[1],
    )
    workers = run(server, tmp_path, "hung", workers=2, deadline_s=3, retry_s=0)
    assert workers.join() == [3, 3]
    assert all("DeadlineError" in e or "LostError" in e for e in workers.errors()), workers.errors()
    assert any("DeadlineError: waited 3 s" in e for e in workers.errors()), workers.errors()
    go.set()
    check_next_session_trains(server, tmp_path, "again")


def test_a_worker_that_comes_when_the_others_have_left(host, tmp_path):  # Rule 5
    """All steps are done: worker 0 has nothing to do and leaves before worker 1 joins."""
    server = host()
    assert run(server, tmp_path, "first", workers=2).join() == [0, 0]
    late = run(server, tmp_path, "late", workers=2, changes={1: "late"})
    assert late.join() == [0, 0], late.errors()
    never = run(server, tmp_path, "never", workers=2, changes={1: "late"})
    never.processes[1].kill()
    never.processes[0].join(60)
    more = run(server, tmp_path, "more", workers=2, steps=4, retry_s=20)
    assert more.join() == [0, 0], more.errors()
    assert sum("its workers have left" in line for line in server.lines) == 1, server.lines


def test_a_session_without_workers_ends(host, tmp_path):
    server = host(silent_s=1)
    never = run(server, tmp_path, "never", workers=2, steps=0, changes={1: "late"})
    never.processes[1].kill()
    never.processes[0].join(60)
    wait_for(lambda: server.session is None, "the end of the session")
    assert "its workers have left" in server.lines[-1]


def test_the_transfers_of_a_link_are_counted(host):
    case = Case()
    model, optimizer = build(case)
    with roadtrain.place(model, optimizer, store=Servers([host().where])) as placed:
        lines = []
        for step in (1, 2):
            one_step(case, model, placed, new_scaler(case), step)
            lines.append(placed.metrics()["stages"]["Fetch"])
        (link,) = {i.lane for i in placed.session.stages.intervals() if i.lane.startswith("link")}
    blocks = placed.session.meta.table.blocks[1:]
    assert sum(f["bytes"] for f in lines) >= sum(block.pull_nbytes for block in blocks)
    assert all(0 < fetch["seconds"] < 60 for fetch in lines) and link.startswith(
        "link of worker 0 to server 0"
    )
