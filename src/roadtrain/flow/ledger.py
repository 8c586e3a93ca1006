"""When a step is committed: every server prepared it, the job's own state after it is known, server 0 commits, all are
told. Pure; the worker feeds it.

sealed(s) -> Seal to all servers.  servers 1.. answer Prepared(s);  blob(s) is captured when the next step begins.
Both there -> Commit(s, blob) to server 0, which answers CommitDone(s) -> CommitDone to the others.
"""

from __future__ import annotations

from typing import Any

from roadtrain.flow import ops


class Ledger:
    """Invariants (`check`): committed <= sealed; a blob is kept only until its commit."""

    def __init__(self, servers: int, committed: int) -> None:
        self.servers = servers
        self.sealed = committed
        self.committed = committed
        self.blobs: dict[int, Any] = {}
        self.prepared: dict[int, set[int]] = {}  # step -> servers other than 0

    def seal(self, step: int) -> list[tuple[int, Any]]:
        """No more releases for `step`. Returns (server, message)s."""
        assert step == self.sealed + 1
        self.sealed = step
        self.prepared[step] = set()
        return [(server, ops.Seal(step)) for server in range(self.servers)]

    def blob(self, step: int, blob: Any) -> list[tuple[int, Any]]:
        assert self.committed < step <= self.sealed
        self.blobs[step] = blob
        return self._try(step)

    def on_prepared(self, event: ops.Prepared) -> list[tuple[int, Any]]:
        self.prepared[event.step].add(event.server)
        return self._try(event.step)

    def on_committed(self, event: ops.CommitDone) -> list[tuple[int, Any]]:
        assert event.step == self.committed + 1
        self.committed = event.step
        del self.prepared[event.step]
        return [(server, event) for server in range(1, self.servers)]

    def _try(self, step: int) -> list[tuple[int, Any]]:
        if step in self.blobs and len(self.prepared[step]) == self.servers - 1:
            return [(0, ops.Commit(step, self.blobs.pop(step)))]
        return []

    def missing(self) -> str:
        """Who the oldest uncommitted step waits for."""
        step = self.committed + 1
        late = sorted(set(range(1, self.servers)) - self.prepared.get(step, set()))
        return f"step {step} waits for server(s) {late or [0]}" if step <= self.sealed else "nothing"

    def check(self) -> None:
        assert self.committed <= self.sealed
        assert set(self.prepared) == set(range(self.committed + 1, self.sealed + 1))
        assert set(self.blobs) <= set(self.prepared)
