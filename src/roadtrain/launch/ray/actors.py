"""The actors of a launched run. ServedProcess: a server, a reducer or a switch, on its node.
WorkerMailbox: between the supervisor and the workers of Ray Train, which have no name of their own.

    what they say    `news` waits for it: the supervisor may be away meanwhile, and another
                     one may ask for it; the last lines are kept
    Ray              starts a ServedProcess again that was killed, and with it its process
    the supervisor   starts a process again that ended (`begin`), as on every engine; while there
                     is none, the actor does so itself after ALONE_S

Arguments hold the run's token: Ray carries it as it carries all (docs/guides/launch.md).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import ray

from roadtrain.launch.processes import Process
from roadtrain.launch.ray.held_process import END_S, HeldProcess, Said, to_ray_log
from roadtrain.protocol.launch import ProcessEnded, ProcessRestarted

KEPT = 5000  # lines and ends that wait for the supervisor
BATCH = 1000  # of one answer
ALONE_S = 60.0  # longer than the supervisor waits before it starts a process again

Told = Said | ProcessRestarted


@dataclass(frozen=True)
class News:
    """What an actor has to say. life: another one for each start of the actor. then: where the
    next question goes on."""

    life: str
    then: int
    events: tuple[Told, ...]


class _Told:
    """What was told, for those that ask later. Thread-safe. Invariant: at most KEPT are kept."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._kept: deque[Told] = deque(maxlen=KEPT)
        self._count = 0  # ever
        self._changed = threading.Condition()

    def add(self, *events: Told) -> None:
        with self._changed:
            self._kept.extend(events)
            self._count += len(events)
            self._changed.notify_all()

    def news(self, life: str, after: int, patience_s: float) -> News:
        """after: -1: nothing of what was told before."""
        with self._changed:
            if after < 0:
                after = self._count
            elif life != self._life:
                after = 0
            if life == self._life:
                self._changed.wait_for(lambda: self._count > after, patience_s)
            first = self._count - len(self._kept)
            skipped = max(0, after - first)
            events = tuple(self._kept)[skipped : skipped + BATCH]
            return News(self._life, max(after, first) + len(events), events)


class ServedProcess:
    """One service. Its process begins with it."""

    def __init__(self, process: Process, mark: str) -> None:
        self._mark = mark
        self._told = _Told()
        self._lock = threading.Lock()
        self._stopped = False  # it was asked to end
        self._ended_at: float | None = None
        self._place = {"host": process.host}
        self._held = HeldProcess(process, mark, self._tell)
        threading.Thread(target=self._mind, name="alone", daemon=True).start()

    def begin(self, process: Process) -> None:
        """It runs from now on, if it did not: as it is here, so a changed one begins again."""
        with self._lock:
            self._stopped, self._ended_at = False, None
            if self._held.alive and self._held.process == process:
                return
            self._held.stop(0.0)
            self._held.wait(END_S)
            self._held = HeldProcess(process, self._mark, self._tell)

    def stop(self, grace_s: float) -> None:
        with self._lock:
            self._stopped = True
            self._held.stop(grace_s)

    def news(self, life: str, after: int, patience_s: float) -> News:
        return self._told.news(life, after, patience_s)

    def place(self) -> tuple[Process, str]:
        """What it runs, on which node."""
        return self._held.process, ray.get_runtime_context().get_node_id()

    def _tell(self, event: Said) -> None:
        to_ray_log(event, self._place)
        self._told.add(event)
        if isinstance(event, ProcessEnded):
            self._ended_at = time.monotonic()

    def _mind(self) -> None:
        """Starts it again while there is no supervisor that would."""
        while True:
            time.sleep(1.0)
            with self._lock:
                ended_at = self._ended_at
                if self._stopped or ended_at is None or self._held.alive:
                    continue
                if time.monotonic() - ended_at > ALONE_S:
                    process, self._ended_at = self._held.process, None
                    self._held = HeldProcess(process, self._mark, self._tell)
                    self._told.add(ProcessRestarted(process.name, time.monotonic()))


@dataclass
class _Attempt:
    """Of the workers."""

    number: int
    places: dict[str, list[Process]]  # node -> its workers that nobody runs yet
    grace_s: float | None = None  # they were asked to end
    running: set[str] = field(default_factory=set)


class WorkerMailbox:
    """Workers take what they run from here, say what it says, and hear when they are to end."""

    def __init__(self) -> None:
        self._told = _Told()
        self._lock = threading.Lock()
        self._attempt = _Attempt(-1, {})

    def offer(self, attempt: int, places: dict[str, list[Process]]) -> None:
        """The workers of an attempt, by node."""
        with self._lock:
            self._attempt = _Attempt(attempt, {node: list(of) for node, of in places.items()})

    def take(self, attempt: int, node: str) -> Process | None:
        """One of this node's workers; None: there is none for it."""
        with self._lock:
            left = self._attempt.places.get(node)
            if attempt != self._attempt.number or not left:
                return None
            process = left.pop(0)
            self._attempt.running.add(process.name)
            return process

    def post(self, attempt: int, events: Sequence[Said]) -> float | None:
        """Returns within how many seconds the worker is to end, where it is; 0.0: now."""
        with self._lock:
            if attempt != self._attempt.number:
                return 0.0  # of an attempt that is over
            self._told.add(*events)
            return self._attempt.grace_s

    def order(self, attempt: int, grace_s: float) -> None:
        with self._lock:
            if attempt == self._attempt.number:
                self._attempt.grace_s = grace_s

    def news(self, life: str, after: int, patience_s: float) -> News:
        return self._told.news(life, after, patience_s)
