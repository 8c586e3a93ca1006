"""Events and actions of the state machine that keeps a launched run going (run_state.py). The state
machine reacts to faults as follows:

    a service (server, reducer, switch) ends   the service is restarted alone
    a worker fails                             all workers restart from the committed step
    a host is lost                             the ranks of the host move to a spare host, or the
                                               workers continue without the host or wait for the
                                               host

Each action is preceded by a `NotifyUser` that announces the action. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WORKERS = "workers"  # the name that stands for all workers
KILLED = -9  # exit code of a process that signal 9 killed
REFUSED, FAILED = 2, 1  # exit codes of a user's mistake and of other errors
INTERRUPTED = 130  # exit code of a process or a run that was asked to stop
STEP_GRACE_S = 120.0  # default time for workers to finish and commit a step


@dataclass(frozen=True)
class ProcessEnded:
    """A service has ended, by itself or on request. `code`: the exit code; -N means that signal N
    killed the process."""

    name: str
    code: int
    last_line: str = ""  # last line of the process on stderr


@dataclass(frozen=True)
class ProcessRestarted:
    """The engine has restarted a service by itself."""

    name: str


@dataclass(frozen=True)
class WorkersEnded:
    """All workers of an attempt have ended."""

    attempt: int
    code: int  # 0 if all workers succeeded, else the exit code of `first`
    first: str  # name of the first worker that failed, or of the last to end if none failed
    last_line: str = ""  # last line of `first` on stderr


@dataclass(frozen=True)
class WorkersPlaced:
    """Ray has placed worker 0, whose process starts next. Only the supervisor uses this event, to
    time the start."""


@dataclass(frozen=True)
class HostLost:
    """A host no longer answers. Its processes count as ended."""

    host: str
    why: str


@dataclass(frozen=True)
class HostJoined:
    """A host has come up: a lost host that is back, or a new host that is not in the plan."""

    host: str
    address: str
    workers: int  # number of workers that the host can run


@dataclass(frozen=True)
class HostLeaving:
    """A host will be lost within `within_s` seconds, for example because it is a spot machine."""

    host: str
    within_s: float


@dataclass(frozen=True)
class Committed:
    """A step was committed. This event resets all counts of failures to 0."""

    step: int


@dataclass(frozen=True)
class StopRequested:
    """The run must end, because the user has stopped it or its launcher has ended."""

    why: str


@dataclass(frozen=True)
class TimePassed:
    """A tick of the clock, at which the state machine checks deadlines."""


@dataclass(frozen=True)
class Output:
    """A line that a process has printed. The state machine ignores this event."""

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
    """Start a server, reducer or switch."""

    name: str


@dataclass(frozen=True)
class StartWorkers:
    """Start all workers. `hosts`: their hosts, in rank order; may lack hosts of the plan and
    include spare hosts."""

    attempt: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class StopProcess:
    """Stop a service, or all workers if the name is "workers". A process that has not ended after
    `grace_s` seconds is killed."""

    name: str
    grace_s: float


@dataclass(frozen=True)
class SetReducers:
    """Write reducers.txt on all hosts with workers, so that workers use the reducers on `hosts`."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class NotifyUser:
    """Log a line that announces the next actions to the user."""

    text: str


@dataclass(frozen=True)
class EndRun:
    """End the run: the last action of the state machine."""

    code: int  # 0 if the run is done, 130 if it was stopped on request, else it failed
    why: str  # the reason, one sentence


RunAction = StartService | StartWorkers | StopProcess | SetReducers | NotifyUser | EndRun


@dataclass(frozen=True)
class RunService:
    """A server, a reducer or a switch of the plan."""

    name: str  # the name of the service's process, unique in the run
    host: str
    # True for a reducer. While its host is lost, it is not in reducers.txt and workers run without.
    reducer: bool = False
    # True for a server whose chunks another server has too. Workers can run without one of these.
    replicated: bool = False


@dataclass(frozen=True)
class RunFacts:
    """The properties of a run that the state machine needs, which do not change during the run."""

    services: tuple[RunService, ...]  # in the order in which they start
    workers: Mapping[str, int]  # number of workers of each worker host, in the order of the ranks
    # Returns the reason why workers cannot run on these hosts, in one sentence, or "" if they can.
    # It is not called if the hosts are exactly those of the plan.
    can_run_on: Callable[[Sequence[str]], str]
    spares: Mapping[str, int] = field(default_factory=dict)  # workers that each spare host can run
    shrink: bool = True  # if True, workers continue without lost hosts, else they wait for them
    sums_at_reducers: bool = False  # if True, a host that joins becomes a reducer without a restart
    first_attempt: int = 0  # number of the first attempt of this start of the run
    committed: int = -1  # last step known to be committed by earlier starts, or -1
    step_grace_s: float = STEP_GRACE_S  # time for workers to finish and commit a step

    def workers_of(self, offered: int) -> int:
        """Return the number of workers to run on a joined host that can run `offered` workers: at
        most as many as the plan has on any host."""
        return min(offered, max(self.workers.values(), default=0))
