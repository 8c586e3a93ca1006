"""WorkerRun: the workers of a running attempt: those still running, and the first that failed. Does
NOT end processes (agents.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from roadtrain.launch.protocol.run_events import WorkersEnded

ALL_END_S = 600.0  # time between the first successful end and the last; covers their evaluations


@dataclass
class WorkerRun:
    attempt: int

    hosts: dict[str, str]
    """Worker -> host, of the workers that have not ended."""

    stopping: bool = False
    """They were asked to end. A failure then does not kill the others: they finish their step."""

    late_at: float | None = None
    """Monotonic time at which the rest is killed, once a worker has ended successfully."""

    _first: tuple[str, int, str] | None = None
    """The first that failed: name, code, last line on stderr."""

    _ended: list[str] = field(default_factory=list)

    def end(self, name: str, code: int, last_line: str, at: float) -> bool:
        """Record the end of a worker. Return True if the others must be killed now."""
        self.hosts.pop(name)
        self._ended.append(name)
        if code == 0:
            self.late_at = self.late_at or at + ALL_END_S
            return False
        failed = self._first is None
        if failed:
            self._first = (name, code, last_line)
        return failed and not self.stopping

    def end_late(self, at: float) -> str:
        """Return the reason if the remaining workers must be killed now because they are too late,
        else ""."""
        if self.late_at is None or at < self.late_at or not self.hosts:
            return ""
        self.late_at = None
        left = next(iter(self.hosts))
        why = f"{left} has not ended {ALL_END_S:.0f} s after {self._ended[0]} ended"
        self._first = self._first or (left, -9, why)
        return why

    def ended(self) -> WorkersEnded | None:
        """Return the result of the attempt; None while workers are running."""
        if self.hosts:
            return None
        name, code, last_line = self._first or (self._ended[-1], 0, "")
        return WorkersEnded(self.attempt, code, name, last_line)

    def check(self) -> None:
        assert not set(self.hosts) & set(self._ended)
        assert self._first is None or self._first[1] != 0
