"""TrainerProgress: the progress of Hugging Face's Trainer, committed with each step.

The Trainer keeps its step, log, schedule and position in the data in checkpoints, which are older
than the store once a run was killed. So they are committed with each step, like other tracked
objects, and a Trainer on a resumed store continues there, whether or not it was told to resume from
its last checkpoint.

Note "the seam": the Trainer decides where to begin before it makes its optimizer. But its method
`_run_epoch` takes all that it needs as arguments, so this method is replaced in the Trainer object:
it skips finished epochs, and begins the next one at the resumed step.

Needs transformers 5, whose Trainer has `_run_epoch`. Does not import transformers, or read or write
checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from roadtrain.errors import ConfigError
from roadtrain.placement.optimizer import PlacedOptimizer
from roadtrain.placement.tracked import generators, set_generators

# fields of TrainerState that change during training
KEPT = (
    "epoch", "global_step", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint", "num_input_tokens_seen", "total_flos", "stateful_callbacks",
)  # fmt: skip
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
HOST = torch.device("cpu")
NAME = "trainer"  # name of this state among the tracked objects


def follow(trainer: Any, placed: PlacedOptimizer, frame: FrameType) -> None:
    """Commit the Trainer's progress with each step of `placed`, and resume that of its store.

    Args:
        trainer: Hugging Face's Trainer, in `train`.
        placed: Its optimizer, just made.
        frame: The Trainer's method that makes the optimizer.

    Raises:
        ConfigError: The store has steps, but neither it nor a checkpoint has the progress.
    """
    checkpoint = _local(frame, "resume_from_checkpoint")
    recorded = placed.job_state.resumed(NAME) is not None
    step, begun = placed.steps_done, trainer.state.global_step
    goes_on = recorded and (checkpoint is None or (begun <= step and _is_last(trainer, checkpoint)))
    if step and checkpoint is None and not goes_on:
        raise ConfigError(
            f"the store is at step {step}, but has no progress of a Trainer: it was trained by"
            " another program, or by an earlier version",
            hint=(
                "nothing was changed. resume_from_checkpoint=DIR continues from a checkpoint of"
                " that step; to start a new run with its values, export them and name another store"
            ),
        )
    if not hasattr(trainer, "_run_epoch"):
        raise ConfigError(
            "this version of transformers has no Trainer._run_epoch, needed to resume runs",
            hint="pip install 'transformers>=5.24'",
        )
    placed.passes_over_earlier = goes_on and checkpoint is not None
    progress = TrainerProgress(trainer, placed)
    if goes_on:
        placed.track(trainer=progress)
    else:
        placed.job_state.track_anew(trainer=progress)


class TrainerProgress:
    """The progress of `trainer` as an object with a state dict.

    `began` is the epoch that began last, with the random generators just before. `resumed` is the
    state to continue from, until the first epoch has begun.
    """

    def __init__(self, trainer: Any, placed: PlacedOptimizer) -> None:
        self._trainer, self._placed = trainer, placed
        self._run_epoch = trainer._run_epoch
        self.began: tuple[int, Mapping[str, Any]] = (-1, {})
        self.resumed: Mapping[str, Any] | None = None
        self._at_forward: Mapping[str, Any] = {}  # generators when the resumed step was captured
        self._scheduler: Any = None  # the tracked scheduler
        trainer._run_epoch = self.run_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return plain data; the log and the callbacks' states are JSON."""
        trainer, state = self._trainer, self._trainer.state
        kept = {name: getattr(state, name) for name in KEPT}
        kept["stateful_callbacks"] = [
            (type(callback).__name__, callback.state()["attributes"])
            for callback in _callbacks(trainer)
        ]
        return {
            "state": json.dumps(kept, default=float),
            "began": list(self.began),
            # these attributes are set when the loop begins, perhaps after a state was loaded
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "last_logged": int(getattr(trainer, "_globalstep_last_logged", state.global_step)),
            "flos": float(trainer.current_flos),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the Trainer's state; the rest is restored when its first epoch begins."""
        self.resumed, self._at_forward = state, self._placed.job_state.resumed_generators()
        kept = json.loads(state["state"])
        states = list(kept.pop("stateful_callbacks"))
        for name, value in kept.items():
            setattr(self._trainer.state, name, value)
        for callback in _callbacks(self._trainer):
            mine = next((s for s in states if s[0] == type(callback).__name__), None)
            if mine is None:
                continue
            states.remove(mine)
            if callback is not self._trainer.control:  # its requests were for that moment
                vars(callback).update(mine[1])

    def run_epoch(self, **kwargs: Any) -> Any:
        """Run one epoch, or the rest of it. Called with the arguments of `_run_epoch`."""
        trainer = self._trainer
        self._track_schedule()
        step, epoch = trainer.state.global_step, kwargs["epoch"]
        if self.resumed is None:
            self.began = (epoch, generators(HOST))
            return self._run_epoch(**kwargs)
        per_epoch = kwargs["num_update_steps_per_epoch"]
        if step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            return None
        if epoch < step // per_epoch:
            return None
        resumed, self.resumed = self.resumed, None
        trainer._tr_loss = torch.full_like(trainer._tr_loss, resumed["loss"])
        trainer._total_loss_scalar = resumed["total_loss"]
        trainer._globalstep_last_logged = resumed["last_logged"]
        trainer.current_flos = resumed["flos"]
        began, now = resumed["began"], self._at_forward
        set_generators(began[1] if began[0] == epoch else now, HOST)
        self.began = (epoch, generators(HOST))
        batches = step % per_epoch * trainer.args.gradient_accumulation_steps
        if not batches:
            return self._run_epoch(**kwargs | {"resume_from_checkpoint": None})
        load = trainer._load_rng_state
        # called after the finished batches were skipped
        trainer._load_rng_state = lambda checkpoint: set_generators(
            now, self._placed.job_state.device
        )
        try:
            done = 0 if trainer.args.ignore_data_skip else batches
            more = {"epochs_trained": epoch, "steps_trained_in_current_epoch": done}
            return self._run_epoch(**kwargs | more | {"resume_from_checkpoint": "the store"})
        finally:
            trainer._load_rng_state = load

    def _track_schedule(self) -> None:
        """Track the scheduler and the loss scaler, which are created after the optimizer."""
        if self._scheduler is self._trainer.lr_scheduler:
            return
        self._scheduler = self._trainer.lr_scheduler
        things = {"scheduler": self._scheduler, "scaler": self._trainer.accelerator.scaler}
        job = self._placed.job_state
        track = job.track_anew if self.resumed is None else job.track
        track(**{name: thing for name, thing in things.items() if thing is not None})


def _callbacks(trainer: Any) -> list[Any]:
    """Return the Trainer's callbacks that have a state, and its control."""
    every = [*trainer.callback_handler.callbacks, trainer.control]
    return [callback for callback in every if callable(getattr(callback, "state", None))]


def _local(frame: FrameType | None, name: str) -> Any:
    """Return a local variable of the nearest caller that has it; None if none has."""
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


def _is_last(trainer: Any, checkpoint: str) -> bool:
    """Whether `checkpoint` is the newest one in the Trainer's output directory."""
    named = (CHECKPOINT.fullmatch(path.name) for path in Path(trainer.args.output_dir).glob("*"))
    last = max((int(match[1]) for match in named if match), default=-1)
    return (
        Path(checkpoint).resolve() == Path(trainer.args.output_dir).resolve() / f"checkpoint-{last}"
    )
