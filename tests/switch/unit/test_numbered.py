"""The two ends of a numbered stream (switch/protocol/numbered.py), alone and over a link that
loses, delays and repeats packets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.errors import WireError
from roadtrain.switch.protocol.numbered import (
    NOTHING,
    Heartbeat,
    NumberedReceiver,
    NumberedSender,
    NumberRun,
    combined,
    merged,
    overlapping,
)


def numbers_of(beat: Heartbeat) -> set[int]:
    """Numbers that a heartbeat reports as received."""
    later = {beat.ack + i for i in range(beat.have.bit_length()) if beat.have >> i & 1}
    return set(range(beat.ack)) | later


def beat_of(numbers: set[int], credit: int) -> Heartbeat:
    """Reference: the heartbeat of a receiver with a set of numbers."""
    ack = next(n for n in range(len(numbers) + 1) if n not in numbers)
    return Heartbeat(ack, credit, sum(1 << (n - ack) for n in numbers if n > ack))


# numbers without a hole from 0, and later numbers
SETS = st.builds(
    lambda begun, later: set(range(begun)) | later, st.integers(0, 20), st.sets(st.integers(0, 20))
)


@given(st.lists(st.tuples(SETS, st.integers(20, 30)), min_size=1, max_size=5))
def test_merged_beats_report_what_all_receivers_have(receivers: list[tuple[set[int], int]]) -> None:
    beat = merged([beat_of(numbers, credit) for numbers, credit in receivers])
    assert numbers_of(beat) == set.intersection(*(numbers for numbers, _ in receivers))
    assert beat == beat_of(numbers_of(beat), min(credit for _, credit in receivers))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=5))
def test_the_runs_that_overlap_a_range_are_found_with_their_packets(gaps) -> None:
    runs, at = [], 0
    for gap, count in gaps:
        runs.append(NumberRun(at + gap, count))
        at += gap + count
    for first in range(at + 2):
        for stop in range(first, at + 2):
            found = {
                run.first + begin + i
                for run, begin, many in overlapping(runs, first, stop)
                for i in range(many)
            }
            own = {n for run in runs for n in range(run.first, run.first + run.count)}
            assert found == own & set(range(first, stop))


@given(SETS)
def test_a_beat_counts_what_has_arrived(numbers: set[int]) -> None:
    beat = beat_of(numbers, 30)
    assert beat.count == len(numbers) and beat.end == max(numbers, default=-1) + 1
    assert {n for n in range(40) if beat.has(n)} == numbers


@given(SETS, SETS)
def test_combined_beats_report_what_either_reports(first: set[int], second: set[int]) -> None:
    assert combined(beat_of(first, 21), beat_of(second, 20)) == beat_of(first | second, 21)
    assert combined(NOTHING, beat_of(first, 25)) == beat_of(first, 25)


def sent_to(receiver: NumberedReceiver | None = None, ready: int = 100) -> NumberedSender:
    sender = NumberedSender()
    sender.may_send(ready)
    if receiver is not None:
        sender.heartbeat(receiver.heartbeat())
    return sender


def test_nothing_is_sent_before_the_first_heartbeat() -> None:
    sender = sent_to()
    assert list(sender.next_numbers(10)) == [] and not sender.idle
    sender.heartbeat(Heartbeat(0, 3))
    assert list(sender.next_numbers(0)) == []
    assert list(sender.next_numbers(3)) == [0, 1, 2] and list(sender.next_numbers(3)) == [3]
    assert list(sender.next_numbers(3)) == []
    sender.check()


def test_a_sender_stops_at_the_last_number() -> None:
    sender = NumberedSender()
    assert sender.idle
    sender.heartbeat(Heartbeat(0, 9))
    sender.may_send(2)
    sender.may_send(1)  # a late call takes nothing back
    assert list(sender.next_numbers(9)) == [0, 1] and not sender.idle
    sender.heartbeat(Heartbeat(2, 9))
    assert sender.idle and list(sender.next_numbers(9)) == []
    sender.silent()
    assert list(sender.next_numbers(9)) == [] and sender.sent == 2


def test_a_missing_number_is_resent_once_before_new_numbers() -> None:
    sender = sent_to(NumberedReceiver(16))
    assert list(sender.next_numbers(8)) == list(range(8))
    seen = Heartbeat(1, 16, 0b101100)  # missing: 1, 2, 5; 7 is still in transit
    sender.heartbeat(seen)
    assert [list(sender.next_numbers(9)) for _ in range(2)] == [[1, 2], [5]]
    sender.heartbeat(seen)  # reports nothing new
    assert sender.resends == 3
    assert list(sender.next_numbers(2)) == [8, 9]
    sender.heartbeat(Heartbeat(1, 16, 0b1101100))  # 7 arrived, sent before the resends
    assert list(sender.next_numbers(0)) == [] and list(sender.next_numbers(1)) == [10]
    sender.heartbeat(Heartbeat(1, 16, 0b11101100))  # 8 was sent after them
    assert [list(sender.next_numbers(9)) for _ in range(2)] == [[1, 2], [5]]
    sender.check()


def test_a_resend_that_arrives_shows_that_earlier_resends_were_lost() -> None:
    sender = sent_to(NumberedReceiver(4))
    assert len(sender.next_numbers(4)) == 4
    sender.heartbeat(Heartbeat(0, 3, 0b1000))
    assert list(sender.next_numbers(4)) == [0, 1, 2]
    sender.heartbeat(Heartbeat(0, 3, 0b1010))
    assert list(sender.next_numbers(4)) == [0]  # 2 was sent after 1 and may still arrive
    sender.check()


def test_after_silence_all_missing_numbers_are_resent() -> None:
    sender = sent_to(NumberedReceiver(8))
    sender.next_numbers(5)
    sender.heartbeat(Heartbeat(0, 7, 0b100))
    sender.next_numbers(1)
    sender.silent()
    assert [list(sender.next_numbers(9)) for _ in range(3)] == [[0, 1], [3, 4], [5, 6, 7]]
    assert sender.sent == 5 + 1 + 7 and sender.resends == 5
    sender.check()


def test_a_heartbeat_for_unsent_numbers_is_refused() -> None:  # Rule 6
    sender = sent_to(NumberedReceiver(8))
    sender.next_numbers(4)
    for beat in (Heartbeat(5, 20), Heartbeat(2, 20, 0b100)):
        words = "5 packets are acknowledged, but 4 were sent"
        with pytest.raises(WireError, match=words):
            sender.heartbeat(beat)


def test_a_receiver_takes_each_number_of_its_window_once() -> None:
    receiver = NumberedReceiver(4)
    assert [receiver.accept(n) for n in (2, 4, 2, 0, 4, 1, 3)] == [
        *(True, False, False, True),
        *(True, True, True),
    ]
    assert receiver.heartbeat() == Heartbeat(5, 8)
    assert not receiver.accept(4) and not receiver.accept(0) and not receiver.accept(-3)
    receiver.check()


@settings(max_examples=300)
@given(
    st.integers(1, 70),
    st.lists(st.lists(st.tuples(st.integers(-2, 90), st.integers(1, 90)), max_size=4), max_size=6),
)
@pytest.mark.slow
def test_accepting_many_numbers_equals_accepting_each(
    depth: int, batches: list[list[tuple[int, int]]]
) -> None:
    single, many = NumberedReceiver(depth), NumberedReceiver(depth)
    for batch in batches:
        numbers = [n for first, count in batch for n in range(first, first + count)]
        new = many.accept_many(np.array(numbers, np.int64))
        assert new.dtype == np.bool_ and new.tolist() == [single.accept(n) for n in numbers]
        assert many.heartbeat() == single.heartbeat()
        many.check()


def test_a_receiver_agrees_with_a_plain_set() -> None:
    """The reference keeps all numbers."""
    rng = random.Random(1)
    for depth in (1, 3, 64, 200):
        receiver, arrived, ack = NumberedReceiver(depth), set[int](), 0
        for _ in range(2000):
            number = ack + rng.randrange(-5, depth + 3)
            new = number >= 0 and number not in arrived and number < ack + depth
            assert receiver.accept(number) == new
            arrived |= {number} if new else set()
            while ack in arrived:
                ack += 1
            assert numbers_of(receiver.heartbeat()) == arrived


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("receivers", [1, 3])
def test_every_number_reaches_every_receiver_once(loss: float, receivers: int) -> None:  # Rule 5
    """Over a link that loses, repeats and reorders packets; numbers that are not lost are not
    resent."""
    rng = random.Random(f"{loss} {receivers}")
    count, depth = 3000, 32
    sender, ends = NumberedSender(), [NumberedReceiver(depth) for _ in range(receivers)]
    got = [list[int]() for _ in ends]
    sender.may_send(count)
    beats = [NOTHING] * receivers
    for _ in range(200_000):
        batch = [n for _ in range(3) for n in sender.next_numbers(rng.randrange(9))]
        for end, mine in zip(ends, got):
            arrived = [n for n in batch if rng.random() >= loss]
            if loss:
                arrived += rng.sample(arrived, len(arrived) // 4)
                rng.shuffle(arrived)
            mine += [n for n in arrived if end.accept(n)]
        beats = [
            combined(old, end.heartbeat()) if rng.random() >= loss else old
            for old, end in zip(beats, ends)
        ]
        sender.heartbeat(merged(beats))
        sender.check()
        if sender.idle:
            break
        if not batch:
            sender.silent()
    assert all(sorted(mine) == list(range(count)) for mine in got)
    if loss == 0:
        assert sender.resends == 0 and sender.sent == count


def test_a_probe_resends_the_last_missing_number_and_shows_what_was_lost() -> None:
    sender = sent_to(NumberedReceiver(16))
    assert list(sender.probe()) == [], "nothing was sent"
    sender.next_numbers(10)
    sender.heartbeat(Heartbeat(2, 17, 0b10000000))  # 9 has arrived
    assert list(sender.next_numbers(9)) == [2, 3, 4, 5, 6, 7, 8] and sender.in_flight == 7
    assert list(sender.probe()) == [8]
    sender.check()
    assert (sender.sent, sender.resends, sender.in_flight) == (18, 8, 7)
    assert list(sender.next_numbers(1)) == [10], "a probe does not count as lost"
    sender.heartbeat(Heartbeat(2, 17, 0b11000000))  # this resend arrives, the others do not
    sender.check()
    assert list(sender.next_numbers(9)) == [2, 3, 4, 5, 6, 7]


def test_after_silence_every_missing_number_counts_as_lost() -> None:
    sender = sent_to(NumberedReceiver(16))
    sender.next_numbers(10)
    assert sender.in_flight == 10
    sender.heartbeat(Heartbeat(4, 19, 0b100))
    assert list(sender.next_numbers(9)) == [4, 5]
    sender.silent()
    sender.check()
    assert sender.in_flight == 0 and list(sender.next_numbers(9)) == [4, 5]
    assert sender.in_flight == 2 and list(sender.next_numbers(9)) == [7, 8, 9]
    sender.check()
