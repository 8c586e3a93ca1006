"""In which order a pipeline stage runs its micro-batches: one forward, one backward, with a flush at the step's end.

Stage s of p: min(m, p - 1 - s) forwards, then a forward and a backward in turn, then the backwards that are left
(PipeDream-Flush; Narayanan et al., 2021). At most p - s micro-batches' activations are held. Pure: events in, actions
out; the runtime and the simulator drive the same decider.
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD = "Forward", "Backward"


@dataclass(frozen=True, slots=True)
class Run:
    """Run the stage's blocks for `micro`. `last`: its gradients are whole after this."""

    what: str
    micro: int
    last: bool = False


def one_forward_one_backward(stage: int, stages: int, micros: int) -> list[Run]:
    """The whole order of one step."""
    warm = min(micros, stages - 1 - stage)
    out = [Run(FORWARD, i) for i in range(warm)]
    for i in range(micros - warm):
        out += [Run(FORWARD, warm + i), Run(BACKWARD, i)]
    out += [Run(BACKWARD, i) for i in range(micros - warm, micros)]
    return [Run(run.what, run.micro, run.what == BACKWARD and run.micro == micros - 1) for run in out]


class StageDecider:
    """Invariants (`check`): forwards begun are at most `stages - stage` ahead of backwards ended; each runs once."""

    def __init__(self, stage: int, stages: int, micros: int) -> None:
        self.stage, self.stages, self.micros = stage, stages, micros
        self.order = one_forward_one_backward(stage, stages, micros)
        self.at = 0
        self.running: Run | None = None
        self.here: dict[str, set[int]] = {FORWARD: set(), BACKWARD: set()}
        if stage == 0:
            self.here[FORWARD] = set(range(micros))
        self.ran: dict[str, int] = {FORWARD: 0, BACKWARD: 0}

    def arrived(self, what: str, micro: int) -> list[Run]:
        """The activations (for FORWARD) or the gradient of them (for BACKWARD) of `micro` are here."""
        self.here[what].add(micro)
        return self._next()

    def start(self) -> list[Run]:
        return self._next()

    def ended(self, run: Run) -> list[Run]:
        assert run == self.running
        self.running = None
        self.ran[run.what] += 1
        if run.what == FORWARD and self.stage == self.stages - 1:
            self.here[BACKWARD].add(run.micro)  # the loss
        return self._next()

    def _next(self) -> list[Run]:
        if self.running is not None or self.at == len(self.order):
            return []
        run = self.order[self.at]
        if run.micro not in self.here[run.what]:
            return []
        self.here[run.what].remove(run.micro)
        self.at += 1
        self.running = run
        return [run]

    @property
    def finished(self) -> bool:
        return self.at == len(self.order) and self.running is None

    def check(self) -> None:
        begun = sum(run.what == FORWARD for run in self.order[: self.at])
        assert 0 <= begun - self.ran[BACKWARD] <= self.stages - self.stage
