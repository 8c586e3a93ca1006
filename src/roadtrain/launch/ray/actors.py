"""The actors of a launched run. ServedProcess: a server, a reducer or a switch, on its node.
WorkerMailbox: between the supervisor and the workers of Ray Train, which have no name of their own.

    what they say    `news` waits for it: the supervisor may be away meanwhile, and another
                     one may ask for it; the last lines are kept, and how many are not is told
    Ray              starts a ServedProcess again that was killed, and with it its process
    the supervisor   makes another actor for a service whose process has ended
    a service        ends itself where there never will be a supervisor again: Ray does not start
                     that one's actor anew, as its node is gone for good

Arguments hold the run's token: Ray carries it as it carries all (docs/guides/launch.md).
"""

from __future__ import annotations

import heapq
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from roadtrain.launch.processes import Process
from roadtrain.launch.protocol.run_events import Output
from roadtrain.launch.ray.held_process import HeldProcess, ProcessEvent, to_ray_log

KEPT = 5000  # lines that wait for the supervisor, and as many ends
ORPHAN_S = 300.0  # a service ends when it was not asked for news for so long, and nobody will


@dataclass(frozen=True)
class WorkerBegun:
    """A train function has begun on its node, and the process of a worker does now."""

    name: str


ActorEvent = ProcessEvent | WorkerBegun


@dataclass(frozen=True)
class EventBatch:
    """What an actor has to say. life: another one for each start of the actor. then: where the
    next question goes on. left_out: lines before or among these that are not kept any more."""

    life: str
    then: int
    events: tuple[ActorEvent, ...]
    left_out: int = 0


class EventLog:
    """What was told, for those that ask later. Thread-safe. Lines never push out what is none.
    Invariant: at most KEPT of each are kept, with their numbers, which count all from 0 on."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._lines: deque[tuple[int, ActorEvent]] = deque(maxlen=KEPT)
        self._others: deque[tuple[int, ActorEvent]] = deque(maxlen=KEPT)
        self._count = 0  # ever
        self._changed = threading.Condition()

    def add(self, *events: ActorEvent) -> None:
        with self._changed:
            for event in events:
                kept = self._lines if isinstance(event, Output) else self._others
                kept.append((self._count, event))
                self._count += 1
            self._changed.notify_all()

    def news(self, life: str, after: int, patience_s: float) -> EventBatch:
        """after: -1: nothing of what was told before."""
        with self._changed:
            if after < 0:
                after = self._count
            elif life != self._life:
                after = 0
            if life == self._life:
                self._changed.wait_for(lambda: self._count > after, patience_s)
            kept = heapq.merge(self._others, self._lines)
            events = tuple(event for number, event in kept if number >= after)
            return EventBatch(self._life, self._count, events, self._count - after - len(events))


class ServedProcess:
    """One service. Its process begins with it, and ends with it."""

    def __init__(self, process: Process, mark: str) -> None:
        self._process, self._mark = process, mark
        self._log = EventLog()
        self._asked_at = time.monotonic()  # for news
        self._held = HeldProcess(process, mark, self._tell)
        threading.Thread(target=self._mind, name="orphan", daemon=True).start()

    def stop(self, grace_s: float) -> None:
        self._held.stop(grace_s)

    def news(self, life: str, after: int, patience_s: float) -> EventBatch:
        self._asked_at = time.monotonic()
        return self._log.news(life, after, patience_s)

    def place(self) -> tuple[Process, str, bool]:
        """What it runs, on which node, and whether that has not ended."""
        return self._process, ray.get_runtime_context().get_node_id(), self._held.alive

    def _tell(self, event: ProcessEvent) -> None:
        to_ray_log(event, self._process.host)
        self._log.add(event)

    def _mind(self) -> None:
        while True:
            time.sleep(1.0)
            self.look_after(time.monotonic())

    def look_after(self, now: float) -> None:
        """Ends it where there never will be a supervisor that asks for it."""
        if now - self._asked_at > ORPHAN_S:
            self._asked_at = now  # and not at each look
            if not is_there(self._mark):
                kill_named(service_actor(self._mark, self._process.name))


@dataclass
class _Attempt:
    """Of the workers."""

    number: int
    places: dict[str, list[Process]]  # node -> its workers that nobody runs yet
    grace_s: float | None = None  # they were asked to end


class WorkerMailbox:
    """Workers take what they run from here, say what it says, and hear when they are to end."""

    def __init__(self) -> None:
        self._log = EventLog()
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
            self._log.add(WorkerBegun(process.name))
            return process

    def post(self, attempt: int, events: Sequence[ProcessEvent]) -> float | None:
        """Returns within how many seconds the worker is to end, where it is; 0.0: now."""
        with self._lock:
            if attempt != self._attempt.number:
                return 0.0  # of an attempt that is over
            self._log.add(*events)
            return self._attempt.grace_s

    def order(self, attempt: int, grace_s: float) -> None:
        with self._lock:
            if attempt == self._attempt.number:
                self._attempt.grace_s = grace_s

    def news(self, life: str, after: int, patience_s: float) -> EventBatch:
        return self._log.news(life, after, patience_s)


def actor_name(run: str) -> str:
    """The name of the actor of a run's supervisor; those of its services begin with it."""
    return f"roadtrain:{run}"


def service_actor(run: str, process: str) -> str:
    """The name of a service's actor. run: that of the run's supervisor."""
    return f"{run}:{process}"


def service_actors(run: str) -> list[str]:
    """The names of those of a run that are there."""
    return [one for one in ray.util.list_named_actors() if one.startswith(service_actor(run, ""))]


def is_there(actor: str) -> bool:
    """Whether an actor of this name runs or is started again, or nobody can tell."""
    try:
        ray.get_actor(actor)
    except ValueError:
        return False
    except (RayError, ConnectionError, RuntimeError):
        pass
    return True


def kill_named(actor: str) -> None:
    with suppress(ValueError):  # it has ended
        ray.kill(ray.get_actor(actor), no_restart=True)


def end_actors(run: str) -> None:
    """Those of a run's services, and their processes with them."""
    with suppress(RayError):
        for service in service_actors(run):
            with suppress(RayError):
                kill_named(service)
