"""TCP links. A link has one or several connections, optionally with TLS. Payloads are sent from and
received into buffers of the link's owner.

    link = connect(("10.0.0.3", 7000), receiver, TcpOptions(connections=4, token=token),
                   name="server 2")
    listener = listen(("10.0.0.3", 0), accept, TcpOptions(token=token))
    listener.address                                      # with the port that was chosen

If the link is idle, keepalive probes detect the loss of a host within 4 s. Otherwise a host counts
as lost if it has not acknowledged packets for `silence_s` seconds. TCP_USER_TIMEOUT is not used for
this purpose: on Linux it also ends a connection to a live peer that reads nothing during the
timeout, and with back-pressure such a pause is normal. Requires Linux.

Without `tls`, nothing is encrypted. The token excludes strangers, but not a man in the middle. The
checksums of frames detect flipped bits, but not deliberate changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import ipaddress
import secrets
import select
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.options.check import Checked, check_options
from roadtrain.retry import retry, undone_on_error
from roadtrain.transport import handshake
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.listener import Accept, Listener, Report
from roadtrain.transport.stream import Channel
from roadtrain.units import KIB

Address = tuple[str, int]
TCP_RTO_MAX_MS = 44  # a socket option since Linux 6.15, which Python's socket module lacks
_INFO = struct.Struct("<8B24I")  # the beginning of Linux's struct tcp_info
_RETRANSMITS, _PROBES, _LAST_ACK = 2, 3, 8 + 12
TLS_PIECE = 256 * KIB  # most bytes of a call that holds the lock of a TLS connection
TICK_S = 1  # seconds after which a blocked call returns, to check that the other host answers
# On a link slower than SLOW bytes per second, at most UNSENT bytes are queued in the kernel.
UNSENT, SLOW = 256 * KIB, 16e6
LOOK_S = 0.1  # duration in seconds of a measurement of the link's speed
MIN_TOKEN = 16  # bytes; a shorter token could be guessed


PemFile = Annotated[Path, Field(strict=False)]  # a str is accepted too


@dataclass(frozen=True)
class Tls(Checked):
    """The TLS files of one side, in PEM format.

    A client needs `ca`, and a server needs `cert` and `key`. A server with `ca` demands
    certificates of its clients. The server's certificate must name the server's address.

    Attributes:
        cert: The path of this side's certificate.
        key: The path of the private key of `cert`.
        ca: The path of the certificates of the authorities that have signed the other side's
            certificate.
    """

    cert: PemFile | None = None
    key: PemFile | None = None
    ca: PemFile | None = None

    def context(self, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if server and self.cert is None:
            raise ConfigError("TLS: a server needs `cert` and `key`")
        if not server and self.ca is None:
            raise ConfigError("TLS: a client needs `ca` to verify the server")
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise ConfigError(f"TLS: {error} in {self.cert}, {self.key} or {self.ca}") from error
        return context

    def binding(self) -> bytes:
        """Return the SHA-256 of this server's certificate, the first in the file `cert`. Client and
        server include it in their proofs (RFC 5929, tls-server-end-point)."""
        text = Path(self.cert or "").read_text()
        end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        own = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : end])
        return hashlib.sha256(own).digest()


@dataclass(frozen=True)
class TcpOptions(handshake.Common):
    """Options of TCP links.

    Attributes:
        token: The job's secret, which both sides must have; None for links without a token.
        tls: TLS files; None for links without TLS.
        connections: The number of connections of a link.
        connect_s: Seconds after which an attempt to connect fails.
        silence_s: Seconds after which the link counts as lost if the other host acknowledges no
            packets.
    """

    token: bytes | None = None
    tls: Tls | None = None
    connections: Annotated[int, Field(ge=1, le=handshake.MAX_CONNECTIONS)] = 1
    connect_s: float = 10.0
    silence_s: float = 10.0

    def __post_init__(self) -> None:
        check_options(TcpOptions, vars(self))
        if self.token is not None and len(self.token) < MIN_TOKEN:
            raise ConfigError(
                f"the token must have at least {MIN_TOKEN} bytes, but has {len(self.token)}",
                hint="(umask 077; head -c 32 /dev/urandom | base64 > token) creates a token",
            )

    @property
    def summed(self) -> bool:
        return self.tls is None if self.checksums is None else self.checksums

    def check(self) -> None:
        """Raise ConfigError if this host does not support these options. `connect` and `listen`
        call this method first. Plugins override it."""

    def channel(self, sock: socket.socket) -> Channel:
        """Return a new channel that uses the socket of an accepted connection. Plugins override
        this method."""
        tcp = socket.IPPROTO_TCP
        sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probes = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}
        for option, value in probes.items():
            sock.setsockopt(tcp, option, value)
        # otherwise window probes become rare during long back-pressure, and a lost host is noticed
        # late
        with contextlib.suppress(OSError):
            sock.setsockopt(tcp, TCP_RTO_MAX_MS, max(1000, int(self.silence_s * 250)))
        if isinstance(sock, ssl.SSLSocket):
            sock.setblocking(False)
            return _TlsChannel(sock, self.silence_s)
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", TICK_S, 0))
        return _TcpChannel(sock, self.silence_s)


def connect(
    address: Address,
    receiver: Receiver,
    options: TcpOptions = TcpOptions(),
    *,
    hello: bytes = b"",
    name: str = "",
    language: bytes = handshake.NO_LANGUAGE,
    report: Report = lambda _: None,
) -> Link:
    """Connect to a listener and return the started link.

    Args:
        address: Host and port of the listener.
        receiver: Handles the frames that arrive.
        options: Token, TLS, number of connections and timeouts.
        hello: Bytes that the listener passes to its function `accept`.
        name: Name of the peer for messages; the address is appended.
        language: Digest of the message types of both sides (transport/handshake.py).
        report: Function that is called with a line of text every few seconds while nothing listens
            at the address.

    Raises:
        AuthError: The token or a certificate does not match.
        WireError: The server has refused the link. The message has the server's reason.
        LostError: Nothing listens at the address, or the connection was lost.
        DeadlineError: The handshake took too long.
    """
    where = f"{address[0]}:{address[1]}"
    peer = f"{name} ({where})" if name else where
    context = options.tls.context(False) if options.tls else None
    options.check()
    link_id = secrets.token_bytes(16)
    socks: list[socket.socket] = []
    channels: list[Channel] = []

    def on_wait(_: BaseException, left_s: float) -> None:
        report(
            f"waiting for {peer}: connection refused, because nothing listens there. Retrying for"
            f" another {left_s:.0f} s: start the peer, or correct its address"
        )

    try:
        answers = []
        for i in range(options.connections):
            opened = functools.partial(_connected, address, options)
            sock = retry(opened, ConnectionRefusedError, options.retry_s, on_wait)
            socks.append(sock)
            deadline = time.monotonic() + options.handshake_s
            if context is not None and options.tls is not None:
                sock.settimeout(options.handshake_s)
                sock = socks[-1] = context.wrap_socket(sock, server_hostname=address[0])
            own_hello = b"" if i else hello
            token, count = options.token, options.connections
            ours = handshake.greeting(
                options, token, link_id, i, count, language=language, hello=own_hello
            )
            answers.append(
                handshake.client_greet(sock, ours, token, own_hello, deadline, _binding(sock))
            )
        for sock, answer in zip(socks, answers):
            handshake.client_verdict(sock, answer, deadline)
        link = handshake.stream_between(peer, options, answers)
        for sock in socks:
            channels.append(options.channel(sock))
    except (OSError, RoadtrainError) as error:
        for each in channels:
            each.close()
        for sock in socks:
            sock.close()
        raise handshake.as_peer_error(error, peer) from error
    link.start(receiver, channels)
    return link


def listen(
    address: Address,
    accept: Accept,
    options: TcpOptions = TcpOptions(),
    report: Report = print,
    *,
    language: bytes = handshake.NO_LANGUAGE,
) -> Listener:
    """Listen for links at `address`. Raises ConfigError if the address is not available, or if
    other hosts can reach the address and there is no token."""
    options.check()
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        if options.token is None and not ipaddress.ip_address(where[0]).is_loopback:
            raise ConfigError(
                f"listening on {where[0]} needs a token: otherwise any host could connect",
                hint="set a token, or listen on 127.0.0.1",
            )
        carrier = _TcpCarrier(options)
        sock = socket.socket(family, kind, protocol)
        with undone_on_error(sock.close):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(128)
    except OSError as error:
        what = f"cannot listen on {address[0]}:{address[1]}"
        raise ConfigError(f"{what}: {error.strerror or error}") from error
    real: Address = sock.getsockname()[:2]
    return Listener(sock, real, accept, options, options.token, carrier, report, language)


class _TcpCarrier:
    def __init__(self, options: TcpOptions) -> None:
        self._options, self._context = options, options.tls.context(True) if options.tls else None
        self._binding = options.tls.binding() if options.tls else b""

    def name(self, sock: socket.socket) -> str:
        host, port = sock.getpeername()[:2]
        return f"{host}:{port}"

    def secure(self, sock: socket.socket, deadline: float) -> socket.socket:
        if self._context is None:
            return sock
        # the TLS handshake is done by the first read
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def binding(self, sock: socket.socket) -> bytes:
        return self._binding

    def channel(self, sock: socket.socket) -> Channel:
        return self._options.channel(sock)


def _binding(sock: socket.socket) -> bytes:
    """Return the SHA-256 of the certificate that the server has sent, or b"" without TLS."""
    if not isinstance(sock, ssl.SSLSocket):
        return b""
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def _connected(address: Address, options: TcpOptions) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    with undone_on_error(sock.close):
        sock.settimeout(options.connect_s)
        sock.connect(where)
    return sock


class _TcpChannel:
    """A channel that uses a TCP socket. A blocked call checks every second that the other host
    still answers.

    On a slow link, the kernel's send queue is kept short, so that urgent frames do not wait behind
    a long queue. On a fast link, a short queue would cost CPU time.
    """

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self._sock, self._silence_s, self._slow = sock, silence_s, False
        # `_queued`: the bytes in the kernel's send queue at time `_since`, and the bytes sent since
        self._since, self._queued = 0.0, 0

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        self._check_backlog()
        while True:
            try:
                n = self._sock.sendmsg(buffers)
                self._queued += n
                return n
            except BlockingIOError:
                self._check_answers()

    def _check_backlog(self) -> None:
        """Measure how fast the kernel sends. Below 16 MB/s, limit the send queue until the channel
        is closed."""
        if self._slow:
            return
        now = time.monotonic()
        waiting = int.from_bytes(fcntl.ioctl(self._sock, termios.TIOCOUTQ, b"\0" * 4), "little")
        if waiting > UNSENT and now - self._since < LOOK_S:
            return
        if waiting > UNSENT and self._queued - waiting < SLOW * (now - self._since):
            self._slow = True
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        self._since, self._queued = now, waiting

    def recv_into(self, view: memoryview, whole: bool) -> int:
        flags = socket.MSG_WAITALL if whole else 0
        while True:
            try:
                return self._sock.recv_into(view, 0, flags)
            except BlockingIOError:
                self._check_answers()

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would continue in plain text
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _check_answers(self) -> None:
        """Raise TimeoutError if the other host has not acknowledged a packet for `silence_s`
        seconds, and has not answered two retransmissions or window probes."""
        info = _INFO.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
        unanswered, silent_s = max(info[_RETRANSMITS], info[_PROBES]), info[_LAST_ACK] / 1000
        if unanswered >= 2 and silent_s >= self._silence_s:
            raise TimeoutError(f"the other host has acknowledged no packets for {silent_s:.0f} s")


class _TlsChannel(_TcpChannel):
    """A channel that uses a TLS socket. An OpenSSL connection is not thread-safe, so each call of
    OpenSSL holds a lock, and none blocks while it holds the lock."""

    def __init__(self, sock: ssl.SSLSocket, silence_s: float) -> None:
        super().__init__(sock, silence_s)
        self._tls, self._lock = sock, threading.Lock()

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        data: memoryview | bytes = memoryview(buffers[0])[:TLS_PIECE]
        if len(buffers) > 1 and len(data) < TLS_PIECE:  # join small buffers into one TLS record
            few: list[memoryview | bytes] = []
            room = TLS_PIECE
            for buffer in buffers:
                few.append(memoryview(buffer)[:room])
                room -= len(few[-1])
                if room == 0:
                    break
            data = b"".join(few)
        self._check_backlog()
        while True:
            try:
                with self._lock:
                    n = self._tls.send(data)
                self._queued += n
                return n
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                self._wait(select.POLLOUT)

    def recv_into(self, view: memoryview, whole: bool) -> int:
        while True:
            try:
                with self._lock:
                    return self._tls.recv_into(view[:TLS_PIECE])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._wait(select.POLLIN)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._tls, event)
        if not poll.poll(TICK_S * 1000):
            self._check_answers()
