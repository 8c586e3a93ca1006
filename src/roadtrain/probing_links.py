"""Links between hosts, measured: each listening host measures itself and its links to others when it is asked.

    roadtrain probe --listen 10.0.0.2:7100 --token-file T        on every other host, until Ctrl-C
    roadtrain probe --hosts 10.0.0.2:7100,10.0.0.3:7100 --token-file T

A link's rate is that of FLOOD_S of frames over one TCP link, its latency half of the fastest of PINGS answers. Hosts
that listen beyond this machine demand the token (Rule 8); what they are asked for is one of three words. Every wait has
a deadline (Rule 5).
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from roadtrain.errors import DeadlineError, LostError, PeerError, WireError
from roadtrain.node.dial import address_of
from roadtrain.units import MIB, show_rate, show_seconds
from roadtrain.wire.link import Link
from roadtrain.wire.listener import Listener
from roadtrain.wire.tcp import Options, connect, listen

PING, PONG, FLOOD, DESCRIBE, MEASURE, SAID = range(1, 7)
PINGS, FLOOD_S, AHEAD, WAIT_S = 20, 0.5, 8, 90.0
Describe = Callable[[], tuple[dict[str, Any], list[str]]]


class _End:
    """Either end's Receiver. `describe`: what this host is, where it may be asked."""

    def __init__(self, options: Options, describe: Describe | None = None) -> None:
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
        elif kind in (DESCRIBE, MEASURE) and self.describe is not None:
            threading.Thread(target=self._answer, args=(kind, header), name="probe", daemon=True).start()
        elif kind != FLOOD:
            raise WireError(f"a frame of kind {kind} came to a probe")

    def _answer(self, kind: int, header: bytes) -> None:
        assert self.describe is not None
        try:
            if kind == DESCRIBE:
                found: Any = self.describe()
            else:
                found = measure(header.decode(), self.options)
            self.link.send(SAID, json.dumps(found).encode())
        except Exception as error:  # whoever asked hears why
            with suppress(PeerError):  # who has gone hears nothing
                self.link.send(SAID, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())

    def lost(self, error: PeerError) -> None:
        self.said.put(error)

    def heard(self, what: str) -> bytes:
        """The next answer. Raises DeadlineError, LostError."""
        try:
            said = self.said.get(timeout=WAIT_S)
        except queue.Empty:
            raise DeadlineError(f"{self.link.peer} did not answer {what} in {WAIT_S:.0f} s") from None
        if isinstance(said, PeerError):
            raise LostError(f"{self.link.peer} has gone: {said}") from said
        return said[1]


def measure(address: str, options: Options) -> tuple[float, float]:
    """(bytes a second, seconds of latency) from here to the host that listens at `address`. Raises PeerError."""
    end = _End(options)
    end.link = connect(address_of(address), end, options, name="probe")
    try:
        trips = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            end.link.send(PING, b"", urgent=True)
            end.heard("a ping")
            trips.append(time.perf_counter() - begin)
        frame, room, count = memoryview(bytes(MIB)), threading.Semaphore(AHEAD), 0
        begin = time.perf_counter()
        while time.perf_counter() < begin + FLOOD_S:
            if not room.acquire(timeout=WAIT_S):
                raise DeadlineError(f"{end.link.peer} took nothing for {WAIT_S:.0f} s")
            end.link.send(FLOOD, b"", [frame], room.release)
            count += 1
        end.link.send(PING, b"")  # behind all of them
        end.heard("the end of a flood")
        return count * MIB / (time.perf_counter() - begin), min(trips) / 2
    finally:
        end.link.close()


def ask(address: str, kind: int, words: str, options: Options) -> Any:
    """What the host there says of itself (DESCRIBE), or of its link to `words` (MEASURE). Raises PeerError."""
    end = _End(options)
    end.link = connect(address_of(address), end, options, name="probe")
    try:
        end.link.send(kind, words.encode())
        found = json.loads(end.heard("what it was asked"))
    finally:
        end.link.close()
    if isinstance(found, dict) and "error" in found:
        raise LostError(f"{address}: {found['error']}")
    return found


def listening(address: str, options: Options, describe: Describe) -> Listener:
    """Raises ConfigError."""
    def accept(link: Link, hello: bytes) -> _End:
        end = _End(options, describe)
        end.link = link
        return end

    return listen(address_of(address), accept, options, lambda line: None)


def serve(address: str, options: Options, describe: Describe) -> None:
    """Answers until it is ended. Raises ConfigError."""
    listener = listening(address, options, describe)
    try:
        print("probe: listening at {}:{}".format(*listener.address), flush=True)
        threading.Event().wait()
    finally:
        listener.close()


def matrix(hosts: Sequence[str], options: Options) -> dict[tuple[str, str], tuple[float, float]]:
    """(from, to) -> (rate, latency) of every pair, one after the other; this host is `here`, from which alone it is
    measured. Raises PeerError."""
    found = {("here", host): measure(host, options) for host in hosts}
    for one in hosts:
        for other in hosts:
            if one != other:
                rate, latency = ask(one, MEASURE, other, options)
                found[one, other] = rate, latency
    return found


def shown(found: dict[tuple[str, str], tuple[float, float]]) -> str:
    names = list(dict.fromkeys(name for pair in found for name in pair))
    width = max(len(name) for name in names) + 2
    lines = [" " * width + "".join(f"{name:>24}" for name in names if any(to == name for _, to in found))]
    for one in names:
        cells = [found.get((one, other)) for other in names if any(to == other for _, to in found)]
        if any(cells):
            lines.append(f"{one:{width}}" + "".join(
                f"{f'{show_rate(cell[0])}, {show_seconds(cell[1])}' if cell else '':>24}" for cell in cells))
    return "\n".join(lines)
