"""Events and actions of the state machine that keeps a launched run going (run_state.py). Pure.

    services (servers, reducers, switches)   restarted one by one when they end
    workers                                  when one fails, all restart from the committed step
    hosts                                    when one is lost, its ranks move to a spare host, or
                                             the others continue without it, or all wait for it

Each action is preceded by a `NotifyUser` that announces it. Does NOT know command lines, files,
engines or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

STEP_GRACE_S = 120.0  # default time for workers to finish a step and commit it


@dataclass(frozen=True)
class ProcessEnded:
    """A service has ended, by itself or on request. code: its exit code; negative: the signal that
    killed it."""

    name: str
    code: int
    last_line: str = ""  # on stderr


@dataclass(frozen=True)
class ProcessRestarted:
    """The engine has restarted a service by itself."""

    name: str


@dataclass(frozen=True)
class WorkersEnded:
    """The workers of an attempt have all ended. code: 0 if all succeeded, else the code of `first`,
    the first worker that failed."""

    attempt: int
    code: int
    first: str
    last_line: str = ""  # of `first`, on stderr


@dataclass(frozen=True)
class WorkersPlaced:
    """An engine that schedules workers (Ray) has placed worker 0, whose process now starts. Only
    for start-up statistics: the state machine ignores it."""


@dataclass(frozen=True)
class HostLost:
    """A host no longer answers; its processes count as ended."""

    host: str
    why: str


@dataclass(frozen=True)
class HostJoined:
    """A host is up: a lost one is back, or it is one that the plan does not have."""

    host: str
    address: str
    workers: int  # number of workers that it can run


@dataclass(frozen=True)
class HostLeaving:
    """A host will be lost soon: a spot machine, or one that is drained."""

    host: str
    within_s: float


@dataclass(frozen=True)
class Committed:
    """A step was committed, which resets the failure counts."""

    step: int


@dataclass(frozen=True)
class StopRequested:
    """The run must end: at the user's request, or because its launcher has ended."""

    why: str


@dataclass(frozen=True)
class TimePassed:
    """A tick of the clock, on which deadlines are checked."""


@dataclass(frozen=True)
class Output:
    """A line of output of a process. The state machine ignores it."""

    name: str
    host: str
    line: str


RunEvent = (
    ProcessEnded
    | ProcessRestarted
    | WorkersEnded
    | WorkersPlaced
    | HostLost
    | HostJoined
    | HostLeaving
    | Committed
    | StopRequested
    | TimePassed
    | Output
)


@dataclass(frozen=True)
class StartService:
    name: str


@dataclass(frozen=True)
class StartWorkers:
    """Start all workers. hosts: in rank order: the plan's, with spare hosts in place of lost ones,
    or without the lost ones."""

    attempt: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class StopProcess:
    """Stop a service or all workers (name "workers"). They are killed after `grace_s` seconds."""

    name: str
    grace_s: float


@dataclass(frozen=True)
class SetReducers:
    """Change the hosts whose reducers the workers use, by rewriting reducers.txt."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class NotifyUser:
    """Log a line for the user. Precedes the action that it announces."""

    text: str


@dataclass(frozen=True)
class EndRun:
    """The run is over. code: 0 done, 130 stopped on request, else failed; why: one sentence."""

    code: int
    why: str


RunAction = StartService | StartWorkers | StopProcess | SetReducers | NotifyUser | EndRun


@dataclass(frozen=True)
class RunService:
    """A server, a reducer or a switch of the plan."""

    name: str  # the name of its process, unique in the run
    host: str
    # Workers run without it: it is omitted from reducers.txt while its host is lost.
    reducer: bool = False
    # A server whose chunks another server also has: workers can run without one such server.
    replicated: bool = False


@dataclass(frozen=True)
class RunFacts:
    """The static facts on a run that the state machine needs."""

    services: tuple[RunService, ...]  # in the order in which they start
    workers: Mapping[str, int]  # host -> number of workers, in rank order
    # Returns why workers cannot run on these hosts, in one sentence, or "". Only called for hosts
    # other than the plan's.
    can_run_on: Callable[[Sequence[str]], str]
    spares: Mapping[str, int] = field(default_factory=dict)  # host -> workers that it can run
    shrink: bool = True  # True: workers continue without lost hosts; False: they wait for them
    sums_at_reducers: bool = False  # a joining host can become a reducer without a restart
    first_attempt: int = 0  # number of the first attempt of this start of the run
    committed: int = -1  # the last step known to be committed by earlier starts; -1: none
    step_grace_s: float = STEP_GRACE_S  # time for workers to finish a step and commit it

    def workers_of(self, offered: int) -> int:
        """Return the number of workers to run on a host that can run `offered`."""
        return min(offered, max(self.workers.values(), default=0))
