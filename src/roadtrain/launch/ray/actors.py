"""The actors of a launched run. Each runs a server, a reducer, a switch, or the workers of a host.

An actor buffers events, so that a new supervisor can fetch what the old supervisor has not fetched.
If the actor of a service is killed, Ray restarts it. If only its process has ended, the supervisor
creates a new actor. Services end themselves if the supervisor's own actor is lost with its node.

The arguments of an actor contain the run's token. Ray sends arguments unencrypted, unless TLS is on
in Ray. So Ray's ports must be inside a trusted network (docs/guides/launch.md).
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

KEPT = 5000  # largest number of lines, and of other events, that an EventLog keeps
ORPHAN_S = 300.0  # time without a poll after which a service checks whether it is orphaned


@dataclass(frozen=True)
class EventBatch:
    """The reply to a poll for events."""

    life: str  # unique id of this start of the actor
    then: int  # sequence number from which the next poll continues
    events: tuple[ProcessEvent, ...]
    left_out: int = 0  # number of lines that were dropped before they were polled


class EventLog:
    """A bounded log of events that the supervisor polls. Thread-safe. Many lines of output never
    push out other events. Invariant: at most the last 5000 lines, and the last 5000 other events,
    are kept."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._lines: deque[tuple[int, ProcessEvent]] = deque(maxlen=KEPT)
        self._others: deque[tuple[int, ProcessEvent]] = deque(maxlen=KEPT)
        self._count = 0  # sequence number of the next event
        self._changed = threading.Condition()

    def add(self, *events: ProcessEvent) -> None:
        with self._changed:
            for event in events:
                kept = self._lines if isinstance(event, Output) else self._others
                kept.append((self._count, event))
                self._count += 1
            self._changed.notify_all()

    def news(self, life: str, after: int, patience_s: float) -> EventBatch:
        """Return the events from the sequence number `after` on, or wait for an event.

        Args:
            life: `EventBatch.life` of the last reply, the id of the actor's start. If the actor was
                restarted since, all events are returned.
            after: `EventBatch.then` of the last reply, a sequence number; -1 skips all events
                before this call.
            patience_s: The longest wait in seconds.
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


class ServedProcesses:
    """The actor of a service, or of the workers of a host. The processes start and end with it."""

    def __init__(self, processes: Sequence[Process], mark: str) -> None:
        self._first, self._mark = processes[0], mark
        self._log = EventLog()
        self._polled_at = time.monotonic()
        self._held = [HeldProcess(process, mark, self._record) for process in processes]
        threading.Thread(target=self._watch, name="orphan", daemon=True).start()

    def stop(self, grace_s: float) -> None:
        for held in self._held:
            held.stop(grace_s)

    def news(self, life: str, after: int, patience_s: float) -> EventBatch:
        self._polled_at = time.monotonic()
        return self._log.news(life, after, patience_s)

    def place(self) -> tuple[Process, str, bool]:
        """Return the process of the service, the id of the actor's node, and whether the process is
        alive."""
        return self._first, ray.get_runtime_context().get_node_id(), self._held[0].alive

    def _record(self, event: ProcessEvent) -> None:
        to_ray_log(event, self._first.host)
        self._log.add(event)

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            self.end_if_orphaned(time.monotonic())

    def end_if_orphaned(self, now: float) -> None:
        """End the actor of a service if the supervisor has not polled it for a fixed time and the
        supervisor's own actor is gone. (Ray ends the actors of workers with the supervisor.) `now`:
        the monotonic time in seconds."""
        if now - self._polled_at > ORPHAN_S:
            self._polled_at = now  # check again only after another ORPHAN_S
            if not is_there(self._mark):
                kill_named(service_actor(self._mark, self._first.name))


def actor_name(run: str) -> str:
    """Return the name of the supervisor's actor of the run called `run`."""
    return f"roadtrain:{run}"


def service_actor(run: str, process: str) -> str:
    """Return the name of a service's actor. `run`: the name of the supervisor's actor. `process`:
    the name of the service's process."""
    return f"{run}:{process}"


def service_actors(run: str) -> list[str]:
    """Return the names of the existing service actors of a run. `run`: the name of the supervisor's
    actor."""
    return [name for name in ray.util.list_named_actors() if name.startswith(f"{run}:")]


def is_there(actor: str) -> bool:
    """Return False if there is no actor of this name; True also if Ray does not answer."""
    try:
        ray.get_actor(actor)
    except ValueError:
        return False
    except (RayError, ConnectionError, RuntimeError):
        pass
    return True


def kill_named(actor: str) -> None:
    with suppress(ValueError):  # the actor has ended
        ray.kill(ray.get_actor(actor), no_restart=True)


def end_actors(run: str) -> None:
    """Kill the actors of a run's services, with their processes. `run`: the name of the
    supervisor's actor."""
    with suppress(RayError):
        for service in service_actors(run):
            with suppress(RayError):
                kill_named(service)
