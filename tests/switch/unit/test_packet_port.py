"""PacketPort: packets that arrive one by one are handled together, and packets that the kernel
joined are all delivered."""

import threading
import time

import numpy as np

from roadtrain.switch import packets
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import Heartbeat
from roadtrain.switch.streams import GATHERED, HOLD_S, Batch, Moderation, PacketPort, beat_packet

KEY, JOB = PacketKey.derive(b"0123456789abcdef", b"nonce"), 7
ABOVE, OTHER = ("10.0.0.1", 7101), ("10.0.0.2", 7101)


class FilledSocket:
    """A socket that has received datagrams: (data, bytes per packet, source)."""

    def __init__(self, datagrams):
        self.left = list(datagrams)
        self.empty = threading.Event()

    def wait(self, timeout_s):
        time.sleep(timeout_s)

    def receive(self, into, timeout_s):
        if not self.left:
            self.empty.set()
            return None
        data, segment, source = self.left.pop(0)
        assert len(into) >= 1 << 16
        into[: data.size] = data
        return data.size, segment, source


def bulk(first, count=1):
    run = np.zeros(count * PACKET_NBYTES, np.uint8)
    packets.write_headers(run, PACKET_NBYTES, count, kind=Kind.PARAMETERS, job=JOB, first=first)
    packets.seal(run, PACKET_NBYTES, count, KEY)
    return run


def beat(ack):
    return beat_packet(KEY, JOB, Kind.GRADIENT_BEAT, Heartbeat(ack, ack + 9))


def deliver_all(datagrams):
    """Run a port over datagrams. Returns the delivered batches and the number of strangers."""
    seen, failures = [], []

    def take(batch: Batch):
        numbers = batch.headers["number"][batch.ok].tolist()
        seen.append((batch.kind, numbers, [*dict.fromkeys(batch.sources)]))

    socket = FilledSocket(datagrams)
    kinds = dict.fromkeys((Kind.PARAMETERS, Kind.GRADIENT_BEAT), take)
    port = PacketPort([socket], KEY, JOB, kinds, failures.append, name="port of a test")
    port.start()
    assert socket.empty.wait(20)
    port.close()
    assert not failures
    return seen, port.strangers


def test_packets_that_arrive_one_by_one_are_handled_together() -> None:
    ones = [(bulk(n), PACKET_NBYTES, ABOVE) for n in range(GATHERED + 3)]
    seen, strangers = deliver_all(ones)
    assert [len(numbers) for _, numbers, _ in seen] == [GATHERED, 3] and not strangers
    assert [n for _, numbers, _ in seen for n in numbers] == list(range(GATHERED + 3))


def test_bulk_packets_of_all_senders_are_handled_together_in_order() -> None:
    seen, _ = deliver_all(
        [
            (bulk(0), PACKET_NBYTES, ABOVE),
            (bulk(1, 4), PACKET_NBYTES, ABOVE),
            (bulk(9), PACKET_NBYTES, OTHER),
            (beat(3), beat(3).size, OTHER),
            (bulk(10), PACKET_NBYTES, OTHER),
        ]
    )
    assert seen == [
        (Kind.PARAMETERS, [0, 1, 2, 3, 4, 9], [ABOVE, OTHER]),
        (Kind.GRADIENT_BEAT, [3], [OTHER]),
        (Kind.PARAMETERS, [10], [OTHER]),
    ]


def test_a_heartbeat_that_the_kernel_joined_to_bulk_counts() -> None:
    joined = np.concatenate([bulk(0, 2), beat(5)])
    seen, strangers = deliver_all([(joined, PACKET_NBYTES, ABOVE)])
    assert seen == [(Kind.PARAMETERS, [0, 1], [ABOVE]), (Kind.GRADIENT_BEAT, [5], [ABOVE])]
    assert not strangers


def test_strangers_change_nothing_and_are_counted() -> None:
    """Rule 8."""
    other = bulk(0, 2)
    other[PACKET_NBYTES + HEADER_NBYTES] ^= 1
    short = np.zeros(HEADER_NBYTES - 1, np.uint8)
    seen, strangers = deliver_all(
        [(other, PACKET_NBYTES, ABOVE), (short, short.size, OTHER), (bulk(3), PACKET_NBYTES, ABOVE)]
    )
    assert seen == [(Kind.PARAMETERS, [0], [ABOVE]), (Kind.PARAMETERS, [3], [ABOVE])]
    assert strangers == 2


def test_packets_are_left_to_the_kernel_only_while_many_arrive() -> None:
    moderation = Moderation()
    assert moderation.pause_s(GATHERED, 1000.0) == 0, "the rate is not yet known"
    assert moderation.pause_s(44, 1000.002) == HOLD_S, "22,000 a second"
    assert moderation.pause_s(6, 1000.010) == 0, "fewer than 8 in 8 ms"
    fast = moderation.pause_s(44, 1000.0101)
    assert 0 < 44 / 1e-4 * fast <= GATHERED, "440,000 a second: wait until a batch has arrived"
    assert moderation.pause_s(1, 1001.0) == 0


def test_several_sockets_share_a_thread_and_do_not_block_each_other() -> None:
    sockets = [FilledSocket([(bulk(n), PACKET_NBYTES, ABOVE)]) for n in (0, 5)]
    sockets[0].wait = lambda timeout_s, *others: time.sleep(timeout_s)
    seen = []
    kinds = {Kind.PARAMETERS: lambda batch: seen.extend(batch.numbers.tolist())}
    port = PacketPort(sockets, KEY, JOB, kinds, seen.append, name="port of a test")
    port.start()
    assert all(socket.empty.wait(20) for socket in sockets)
    port.close()
    assert seen == [0, 5]
