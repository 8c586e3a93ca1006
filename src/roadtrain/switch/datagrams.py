"""Datagrams: a UDP socket that sends and receives runs of equal packets in one call.

    socket = DatagramSocket(("10.0.0.3", 0), receive_nbytes=8 * MIB, send_nbytes=4 * MIB)
    socket.send(packets, 1456, ("10.0.0.4", 7001))      # packet i = packets[i * 1456 : ...]
    nbytes, segment, source = socket.receive(buffer, 0.5)

The kernel cuts a run into packets (UDP_SEGMENT) and joins what arrives (UDP_GRO); where it refuses,
packets go one by one, and that is printed once. Datagrams get lost: a peer that is not there, a
full queue or a firewall lose them without an error here, `unsent` and `drops` count those that this
host knows of. Multicast, over IPv4: a socket with a `group` receives that group's datagrams and no
others, on the interface of its address; any socket sends to a group from its own address'
interface, to this network only (TTL 1) and to this host too.

One thread may send while another receives. Assumes Linux. Does NOT check who sent what it receives.
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
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from roadtrain.errors import ConfigError, DeadlineError, LostError
from roadtrain.transport.listener import Report
from roadtrain.transport.tcp import Address

# Linux's numbers that the socket module lacks
UDP_SEGMENT, UDP_GRO = 103, 104
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU = 10, 2, 14
IPV6_MTU_DISCOVER, IPV6_MTU = 23, 24
SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_RXQ_OVFL = 32, 33, 40

MOST_SEGMENTS = 64  # that the kernel cuts one call into
MOST_NBYTES: Mapping[int, int] = {
    socket.AF_INET: 65507,
    socket.AF_INET6: 65527,
}  # of one datagram, without headers
HEADERS_NBYTES: Mapping[int, int] = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP
RECEIVE_NBYTES = 1 << 16  # a run that was joined is never longer
SEND_S = 10.0  # that a full queue may take nothing
MOST_NAMES = 1024  # addresses that are remembered
_ANCILLARY = socket.CMSG_SPACE(4) * 2
# A datagram that is lost on this host, as it could be on the way: the peer or its network is not
# there now, a firewall or a queue dropped it.
_LOST = {
    errno.ECONNREFUSED,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ENOBUFS,
    errno.EPERM,
}


class DatagramSocket:
    """Raises ConfigError where the address or the group cannot be had."""

    def __init__(
        self,
        address: Address,
        *,
        receive_nbytes: int,
        send_nbytes: int,
        group: Address | None = None,
        report: Report = print,
    ) -> None:
        """address: this host's, port 0: any. receive_nbytes, send_nbytes: what the kernel may hold
        of each direction. group: (multicast address, port) to receive from, instead of what comes
        to `address`."""
        self._report = report
        self._family, where = _resolved(address, socket.AF_UNSPEC)
        self._socket = socket.socket(self._family, socket.SOCK_DGRAM)
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._users, self._changed, self._over = 0, threading.Condition(), False
        # addresses in numbers, each found once
        self._number_of = functools.lru_cache(MOST_NAMES)(self.number_of)
        self._segments = True  # whether the kernel cuts runs
        # Datagrams that this host's kernel dropped since nobody received them in time, as far as
        # those that came after them say; of packets that arrived joined it counts the runs.
        self.drops = 0
        self.unsent = 0  # packets that this host's kernel refused
        try:
            self._bind(where, group)
            self.receive_nbytes = self._room("receive", SO_RCVBUFFORCE, receive_nbytes)
            self.send_nbytes = self._room("send", SO_SNDBUFFORCE, send_nbytes)
            self._prepare()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"no datagrams at {address[0]}:{address[1]}"
                + (f", group {group[0]}:{group[1]}" if group else "")
                + f": {error.strerror or error}",
                hint="an address of this host, and a port that is free",
            ) from error
        except BaseException:
            self.close()
            raise
        self.address: Address = _named(self._socket.getsockname())

    def send(self, buffer: memoryview | np.ndarray, segment: int, to: Address) -> None:
        """A run of packets, each `segment` bytes, the last one perhaps shorter. Blocks while the
        kernel's queue is full. Raises ConfigError for packets that the way there cannot carry,
        DeadlineError where the queue stays full for SEND_S, LostError when closed."""
        with self._using():
            self._send_run(_bytes_of(buffer), segment, self._number_of(to))

    def receive(
        self, into: memoryview | np.ndarray, timeout_s: float
    ) -> tuple[int, int, Address] | None:
        """The next run: (bytes, bytes of each packet but a shorter last one, who sent it), or None
        after `timeout_s`. into: RECEIVE_NBYTES at least. Raises LostError when closed."""
        deadline = time.monotonic() + timeout_s
        with self._using():
            while True:
                try:
                    found = self._socket.recvmsg_into(
                        [_bytes_of(into)], _ANCILLARY, socket.MSG_DONTWAIT
                    )
                    return self._read(*found)
                except BlockingIOError:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or not self._wait(select.POLLIN, left_s):
                        return None
                except OSError as error:
                    if error.errno not in _LOST:
                        raise

    def wait(self, timeout_s: float, *others: DatagramSocket) -> None:
        """Until something has come to it or to one of the others, or the time is over. Raises
        LostError when one of them is closed."""
        sockets = (self, *others)
        with contextlib.ExitStack() as used:
            poll = select.poll()
            for one in sockets:
                used.enter_context(one._using())
                poll.register(one._socket, select.POLLIN)
                poll.register(one._awake, select.POLLIN)
            poll.poll(max(timeout_s, 0) * 1000)
            if any(one._over for one in sockets):
                raise LostError("the datagram socket was closed")

    def fileno(self) -> int:
        """For select and epoll, by who closes it."""
        return self._socket.fileno()

    def number_of(self, to: Address) -> Address:
        """An address in numbers, as `receive` names those who sent. Raises ConfigError."""
        return _resolved(to, self._family)[1]

    def has_room(self) -> bool:
        """Whether the kernel takes a run now, so that `send` does not block."""
        with self._using():
            return self._wait(select.POLLOUT, 0.0)

    def close(self) -> None:
        """Wakes who sends or receives; idempotent, from any thread."""
        with self._changed:
            if self._over:
                return
            self._over = True
            os.eventfd_write(self._awake, 1)
            self._changed.wait_for(lambda: self._users == 0)
        self._socket.close()
        os.close(self._awake)

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """While it is in use its descriptors stay open."""
        with self._changed:
            if self._over:
                raise LostError("the datagram socket was closed")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if self._over:
                    self._changed.notify_all()

    def _wait(self, event: int, timeout_s: float) -> bool:
        """Whether the event came in time. Raises LostError when closed."""
        poll = select.poll()
        poll.register(self._socket, event)
        poll.register(self._awake, select.POLLIN)
        came = poll.poll(max(timeout_s, 0) * 1000)
        if self._over:
            raise LostError("the datagram socket was closed")
        return bool(came)

    def _read(
        self, nbytes: int, ancillary: list[tuple[int, int, bytes]], flags: int, source: Address
    ) -> tuple[int, int, Address]:
        segment = nbytes
        for level, kind, data in ancillary:
            if (level, kind) == (socket.IPPROTO_UDP, UDP_GRO):
                segment = int.from_bytes(data[:4], "little")
            elif (level, kind) == (socket.SOL_SOCKET, SO_RXQ_OVFL):  # counts modulo 2**32
                said = int.from_bytes(data[:4], "little")
                self.drops += (said - self.drops) % (1 << 32)
        return nbytes, segment, _named(source)

    def _send_run(self, view: memoryview, segment: int, to: Address) -> None:
        most = min(MOST_SEGMENTS, MOST_NBYTES[self._family] // max(segment, 1))
        at = 0
        while at < len(view):
            step = segment * (most if self._segments and most > 1 else 1)
            if self._sent(view[at : at + step], segment, to):
                at += step

    def _sent(self, part: memoryview, segment: int, to: Address) -> bool:
        """Whether it is on its way or lost; else it is to be sent again, packet by packet."""
        joined = len(part) > segment
        said = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", segment))] if joined else []
        deadline = time.monotonic() + SEND_S
        while True:
            try:
                self._socket.sendmsg([part], said, socket.MSG_DONTWAIT, to)
                return True
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline - time.monotonic()):
                    raise DeadlineError(
                        f"datagrams to {to[0]}:{to[1]}: this host's queue of {self.send_nbytes}"
                        f" bytes took nothing for {SEND_S:.0f} s"
                    ) from None
            except OSError as error:
                if error.errno in _LOST:
                    self.unsent += -(-len(part) // segment)
                    return True
                if joined and error.errno in (errno.EINVAL, errno.EMSGSIZE, errno.EIO):
                    self._check_size(segment, to)
                    self._segments = False
                    self._report(
                        f"datagrams to {to[0]}:{to[1]}: the kernel cuts no runs"
                        f" ({error.strerror}), packets go one by one"
                    )
                    return False
                if error.errno == errno.EMSGSIZE:
                    self._check_size(segment, to)
                raise ConfigError(
                    f"a datagram of {len(part)} bytes to {to[0]}:{to[1]}: {error.strerror}"
                ) from error

    def _check_size(self, segment: int, to: Address) -> None:
        """Raises ConfigError where the way to `to` carries no packets of `segment` bytes."""
        needed, mtu = segment + HEADERS_NBYTES[self._family], self._mtu(to)
        if mtu < needed:
            raise ConfigError(
                f"packets to {to[0]}:{to[1]} need an MTU of {needed} bytes, the way there has"
                f" {mtu}",
                hint=f"ip link set DEVICE mtu {needed} or more, on every host of the way",
            )

    def _mtu(self, to: Address) -> int:
        with socket.socket(self._family, socket.SOCK_DGRAM) as probe:
            probe.bind((self.address[0], 0))
            probe.connect(to)
            if self._family == socket.AF_INET:
                return probe.getsockopt(socket.IPPROTO_IP, IP_MTU)
            return probe.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)

    def _bind(self, where: Address, group: Address | None) -> None:
        if group is None:
            self._socket.bind(where)
            self._send_to_groups(_named(self._socket.getsockname())[0])
            return
        far = _resolved(group, self._family)[1]
        if self._family != socket.AF_INET or not ipaddress.ip_address(far[0]).is_multicast:
            raise ConfigError(f"{group[0]} is no multicast group", hint="as 239.1.2.3")
        # several processes of a host may receive from one group
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(far)
        request = socket.inet_aton(far[0]) + socket.inet_aton(where[0])
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
        # without it Linux also delivers what other sockets of this host joined
        self._socket.setsockopt(socket.IPPROTO_IP, 49, 0)  # IP_MULTICAST_ALL
        self._send_to_groups(where[0])

    def _send_to_groups(self, own: str) -> None:
        if self._family == socket.AF_INET:
            request = socket.inet_aton(own)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, request)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)

    def _room(self, name: str, forced: int, nbytes: int) -> int:
        """Bytes that the kernel will hold: all of them with the right to, else its limit, said."""
        plain = socket.SO_RCVBUF if forced == SO_RCVBUFFORCE else socket.SO_SNDBUF
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, forced, nbytes)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, plain, nbytes)
        # the kernel counts its own bookkeeping too, and doubles what is asked for
        got = self._socket.getsockopt(socket.SOL_SOCKET, plain) // 2
        if got < nbytes:
            limit = "rmem_max" if forced == SO_RCVBUFFORCE else "wmem_max"
            self._report(
                f"datagrams: the kernel holds {got} bytes to {name}, {nbytes} were asked for"
                f" (sysctl -w net.core.{limit}={nbytes} allows them)"
            )
        return got

    def _prepare(self) -> None:
        sock = self._socket
        if self._family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IP_PMTUDISC_DO)
        sock.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        try:
            sock.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        except OSError as error:
            self._report(
                f"datagrams: the kernel joins no packets ({error.strerror}), they come one by one"
            )


def _resolved(address: Address, family: int) -> tuple[int, Address]:
    """(family, address in numbers). Raises ConfigError."""
    try:
        if not 0 <= address[1] <= 65535:  # getaddrinfo would take the rest of a division
            raise OverflowError
        # a socket of IPv6 reaches, and names, a host that has IPv4 alone as ::ffff:a.b.c.d
        mapped = socket.AI_V4MAPPED if family == socket.AF_INET6 else 0
        found = socket.getaddrinfo(*address, family, socket.SOCK_DGRAM, flags=mapped)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{address[0]}:{address[1]} is no address for datagrams") from error
    return found[0][0], _named(found[0][4])


def _named(raw: Sequence[object]) -> Address:
    """(host, port); a link's own IPv6 address keeps its interface, as HOST%INDEX."""
    host, port = str(raw[0]), int(str(raw[1]))
    if len(raw) == 4 and raw[3] and "%" not in host:
        host = f"{host}%{raw[3]}"
    return host, port


def _bytes_of(buffer: memoryview | np.ndarray) -> memoryview:
    return (buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
