"""Measure links between hosts. A listening host measures itself and its links to other hosts when
the probing host requests it.

    roadtrain probe --listen 10.0.0.2:7100 --token-file T        on each listening host
    roadtrain probe --hosts 10.0.0.2:7100,10.0.0.3:7100 --token-file T    on the probing host

The rate of a link is measured by sending frames of 1 MiB over one TCP connection, for at most 0.5 s
and at most 32768 frames. The latency is half of the shortest of 20 round-trip times. The probing
host needs no open port: links to it are measured over the connection on which the request has
arrived. A listener that other machines can reach requires the token (Rule 8). Every wait has a
timeout (Rule 5).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import permutations
from typing import Any, get_type_hints

import msgspec

from roadtrain.errors import DeadlineError, LostError, PeerError, WireError
from roadtrain.servers.frames import language_of
from roadtrain.transport.address import address_of
from roadtrain.transport.link import Link
from roadtrain.transport.listener import Listener
from roadtrain.transport.tcp import TcpOptions, connect, listen
from roadtrain.units import MIB, show_rate, show_seconds

PING, PONG, FLOOD, DESCRIBE, MEASURE, BACK, REPORT = range(1, 8)  # kinds of frames
# round trips; seconds and frames (of 1 MiB) of a rate test; unsent frames; timeout of a wait
PINGS, FLOOD_S, FRAMES, AHEAD, WAIT_S = 20, 0.5, 1 << 15, 8, 90.0
Pair = tuple[str, str]  # sender and receiver of a link


class ProbeReport(msgspec.Struct, omit_defaults=True):
    """The answer of a listening host to a request of a probing host."""

    tree: dict[str, Any] = {}  # the content of a cluster.toml with this host
    missing: list[str] = []  # the values that could not be measured
    topology: list[str] = []  # lines of text on the topology of the host
    link: tuple[float, float] = (0.0, 0.0)  # rate in bytes/s, and latency in seconds
    error: str = ""  # why the request failed, or ""


Describe = Callable[[], ProbeReport]
LANGUAGE = language_of(
    {
        "probe": 2,
        "kinds": " ".join(map(str, (PING, PONG, FLOOD, DESCRIBE, MEASURE, BACK, REPORT))),
        **get_type_hints(ProbeReport),
    }
)


class LinkEnd:
    """This host's end of a link to another host, which handles the frames that arrive. `describe`:
    returns a report on this host; None if this host does not answer requests."""

    def __init__(self, options: TcpOptions, describe: Describe | None = None) -> None:
        self.options, self.describe = options, describe
        self.link: Link
        self.answers: queue.SimpleQueue[tuple[int, bytes] | PeerError] = queue.SimpleQueue()
        self._scratch = memoryview(bytearray(MIB))

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind != FLOOD or nbytes > MIB:
            allowed = f"but at most {MIB if kind == FLOOD else 0} are allowed"
            raise WireError(f"a frame of kind {kind} has {nbytes} bytes of payload, {allowed}")
        return self._scratch[:nbytes]

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        if kind == PING:
            self.link.send(PONG, header)
        elif kind in (PONG, REPORT):
            self.answers.put((kind, header))
        elif kind in (DESCRIBE, MEASURE, BACK) and self.describe is not None:
            threading.Thread(
                target=self._answer, args=(kind, header), name="probe", daemon=True
            ).start()
        elif kind != FLOOD:
            raise WireError(f"a probe received a frame of the unknown kind {kind}")

    def _answer(self, kind: int, header: bytes) -> None:
        assert self.describe is not None
        try:
            if kind == DESCRIBE:
                found = self.describe()
            else:
                link = self.measured() if kind == BACK else measure(header.decode(), self.options)
                found = ProbeReport(link=link)
        except Exception as error:  # reported to the requesting host
            found = ProbeReport(error=f"{type(error).__name__}: {error}")
        with suppress(PeerError):  # the requesting host may be lost
            self.link.send(REPORT, msgspec.json.encode(found))

    def lost(self, error: PeerError) -> None:
        self.answers.put(error)

    def receive(self, what: str) -> bytes:
        """Wait for the next answer of the other host. `what`: a name of the request for error
        messages. Raises DeadlineError and LostError."""
        try:
            answer = self.answers.get(timeout=WAIT_S)
        except queue.Empty:
            raise DeadlineError(
                f"{self.link.peer} did not answer {what} in {WAIT_S:.0f} s"
            ) from None
        if isinstance(answer, PeerError):
            raise LostError(f"{self.link.peer} was lost: {answer}") from answer
        return answer[1]

    def measured(self) -> tuple[float, float]:
        """Measure the link from this host to the other host. Return the rate in bytes/s and the
        latency in seconds. Raises PeerError."""
        trips = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            self.link.send(PING, b"", urgent=True)
            self.receive("a ping")
            trips.append(time.perf_counter() - begin)
        frame, room, count = memoryview(bytes(MIB)), threading.Semaphore(AHEAD), 0
        begin = time.perf_counter()
        while time.perf_counter() < begin + FLOOD_S and count < FRAMES:
            if not room.acquire(timeout=WAIT_S):
                raise DeadlineError(f"{self.link.peer} accepted no data for {WAIT_S:.0f} s")
            self.link.send(FLOOD, b"", [frame], room.release)
            count += 1
        self.link.send(PING, b"")  # answered after all frames have arrived
        self.receive("the last frame of a rate test")
        return count * MIB / (time.perf_counter() - begin), min(trips) / 2


@contextmanager
def _linked(address: str, options: TcpOptions) -> Iterator[LinkEnd]:
    end = LinkEnd(options)
    end.link = connect(address_of(address), end, options, name="probe", language=LANGUAGE)
    try:
        yield end
    finally:
        end.link.close()


def reach(address: str, options: TcpOptions) -> None:
    """Raise PeerError if no host listens at `address`, or if the host does not accept the token."""
    with _linked(address, options):
        pass


def measure(address: str, options: TcpOptions) -> tuple[float, float]:
    """Measure the link from this host to the host that listens at `address`. Return the rate in
    bytes/s and the latency in seconds. Raises PeerError."""
    with _linked(address, options) as end:
        return end.measured()


def ask(address: str, kind: int, words: str, options: TcpOptions) -> ProbeReport:
    """Request a report from the host that listens at `address`. `kind`: DESCRIBE for a description
    of that host; MEASURE for its link to the host at the address `words`; BACK for its link to this
    host. Raises PeerError."""
    with _linked(address, options) as end:
        end.link.send(kind, words.encode())
        try:
            report = msgspec.json.decode(end.receive("a request"), type=ProbeReport)
        except msgspec.MsgspecError as error:
            raise WireError(
                f"{address} sent an invalid report ({error})",
                hint="run the same version of roadtrain on both hosts",
            ) from error
    if report.error:
        raise LostError(f"{address}: {report.error}")
    return report


def listening(address: str, options: TcpOptions, describe: Describe) -> Listener:
    """Listen at `address`, and answer the requests of other hosts in the background. `describe`:
    returns a report on this host. Raises ConfigError if this host cannot listen at `address`."""

    def accept(link: Link, hello: bytes) -> LinkEnd:
        end = LinkEnd(options, describe)
        end.link = link
        return end

    return listen(address_of(address), accept, options, lambda line: None, language=LANGUAGE)


def serve(address: str, options: TcpOptions, describe: Describe) -> None:
    """Answer the requests of other hosts at `address` until this process is interrupted. Raises
    ConfigError if this host cannot listen at `address`."""
    listener = listening(address, options, describe)
    try:
        print("probe: listening at {}:{}".format(*listener.address), flush=True)
        threading.Event().wait()
    finally:
        listener.close()


def matrix(
    hosts: Sequence[str], options: TcpOptions
) -> tuple[dict[Pair, tuple[float, float]], list[str]]:
    """Measure the links between all hosts, one link at a time. A lost host is not contacted again.

    Returns:
        A mapping from (sender, receiver) to the rate in bytes/s and the latency in seconds, and a
        list of reasons why links were not measured. The name of this host is "here".
    """
    found, missing, lost = dict[Pair, tuple[float, float]](), list[str](), set[str]()
    for source, target in permutations(("here", *hosts), 2):
        if lost & {source, target}:
            continue
        try:
            if source == "here":
                found[source, target] = measure(target, options)
            else:
                kind = BACK if target == "here" else MEASURE
                found[source, target] = ask(source, kind, target, options).link
        except PeerError as error:
            missing.append(f"the link from {source} to {target}: {error}")
            for host in {source, target} - {"here"}:
                try:
                    reach(host, options)
                except PeerError as why:
                    lost.add(host)
                    missing.append(f"other links of host {host}, which was lost: {why}")
    return found, missing


def format_matrix(found: dict[Pair, tuple[float, float]]) -> str:
    names = list(dict.fromkeys(name for pair in found for name in pair))
    width = max(map(len, names), default=0) + 2
    lines = [" " * width + "".join(f"{name:>24}" for name in names)]
    for source in names:
        row = (found.get((source, target)) for target in names)
        cells = (f"{show_rate(cell[0])}, {show_seconds(cell[1])}" if cell else "" for cell in row)
        lines.append(f"{source:{width}}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)
