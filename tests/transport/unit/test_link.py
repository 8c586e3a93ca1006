"""The contract of a link (transport/link.py) for every transport: order, buffers, back-pressure,
close and loss."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import platform
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

import roadtrain_rdma as rdma
from roadtrain.errors import (
    AuthError,
    BusyError,
    ConfigError,
    DeadlineError,
    LostError,
    PeerError,
    RoadtrainError,
    WireError,
)
from roadtrain.lab.bad_link import Relay
from roadtrain.transport import handshake, local, shm, tcp
from roadtrain.transport import listener as listeners
from roadtrain.transport.link import HEAD_NBYTES, SUM, Head, pack_head, sealed
from roadtrain.units import KIB, MIB
from tests.support.ports import free_port

TOKEN = b"a secret of the job"
WAIT_S = 10.0
with_nixl = pytest.mark.skipif(  # on x86-64 it must be installed: a failed import fails the test
    importlib.util.find_spec("nixl_cu12") is None and platform.machine() != "x86_64",
    reason="no nixl: pip install ./plugins/rdma",
)
RDMA = pytest.param("rdma", marks=with_nixl)
KINDS = [
    "local",
    "local+sums",
    "shm",
    pytest.param("shm+bare", marks=pytest.mark.exhaustive),
    "tcp",
    "tcp+bare",
    "tcp+4",
    pytest.param("tcp+4+bare", marks=pytest.mark.exhaustive),
    "tcp+tls",
    pytest.param("tcp+4+tls", marks=pytest.mark.exhaustive),
    pytest.param("tcp+tls+sums", marks=pytest.mark.slow),
    RDMA,
    pytest.param("rdma+4+bare", marks=[with_nixl, pytest.mark.exhaustive]),
]  # bare: no checksums


def socket_options(kind: str, **options) -> tcp.TcpOptions:
    """Options of a link; RDMA uses UCX's TCP mode, as there is no RDMA hardware to test with."""
    if kind.startswith("rdma"):
        return rdma.RdmaOptions(device="lo", **options)
    return tcp.TcpOptions(**options)


class Recorder:
    """A Receiver that records its calls and lets a test wait for them."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes, bytes]] = []
        self.rooms: list[int] = []
        self.errors: list[PeerError] = []
        self.changed = threading.Condition()
        self.open = threading.Event()
        self.open.set()
        self.hook = lambda kind, header, payload: None

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        self.rooms.append(kind)
        assert self.open.wait(WAIT_S)
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self.hook(kind, header, payload)
        with self.changed:
            assert not self.errors, "a frame after lost"
            self.frames.append((kind, header, bytes(payload)))
            self.changed.notify_all()

    def lost(self, error: PeerError) -> None:
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()

    def wait_frames(self, n: int) -> list[tuple[int, bytes, bytes]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.frames) >= n or self.errors, WAIT_S), len(
                self.frames
            )
        assert len(self.frames) >= n, (len(self.frames), self.errors)
        return self.frames

    def wait_lost(self, timeout_s: float = WAIT_S) -> PeerError:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.errors), timeout_s)
        return self.errors[0]


class Ends:
    """Two connected links, `a` (the client) and `b`, and a Recorder of each."""

    def __init__(self, kind: str, folder: Path, **options) -> None:
        self.got_a, self.got_b, self.listener, self.reports = Recorder(), Recorder(), None, []
        words = kind.split("+")
        options = {
            "checksums": True if "sums" in words else False if "bare" in words else None,
            **options,
        }
        there = threading.Event()

        def accept(link, hello):
            self.b, self.hello = link, hello
            there.set()
            return self.got_b

        if words[0] == "local":
            self.a = local.connect(
                accept, self.got_a, handshake.Common(**options), hello=b"hello", name="b"
            )
        elif words[0] == "shm":
            made = handshake.Common(**options)
            self.listener = shm.listen(folder / "s", accept, made, self.reports.append)
            self.a = shm.connect(folder / "s", self.got_a, made, hello=b"hello", name="b")
        else:
            both = {"token": TOKEN, "connections": 4 if "4" in words else 1, **options}
            ours, theirs = tls_options(folder) if "tls" in words else (None, None)
            listening = socket_options(words[0], tls=theirs, **both)
            self.listener = tcp.listen(("127.0.0.1", 0), accept, listening, self.reports.append)
            made = socket_options(words[0], tls=ours, **both)
            self.a = tcp.connect(self.listener.address, self.got_a, made, hello=b"hello", name="b")
        assert there.wait(WAIT_S)
        assert self.hello == b"hello"

    def close(self) -> None:
        for got in (self.got_a, self.got_b):
            got.open.set()
        self.a.close()
        self.b.close()
        if self.listener is not None:
            self.listener.close()
        assert not self.reports, self.reports


def tls_options(folder: Path) -> tuple[tcp.Tls, tcp.Tls]:
    """TLS options of a client and a server that share a self-signed certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt install openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    if not cert.exists():
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-keyout",
                key,
                "-out",
                cert,
                "-days",
                "2",
                "-subj",
                "/CN=roadtrain test",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
            ],
            check=True,
            capture_output=True,
        )
    return tcp.Tls(cert, key, cert), tcp.Tls(cert, key, cert)


def descriptors() -> dict[str, str]:
    out = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            out[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return out


@pytest.fixture(autouse=True)
def nothing_is_left():
    threads, files = set(threading.enumerate()), descriptors()
    yield
    deadline = time.monotonic() + WAIT_S
    while True:
        left = [thread.name for thread in threading.enumerate() if thread not in threads]
        new = {fd: name for fd, name in descriptors().items() if files.get(fd) != name}
        if not left and not new:
            return
        assert time.monotonic() < deadline, (left, new)
        time.sleep(0.01)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("link")


@pytest.fixture(scope="session")
def port() -> int:
    """A free port, reserved by a lock until the process ends."""
    return free_port()


@pytest.fixture(params=KINDS)
def ends(request, folder):
    made = Ends(request.param, folder)
    yield made
    made.close()


@pytest.mark.slow
def test_order_sizes_and_parts(ends):
    pick, sent = random.Random(0), []
    for i in range(300):
        data = pick.randbytes(pick.choice([0, 1, 100, 5000, 70_000, 400_000]))
        cuts = sorted(pick.randrange(len(data) + 1) for _ in range(pick.randrange(4)))
        parts = [memoryview(data)[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
        header = pick.randbytes(pick.choice([0, 3, 200, 20_000]))
        sent.append((i, header, data))
        ends.a.send(i, header, parts)
    assert ends.got_b.wait_frames(300) == sent
    # in order, and only for frames with a payload
    assert ends.got_b.rooms == [kind for kind, _, data in sent if data]


@pytest.mark.slow
def test_small_frames_in_great_number(ends):
    for i in range(5000):
        ends.a.send(i % 7, i.to_bytes(4, "little"), [memoryview(b"xy")] if i % 3 else [])
    frames = ends.got_b.wait_frames(5000)
    assert [int.from_bytes(header, "little") for _, header, _ in frames] == list(range(5000))


@pytest.mark.slow
def test_a_big_payload_of_many_parts_and_types(ends):
    data = memoryview(random.Random(1).randbytes(24 * MIB))
    ends.a.send(1, b"", [data[i : i + 8 * KIB].cast("d") for i in range(0, len(data), 8 * KIB)])
    assert ends.got_b.wait_frames(1)[0][2] == data


@pytest.mark.slow
def test_sent_is_called_once_when_the_buffer_is_free(ends):
    buffer, calls = bytearray(300 * KIB), []
    for i in range(20):
        free = threading.Event()
        buffer[:] = bytes([i]) * len(buffer)
        ends.a.send(
            i, b"", [memoryview(buffer)], lambda i=i, free=free: (calls.append(i), free.set())
        )
        assert free.wait(WAIT_S)
    frames = ends.got_b.wait_frames(20)
    assert calls == list(range(20))
    assert all(payload == bytes([kind]) * len(buffer) for kind, _, payload in frames)


@pytest.mark.slow
def test_back_pressure_holds_the_sender_not_its_caller(ends):
    ends.got_b.open.clear()
    data, calls, begin = memoryview(bytes(MIB)), [], time.monotonic()
    for i in range(60):
        ends.a.send(i, b"", [data], lambda: calls.append(1))
    assert time.monotonic() - begin < WAIT_S / 2  # a blocked caller would wait for WAIT_S
    time.sleep(0.3)
    assert len(calls) < 60
    assert not ends.got_b.frames
    ends.b.send(1, b"the other way is open")
    assert ends.got_a.wait_frames(1)
    ends.got_b.open.set()
    assert [kind for kind, _, _ in ends.got_b.wait_frames(60)] == list(range(60))
    ends.a.close()
    assert len(calls) == 60


@pytest.mark.slow
def test_urgent_frames_overtake_frames_not_yet_being_sent(ends):
    ends.got_b.open.clear()  # the receiver has no room for the first frame yet, so little is sent
    freed, before = [], 0
    for i in range(40):
        ends.a.send(1, b"%d" % i, [memoryview(bytes(4 * MIB))], lambda: freed.append(1))
    while not ends.got_b.rooms or len(freed) > before:  # until nothing more is sent
        before = len(freed)
        time.sleep(0.1)
    for i in range(3):
        ends.a.send(2, b"%d" % i, urgent=True)
    ends.got_b.open.set()
    frames = ends.got_b.wait_frames(43)
    kinds = [kind for kind, _, _ in frames]
    assert kinds.index(2) < 25 and kinds[kinds.index(2) :][:3] == [2] * 3
    assert [int(header) for kind, header, _ in frames if kind == 1] == list(range(40))
    assert [int(header) for kind, header, _ in frames if kind == 2] == list(range(3))


@pytest.mark.slow
def test_parts_that_are_frames_of_their_own_are_taken_one_by_one(ends):
    """They arrive in order, an urgent frame goes between them, and `sent` is called once."""
    ends.got_b.open.clear()
    asked, calls = [], []

    def parts():
        for i in range(40):
            asked.append(i)
            yield memoryview(bytes([i]) * 4 * MIB)

    ends.a.send(1, b"many", parts(), lambda: calls.append(1), each=True)
    ends.a.send(2, b"after")
    while not ends.got_b.rooms:
        time.sleep(0.1)
    time.sleep(0.3)
    assert len(asked) < 25 and not calls, "parts are taken when their turn comes"
    ends.a.send(3, b"urgent", urgent=True)
    ends.got_b.open.set()
    frames = ends.got_b.wait_frames(42)
    kinds = [kind for kind, _, _ in frames]
    assert kinds.index(3) < 30 and kinds[-1] == 2
    data = [(header, payload[0], len(payload)) for kind, header, payload in frames if kind == 1]
    assert data == [(b"many", i, 4 * MIB) for i in range(40)]
    ends.a.close()
    assert calls == [1]


@pytest.mark.slow
def test_the_parts_of_a_lost_link_are_returned_once(ends):
    ends.got_b.open.clear()
    calls = []
    ends.a.send(1, b"", iter([memoryview(bytes(MIB))] * 60), lambda: calls.append(1), each=True)
    ends.got_a.hook = lambda kind, header, payload: 1 / 0
    ends.b.send(2, b"")
    assert "division" in str(ends.got_a.wait_lost())
    ends.got_b.open.set()
    deadline = time.monotonic() + WAIT_S
    while not calls and time.monotonic() < deadline:
        time.sleep(0.01)
    ends.a.close()
    assert calls == [1]


@pytest.mark.slow
def test_a_slow_connection_keeps_little_in_kernel_buffers():
    """Including pieces so small that the kernel accepts each at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()

    def read():
        with contextlib.suppress(OSError):
            while theirs.recv(64 * KIB):
                time.sleep(0.01)

    threading.Thread(target=read, daemon=True).start()
    with ours, theirs:
        channel, until = tcp._TcpChannel(ours, 10.0), time.monotonic() + 5
        while not (limit := ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)):
            channel.send([bytes(64 * KIB)])
            assert time.monotonic() < until
        assert limit == tcp.UNSENT


@pytest.mark.slow
def test_a_flood_both_ways_with_answers(ends):
    data = memoryview(bytes(200 * KIB))
    ends.got_b.hook = lambda kind, header, payload: (
        ends.b.send(kind, b"answer", [data]) if kind else None
    )
    ends.got_a.hook = lambda kind, header, payload: (
        ends.a.send(0, b"thanks") if header == b"answer" else None
    )
    for _ in range(100):
        ends.a.send(1, b"", [data])
        ends.b.send(2, b"", [data])
    ends.got_a.wait_frames(200)
    ends.got_b.wait_frames(200)


@pytest.mark.slow
def test_close_sends_queued_frames(ends):
    data, calls = memoryview(bytes(MIB)), []
    for i in range(40):
        ends.a.send(i, b"", [data], lambda: calls.append(1))
    ends.a.close()
    assert len(calls) == 40
    assert [kind for kind, _, _ in ends.got_b.wait_frames(40)] == list(range(40))
    assert "closed by peer" in str(ends.got_b.wait_lost())
    assert ends.a.peer in ("b",) or ends.a.peer.startswith("b (")
    assert not ends.got_a.errors
    for link in (ends.a, ends.b):
        with pytest.raises(LostError, match="closed"):
            link.send(1, b"")
    ends.a.close()


@pytest.mark.slow
def test_both_close_at_once(ends):
    for i in range(20):
        ends.a.send(i, b"", [memoryview(bytes(MIB))])
        ends.b.send(i, b"", [memoryview(bytes(MIB))])
    other, begin = threading.Thread(target=ends.b.close), time.monotonic()
    other.start()
    ends.a.close()
    other.join()
    assert time.monotonic() - begin < 4


@pytest.mark.slow
def test_close_from_a_thread_of_the_link(ends):
    ends.got_b.hook = lambda kind, header, payload: ends.b.close()
    ends.a.send(1, b"")
    assert "closed by peer" in str(ends.got_a.wait_lost())
    assert not ends.got_b.errors


@pytest.mark.slow
def test_an_error_in_the_receiver_ends_the_link_with_that_error(ends):
    def fail(kind, header, payload):
        raise WireError("kind 1 is not known here")

    ends.got_b.hook, calls = fail, []
    ends.got_a.open.clear()
    ends.a.send(1, b"")
    assert "kind 1 is not known" in str(ends.got_b.wait_lost())
    ends.got_a.wait_lost()
    with pytest.raises(LostError):
        ends.a.send(1, b"", [memoryview(b"x")], lambda: calls.append(1))
    assert not calls


@pytest.mark.slow
def test_queued_buffers_are_returned_when_the_link_is_lost(ends):
    ends.got_b.open.clear()
    calls = []
    for i in range(60):
        ends.a.send(i, b"", [memoryview(bytes(MIB))], lambda i=i: calls.append(i))
    ends.b.send(1, b"", [memoryview(b"x")])
    ends.got_a.hook = lambda kind, header, payload: 1 / 0
    ends.b.send(2, b"")
    assert "division" in str(ends.got_a.wait_lost())
    ends.got_b.open.set()
    deadline = time.monotonic() + WAIT_S
    while len(calls) < 60 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(calls) == list(range(60))


@pytest.mark.parametrize("kind", ["local", "shm", "tcp", RDMA])
def test_a_frame_over_the_limit_is_refused_where_it_is_sent(kind, folder):
    ends = Ends(kind, folder, frame_limit=MIB)
    with pytest.raises(WireError, match=rf"{MIB + 1} bytes exceeds the limit of {MIB}"):
        ends.a.send(1, b"", [memoryview(bytes(MIB)), memoryview(b"x")])
    with pytest.raises(WireError, match="a header has 65537 bytes; the limit is 65536"):
        ends.a.send(1, bytes(65537))
    ends.a.send(2, bytes(65536), [memoryview(bytes(MIB))])
    assert len(ends.got_b.wait_frames(1)[0][2]) == MIB
    ends.close()


def listen_on(kind: str, folder: Path, accept, report=print, port=0, **options):
    if kind == "shm":
        return (
            shm.listen(folder / "s", accept, handshake.Common(**options), report),
            shm.connect,
            handshake.Common(**options),
        )
    made = socket_options(kind, token=TOKEN, connections=4 if kind == "tcp+4" else 1, **options)
    return tcp.listen(("127.0.0.1", port), accept, made, report), tcp.connect, made


@pytest.mark.parametrize("kind", ["shm", "tcp", "tcp+4", RDMA])
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.slow
def test_a_killed_peer_is_lost_within_a_second(kind, busy, folder):
    """On a busy machine this may take several tries."""
    tries = []
    while not tries or tries[-1] >= 1:
        assert len(tries) < 3, tries
        tries.append(seconds_to_lose_a_killed_peer(kind, busy, folder))


def seconds_to_lose_a_killed_peer(kind, busy, folder) -> float:
    got, there = Recorder(), threading.Event()

    def accept(link, hello):
        got.link = link
        there.set()
        return got

    listener, connect, options = listen_on(kind, folder, accept)
    child = os.fork()
    if child == 0:  # connects only; os._exit, so that the child runs no cleanup of the test run
        try:
            link = connect(listener.address, Recorder(), options)
            while busy:
                link.send(1, b"", [memoryview(bytes(MIB))])
                time.sleep(0.001)
            time.sleep(60)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)
    try:
        assert there.wait(WAIT_S)
        if busy:
            got.wait_frames(20)
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        begin = time.monotonic()
        error = got.wait_lost()
        seconds = time.monotonic() - begin
        assert isinstance(error, LostError)
        assert got.link.peer in str(error)
        with pytest.raises(LostError):
            got.link.send(1, b"")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        got.link.close()
        listener.close()
    # and nothing else killed the child
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return seconds


@pytest.mark.parametrize("kind", ["shm", "tcp", "tcp+4", RDMA])
def test_accept_may_refuse_with_words_that_the_client_gets(kind, folder):
    answers = [
        WireError("step 3 is needed, this is step 5"),
        AuthError("not of this job"),
        ValueError("a bug"),
        BusyError("busy with another start"),
        WireError("a long story: " + 9000 * "x"),
    ]

    def accept(link, hello):
        link.send(1, b"never sent")
        raise answers[int(hello)]

    reports: list[str] = []
    listener, connect, options = listen_on(kind, folder, accept, reports.append)
    with pytest.raises(WireError, match="step 3 is needed, this is step 5"):
        connect(listener.address, Recorder(), options, hello=b"0")
    with pytest.raises(AuthError, match="not of this job"):
        connect(listener.address, Recorder(), options, hello=b"1")
    with pytest.raises(WireError, match="the server failed"):
        connect(listener.address, Recorder(), options, hello=b"2")
    with pytest.raises(WireError, match="65537 bytes; the limit is 65536"):
        connect(listener.address, Recorder(), options, hello=bytes(65537))
    with pytest.raises(BusyError, match="busy with another start"):
        connect(listener.address, Recorder(), options, hello=b"3")
    with pytest.raises(WireError, match=r"a long story: x{2000}"):
        connect(listener.address, Recorder(), options, hello=b"4")
    listener.close()
    assert len(reports) >= 5


@pytest.mark.parametrize("kind", ["shm", "tcp", RDMA])
@pytest.mark.slow
def test_connect_fails_without_a_listener_and_waits_for_a_late_one(kind, folder, port):
    listener, connect, options = listen_on(kind, folder, lambda link, hello: Recorder(), port=port)
    listener.close()
    begin = time.monotonic()
    with pytest.raises(LostError):
        connect(listener.address, Recorder(), options)
    assert time.monotonic() - begin < options.handshake_s / 2
    again: list = []

    def later() -> None:
        time.sleep(0.3)
        if kind == "shm":
            again.append(shm.listen(listener.address, lambda link, hello: Recorder(), options))
        else:
            again.append(tcp.listen(listener.address, lambda link, hello: Recorder(), options))

    thread = threading.Thread(target=later)
    thread.start()
    patient = type(options)(**{**options.__dict__, "retry_s": 5.0})
    link = connect(listener.address, Recorder(), patient)
    thread.join()
    link.close()
    again[0].close()


def test_the_socket_of_a_dead_process_is_replaced_but_not_that_of_a_live_process(folder):
    path = folder / "left"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    listener = shm.listen(path, lambda link, hello: Recorder())
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="in use"):
        shm.listen(path, lambda link, hello: Recorder())
    listener.close()
    assert not path.exists()


# Strangers, and features of TCP alone


@pytest.fixture
def server():
    with serving(handshake_s=10.0) as made:
        yield made


@contextlib.contextmanager
def serving(handshake_s: float):
    """Yield (listener, reports), with a link that the test must not disturb."""
    reports: list[str] = []
    got = Recorder()
    made: list = []

    def accept(link, hello):
        made.append(link)
        return got if len(made) == 1 else Recorder()

    options = tcp.TcpOptions(token=TOKEN, handshake_s=handshake_s)
    listener = tcp.listen(("127.0.0.1", 0), accept, options, reports.append)
    friend = tcp.connect(listener.address, Recorder(), options)
    until = time.monotonic() + WAIT_S
    while greeting_threads():
        assert time.monotonic() < until  # until then the link counts as not yet greeted
        time.sleep(0.001)
    yield listener, reports
    friend.send(5, b"still here")
    assert got.wait_frames(1)[0] == (5, b"still here", b"")
    friend.close()
    listener.close()
    for link in made:
        link.close()


def greeting_threads() -> int:
    """Number of handshakes in progress in this process."""
    return sum(thread.name.startswith("greet") for thread in threading.enumerate())


def stranger(listener, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(listener.address)
    sock.settimeout(5)
    sock.sendall(data)
    return sock


@pytest.mark.parametrize("nbytes", [0, 1])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_peer_that_dies_in_the_handshake_is_named_with_the_missing_message(kind, nbytes, folder):
    """The socket is closed with unread bytes, as when a process ends: the kernel resets the
    connection."""
    family, address = (
        (socket.AF_UNIX, str(folder / "dies"))
        if kind == "shm"
        else (socket.AF_INET, ("127.0.0.1", 0))
    )
    with socket.socket(family) as server:
        server.bind(address)
        server.listen(1)

        def die():
            sock, _ = server.accept()
            with sock:
                sock.recv(nbytes) if nbytes else select.select([sock], [], [], WAIT_S)

        dying = threading.Thread(target=die)
        dying.start()
        with pytest.raises(LostError, match=r"server 1 \(.*: .*while waiting for"):
            if kind == "shm":
                shm.connect(address, Recorder(), handshake.Common(retry_s=0), name="server 1")
            else:
                tcp.connect(
                    server.getsockname(),
                    Recorder(),
                    tcp.TcpOptions(token=TOKEN, retry_s=0),
                    name="server 1",
                )
        dying.join()
    (folder / "dies").unlink(missing_ok=True)


def wait_report(reports: list[str], word: str) -> None:
    deadline = time.monotonic() + 5
    while not any(word in line for line in reports):
        assert time.monotonic() < deadline, reports
        time.sleep(0.01)
    assert all("\n" not in line for line in reports)


@pytest.mark.parametrize("token", [b"another token of a job", None])
def test_a_wrong_token_or_none_is_refused_on_both_sides(server, token):
    listener, reports = server
    words = "token does not match" if token else "this side has no token, but the peer has one"
    with pytest.raises(AuthError, match=words):
        tcp.connect(listener.address, Recorder(), tcp.TcpOptions(token=token))
    wait_report(reports, "token")


def test_a_server_that_cannot_prove_the_token_is_not_believed():
    options = tcp.TcpOptions(token=TOKEN)
    pretender = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        sock, _ = pretender.accept()
        handshake.receive(sock, handshake.GREETING.size + 8, time.monotonic() + 5, "")
        sock.sendall(sealed(handshake.GREETING.pack(*handshake.greeting(options, TOKEN, b""))))
        handshake.receive(sock, handshake.PROOF.size + 8, time.monotonic() + 5, "")
        handshake.accept(
            sock, handshake.OpenHandshake(None, b"another token", b""), time.monotonic() + 5
        )
        sock.close()

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(AuthError, match="did not prove that it has the token"):
        tcp.connect(pretender.getsockname(), Recorder(), options)
    thread.join()
    pretender.close()


@pytest.mark.parametrize(("number", "connections"), [(0, 65), (0, 65535), (64, 64), (2, 2), (0, 0)])
def test_no_link_of_too_many_connections_before_the_token_is_proven(server, number, connections):
    """A peer without the token is refused after its greeting, long before the deadline, whatever
    number of connections it announces. Rule 8."""
    listener, reports = server
    ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16), number, connections)
    sock = stranger(listener, sealed(handshake.GREETING.pack(*ours)))
    until = time.monotonic() + WAIT_S
    handshake.receive(sock, handshake.GREETING.size + SUM.size, until, "")
    assert sock.recv(1) == b""
    sock.close()
    wait_report(
        reports,
        f"connection {number} (counted from 0) of a link with {connections} connections; the limit",
    )


def test_no_hello_of_any_size_before_the_token_is_proven(server):  # Rule 8
    listener, reports = server
    ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16))._replace(hello_nbytes=65537)
    sock = stranger(listener, sealed(handshake.GREETING.pack(*ours)))
    handshake.receive(sock, handshake.GREETING.size + SUM.size, time.monotonic() + WAIT_S, "")
    assert sock.recv(1) == b""
    sock.close()
    wait_report(reports, "the client's hello message has 65537 bytes; the limit is 65536")


def test_a_hello_changed_in_transit_is_refused(server):
    listener, reports = server
    ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16), hello=b"hello")
    sock = stranger(listener)
    handshake.client_greet(sock, ours, TOKEN, b"jello", time.monotonic() + WAIT_S)
    assert sock.recv(1) == b""
    sock.close()
    wait_report(reports, "hello message does not match its checksum")


def test_a_second_connection_with_the_same_number_is_refused(server):
    listener, reports = server
    until = time.monotonic() + WAIT_S
    socks = [stranger(listener) for _ in range(2)]
    for sock in socks:
        ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16), 0, 2)
        handshake.client_greet(sock, ours, TOKEN, b"", until)
    wait_report(reports, "opened connection 0 of the link twice")
    for sock in socks:
        sock.close()


def test_closing_a_listener_does_not_wait_for_missing_connections():
    listener = tcp.listen(
        ("127.0.0.1", 0),
        lambda link, hello: Recorder(),
        tcp.TcpOptions(token=TOKEN, handshake_s=60.0),
        lambda line: None,
    )
    sock = stranger(listener)
    ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16), 0, 2)
    handshake.client_greet(sock, ours, TOKEN, b"", time.monotonic() + WAIT_S)
    begin = time.monotonic()
    listener.close()
    assert time.monotonic() - begin < 10
    sock.close()


def test_a_completed_link_no_longer_counts_as_a_handshake():
    """The first of several connections waits only until the others have arrived."""
    options, made = tcp.TcpOptions(token=TOKEN, handshake_s=60.0, connections=3), []

    def accept(link, hello):
        made.append(link)
        return Recorder()

    listener = tcp.listen(("127.0.0.1", 0), accept, options)
    link, until = tcp.connect(listener.address, Recorder(), options), time.monotonic() + WAIT_S
    while greeting_threads():
        assert time.monotonic() < until
        time.sleep(0.01)
    link.close()
    made[0].close()
    listener.close()


def test_garbage_gets_no_answer(server):
    listener, reports = server
    sock = stranger(listener, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(100) == b""
    sock.close()
    wait_report(reports, "the client is not a roadtrain process: its first bytes are b'GET / HTTP")


@pytest.mark.slow
def test_a_peer_that_sends_byte_by_byte_is_cut_off_at_the_deadline():
    with serving(handshake_s=1.0) as (listener, reports):
        sock, begin = stranger(listener), time.monotonic()
        with contextlib.suppress(OSError):
            for byte in handshake.BEGINNING.pack(handshake.MAGIC, 2) + bytes(400):  # for 20 s
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - begin < 10
        sock.close()
        wait_report(reports, "timed out")


@pytest.mark.slow
def test_a_link_whose_other_connections_never_arrive_is_abandoned():
    with serving(handshake_s=1.0) as (listener, reports):
        sock, deadline = stranger(listener), time.monotonic() + 5
        ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16), 0, 2)
        handshake.client_greet(sock, ours, TOKEN, b"", deadline)
        assert sock.recv(1) == b""
        sock.close()
        wait_report(reports, "arrived in time")


@pytest.mark.slow
def test_many_strangers_do_not_keep_a_friend_out(server):
    listener, _ = server
    strangers = [stranger(listener) for _ in range(135)]
    link = tcp.connect(listener.address, Recorder(), tcp.TcpOptions(token=TOKEN))
    link.close()
    for sock in strangers:
        sock.close()


def test_another_version_is_named_on_both_sides(server):
    listener, reports = server
    ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16))._replace(version=9)
    sock = stranger(listener)
    with pytest.raises(WireError, match="has protocol version 2, but this side has 9"):
        handshake.client_greet(sock, ours, TOKEN, b"", time.monotonic() + 5)
    sock.close()
    wait_report(reports, "version 9, but this side has 2")


def test_checksums_must_be_the_same_on_both_sides(server):
    listener, reports = server
    with pytest.raises(WireError, match="side's checksums are off, but the peer's are on"):
        tcp.connect(listener.address, Recorder(), tcp.TcpOptions(token=TOKEN, checksums=False))
    wait_report(reports, "checksums")


def raw_client(**options) -> tuple[socket.socket, Recorder, object]:
    """A client that has completed the handshake and may send any bytes."""
    got = Recorder()

    def accept(link, hello):
        got.link = link
        return got

    made = tcp.TcpOptions(token=TOKEN, **options)
    listener = tcp.listen(("127.0.0.1", 0), accept, made)
    sock, deadline = socket.create_connection(listener.address), time.monotonic() + 5
    answer = handshake.client_greet(
        sock, handshake.greeting(made, TOKEN, bytes(16)), TOKEN, b"", deadline
    )
    handshake.client_verdict(sock, answer, deadline)
    return sock, got, listener


SPOILED = {
    "a cut head": (pack_head(Head(0, 1, 0, 0, 0, 0))[:20], LostError, "head of a frame: 20 of 52"),
    "a cut payload": (
        pack_head(Head(0, 1, 0, 1000, 0, 0)) + b"abc",
        LostError,
        "frame 0 .kind 1.: 3 of 1000",
    ),
    "a cut header": (pack_head(Head(0, 1, 10, 0, 0, 0)) + b"abc", LostError, "3 of 10"),
    "no goodbye": (b"", LostError, "without a goodbye"),
    "another magic": (b"GET " + bytes(HEAD_NBYTES), WireError, "begins with b'GET '"),
    "another version": (
        b"RTfr\7" + bytes(HEAD_NBYTES),
        WireError,
        "version 7, but this side has 2",
    ),
    "an unknown flag": (pack_head(Head(8, 1, 0, 0, 0, 0)), WireError, "flags 0x8"),
    "a checksum not agreed": (pack_head(Head(1, 1, 0, 0, 0, 0)), WireError, "checksums are off"),
    "a huge payload": (
        pack_head(Head(0, 1, 0, 1 << 60, 0, 0)),
        WireError,
        f"{1 << 60} bytes exceeds the limit of {64 * MIB}",
    ),
    "a huge header": (
        pack_head(Head(0, 1, 1 << 31, 0, 0, 0)),
        WireError,
        f"{1 << 31} bytes exceeds the limit of {64 * KIB}",
    ),
    "a frame left out": (
        pack_head(Head(0, 1, 0, 0, 1, 0)),
        WireError,
        "frame 0 is missing before frame 1",
    ),
    "a frame twice": (
        2 * pack_head(Head(0, 1, 0, 0, 0, 0)),
        WireError,
        "frame 0 was received twice",
    ),
    "a goodbye too early": (
        pack_head(Head(2, 0, 0, 0, 7, 0)),
        WireError,
        "counts 7 frames, but 0 arrived",
    ),
    "a goodbye with a payload": (
        pack_head(Head(2, 0, 0, 9, 0, 0)),
        WireError,
        "but has 9 bytes and kind 0",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_stream_ends_the_link_with_a_typed_error(what):
    data, kind, words = SPOILED[what]
    sock, got, listener = raw_client(checksums=False)
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    with pytest.raises(kind, match=words):
        raise got.wait_lost()
    assert got.link.peer in str(got.errors[0])
    sock.close()
    got.link.close()
    listener.close()


FRAMES = [(1, b"header", b"payload" * 30), (2, b"", b"x"), (3, b"alone", b""), (4, b"", b"")]


def conversation(
    address, options, listener_got: Recorder, made: list
) -> tuple[Recorder, list[Exception]]:
    """Connect, send FRAMES from both sides and close, without ever hanging.

    Returns:
        The client's Recorder, and the errors that either side got.
    """
    got, errors = Recorder(), []
    before = len(made)
    try:
        link = tcp.connect(address, got, options, hello=b"a hello of some bytes")
    except Exception as error:
        errors.append(error)
    else:
        for kind, header, payload in FRAMES:
            with contextlib.suppress(LostError):
                link.send(kind, header, [memoryview(payload)])
        with got.changed:
            assert got.changed.wait_for(
                lambda: len(got.frames) == len(FRAMES) or got.errors, WAIT_S
            ), "it hangs"
        with listener_got.changed:
            assert listener_got.changed.wait_for(
                lambda: len(listener_got.frames) == len(FRAMES) or listener_got.errors, WAIT_S
            ), "it hangs"
        link.close()
    for link in made[before:]:
        link.close()
    return got, [*errors, *got.errors, *listener_got.errors]


def flipped_everywhere(options: tcp.TcpOptions, folder: Path, step: int = 1) -> None:
    """Run a conversation for each byte on the wire, with one bit of that byte flipped."""
    reports: list[str] = []
    made: list = []
    there = Recorder()
    # In TLS 1.3 a record adds 22 bytes to its payload, and an alert of 24 bytes ends the
    # connection.
    goodbye = HEAD_NBYTES + (22 + 24 if options.tls else 0)

    def accept(link, hello):
        made.append(link)
        assert hello == b"a hello of some bytes"
        for kind, header, payload in FRAMES:
            link.send(kind, header, [memoryview(payload)])
        return there

    listener = tcp.listen(("127.0.0.1", 0), accept, options, reports.append)
    with Relay(listener.address) as relay:
        got, errors = conversation(relay.address, options, there, made)
        assert got.frames == there.frames == FRAMES and all(
            "closed by peer" in str(error) for error in errors
        )
        sent = dict(relay.nbytes)
    for way in ("there", "back"):
        for at in range(0, sent[way] - goodbye, step):  # another test covers the goodbye
            there = Recorder()
            with Relay(listener.address) as relay:
                relay.flip(at, way, at % 8)
                got, errors = conversation(relay.address, options, there, made)
            where = f"byte {at} of {sent[way]} {way}: {errors}"
            assert relay.flipped == 1, where
            for frames in (got.frames, there.frames):
                assert frames == FRAMES[: len(frames)], where
            found = [error for error in errors if "closed by peer" not in str(error)]
            assert found and all(isinstance(error, PeerError) for error in found), where
            assert all("127.0.0.1:" in str(error) for error in found), where
    listener.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("tcp", 3),
        ("tcp+tls", 61),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("tcp", 1), ("tcp+tls", 29))
        ),
    ],
)
def test_a_bit_that_flips_anywhere_is_a_typed_error_that_names_the_peer(kind, step, folder):
    """In lengths, headers, payloads and the handshake, in both directions. TLS detects it by
    itself."""
    tls = dataclasses.replace(tls_options(folder)[0]) if "tls" in kind else None
    options = tcp.TcpOptions(token=TOKEN, tls=tls, handshake_s=2.0, close_s=1.0)
    flipped_everywhere(options, folder, step)


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.slow
def test_a_bit_that_flips_in_a_goodbye_is_found(bit):
    goodbye = pack_head(Head(3, 0, 0, 0, 0))
    for at in range(len(goodbye)):
        sock, got, listener = raw_client()
        sock.sendall(goodbye[:at] + bytes([goodbye[at] ^ 1 << bit]) + goodbye[at + 1 :])
        assert isinstance(got.wait_lost(), WireError)
        sock.close()
        got.link.close()
        listener.close()


def test_no_length_is_used_before_its_checksum_is_checked():
    """Otherwise a flipped bit would wait for bytes that nobody sends, or request room for another
    frame."""
    good = pack_head(Head(1, 1, 6, 1000, 0, 1, 2))
    for at in range(8, 20):  # the two lengths
        sock, got, listener = raw_client()
        sock.sendall(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] + b"header")
        with pytest.raises(WireError, match="head of a frame does not match its checksum"):
            raise got.wait_lost()
        sock.close()
        got.link.close()
        listener.close()
    sock, got, listener = raw_client()
    sock.sendall(good + b"header" + bytes(1000))
    with pytest.raises(WireError, match=r"the header of frame 0 .* does not match its checksum"):
        raise got.wait_lost()
    assert not got.rooms
    sock.close()
    got.link.close()
    listener.close()


def test_a_bit_that_flips_in_shared_memory_is_found(folder):
    for at in (0, 60, 3000):
        ends = Ends("shm", folder)
        ring = ends.a._channels[0]._out
        write = ring._copy

        def spoil(view, into, write=write, ring=ring, at=at):
            begin = ring._here
            write(view, into)
            if begin <= at < ring._here:
                ring._data[at] ^= 16

        ring._copy = spoil
        ends.a.send(7, b"header", [memoryview(b"x" * 5000)])
        with pytest.raises(WireError, match=r"checksum|not a frame"):
            raise ends.got_b.wait_lost()
        assert not ends.got_b.frames
        ends.close()


@with_nixl
def test_a_bit_that_flips_on_an_rdma_link_is_found(folder):
    ends = Ends("rdma", folder)
    ends.a.send(7, b"")
    ends.got_b.wait_frames(1)
    channel = ends.b._channels[0]
    fetch = channel._fetch

    def spoil() -> bool:
        found = fetch()
        channel._fetched[len(channel._fetched) // 2] ^= 1
        return found

    channel._fetch = spoil  # the first is in progress
    for i in range(2):
        ends.a.send(7, b"header", [memoryview(b"x" * 5000)])
        if not i:
            ends.got_b.wait_frames(2)
    with pytest.raises(WireError, match="checksum"):
        raise ends.got_b.wait_lost()
    assert len(ends.got_b.frames) == 2
    ends.close()


@with_nixl
def test_a_bit_that_flips_in_the_description_of_a_ring_is_found(folder):
    ends = Ends("rdma", folder)
    counts = sealed(rdma.COUNTS.pack(1, 1))
    ends.a._channels[0]._tcp.send([counts[:8] + b"\5" + counts[9:]])
    with pytest.raises(WireError, match="its ring does not match its checksum"):
        raise ends.got_b.wait_lost()
    ends.close()


# The handshake


def run_handshake(
    client: handshake.Greeting, hello: bytes = b"", token: bytes = TOKEN, **server
) -> tuple:
    """Run both halves of a handshake over a socket pair. Returns (the server's findings, the
    client's answer or error)."""
    ours, theirs = socket.socketpair()
    until, found = time.monotonic() + 5, []

    def serve() -> None:
        with theirs:
            try:
                caller = handshake.server_greet(
                    theirs,
                    handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16)),
                    TOKEN,
                    until,
                    **server,
                )
                handshake.accept(theirs, caller, until)
                found.append(caller)
            except PeerError as error:
                found.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        try:
            answer = handshake.client_greet(ours, client, token, hello, until)
            handshake.client_verdict(ours, answer, until)
        except PeerError as error:
            answer = error
    thread.join()
    return found[0], answer


def test_the_proofs_cover_the_binding_of_the_channel():
    """A man in the middle with his own certificate forwards both sides' messages: the proof is not
    valid for his channel."""
    ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16))
    found, answer = run_handshake(ours)
    assert isinstance(found, handshake.OpenHandshake) and isinstance(
        answer, handshake.OpenHandshake
    )
    found, answer = run_handshake(ours, binding=b"of another certificate")
    assert isinstance(found, AuthError) and isinstance(answer, AuthError)


def test_the_binding_of_tls_is_the_certificate_that_the_server_showed(folder):
    _, tls = tls_options(folder)
    seen = []

    def accept(link, hello):
        return Recorder()

    options = tcp.TcpOptions(token=TOKEN, tls=tls)
    listener = tcp.listen(("127.0.0.1", 0), accept, options)
    plain = handshake.client_greet
    try:
        handshake_binding = tcp._binding
        tcp._binding = lambda sock: (seen.append(handshake_binding(sock)), seen[-1])[1]
        tcp.connect(listener.address, Recorder(), options).close()
    finally:
        tcp._binding = handshake_binding
    assert plain is handshake.client_greet and seen == [tls.binding()] and len(seen[0]) == 32
    listener.close()


VERDICT_NBYTES = handshake.VERDICT.size + SUM.size


def verdict_answer(change, error=None, *, summed=True):
    """Return the client's response to a verdict whose code, text or proof is changed in transit.
    summed: Recompute the text's checksum."""
    ours, theirs = socket.socketpair()
    until = time.monotonic() + 5

    def serve() -> None:
        theirs_greeting = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16))
        caller = handshake.server_greet(theirs, theirs_greeting, TOKEN, until)
        mine, its = socket.socketpair()
        with mine, its, theirs:
            if error is None:
                handshake.accept(mine, caller, until)
            else:
                handshake.refuse(mine, error, until, caller)
            raw = its.recv(1 << 16)
            code, _, text_sum, proof = handshake.VERDICT.unpack(raw[: handshake.VERDICT.size])
            code, text, proof = change(code, raw[VERDICT_NBYTES:], proof)
            if summed:
                text_sum = SUM.unpack(sealed(text)[-SUM.size :])[0]
            head = handshake.VERDICT.pack(code, len(text), text_sum, proof)
            theirs.sendall(sealed(head) + text)

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        try:
            greeting = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16))
            answer = handshake.client_greet(ours, greeting, TOKEN, b"", until)
            handshake.client_verdict(ours, answer, until)
        except PeerError as found:
            return found
        finally:
            thread.join()
    return None


def test_a_verdict_changed_in_transit_is_detected():
    seen = []
    assert (
        verdict_answer(lambda code, text, proof: (seen.append(proof), (code, text, proof))[1])
        is None
    )
    refusal = WireError("no room")
    same = verdict_answer(lambda *verdict: verdict, refusal)
    assert isinstance(same, WireError) and "no room" in str(same)
    changes = {
        "refused": (lambda code, text, proof: (handshake.REFUSED, text, proof), None),
        "taken": (lambda code, text, proof: (handshake.ACCEPTED, text, proof), refusal),
        "busy": (lambda code, text, proof: (handshake.BUSY, text, proof), refusal),
        "other words": (lambda code, text, proof: (code, b"go away", proof), refusal),
        "of another session": (lambda code, text, proof: (code, text, seen[0]), None),
    }
    for name, (change, error) in changes.items():
        found = verdict_answer(change, error)
        assert isinstance(found, AuthError) and "did not prove" in str(found), name
    flipped = verdict_answer(
        lambda code, text, proof: (code, b"go away", proof), refusal, summed=False
    )
    assert isinstance(flipped, WireError) and "checksum" in str(flipped), (
        "the error must not blame the token"
    )


def test_a_verdict_is_short_and_plain():
    """It may come from a stranger: only a bounded text is read, and no control character is
    shown."""

    def unproven(text):
        return verdict_answer(lambda code, _, proof: (handshake.NOT_PROVEN, text, proof))

    long = unproven(bytes(handshake.MAX_TEXT + 1))
    assert isinstance(long, WireError) and "2049 bytes; the limit is 2048" in str(long)
    shown = str(unproven(b"\x1b[2Jno\x07 token\xff"))
    assert "[2Jno token" in shown and shown.replace("\n", "").isprintable()


def test_each_side_proves_its_own_role():
    """A server's proof is not accepted as a client's proof of the same words."""
    answer = handshake.OpenHandshake(
        handshake.greeting(tcp.TcpOptions(), TOKEN, b""), TOKEN, b"said"
    )
    words = b"said" + bytes([handshake.ACCEPTED])
    assert handshake._prove_verdict(answer, handshake.ACCEPTED, b"") == handshake._prove(
        TOKEN, b"server", words
    )
    assert handshake._prove(TOKEN, b"server", words) != handshake._prove(TOKEN, b"client", words)


@pytest.mark.parametrize("limits", [(10, [20, 30]), (30, [20, 10]), (30, [10, 20]), (20, [30, 10])])
def test_the_smallest_limit_of_both_sides_counts(limits):
    ours, theirs = limits
    greetings = [handshake.greeting(tcp.TcpOptions(frame_limit=n), TOKEN, b"") for n in theirs]
    answers = [handshake.OpenHandshake(greeting, TOKEN, b"") for greeting in greetings]
    link = handshake.stream_between("the peer", tcp.TcpOptions(frame_limit=ours), answers)
    with pytest.raises(WireError, match="a payload of 11 bytes exceeds the limit of 10"):
        link.send(1, b"", [memoryview(bytes(11))])


def test_messages_of_another_edition_are_refused_with_a_sentence_on_both_sides():
    found, answer = run_handshake(
        handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16), language=b"another edition!")
    )
    for error in (found, answer):
        with pytest.raises(WireError, match=r"uses other messages .* another version of roadtrain"):
            raise error


FIRST_EDITION = struct.Struct("<8sH??HHQ16s32s")  # layout of its greeting


def test_the_first_edition_is_refused_with_a_sentence_on_both_sides(server):
    listener, reports = server
    sock = stranger(
        listener,
        FIRST_EDITION.pack(handshake.MAGIC, 1, True, False, 0, 1, MIB, bytes(16), bytes(32)),
    )
    raw = handshake.receive(sock, FIRST_EDITION.size, time.monotonic() + 5, "")
    # so that the old peer can report it
    assert FIRST_EDITION.unpack(raw)[:2] == (handshake.MAGIC, 2)
    sock.close()
    wait_report(reports, "the peer has protocol version 1, but this side has 2")
    old = socket.create_server(("127.0.0.1", 0))

    def first_edition() -> None:
        sock, _ = old.accept()
        sock.recv(FIRST_EDITION.size, socket.MSG_WAITALL)
        sock.sendall(
            FIRST_EDITION.pack(handshake.MAGIC, 1, True, False, 0, 1, MIB, bytes(16), bytes(32))
        )
        sock.close()

    thread = threading.Thread(target=first_edition)
    thread.start()
    with pytest.raises(WireError, match="has protocol version 1, but this side has 2"):
        tcp.connect(old.getsockname(), Recorder(), tcp.TcpOptions(token=TOKEN))
    thread.join()
    old.close()


def test_a_peer_that_echoes_our_messages_proves_nothing():
    """Reflection, even if the echoed greeting would be accepted."""
    ours, theirs = socket.socketpair()

    def reflect() -> None:
        with theirs, contextlib.suppress(OSError):
            while data := theirs.recv(4096):
                theirs.sendall(data)

    thread = threading.Thread(target=reflect)
    thread.start()
    until = time.monotonic() + 5
    with ours, pytest.raises(WireError, match="received its own greeting"):
        handshake.client_greet(
            ours, handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16)), TOKEN, b"", until
        )
    thread.join()


def test_a_replayed_proof_is_refused(server):
    """The same bytes are sent to a server with another nonce; and a client's proof does not serve
    as a server's."""
    listener, reports = server
    sent: list[bytes] = []
    sock = socket.create_connection(listener.address)
    until = time.monotonic() + 5
    with pytest.MonkeyPatch.context() as patch:
        plain = handshake.send
        patch.setattr(
            handshake,
            "send",
            lambda to, data, deadline: (
                sent.append(data) if to is sock else None,
                plain(to, data, deadline),
            ),
        )
        answer = handshake.client_greet(
            sock, handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16)), TOKEN, b"", until
        )
        handshake.client_verdict(sock, answer, until)
    sock.close()
    again = stranger(listener, b"".join(sent))
    verdict = handshake.receive(
        again, len(sealed(handshake.GREETING.pack(*answer.greeting))), until, ""
    )
    assert verdict  # its greeting
    code, *_ = handshake.VERDICT.unpack(handshake.receive(again, handshake.VERDICT.size, until, ""))
    assert code == handshake.NOT_PROVEN
    again.close()
    wait_report(reports, "the token does not match")


@pytest.mark.parametrize(
    "field", ["has_token", "number", "connections", "frame_limit", "link", "hello_nbytes"]
)
def test_a_greeting_changed_in_transit_is_detected(field):
    """The checksum is recomputed, so this is not a flipped bit."""
    values = {
        "has_token": True,
        "number": 0,
        "connections": 3,
        "frame_limit": 5,
        "link": b"m" * 16,
        "hello_nbytes": 3,
    }
    ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16), hello=b"hello")
    sent = handshake.GREETING.pack(*ours)
    changed = handshake.GREETING.pack(*ours._replace(**{field: values[field]}, nonce=b"n" * 32))
    with pytest.MonkeyPatch.context() as patch:
        plain = handshake.send
        patch.setattr(
            handshake,
            "send",
            lambda sock, data, until: plain(
                sock, sealed(changed) if data == sealed(sent) else data, until
            ),
        )
        found, answer = run_handshake(ours, b"hello")
    assert isinstance(found, AuthError) and isinstance(answer, AuthError)


# Floods


@pytest.mark.slow
def test_lines_about_strangers_are_limited_and_counted(server, monkeypatch):
    monkeypatch.setattr(listeners, "WINDOW_S", 1.0)
    monkeypatch.setattr(listeners, "LOOK_S", 0.1)
    listener, reports = server
    for _ in range(60):
        stranger(listener, b"GET / HTTP/1.1 and more").close()
    wait_report(reports, "more line(s) like these were dropped")
    lines = [line for line in reports if "refused" in line]
    assert len(lines) <= 2 * listeners.LINES + 2
    left_out = sum(int(line.split()[0]) for line in reports if "were dropped" in line)
    deadline = time.monotonic() + 3
    while (
        left_out + sum(line.startswith("refused") for line in reports) < 60
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
        left_out = sum(int(line.split()[0]) for line in reports if "were dropped" in line)
    assert left_out + sum(line.startswith("refused") for line in reports) == 60


def test_suppressed_lines_are_counted_at_the_end():
    lines: list[str] = []
    few = listeners.LineLimit(lines.append)
    for i in range(listeners.LINES + 7):
        few(f"line {i}")
    assert len(lines) == listeners.LINES
    few.tick()
    few.tick(now=True)
    assert (
        len(lines) == listeners.LINES + 1
        and lines[-1].startswith("7 more")
        and lines[-1].endswith("line 16")
    )


def test_a_flood_from_one_address_blocks_no_other(monkeypatch):
    """A slow friend stays connected; the oldest connections of the flood are cut long before the
    deadline of a handshake."""
    monkeypatch.setattr(listeners, "MAX_PENDING", 8)
    with serving(handshake_s=60.0) as (listener, _):
        friend = socket.socket()
        friend.bind(("127.0.0.7", 0))
        friend.connect(listener.address)
        strangers = [stranger(listener) for _ in range(30)]
        until = time.monotonic() + WAIT_S
        # the friend is one of the eight handshakes that may be in progress
        while len(cut := select.select(strangers, [], [], 0)[0]) < 23 or greeting_threads() > 8:
            assert time.monotonic() < until, "the oldest connections were not cut"
            time.sleep(0.01)
        assert cut == strangers[:23]
        answer = handshake.client_greet(
            friend, handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16)), TOKEN, b"", until
        )
        handshake.client_verdict(friend, answer, until)
        for sock in (friend, *strangers):
            sock.close()


def test_a_process_that_cannot_start_a_thread_keeps_listening(server, monkeypatch):
    listener, reports = server
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("greet"):
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        sock = stranger(listener)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        sock.close()
    wait_report(reports, "can't start new thread")
    tcp.connect(listener.address, Recorder(), tcp.TcpOptions(token=TOKEN)).close()


def test_a_peer_that_never_greets_is_a_deadline_error():
    silent = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(DeadlineError, match="the server's greeting"):
        tcp.connect(silent.getsockname(), Recorder(), tcp.TcpOptions(handshake_s=0.2))
    silent.close()


def test_invalid_link_options_are_refused(folder):
    def accept(link, hello):
        raise AssertionError

    with pytest.raises(ConfigError, match="needs a token"):
        tcp.listen(("0.0.0.0", 0), accept)
    for token in (b"", b"fifteen bytes.."):
        with pytest.raises(ConfigError, match=f"must have at least 16 bytes, but has {len(token)}"):
            tcp.TcpOptions(token=token)
    with pytest.raises(ConfigError, match="`connections` cannot be 0"):
        tcp.TcpOptions(connections=0)
    with pytest.raises(ConfigError, match="cannot listen"):
        tcp.listen(("192.0.2.1", 0), accept, tcp.TcpOptions(token=TOKEN))
    with pytest.raises(ConfigError, match="cannot listen"):
        shm.listen(folder / "no" / "such" / "folder", accept)
    with pytest.raises(RoadtrainError, match="TLS"):
        tcp.connect(
            ("127.0.0.1", 1), Recorder(), tcp.TcpOptions(tls=tcp.Tls(ca=folder / "nothing"))
        )


def test_an_untrusted_certificate_is_refused(folder):
    (folder / "other").mkdir()
    ours, _ = tls_options(folder / "other")
    _, theirs = tls_options(folder)
    reports: list[str] = []
    options = tcp.TcpOptions(token=TOKEN, tls=theirs)
    listener = tcp.listen(("127.0.0.1", 0), lambda link, hello: Recorder(), options, reports.append)
    with pytest.raises(AuthError, match="TLS"):
        tcp.connect(listener.address, Recorder(), tcp.TcpOptions(token=TOKEN, tls=ours))
    wait_report(reports, "TLS")
    listener.close()


def test_a_link_has_the_name_given_by_its_acceptor():
    got = Recorder()

    def accept(link, hello):
        link.peer = "worker 3"
        return got

    listener = tcp.listen(("127.0.0.1", 0), accept, tcp.TcpOptions())
    tcp.connect(listener.address, Recorder(), tcp.TcpOptions()).close()
    assert "worker 3: closed by peer" in str(got.wait_lost())
    listener.close()


def test_rings_of_another_size_are_refused(monkeypatch):
    here, there = socket.socketpair(socket.AF_UNIX)
    size = 2 * shm.RING_BYTES
    with monkeypatch.context() as other:
        other.setattr(shm, "RING_BYTES", size)
        other.setattr(shm, "_MEMORY_BYTES", shm._CONTROL + 2 * size)
        channel = shm._ShmCarrier().channel(there)
    with here, pytest.raises(WireError, match=f"for rings of {size}, sealed: True"):
        shm._receive_channel(here)
    channel.close()


def test_the_portable_fence_of_shm(folder, monkeypatch):
    """Processors other than x86-64 use this fence; here it is at least executed."""
    monkeypatch.setattr(shm, "_fence", shm._membarrier)
    monkeypatch.setattr(shm, "_order", shm._membarrier)
    ends = Ends("shm", folder)
    for i in range(100):
        ends.a.send(i, b"", [memoryview(bytes(100 * KIB))])
    ends.got_b.wait_frames(100)
    ends.close()


def test_a_ring_with_wrong_counts_is_a_wire_error(folder):
    ends = Ends("shm", folder)
    ends.a._channels[0]._out._words[0] = 1 << 40
    ends.a._channels[0]._out._ring(16)
    assert isinstance(ends.got_b.wait_lost(), WireError)
    ends.close()


@pytest.mark.parametrize("secured", [False, True])
def test_closing_a_listener_does_not_wait_for_strangers(folder, secured):
    options = tcp.TcpOptions(token=TOKEN, tls=tls_options(folder)[1] if secured else None)
    listener = tcp.listen(("127.0.0.1", 0), lambda link, hello: Recorder(), options)
    sock = stranger(listener)
    time.sleep(0.1)
    begin = time.monotonic()
    listener.close()
    assert time.monotonic() - begin < 5
    sock.close()


# Features of RDMA alone


def test_rdma_without_its_package_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    options = rdma.RdmaOptions(token=TOKEN, device="lo")
    for attempt in (
        lambda: tcp.connect(("127.0.0.1", 1), Recorder(), options),
        lambda: tcp.listen(("127.0.0.1", 0), lambda link, hello: Recorder(), options),
    ):
        with pytest.raises(ConfigError, match="pip install roadtrain-rdma"):
            attempt()


def test_invalid_rdma_options_are_refused():
    with pytest.raises(ConfigError, match="do not support TLS"):
        rdma.RdmaOptions(tls=tcp.Tls())
    with pytest.raises(ConfigError, match="only one device is supported"):
        rdma.RdmaOptions(device="mlx5_0:1,mlx5_1:1")


@with_nixl
def test_a_missing_device_is_refused_when_the_listener_starts():
    with pytest.raises(ConfigError, match="cannot use 'nothing0'"):
        tcp.listen(
            ("127.0.0.1", 0), lambda link, hello: Recorder(), rdma.RdmaOptions(device="nothing0")
        )
    if not Path("/sys/class/infiniband").exists():
        with pytest.raises(ConfigError, match="no RDMA device"):
            tcp.connect(("127.0.0.1", 1), Recorder(), rdma.RdmaOptions())


@with_nixl
def test_many_small_frames_that_nobody_reads_block_neither_direction(folder):
    ends = Ends("rdma", folder)
    ends.got_b.open.clear()
    for i in range(2000):  # one at a time, so that each is announced alone
        free = threading.Event()
        ends.a.send(i, b"", [memoryview(b"x")], free.set)
        assert free.wait(WAIT_S)
    for i in range(200):
        ends.b.send(i, b"the other way is open")
    ends.got_a.wait_frames(200)
    ends.got_b.open.set()
    ends.got_b.wait_frames(2000)
    ends.close()


def rdma_listener(got: Recorder, **options):
    made: list = []

    def accept(link, hello):
        made.append(link)
        return got

    return (
        tcp.listen(
            ("127.0.0.1", 0),
            accept,
            rdma.RdmaOptions(token=TOKEN, device="lo", **options),
            lambda line: None,
        ),
        made,
    )


def meeting(nbytes: int, metadata: bytes) -> bytes:
    digest = hashlib.sha256(metadata).digest()
    return sealed(rdma.MEETING.pack(rdma.MAGIC, 1 << 40, nbytes, digest)) + metadata


MEETINGS = {
    "a frame of TCP": (
        pack_head(Head(0, 1, 0, 0, 0)),
        "does not use RDMA: its first bytes are b'RTfr",
    ),
    "huge metadata": (meeting(1 << 31, b""), f"{1 << 31} bytes, but at most {64 * KIB} are"),
    "metadata that is none": (meeting(100, bytes(100)), "NIXL loadRemoteMD"),
    "metadata with a flipped bit": (
        meeting(100, bytes(100))[:-1] + b"\1",
        "metadata does not match its checksum",
    ),
    "half a meeting": (meeting(100, b"")[:9], "1 of 52 bytes"),
    "a flipped bit": (
        meeting(100, b"")[:9] + b"\7" + meeting(100, b"")[10:],
        "ring does not match its checksum",
    ),
}


@with_nixl
@pytest.mark.parametrize("what", MEETINGS)
def test_a_spoiled_meeting_ends_the_link_with_a_typed_error(what):
    data, words = MEETINGS[what]
    got = Recorder()
    listener, made = rdma_listener(got)
    sock, deadline = socket.create_connection(listener.address), time.monotonic() + 5
    ours = handshake.greeting(tcp.TcpOptions(), TOKEN, bytes(16))
    answer = handshake.client_greet(sock, ours, TOKEN, b"", deadline)
    handshake.client_verdict(sock, answer, deadline)
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerError, match=words):
        raise got.wait_lost()
    sock.close()
    made[0].close()
    listener.close()


@with_nixl
@pytest.mark.parametrize("server_has_rdma", [False, True])
def test_an_rdma_and_a_tcp_link_refuse_each_other(server_has_rdma):
    kinds = [rdma.RdmaOptions(token=TOKEN, device="lo", handshake_s=1), tcp.TcpOptions(token=TOKEN)]
    got, here = Recorder(), Recorder()
    listener = tcp.listen(
        ("127.0.0.1", 0),
        lambda link, hello: (setattr(got, "link", link), got)[1],
        kinds[not server_has_rdma],
        lambda line: None,
    )
    try:
        link = tcp.connect(listener.address, here, kinds[server_has_rdma])
        assert isinstance(here.wait_lost(), WireError)
        link.close()
    except PeerError as error:
        assert "127.0.0.1" in str(error)
    assert isinstance(got.wait_lost(), PeerError)
    got.link.close()
    listener.close()


@with_nixl
@pytest.mark.parametrize("counts", [(1 << 40, 0), (0, 1 << 40)], ids=["written", "read"])
def test_wrong_counts_are_a_wire_error(counts, folder):
    ends = Ends("rdma", folder)
    ends.a._channels[0]._tcp.send([sealed(rdma.COUNTS.pack(*counts))])
    # b reads the wrong count before the next frame brings the right one
    deadline = time.monotonic() + WAIT_S
    while not (ends.got_b.errors or any(channel._theirs == counts for channel in ends.b._channels)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # the peer may read its ring, and the wrong count, at any time
    with contextlib.suppress(LostError):
        ends.b.send(1, b"", [memoryview(bytes(MIB))])
    with pytest.raises(WireError, match="used bytes of a ring of 4194304"):
        raise ends.got_b.wait_lost()
    ends.close()


@with_nixl
def test_a_read_beyond_the_registered_memory_is_refused(folder):
    ends = Ends("rdma", folder)
    ends.a._channels[0]._there += 8 * MIB
    ends.b.send(1, b"", [memoryview(bytes(MIB))])
    with pytest.raises(LostError, match="NIXL createXferReq: NIXL_ERR_NOT_FOUND"):
        raise ends.got_a.wait_lost()
    ends.close()


@pytest.mark.slow
@with_nixl
@pytest.mark.parametrize(
    ("how", "child_sends"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGSTOP, True)],
)
def test_a_peer_that_ends_in_the_middle_of_a_payload(how, child_sends):
    """A killed peer is lost at once. A peer stopped while it has bytes for us is lost once a READ
    has not ended for `silence_s`. (A peer stopped without such bytes merely does not read and is
    kept, as over TCP.)"""
    got, options = Recorder(), {"token": TOKEN, "device": "lo", "silence_s": 1.0}
    listener, made = rdma_listener(got, silence_s=1.0)
    child = os.fork()
    if child == 0:
        try:
            link = tcp.connect(listener.address, Recorder(), rdma.RdmaOptions(**options))
            parts = [memoryview(bytes(48 * MIB))] if child_sends else []
            while True:
                done = threading.Event()
                link.send(1, b"", parts, done.set)
                done.wait()
        finally:
            os._exit(1)
    got.wait_frames(1)
    freed, data = threading.Event(), memoryview(bytes(48 * MIB))
    for _ in range(20):
        made[0].send(1, b"", [data], freed.set)
    assert freed.wait(WAIT_S)
    got.open.clear()
    (channel,), until = made[0]._channels, time.monotonic() + WAIT_S
    # the peer has bytes that we do not take
    while child_sends and channel._theirs[0] - channel._read < 2 * rdma.PIECE:
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(child, how)
    got.open.set()
    begin = time.monotonic()
    error = got.wait_lost()
    assert time.monotonic() - begin < (1.5 if how == signal.SIGKILL else 6)
    assert isinstance(error, LostError)
    assert made[0].peer in str(error)
    begin = time.monotonic()
    made[0].close()
    assert time.monotonic() - begin < 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    listener.close()
