"""switch/protocol/timed_sender.py: the timer of RFC 6298 and the window, on virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadtrain.switch.protocol import timed_sender
from roadtrain.switch.protocol.numbered import Heartbeat
from roadtrain.switch.protocol.timed_sender import (
    FIRST_TIMEOUT_S,
    GAIN,
    LEAST_TIMEOUT_S,
    LEAST_TRIP_S,
    LEAST_WINDOW,
    MEMORY_S,
    MOST_TIMEOUT_S,
    STUCK,
    RetransmissionTimer,
    TimedSender,
)

SLOTS = 2048


def reference(trips: list[float]) -> float:
    """Reference: the timeout of RFC 6298, sections 2.2 and 2.3."""
    srtt, rttvar = trips[0], trips[0] / 2
    for trip in trips[1:]:
        rttvar = (1 - 1 / 4) * rttvar + 1 / 4 * abs(srtt - trip)
        srtt = (1 - 1 / 8) * srtt + 1 / 8 * trip
    return srtt + max(timed_sender.BEAT_S, 4 * rttvar)


@given(st.lists(st.floats(1e-4, 0.3), min_size=1, max_size=30))
def test_the_timeout_equals_that_of_the_rfc(trips: list[float]) -> None:
    timer = RetransmissionTimer()
    assert timer.timeout_s() == FIRST_TIMEOUT_S
    for trip in trips:
        timer.sample(trip)
    expected = reference(trips)
    assert timer.timeout_s(0.0) == pytest.approx(min(expected, MOST_TIMEOUT_S))
    bounded = min(max(expected, LEAST_TIMEOUT_S), MOST_TIMEOUT_S)
    assert timer.timeout_s() == pytest.approx(bounded)
    timer.doublings += 1
    assert timer.timeout_s() == pytest.approx(min(2 * bounded, MOST_TIMEOUT_S))
    timer.sample(trips[-1])
    assert timer.timeout_s() == pytest.approx(
        min(max(reference([*trips, trips[-1]]), LEAST_TIMEOUT_S), MOST_TIMEOUT_S)
    ), "a sample ends the doubling"


def sender_of(ready: int = 100_000) -> TimedSender:
    sender = TimedSender()
    sender.numbers.may_send(ready)
    sender.heartbeat(Heartbeat(0, SLOTS - 1), 0.0)
    return sender


def send_ready(sender: TimedSender, now_s: float, most: int = 10_000) -> list[int]:
    return [n for run in iter(lambda: sender.next_numbers(most, now_s), range(0)) for n in run]


def test_a_resent_number_gives_no_sample() -> None:
    """Karn's rule: number 0 is resent, and its heartbeat may belong to either packet."""
    sender = sender_of(ready=3)
    assert send_ready(sender, 0.0) == [0, 1, 2]
    sender.heartbeat(Heartbeat(0, SLOTS - 1, 0b110), 0.01)
    assert send_ready(sender, 0.01) == [0]
    sender.heartbeat(Heartbeat(3, SLOTS + 2), 5.0)
    assert sender.timer.timeout_s() == FIRST_TIMEOUT_S
    sender.numbers.may_send(4)
    assert send_ready(sender, 6.0) == [3]
    sender.heartbeat(Heartbeat(4, SLOTS + 3), 6.1)
    assert sender.timer.timeout_s(0.0) == pytest.approx(0.1 + 4 * 0.05)


def test_there_is_one_sample_per_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[float] = []
    monkeypatch.setattr(RetransmissionTimer, "sample", lambda self, rtt_s: samples.append(rtt_s))
    sender = sender_of()
    first = send_ready(sender, 0.0)
    for i in range(1, len(first) + 1):  # a heartbeat for each packet, 1 ms apart
        sender.heartbeat(Heartbeat(i, SLOTS + i - 1), 0.02 + i * 1e-3)
        send_ready(sender, 0.02 + i * 1e-3)
    assert samples == [pytest.approx(0.021)], "the next number was sent 21 ms later"


def test_silence_is_answered_by_a_probe_and_then_by_timeouts_that_double() -> None:
    sender = sender_of(ready=10)
    send_ready(sender, 0.0)
    sender.heartbeat(Heartbeat(4, SLOTS + 3), 0.02)
    early_s, late_s = sender.timer.timeout_s(0.0), sender.timer.timeout_s()
    assert early_s < LEAST_TIMEOUT_S == late_s
    now_s, waits, resent = 0.02, list[float](), list[list[int]]()
    for _ in range(6):
        assert send_ready(sender, now_s) == [], "nothing may be sent before the timer expires"
        waits.append(sender.wait_s(now_s))
        assert not sender.stuck or len(waits) > STUCK
        now_s += waits[-1]
        resent.append(send_ready(sender, now_s))
    doubled = [late_s * 2**i for i in range(5)]
    assert waits == pytest.approx([early_s, *(min(s, MOST_TIMEOUT_S) for s in doubled)])
    assert resent == [[9], *[[4, 5, 6, 7, 8, 9]] * 5] and sender.stuck
    sender.heartbeat(Heartbeat(10, SLOTS + 9), now_s)
    assert not sender.stuck and sender.wait_s(now_s) == float("inf")


def test_no_timer_runs_while_nothing_is_in_flight() -> None:
    sender = sender_of(ready=2)
    assert sender.wait_s(0.0) == float("inf")
    send_ready(sender, 100.0)
    assert sender.wait_s(100.0) == FIRST_TIMEOUT_S, "the timer begins with the first packet"


class Pipe:
    """A link of `rate` packets/s and a round trip, with a heartbeat each 10 ms."""

    def __init__(self, sender: TimedSender, rate: float, trip_s: float) -> None:
        self.sender, self.rate, self.trip_s = sender, rate, trip_s
        self.now_s, self.free_s = 0.0, 0.0
        self.arrivals = list[tuple[float, int]]()
        self.most_flight = 0
        self.arrived = 0

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            for number in send_ready(self.sender, self.now_s):
                self.free_s = max(self.free_s, self.now_s) + 1 / self.rate
                self.arrivals.append((self.free_s + self.trip_s, number))
            self.most_flight = max(self.most_flight, self.sender.numbers.in_flight)
            self.now_s += timed_sender.BEAT_S
            while self.arrivals and self.arrivals[0][0] <= self.now_s:
                self.arrived = self.arrivals.pop(0)[1] + 1
            self.sender.heartbeat(Heartbeat(self.arrived, self.arrived + SLOTS - 1), self.now_s)


@pytest.mark.parametrize("trip_s", [1e-4, 0.02, 0.1])
@pytest.mark.parametrize("mbit", [10, 50, 100, 400])
@pytest.mark.slow
def test_the_window_fills_the_link_and_not_its_queue(mbit: int, trip_s: float) -> None:
    rate = mbit * 1e6 / 8 / 1498
    pipe = Pipe(sender_of(1 << 30), rate, trip_s)
    pipe.run(2.0)
    before, pipe.most_flight = pipe.arrived, 0
    pipe.run(4.0)
    assert pipe.sender.numbers.resends == 0
    slots = SLOTS / (trip_s + 2 * timed_sender.BEAT_S)  # packets/s that the slots allow
    assert (pipe.arrived - before) / 2.0 >= 0.95 * min(rate, slots)
    delay_s = max(trip_s + 2 * timed_sender.BEAT_S, LEAST_TRIP_S)
    assert pipe.most_flight <= 1.3 * GAIN * rate * delay_s + LEAST_WINDOW


def test_a_link_that_becomes_slower_gets_a_smaller_window() -> None:
    pipe = Pipe(sender_of(1 << 30), 8000.0, 1e-4)
    pipe.run(2.0)
    fast, pipe.rate = pipe.sender.window, 800.0
    pipe.run(4 * MEMORY_S)
    assert pipe.sender.window < fast / 3 and pipe.sender.numbers.resends == 0


@pytest.mark.slow
def test_a_longer_round_trip_is_measured_although_the_window_is_full() -> None:
    pipe = Pipe(sender_of(1 << 30), 8000.0, 0.01)
    pipe.run(2.0)
    pipe.trip_s = 0.12
    pipe.run(6 * MEMORY_S)
    before = pipe.arrived
    pipe.run(8 * MEMORY_S)
    assert (pipe.arrived - before) / (2 * MEMORY_S) > 0.9 * 8000.0


def test_a_sender_without_data_does_not_forget_the_rate() -> None:
    sender = sender_of(1 << 30)
    pipe = Pipe(sender, 8000.0, 1e-4)
    pipe.run(2.0)
    full = sender.window
    sender.numbers.ready = sender.numbers.next
    for _ in range(100):
        sender.numbers.may_send(sender.numbers.next + 1)
        pipe.run(pipe.now_s + 0.2)
    assert sender.window >= 0.9 * full
