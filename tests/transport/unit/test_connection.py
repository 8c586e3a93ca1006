"""Workers of a start of a job at a host: which may join, what ends them all, and how each learns of
it."""

from __future__ import annotations

from typing import Any

import pytest

from roadtrain.errors import BusyError, LostError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers.connection import COMING_S, HostedSession, WorkerConnection
from roadtrain.sums import sum_frames


class Wire:
    def __init__(self) -> None:
        self.peer, self.sent_frames, self.closed = "10.0.0.3:7000", [], 0

    def send(
        self, kind: int, header: bytes, parts: Any = (), sent: Any = None, *, urgent: bool = False
    ) -> None:
        self.sent_frames.append((kind, tuple(m.header(kind, header))))

    def close(self) -> None:
        self.closed += 1


class Sums(HostedSession[WorkerConnection]):
    """A session that takes parts of at most one byte."""

    payloads = {sum_frames.PART: 1}

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.parts: list[Any] = []
        self.reasons: list[BaseException] = []

    def take(
        self, connection: WorkerConnection, kind: int, fields: Any, payload: memoryview
    ) -> None:
        if kind == sum_frames.MOVED:
            raise KeyError("a defect")
        if kind != sum_frames.PART:
            raise WireError("not to me")
        self.parts.append((connection.rank, tuple(fields), bytes(payload)))

    def ended(self, error: BaseException) -> None:
        self.reasons.append(error)
        super().ended(error)


PART = m.encode((7, 0, 1, 1, "fp32", 0))


@pytest.fixture
def made() -> Any:
    session = Sums(2)
    links = [Wire(), Wire()]
    yield session, links, [session.join(rank, link) for rank, link in enumerate(links)]
    session.wait_for_the_end(10)
    assert all(not thread.is_alive() for thread in session.threads)


def test_each_rank_joins_once(made: Any) -> None:
    session, links, _ = made
    assert [link.peer for link in links] == [f"worker {i} (10.0.0.3:7000)" for i in (0, 1)]
    for rank in (-1, 0, 1, 2):
        with pytest.raises(BusyError):
            session.join(rank, Wire())


def test_a_frame_goes_to_the_session_with_its_fields(made: Any) -> None:
    session, _, (first, second) = made
    room = second.room(sum_frames.PART, PART, 1)
    room[:] = b"x"
    second.arrived(sum_frames.PART, PART, room)
    first.arrived(sum_frames.PART, PART, memoryview(b""))
    assert session.parts == [(1, (7, 0, 1, 1, "fp32", 0), b"x"), (0, (7, 0, 1, 1, "fp32", 0), b"")]


@pytest.mark.parametrize(
    ("kind", "header", "nbytes"),
    [(sum_frames.PART, PART, 2), (sum_frames.SUM, m.encode((7, 0, 1, True)), 1)],
)
def test_a_payload_above_the_limit_of_its_kind_is_refused(
    made: Any, kind: int, header: bytes, nbytes: int
) -> None:
    with pytest.raises(WireError, match=f"payload of {nbytes} bytes"):
        made[2][0].room(kind, header, nbytes)


@pytest.mark.parametrize(
    ("kind", "header", "words"),
    [
        (m.BEAT, m.encode(()), ("WireError", "not to me")),
        (999, b"", ("WireError", "a frame has the unknown kind 999")),
        (sum_frames.MOVED, m.encode(()), ("LostError", "this server failed: KeyError: 'a defect'")),
    ],
)
def test_a_bad_frame_ends_all_workers_once(
    made: Any, kind: int, header: bytes, words: tuple[str, str]
) -> None:
    session, links, workers = made
    workers[0].arrived(kind, header, memoryview(b""))
    workers[1].arrived(m.BEAT, m.encode(()), memoryview(b""))
    session.end(LostError("later"))
    session.wait_for_the_end(10)
    assert len(session.reasons) == 1
    assert [link.sent_frames for link in links] == [[(m.FAILED, words)]] * 2
    assert [link.closed for link in links] == [1, 1]


def test_the_session_is_over_when_all_workers_have_left(made: Any) -> None:
    session, _, (first, second) = made
    first.lost(LostError("closed by peer"))
    assert session.over is None and session.lost_ranks == {0}
    second.lost(LostError("the last one"))
    assert str(session.over) == "the last one"


def test_a_worker_that_joins_after_the_end_gets_busy_error() -> None:
    session = Sums(2)
    session.end(LostError("over"))
    with pytest.raises(BusyError):
        session.join(0, Wire())  # type: ignore[arg-type]


def test_a_frame_in_transit_does_not_count_as_silence(made: Any) -> None:
    worker = made[2][0]
    worker.last_seen -= 100
    assert worker.silent_for(5) > 99 and worker.silent_for(200) == 0
    room = worker.room(sum_frames.PART, PART, 1)
    worker.last_seen -= 100
    assert worker.silent_for(5) == 0 == worker.silent_for(COMING_S)
    worker.last_seen -= COMING_S
    assert worker.silent_for(5) > COMING_S
    worker.arrived(sum_frames.PART, PART, room)
    assert worker.silent_for(5) == 0
