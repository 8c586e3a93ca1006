"""The relay on loopback: bytes pass unchanged; delay, rate, stall and cut take effect while it
runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roadtrain.lab.bad_link import Relay

pytestmark = pytest.mark.alone

SRC = Path(__file__).parents[3] / "src"
Address = tuple[str, int]


class Echo:
    """A server that sends received bytes back on every connection until it is closed."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self.listener.getsockname()[:2]
        self.received = 0
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._echo, args=(connection,))
            thread.start()
            self.threads.append(thread)

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    self.received += len(data)
                    connection.sendall(data)
            except OSError:
                return

    def wait_quiet(self, connections: int = 0) -> None:
        """Wait until that many connections were accepted and all of them have ended."""
        while len(self.threads) <= connections:
            time.sleep(0.01)
        for thread in self.threads[1:]:
            thread.join(5)
            assert not thread.is_alive(), "a connection outlives its relay"

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.threads[0].join(5)
        self.wait_quiet()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def connect(address: Address) -> socket.socket:
    peer = socket.create_connection(address, timeout=5)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def exchange(peer: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=peer.sendall, args=(data,))
    sender.start()
    received = bytearray()
    while len(received) < len(data) and (piece := peer.recv(1 << 16)):
        received += piece
    sender.join()
    return bytes(received)


def until_closed(peer: socket.socket) -> bytes:
    received = bytearray()
    try:
        while piece := peer.recv(1 << 16):
            received += piece
    except ConnectionError:
        pass
    return bytes(received)


def seconds(peer: socket.socket, nbytes: int) -> float:
    begin = time.perf_counter()
    assert len(exchange(peer, bytes(nbytes))) == nbytes
    return time.perf_counter() - begin


def assert_takes(least: float, most: float, measure: Callable[[], float]) -> None:
    """Check that `measure` never takes less than `least`, and less than `most` at least once: a busy
    machine may need several tries."""
    tries = []
    for _ in range(5):
        tries.append(measure())
        assert tries[-1] >= least, tries
        if tries[-1] < most:
            return
    raise AssertionError(f"always took {most} s or more: {tries}")


def test_bytes_and_the_end_of_a_stream_pass_unchanged(echo: Echo) -> None:
    data = os.urandom(3_000_001)
    with (
        Relay(echo.address) as relay,
        connect(relay.address) as peer,
        connect(relay.address) as other,
    ):
        assert exchange(peer, data) == data
        assert relay.nbytes == {"there": len(data), "back": len(data)}
        assert exchange(other, b"x") == b"x"
        peer.sendall(data[:1000])
        peer.shutdown(socket.SHUT_WR)
        assert until_closed(peer) == data[:1000]


def test_a_delay_applies_to_each_direction(echo: Echo) -> None:
    with Relay(echo.address, delay_s=0.05) as relay, connect(relay.address) as peer:
        assert_takes(0.1, 0.2, lambda: seconds(peer, 1))
        # a delay is not a rate: several pieces are in transit at once
        assert_takes(0.1, 0.4, lambda: seconds(peer, 4_000_000))


def test_a_rate_applies_both_ways_and_changes_while_running(echo: Echo) -> None:
    with Relay(echo.address, 10e6) as relay, connect(relay.address) as peer:
        assert_takes(0.28, 0.4, lambda: seconds(peer, 3_000_000))  # there and back overlap
        relay.set_rate(40e6, 5e6)
        assert_takes(0.28, 0.4, lambda: seconds(peer, 1_500_000))

        def raise_the_rate() -> float:
            begin = time.perf_counter()
            relay.set_rate(1e3)
            threading.Timer(0.3, relay.set_rate, (1e9,)).start()
            seconds(peer, 1_000_000)
            return time.perf_counter() - begin

        # the new rate applies to pieces that are already queued
        assert_takes(0.3, 0.6, raise_the_rate)


def test_connections_share_the_rate(echo: Echo) -> None:
    with (
        Relay(echo.address, 10e6) as relay,
        connect(relay.address) as first,
        connect(relay.address) as second,
    ):

        def both() -> float:
            begin = time.perf_counter()
            threads = [
                threading.Thread(target=seconds, args=(peer, 1_500_000)) for peer in (first, second)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return time.perf_counter() - begin

        assert_takes(0.28, 0.45, both)


def test_a_stall_keeps_connections_open(echo: Echo) -> None:
    with Relay(echo.address) as relay, connect(relay.address) as peer:
        assert exchange(peer, b"a") == b"a"
        relay.stall()
        peer.sendall(b"b")
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        relay.resume()
        peer.settimeout(5)
        assert peer.recv(1) == b"b"


def test_a_cut_relay_accepts_connections_after_resume(echo: Echo) -> None:
    with Relay(echo.address) as relay:
        with connect(relay.address) as peer:
            assert exchange(peer, b"a") == b"a"
            relay.stall()
            relay.cut()
            assert until_closed(peer) == b""
        relay.resume()
        with connect(relay.address) as peer:
            assert exchange(peer, b"b") == b"b"


@pytest.mark.parametrize("rate", [float("inf"), 20e6])
def test_a_cut_passes_exactly_the_given_number_of_bytes(echo: Echo, rate: float) -> None:
    with Relay(echo.address, rate) as relay:
        with connect(relay.address) as peer:
            assert exchange(peer, bytes(1000)) == bytes(1000)
            relay.cut(123_457, "back")
            sender = threading.Thread(target=send_until_closed, args=(peer, bytes(1_000_000)))
            sender.start()
            assert len(until_closed(peer)) == 123_457
            sender.join()
        assert relay.nbytes["back"] == 124_457
        echo.wait_quiet(1)
        received = echo.received
        with connect(relay.address) as peer:
            relay.cut(777)
            send_until_closed(peer, bytes(100_000))
            until_closed(peer)
        echo.wait_quiet(2)
        assert echo.received == received + 777
        with connect(relay.address) as peer:
            assert exchange(peer, b"again") == b"again", "a cut still affects later connections"


@pytest.mark.parametrize("rate", [float("inf"), 20e6])
def test_exactly_the_requested_bits_are_flipped(echo: Echo, rate: float) -> None:
    data = os.urandom(400_000)
    with Relay(echo.address, rate) as relay, connect(relay.address) as peer:
        assert exchange(peer, data[:1000]) == data[:1000]
        relay.flip(123_456, bit=7)
        relay.flip(123_456)
        relay.flip(0, "back", 3)
        relay.flip(399_999, "back")
        expected = bytearray(data)
        expected[123_456] ^= 0x81
        expected[0] ^= 8
        expected[399_999] ^= 1
        assert exchange(peer, data) == expected
        assert relay.flipped == 4
        assert exchange(peer, data) == data, "a flip is repeated"


def send_until_closed(peer: socket.socket, data: bytes) -> None:
    try:
        peer.sendall(data)
    except ConnectionError:
        pass


def test_a_missing_target_and_an_occupied_port(echo: Echo) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with Relay(bound.getsockname()) as relay, connect(relay.address) as peer:
            assert until_closed(peer) == b""
    with pytest.raises(OSError, match="in use"), Relay(echo.address, listen=echo.address):
        pass


def test_a_relay_process_takes_commands_from_its_input(echo: Echo) -> None:
    argv = [
        sys.executable,
        "-m",
        "roadtrain.lab.bad_link",
        "127.0.0.1:0",
        f"127.0.0.1:{echo.address[1]}",
    ]
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SRC)},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        host, port = process.stdout.readline().split()
        with connect((host, int(port))) as peer:
            assert exchange(peer, b"a") == b"a"
            process.stdin.write("set_rate 1e6\nflip 1 back 5\ncut 3 back\n")
            process.stdin.flush()
            assert [process.stdout.readline() for _ in range(3)] == ["done\n"] * 3
            peer.sendall(b"abcdef")
            assert until_closed(peer) == b"aBc"
        process.stdin.close()
        assert process.wait(5) == 0
