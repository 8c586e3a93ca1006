"""UDP sockets that send or receive many packets of equal length in one call. The packets of a call
are a run, whose last packet may be shorter.

    socket = DatagramSocket(("10.0.0.3", 0), receive_nbytes=8 * MIB, send_nbytes=4 * MIB)
    socket.send(packets, 1456, ("10.0.0.4", 7001))      # packet i = packets[i * 1456 : ...]
    nbytes, segment, source = socket.receive(buffer, 0.5)

Lost packets raise no error; `unsent` and `drops` count the losses that this host knows of. A socket
with a multicast `group` (IPv4 only) receives only its datagrams, and any socket can send to a
group. One thread may send while another receives. Linux only. Does NOT authenticate senders.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping

import numpy as np

from roadtrain.errors import ConfigError, DeadlineError, LostError
from roadtrain.retry import undone_on_error
from roadtrain.transport.listener import Report
from roadtrain.transport.tcp import Address

# Linux constants that the socket module lacks
UDP_SEGMENT, UDP_GRO = 103, 104
IP_PMTUDISC_DO = 2
# by family: level and names of the options MTU_DISCOVER and MTU
PATH_MTU: Mapping[int, tuple[int, int, int]] = {
    socket.AF_INET: (socket.IPPROTO_IP, 10, 14),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 24),
}
SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_RXQ_OVFL = 32, 33, 40

MOST_SEGMENTS = 64  # packets of one call that the kernel can split
MOST_NBYTES: Mapping[int, int] = {
    socket.AF_INET: 65507,
    socket.AF_INET6: 65527,
}  # payload of one datagram
HEADERS_NBYTES: Mapping[int, int] = {socket.AF_INET: 28, socket.AF_INET6: 48}  # IP and UDP
RECEIVE_NBYTES = 1 << 16  # longest coalesced run
SEND_S = 10.0  # timeout while the send buffer stays full
MOST_NAMES = 1024  # resolved addresses that are cached
_ANCILLARY = socket.CMSG_SPACE(4) * 2
# Errors that count as a lost datagram: the peer or its network is unreachable, or a firewall or
# queue of this host dropped it.
_LOST = {
    errno.ECONNREFUSED,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ENOBUFS,
    errno.EPERM,
}


class _Use:
    """Keeps the descriptors of a socket open in the `with` statements of its calls. Entering raises
    LostError if the socket is closed.
    """

    def __init__(self) -> None:
        self._lock, self.users, self.over = threading.Lock(), 0, False
        self.changed = threading.Condition(self._lock)

    def __enter__(self) -> None:
        with self._lock:
            if self.over:
                raise LostError("the datagram socket was closed")
            self.users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.users -= 1
            if self.over:
                self.changed.notify_all()


class DatagramSocket:
    """A UDP socket. Raises ConfigError if it cannot be bound to the address or cannot join the
    group.
    """

    def __init__(
        self,
        address: Address,
        *,
        receive_nbytes: int,
        send_nbytes: int,
        group: Address | None = None,
        report: Report = print,
    ) -> None:
        """
        Args:
            address: Address of this host; port 0 stands for any free port.
            receive_nbytes: Size of the kernel's receive buffer.
            send_nbytes: Size of the kernel's send buffer.
            group: (multicast address, port) to receive from, instead of `address`.
            report: Function that is called with each warning, a text.
        """
        self._report = report
        self._family, where = _resolved(address, socket.AF_UNSPEC)
        self._socket = socket.socket(self._family, socket.SOCK_DGRAM)
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._room_poll = select.poll()
        self._room_poll.register(self._socket, select.POLLOUT)
        self._use = _Use()
        self._number_of = functools.lru_cache(MOST_NAMES)(self.number_of)
        self._segments = True  # whether the kernel splits runs
        # Number of datagrams that the kernel dropped because the receive buffer was full. It is
        # updated when a later datagram is received. A coalesced run counts as one datagram.
        self.drops = 0
        self.unsent = 0  # packets that the kernel refused to send
        with undone_on_error(self.close):
            try:
                self._bind(where, group)
                self.receive_nbytes = self._room("receive", SO_RCVBUFFORCE, receive_nbytes)
                self.send_nbytes = self._room("send", SO_SNDBUFFORCE, send_nbytes)
                self._prepare()
            except OSError as error:
                raise ConfigError(
                    f"cannot open a UDP socket at {address[0]}:{address[1]}"
                    + (f", group {group[0]}:{group[1]}" if group else "")
                    + f": {error.strerror or error}",
                    hint="use an address of this host and a free port",
                ) from error
        self.address: Address = _named(self._socket.getsockname())

    def send(self, buffer: memoryview | np.ndarray, segment: int, to: Address) -> None:
        """Send a run of packets of `segment` bytes each; the last may be shorter. Blocks while the
        send buffer is full.

        Raises:
            ConfigError: The packets are too long for the path to `to`.
            DeadlineError: The send buffer stayed full for 10 s.
            LostError: The socket is closed.
        """
        with self._use:
            self._send_run(_bytes_of(buffer), segment, self._number_of(to))

    def receive(
        self, into: memoryview | np.ndarray, timeout_s: float
    ) -> tuple[int, int, Address] | None:
        """Receive the next run of packets.

        Args:
            into: The buffer. Has at least 64 KiB.

        Returns:
            (number of bytes of the run, bytes per packet, sender), or None after `timeout_s`
            seconds.

        Raises:
            LostError: The socket is closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._use:
            while True:
                try:
                    found = self._socket.recvmsg_into(
                        [_bytes_of(into)], _ANCILLARY, socket.MSG_DONTWAIT
                    )
                    return self._read(*found)
                except BlockingIOError:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or not _poll(select.POLLIN, left_s, self):
                        return None
                except OSError as error:
                    if error.errno not in _LOST:
                        raise

    def wait(self, timeout_s: float, *others: DatagramSocket) -> None:
        """Wait until this socket or one of the others is readable, at most `timeout_s` seconds.
        Raises LostError if one of them is closed.
        """
        with contextlib.ExitStack() as used:
            for sock in (self, *others):
                used.enter_context(sock._use)
            _poll(select.POLLIN, timeout_s, self, *others)

    def fileno(self) -> int:
        """Return the descriptor, for select and epoll. Only the thread that closes the socket may
        call this method.
        """
        return self._socket.fileno()

    def number_of(self, to: Address) -> Address:
        """Resolve an address to the numeric address that `receive` returns. Raises ConfigError."""
        return _resolved(to, self._family)[1]

    def has_room(self) -> bool:
        """Return whether `send` would not block. Only one thread may call this method."""
        with self._use:
            return bool(self._room_poll.poll(0))

    def close(self) -> None:
        """Close the socket and wake threads that send or receive. Idempotent, thread-safe."""
        use = self._use
        with use.changed:
            if use.over:
                return
            use.over = True
            os.eventfd_write(self._awake, 1)
            use.changed.wait_for(lambda: use.users == 0)
        self._socket.close()
        os.close(self._awake)

    def _read(
        self, nbytes: int, ancillary: list[tuple[int, int, bytes]], flags: int, source: Address
    ) -> tuple[int, int, Address]:
        segment = nbytes
        for level, kind, data in ancillary:
            if (level, kind) == (socket.IPPROTO_UDP, UDP_GRO):
                segment = int.from_bytes(data[:4], "little")
            elif (level, kind) == (socket.SOL_SOCKET, SO_RXQ_OVFL):  # counts modulo 2**32
                drops = int.from_bytes(data[:4], "little")
                self.drops += (drops - self.drops) % (1 << 32)
        return nbytes, segment, _named(source)

    def _send_run(self, view: memoryview, segment: int, to: Address) -> None:
        most = min(MOST_SEGMENTS, MOST_NBYTES[self._family] // max(segment, 1))
        at = 0
        while at < len(view):
            step = segment * (most if self._segments and most > 1 else 1)
            if self._send_part(view[at : at + step], segment, to):
                at += step

    def _send_part(self, part: memoryview, segment: int, to: Address) -> bool:
        """Send some packets of a run. Returns False if the kernel cannot split them, so the caller
        must send them one by one.
        """
        joined = len(part) > segment
        control = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", segment))] if joined else []
        deadline = time.monotonic() + SEND_S
        while True:
            try:
                self._socket.sendmsg([part], control, socket.MSG_DONTWAIT, to)
                return True
            except BlockingIOError:
                if not _poll(select.POLLOUT, deadline - time.monotonic(), self):
                    raise DeadlineError(
                        f"cannot send datagrams to {to[0]}:{to[1]}: the send buffer of"
                        f" {self.send_nbytes} bytes has been full for {SEND_S:.0f} s"
                    ) from None
            except OSError as error:
                if error.errno in _LOST:
                    self.unsent += -(-len(part) // segment)
                    return True
                if joined and error.errno in (errno.EINVAL, errno.EMSGSIZE, errno.EIO):
                    self._check_size(segment, to)
                    self._segments = False
                    self._report(
                        f"datagrams to {to[0]}:{to[1]}: the kernel cannot split runs"
                        f" ({error.strerror}), packets are sent one by one"
                    )
                    return False
                if error.errno == errno.EMSGSIZE:
                    self._check_size(segment, to)
                raise ConfigError(
                    f"cannot send {len(part)} bytes to {to[0]}:{to[1]}: {error.strerror}"
                ) from error

    def _check_size(self, segment: int, to: Address) -> None:
        """Raise ConfigError if the MTU of the path to `to` is too small for `segment` bytes."""
        needed, mtu = segment + HEADERS_NBYTES[self._family], self._mtu(to)
        if mtu < needed:
            raise ConfigError(
                f"packets to {to[0]}:{to[1]} need an MTU of {needed} bytes, but the path has {mtu}",
                hint=f"run `ip link set DEVICE mtu {needed}` on every host of the path",
            )

    def _mtu(self, to: Address) -> int:
        with socket.socket(self._family, socket.SOCK_DGRAM) as probe:
            probe.bind((self.address[0], 0))
            probe.connect(to)
            level, _, mtu = PATH_MTU[self._family]
            return probe.getsockopt(level, mtu)

    def _bind(self, where: Address, group: Address | None) -> None:
        if group is None:
            self._socket.bind(where)
            self._send_to_groups(_named(self._socket.getsockname())[0])
            return
        far = _resolved(group, self._family)[1]
        if self._family != socket.AF_INET or not ipaddress.ip_address(far[0]).is_multicast:
            raise ConfigError(f"{group[0]} is not a multicast address", hint="try 239.1.2.3")
        # lets several processes of a host receive from one group
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(far)
        request = socket.inet_aton(far[0]) + socket.inet_aton(where[0])
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
        # disables delivery of groups that only other sockets of this host have joined
        self._socket.setsockopt(socket.IPPROTO_IP, 49, 0)  # IP_MULTICAST_ALL
        self._send_to_groups(where[0])

    def _send_to_groups(self, own: str) -> None:
        if self._family == socket.AF_INET:
            request = socket.inet_aton(own)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, request)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)

    def _room(self, name: str, forced: int, nbytes: int) -> int:
        """Set the size of a kernel buffer, and return the size that the kernel allows. If it is
        smaller, a warning is reported.
        """
        plain = socket.SO_RCVBUF if forced == SO_RCVBUFFORCE else socket.SO_SNDBUF
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, forced, nbytes)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, plain, nbytes)
        # the kernel doubles the requested size, to account for its own overhead
        got = self._socket.getsockopt(socket.SOL_SOCKET, plain) // 2
        if got < nbytes:
            limit = "rmem_max" if forced == SO_RCVBUFFORCE else "wmem_max"
            self._report(
                f"datagrams: the kernel's {name} buffer has {got} bytes instead of {nbytes}"
                f" (sysctl -w net.core.{limit}={nbytes} raises the limit)"
            )
        return got

    def _prepare(self) -> None:
        sock = self._socket
        level, discover, _ = PATH_MTU[self._family]
        sock.setsockopt(level, discover, IP_PMTUDISC_DO)
        sock.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        try:
            sock.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        except OSError as error:
            self._report(
                f"datagrams: the kernel does not coalesce received packets ({error.strerror})"
            )


def _poll(event: int, timeout_s: float, *sockets: DatagramSocket) -> bool:
    """Wait for a poll event of any of the sockets. Returns False after the timeout. Raises
    LostError if a socket is closed.
    """
    poll = select.poll()
    for sock in sockets:
        poll.register(sock._socket, event)
        poll.register(sock._awake, select.POLLIN)
    ready = poll.poll(max(timeout_s, 0) * 1000)
    if any(sock._use.over for sock in sockets):
        raise LostError("the datagram socket was closed")
    return bool(ready)


def _resolved(address: Address, family: int) -> tuple[int, Address]:
    """Resolve an address to (family, numeric address). Raises ConfigError if that is impossible."""
    try:
        if not 0 <= address[1] <= 65535:  # getaddrinfo would take it modulo 65536
            raise OverflowError
        # for an IPv6 socket, a host that has only IPv4 is ::ffff:a.b.c.d
        mapped = socket.AI_V4MAPPED if family == socket.AF_INET6 else 0
        found = socket.getaddrinfo(*address, family, socket.SOCK_DGRAM, flags=mapped)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{address[0]}:{address[1]} is not a valid UDP address") from error
    return found[0][0], _named(found[0][4])


@functools.lru_cache(MOST_NAMES)
def _named(raw: tuple[object, ...]) -> Address:
    """Convert a socket address to (host, port), with the network interface of a link-local
    address.
    """
    host, port = str(raw[0]), int(str(raw[1]))
    if len(raw) == 4 and raw[3] and "%" not in host:
        host = f"{host}%{raw[3]}"
    return host, port


def _bytes_of(buffer: memoryview | np.ndarray) -> memoryview:
    return (buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
