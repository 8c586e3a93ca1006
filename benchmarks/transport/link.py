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

import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.children import Child, requests, running, send_value, wait_for_all
from benchmarks.common.report import Report, Row, cores
from benchmarks.common.rows import row
from roadtrain.device.buffers import Buffer
from roadtrain.errors import PeerError
from roadtrain.lab import CARRIED, LabHost, LabNic, Network, network_available
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
GLOO = "gloo isend/irecv"
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
            self.link = tcp.connect(tuple(address), self, _options(transport, connections))

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
        self.client = socket.create_connection(tuple(address))

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


def serve() -> None:
    """Make the transfers that the parent process requests."""
    torch.set_num_threads(1)
    node = _Node()
    send_value("ready")
    for name, *arguments in requests():
        send_value("answer", getattr(node, name)(*arguments))


class _Pair:
    """Two child processes. `ask` sends a request to each at the same time, and returns the
    answers.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children

    def ask(self, *both: tuple[Any, ...] | None) -> list[Any]:
        receivers = []
        for child, request in zip(self._children, both, strict=True):
            if request is not None:
                child.go_on(request)
                receivers.append(child)
        return wait_for_all(receivers, "answer", 2 * WAIT_S)


@contextmanager
def _pair(home: Path, hosts: Sequence[LabHost] = ()) -> Iterator[_Pair]:
    with running(serve, [{}, {}], home, hosts=hosts) as children:
        wait_for_all(children, "ready", 2 * WAIT_S)
        yield _Pair(children)


def _loopback(buffers: int, quick: bool) -> Iterator[Row]:
    chunks, rounds = (16, 1) if quick else (256, 9)
    ways = [*WAYS, "plain", "gloo", "copy"]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="roadtrain-link-") as name, _pair(Path(name)) as two:
        two.ask(("gloo", 0, f"{name}/gloo"), ("gloo", 1, f"{name}/gloo"))
        two.ask(("use", buffers), ("use", buffers))
        for _ in range(rounds + 1):  # the first round is a warm-up
            for way in ways:
                spent = _transfer(two, way, chunks, name)
                rates[way].append(chunks * CHUNK / spent[0][0])
                cpu[way].append(sum(cpu_s for _, _, cpu_s in spent) / (chunks * CHUNK / 1e9))
    rate = {way: median(values[1:]) for way, values in rates.items()}
    spent_s = {way: median(values[1:]) for way, values in cpu.items()}
    where = (
        "one buffer a side, in the cache" if buffers == 1 else f"{buffers} buffers a side in turn"
    )
    floors = {"tcp": ("plain", 4.0), "shm": ("copy", 10.0), "rdma": ("plain", None)}
    for way in LINKS:
        floor, goal = floors[way]
        case = f"{CALLED[way]}, 4 MiB chunks, {where}, two processes, {cores()} cores"
        bare, whole = way + UNSUMMED, "CPU of both sides"
        yield row(
            *(case, "one way", "GB/s", rate[way], (rate["gloo"], GLOO)),
            goal=None if goal is None or buffers > 1 else f"ours >= {goal:g}",
            of_floor=rate[way] / rate[floor],
            more_is_better=True,
        )
        of_floor = spent_s[floor] / spent_s[way] if floor == "plain" else None
        gloo_s = (spent_s["gloo"], GLOO)
        yield row(case, whole, "s/GB", spent_s[way], gloo_s, of_floor=of_floor)
        yield row(
            *(case + UNSUMMED, "one way", "GB/s", rate[bare], (rate[way], "with checksums")),
            of_floor=rate[bare] / rate[floor],
            more_is_better=True,
        )
        summed_s = (spent_s[way], "with checksums")
        yield row(case + UNSUMMED, whole, "s/GB", spent_s[bare], summed_s)


def _transfer(two: _Pair, way: str, chunks: int, home: str) -> list[tuple[float, float, float]]:
    """Transfer chunks from the first process to the second, and return what each measures."""
    if way == "copy":
        return two.ask(("copy_transfer", chunks, 0), None)
    if way not in WAYS:
        if way == "plain":
            (address,) = two.ask(None, ("listen_plain",))
            two.ask(("connect_plain", address), None)
        return two.ask((f"{way}_transfer", chunks, 0), (f"{way}_transfer", 0, chunks))
    where = f"{home}/shm" if way.startswith("shm") else "127.0.0.1"
    return _over_link(two, way, where, (chunks, 0))


def _over_link(
    two: _Pair, way: str, where: str, *transfers: tuple[int, int]
) -> list[tuple[float, float, float]]:
    """Connect the processes by a link, make the transfers (chunks sent by the first process, by the
    second), and return what each process measures in the last one.
    """
    (address,) = two.ask(None, ("listen", way, where))
    two.ask(("connect", way, address, 1), None)
    for there, back in transfers:
        measured = two.ask(("transfer", there, back), ("transfer", back, there))
    two.ask(("close",), None)
    two.ask(None, ("close",))
    return measured


def _shaped(rate: str, bytes_per_s: float, goal: float, quick: bool) -> Iterator[Row]:
    chunks = max(4, int(bytes_per_s * (0.5 if quick else 6) / CHUNK))
    nics = {name: [LabNic(bytes_per_s)] for name in ("a", "b")}
    with tempfile.TemporaryDirectory(prefix="roadtrain-link-") as home, Network(nics) as network:
        hosts = [network.hosts[name] for name in nics]
        found = []
        with _pair(Path(home), hosts) as two:
            for _ in range(1 if quick else 3):
                transfers = ((2, 2), (chunks, chunks))
                a, b = _over_link(two, "tcp", hosts[1].address, *transfers)
                found.append((min(a[1], b[1]), (a[2] + b[2]) / (2 * chunks * CHUNK / 1e9)))
    slower, cpu = (median(values) for values in zip(*found))
    case, metric = f"pull and push at once, {rate} each way, one connection", "the slower direction"
    yield row(
        *(case, metric, "MB/s", slower / 1e6, (bytes_per_s / 1e6, "the link")),
        goal=f"ratio >= {goal:g}",
        of_floor=slower / (bytes_per_s * CARRIED),
        more_is_better=True,
    )
    yield Row(case, "CPU of both sides", "s/GB", cpu)


def run(quick: bool = False) -> Report:
    rows = [*_loopback(1, quick), *_loopback(WINDOW, quick)]
    if (why := network_available()) is None:
        for rate, (bytes_per_s, goal) in RATES.items():
            rows += _shaped(rate, bytes_per_s, goal, quick)
    else:
        print(f"the emulated links are not measured: {why}")
    return Report("link", rows)
