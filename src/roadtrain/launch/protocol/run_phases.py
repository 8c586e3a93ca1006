"""The phases of a launched run, of a service, and of all workers together, with the allowed
transitions. Does no I/O. Does NOT decide when a transition happens (run_state.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # pauses before the first, second, ... restart


class ProcessPhase(Enum):
    """The phase of a service, or of all workers together."""

    WAITING = "waiting"  # will start when its time has come and all that it needs is running
    RUNNING = "running"
    STOPPING = "stopping"  # was asked to end
    ENDED = "ended"  # will not be restarted


class RunPhase(Enum):
    """The phase of a run."""

    GOING = "going"
    ENDING = "ending"  # first the workers end, then the services
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
    """The state of a service, or of all workers together. All times are monotonic times in
    seconds."""

    name: str
    phase: ProcessPhase = ProcessPhase.WAITING
    since: float = 0.0  # time at which the process entered the phase
    due: float = 0.0  # earliest time of the next start
    starts: int = 0  # number of starts
    ends: int = 0  # number of ends without a request since the last committed step
    stop_until: float | None = None  # while STOPPING, deadline for the engine to report the end

    def enter(self, phase: ProcessPhase, at: float) -> None:
        assert phase in NEXT_PROCESS_PHASES[self.phase], (
            f"{self.name}: no transition from {self.phase} to {phase}"
        )
        self.phase, self.since = phase, at
        self.stop_until = None
        if phase is ProcessPhase.RUNNING:
            self.starts += 1

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def ended_by_itself(self, at: float) -> str:
        """Count an unrequested end of the process and schedule the restart. Return a text that says
        when the restart is due."""
        delay = DELAYS_S[min(self.ends, len(DELAYS_S) - 1)]
        self.ends, self.due = self.ends + 1, at + delay
        return f"in {delay:g} s" if delay else "at once"
