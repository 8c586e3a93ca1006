"""The commit of steps: the part of a worker's state machine that decides when a step is committed.

    end_step(s)  EndStep goes to all servers; all servers except the first answer Prepared(s).
    blob(s)      The job state after step s, which is captured when the next step begins.
    after both   Commit(s, blob) goes to the first server, which answers CommitDone(s). CommitDone
                 is then sent to the other servers.

With replicas, all servers get Commit(s, blob). Before that, each server reports checksums of the
records that it wrote (Written). If the two servers of a chunk wrote different bytes, no server
prepares the step.

Note "two sums": for the chunks of each owner, each of the two servers reports two sums modulo 2^64.
The plain sum adds the checksums, and the weighted sum adds checksum * (chunk number + 1). If the
servers differ in only one chunk, their weighted sums differ by (chunk number + 1) times the
difference of their plain sums, which identifies the chunk.

A separate server stores the residuals of this worker. Commit is sent only after this server has
prepared the step, so the residuals of the last committed step are always stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from roadtrain.errors import DivergedError
from roadtrain.servers.protocol import messages as m

_MASK = (1 << 64) - 1
Addressed: TypeAlias = tuple[int, m.WorkerMessage]  # (server, message)


@dataclass(frozen=True)
class Diverged:
    """A pair of servers that wrote different bytes for chunks of `owner` in `step`."""

    step: int
    owner: int
    servers: tuple[int, int]
    differences: tuple[int, int]  # differences of the plain and of the weighted sums

    def chunk(self, chunks: Sequence[int]) -> int | None:
        """Return the chunk in `chunks` that differs, or None if several chunks differ."""
        plain, weighted = self.differences
        return next((c for c in chunks if plain and (c + 1) * plain & _MASK == weighted), None)

    def error(self, first: str, second: str, owned: Mapping[int, int]) -> DivergedError:
        """Return the error for the user.

        `first` and `second` are the names of the servers. `owned` maps each chunk of `owner` to its
        block.
        """
        number = self.chunk([*owned])
        chunk = "several chunks" if number is None else f"chunk {number} of block {owned[number]}"
        return DivergedError(
            f"{first} and {second} wrote different bytes for {chunk} in step {self.step}: the step"
            " is not committed",
            hint="run the same command to resume from the step before. If this happens again, the"
            " memory or CPU of a server is failing, or the servers have different kinds of CPUs"
            " and the optimizer has no compiled rule",
        )


def added(sums: tuple[int, int], chunk: int, checksum: int) -> tuple[int, int]:
    """Return the two sums after adding the checksum of a chunk. See Note "two sums"."""
    return (sums[0] + checksum) & _MASK, (sums[1] + (chunk + 1) * checksum) & _MASK


class CommitStateMachine:
    def __init__(
        self,
        servers: Sequence[int],
        committed: int,
        *,
        everywhere: bool = False,
        own: int | None = None,
    ) -> None:
        self.first = servers[0]  # the server that commits
        self.others = tuple(servers[1:])
        self.everywhere = everywhere  # whether all servers keep the job state (replicas)
        self.own = own  # number of the server of this worker's residuals, if any
        self.ended = committed  # the last step that this worker has ended; at least `committed`
        self.committed = committed
        # For every step after `committed` up to `ended`:
        # step -> servers other than the first server that have prepared it
        self.prepared: dict[int, set[int]] = {}
        self.written: dict[int, dict[int, m.Written]] = {}  # step -> server -> its report
        # For some of these steps:
        self.blobs: dict[int, Any] = {}  # step -> job state, until the first server gets it
        self.sent: set[int] = set()  # with replicas, steps whose blob all other servers have got
        # Set when two servers wrote different bytes. Afterwards no step is committed.
        self.diverged: Diverged | None = None

    def end_step(self, step: int, word: bytes = b"") -> list[Addressed]:
        """End the step, after which it has no further updates. The first server passes the
        bytes `word` on to all workers.
        """
        assert step == self.ended + 1
        self.ended = step
        self.prepared[step] = set()
        self.written[step] = {}
        return [
            (self.first, m.EndStep(step, word=word)),
            *((server, m.EndStep(step)) for server in self.others),
        ]

    def blob(self, step: int, blob: Any) -> list[Addressed]:
        """Record this worker's job state after the step."""
        assert step <= self.ended
        if step <= self.committed or step in self.blobs:
            return []  # an interrupted worker may report the same blob twice
        self.blobs[step] = blob
        return self._move(step)

    def on_prepared(self, event: m.Prepared) -> list[Addressed]:
        self.prepared[event.step].add(event.server)
        return self._move(event.step)

    def on_written(self, event: m.Written) -> list[Addressed]:
        mine = {owner: both for owner, *both in event.sums}
        for other in self.written[event.step].values():
            for owner, *its in other.sums:
                if owner in mine and mine[owner] != its and self.diverged is None:
                    less = tuple((a - b) & _MASK for a, b in zip(mine[owner], its))
                    servers = min(event.server, other.server), max(event.server, other.server)
                    self.diverged = Diverged(event.step, owner, servers, (less[0], less[1]))
        self.written[event.step][event.server] = event
        return self._move(event.step)

    def on_committed(self, event: m.CommitDone) -> list[Addressed]:
        assert event.step == self.committed + 1
        self.committed = event.step
        del self.prepared[event.step], self.written[event.step]
        self.sent.discard(event.step)
        return [(server, event) for server in self.others]

    def _unwritten(self, step: int) -> list[int]:
        """Return the servers that have not sent Written for `step` (empty without replicas)."""
        servers = [
            server
            for server in (self.first, *self.others)
            if self.everywhere and server != self.own
        ]
        return [server for server in servers if server not in self.written[step]]

    def _move(self, step: int) -> list[Addressed]:
        """Return the messages about the commit of `step` that can be sent now."""
        if step not in self.blobs or self._unwritten(step) or self.diverged is not None:
            return []
        out: list[Addressed] = []
        if self.everywhere and step not in self.sent and self.own in (None, *self.prepared[step]):
            self.sent.add(step)
            out += [
                (other, m.Commit(step, self.blobs[step]))
                for other in self.others
                if other != self.own
            ]
        if len(self.prepared[step]) == len(self.others):
            out.append((self.first, m.Commit(step, self.blobs.pop(step))))
        return out

    def missing(self) -> str:
        """Return a text that names the oldest uncommitted step and the servers that have not
        answered for it.
        """
        step = self.committed + 1
        late = sorted(set(self.others) - self.prepared.get(step, set()))
        late = (self._unwritten(step) if step in self.written else []) or late
        return (
            f"step {step} waits for server(s) {late or [self.first]}"
            if step <= self.ended
            else "nothing"
        )

    def check(self) -> None:
        assert self.committed <= self.ended
        assert (
            set(self.prepared)
            == set(self.written)
            == set(range(self.committed + 1, self.ended + 1))
        )
        assert self.sent <= set(self.prepared)
        assert set(self.blobs) <= set(self.prepared)
