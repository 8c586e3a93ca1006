"""StageParameters: which parameters of a stage its optimizer updates, and their flat memory.

Names are those of the whole model. Assumes that a stage's parameters lie on one device. Does NOT
communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from roadtrain.chunks import TRAINABLE, ParamSpec
from roadtrain.errors import ModelError
from roadtrain.stages.flat_layout import FlatLayout, FlatRun
from roadtrain.streaming.split import DTYPES, NAMES

# what fp32 holds exactly
FROZEN_DTYPES = (*TRAINABLE, "i8", "u8", "i16", "bool")


class StageParameters:
    """`trainable`: what the optimizer has and requires gradients; `frozen`: the rest. Raises
    ModelError for a parameter that is nowhere, of a dtype that cannot be, or elsewhere than the
    others; for one name of two parameters; for what the optimizer has and the stage has not. A
    stage may have nothing that trains."""

    def __init__(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.trainable: dict[str, nn.Parameter] = {}
        self.frozen: dict[str, nn.Parameter] = {}
        # frozen ones that the optimizer has: they cannot begin to train later
        self.late: dict[str, nn.Parameter] = {}
        self.specs: list[ParamSpec] = []
        for name, p in _named(models).items():
            trains = p.requires_grad and p in groups
            self._check(name, p, trains)
            (self.trainable if trains else self.frozen)[name] = p
            if not trains and p in groups:
                self.late[name] = p
            if trains:
                spec = ParamSpec(name, tuple(p.shape), NAMES[p.dtype], True, groups[p])
                self.specs.append(spec)
        own = {*self.trainable.values(), *self.frozen.values()}
        strangers = sum(p not in own for p in groups)
        if strangers:
            raise ModelError(
                f"the optimizer has {strangers} parameters that the stage has not",
                hint="make the optimizer of the stage's own parameters",
            )
        some = next(iter((*self.trainable.values(), *self.frozen.values())), torch.empty(0))
        self.device = some.device

    def _check(self, name: str, p: nn.Parameter, trains: bool) -> None:
        devices = {q.device for q in (*self.trainable.values(), p)} if trains else {p.device}
        if p.is_meta or len(devices) > 1:
            raise ModelError(
                f"parameter {name!r} is on {p.device}, the stage on {', '.join(map(str, devices))}",
                hint="bring the stage's parameters to one device first",
            )
        allowed = TRAINABLE if trains else FROZEN_DTYPES
        if NAMES.get(p.dtype) not in allowed:
            raise ModelError(
                f"parameter {name!r} is {p.dtype}, {'updated' if trains else 'kept'} are"
                f" {', '.join(allowed)}",
                hint="cast it" if trains else "cast it, or make it a buffer",
            )

    def flatten(self, layout: FlatLayout) -> list[torch.Tensor]:
        """The runs' values; the parameters are views of them from here on."""
        params = list(self.trainable.values())
        out = []
        for run in layout.runs:
            flat = torch.zeros(run.numel, dtype=DTYPES[run.dtype], device=self.device)
            for index, view in views_of(flat, run, layout.params):
                view.copy_(params[index].detach())
                params[index].data = view
            out.append(flat)
        return out


def views_of(
    flat: torch.Tensor, run: FlatRun, params: Sequence[ParamSpec]
) -> list[tuple[int, torch.Tensor]]:
    """(index, view) of each of the run's parameters."""
    return [(s.param, flat[s.start : s.stop].view(params[s.param].shape)) for s in run.spans]


def views_of_all(layout: FlatLayout, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each parameter of the layout its place in `flats`, the runs' memory."""
    held: dict[int, torch.Tensor] = {}
    for flat, run in zip(flats, layout.runs, strict=True):
        held |= views_of(flat, run, layout.params)
    return [
        held[i] if i in held else torch.empty(spec.shape, device=flats[0].device)  # without any
        for i, spec in enumerate(layout.params)
    ]


def _named(models: Sequence[nn.Module]) -> Mapping[str, nn.Parameter]:
    """Of all parts of the stage; a parameter that is in several has its first name."""
    out: dict[str, nn.Parameter] = {}
    seen: set[nn.Parameter] = set()
    for model in models:
        for name, p in model.named_parameters():
            if p in seen:
                continue
            if name in out:
                raise ModelError(
                    f"two parts of the stage have a parameter {name!r} each",
                    hint="they are one model's parts, with its names",
                )
            seen.add(p)
            out[name] = p
    return out
