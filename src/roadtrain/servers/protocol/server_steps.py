"""ServerSteps: the steps that a server has ended, written, prepared and committed. It is the part
of servers/protocol/server.py that is not about chunks.

A step has ended once all workers have sent EndStep. When all its updates are written too, a server
with replicas reports what it wrote (Written). It prepares the step after the previous one is
committed and, if the job state is kept here, after that has arrived (Commit). The first server
commits by preparing; the others are informed by CommitDone.
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
    chunks: Mapping[int, Resident]  # chunks that it owns or holds a replica of
    buffers: int  # record buffers
    durable: bool  # records are on files
    committed: int = 0  # the step at which the session began
    workers: int = 1
    relays: bool = False  # each worker is a relay that pushes the sum of several
    # Chunks whose weights part is one update behind -> whether the last update was in the step at
    # which the session began.
    delayed: Mapping[int, bool] = field(default_factory=dict)
    first: int = 0  # the server that commits
    everywhere: bool = False  # replicas: all servers keep the job state
    owners: Mapping[int, int] = field(default_factory=dict)  # with replicas: chunk -> owner
    answers: int | None = None  # pulls of a worker that are answered at once; None: all

    @property
    def alone(self) -> bool:
        """Whether there is one worker, so nothing is waited for or summed."""
        return self.workers == 1 and not self.relays

    @property
    def commits(self) -> bool:
        return self.number == self.first

    @property
    def keeps_blobs(self) -> bool:
        return self.commits or self.everywhere


class ServerSteps:
    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.committed = spec.committed
        # Step -> the chunks with a requested update that is not written. A step is here from its
        # first such chunk (or its end) until it is prepared.
        self.open_updates: dict[int, set[int]] = {}
        # Step -> the workers that have ended it: some, never all.
        self.ending: dict[int, set[int]] = {}
        # For the same steps: worker -> its word for the others.
        self.words: dict[int, dict[int, Any]] = {}
        # Steps that all workers have ended and that are not prepared, in order.
        self.ended: deque[int] = deque()
        self.preparing: int | None = None
        # Step -> worker -> its part of the job state, until the step is prepared.
        self.blobs: dict[int, dict[int, Any]] = {}
        self.last_written = spec.committed  # the last step for which Written was sent
        # With replicas: step -> owner -> the sums for Written so far, until it is sent.
        self.sums: dict[int, dict[int, tuple[int, int]]] = {}

    @property
    def busy(self) -> bool:
        """Whether a step is in progress."""
        under_way = self.ending or self.ended or self.blobs or self.open_updates
        return bool(under_way) or self.preparing is not None

    def update_requested(self, step: int, chunk: int) -> None:
        self.open_updates.setdefault(step, set()).add(chunk)

    def update_over(self, step: int, chunk: int) -> None:
        """Record that an update was written, or that no worker had a gradient."""
        self.open_updates[step].discard(chunk)

    def updated(self, step: int, chunk: int, checksum: int) -> None:
        """With replicas: add the checksum of the updated record."""
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
        """Prepare the oldest ended step if nothing is missing for it."""
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
        if self.spec.keeps_blobs and len(self.blobs.get(step, ())) < self.spec.workers:
            return out
        self.ended.popleft()
        del self.open_updates[step]
        self.preparing = step
        blobs = self.blobs.pop(step, {})
        return [*out, m.Prepare(step, [blobs[worker] for worker in sorted(blobs)])]

    def prepared(self, step: int) -> m.Send:
        """Record that a step is prepared, and return the message about it."""
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
