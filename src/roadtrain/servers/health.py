"""Watch: what every server of a job does, who waits for what and since when; asked over a link of
its own.

A server answers whoever proves the token with one frame of JSON, also while it is busy with a
session or hangs in one. Workers and relays are seen through the servers: what they asked for and
what they owe. Does NOT disturb training.
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
SWITCH = "switch: "  # what a switch says begins with it; others are servers
Said = m.Status


class Watcher:
    """Either end: the Receiver of such a link."""

    def __init__(self) -> None:
        self.answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self.answer.put(bytes(payload))

    def lost(self, error: PeerError) -> None:
        self.answer.put(error)


def answer(link: Link, said: Said) -> Watcher:
    link.send(0, b"", [memoryview(msgspec.json.encode(said))])
    return Watcher()


def ask(address: Address, options: TcpOptions, hello: bytes = HELLO) -> Said | PeerError:
    """What the server there says, or why it says nothing. `hello`: the question."""
    watcher = Watcher()
    try:
        once = replace(options, connections=1, retry_s=0.0, connect_s=ANSWER_S)
        link = connect(address, watcher, once, hello=hello, language=m.LANGUAGE)
        said = watcher.answer.get(timeout=ANSWER_S)
        link.close()
        return said if isinstance(said, PeerError) else msgspec.json.decode(said, type=Said)
    except queue.Empty:
        return DeadlineError(f"no answer for {ANSWER_S:.0f} s")
    except msgspec.DecodeError as error:
        return WireError(f"no status: {error}")
    except PeerError as error:
        return error


def ask_all(addresses: Sequence[Address], options: TcpOptions) -> list[Said | PeerError]:
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(partial(ask, options=options), addresses))


def rows(
    names: Sequence[str],
    found: Sequence[Said | PeerError],
    switches: int = 0,
    role: str = "server",
) -> list[tuple[str, str]]:
    """(node, what it waits for and since when), servers first; of a worker the longest wait
    that a server knows of. switches: how many of the last ones are known to be switches; the others
    are each a `role`."""
    out, workers = [], dict[str, tuple[float, str]]()
    for number, (name, one) in enumerate(zip(names, found)):
        if isinstance(one, PeerError):
            known = "switch" if number >= len(names) - switches else role
            out.append((f"{known} {number}", f"does not answer: {str(one).splitlines()[0]}"))
            continue
        kind = "switch" if one[0].startswith(SWITCH) else role
        first, *more = one[0].removeprefix(SWITCH).split("\n")
        out += [(f"{kind} {number}", f"{name}, {first}"), *(("", line) for line in more)]
        for worker, (seconds, what) in one[1].items():
            workers[worker] = max(
                workers.get(worker, (0.0, "")),
                (seconds, f"waits since {seconds:.1f} s for {what} of {name}" if what else ""),
            )
    return out + [
        (worker, text or f"waits for no {role}") for worker, (_, text) in sorted(workers.items())
    ]
