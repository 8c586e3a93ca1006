"""RDMA links: TCP's connections and handshake, but the bytes go by NIXL's WRITE into a ring in the other side's memory.

    link = tcp.connect(("10.0.0.3", 7000), receiver, rdma.Options(token=token, device="mlx5_0:1"))

Once let in, both sides tell where their ring lies and how it is reached. A piece is copied into registered memory and
written to the same place of the other side's ring; then the socket says how much was written, and how much was read in
the other direction. What the socket says wakes, what NIXL's own notification says is there: it travels behind the
bytes it speaks of, while a WRITE that has ended says only that the other NIC has them. The socket's end is the news
that the other side is gone.

Assumes the package nixl-cu12 (the extra `rdma`), loaded when it is first needed. Has run over UCX's TCP mode only (a
network interface as `device`), not on RDMA hardware. UCX_* variables of the environment win over `device`. Does NOT
encrypt, and does NOT write from the owner's buffers: two copies, as in shm.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import mmap
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roadtrain.errors import ConfigError, WireError
from roadtrain.units import KIB, MIB
from roadtrain.wire import handshake, tcp
from roadtrain.wire.ring import Ring, check_ring_bytes
from roadtrain.wire.stream import Channel

MAGIC = b"roadRDMA"
MEETING = struct.Struct("<8sQQI")  # magic, address and bytes of the ring, bytes of the agent's metadata that follow
COUNTS = struct.Struct("<QQ")  # bytes ever written into the other side's ring, bytes ever read from one's own
NOTE = struct.Struct("<Q")  # a notification: bytes ever written, of which the last have landed
MAX_METADATA = 64 * KIB
RUNG_MOST = 64  # COUNTS that nobody has answered: few enough for any socket, so that telling never blocks
PROGRESS_US = 10_000  # UCX may sleep through an event for this long; NIXL's own 0 keeps a core busy all the time
POLL_S, POLL_MOST_S = 20e-6, 1e-3
GONE_S = 0.5  # for what a side that hung up sent before; how long one that hangs up waits for the other


@dataclass(frozen=True)
class Options(tcp.Options):
    """`device`: one RDMA device and its port; empty leaves the choice among all to UCX; a network interface ("eth0")
    means UCX's TCP mode. `ring_bytes`: of each direction, a power of two; the smaller of both sides counts.
    `silence_s` holds for a WRITE too."""

    device: str = ""
    ring_bytes: int = 4 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ring_bytes(self.ring_bytes)
        if self.tls is not None:
            raise ConfigError("an RDMA link does not encrypt", hint="TLS goes with tcp.Options")
        if "," in self.device:
            raise ConfigError(f"device {self.device!r}: one is possible")

    def check(self) -> None:
        _usable(self.device)

    def channel(self, sock: socket.socket) -> Channel:
        return _RdmaChannel(sock, super().channel, self)


def _nixl() -> Any:
    try:
        return importlib.import_module("nixl_cu12._bindings")
    except ImportError as error:
        raise ConfigError(f"RDMA links need NIXL: {error}", hint="pip install 'roadtrain[rdma]'") from error


def _agent(device: str) -> Any:
    nixl = _nixl()
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, PROGRESS_US
    config.syncMode = nixl.NIXL_THREAD_SYNC_RW
    agent = nixl.nixlAgent(secrets.token_hex(16), config)
    try:
        # "ucx_devices", which NIXL lists, does nothing; "device_list" takes no network interfaces
        agent.createBackend("UCX", {"engine_config": f"NET_DEVICES={device}" if device else "TLS=ib"})
    except Exception as error:
        raise ConfigError(
            f"UCX cannot use {device!r}: {error}" if device else f"UCX finds no RDMA device here: {error}",
            hint="ucx_info -d lists devices; links over plain Ethernet are faster with tcp.Options",
        ) from error
    return agent


@functools.cache
def _usable(device: str) -> None:
    _agent(device)


class _RdmaChannel:
    """`_under_way`: WRITEs whose end has not been seen, each with the count after it; oldest first. `_written`: bytes
    of those that have ended, `_landed` of the other side's that notifications spoke of, `_theirs` its last COUNTS, one
    of `_told` that came, all read by us when `_answered` was the last. `_rung`: counts told and not yet read there, at
    most RUNG_MOST. `_hearing`: one of the two threads reads the socket, for both. Owns socket, agent and memory."""

    def __init__(self, sock: socket.socket, channel: Callable[[socket.socket], Channel], options: Options) -> None:
        self._sock, self._silence_s, self._nixl = sock, options.silence_s, _nixl()
        self._agent, self._memory = _agent(options.device), memoryview(mmap.mmap(-1, 2 * options.ring_bytes))
        self._under_way: deque[tuple[Any, int]] = deque()
        self._rung: deque[int] = deque()
        self._written = self._landed = self._heard = self._told = self._answered = 0
        self._theirs, self._message = (0, 0), memoryview(bytearray(COUNTS.size))
        self._changed, self._telling = threading.Condition(), threading.Lock()
        self._hearing = self._ended = False
        self._gone = select.poll()
        self._gone.register(sock, select.POLLRDHUP)
        try:
            size = self._meet(options.ring_bytes, time.monotonic() + options.handshake_s)
            self._tcp = channel(sock)
        except BaseException:
            self.close()
            raise
        self._out, self._back = Ring(self._memory[:size]), Ring(self._memory[options.ring_bytes :][:size])

    def _meet(self, ring_bytes: int, deadline: float) -> int:
        """Bytes of the rings of both sides. The other side can write into our ring, nowhere else."""
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        out, ring = (
            self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, ring_bytes, 0, "")])
            for address in (self._address, self._address + ring_bytes)
        )
        self._call("registerMem", out, [])
        self._call("registerMem", ring, [])
        metadata = self._call("getLocalPartialMD", ring, True, [])
        ours = MEETING.pack(MAGIC, self._address + ring_bytes, ring_bytes, len(metadata))
        handshake.send(self._sock, ours + metadata, deadline)
        raw = handshake.receive(self._sock, MEETING.size, deadline, "the other side's ring")
        magic, self._there, size, length = MEETING.unpack(raw)
        if magic != MAGIC:
            raise WireError(f"the other side speaks no RDMA: it began with {magic!r}", hint="rdma.Options on both")
        if length > MAX_METADATA:
            raise WireError(f"metadata of {length} bytes, {MAX_METADATA} are allowed")
        check_ring_bytes(size)
        metadata = handshake.receive(self._sock, length, deadline, "NIXL's metadata")
        self._name = self._call("loadRemoteMD", metadata)
        return min(ring_bytes, int(size))

    def _call(self, name: str, *words: Any) -> Any:
        """NIXL's errors have no class in common."""
        try:
            return getattr(self._agent, name)(*words)
        except Exception as error:
            raise ConnectionError(f"NIXL {name}: {error}") from error

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        """A piece is copied in while the one before it is under way; none is left so when these bytes are all."""
        if not (free := self._free()):
            self._finish(0)
            if not (free := self._wait(self._free)):
                raise BrokenPipeError(errno.EPIPE, "the other side is gone")
        at = self._out.here % self._out.size
        n = self._out.put(buffers, min(free, self._out.piece, self._out.size - at))
        self._write(at, n)
        self._finish(0 if n == sum(map(len, buffers)) else 1)
        return n

    def recv_into(self, view: memoryview, whole: bool) -> int:
        n = min(self._wait(self._used), len(view), self._back.piece)
        before = self._back.here
        self._until(lambda: self._notified(before + n), "notification")
        self._back.get(view[:n])
        if self._told - self._answered >= RUNG_MOST // 2 and not self._used():
            self._answered = self._told
            self._tell()
        elif before // self._back.piece != self._back.here // self._back.piece:  # not for every frame
            self._tell()
        return n

    def _free(self) -> int:
        free = self._out.size - self._out.used(self._out.here, self._theirs[1])
        while self._rung and self._rung[0] <= self._theirs[1]:
            self._rung.popleft()
        return free if len(self._rung) < RUNG_MOST else 0

    def _used(self) -> int:
        return self._back.used(self._theirs[0], self._back.here)

    def _write(self, at: int, nbytes: int) -> None:
        ours, theirs = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(base + at, nbytes, 0)])
            for base in (self._address, self._there)
        )
        note = NOTE.pack(self._out.here)
        handle = self._call("createXferReq", self._nixl.NIXL_WRITE, ours, theirs, self._name, note, [])
        self._under_way.append((handle, self._out.here))
        self._call("postXferReq", handle, note)

    def _finish(self, leave: int) -> None:
        """Waits until so many WRITEs are under way, and says what has ended."""
        while len(self._under_way) > leave:
            self._until(self._oldest_ended, "end of a write")
            handle, self._written = self._under_way.popleft()
            self._call("releaseXferReq", handle)
            self._rung.append(self._written)
            self._tell()

    def _oldest_ended(self) -> bool:
        return bool(self._call("getXferStatus", self._under_way[0][0]) != self._nixl.NIXL_IN_PROG)

    def _notified(self, landed: int) -> bool:
        if self._landed < landed:
            for notes in self._call("getNotifs", {}, []).values():
                for note in notes:
                    if len(note) != NOTE.size:
                        raise WireError(f"a notification of {len(note)} bytes, not {NOTE.size}")
                    self._landed = max(self._landed, NOTE.unpack(note)[0])
        return self._landed >= landed

    def _until(self, done: Callable[[], bool], what: str) -> None:
        begin, pause = time.monotonic(), POLL_S
        while not done():
            limit = GONE_S if self._gone.poll(0) else self._silence_s
            if time.monotonic() - begin > limit:
                raise TimeoutError(f"no {what} for {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, POLL_MOST_S)

    def _tell(self) -> None:
        with self._telling:
            message = memoryview(COUNTS.pack(self._written, self._back.here))
            while message:
                message = message[self._tcp.send([message]) :]

    def _wait(self, ready: Callable[[], int]) -> int:
        """What `ready` says once it is not 0; 0 at the end."""
        with self._changed:
            while not (n := ready()) and not self._ended:
                if self._hearing:
                    self._changed.wait()
                    continue
                self._hearing = True
                self._changed.release()
                try:
                    self._hear()
                finally:
                    self._changed.acquire()
                    self._hearing = False
                    self._changed.notify_all()
            return n

    def _hear(self) -> None:
        n = self._tcp.recv_into(self._message[self._heard :], True)
        self._heard, self._ended = (self._heard + n) % COUNTS.size, n == 0
        if not self._heard and n:
            self._theirs = COUNTS.unpack(self._message)
            self._told += 1

    def shutdown(self) -> None:
        self._tcp.shutdown()

    def close(self) -> None:
        """Idempotent. The agent goes before the memory that its thread may write into; what was written last may be
        on its way until the other side hangs up too."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._gone.poll(int(GONE_S * 1000))
        for handle, _ in self._under_way:
            with contextlib.suppress(Exception):
                agent.releaseXferReq(handle)
        del agent
        self._sock.close()
