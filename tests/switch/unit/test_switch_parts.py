"""Parts of a switch that need no sockets: quotas, queued packets, children."""

from __future__ import annotations

import numpy as np
import pytest

from roadtrain.errors import BudgetError, BusyError, ConfigError
from roadtrain.switch import switch_job
from roadtrain.switch.admission import SLOT_NBYTES, SlotQuota
from roadtrain.switch.packets import PACKET_NBYTES
from roadtrain.switch.protocol.numbered import NOTHING, Heartbeat
from roadtrain.switch.protocol.switch import SwitchStateMachine
from roadtrain.switch.streams import read_runs
from roadtrain.switch.switch_job import MOST, READ_NBYTES, UNKNOWN_RANK, Children, SwitchOutgoing
from roadtrain.switch.switch_table import SwitchTable
from roadtrain.units import KIB, MIB

A, B, C = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)


# Rule 4
def test_quotas_count_tables_sockets_and_buffers() -> None:
    quota = SlotQuota(64 * MIB)
    reserved = list[int]()
    nbytes = 0
    while (slots := min(quota.free_slots, 2048)) > 0:
        quota.take(slots, 64, "a job")
        reserved.append(slots)
        nbytes += SwitchTable(slots, 64).nbytes
        receive_nbytes = quota.receive_nbytes(slots, 64)
        nbytes += 2 * (receive_nbytes + quota.send_nbytes)  # Linux doubles the requested size
        assert nbytes < quota.used_nbytes <= 64 * MIB
    assert quota.used_slots == sum(reserved) and len(reserved) >= 3
    with pytest.raises(BusyError, match="1 slots, but only 0 are free"):
        quota.take(1, 64, "another")
    for slots in reserved:
        quota.give_back(slots, 64)
    assert (quota.used_slots, quota.free_slots) == (0, SlotQuota(64 * MIB).free_slots)


def test_more_memory_holds_more_jobs() -> None:
    """Sockets leave memory for tables: some amount of memory holds all 64 jobs that have ports."""
    quota = SlotQuota(2048 * MIB)
    for i in range(64):
        quota.take(2048, 3, f"job {i}")


def test_sockets_hold_the_windows_of_all_children() -> None:
    quota = SlotQuota(512 * MIB)
    assert quota.receive_nbytes(2048, 8) == 8 * 2048 * PACKET_NBYTES
    assert quota.receive_nbytes(2048, 100) == 32 * MIB  # at most a part of the memory
    assert quota.receive_nbytes(8, 1) >= 1 << 17


def test_a_refused_job_reserves_nothing() -> None:
    quota = SlotQuota(8 * MIB)
    before = quota.used_nbytes, quota.free_slots
    with pytest.raises(BudgetError, match=f"{before[1] + 1} slots, but only {before[1]} are free"):
        quota.take(before[1] + 1, 64, "a job")
    assert (quota.used_nbytes, quota.free_slots) == before
    quota.take(before[1], 64, "a job")
    assert 8 * MIB - quota.used_nbytes < SLOT_NBYTES


def test_too_little_memory_for_a_job_is_refused_with_the_needed_amount() -> None:
    with pytest.raises(ConfigError, match=r"64\.0 KiB") as caught:
        SlotQuota(64 * KIB)
    least = int(str(caught.value).rpartition("--memory ")[2].split("KiB")[0])
    assert SlotQuota(least * KIB).free_slots >= 8


class Script:
    """A socket with queued runs of packets."""

    def __init__(self, *runs: tuple[int, int, object]) -> None:
        """runs: (bytes, bytes of a packet, sender) of each; the bytes count up modulo 256."""
        self.runs, self.value = list(runs), 0

    def receive(self, into: np.ndarray, timeout_s: float) -> tuple[int, int, object] | None:
        assert timeout_s == 0 and into.size >= 1 << 16
        if not self.runs:
            return None
        nbytes, segment, source = self.runs.pop(0)
        for at in range(0, nbytes, max(segment, 1)):
            self.value = (self.value + 1) % 256
            into[at : min(at + segment, nbytes)] = self.value
        return nbytes, segment, source


def read(socket: Script) -> list[tuple[int, list[int], list[object]]]:
    """Read until the socket is empty. Returns (bytes of a packet, first bytes, senders) of each
    run."""
    out, memory = [], np.zeros(READ_NBYTES, np.uint8)
    while runs := read_runs(socket, memory)[0]:  # type: ignore[arg-type]
        for run in runs:
            assert run.buffer.size == run.segment * run.count and run.count <= MOST
            firsts = [int(run.buffer[i * run.segment]) for i in range(run.count) if run.segment]
            out.append((run.segment, firsts, run.sources))
    return out


def test_bulk_packets_of_several_senders_are_gathered() -> None:
    n = PACKET_NBYTES
    assert read(Script((n, n, A), (2 * n, n, B), (n, n, A))) == [(n, [1, 2, 3, 4], [A, B, B, A])]


def test_a_packet_of_another_length_starts_a_new_run() -> None:
    n = PACKET_NBYTES
    got = read(
        Script((n, n, A), (2 * n + 60, n, B), (48, 48, C), (130, 60, A), (0, 0, B), (n, n, A))
    )
    assert got == [
        (n, [1, 2, 3], [A, B, B]),
        (60, [4], [B]),
        (48, [5], [C]),
        (60, [6, 7], [A, A]),
        (10, [8], [A]),
        (0, [], [B]),
        (n, [9], [A]),
    ]


def test_the_size_of_a_run_is_bounded() -> None:
    n = PACKET_NBYTES
    got = read(Script(*[(n, n, A)] * 131, *[(45 * n, n, B)] * 3))
    assert [len(sources) for _, _, sources in got] == [176, 90]
    assert max(len(sources) for _, _, sources in got) <= MOST


class Narrow:
    """A socket whose kernel accepts `room` more runs."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent = list[tuple[bytes, int, object]]()

    def has_room(self) -> bool:
        return self.room > 0

    def send(self, packets: np.ndarray, segment: int, to: object) -> None:
        assert self.room > 0, "it would block"
        self.room -= 1
        self.sent.append((packets.tobytes(), segment, to))


def run_of(*values: int) -> np.ndarray:
    return np.repeat(np.array(values, np.uint8), 10)


# Rule 5
def test_blocked_packets_are_queued_in_order_and_delay_no_others() -> None:
    socket = Narrow(1)
    out = SwitchOutgoing(socket)  # type: ignore[arg-type]
    memory = run_of(1, 2)
    out.send(memory, 10, [A, B, C])
    memory[:] = 0  # the owner reuses the buffer
    out.send(run_of(3), 10, [A])
    assert out.waits and socket.sent == [(run_of(1, 2).tobytes(), 10, A)]
    socket.room = 1
    out.resume()
    assert out.waits
    socket.room = 9
    out.resume()
    assert not out.waits and out.given_up == 0 and out.sent == 7
    assert socket.sent[1:] == [
        (run_of(1, 2).tobytes(), 10, B),
        (run_of(1, 2).tobytes(), 10, C),
        (run_of(3).tobytes(), 10, A),
    ]


def test_packets_queued_for_too_long_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switch_job, "WAIT_S", 0.0)
    socket = Narrow(1)
    out = SwitchOutgoing(socket)  # type: ignore[arg-type]
    out.send(run_of(1, 2), 10, [A, B, C])
    out.resume()
    assert not out.waits and out.given_up == 4 and out.sent == 2


def children(count: int) -> Children:
    return Children(SwitchStateMachine(8, count), 100.0)


def test_nothing_is_reported_before_all_children_sent_a_heartbeat() -> None:
    both = children(2)
    assert both.heartbeat(0, Heartbeat(5, 9), A, (0, 4), 100.1)
    assert both.merged == NOTHING and both.addresses == [A]
    assert both.heartbeat(1, Heartbeat(3, 12, 0b10), B, (0, 6), 100.1)
    assert both.merged == Heartbeat(3, 9, 0b10) and both.addresses == [A, B]


# Rule 8
def test_a_child_moves_to_a_new_address_if_its_heartbeat_is_newer_or_it_was_silent() -> None:
    table = children(1)
    beat = Heartbeat(5, 9)
    assert table.heartbeat(0, beat, A, (0, 0), 100.0)
    assert not table.heartbeat(0, beat, B, (0, 0), 100.5) and table.addresses == [A]
    assert table.heartbeat(0, Heartbeat(6, 10), B, (0, 0), 100.5) and table.addresses == [B]
    assert not table.heartbeat(0, Heartbeat(5, 9), A, (0, 0), 100.6) and table.addresses == [B]
    assert table.heartbeat(0, Heartbeat(6, 10), C, (0, 0), 101.6) and table.addresses == [C]


def test_the_longest_silent_worker_of_the_subtree_is_reported() -> None:
    three = children(3)
    assert three.most_silent(100.25) == (250, UNKNOWN_RANK)
    for number, below in enumerate([(0, 7), (1300, 12), (40, 9)]):
        assert three.heartbeat(number, Heartbeat(0, 3), (f"10.0.0.{number}", 1), below, 100.25)
    # a child switch reports this for one of its workers
    assert three.most_silent(100.5) == (1550, 12)
    silent = three.silent(100.5)
    assert [(child.number, seconds) for child, seconds in silent] == [(1, 1.55)]
    assert str(silent[0][0]) == "child 1 (worker 12, 10.0.0.1:1)"
    assert three.heartbeat(1, Heartbeat(0, 3), ("10.0.0.1", 1), (0, 11), 101.5)
    assert [child.number for child, _ in three.silent(101.5)] == [0, 2]
