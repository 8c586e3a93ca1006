"""The job state: everything in a step's state except parameters and optimizer state.

The job state consists of the states of the random generators, the model's buffers, the parameter
groups, and the states of the objects that the user tracks. It is committed with each step as plain
data without code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import nn

from roadtrain.errors import ForeignError, ForkedError, LoopError
from roadtrain.placement.optimizer_states import take_groups
from roadtrain.placement.tracked import (
    LoaderPosition,
    generators,
    is_data,
    is_scheduler,
    set_generators,
    trackable,
)
from roadtrain.servers.session import JobSession
from roadtrain.streaming import plain


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is committed with each step, such as a scheduler or a data loader."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


HasState = Annotated[
    Stateful, Field(description="an object with state_dict() and load_state_dict()")
]
KEYS = {"torch", "cuda", "python", "numpy", "buffers", "groups", "extra"}
GENERATORS = ("torch", "cuda", "python", "numpy")
# hyperparameters that do not influence the results of a placed optimizer
IGNORED = {"foreach", "fused", "capturable", "differentiable", "param_names"}


class CommittedState:
    """The job state of one placed optimizer.

    Attributes:
        due: The step that has ended but whose job state is not captured yet, or None.
        history: Random identifier of the values that were last loaded into the store. "" if none
            were loaded.
        device: The device of the model. Its random generator is in the job state.
        tracked: The tracked objects by the names that the user gave them.
    """

    def __init__(
        self,
        optimizer: Any,
        user_optimizer: torch.optim.Optimizer,
        model: nn.Module,
        session: JobSession,
        extra: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        """Create the job state of a session. `user_optimizer` is the optimizer that was passed to
        place(); `extra` holds the objects to track, by name."""
        self._optimizer, self._user_optimizer, self._model = optimizer, user_optimizer, model
        self._session, self._report = session, report
        self.device = session.worker.root_tensor.device
        self._script_groups = script_groups(optimizer.param_groups)
        self._begun_at = session.step
        self.due: int | None = None
        self.history = ""
        self.tracked: dict[str, Any] = {}
        # job state of the step that place() resumed; None after the first step of this run
        self._resumed: Mapping[str, Any] | None = None
        self._stepped = self._checked = False
        # states of generators and data sources at the end of step `due`, or later but before the
        # next batch was drawn
        self._drawn: Mapping[str, Any] | None = None
        self._has_drawn = False  # whether a batch was drawn since the end of step `due`
        self.track_anew(**extra)

    # tracked objects

    def track(self, **things: Any) -> None:
        """Track objects and restore their resumed state; see StoredOptimizer.track."""
        if self._stepped and self._begun_at:
            raise LoopError(
                f"track() was called after step {self._optimizer.steps_done}, but this run resumed"
                f" step {self._begun_at}, whose state must be restored before the next step",
                hint="call track() between place() and the loop",
            )
        self.track_anew(**things)
        for name in things:
            self._restore(name)

    def track_anew(self, **things: Any) -> None:
        """Commit the state of these objects with each step, without restoring a resumed state."""
        for name, thing in things.items():
            self.tracked[name] = trackable(name, thing, self._before_batch, self._settle)

    @property
    def has_schedule(self) -> bool:
        """Whether a learning-rate scheduler is tracked."""
        return any(map(is_scheduler, self.tracked.values()))

    def _before_batch(self) -> None:
        # since step `due` ended, an evaluation may have used generators
        if self.due is not None and not self._has_drawn:
            self._has_drawn, self._drawn = True, self._draws()

    def _draws(self) -> Mapping[str, Any]:
        states = {n: copy.deepcopy(t.state_dict()) for n, t in self.tracked.items() if is_data(t)}
        return {"generators": generators(self.device), "extra": states}

    # committing a step

    def step_ended(self, step: int) -> None:
        """Capture the states of random generators and data sources at the end of `step`. Batches
        that are drawn later belong to the next step."""
        self.due, self._stepped, self._resumed, self._has_drawn = step, True, None, False
        for thing in self.tracked.values():
            if isinstance(thing, LoaderPosition):
                thing.resumed = None
        self._drawn = self._draws()

    def capture(self, at_forward: bool = False) -> None:
        """Send the job state of the last step to the servers for the commit. For `at_forward`, see
        `encode`."""
        if self.due is not None:
            self._session.worker.blob(self.due, self.encode(self._drawn, at_forward))
            self.due = None  # if interrupted before this line, the state is captured again

    def encode(self, drawn: Mapping[str, Any] | None = None, at_forward: bool = False) -> bytes:
        """Encode the job state as plain data. `drawn` holds the states of random generators and
        data sources at the end of the step. If None, their present states are used.

        With `at_forward`, a resumed run restores the random generators before its first forward.
        Raises ConfigError if a state cannot be written as plain data.
        """
        now = self._draws()
        before = (drawn or now)["generators"].items()
        states = {n: thing.state_dict() for n, thing in self.tracked.items() if not is_data(thing)}
        return plain.encode(
            now["generators"]
            | {
                "buffers": persistent_buffers(self._model),
                "history": self.history,
                "groups": bare(self._optimizer.param_groups),
                "extra": states | (drawn or now)["extra"],
                "at_step": {k: v for k, v in before if not same(v, now["generators"][k])},
                "at_forward": at_forward,
                "residuals": self._session.residual_sessions[1],
                "given": self._script_groups,
                "scheduled": self.has_schedule,
            }
        )

    # resuming a step

    def resume(self, blob: bytes) -> None:
        """Restore the job state of the resumed step. `blob` is a result of `encode`."""
        state = decode(blob, self._begun_at)
        self._check_residuals(state.get("residuals", ""))
        groups, lines = resumed_groups(state, self._optimizer.param_groups)
        for line in lines:
            self._report(line)
        self._resumed = {**state, "groups": groups}
        self.history = state.get("history", "")
        self._settle()
        buffers = dict(self._model.named_buffers())
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)
        take_groups(self._optimizer, {"param_groups": groups})
        for name in self.tracked:
            self._restore(name)

    def forget_resumed(self) -> None:
        """Forget the resumed job state, because the store now has values of a different step."""
        self._resumed = None

    def resumed(self, name: str) -> Any:
        """Return the state that was tracked under `name` at the resumed step. Returns None if there
        is none, or if this run has already taken a step."""
        return None if self._resumed is None else self._resumed["extra"].get(name)

    def resumed_generators(self) -> dict[str, Any]:
        """Return the states of the random generators at the resumed step."""
        assert self._resumed is not None
        return {key: self._resumed[key] for key in GENERATORS}

    def _restore(self, name: str) -> None:
        if self._resumed is None:
            return
        if name not in self._resumed["extra"]:
            self._report(
                f"the store has no state of {name!r} at step {self._begun_at}, so {name!r} keeps"
                " the state that the script created it with"
            )
            return
        self.tracked[name].load_state_dict(self._resumed["extra"][name])
        if is_scheduler(self.tracked[name]):  # its constructor has set the initial rate
            take_groups(self._optimizer, {"param_groups": self._resumed["groups"]})

    def _settle(self) -> None:
        """Set the random generators to their states at the end of the resumed step."""
        if (state := self._resumed) is not None:
            set_generators({**state, **state.get("at_step", {})}, self.device)

    def _check_residuals(self, committed: str) -> None:
        """Raise ForkedError if this worker's residuals of error feedback come from another session
        than `committed`, the session of the servers' step."""
        found = self._session.residual_sessions[0]
        if found and committed and found != committed:
            raise ForkedError(
                f"the residuals of worker {self._session.group.rank} at step {self._begun_at} are"
                f" from session {found}, but the servers' step is from session {committed}",
                hint="nothing was changed. These residuals belong to a copy of the job that was"
                " trained elsewhere. Name the directory of residuals that was used with these"
                " servers, or an empty directory: the residuals then begin at zero (lossy)",
            )

    def check_tracked(self) -> None:
        """Before the first forward, report each state of the resumed step for which no object is
        tracked. Also sets the random generators, and checks the step of a Lightning Trainer."""
        if self._resumed is None or self._checked:
            return
        self._checked = True
        # the script may have drawn random numbers before its loop
        if self._resumed.get("at_forward"):
            set_generators(self._resumed, self.device)
        self.check_lightning(self._model)
        step = self._begun_at
        if step and self._has_scheduler() and not self.has_schedule:
            self._report(
                f"the optimizer is at step {step} and has a learning-rate scheduler that is not"
                " tracked: the schedule starts from its beginning unless the script advances it;"
                " optimizer.track(scheduler=scheduler) resumes the schedule"
            )
        for name in self._resumed["extra"].keys() - self.tracked.keys():
            self._report(
                f"the store's state of {name!r} at step {step} is not restored: call"
                f" optimizer.track({name}=...) to restore it"
            )

    def _has_scheduler(self) -> bool:
        """Whether a torch learning-rate scheduler has wrapped the optimizer's step method."""
        steps = (vars(opt).get("step") for opt in (self._optimizer, self._user_optimizer))
        return any(hasattr(step, "_wrapped_by_lr_sched") for step in steps)

    def check_lightning(self, *modules: Any) -> None:
        """Raise LoopError if a step was resumed and the Lightning Trainer of one of `modules` is at
        a different step.

        The job state does not contain a Trainer's progress, so a resumed Trainer must load its own
        checkpoint.
        """
        trainers = [getattr(module, "_trainer", None) for module in modules]
        counted = next((trainer.global_step for trainer in trainers if trainer is not None), None)
        if self._resumed is None or counted in (None, self._begun_at):
            return
        raise LoopError(
            f"Lightning's Trainer is at step {counted}, but the store is at step {self._begun_at}:"
            " the Trainer's schedule and data would not match the parameters",
            hint=(
                "nothing was changed. To continue, call fit(ckpt_path=...) with a checkpoint of the"
                " store's step, or with any checkpoint that was saved while optimizer.whole_states"
                " was True. To start from scratch, use another store"
            ),
        )


def decode(blob: bytes, step: int) -> dict[str, Any]:
    """Decode the job state of `step`. Raises ForeignError if `blob` is not a job state."""
    state = plain.decode(blob)
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise ForeignError(
            f"the data committed with step {step} is not a job state: expected a dict with the keys"
            f" {', '.join(sorted(KEYS))}, found a {type(state).__name__} without some of these keys"
        )
    return state


def bare(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def resumed_groups(
    state: Mapping[str, Any], script: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the parameter groups of a resumed step, and a line for each edited hyperparameter.

    `state` is the resumed job state, and `script` the groups as the script has set them in this
    run. If the user has edited a hyperparameter in the script since the previous run, the script's
    value is used, unless a tracked scheduler sets this hyperparameter.
    """
    scheduled, groups = state.get("scheduled", False), [dict(group) for group in state["groups"]]
    found: dict[str, list[int]] = {}
    for number, (group, own) in enumerate(zip(groups, script)):
        before = script_groups([group])[0] if "given" not in state else state["given"][number]
        for key, value in script_groups([own])[0].items():
            if key not in before or key not in group or same(value, before[key]):
                group.setdefault(key, value)
                continue
            theirs = scheduled and not same(group[key], before[key])
            kept = theirs or (scheduled and key == "lr")
            now = "" if same(group[key], before[key]) else f" ({show(group[key])} now)"
            found.setdefault(
                f"{key} is {show(value)} in the script and {show(before[key])} in the store{now}: "
                + ("the store's schedule is used" if kept else "the script's is used"),
                [],
            ).append(number)
            if not kept:
                group[key] = value
                if key == "lr" and "initial_lr" in group:
                    group["initial_lr"] = value
        group |= {key: own[key] for key in IGNORED & own.keys()}
    return groups, [
        line if len(numbers) == len(groups) else f"parameter group {str(numbers)[1:-1]}: {line}"
        for line, numbers in found.items()
    ]


def script_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the hyperparameters that the script has set, without the changes of a scheduler."""
    return [
        {
            key: group.get("initial_lr", value) if key == "lr" else value
            for key, value in group.items()
            if key not in {"params", "initial_lr"} | IGNORED
        }
        for group in groups
    ]


def same(value: Any, other: Any) -> bool:
    """Whether two hyperparameters, or two lists of tensors, are equal."""
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(value), torch.as_tensor(other)))
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)


def show(value: Any) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the model's state dict contains, by name. A shared buffer appears
    once, under its first name."""
    kept = {
        id(b)
        for m in model.modules()
        for n, b in m._buffers.items()
        if n not in m._non_persistent_buffers_set
    }
    return {name: b for name, b in model.named_buffers() if id(b) in kept}
