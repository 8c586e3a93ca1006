"""PausedRun: a run that is stopped so that its links are measured, and goes on whatever happens.

It goes on as it was launched: a run that ends with its launcher gets the command as its new one,
which then stays to the run's end. It does not go on where it ended for another reason than to be
planned anew: the user stopped it, it was done, it failed. Does NOT plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roadtrain.errors import LaunchError
from roadtrain.launch.engines import is_alive
from roadtrain.launch.home import PLANNED_ANEW, RunHome, StartPhase
from roadtrain.launch.supervisor_process import patient_client
from roadtrain.launch.waiting import wait_until

MEASURES_S = 900.0  # a step, the end of services, links of all hosts
HEARD_S = 30.0  # a supervisor that was asked to stop says within it that it does
CHECKS_S = 600.0  # a run that goes on has checked its hosts within it
GoOn = Callable[[str, bool], int]  # if_launcher_dies, detach -> the command's exit code
Report = Callable[[str], None]


@dataclass(frozen=True)
class PausedRun:
    """`start`: starts the run again, and follows it unless it is detached."""

    home: RunHome
    start: GoOn
    report: Report
    ends_with_launcher: bool

    def measure(self) -> bool:
        """Stops the run; on return its home has measured.json. False: it has ended for another
        reason. Raises LaunchError, also where it has not ended in time."""
        self.home.measured_path.unlink(missing_ok=True)
        with patient_client(self.home) as client:
            if client is not None:
                client.ask("measure")
        if not wait_until(lambda: not is_alive(self.home), MEASURES_S):
            raise LaunchError(
                f"the supervisor of {self.home.name} has not stopped and measured within"
                f" {MEASURES_S:.0f} s",
                hint=f"roadtrain launch --logs {self.home.name} shows what it waits for",
            )
        return self._is_ours

    @property
    def _is_ours(self) -> bool:
        """Whether it has ended to be planned anew."""
        state = self.home.state()
        return state.phase == "ended" and state.why == PLANNED_ANEW

    def told_end(self) -> int:
        """Says that the run does not go on, and why; the command's exit code."""
        state, name = self.home.state(), self.home.name
        ended = state.phase == "ended"
        why = state.why if ended else "its supervisor was killed"
        self.report(
            f"run {name} ended before it was planned anew, and does not go on: {why} (`roadtrain"
            f" launch --resume {name}`)"
        )
        return state.code if ended and state.code in (0, 130) else 1

    def go_on(self, *, follows: bool) -> int:
        """By the plan in its home. follows: to its end. The command's exit code."""
        if self.ends_with_launcher and not follows:
            self.report(
                f"run {self.home.name} ends with its launcher, which this command is now: it stays"
            )
        follows = follows or self.ends_with_launcher
        code = self.start("stop" if self.ends_with_launcher else "keep", not follows)
        return code if follows or code else self._checked()

    def go_on_after(self, error: BaseException) -> None:
        """With the plan that it had, where it has stopped for this command; says what it does."""
        name = self.home.name
        why = str(error).partition("\n")[0] or type(error).__name__
        try:
            ended = self._ends()
        except KeyboardInterrupt:
            self.report(
                f"run {name} may be stopped, and is not started again: `roadtrain launch --resume"
                f" {name}`"
            )
            return
        if not ended:
            self.report(f"run {name} is alive and left as it is: `roadtrain status {name}`")
        elif not self._is_ours:
            self.told_end()
        elif self.ends_with_launcher and isinstance(error, KeyboardInterrupt):
            self.report(
                f"run {name} stays stopped, as it ends with its launcher: `roadtrain launch"
                f" --resume {name}`"
            )
        else:
            self.report(f"run {name} goes on by its old plan, it was not planned anew: {why}")
            self.go_on(follows=False)

    def _ends(self) -> bool:
        """Whether it has ended, or does: at its next step, once all is measured. One that has not
        heard of it is not waited for."""

        def is_gone() -> bool:
            return not is_alive(self.home)

        def has_heard() -> bool:
            return is_gone() or self.home.state().phase in ("ending", "ended")

        return wait_until(has_heard, HEARD_S) and wait_until(is_gone, MEASURES_S)

    def _checked(self) -> int:
        """Once it is known whether a run that nobody follows goes on; the exit code."""

        def is_known() -> bool:
            return not is_alive(self.home) or StartPhase.CHECKED in self.home.state().stamps

        if not wait_until(is_known, CHECKS_S):
            raise LaunchError(
                f"run {self.home.name} has not checked its hosts within {CHECKS_S:.0f} s",
                hint=f"roadtrain status {self.home.name}",
            )
        alive = is_alive(self.home)  # before its state is read
        state = self.home.state()
        if state.phase != "ended":
            if not alive:
                self.report(f"the supervisor of run {self.home.name} was killed")
            return int(not alive)
        if state.code:
            self.report(f"run {self.home.name} has ended: {state.why}")
        return state.code
