"""The state dict of a placed optimizer. It contains either all values or only a reference to the
store.

The "roadtrain" entry of the state dict has the keys "step", "job", "history" and "where". When a
reference is loaded, the entry is compared with the store.

A state dict with all values also has torch's "state" and two more "roadtrain" keys: "masters", the
fp32 values of 16-bit parameters, and "parameters", a checksum of the parameters that belong to this
state. Its tensors are in a scratch file. The state dict of an ordinary torch optimizer has no
"roadtrain" entry, but can be loaded.
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
    """The attributes of PlacedOptimizer that this module uses.

    `numbers` maps the index of each trainable parameter in `params` to its number in torch's state
    dict.
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
    """Return the groups as in torch's state dict, which has numbers in place of parameters."""
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
    """Return the optimizer's state dict with all values. `pieces` reads arrays from the store.
    `values_of` allocates fp32 tensors for parameters."""
    # (number in torch's state dict, parameter index, name of the array)
    needed = list[tuple[int, int, str]]()
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
    """Return a hash of the trainable parameters in their compute dtype. Values in `staged` replace
    those in the store."""
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
    """Raise LoopError if the parameter groups of the state dict `form` differ in size from those of
    the optimizer."""
    if not isinstance(form, Mapping) or not {"state", "param_groups"} <= form.keys():
        raise LoopError("load_state_dict() needs a dict with 'state' and 'param_groups'")
    theirs, ours = (
        [len(g["params"]) for g in groups] for groups in (form["param_groups"], place.param_groups)
    )
    if theirs != ours:
        raise LoopError(
            f"the optimizer's groups have {ours} parameters, but the state dict's have {theirs}"
        )


def take_groups(place: PlacedState, form: Mapping[str, Any]) -> None:
    """Adopt the learning rates and all other hyperparameters of the state dict `form`."""
    for group, saved in zip(place.param_groups, form["param_groups"]):
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                value = value.to(group[key].device)  # a learning rate may be a tensor
            if key != "params":
                group[key] = value


def check_reference(place: PlacedState, found: Mapping[str, Any]) -> None:
    """Raise LoopError if `found`, the "roadtrain" entry of a state dict, does not name the
    optimizer's store and its current step."""
    now = place.reference
    keys = ("job", "history", "step")
    if all(found.get(key) == now[key] for key in keys):
        return
    same = found.get("job") == now["job"]
    other = "the same store" if same else "another store"
    if same and found.get("step") == now["step"]:
        other = "the same store, whose values were replaced since by load_state_dict"
    raise LoopError(
        f"this state refers to step {found.get('step')} of {other} ({found.get('where')}), but"
        f" the optimizer's store is at step {now['step']} ({now['where']}). Nothing was changed",
        hint="without load_state_dict the store continues from its own last step. To return to an"
        " earlier step, load a state that was saved with state_dict(gather=True)",
    )


def check_state(place: PlacedState, form: Mapping[str, Any]) -> None:
    """Raise LoopError if the state dict `form`, which contains all values, does not fit the
    optimizer's rules and parameters."""
    state = form["state"]
    for index, number in place.numbers.items():
        spec, rule = place.params[index], place.rules[place.params[index].group]
        entry = {k: v for k, v in state.get(number, {}).items() if v is not None}
        if not entry:
            continue
        # torch's SGD does not keep the step
        optional = {"step"} if isinstance(rule, SgdRule) else set()
        if (
            not {*rule.arrays, *rule.scalars} - optional
            <= entry.keys()
            <= {*rule.arrays, *rule.scalars}
        ):
            raise LoopError(
                f"the state of {spec.name!r} has the entries {sorted(entry)}, but the optimizer"
                f" needs {[*rule.arrays, *rule.scalars]}"
            )
        if wrong := [k for k in rule.arrays if tuple(entry[k].shape) != spec.shape]:
            shape = tuple(entry[wrong[0]].shape)
            raise LoopError(
                f"{wrong[0]} of {spec.name!r} must have shape {spec.shape}, but has shape {shape}"
            )


def check_parameters(
    place: PlacedState, found: Mapping[str, Any], pieces: Pieces, staged: Staged
) -> None:
    """Raise LoopError if a state dict was saved with other parameter values than the present ones.
    `found` is its "roadtrain" entry."""
    if found["step"] and found["parameters"] != checksum(place, pieces, staged):
        raise LoopError(
            f"this state dict of step {found['step']} was saved with other parameter values than"
            f" those in the store, which is at step {place.steps_done}"
            f" ({place.reference['where']}). Nothing was changed",
            hint=f"load the model's state_dict() of step {found['step']} first, then the"
            " optimizer's; a trainer that loads the model before place() needs an empty store",
        )


def writer(
    place: PlacedState,
    form: Mapping[str, Any] | None,
    staged: Staged,
    hyperparameters: Sequence[Sequence[float]],
) -> Callable[[RecordView], None]:
    """Return a function that writes new values to a record. Values in the state dict `form`, if
    there is one, take precedence over `staged`. A state dict also sets the residuals of error
    feedback to zero."""
    masters = {} if form is None else form.get(KEY, {}).get("masters", {})

    def change(view: RecordView) -> None:
        for i, span in enumerate(view.chunk.spans):
            if span.param >= len(place.params):  # a residual: they follow the model's parameters
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
    """Write the optimizer state of span `i` to `view`, the record of a chunk. `entry` is the
    parameter's "state" in a state dict, empty if the parameter was never updated. `cut` selects the
    elements of the span."""
    there = any(value is not None for value in entry.values())
    for what in rule.arrays:
        view.piece(what, i)[...] = (
            flat_of(entry[what], cut.start, cut.stop, "fp32") if there else 0.0
        )
    for what in rule.scalars:
        view.piece(what, i)[0] = float(entry.get(what, 1.0)) if there else 0.0
    if not there:
        start_state(view, i, rule, hyper)
