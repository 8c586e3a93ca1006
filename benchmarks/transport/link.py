"""Measure links: two processes transfer 4 MiB chunks over loopback TCP and over shared memory. gloo
transfers the same chunks for comparison. If NIXL is installed, the RDMA link is measured over UCX's
TCP mode, which shows its overhead but not the speed of RDMA. With root, both directions are also
measured at once over an emulated link of a given rate.

The floor of TCP is a bare socket with the same calls, the floor of shared memory is one copy, and
the floor of the emulated link is its rate without the headers of its packets. With one buffer on
each side, the bytes stay in the cache; with several, the memory bandwidth counts. CPU seconds are
those of both processes together.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.report import Report, Row, cores
from roadtrain.device.buffers import Buffer
from roadtrain.errors import PeerError
from roadtrain.transport import handshake, shm, tcp
from roadtrain.transport.link import Link, copy
from roadtrain.transport.plugins import link_names, link_options
from roadtrain.units import MIB

CHUNK, WINDOW = 4 * MIB, 8  # bytes; chunks that a sender has in flight
CHUNK_KIND, LAST_KIND, ACK_KIND = 1, 2, 3
WAIT_S = 60.0
TOKEN = b"only for this measurement"
# name -> (bytes/s, goal as a share of the rate)
RATES = {"400mbit": (50e6, 0.95), "1gbit": (125e6, 0.95), "4gbit": (500e6, 0.90)}
CLONE_NEWNET = 0x40000000
LINKS = ("tcp", "shm", *(name for name in link_names() if name == "rdma"))
CALLED = {"tcp": "tcp", "shm": "shm", "rdma": "rdma (UCX's TCP mode)"}
UNSUMMED = " without checksums"
WAYS = (*LINKS, *(link + UNSUMMED for link in LINKS))


def _options(way: str, connections: int = 1) -> tcp.TcpOptions:
    transport, summed = way.removesuffix(UNSUMMED), not way.endswith(UNSUMMED)
    more: dict[str, Any] = {"device": "lo"} if transport == "rdma" else {}
    return link_options(transport)(token=TOKEN, connections=connections, checksums=summed, **more)


def _near_options(way: str) -> handshake.Common:
    return handshake.Common(checksums=not way.endswith(UNSUMMED))


class _Node:
    """A child process that makes the transfers that its parent process requests."""

    def __init__(self) -> None:
        self.buffers, self.out = ([Buffer(CHUNK).view for _ in range(WINDOW)] for _ in range(2))
        for view in (*self.buffers, *self.out):
            view[:] = b"\1" * CHUNK
        self.count = WINDOW
        self.link: Link | None = None
        self.listener: Any = None
        self.there, self.acked = threading.Event(), threading.Event()
        self.error: PeerError | None = None
        self.times: list[float] = []

    # Receiver

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return self.buffers[len(self.times) % self.count][:nbytes]

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        if kind == ACK_KIND:
            self.acked.set()
            return
        self.times.append(perf_counter())
        if kind == LAST_KIND and self.link is not None:
            self.link.send(ACK_KIND, b"")
            self.there.set()

    def lost(self, error: PeerError) -> None:
        self.error = error
        self.there.set()
        self.acked.set()

    # Calls by the parent

    def listen(self, transport: str, host: str) -> Any:
        def accept(link: Link, hello: bytes) -> _Node:
            self.link = link
            return self

        if transport.startswith("shm"):
            self.listener = shm.listen(host, accept, _near_options(transport))
        else:
            self.listener = tcp.listen((host, 0), accept, _options(transport))
        return self.listener.address

    def connect(self, transport: str, address: Any, connections: int) -> None:
        if transport.startswith("shm"):
            self.link = shm.connect(address, self, _near_options(transport))
        else:
            self.link = tcp.connect(address, self, _options(transport, connections))

    def transfer(self, sends: int, receives: int) -> tuple[float, float, float]:
        """Send `sends` chunks and receive `receives` chunks at the same time. Returns (seconds
        until both processes have all chunks, bytes/s of the arriving data, CPU seconds of this
        process).
        """
        assert self.link is not None
        self.there.clear()
        self.acked.clear()
        self.times.clear()
        free, begin, cpu = threading.Semaphore(WINDOW), perf_counter(), process_time()
        for i in range(sends):
            free.acquire()
            self.link.send(
                LAST_KIND if i == sends - 1 else CHUNK_KIND,
                b"",
                [self.out[i % self.count]],
                free.release,
            )
        for event, chunks in ((self.acked, sends), (self.there, receives)):
            if (chunks and not event.wait(WAIT_S)) or self.error is not None:
                raise TimeoutError(
                    f"{chunks} chunks were not transferred within {WAIT_S:.0f} s; error of the"
                    f" link: {self.error or 'none'}"
                )
        seconds, rate = perf_counter() - begin, 0.0
        if receives > 1:
            rate = (len(self.times) - 1) * CHUNK / (self.times[-1] - self.times[0])
        return seconds, rate, process_time() - cpu

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        if self.listener is not None:
            self.listener.close()
        self.link = self.listener = self.error = None

    def use(self, buffers: int) -> None:
        self.count = buffers

    def copy_transfer(self, sends: int, receives: int) -> tuple[float, float, float]:
        """Measure the floor of shared memory: one copy of as many chunks as a transfer sends.
        Returns the same as `transfer`.
        """
        begin, cpu = perf_counter(), process_time()
        for i in range(sends):
            copy(self.buffers[i % self.count], self.out[i % self.count])
        return perf_counter() - begin, 0.0, process_time() - cpu

    def listen_plain(self) -> Any:
        self.server = socket.create_server(("127.0.0.1", 0))
        return self.server.getsockname()

    def connect_plain(self, address: Any) -> None:
        self.client = socket.create_connection(address)

    def plain_transfer(self, sends: int, receives: int) -> tuple[float, float, float]:
        """Measure the floor of TCP: transfer the same bytes over a bare socket, without frames.
        Returns the same as `transfer`.
        """
        if receives:
            sock, _ = self.server.accept()
            self.server.close()
        else:
            sock = self.client
        with sock:
            begin, cpu = perf_counter(), process_time()
            for i in range(sends):
                sock.sendall(self.out[i % self.count])
            for i in range(receives):
                view, have = self.buffers[i % self.count], 0
                while have < CHUNK:
                    have += sock.recv_into(view[have:], 0, socket.MSG_WAITALL)
            if sends:
                sock.recv(1)
            else:
                sock.sendall(b"1")
            return perf_counter() - begin, 0.0, process_time() - cpu

    def gloo(self, rank: int, file: str) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{file}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=WAIT_S),
        )

    def gloo_transfer(self, sends: int, receives: int) -> tuple[float, float, float]:
        tensors = [torch.frombuffer(view, dtype=torch.uint8) for view in self.buffers]
        begin, cpu = perf_counter(), process_time()
        works: list[Any] = []
        for i in range(sends or receives):
            tensor = tensors[i % self.count]
            works.append(dist.isend(tensor, 1) if sends else dist.irecv(tensor, 0))
            if i >= WINDOW // 2:
                works[i - WINDOW // 2].wait()
        for work in works[-(WINDOW // 2) :]:
            work.wait()
        if sends:
            dist.recv(tensors[0][:1], 1)
        else:
            dist.send(tensors[0][:1], 0)
        return perf_counter() - begin, 0.0, process_time() - cpu


def _serve(pipe: Connection, namespace: str) -> None:
    if namespace:
        libc, fd = (
            ctypes.CDLL(None, use_errno=True),
            os.open(f"/run/netns/{namespace}", os.O_RDONLY),
        )
        if libc.setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
    torch.set_num_threads(1)
    node = _Node()
    while (request := pipe.recv()) is not None:
        try:
            pipe.send(getattr(node, request[0])(*request[1:]))
        except Exception as error:
            pipe.send(RuntimeError(f"{request[0]}: {error!r}"))
    node.close()


class _Pair:
    """Two child processes. `ask` sends a request to each at the same time, and returns the
    answers.
    """

    def __init__(self, *namespaces: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for namespace in namespaces:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, namespace), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> list[Any]:
        requests = [
            (pipe, request) for pipe, request in zip(self._pipes, (a, b)) if request is not None
        ]
        for pipe, request in requests:
            pipe.send(request)
        answers = []
        for pipe, request in requests:
            if not pipe.poll(2 * WAIT_S):
                raise TimeoutError(
                    f"a process did not answer the request {request[0]!r} within {2 * WAIT_S:.0f} s"
                )
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _loopback(buffers: int, quick: bool) -> list[Row]:
    chunks, rounds = (16, 1) if quick else (256, 9)
    two = _Pair("", "")
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    folder = tempfile.mkdtemp(prefix="roadtrain-link-")
    try:
        two.ask(("gloo", 0, f"{folder}/gloo"), ("gloo", 1, f"{folder}/gloo"))
        two.ask(("use", buffers), ("use", buffers))
        for _ in range(rounds + 1):  # the first round is a warm-up
            for way in (
                "tcp",
                "tcp" + UNSUMMED,
                "plain",
                "gloo",
                "shm",
                "shm" + UNSUMMED,
                "copy",
                *(way for way in WAYS if way.startswith("rdma")),
            ):
                if way in WAYS:
                    where = f"{folder}/shm" if way.startswith("shm") else "127.0.0.1"
                    (address,) = two.ask(None, ("listen", way, where))
                    two.ask(("connect", way, address, 1), None)
                elif way == "plain":
                    (address,) = two.ask(None, ("listen_plain",))
                    two.ask(("connect_plain", address), None)
                name = "transfer" if way in WAYS else f"{way}_transfer"
                a, b = two.ask((name, chunks, 0), None if way == "copy" else (name, 0, chunks)) + [
                    (0.0, 0.0, 0.0)
                ] * (way == "copy")
                rates.setdefault(way, []).append(chunks * CHUNK / a[0] / 1e9)
                cpu.setdefault(way, []).append((a[2] + b[2]) / (chunks * CHUNK / 1e9))
                if way in WAYS:
                    two.ask(("close",), None)
                    two.ask(None, ("close",))
    finally:
        two.close()
        shutil.rmtree(folder)
    rate = {way: median(values[1:]) for way, values in rates.items()}
    spent = {way: median(values[1:]) for way, values in cpu.items()}
    rows = []
    for way, floor, goal in (("tcp", "plain", 4.0), ("shm", "copy", 10.0), ("rdma", "plain", None))[
        : len(LINKS)
    ]:
        where = (
            "one buffer a side, in the cache"
            if buffers == 1
            else f"{buffers} buffers a side in turn"
        )
        case = f"{CALLED[way]}, 4 MiB chunks, {where}, two processes, {cores()} cores"
        judged = goal if buffers == 1 else None
        rows += [
            Row(
                case,
                "one way",
                "GB/s",
                rate[way],
                peer=rate["gloo"],
                peer_name="gloo isend/irecv",
                ratio=rate[way] / rate["gloo"],
                of_floor=rate[way] / rate[floor],
                goal=None if judged is None else f">= {judged:g} GB/s",
                met=None if judged is None else rate[way] >= judged,
            ),
            Row(
                case,
                "CPU of both sides",
                "s/GB",
                spent[way],
                peer=spent["gloo"],
                peer_name="gloo isend/irecv",
                ratio=spent["gloo"] / spent[way],
                of_floor=spent[floor] / spent[way] if floor == "plain" else None,
            ),
        ]
        bare = way + UNSUMMED
        rows += [
            Row(
                case + UNSUMMED,
                "one way",
                "GB/s",
                rate[bare],
                peer=rate[way],
                peer_name="with checksums",
                ratio=rate[bare] / rate[way],
                of_floor=rate[bare] / rate[floor],
            ),
            Row(
                case + UNSUMMED,
                "CPU of both sides",
                "s/GB",
                spent[bare],
                peer=spent[way],
                peer_name="with checksums",
                ratio=spent[way] / spent[bare],
            ),
        ]
    return rows


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def _emulated(rate: str) -> Iterator[tuple[str, str]]:
    """Create two network namespaces, joined by a link of rate `rate` in each direction, during the
    `with` block. Yields the names of the namespaces, whose addresses are 10.99.0.1 and 10.99.0.2.
    """
    names = [f"roadtrain-link-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run(
            "ip",
            "link",
            "add",
            "v0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "v0",
            "netns",
            names[1],
        )
        for i, name in enumerate(names):
            _run("ip", "-n", name, "address", "add", f"10.99.0.{i + 1}/24", "dev", "v0")
            _run("ip", "-n", name, "link", "set", "v0", "up")
            _run(
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                "v0",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "256kb",
                "latency",
                "20ms",
            )
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _shaped(rate: str, bytes_per_s: float, goal: float, quick: bool) -> list[Row]:
    chunks = max(4, int(bytes_per_s * (0.5 if quick else 6) / CHUNK))
    found = []
    with _emulated(rate) as names:
        two = _Pair(*names)
        try:
            for _ in range(1 if quick else 3):
                (address,) = two.ask(None, ("listen", "tcp", "10.99.0.2"))
                two.ask(("connect", "tcp", address, 1), None)
                two.ask(("transfer", 2, 2), ("transfer", 2, 2))
                a, b = two.ask(("transfer", chunks, chunks), ("transfer", chunks, chunks))
                found.append((min(a[1], b[1]), (a[2] + b[2]) / (2 * chunks * CHUNK / 1e9)))
                two.ask(("close",), None)
                two.ask(None, ("close",))
        finally:
            two.close()
    slower, cpu = (median(values) for values in zip(*found))
    case, share = f"pull and push at once, {rate} each way, one connection", slower / bytes_per_s
    return [
        Row(
            case,
            "the slower direction",
            "MB/s",
            slower / 1e6,
            peer=bytes_per_s / 1e6,
            peer_name="the link",
            ratio=share,
            of_floor=slower / (bytes_per_s * 1448 / 1514),
            goal=f"ratio >= {goal:g}",
            met=share >= goal,
        ),
        Row(case, "CPU of both sides", "s/GB", cpu),
    ]


def run(quick: bool = False) -> Report:
    rows = _loopback(1, quick) + _loopback(WINDOW, quick)
    if _can_make_namespaces():
        for rate, (bytes_per_s, goal) in RATES.items():
            rows += _shaped(rate, bytes_per_s, goal, quick)
    else:
        print(
            "no network namespaces here (needs root, ip and tc); the emulated links are"
            " not measured"
        )
    return Report("link", rows)


def _can_make_namespaces() -> bool:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"roadtrain-link-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    return (
        made
        and subprocess.run(["ip", "netns", "delete", name], capture_output=True).returncode == 0
    )
