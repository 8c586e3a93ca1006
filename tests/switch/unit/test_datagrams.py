"""The contract of DatagramSocket over loopback: runs arrive with their packet boundaries or are
lost and counted; nothing hangs or stays open."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from roadtrain.errors import ConfigError, LostError
from roadtrain.switch import datagrams
from roadtrain.switch.datagrams import RECEIVE_NBYTES, DatagramSocket
from roadtrain.units import MIB
from tests.support.faulty import RandomFaults, faulty

PACKET = 1456
HOSTS = ("127.0.0.1", "::1")


@pytest.fixture(autouse=True)
def nothing_leaks():
    before, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    deadline = time.monotonic() + 10
    while not set(os.listdir("/proc/self/fd")) <= before or threading.active_count() > threads:
        assert time.monotonic() < deadline, "a descriptor or a thread is left over"
        time.sleep(0.01)


def open_socket(host: str = "127.0.0.1", **options) -> DatagramSocket:
    sizes = {"receive_nbytes": 4 * MIB, "send_nbytes": 2 * MIB}
    return DatagramSocket((host, 0), **(sizes | options))


def run_of(count: int, nbytes: int = PACKET, first: int = 0) -> np.ndarray:
    """A run of packets that each begin with their number."""
    packets = np.random.default_rng(first).integers(0, 256, (count, nbytes), dtype=np.uint8)
    packets[:, :4] = np.arange(first, first + count, dtype="<u4").view(np.uint8).reshape(-1, 4)
    return packets.reshape(-1)


def receive_packets(sock: DatagramSocket, nbytes: int, patience_s: float = 1.0) -> list[bytes]:
    """Receive packets until `nbytes` bytes have arrived or none for `patience_s`."""
    buffer, packets = np.zeros(RECEIVE_NBYTES, np.uint8), []
    while nbytes > 0 and (datagram := sock.receive(buffer, patience_s)) is not None:
        length, segment, _ = datagram
        data = buffer[:length].tobytes()
        packets += [data[at : at + segment] for at in range(0, length, segment)]
        nbytes -= length
    return packets


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("count", "nbytes"), [(1, 48), (1, PACKET), (44, PACKET), (45, PACKET), (200, 100)]
)
def test_runs_arrive_with_their_packet_boundaries(host, count, nbytes):
    ours, theirs = open_socket(host), open_socket(host)
    run = run_of(count, nbytes)
    ours.send(run, nbytes, theirs.address)
    packets = receive_packets(theirs, run.size)
    assert [len(packet) for packet in packets] == [nbytes] * count
    assert b"".join(packets) == run.tobytes()
    assert (ours.unsent, theirs.drops) == (0, 0)
    ours.close(), theirs.close()


@pytest.mark.parametrize("host", HOSTS)
def test_an_answer_goes_to_the_source_address(host):
    ours, theirs = open_socket(host), open_socket("localhost" if host == "127.0.0.1" else host)
    buffer = np.zeros(RECEIVE_NBYTES, np.uint8)
    ours.send(memoryview(b"question"), 8, theirs.address)
    assert theirs.receive(buffer, 1) == (8, 8, ours.address)
    theirs.send(memoryview(b"yes"), 3, ours.address)
    assert ours.receive(buffer, 1) == (3, 3, theirs.address)
    assert buffer[:3].tobytes() == b"yes"
    ours.close(), theirs.close()


def test_a_shorter_last_packet_stays_shorter():
    ours, theirs = open_socket(), open_socket()
    run = run_of(3)[: 2 * PACKET + 100]
    ours.send(run, PACKET, theirs.address)
    assert [len(packet) for packet in receive_packets(theirs, run.size)] == [PACKET, PACKET, 100]
    ours.close(), theirs.close()


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.EIO])
def test_a_kernel_without_segmentation_is_reported_once(monkeypatch, reason):  # Rule 6
    lines: list[str] = []
    ours, theirs = open_socket(report=lines.append), open_socket()
    real: Any = vars(ours)["_socket"]

    class Refusing:
        def __getattr__(self, name):
            return getattr(real, name)

        def sendmsg(self, buffers, ancillary, *rest):
            if ancillary:
                raise OSError(reason, "not here")
            return real.sendmsg(buffers, ancillary, *rest)

    monkeypatch.setattr(ours, "_socket", Refusing())
    for first in (0, 20):
        run = run_of(20, first=first)
        ours.send(run, PACKET, theirs.address)
        assert b"".join(receive_packets(theirs, run.size)) == run.tobytes()
    assert len(lines) == 1 and "one by one" in lines[0] and "not here" in lines[0]
    ours.close(), theirs.close()


def test_receive_returns_none_after_its_timeout():  # Rule 5
    with_nothing = open_socket()
    begun = time.monotonic()
    assert with_nothing.receive(np.zeros(RECEIVE_NBYTES, np.uint8), 0.1) is None
    assert 0.09 < time.monotonic() - begun < 10
    with_nothing.close()


def test_close_wakes_a_receive():  # Rule 5
    sock, ended = open_socket(), []

    def wait():
        with pytest.raises(LostError):
            sock.receive(np.zeros(RECEIVE_NBYTES, np.uint8), 60)
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    begun = time.monotonic()
    sock.close()
    thread.join(20)
    assert ended and ended[0] - begun < 10
    sock.close()
    for call in (
        lambda: sock.send(run_of(1), PACKET, ("127.0.0.1", 9)),
        lambda: sock.receive(np.zeros(RECEIVE_NBYTES, np.uint8), 1),
    ):
        with pytest.raises(LostError, match="closed"):
            call()


@pytest.mark.parametrize("host", HOSTS)
def test_sending_to_an_absent_peer_is_no_error(host):
    absent, ours = open_socket(host), open_socket(host)
    absent.close()
    for _ in range(5):
        ours.send(run_of(4), PACKET, absent.address)
    again = DatagramSocket(absent.address, receive_nbytes=MIB, send_nbytes=MIB)  # it restarts
    ours.send(run_of(4), PACKET, again.address)
    assert len(receive_packets(again, 4 * PACKET)) == 4
    ours.close(), again.close()


def test_packets_above_the_path_mtu_are_refused():
    ours = open_socket()
    for nbytes in (70_000, 65_530):
        with pytest.raises(ConfigError, match=f"need an MTU of {nbytes + 28} bytes, but .* 65535"):
            ours.send(np.zeros(nbytes, np.uint8), nbytes, ("127.0.0.1", 9))
    ours.close()


def test_a_small_mtu_is_reported_with_both_numbers(monkeypatch):  # Rule 6
    ours = open_socket()
    real: Any = vars(ours)["_socket"]

    class Narrow:
        def __getattr__(self, name):
            return getattr(real, name)

        def sendmsg(self, *_):
            raise OSError(errno.EMSGSIZE, "Message too long")

    monkeypatch.setattr(ours, "_socket", Narrow())
    monkeypatch.setattr(ours, "_mtu", lambda to: 1400)
    for count in (1, 9):
        with pytest.raises(ConfigError, match=r"1484 bytes, but the path has 1400"):
            ours.send(run_of(count), PACKET, ("127.0.0.1", 9))
    ours.close()


def test_dropped_packets_are_counted():  # Rule 6
    lines: list[str] = []
    ours, theirs = open_socket(), open_socket(receive_nbytes=200_000, report=lines.append)
    for first in range(40):
        ours.send(run_of(44, first=first), PACKET, theirs.address)
    packets = receive_packets(theirs, 1 << 30, 0.1)
    assert len(packets) < 40 * 44
    ours.send(run_of(1), PACKET, theirs.address)  # the next packet carries the count
    assert len(receive_packets(theirs, PACKET)) == 1
    assert theirs.drops >= 1
    ours.close(), theirs.close()


def test_a_refused_buffer_size_is_reported(monkeypatch):  # Rule 6
    monkeypatch.setattr(datagrams, "SO_RCVBUFFORCE", socket.SO_RCVBUF)
    with open("/proc/sys/net/core/rmem_max") as file:
        limit = int(file.read())
    lines: list[str] = []
    sock = open_socket(receive_nbytes=2 * limit, report=lines.append)
    assert sock.receive_nbytes < 2 * limit and sock.send_nbytes == 2 * MIB
    assert len(lines) == 1 and str(sock.receive_nbytes) in lines[0] and str(2 * limit) in lines[0]
    sock.close()


@pytest.mark.parametrize(
    "address", [("127.0.0.1", 70000), ("203.0.113.77", 0), ("no.such.host.invalid", 1)]
)
def test_unavailable_addresses_are_refused(address):
    with pytest.raises(ConfigError, match=address[0]):
        DatagramSocket(address, receive_nbytes=MIB, send_nbytes=MIB)


def test_a_port_belongs_to_a_single_socket():
    sock = open_socket()
    with pytest.raises(ConfigError, match=str(sock.address[1])):
        DatagramSocket(sock.address, receive_nbytes=MIB, send_nbytes=MIB)
    sock.close()


def test_a_group_reaches_all_that_joined_it_and_nobody_else():
    group = ("239.255.7.77", 20_000 + os.getpid() % 20_000)
    ours, alone = (
        open_socket(),
        DatagramSocket(("127.0.0.1", group[1]), receive_nbytes=MIB, send_nbytes=MIB),
    )
    joined = [open_socket(group=group) for _ in range(3)]
    other = open_socket(group=("239.255.7.78", group[1]))
    ours.send(run_of(44), PACKET, group)
    for sock in joined:
        assert sock.address == group
        assert b"".join(receive_packets(sock, 44 * PACKET)) == run_of(44).tobytes()
    for sock in (alone, other):
        assert receive_packets(sock, 1, 0.1) == []
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 is not a multicast address"):
        open_socket(group=("127.0.0.1", group[1]))
    with pytest.raises(ConfigError, match="is not a multicast address"):
        open_socket("::1", group=group)
    for sock in (ours, alone, other, *joined):
        sock.close()


@pytest.mark.slow
def test_random_faults_lose_double_and_reorder_at_their_rates():
    faults = RandomFaults(7, loss=0.2, duplicate=0.1, reorder=0.1)
    ours, theirs = faulty(open_socket(), faults), open_socket()
    other = open_socket()
    found: list[bytes] = []
    for first in range(0, 2000, 40):
        ours.send(run_of(40, first=first), PACKET, theirs.address)
        ours.send(run_of(1, 64), 64, other.address)
        found += receive_packets(theirs, 40 * PACKET, 0.01)
    found += receive_packets(theirs, 1 << 30, 0.05)
    times = Counter(int.from_bytes(packet[:4], "little") for packet in found)
    assert set(times) <= set(range(2000)) and all(len(packet) == PACKET for packet in found)
    assert 300 < 2000 - len(times) < 500 and 100 < sum(n == 2 for n in times.values()) < 260
    order = [int.from_bytes(packet[:4], "little") for packet in found]
    assert 50 < sum(b < a for a, b in pairwise(order)) < 350
    assert faults.lost > 300 and faults.doubled > 100 and faults.overtaken > 100
    assert all(len(packet) == 64 for packet in receive_packets(other, 1 << 30, 0.05))
    ours.close(), theirs.close(), other.close()


def test_both_directions_at_once():
    """Nothing is lost while the receivers keep up, however threads are scheduled."""
    socks, runs, got = (open_socket(), open_socket()), 60, [0, 0]

    def work(me: int):
        sender = threading.Thread(target=send, args=(me,))
        sender.start()
        got[me] = sum(len(packet) for packet in receive_packets(socks[me], runs * 22 * PACKET, 20))
        sender.join()

    def send(me: int):
        for first in range(runs):
            socks[me].send(run_of(22, first=first), PACKET, socks[1 - me].address)
            time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert got == [runs * 22 * PACKET] * 2
    for sock in socks:
        sock.close()


def test_a_wait_on_several_sockets_ends_with_data_or_a_close() -> None:
    with contextlib.ExitStack() as stack:
        first, other, third = (
            stack.enter_context(contextlib.closing(open_socket())) for _ in range(3)
        )
        third.send(run_of(1), PACKET, other.address)
        begin = time.monotonic()
        first.wait(20.0, other)
        assert time.monotonic() - begin < 10 and other.receive(
            np.zeros(RECEIVE_NBYTES, np.uint8), 0
        )
        first.wait(0.01, other)
        ended = []

        def wait() -> None:
            try:
                first.wait(20.0, other)
            except LostError as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        other.close()
        thread.join(10)
        assert len(ended) == 1
