"""Handshake: two strangers become the ends of a link, within a deadline and a few hundred bytes.

    client  GREETING  magic, version, has a token, checksums, number, connections, frame limit, link id, nonce
    server  GREETING  its own; then either hangs up if the two do not fit, and says why on its side
    client  PROOF     HMAC-SHA256(token, "client", both greetings), length of hello; then hello (<= 64 KiB)
    server  VERDICT   taken or refused and why; HMAC-SHA256(token, "server", both greetings) if the client's was right

The token is never sent; both prove it, over both nonces; without one both must have none. All connections of a link
carry one link id; hello comes with the first, the verdict when all are there. Assumes what protects the bytes after
it (TLS, a private network) is the owner's choice. Does NOT know which kind of socket it is.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roadtrain.errors import AuthError, BusyError, DeadlineError, LostError, PeerError, RoadtrainError, WireError
from roadtrain.units import KIB
from roadtrain.wire.link import FRAME_LIMIT, VERSION

MAGIC = b"roadtrn\n"
GREETING = struct.Struct("<8sH??HHQ16s32s")
PROOF = struct.Struct("<32sI")
VERDICT = struct.Struct("<B32sH")
MAX_HELLO, MAX_TEXT, MAX_CONNECTIONS = 64 * KIB, 2 * KIB, 64
TAKEN, REFUSED, NOT_PROVEN, BUSY = 0, 1, 2, 3


@dataclass(frozen=True)
class Common:
    """What every transport asks for. `frame_limit`: the smaller of both sides counts for sending. `checksums`: xxh3
    of every frame; both sides must say the same. `retry_s`: how long to try again while nobody listens there; None: not
    at all, or as long as the deadline of whoever dials, if it has one. `close_s`: how long `close` waits for the other
    side while nothing moves."""

    frame_limit: int = FRAME_LIMIT
    checksums: bool = False
    handshake_s: float = 10.0
    close_s: float = 5.0
    retry_s: float | None = None


DEFAULTS = Common()


class Greeting(NamedTuple):
    magic: bytes
    version: int
    has_token: bool
    checksums: bool
    number: int  # of this connection, from 0
    connections: int
    frame_limit: int
    link: bytes
    nonce: bytes


@dataclass(frozen=True)
class Caller:
    """A client's connection that proved the token and waits for its verdict."""

    greeting: Greeting
    hello: bytes
    proof: bytes  # ours, for the verdict


def greeting(common: Common, token: bytes | None, link: bytes, number: int = 0, connections: int = 1) -> Greeting:
    return Greeting(MAGIC, VERSION, token is not None, common.checksums, number, connections, common.frame_limit, link,
                    secrets.token_bytes(32))


def client_greet(sock: socket.socket, ours: Greeting, token: bytes | None, hello: bytes, deadline: float) -> Greeting:
    """The first three messages; returns the server's greeting with, as `nonce`, the proof its verdict must carry."""
    if len(hello) > MAX_HELLO:
        raise WireError(f"a hello of {len(hello)} bytes, {MAX_HELLO} are allowed")
    mine = GREETING.pack(*ours)
    send(sock, mine, deadline)
    raw = receive(sock, GREETING.size, deadline, "the server's greeting")
    theirs = _fits(ours, raw)
    send(sock, PROOF.pack(_prove(token, b"client", mine, raw), len(hello)) + hello, deadline)
    return theirs._replace(nonce=_prove(token, b"server", mine, raw))


def client_verdict(sock: socket.socket, proof: bytes, deadline: float) -> None:
    code, theirs, length = VERDICT.unpack(receive(sock, VERDICT.size, deadline, "the server's verdict"))
    if length > MAX_TEXT:
        raise WireError(f"a verdict of {length} bytes, {MAX_TEXT} are allowed")
    words = receive(sock, length, deadline, "the server's verdict").decode(errors="replace")
    text = "".join(c for c in words if c.isprintable() or c == "\n")  # it may come from a stranger
    if code == NOT_PROVEN:
        raise AuthError(f"refused by the server: {text}")
    if not hmac.compare_digest(theirs, proof):
        raise AuthError("the server does not prove the token", hint="give both sides the same token")
    if code != TAKEN:
        raise (BusyError if code == BUSY else WireError)(f"refused by the server: {text}")


def server_greet(sock: socket.socket, ours: Greeting, token: bytes | None, deadline: float) -> Caller:
    """The server's side up to hello. Raises PeerError for whoever is not to be let in."""
    raw = receive(sock, GREETING.size, deadline, "a greeting")
    if raw[: len(MAGIC)] != MAGIC:
        raise WireError(f"a stranger: began with {raw[:16]!r}")
    mine = GREETING.pack(*ours)
    send(sock, mine, deadline)
    theirs = _fits(ours, raw)
    if not theirs.number < theirs.connections <= MAX_CONNECTIONS:
        raise WireError(f"connection {theirs.number} of {theirs.connections}, {MAX_CONNECTIONS} are allowed")
    proof, length = PROOF.unpack(receive(sock, PROOF.size, deadline, "a proof of the token"))
    if not hmac.compare_digest(proof, _prove(token, b"client", raw, mine)):
        refusal = AuthError("the token does not match", hint="give both sides the same token")
        refuse(sock, refusal, deadline)
        raise refusal
    if length > MAX_HELLO:
        raise WireError(f"a hello of {length} bytes, {MAX_HELLO} are allowed")
    return Caller(theirs, receive(sock, length, deadline, "hello"), _prove(token, b"server", raw, mine))


def take(sock: socket.socket, caller: Caller, deadline: float) -> None:
    send(sock, VERDICT.pack(TAKEN, caller.proof, 0), deadline)


def refuse(sock: socket.socket, error: Exception, deadline: float, caller: Caller | None = None) -> None:
    """Tells the client why: an AuthError or BusyError there too if it is one here, else a WireError."""
    text = str(error).encode()[:MAX_TEXT]
    code = NOT_PROVEN if isinstance(error, AuthError) else BUSY if isinstance(error, BusyError) else REFUSED
    send(sock, VERDICT.pack(code, caller.proof if caller else bytes(32), len(text)) + text, deadline)


def _fits(ours: Greeting, raw: bytes) -> Greeting:
    theirs = Greeting(*GREETING.unpack(raw))
    if theirs.magic != MAGIC:
        raise WireError(f"not a roadtrain peer: began with {raw[:16]!r}")
    if theirs.version != ours.version:
        raise WireError(f"the peer speaks protocol version {theirs.version}, this side {ours.version}",
                        hint="install the same version of roadtrain on both")
    if theirs.has_token != ours.has_token:
        have = ("none here", "one there") if theirs.has_token else ("one here", "none there")
        raise AuthError(f"token: {have[0]}, {have[1]}", hint="give both sides the same token")
    if theirs.checksums != ours.checksums:
        here, there = ("on" if g.checksums else "off" for g in (ours, theirs))
        raise WireError(f"checksums are {here} here and {there} there", hint="set both the same")
    return theirs


def _prove(token: bytes | None, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(token or b"none", b"roadtrain " + role + client + server, "sha256")


def send(sock: socket.socket, data: bytes, deadline: float) -> None:
    _timed(sock, deadline, "an answer")
    sock.sendall(data)


def receive(sock: socket.socket, nbytes: int, deadline: float, what: str) -> bytes:
    """Exactly that many; the deadline is for all of them together, however slowly they drip."""
    raw = bytearray(nbytes)
    view, have = memoryview(raw), 0
    while have < nbytes:
        _timed(sock, deadline, what)
        try:
            n = sock.recv_into(view[have:])
        except TimeoutError:
            continue  # _timed says so
        if n == 0:
            raise LostError(f"hung up while we waited for {what} ({have} of {nbytes} bytes)")
        have += n
    return bytes(raw)


def _timed(sock: socket.socket, deadline: float, what: str) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError(f"no {what} before the handshake's deadline")
    sock.settimeout(left)


def limits(ours: Common, theirs: Sequence[Greeting]) -> int:
    return min([ours.frame_limit, *(g.frame_limit for g in theirs)])


def as_peer_error(error: Exception, peer: str) -> PeerError:
    """A PeerError of the same kind that names the peer."""
    if isinstance(error, PeerError):
        return error if peer in str(error) else type(error)(f"{peer}: {error}")
    if isinstance(error, ssl.SSLError):
        return AuthError(f"{peer}: TLS: {error.reason or error}")
    if isinstance(error, TimeoutError):
        return DeadlineError(f"{peer}: no answer before the handshake's deadline")
    if isinstance(error, RoadtrainError):
        return WireError(f"{peer}: {error}")
    return LostError(f"{peer}: {(error.strerror or error) if isinstance(error, OSError) else repr(error)}")
