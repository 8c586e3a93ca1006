"""The handshake of a new connection. Both sides authenticate each other before a deadline, with
messages of a few hundred bytes.

    client  GREETING  magic, version, has a token, checksums, number, connections, frame limit, link
                      id, nonce, language, length and SHA-256 of hello
    server  GREETING  the same fields; a side that cannot accept the fields of the other side hangs
                      up and reports why
    client  PROOF     HMAC-SHA256(token, "client", transcript); then hello (<= 64 KiB)
    server  VERDICT   accepted, or refused with a reason; HMAC-SHA256(token, "server", transcript,
                      verdict) if the client's proof was right

The transcript of PROOF consists of both greetings and, under TLS, the server's certificate, so that
a man in the middle is detected. The transcript of VERDICT consists of the transcript of PROOF, the
client's proof and hello. Both sides choose a new nonce for each handshake, and each side proves its
own role, so a message can neither be replayed later nor sent back to its sender. Each message ends
with its own checksum, so that a flipped bit is not reported as a wrong token.

Note "language". The language is a digest of all message types that the two sides exchange, so
versions of roadtrain that would misunderstand each other refuse to connect. The first ten bytes of
a greeting (magic, version) are the same in every version of roadtrain, so that each side can report
that the other side has another version.

"hello" is a message of the client's owner, such as the number of a worker. The token is never sent,
but both sides prove that they know the token. A side without a token only connects to another side
without a token. All connections of a link have the same link id. The client sends hello on the
first connection. The server sends a verdict on each connection once all connections of the link
have arrived. The handshake does not protect the bytes after it: for these, use TLS or a private
network.
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
BEGINNING = struct.Struct("<8sH")  # magic, version; the same in every version
GREETING = struct.Struct("<8sH??HHQ16s32s16sI32s")
PROOF = struct.Struct("<32s")
VERDICT = struct.Struct("<BHQ32s")  # code, bytes of the text, their xxh3, proof
MAX_HELLO, MAX_TEXT, MAX_CONNECTIONS = 64 * KIB, 2 * KIB, 64
ACCEPTED, REFUSED, NOT_PROVEN, BUSY = 0, 1, 2, 3
CODES = {AuthError: NOT_PROVEN, BusyError: BUSY}


@dataclass(frozen=True)
class Common:
    """Options of every transport.

    Attributes:
        frame_limit: Largest payload in bytes. The smaller limit of both sides applies.
        checksums: Whether every frame has a checksum (xxh3); both sides must agree. If None, frames
            have checksums, except on links inside one process and on links with TLS. (TLS
            authenticates the bytes itself.)
        handshake_s: The most seconds that a handshake may take.
        close_s: Seconds after which `close` gives up if no byte leaves.
        retry_s: Seconds for which connecting is retried while nothing listens at the address. If
            None, connecting is retried until the caller's deadline. If the caller has no deadline
            either, connecting is not retried.
    """

    frame_limit: int = FRAME_LIMIT
    checksums: bool | None = None
    handshake_s: float = 10.0
    close_s: float = 5.0
    retry_s: float | None = None

    @property
    def summed(self) -> bool:
        """True if frames carry checksums."""
        return self.checksums is not False


DEFAULTS = Common()
NO_LANGUAGE = bytes(16)  # the language of links that do not carry roadtrain's own messages


class Greeting(NamedTuple):
    """The first message of each side in a handshake."""

    magic: bytes
    version: int
    has_token: bool
    checksums: bool
    number: int  # index of this connection among the connections of the link
    connections: int  # number of connections of the link
    frame_limit: int
    link: bytes
    nonce: bytes
    language: bytes  # see Note "language"
    hello_nbytes: int
    hello_digest: bytes  # SHA-256


@dataclass(frozen=True)
class OpenHandshake:
    """A handshake that is complete except for the verdict. `greeting`: the greeting of the other
    side."""

    greeting: Greeting
    token: bytes | None
    transcript: bytes
    hello: bytes = b""  # set on the server's side only


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
    """Return the greeting that this side sends on connection `number` of the link with the id
    `link`. Raises WireError if `hello` is longer than 64 KiB."""
    if len(hello) > MAX_HELLO:
        raise WireError(f"the hello message has {len(hello)} bytes; the limit is {MAX_HELLO}")
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
    """Do the client's side of a handshake, without the verdict. `binding`: the SHA-256 of the
    server's TLS certificate, or b"" without TLS."""
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
    """Receive the server's verdict. If the server refuses the client, raises AuthError, BusyError
    or WireError with the server's reason."""
    what = "the server's verdict"
    raw = receive(sock, VERDICT.size + SUM.size, deadline, what)
    code, length, text_sum, theirs = VERDICT.unpack(opened(raw, what))
    if length > MAX_TEXT:
        raise WireError(f"the server's verdict has {length} bytes; the limit is {MAX_TEXT}")
    words = receive(sock, length, deadline, what)
    opened(words + SUM.pack(text_sum), what)
    decoded = words.decode(errors="replace")
    # control characters are removed, because the server is not authenticated yet
    text = "".join(c for c in decoded if c.isprintable() or c == "\n")
    if code == NOT_PROVEN:
        raise AuthError(f"the server refused the connection: {text}")
    if not hmac.compare_digest(theirs, _prove_verdict(answer, code, words)):
        raise AuthError(
            "the server did not prove that it has the token", hint="give both sides the same token"
        )
    if code != ACCEPTED:
        raise (BusyError if code == BUSY else WireError)(f"the server refused the link: {text}")


def server_greet(
    sock: socket.socket, ours: Greeting, token: bytes | None, deadline: float, binding: bytes = b""
) -> OpenHandshake:
    """Do the server's side of a handshake, without the verdict. Raises PeerError if the client must
    be refused. `binding`: the SHA-256 of the server's TLS certificate, or b"" without TLS."""
    beginning = receive(sock, BEGINNING.size, deadline, "a greeting")
    if beginning[: len(MAGIC)] != MAGIC:
        raise WireError(f"the client is not a roadtrain process: its first bytes are {beginning!r}")
    mine = sealed(GREETING.pack(*ours))
    send(sock, mine, deadline)
    raw = _rest_of_greeting(sock, ours, beginning, deadline)
    theirs = _fits(ours, raw)
    if not theirs.number < theirs.connections <= MAX_CONNECTIONS:
        raise WireError(
            f"the client opens connection {theirs.number} (counted from 0) of a link with"
            f" {theirs.connections} connections; the limit is {MAX_CONNECTIONS} connections"
        )
    if theirs.hello_nbytes > MAX_HELLO:
        raise WireError(
            f"the client's hello message has {theirs.hello_nbytes} bytes; the limit is {MAX_HELLO}"
        )
    transcript = raw + mine + binding
    sealed_proof = receive(sock, PROOF.size + SUM.size, deadline, "a proof of the token")
    proof = opened(sealed_proof, "the proof of the token")
    if not hmac.compare_digest(proof, _prove(token, b"client", transcript)):
        refusal = AuthError("the token does not match", hint="give both sides the same token")
        refuse(sock, refusal, deadline)
        raise refusal
    hello = receive(sock, theirs.hello_nbytes, deadline, "hello")
    if hashlib.sha256(hello).digest() != theirs.hello_digest:
        raise WireError("the client's hello message does not match its checksum")
    return OpenHandshake(theirs, token, transcript + bytes(proof) + hello, hello)


def accept(sock: socket.socket, caller: OpenHandshake, deadline: float) -> None:
    """Send the client a verdict that accepts the connection."""
    _send_verdict(sock, ACCEPTED, b"", deadline, caller)


def refuse(
    sock: socket.socket, error: Exception, deadline: float, caller: OpenHandshake | None = None
) -> None:
    """Send the client a verdict that refuses the connection, with `error` as the reason. The client
    raises an AuthError or BusyError if `error` is one, otherwise a WireError."""
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
    """Receive the bytes of the peer's greeting after `beginning`, and return the complete greeting.
    Raises WireError if the peer's version, which `beginning` contains, differs from that of this
    side."""
    magic, version = BEGINNING.unpack(beginning)
    if magic != MAGIC:
        raise WireError(f"the peer is not a roadtrain process: its first bytes are {beginning!r}")
    if version != ours.version:
        # closing with unread bytes could reset the connection before the peer has read our greeting
        with contextlib.suppress(OSError):
            sock.settimeout(0.1)
            sock.recv(GREETING.size)
        raise WireError(
            f"the peer has protocol version {version}, but this side has {ours.version}",
            hint="install the same version of roadtrain on both sides",
        )
    left = GREETING.size + SUM.size - len(beginning)
    return beginning + receive(sock, left, deadline, "the rest of a greeting")


def _fits(ours: Greeting, raw: bytes) -> Greeting:
    theirs = Greeting(*GREETING.unpack(opened(raw, "the peer's greeting")))
    if theirs.nonce == ours.nonce:
        raise WireError("this side received its own greeting: the peer echoes all messages")
    if theirs.language != ours.language:
        raise WireError(
            f"the peer uses other messages ({theirs.language.hex()[:8]}) than this side"
            f" ({ours.language.hex()[:8]}): another version of roadtrain or another kind of server",
            hint="install the same version of roadtrain on both sides, and check the address",
        )
    if theirs.has_token != ours.has_token:
        have = ("no token", "one") if theirs.has_token else ("a token", "none")
        raise AuthError(
            f"this side has {have[0]}, but the peer has {have[1]}",
            hint="give both sides the same token",
        )
    if theirs.checksums != ours.checksums:
        here, there = ("on" if g.checksums else "off" for g in (ours, theirs))
        raise WireError(
            f"this side's checksums are {here}, but the peer's are {there}",
            hint="give both sides the same value of the option `checksums`",
        )
    return theirs


def _prove(token: bytes | None, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token or b"none", b"roadtrain " + role + transcript, "sha256")


def _prove_verdict(side: OpenHandshake, code: int, text: bytes) -> bytes:
    return _prove(side.token, b"server", side.transcript + bytes([code]) + text)


def send(sock: socket.socket, data: bytes, deadline: float) -> None:
    _timed(sock, deadline, "a response")
    try:
        sock.sendall(data)
    except ConnectionError as error:
        when = "while this side sent its part of the handshake"
        raise LostError(f"{error.strerror} {when}") from error


def receive(sock: socket.socket, nbytes: int, deadline: float, what: str) -> bytes:
    """Receive exactly `nbytes` bytes. `what`: a name for these bytes in error messages. Raises
    DeadlineError if not all bytes arrive before `deadline`, and LostError if the connection is
    lost."""
    raw = bytearray(nbytes)
    view, have = memoryview(raw), 0
    while have < nbytes:
        _timed(sock, deadline, what)
        try:
            n = sock.recv_into(view[have:])
        except TimeoutError:
            continue  # _timed raises the error
        except ConnectionError as error:
            raise LostError(
                f"{error.strerror} while waiting for {what} ({have} of {nbytes} bytes arrived)"
            ) from error
        if n == 0:
            raise LostError(f"waited for {what}, but the peer hung up ({have} of {nbytes} bytes)")
        have += n
    return bytes(raw)


def _timed(sock: socket.socket, deadline: float, what: str) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError(f"timed out waiting for {what} in the handshake")
    sock.settimeout(left)


def stream_between(peer: str, ours: Common, theirs: Sequence[OpenHandshake]) -> FrameStream:
    """Return a new link that is not started yet. Its frame limit is the smallest that the two sides
    have announced."""
    limit = min([ours.frame_limit, *(other.greeting.frame_limit for other in theirs)])
    return FrameStream(peer, limit, ours.summed, ours.close_s)


def as_peer_error(error: Exception, peer: str) -> PeerError:
    """Convert any error to a PeerError with the name of the peer in the message. A PeerError keeps
    its class."""
    if isinstance(error, PeerError):
        return error if peer in str(error) else type(error)(f"{peer}: {error}")
    if isinstance(error, ssl.SSLError):
        return AuthError(f"{peer}: TLS: {error.reason or error}")
    if isinstance(error, TimeoutError):
        return DeadlineError(f"{peer}: no response before the deadline of the handshake")
    if isinstance(error, RoadtrainError):
        return WireError(f"{peer}: {error}")
    why = (error.strerror or error) if isinstance(error, OSError) else repr(error)
    return LostError(f"{peer}: {why}")
