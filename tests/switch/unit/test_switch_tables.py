"""The compiled table of a switch equals the state machine in switch/protocol/switch.py packet by
packet (Rule 7): any packets get the same answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roadtrain.switch.packets import HEADER, HEADER_NBYTES, PACKET_NBYTES, Kind
from roadtrain.switch.switch_table import SwitchTable
from tests.support.plain_table import PlainTable

SUMMED = [(Kind.GRADIENT, 1), (Kind.GRADIENT, 2), (Kind.GRADIENT, 4), (Kind.EXPONENTS, 0)]
Sent = tuple[
    int, int, int, bool
]  # number, sender, index in SUMMED (mostly derived from the number), accepted?


def batch_of(sent: list[Sent], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Packets with random payloads, and a mask of those to accept."""
    packets = random.integers(0, 256, (len(sent), PACKET_NBYTES), np.uint8)
    headers = packets[:, :HEADER_NBYTES].view(HEADER)[:, 0]
    for header, (number, sender, what, _) in zip(headers, sent):
        kind, width = SUMMED[what]
        header["number"], header["sender"], header["width"] = number, sender, width
        header["kind"] = kind
    return packets.reshape(-1), np.array([accepted for *_, accepted in sent], np.bool_)


class Both:
    """Applies each event to both tables and asserts equal answers."""

    def __init__(self, slots: int, children: int, child: int) -> None:
        self.slots, self.children, self.child = slots, children, child
        self.restart()

    def restart(self) -> None:
        self.tables = SwitchTable(self.slots, self.children), PlainTable(self.slots, self.children)

    def snoop(self, ack: int) -> None:
        for table in self.tables:
            table.snoop(ack)

    def add(self, packets: np.ndarray, ok: np.ndarray) -> int:
        answers, made = list[np.ndarray](), list[int]()
        for table in self.tables:
            out = np.zeros(packets.size, np.uint8)
            made.append(table.add(packets.copy(), ok, out, self.child))
            answers.append(out[: made[-1] * PACKET_NBYTES])
            table.check()
        assert made[0] == made[1] and np.array_equal(*answers)
        return made[0]


PACKET = st.tuples(st.integers(0, 11), st.integers(0, 3), st.integers(0, 11), st.booleans())
EVENT = st.one_of(st.lists(PACKET, min_size=1, max_size=12), st.integers(0, 11), st.just("restart"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 5), st.integers(1, 4), st.lists(EVENT, max_size=12), st.integers(0, 9))
@pytest.mark.slow
def test_both_tables_answer_any_packets_equally(
    slots: int, children: int, events: list[list[Sent] | int | str], seed: int
) -> None:
    both, random = Both(slots, children, child=3), np.random.default_rng(seed)
    for event in events:
        match event:
            case "restart":
                both.restart()
            case int(ack):
                both.snoop(ack)
            case list(sent):
                # most packets of a number have the same kind and width
                sent = [
                    (number, sender % children, number % 4 if what > 3 else what, accepted)
                    for number, sender, what, accepted in sent
                ]
                both.add(*batch_of(sent, random))


@pytest.mark.parametrize("children", [1, 2, 5, 64])
@pytest.mark.slow
def test_both_tables_agree_over_a_long_job(children: int) -> None:
    """Numbers advance as in a job, with many late or repeated packets."""
    random, both, answers, acked = np.random.default_rng(children), Both(16, children, 1), 0, 0
    for _ in range(60):
        count = 8 * children
        numbers = acked + random.integers(-4, 18, count)
        senders = random.integers(0, children, count)
        sent = [
            (max(0, int(n)), int(s), max(0, int(n)) % 4, True) for n, s in zip(numbers, senders)
        ]
        answers += both.add(*batch_of(sent, random))
        chance = random.random()
        if chance < 0.7:
            acked += int(random.integers(0, 6))
            both.snoop(acked)
        elif chance < 0.75:
            both.restart()
    assert answers > 20
