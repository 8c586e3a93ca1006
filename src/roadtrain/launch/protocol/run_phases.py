"""The phases of a launched run, of its services, and of its workers together, with what each may
become. Pure. Does NOT decide when (run_state.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the first, second, ... start again


class ProcessPhase(Enum):
    """Of a service, or of all workers together."""

    WAITING = "waiting"  # to be started: it is not due yet, or something that it needs is not there
    RUNNING = "running"
    STOPPING = "stopping"  # it was asked to end
    ENDED = "ended"  # for good


class RunPhase(Enum):
    GOING = "going"
    ENDING = "ending"  # workers end, then services
    ENDED = "ended"


NEXT_PROCESS_PHASES: Mapping[ProcessPhase, frozenset[ProcessPhase]] = {
    ProcessPhase.WAITING: frozenset({ProcessPhase.RUNNING, ProcessPhase.ENDED}),
    ProcessPhase.RUNNING: frozenset(
        {ProcessPhase.WAITING, ProcessPhase.STOPPING, ProcessPhase.ENDED}
    ),
    ProcessPhase.STOPPING: frozenset({ProcessPhase.WAITING, ProcessPhase.ENDED}),
    ProcessPhase.ENDED: frozenset(),
}
NEXT_RUN_PHASES: Mapping[RunPhase, frozenset[RunPhase]] = {
    RunPhase.GOING: frozenset({RunPhase.ENDING}),
    RunPhase.ENDING: frozenset({RunPhase.ENDED}),
    RunPhase.ENDED: frozenset(),
}


@dataclass(slots=True)
class ProcessState:
    """Of a service, or of all workers together."""

    name: str
    phase: ProcessPhase = ProcessPhase.WAITING
    since: float = 0.0  # of the phase
    due: float = 0.0  # it starts no sooner
    starts: int = 0
    ends: int = 0  # by itself, since a step was committed
    stop_until: float | None = None  # when its end should have been told; only while STOPPING

    def enter(self, phase: ProcessPhase, at: float) -> None:
        assert phase in NEXT_PROCESS_PHASES[self.phase], (
            f"{self.name}: {self.phase} cannot become {phase}"
        )
        self.phase, self.since = phase, at
        self.stop_until = None
        if phase is ProcessPhase.RUNNING:
            self.starts += 1

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def ended_by_itself(self, at: float) -> str:
        """Count it; when it starts again, for people."""
        delay = DELAYS_S[min(self.ends, len(DELAYS_S) - 1)]
        self.ends, self.due = self.ends + 1, at + delay
        return f"in {delay:g} s" if delay else "at once"
