"""optimizer.state_dict() and load_state_dict() of a placed optimizer: a reference to the store, or
torch's whole form.

The small form: {"state": {}, "param_groups": torch's, "roadtrain": {"step", "job", "history",
"where"}}. When it is loaded, it is checked against the store and its parameter groups are adopted.
The whole form also has torch's "state"; its "roadtrain" adds "masters" (fp32 values of 16-bit
parameters) and "parameters", a checksum of the parameters that the state belongs to. The state of
an ordinary torch optimizer, without "roadtrain", can be loaded as well.

The whole form is not held in memory: tensors lie in a scratch file, as in state_dicts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from roadtrain.chunks import ParamSpec
from roadtrain.errors import LoopError
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.rules import SgdRule
from roadtrain.placement.state_dicts import Pieces, Values, bytes_of, flat_of, steps_of
from roadtrain.servers.store_plan import start_state
from roadtrain.storage.convert import MASTER, RecordView
from roadtrain.storage.tier import WEIGHTS

KEY = "roadtrain"
Staged = Mapping[int, torch.Tensor]


class PlacedState(Protocol):
    """The part of PlacedOptimizer that is used here.

    `numbers` maps a trainable parameter's index to its number in torch's form.
    """

    param_groups: list[dict[str, Any]]
    steps_done: int

    @property
    def params(self) -> Sequence[ParamSpec]: ...
    @property
    def rules(self) -> Sequence[Rule]: ...
    @property
    def reference(self) -> dict[str, Any]: ...
    @property
    def numbers(self) -> Mapping[int, int]: ...


def groups_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return torch's form of the groups, in which parameters are numbers."""
    out, at = list[dict[str, Any]](), 0
    for group in groups:
        count = len(group["params"])
        rest = {k: v for k, v in group.items() if k != "params"}
        out.append(rest | {"params": list(range(at, at + count))})
        at += count
    return out


def gather(
    place: PlacedState, pieces: Pieces, values_of: Callable[[Sequence[ParamSpec]], Values]
) -> dict[str, Any]:
    """Return the whole form. `values_of` allocates fp32 tensors for the given parameters."""
    needed = list[tuple[int, int, str]]()  # number, parameter index, name of the array
    for index, number in place.numbers.items():
        spec = place.params[index]
        own = [MASTER] if spec.dtype != "fp32" else []
        arrays = place.rules[spec.group].arrays if place.steps_done else ()
        needed += [(number, index, what) for what in (*arrays, *own)]
    values = values_of([place.params[index] for _, index, _ in needed])
    state: dict[int, dict[str, torch.Tensor]] = (
        {n: {} for n in place.numbers.values()} if place.steps_done else {}
    )
    masters: dict[int, torch.Tensor] = {}
    for at, (number, index, what) in enumerate(needed):
        tensor = values.take(at, pieces(place.params[index].name, what))
        target = masters if what == MASTER else state[number]
        target[number if what == MASTER else what] = tensor  # type: ignore[index]
    for index, number in place.numbers.items() if place.steps_done else ():
        spec = place.params[index]
        for what in place.rules[spec.group].scalars if spec.numel else ():
            _, found = next(iter(pieces(spec.name, what)))
            state[number][what] = torch.from_numpy(found.copy()).float()[0]
    extra = place.reference | {"masters": masters, "parameters": checksum(place, pieces, {})}
    return {"state": state, "param_groups": groups_of(place.param_groups), KEY: extra}


def checksum(place: PlacedState, pieces: Pieces, staged: Staged) -> str:
    """Hash the trainable parameters in their compute dtype; `staged` holds newer values of some."""
    out = xxhash.xxh3_128()
    for index in place.numbers:
        spec = place.params[index]
        out.update(f"{spec.name} {spec.dtype} {spec.shape}\n".encode())
        for values in _now(spec, pieces, staged.get(index)):
            out.update(bytes_of(values).data)
    return str(out.hexdigest())


def _now(spec: ParamSpec, pieces: Pieces, staged: torch.Tensor | None) -> Iterator[np.ndarray]:
    if staged is None:
        return (values for _, values in pieces(spec.name, WEIGHTS))
    return (flat_of(staged, first, first + n, spec.dtype) for first, n in steps_of(spec.numel))


def check_groups(place: PlacedState, form: Mapping[str, Any]) -> None:
    """Raise LoopError where `form` has the parameter groups of another optimizer."""
    if not isinstance(form, Mapping) or not {"state", "param_groups"} <= form.keys():
        raise LoopError("not an optimizer's state dict: 'state' or 'param_groups' is missing")
    theirs, ours = (
        [len(g["params"]) for g in groups] for groups in (form["param_groups"], place.param_groups)
    )
    if theirs != ours:
        raise LoopError(
            f"the state has parameter groups of {theirs} parameters, but the optimizer of {ours}"
        )


def take_groups(place: PlacedState, form: Mapping[str, Any]) -> None:
    """Adopt the learning rates and all other hyperparameters of `form`."""
    for group, saved in zip(place.param_groups, form["param_groups"]):
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                value = value.to(group[key].device)  # a learning rate may be a tensor
            if key != "params":
                group[key] = value


def check_reference(place: PlacedState, found: Mapping[str, Any]) -> None:
    """Raise LoopError where the small form refers to another store or step than the current one."""
    now = place.reference
    keys = ("job", "history", "step")
    if all(found.get(key) == now[key] for key in keys):
        return
    same = found.get("job") == now["job"]
    other = "the same store" if same else "another store"
    if same and found.get("step") == now["step"]:
        other = "the same store from before other values were loaded into it"
    raise LoopError(
        f"this state refers to step {found.get('step')} of {other} ({found.get('where')}), but"
        f" the optimizer's store is at step {now['step']} ({now['where']}). Nothing was changed",
        hint=(
            "without load_state_dict the store continues from its own last step; to be able to go"
            " back to a checkpoint, save it with state_dict(gather=True) and load that"
        ),
    )


def check_state(place: PlacedState, form: Mapping[str, Any]) -> None:
    """Raise LoopError where the whole form does not fit the optimizer's rules and parameters."""
    state = form["state"]
    for index, number in place.numbers.items():
        spec, rule = place.params[index], place.rules[place.params[index].group]
        entry = {k: v for k, v in state.get(number, {}).items() if v is not None}
        if not entry:
            continue
        # torch's SGD does not keep it
        optional = {"step"} if isinstance(rule, SgdRule) else set()
        if (
            not {*rule.arrays, *rule.scalars} - optional
            <= entry.keys()
            <= {*rule.arrays, *rule.scalars}
        ):
            raise LoopError(
                f"the state of {spec.name!r} has {sorted(entry)}, but the optimizer keeps "
                f"{[*rule.arrays, *rule.scalars]}"
            )
        if wrong := [k for k in rule.arrays if tuple(entry[k].shape) != spec.shape]:
            shape = tuple(entry[wrong[0]].shape)
            raise LoopError(
                f"{wrong[0]} of {spec.name!r} has shape {shape}, but the parameter {spec.shape}"
            )


def check_parameters(
    place: PlacedState, found: Mapping[str, Any], pieces: Pieces, staged: Staged
) -> None:
    """Raise LoopError where the whole form belongs to other parameters than the current ones."""
    if found["step"] and found["parameters"] != checksum(place, pieces, staged):
        raise LoopError(
            f"this state of step {found['step']} belongs to other parameters than those in the"
            f" store, which is at step {place.steps_done} ({place.reference['where']}). Nothing"
            " was changed",
            hint=(
                "load the model's state_dict() of that step first, then the optimizer's; a trainer"
                " that loads the model before it is placed needs an empty store"
            ),
        )


def writer(
    place: PlacedState,
    form: Mapping[str, Any] | None,
    staged: Staged,
    hyperparameters: Sequence[Sequence[float]],
) -> Callable[[RecordView], None]:
    """Return the function that `JobSession.rewrite` applies to each record.

    It writes the values staged by the model's load_state_dict, then those of the whole form
    `form`, if any. A whole form also clears the residuals of error feedback.
    """
    masters = {} if form is None else form.get(KEY, {}).get("masters", {})

    def change(view: RecordView) -> None:
        for i, span in enumerate(view.chunk.spans):
            if span.param >= len(place.params):  # residuals follow the model's own parameters
                if form is not None:
                    view.piece(MASTER, i)[...] = 0.0
                continue
            spec, number = place.params[span.param], place.numbers.get(span.param)
            cut = slice(span.origin, span.origin + span.stop - span.start)
            values = masters.get(number, staged.get(span.param))
            if values is not None:
                held = "fp32" if spec.trainable else spec.dtype
                view.piece(MASTER, i)[...] = flat_of(values, cut.start, cut.stop, held)
            if form is not None and number is not None:
                _put_state(
                    view,
                    i,
                    form["state"].get(number, {}),
                    cut,
                    place.rules[spec.group],
                    hyperparameters[spec.group],
                )
        view.cast_weights()

    return change


def _put_state(
    view: RecordView,
    i: int,
    entry: Mapping[str, Any],
    cut: slice,
    rule: Rule,
    hyper: Sequence[float],
) -> None:
    """Write one parameter's state; an empty `entry` means that it was never updated."""
    there = any(value is not None for value in entry.values())
    for what in rule.arrays:
        view.piece(what, i)[...] = (
            flat_of(entry[what], cut.start, cut.stop, "fp32") if there else 0.0
        )
    for what in rule.scalars:
        view.piece(what, i)[0] = float(entry.get(what, 1.0)) if there else 0.0
    if not there:
        start_state(view, i, rule, hyper)
