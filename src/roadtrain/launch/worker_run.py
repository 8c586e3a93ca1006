"""WorkerRun: the workers of one attempt while they run: which are still there, which failed first.
Does NOT end anything (agents.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from roadtrain.launch.protocol.run_events import WorkersEnded

ALL_END_S = 600.0  # workers that end well end within it of each other: each evaluates by itself


@dataclass
class WorkerRun:
    attempt: int

    hosts: dict[str, str]
    """Worker -> host, of those that have not ended."""

    stopping: bool = False
    """They were stopping to end: the others finish their step though one has ended."""

    late_at: float | None = None
    """When those that are left are killed, where one has ended well."""

    _first: tuple[str, int, str] | None = None
    """The first that failed: name, code, last words."""

    _ended: list[str] = field(default_factory=list)

    def end(self, name: str, code: int, said: str, at: float) -> bool:
        """A worker has ended. Returns whether the others are to be killed now."""
        self.hosts.pop(name)
        self._ended.append(name)
        if code == 0:
            self.late_at = self.late_at or at + ALL_END_S
            return False
        failed = self._first is None
        if failed:
            self._first = (name, code, said)
        return failed and not self.stopping

    def end_late(self, at: float) -> str:
        """A sentence where those that are left are to be killed now: they have not ended, though
        another has."""
        if self.late_at is None or at < self.late_at or not self.hosts:
            return ""
        self.late_at = None
        left = next(iter(self.hosts))
        why = f"{left} has not ended {ALL_END_S:.0f} s after {self._ended[0]} had"
        self._first = self._first or (left, -9, why)
        return why

    def ended(self) -> WorkersEnded | None:
        """Where all have ended."""
        if self.hosts:
            return None
        name, code, said = self._first or (self._ended[-1], 0, "")
        return WorkersEnded(self.attempt, code, name, said)

    def check(self) -> None:
        assert not set(self.hosts) & set(self._ended)
        assert self._first is None or self._first[1] != 0
