"""When a step is committed: every server prepared it, the job's own state after it is known, the first server commits,
all are told. Pure; the worker feeds it.

sealed(s) -> Seal to all servers.  the others answer Prepared(s);  blob(s) is captured when the next step begins.
Both there -> Commit(s, blob) to the first, which answers CommitDone(s) -> CommitDone to the others.

With replicas (`everywhere`) all get Commit(s, blob), the others as soon as it is there, and prepare with it: then no
server holds anything that no other holds. `resumed` says what is left of all that when somebody died.

A part that only this worker has (`own`, node/residuals.py) is one of the others, and no commit is sent that it has not
prepared: whichever step the job goes on from, this part has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roadtrain.flow import ops


class Ledger:
    """`servers`: their numbers; the first commits. Invariants (`check`): committed <= sealed; a blob is kept only until
    its commit."""

    def __init__(
        self, servers: Sequence[int], committed: int, *, everywhere: bool = False, own: int | None = None
    ) -> None:
        self.first, self.others, self.everywhere, self.own = servers[0], tuple(servers[1:]), everywhere, own
        self.sealed = committed
        self.committed = committed
        self.blobs: dict[int, Any] = {}
        self.prepared: dict[int, set[int]] = {}  # step -> servers other than the first

    def seal(self, step: int) -> list[tuple[int, Any]]:
        """No more releases for `step`. Returns (server, message)s."""
        assert step == self.sealed + 1
        self.sealed = step
        self.prepared[step] = set()
        return [(server, ops.Seal(step)) for server in (self.first, *self.others)]

    def blob(self, step: int, blob: Any) -> list[tuple[int, Any]]:
        assert self.committed < step <= self.sealed
        self.blobs[step] = blob
        return (self._early(step) if self.own in (None, *self.prepared[step]) else []) + self._try(step)

    def on_prepared(self, event: ops.Prepared) -> list[tuple[int, Any]]:
        self.prepared[event.step].add(event.server)
        early = event.server == self.own and event.step in self.blobs
        return (self._early(event.step) if early else []) + self._try(event.step)

    def _early(self, step: int) -> list[tuple[int, Any]]:
        """Where all prepare with the blob."""
        others = [server for server in self.others if self.everywhere and server != self.own]
        return [(server, ops.Commit(step, self.blobs[step])) for server in others]

    def on_committed(self, event: ops.CommitDone) -> list[tuple[int, Any]]:
        assert event.step == self.committed + 1
        self.committed = event.step
        del self.prepared[event.step]
        return [(server, event) for server in self.others]

    def _try(self, step: int) -> list[tuple[int, Any]]:
        if step in self.blobs and len(self.prepared[step]) == len(self.others):
            return [(self.first, ops.Commit(step, self.blobs.pop(step)))]
        return []

    def missing(self) -> str:
        """Who the oldest uncommitted step waits for."""
        step = self.committed + 1
        late = sorted(set(self.others) - self.prepared.get(step, set()))
        return f"step {step} waits for server(s) {late or [self.first]}" if step <= self.sealed else "nothing"

    def check(self) -> None:
        assert self.committed <= self.sealed
        assert set(self.prepared) == set(range(self.committed + 1, self.sealed + 1))
        assert set(self.blobs) <= set(self.prepared)


def resumed(found: Mapping[int, tuple[int, Sequence[int]]]) -> tuple[int, tuple[int, ...], int]:
    """What the next session goes on from: (step, the servers whose contents count, the session's number). `found`:
    living server -> (its newest step, -1 without a store; which session each server took part in last, () where there
    are no replicas).

    The latest of these descriptions says who was there last; what another server holds is older. Each of those has
    every committed step, and step s-1 while any has s, since a step is prepared after the commit of the one before. So
    the smallest of their newest steps is the last committed one; or, where who had to commit is gone, maybe the one
    after, which then all have prepared whole.
    """
    holding = {server: newest for server, (newest, _) in found.items() if newest >= 0}
    _, _, latest = max(((max(found[s][1], default=0), holding[s], found[s][1]) for s in holding), default=(0, -1, ()))
    number = max(latest, default=0)
    there = {server for server, session in enumerate(latest) if session == number}
    members = tuple(server for server in sorted(holding) if not latest or server in there)
    return min((holding[server] for server in members), default=-1), members, number + 1
