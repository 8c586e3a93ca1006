"""TrainerProgress: the progress of Hugging Face's Trainer (step, log, schedule and position in the
data), committed to the store with each step. Does not import transformers, or read or write
checkpoints.

After a run was killed, its store is newer than the last checkpoint. So the Trainer continues at the
store's step, whether `resume_from_checkpoint` is left out or names the last checkpoint.

Note "how a run resumes". The Trainer decides at which step to begin before it makes its optimizer.
So the Trainer's method `_run_epoch` is replaced by a method that skips finished epochs and begins
the next epoch at the resumed step. Needs transformers 5.
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
NAME = "trainer"  # name of the progress among the tracked objects


def follow(trainer: Any, placed: PlacedOptimizer, frame: FrameType) -> None:
    """Commit the Trainer's progress with each step of `placed`. If the store of `placed` already
    has a Trainer's progress, continue from this progress.

    Args:
        trainer: Hugging Face's Trainer, while its method `train` runs.
        placed: The Trainer's optimizer, which was just made.
        frame: The frame of the Trainer's method that makes the optimizer.

    Raises:
        ConfigError: The store has steps, but neither the store nor a checkpoint has the progress.
    """
    checkpoint = _local(frame, "resume_from_checkpoint")
    recorded = placed.job_state.resumed(NAME) is not None
    step, begun = placed.steps_done, trainer.state.global_step
    goes_on = recorded and (checkpoint is None or (begun <= step and _is_last(trainer, checkpoint)))
    if step and checkpoint is None and not goes_on:
        raise ConfigError(
            f"the store is at step {step}, but has no progress of a Trainer: another program, or"
            " an earlier version of roadtrain, wrote the store",
            hint="pass a checkpoint of this step as resume_from_checkpoint=DIR, or export the"
            " store's values and begin a new run with them; nothing was changed",
        )
    if not hasattr(trainer, "_run_epoch"):
        raise ConfigError(
            "this version of transformers has no Trainer._run_epoch, which resuming runs needs",
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

    `began`: number of the epoch that began last, and the state of the random generators just before
    this epoch. `resumed`: the loaded state from which the Trainer continues; None after an epoch
    has begun.
    """

    def __init__(self, trainer: Any, placed: PlacedOptimizer) -> None:
        self._trainer, self._placed = trainer, placed
        self._run_epoch = trainer._run_epoch
        self.began: tuple[int, Mapping[str, Any]] = (-1, {})
        self.resumed: Mapping[str, Any] | None = None
        # state of the random generators when the resumed step was captured
        self._at_forward: Mapping[str, Any] = {}
        self._scheduler: Any = None  # the tracked scheduler
        trainer._run_epoch = self.run_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain data, with the log and the callbacks' states as JSON."""
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
        """Restore the Trainer's `state` and the states of its callbacks. `run_epoch` restores the
        losses, counters and random generators."""
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
            if callback is not self._trainer.control:  # requests of `control` are outdated
                vars(callback).update(mine[1])

    def run_epoch(self, **kwargs: Any) -> Any:
        """Run one epoch, or the remaining steps of an epoch after a resume, with the arguments of
        `_run_epoch`."""
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
        # the Trainer calls this method after it has skipped the finished batches
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
    """Return the Trainer's callbacks that have a state, and the Trainer's `control`."""
    every = [*trainer.callback_handler.callbacks, trainer.control]
    return [callback for callback in every if callable(getattr(callback, "state", None))]


def _local(frame: FrameType | None, name: str) -> Any:
    """Return the local variable `name` of the nearest frame that has it, from `frame` outwards, or
    None."""
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


def _is_last(trainer: Any, checkpoint: str) -> bool:
    """Return whether `checkpoint` is the newest checkpoint in the Trainer's output directory."""
    named = (CHECKPOINT.fullmatch(path.name) for path in Path(trainer.args.output_dir).glob("*"))
    last = max((int(match[1]) for match in named if match), default=-1)
    return (
        Path(checkpoint).resolve() == Path(trainer.args.output_dir).resolve() / f"checkpoint-{last}"
    )
