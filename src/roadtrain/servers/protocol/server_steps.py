"""The end and the commit of steps at a server. servers/protocol/server.py handles the chunks.

When all workers have ended a step and its updates are written, a server with replicas reports
checksums (Written). A server that keeps the job state then waits for it (Commit). Finally, the
server prepares the step, and thereby the first server commits it. The others learn of the commit
from CommitDone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.chunk_state import Resident
from roadtrain.servers.protocol.commit import added


@dataclass(frozen=True)
class ServerSpec:
    """The configuration of one server in one session of workers."""

    number: int
    chunks: Mapping[int, Resident]  # chunks that the server owns or has a replica of
    buffers: int  # number of record buffers
    durable: bool  # whether records are on files
    committed: int = 0  # the step at which the session began
    workers: int = 1
    relays: bool = False  # whether each worker is a relay that pushes the sum of several workers
    # Chunks whose weights part is one update behind the master. The value is True if the last
    # update was in the step at which the session began.
    delayed: Mapping[int, bool] = field(default_factory=dict)
    first: int = 0  # the server that commits
    everywhere: bool = False  # whether all servers keep the job state (replicas)
    owners: Mapping[int, int] = field(default_factory=dict)  # with replicas, chunk -> its owner
    # most pulls of a worker that are answered at the same time; None if there is no limit
    answers: int | None = None
    # most resident chunks that are updated at the same time; pulls of all others are answered
    at_once: int = 2

    @property
    def alone(self) -> bool:
        """Return whether there is only one worker, so gradients are not summed."""
        return self.workers == 1 and not self.relays

    @property
    def commits(self) -> bool:
        return self.number == self.first


class ServerSteps:
    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.committed = spec.committed
        # step -> chunks whose update was requested but is not written yet. A step is added by its
        # first request or at its end, and removed when it is prepared.
        self.open_updates: dict[int, set[int]] = {}
        # step -> workers that have ended it. A step is removed when all workers have ended it.
        self.ending: dict[int, set[int]] = {}
        # step -> worker -> its word for the other workers; has the same steps as `ending`
        self.words: dict[int, dict[int, Any]] = {}
        # Steps that all workers have ended and that are not prepared, in order.
        self.ended: deque[int] = deque()
        self.preparing: int | None = None
        # step -> worker -> its job state, until the step is prepared
        self.blobs: dict[int, dict[int, Any]] = {}
        self.last_written = spec.committed  # the last step for which Written was sent
        # With replicas, step -> owner -> the two sums so far, until Written is sent.
        self.sums: dict[int, dict[int, tuple[int, int]]] = {}

    @property
    def busy(self) -> bool:
        """Return whether a step is in progress."""
        under_way = self.ending or self.ended or self.blobs or self.open_updates
        return bool(under_way) or self.preparing is not None

    @property
    def newest(self) -> int:
        """The newest step that all workers have ended."""
        return max([self.committed, self.preparing or 0, *list(self.ended)])

    def update_requested(self, step: int, chunk: int) -> None:
        self.open_updates.setdefault(step, set()).add(chunk)

    def update_over(self, step: int, chunk: int) -> None:
        """Record that a chunk's update was written, or is not needed."""
        self.open_updates[step].discard(chunk)

    def updated(self, step: int, chunk: int, checksum: int) -> None:
        """With replicas, add the checksum of an updated record to the sums of the step."""
        owner = self.spec.owners.get(chunk)
        if owner is not None:
            sums = self.sums.setdefault(step, {})
            sums[owner] = added(sums.get(owner, (0, 0)), chunk, checksum)

    def end(self, event: m.EndStep) -> list[m.Action]:
        ending = self.ending.setdefault(event.step, set())
        ending.add(event.worker)
        words = self.words.setdefault(event.step, {})
        words[event.worker] = event.word
        if len(ending) < self.spec.workers:
            return []
        del self.ending[event.step], self.words[event.step]
        self.ended.append(event.step)
        self.open_updates.setdefault(event.step, set())
        sent = [words[worker] for worker in sorted(words)]
        out: list[m.Action] = [m.Send(m.StepWords(event.step, sent))] if any(sent) else []
        return out + self.prepare()

    def commit(self, event: m.Commit) -> list[m.Action]:
        self.blobs.setdefault(event.step, {})[event.worker] = event.blob
        return self.prepare()

    def prepare(self) -> list[m.Action]:
        """Return the actions that prepare the oldest ended step.

        There are none until the step's updates are written, the previous step is committed, and the
        needed job state has arrived.
        """
        if not self.ended or self.preparing is not None or self.open_updates[self.ended[0]]:
            return []
        step = self.ended[0]
        if self.committed < step - 1:
            return []
        out: list[m.Action] = []
        if self.spec.everywhere and self.last_written < step:
            self.last_written = step
            sums = [(owner, *both) for owner, both in sorted(self.sums.pop(step, {}).items())]
            out.append(m.Send(m.Written(self.spec.number, step, tuple(sums))))
        keeps_blobs = self.spec.commits or self.spec.everywhere
        if keeps_blobs and len(self.blobs.get(step, ())) < self.spec.workers:
            return out
        self.ended.popleft()
        del self.open_updates[step]
        self.preparing = step
        blobs = self.blobs.pop(step, {})
        return [*out, m.Prepare(step, [blobs[worker] for worker in sorted(blobs)])]

    def prepared(self, step: int) -> m.Send:
        """Record that a step is prepared, and return the message to the workers."""
        assert self.preparing == step
        self.preparing = None
        if not self.spec.commits:
            return m.Send(m.Prepared(self.spec.number, step))
        self.committed = step
        return m.Send(m.CommitDone(step))

    def check(self) -> None:
        """Assert every invariant."""
        for step, workers in self.ending.items():
            assert 0 < len(workers) < self.spec.workers
            assert step not in self.ended and set(self.words[step]) == workers
        assert [*self.ended] == sorted(self.ended)
        assert set(self.ended) <= set(self.open_updates)
        assert self.preparing not in self.open_updates
        assert self.preparing is None or self.preparing == self.committed + 1
        assert all(step > self.committed for step in self.blobs)
        assert not self.sums or self.spec.owners
        assert all(step > self.last_written for step in self.sums) or not self.spec.everywhere
