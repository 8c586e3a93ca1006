"""WorkerRun: records, for one attempt, which workers are still running and which worker failed
first. Does NOT end processes (agents.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from roadtrain.launch.protocol.run_events import KILLED, WorkersEnded

# Largest time between the first successful end of a worker and the last end. Must be longer than
# the evaluation after the last step.
ALL_END_S = 600.0


@dataclass
class WorkerRun:
    """The workers of one attempt."""

    attempt: int

    hosts: dict[str, str]
    """The host of each worker that has not ended, by the worker's name."""

    # True if the workers were asked to end. If True and a worker fails, the other workers are not
    # killed, so that they can finish their step.
    stopping: bool = False

    # Monotonic time at which all remaining workers are killed. None if no worker has ended
    # successfully yet.
    late_at: float | None = None

    _first: tuple[str, int, str] | None = None
    """Name, exit code and last line on stderr of the first worker that failed."""

    _ended: list[str] = field(default_factory=list)

    def end(self, name: str, code: int, last_line: str, at: float) -> bool:
        """Record the end of a worker. Return True if the remaining workers must be killed, because
        this worker is the first that has failed."""
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
        """Return the reason why the remaining workers must be killed, if they are late after the
        first worker ended successfully, else "". `at`: the monotonic time in seconds."""
        if self.late_at is None or at < self.late_at or not self.hosts:
            return ""
        self.late_at = None
        left = next(iter(self.hosts))
        why = f"{left} has not ended {ALL_END_S:.0f} s after {self._ended[0]} ended"
        self._first = self._first or (left, KILLED, why)
        return why

    def ended(self) -> WorkersEnded | None:
        """Return the result of the attempt, or None if workers are still running."""
        if self.hosts:
            return None
        name, code, last_line = self._first or (self._ended[-1], 0, "")
        return WorkersEnded(self.attempt, code, name, last_line)

    def check(self) -> None:
        assert not set(self.hosts) & set(self._ended)
        assert self._first is None or self._first[1] != 0
