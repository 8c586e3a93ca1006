"""Status queries: ask every server of a job what it does, and which worker waits for what. Each
query uses a separate link, so it is answered also while training runs or hangs. Workers and relays
are not asked.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from roadtrain.errors import AuthError, DeadlineError, PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers.trace import Interval
from roadtrain.transport.link import Link
from roadtrain.transport.tcp import Address, TcpOptions, connect

HELLO = b"roadtrain status"
ANSWER_S = 5.0
ASK_INTERVALS = b"roadtrain intervals"  # the hello of a query for a server's intervals
SWITCH = "switch: "  # prefix of the status of a switch; a status without it is a server's
Status = m.Status


class Watcher:
    """The Receiver of a status link, used at both ends of the link."""

    def __init__(self) -> None:
        self.answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self.answer.put((bytes(header), bytes(payload), time.time()))

    def lost(self, error: PeerError) -> None:
        self.answer.put(error)


def answer(link: Link, reply: Status | list[Interval]) -> Watcher:
    link.send(0, repr(time.time()).encode(), [memoryview(msgspec.json.encode(reply))])
    return Watcher()


def ask(address: Address, options: TcpOptions, **how: Any) -> Any:
    """Query the server at `address`, like ask_with_clock. Returns its answer or an error."""
    return ask_with_clock(address, options, **how)[0]


def ask_with_clock(
    address: Address,
    options: TcpOptions,
    hello: bytes = HELLO,
    answer_s: float = ANSWER_S,
    kind: Any = Status,
) -> tuple[Any, float | None]:
    """Query the server at `address`. Returns its answer or an error, and the seconds by which its
    clock is ahead of this host's, less the time that the answer travelled; None if unknown. `kind`:
    the type of the answer to another `hello`, such as list[Interval] to ASK_INTERVALS."""
    watcher = Watcher()
    handshake_s = min(answer_s, options.handshake_s)
    try:
        once = replace(
            options, connections=1, retry_s=0.0, connect_s=answer_s, handshake_s=handshake_s
        )
        link = connect(address, watcher, once, hello=hello, language=m.LANGUAGE)
        try:
            reply = watcher.answer.get(timeout=answer_s)
        finally:
            link.close()
        if isinstance(reply, PeerError):
            return reply, None
        clock, body, now = reply
        ahead_s = float(clock) - now if clock else None
        return msgspec.json.decode(body, type=kind), ahead_s
    except queue.Empty:
        return DeadlineError(f"no answer for {answer_s:.0f} s"), None
    except (msgspec.DecodeError, ValueError) as error:
        return WireError(f"the answer is not a status: {error}"), None
    except PeerError as error:
        return error, None


def ask_all(addresses: Sequence[Address], options: TcpOptions) -> list[Status | PeerError]:
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(partial(ask, options=options), addresses))


def rows(
    names: Sequence[str],
    found: Sequence[Status | PeerError],
    switches: int = 0,
    role: str = "server",
) -> list[tuple[str, str]]:
    """Format statuses as rows (node, state of the node). Rows of workers follow, each with the
    worker's longest wait.

    Args:
        names: Addresses of the nodes that were asked. The last `switches` names are switches.
        found: The status of each node, or an error if the node did not answer.
        switches: The number of switches.
        role: The role of the nodes that are not switches.
    """
    out, workers = [], dict[str, tuple[float, str]]()
    for number, (name, status) in enumerate(zip(names, found)):
        if isinstance(status, PeerError):
            kind = "switch" if number >= len(names) - switches else role
            refused = isinstance(status, AuthError)
            why = "refuses to answer" if refused else "does not answer"
            out.append((f"{kind} {number}", f"{why}: {str(status).splitlines()[0]}"))
            continue
        kind = "switch" if status[0].startswith(SWITCH) else role
        first, *more = status[0].removeprefix(SWITCH).split("\n")
        out += [(f"{kind} {number}", f"{name}, {first}"), *(("", line) for line in more)]
        for worker, (seconds, what) in status[1].items():
            workers[worker] = max(
                workers.get(worker, (0.0, "")),
                (seconds, f"waiting {seconds:.1f} s for {what} of {name}" if what else ""),
            )
    return out + [
        (worker, text or f"waits for no {role}") for worker, (_, text) in sorted(workers.items())
    ]
