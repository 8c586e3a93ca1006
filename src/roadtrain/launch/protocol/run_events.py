"""What keeps a launched run running: events of its processes and hosts in, actions out. Pure.

The state machine itself is in run_state.py.

    services (servers, reducers, switches)   each by itself: ended -> started again
    workers                                  all together: one ended -> all are started again, at
                                             the committed step
    hosts                                    lost -> its workers' ranks go to a spare host, or the
                                             others go on without them, or all wait for it
Whatever is done is said first (`NotifyUser`). Does NOT know words, files, engines or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

STEP_GRACE_S = 120.0  # in which workers finish a step and commit it, where no more is known


@dataclass(frozen=True)
class ProcessEnded:
    """A service ended by itself, or as it was asked to. code: as its parent sees it; negative: the
    signal that killed it."""

    name: str
    code: int
    said: str = ""  # its last line on standard error


@dataclass(frozen=True)
class ProcessRestarted:
    """The engine has started a service again by itself."""

    name: str


@dataclass(frozen=True)
class WorkersEnded:
    """All workers of an attempt have ended. code: 0 where all did; else that of the first that
    failed, whose name is `first`."""

    attempt: int
    code: int
    first: str
    said: str = ""


@dataclass(frozen=True)
class WorkersPlaced:
    """An engine that has to look for places has found that of worker 0, whose process begins. For
    people: the state machine does not look at it."""


@dataclass(frozen=True)
class HostLost:
    """A host answers no more, with all that ran there."""

    host: str
    why: str


@dataclass(frozen=True)
class HostJoined:
    """A host is there: again, or one that the plan does not have."""

    host: str
    address: str
    workers: int  # as many as it can run


@dataclass(frozen=True)
class HostLeaving:
    """A host will be gone soon: a spot machine, or one that is drained."""

    host: str
    within_s: float


@dataclass(frozen=True)
class Committed:
    """A step is committed. Faults are counted between such."""

    step: int


@dataclass(frozen=True)
class StopRequested:
    """The user, or a launcher that is gone and was to take the run with it."""

    why: str


@dataclass(frozen=True)
class TimePassed:
    """Time has passed."""


@dataclass(frozen=True)
class Output:
    """A line of a process; the state machine does not look at it."""

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
    """hosts: with workers, in the order of ranks: the plan's, spare ones in the places of lost
    ones, or fewer."""

    attempt: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class StopProcess:
    """name: a service's, or "workers". grace_s: time to end by itself."""

    name: str
    grace_s: float


@dataclass(frozen=True)
class SetReducers:
    """Which hosts' reducers workers use from now on (the file of spare hosts that they read)."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class NotifyUser:
    """For people, before what it says happens."""

    text: str


@dataclass(frozen=True)
class EndRun:
    """The run is over. code: 0 done, 130 stopped as asked, else it failed; why: one sentence."""

    code: int
    why: str


RunAction = StartService | StartWorkers | StopProcess | SetReducers | NotifyUser | EndRun


@dataclass(frozen=True)
class RunService:
    """A server, a reducer or a switch of the plan."""

    name: str  # unique in the run, as of its process
    host: str
    # Workers go on without it: it is left out of the file of reducers while its host is gone.
    reducer: bool = False
    # A server whose chunks another one has too: workers go on without one such.
    replicated: bool = False


@dataclass(frozen=True)
class RunFacts:
    """What the state machine knows of a run."""

    services: tuple[RunService, ...]  # in the order in which they start
    workers: Mapping[str, int]  # host -> its workers, in the order of ranks
    # Why workers cannot run on these hosts, in one sentence; "" where they can. It is asked only of
    # others than the plan's.
    can_run_on: Callable[[Sequence[str]], str]
    spares: Mapping[str, int] = field(default_factory=dict)  # host -> workers it can run
    shrink: bool = True  # whether workers go on without the lost hosts; else they wait
    sums_at_reducers: bool = False  # a host that comes can sum, without a restart of workers
    first_attempt: int = 0  # of the workers; others were in starts of this run before
    committed: int = -1  # the last step that is known to be committed by starts before
    step_grace_s: float = STEP_GRACE_S  # for workers to finish a step and commit it

    def workers_of(self, offered: int) -> int:
        """How many workers a host runs that the plan does not have and that can run `offered`."""
        return min(offered, max(self.workers.values(), default=0))
