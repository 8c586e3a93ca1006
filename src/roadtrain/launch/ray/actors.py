"""The actors of a launched run. ServedProcess: a server, a reducer or a switch, on its node.
WorkerMailbox: passes messages between the supervisor and the workers, as actors of Ray Train cannot
be called by name.

    events           are buffered by the actor and fetched by long polls (`news`), so that a new
                     supervisor can continue; if lines had to be dropped, their number is reported
    Ray              restarts a ServedProcess that was killed, and with it its process
    the supervisor   creates a new actor for a service whose process has ended
    a service        ends itself if there will never be a supervisor again, because Ray cannot
                     restart the supervisor's actor: its node is gone for good

Arguments contain the run's token: Ray transfers it like all its data (docs/guides/launch.md).
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

KEPT = 5000  # capacity of the log for lines, and the same for other events
ORPHAN_S = 300.0  # after this time without a poll, a service checks if it is orphaned


@dataclass(frozen=True)
class WorkerBegun:
    """A train function of Ray Train runs on its node and now starts a worker's process."""

    name: str


ActorEvent = ProcessEvent | WorkerBegun


@dataclass(frozen=True)
class EventBatch:
    """The reply to a poll for events."""

    life: str  # unique id of this start of the actor
    then: int  # sequence number from which to continue
    events: tuple[ActorEvent, ...]
    left_out: int = 0  # number of lines in the polled range that were dropped


class EventLog:
    """A bounded log of events for polling. Thread-safe. Lines and other events are bounded
    separately, so lines never displace other events. Invariant: at most KEPT of each are kept, with
    their sequence numbers."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._lines: deque[tuple[int, ActorEvent]] = deque(maxlen=KEPT)
        self._others: deque[tuple[int, ActorEvent]] = deque(maxlen=KEPT)
        self._count = 0  # the next sequence number
        self._changed = threading.Condition()

    def add(self, *events: ActorEvent) -> None:
        with self._changed:
            for event in events:
                kept = self._lines if isinstance(event, Output) else self._others
                kept.append((self._count, event))
                self._count += 1
            self._changed.notify_all()

    def news(self, life: str, after: int, patience_s: float) -> EventBatch:
        """Return the events from sequence number `after` on, waiting up to `patience_s` for one.

        Args:
            life: The actor's id in the last reply. Another id means that the actor was restarted;
                then all events are returned.
            after: `then` of the last reply. -1: skip all events so far.
        """
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
    """The actor of a service. Its process starts and ends with it."""

    def __init__(self, process: Process, mark: str) -> None:
        self._process, self._mark = process, mark
        self._log = EventLog()
        self._polled_at = time.monotonic()
        self._held = HeldProcess(process, mark, self._record)
        threading.Thread(target=self._watch, name="orphan", daemon=True).start()

    def stop(self, grace_s: float) -> None:
        self._held.stop(grace_s)

    def news(self, life: str, after: int, patience_s: float) -> EventBatch:
        self._polled_at = time.monotonic()
        return self._log.news(life, after, patience_s)

    def place(self) -> tuple[Process, str, bool]:
        """Return its process, the id of its node, and whether the process is alive."""
        return self._process, ray.get_runtime_context().get_node_id(), self._held.alive

    def _record(self, event: ProcessEvent) -> None:
        to_ray_log(event, self._process.host)
        self._log.add(event)

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            self.end_if_orphaned(time.monotonic())

    def end_if_orphaned(self, now: float) -> None:
        """End this actor if it is no longer polled and the supervisor is gone for good."""
        if now - self._polled_at > ORPHAN_S:
            self._polled_at = now  # check again only after another ORPHAN_S
            if not is_there(self._mark):
                kill_named(service_actor(self._mark, self._process.name))


@dataclass
class _Attempt:
    """An attempt of the workers."""

    number: int
    places: dict[str, list[Process]]  # node id -> workers not yet taken by a train function
    grace_s: float | None = None  # the grace period of a stop request; None: no request


class WorkerMailbox:
    """Hands out worker processes to train functions, buffers their events for the supervisor, and
    passes on its stop requests."""

    def __init__(self) -> None:
        self._log = EventLog()
        self._lock = threading.Lock()
        self._attempt = _Attempt(-1, {})

    def offer(self, attempt: int, places: dict[str, list[Process]]) -> None:
        """Set the workers of an attempt, by node id."""
        with self._lock:
            self._attempt = _Attempt(attempt, {node: list(of) for node, of in places.items()})

    def take(self, attempt: int, node: str) -> Process | None:
        """Take a worker of this node; None if none is left."""
        with self._lock:
            left = self._attempt.places.get(node)
            if attempt != self._attempt.number or not left:
                return None
            process = left.pop(0)
            self._log.add(WorkerBegun(process.name))
            return process

    def post(self, attempt: int, events: Sequence[ProcessEvent]) -> float | None:
        """Add events of a worker. Return the grace period if the worker must end, else None."""
        with self._lock:
            if attempt != self._attempt.number:
                return 0.0  # the attempt is over: end now
            self._log.add(*events)
            return self._attempt.grace_s

    def order(self, attempt: int, grace_s: float) -> None:
        """Request that the workers of an attempt end within `grace_s` seconds."""
        with self._lock:
            if attempt == self._attempt.number:
                self._attempt.grace_s = grace_s

    def news(self, life: str, after: int, patience_s: float) -> EventBatch:
        return self._log.news(life, after, patience_s)


def actor_name(run: str) -> str:
    """Return the name of the supervisor's actor, which is the prefix of its services' actors."""
    return f"roadtrain:{run}"


def service_actor(run: str, process: str) -> str:
    """Return the name of a service's actor. run: the name of the supervisor's actor."""
    return f"{run}:{process}"


def service_actors(run: str) -> list[str]:
    """Return the names of a run's service actors that exist."""
    return [name for name in ray.util.list_named_actors() if name.startswith(f"{run}:")]


def is_there(actor: str) -> bool:
    """Return True if an actor of this name is running or restarting, or if that is unknown."""
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
    """Kill the actors of a run's services, and with them their processes."""
    with suppress(RayError):
        for service in service_actors(run):
            with suppress(RayError):
                kill_named(service)
