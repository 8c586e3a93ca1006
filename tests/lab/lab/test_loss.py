"""A NIC that loses: the share that was set, of each packet alone, each way; none of a train is spared
or lost as a whole; TCP carries all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roadtrain.errors import ConfigError
from roadtrain.lab import LabHost, LabNic, Network, loss_available
from roadtrain.lab.lab_command import load_lab

WHY = loss_available()
needs_loss = pytest.mark.skipif(WHY is not None, reason=str(WHY))
pytestmark = [pytest.mark.lab, pytest.mark.alone]

FAST = 50e6
TRAIN, TRAINS, SEGMENT = 20, 500, 1400  # datagrams that one call sends, calls, bytes
COUNTED = """
import socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.setsockopt(socket.SOL_SOCKET, 33, 1 << 25)  # SO_RCVBUFFORCE
    sock.bind(("0.0.0.0", 5000))
    sock.settimeout(20.0)  # until the sender has started
    print("ready", flush=True)
    seen = []
    try:
        while True:
            seen.append(struct.unpack_from("<I", sock.recv(2000))[0])
            sock.settimeout(1.0)
    except TimeoutError:
        print(*seen)
"""
SENT = """
import socket, struct, sys
train, trains, segment = map(int, sys.argv[2:])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.setsockopt(socket.IPPROTO_UDP, 103, segment)  # UDP_SEGMENT
    for first in range(0, train * trains, train):
        packets = [struct.pack("<I", first + i).ljust(segment) for i in range(train)]
        sock.sendto(b"".join(packets), (sys.argv[1], 5000))
"""


def arrived(start: LabHost, end: LabHost) -> set[int]:
    """Which of TRAIN * TRAINS datagrams came."""
    receiver = end.run([sys.executable, "-c", COUNTED], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
    words = [end.address, *map(str, (TRAIN, TRAINS, SEGMENT))]
    assert start.run([sys.executable, "-c", SENT, *words]).wait(30) == 0
    return set(map(int, receiver.communicate(timeout=30)[0].split()))


@needs_loss
def test_each_packet_is_lost_alone_with_the_share_that_was_set() -> None:
    share, sent = 0.05, TRAIN * TRAINS
    with Network({"a": [LabNic(FAST, loss=share)], "b": [LabNic(FAST)]}) as network:
        a, b = network.hosts.values()
        for start, end in ((a, b), (b, a)):
            there = arrived(start, end)
            lost = set(range(sent)) - there
            # 500 of 10,000 are expected, with a standard deviation of 22
            assert 380 < len(lost) < 620, f"{start.name} to {end.name}"
            trains = {number // TRAIN for number in lost}
            # by chance 321 of 500 trains lose at least one; as whole trains it were 25
            assert 270 < len(trains) < 370, f"{start.name} to {end.name}"
        a.nics[0].set_loss(0)
        assert len(arrived(a, b)) == len(arrived(b, a)) == sent


@needs_loss
def test_a_large_mtu_afterwards_does_not_join_packets() -> None:
    with Network({"a": [LabNic(FAST)], "b": [LabNic(FAST)]}) as network:
        a, b = network.hosts.values()
        a.nics[0].set_loss(0.05)
        a.nics[0].set_mtu(1500)
        lost = set(range(TRAIN * TRAINS)) - arrived(a, b)
        assert len({number // TRAIN for number in lost}) > 270


@needs_loss
def test_frames_count_what_the_rate_holds_for() -> None:
    headers = 14 + 20 + 8
    with Network({"a": [LabNic(FAST)], "b": [LabNic(FAST)]}) as network:
        a, b = network.hosts.values()
        before = [host.nics[0].frames() for host in (a, b)]
        assert len(arrived(a, b)) == TRAIN * TRAINS
        out, into = (host.nics[0].frames() - then for host, then in zip((a, b), before))
        frames = TRAIN * TRAINS
        own = frames  # bytes of ARP and neighbor discovery: a wrong header would be as many or more
        assert 0 <= out.sent - frames * (SEGMENT + headers) < own
        assert 0 <= into.received - frames * (SEGMENT + headers) < own
        assert out.received < own and into.sent < own


@pytest.mark.parametrize("share", [-0.1, 1, 1.5])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"loss = {share}, but must be"):
        LabNic(FAST, loss=share)


def test_a_lab_file_says_the_loss(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('[[hosts]]\nname = "a"\nnics = [{ rate = "1GB/s", loss = 0.001 }]\n')
    lab = load_lab(path)
    assert lab.nics(lab.hosts[0])[0].loss == 0.001
    path.write_text(path.read_text().replace("0.001", "1.0"))
    with pytest.raises(ConfigError, match="loss"):
        load_lab(path)
