"""A reducer, a coordinator or a worker of a summation accepts any frame or ends with a typed error
(Rule 8)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roadtrain.errors import BudgetError, BusyError, LostError, RoadtrainError, WireError
from roadtrain.servers import frames as m
from roadtrain.sums import sum_frames
from roadtrain.sums.agreement import Agreement
from roadtrain.sums.coordinator import Coordinator
from roadtrain.sums.coordinator_link import CoordinatorLink
from roadtrain.sums.protocol.membership import Change, Spares
from roadtrain.sums.reducer import Reducer

LIMIT = 1 << 16
PART = m.encode((0, 0, 0, 2, "\0" * 6, 4))

small = st.integers(-2, 3) | st.integers(-(1 << 63), (1 << 64) - 1)
texts = st.sampled_from(
    ["fp32", "bf16", "topk:0.5", "topk:0", "onebit", "dither:4", "", "x" * 99, "topk:1e-300"]
)
fields = st.lists(small | texts | st.booleans() | st.lists(small, max_size=3), max_size=7)
headers = (
    fields.map(lambda values: m.encode(tuple(values)))
    | st.binary(max_size=20)
    | st.builds(
        lambda *values: m.encode(values), small, small, small, small, texts, st.integers(-1, 4)
    )
)
sums = [
    sum_frames.PART,
    sum_frames.MOVED,
    sum_frames.SUM,
    sum_frames.REDUCER_LOST,
    sum_frames.STATE,
    sum_frames.ASK,
    sum_frames.CHANGE,
    m.FAILED,
    0,
    999,
]
agreement = [
    sum_frames.SAY,
    sum_frames.STALL,
    sum_frames.HAS,
    sum_frames.AGREED,
    sum_frames.ASK_BEGUN,
    sum_frames.MISMATCH,
]
kinds = st.sampled_from([*sums, *agreement])
frames = st.tuples(kinds, headers, st.sampled_from([0, 1, 2, 4, 8, 36]) | st.integers(0, 300))


class Sums:
    """Sums of a worker that reaches no new spare host."""

    def dial(self, added: Spares) -> list[int]:
        return [number for number, _, _ in added]

    def hold(self) -> dict[int, tuple[int, bool]]:
        return {}

    def change(self, change: Change) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Mute:
    peer = "a fuzzer"

    def send(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...


def deliver(receiver: Any, frame: tuple[int, bytes, int]) -> bool:
    """Deliver a frame. Returns whether the link stays open: an error raised by the receiver ends
    it, and any error other than a typed one is a defect."""
    kind, header, nbytes = frame
    try:
        room = receiver.room(kind, header, nbytes) if nbytes else memoryview(b"")
        assert len(room) == nbytes
        if nbytes:
            room[:] = bytes(range(256))[:1] * nbytes
        receiver.arrived(kind, header, room)
    except RoadtrainError:
        return False
    return True


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 1), frames), max_size=12))
# frames after the end
@example(
    [
        (0, (sum_frames.PART, b"\x90", 0)),
        (0, (sum_frames.PART, PART, 8)),
        (1, (sum_frames.SUM, PART, 8)),
    ]
)
@pytest.mark.slow
def test_a_reducer_accepts_or_refuses_any_frames(
    arrivals: list[tuple[int, tuple[int, bytes, int]]],
) -> None:
    used = [0]

    def reserve(nbytes: int) -> None:
        if used[0] + nbytes > LIMIT:
            raise BudgetError("no more")
        used[0] += nbytes

    reducer = Reducer("sum", 2, reserve, lambda _: None)
    connections = [reducer.join(rank, Mute()) for rank in range(2)]  # type: ignore[arg-type]
    for rank, frame in arrivals:
        if not deliver(connections[rank], frame):
            break
        assert used[0] <= LIMIT
        with reducer.lock:
            reducer._machine.check()
    assert reducer.over is None or "this server failed" not in str(reducer.over)
    reducer.end(RoadtrainError("over"))
    for thread in reducer.threads:
        thread.join(10)
        assert not thread.is_alive()


@settings(deadline=None, max_examples=100)
@given(st.lists(frames, max_size=12))
@pytest.mark.slow
def test_a_coordinator_accepts_or_refuses_any_frames(
    arrivals: list[tuple[int, bytes, int]],
) -> None:
    control = Coordinator("s", 1, True, [[0]], ((1, "a:1", 1.0),), lambda _: None)
    connection = control.join(0, Mute())  # type: ignore[arg-type]
    for frame in arrivals:
        if not deliver(connection, frame):
            break
        control.agreement.check()
        control.groups[0].machine.check()
    assert control.over is None or "this server failed" not in str(control.over)


@settings(deadline=None, max_examples=100)
@given(st.lists(frames, max_size=12))
@pytest.mark.slow
def test_a_worker_accepts_or_refuses_any_frames_of_a_coordinator(
    arrivals: list[tuple[int, bytes, int]],
) -> None:
    link = CoordinatorLink()
    link.sums = Sums()  # type: ignore[assignment]
    link.agreement = Agreement(0, True, 60.0, link.say, lambda: None, lambda error: None)
    link.linked(Mute())  # type: ignore[arg-type]
    for frame in arrivals:
        if not deliver(link, frame):
            break
    link.agreement.close()


@pytest.mark.parametrize(
    ("ended", "raised"),
    [(WireError("no format 'doubled'"), WireError), (LostError("worker 1 has left"), BusyError)],
)
def test_a_worker_that_joins_an_ended_reducer_gets_the_reason(
    ended: Any, raised: type[RoadtrainError]
) -> None:
    """Unless the host counts as dead: then the worker continues without it."""
    reducer = Reducer("sum", 2, lambda nbytes: None, lambda _: None)
    reducer.join(0, Mute())  # type: ignore[arg-type]
    reducer.end(ended)
    with pytest.raises(raised, match="doubled" if raised is WireError else "busy"):
        reducer.join(1, Mute())  # type: ignore[arg-type]
