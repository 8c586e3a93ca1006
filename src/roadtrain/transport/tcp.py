"""TCP links with one or several connections each, optionally TLS, directly from and to the owner's
buffers.

    link = connect(("10.0.0.3", 7000), receiver, TcpOptions(connections=4, token=token),
                   name="server 2")
    listener = listen(("10.0.0.3", 0), accept, TcpOptions(token=token))
    listener.address                                      # has the port

A vanished host is detected by keepalive while the link is idle (4 s), else by unanswered packets
(`silence_s`). TCP_USER_TIMEOUT is not used for this, because on Linux it also ends a connection
whose live peer does not read for that long, as happens with back-pressure. Requires Linux.

Without `tls` nothing is encrypted: the token excludes strangers, but not a man in the middle, and
the checksums of frames detect flipped bits, but not deliberate changes.
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
from roadtrain.options.check import check_options
from roadtrain.retry import retry, undone_on_error
from roadtrain.transport import handshake
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.listener import Accept, Listener, Report
from roadtrain.transport.stream import Channel
from roadtrain.units import KIB

Address = tuple[str, int]
TCP_RTO_MAX_MS = 44  # Linux 6.15; not yet in the socket module
_INFO = struct.Struct("<8B24I")  # the beginning of Linux's struct tcp_info
_RETRANSMITS, _PROBES, _LAST_ACK = 2, 3, 8 + 12
TLS_PIECE = 256 * KIB  # bytes per call while holding the lock of a TLS connection
TICK_S = 1
# bytes that may be queued in the kernel on a link slower than SLOW bytes per second
UNSENT, SLOW = 256 * KIB, 16e6
LOOK_S = 0.1  # duration of that measurement
MIN_TOKEN = 16  # bytes; a shorter token could be guessed


PemFile = Annotated[Path, Field(strict=False)]  # or a str


@dataclass(frozen=True)
class Tls:
    """TLS files in PEM format.

    A client may have only `ca`. A server with `ca` demands a certificate of its clients. The
    server's certificate must name its address.

    Attributes:
        cert: This side's certificate.
        key: The private key of `cert`.
        ca: Certificates of the authorities that have signed the other side's.
    """

    cert: PemFile | None = None
    key: PemFile | None = None
    ca: PemFile | None = None

    def __post_init__(self) -> None:
        check_options(Tls, vars(self))

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
        """Return the SHA-256 of the server's own certificate, the first one in the file (RFC 5929,
        tls-server-end-point)."""
        text = Path(self.cert or "").read_text()
        end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        own = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : end])
        return hashlib.sha256(own).digest()


@dataclass(frozen=True)
class TcpOptions(handshake.Common):
    """Options of TCP links."""

    token: bytes | None = None  # the job's secret
    tls: Tls | None = None
    connections: Annotated[int, Field(ge=1, le=handshake.MAX_CONNECTIONS)] = 1  # per link
    connect_s: float = 10.0
    silence_s: float = 10.0  # how long packets may remain unacknowledged

    def __post_init__(self) -> None:
        check_options(TcpOptions, vars(self))
        if self.token is not None and len(self.token) < MIN_TOKEN:
            raise ConfigError(
                f"the token has {len(self.token)} bytes, at least {MIN_TOKEN} are needed: it could"
                " be guessed",
                hint="(umask 077; head -c 32 /dev/urandom | base64 > token) creates one",
            )

    @property
    def summed(self) -> bool:
        return self.tls is None if self.checksums is None else self.checksums

    def check(self) -> None:
        """Raise ConfigError where this host does not support these options. Called before
        listening or connecting."""

    def channel(self, sock: socket.socket) -> Channel:
        """Make the channel of an accepted connection. Plugins override it."""
        tcp = socket.IPPROTO_TCP
        sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probes = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}
        for option, value in probes.items():
            sock.setsockopt(tcp, option, value)
        # otherwise probes are rare during long back-pressure, and a vanished host is noticed late
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
        hello: Bytes that are passed to `accept` of the listener.
        name: Name of the peer for messages.
        language: Digest of the message types of both sides (transport/handshake.py).
        report: Called with a line now and then while nothing listens at the address.

    Raises:
        AuthError: The token, certificate or user does not match.
        WireError: The server refused, with its reason.
        LostError: Nothing listens there, or the connection was lost.
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
            f" another {left_s:.0f} s: start it, or correct its address"
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
    """Listen for links. Raises ConfigError where the address is not available, or where other hosts
    could reach it and there is no token."""
    options.check()
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        if options.token is None and not ipaddress.ip_address(where[0]).is_loopback:
            raise ConfigError(
                f"listening on {where[0]} without a token: any host that reaches it could connect",
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
        # the handshake is done by the first read
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def binding(self, sock: socket.socket) -> bytes:
        return self._binding

    def channel(self, sock: socket.socket) -> Channel:
        return self._options.channel(sock)


def _binding(sock: socket.socket) -> bytes:
    """Return a client's channel binding: the SHA-256 of the server's certificate."""
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
    """Socket calls that return every TICK_S to check that the other host still answers.

    Once the kernel's send queue drains slowly, it is kept short, so that urgent frames do not wait
    behind it. On fast links that would cost CPU time.
    """

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self._sock, self._silence_s, self._slow = sock, silence_s, False
        self._since, self._queued = 0.0, 0  # bytes in the kernel at that time, and added since

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
        """Detect that the kernel's send queue drains slowly, and keep it short from then on."""
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
        """Raise TimeoutError if packets or window probes are unanswered. A single probe may still
        be in flight, two cannot."""
        info = _INFO.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
        unanswered, silent_s = max(info[_RETRANSMITS], info[_PROBES]), info[_LAST_ACK] / 1000
        if unanswered >= 2 and silent_s >= self._silence_s:
            raise TimeoutError(f"no response for {silent_s:.0f} s")


class _TlsChannel(_TcpChannel):
    """A TLS channel. OpenSSL's connection is not thread-safe, so each call holds a lock and does
    not block while holding it."""

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
