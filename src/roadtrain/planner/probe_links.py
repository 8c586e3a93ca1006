"""Links between hosts, measured: each listening host measures itself and its links to others when
it is asked.

    roadtrain probe --listen 10.0.0.2:7100 --token-file T        on every other host, until Ctrl-C
    roadtrain probe --hosts 10.0.0.2:7100,10.0.0.3:7100 --token-file T

A link's rate is that of FLOOD_S of frames over one TCP link, its latency half of the fastest of
PINGS answers. A host that listens floods back over the link that it was asked on, so whoever asks
needs no port of its own. Hosts that listen beyond this machine demand the token (Rule 8); what they
are asked for is one of three words (what they are, their link to another, their link back), and no
more than FLOOD_S or FRAMES answers it. Every wait has a deadline (Rule 5).
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

PING, PONG, FLOOD, DESCRIBE, MEASURE, BACK, SAID = range(1, 8)
PINGS, FLOOD_S, FRAMES, AHEAD, WAIT_S = 20, 0.5, 1 << 15, 8, 90.0  # FRAMES of 1 MiB
Pair = tuple[str, str]


class Said(msgspec.Struct, omit_defaults=True):
    """What a host answers. `tree`: a cluster.toml's of itself; `missing`: what it could not
    measure; `topology`: lines;
    `link`: bytes a second, seconds of latency; `error`: why there is none of that."""

    tree: dict[str, Any] = {}
    missing: list[str] = []
    topology: list[str] = []
    link: tuple[float, float] = (0.0, 0.0)
    error: str = ""


Describe = Callable[[], Said]
LANGUAGE = language_of(
    {
        "probe": 2,
        "kinds": " ".join(map(str, (PING, PONG, FLOOD, DESCRIBE, MEASURE, BACK, SAID))),
        **get_type_hints(Said),
    }
)


class LinkEnd:
    """Either end's Receiver. `describe`: what this host is, where it may be asked."""

    def __init__(self, options: TcpOptions, describe: Describe | None = None) -> None:
        self.options, self.describe = options, describe
        self.link: Link
        self.said: queue.SimpleQueue[tuple[int, bytes] | PeerError] = queue.SimpleQueue()
        self._scratch = memoryview(bytearray(MIB))

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind != FLOOD or nbytes > MIB:
            raise WireError(f"a frame of kind {kind} with {nbytes} bytes came to a probe")
        return self._scratch[:nbytes]

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        if kind == PING:
            self.link.send(PONG, header)
        elif kind in (PONG, SAID):
            self.said.put((kind, header))
        elif kind in (DESCRIBE, MEASURE, BACK) and self.describe is not None:
            threading.Thread(
                target=self._answer, args=(kind, header), name="probe", daemon=True
            ).start()
        elif kind != FLOOD:
            raise WireError(f"a frame of kind {kind} came to a probe")

    def _answer(self, kind: int, header: bytes) -> None:
        assert self.describe is not None
        try:
            if kind == DESCRIBE:
                found = self.describe()
            else:
                to = header.decode()
                found = Said(link=self.measured() if kind == BACK else measure(to, self.options))
        except Exception as error:  # whoever asked hears why
            found = Said(error=f"{type(error).__name__}: {error}")
        with suppress(PeerError):  # who has gone hears nothing
            self.link.send(SAID, msgspec.json.encode(found))

    def lost(self, error: PeerError) -> None:
        self.said.put(error)

    def heard(self, what: str) -> bytes:
        """The next answer. Raises DeadlineError, LostError."""
        try:
            said = self.said.get(timeout=WAIT_S)
        except queue.Empty:
            raise DeadlineError(
                f"{self.link.peer} did not answer {what} in {WAIT_S:.0f} s"
            ) from None
        if isinstance(said, PeerError):
            raise LostError(f"{self.link.peer} has gone: {said}") from said
        return said[1]

    def measured(self) -> tuple[float, float]:
        """(bytes a second, seconds of latency) from here to the other end. Raises PeerError."""
        trips = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            self.link.send(PING, b"", urgent=True)
            self.heard("a ping")
            trips.append(time.perf_counter() - begin)
        frame, room, count = memoryview(bytes(MIB)), threading.Semaphore(AHEAD), 0
        begin = time.perf_counter()
        while time.perf_counter() < begin + FLOOD_S and count < FRAMES:
            if not room.acquire(timeout=WAIT_S):
                raise DeadlineError(f"{self.link.peer} took nothing for {WAIT_S:.0f} s")
            self.link.send(FLOOD, b"", [frame], room.release)
            count += 1
        self.link.send(PING, b"")  # behind all of them
        self.heard("the end of a flood")
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
    """Raises PeerError where no host listens at `address` that knows our token."""
    with _linked(address, options):
        pass


def measure(address: str, options: TcpOptions) -> tuple[float, float]:
    """(bytes a second, seconds of latency) from here to the host that listens at `address`.
    Raises PeerError."""
    with _linked(address, options) as end:
        return end.measured()


def ask(address: str, kind: int, words: str, options: TcpOptions) -> Said:
    """What the host there says of itself (DESCRIBE), of its link to `words` (MEASURE) or to here
    (BACK). Raises PeerError."""
    with _linked(address, options) as end:
        end.link.send(kind, words.encode())
        try:
            said = msgspec.json.decode(end.heard("what it was asked"), type=Said)
        except msgspec.MsgspecError as error:
            raise WireError(
                f"{address} answered what no probe does ({error})",
                hint="run the same version of roadtrain there",
            ) from error
    if said.error:
        raise LostError(f"{address}: {said.error}")
    return said


def listening(address: str, options: TcpOptions, describe: Describe) -> Listener:
    """Raises ConfigError."""

    def accept(link: Link, hello: bytes) -> LinkEnd:
        end = LinkEnd(options, describe)
        end.link = link
        return end

    return listen(address_of(address), accept, options, lambda line: None, language=LANGUAGE)


def serve(address: str, options: TcpOptions, describe: Describe) -> None:
    """Answers until it is ended. Raises ConfigError."""
    listener = listening(address, options, describe)
    try:
        print("probe: listening at {}:{}".format(*listener.address), flush=True)
        threading.Event().wait()
    finally:
        listener.close()


def matrix(
    hosts: Sequence[str], options: TcpOptions
) -> tuple[dict[Pair, tuple[float, float]], list[str]]:
    """(from, to) -> (rate, latency) of every pair, one after the other, this host being `here`;
    and what was not measured, with the reason. A host that has gone is not waited for again."""
    found, missing, gone = dict[Pair, tuple[float, float]](), list[str](), set[str]()
    for one, other in permutations(("here", *hosts), 2):
        if gone & {one, other}:
            continue
        try:
            if one == "here":
                found[one, other] = measure(other, options)
            else:
                kind = BACK if other == "here" else MEASURE
                found[one, other] = ask(one, kind, other, options).link
        except PeerError as error:
            missing.append(f"the link from {one} to {other}: {error}")
            for host in {one, other} - {"here"}:
                try:
                    reach(host, options)
                except PeerError as why:
                    gone.add(host)
                    missing.append(f"other links of host {host}, which has gone: {why}")
    return found, missing


def shown(found: dict[Pair, tuple[float, float]]) -> str:
    names = list(dict.fromkeys(name for pair in found for name in pair))
    width = max(map(len, names), default=0) + 2
    lines = [" " * width + "".join(f"{name:>24}" for name in names)]
    for one in names:
        cells = (found.get((one, other)) for other in names)
        told = (f"{show_rate(cell[0])}, {show_seconds(cell[1])}" if cell else "" for cell in cells)
        lines.append(f"{one:{width}}" + "".join(f"{words:>24}" for words in told))
    return "\n".join(lines)
