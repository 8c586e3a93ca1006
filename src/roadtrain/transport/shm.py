"""Links between processes of one host and user: a ring of shared memory each way, no system call
while both are busy.

    link = connect("/run/job/server0", receiver, name="server 0")
    listener = listen("/run/job/server0", accept)

A Unix socket does the handshake (both sides check the other's user id), passes the descriptors, and
then only tells by its end that the other process is gone. The rings lie in one memfd that cannot
shrink under its readers. Who finds his ring empty or full says so in the ring and sleeps on an
eventfd, which the other side rings only then.

Assumes Linux, and of the processor: aligned 8-byte loads and stores are single, and either x86-64,
where stores are seen in order and only a store before a load needs a fence (a lock's locked
instruction), or membarrier(2), used as a full fence in all places that need an order. The second
has run on x86-64 only. Does NOT trust the other side's counters.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from roadtrain.errors import AuthError, ConfigError, LostError, PeerError, WireError
from roadtrain.retry import retry
from roadtrain.transport import handshake
from roadtrain.transport.link import Link, Receiver, copy
from roadtrain.transport.listener import Accept, Listener, Report
from roadtrain.transport.stream import Channel
from roadtrain.units import MIB

RING_BYTES = 4 * MIB  # of each direction; in the cache both copies are fast
# at most published at a time: the reader copies out one while the writer copies in the next
PIECE = MIB
_CONTROL = 4096  # bytes before the rings; a cache line for each word
_MEMORY_BYTES = _CONTROL + 2 * RING_BYTES
# 8-byte words of one ring's control
_HEAD, _TAIL, _READER_SLEEPS, _WRITER_SLEEPS, _WORDS = 0, 8, 16, 24, 32
_EVENTS = 4  # data and space of each ring
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_EXPEDITED, _REGISTER_EXPEDITED = 8, 16


def connect(
    path: str | Path,
    receiver: Receiver,
    options: handshake.Common = handshake.DEFAULTS,
    *,
    hello: bytes = b"",
    name: str = "",
    language: bytes = handshake.NO_LANGUAGE,
) -> Link:
    """As tcp.connect."""
    peer = f"{name} ({path})" if name else str(path)
    _start_fences()
    sock = socket.socket(socket.AF_UNIX)
    try:
        absent = ConnectionRefusedError, FileNotFoundError
        retry(lambda: sock.connect(str(path)), absent, options.retry_s)
        _same_user(sock)
        deadline = time.monotonic() + options.handshake_s
        ours = handshake.greeting(options, None, os.urandom(16), language=language, hello=hello)
        answer = handshake.client_greet(sock, ours, None, hello, deadline)
        handshake.client_verdict(sock, answer, deadline)
        link = handshake.stream_between(peer, options, [answer])
        channel = _receive_channel(sock)
    except (OSError, PeerError) as error:
        sock.close()
        raise handshake.as_peer_error(error, peer) from error
    link.start(receiver, [channel])
    return link


def listen(
    path: str | Path,
    accept: Accept,
    options: handshake.Common = handshake.DEFAULTS,
    report: Report = print,
    *,
    language: bytes = handshake.NO_LANGUAGE,
) -> Listener:
    """Raises ConfigError where the path cannot be had. A socket that nobody listens on any more
    is replaced."""
    _start_fences()
    sock = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(sock.fileno(), 0o600)  # before bind: it never exists with more
        try:
            sock.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _left_over(str(path)):
                raise
            os.unlink(path)
            sock.bind(str(path))
        sock.listen(16)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    return _UnixListener(sock, str(path), accept, options, None, _ShmCarrier(), report, language)


class _UnixListener(Listener):
    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(str(self.address))
        super().close()


class _ShmCarrier:
    def name(self, sock: socket.socket) -> str:
        return f"process {_credentials(sock)[0]}"

    def secure(self, sock: socket.socket, deadline: float) -> socket.socket:
        _same_user(sock)
        return sock

    def binding(self, sock: socket.socket) -> bytes:
        return b""

    def channel(self, sock: socket.socket) -> Channel:
        memory = os.memfd_create("roadtrain link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with _closing(fds := [memory]):
            # now, so that no later write finds the memory full
            os.posix_fallocate(memory, 0, _MEMORY_BYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
            fds += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(_EVENTS)]
            socket.send_fds(sock, [struct.pack("<Q", RING_BYTES)], fds)
            return _ShmChannel(sock, memory, fds[1:], 1)


def _receive_channel(sock: socket.socket) -> Channel:
    try:
        raw, fds, _, _ = socket.recv_fds(sock, 8, 1 + _EVENTS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        raise LostError(f"waited for the rings of a link: {error.strerror}") from error
    with _closing(fds):
        if not raw and not fds:
            raise LostError("waited for the rings of a link: closed by peer")
        if len(raw) != 8 or len(fds) != 1 + _EVENTS:
            raise WireError(
                f"{len(raw)} bytes and {len(fds)} descriptors for the rings, not 8 and"
                f" {1 + _EVENTS}"
            )
        (size,) = struct.unpack("<Q", raw)
        try:
            sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            raise WireError(f"what came is no memory for rings: {error}") from error
        nbytes = os.fstat(fds[0]).st_size
        if not sealed or size != RING_BYTES or nbytes != _MEMORY_BYTES:
            raise WireError(f"memory of {nbytes} bytes for rings of {size}, sealed: {bool(sealed)}")
        if any(os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]" for fd in fds[1:]):
            raise WireError("a bell that is no eventfd")
        return _ShmChannel(sock, fds[0], fds[1:], 0)


@contextlib.contextmanager
def _closing(fds: list[int]) -> Iterator[None]:
    """The memory, which comes first, in any case; the bells where no channel takes them."""
    try:
        yield
    except BaseException:
        for fd in fds[1:]:
            os.close(fd)
        raise
    finally:
        for fd in fds[:1]:
            os.close(fd)


class _Ring:
    """One direction as one side sees it. The writer owns _HEAD, the reader _TAIL: bytes ever
    written and read, so `tail <= head <= tail + RING_BYTES`; what the other side says is checked
    each time. `here` is this side's own counter.
    """

    def __init__(
        self, words: memoryview, data: memoryview, bell: int, answer: int, sock: socket.socket
    ) -> None:
        self._words, self._data = words, data
        self._bell, self._answer, self._here = bell, answer, 0
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)
        self._poll.register(sock, select.POLLRDHUP)

    def write(self, buffers: Sequence[memoryview | bytes]) -> int:
        free = RING_BYTES - self._used(self._here, self._words[_TAIL])
        if not free:
            if self._sleep(_WRITER_SLEEPS, lambda: self._words[_TAIL] + RING_BYTES > self._here):
                raise BrokenPipeError(errno.EPIPE, "the other process is gone")
            return 0
        _order()
        room = min(free, PIECE)
        begin = self._here
        for buffer in buffers:
            n = min(len(buffer), room)
            self._copy(memoryview(buffer)[:n], True)
            room -= n
            if not room:
                break
        _order()
        self._words[_HEAD] = self._here
        _fence()
        if self._words[_READER_SLEEPS]:
            self._ring(_READER_SLEEPS)
        return self._here - begin

    def read(self, view: memoryview) -> int:
        """0 at the end, -1 to try again."""
        there = self._used(self._words[_HEAD], self._here)
        if not there:
            ended = self._sleep(_READER_SLEEPS, lambda: self._words[_HEAD] != self._here)
            return 0 if ended else -1
        _order()
        n = min(there, len(view), PIECE)
        self._copy(view[:n], False)
        _order()
        self._words[_TAIL] = self._here
        _fence()
        # not for every piece
        if self._words[_WRITER_SLEEPS] and RING_BYTES - there + n >= RING_BYTES // 2:
            self._ring(_WRITER_SLEEPS)
        return n

    def _used(self, head: int, tail: int) -> int:
        used = head - tail
        if not 0 <= used <= RING_BYTES:
            raise WireError(f"the ring says that {used} of its {RING_BYTES} bytes are used")
        return used

    def _copy(self, view: memoryview, into: bool) -> None:
        at = self._here % RING_BYTES
        first = min(len(view), RING_BYTES - at)
        for ours, data in ((view[:first], self._data[at:]), (view[first:], self._data)):
            if ours:
                copy(*((data[: len(ours)], ours) if into else (ours, data[: len(ours)])))
        self._here += len(view)

    def _sleep(self, flag: int, ready: Callable[[], bool]) -> bool:
        """Until the bell rings or the other process is gone: True if so and there is nothing to
        do any more."""
        self._words[flag] = 1
        _fence()  # either we see the other side's counter, or it sees that we sleep
        if ready():
            return False
        events = dict(self._poll.poll())
        self._words[flag] = 0
        if self._bell in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            return False
        return not ready()

    def _ring(self, flag: int) -> None:
        # before the bell: who sets it again at this moment is woken all the same
        self._words[flag] = 0
        with contextlib.suppress(BlockingIOError):  # full: it rings already
            os.eventfd_write(self._answer, 1)


class _ShmChannel:
    """`side` 0 connected, 1 listened; ring i carries what side i sends. Owns the socket and the
    bells."""

    def __init__(self, sock: socket.socket, memory: int, bells: Sequence[int], side: int) -> None:
        self._sock, self._bells = sock, bells
        self._map = mmap.mmap(memory, _MEMORY_BYTES)
        whole = memoryview(self._map)
        words = [whole[8 * _WORDS * i : 8 * _WORDS * (i + 1)].cast("Q") for i in (0, 1)]
        data = [whole[at : at + RING_BYTES] for at in (_CONTROL, _CONTROL + RING_BYTES)]
        self._views = [*words, *data, whole]
        mine, theirs = side, 1 - side
        self._out = _Ring(words[mine], data[mine], bells[2 * mine + 1], bells[2 * mine], sock)
        self._back = _Ring(
            words[theirs], data[theirs], bells[2 * theirs], bells[2 * theirs + 1], sock
        )

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        while not (n := self._out.write(buffers)):
            pass
        return n

    def recv_into(self, view: memoryview, whole: bool) -> int:
        while (n := self._back.read(view)) < 0:
            pass
        return n

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        for fd in self._bells:
            os.close(fd)
        for view in self._views:
            view.release()
        self._map.close()  # it has a descriptor of its own


def _left_over(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other side, as the kernel knows them."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def _same_user(sock: socket.socket) -> None:
    pid, uid, _ = _credentials(sock)
    if uid != os.geteuid():
        raise AuthError(f"process {pid} belongs to user {uid}, this one to {os.geteuid()}")


_lock = threading.Lock()


def _locked_instruction() -> None:
    """A full fence on x86-64: taking a lock is a locked instruction."""
    with _lock:
        pass


def _membarrier() -> None:
    """A full fence anywhere: the kernel does one on entry and exit."""
    if _libc.syscall(_MEMBARRIER, _EXPEDITED, 0, 0):
        raise OSError(ctypes.get_errno(), "membarrier")


def _nothing() -> None:
    """x86-64 keeps stores in order, and loads."""


def _start_fences() -> None:
    if _fence is _membarrier and (
        _MEMBARRIER is None or _libc.syscall(_MEMBARRIER, _REGISTER_EXPEDITED, 0, 0)
    ):
        raise ConfigError(
            f"shared memory links need x86-64 or membarrier(2), this is {platform.machine()}",
            hint="use TCP over 127.0.0.1",
        )


_libc = ctypes.CDLL(None, use_errno=True)
_fence: Callable[[], None] = _locked_instruction if platform.machine() == "x86_64" else _membarrier
_order: Callable[[], None] = _nothing if platform.machine() == "x86_64" else _membarrier
