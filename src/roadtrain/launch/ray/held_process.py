"""HeldProcess: a process of the run that ends when its holder, an actor, ends. Does NOT restart the
process.

The process has an agent of its own (launch/agent.py), which kills the process when the holder is
killed. The kernel cannot do this for a holder with several threads.
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
from roadtrain.launch.protocol.run_events import KILLED, HostLost, Output, ProcessEnded

TURN_S = 0.1  # longest delay of a stop request
ProcessEvent = Output | ProcessEnded


class HeldProcess:
    """A process and its agent. `emit`: function that gets an Output for each line of the process,
    and then a ProcessEnded. It is called in the thread of this object and must return quickly."""

    def __init__(self, process: Process, mark: str, emit: Callable[[ProcessEvent], None]) -> None:
        self.process = process
        self._mark = f"{mark}/{process.name}"
        self._emit = emit
        self._orders: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=process.name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, grace_s: float) -> None:
        """Interrupt the process, and kill it after `grace_s` seconds (0: at once)."""
        self._orders.put(grace_s)

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """Run the process to its end. Emit a ProcessEnded even after an error, because nothing else
        reports the end."""
        name = self.process.name
        ended = ProcessEnded(name, KILLED, f"the agent of {name} was lost")
        try:
            ended = self._held() or ended
        except (RoadtrainError, OSError) as error:
            ended = replace(ended, last_line=str(error))
        except Exception as error:  # a bug
            ended = replace(ended, last_line=f"the holder of {name} failed: {error!r}")
        self._emit(ended)

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
                            self._emit(event)
                        case ProcessEnded():
                            return event
                        case HostLost():
                            return None


def to_ray_log(event: ProcessEvent, host: str) -> None:
    """Print an event to stdout, which Ray writes to a log for its dashboard."""
    text = event.line if isinstance(event, Output) else f"ended with code {event.code}"
    with contextlib.suppress(OSError, ValueError):  # the log is full or closed
        print(f"[{event.name} {host}] {text}", file=sys.stdout, flush=True)
