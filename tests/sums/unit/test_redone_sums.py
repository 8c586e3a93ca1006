"""A sum that one worker has and another lacks: the first may continue at once, and the other still
gets the right sum (Rule 1). Found by `roadtrain soak --sums`: the answer was sent from memory that
already received the first worker's next part."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from roadtrain.servers import frames as m
from roadtrain.sums import sum_frames
from roadtrain.sums.reducer import Reducer


class RecordingLink:
    peer = "a worker"

    def __init__(self) -> None:
        self.frames: list[tuple[Any, Any]] = []

    def send(
        self, kind: int, header: bytes, parts: Any = (), sent: Any = None, *, urgent: bool = False
    ) -> None:
        self.frames.append((m.header(kind, header), parts[0] if parts else None))

    def close(self) -> None: ...


def push(connection: Any, number: int, values: np.ndarray, summed: int, start: int = 0) -> None:
    header = m.encode((7, start, number, values.size, "fp32", summed))
    room = connection.room(sum_frames.PART, header, values.nbytes)
    room[:] = m.as_bytes(values)
    connection.arrived(sum_frames.PART, header, room)


def wait(frames: list[Any], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(frames) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_answer_is_the_sum_even_if_the_next_round_arrives_first() -> None:
    links = [RecordingLink(), RecordingLink()]
    reducer = Reducer("sum", 2, lambda nbytes: None, lambda line: None)
    connections = [reducer.join(rank, link) for rank, link in enumerate(links)]  # type: ignore[arg-type]
    try:
        # worker 0 has the sum of round 3
        push(connections[0], 3, np.full(100, 5.0, np.float32), summed=4)
        push(connections[1], 3, np.full(100, 1.0, np.float32), summed=0)
        wait(links[1].frames, 1)
        wait(links[0].frames, 1)
        assert [(tuple(header), content) for header, content in links[0].frames] == [
            ((7, 0, 3, True), None)
        ]
        # before the answer has been sent
        push(connections[0], 4, np.full(100, 9.0, np.float32), summed=0)
        assert (np.frombuffer(links[1].frames[0][1], np.float32) == 5.0).all()
        push(connections[1], 4, np.full(100, 2.0, np.float32), summed=0)
        wait(links[1].frames, 2)
        assert (np.frombuffer(links[1].frames[1][1], np.float32) == 11.0).all()
        push(connections[0], 5, np.full(100, 1.0, np.float32), summed=0)  # meant for this reducer
        # pushes of the previous round, which are not
        push(connections[0], 4, np.full(100, 11.0, np.float32), summed=4, start=~0)
        push(connections[1], 4, np.full(100, 2.0, np.float32), summed=0, start=~0)
        wait(links[1].frames, 3)
        assert (np.frombuffer(links[1].frames[2][1], np.float32) == 11.0).all()
        push(connections[1], 5, np.full(100, 1.0, np.float32), summed=0)
        wait(links[1].frames, 4)
        assert (np.frombuffer(links[1].frames[3][1], np.float32) == 2.0).all()
    finally:
        reducer.end(RuntimeError("over"))
        for thread in reducer.threads:
            thread.join(10)
