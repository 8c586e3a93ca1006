"""When a step is committed: every server prepared it, the job's own state after it is known, the
first server commits, all are told. Pure; the worker feeds it.

end_step(s) -> EndStep to all servers; the others answer Prepared(s).
blob(s) is captured when the next step begins.
Both there -> Commit(s, blob) to the first, which answers CommitDone(s) -> CommitDone to the others.

With replicas (`everywhere`) all get Commit(s, blob) and prepare with it: then no server holds
anything that no other holds. Before that each says what it has written (Written). The two servers
of a chunk apply the same pushes in the same order to the same bytes, whatever the staleness, so
they write the same; where they did not, no server prepares the step. storage/history.py says what
is left of all that when somebody died.

Note "two sums": of the chunks of one owner both servers say the sum of their checksums and the sum
weighted by the chunks' numbers, modulo 2^64. Where one chunk differs, the second difference is the
first times its number plus one.

A part that only this worker has (`own`, servers/residuals.py) is one of the others, and no commit
is sent that it has not prepared: whichever step the job goes on from, this part has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from roadtrain.errors import DivergedError
from roadtrain.servers.protocol import messages as m

_MASK = (1 << 64) - 1
Addressed: TypeAlias = tuple[int, m.WorkerMessage]  # to which server


@dataclass(frozen=True)
class Diverged:
    """Two servers that wrote different bytes of the chunks of `owner` in `step`."""

    step: int
    owner: int
    servers: tuple[int, int]
    differences: tuple[int, int]  # of the two sums

    def chunk(self, chunks: Sequence[int]) -> int | None:
        """Which of `chunks` it is; None where several differ."""
        plain, weighted = self.differences
        return next((c for c in chunks if plain and (c + 1) * plain & _MASK == weighted), None)

    def error(self, one: str, other: str, owned: Mapping[int, int]) -> DivergedError:
        """For people. `one`, `other`: the servers; `owned`: chunk -> block, of `owner`."""
        number = self.chunk([*owned])
        chunk = "several chunks" if number is None else f"chunk {number} of block {owned[number]}"
        return DivergedError(
            f"{one} and {other} made different bytes of {chunk} in step {self.step}: it is not"
            " committed",
            hint=(
                "the same command goes on from the step before. If it comes again, the memory or"
                " processor of one of them is failing, or they are of different kinds and the"
                " optimizer has no compiled rule"
            ),
        )


def added(sums: tuple[int, int], chunk: int, checksum: int) -> tuple[int, int]:
    """With one more chunk. See Note "two sums"."""
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
        self.everywhere = everywhere  # replicas: all servers keep the job's own state
        self.own = own  # the server of what only this worker has
        self.ended = committed  # the last step that ended here: committed <= ended
        self.committed = committed
        # Of every step after `committed` up to `ended`:
        self.prepared: dict[int, set[int]] = {}  # step -> servers other than the first
        self.written: dict[int, dict[int, m.Written]] = {}  # step -> server -> what it said
        # Of some of these steps:
        self.blobs: dict[int, Any] = {}  # those that are known and not yet sent to the first
        self.told: set[int] = set()  # steps whose blob the others have, with replicas
        # Once two servers wrote different bytes. No step is committed from then on.
        self.diverged: Diverged | None = None

    def end_step(self, step: int, word: bytes = b"") -> list[Addressed]:
        """This worker asks for no more updates in the step. `word`: for the other workers."""
        assert step == self.ended + 1
        self.ended = step
        self.prepared[step] = set()
        self.written[step] = {}
        return [
            (self.first, m.EndStep(step, word=word)),
            *((server, m.EndStep(step)) for server in self.others),
        ]

    def blob(self, step: int, blob: Any) -> list[Addressed]:
        """The job's own state after the step, this worker's part, is known."""
        assert step <= self.ended
        if step <= self.committed or step in self.blobs:
            return []  # an interrupted worker says it twice
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
        self.told.discard(event.step)
        return [(server, event) for server in self.others]

    def _unwritten(self, step: int) -> list[int]:
        """With replicas: the servers that have not said what they wrote."""
        servers = [
            server
            for server in (self.first, *self.others)
            if self.everywhere and server != self.own
        ]
        return [server for server in servers if server not in self.written[step]]

    def _move(self, step: int) -> list[Addressed]:
        """What can be said now that something is known of `step`."""
        if step not in self.blobs or self._unwritten(step) or self.diverged is not None:
            return []
        out: list[Addressed] = []
        if self.everywhere and step not in self.told and self.own in (None, *self.prepared[step]):
            self.told.add(step)
            out += [
                (other, m.Commit(step, self.blobs[step]))
                for other in self.others
                if other != self.own
            ]
        if len(self.prepared[step]) == len(self.others):
            out.append((self.first, m.Commit(step, self.blobs.pop(step))))
        return out

    def missing(self) -> str:
        """Who the oldest uncommitted step waits for."""
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
        assert self.told <= set(self.prepared)
        assert set(self.blobs) <= set(self.prepared)
