"""The bytes and buffers behind the numbers of a fan-in's two streams; the trial of the network's
multicast; reports of late workers."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from roadtrain.chunks import ChunkTable, ParamSpec, record
from roadtrain.errors import BudgetError, WireError
from roadtrain.options.budgets import derive_server
from roadtrain.switch import fixed_point, packets
from roadtrain.switch.end_streams import Incoming, Outgoing, OutgoingBytes, derive_fan_in
from roadtrain.switch.lateness import LATE_S, SILENT_S, Lateness
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.chunk_queue import LateWorker
from roadtrain.switch.streams import Batch
from roadtrain.switch.trial import ANSWERS_S, MulticastTrial, group_of, packet_of
from tests.support import switch_references as references

KEY = PacketKey.derive(b"0123456789abcdef", b"nonce")
WORKERS = 3


def batch_of(kind, numbered):
    """A batch of packets. numbered: (number, payload) of each."""
    buffer = np.zeros(len(numbered) * PACKET_NBYTES, np.uint8)
    for i, (number, payload) in enumerate(numbered):
        part = buffer[i * PACKET_NBYTES : (i + 1) * PACKET_NBYTES]
        packets.write_headers(part, PACKET_NBYTES, 1, kind=kind, job=1, first=number)
        part[HEADER_NBYTES : HEADER_NBYTES + len(payload)] = payload
    count = len(numbered)
    headers = packets.headers(buffer, PACKET_NBYTES, count)
    sources = [("", 0)] * count
    return Batch(buffer, PACKET_NBYTES, sources, kind, np.ones(count, bool), headers)


def pieces(data, first):
    """Split `data` into (number, payload) of packets."""
    starts = range(0, len(data), PAYLOAD_NBYTES)
    return [(first + i, data[at : at + PAYLOAD_NBYTES]) for i, at in enumerate(starts)]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_sums_are_stored_correctly_in_any_order_of_packets(width, seed):  # Rule 6
    """Packets of two rounds are mixed and some repeated; the sums equal the plain reference."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    incoming, sizes = Incoming(64, width, WORKERS), [5000, 333]
    maxima, totals, sums, first = [], [], [], 0
    for round, size in enumerate(sizes):
        blocks = fixed_point.blocks_of(size)
        maxima.append(noise.integers(120, 130, blocks).astype(np.uint8))
        incoming.expect_exponents(7, round, first, blocks)
        first += fixed_point.exponent_packets_of(size)
    exponents = [p for i, m in enumerate(maxima) for p in pieces(m, i)]
    whole = incoming.take(batch_of(Kind.EXPONENTS, [*exponents, exponents[0]]))
    assert [run.round for run in whole] == [0, 1] and incoming.repeated == 1
    todo = []
    for round, (run, size) in enumerate(zip(whole, sizes)):
        assert np.array_equal(run.maxima, maxima[round])
        total = noise.integers(-100, 100, size).astype(f"i{width}")
        into = np.full(size, np.nan, np.float32)
        incoming.expect_gradient(7, round, first, run.maxima, into)
        todo += pieces(total.view(np.uint8), first)
        first += fixed_point.packets_of(size, width)
        totals.append(total)
        sums.append(into)
    todo += rng.choices(todo, k=5)
    rng.shuffle(todo)
    done = []
    while todo:
        count = rng.randrange(1, 9)
        some, todo = todo[:count], todo[count:]
        done += incoming.take(batch_of(Kind.GRADIENT, some))
        incoming.check()
    assert incoming.repeated == 1 + 5 and sorted(run.round for run in done) == [0, 1]
    for run in done:
        expected = references.reference_dequantize(
            totals[run.round], maxima[run.round], WORKERS, width
        )
        assert np.array_equal(sums[run.round], expected)


def test_packets_that_were_not_granted_are_refused():
    incoming = Incoming(64, 4, WORKERS)
    incoming.expect_exponents(0, 1, 0, 10)
    with pytest.raises(WireError, match="packet 1 arrived, but grants end before 1"):
        incoming.take(batch_of(Kind.EXPONENTS, [(1, [])]))
    words = "GRADIENT, but the packet's number was granted for EXPONENTS"
    with pytest.raises(WireError, match=words):
        incoming.take(batch_of(Kind.GRADIENT, [(0, [])]))


def test_data_is_kept_for_resends_until_all_have_it():
    noise, out, done = np.random.default_rng(0), Outgoing(9, KEY), []
    data = [noise.integers(0, 256, size).astype(np.uint8) for size in (4096, 100, 8192)]
    kinds = [Kind.PARAMETERS, Kind.MAXIMA, Kind.PARAMETERS]
    for i, (kind, part) in enumerate(zip(kinds, data)):
        below = out.add(OutgoingBytes(kind, i, i - 1, part, 55), lambda i=i: done.append(i))
        out.check()
    assert below == out.end == 3 + 1 + 6
    staging = np.zeros(12 * PACKET_NBYTES, np.uint8)
    assert out.fill(0, 10, staging) == 10
    assert packets.verify(staging, PACKET_NBYTES, 10, KEY, 9).all()
    headers = packets.headers(staging, PACKET_NBYTES, 10)
    assert headers["number"].tolist() == list(range(10))
    assert headers["c"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5]
    assert headers["b"].tolist() == [(1 << 32) - 1] * 3 + [0] + [1] * 6
    payloads = staging.reshape(12, PACKET_NBYTES)[:10, HEADER_NBYTES:]
    for i, (first, stop) in enumerate([(0, 3), (3, 4), (4, 10)]):
        got = payloads[first:stop].reshape(-1)
        assert np.array_equal(got[: len(data[i])], data[i]) and not got[len(data[i]) :].any()
    out.acknowledged(3)
    assert done == [0]
    assert out.fill(2, 4, staging) == 3, "number 2 is acknowledged"
    assert packets.headers(staging, PACKET_NBYTES, 3)["number"].tolist() == [3, 4, 5]
    out.acknowledged(9)
    assert done == [0, 1]
    assert out.fill(9, 1, staging) == 1
    out.acknowledged(10)
    assert done == [0, 1, 2] and out.fill(9, 1, staging) == 0
    out.check()


@pytest.mark.parametrize(
    ("answers", "verdict"), [([True] * 3, True), ([True, False], False), ([True, True], None)]
)
def test_multicast_is_used_if_all_workers_received_the_trial(answers, verdict):
    trial = MulticastTrial(3)
    assert not trial.due(0.0), "no worker listens yet"
    for rank in range(3):
        trial.invite(rank, 1.0)
    assert trial.due(1.0) and not trial.due(1.01) and trial.due(1.06)
    for rank, arrived in enumerate(answers):
        trial.answered(rank, arrived)
    assert trial.verdict(1.5) is verdict
    assert trial.verdict(1.1 + ANSWERS_S) is (verdict or False)


def test_a_trial_uses_the_multicast_group_of_its_job():
    assert group_of(5, "10.0.0.1") == ("239.192.0.5", 20005)
    assert group_of((1 << 32) - 1, "10.0.0.1")[0] == "239.195.255.255"
    assert group_of(5, "fe80::1%3") is None
    assert packets.verify(packet_of(5, KEY), PACKET_NBYTES, 1, KEY, 5).all()


def test_a_late_worker_is_named_once_within_two_seconds():  # Rule 5
    lateness, lines = Lateness(3, "10.0.0.9:7100"), []

    def look(now, late=(), lost=(), here=True):
        lines.extend(lateness.update(late, now, set(lost), here))

    look(10.0)
    lateness.heartbeat(100, 2, 10.5)
    look(11.0)
    assert not lines
    lateness.heartbeat(int(SILENT_S * 1000), 2, 11.5)
    look(11.6)
    look(11.8)
    assert len(lines) == 1 and "worker 2 has sent no packet for 1." in lines[0]
    assert list(lateness.named) == [2]
    lateness.heartbeat(50, 1, 12.0)
    look(12.1, [LateWorker(1, 4, 12.1 - LATE_S / 2)])
    assert lines[1:] == ["worker 2 is no longer late"]
    look(12.8, [LateWorker(1, 4, 12.8 - LATE_S - 0.1)])
    assert len(lines) == 3 and "worker 1 has been behind the others with chunk 4" in lines[2]
    look(12.9, lost=[1])
    assert len(lines) == 3 and not lateness.named, "a worker that has left is not late"
    look(14.0)
    assert lines[3].startswith("the root switch 10.0.0.9:7100 has sent no packet for 2.")
    assert re.search(r"since \d\d:\d\d:\d\d UTC", lines[3])
    look(14.2, here=False)
    assert not lateness.named
    lateness.heartbeat(3000, (1 << 32) - 1, 15.0)
    look(15.1)
    assert not lateness.named, "the end has not begun yet"
    lateness.heartbeat(5100, (1 << 32) - 1, 17.1)
    look(17.2)
    assert "a worker that has not reached any switch yet" in lines[-1]


def test_the_end_takes_a_quarter_of_the_memory_or_the_minimum():  # Rule 4
    table = ChunkTable.build([("", ()), ("b", [ParamSpec("w", (3 << 20,), "bf16", True, 0)])])
    records = {chunk.id: record(chunk, 2, 0) for chunk in table.chunks}
    piece, scratch = 2 << 20, 4 << 20
    least = derive_fan_in(table, records, 1 << 20)
    assert (least.piece_bytes, least.scratch_bytes) == (piece, scratch)
    assert least.total == 2 * piece + 2 * scratch, "the server's own budgets refuse it"
    some = derive_fan_in(table, records, 80 << 20)
    assert least.total < some.total <= 20 << 20
    most = derive_fan_in(table, records, 1 << 40)
    assert most.buffers == 6
    beside = most.total
    alone = derive_server(table, records, 1 << 30, workers=1, holds_gradients=False, wide=True)
    both = derive_server(
        table,
        records,
        (1 << 30) + beside,
        workers=1,
        holds_gradients=False,
        wide=True,
        beside=beside,
    )
    assert both.least_bytes == alone.least_bytes + beside
    assert replace(both, least_bytes=alone.least_bytes) == alone
    with pytest.raises(BudgetError, match=r"at least \d+ MiB \(36.0 MiB of it for its fan-in\)"):
        derive_server(
            table, records, beside, workers=1, holds_gradients=False, wide=True, beside=beside
        )
