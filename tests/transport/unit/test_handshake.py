"""Both sides of a handshake over a socket pair: accepted and refused clients, the errors on each
side, and that no byte can be changed in transit (Rule 8)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from roadtrain.errors import AuthError, BusyError, WireError
from roadtrain.transport.handshake import (
    MAX_HELLO,
    MAX_TEXT,
    Common,
    Greeting,
    OpenHandshake,
    accept,
    client_greet,
    client_verdict,
    greeting,
    refuse,
    server_greet,
)

TOKEN, LINK = b"the token of a job", bytes(range(16))
Change = Callable[[bytes], bytes]


@dataclass
class Side:
    """A side's options, with fields that differ in its greeting. change: Applied to each message
    that it sends."""

    token: bytes | None = TOKEN
    checksums: bool | None = True
    hello: bytes = b"hello"
    binding: bytes = b""
    language: bytes = bytes(16)
    fields: dict | None = None
    change: Change = bytes

    def greeting(self) -> Greeting:
        common = Common(checksums=self.checksums)
        found = greeting(common, self.token, LINK, language=self.language, hello=self.hello)
        return found._replace(**self.fields or {})


class Changed:
    """A socket that changes outgoing data."""

    def __init__(self, sock: socket.socket, change: Change) -> None:
        self.sock, self.change = sock, change

    def sendall(self, data: bytes) -> None:
        self.sock.sendall(self.change(data))

    def __getattr__(self, name: str):
        return getattr(self.sock, name)


def meet(client: Side, server: Side, refusal: Exception | None = None):
    """Run a handshake. Returns the result or error of the client and of the server."""
    pair = socket.socketpair()
    deadline = time.monotonic() + 10

    def serve(sock) -> OpenHandshake:
        found = server_greet(sock, server.greeting(), server.token, deadline, server.binding)
        if refusal is None:
            accept(sock, found, deadline)
        else:
            refuse(sock, refusal, deadline, found)
        return found

    def connect(sock) -> OpenHandshake:
        ours = client.greeting()
        found = client_greet(sock, ours, client.token, client.hello, deadline, client.binding)
        client_verdict(sock, found, deadline)
        return found

    def ended(side: Side, function, sock):
        try:
            return function(Changed(sock, side.change))
        except Exception as error:
            return error
        finally:
            sock.shutdown(socket.SHUT_WR)  # lets earlier data arrive

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(ended, server, serve, pair[1])
        connected = ended(client, connect, pair[0])
        out = connected, served.result()
    for sock in pair:
        sock.close()
    return out


@pytest.mark.parametrize("hello", [b"", b"x", bytes(MAX_HELLO)], ids=len)
@pytest.mark.parametrize("token", [TOKEN, None])
def test_both_sides_of_a_handshake_agree_and_the_hello_arrives(token, hello) -> None:
    client, server = meet(Side(token, hello=hello), Side(token))
    assert isinstance(client, OpenHandshake) and isinstance(server, OpenHandshake), (client, server)
    assert client.transcript == server.transcript and server.hello == hello
    assert server.greeting.hello_nbytes == len(hello) and server.greeting.link == LINK
    assert (client.token, server.token) == (token, token)


def test_a_hello_that_is_too_long_is_neither_sent_nor_awaited() -> None:
    with pytest.raises(WireError, match=f"{MAX_HELLO + 1} bytes; the limit is {MAX_HELLO}"):
        Side(hello=bytes(MAX_HELLO + 1)).greeting()
    _, server = meet(Side(fields={"hello_nbytes": MAX_HELLO + 1}), Side())
    assert type(server) is WireError and f"{MAX_HELLO + 1} bytes" in str(server)


DIFFERENCES = {
    "a token": (Side(), Side(None), AuthError, "this side has a token, but the peer has none"),
    "no token": (Side(None), Side(), AuthError, "this side has no token, but the peer has one"),
    "sums": (Side(), Side(checksums=False), WireError, "this side's checksums are on, but the pee"),
    "no sums": (
        Side(checksums=False),
        Side(),
        WireError,
        "checksums are off, but the peer's are on",
    ),
    "language": (Side(language=b"a" * 16), Side(), WireError, "uses other messages (00000000)"),
    "older": (Side(fields={"version": 1}), Side(), WireError, "but this side has 1"),
    "newer": (Side(fields={"version": 999}), Side(), WireError, "but this side has 999"),
    "stranger": (Side(fields={"magic": b"zzzzzzz\n"}), Side(), WireError, "magic"),
    "another": (Side(fields={"magic": b"aaaaaaa\n"}), Side(), WireError, "magic"),
    "other token": (Side(b"another"), Side(), AuthError, "the token does not match"),
    "binding": (Side(binding=b"a" * 32), Side(binding=b"b" * 32), AuthError, "does not match"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_between_the_sides_is_refused_and_named(what: str) -> None:  # Rule 8
    client, server, kind, words = DIFFERENCES[what]
    ends = meet(client, server)
    assert not any(isinstance(end, OpenHandshake) for end in ends), ends
    if words == "magic":  # the server hangs up on a stranger
        assert type(ends[1]) is WireError and "is not a roadtrain process" in str(ends[1])
        return
    assert type(ends[0]) is kind and words in str(ends[0]), ends
    assert type(ends[1]) is kind, ends


@pytest.mark.parametrize("magic", [b"zzzzzzz\n", b"aaaaaaa\n"])
def test_a_server_of_another_kind_is_named(magic: bytes) -> None:
    client, _ = meet(Side(), Side(fields={"magic": magic}))
    assert type(client) is WireError and "the peer is not a roadtrain process" in str(client)


def test_checksums_are_on_by_default() -> None:
    assert [Common(checksums=value).summed for value in (None, True, False)] == [True, True, False]
    assert isinstance(meet(Side(checksums=None), Side())[0], OpenHandshake)


@pytest.mark.parametrize(
    ("number", "connections", "fits"),
    [
        *((0, 1, True), (1, 2, True), (63, 64, True), (0, 64, True)),
        *((1, 1, False), (0, 65, False), (0, 0, False), (64, 64, False), (3, 2, False)),
    ],
)
def test_a_link_has_1_to_64_connections_counted_from_0(number, connections, fits) -> None:
    client, server = meet(Side(fields={"number": number, "connections": connections}), Side())
    if fits:
        assert isinstance(client, OpenHandshake)
    else:
        assert type(server) is WireError and f"connection {number} (counted from 0)" in str(server)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (AuthError("no"), AuthError),
        (BusyError("no"), BusyError),
        (WireError("no"), WireError),
        (OSError("no"), WireError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refused_client_gets_the_type_and_text_of_the_error(refusal, kind) -> None:
    client, _ = meet(Side(), Side(), refusal)
    assert type(client) is kind and str(client).endswith(": no"), client


def test_the_words_of_a_refusal_are_short_and_plain() -> None:
    client, _ = meet(Side(), Side(), WireError("one\ntwo\x1b[2J\x0b\x07" + 2 * MAX_TEXT * "x"))
    assert type(client) is WireError
    words = str(client).partition(": ")[2]
    assert words.startswith("one\ntwo[2Jx") and MAX_TEXT - 9 < len(words) <= MAX_TEXT == 2048


def flips(at: int) -> Change:
    """Flip a bit of byte `at` of all sent data."""
    begun = 0

    def change(data: bytes) -> bytes:
        nonlocal begun
        out, at_here = bytearray(data), at - begun
        if 0 <= at_here < len(data):
            out[at_here] ^= 1 << at % 7
        begun += len(data)
        return bytes(out)

    return change


@pytest.mark.parametrize("sender", ["client", "server"])
@pytest.mark.slow
def test_no_byte_of_a_handshake_can_be_changed_in_transit(sender: str) -> None:  # Rule 8
    lengths: list[int] = []

    def count(data: bytes) -> bytes:
        lengths.append(len(data))
        return data

    sides = {"client": Side(), "server": Side(), sender: Side(change=count)}
    assert isinstance(meet(**sides)[0], OpenHandshake)
    for at in range(sum(lengths)):
        ends = meet(**sides | {sender: Side(change=flips(at))})
        deceived = ends[0 if sender == "server" else 1]
        assert isinstance(deceived, AuthError | WireError), (at, deceived)


def test_a_peer_that_echoes_everything_is_not_a_server() -> None:
    client, server = socket.socketpair()
    with client, server, ThreadPoolExecutor(1) as pool:
        echo = pool.submit(lambda: server.sendall(server.recv(1 << 16)))
        with pytest.raises(WireError, match="received its own greeting"):
            client_greet(client, Side().greeting(), TOKEN, b"", time.monotonic() + 10)
        echo.result()
