"""In which order a pipeline stage runs its micro-batches: one forward, one backward, with a flush
at the step's end.

Stage s of p: min(m, p - 1 - s) forwards, then a forward and a backward in turn, then the backwards
that are left (PipeDream-Flush; Narayanan et al., 2021). At most p - s micro-batches' activations
are held.

A stage may have v parts of the model, part k of stage s after all of parts k - 1 (interleaved; the
same paper, section 2.2): the idle time (p - 1) (f + b) of a step shrinks to 1 / v of it. Forwards
go p micro-batches at a time through a stage's parts, backwards the same with its last part first; 2
(p - 1 - s) + (v - 1) p forwards come before the first backward. m is a multiple of p then. Pure:
events in, actions out; the runtime and the simulator drive the same state machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from roadtrain.errors import ConfigError

FORWARD, BACKWARD = "Forward", "Backward"


@dataclass(frozen=True, slots=True)
class RunBlocks:
    """Run the blocks of the stage's `part` for `micro`. `last`: their gradients are whole after
    this."""

    what: str
    micro: int
    last: bool = False
    part: int = 0


def first_forwards(stage: int, stages: int, num_microbatches: int, parts: int = 1) -> int:
    """Forwards of one part before those that take turns with a backward."""
    warm = stages - 1 - stage if parts == 1 else 2 * (stages - 1 - stage) + (parts - 1) * stages
    return min(num_microbatches * parts, warm)


def ahead(stage: int, stages: int, num_microbatches: int, parts: int = 1) -> int:
    """Most passes of one part of which a stage holds the activations at once."""
    return min(num_microbatches * parts, first_forwards(stage, stages, num_microbatches, parts) + 1)


def one_forward_one_backward(
    stage: int, stages: int, num_microbatches: int, parts: int = 1
) -> list[RunBlocks]:
    """The whole order of one step. Raises ConfigError where parts take turns and micro-batches
    do not divide."""
    if parts > 1 and num_microbatches % stages:
        raise ConfigError(
            f"{num_microbatches} micro-batches go through {stages} stages of {parts} parts each",
            hint="with virtual_stages above 1 micro-batches are a multiple of the stages",
        )
    turns = (
        [range(first, first + stages) for first in range(0, num_microbatches, stages)]
        if parts > 1
        else [range(num_microbatches)]
    )
    forwards = [
        RunBlocks(FORWARD, i, False, part) for turn in turns for part in range(parts) for i in turn
    ]
    backwards = [
        RunBlocks(BACKWARD, i, i == num_microbatches - 1, part)
        for turn in turns
        for part in reversed(range(parts))
        for i in turn
    ]
    warm = first_forwards(stage, stages, num_microbatches, parts)
    out = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards):
        out += [forward, backward]
    return out + backwards[len(forwards) - warm :]


class StageStateMachine:
    """Invariants (`check`): forwards begun are at most `ahead` of backwards ended; each runs
    once, after what it needs has come. `parts`: of the model, that each stage has."""

    def __init__(self, stage: int, stages: int, num_microbatches: int, parts: int = 1) -> None:
        self.stage, self.stages, self.num_microbatches, self.parts = (
            stage,
            stages,
            num_microbatches,
            parts,
        )
        self.order = one_forward_one_backward(stage, stages, num_microbatches, parts)
        self.at = 0
        self.running: RunBlocks | None = None
        # (micro, part)
        self.here: dict[str, set[tuple[int, int]]] = {FORWARD: set(), BACKWARD: set()}
        if stage == 0:
            self.here[FORWARD] = {(i, 0) for i in range(num_microbatches)}
        self.ran: dict[str, int] = {FORWARD: 0, BACKWARD: 0}

    def arrived(self, what: str, micro: int, part: int = 0) -> list[RunBlocks]:
        """The activations (for FORWARD) or the gradient of them (for BACKWARD) of `micro` are
        here for `part`."""
        self.here[what].add((micro, part))
        return self._next()

    def start(self) -> list[RunBlocks]:
        return self._next()

    def goes(self, run: RunBlocks) -> tuple[int, int] | None:
        """(stage, part) that needs what `run` leaves; None: nobody, or this stage's own
        backward of the loss."""
        step = 1 if run.what == FORWARD else -1
        turns, stage = divmod(self.stage + step, self.stages)
        part = run.part + turns
        return (stage, part) if 0 <= part < self.parts else None

    def ended(self, run: RunBlocks) -> list[RunBlocks]:
        assert run == self.running
        self.running = None
        self.ran[run.what] += 1
        if run.what == FORWARD and self.goes(run) is None:
            self.here[BACKWARD].add((run.micro, run.part))  # the loss
        return self._next()

    def _next(self) -> list[RunBlocks]:
        if self.running is not None or self.at == len(self.order):
            return []
        run = self.order[self.at]
        if (run.micro, run.part) not in self.here[run.what]:
            return []
        self.here[run.what].remove((run.micro, run.part))
        self.at += 1
        self.running = run
        return [run]

    @property
    def finished(self) -> bool:
        return self.at == len(self.order) and self.running is None

    def check(self) -> None:
        begun = sum(run.what == FORWARD for run in self.order[: self.at])
        assert (
            0
            <= begun - self.ran[BACKWARD]
            <= ahead(self.stage, self.stages, self.num_microbatches, self.parts)
        )
        assert all(
            0 <= micro < self.num_microbatches and 0 <= part < self.parts
            for micro, part in self.here[FORWARD] | self.here[BACKWARD]
        )
