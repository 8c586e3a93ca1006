"""PausedRun: stop a run to measure its links, and resume the run even if replanning fails. Does NOT
plan.

If the run ends with its launcher, the replan command becomes the launcher and waits for the run's
end. A run that has ended for another reason than replanning is not resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roadtrain.errors import LaunchError
from roadtrain.launch.engines import is_alive
from roadtrain.launch.home import PLANNED_ANEW, RunHome, StartPhase
from roadtrain.launch.supervisor_process import patient_client
from roadtrain.launch.waiting import wait_until

MEASURES_S = 900.0  # timeout for finishing a step, ending the services and measuring all links
STOPS_S = 30.0  # timeout for a supervisor to begin to stop its run
CHECKS_S = 600.0  # timeout for a resumed run to check its hosts
GoOn = Callable[[str, bool], int]  # (if_launcher_dies, detach) -> the command's exit code
Report = Callable[[str], None]


@dataclass(frozen=True)
class ReplanOptions:
    """The options that `roadtrain launch` accepts with --replan."""

    dry_run: bool = False
    write_plan: str = ""  # also write the plan to this file
    new_run: str = ""  # name of a new run to plan, or "" to replan the existing run
    placements: tuple[str, ...] = ()  # placements to try for a new run; if empty, try all
    detach: bool = False  # option of the resumed run
    if_launcher_dies: str = "keep"  # option of the resumed run


@dataclass(frozen=True)
class PausedRun:
    """A run to stop and resume. `start`: a function that restarts the run, with the arguments
    `if_launcher_dies` and `detach`. It returns when the run has ended, or at once if `detach` is
    True."""

    home: RunHome
    start: GoOn
    report: Report
    ends_with_launcher: bool

    def measure(self) -> bool:
        """Stop the run, and wait until its supervisor has measured the links, written measured.json
        and ended. Return False if the run ended for another reason. Raises LaunchError if the
        supervisor does not end in time or the state of the run cannot be read."""
        self.home.measured_path.unlink(missing_ok=True)
        with patient_client(self.home) as client:
            if client is not None:
                client.ask("measure")
        if not wait_until(lambda: not is_alive(self.home), MEASURES_S):
            raise LaunchError(
                f"the supervisor of run {self.home.name} has not stopped the run and measured its"
                f" links within {MEASURES_S:.0f} s",
                hint=f"roadtrain launch --logs {self.home.name} shows why",
            )
        return self._was_paused

    @property
    def _was_paused(self) -> bool:
        """True if the run ended because it was stopped for replanning."""
        state = self.home.state()
        return state.phase == "ended" and state.why == PLANNED_ANEW

    def report_end(self) -> int:
        """Report to the user why the run is not resumed. Return the exit code of the replan
        command."""
        state, name = self.home.state(), self.home.name
        ended = state.phase == "ended"
        why = state.why if ended else "its supervisor was killed"
        self.report(
            f"run {name} ended before it could be replanned, and is not resumed: {why} (`roadtrain"
            f" launch --resume {name}` resumes it)"
        )
        return state.code if ended and state.code in (0, 130) else 1

    def go_on(self, *, follows: bool) -> int:
        """Resume the run with the plan.toml in its home. Return the exit code of the replan
        command. `follows`: whether to wait until the run ends."""
        if self.ends_with_launcher and not follows:
            self.report(
                f"run {self.home.name} ends with its launcher: this command waits for the run's end"
            )
        follows = follows or self.ends_with_launcher
        code = self.start("stop" if self.ends_with_launcher else "keep", not follows)
        return code if follows or code else self._checked()

    def go_on_after(self, error: BaseException) -> None:
        """Handle an error of the replan command: resume a stopped run with its old plan, and report
        whether the run goes on."""
        name = self.home.name
        why = str(error).partition("\n")[0] or type(error).__name__
        try:
            ended = self._ends()
        except KeyboardInterrupt:
            self.report(
                f"run {name} may be stopped, and is not resumed: `roadtrain launch --resume {name}`"
                " resumes it"
            )
            return
        if not ended:
            self.report(f"run {name} is still running: `roadtrain status {name}`")
        elif not self._was_paused:
            self.report_end()
        elif self.ends_with_launcher and isinstance(error, KeyboardInterrupt):
            self.report(
                f"run {name} stays stopped, as it ends with its launcher: `roadtrain launch"
                f" --resume {name}` resumes it"
            )
        else:
            self.report(f"run {name} goes on with its old plan, replanning failed: {why}")
            self.go_on(follows=False)

    def _ends(self) -> bool:
        """Wait until the run begins to stop, and then until it has ended, with timeouts. Return
        True if it has."""

        def has_ended() -> bool:
            return not is_alive(self.home)

        def is_stopping() -> bool:
            return has_ended() or self.home.state().phase in ("ending", "ended")

        return wait_until(is_stopping, STOPS_S) and wait_until(has_ended, MEASURES_S)

    def _checked(self) -> int:
        """Wait until the resumed run has passed its checks or has ended. Return the command's exit
        code."""

        def is_decided() -> bool:
            return not is_alive(self.home) or StartPhase.CHECKED in self.home.state().stamps

        if not wait_until(is_decided, CHECKS_S):
            raise LaunchError(
                f"run {self.home.name} has not checked its hosts within {CHECKS_S:.0f} s",
                hint=f"roadtrain status {self.home.name} shows the state of the run",
            )
        alive = is_alive(self.home)  # must precede the read of the run's state
        state = self.home.state()
        if state.phase != "ended":
            if not alive:
                self.report(f"the supervisor of run {self.home.name} was killed")
            return int(not alive)
        if state.code:
            self.report(f"run {self.home.name} has ended: {state.why}")
        return state.code
