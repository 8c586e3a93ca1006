"""TCP links: one or several connections per link, TLS if asked for, bytes straight from and to the
owner's buffers.

    link = connect(("10.0.0.3", 7000), receiver, TcpOptions(connections=4, token=token),
                   name="server 2")
    listener = listen(("10.0.0.3", 0), accept, TcpOptions(token=token))
    listener.address                                      # has the port

A vanished host is noticed by keepalive while nothing is under way (4 s), else by unanswered packets
(`silence_s`).
This is not TCP_USER_TIMEOUT: Linux ends a connection with it when a live peer merely does not read
for that long, which is what back-pressure does. Assumes Linux. Does NOT encrypt without `tls`: the
token keeps strangers out, not those on the way, and the checksums of frames find bits that flipped,
not bytes that somebody changed on purpose.
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
TCP_RTO_MAX_MS = 44  # Linux 6.15; not in the socket module yet
_INFO = struct.Struct("<8B24I")  # the beginning of Linux's struct tcp_info
_RETRANSMITS, _PROBES, _LAST_ACK = 2, 3, 8 + 12
TLS_PIECE = 256 * KIB  # of one call under the lock of a TLS connection
TICK_S = 1
# bytes that may wait in the kernel of a link slower than so many bytes a second
UNSENT, SLOW = 256 * KIB, 16e6
LOOK_S = 0.1  # over which that is measured
MIN_TOKEN = 16  # bytes: what is shorter can be guessed


PemFile = Annotated[Path, Field(strict=False)]  # or a string


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files: this side's certificate and key, and who signs the other side's. A
    client may have only `ca`; a server with `ca` demands a certificate of the client.
    The server's certificate names its address."""

    cert: PemFile | None = None
    key: PemFile | None = None
    ca: PemFile | None = None

    def __post_init__(self) -> None:
        check_options(Tls, vars(self))

    def context(self, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if server and self.cert is None:
            raise ConfigError("TLS: a server needs cert and key")
        if not server and self.ca is None:
            raise ConfigError("TLS: a client needs ca, to know the server by")
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
        """A server's: SHA-256 of its own certificate, the first in the file (RFC 5929,
        tls-server-end-point)."""
        text = Path(self.cert or "").read_text()
        end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        own = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : end])
        return hashlib.sha256(own).digest()


@dataclass(frozen=True)
class TcpOptions(handshake.Common):
    """Of a link over TCP."""

    token: bytes | None = None  # the job's secret
    tls: Tls | None = None
    connections: Annotated[int, Field(ge=1, le=handshake.MAX_CONNECTIONS)] = 1  # of a link
    connect_s: float = 10.0
    silence_s: float = 10.0  # how long packets may stay unanswered

    def __post_init__(self) -> None:
        check_options(TcpOptions, vars(self))
        if self.token is not None and len(self.token) < MIN_TOKEN:
            raise ConfigError(
                f"a token of {len(self.token)} bytes, {MIN_TOKEN} are the least: it could be"
                " guessed",
                hint="(umask 077; head -c 32 /dev/urandom | base64 > token) makes one",
            )

    @property
    def summed(self) -> bool:
        return self.tls is None if self.checksums is None else self.checksums

    def check(self) -> None:
        """Called before anything listens or connects. Raises ConfigError where this host cannot
        do what is asked."""

    def channel(self, sock: socket.socket) -> Channel:
        """Of a connection that was let in. A plugin's options carry the bytes another way."""
        tcp = socket.IPPROTO_TCP
        sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probes = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}
        for option, value in probes.items():
            sock.setsockopt(tcp, option, value)
        # without it, long back-pressure makes probes rare and a vanished host late
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
    """A link whose other end is what `accept` of the listener there returned for `hello`.
    `language`: a digest of all that the frames of both sides can say (transport/handshake.py).
    `report`: called with a line now and then while nobody listens there.
    Raises AuthError, WireError (refused, with the server's words), LostError (nobody there),
    DeadlineError."""
    where = f"{address[0]}:{address[1]}"
    peer = f"{name} ({where})" if name else where
    context = options.tls.context(False) if options.tls else None
    options.check()
    link_id = secrets.token_bytes(16)
    socks: list[socket.socket] = []
    channels: list[Channel] = []

    def waits(_: BaseException, left_s: float) -> None:
        report(
            f"waiting for {peer}: nobody listens there (connection refused). It is tried for"
            f" another {left_s:.0f} s: start it, or correct its address"
        )

    try:
        answers = []
        for i in range(options.connections):
            opened = functools.partial(_connected, address, options)
            sock = retry(opened, ConnectionRefusedError, options.retry_s, waits)
            socks.append(sock)
            deadline = time.monotonic() + options.handshake_s
            if context is not None and options.tls is not None:
                sock.settimeout(options.handshake_s)
                sock = socks[-1] = context.wrap_socket(sock, server_hostname=address[0])
            said = b"" if i else hello
            token, count = options.token, options.connections
            ours = handshake.greeting(
                options, token, link_id, i, count, language=language, hello=said
            )
            answers.append(
                handshake.client_greet(sock, ours, token, said, deadline, _binding(sock))
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
    """Raises ConfigError where the address cannot be had, or strangers could reach it and there
    is no token (Rule 8)."""
    options.check()
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        if options.token is None and not ipaddress.ip_address(where[0]).is_loopback:
            raise ConfigError(
                f"listening on {where[0]} without a token: anybody who reaches it could join",
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
        # the first read does
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def binding(self, sock: socket.socket) -> bytes:
        return self._binding

    def channel(self, sock: socket.socket) -> Channel:
        return self._options.channel(sock)


def _binding(sock: socket.socket) -> bytes:
    """A client's: of the certificate that the server showed."""
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
    """Blocking calls that come back every TICK_S, to see whether the other host still answers.
    Once what the kernel holds left it slowly, little waits there, where nothing urgent can
    overtake it; on fast links that would cost processor time."""

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self._sock, self._silence_s, self._slow = sock, silence_s, False
        self._since, self._given = 0.0, 0  # what the kernel held then, and was given since

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        self._look()
        while True:
            try:
                n = self._sock.sendmsg(buffers)
                self._given += n
                return n
            except BlockingIOError:
                self._check_answers()

    def _look(self) -> None:
        """Whether what is waiting in the kernel leaves it slowly."""
        if self._slow:
            return
        now = time.monotonic()
        waiting = int.from_bytes(fcntl.ioctl(self._sock, termios.TIOCOUTQ, b"\0" * 4), "little")
        if waiting > UNSENT and now - self._since < LOOK_S:
            return
        if waiting > UNSENT and self._given - waiting < SLOW * (now - self._since):
            self._slow = True
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        self._since, self._given = now, waiting

    def recv_into(self, view: memoryview, whole: bool) -> int:
        flags = socket.MSG_WAITALL if whole else 0
        while True:
            try:
                return self._sock.recv_into(view, 0, flags)
            except BlockingIOError:
                self._check_answers()

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            # an SSLSocket's own would go on in plain text
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _check_answers(self) -> None:
        """TimeoutError if packets or window probes have gone unanswered. One probe may just be
        on its way, two cannot."""
        info = _INFO.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
        unanswered, silent_s = max(info[_RETRANSMITS], info[_PROBES]), info[_LAST_ACK] / 1000
        if unanswered >= 2 and silent_s >= self._silence_s:
            raise TimeoutError(f"no answer for {silent_s:.0f} s")


class _TlsChannel(_TcpChannel):
    """OpenSSL's connection is not for two threads at once: each call holds a lock and never
    blocks under it."""

    def __init__(self, sock: ssl.SSLSocket, silence_s: float) -> None:
        super().__init__(sock, silence_s)
        self._tls, self._lock = sock, threading.Lock()

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        data: memoryview | bytes = memoryview(buffers[0])[:TLS_PIECE]
        if len(buffers) > 1 and len(data) < TLS_PIECE:  # small ones into one record
            few: list[memoryview | bytes] = []
            room = TLS_PIECE
            for buffer in buffers:
                few.append(memoryview(buffer)[:room])
                room -= len(few[-1])
                if room == 0:
                    break
            data = b"".join(few)
        self._look()
        while True:
            try:
                with self._lock:
                    n = self._tls.send(data)
                self._given += n
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
