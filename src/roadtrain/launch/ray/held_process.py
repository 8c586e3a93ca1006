"""HeldProcess: one process of the run under an agent of its own (launch/agent.py), which a process
of Ray's holds: an actor or a worker of Ray Train. When the holder is killed, the agent's input
ends and it kills all that it started; a Ray process has threads, so it cannot tie a child to
itself.

One thread does all. Does NOT start a process again.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from roadtrain.errors import RoadtrainError
from roadtrain.launch.agent_link import AgentHost
from roadtrain.launch.agents import HostAgents
from roadtrain.launch.processes import Process
from roadtrain.launch.protocol.run_events import HostLost, Output, ProcessEnded

KILLED = -9
END_S = 30.0  # a process that is killed has ended within it
TURN_S = 0.1  # until an order is obeyed
ProcessEvent = Output | ProcessEnded


class HeldProcess:
    """`tell` gets, in order, its lines and its end, in a thread of its own; it must return soon.
    mark: of the run."""

    def __init__(self, process: Process, mark: str, tell: Callable[[ProcessEvent], None]) -> None:
        self.process = process
        self._mark = f"{mark}/{process.name}"
        self._tell = tell
        self._orders: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=process.name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, grace_s: float) -> None:
        """Interrupted, and killed `grace_s` later; 0: killed now."""
        self._orders.put(grace_s)

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """Whatever happens, its end is told: nobody else would."""
        name = self.process.name
        ended = ProcessEnded(name, KILLED, "its agent was lost")
        try:
            ended = self._held() or ended
        except (RoadtrainError, OSError) as error:
            ended = replace(ended, said=str(error))
        except Exception as error:  # a fault of ours
            ended = replace(ended, said=f"what holds {name} failed: {error!r}")
        self._tell(ended)

    def _held(self) -> ProcessEnded | None:
        hosts = [AgentHost(self.process.host, "")]
        with contextlib.closing(HostAgents(hosts, self._mark)) as agents:
            agents.start(self.process)
            while True:
                while not self._orders.empty():
                    agents.stop(self.process.name, self._orders.get())
                for event in agents.events(TURN_S):
                    match event:
                        case Output():
                            self._tell(event)
                        case ProcessEnded():
                            return event
                        case HostLost():
                            return None


def to_ray_log(event: ProcessEvent, host: str) -> None:
    """A line for Ray's own log of this process and its dashboard, with role and host."""
    said = event.line if isinstance(event, Output) else f"ended with code {event.code}"
    with contextlib.suppress(OSError, ValueError):  # a log that is full or closed ends nothing
        print(f"[{event.name} {host}] {said}", file=sys.stdout, flush=True)
