"""Watch: what every server of a job does, who waits for what and since when; asked over a link of its own.

A server answers whoever proves the token with one frame of JSON, also while it is busy with a session or hangs in one.
Workers and relays are seen through the servers: what they asked for and what they owe. Does NOT disturb training.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from roadtrain.errors import DeadlineError, PeerError, WireError
from roadtrain.wire.link import Link
from roadtrain.wire.tcp import Address, Options, connect

HELLO = b"roadtrain status"
STATUS = 40
ANSWER_S = 5.0


class Wait(msgspec.Struct):
    """`who` waits for `what` of `whom`; "" is the server itself. Since `seconds`."""

    who: str
    whom: str
    what: str
    seconds: float


class Status(msgspec.Struct):
    """Of a server. `step`: the last committed one, -1 without a session. `workers`: name -> seconds since its last
    message; `expected`: how many there are to be."""

    where: str
    store: str
    rests: str
    step: int = -1
    expected: int = 0
    workers: dict[str, float] = {}
    waits: list[Wait] = []


class Watched:
    """The server's Receiver of such a link: nothing more is to come."""

    def __init__(self, link: Link, status: Status) -> None:
        link.send(STATUS, b"", [memoryview(msgspec.json.encode(status))])

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        raise WireError(f"a frame of kind {kind} from who only watches")

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        raise WireError(f"a frame of kind {kind} from who only watches")

    def lost(self, error: PeerError) -> None: ...


class _Asker:
    def __init__(self) -> None:
        self.answer: queue.SimpleQueue[Status | PeerError] = queue.SimpleQueue()

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        try:
            self.answer.put(msgspec.json.decode(payload, type=Status))
        except msgspec.DecodeError as error:
            self.answer.put(WireError(f"no status: {error}"))

    def lost(self, error: PeerError) -> None:
        self.answer.put(error)


def ask(address: Address, options: Options) -> Status | PeerError:
    asker = _Asker()
    try:
        link = connect(address, asker, replace(options, connections=1, retry_s=0.0, connect_s=ANSWER_S), hello=HELLO)
        try:
            return asker.answer.get(timeout=ANSWER_S)
        finally:
            link.close()
    except queue.Empty:
        return DeadlineError(f"no status within {ANSWER_S:.0f} s")
    except PeerError as error:
        return error


def ask_all(addresses: Sequence[Address], options: Options) -> list[Status | PeerError]:
    """Of each server, in order: its status, or why there is none."""
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(lambda address: ask(address, options), addresses))


def rows(addresses: Sequence[str], found: Sequence[Status | PeerError]) -> list[tuple[str, str]]:
    """(node, what it waits for and since when), servers first."""
    out, heard, waits = [], dict[str, float](), dict[str, tuple[Wait, str]]()
    for number, (address, one) in enumerate(zip(addresses, found)):
        if not isinstance(one, Status):
            out.append((f"server {number}", f"does not answer: {str(one).splitlines()[0]}"))
            continue
        for wait in one.waits:
            if wait.who and (wait.who not in waits or wait.seconds > waits[wait.who][0].seconds):
                waits[wait.who] = wait, address
        for name, seconds in one.workers.items():
            heard[name] = min(seconds, heard.get(name, seconds))
        out.append((f"server {number}", f"{address}, state {one.rests}; {_does(one)}"))
    for name, seconds in sorted(heard.items()):
        said = f"last word {seconds:.1f} s ago"
        if name in waits:
            wait, address = waits[name]
            said = f"waits since {wait.seconds:.1f} s for {wait.what} of {address}; {said}"
        out.append((name, said))
    return out


def _does(one: Status) -> str:
    if not one.expected:
        return "no session: waits for workers"
    owed = [wait for wait in one.waits if not wait.who]
    if not owed:
        return f"step {one.step}, {one.expected} worker(s)"
    worst = max(owed, key=lambda wait: wait.seconds)
    of = f" of {worst.whom}" if worst.whom else ""
    more = f" (and {len(owed) - 1} more)" if len(owed) > 1 else ""
    return f"step {one.step}, {one.expected} worker(s); waits since {worst.seconds:.1f} s for {worst.what}{of}{more}"
