"""RDMA links, a plugin of roadtrain named `rdma`. Connections and handshakes are those of TCP
links, but the bytes of frames are transferred by NIXL READs: the receiver reads the bytes from the
sender's memory.

    options = roadtrain_rdma.RdmaOptions(token=token, device="mlx5_0:1")
    link = tcp.connect(("10.0.0.3", 7000), receiver, options)

The sender copies the bytes of a frame, at most 1 MiB at once, into a ring buffer of registered
memory. Over the socket, the sender sends the total number of bytes that it has written to the ring.
The receiver READs the new bytes into registered memory of its own, one READ at a time. When a READ
has completed, the receiver sends the total number of bytes that it has read, so that the sender can
reuse their place in the ring. Then the receiver copies the bytes to the buffers of its caller. The
link ends when the socket is closed.

READ is used because NIXL's UCX backend completes a READ only after its bytes have arrived. With
WRITE, the receiver would depend on notifications, which may arrive in any order, and only when the
*sender* polls its WRITE.

Needs the package nixl-cu12, which is imported on first use. Tested only with UCX's TCP mode (a
network interface as `device`), never on RDMA hardware. UCX_* environment variables override
`device`. Does not encrypt.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import mmap
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roadtrain.errors import ConfigError, WireError
from roadtrain.transport import handshake, tcp
from roadtrain.transport.link import SUM, copy, opened, sealed
from roadtrain.transport.stream import Channel
from roadtrain.units import KIB, MIB

MAGIC = b"roadRDMA"
# magic, address of the ring, number of bytes and SHA-256 of NIXL's metadata; the metadata follows
MEETING = struct.Struct("<8sQI32s")
# The message about the rings, which is sealed with a checksum: total bytes that the sender of the
# message has written to its own ring, total bytes that it has read from the other side's ring
COUNTS = struct.Struct("<QQ")
COUNTS_NBYTES = COUNTS.size + SUM.size
MAX_METADATA = 64 * KIB
RING, PIECE = 4 * MIB, MIB  # the sender writes a piece while the receiver reads the piece before
# interval at which NIXL's thread polls in addition to events; the default 0 keeps a core busy
PROGRESS_US = 10_000
POLL_S = 20e-6


@dataclass(frozen=True)
class RdmaOptions(tcp.TcpOptions):
    """Options of RDMA links. `silence_s` is also the time limit of a READ.

    Attributes:
        device: An RDMA device and its port, such as "mlx5_0:1", or a network interface such as
            "eth0"
            for UCX's TCP mode. If "", UCX chooses a device.
    """

    device: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls is not None:
            raise ConfigError("RDMA links do not support TLS", hint="use tcp.TcpOptions for TLS")
        if "," in self.device:
            raise ConfigError(f"device {self.device!r}: only one device is supported")

    def check(self) -> None:
        _agent(self.device)

    def channel(self, sock: socket.socket) -> Channel:
        return _RdmaChannel(sock, super().channel, self)


def _nixl() -> Any:
    try:
        return importlib.import_module("nixl_cu12._bindings")
    except ImportError as error:
        raise ConfigError(
            f"RDMA links need NIXL: {error}", hint="pip install roadtrain-rdma"
        ) from error


def _agent(device: str) -> Any:
    nixl = _nixl()
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, PROGRESS_US
    agent = nixl.nixlAgent(secrets.token_hex(16), config)
    # NET_DEVICES alone is not enough: UCX would transfer bytes within a host by a system call. The
    # option "ucx_devices" that NIXL lists has no effect.
    transport = "TLS=tcp" if device and Path("/sys/class/net", device).exists() else "TLS=ib"
    try:
        agent.createBackend("UCX", {"engine_config": f"{transport},NET_DEVICES={device or 'all'}"})
    except Exception as error:
        raise ConfigError(
            (
                f"UCX cannot use {device!r}: {error}"
                if device
                else f"UCX finds no RDMA device on this host: {error}"
            ),
            hint="list devices with `ucx_info -d`; use tcp.TcpOptions on Ethernet without RDMA",
        ) from error
    return agent


def _used(written: int, read: int) -> int:
    used = written - read
    if not 0 <= used <= RING:
        raise WireError(
            f"the counters of a ring are damaged: they imply {used} used bytes of a ring of {RING}"
        )
    return used


class _RdmaChannel:
    """A channel over two ring buffers, one in the memory of each side. Each side writes to its own
    ring and READs from the other side's ring. Owns the socket, the NIXL agent and the memory of
    this side.

    Attributes:
        _written: The number of bytes written to this side's ring.
        _read: The number of bytes read from the other side's ring into the buffer `_piece`.
        _fetched: The bytes in `_piece` that were not passed on to the receiver yet.
        _theirs: The values of `_written` and `_read` on the other side, as last received. They are
            checked before use.
    """

    def __init__(
        self, sock: socket.socket, channel: Callable[[socket.socket], Channel], options: RdmaOptions
    ) -> None:
        self._sock, self._silence_s, self._nixl = sock, options.silence_s, _nixl()
        # the default MAP_SHARED is needed: a fork must not copy a page that a device is reading
        registered = mmap.mmap(-1, RING + PIECE)
        self._agent, memory = _agent(options.device), memoryview(registered)
        self._ring, self._piece, self._fetched = memory[:RING], memory[RING:], memory[:0]
        self._address = np.frombuffer(memory, np.uint8).ctypes.data
        self._written = self._read = 0
        self._theirs = (0, 0)
        self._changed, self._sending = threading.Condition(), threading.Lock()
        self._ended = False
        self._error: OSError | WireError | None = None
        self._receiver = threading.Thread(
            target=self._receive_counts, name="RDMA counts", daemon=True
        )
        try:
            self._meet(time.monotonic() + options.handshake_s)
            self._tcp = channel(sock)
        except BaseException:
            self.close()
            raise
        self._receiver.start()

    def _meet(self, deadline: float) -> None:
        """Exchange memory addresses and access keys with the other side, which gets access only to
        this side's `_ring` and `_piece`."""
        memory = self._nixl.nixlRegDList(
            self._nixl.DRAM_SEG, [(self._address, RING + PIECE, 0, "")]
        )
        self._call("registerMem", memory)
        metadata = bytes(self._call("getLocalPartialMD", memory, True))
        meeting = MEETING.pack(
            MAGIC, self._address, len(metadata), hashlib.sha256(metadata).digest()
        )
        handshake.send(self._sock, sealed(meeting) + metadata, deadline)
        raw = handshake.receive(self._sock, len(MAGIC), deadline, "the other side's ring")
        if raw != MAGIC:
            raise WireError(
                f"the other side does not use RDMA: its first bytes are {raw!r}",
                hint="use roadtrain_rdma.RdmaOptions on both sides",
            )
        raw += handshake.receive(
            self._sock, MEETING.size + SUM.size - len(raw), deadline, "the other side's ring"
        )
        _, self._there, length, digest = MEETING.unpack(opened(raw, "the other side's ring"))
        if length > MAX_METADATA:
            raise WireError(
                f"the other side's NIXL metadata has {length} bytes, but at most {MAX_METADATA} are"
                " allowed"
            )
        metadata = handshake.receive(self._sock, length, deadline, "NIXL's metadata")
        if hashlib.sha256(metadata).digest() != digest:
            raise WireError("the other side's NIXL metadata does not match its checksum")
        self._name = self._call("loadRemoteMD", metadata)

    def _call(self, name: str, *words: Any) -> Any:
        """Call a method of NIXL's agent. Every error is raised as a ConnectionError, because the
        errors of NIXL have no common class."""
        try:
            return getattr(self._agent, name)(*words)
        except Exception as error:
            raise ConnectionError(f"NIXL {name}: {error}") from error

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        if not (free := self._wait(lambda: RING - _used(self._written, self._theirs[1]))):
            raise BrokenPipeError(errno.EPIPE, "the RDMA link has ended")
        begin = self._written % RING
        at, end = begin, begin + min(free, PIECE, RING - begin)
        for buffer in buffers:
            part = memoryview(buffer)[: end - at]
            copy(self._ring[at : at + len(part)], part)
            at += len(part)
        self._written += at - begin
        self._send_counts()
        return at - begin

    def recv_into(self, view: memoryview, whole: bool) -> int:
        if not self._fetched and not self._fetch():
            return 0
        n = min(len(view), len(self._fetched))
        copy(view[:n], self._fetched[:n])
        self._fetched = self._fetched[n:]
        return n

    def _fetch(self) -> bool:
        """READ the next bytes of the other side's ring into `_piece`. Return False if the link has
        ended."""
        at = self._read % RING
        n = min(self._wait(lambda: _used(self._theirs[0], self._read)), PIECE, RING - at)
        if not n:
            return False
        ours, theirs = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(address, n, 0)])
            for address in (self._address + RING, self._there + at)
        )
        handle = self._call("createXferReq", self._nixl.NIXL_READ, ours, theirs, self._name)
        try:
            self._call("postXferReq", handle)
            begin = time.monotonic()
            while self._call("getXferStatus", handle) == self._nixl.NIXL_IN_PROG:
                if self._ended:
                    return False
                if time.monotonic() - begin > self._silence_s:
                    raise TimeoutError(f"an RDMA READ did not end within {self._silence_s:g} s")
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(Exception):
                self._agent.releaseXferReq(handle)
        self._fetched = self._piece[:n]
        self._read += n
        self._send_counts()
        return True

    def _send_counts(self) -> None:
        """Send `_written` and `_read` to the other side, which always receives, so the call does
        not block for long."""
        with self._sending:
            message = memoryview(sealed(COUNTS.pack(self._written, self._read)))
            while message:
                message = message[self._tcp.send([message]) :]

    def _wait(self, ready: Callable[[], int]) -> int:
        """Wait until `ready` returns a number above 0, and return the number; 0 if the link has
        ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or ready())
            if self._error is not None:
                raise self._error
            return 0 if self._ended else ready()

    def _receive_counts(self) -> None:
        message, have = memoryview(bytearray(COUNTS_NBYTES)), 0
        try:
            while n := self._tcp.recv_into(message[have:], True):
                have = (have + n) % COUNTS_NBYTES
                if not have:
                    counts = COUNTS.unpack(
                        opened(message, "the other side's message about its ring")
                    )
                    with self._changed:
                        self._theirs = counts
                        self._changed.notify_all()
        except (OSError, WireError) as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def shutdown(self) -> None:
        self._tcp.shutdown()

    def close(self) -> None:
        """Close the channel. Idempotent. The agent is released before the memory, because a READ
        may still write to the memory."""
        if self._receiver.is_alive():
            self.shutdown()
            self._receiver.join()
        self._agent = None
        self._sock.close()
