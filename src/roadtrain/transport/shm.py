"""Links between processes of the same user on one host. Each direction of a link is a ring buffer
in shared memory, and needs no system calls while both sides are busy.

    link = connect("/run/job/server0", receiver, name="server 0")
    listener = listen("/run/job/server0", accept)

The handshake uses a Unix socket. Each side checks the user id of the other process. Then the
listening side sends the descriptors of the shared memory and of the eventfds. Later, the socket
only shows that the other process has ended. Both rings are in one memfd that cannot be shrunk. A
side that finds nothing to read in a ring, or no space to write, sets a flag of the ring and sleeps
on an eventfd. The other side signals the eventfd only if the flag is set.

Requires Linux. Assumes that aligned 8-byte loads and stores are atomic. On x86-64, other processors
see stores in order, so a fence is needed only between a store and a later load. Other processors
use the system call membarrier(2) as a full fence wherever an order is needed; this variant has only
been tested on x86-64. Counters that the other side writes are checked before use.
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

RING_BYTES = 4 * MIB  # bytes of each ring; small enough for the CPU cache
# most bytes that are published at once: the reader copies a piece while the writer copies the next
PIECE = MIB
_CONTROL = 4096  # bytes before the rings, which hold the words of both control blocks
_MEMORY_BYTES = _CONTROL + 2 * RING_BYTES
# indices of the words (8 bytes) in a ring's control block; each word has its own cache line
_HEAD, _TAIL, _READER_SLEEPS, _WRITER_SLEEPS, _WORDS = 0, 8, 16, 24, 32
_EVENTS = 4  # number of eventfds: each ring has one for "data" and one for "space"
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
    """Connect to the listener at the Unix socket `path` on this host and return the started link.
    The other arguments are those of tcp.connect."""
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
    """Listen on a Unix socket at `path`. The socket file of a process that no longer listens is
    replaced. Raises ConfigError if this process cannot listen at `path`."""
    _start_fences()
    sock = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(sock.fileno(), 0o600)  # before bind, so that the file never has wider permissions
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
            # allocate the pages now, so that no later write can run out of memory
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
        raise LostError(f"{error.strerror} while waiting for the shared memory") from error
    with _closing(fds):
        if not raw and not fds:
            raise LostError("the peer closed the connection before sending the shared memory")
        if len(raw) != 8 or len(fds) != 1 + _EVENTS:
            raise WireError(
                f"the peer must send 8 bytes and {1 + _EVENTS} descriptors for the shared memory,"
                f" but sent {len(raw)} bytes and {len(fds)} descriptors"
            )
        (size,) = struct.unpack("<Q", raw)
        try:
            sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            raise WireError(f"the peer's first descriptor is not a memfd: {error}") from error
        nbytes = os.fstat(fds[0]).st_size
        if not sealed or size != RING_BYTES or nbytes != _MEMORY_BYTES:
            raise WireError(
                f"rings must be sealed and have {RING_BYTES} bytes each, but the peer's memory has"
                f" {nbytes} bytes for rings of {size}, sealed: {bool(sealed)}"
            )
        if any(os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]" for fd in fds[1:]):
            raise WireError("a descriptor that the peer sent is not an eventfd")
        return _ShmChannel(sock, fds[0], fds[1:], 0)


@contextlib.contextmanager
def _closing(fds: list[int]) -> Iterator[None]:
    """Close the first descriptor, which belongs to the shared memory, when the `with` statement
    ends. After an error, close the other descriptors too."""
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
    """One direction of a link, as seen by one side.

    The counter `words[_HEAD]` is the total number of bytes written; only the writer changes it. The
    counter `words[_TAIL]` is the total number of bytes read; only the reader changes it. Invariant:
    `tail <= head <= tail + RING_BYTES`, which a side checks whenever it reads the counter of the
    other side. `_here`: this side's own copy of the counter that it changes.

    Args:
        words: The 8-byte integers of the ring's control block: two counters and two flags.
        data: The memory of the ring.
        bell: The descriptor of the eventfd on which this side sleeps.
        answer: The descriptor of the eventfd on which the other side sleeps.
        sock: The link's socket, which hangs up when the other process ends.
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
                raise BrokenPipeError(errno.EPIPE, "the other process has ended")
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
        """Read bytes from the ring into `view` and return their number. Return 0 if the other
        process has ended, and -1 if the caller must try again."""
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
        # do not wake the writer for every piece, but only once half of the ring is free
        if self._words[_WRITER_SLEEPS] and RING_BYTES - there + n >= RING_BYTES // 2:
            self._ring(_WRITER_SLEEPS)
        return n

    def _used(self, head: int, tail: int) -> int:
        used = head - tail
        if not 0 <= used <= RING_BYTES:
            raise WireError(f"damaged counters imply {used} used bytes of a ring of {RING_BYTES}")
        return used

    def _copy(self, view: memoryview, into: bool) -> None:
        at = self._here % RING_BYTES
        first = min(len(view), RING_BYTES - at)
        for ours, data in ((view[:first], self._data[at:]), (view[first:], self._data)):
            if ours:
                copy(*((data[: len(ours)], ours) if into else (ours, data[: len(ours)])))
        self._here += len(view)

    def _sleep(self, flag: int, ready: Callable[[], bool]) -> bool:
        """Sleep until this side's eventfd is signalled or the other process ends. Return True if
        the other process has ended and `ready()` returns False. `flag`: the index in `words` of the
        flag that is 1 while this side sleeps."""
        self._words[flag] = 1
        _fence()  # either this side sees the new counter, or the other side sees the flag
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
        # clear the flag first: if the other side sets it again, it is woken up again
        self._words[flag] = 0
        with contextlib.suppress(BlockingIOError):  # the eventfd is already signalled
            os.eventfd_write(self._answer, 1)


class _ShmChannel:
    """A channel that uses two rings, one for each direction. `side`: 0 on the side that connected,
    1 on the side that listened. Ring i carries the bytes that side i sends. The channel owns the
    socket and the eventfds (`bells`)."""

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
        self._map.close()  # closes the mapping's own duplicate of the memory's descriptor


def _left_over(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return the process id, user id and group id of the process on the other side, as known to the
    kernel."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def _same_user(sock: socket.socket) -> None:
    pid, uid, _ = _credentials(sock)
    if uid != os.geteuid():
        raise AuthError(f"process {pid} runs as user {uid}, but must run as user {os.geteuid()}")


_lock = threading.Lock()


def _locked_instruction() -> None:
    """Execute a full memory fence on x86-64: taking a lock executes a locked instruction."""
    with _lock:
        pass


def _membarrier() -> None:
    """Execute a full memory fence on any processor, with the system call membarrier(2)."""
    if _libc.syscall(_MEMBARRIER, _EXPEDITED, 0, 0):
        raise OSError(ctypes.get_errno(), "membarrier")


def _nothing() -> None:
    """Do nothing, in place of memory fences that x86-64 does not need."""


def _start_fences() -> None:
    if _fence is _membarrier and (
        _MEMBARRIER is None or _libc.syscall(_MEMBARRIER, _REGISTER_EXPEDITED, 0, 0)
    ):
        raise ConfigError(
            f"shared memory links need x86-64 or membarrier(2), but this is {platform.machine()}",
            hint="use TCP over 127.0.0.1",
        )


_libc = ctypes.CDLL(None, use_errno=True)
_fence: Callable[[], None] = _locked_instruction if platform.machine() == "x86_64" else _membarrier
_order: Callable[[], None] = _nothing if platform.machine() == "x86_64" else _membarrier
