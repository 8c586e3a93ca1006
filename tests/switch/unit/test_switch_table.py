"""The table of a switch: each sum contains a packet of each child exactly once, whatever
arrives."""

from __future__ import annotations

import numpy as np
import pytest

from roadtrain.switch import packets
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES, PAYLOAD_NBYTES, Kind
from roadtrain.switch.switch_table import StuckSlot, SwitchTable

INTEGER = {1: "<i1", 2: "<i2", 4: "<i4"}
ABOVE = 9  # this switch's child number at its parent


def payload_of(number: int, child: int) -> np.ndarray:
    """The payload of a number and child, always the same bytes."""
    return np.random.default_rng([number, child]).integers(0, 256, PAYLOAD_NBYTES, dtype=np.uint8)


def packet(number: int, child: int, *, kind: int = Kind.GRADIENT, width: int = 4) -> np.ndarray:
    buffer = np.zeros(PACKET_NBYTES, np.uint8)
    packets.write_headers(
        buffer,
        PACKET_NBYTES,
        1,
        kind=kind,
        job=1,
        first=number,
        sender=child,
        width=width,
        a=3,
        b=4,
    )
    buffer[HEADER_NBYTES:] = payload_of(number, child)
    return buffer


def put(table: SwitchTable, *ones: np.ndarray, ok: list[bool] | None = None) -> list[np.ndarray]:
    buffer, out = np.concatenate(ones), np.zeros(len(ones) * PACKET_NBYTES, np.uint8)
    right = np.array([True] * len(ones) if ok is None else ok)
    made = table.add(buffer, right, out, ABOVE)
    table.check()
    return list(out.reshape(-1, PACKET_NBYTES)[:made])


def total(number: int, children: int, kind: int = Kind.GRADIENT, width: int = 4) -> np.ndarray:
    parts = [payload_of(number, child) for child in range(children)]
    if kind == Kind.EXPONENTS:
        return np.max(parts, axis=0)
    return np.sum([part.view(INTEGER[width]) for part in parts], axis=0, dtype=INTEGER[width]).view(
        np.uint8
    )


@pytest.mark.parametrize("children", [1, 2, 64])
@pytest.mark.parametrize(
    ("kind", "width"),
    [(Kind.GRADIENT, 1), (Kind.GRADIENT, 2), (Kind.GRADIENT, 4), (Kind.EXPONENTS, 0)],
)
def test_a_sum_contains_all_children(children, kind, width):
    table = SwitchTable(8, children)
    for number in (0, 5, 8, (1 << 62) - 1):
        ones = [packet(number, child, kind=kind, width=width) for child in range(children)]
        order = np.random.default_rng(number).permutation(children)
        made = [sum for child in order for sum in put(table, ones[child])]
        assert len(made) == 1
        header = packets.headers(made[0], PACKET_NBYTES, 1)[0]
        assert header["number"] == number and header["sender"] == ABOVE
        assert (header["kind"], header["width"], header["a"], header["b"]) == (kind, width, 3, 4)
        assert np.array_equal(made[0][HEADER_NBYTES:], total(number, children, kind, width))
    assert table.counters["completed"] == 4 and table.counters["added"] == 4 * (children - 1)


def test_a_repeated_packet_is_not_added_again():  # Rule 6, L10 of LuWu's inconsistencies
    table = SwitchTable(4, 2)
    assert put(table, packet(1, 0), packet(1, 0), packet(1, 0)) == []
    (first,) = put(table, packet(1, 1))
    (again,) = put(table, packet(1, 0))  # a resend is answered with the sum
    assert np.array_equal(first, again)
    assert np.array_equal(first[HEADER_NBYTES:], total(1, 2))
    assert put(table, packet(5, 0)) == []  # this number takes the slot
    # these resends poison the slot in the published protocol
    assert put(table, packet(1, 0), packet(1, 1)) == []
    (sum_of_5,) = put(table, packet(5, 1))
    assert np.array_equal(sum_of_5[HEADER_NBYTES:], total(5, 2))
    assert table.counters == {
        "added": 2, "completed": 2, "dropped_old": 2, "repeated": 2, "answered": 1, "mismatched": 0
    }  # fmt: skip


def test_acknowledged_sums_are_dropped():
    table = SwitchTable(4, 2)
    put(table, packet(2, 0), packet(2, 1))
    table.snoop(3)
    table.snoop(1)  # a late heartbeat
    assert table.acked == 3
    assert put(table, packet(2, 0), packet(0, 1)) == []
    assert table.counters["dropped_old"] == 2


@pytest.mark.parametrize(
    "bad",
    [
        packet(1, 0, width=2),
        packet(1, 0, kind=Kind.EXPONENTS, width=0),
        packet(1, 0, kind=Kind.EXPONENTS, width=4),
        packet(1, 0, width=3),
        packet(1, 0, width=0),
        packet(1, 0, kind=Kind.PARAMETERS, width=0),
        packet(1, 2),
        packet(1 << 62, 0),
        packet((1 << 64) - 3, 0),
    ],
)
def test_packets_that_do_not_fit_change_nothing(bad):  # Rule 6
    table = SwitchTable(4, 2)
    put(table, packet(1, 1))
    assert put(table, bad) == []
    assert table.counters["mismatched"] == 1
    (made,) = put(table, packet(1, 0))
    assert np.array_equal(made[HEADER_NBYTES:], total(1, 2))


def test_packets_for_another_switch_change_nothing():  # Rule 8
    table = SwitchTable(4, 2, first=5)
    assert put(table, packet(1, 0), packet(1, 1), packet(1, 4), packet(1, 7)) == []
    assert table.counters["mismatched"] == 4
    (made,) = put(table, packet(1, 5), packet(1, 6))
    both = payload_of(1, 5).view(np.int32) + payload_of(1, 6).view(np.int32)
    assert np.array_equal(made[HEADER_NBYTES:], both.view(np.uint8))
    assert table.stuck() == []


def test_unverified_packets_change_nothing():  # Rule 8
    table = SwitchTable(4, 2)
    assert put(table, packet(1, 0), packet(1, 1), ok=[True, False]) == []
    assert sum(table.counters.values()) == 1
    with pytest.raises(AssertionError):
        table.add(packet(0, 0)[:-8], np.ones(1, bool), packet(0, 0), 0)
    with pytest.raises(AssertionError):
        table.add(packet(0, 0), np.ones(1, bool), np.zeros(9, np.uint8), 0)


@pytest.mark.parametrize("seed", range(4))
def test_loss_doubling_and_reordering_make_no_wrong_sum(seed):  # L10
    rng = np.random.default_rng(seed)
    children, slots, numbers = 3, 4, 60
    table, ack = SwitchTable(slots, children), 0
    have: dict[int, np.ndarray] = {}
    late: list[np.ndarray] = []  # packets in transit or to be delivered twice
    while ack < numbers:
        for child in range(children):
            for number in range(ack, min(ack + slots, numbers)):
                if rng.random() < 0.6:
                    late += [packet(number, child)] * int(rng.integers(1, 3))
        rng.shuffle(late)
        now, late = late[:8], late[8:120]
        for packet_sum in put(table, *now) if now else []:
            if rng.random() < 0.8:  # a sum may be lost too
                number = int(packets.headers(packet_sum, PACKET_NBYTES, 1)[0]["number"])
                have.setdefault(number, packet_sum[HEADER_NBYTES:].copy())
        while ack in have:
            ack += 1
        if rng.random() < 0.5:
            table.snoop(ack)
        if rng.random() < 0.02:
            table = SwitchTable(slots, children)  # a restart
    assert all(np.array_equal(have[number], total(number, children)) for number in range(numbers))


def test_memory_is_bounded_and_stuck_slots_name_the_missing_children():  # Rules 4 and 5
    table = SwitchTable(1024, 3)
    before = table.nbytes
    assert before < 1024 * (PAYLOAD_NBYTES + 64)
    for number in range(1000):
        table.now = number
        put(table, packet(number, number % 3))
    assert table.nbytes == before
    stuck = table.stuck()
    assert [slot.number for slot in stuck] == list(range(1000))
    assert stuck[4] == StuckSlot(4, (0, 2), 995)
    assert [slot.number for slot in table.stuck(older_than=990)] == list(range(10))
    put(table, packet(7, 0), packet(7, 2))
    table.snoop(5)
    assert [slot.number for slot in table.stuck()][:3] == [5, 6, 8]


@pytest.mark.parametrize(("slots", "children"), [(0, 1), (8, 0), (8, 65)])
def test_impossible_tables_are_refused(slots, children):
    with pytest.raises(AssertionError):
        SwitchTable(slots, children)
