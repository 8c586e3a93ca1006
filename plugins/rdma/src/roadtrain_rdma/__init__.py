"""RDMA links, a plugin of roadtrain named `rdma`: TCP's connections and handshake, but the bytes
are fetched by NIXL's READ from the other side's memory.

    options = roadtrain_rdma.RdmaOptions(token=token, device="mlx5_0:1")
    link = tcp.connect(("10.0.0.3", 7000), receiver, options)

Who sends copies a piece into a ring of registered memory; the socket says how many bytes were ever
written there. Who receives READs them into registered memory of its own, one READ at a time, hands
them on when it has seen that READ end, and says how many it ever read, which gives their place
back. The socket's end is the end.

Why READ. NIXL's UCX backend calls a request ended when its bytes and a flush of the endpoint have,
so who fetched bytes knows alone that they are here. Of a WRITE the receiver knows by a
notification, which leaves when the *sender* asks about that WRITE: those of two WRITEs may come in
either order, and each must be counted.

Assumes the package nixl-cu12, loaded when it is first needed. Has run over UCX's
TCP mode only (a network interface as `device`), never on RDMA hardware. UCX_* variables of the
environment win over `device`. Does NOT encrypt, and does NOT send from the owner's buffers: two
copies, as in shm.
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
# magic, address of the ring, bytes and SHA-256 of NIXL's metadata, which follows
MEETING = struct.Struct("<8sQI32s")
# bytes ever written into one's own ring, bytes ever read from the other side's; sealed
COUNTS = struct.Struct("<QQ")
COUNTS_NBYTES = COUNTS.size + SUM.size
MAX_METADATA = 64 * KIB
RING, PIECE = 4 * MIB, MIB  # a piece is written while the one before it is read
# NIXL's thread also looks without an event, this often; at NIXL's own 0 it keeps a core busy
PROGRESS_US = 10_000
POLL_S = 20e-6


@dataclass(frozen=True)
class RdmaOptions(tcp.TcpOptions):
    """`device`: one RDMA device and its port; empty leaves the choice among all to UCX; a
    network interface ("eth0") means UCX's TCP mode. `silence_s` holds for a READ too."""

    device: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls is not None:
            raise ConfigError("an RDMA link does not encrypt", hint="TLS goes with tcp.TcpOptions")
        if "," in self.device:
            raise ConfigError(f"device {self.device!r}: one is possible")

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
    # with NET_DEVICES alone, bytes go to the same host by a system call; "ucx_devices", which NIXL
    # lists, does nothing
    transport = "TLS=tcp" if device and Path("/sys/class/net", device).exists() else "TLS=ib"
    try:
        agent.createBackend("UCX", {"engine_config": f"{transport},NET_DEVICES={device or 'all'}"})
    except Exception as error:
        raise ConfigError(
            (
                f"UCX cannot use {device!r}: {error}"
                if device
                else f"UCX finds no RDMA device here: {error}"
            ),
            hint="ucx_info -d lists devices; over plain Ethernet tcp.TcpOptions is faster",
        ) from error
    return agent


def _used(written: int, read: int) -> int:
    used = written - read
    if not 0 <= used <= RING:
        raise WireError(f"the ring says that {used} of its {RING} bytes are used")
    return used


class _RdmaChannel:
    """`_written` into our ring, whose bytes the other side may READ until it says so; `_read`
    from its ring into `_piece`, of which `_fetched` is still to be handed on; `_theirs`: its
    last COUNTS. Each is the count of one side alone, so the other's is checked. Owns socket,
    agent and memory."""

    def __init__(
        self, sock: socket.socket, channel: Callable[[socket.socket], Channel], options: RdmaOptions
    ) -> None:
        self._sock, self._silence_s, self._nixl = sock, options.silence_s, _nixl()
        # MAP_SHARED: a fork copies no page of it while a device reads
        registered = mmap.mmap(-1, RING + PIECE)
        self._agent, memory = _agent(options.device), memoryview(registered)
        self._ring, self._piece, self._fetched = memory[:RING], memory[RING:], memory[:0]
        self._address = np.frombuffer(memory, np.uint8).ctypes.data
        self._written = self._read = 0
        self._theirs = (0, 0)
        self._changed, self._telling = threading.Condition(), threading.Lock()
        self._ended = False
        self._error: OSError | WireError | None = None
        self._hearing = threading.Thread(target=self._hear, name="RDMA counts", daemon=True)
        try:
            self._meet(time.monotonic() + options.handshake_s)
            self._tcp = channel(sock)
        except BaseException:
            self.close()
            raise
        self._hearing.start()

    def _meet(self, deadline: float) -> None:
        """The other side then reaches our ring and the piece that came from it (to write too),
        nothing else here."""
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
                f"the other side speaks no RDMA: it began with {raw!r}",
                hint="rdma.RdmaOptions on both",
            )
        raw += handshake.receive(
            self._sock, MEETING.size + SUM.size - len(raw), deadline, "the other side's ring"
        )
        _, self._there, length, digest = MEETING.unpack(opened(raw, "the other side's ring"))
        if length > MAX_METADATA:
            raise WireError(f"metadata of {length} bytes, {MAX_METADATA} are allowed")
        metadata = handshake.receive(self._sock, length, deadline, "NIXL's metadata")
        if hashlib.sha256(metadata).digest() != digest:
            raise WireError("NIXL's metadata does not match its checksum")
        self._name = self._call("loadRemoteMD", metadata)

    def _call(self, name: str, *words: Any) -> Any:
        """NIXL's errors have no class in common."""
        try:
            return getattr(self._agent, name)(*words)
        except Exception as error:
            raise ConnectionError(f"NIXL {name}: {error}") from error

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        if not (free := self._wait(lambda: RING - _used(self._written, self._theirs[1]))):
            raise BrokenPipeError(errno.EPIPE, "the other side is gone")
        begin = self._written % RING
        at, end = begin, begin + min(free, PIECE, RING - begin)
        for buffer in buffers:
            part = memoryview(buffer)[: end - at]
            copy(self._ring[at : at + len(part)], part)
            at += len(part)
        self._written += at - begin
        self._tell()
        return at - begin

    def recv_into(self, view: memoryview, whole: bool) -> int:
        if not self._fetched and not self._fetch():
            return 0
        n = min(len(view), len(self._fetched))
        copy(view[:n], self._fetched[:n])
        self._fetched = self._fetched[n:]
        return n

    def _fetch(self) -> bool:
        """The next bytes of the other side's ring are here; False at the end."""
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
                    raise TimeoutError(f"no end of a read for {self._silence_s:g} s")
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(Exception):
                self._agent.releaseXferReq(handle)
        self._fetched = self._piece[:n]
        self._read += n
        self._tell()
        return True

    def _tell(self) -> None:
        """Never blocks for long: the other side hears whatever else it does."""
        with self._telling:
            message = memoryview(sealed(COUNTS.pack(self._written, self._read)))
            while message:
                message = message[self._tcp.send([message]) :]

    def _wait(self, ready: Callable[[], int]) -> int:
        """What `ready` says once it is not 0; 0 at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or ready())
            if self._error is not None:
                raise self._error
            return 0 if self._ended else ready()

    def _hear(self) -> None:
        message, have = memoryview(bytearray(COUNTS_NBYTES)), 0
        try:
            while n := self._tcp.recv_into(message[have:], True):
                have = (have + n) % COUNTS_NBYTES
                if not have:
                    counts = COUNTS.unpack(opened(message, "what the other side says of its ring"))
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
        """Idempotent. The agent goes before the memory that a READ may still land in."""
        if self._hearing.is_alive():
            self.shutdown()
            self._hearing.join()
        self._agent = None
        self._sock.close()
