"""Watch: query every server of a job, over a link of its own, for what it does and which worker
waits for what.

A server answers every caller that proves the token, with one frame of JSON, even while a session
keeps it busy or hangs. Workers and relays are seen through the servers: by the pulls they wait for
and the messages they owe. Does NOT disturb training.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from roadtrain.errors import DeadlineError, PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.transport.link import Link
from roadtrain.transport.tcp import Address, TcpOptions, connect

HELLO = b"roadtrain status"
ANSWER_S = 5.0
SWITCH = "switch: "  # the status of a switch begins with it; all others are servers
Status = m.Status


class Watcher:
    """The Receiver of a status link, at either end."""

    def __init__(self) -> None:
        self.answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self.answer.put(bytes(payload))

    def lost(self, error: PeerError) -> None:
        self.answer.put(error)


def answer(link: Link, status: Status) -> Watcher:
    link.send(0, b"", [memoryview(msgspec.json.encode(status))])
    return Watcher()


def ask(address: Address, options: TcpOptions, hello: bytes = HELLO) -> Status | PeerError:
    """Query the server at `address` for its status; return the error if it does not answer."""
    watcher = Watcher()
    try:
        once = replace(options, connections=1, retry_s=0.0, connect_s=ANSWER_S)
        link = connect(address, watcher, once, hello=hello, language=m.LANGUAGE)
        reply = watcher.answer.get(timeout=ANSWER_S)
        link.close()
        return reply if isinstance(reply, PeerError) else msgspec.json.decode(reply, type=Status)
    except queue.Empty:
        return DeadlineError(f"no answer for {ANSWER_S:.0f} s")
    except msgspec.DecodeError as error:
        return WireError(f"not a status: {error}")
    except PeerError as error:
        return error


def ask_all(addresses: Sequence[Address], options: TcpOptions) -> list[Status | PeerError]:
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(partial(ask, options=options), addresses))


def rows(
    names: Sequence[str],
    found: Sequence[Status | PeerError],
    switches: int = 0,
    role: str = "server",
) -> list[tuple[str, str]]:
    """Format the statuses as (node, its state) rows, servers first. Each worker's row shows the
    longest wait that any server reports. The last `switches` of `names` are switches; the others
    have the role `role`."""
    out, workers = [], dict[str, tuple[float, str]]()
    for number, (name, status) in enumerate(zip(names, found)):
        if isinstance(status, PeerError):
            kind = "switch" if number >= len(names) - switches else role
            out.append((f"{kind} {number}", f"does not answer: {str(status).splitlines()[0]}"))
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
