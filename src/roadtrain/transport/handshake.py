"""Handshake: two strangers become the ends of a link, within a deadline and a few hundred bytes.

    client  GREETING  magic, version, has a token, checksums, number, connections, frame limit, link
                      id, nonce, language, length and SHA-256 of hello
    server  GREETING  its own; then either hangs up if the two do not fit, and says why on its side
    client  PROOF     HMAC-SHA256(token, "client", transcript); then hello (<= 64 KiB)
    server  VERDICT   taken, or refused and why; HMAC-SHA256(token, "server", transcript, verdict)
                      if the client's was right

The transcript is all that was said before: both greetings and, under TLS, the server's certificate,
so that nobody stands between; in a verdict also the proof and hello. Both nonces are new each time
and each side proves its own role: what was heard once proves nothing again, and what one side said
proves nothing for the other. Each message ends with its own checksum: a flipped bit is called so,
not a wrong token.

NOTE language. A digest of what the frames of both sides can say (of servers/frames.py, most often):
two editions of roadtrain that would misunderstand each other do not begin. The first ten bytes
(magic, version) stay as they are in every edition, so that each can say of the other that it is
another one.

The token is never sent; both prove it; without one both must have none. All connections of a link
carry one link id; hello comes with the first, the verdict when all are there. Assumes what protects
the bytes after it (TLS, a private network) is the owner's choice. Does NOT know which kind of
socket it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roadtrain.errors import (
    AuthError,
    BusyError,
    DeadlineError,
    LostError,
    PeerError,
    RoadtrainError,
    WireError,
)
from roadtrain.transport.link import FRAME_LIMIT, SUM, VERSION, opened, sealed
from roadtrain.transport.stream import FrameStream
from roadtrain.units import KIB

MAGIC = b"roadtrn\n"
BEGINNING = struct.Struct("<8sH")  # magic, version: of every edition
GREETING = struct.Struct("<8sH??HHQ16s32s16sI32s")
PROOF = struct.Struct("<32s")
VERDICT = struct.Struct("<BHQ32s")  # code, bytes of the text, their xxh3, proof
MAX_HELLO, MAX_TEXT, MAX_CONNECTIONS = 64 * KIB, 2 * KIB, 64
TAKEN, REFUSED, NOT_PROVEN, BUSY = 0, 1, 2, 3
CODES = {AuthError: NOT_PROVEN, BusyError: BUSY}


@dataclass(frozen=True)
class Common:
    """What every transport asks for. `frame_limit`: the smaller of both sides counts for
    sending. `checksums`: xxh3 of every frame (None: wherever bytes leave the process, but under
    TLS, which authenticates them); both sides must say the same. `retry_s`: how long to try
    again while nobody listens there; None: not at all, or as long as the deadline of whoever
    connects, if it has one. `close_s`: how long `close` waits for the other side while nothing
    moves."""

    frame_limit: int = FRAME_LIMIT
    checksums: bool | None = None
    handshake_s: float = 10.0
    close_s: float = 5.0
    retry_s: float | None = None

    @property
    def summed(self) -> bool:
        """Whether frames carry checksums."""
        return self.checksums is not False


DEFAULTS = Common()
NO_LANGUAGE = bytes(16)  # of frames that mean nothing to roadtrain's nodes


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
    language: bytes  # NOTE language
    hello_nbytes: int
    hello_digest: bytes  # SHA-256


@dataclass(frozen=True)
class OpenHandshake:
    """A handshake that lacks the verdict, on either side. `greeting`: the other side's."""

    greeting: Greeting
    token: bytes | None
    transcript: bytes
    hello: bytes = b""  # on the server's side


def greeting(
    common: Common,
    token: bytes | None,
    link: bytes,
    number: int = 0,
    connections: int = 1,
    *,
    language: bytes = NO_LANGUAGE,
    hello: bytes = b"",
) -> Greeting:
    """Raises WireError where hello is too long."""
    if len(hello) > MAX_HELLO:
        raise WireError(f"a hello of {len(hello)} bytes, {MAX_HELLO} are allowed")
    return Greeting(
        MAGIC,
        VERSION,
        token is not None,
        common.summed,
        number,
        connections,
        common.frame_limit,
        link,
        secrets.token_bytes(32),
        language,
        len(hello),
        hashlib.sha256(hello).digest(),
    )


def client_greet(
    sock: socket.socket,
    ours: Greeting,
    token: bytes | None,
    hello: bytes,
    deadline: float,
    binding: bytes = b"",
) -> OpenHandshake:
    """The first three messages. `binding`: of the channel below, the same on both sides; empty
    without TLS."""
    mine = sealed(GREETING.pack(*ours))
    send(sock, mine, deadline)
    beginning = receive(sock, BEGINNING.size, deadline, "the server's greeting")
    raw = _rest_of_greeting(sock, ours, beginning, deadline)
    theirs = _fits(ours, raw)
    transcript = mine + raw + binding
    proof = _prove(token, b"client", transcript)
    send(sock, sealed(PROOF.pack(proof)) + hello, deadline)
    return OpenHandshake(theirs, token, transcript + proof + hello)


def client_verdict(sock: socket.socket, answer: OpenHandshake, deadline: float) -> None:
    """Raises AuthError, BusyError or WireError with the server's words where it refuses."""
    what = "the server's verdict"
    raw = receive(sock, VERDICT.size + SUM.size, deadline, what)
    code, length, text_sum, theirs = VERDICT.unpack(opened(raw, what))
    if length > MAX_TEXT:
        raise WireError(f"a verdict of {length} bytes, {MAX_TEXT} are allowed")
    words = receive(sock, length, deadline, what)
    opened(words + SUM.pack(text_sum), what)
    decoded = words.decode(errors="replace")
    # it may come from a stranger
    text = "".join(c for c in decoded if c.isprintable() or c == "\n")
    if code == NOT_PROVEN:
        raise AuthError(f"refused by the server: {text}")
    if not hmac.compare_digest(theirs, _prove_verdict(answer, code, words)):
        raise AuthError(
            "the server does not prove the token", hint="give both sides the same token"
        )
    if code != TAKEN:
        raise (BusyError if code == BUSY else WireError)(f"refused by the server: {text}")


def server_greet(
    sock: socket.socket, ours: Greeting, token: bytes | None, deadline: float, binding: bytes = b""
) -> OpenHandshake:
    """The server's side up to hello. Raises PeerError for whoever is not to be let in."""
    beginning = receive(sock, BEGINNING.size, deadline, "a greeting")
    if beginning[: len(MAGIC)] != MAGIC:
        raise WireError(f"a stranger: began with {beginning!r}")
    mine = sealed(GREETING.pack(*ours))
    send(sock, mine, deadline)
    raw = _rest_of_greeting(sock, ours, beginning, deadline)
    theirs = _fits(ours, raw)
    if not theirs.number < theirs.connections <= MAX_CONNECTIONS:
        raise WireError(
            f"connection {theirs.number} of {theirs.connections}, {MAX_CONNECTIONS} are allowed"
        )
    if theirs.hello_nbytes > MAX_HELLO:
        raise WireError(f"a hello of {theirs.hello_nbytes} bytes, {MAX_HELLO} are allowed")
    transcript = raw + mine + binding
    sealed_proof = receive(sock, PROOF.size + SUM.size, deadline, "a proof of the token")
    proof = opened(sealed_proof, "the proof of the token")
    if not hmac.compare_digest(proof, _prove(token, b"client", transcript)):
        refusal = AuthError("the token does not match", hint="give both sides the same token")
        refuse(sock, refusal, deadline)
        raise refusal
    hello = receive(sock, theirs.hello_nbytes, deadline, "hello")
    if hashlib.sha256(hello).digest() != theirs.hello_digest:
        raise WireError("hello does not match its checksum")
    return OpenHandshake(theirs, token, transcript + bytes(proof) + hello, hello)


def take(sock: socket.socket, caller: OpenHandshake, deadline: float) -> None:
    _send_verdict(sock, TAKEN, b"", deadline, caller)


def refuse(
    sock: socket.socket, error: Exception, deadline: float, caller: OpenHandshake | None = None
) -> None:
    """Tells the client why: an AuthError or BusyError there too if it is one here, else a
    WireError."""
    code = next((code for kind, code in CODES.items() if isinstance(error, kind)), REFUSED)
    _send_verdict(sock, code, str(error).encode()[:MAX_TEXT], deadline, caller)


def _send_verdict(
    sock: socket.socket, code: int, text: bytes, deadline: float, caller: OpenHandshake | None
) -> None:
    proof = _prove_verdict(caller, code, text) if caller else bytes(32)
    (text_sum,) = SUM.unpack(sealed(text)[-SUM.size :])
    send(sock, sealed(VERDICT.pack(code, len(text), text_sum, proof)) + text, deadline)


def _rest_of_greeting(
    sock: socket.socket, ours: Greeting, beginning: bytes, deadline: float
) -> bytes:
    """The whole greeting; WireError for one of another edition, which may be longer or shorter."""
    magic, version = BEGINNING.unpack(beginning)
    if magic != MAGIC:
        raise WireError(f"not a roadtrain peer: began with {beginning!r}")
    if version != ours.version:
        # what is unread when we hang up may take our own greeting with it
        with contextlib.suppress(OSError):
            sock.settimeout(0.1)
            sock.recv(GREETING.size)
        raise WireError(
            f"the peer speaks protocol version {version}, this side {ours.version}",
            hint="install the same version of roadtrain on both",
        )
    left = GREETING.size + SUM.size - len(beginning)
    return beginning + receive(sock, left, deadline, "the rest of a greeting")


def _fits(ours: Greeting, raw: bytes) -> Greeting:
    theirs = Greeting(*GREETING.unpack(opened(raw, "the peer's greeting")))
    if theirs.nonce == ours.nonce:
        raise WireError("our own greeting came back: something on the way sends back what it hears")
    if theirs.language != ours.language:
        raise WireError(
            f"the peer speaks other messages ({theirs.language.hex()[:8]}) than this side"
            f" ({ours.language.hex()[:8]}): another edition of roadtrain, or a server of another"
            " kind",
            hint="install the same version of roadtrain on both; is this the address of a server of"
            " the kind that is meant?",
        )
    if theirs.has_token != ours.has_token:
        have = ("none here", "one there") if theirs.has_token else ("one here", "none there")
        raise AuthError(f"token: {have[0]}, {have[1]}", hint="give both sides the same token")
    if theirs.checksums != ours.checksums:
        here, there = ("on" if g.checksums else "off" for g in (ours, theirs))
        raise WireError(f"checksums are {here} here and {there} there", hint="set both the same")
    return theirs


def _prove(token: bytes | None, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token or b"none", b"roadtrain " + role + transcript, "sha256")


def _prove_verdict(side: OpenHandshake, code: int, text: bytes) -> bytes:
    return _prove(side.token, b"server", side.transcript + bytes([code]) + text)


def send(sock: socket.socket, data: bytes, deadline: float) -> None:
    _timed(sock, deadline, "an answer")
    try:
        sock.sendall(data)
    except ConnectionError as error:
        when = "while it waited for our part of the handshake"
        raise LostError(f"{error.strerror} {when}") from error


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
        except ConnectionError as error:
            raise LostError(
                f"{error.strerror} while we waited for {what} ({have} of {nbytes} bytes)"
            ) from error
        if n == 0:
            raise LostError(f"hung up while we waited for {what} ({have} of {nbytes} bytes)")
        have += n
    return bytes(raw)


def _timed(sock: socket.socket, deadline: float, what: str) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError(f"no {what} before the handshake's deadline")
    sock.settimeout(left)


def stream_between(peer: str, ours: Common, theirs: Sequence[OpenHandshake]) -> FrameStream:
    """A link that is not started yet, on the terms that both sides can keep."""
    limit = min([ours.frame_limit, *(other.greeting.frame_limit for other in theirs)])
    return FrameStream(peer, limit, ours.summed, ours.close_s)


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
    why = (error.strerror or error) if isinstance(error, OSError) else repr(error)
    return LostError(f"{peer}: {why}")
