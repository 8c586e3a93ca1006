"""The RDMA link over a fake NIXL whose READs complete late: no byte is delivered and no buffer
returned before that."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import sys
import threading
from types import SimpleNamespace

import pytest

import roadtrain_rdma as rdma
from roadtrain.units import MIB

IN_PROGRESS, ENDED = 1, 0
POLLS = 5  # status queries until a READ has ended


class LateAgent:
    """A NIXL agent: posting a READ spoils its destination, half of the bytes arrive midway and the
    rest at the end."""

    def __init__(self, name, config) -> None:
        self.under_way = None
        self.ended = 0

    def createBackend(self, name, settings) -> None:
        self.settings = settings["engine_config"]

    def registerMem(self, regions) -> None: ...

    def getLocalPartialMD(self, regions, connection) -> bytes:
        return b"metadata"

    def loadRemoteMD(self, metadata) -> bytes:
        return b"the other side"

    def createXferReq(self, operation, ours, theirs, name) -> int:
        assert operation == "READ"
        assert self.under_way is None, "two READs at once"
        (into, nbytes, _), (source, length, _) = ours[0], theirs[0]
        assert nbytes == length
        self.under_way = [into, source, nbytes, 0]
        return 1

    def postXferReq(self, handle) -> None:
        into, _, nbytes, _ = self.under_way
        ctypes.memset(into, 0xEE, nbytes)

    def getXferStatus(self, handle) -> int:
        into, source, nbytes, polls = self.under_way
        self.under_way[3] += 1
        if polls == POLLS // 2:
            ctypes.memmove(into, source, nbytes // 2)
        if polls < POLLS:
            return IN_PROGRESS
        ctypes.memmove(into, source, nbytes)
        self.ended += 1
        return ENDED

    def releaseXferReq(self, handle) -> None:
        self.under_way = None


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setitem(
        sys.modules,
        "nixl_cu12._bindings",
        SimpleNamespace(
            nixlAgent=LateAgent,
            nixlAgentConfig=SimpleNamespace,
            DRAM_SEG=0,
            NIXL_READ="READ",
            NIXL_IN_PROG=IN_PROGRESS,
            nixlRegDList=lambda kind, regions: regions,
            nixlXferDList=lambda kind, regions: regions,
        ),
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        socks = [socket.create_connection(server.getsockname()), server.accept()[0]]
    made = {}
    other = threading.Thread(target=lambda: made.update(b=rdma.RdmaOptions().channel(socks[1])))
    other.start()
    made["a"] = rdma.RdmaOptions().channel(socks[0])
    other.join()
    yield made["a"], made["b"]
    for end in made.values():
        end.close()


def test_bytes_are_delivered_and_their_buffer_returned_only_after_their_read(ends):
    a, b = ends
    # keeps the ring full most of the time
    data = random.Random(0).randbytes(3 * rdma.RING + 12_345)

    def send() -> None:
        left = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # after an assertion below failed
            while left:
                left = left[a.send([left[:700], left[700 : 2 * MIB]]) :]

    sender = threading.Thread(target=send)
    sender.start()
    got = bytearray(len(data))
    view, have, pick = memoryview(got), 0, random.Random(1)
    while have < len(got):
        have += b.recv_into(view[have : have + pick.choice([52, 16_384, 2 * MIB])], False)
        assert got[:have] == data[:have]
    sender.join()
    assert b._agent.ended >= 3 * rdma.RING // rdma.PIECE


def test_an_interface_selects_tcp_and_anything_else_rdma(ends):
    # not UCX's copy between processes through the kernel
    assert rdma._agent("lo").settings == "TLS=tcp,NET_DEVICES=lo"
    assert rdma._agent("mlx5_0:1").settings == "TLS=ib,NET_DEVICES=mlx5_0:1"
    assert rdma._agent("").settings == "TLS=ib,NET_DEVICES=all"


def test_a_read_that_never_ends_is_an_error_and_delivers_nothing(ends, monkeypatch):
    a, b = ends
    monkeypatch.setattr(LateAgent, "getXferStatus", lambda self, handle: IN_PROGRESS)
    b._silence_s = 0.05
    a.send([b"x" * 100])
    view = memoryview(bytearray(100))
    with pytest.raises(TimeoutError, match=r"an RDMA READ did not end within 0\.05 s"):
        b.recv_into(view, True)
    assert bytes(view) == bytes(100)
    assert b._read == 0
