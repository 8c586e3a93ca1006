"""Follow a launched run: print its output, the time until its first step, and how it ended."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, closing, suppress

from roadtrain.errors import LaunchError
from roadtrain.launch.control_socket import ControlClient
from roadtrain.launch.engines import is_alive
from roadtrain.launch.home import LaunchRecord, RunHome, RunState, StartPhase
from roadtrain.launch.logs import LogTail
from roadtrain.launch.protocol.run_events import INTERRUPTED, REFUSED
from roadtrain.launch.supervisor_process import ask_to_stop
from roadtrain.launch.waiting import POLL_S

# The cause to which the time of a phase of a start is attributed. Phases that are not listed are
# attributed to "ours", roadtrain itself.
PHASE_OWNERS = {
    StartPhase.READY: "engine",
    StartPhase.PLACED: "engine",
    StartPhase.IMPORTED: "Python and imports",
}


def follow(home: RunHome, record: LaunchRecord, offset: int = 0, *, detach: bool = False) -> int:
    """Print the run's log from byte `offset` until the run has ended, and return the run's exit
    code. If `detach` is True, only print how to look at the run, and return 0 at once."""
    if detach:
        print(f"run {home.name} is starting: roadtrain status {home.name}")
        return 0
    stops = record.if_launcher_dies == "stop"
    with ExitStack() as stack:
        try:
            greeting = stack.enter_context(closing(LauncherHello(home))) if stops else None
            show_until_end(home, offset, greeting)
        except KeyboardInterrupt:
            if not stops:
                print(
                    f"\nrun {home.name} goes on: `roadtrain launch --stop {home.name}` ends it,"
                    f" `--logs {home.name}` shows its output"
                )
                return INTERRUPTED
            print(f"\nrun {home.name} stops after this step")
            offset = log_size(home)
            ask_to_stop(home)
            show_until_end(home, offset)
    return report_end(home, record)


class LauncherHello:
    """The connection of a launcher to the run's supervisor, which stops the run when this
    connection ends."""

    def __init__(self, home: RunHome) -> None:
        self._home = home
        self._client: ControlClient | None = None

    def say(self) -> None:
        """Send hello to the run's supervisor, if there is one and the connection is not open
        yet."""
        if self._client is not None and not self._client.closed:
            return
        self.close()
        with suppress(LaunchError):
            self._client = ControlClient(self._home)
            self._client.ask("hello")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None


def show_until_end(home: RunHome, offset: int, greeting: LauncherHello | None = None) -> None:
    tail, first_shown = LogTail(home, offset), False
    while True:
        if greeting is not None:
            greeting.say()
        alive = is_alive(home)  # must precede `tail.lines`, so that no last line is missed
        for line in tail.lines():
            print(line)
        if not first_shown and (text := first_step(home.state(), home.record().engine)):
            first_shown = True
            print(text)
        if not alive:
            return
        time.sleep(POLL_S)


def log_size(home: RunHome) -> int:
    return home.all_log.stat().st_size if home.all_log.exists() else 0


def report_end(home: RunHome, record: LaunchRecord) -> int:
    """Print how the run has ended, and return its exit code."""
    if home.record().launched != record.launched:  # restarted in another terminal
        print(f"run {home.name} was restarted: see `roadtrain launch --logs {home.name}`")
        return INTERRUPTED
    state = home.state()
    if state.phase != "ended":
        raise LaunchError(
            f"the supervisor of run {home.name} was killed, which ended all processes of the run",
            hint=f"roadtrain launch --resume {home.name} resumes the run at the committed step",
        )
    if state.code == REFUSED:
        raise LaunchError(state.why)
    end = {0: "is done", INTERRUPTED: "is stopped"}.get(state.code, "failed")
    print(f"run {home.name} {end}: {state.why}")
    return state.code if state.code in (0, INTERRUPTED) else 1


def first_step(state: RunState, engine: str) -> str:
    """Return a text with the time from the launch to the first step, and what took this time, or ""
    before the first step."""
    stamps = state.stamps
    if not {StartPhase.LAUNCHED, StartPhase.STEPPED} <= stamps.keys():
        return ""
    spent = dict.fromkeys(("engine", "Python and imports", "ours"), 0.0)
    for before, after in itertools.pairwise(phase for phase in StartPhase if phase in stamps):
        spent[PHASE_OWNERS.get(after, "ours")] += max(0.0, stamps[after] - stamps[before])
    names = {"engine": "Ray" if engine == "ray" else f"engine `{engine}`"}
    sums = ", ".join(f"{names.get(name, name)} {took_s:.1f} s" for name, took_s in spent.items())
    whole_s = stamps[StartPhase.STEPPED] - stamps[StartPhase.LAUNCHED]
    return f"first step {whole_s:.1f} s after launch: {sums}"
