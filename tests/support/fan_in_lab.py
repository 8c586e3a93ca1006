"""Packets of a fan-in through an emulated network: PacketSender, PacketPort, a switch's job and its
packet loop run in threads of this process with sockets on hosts of the lab. Nothing is trained."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from roadtrain.lab import LabHost, LabNic, Network
from roadtrain.switch import packets
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.packet_loop import PacketLoop
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import NumberedReceiver
from roadtrain.switch.streams import (
    SEND_NBYTES,
    Batch,
    BeatClock,
    PacketPort,
    PacketSender,
    beat_packet,
    beats_of,
)
from roadtrain.switch.switch_frames import SwitchHello
from roadtrain.switch.switch_job import SwitchJob
from roadtrain.switch.switch_table import SwitchTable
from tests.support.host_thread import HostThread

NONCE, JOB = b"nonce of a lab's test", 5
KEY = PacketKey.derive(b"token of a lab's test", NONCE)
FRAME = PACKET_NBYTES + 42
WINDOW = 2048
FAST = 1.25e9  # bytes/s of the switch's host


def network(workers: int, rate: float, loss: float = 0.0) -> Network:
    """A network for a fan-in. rate: bytes/s of the links of the workers and the node."""
    hosts = {f"w{w}": [LabNic(rate, loss=loss)] for w in range(workers)}
    return Network({**hosts, "node": [LabNic(rate, loss=loss)], "switch": [LabNic(FAST)]})


def socket_on(host: LabHost, nbytes: int, send_nbytes: int = SEND_NBYTES) -> DatagramSocket:
    with HostThread(host.net) as thread:
        return thread.do(
            lambda: DatagramSocket(
                (host.address, 0), receive_nbytes=nbytes, send_nbytes=send_nbytes
            )
        )


def values_of(numbers: np.ndarray, worker: int) -> np.ndarray:
    """Value of every element of a worker's packet with each number, int32."""
    return (numbers * 1_000_003 + worker * 7919).astype(np.int32)


class Peer:
    """A worker or the node, which sends one stream and receives the other."""

    def __init__(
        self, lab: FanInLab, host: LabHost, child: int | None, to: tuple[str, int]
    ) -> None:
        self.lab, self.child, self.to = lab, child, to
        self.socket = socket_on(host, 2 * WINDOW * PACKET_NBYTES)
        self.receiver, self.clock = NumberedReceiver(WINDOW), BeatClock(WINDOW)
        self.kind = Kind.PARAMETERS if child is None else Kind.GRADIENT
        self.got, self.wrong, self.twice = 0, 0, 0
        self.sender = PacketSender(
            self.socket, to, self._fill, lab.failed.append, name=f"{host.name} sends"
        )
        into = Kind.GRADIENT if child is None else Kind.PARAMETERS
        beats = Kind.PARAMETER_BEAT if child is None else Kind.GRADIENT_BEAT
        self.port = PacketPort(
            [self.socket],
            KEY,
            JOB,
            {into: self._take, beats: self._beats},
            lab.failed.append,
            name=f"{host.name} receives",
            tick=self._tick,
        )

    def _fill(self, first: int, count: int, staging: np.ndarray) -> int:
        run = staging[: count * PACKET_NBYTES]
        width = 0 if self.child is None else 4
        packets.write_headers(
            run, PACKET_NBYTES, count, kind=self.kind, job=JOB, first=first,
            sender=self.child or 0, width=width,
        )  # fmt: skip
        rows = run.reshape(count, PACKET_NBYTES)[:, HEADER_NBYTES:]
        values = values_of(np.arange(first, first + count), self.child or 0)
        rows[...] = np.repeat(values, PAYLOAD_NBYTES // 4).view(np.uint8).reshape(rows.shape)
        packets.seal(run, PACKET_NBYTES, count, KEY)
        return count

    def _take(self, batch: Batch) -> None:
        numbers = batch.numbers
        new = batch.ok.copy()
        new[new] = self.receiver.accept_many(numbers[new])
        rows = batch.buffer.reshape(-1, PACKET_NBYTES)[new, HEADER_NBYTES:]
        workers = range(self.lab.workers) if self.child is None else (0,)
        right = sum(values_of(numbers[new], worker) for worker in workers)
        found = np.ascontiguousarray(rows).view(np.int32)
        self.wrong += int(np.count_nonzero((found != np.asarray(right)[:, None]).any(axis=1)))
        count, arrived = int(np.count_nonzero(new)), int(np.count_nonzero(batch.ok))
        self.got, self.twice = self.got + count, self.twice + arrived - count
        self.clock.received(arrived)

    def _beats(self, batch: Batch) -> None:
        for beat, _, _ in beats_of(batch):
            self.sender.heartbeat(beat)

    def _tick(self) -> None:
        if not _due(self.clock):
            return
        kind = Kind.GRADIENT_BEAT if self.child is None else Kind.PARAMETER_BEAT
        packet = beat_packet(KEY, JOB, kind, self.receiver.heartbeat(), sender=self.child or 0)
        self.socket.send(packet, packet.size, self.to)

    def start(self) -> None:
        self.sender.start()
        self.port.start()

    def close(self) -> None:
        self.sender.close()
        self.port.close()
        self.socket.close()


def _due(clock: BeatClock) -> bool:
    try:
        return clock.due(time.monotonic())
    except TypeError:
        return clock.due()


@dataclass
class Outcome:
    seconds: float
    received: float  # bytes that the node received, of those of N packets
    sent: float  # bytes that the node sent, of those of N packets
    resends: list[int] = field(default_factory=list)  # by the node and each worker
    cpu: float = 0.0


class FanInLab:
    def __init__(self, network: Network, workers: int) -> None:
        self.network, self.workers, self.failed = network, workers, list[BaseException]()
        hosts = network.hosts
        at_switch = socket_on(hosts["switch"], 4 * workers * WINDOW * PACKET_NBYTES, 1 << 22)
        self.node = Peer(self, hosts["node"], None, at_switch.address)
        self.peers = [self.node] + [
            Peer(self, hosts[f"w{w}"], w, at_switch.address) for w in range(workers)
        ]
        to = self.node.socket.address
        hello = SwitchHello("a job", JOB, NONCE, workers, WINDOW, 0, to, 0)
        table = SwitchTable(WINDOW, workers)
        self.job = SwitchJob(hello, to, at_switch, table, KEY, lambda line: None)
        self.loop = PacketLoop(lambda job, error: None, self.failed.append)

    def __enter__(self) -> Self:
        self.loop.add(self.job)
        for peer in self.peers:
            peer.start()
        self._until(lambda: len(self.job.children.addresses) == self.workers, 20.0)
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.close()
        self.loop.close()

    def _until(self, done: Any, most_s: float) -> None:
        end = time.monotonic() + most_s
        while not done():
            assert time.monotonic() < end, f"not done: {[p.sender.machine for p in self.peers]}"
            assert not self.failed, self.failed
            time.sleep(0.002)

    def send(self, up: int, down: int, most_s: float = 120.0) -> Outcome:
        """Send `up` and `down` more numbers and wait until all are acknowledged."""
        link = self.network.hosts["node"].nics[0]
        ends = [peer.receiver.ack for peer in self.peers]
        before, began, cpu = link.frames(), time.monotonic(), time.process_time()
        resent = [_resends(peer) for peer in self.peers]
        goals = [ends[0] + up, *(end + down for end in ends[1:])]
        for peer, more in zip(self.peers, [ends[1] + down, *[goals[0]] * self.workers]):
            peer.sender.may_send(more)
        self._until(
            lambda: all(p.receiver.ack >= goal for p, goal in zip(self.peers, goals)), most_s
        )
        seconds = time.monotonic() - began
        self._until(lambda: all(_idle(peer) for peer in self.peers), 20.0)
        moved = link.frames() - before
        assert not any(peer.wrong for peer in self.peers)
        assert [peer.got for peer in self.peers] == goals
        return Outcome(
            seconds,
            moved.received / (max(up, 1) * FRAME),
            moved.sent / (max(down, 1) * FRAME),
            [_resends(peer) - then for peer, then in zip(self.peers, resent)],
            time.process_time() - cpu,
        )


def _numbers(peer: Peer) -> Any:
    machine = peer.sender.machine
    return getattr(machine, "numbers", machine)


def _resends(peer: Peer) -> int:
    return int(_numbers(peer).resends)


def _idle(peer: Peer) -> bool:
    return bool(_numbers(peer).idle)
